"""Restart one backend, and bring it up: what is done to it, step by step.

    restart:   its GPUs' turn --> drain --> stop, start --> bring up
    bring up:  healthy, models known --> one token --> adapters --> warm-up --> it serves, slowly at first

While this goes on the backend is DRAINING, then STARTING, whatever its probes say: a server that
answers `/health` has not proved that its engine works. A start that fails stays STARTING: what is
done about it is for the policy (`control.remedy`) to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.core.aio import Clock
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import ModelsSeen, Phase
from gateway.heal.autopsy import Autopsy
from gateway.heal.charge import Charge, Timing, emptied
from gateway.heal.gputurns import GpuTurns
from gateway.heal.healing import Cause, Restart, Sign
from gateway.heal.lookout import runs
from gateway.heal.overrides import Overrides
from gateway.heal.startup import StartWatch
from gateway.heal.usual import UsualTimes
from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Superseded,
)
from gateway.pools.health import Tending
from gateway.pools.table import PoolTable
from gateway.vllmlog.diagnosis import Kind
from gateway.watch import adapters
from gateway.watch.canary import canary, warm_up
from gateway.watch.fetch import FetchError
from gateway.wire.vllm import parse_models

log = logging.getLogger("gateway.supervisor")

_POLL_S: Final = 0.1
_CANARIES: Final = 2
_ADAPTER_S: Final = 120.0  # to read its weights from a slow disk
_WARM_UP_S: Final = 60.0
_MODELS_S: Final = 5.0


class StartFailed(Exception):
    """A start does not come to its good end though its process lives; the message is the evidence."""


class Ended(Exception):
    """The process ended while it started; the autopsy tells why."""


@dataclass(slots=True)
class Bringup:
    """What it takes to restart backends; one for all of them."""

    table: PoolTable
    clock: Clock
    overrides: Overrides
    usual: UsualTimes
    events: Events
    gpus: GpuTurns
    autopsy: Autopsy
    timing: Timing = Timing()

    async def restart(self, charge: Charge, order: Restart) -> bool:
        """Carry out an order; returns whether a server was started. Failures are told as events.

        Cancel: the server is left as it is; what was launched stays launched.
        """
        charge.restarting = True
        try:
            async with self.gpus.turn(charge):
                if order.planned:  # it served until now, for others' starts may take minutes
                    await self._drain(charge, order)
                incarnation = await self._launch(charge, order)
                charge.restarting = False
                await self._bring_up(charge, incarnation, order.incarnation)
        except LaunchError as error:
            charge.trouble, charge.starting = str(error), False  # what runs is looked at anew
            charge.watch = None
            superseded = isinstance(error, Superseded)
            failed = Tending(Phase.STARTING, "restart", str(error))
            self.table.tend(charge.id, None if superseded else failed)
            kind = Kind.PORT if error.obstacle is Obstacle.PORT else order.cause
            self._tell(charge, EventKind.LAUNCH_FAILED, kind.value, str(error))
            return False
        else:
            return True
        finally:
            charge.restarting = False

    async def bring_up(self, charge: Charge, incarnation: Incarnation | None) -> None:
        """Watch the start of a server that runs already, and try it. Nothing raises."""
        async with self.gpus.turn(charge):
            await self._bring_up(charge, incarnation)

    # --- down ---------------------------------------------------------------------------------------

    async def _drain(self, charge: Charge, order: Restart) -> None:
        """Let what it carries finish, up to `supervision.drain`."""
        streams = charge.backend.in_flight
        self._tend(
            charge,
            Phase.DRAINING,
            f"finishing {streams} request{'' if streams == 1 else 's'}, then {_why(order)}",
        )
        await emptied(charge.backend, self.clock, charge.pool.supervision.drain)

    async def _launch(self, charge: Charge, order: Restart) -> Incarnation | None:
        served_s = 0.0
        if charge.verified is not None:  # its last list is of the server that goes, whole
            charge.adapters = charge.known_adapters()
            served_s = self.clock.now() - (charge.first_seen_at or self.clock.now())
        charge.starting, charge.verified = True, None
        charge.signs.clear()
        charge.trouble, charge.diagnosis = "", None  # of the server that goes
        self._tend(charge, Phase.STARTING, _why(order))
        changes = self.overrides.starting(charge.id, charge.config.launch, served_s)
        grace_s = charge.pool.supervision.stop_grace
        charge.watch = self._watch(charge)
        restart = charge.launcher.restart
        incarnation = await restart(order.incarnation, grace_s=grace_s, changes=changes)
        charge.orders, charge.seen = charge.orders + 1, None  # what was seen before is gone
        # The one before answered until just now: what its probes said must not pass for this one's.
        self.table.tend(charge.id, Tending(Phase.STARTING, "restart", _why(order), fresh=True))
        return incarnation

    def _watch(self, charge: Charge) -> StartWatch:
        patience, now = charge.pool.supervision.patience, self.clock.now()
        usual_s = self.usual.of(charge.id, charge.config, self._changes(charge))
        return StartWatch(patience, now, charge.launcher.launches, usual_s)

    def _changes(self, charge: Charge) -> Changes:
        return self.overrides.of(charge.id, charge.config.launch).changes

    # --- up -----------------------------------------------------------------------------------------

    async def _bring_up(
        self, charge: Charge, incarnation: Incarnation | None, before: Incarnation | None = None
    ) -> None:
        """Take a start to its end. `before` is the incarnation that `incarnation`, if known, replaces."""
        charge.starting = True
        from_its_launch = charge.watch is not None  # else it was found running
        watch = charge.watch = charge.watch or self._watch(charge)
        self._tend(charge, Phase.STARTING, watch.told(self.clock.now()))
        try:
            await self._until_up(charge, incarnation, before)
            await self._try(charge, incarnation, before)
            await self._adapters(charge)
            await self._warm_up(charge)
        except StartFailed as error:
            # Only then the sign: the restart that comes of it has to find the remedy.
            await self.autopsy.examine_hung(charge, watch.stage.name.lower(), str(error))
            charge.signs[Cause.START_HUNG] = Sign(Cause.START_HUNG, str(error))
            return
        except Ended:
            return
        finally:
            charge.watch = None
        now = self.clock.now()
        if from_its_launch:
            changes = self._changes(charge)
            self.usual.learn(charge.id, charge.config, changes, watch.ended(now))
            gone = self.overrides.served(charge.id, charge.config.launch)
            if gone is not None:
                told = f"it serves without {gone.told()}, so that was dropped"
                self._tell(charge, EventKind.REMEDY, "dropped", told)
        charge.starting, charge.progress_at = False, now
        charge.verified = incarnation or runs(charge)
        self.table.tend(charge.id, None)
        took = f"serves {now - watch.began_at:.0f} s after its start"
        self._tell(charge, EventKind.STARTED, "started", took)

    async def _until_up(
        self, charge: Charge, incarnation: Incarnation | None, before: Incarnation | None
    ) -> None:
        """Wait until it is healthy and its models are known; the supervisor looks at its process.

        Where only a look tells the new incarnation, the old one may answer for a while yet.
        """
        watch = charge.watch
        assert watch is not None
        told = ""
        old = (None, before)
        while not charge.backend.health.up or (incarnation is None and runs(charge) in old):
            now = self.clock.now()
            self._fail_if_ended(charge, incarnation, before)
            if charge.seen is not None and charge.seen.state is Runs.PENDING:
                watch = charge.watch = self._watch(charge)  # its start has not begun
            hung = watch.hung(now)
            if hung is not None:
                raise StartFailed(hung)
            if (where := watch.told(now)) != told:
                told = where
                self._tend(charge, Phase.STARTING, told)
            await asyncio.sleep(_POLL_S)

    def _fail_if_ended(
        self, charge: Charge, incarnation: Incarnation | None, before: Incarnation | None
    ) -> None:
        seen = charge.seen
        if seen is None or not seen.gone or seen.incarnation is None:
            return
        if seen.incarnation == incarnation or (incarnation is None and seen.incarnation != before):
            raise Ended

    async def _try(
        self, charge: Charge, incarnation: Incarnation | None, before: Incarnation | None
    ) -> None:
        """Ask for one token; twice, for the first may find a cold engine.

        A server whose engine dies of it ends within seconds, and its end tells more.
        """
        self._tend(charge, Phase.STARTING, "it responds; now testing its engine with one token")
        failed = ""
        for _ in range(_CANARIES):
            try:
                timeout_s = self.timing.first_token_s
                await canary(charge.pages, charge.backend, timeout_s=timeout_s)
            except FetchError as error:
                failed = error.reason
            else:
                return
        until = self.clock.now() + self.timing.last_words_s
        while self.clock.now() < until:
            self._fail_if_ended(charge, incarnation, before)
            await asyncio.sleep(_POLL_S)
        why = f"/health responds, but its engine did not compute one token ({failed})"
        raise StartFailed(why)

    async def _adapters(self, charge: Charge) -> None:
        """Load the adapters that it should hold, and see them in its model list."""
        wanted = adapters.wanted(charge.pool, charge.adapters)
        if not wanted:
            return
        await self._see_models(charge)  # what is known may be the last word of the server before
        held = charge.backend.adapters
        missing = {name: path for name, path in wanted.items() if name not in held}
        for name, path in missing.items():
            self._tend(charge, Phase.STARTING, f"loading the adapter {name}")
            await self._load(charge, name, path)
        if missing:
            await self._see_models(charge)
            self._verify(charge, missing)

    async def _load(self, charge: Charge, name: str, path: str) -> None:
        try:
            await adapters.load(charge.pages, name, path, timeout_s=_ADAPTER_S)
        except adapters.AdapterError as error:
            self._tell(charge, EventKind.ADAPTER_FAILED, name, str(error))

    async def _see_models(self, charge: Charge) -> None:
        try:
            models = parse_models(await charge.pages.get("/v1/models", timeout_s=_MODELS_S))
        except FetchError as error:
            raise StartFailed(f"cannot read its model list: {error.reason}") from error
        backend = charge.backend
        seen = ModelsSeen(self.clock.now(), models, backend.endpoints, backend.version)
        self.table.observe(charge.id, seen)

    def _verify(self, charge: Charge, loaded: Mapping[str, str]) -> None:
        for name in loaded:
            if name in charge.backend.adapters:
                self._tell(charge, EventKind.ADAPTER, name, f"the adapter {name} was loaded again")

    async def _warm_up(self, charge: Charge) -> None:
        """Best effort: a server that gave one token serves."""
        try:
            await warm_up(charge.pages, charge.backend, timeout_s=_WARM_UP_S)
        except FetchError as error:
            log.warning(
                "%s: warm-up failed: %s", charge.id, error.reason, extra={"event": "warm_up_failed"}
            )

    # --- telling ------------------------------------------------------------------------------------

    def _tend(self, charge: Charge, phase: Phase, detail: str) -> None:
        now, watch = self.clock.now(), charge.watch
        left_s = None if watch is None or phase is not Phase.STARTING else watch.left_s(now)
        ready_at = None if left_s is None else now + left_s
        self.table.tend(charge.id, Tending(phase, "restart", detail, ready_at=ready_at))

    def _tell(self, charge: Charge, kind: EventKind, label: str, detail: str) -> None:
        self.events.tell(Event(self.clock.wall(), kind, charge.id, label, detail))


def _why(order: Restart) -> str:
    return f"restarting: {order.cause.value}, {order.evidence}"
