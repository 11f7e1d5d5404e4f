"""A pool of engines that the gateway launches, and what happens to them: which of their lives ended by a crash.

Everything else that happens to them is no reason for a restart: they stand still for seconds, answer with
errors, or show odd metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tests.abuse.support import head
from tests.faults import ledgers
from tests.faults.engines import Strike
from tests.faults.ledgers import Life

TENDED: Final = "tended"  # the model, its pool, and the tenant who asks it
CRASH: Final = "crash"
STOP: Final = "stop"  # SIGSTOP, and SIGCONT later
HARMLESS: Final = (
    STOP, "frozen", "health_500", "http_500@5", "reset_after:2@3", "slow_metrics", "garbage_metrics", "no_metrics",
)  # fmt: skip
_NAMES: Final = ("t1", "t2")
_EVERY_S: Final = (3.0, 7.0)
_LONGEST_S: Final = 3.0
_LAST_S: Final = 20.0  # before the end: the last crash is to be healed by then


def planned(seconds: float, chance: random.Random) -> list[Strike]:
    """Return what happens when: each third time a crash."""
    strikes: list[Strike] = []
    at_s = 1.0
    while at_s < seconds - _LAST_S:
        crash = len(strikes) % 3 == 0
        fault = CRASH if crash else chance.choice(HARMLESS)
        for_s = 0.0 if crash else chance.uniform(0.5, _LONGEST_S)
        strikes.append(Strike(at_s, chance.randrange(len(_NAMES)), fault, for_s))
        at_s += for_s + chance.uniform(*_EVERY_S)
    return strikes


class Tended:
    """These engines, by the number of a strike. Made by `tended`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.broken: set[str] = set()  # incarnations
        self._folder = folder
        self._sockets = {name: folder / f"{name}.sock" for name in _NAMES}

    @property
    def pool(self) -> dict[str, Any]:
        """Its settings."""
        command = [sys.executable, "-m", "tests.faults.launched"]
        backends = [
            {"name": name, "launch": {"command": [*command, name, TENDED, str(self._folder)], "socket": str(path)}}
            for name, path in self._sockets.items()
        ]  # fmt: skip
        # They crash more often than real ones: none is to be suspended for that.
        often = {"backoff": "1s", "max_backoff": "1s", "max_restarts": 10_000}
        return {"backends": backends, "supervision": often}

    @property
    def lives(self) -> list[Life]:
        """All of their processes so far."""
        return ledgers.read(self._folder / "lives.jsonl", Life)

    async def break_them(self, strikes: Sequence[Strike]) -> None:
        """Carry out what is planned, one after the other."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for each in strikes:
            await asyncio.sleep(max(0.0, begun + each.at_s - loop.time()))
            life = [life for life in self.lives if life.engine == _NAMES[each.engine]][-1]
            if each.fault == CRASH:
                self.broken.add(life.incarnation)
                self._signal(life, signal.SIGUSR1)
            elif each.fault == STOP:
                self._signal(life, signal.SIGSTOP)
                await asyncio.sleep(each.for_s)
                self._signal(life, signal.SIGCONT)
            else:
                await self._fault(each, "POST", json.dumps({"fault": each.fault}).encode())
                await asyncio.sleep(each.for_s)
                await self._fault(each, "DELETE")

    def kill(self) -> None:
        """End what runs of them, should the gateway have left anything."""
        with contextlib.suppress(FileNotFoundError):
            for life in self.lives:
                self._signal(life, signal.SIGKILL)

    def _signal(self, life: Life, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{life.pid}/cmdline").read_bytes()
            if str(self._folder).encode() in words:  # a process id may be another's by now
                os.kill(life.pid, number)

    async def _fault(self, strike: Strike, method: str, body: bytes = b"") -> None:
        """Tell the simulator; one that is being restarted has no fault."""
        with contextlib.suppress(OSError):
            path = self._sockets[_NAMES[strike.engine]]
            reader, writer = await asyncio.open_unix_connection(path)
            told = head(method, "/sim/faults", "connection: close", length=len(body))
            writer.write(told + body)
            await reader.read()
            writer.transport.abort()


@contextlib.contextmanager
def tended(folder: pathlib.Path) -> Iterator[Tended]:
    """Run nothing yet, and leave nothing behind."""
    made = Tended(folder)
    try:
        yield made
    finally:
        made.kill()
