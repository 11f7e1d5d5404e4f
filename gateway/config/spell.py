"""Settings written back the way the file spells them: `30s`, `64MiB`, `auto`, secrets hidden."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gateway.config.models import Section
from gateway.config.units import (
    Listen,
    OrWord,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

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
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, Listen | Path):
        return str(value)
    return value
