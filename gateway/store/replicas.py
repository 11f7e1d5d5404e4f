"""Which gateways share the store: each tells of itself once a second, and hears of the others."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.core.aio import Clock, periodic
from gateway.core.traffic import Queued
from gateway.store.group import LEADER
from gateway.store.shared import SharedStore, StoreUnavailable, read_told

BEAT_S: Final = 1.0
ALIVE_S: Final = 5.0  # heard of within this time, a replica lives
# The leader tells within a beat, the others hear it a beat later, follow it half a beat after that.
_SETTLED_S: Final = 3 * BEAT_S
_GATEWAYS_SETTLED_S: Final = 4 * BEAT_S  # other gateways follow it a whole beat after that
TOLD_S: Final = 60.0  # for so long a silent one is still told of


class Told(msgspec.Struct, frozen=True):
    """What a replica tells of itself. What another version does not tell has its default."""

    host: str = ""
    pid: int = 0
    version: str = ""
    config_hash: str = ""  # of what replicas should have alike
    leads: tuple[str, ...] = ()  # pools whose backends it restarts
    group: str = ""  # of workers; empty: it is alone
    worker: int = 0  # its number in the group
    in_charge: bool = True  # of what it launched: no other process has its place
    connections: int = 0  # of clients
    in_flight: dict[str, int] = {}  # requests that it carries, see `heal.emptied.carried_as`
    queued: dict[str, Queued] = {}  # what waits, by pool
    phases: dict[str, str] = {}  # of its backends, as it sees them
    tends: dict[str, tuple[str, str, str]] = {}  # backends that it works on: phase, reason, detail
    drains: tuple[str, ...] = ()  # the `heal.names` of those that it drains and stops
    carries: dict[str, int] = {}  # requests at each of its backends, by their `heal.names`


@dataclass(frozen=True, slots=True)
class Replica:
    """One gateway. `heard_at` is when it told this, by the local clock."""

    id: str
    told: Told
    heard_at: float


_FORMAT: Final = msgspec.json.Decoder(Told)


@dataclass(slots=True)
class Replicas:
    """The others, and this one (`id`). While the store does not answer, who was there last stays known."""

    store: SharedStore
    clock: Clock
    tell: Callable[[], Told]  # of this one
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    every: Sequence[Replica] = ()
    answered_at: float | None = None
    least: int = 1  # the workers of this one's group, heard of or not
    named: Callable[[str], str] = str  # what all gateways call a backend
    on_heard: list[Callable[[Sequence[Told]], None]] = field(default_factory=list)  # of these
    group: str = field(default="", init=False)  # as this one told it last
    _away: bool = field(default=False, init=False)  # the store, when it was told last
    _before: int = field(default=0, init=False)  # how many lived before it was away
    _back_at: float = field(default=-math.inf, init=False)  # when it answered again

    @property
    def alive(self) -> int:
        """How many lived when the store last answered; at least `least`, for a worker that died is started again.

        As many as before live until a store that was away has heard of all again.
        """
        at = self.answered_at
        if at is None:
            return self.least
        before = self._before if at - self._back_at <= ALIVE_S else 0
        heard = sum(at - each.heard_at <= ALIVE_S for each in self.every)
        return max(self.least, before, heard)

    def leader(self) -> Told | None:
        """Return what the leading worker of this one's group told; None while none is heard of.

        Another process may have its place that finishes its requests, or that is yet to take it.
        """
        leads = (each for each in self.fellows() if each.worker == LEADER and each.in_charge)
        return next(leads, None)

    def carried_elsewhere(self, backend_id: str, since: float) -> bool:
        """Whether another worker or gateway carries requests of a backend, or may still begin some.

        It stops sending to one that is worked on here once both have told and heard of each other.
        """
        name = self.named(backend_id)
        return any(
            each.heard_at < since + _SETTLED_S or bool(each.told.in_flight.get(backend_id))
            for each in self._of_group()
        ) or any(
            each.heard_at < since + _GATEWAYS_SETTLED_S or bool(each.told.carries[name])
            for each in self._of_other_gateways()
            if name in each.told.carries
        )

    def at_other_gateways(self, backend_id: str) -> int:
        """Return how many requests other gateways told that they carry at a backend."""
        name = self.named(backend_id)
        return sum(each.told.carries.get(name, 0) for each in self._of_other_gateways())

    def fellows(self) -> list[Told]:
        """Return what the other workers of this one's group told last."""
        return [each.told for each in self._of_group()]

    def drained_elsewhere(self) -> frozenset[str]:
        """Return the names of the backends that other replicas drain and stop.

        A replica that has lost its lease still ends the restart that it began.
        """
        return frozenset(name for each in self._others() for name in each.told.drains)

    def _others(self) -> list[Replica]:
        """Return the others that lived when the store last answered."""
        at = self.answered_at
        if at is None:
            return []
        return [each for each in self.every if each.id != self.id and at - each.heard_at <= ALIVE_S]

    def _of_group(self) -> list[Replica]:
        group = self.group
        return [each for each in self._others() if each.told.group == group] if group else []

    def _of_other_gateways(self) -> list[Replica]:
        group = self.group
        return [each for each in self._others() if not group or each.told.group != group]

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await periodic(self.turn, every_s=BEAT_S, name="replicas")

    async def turn(self) -> None:
        """Tell of this one, and hear of the others."""
        told = self.tell()
        self.group = told.group
        try:
            found = await self.store.beat(self.id, msgspec.json.encode(told).decode(), TOLD_S)
        except StoreUnavailable:
            self._away = True
            return
        now = self.clock.now()
        if self._away:
            self._away, self._before, self._back_at = False, self.alive, now
        self.answered_at = now
        self.every = [
            Replica(each, read_told(_FORMAT, text, Told()), now - age_s)
            for each, (text, age_s) in sorted(found.items())
        ]
        fellows = self.fellows()
        for heard in self.on_heard:
            heard(fellows)

    async def leave(self) -> None:
        """Tell that this one is gone."""
        with contextlib.suppress(StoreUnavailable):  # it is soon missed
            await self.store.beat(self.id, "", TOLD_S)


def this_process(version: str, config_hash: str, leads: Sequence[str], connections: int) -> Told:
    """Return what this gateway tells of itself, but for its backends."""
    host, pid = socket.gethostname(), os.getpid()
    return Told(host, pid, version, config_hash, tuple(leads), connections=connections)
