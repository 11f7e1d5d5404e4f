"""What the overview says of how a backend's prefix cache is known."""

from __future__ import annotations

from typing import TypedDict

from gateway.pools.table import Backend


class KvEventsOverview(TypedDict):
    """How well a backend is followed by its KV events."""

    known: bool  # they tell what its prefix cache holds; else it is guessed
    engines: int  # that are listened to; 0: it does not publish, or nobody knows where
    blocks: int
    losses: int  # times that all was forgotten: messages were missed, or it started anew
    garbled: int  # messages that nobody could read


def kv_events(backend: Backend) -> KvEventsOverview | None:
    """Return how well a backend is followed; None where nobody asks."""
    told = backend.kv_events
    if told is None:
        return None
    return KvEventsOverview(
        known=told.known,
        engines=told.engines,
        blocks=told.blocks,
        losses=told.losses,
        garbled=told.garbled,
    )
