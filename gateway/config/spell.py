"""Settings written back the way the file spells them: `30s`, `64MiB`, `auto`, secrets hidden."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gateway.config.findings import KeyPath, dotted
from gateway.config.keylimits import limits_told
from gateway.config.models import Section
from gateway.config.units import (
    Listen,
    OrWord,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from gateway.core.limits import KeyLimits

HIDDEN: Final = "***"


def spell(value: object, setting: FieldInfo | None = None) -> Any:
    """Return the value as plain data (mapping, list, text, number), spelled as in the file."""
    parsers = [getattr(mark, "func", mark) for mark in setting.metadata] if setting else []
    if value is None or value == "":
        words = [mark.word for mark in parsers if isinstance(mark, OrWord)]
        return words[0] if words else None
    if isinstance(value, float) and parse_duration in parsers:
        return format_duration(value)
    if isinstance(value, int) and parse_size in parsers:
        return format_size(value)
    return _plain(value)


def flat(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield path, dotted name and spelled value of every single setting below a section."""
    for name, field in type(section).model_fields.items():
        yield from _leaves(getattr(section, name), (*path, name), field)


def _leaves(
    value: object, path: KeyPath, field: FieldInfo | None
) -> Iterator[tuple[KeyPath, str, Any]]:
    if isinstance(value, Section):
        yield from flat(value, path)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key), None)
    elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place), None)
    else:
        yield path, dotted(path), spell(value, field)


def _plain(value: object) -> Any:
    if isinstance(value, Section):
        fields = type(value).model_fields
        return {name: spell(getattr(value, name), field) for name, field in fields.items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, KeyLimits):
        return limits_told(value)
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, Listen | Path):
        return str(value)
    return value
