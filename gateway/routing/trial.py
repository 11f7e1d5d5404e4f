"""Which requests go to a revision on trial. Pure: the same conversation has the same answer everywhere."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from gateway.core.types import Ask
from gateway.wire.conversation import beginning

_BYTES: Final = 8


def assign(ask: Ask, wished: bytes) -> None:
    """Note whether a request goes to the revision on trial of its pool, if that has one.

    By the header `x-gateway-revision` (`wished`), by its key, or by a hash of key and conversation, so
    that no conversation changes sides and a share of a half holds all that is in one of a tenth. A
    conversation is what its session is said to be (`Ask.session`), else how it begins.
    """
    trial = ask.route.trial
    if trial is None:
        return
    if trial.by_header:
        ask.on_trial = wished == trial.revision.encode()
    elif trial.keys:
        ask.on_trial = ask.caller.key_id in trial.keys
    else:
        ask.on_trial = place_of(ask, trial.revision) < trial.share


def place_of(ask: Ask, purpose: str) -> float:
    """Return a number between 0 and 1 that is the same for each turn of a conversation, and differs by purpose."""
    told = blake2b(
        ask.session or beginning(ask.call).encode("utf-8", "replace"), digest_size=_BYTES
    )
    told.update(f"\n{ask.caller.key_id}\n{ask.route.pool}\n{purpose}".encode())
    return int.from_bytes(told.digest()) / 256**_BYTES
