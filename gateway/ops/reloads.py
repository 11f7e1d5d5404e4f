"""What was put in force, when and by whom: the history of the configuration, and who can reload it.

<state>/config.jsonl, config.1.jsonl    one JSON object a line, the newest last
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gateway.config.models import Config
from gateway.core.aio import Clock
from gateway.launch.proc import Process, tell
from gateway.observe.journal import Journal

_KEPT: Final = 200
_MOST_BYTES: Final = 1024 * 1024  # of each of the two files


class Reload(msgspec.Struct, frozen=True):
    """One try to put a configuration in force. `at` is seconds since the epoch; `hash` is of what is then in force."""

    number: int
    at: float
    by: str
    reason: str
    done: bool
    hash: str
    effect: tuple[str, ...]
    findings: tuple[str, ...]


class Reloading(Protocol):
    """Who can read the configuration again."""

    history: History
    started: Config  # the configuration that the process began with

    @property
    def keys_trouble(self) -> str:
        """Why the keys file is not in force, but the keys before it; empty: it is."""

    async def reload(self, by: str, reason: str) -> Reload:
        """Read it, and put it in force if it is valid; return what came of it.

        Cancel: what was in force stays.
        """


_RELOAD: Final = msgspec.json.Decoder(Reload)


class History:
    """The newest reloads. One owner; `saves`: it writes the files."""

    def __init__(self, folder: Path, clock: Clock, *, saves: bool = True) -> None:
        self._journal = Journal(folder, "config", _MOST_BYTES)
        self._saves = saves
        self._clock = clock
        self._kept: deque[Reload] = deque(self._journal.read(_RELOAD), maxlen=_KEPT)

    def note(
        self,
        by: str,
        digest: str,
        *,
        reason: str = "",
        effect: Sequence[str] = (),
        findings: Sequence[str] = (),
    ) -> Reload:
        """Keep a try; with findings it was refused."""
        number = self._kept[-1].number + 1 if self._kept else 1
        made = Reload(
            number, self._clock.wall(), by, reason, not findings, digest, (*effect,), (*findings,)
        )
        self._kept.append(made)
        if self._saves:
            self._journal.append(msgspec.json.encode(made))
        return made

    def newest(self) -> Iterator[Reload]:
        """Go through what is kept, the newest first."""
        return reversed(self._kept)


def left_to(heir: Process, by: str, reason: str, clock: Clock, digest: str) -> Reload:
    """Have the process that took over read its file in place of this one; what comes of it is in its own history."""
    tell(heir, signal.SIGHUP)
    told = f"Process {heir.pid} took over, and reads its file now. Its log says what comes of that."
    return Reload(0, clock.wall(), by, reason, False, digest, (), (told,))
