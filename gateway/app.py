"""The composition root: a configuration in, wired objects and one TaskGroup out.

    signals --> Process --> public server (uvicorn + GatewayProtocol) --> Handler --> Client --> backends
                       |--> admin server (uvicorn + Starlette)
                       |--> Watchers (health, metrics, models of every backend)
                       |--> Supervisor (starts and restarts backends)
                       `--> ticks: upstream deadlines, head deadlines, access log, loop lag

SIGHUP reloads, SIGTERM and SIGINT drain, a second one stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from gateway.access.failures import FailedKeys
from gateway.access.keys import KeyRing
from gateway.admission.gate import Gate
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import diff, digest
from gateway.core.aio import Clock, SystemClock, periodic
from gateway.core.errors import ConfigError
from gateway.heal.orders import Orders
from gateway.heal.supervisor import Supervisor
from gateway.ingress import descriptors
from gateway.ingress.drain import drain, end_late
from gateway.ingress.early import Early
from gateway.ingress.handler import Handler
from gateway.ingress.listener import Server, bind_both, port_of, server_for
from gateway.ingress.reader import ClientLimits
from gateway.ingress.routes import Readiness, public_app
from gateway.ingress.server import Ingress
from gateway.ingress.settings import Settings, admin_ingress, connections_for, settings_for
from gateway.observe.ledger import Ledger
from gateway.observe.log import AccessLog, set_up_logging
from gateway.observe.metrics import Metrics, Readings
from gateway.observe.outlet import Outlet
from gateway.ops.api import admin_app
from gateway.ops.dryrun import Deciding
from gateway.pools.store import MemoryStore, SharedStore
from gateway.pools.table import PoolTable
from gateway.routing.catalog import Catalogs
from gateway.routing.choice import Chooser
from gateway.upstream.client import Client
from gateway.upstream.relay import TICK_S
from gateway.watch.adapter_loader import AdapterLoader
from gateway.watch.discovery import Watchers
from gateway.watch.fetch import Pages

log = logging.getLogger("gateway.app")
Supervise = Callable[[PoolTable, Clock, SharedStore, Config], Supervisor]

# Young collections are rare: the request path makes no reference cycles, so there is little to find.
_GC_THRESHOLDS: Final = (50_000, 20, 100)
_STOOD_STILL_S: Final = 1.0  # a loop that was this late was stopped, or starved
_KEYS_S: Final = 2.0  # between two looks at the keys file, a stat each


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
    adapter_loader: AdapterLoader
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    hangup: asyncio.Event = field(default_factory=asyncio.Event)  # a reload is asked for
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while settings are replaced
    public_port: int = 0
    admin_port: int = 0

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.handler.settings.config

    def oldest_at(self, backend_id: str) -> float | None:
        """Return when the oldest request came that a backend carries; None when it carries none."""
        return min(
            (
                down.record.received_at
                for down in self.ingress.live
                if down.record is not None and down.record.backend_id == backend_id
            ),
            default=None,
        )

    def readiness(self) -> Readiness:
        """Ready when not draining and any backend serves (a fleet that is all down must not take traffic)."""
        serving, total = self.table.serving()
        return Readiness(
            ready=not self.handler.draining and serving > 0,
            checks=(
                (
                    "accepting",
                    not self.handler.draining,
                    "draining" if self.handler.draining else "ok",
                ),
                ("backends", serving > 0, f"{serving} of {total} serving"),
            ),
        )


def build(
    loaded: Loaded,
    path: Path,
    outlet: Outlet,
    supervise: Supervise = Supervisor,
    clock: Clock | None = None,
) -> Process:
    """Wire one process; `clock` is the machine's unless said. Nothing is opened yet but the key file.

    Raises:
        ConfigError: the keys file is unusable.
    """
    config = loaded.config
    clock = clock or SystemClock()
    table = PoolTable(clock)
    client = Client(
        connect_s=config.timeouts.connect,
        keep_alive_s=config.timeouts.upstream_keep_alive,
        receive_bytes=config.limits.buffer_bytes,
    )
    metrics = Metrics(
        Readings(
            backends=lambda: (*table, *table.leaving()),
            connections=lambda: {
                "client": len(ingress.connections),
                "backend": sum(client.open_connections()),
            },
            shed=lambda: ingress.connections.counts,
            queues=lambda: handler.gate.queues(),
            held=lambda: supervisor.held(),
            bodies=lambda: handler.bodies.filled(handler.settings.config.limits),
            log_dropped=lambda: outlet.dropped,
        ),
        clock,
    )
    access_log = AccessLog(outlet, clock, enabled=config.log.access)
    ledger = Ledger(metrics, access_log, clock)
    handler = Handler(
        settings=settings_for(config, Pages),
        table=table,
        client=client,
        ledger=ledger,
        clock=clock,
        gate=Gate(table, Chooser(), clock),
        catalogs=Catalogs(table, clock),
        live=set(),
        early=Early(ledger.settle, clock),
        failed_keys=FailedKeys(
            config.limits.failed_keys, clock.now, partial(metrics.failed_key, "public")
        ),
    )
    ingress = Ingress(
        story=handler.handle,
        refused=handler.early.settle,
        live=handler.live,
        limits=ClientLimits.of(config.limits),
        connections=connections_for(config),
    )
    table.on_transition.append(ledger.transition)
    table.on_cut.append(ledger.limit_cut)
    ledger.on_posted += [handler.gate.learn, table.ended]
    table.apply(config.pools, config.health)
    handler.gate.configure(config.pools, handler.settings.keys.priorities)
    metrics.configured(digest(loaded.config))
    ingress.allow(config.cors)
    watchers = Watchers(table, config.health, clock)
    supervisor = supervise(table, clock, MemoryStore(clock), config)
    supervisor.events.on_event.append(ledger.event)
    ledger.on_posted.append(supervisor.ended)
    return Process(
        path, config, loaded, clock, table, client, metrics, outlet, ledger, ingress, admin_ingress(config),
        handler, watchers, supervisor, AdapterLoader(table, clock, supervisor.events, config.pools),
    )  # fmt: skip


def serve(path: Path) -> None:
    """Run the gateway until it is told to stop.

    Raises:
        ConfigError: the configuration cannot be used.
        OSError: an address to listen on cannot be had; its `filename` is the address.
    """
    loaded = load_config(path)
    descriptors.raise_limit()
    process = build(loaded, path, set_up_logging(loaded.config.log))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        handle_signals(runner.get_loop(), process)
        runner.run(run(process))


async def run(process: Process, sockets: tuple[socket.socket, socket.socket] | None = None) -> None:
    """Serve until `process.stopping`, then drain; everything is closed when this returns.

    `sockets` are those of `bind_both`, which is called when there are none.

    Raises:
        OSError: an address to listen on cannot be had.
    Cancel: stops without draining.
    """
    config = process.config
    public_socket, admin_socket = sockets or bind_both(config)
    process.public_port, process.admin_port = port_of(public_socket), port_of(admin_socket)
    public = server_for(
        public_app(
            process.handler, process.table, process.clock, process.readiness, process.ingress
        ),
        process.ingress,
    )
    admin = server_for(
        admin_app(
            table=process.table,
            metrics=process.metrics,
            clock=process.clock,
            loaded=lambda: process.loaded,
            ready=process.readiness,
            deciding=Deciding(
                process.handler.gate,
                process.handler.catalogs,
                lambda: process.handler.settings.keys,
            ),
            early=process.handler.early,
            orders=Orders(
                process.table,
                process.supervisor,
                process.supervisor.store,
                process.clock,
                process.oldest_at,
            ),
            file=process.path,
        ),
        process.admin,
    )
    try:
        async with asyncio.TaskGroup() as group:
            supervised = group.create_task(process.supervisor.run(), name="supervisor")
            background = [
                group.create_task(process.watchers.run(), name="watchers"),
                group.create_task(process.adapter_loader.run(), name="adapters"),
                group.create_task(process.ledger.run(), name="ledger"),
                group.create_task(_ticks(process), name="ticks"),
                group.create_task(_watch_keys(process), name="keys"),
                group.create_task(_reloads(process), name="reloads"),
            ]
            served = group.create_task(public.serve(sockets=[public_socket]), name="public")
            operated = group.create_task(admin.serve(sockets=[admin_socket]), name="admin")
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            process.listening.set()
            log.info(
                "listening",
                extra={
                    "event": "listening",
                    "public": str(config.listen),
                    "admin": str(config.admin.listen),
                },
            )
            await process.stopping.wait()
            process.handler.draining = True
            await drain(process.ingress.live, process.config.shutdown.grace, process.hurry)
            public.leave()
            supervised.cancel()
            await asyncio.wait([served, supervised])
            await process.supervisor.close()  # operators can still see what holds it up
            admin.leave()
            await asyncio.wait([operated])
            for task in background:
                task.cancel()
    finally:
        _close(public, admin)
        process.client.close()
        await process.supervisor.close()
        process.ledger.post()
        process.outlet.flush()
        process.handler.settings.counters.close()


def _close(*servers: Server) -> None:
    """Close what a server still has open; uvicorn leaves it so when its task is cancelled."""
    for server in servers:
        for listener in getattr(server, "servers", ()):
            listener.close()
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()


async def _ticks(process: Process) -> None:
    """Drive every coarse deadline, and measure how late the loop runs."""
    loop = asyncio.get_running_loop()
    due = loop.time()

    async def tick() -> None:
        nonlocal due
        now = loop.time()
        process.metrics.loop_lag(max(0.0, now - due))
        if now - due > _STOOD_STILL_S:
            process.table.forgive(process.clock.now())
        process.client.tick(now)
        for backend, waits in process.client.waits():
            process.table.listen(backend, waits, process.clock.now())
        process.ingress.tick(now)
        process.admin.tick(now)
        end_late(process.ingress.live, now, process.config.timeouts.total)
        process.handler.gate.tick(process.clock.now())
        due = loop.time() + TICK_S

    await periodic(tick, every_s=TICK_S, name="ticks", jitter_ratio=0.0)


async def _watch_keys(process: Process) -> None:
    """Take over the keys file whenever it changed: a new key works, a revoked one ends, within seconds."""
    told = False  # of a file that cannot be read; the keys before it stay

    async def look() -> None:
        nonlocal told
        settings = process.handler.settings
        if not isinstance(settings.keys, KeyRing) or not settings.keys.changed():
            return
        try:
            keys = await asyncio.to_thread(KeyRing.load, settings.keys.path)
        except ConfigError as error:
            if not told:
                log.error("; ".join(error.findings), extra={"event": "keys_invalid"})
            told = True
            return
        told = False
        process.handler.settings = replace(settings, keys=keys)
        process.handler.gate.configure(settings.config.pools, keys.priorities)
        log.info("keys reloaded", extra={"event": "keys_reloaded", "keys": len(keys)})

    async def turn() -> None:
        async with process.changing:
            await look()

    await periodic(turn, every_s=_KEYS_S, name="keys")


# --- signals and reload ---------------------------------------------------------------------------


def handle_signals(loop: asyncio.AbstractEventLoop, process: Process) -> None:
    """Reload on SIGHUP; drain on SIGTERM and SIGINT, and stop at once on a second one."""

    def stop() -> None:
        (process.hurry if process.stopping.is_set() else process.stopping).set()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, process.hangup.set)


async def _reloads(process: Process) -> None:
    """Reload when asked to; asking again meanwhile leads to one more."""

    async def turn() -> None:
        await process.hangup.wait()
        process.hangup.clear()
        await reload(process)

    await periodic(turn, every_s=0.0, name="reloads")


async def reload(process: Process) -> bool:
    """Read the configuration again and swap it in; True when it is in force.

    Streams are untouched, and go on while a thread reads. A file that is not valid keeps the old
    configuration and is logged with every finding. Settings that need a restart are named and keep
    their old value's effect. Cancel: the old configuration stays.
    """
    async with process.changing:
        try:
            loaded, settings = await asyncio.to_thread(
                _read, process.path, process.handler.settings
            )
        except ConfigError as error:
            process.metrics.reloaded(ok=False)
            for finding in error.findings:
                log.error(finding, extra={"event": "config_invalid"})
            log.error(
                "reload refused, the old configuration stays in force",
                extra={"event": "reload_failed"},
            )
            return False
        _swap(process, loaded, settings)
        return True


def _read(path: Path, before: Settings) -> tuple[Loaded, Settings]:
    loaded = load_config(path)
    return loaded, settings_for(loaded.config, Pages, before)


def _swap(process: Process, loaded: Loaded, settings: Settings) -> None:
    """Put a configuration in the place of the one in force."""
    for warning in loaded.warnings:
        log.warning(str(warning), extra={"event": "config_warning"})
    effect = diff(process.config, loaded.config, started=process.started)
    process.loaded = loaded
    process.handler.settings.counters.close()
    process.handler.settings = settings
    process.ingress.allow(loaded.config.cors)
    process.table.apply(loaded.config.pools, loaded.config.health)
    process.handler.gate.configure(loaded.config.pools, settings.keys.priorities)
    process.watchers.health = loaded.config.health
    process.supervisor.apply(loaded.config)
    process.adapter_loader.pools = loaded.config.pools
    process.metrics.configured(digest(loaded.config))
    process.client.keep_only(process.table.ids())
    process.metrics.reloaded(ok=True)
    log.info("configuration reloaded", extra={"event": "reloaded", "effect": effect.sentences})
