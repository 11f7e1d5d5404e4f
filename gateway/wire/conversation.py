"""What tells one conversation from another in a request that names no session: how it begins. Pure."""

from __future__ import annotations

import json
import re
from typing import Final

from gateway.core.types import Call
from gateway.wire.large import fields_at_hand

_FIELDS: Final = ("messages", "input", "prompt")
_MOST_BYTES: Final = (
    32 * 1024
)  # looked at; two conversations that begin alike for so long count as one
_TURN: Final = json.JSONDecoder()  # reads one value, and says where it ends
_BETWEEN: Final = re.compile(r"[\[,\s]*")


def beginning(call: Call) -> str:
    """Return the same for each turn of a conversation: all up to the end of what its user said first.

    Of what is no list of turns the beginning of the prompt; nothing where there is none, nor of a form.
    A body is looked at as it is written, and no more than its first 32 KiB of turns.
    """
    if call.model_at is not None:
        return ""
    for name in _FIELDS:
        if said := _first_bytes(call, name):
            text = said.decode("utf-8", "replace")
            return text[: _end_of_first_turn(text)] if text.startswith("[") else text
    return ""


def _first_bytes(call: Call, name: str) -> bytes:
    """Return how the value of a field begins."""
    if call.places is not None:
        start, end = call.places.get(name, (0, 0))
        return call.body[start : min(end, start + _MOST_BYTES)]
    raw = fields_at_hand(call).get(name)
    return b"" if raw is None else bytes(memoryview(raw)[:_MOST_BYTES])


def _end_of_first_turn(text: str) -> int:
    """Return where the first turn of a user ends; the end of the text if that is not in it."""
    at = 0
    while (between := _BETWEEN.match(text, at)) is not None and between.end() < len(text):
        try:
            turn, at = _TURN.raw_decode(text, between.end())
        except (ValueError, RecursionError):
            break  # it is cut, or has a number of too many digits
        if not isinstance(turn, dict) or turn.get("role") in ("user", None):
            return at
    return len(text)
