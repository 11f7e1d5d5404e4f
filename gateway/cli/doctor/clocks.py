"""How far the clocks of others are from this machine's."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator
from typing import Final

from gateway.cli.doctor.findings import Finding, Verdict, ok

_MOST_S: Final = 5.0  # a `Date` has whole seconds, and its reply was under way
_CHANGE: Final = "timedatectl set-ntp true, on the machine whose clock is wrong"


def of_date(date: str, whose: str, verdict: Verdict, harm: str) -> Iterator[Finding]:
    """Yield how far a reply's `Date` is from this machine's clock; nothing if it has no date.

    `verdict` and `harm` are what is told if it is too far: `harm` ends the sentence.
    """
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return
    yield from judged(time.time() - theirs, whose, verdict, harm)


def judged(apart_s: float, whose: str, verdict: Verdict, harm: str) -> Iterator[Finding]:
    """Yield whether clocks that are so far apart go together. Pure."""
    if abs(apart_s) <= _MOST_S:
        yield ok("clock", f"The clocks of this machine and of {whose} go together")
        return
    yield Finding(
        verdict=verdict, about="clock", change=_CHANGE,
        told=f"The clocks of this machine and of {whose} are {abs(apart_s):.0f} s apart: {harm}",
    )  # fmt: skip
