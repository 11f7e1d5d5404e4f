"""One gateway while it runs: from its listeners to the last request, in one TaskGroup.

watch -> heal -> accept -> ... -> told to stop, or another process took over -> finish -> close
"""

from __future__ import annotations

import asyncio
import gc
import logging
from functools import partial
from typing import Final

from gateway.admin.api import admin_app
from gateway.admin.audit import Audit
from gateway.admin.condition import notice_problems, watch_settings_file
from gateway.admin.desk import Desk
from gateway.admin.fleet import gather_always
from gateway.admin.requests import answers_to_workers
from gateway.admission.telling import Telling
from gateway.core.aio import periodic
from gateway.heal.eventlog import keep_events
from gateway.heal.orders import Orders
from gateway.ingress import inherited
from gateway.ingress.charging import foreseen
from gateway.ingress.drain import announce_stop, end, end_late, let_answer, let_finish, outlast
from gateway.ingress.listener import (
    Listeners,
    Server,
    accept_the_last,
    port_of,
    server_for,
    with_copies,
)
from gateway.ingress.routes import public_app
from gateway.launch import disk
from gateway.ops.dryrun import Deciding
from gateway.ops.requests import Requests
from gateway.process import Process, watch_keys, watch_reloads
from gateway.rollout.together import Together
from gateway.routing.exchange import PrefixExchange
from gateway.upgrade.fellows import all_stop, let_others_end, meet_parent
from gateway.upgrade.found import found_serving
from gateway.upgrade.healing import Healing
from gateway.upgrade.notify import notify
from gateway.upgrade.predecessor import Predecessor
from gateway.upgrade.replace import Replacement
from gateway.upstream.relay import TICK_S

log = logging.getLogger("gateway.app")

# Young collections are rare: the request path makes no reference cycles, so there is little to find.
_GC_THRESHOLDS: Final = (50_000, 20, 100)
_STOOD_STILL_S: Final = 1.0  # a loop that was this late was stopped, or starved


async def run(
    process: Process, listeners: Listeners | None = None, predecessor: Predecessor | None = None
) -> None:
    """Serve until told to stop, or until another process took over; everything is closed at the end.

    Without `listeners` it opens its own. A predecessor serves as yet: this process takes its place once it can serve.

    Raises:
        OSError: an address to listen on cannot be had.
        UpgradeFailed: this process could not take its predecessor's place, which goes on.
    Cancel: stops without draining.
    """
    config = process.config
    listeners = listeners or inherited.listeners(config, inherited.Given())
    process.public_port, process.admin_port = port_of(listeners.public), port_of(listeners.admin)
    desk = _desk(process)
    public, admin = _servers(process, desk)
    try:
        async with asyncio.TaskGroup() as group:
            healing = Healing(process, group)
            await _know_before(process)
            background = [*_background(process, group), *await meet_parent(process, group)]
            missing = []
            if predecessor is not None:
                missing = await found_serving(process.table, process.clock, predecessor.expects)
            accepting = with_copies(listeners.public)
            served = group.create_task(public.serve(sockets=accepting), name="public")
            await public.accepting.wait()
            if predecessor is not None:
                await predecessor.replaced_by(process, missing)
                following = predecessor.follow(process.adapters)
                background.append(group.create_task(following, name="process before"))
            healing.begin()
            replacement = Replacement(process, healing, listeners, (public, admin))
            background += [
                group.create_task(watch_reloads(process), name="reloads"),
                group.create_task(notice_problems(desk), name="problems"),
                group.create_task(watch_settings_file(desk), name="settings file"),
                group.create_task(gather_always(desk), name="counts of other workers"),
            ]
            replacing = group.create_task(replacement.run(), name="upgrades")
            operated = group.create_task(_operators(process, admin, listeners), name="admin")
            await _say_listening(process)
            await _until_the_end(process)
            replacing.cancel()
            await asyncio.wait([replacing])
            await _finish(process, listeners, public, admin)
            await asyncio.wait([served, group.create_task(healing.pause(), name="pause")])
            await let_others_end(process)
            await process.supervisor.close()  # operators can still see what holds it up
            admin.leave()
            await asyncio.wait([operated])
            for task in background:
                task.cancel()
    finally:
        await _close(process, public, admin)


