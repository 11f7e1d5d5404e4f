"""What the endpoints of one simulated server share."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from gateway.sim.config import SimConfig
from gateway.sim.driver import Driver
from gateway.sim.engine import Engine
from gateway.sim.faults import FaultSet


class SimState:
    """Engines, adapters and faults of one server. Made inside the event loop that drives it."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.drivers = [Driver(Engine(config.engine), config.speed) for _ in range(config.dp)]
        self.loaded = {name: f"/adapters/{name}" for name in config.adapters}
        self.faults = FaultSet()
        self.on_death: Callable[[], None] = lambda: None
        self.admission_rejections = 0
        self.lora_seen: dict[tuple[str, str], float] = {}  # every combination stays a series
        self.lora_steps = 0  # of all engines, when the present one was last seen
        digest = zlib.crc32(repr((config.model, config.max_model_len, config.dp)).encode())
        self.fingerprint = f"vllm-{config.version}-{digest:08x}"

    @property
    def engines(self) -> list[Engine]:
        """The engine cores."""
        return [driver.engine for driver in self.drivers]

    @property
    def dead(self) -> bool:
        """An engine died, and with it the server."""
        return any(driver.dead for driver in self.drivers)

    @property
    def adapters(self) -> dict[str, str]:
        """Adapters served now, name to path."""
        lost = self.faults.find("lost_adapter")
        if lost is None:
            return self.loaded
        return {n: p for n, p in self.loaded.items() if lost.arg is not None and n != lost.arg}

    @property
    def in_flight(self) -> int:
        """Requests running and waiting, over all engines."""
        return sum(engine.running + engine.waiting for engine in self.engines)

    def least_loaded(self) -> Driver:
        """Return the engine with the fewest requests."""
        return min(self.drivers, key=lambda d: d.engine.running + d.engine.waiting)

    def die(self) -> None:
        """Kill the engines; every request in progress learns it."""
        for driver in self.drivers:
            driver.die()
        self.on_death()

    def revive(self) -> None:
        """Start again with empty engines if they died; adapters loaded at run time are gone."""
        if self.dead:
            config = self.config
            self.drivers = [Driver(Engine(config.engine), config.speed) for _ in range(config.dp)]
            self.loaded = {name: f"/adapters/{name}" for name in config.adapters}
