"""What tells one conversation from another in a request that names no session: how it begins. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from gateway.core.types import Call
from gateway.wire.large import fields_at_hand
from gateway.wire.objects import fields_of, items_if_list

_LISTS: Final = ("messages", "input")  # of turns, of which each request repeats those before it
_MOST_BYTES: Final = 4096  # of each part


def beginning(call: Call) -> bytes:
    """Return the same for each turn of a conversation: all up to the first that its user said.

    Of what is no list of turns the beginning of the prompt; nothing where there is none.
    """
    fields = fields_at_hand(call)
    for name in _LISTS:
        turns = items_if_list(fields.get(name, Raw()))
        if turns:
            return b"".join(_until_user(turns))
    return bytes(fields.get("prompt") or fields.get("input") or b"")[:_MOST_BYTES]


def _until_user(turns: list[Raw]) -> list[bytes]:
    said = []
    for turn in turns:
        said.append(bytes(turn)[:_MOST_BYTES])
        role = fields_of(turn).get("role") if said[-1].startswith(b"{") else None
        if role is None or bytes(role) == b'"user"':
            break
    return said
