"""Which name a misspelt one most likely means, in time that does not grow with the number of names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Final

_NEIGHBOURS: Final = 2  # candidates on each side of the place where the name would stand
_LOOKED_AT: Final = 32  # names on each side, of which the caller may use few
_COMPARED_CHARS: Final = 64  # difflib needs quadratic time


class NearNames:
    """The names, sorted by how they begin and by how they end.

    A name with one mistake begins or ends as the right one does, so the right one stands near it in
    one of the two orders. At most ten names are compared: below 1 ms, however many there are.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._forward = sorted((name.casefold(), name) for name in names)
        self._backward = sorted((name.casefold()[::-1], name) for name in names)

    def find(
        self, name: str, allowed: Callable[[str], bool], known: Collection[str] = ()
    ) -> str | None:
        """Return the nearest name among those that are `allowed`; None when none is near.

        `known` are names worth a comparison wherever they stand; the first few are compared.
        """
        folded = name[:_COMPARED_CHARS].casefold()
        near = [
            *list(known)[:_NEIGHBOURS],
            *_around(self._forward, folded, allowed),
            *_around(self._backward, name.casefold()[: -_COMPARED_CHARS - 1 : -1], allowed),
        ]
        by_folded = {each[:_COMPARED_CHARS].casefold(): each for each in reversed(near)}
        close = get_close_matches(folded, by_folded, n=1)
        return by_folded[close[0]] if close else None


def _around(order: list[tuple[str, str]], key: str, allowed: Callable[[str], bool]) -> list[str]:
    """Return the allowed names closest to a place in the order, some of either side."""
    place = bisect_left(order, (key, ""))
    after = [name for _, name in order[place : place + _LOOKED_AT] if allowed(name)]
    before = [name for _, name in order[max(0, place - _LOOKED_AT) : place] if allowed(name)]
    return after[:_NEIGHBOURS] + before[-_NEIGHBOURS:][::-1]
