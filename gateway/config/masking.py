"""What of a settings file a finding may show. Pure. Findings end up in build logs and chats.

Names of settings are shown. A value is shown if a setting of that name exists, and it is no secret; of a URL
only what names a server. So a secret stays hidden where somebody misspelt its key or put it into a URL.

    admin: {token: hunter2}                   admin: {token: *******}
    - {url: http://h:1, api_kee: abc}         - {url: http://h:1, api_kee: ***}
    api_key: ${KEY}abc                        api_key: ${KEY}***
    - http://user:abc@h:1/?key=abc            - http://********@h:1/?*******
    command: [vllm, --api-key, abc]           command: [****, --api-key, ***]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import JsonValue, SecretStr

from gateway.config.findings import KeyPath
from gateway.config.models import Config
from gateway.config.units import Listen, OrText, Section


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that settings of this kind are made of."""
    if _is_section(annotation):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _sections(field.annotation)
    for each in get_args(annotation):
        yield from _sections(each)


_COMMAND: Final = "command"
_HARMLESS: Final = re.compile(r"true|false|null|none|auto|~|")
_SIGN_OR_REFERENCE: Final = re.compile(
    r"[\"' ]|--[a-z-]+(?=[=\"']|$)|\$\{(?:[A-Za-z_][A-Za-z0-9_]*|file:[^{}]*)(?:(?=\})|:-(?=[^{}]*\}))|\}"
)
_USER: Final = re.compile(r"(?<![^\"'])(?!https?://).*(?=@)|(?<=://).*(?=@)")
# What follows an address or a variable, and what stands in the place of a port.
_BEHIND: Final = re.compile(
    r"(?:(?<=[?#=}])|(?<=:-)|(?<=\$\{)(?![^{}]*\})|(?<=:)(?!//|[0-9a-fA-F:.]*\]|[0-9]{1,5}(?:/|[\"']?$))).+?(?=[\"']?$)"
)
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
_NAMES: Final = sorted({name for each in _sections(Config) for name in each.model_fields})
# In a text that is no YAML, only the names of settings and the characters of its structure are certainly no values.
_NAME_OR_SIGN: Final = re.compile(
    rf"\b(?:{'|'.join(_NAMES)})(?=[\"']?\s*:(?:\s|$))|[\s{{}}\[\],:#\"'&*|>-]"
)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a name or a value without parts is: lines and columns from 0, its end excluded; quotes included."""

    path: KeyPath
    line: int
    column: int
    end_line: int
    end_column: int


def masked(lines: Sequence[str], values: Iterable[Span], names: Iterable[Span]) -> list[str]:
    """Return the lines of a file as they may be shown: as long as they are, without their comments.

    What is neither the name of a setting nor a value that may be shown is hidden.
    """
    shown = [masked_raw(line) for line in lines]
    ends = [0] * len(lines)  # of the last name or value in each line

    def show(span: Span, mask: Callable[[str], str]) -> None:
        places = []
        for number in range(span.line, min(span.end_line + 1, len(lines))):
            start = span.column if number == span.line else 0
            end = span.end_column if number == span.end_line else len(lines[number])
            places.append((number, start, end))
        # The whole value at once: the @ behind a password may stand in a later line.
        text = mask(" ".join(lines[number][start:end] for number, start, end in places))
        for number, start, end in places:
            part, text = text[: end - start], text[end - start + 1 :]
            shown[number] = shown[number][:start] + part + shown[number][end:]
            ends[number] = max(ends[number], end)

    for name in names:
        show(name, str)
    for value in values:
        show(value, _mask_of(value.path))
    return [_without_comment(line, end) for line, end in zip(shown, ends, strict=True)]


def masked_raw(line: str) -> str:
    """Return a line of what is no YAML: names of known settings, and what structures it."""
    return _hide_but(_NAME_OR_SIGN, line)


def _mask_of(path: KeyPath) -> Callable[[str], str]:
    """Return what hides the secrets in the value at a path of the file."""
    if _COMMAND in path[:-1]:  # any of its words may be a secret
        return _hidden
    annotation: Any = Config
    for part in path:
        annotation = _inside(annotation, part)
        if annotation is None:
            return _hidden
    if not _is_text(annotation):
        return _hidden
    return _as_written if Listen in _kinds(annotation) else _cleaned


def _as_written(text: str) -> str:
    """Show an address to listen at, which has no secret, unless it is a variable or a URL by mistake."""
    return _cleaned(text) if "$" in text or "@" in text or "://" in text else text


def _hidden(text: str) -> str:
    return text if _HARMLESS.fullmatch(text) else _hide_but(_SIGN_OR_REFERENCE, text)


def _cleaned(text: str) -> str:
    return _USER.sub(_stars, _BEHIND.sub(_kept_at, text))


def _hide_but(shown: re.Pattern[str], text: str) -> str:
    out, at = "", 0
    for found in shown.finditer(text):
        out += "*" * (found.start() - at) + found[0]
        at = found.end()
    return out + "*" * (len(text) - at)


def _kept_at(found: re.Match[str]) -> str:
    """Hide all but the last @, before which a user and a password stand."""
    at = found[0].rfind("@")
    return "".join("@" if place == at else "*" for place in range(len(found[0])))


def _stars(found: re.Match[str]) -> str:
    return "*" * len(found[0])


def _without_comment(line: str, end: int) -> str:
    comment = _COMMENT.search(line, end)
    return line if comment is None else line[: comment.start()].rstrip()


def _inside(annotation: Any, part: str | int) -> Any:
    """Return the annotation of a part, by its name or index; None: the settings have no such part."""
    for kind in _kinds(annotation):
        if _is_section(kind):
            field = kind.model_fields.get(str(part))
            return None if field is None else field.annotation
        if get_origin(kind) is dict:
            inner = get_args(kind)[1]
            # The operator chose the name, as of an environment variable: its text may be anything.
            return None if inner in (str, JsonValue) else inner
        if get_origin(kind) is tuple and isinstance(part, int):
            return get_args(kind)[0]
    return None


def _is_text(annotation: Any) -> bool:
    """Whether a setting can be written as one text, and is no secret."""
    if any(isinstance(mark, OrText) for mark in get_args(annotation)):  # `- http://...`
        return True
    return not any(
        kind is SecretStr or get_origin(kind) in (dict, tuple) or _is_section(kind)
        for kind in _kinds(annotation)
    )


def _kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kinds(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation]
