"""Regular expressions of a schema: what RE2 would compile, and cheaply.

Grammar compilers turn patterns into automata: counts multiply states, and what no automaton can do
(backreferences, lookaround) sends them to slower engines or errors. Source: GHSA-rwxx-mrjm-wc2m,
GHSA-9hcf-v7m4-6m2j; RE2's syntax and its limit of 1000 repetitions.
"""

from __future__ import annotations

import re
from typing import Final

MAX_REPEATS: Final = 1000  # of one atom, nested counts multiplied. Source: RE2
MAX_GROUPS: Final = 64  # inside each other; readers recurse
_COUNT: Final = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
# With this flag, which RE2 does not know, spaces do not count: those in `{ 1000 }` neither.
_EXTENDED: Final = re.compile(r"\(\?[a-zA-Z-]*x")
_OPENING: Final = re.compile(r"\((?:\?(?:P?<\w{1,64}>|[a-zA-Z-]{0,8}:))?")  # of a group
_MANY: Final = float("inf")


class _Unfit(Exception):
    """Why a pattern is refused."""


def pattern_problem(pattern: str) -> str | None:
    """Say why a pattern is refused; None for one that is cheap to compile."""
    try:
        _Reader(pattern).alternatives(0)
    except _Unfit as why:
        return str(why)
    return None


class _Reader:
    """Reads a pattern once, left to right. What is malformed is left to the engine to refuse."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0

    def alternatives(self, depth: int) -> tuple[float, bool]:
        """Read up to a closing parenthesis or the end.

        Returns the largest product of counts in it, and whether it may match in several ways when it
        is itself repeated without end: some alternative has an endless repetition and no fixed part.
        """
        if depth > MAX_GROUPS:
            raise _Unfit(f"groups are nested more than {MAX_GROUPS} deep")
        most, ambiguous, endless, fixed = 1.0, False, False, False
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "|":
                ambiguous, endless, fixed = ambiguous or (endless and not fixed), False, False
                self.at += 1
                continue
            is_anchor = self.text[self.at] in "^$"
            counts, inner_ambiguous = self._atom(depth)
            low, high = self._quantifier()
            if high == _MANY and inner_ambiguous:
                raise _Unfit("it contains an unbounded repetition inside an unbounded repetition")
            product = counts * (max(low, 1) if high == _MANY else max(high, 1))
            if product > MAX_REPEATS:
                raise _Unfit(f"its counts multiply to more than {MAX_REPEATS}")
            most = max(most, product)
            endless = endless or high == _MANY or inner_ambiguous
            fixed = fixed or (low >= 1 and high != _MANY and not inner_ambiguous and not is_anchor)
        return most, ambiguous or (endless and not fixed)

    def _atom(self, depth: int) -> tuple[float, bool]:
        sign = self.text[self.at]
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            self._skip_class()
        elif sign == "\\":
            self._skip_escape()
        else:
            self.at += 1
        return 1.0, False

    def _group(self, depth: int) -> tuple[float, bool]:
        if self.text.startswith(("(?=", "(?!", "(?<=", "(?<!"), self.at):
            raise _Unfit("lookahead and lookbehind are not accepted")
        unusual = self.text.startswith(("(?>", "(?(", "(?P=", "(?R", "(?&", "(?#"), self.at)
        if unusual or _EXTENDED.match(self.text, self.at):
            raise _Unfit("its kind of group is not accepted")
        opening = _OPENING.match(self.text, self.at)
        assert opening is not None  # a parenthesis alone is one
        self.at = opening.end()
        seen = self.alternatives(depth + 1)
        self.at += 1  # the closing parenthesis
        return seen

    def _skip_class(self) -> None:
        self.at += 2 if self.text.startswith("[^", self.at) else 1
        first = True
        while self.at < len(self.text) and (first or self.text[self.at] != "]"):
            self.at += 2 if self.text[self.at] == "\\" else 1
            first = False
        self.at += 1

    def _skip_escape(self) -> None:
        after = self.text[self.at + 1 : self.at + 2]
        if (after.isdigit() and after != "0") or after in ("k", "g"):
            raise _Unfit("backreferences are not accepted")
        self.at += 2

    def _quantifier(self) -> tuple[float, float]:
        """Read what follows an atom: how often it comes, least and most."""
        sign = self.text[self.at : self.at + 1]
        if sign in ("*", "+", "?"):
            self.at += 1
            low, high = {"*": (0.0, _MANY), "+": (1.0, _MANY), "?": (0.0, 1.0)}[sign]
        elif found := _COUNT.match(self.text, self.at):
            self.at = found.end()
            low = float(found[1])
            high = low if found[2] is None else float(found[3]) if found[3] else _MANY
        else:
            return 1.0, 1.0
        if self.text.startswith("?", self.at):
            self.at += 1  # lazy
        if self.text.startswith(("?", "+", "*"), self.at) or _COUNT.match(self.text, self.at):
            raise _Unfit("possessive and doubled repetitions are not accepted")
        return low, high
