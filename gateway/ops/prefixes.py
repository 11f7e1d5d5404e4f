"""How well a backend's prefix cache is known, for the overview."""

from __future__ import annotations

from typing_extensions import TypedDict

from gateway.pools.table import Backend


class KvEventsOverview(TypedDict):
    """How well the gateway follows a backend's KV events."""

    known: bool  # the events tell what is cached; else it is guessed
    # Those that the gateway is subscribed to; 0: none publishes, or its address is not known.
    engines: int
    blocks: int  # cached, by the events
    losses: int  # times that the picture was dropped: messages were missed, or the engine restarted
    garbled: int  # messages that could not be decoded


def kv_events(backend: Backend) -> KvEventsOverview | None:
    """Return how well a backend is followed; None without `prefix: precise`."""
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
