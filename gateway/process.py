"""One running gateway: everything it is made of, and what replaces its settings under way: keys, reload."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.access.filestore import FileKeys
from gateway.access.keys import KeyRing
from gateway.access.keyscripts import HINTS
from gateway.access.keystore import KeyStore
from gateway.access.lastused import LastUsed
from gateway.access.rereading import Rereading
from gateway.access.sharedkeys import SharedKeys
from gateway.adapters.keepers import Adapters
from gateway.config.identity import keep_names, names_of
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import diff, digest, opened
from gateway.core.aio import Clock, periodic
from gateway.core.errors import ConfigError
from gateway.heal.givennames import save_names
from gateway.heal.supervisor import Supervisor
from gateway.ingress.handler import Handler
from gateway.ingress.routes import Readiness
from gateway.ingress.server import Ingress
from gateway.ingress.settings import Settings, change_ingresses, settings_for
from gateway.ingress.tracing import Tracing
from gateway.launch import proc
from gateway.launch.disk import DiskSpace
from gateway.launch.gpuload import GpuWatch
from gateway.observe.ended import EndedRequests
from gateway.observe.ledger import Ledger
from gateway.observe.metrics import Metrics
from gateway.observe.outlet import Outlet
from gateway.observe.readings import carried_by
from gateway.observe.series import Series
from gateway.ops.reloads import History, Reload, left_to
from gateway.ops.upgrading import Upgrades
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollouts
from gateway.sharing import count_on
from gateway.store.group import Group
from gateway.store.replicas import Replicas
from gateway.store.shared import SharedStore
from gateway.upstream.client import Client
from gateway.usage.accounts import Accounts
from gateway.watch.discovery import Watchers
from gateway.watch.engine_events import EngineEvents
from gateway.watch.fetch import Pages

if TYPE_CHECKING:  # it needs a library that is optional
    from gateway.access.tokens import Tokens

log = logging.getLogger("gateway.app")

_KEYS_S: Final = 0.8  # between two looks at the keys file: changes hold within a second


@dataclass(slots=True)
class Process:
    """Everything one gateway process is made of. Build with `build`, run with `run`."""

    path: Path
    started: Config  # the configuration it began with
    loaded: Loaded
    clock: Clock
    table: PoolTable
    client: Client
    metrics: Metrics
    outlet: Outlet
    ledger: Ledger
    ingress: Ingress
    admin: Ingress
    handler: Handler
    watchers: Watchers
    supervisor: Supervisor
    rollouts: Rollouts
    adapters: Adapters
    engine_events: EngineEvents
    store: SharedStore
    replicas: Replicas
    shared_keys: SharedKeys | None
    accounts: Accounts
    gpus: GpuWatch
    group: Group | None = None  # of workers, that this one is in
    tokens: Tokens | None = None  # of an identity provider
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    announces: bool = True  # that it stops, before connections are refused
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    hangup: asyncio.Event = field(default_factory=asyncio.Event)  # a reload is asked for
    succession: asyncio.Lock = field(default_factory=asyncio.Lock)  # no reload during an upgrade
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while settings are replaced
    upgrades: Upgrades = field(default_factory=Upgrades)
    succeeded: asyncio.Event = field(default_factory=asyncio.Event)  # another process took over
    heir: proc.Process | None = None  # that process, once it serves
    finishing: list[tuple[int, int]] = field(default_factory=list)  # before it: pid, start
    history: History = field(init=False)
    rereading: Rereading = field(init=False)
    public_port: int = 0
    admin_port: int = 0
    last_used: LastUsed = field(init=False)
    series: Series = field(init=False)
    disk: DiskSpace = field(init=False)
    ended: EndedRequests = field(init=False)

    def __post_init__(self) -> None:
        self.rereading = Rereading(self.clock.now)
        self.last_used = LastUsed(lambda: self.key_store, self.clock.wall)
        self.series = Series(self.metrics, self.clock)
        self.disk = DiskSpace(self.started.state)
        self.ended = EndedRequests(self.ledger.post)
        self.handler.tracing = Tracing.of(self.started.traces, self.ledger, self.clock)
        # The last one lets go what is large in a record.
        self.ledger.on_posted += [self.last_used.posted, self.series.posted, self.ended.posted]
        if self.shared_keys is not None:
            self.shared_keys.on_change.append(partial(take_shared_keys, self))
        self.table.carried_elsewhere = self.replicas.carried_elsewhere
        self.history = History(self.started.state, self.clock, saves=self.leads)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.handler.settings.config

    async def reload(self, by: str, reason: str) -> Reload:
        """See `ops.reloads.Reloading`."""
        done = await reload(self, by, reason)
        if self.group is not None:
            self.group.reload_others()
        return done

    @property
    def keys_trouble(self) -> str:
        """Why the keys file is not in force, but the keys before it; empty: it is."""
        return self.rereading.trouble

    @property
    def leads(self) -> bool:
        """Whether it heals, places adapters and serves operators; of several workers, one does."""
        return self.group is None or self.group.place.leads

    def carried(self, backend_id: str) -> tuple[float | None, int]:
        """Return when the oldest request came that a backend carries here, if any; and how many others have there.

        Others are the other workers, and other gateways on one Redis.
        """
        records = (down.record for down in self.ingress.live if down.record is not None)
        came = (each.received_at for each in records if each.backend_id == backend_id)
        workers, gateways = self.replicas.fellows(), self.replicas.at_other_gateways(backend_id)
        return min(came, default=None), carried_by(workers)[backend_id] + gateways

    def note_start(self) -> None:
        """Note the configuration that it begins with."""
        self.history.note("start", digest(self.config))
        self.save_names()

    def save_names(self) -> None:
        """Keep the names of backends that the file does not name."""
        if self.leads:
            save_names(self.started.state, names_of(self.loaded))

    def slow_clients(self) -> dict[str, float]:
        """Return for how many seconds clients have not read what is ready for them, the longest of each key."""
        now, found = asyncio.get_running_loop().time(), dict[str, float]()
        for down in self.ingress.live:
            relay, record = down.relay, down.record
            if relay is None or record is None or relay.blocked_since is None:
                continue
            key = "" if record.caller is None else record.caller.key_id
            found[key] = max(found.get(key, 0.0), now - relay.blocked_since)
        return found

    @property
    def key_store(self) -> KeyStore | None:
        """Where the keys are kept; None without keys."""
        config = self.config
        if config.keys is None:
            return None
        if self.shared_keys is not None:
            return self.shared_keys.store
        return FileKeys(config.keys.file, lambda: self.config.tiers, self.clock.wall)

    def readiness(self) -> Readiness:
        """Ready when not draining and any backend serves (a fleet that is all down must not take traffic)."""
        serving, total = self.table.serving()
        draining = self.handler.draining or self.ingress.leaving
        checks = [
            ("accepting", not draining, "draining" if draining else "ok"),
            ("backends", serving > 0, f"{serving} of {total} serving"),
        ]
        if self.shared_keys is not None:
            known = self.handler.settings.keys.known
            checks.append(("keys", known, "ok" if known else "the shared store does not answer"))
        return Readiness(ready=all(passed for _, passed, _ in checks), checks=tuple(checks))


async def watch_keys(process: Process) -> None:
    """Take over keys whenever they change: a new key works, a revoked one ends, within a second."""
    shared, redis = process.shared_keys, process.started.redis
    if shared is None or redis is None:
        await _watch_file(process)
        return
    from gateway.store.hints import follow_hints

    async with asyncio.TaskGroup() as group:
        group.create_task(shared.run(), name="shared keys")
        hints = follow_hints(redis.get_secret_value(), HINTS, shared.woken.set)
        group.create_task(hints, name="hints of keys")


def take_shared_keys(process: Process) -> None:
    """Have requests from now on know the shared keys as they are now."""
    config, shared = process.config, process.shared_keys
    if shared is not None and config.keys is not None:
        _take_keys(process, shared.ring(config.tiers))


def _take_keys(process: Process, keys: KeyRing) -> None:
    before = process.handler.settings
    process.handler.settings = replace(before, keys=keys)
    pools, priorities = before.config.pools, keys.priorities(process.clock.wall())
    process.handler.gate.configure(pools, priorities)
    count_on(process.handler, process.accounts, before)


async def _watch_file(process: Process) -> None:
    async def look() -> None:
        async with process.changing:
            keys = await process.rereading.look(process.handler.settings.keys)
            if keys is not None:
                _take_keys(process, keys)

    await periodic(look, every_s=_KEYS_S, name="keys")


async def watch_reloads(process: Process) -> None:
    """Reload when asked to; asking again meanwhile leads to one more."""

    async def turn() -> None:
        await process.hangup.wait()
        process.hangup.clear()
        await reload(process)

    await periodic(turn, every_s=0.0, name="reloads")


async def reload(process: Process, by: str = "SIGHUP", reason: str = "") -> Reload:
    """Read the configuration again and swap it in; return what came of it.

    Streams are untouched, and go on while a thread reads. A file that is not valid keeps the old
    configuration and is logged with every finding. Settings that need a restart are named and keep
    their old value's effect. Where another process took over, it is told to. Cancel: the old configuration stays.
    """
    async with process.succession, process.changing:
        if process.heir is not None:
            return left_to(process.heir, by, reason, process.clock, digest(process.config))
        try:
            before, shared = process.handler.settings, process.shared_keys
            ring = None if shared is None else shared.ring(before.config.tiers)
            loaded, settings = await asyncio.to_thread(_read, process, before, ring)
        except ConfigError as error:
            process.metrics.reloaded(ok=False)
            for finding in error.findings:
                log.error(finding, extra={"event": "config_invalid"})
            log.error(
                "reload refused, the old configuration stays in force",
                extra={"event": "reload_failed"},
            )
            in_force = digest(process.config)
            return process.history.note(by, in_force, reason=reason, findings=error.findings)
        effect = _swap(process, loaded, settings)
        return process.history.note(by, digest(loaded.config), reason=reason, effect=effect)


def _read(process: Process, before: Settings, shared: KeyRing | None) -> tuple[Loaded, Settings]:
    loaded = load_config(process.path)
    if found := opened(loaded, process.config, process.started, process.path):
        raise ConfigError([str(each) for each in found])
    loaded = keep_names(loaded, names_of(process.loaded))
    return loaded, settings_for(loaded.config, Pages, before, shared, process.tokens)


def _swap(process: Process, loaded: Loaded, settings: Settings) -> tuple[str, ...]:
    """Put a configuration in the place of the one in force; return what changes, in sentences."""
    for warning in loaded.warnings:
        log.warning(str(warning), extra={"event": "config_warning"})
    effect = diff(process.config, loaded.config, started=process.started)
    process.loaded = loaded
    process.save_names()
    before, process.handler.settings = process.handler.settings, settings
    before.counters.close()
    take_shared_keys(process)  # a key may have been revoked while the file was read
    count_on(process.handler, process.accounts, before)
    change_ingresses(loaded.config, process.ingress, process.admin)
    process.table.apply(loaded.config.pools, loaded.config.health)
    keys = process.handler.settings.keys
    process.handler.gate.configure(loaded.config.pools, keys.priorities(process.clock.wall()))
    process.watchers.health = loaded.config.health
    process.supervisor.apply(loaded.config)
    process.rollouts.apply(loaded.config.pools)
    process.engine_events.pools = loaded.config.pools
    process.adapters.apply(loaded.config.pools)
    process.metrics.configured(digest(loaded.config), settings.shared_digest)
    process.client.keep_only(process.table.ids())
    process.metrics.reloaded(ok=True)
    log.info("configuration reloaded", extra={"event": "reloaded", "effect": effect})
    return effect