def _servers(process: Process, desk: Desk) -> tuple[Server, Server]:
    """Make the public and the admin server; neither accepts yet. What is done to backends is written down."""
    if process.leads:
        keep_events(process.config.state, process.supervisor.events)
    served = public_app(
        process.handler, process.table, process.clock, process.readiness, process.ingress
    )
    public = server_for(served, process.ingress)
    admin = server_for(admin_app(desk), process.admin)
    if (workers := process.group) is not None:
        desk.fellows, desk.workers = workers.fellows, workers.place.answers_for
        workers.answers.update(answers_to_workers(desk))
        if key := workers.place.key:  # a parent of an older version made none
            desk.quarantine.share(bytes.fromhex(key), partial(workers.tell_fellows, "deaths"))
    return public, admin


def _desk(process: Process) -> Desk:
    """Return what the admin listener shows and changes."""
    handler = process.handler
    return Desk(
        table=process.table,
        metrics=process.metrics,
        clock=process.clock,
        loaded=lambda: process.loaded,
        ready=process.readiness,
        deciding=Deciding(
            handler.gate,
            handler.catalogs,
            lambda: handler.settings.keys,
            lambda ask: foreseen(
                handler.limiter, handler.settings.plans, handler.settings.prices, ask
            ),
        ),
        early=process.handler.early,
        requests=Requests(process.ended, lambda: process.ingress.live),
        trial=process.rollouts.get,
        replicas=process.replicas,
        adapters=process.adapters,
        quarantine=process.handler.retrying.quarantine,
        orders=Orders(process.table, process.supervisor, process.clock, process.carried),
        upgrades=process.upgrades,
        reloading=process,
        keys=lambda: process.key_store,
        audit=Audit(process.config.state),
        accounts=process.accounts,
        series=process.series,
        disk=process.disk,
        gpus=lambda: process.gpus.seen,
        slow_clients=process.slow_clients,
        file=process.path,
    )


# --- beginning and end ----------------------------------------------------------------------------


async def _know_before(process: Process) -> None:
    """Read what the first request has to find: the keys, and what was spent before."""
    if process.shared_keys is not None:
        await process.shared_keys.first_look()
    if process.tokens is not None:
        await process.tokens.issuer.fetch()
    await process.accounts.open()


