"""What a prompt says about its own reply.

A prompt may steer its own reply: `[[sim:tokens=5;itl=20ms;ttft=50ms]]` sets how many tokens the
reply has (as if the model had stopped there) and how fast it comes. With `call=5` it calls its first tool
behind five tokens of text. Where token ids stand in for messages, the text in them steers the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gateway.sim.errors import SimError

_CONTROL: Final = re.compile(r"\[\[sim:([^\]]*)\]\]")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Control:
    """What a prompt says about its own reply."""

    tokens: int | None = None
    itl_s: float | None = None
    ttft_s: float | None = None
    call_at: int | None = None  # tokens of text before it calls a tool


def parse_control(text: str) -> Control:
    """Read the last `[[sim:...]]` of a text."""
    found = _CONTROL.findall(text)
    pairs = dict(p.split("=", 1) for p in found[-1].split(";") if "=" in p) if found else {}
    return Control(
        tokens=_count(pairs["tokens"]) if "tokens" in pairs else None,
        itl_s=parse_duration(pairs["itl"]) if "itl" in pairs else None,
        ttft_s=parse_duration(pairs["ttft"]) if "ttft" in pairs else None,
        call_at=_count(pairs["call"]) if "call" in pairs else None,
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise SimError(400, f"not a number of tokens: {text}")
    return int(text)


def parse_duration(text: str) -> float:
    """Read `20ms` or `1.5s` as seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SimError(400, f"not a duration: {text}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
