"""What waits, who finds it a backend, and which backend is worth the wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.admission.patience import UNKNOWN, Allowed
from gateway.core.endpoints import NO_ENGINE
from gateway.core.exclusion import Choice
from gateway.core.types import SERVING, Ask, Exclusion, Need, Phase, Slot
from gateway.pools.table import Backend, PoolTable

_SOON_S: Final = 1.0

Announce = Callable[[int, float | None], None]  # position from 1, and seconds if they are known


class Finder(Protocol):
    """Who chooses a backend; `routing.choice.Chooser`."""

    def find(
        self,
        ask: Ask,
        now: float,
        barred: AbstractSet[str] = ...,
        before: dict[str, float] | None = None,
    ) -> Backend | None:
        """Return the best backend that may take the request now and is not barred, if any.

        A request that waits for one gets `ask.awaits`, and adds what it will take of it to `before`.
        """

    def explain(self, ask: Ask, now: float) -> Choice:
        """Return what each backend is worth to the request, and why others cannot take it."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One request that waits; `turn` is resolved with its slot, or with its refusal.

    Times are monotonic seconds. The fields at the end are the queue's.
    """

    ask: Ask
    turn: asyncio.Future[Slot]
    came_at: float
    deadline: float
    body_bytes: int = 0
    announce: Announce | None = None
    allowed: Allowed = UNKNOWN  # how late it may be
    impatient: bool = False  # its client's time-out ends its wait, not a setting
    hurried: bool = False  # what the pool allows ends its wait, not a setting nor its client
    announced_at: float = field(init=False)
    ahead_tokens: int = 0  # when it was last announced
    moved_at: float = 0.0  # when that was found to be less than before
    tenant: str = field(init=False)
    priority: int = field(init=False)  # the higher goes first
    cost_tokens: int = field(init=False)  # what it will take of a backend; 1 at least
    returned: bool = field(init=False)  # as it was told, or it had a place before
    kind: tuple[object, ...] = field(init=False)  # which backends could take it, but for its size
    alike: tuple[object, ...] = field(init=False)  # the same: they differ only in size and prompt
    awaits: str | None = field(default=None, init=False)  # the backend, as of the last look at it
    passes: int = field(default=0, init=False)  # by later ones, which went where it could have gone
    number: int = field(default=-1, init=False)  # order of arrival; -1: it was not queued yet
    order: tuple[bool, int] = field(init=False)  # of its tenant: whether it is fresh, its number

    def __post_init__(self) -> None:
        ask, caller = self.ask, self.ask.caller
        self.announced_at = self.came_at
        self.tenant, self.priority = caller.tenant, caller.priority
        self.returned = ask.returned or ask.let_in
        self.cost_tokens = max(1, ask.need.tokens)
        self.order = not self.returned, sys.maxsize
        self.kind = (ask.route.adapter, ask.call.endpoint, *sorted(ask.tried.items()))
        # Room judges streams, other replies and batches in different ways.
        judged = ask.need.streams, ask.need.sequences == 1
        self.alike = self.kind, self.tenant, self.priority, *judged

    def hurry(self, deadline: float) -> bool:
        """Bring the deadline forward; returns whether it was later."""
        if deadline >= self.deadline:
            return False
        self.deadline, self.hurried = deadline, True
        return True


def ready_at(backend: Backend) -> float | None:
    """Return when a backend that starts is expected to serve; None: it serves, is held, or nobody knows."""
    health = backend.health
    if health.tended is None or health.held is not None:
        return None
    return health.tended.ready_at


def starts_in_s(backends: Sequence[Backend], ask: Ask, now: float) -> float | None:
    """Estimate in how many seconds the first backend that starts will serve; None when nobody knows.

    At least one second: a start that takes longer than the one before may be over at any moment.
    """
    times = (ready_at(each) for each in backends if each.id not in ask.tried)
    first_at = min((at for at in times if at is not None), default=None)
    return None if first_at is None else max(first_at - now, _SOON_S)


def coming(backend: Backend) -> bool:
    """Whether a backend that does not serve is expected to, soon.

    It is, if it starts (for as long as its last start took), is being restarted, was only just added, or has
    answered before. One that never answered, and that nobody here starts, is not: its address may be wrong.
    """
    health = backend.health
    if ready_at(backend) is not None:
        return True
    if backend.phase is Phase.STARTING:
        return health.tended is not None or not health.probe_failures
    if backend.phase is Phase.DRAINING:
        return health.tended is not None and health.held is None
    return backend.phase is Phase.DOWN and health.tended is None and health.probe_passes > 0


def awaits(backends: Sequence[Backend], ask: Ask) -> bool:
    """Whether no backend serves a pool, and one that will is worth waiting for."""
    return not any(each.phase in SERVING for each in backends) and any(
        coming(each) and each.id not in ask.tried for each in backends
    )


def awaits_load(backends: Sequence[Backend], ask: Ask) -> bool:
    """Whether a request waits until an adapter is loaded: its own, or another one where its own is.

    An engine stands still while it loads an adapter. That ends soon, and is no overload.
    """
    adapter = ask.route.adapter
    return adapter is not None and not any(
        adapter in each.models
        and adapter not in each.lacking
        and Exclusion.ADAPTER_LOADING not in each.lacking.values()
        for each in backends
        if each.phase in SERVING
    )


def all_start(backends: Sequence[Backend], now: float) -> bool:
    """Whether no backend serves but those that start slowly: what they cannot take yet is no overload."""
    return all(each.limit.starts(now) for each in backends if each.phase in SERVING)


def place_at(table: PoolTable, backend_id: str, ask: Ask, now: float) -> Slot:
    """Take a place at a backend; what no engine works on takes none."""
    if ask.call.endpoint in NO_ENGINE:
        return table.visit(backend_id, now)
    return table.take(backend_id, now, ask.need, ask.caller.tenant, ask.prefix, ask.route.adapter)


def covers(need: Need, other: Need) -> bool:
    """Whether a need is at least as large as another, by its prompt and in all."""
    return need.prompt_tokens >= other.prompt_tokens and need.tokens >= other.tokens


def needs_as_much(backends: Sequence[Backend], ask: Ask, least: Need) -> bool:
    """Whether a request surely finds no room, because one like it that needs `least` found none.

    False where a backend has some of its prompt cached: that part need not be read, so it may fit.
    """
    if ask.awaits is not None or not covers(ask.need, least):
        return False
    prefix = ask.prefix
    return prefix is None or not any(each.cached_tokens(prefix) for each in backends)


def held_tokens(backends: Sequence[Backend]) -> int:
    """Return what all requests in flight are expected to need."""
    return sum(each.room.shares.tokens for each in backends)


def left_alone(
    table: PoolTable, ask: Ask, claimed: Mapping[str, Sequence[Waiting]]
) -> AbstractSet[str]:
    """Return which of the claimed backends a request must leave alone.

    A tenant that does not hold much of one may pass, if all who claim it do: it takes the room that is kept
    for such tenants.
    """
    found = set()
    for backend_id, claimers in claimed.items():
        backend = table.get(backend_id)
        much = backend.room.shares.holds_much if backend is not None else None
        if (
            much is None
            or much(ask.caller.tenant)
            or not all(much(each.tenant) for each in claimers)
        ):
            found.add(backend_id)
    return found
