"""Events on disk: what was done to backends, and why, is known to the next gateway too.

    <state>/events.jsonl      one JSON object a line, the newest last
    <state>/events.1.jsonl    the lines before it

A line is appended when an event happens: a few an hour, and some a minute in the worst crash loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from gateway.core.events import Event, Events

log = logging.getLogger("gateway.supervisor")

FILE: Final = "events.jsonl"
_BEFORE: Final = "events.1.jsonl"
_MOST_BYTES: Final = 1024 * 1024  # of a file; some 4,000 events
_EVENT: Final = msgspec.json.Decoder(Event)


@dataclass(slots=True)
class EventLog:
    """Keeps events in a folder. One writer; what cannot be written is told once and stays in memory."""

    folder: Path
    _told: bool = False
    _began: bool = False

    def follow(self, events: Events) -> None:
        """Give what was kept to a list of events that is still empty, and keep what comes from now on."""
        for event in self._kept():
            events.recall(event)
        events.on_event.append(self._keep)

    def _kept(self) -> Iterator[Event]:
        """Go through the events on disk, the oldest first; lines that cannot be read are left out."""
        files = (self.folder / _BEFORE, self.folder / FILE)
        for line in chain.from_iterable(map(_lines, files)):
            try:
                yield _EVENT.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the last line of a gateway that was killed, or of a newer version

    def _keep(self, event: Event) -> None:
        path = self.folder / FILE
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # The gateway before may have been killed in the middle of a line.
                end = b"" if self._began else b"\n"
                os.write(handle, end + msgspec.json.encode(event) + b"\n")
                self._began = True
                full = os.fstat(handle).st_size >= _MOST_BYTES
            finally:
                os.close(handle)
            if full:
                path.replace(self.folder / _BEFORE)
        except OSError as error:
            if not self._told:
                log.warning(
                    "cannot write %s, so events end with this gateway: %s", path, error.strerror
                )
            self._told = True
        else:
            self._told = False


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []
