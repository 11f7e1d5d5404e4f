"""What tells one conversation from another in a request that names no session: how it begins. Pure.

A client may write what it said first in another way with each turn: a mark of the prefix cache moves on, or a
string becomes a list with one message. So only strings count, without those that are the form of a message.
"""

from __future__ import annotations

import json
import re
from typing import Final

from gateway.core.types import Call
from gateway.wire.large import fields_at_hand
from gateway.wire.unread import without_billing

_FIELDS: Final = ("messages", "input", "prompt")
# Two conversations that begin alike for so long count as one. Less of it is counted than looked at, for in some
# turns the form takes more of the room than in others.
_MOST_BYTES: Final = 32 * 1024
_COUNTED_BYTES: Final = 31 * 1024
_WORDS_OF_FORM: Final = frozenset(
    ("role", "user", "content", "type", "text", "input_text", "message")
    + ("cache_control", "ephemeral", "ttl", "5m", "1h")
)
# Reads one value, and says where it ends. Numbers stay text: Python reads none of more than 4,300 digits.
_TURN: Final = json.JSONDecoder(parse_int=str)
_BETWEEN: Final = re.compile(r"[\[,\s]*")


def beginning(call: Call) -> str:
    """Return the same for each turn of a conversation: all up to the end of what its user said first.

    Of what is no list of turns the beginning of the prompt; nothing where there is none, nor of an upload.
    No more is looked at than the first 32 KiB of turns.
    """
    if call.model_at is not None:
        return ""
    for name in _FIELDS:
        if said := without_billing(_first_bytes(call, name)):
            text = said.decode("latin-1")  # a character for each byte
            if text.startswith("["):
                text = text[: _end_of_first_turn(text)]
            return _strings(text) or text
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
        except (json.JSONDecodeError, RecursionError):
            break  # it is cut
        if not isinstance(turn, dict) or turn.get("role") in ("user", None):
            return at
    return len(text)


def _strings(text: str) -> str:
    """Return the strings of JSON that may be cut, nearly as they are written: no quote is left within them."""
    unescaped = text.replace("\\\\", "//").replace('\\"', "/'")
    said = (each for each in unescaped.split('"')[1::2] if each not in _WORDS_OF_FORM)
    return "\n".join(said)[:_COUNTED_BYTES]
