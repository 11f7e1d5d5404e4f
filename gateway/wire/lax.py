"""Values read as laxly as vLLM's request models do: 7.0, "7" and true are numbers, 1 and "on" are true.

Source: pydantic's conversion table (2.14), which vLLM 0.32 validates decoded JSON with; a test
compares them. What could be read in two ways is refused, never guessed.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import Raw

# Items of a list that is no plain list of numbers; beyond, reading it takes too long.
MAX_ITEMS: Final = 65_536
_INTEGER: Final = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_MAX_DIGITS: Final = 64
MOST: Final = 2**63 - 1  # of an integer, above and below 0
# What pydantic takes for a boolean.
ON: Final = frozenset({"1", "t", "true", "y", "yes", "on"})
OFF: Final = frozenset({"0", "f", "false", "n", "no", "off"})


class NotReadable(ValueError):
    """The value is of no form that vLLM takes, or of one that is not safe to read."""


def lax_int(value: object) -> int:
    """Return the integer that vLLM reads.

    Raises:
        NotReadable: it is none, or has more than 63 bits.
    """
    if isinstance(value, str):
        value = value.strip()
        if len(value) > _MAX_DIGITS or not _INTEGER.fullmatch(value):
            raise NotReadable
        value = int(value.partition(".")[0])
    if not isinstance(value, int | float) or not -MOST <= value <= MOST or value != int(value):
        raise NotReadable
    return int(value)


def lax_bool(value: object) -> bool:
    """Return the truth that vLLM reads.

    Raises:
        NotReadable: it is none.
    """
    if isinstance(value, str):
        text = value.lower()
        if text in ON or text in OFF:
            return text in ON
    elif isinstance(value, int | float) and value in (0, 1):
        return value == 1
    raise NotReadable


def lax_ids(values: list[Any]) -> list[int]:
    """Return the token ids that vLLM reads.

    Raises:
        NotReadable: one of them is none, or they are too many to look at each.
    """
    if len(values) > MAX_ITEMS:
        raise NotReadable
    return [lax_int(value) for value in values]


# --- of a field that is judged, not read: what is unclear counts as the larger ----------------------

_SURELY_OFF: Final = OFF | {"0.0", "-0", "-0.0"}
_TEXT: Final = msgspec.json.Decoder(str)


def number_of(raw: Raw) -> float | None:
    """Read a number as laxly as vLLM's models: 7, 7.0, "7", true; None for what is none."""
    data = bytes(raw)
    try:
        return float(data)
    except ValueError:
        pass
    if data in (b"true", b"false"):
        return float(data == b"true")
    if data[:1] != b'"':
        return None
    try:
        return float(_TEXT.decode(data))
    except ValueError:
        return None


def is_on(raw: Raw) -> bool:
    """Whether a switch is on, as laxly as vLLM's models read it; what is unclear counts as on."""
    data = bytes(raw)
    text = _TEXT.decode(data) if data[:1] == b'"' else data.decode()
    return text != "null" and text.strip().lower() not in _SURELY_OFF
