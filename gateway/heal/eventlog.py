"""Events on disk: what was done to backends, and why, is known to the next gateway too (`<state>/events.jsonl`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gateway.core.events import Event, Events
from gateway.observe.journal import Journal

MOST_BYTES: Final = 1024 * 1024  # some 4,000 events
_EVENT: Final = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class EventLog:
    """Keeps events in a folder. What cannot be written stays in memory."""

    folder: Path
    most_bytes: int = MOST_BYTES  # of each of the two files

    def follow(self, events: Events) -> None:
        """Give what was kept to a list of events that is still empty, and keep what comes from now on."""
        journal = Journal(self.folder, "events", self.most_bytes)
        for event in journal.read(_EVENT):
            events.recall(event)

        def keep(event: Event) -> None:
            journal.append(msgspec.json.encode(event))

        events.on_event.append(keep)
