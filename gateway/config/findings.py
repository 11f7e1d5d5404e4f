"""What is wrong with a settings file: where, how badly, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway.core.printable import printable

_MOST_CHARS: Final = 160  # of a line
_CHARS_BEFORE: Final = 60  # of them, before the place

KeyPath = tuple[str | int, ...]  # keys and indexes from the root of the file to a value


class Severity(Enum):
    """An error keeps the file from being used; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of one line; line and column count from 1."""

    line: int = 1
    column: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that is wrong with a setting, or with the file (no path). `code` is stable."""

    path: KeyPath
    code: str
    message: str
    hint: str = ""
    severity: Severity = Severity.ERROR


def warning(path: KeyPath, code: str, message: str, hint: str = "") -> Remark:
    """Return a remark that does not keep a file from being used."""
    return Remark(path, code, message, hint, Severity.WARNING)


@dataclass(frozen=True, slots=True)
class Finding(Remark):
    """A remark with its place; `str()` is the one-line form."""

    file: str = ""
    place: Place = Place()
    source: str = field(default="", repr=False)  # its line of the file, with secrets hidden

    @staticmethod
    def of(remark: Remark, file: str, place: Place, source: str = "") -> Finding:
        """Return a remark with its place."""
        return Finding(
            remark.path,
            remark.code,
            remark.message,
            remark.hint,
            remark.severity,
            file,
            place,
            source,
        )

    def __str__(self) -> str:
        where = f"{self.file}:{self.place.line}:{self.place.column}"
        text = printable(f"{self.message}; {self.hint}" if self.hint else self.message)
        return f"{where} {self.severity.value} {text} [{self.code}]"

    def excerpt(self) -> str:
        """Return the one-line form with the source line and a caret under the place."""
        place = self.place
        message, hint = printable(self.message), printable(self.hint)
        head = f"{self.file}:{place.line}:{place.column} {self.severity.value} {message}"
        number = f"{place.line:>5}"
        lines = [f"{head} [{self.code}]"]
        if self.source:
            # JSON is often one line: with all of it in each finding, the output would be the file squared.
            is_long = len(self.source) > _MOST_CHARS
            start = max(0, place.column - 1 - _CHARS_BEFORE) if is_long else 0
            shown = self.source[start : start + _MOST_CHARS]
            column = place.column - 1 - start
            carets = " " * column + "^" * min(place.width, max(1, len(shown) - column))
            lines += [f"{number} | {shown}", f"      | {carets} {hint}".rstrip()]
        elif hint:
            lines.append(f"      {hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, str | int]:
        """Return the form for programs."""
        return {
            "file": self.file,
            "line": self.place.line,
            "column": self.place.column,
            "severity": self.severity.value,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
        }


def dotted(path: Sequence[str | int]) -> str:
    """Write a path the way people say it: `pools.qwen3.backends[1].url`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
