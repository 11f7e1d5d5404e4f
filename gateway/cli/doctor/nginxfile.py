"""nginx's configuration as a tree: which directive holds at a place, and in which line it stands. Pure.

It reads a file, or what `nginx -T` prints: all files, each after a line `# configuration file NAME:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<comment>\#[^\n]*) | (?P<space>\s+) | (?P<mark>[{};])
    | (?P<word>"(?:\\.|[^"\\])*"\)? | '(?:\\.|[^'\\])*'\)?
        | (?!["'])(?:\$\{\w+\} | \\. | [^\s{};\\])+)""",  # a quote within a word is a part of it
    re.VERBOSE | re.DOTALL,
)
# What is skipped of a program in Lua: comments, strings, and all else up to a brace.
_LUA: Final = re.compile(
    r"""--\[(?P<c>=*)\[.*?\](?P=c)\] | --[^\n]* | \[(?P<s>=*)\[.*?\](?P=s)\]
    | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | (?P<brace>[{}]) | [^{}"'\[-]+ | .""",
    re.VERBOSE | re.DOTALL,
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
    """Return the whole configuration as one block without a name, each printed file where it is included.

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
        elif token == "{" and words and words[0].endswith("_by_lua_block"):
            offset = _end_of_lua(text, offset, f"{file}:{line - base}")
            _step(place, words, ";", f"{file}:{began - base}")
            line, words = line + text.count("\n", found.end(), offset), []
        elif found["mark"] is not None:
            place = _step(place, words, token, f"{file}:{began - base}")
            words = []
        line += token.count("\n")
    if place is not root or words:
        raise ValueError(f"{place.where}: it is not closed")
    _put_includes(root)
    return root


def _end_of_lua(text: str, offset: int, where: str) -> int:
    """Return where a block of Lua ends, behind its brace."""
    depth = 1
    while depth:
        found = _LUA.match(text, offset)
        if found is None:
            raise ValueError(f"{where}: it is not closed")
        depth += {"{": 1, "}": -1}.get(found["brace"], 0)
        offset = found.end()
    return offset


def _put_includes(root: Directive) -> None:
    """Put each file where the first one, or one that it includes, includes it; others stay behind it."""
    files: dict[str, list[Directive]] = {}
    for each in root.inside:
        files.setdefault(each.where.rpartition(":")[0], []).append(each)
    main = next(iter(files), "")
    included: set[str] = set()

    def expanded(given: Directive, place: Directive, within: frozenset[str]) -> Iterator[Directive]:
        names = []
        if given.name == "include" and given.words:
            pattern = PurePosixPath(main).parent / given.words[0].strip("\"'")
            names = [name for name in files if PurePosixPath(name).match(str(pattern))]
        names = [name for name in names if name not in within]
        included.update(names)
        for name in names:
            for each in files[name]:
                yield from expanded(each, place, within | {name})
        if not names:
            made = Directive(given.name, given.words, given.where, place)
            made.inside = [got for each in given.inside for got in expanded(each, made, within)]
            yield made

    inside = [
        got for each in files.get(main, []) for got in expanded(each, root, frozenset({main}))
    ]
    others = [each for name in files if name not in included | {main} for each in files[name]]
    root.inside = inside + others


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
