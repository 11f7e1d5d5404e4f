"""nginx's configuration as a tree: which directive holds at a place, and in which line it stands. Pure.

It reads a file, or what `nginx -T` prints: all files, each after a line `# configuration file NAME:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<comment>\#[^\n]*) | (?P<space>\s+) | (?P<mark>[{};])
    | (?P<word>(?:"(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | \$\{\w+\} | \\. | [^\s{};"'\\])+)""",
    re.VERBOSE,
)
_FILE: Final = re.compile(r"# configuration file (.+):$")


@dataclass(slots=True)
class Directive:
    """One directive with its words, and what is within its braces."""

    name: str
    words: list[str]
    where: str  # file:line
    parent: Directive | None = None
    inside: list[Directive] = field(default_factory=list)

    def find(self, name: str) -> Iterator[Directive]:
        """Go through all directives of a name within it, however deep."""
        for each in self.inside:
            if each.name == name:
                yield each
            yield from each.find(name)

    def holds(self, name: str) -> Directive | None:
        """Return the directive of a name that holds here: nginx inherits it from the blocks around."""
        place: Directive | None = self
        while place is not None:
            for each in reversed(place.inside):
                if each.name == name:
                    return each
            place = place.parent
        return None

    def all_of(self, name: str) -> list[Directive]:
        """Return the directives of a name that hold here: those of the nearest block that has any."""
        place: Directive | None = self
        while place is not None:
            if found := [each for each in place.inside if each.name == name]:
                return found
            place = place.parent
        return []


def parse(text: str, file: str) -> Directive:
    """Return the whole configuration as one block without a name; includes stay as they are.

    Raises:
        ValueError: its braces do not fit.
    """
    root = Directive("", [], file)
    words: list[str] = []
    place, line, began = root, 1, 1
    offset, base = 0, 0
    while offset < len(text):
        found = _TOKEN.match(text, offset)
        if found is None:
            raise ValueError(f"{file}:{line - base}: a quote is not closed")
        token, offset = found[0], found.end()
        if found["comment"] is not None and (named := _FILE.match(token)):
            file, base = named[1], line
        elif found["word"] is not None:
            began = began if words else line
            words.append(token)
        elif found["mark"] is not None:
            place = _step(place, words, token, f"{file}:{began - base}")
            words = []
        line += token.count("\n")
    if place is not root or words:
        raise ValueError(f"{place.where}: it is not closed")
    return root


def _step(place: Directive, words: list[str], mark: str, where: str) -> Directive:
    """Return the block that one is in after `;`, `{` or `}`."""
    if mark == "}":
        if place.parent is None or words:
            raise ValueError(f"{where}: a brace or semicolon too few, or too many")
        return place.parent
    made = Directive(words[0] if words else "", words[1:], where, place)
    place.inside.append(made)
    return made if mark == "{" else place


def seconds(word: str) -> float | None:
    """Return a time as nginx writes it, such as `60s`, `1m30s` or `75`; None if it is none."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    parts = re.findall(r"(\d+)(ms|[smhd])?", word)
    if not parts or "".join(a + b for a, b in parts) != word:
        return None
    return sum(int(number) * units[unit or "s"] for number, unit in parts)


def size(word: str) -> int | None:
    """Return a size as nginx writes it, such as `64m`; None if it is none."""
    found = re.fullmatch(r"(\d+)([kKmMgG]?)", word)
    if found is None:
        return None
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2].lower()]
