"""One running gateway: everything it is made of, and what replaces its settings under way: keys, reload."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gateway.access.keys import KeyRing
from gateway.adapters.keepers import Adapters
from gateway.config.load import Loaded, load_config
from gateway.config.models import Config
from gateway.config.reload import diff, digest
from gateway.core.aio import Clock, periodic
from gateway.core.errors import ConfigError
from gateway.heal.supervisor import Supervisor
from gateway.ingress.handler import Handler
from gateway.ingress.routes import Readiness
from gateway.ingress.server import Ingress
from gateway.ingress.settings import Settings, settings_for
from gateway.observe.ledger import Ledger
from gateway.observe.metrics import Metrics
from gateway.observe.outlet import Outlet
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollouts
from gateway.upstream.client import Client
from gateway.watch.discovery import Watchers
from gateway.watch.engine_events import EngineEvents
from gateway.watch.fetch import Pages

log = logging.getLogger("gateway.app")

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
    rollouts: Rollouts
    adapters: Adapters
    engine_events: EngineEvents
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


async def watch_keys(process: Process) -> None:
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


async def watch_reloads(process: Process) -> None:
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
    process.ingress.connections.proxies = process.handler.settings.proxies
    process.table.apply(loaded.config.pools, loaded.config.health)
    process.handler.gate.configure(loaded.config.pools, settings.keys.priorities)
    process.watchers.health = loaded.config.health
    process.supervisor.apply(loaded.config)
    process.rollouts.apply(loaded.config.pools)
    process.engine_events.pools = loaded.config.pools
    process.adapters.apply(loaded.config.pools)
    process.metrics.configured(digest(loaded.config))
    process.client.keep_only(process.table.ids())
    process.metrics.reloaded(ok=True)
    log.info("configuration reloaded", extra={"event": "reloaded", "effect": effect})
