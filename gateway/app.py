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
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from gateway.access.failures import FailedKeys
from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import Memory
from gateway.admission.gate import Gate
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import digest
from gateway.core.aio import Clock, SystemClock, periodic
from gateway.heal.eventlog import EventLog
from gateway.heal.orders import Orders
from gateway.heal.supervisor import Supervisor
from gateway.ingress import descriptors
from gateway.ingress.drain import drain, end_late
from gateway.ingress.early import Early
from gateway.ingress.handler import Handler
from gateway.ingress.listener import Server, bind_both, port_of, server_for, with_copies
from gateway.ingress.reader import ClientLimits
from gateway.ingress.routes import public_app
from gateway.ingress.server import Ingress
from gateway.ingress.settings import admin_ingress, connections_for, settings_for
from gateway.ingress.shadow import Shadows
from gateway.launch import disk
from gateway.observe.ledger import Ledger
from gateway.observe.log import AccessLog, set_up_logging
from gateway.observe.metrics import Metrics
from gateway.observe.outlet import Outlet
from gateway.observe.readings import Readings
from gateway.ops.api import admin_app
from gateway.ops.dryrun import Deciding
from gateway.pools.store import MemoryStore, SharedStore
from gateway.pools.table import PoolTable
from gateway.process import Process, watch_keys, watch_reloads
from gateway.rollout.rollouts import Rollouts
from gateway.routing.catalog import Catalogs
from gateway.routing.choice import Chooser
from gateway.upstream.client import Client
from gateway.upstream.relay import TICK_S
from gateway.watch.discovery import Watchers
from gateway.watch.engine_events import EngineEvents
from gateway.watch.fetch import Pages

log = logging.getLogger("gateway.app")
Supervise = Callable[[PoolTable, Clock, SharedStore, Config], Supervisor]

# Young collections are rare: the request path makes no reference cycles, so there is little to find.
_GC_THRESHOLDS: Final = (50_000, 20, 100)
_STOOD_STILL_S: Final = 1.0  # a loop that was this late was stopped, or starved


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
    chooser = Chooser(table)
    gate = Gate(table, chooser, clock)
    handler = Handler(
        settings=settings_for(config, Pages),
        table=table,
        client=client,
        ledger=ledger,
        clock=clock,
        gate=gate,
        shadows=Shadows(table, chooser, gate, client, clock, metrics.shadowed),
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
    table.on_transition += [ledger.transition, client.end_held]
    table.on_cut.append(ledger.limit_cut)
    ledger.on_posted += [handler.gate.learn, table.ended]
    table.apply(config.pools, config.health)
    handler.gate.configure(config.pools, handler.settings.keys.priorities)
    metrics.configured(digest(loaded.config))
    ingress.allow(config.cors)
    ingress.connections.proxies = handler.settings.proxies
    watchers = Watchers(table, config.health, clock)
    supervisor = supervise(table, clock, MemoryStore(clock), config)
    supervisor.events.on_event.append(ledger.event)
    rollouts = Rollouts(table, clock, supervisor.events, config.state)
    rollouts.apply(config.pools)
    ledger.on_posted += [supervisor.ended, rollouts.settled]
    ledger.on_failed.append(rollouts.failed)
    adapters = Adapters(table, clock, supervisor.events, Memory(config.state), handler.gate.awaited)
    adapters.apply(config.pools)
    handler.gate.on_wanted.append(adapters.want)
    return Process(
        path, config, loaded, clock, table, client, metrics, outlet, ledger, ingress, admin_ingress(config),
        handler, watchers, supervisor, rollouts, adapters, EngineEvents(table, config.pools, clock),
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
    EventLog(config.state).follow(process.supervisor.events)
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
            trial=process.rollouts.get,
            adapters=process.adapters,
            orders=Orders(
                process.table,
                process.supervisor,
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
                group.create_task(process.engine_events.run(), name="kv events"),
                group.create_task(process.adapters.run(), name="adapters"),
                group.create_task(process.ledger.run(), name="ledger"),
                group.create_task(disk.watch(config.state), name="disk"),
                group.create_task(_ticks(process), name="ticks"),
                group.create_task(watch_keys(process), name="keys"),
                group.create_task(watch_reloads(process), name="reloads"),
            ]
            served = group.create_task(
                public.serve(sockets=with_copies(public_socket)), name="public"
            )
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
            process.handler.shadows.close()
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
        process.handler.shadows.close()
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
        process.table.listen(process.client.waits(), process.clock.now())
        process.ingress.tick(now)
        process.admin.tick(now)
        end_late(process.ingress.live, now, process.config.timeouts.total)
        process.handler.gate.tick(process.clock.now())
        process.handler.shadows.tick()
        due = loop.time() + TICK_S

    await periodic(tick, every_s=TICK_S, name="ticks", jitter_ratio=0.0)


# --- signals and reload ---------------------------------------------------------------------------


def handle_signals(loop: asyncio.AbstractEventLoop, process: Process) -> None:
    """Reload on SIGHUP; drain on SIGTERM and SIGINT, and stop at once on a second one."""

    def stop() -> None:
        (process.hurry if process.stopping.is_set() else process.stopping).set()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, process.hangup.set)
