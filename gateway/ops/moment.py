"""How times are told to people: one instant on both clocks, and numbers with few decimals."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Moment:
    """One instant on both clocks, to tell monotonic times as wall times."""

    now: float
    wall: float

    def told(self, at: float) -> str:
        """Return a monotonic time in RFC 3339."""
        return rfc3339(self.wall - (self.now - at))


def rfc3339(wall: float) -> str:
    """Return seconds since the epoch as `2026-01-31T14:02:11.120Z`."""
    text = datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def rounded(number: float | None, digits: int = 3) -> float | None:
    """Return a number with so many decimals; None stays None."""
    return None if number is None else round(number, digits)
