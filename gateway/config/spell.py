"""Settings written back the way the file spells them: `30s`, `64MiB`, `auto`, secrets hidden.

Of a server's environment only the names are shown, and of its arguments none that follows a flag for a secret:

    command: [vllm, serve, m, --api-key, ***]    args: {hf-token: ***}    env: {HF_TOKEN: ***}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gateway.config.findings import KeyPath, dotted
from gateway.config.keylimits import limits_told
from gateway.config.units import (
    Hides,
    Listen,
    OrWord,
    Section,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from gateway.core.limits import KeyLimits

HIDDEN: Final = "***"
FOR_A_SECRET: Final = re.compile(
    r"(?:.*[-_])?(?:keys?|token|password|passwd|secret|credentials?)", re.I
)
_ASSIGNED: Final = re.compile(r"(?P<name>-{0,2}[\w-]+)=.+", re.S)


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
    return _plain(_hidden(value, setting))


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
        for key, item in _hidden(value, field).items():
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


def _hidden(value: Any, setting: FieldInfo | None) -> Any:
    """Return a value without what its setting hides."""
    marks = setting.metadata if setting is not None else []
    if Hides.VALUES in marks:
        return dict.fromkeys(value, HIDDEN)
    if Hides.ARGUMENTS not in marks:
        return value
    return _without_secrets(value) if isinstance(value, dict) else list(_shown(value))


def _without_secrets(value: Any) -> Any:
    """Return what a flag is set to without its secrets; some take JSON, such as --kv-transfer-config."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if FOR_A_SECRET.fullmatch(key) else _without_secrets(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    shown = _without_secrets(found)
    return value if shown == found else json.dumps(shown)


def _shown(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command line; a word may be a command line itself, for a shell."""
    hides = False
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        name = (assigned["name"] if assigned else word).lstrip("-")
        is_flag, parts = word.startswith("-"), word.split()
        if assigned and FOR_A_SECRET.fullmatch(name) and (is_flag or len(parts) == 1):
            yield f"{assigned['name']}={HIDDEN}"
        elif not hides and (json_shown := _without_secrets(word)) != word:
            yield json_shown
        elif len(parts) > 1:
            yield HIDDEN if hides else " ".join(_shown(parts))
        else:
            yield HIDDEN if hides and not is_flag else word
        if is_flag:
            hides = not assigned and FOR_A_SECRET.fullmatch(name) is not None