def _background(process: Process, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    """Begin what goes on from the first moment to the last."""
    others = []
    if process.group is not None or process.started.redis is not None:
        here = process.store, process.clock, process.table, process.replicas.id
        telling = Telling(*here, process.handler.gate.anybody_waits, process.supervisor.names.of)
        others.append(group.create_task(telling.run(), name="what is under way"))
        others.append(group.create_task(_exchange(process).run(), name="what was sent where"))
        elects = process.leads and process.started.redis is not None
        trials = Together(
            process.rollouts, process.store, process.clock, process.replicas.id, elects
        )
        others.append(group.create_task(trials.run(), name="canaries of all gateways"))
    if process.handler.tracing is not None:
        others.append(group.create_task(process.handler.tracing.traces.run(), name="traces"))
    return [
        *others,
        group.create_task(process.watchers.run(), name="watchers"),
        group.create_task(process.engine_events.run(), name="kv events"),
        group.create_task(process.ledger.run(), name="ledger"),
        group.create_task(process.replicas.run(), name="replicas"),
        group.create_task(process.handler.limiter.run(), name="limits"),
        group.create_task(process.accounts.run(), name="usage"),
        group.create_task(disk.watch(process.disk), name="disk"),
        group.create_task(_ticks(process), name="ticks"),
        group.create_task(watch_keys(process), name="keys"),
        group.create_task(process.last_used.run(), name="last use of keys"),
        *(
            [group.create_task(process.tokens.issuer.run(), name="issuer")]
            if process.tokens
            else []
        ),
        group.create_task(process.series.run(), name="series"),
    ]


def _exchange(process: Process) -> PrefixExchange:
    """Return what tells the others which prompts are sent where."""
    handler = process.handler
    return PrefixExchange(
        process.store,
        process.table,
        process.replicas.id,
        handler.measuring.hasher,
        name_of=process.supervisor.names.of,
        secret=lambda: handler.settings.keys.salting,
        count=process.metrics.shared,
    )


async def _say_listening(process: Process) -> None:
    config = process.config
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    process.note_start()
    process.listening.set()
    if process.group is not None:
        await process.group.serving()
    notify(READY=1)
    log.info(
        "listening",
        extra={
            "event": "listening",
            "public": str(config.listen),
            "admin": str(config.admin.listen),
        },
    )


async def _operators(process: Process, admin: Server, listeners: Listeners) -> None:
    """Serve operators; of several workers, the one that leads does."""
    if process.leads:
        await admin.serve(sockets=[listeners.admin])


async def _until_the_end(process: Process) -> None:
    """Wait until this process is told to stop, or another one took over."""
    loop = asyncio.get_running_loop()
    ends = [
        loop.create_task(process.stopping.wait(), name="told to stop"),
        loop.create_task(process.succeeded.wait(), name="succeeded"),
    ]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in ends:
            each.cancel()


async def _finish(process: Process, listeners: Listeners, public: Server, admin: Server) -> None:
    """Let requests finish, up to `shutdown.grace`; end what is left then.

    Each open connection gets one more reply, which closes it. Where another process accepts connections
    by now, or systemd keeps them until one does, none are accepted here. Else they are for a while, so that
    a load balancer learns of the end before one is refused. A refused one it sends elsewhere.
    """
    ingress, grace_s = process.ingress, process.config.shutdown.grace
    if process.succeeded.is_set():
        admin.leave()
        grace_s = await outlast(ingress.connections, grace_s, process.hurry)
    else:
        notify(STOPPING=1)
        ingress.leave()
        announce_s = min(process.config.shutdown.announce, grace_s)
        if announce_s and process.announces and not listeners.kept:
            await announce_stop(ingress.live, announce_s, process.hurry)
            grace_s -= announce_s
            if await all_stop(process):
                await accept_the_last(listeners.public)
        public.stop_accepting()
    process.handler.shadows.close()
    await let_finish(ingress.live, grace_s, process.hurry)
    if not ingress.live and not process.hurry.is_set():
        await let_answer(ingress.connections, grace_s)
    process.handler.draining = True
    await end(ingress.live)
    public.leave()


async def _close(process: Process, *servers: Server) -> None:
    """Close what is still open; uvicorn leaves a server's connections when its task is cancelled."""
    for server in servers:
        server.stop_accepting()
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()
    process.handler.shadows.close()
    process.client.close()
    await process.supervisor.close()
    process.ledger.post()
    await process.accounts.close()
    await process.last_used.write()
    await process.replicas.leave()
    await process.store.close()
    if process.handler.tracing is not None:
        await process.handler.tracing.traces.close()
    process.outlet.flush()
    process.handler.settings.counters.close()


async def _ticks(process: Process) -> None:
    """Drive every coarse deadline, and measure how late the loop runs.

    After the process stood still, what came meanwhile is read before anything is found too late.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    unread = False

    async def tick() -> None:
        nonlocal due, unread
        now = loop.time()
        process.metrics.loop_lag(max(0.0, now - due))
        stood_still, due = now - due > _STOOD_STILL_S, now + TICK_S
        if stood_still:
            process.table.forgive(process.clock.now())
        if unread := stood_still and not unread:  # not twice in a row: a loop may always be late
            return
        process.client.tick(now)
        process.table.listen(process.client.waits(), process.clock.now())
        process.ingress.tick(now)
        process.admin.tick(now)
        end_late(process.ingress.live, now, process.config.timeouts.total)
        process.handler.gate.tick(process.clock.now())
        process.handler.shadows.tick()
        process.handler.retrying.quarantine.tick()
        process.supervisor.moved(process.handler.passing.departing.leaving.take_moved())
        due = loop.time() + TICK_S

    await periodic(tick, every_s=TICK_S, name="ticks", jitter_ratio=0.0)
