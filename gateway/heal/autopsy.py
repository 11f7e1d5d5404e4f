"""What ended, or hangs in its start, is examined: why, and what may be changed so that it starts?"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from gateway.core.aio import Clock
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import Phase
from gateway.heal.charge import Charge
from gateway.heal.cure import MAX_MODEL_LEN, Cure, cure
from gateway.heal.overrides import Overrides
from gateway.launch.launcher import LaunchError, Seen
from gateway.pools.health import Tending
from gateway.pools.table import PoolTable
from gateway.vllmlog.diagnosis import Diagnosis, Kind, diagnose

log = logging.getLogger("gateway.supervisor")

# An engine's death is told once for each request that it carried, with a traceback of some 3 KiB:
# this holds more than a thousand, and is read within a second or so, by a thread.
_LOG_BYTES: Final = 4 * 1024 * 1024
_UNTOLD: Final = "its log does not say why"


@dataclass(slots=True)
class Autopsy:
    """Examines servers that ended or hang in their start, and applies remedies."""

    table: PoolTable
    clock: Clock
    overrides: Overrides
    events: Events

    async def examine(self, charge: Charge, seen: Seen) -> None:
        """Take a backend whose process ended out of rotation, say why, and apply what policy allows.

        Errors: none; a log that cannot be read leaves the cause unknown.
        """
        charge.examined = seen.incarnation
        starting, orders = charge.starting, charge.orders
        if charge.backend.health.tended is None:
            self.table.tend(charge.id, Tending(Phase.DOWN, "exited", "its process has ended"))
        diagnosis = await self._diagnose(
            charge, exit_code=seen.exit_code, oom_killed=seen.oom_killed
        )
        if charge.gone:
            return  # reloaded meanwhile
        kind = EventKind.START_FAILED if starting else EventKind.EXITED
        code = "" if seen.exit_code is None else f" with code {seen.exit_code}"
        told = _cause(diagnosis) or f"its process ended{code}; {_UNTOLD}"
        self._tell(charge, kind, diagnosis.kind.value, told)
        if charge.restarting or charge.orders != orders:
            return  # begun anew meanwhile
        charge.diagnosis = diagnosis
        phase = Phase.STARTING if starting else Phase.DOWN
        reason = "start_failed" if starting else "exited"
        self.table.tend(charge.id, Tending(phase, reason, told))
        if starting and charge.config.launch is not None:
            self._apply(charge, diagnosis)

    async def examine_hung(self, charge: Charge, stage: str, why: str) -> None:
        """Say why a start hangs whose process lives, and apply what policy allows.

        `why` it counts as hung is all that is said where its log does not tell. Errors: none.
        """
        diagnosis = await self._diagnose(charge, hung=True)
        if charge.gone:
            return
        label, told = stage, why
        if cause := _cause(diagnosis):
            charge.diagnosis, charge.examined = diagnosis, charge.incarnation
            label, told = diagnosis.kind.value, f"{why}: {cause}"
        self._tell(charge, EventKind.START_FAILED, label, told)
        self.table.tend(charge.id, Tending(Phase.STARTING, "start_failed", told))
        if charge.config.launch is not None:
            self._apply(charge, diagnosis)

    async def _diagnose(
        self,
        charge: Charge,
        *,
        exit_code: int | None = None,
        oom_killed: bool | None = None,
        hung: bool = False,
    ) -> Diagnosis:
        text = ""
        try:
            text = await charge.launcher.log(_LOG_BYTES)
        except LaunchError as error:
            log.warning("%s: cannot read its log: %s", charge.id, error)
        return await asyncio.to_thread(
            diagnose, text, exit_code=exit_code, oom_killed=oom_killed, hung=hung
        )

    def _apply(self, charge: Charge, diagnosis: Diagnosis) -> None:
        launch = charge.config.launch
        assert launch is not None
        applied = self.overrides.of(charge.id, launch).changes
        found = cure(diagnosis, charge.pool, launch, applied)
        if found is None:
            return
        try:
            self.overrides.apply(charge.id, launch, found, self.clock.wall())
        except OSError as error:
            where = error.filename or self.overrides.folder
            log.error("cannot save the remedy: %s: %s", where, error.strerror)
        self._tell(charge, EventKind.REMEDY, found.remedy.value, _told(found))
        window = found.changes.args.get(MAX_MODEL_LEN)
        if isinstance(window, int):
            self.table.narrow(charge.id, window)

    def _tell(self, charge: Charge, kind: EventKind, label: str, detail: str) -> None:
        self.events.tell(Event(self.clock.wall(), kind, charge.id, label, detail))


def explained(charge: Charge) -> str:
    """Return why it does not run or serve, and what helps best, for people; empty if that is unknown."""
    if charge.diagnosis is None:
        return charge.trouble
    return _cause(charge.diagnosis) or _UNTOLD


def _cause(diagnosis: Diagnosis) -> str:
    """Return the cause and what helps best; empty where the log does not tell."""
    if diagnosis.kind in (Kind.UNKNOWN, Kind.HEALTHY):
        return ""
    return f"{diagnosis.cause}{_helps(diagnosis)}"


def _helps(diagnosis: Diagnosis) -> str:
    best = next(iter(diagnosis.remedies), None)
    if best is None:
        return ""
    flag = " ".join(filter(None, (best.flag, best.value)))
    if not flag:
        return f" To fix it: {best.why}."
    return f" To fix it: {'without ' if best.remove else ''}{flag} ({best.why})."


def _told(found: Cure) -> str:
    flags = [f"--{name} {value}" for name, value in found.changes.args.items()]
    variables = [f"{name}={value}" for name, value in found.changes.env.items()]
    return f"{' '.join([*flags, *variables]) or found.remedy.value}: {found.why}"
