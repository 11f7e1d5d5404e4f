"""Explain what is wrong with a text that is no YAML, without quoting its values. Pure.

The parser names its own state and quotes the file; an operator wants to know what to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ruamel.yaml.error import MarkedYAMLError, StringMark, YAMLError
from ruamel.yaml.reader import ReaderError

from gateway.config.findings import Place

LINE_END: Final = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as YAML counts lines


@dataclass(frozen=True, slots=True)
class NotYaml:
    """What is wrong, what to do, and where."""

    message: str
    hint: str = ""
    place: Place = Place()


def not_yaml(error: YAMLError | ValueError | RecursionError, text: str) -> NotYaml:
    """Return what a parser's error about a text means."""
    if isinstance(error, RecursionError):
        return NotYaml("lists and mappings are nested too deeply", "is a bracket too many?")
    if isinstance(error, ReaderError):
        before = LINE_END.split(text[: error.position])
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        place = Place(len(before), len(before[-1]) + 1)
        return NotYaml(message, "remove it; was the file damaged?", place)
    if not isinstance(error, MarkedYAMLError):
        return NotYaml("this is not YAML")
    problem, opened = error.problem or "", error.context_mark
    place = _place(error.problem_mark or opened)
    for pattern, explain in _KNOWN:
        if (found := re.search(pattern, problem)) and (known := explain(found, opened, place)):
            return known
    words = re.sub(r"'[^']*'", "something else", problem) or "it cannot be read"
    return NotYaml(f"this is not YAML: {words}", "", place)


def _place(mark: StringMark | None) -> Place:
    return Place(mark.line + 1, mark.column + 1) if mark is not None else Place()


_Explain = Callable[[re.Match[str], StringMark | None, Place], NotYaml | None]


def _says(message: str, hint: str = "") -> _Explain:
    """Return what says this, at the place where the parser stopped."""
    return lambda found, opened, place: NotYaml(message.format(*found.groups()), hint, place)


def _opens(what: str, closes: str) -> _Explain:
    """Return what names the sign that is never closed, at the place where it opens."""
    return lambda found, opened, place: NotYaml(
        f"the {what} that opens here is not closed",
        f"add the missing {closes}; the parser stopped in line {place.line}",
        _place(opened),
    )


def _within(found: re.Match[str], opened: StringMark | None, place: Place) -> NotYaml | None:
    """Say that a value has a sign in it; None where a bracket of an earlier line may be the one that is not closed."""
    if _place(opened).line != place.line:
        return None
    return NotYaml(f"there is a `{found[1]}` within a value here", _QUOTES, place)


_QUOTES: Final = "put the value in quotes"
_KNOWN: Final[tuple[tuple[str, _Explain], ...]] = (
    (
        r"character '\\t' that",
        _says("a tab indents this line; YAML takes spaces only", "replace the tab with spaces"),
    ),
    (r"character '(.)' that", _says("a value cannot begin with {0}", _QUOTES)),
    (r"^expected ',' or '[\]}]', but got '([:\[{])'", _within),
    (r"^expected ',' or '\]'", _opens("bracket [", "]")),
    (r"^expected ',' or '\}'", _opens("brace {", "}")),
    (r"found unexpected end of stream", _opens("quote", "quote")),
    (
        r"node content, but found '<stream end>'",
        _says("the file ends within a list or a mapping", "add the missing ] or }"),
    ),
    (
        r"mapping values are not allowed here",
        _says(
            "there is a second `:` here, or the line is indented more than the one above it",
            "put a value that contains `: ` in quotes, and align the keys of one mapping",
        ),
    ),
    (
        r"expected <block end>, but found '<scalar>'",
        _says("text follows a value that has ended", "put all of the value in quotes"),
    ),
    (r"but found '([\]}])'", _says("this {0} closes nothing", "remove it")),
    (
        r"expected '<document start>'",
        _says("text follows the first value", "settings are `key: value`; is this another format?"),
    ),
    (
        r"expected <block end>",
        _says("the indentation fits none of the lines above", "align the keys of one mapping"),
    ),
    (
        r"found undefined alias",
        _says("a value that begins with * is an alias, and nothing has that name", _QUOTES),
    ),
    (r"could not find expected ':'", _says("this line is not `key: value`", "is a `:` missing?")),
    (
        r"unknown escape character",
        _says(
            "a backslash in double quotes begins an escape, and this is none",
            "use single quotes, or write the backslash twice",
        ),
    ),
    (r"another document", _says("a second document begins here", "remove the line `---`")),
)
