"""Operators are told of a request that is in quarantine from now on."""

from __future__ import annotations

from gateway.core.aio import Clock
from gateway.core.events import EventKind, Events
from gateway.pools.quarantine import Suspect


def quarantined(events: Events, clock: Clock, suspect: Suspect) -> None:
    """Tell operators of a request that was present as two backends died."""
    died = " and ".join(suspect.died)
    told = (
        f"a request of {suspect.of.body_bytes} bytes was being worked on as {died} died; it is refused for 10 min"
        f" (`vllm-gateway quarantine lift {suspect.of.id}`)"
    )
    events.note(clock, EventKind.QUARANTINED, suspect.died[-1], "poison", told)
