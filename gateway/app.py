"""The composition root: a configuration in, wired objects and one TaskGroup out.

    signals --> Process --> public server (uvicorn + GatewayProtocol) --> Handler --> Client --> backends
                       |--> admin server (uvicorn + Starlette)
                       |--> Watchers (health, metrics, models of every backend)
                       |--> Supervisor (starts and restarts backends)
                       `--> ticks: upstream deadlines, head deadlines, access log, loop lag

SIGHUP reloads, SIGUSR2 upgrades, SIGTERM and SIGINT drain, a second one stops at once.
`running.run` is what happens between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from gateway import __version__
from gateway.access.failures import FailedKeys
from gateway.adapters.keepers import Adapters
from gateway.admission.gate import Gate
from gateway.config.identity import keep_names
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import digest
from gateway.core.aio import Clock, SystemClock
from gateway.heal.following import told_of
from gateway.heal.givennames import read_names
from gateway.heal.supervisor import Supervisor
from gateway.ingress import descriptors, inherited
from gateway.ingress.early import Early
from gateway.ingress.handler import Handler
from gateway.ingress.inherited import Given
from gateway.ingress.reader import ClientLimits
from gateway.ingress.server import Ingress
from gateway.ingress.settings import admin_ingress, connections_for, settings_for
from gateway.ingress.shadow import Shadows
from gateway.launch.gpuload import GpuWatch
from gateway.observe import instruments
from gateway.observe.ledger import Ledger
from gateway.observe.log import AccessLog, set_up_logging
from gateway.observe.metrics import Metrics
from gateway.observe.outlet import Outlet
from gateway.observe.readings import Readings
from gateway.ops.quarantine import quarantined
from gateway.pools.table import PoolTable
from gateway.process import Process
from gateway.routing.catalog import Catalogs
from gateway.routing.choice import Chooser
from gateway.running import run
from gateway.sharing import (
    adapter_memory,
    adapters_together,
    keys_of,
    limiter_of,
    rollouts_of,
    shared_store,
)
from gateway.store.group import Group, Place, place_of
from gateway.store.replicas import Replicas, Told, this_process
from gateway.store.shared import SharedStore
from gateway.upgrade.predecessor import Predecessor
from gateway.upstream.client import Client
from gateway.usage.accounts import Accounts
from gateway.watch.discovery import Watchers
from gateway.watch.engine_events import EngineEvents
from gateway.watch.fetch import Pages
from gateway.workers.parent import Parent

Supervise = Callable[[PoolTable, Clock, SharedStore, Config], Supervisor]


def build(
    loaded: Loaded,
    path: Path,
    outlet: Outlet,
    supervise: Supervise = Supervisor,
    clock: Clock | None = None,
    group: Group | None = None,
) -> Process:
    """Wire one process; `clock` is the machine's unless said. Nothing is opened yet but the key file.

    `group`: of workers, that it is one of.

    Raises:
        ConfigError: the keys file is unusable.
    """
    config = loaded.config
    table = PoolTable(clock := clock or SystemClock())
    store, link = shared_store(config, clock, group)
    client = Client(
        connect_s=config.timeouts.connect,
        keep_alive_s=config.timeouts.upstream_keep_alive,
        receive_bytes=config.limits.buffer_bytes,
    )
    gpus = GpuWatch(lambda: handler.settings.config)
    metrics = Metrics(
        Readings(
            backends=lambda: (*table, *table.leaving()),
            queues=lambda: handler.gate.queues(),
            fellows=lambda: replicas.fellows(),
            gpus=lambda: gpus.seen,
            bodies=lambda: handler.bodies.filled(handler.settings.config.limits),
            kept=lambda: {
                instruments.OPEN_CONNECTIONS.name: {
                    ("client",): len(ingress.connections),
                    ("backend",): sum(client.open_connections()),
                },
                instruments.CONNECTIONS_SHED.name: ingress.connections.counts,
                instruments.RESTARTS_HELD.name: {
                    (pool,): held for pool, held in supervisor.held().items()
                },
                instruments.KEPT_BODY_BYTES.name: {(): handler.passing.keeping.held_bytes},
                instruments.ACCESS_LOG_DROPPED.name: {(): outlet.dropped},
                instruments.CANARY.name: rollouts.verdicts(),
                instruments.CANARY_REQUESTS.name: rollouts.requests(),
                instruments.ADAPTER_CHANGES.name: adapters.changes(),
                instruments.ADAPTER_LOAD_SECONDS.name: adapters.load_s(),
                instruments.TENANT_TOKENS.name: accounts.by_tenant,
                instruments.LIMIT_REFUSALS.name: handler.limiter.refusals,
            },
        ),
        clock,
    )
    ledger = Ledger(metrics, AccessLog(outlet, clock, enabled=config.log.access), clock)
    accounts = Accounts(
        clock,
        link,
        config.state / "usage" if config.usage.enabled else None,
        config.usage.ledger,
    )
    chooser = Chooser(table)
    gate = Gate(table, chooser, clock)
    tokens, shared_keys = keys_of(config, link, clock, lambda: handler.settings)
    handler = Handler(
        settings=settings_for(
            config,
            Pages,
            shared=None if shared_keys is None else shared_keys.ring(config.tiers),
            tokens=tokens,
        ),
        table=table,
        client=client,
        ledger=ledger,
        clock=clock,
        gate=gate,
        shadows=Shadows(table, chooser, gate, client, clock, metrics.shadowed),
        limiter=limiter_of(clock, link, lambda: replicas.alive, accounts, group),
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
    table.on_cut.append(metrics.limit_cut)
    ledger.on_posted += [handler.gate.learn, table.ended, accounts.posted]
    table.apply(config.pools, config.health)
    handler.gate.configure(config.pools, handler.settings.keys.priorities(clock.wall()))
    metrics.configured(digest(loaded.config), handler.settings.shared_digest)
    ingress.allow(config.cors)
    ingress.connections.proxies = handler.settings.proxies
    watchers = Watchers(table, config.health, clock)
    quarantine = handler.retrying.quarantine
    quarantine.on_lost.append(watchers.hurry)

    least = 1 if group is None else group.place.count
    replicas = Replicas(
        store, clock, lambda: _told(ingress, handler, supervisor, group), least=least
    )
    replicas.on_heard.append(ingress.even_out)
    supervisor = supervise(table, clock, store, config)
    supervisor.drained_elsewhere = replicas.drained_elsewhere
    replicas.named = supervisor.named
    supervisor.events.on_event.append(ledger.event)
    quarantine.on_quarantined.append(partial(quarantined, supervisor.events, clock))
    rollouts = rollouts_of(table, clock, supervisor.events, config, group)
    ledger.on_posted += [supervisor.ended, rollouts.settled]
    ledger.on_failed.append(rollouts.failed)
    adapters = Adapters(
        table, clock, supervisor.events, adapter_memory(config, group), handler.gate.awaited
    )
    adapters.together = adapters_together(config, store, clock, replicas.id, group, supervisor)
    adapters.apply(config.pools)
    handler.gate.on_wanted.append(adapters.want)
    return Process(
        path, config, loaded, clock, table, client, metrics, outlet, ledger, ingress, admin_ingress(config),
        handler, watchers, supervisor, rollouts, adapters, EngineEvents(table, config.pools, clock),
        store, replicas, shared_keys, accounts, gpus, group, tokens,
    )  # fmt: skip


def _told(ingress: Ingress, handler: Handler, supervisor: Supervisor, group: Group | None) -> Told:
    """Return what this process tells the others that share its store."""
    shared, leads = handler.settings.shared_digest, sorted(supervisor.leads)
    told = this_process(__version__, shared, leads, len(ingress.connections))
    told = told if group is None else group.named(told, in_charge=supervisor.in_charge)
    going = supervisor.fleet.going()
    return told_of(handler.table, supervisor.names, told, handler.gate.queues(), going)


def serve(path: Path, predecessor: Predecessor | None = None, workers: int | None = None) -> None:
    """Run the gateway until it is told to stop, or another process took over.

    With more than one of `workers` (None: as configured) this process is their parent, or one of them.

    Raises:
        ConfigError: the configuration cannot be used.
        OSError: an address to listen on cannot be had; its `filename` is the address.
        GaveUp: it could not take its predecessor's place, which goes on.
        NotStarted: a worker cannot be started; it has said why.
    """
    place = place_of(os.environ)
    with predecessor.told() if predecessor is not None else contextlib.nullcontext():
        loaded = load_config(path)
        loaded = keep_names(loaded, read_names(loaded.config.state))
        listeners = inherited.listeners(loaded.config, _given(predecessor, place))
        count = loaded.config.workers if workers is None else workers
        if count > 1 and place is None and predecessor is None:
            set_up_logging(loaded.config.log)
            asyncio.run(Parent(listeners, count).run())
            return
        descriptors.raise_limit()
        if predecessor is not None:
            predecessor.detach()
            predecessor.loaded(loaded.config.state)
        group = None if place is None else Group.join(place)
        process = build(loaded, path, set_up_logging(loaded.config.log), group=group)
        if predecessor is not None or not process.leads:
            process.supervisor.stand_by(predecessor.expects.unproven if predecessor else None)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            handle_signals(runner.get_loop(), process)
            runner.run(run(process, listeners, predecessor))


def _given(predecessor: Predecessor | None, place: Place | None) -> Given:
    """Return the listeners that this process was started with."""
    if predecessor is not None:
        return Given(predecessor.listeners, predecessor.kept)
    if place is not None:
        return inherited.from_parent(place.public, place.admin, kept=place.kept)
    return inherited.from_systemd(os.environ)


def handle_signals(loop: asyncio.AbstractEventLoop, process: Process) -> None:
    """Reload on SIGHUP, upgrade on SIGUSR2; drain on SIGTERM and, unannounced, on SIGINT; a second stops at once."""

    def stop(announces: bool) -> None:
        process.announces = announces
        (process.hurry if process.stopping.is_set() else process.stopping).set()

    loop.add_signal_handler(signal.SIGTERM, stop, True)
    loop.add_signal_handler(signal.SIGINT, stop, False)
    loop.add_signal_handler(signal.SIGHUP, process.hangup.set)
    loop.add_signal_handler(signal.SIGUSR2, process.upgrades.wanted.set)
