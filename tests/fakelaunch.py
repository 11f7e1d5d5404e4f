"""A machine for stories of supervision: simulated servers in this process, started and stopped by a launcher.

    machine = Machine()
    Supervisor(..., make_launcher=machine.launcher)
    machine["m/b1"].plan(Script(exit_code=1, log=...))   what the next start does
    await machine["m/b1"].die(exit_code=-9)              its process ends

A `Machine` outlives gateways and launchers, as a real one does: a launcher made anew finds what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.config.models import BackendConfig, Config
from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Seen,
    Superseded,
)
from gateway.pools.table import Backend
from gateway.sim.server import SimConfig, SimServer


@dataclass
class Script:
    """What one start does. As it is: it comes up and serves."""

    exit_code: int | None = None  # it ends with that instead
    log: str = ""
    faults: tuple[str, ...] = ()
    listens: asyncio.Event | None = None  # it runs, and listens once this is set


class Slot:
    """One backend's place on the machine: its port, and the server that runs there, if one does."""

    def __init__(self, backend_id: str) -> None:
        self.id = backend_id
        self.model = "m"
        self.adapter_load_s = 0.0
        self._held: list[socket.socket] = []
        self.port = 0
        self.move()
        self.sim: SimServer | None = None
        self.past: list[SimServer] = []  # servers that ended
        self.script = Script()
        self.plans: deque[Script] = deque()
        self.judge: Callable[[Mapping[str, object]], Script] = lambda flags: Script()
        self.starts: list[Changes] = []
        self.stops: list[float] = []  # the grace of each
        self.refuses: list[str] = []  # what the next orders fail with
        self.obstacle = Obstacle.PORT  # of each
        self.late = 0  # so many looks after an order still show what was before; it returns None
        self.shown: list[Seen] = []
        self.looks: asyncio.Event | None = None  # looks come back once this is set
        self.logs: asyncio.Event | None = None  # the log is read once this is set
        self.reading = False
        self.unforeseen: Exception | None = None  # what reading the log raises, once
        self.waiting = 0  # looks that waited so
        self.hanging = 0  # looks that wait so now
        # A server that is told to stop has stopped once this is set.
        self.lasts: asyncio.Event | None = None
        self.stays = ""  # why it cannot be stopped
        self.blind = ""  # why it cannot be looked at
        self.running = False
        self.pending = False  # its service manager is at work on it while it does not run
        self.gone = False  # its service manager shows nothing of it while it does not run
        self.own_restarts = 0  # by its service manager
        self.exit_code: int | None = None
        self.began_at: float | None = None  # its process, where a look tells
        self.starting: asyncio.Task[None] | None = None
        self.speed = 0.0
        self.decode_step_s = 0.01
        self.max_num_seqs = 64
        self.number = 0

    @property
    def incarnation(self) -> Incarnation | None:
        return Incarnation(f"{self.id}#{self.number}") if self.number else None

    @property
    def received(self) -> int:
        """How many inference requests with a client's prompt came in, over all its servers."""
        sims = [*self.past, *([self.sim] if self.sim is not None else [])]
        return sum(len(sim.received("/v1/chat/completions")) for sim in sims)

    def move(self) -> None:
        """Take another port, for the next start."""
        hold = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound and never listening: nobody else gets the port, and connects to it are refused.
        hold.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold.bind(("127.0.0.1", 0))
        self._held.append(hold)
        self.port = hold.getsockname()[1]

    def plan(self, *scripts: Script) -> None:
        """Say what the next starts do."""
        self.plans.extend(scripts)

    async def begin(self, flags: Mapping[str, object] | None = None) -> Incarnation:
        """Start a server; it goes on listening in its own time."""
        flags = flags or {}
        self.script = script = self.plans.popleft() if self.plans else self.judge(flags)
        self.number += 1
        self.began_at = None
        self.exit_code = script.exit_code
        self.running = script.exit_code is None
        if self.running:
            window = int(str(flags.get("max-model-len", 8192)))
            self.starting = asyncio.get_running_loop().create_task(self._listen(script, window))
        made = self.incarnation
        assert made is not None
        return made

    async def _listen(self, script: Script, window: int) -> None:
        if script.listens is not None:
            await script.listens.wait()
        settings = SimConfig(
            model=self.model,
            port=self.port,
            max_model_len=window,
            speed=self.speed,
            decode_step_s=self.decode_step_s,
            max_num_seqs=self.max_num_seqs,
            adapter_load_s=self.adapter_load_s,
        )
        sim = SimServer(settings, script.faults)
        await sim.start()
        self.sim = sim

    async def die(self, exit_code: int = -9, log: str = "") -> None:
        """Its process ends by itself."""
        self.running, self.exit_code = False, exit_code
        self.script = Script(exit_code, log)
        await self.end()

    async def restart_itself(self) -> None:
        """Its service manager starts it again after its end."""
        self.own_restarts += 1
        await self.begin()
        self.pending = False

    async def end(self) -> None:
        self.running = False
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.wait([self.starting])
            self.starting = None
        if self.sim is not None:
            sim, self.sim = self.sim, None
            self.past.append(sim)
            await sim.stop()

    async def close(self) -> None:
        await self.end()
        for hold in self._held:
            hold.close()


