"""Which requests go to a canary. Pure: each replica sends the same conversation to the same side."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from gateway.core.types import Ask
from gateway.wire.conversation import beginning

_BYTES: Final = 8


def assign(ask: Ask, wished: bytes) -> float | None:
    """Set `on_trial` if the pool of a request has a canary; return which conversation it belongs to, as a hash.

    The header `x-gateway-revision` (`wished`) decides, or the key, or a hash of key and conversation. The
    hash keeps a conversation on its side, and a larger share contains a smaller one. A conversation is
    identified by its session (`Ask.session`), or else by how it begins.
    """
    trial = ask.route.trial
    if trial is None:
        return None
    place, told = place_of(ask, trial.revision), side_of(ask, wished)
    ask.on_trial = place < trial.share if told is None else told
    return place


def side_of(ask: Ask, wished: bytes = b"") -> bool | None:
    """Return whether its header or key sends a request to the canary; None: neither decides."""
    trial = ask.route.trial
    if trial is None:
        return None
    if trial.by_header:
        return wished == trial.revision.encode()
    return ask.caller.key_id in trial.keys if trial.keys else None


def place_of(ask: Ask, purpose: str) -> float:
    """Return a number in 0..1 that is the same for each turn of a conversation, and independent by purpose."""
    told = blake2b(
        ask.session or beginning(ask.call).encode("utf-8", "replace"), digest_size=_BYTES
    )
    told.update(f"\n{ask.caller.key_id}\n{ask.route.pool}\n{purpose}".encode())
    return int.from_bytes(told.digest()) / 256**_BYTES
