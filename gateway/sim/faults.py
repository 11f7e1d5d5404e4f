"""Scripted faults: small values, written `name`, `name:arg`, `name@count` or `name:arg@count`.

A fault without a count stays until it is cleared; with a count it is used up that many times.
`k` counts tokens of the reply over all its choices (0: right after the head). Streams and other
replies are hit alike: where a stream breaks after k tokens, a reply that is not streamed breaks in
its body. Only inference requests are hit, unless the table says otherwise.

    name                   arg           what happens
    refuse                               port bound but not listening: connections are refused
    hang_before_headers    [duration]    nothing is answered (for that long; for ever without)
    reset_before_headers                 reset instead of a head
    stall_after            k = 1         after k tokens nothing more comes, connection stays open
    reset_after            k = 1         reset after k tokens
    truncate_after         k = 1         orderly close (FIN) after k tokens, body unfinished
    truncate_chunk         k = 1         orderly close in the middle of a chunk, after k tokens
    clean_end_without_done [k]           body ends well-formed but without [DONE] or terminal event
                                         (after k tokens; without k after all of them)
    error_frame_after      k = 1         vLLM's error frame, then [DONE]; not streamed: 500
    abort_finish           k = 1         finish_reason "abort" after k tokens
    only_comments                        200, then `: keep-alive` for ever
    frozen                               the engine stops stepping; /health and /metrics answer
    die_on_prompt          text          a prompt with the text kills the engine: error frames for
                                         all, 500s and /health 503, then the listener is gone
    admission_503                        refused for capacity
    http_500               [status]      an error in vLLM's form (default 500)
    stopping                             told to stop, it drains: an error for what is new
    html_error             [status]      an HTML page as from a proxy (default 502)
    keepalive_close                      closes when a request comes on a connection used before
    slow_metrics           [duration]    /metrics answers late (default 5s)
    garbage_metrics                      /metrics answers 200 with something else
    no_metrics                           /metrics is 404
    health_500                           /health answers 500
    unhealthy_then_ok      n = 3         /health answers 503 n times, then 200
    lost_adapter           [name]        adapters (or one) are no longer served
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

_NUMBER: Final = re.compile(r"\d+")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
_TEXT: Final = re.compile(r".+", re.DOTALL)

# What argument each fault takes, and the one it has without (None: none is needed).
_ARGUMENTS: Final[dict[str, tuple[re.Pattern[str] | None, str | None]]] = {
    "refuse": (None, None),
    "hang_before_headers": (_DURATION, None),
    "reset_before_headers": (None, None),
    "stall_after": (_NUMBER, "1"),
    "reset_after": (_NUMBER, "1"),
    "truncate_after": (_NUMBER, "1"),
    "truncate_chunk": (_NUMBER, "1"),
    "clean_end_without_done": (_NUMBER, None),
    "error_frame_after": (_NUMBER, "1"),
    "abort_finish": (_NUMBER, "1"),
    "only_comments": (None, None),
    "frozen": (None, None),
    "die_on_prompt": (_TEXT, None),
    "admission_503": (None, None),
    "http_500": (_NUMBER, "500"),
    "stopping": (None, None),
    "html_error": (_NUMBER, "502"),
    "keepalive_close": (None, None),
    "slow_metrics": (_DURATION, "5s"),
    "garbage_metrics": (None, None),
    "no_metrics": (None, None),
    "health_500": (None, None),
    "unhealthy_then_ok": (_NUMBER, "3"),
    "lost_adapter": (_TEXT, None),
}
NAMES: Final = tuple(_ARGUMENTS)
# Break a reply after k tokens; at most one of them hits a request.
CUTS: Final = (
    "stall_after",
    "reset_after",
    "truncate_after",
    "truncate_chunk",
    "clean_end_without_done",
    "error_frame_after",
    "abort_finish",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `count` is how often it still happens; None is always."""

    name: str
    arg: str | None = None
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `name[:arg][@count]` (or `name=arg`). Raises ValueError that says what is wrong."""
        match = re.fullmatch(r"(\w+)(?:[:=](.*?))?(?:@(\d+))?", text, re.DOTALL)
        if match is None or match[1] not in _ARGUMENTS:
            raise ValueError(f"unknown fault {text!r}; known: {', '.join(NAMES)}")
        name, arg = match[1], match[2] or None
        form, default = _ARGUMENTS[name]
        if arg is not None and (form is None or not form.fullmatch(arg)):
            raise ValueError(f"fault {name} does not take the argument {arg!r}")
        if name == "die_on_prompt" and arg is None:
            raise ValueError("fault die_on_prompt needs the text to die on")
        count = int(match[3]) if match[3] else None
        if name == "unhealthy_then_ok":  # its argument is a count
            return cls(name, None, int(arg or default or 0))
        return cls(name, arg if arg is not None else default, count)

    def __str__(self) -> str:
        arg = f":{self.arg}" if self.arg is not None else ""
        return f"{self.name}{arg}" + (f"@{self.count}" if self.count is not None else "")

    @property
    def number(self) -> int | None:
        """The argument as a whole number; None when there is none."""
        return int(self.arg) if self.arg is not None else None

    @property
    def duration_s(self) -> float | None:
        """The argument as seconds; None when there is none."""
        match = _DURATION.fullmatch(self.arg) if self.arg else None
        return float(match[1]) / (1000 if match[2] == "ms" else 1) if match else None


class FaultSet:
    """The faults that are active, in the order in which they were injected."""

    def __init__(self) -> None:
        self.active: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Make a fault happen from now on."""
        self.active.append(fault)

    def find(self, name: str) -> Fault | None:
        """Return the first fault of that name without using it up."""
        return next((fault for fault in self.active if fault.name == name), None)

    def take(self, *names: str) -> Fault | None:
        """Return the first fault with one of the names, and count one use of it."""
        for index, fault in enumerate(self.active):
            if fault.name not in names:
                continue
            if fault.count is not None:
                left = replace(fault, count=fault.count - 1)
                self.active[index : index + 1] = [left] if left.count else []
            return fault
        return None

    def clear(self) -> None:
        """Forget all faults."""
        self.active.clear()
