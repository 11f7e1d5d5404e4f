"""Events on disk: what was done to backends, and why, is known to the next gateway too (`<state>/events.jsonl`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from gateway.core.events import Event, Events
from gateway.observe.journal import Journal

MOST_BYTES: Final = 1024 * 1024  # some 4,000 events
_EVENT: Final = msgspec.json.Decoder(Event)


def keep_events(folder: Path, events: Events, most_bytes: int = MOST_BYTES) -> None:
    """Give what was kept in a folder to a list of events that is still empty, and keep what comes from now on.

    What cannot be written stays in memory. `most_bytes` is of each of the two files.
    """
    journal = Journal(folder, "events", most_bytes)
    for event in journal.read(_EVENT):
        events.recall(event)

    def keep(event: Event) -> None:
        journal.append(msgspec.json.encode(event))

    events.on_event.append(keep)
