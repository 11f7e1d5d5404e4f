"""What the admin API shows and changes: the live objects, asked each time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.access.keystore import KeyStore
from gateway.adapters.keepers import Adapters
from gateway.admin.audit import Audit
from gateway.config.load import Loaded
from gateway.core.aio import Clock
from gateway.core.gpu import GpuLoad
from gateway.heal.orders import Orders
from gateway.ingress.early import Early
from gateway.ingress.routes import Readiness
from gateway.launch.disk import DiskSpace
from gateway.observe.metrics import Metrics
from gateway.observe.series import Series
from gateway.ops.callers import Callers
from gateway.ops.dryrun import Deciding
from gateway.ops.explain import Book
from gateway.ops.moment import Moment
from gateway.ops.past import Past
from gateway.ops.problems import Known
from gateway.ops.reloads import Reloading
from gateway.ops.requests import Requests
from gateway.ops.upgrading import Upgrades
from gateway.pools.quarantine import Quarantine
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollout
from gateway.store.replicas import Replicas
from gateway.usage.accounts import Accounts
from gateway.usage.lists import UsageLists


async def nobody(what: str, *args: Any) -> list[Any]:
    """Return no answers: there are no other workers."""
    return []


@dataclass(slots=True, kw_only=True)
class Desk:
    """The objects of one gateway. `loaded` is asked each time, so that a reload shows."""

    table: PoolTable
    metrics: Metrics
    clock: Clock
    loaded: Callable[[], Loaded]
    ready: Callable[[], Readiness]
    deciding: Deciding
    early: Early
    requests: Requests
    trial: Callable[[str], Rollout | None]
    replicas: Replicas
    orders: Orders
    adapters: Adapters
    quarantine: Quarantine
    upgrades: Upgrades
    reloading: Reloading
    audit: Audit
    accounts: Accounts
    series: Series
    disk: DiskSpace
    gpus: Callable[[], Mapping[str, Sequence[GpuLoad]]] = dict  # of launched backends
    slow_clients: Callable[[], Mapping[str, float]] = dict  # seconds without reading, by key
    keys: Callable[[], KeyStore | None] = lambda: None
    file: Path | None = None
    # When it was written last, if that is not what was in force as it was looked at.
    file_changed: tuple[Loaded | None, float | None] = (None, None)
    fellows: Callable[..., Awaitable[list[Any]]] = nobody  # asks the other workers a question
    workers: int = 1  # that it answers for
    callers_elsewhere: Sequence[Callers] = ()  # what the other workers saw last
    all_were_ready: bool = False  # at one time
    problems: Known = field(default_factory=Known)  # since when each is known
    past: Past = field(default_factory=Past)  # what was told in the last hour
    started_at: float = field(init=False)
    usage: UsageLists = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock.now()
        self.usage = UsageLists(self.accounts)

    def moment(self) -> Moment:
        """Return this instant on both clocks."""
        return Moment(self.clock.now(), self.clock.wall())

    def book(self) -> Book:
        """Return the configuration in force, to tell settings from."""
        return Book(self.loaded(), self.file)

    def draining(self) -> bool:
        """Whether new requests are refused because the gateway ends."""
        checks = self.ready().checks
        return any(name == "accepting" and not passed for name, passed, _ in checks)
