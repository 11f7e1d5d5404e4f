"""What the terminal shows: its width, whether it has colours and more than ASCII, and tables that fit."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.printable import printable

_ESCAPE: Final = "\x1b["
_BOLD: Final = "1"
_RED, _GREEN, _YELLOW, _DIM = "31", "32", "33", "2"
_COLOURS: Final = {
    **dict.fromkeys(("ok", "ready"), _GREEN),
    **dict.fromkeys(
        (
            *("degraded", "saturated", "starting", "restarting", "pending", "draining", "cordoned"),
            "asleep",
        ),
        _YELLOW,
    ),
    **dict.fromkeys(
        (
            *("down", "suspended", "crash-looping", "failed", "unreachable", "frozen", "failing"),
            "unknown",
        ),
        _RED,
    ),
    "note": _DIM,
}
# The shapes differ, so that nothing is told by colour alone.
_SIGNS: Final = {
    "ok": ("●", "+"),
    "ready": ("●", "+"),
    "degraded": ("◐", "~"),
    "saturated": ("◐", "~"),
    "starting": ("◌", "."),
    "down": ("○", "x"),
}
_NUMBER: Final = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})*(?:\.[0-9]+)?")
_GAP: Final = "  "
_LEAST_TEXT: Final = 12  # columns of a text that is cut to fit

Row = Mapping[str, object]


def _begins_with_digit(value: object) -> bool:
    return is_number(value) or (isinstance(value, str) and (not value or value[0].isdigit()))


def is_number(value: object) -> bool:
    """Whether a value is a number, as `1,234` and `93%` too, or not known."""
    if isinstance(value, str):
        return value.endswith("%") or _NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float | None) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Terminal:
    """What can be shown. `width` is in characters, `height` in lines; None: without an end, for a file or a pipe."""

    width: int | None = None
    colour: bool = False
    unicode: bool = True
    height: int | None = None

    @classmethod
    def of_stdout(cls) -> Terminal:
        """Return what standard output can show."""
        is_terminal = sys.stdout.isatty()
        width = (
            shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else None
        )
        colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        height = shutil.get_terminal_size().lines if is_terminal else None
        return cls(width, colour, _can_write("●◐◌○└"), height)

    def sign(self, state: str) -> str:
        """Return the sign of a state."""
        shapes = _SIGNS.get(state)
        return "?" if shapes is None else shapes[0 if self.unicode else 1]

    @property
    def branch(self) -> str:
        """Return what stands before a row that belongs to the one above."""
        return "└ " if self.unicode else "- "

    def painted(self, text: str, state: str) -> str:
        """Return a text in the colour of a state."""
        return self._in(_COLOURS.get(state), text)

    def bold(self, text: str) -> str:
        """Return a text that stands out."""
        return self._in(_BOLD, text)

    def plain(self, text: str) -> str:
        """Return a text as this terminal can write it; others wrote parts of it, such as a log of vLLM."""
        text = printable(text)
        if self.unicode:
            return text
        return text.replace("…", "...").encode("ascii", "replace").decode()

    def wrapped(self, text: str, head: str = "") -> list[str]:
        """Return a text in lines that fit; the first begins with `head`, the others stand below its text."""
        if self.width is None:
            return [head + self.plain(text)]
        indent = " " * len(head)
        return textwrap.wrap(
            self.plain(text),
            max(self.width, len(head) + _LEAST_TEXT),
            initial_indent=head,
            subsequent_indent=indent,
        )

    def table(
        self,
        rows: Sequence[Row],
        *,
        least: Sequence[str] = (),
        state: str = "",
        is_number: Callable[[object], bool] = _begins_with_digit,
    ) -> list[str]:
        """Return rows with a head, numbers to the right.

        Args:
            rows: all with the same names of columns.
            least: columns that are left out where the terminal is narrow, the first of them first.
            state: the column that is shown in its colour.
            is_number: what goes to the right, where all of its column is so.
        """
        names = list(rows[0])
        cells = {name: [self.plain(_told(row[name])) for row in rows] for name in names}
        widths = {name: max(len(name), *(len(cell) for cell in cells[name])) for name in names}
        for name in least:
            if self._fits(widths):
                break
            del widths[name]
        names = list(widths)
        self._shorten(widths)
        right = {name for name in names if all(is_number(row[name]) for row in rows)}
        lines = [self.bold(_line([(name.upper(), widths[name], name in right) for name in names]))]
        for number in range(len(rows)):
            painted = []
            for name in names:
                cell = _cut(cells[name][number], widths[name], "…" if self.unicode else "~")
                padded = cell.rjust(widths[name]) if name in right else cell.ljust(widths[name])
                painted.append(self.painted(padded, cell) if name == state else padded)
            lines.append(_GAP.join(painted).rstrip())
        return lines

    def _fits(self, widths: Mapping[str, int]) -> bool:
        return (
            self.width is None or sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= self.width
        )

    def _shorten(self, widths: dict[str, int]) -> None:
        """Cut the widest columns, where leaving others out was not enough."""
        while not self._fits(widths):
            widest = max(widths, key=lambda name: widths[name])
            if widths[widest] <= _LEAST_TEXT:
                return
            widths[widest] -= 1

    def _in(self, colour: str | None, text: str) -> str:
        if not self.colour or colour is None:
            return text
        return f"{_ESCAPE}{colour}m{text}{_ESCAPE}0m"


def clock(at: object) -> str:
    """Return an RFC 3339 time without its fractions."""
    return str(at)[:19].replace("T", " ")


def _line(cells: Sequence[tuple[str, int, bool]]) -> str:
    padded = (text.rjust(width) if right else text.ljust(width) for text, width, right in cells)
    return _GAP.join(padded).rstrip()


def _cut(text: str, width: int, mark: str) -> str:
    """Return a text without its middle: names often differ in how they end."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return text[: width - 1 - end] + mark + text[len(text) - end :]


def _told(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_told, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_told(each)}" for name, each in value.items()) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _can_write(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
