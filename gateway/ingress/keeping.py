"""Large bodies that are kept beyond the first token, so that another backend can go on with their stream.

Once its backend has failed, others are asked for the token ids of a prompt (`counting.ids`), which takes all of
it. So of a message or response the body is kept until its stream ends, all of them together within `MOST_BYTES`.
Beyond that, the stream of another large body cannot go on elsewhere (`Barrier.BODY`). A small body is at hand.
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from gateway.core.types import Call
from gateway.counting.tokens import MAX_BODY_BYTES

MOST_BYTES: Final = 64 << 20


class Kept:
    """One body with a place of its own. `release` gives it back, and may be called at any time."""

    __slots__ = ("_keeping", "call")

    def __init__(self, keeping: Keeping, call: Call) -> None:
        self._keeping: Keeping | None = keeping
        self.call = call

    def release(self) -> None:
        """Give back its place; whoever refers to it lets go of it, too."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.held_bytes -= len(self.call.body)


class Keeping:
    """What all kept bodies hold. One for the process."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def keep(self, call: Call) -> Kept | None:
        """Keep a copy of a large body, which the request drops; None: there is no room for it.

        One that is so long that nobody takes it apart is not kept.
        """
        size = len(call.body)
        if size > MAX_BODY_BYTES or self.held_bytes + size > MOST_BYTES:
            return None
        self.held_bytes += size
        return Kept(self, structs.replace(call, body=bytes(call.body)))
