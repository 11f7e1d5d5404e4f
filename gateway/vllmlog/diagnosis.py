"""Diagnose a vLLM log: what went wrong, the line that proves it, and what to do, with numbers.

The rules are tables in `vllmlog.rules`: one row for each message that vLLM, torch, CUDA, NCCL,
argparse or the hub are known to write. This module judges what they find:

1. The last start counts: log files are appended to.
2. The cause is the first specific error. `Engine core initialization failed` and `EngineDeadError`
   are only told when nothing better is there.
3. What the server survived is not a cause: an error before it came up, a refused request, a plugin
   that did not load.
4. After it was asked to stop, dying is normal.
5. With no proof of a failure the answer is `healthy` if it served, else `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from gateway.vllmlog import endings, hangs
from gateway.vllmlog.errors import is_quiet
from gateway.vllmlog.lines import Line, read
from gateway.vllmlog.places import place_of, when_of
from gateway.vllmlog.rules.rule import HINT, Rule, told
from gateway.vllmlog.search import Match, errors, matches
from gateway.vllmlog.starts import DEAD, WORKS, Start, split
from gateway.vllmlog.verdict import Advice, Confidence, Diagnosis, Kind, When

__all__ = ["Advice", "Confidence", "Diagnosis", "Kind", "When", "diagnose"]

_SAID_ERROR: Final = frozenset({"ERROR", "CRITICAL"})
_SAYS_LITTLE: Final = frozenset({Kind.UNKNOWN, Kind.ENGINE_INIT})
_SAYS_NO_CAUSE: Final = _SAYS_LITTLE | {Kind.ENGINE_DEAD}
_INTERRUPT: Final = re.compile(
    r"^(?:KeyboardInterrupt|asyncio\.exceptions\.CancelledError)\b(?!: Cancelled by)"
)
_GOING: Final = re.compile(r"[Ss]hut|[Tt]erminat|exit|destroy|leaked")  # what a process says last
_LIVES: Final = re.compile(r"Avg prompt throughput: |HTTP/[\d.]+\" 200")
_NATIVE: Final = re.compile(r"RuntimeError|AcceleratorError|Import|ModuleNotFound")
_LONG: Final = 4  # signs of work after an error that did not end it: throughput is told each 10 s


def diagnose(
    log: str | bytes | Iterable[str | bytes],
    *,
    exit_code: int | None = None,
    oom_killed: bool | None = None,
    hung: bool = False,
) -> Diagnosis:
    """Return what the end of a log (at most 8 MiB of it) says. Nothing raises, whatever the text.

    Args:
        log: the text, or its lines.
        exit_code: of the server's process, if known; negative or above 128 when a signal ended it.
            vLLM exits with 0 after its engine died, so 0 proves nothing.
        oom_killed: whether the kernel killed it for lack of host memory: True only with proof.
        hung: the last start is known to hang. Where it stands then counts, and no other start does.
    """
    starts = split(read(log))
    found = _judge(starts[-1], exit_code, oom_killed)
    if hung and found.kind in _SAYS_LITTLE:
        return hangs.hung_at_start(starts[-1]) or found
    if found.kind not in _SAYS_LITTLE or len(starts) == 1:
        return found
    # It goes on still, or its end is cut off: what ended the start before it is more useful.
    before = _judge(starts[-2], None)
    if before.kind is Kind.HEALTHY or before.kind in _SAYS_LITTLE:
        return found
    hint = "this ended an earlier start; the log does not show the end of the last one"
    return replace(before, confidence=Confidence.MEDIUM, look_at=before.look_at or hint)


def _judge(start: Start, exit_code: int | None, oom_killed: bool | None = None) -> Diagnosis:
    stopped = start.stopped
    if stopped is not None and (start.failed is None or stopped < start.failed):
        return _after_stop(start, stopped)
    failure = _failure(start, len(start.lines))
    if oom_killed and (failure is None or failure.kind in _SAYS_NO_CAUSE):
        return endings.out_of_memory(start)
    return (
        failure
        or endings.by_exit_code(start, exit_code, oom_killed)
        or endings.no_failure(start, exit_code)
    )


def _after_stop(start: Start, stopped: int) -> Diagnosis:
    """Judge a start that was asked to stop: nearly nothing that came after counts."""
    found = _failure(start, stopped)
    if found is not None:
        return found
    late = matches(start, stopped, len(start.lines), lambda rule: rule.even_stopped)
    if late:
        return told(*late[0], When.SERVING, late)
    if start.served is None and start.progress >= 0 and start.engine_up is None:
        return _interrupted(start, stopped)
    return endings.no_failure(start)


def _failure(start: Start, end: int) -> Diagnosis | None:
    """Return what failed in the lines before `end`; None if nothing did."""
    served = start.served if start.served is not None and start.served < end else None
    died = start.died if start.died is not None and start.died < end else None
    first = served if served is not None else end
    if start.failed is None and (died is not None and died < first or served is None):
        # An excerpt: its frames tell what it did; without them, only what served dies so.
        by_frames = start.when(end)
        if by_frames is When.SERVING or (by_frames is None and died is not None and died < first):
            served = 0
    if served is None:
        return _while_starting(start, end)
    if start.came_up is None and died is None:
        # It never said that it is up: the requests may be of another server with the same log.
        ended = [each for each in matches(start, 0, end, _of_start) if _ends_process(each, end)]
        if ended:
            return told(*ended[0], When.STARTUP, ended)
    return _while_serving(start, served, end)


def _while_starting(start: Start, end: int) -> Diagnosis | None:
    found = matches(start, 0, end, _of_start)
    proven = start.failed is not None and start.failed < end
    causes = [each for each in found if proven or each[0].rank < HINT or not _survived(each, end)]
    interrupt = start.first(_INTERRUPT)
    if interrupt is not None and interrupt < end and not (causes and causes[0][0].rank < HINT):
        return _interrupted(start, interrupt)
    raised = errors(start, 0, end)
    late = [at for at in raised if at > start.progress]
    uncaught = [at for at in late if start.raised[at].uncaught]
    ended = bool(raised) and (proven or bool(uncaught) or _ends_with(start, late, end))
    places = (at for at in late or raised if place_of(start.raised[at]) is not None)
    placed = next(places, None) if ended else None
    if causes and not (placed is not None and _better_placed(start, placed, causes[0])):
        return told(*causes[0], When.STARTUP, found)
    if ended:
        cause = (late or raised)[0] if placed is None else placed
        return endings.unknown_error(start, cause, When.STARTUP)
    if proven:
        return endings.no_cause(start)
    after = enumerate(start.lines[start.progress + 1 : end], start.progress + 1)
    logged = [at for at, line in after if line.level in _SAID_ERROR and not line.is_frame]
    if logged and _ends_with(start, logged[-1:], end):
        return endings.unknown_error(start, logged[0], When.STARTUP)
    return hangs.wait_at_start(start) if end == len(start.lines) and not raised else None


def _better_placed(start: Start, at: int, match: Match) -> bool:
    """Whether the place of an exception tells more than the words of a rule.

    Words that mean one thing come first. What native code raises comes through any frame, so its
    frames are asked only when its words tell nothing.
    """
    rule, found = match
    place = place_of(start.raised[at])
    if rule.rank == 0 or place is None or rule.kind is place.kind:
        return False
    return rule.rank >= HINT or not _NATIVE.search(start.raised[at].name) and at <= found.place


def _interrupted(start: Start, place: int) -> Diagnosis:
    """Tell of a start that somebody ended; what it said that it waited for is the cause of that."""
    begin = max(start.progress, 0)
    waited = matches(start, begin, place, lambda rule: rule.rank < HINT, warnings=True)
    if waited:
        found = told(*waited[0], When.STARTUP, waited)
        hint = "it was told to stop while it waited for this"
        return replace(found, confidence=Confidence.MEDIUM, look_at=found.look_at or hint)
    return endings.interrupted(start, place)


def _while_serving(start: Start, served: int, end: int) -> Diagnosis | None:
    died = start.died_after(served)
    if died is not None and died >= end:
        died = None
    recent = _survivors(start, served, end if died is None else died)
    found = matches(start, recent, end, lambda rule: rule.serving, serious=died is None)
    if found and found[0][0].rank < HINT:
        return told(*found[0], When.SERVING, found)
    if died is not None:
        return _death(start, _last_work(start, served, died), died, end, found)
    last = [at for at in errors(start, recent, end) if _of_engine(start, at)]
    if last and (
        _ends_with(start, last, end) if start.served is None else start.idle_after(last[-1])
    ):
        return endings.unknown_error(start, last[0], When.SERVING)
    refused = matches(start, 0, end, lambda rule: rule.request)
    return hangs.hang(start, served, end) or (
        told(*refused[0], When.SERVING, refused) if refused else None
    )


def _survivors(start: Start, served: int, end: int) -> int:
    """Return the place from which on errors count: it worked on for long after what came before."""
    works = (at for at in range(end - 1, served - 1, -1) if WORKS.search(start.lines[at].text))
    return next(islice(works, _LONG - 1, None), served)


def _death(start: Start, begin: int, died: int, end: int, hints: list[Match]) -> Diagnosis:
    """Tell why the engine died, from the lines since it last worked.

    What the API server says after the first word of the death is a consequence.
    """
    raised = errors(start, begin, end)
    causes = [at for at in raised if not _by_server(start.lines[at])] or [
        at for at in raised if at < died and "VLLMValidationError" not in start.lines[at].text
    ]
    if causes:
        return endings.unknown_error(start, causes[0], When.SERVING)
    if hints:
        return told(*hints[0], When.SERVING, hints)
    worded = (at for at in start.raised if died <= at < end and DEAD.search(start.lines[at].text))
    return endings.unknown_error(start, next(worded, died), When.SERVING)


def _of_engine(start: Start, at: int) -> bool:
    """Whether an exception went through the engine's loop, or is all that an excerpt shows."""
    return start.served is None or when_of(list(start.raised[at].frames)) is When.SERVING


def _by_server(line: Line) -> bool:
    return line.process.startswith(("APIServer", "ApiServer"))


def _last_work(start: Start, served: int, died: int) -> int:
    """Return the place of the last sign of life before a death."""
    for at in range(died, served, -1):
        if _LIVES.search(start.lines[at].text):
            return at
    return served


def _ends_with(start: Start, raised: list[int], end: int) -> bool:
    """Whether nothing goes on after the last error: else it may have been survived."""
    if not raised:
        return False
    after = start.lines[raised[-1] + 1 : end]
    return not any(is_quiet(line) and not _GOING.search(line.text) for line in after)


# --- which matches count ---------------------------------------------------------------------------


def _of_start(rule: Rule) -> bool:
    return not rule.request


def _survived(match: Match, end: int) -> bool:
    """Whether starting up went on after an error."""
    _, found = match
    return found.place < found.start.progress < end


def _ends_process(match: Match, end: int) -> bool:
    """Whether an error was raised out of the process: printed by Python itself, nothing after it."""
    rule, found = match
    raised = not found.line.level and found.place in found.start.raised
    in_request = "starlette/" in found.before or "in run_asgi" in found.before
    return raised and rule.rank < HINT and not in_request and not _survived(match, end)