class Machine:
    """All slots. `kinds` says what launchers are: ours (`launches`) or a service manager's."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.made: list[Launching] = []

    def __getitem__(self, backend_id: str) -> Slot:
        if backend_id not in self.slots:
            self.slots[backend_id] = Slot(backend_id)
        return self.slots[backend_id]

    def launcher(self, backend: Backend, config: Config) -> Launching | None:
        """Make the launcher of a backend, as `heal.fleet.launcher_of` does."""
        every = config.pools[backend.pool].backends
        settings = next(each for each in every if each.name == backend.name)
        if settings.launch is None and settings.restart is None:
            return None
        self.made.append(Launching(self[backend.id], settings))
        return self.made[-1]

    async def close(self) -> None:
        for slot in self.slots.values():
            await slot.close()


@dataclass
class Launching:
    """A launcher. It keeps the promises of `launch.launcher.Launcher`."""

    slot: Slot
    settings: BackendConfig
    launches: bool = field(init=False)
    closed: bool = False

    def __post_init__(self) -> None:
        self.launches = self.settings.launch is not None

    async def look(self) -> Seen:
        slot = self.slot
        if slot.blind:
            raise LaunchError(slot.blind)
        seen = slot.shown.pop() if slot.shown else self._seen()
        if (looks := slot.looks) is not None:
            slot.waiting += 1
            slot.hanging += 1
            try:
                async with asyncio.timeout(3):
                    await looks.wait()
            except TimeoutError as error:
                raise LaunchError("looking at it took too long") from error
            finally:
                slot.hanging -= 1
        return seen

    def _seen(self) -> Seen:
        slot = self.slot
        state = Runs.ENDED if slot.number and not slot.gone else Runs.ABSENT
        if slot.running or slot.pending:
            state = Runs.RUNNING if slot.running else Runs.PENDING
        code = None if slot.running else slot.exit_code
        more = {"own_restarts": slot.own_restarts, "began_at": slot.began_at}
        return Seen(slot.incarnation, state, code, **more)

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        slot = self.slot
        if slot.refuses:
            raise LaunchError(slot.refuses.pop(0), slot.obstacle)
        self._check(expected)
        if slot.running:
            slot.stops.append(grace_s)
            if slot.lasts is not None:
                await slot.lasts.wait()
        slot.shown = [self._seen()] * slot.late
        await slot.end()
        slot.starts.append(changes)
        launch = self.settings.launch
        made = await slot.begin({**(launch.args if launch is not None else {}), **changes.args})
        return None if slot.late else made

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        self._check(expected)
        if self.slot.stays:
            raise LaunchError(self.slot.stays)
        self.slot.stops.append(grace_s)
        if self.slot.lasts is not None:
            await self.slot.lasts.wait()
        await self.slot.end()
        self.slot.exit_code = 0

    async def log(self, max_bytes: int) -> str:
        if self.slot.logs is not None:
            self.slot.reading = True
            await self.slot.logs.wait()
        if (unforeseen := self.slot.unforeseen) is not None:
            self.slot.unforeseen = None
            raise unforeseen
        return self.slot.script.log[-max_bytes:]

    async def close(self) -> None:
        self.closed = True

    def _check(self, expected: Incarnation | None) -> None:
        slot = self.slot
        if expected != slot.incarnation and (slot.running or expected is not None):
            raise Superseded(f"{slot.incarnation} runs, not {expected}")


@contextlib.asynccontextmanager
async def machine():  # type: ignore[no-untyped-def]
    """A machine that ends with everything on it."""
    made = Machine()
    try:
        yield made
    finally:
        await made.close()
