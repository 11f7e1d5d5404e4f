"""What other gateways have under way at one backend, as they told last: values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec


class UnderWay(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one gateway has under way at a backend, or several together. Tokens, but for requests and sequences.

    `read_tokens` and `ended_tokens` are totals of its whole life: who hears them uses their differences.
    A request that ended before a scrape could show it is in neither, so `read_tokens` may fall again.
    """

    requests: int = 0
    unread_tokens: int = 0  # of prompts that have to be read
    output_tokens: int = 0  # expected of all
    coming_tokens: int = 0  # whole needs of those whose prompt is not read yet
    seen_tokens: int = 0  # what its last scrape should show of the others
    growing_tokens: int = 0  # expected outputs of these
    read_tokens: int = 0  # whole needs of those whose prompt was read, ever
    ended_tokens: int = 0  # what those that ended should have held, ever
    sequences: int = 0  # what the requests are in the engine's own counts


NOTHING: Final = UnderWay()
_COUNTED: Final = len(UnderWay.__struct_fields__)


def together(every: Iterable[UnderWay]) -> UnderWay:
    """Return what several gateways have under way at one backend."""
    totals = [0] * _COUNTED
    for each in every:
        for place, value in enumerate(msgspec.structs.astuple(each)):
            totals[place] += value
    return UnderWay(*totals)


def since(before: UnderWay | None, now: UnderWay) -> UnderWay:
    """Return what a gateway told, with the differences of its totals in place of these.

    They are 0 where it is not known what it told before, or where it has begun to count anew.
    """
    if before is None or now.ended_tokens < before.ended_tokens:
        return msgspec.structs.replace(now, read_tokens=0, ended_tokens=0)
    return msgspec.structs.replace(
        now,
        read_tokens=now.read_tokens - before.read_tokens,
        ended_tokens=now.ended_tokens - before.ended_tokens,
    )
