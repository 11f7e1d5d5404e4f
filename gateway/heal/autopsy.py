"""Examines servers that ended or hang in their start: why, and what may be changed so that they start."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import Clock
from gateway.core.events import EventKind, Events
from gateway.heal.cure import MAX_MODEL_LEN, Cure, cure
from gateway.heal.overrides import Overrides
from gateway.launch.launcher import Launcher, LaunchError, Seen
from gateway.pools.table import PoolTable
from gateway.vllmlog.diagnosis import Confidence, Diagnosis, Kind, diagnose

log = logging.getLogger("gateway.supervisor")

# An engine's death is told once for each request that it carried, with a traceback of some 3 KiB:
# this holds more than a thousand, and is read within a second or so, by a thread.
_LOG_BYTES: Final = 4 * 1024 * 1024
_SAYS_NOTHING: Final = frozenset({Kind.UNKNOWN, Kind.HEALTHY})  # of why it ended
_UNTOLD: Final = "its log does not say why"


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a server ended or hangs; `diagnosis` is None where its log does not tell of a hang."""

    diagnosis: Diagnosis | None
    told: str  # for people

    @property
    def hopeless(self) -> bool:
        """Whether starting it again as it is will fail again."""
        found = self.diagnosis
        if found is None or found.kind in _SAYS_NOTHING:
            return False
        return found.restart_helps is False and found.confidence is Confidence.HIGH


NOT_EXAMINED: Final = Finding(
    None, "why it ended could not be examined, by a bug of the gateway: see its log"
)


@dataclass(slots=True)
class Autopsy:
    """Examines servers that ended or hang in their start, tells why as an event, and applies remedies."""

    table: PoolTable
    clock: Clock
    overrides: Overrides
    events: Events

    async def of_end(
        self, backend_id: str, launcher: Launcher, seen: Seen, *, starting: bool
    ) -> Finding:
        """Find out why a process ended. Errors: none; a log that cannot be read tells nothing."""
        diagnosis = await self._diagnose(backend_id, launcher, seen, hung=False)
        code = "" if seen.exit_code is None else f" with code {seen.exit_code}"
        told = cause_of(diagnosis) or f"its process ended{code}; {_UNTOLD}"
        kind = EventKind.START_FAILED if starting else EventKind.EXITED
        self.events.note(self.clock, kind, backend_id, diagnosis.kind.value, told)
        return Finding(diagnosis, told)

    async def of_hang(self, backend_id: str, launcher: Launcher, stage: str, why: str) -> Finding:
        """Find out why a start hangs whose process lives; `why` it counts as hung is told in any case."""
        diagnosis = await self._diagnose(backend_id, launcher, Seen(), hung=True)
        finding, label = Finding(None, why), stage
        if cause := cause_of(diagnosis):
            finding, label = Finding(diagnosis, f"{why}: {cause}"), diagnosis.kind.value
        self.events.note(self.clock, EventKind.START_FAILED, backend_id, label, finding.told)
        return finding

    async def _diagnose(
        self, backend_id: str, launcher: Launcher, seen: Seen, *, hung: bool
    ) -> Diagnosis:
        text = ""
        try:
            text = await launcher.log(_LOG_BYTES)
        except LaunchError as error:
            log.warning(
                "%s: cannot read its log: %s", backend_id, error,
                extra={"event": "backend_log_unreadable", "backend": backend_id},
            )  # fmt: skip
        return await asyncio.to_thread(
            diagnose, text, exit_code=seen.exit_code, oom_killed=seen.oom_killed, hung=hung
        )

    def remedy(
        self, backend_id: str, pool: PoolConfig, config: BackendConfig, finding: Finding
    ) -> bool:
        """Apply the first remedy that the pool allows and that changes anything; whether one did."""
        launch = config.launch
        if launch is None or finding.diagnosis is None:
            return False
        applied = self.overrides.of(backend_id, launch).changes
        found = cure(finding.diagnosis, pool, launch, applied)
        if found is None:
            return False
        self.overrides.apply(backend_id, launch, found, self.clock.wall())
        self.events.note(self.clock, EventKind.REMEDY, backend_id, found.remedy.value, _told(found))
        window = found.changes.args.get(MAX_MODEL_LEN)
        if isinstance(window, int):
            self.table.narrow(backend_id, window)
        return True


def explained(diagnosis: Diagnosis | None) -> str:
    """Return why it ended or does not serve, and what helps best; empty where nothing was examined."""
    return "" if diagnosis is None else cause_of(diagnosis) or _UNTOLD


def cause_of(diagnosis: Diagnosis) -> str:
    """Return the cause and what helps best; empty where the log does not tell."""
    if diagnosis.kind in _SAYS_NOTHING:
        return ""
    helps = _helps(diagnosis)
    return f"{diagnosis.cause.removesuffix('.')}.{helps}" if helps else diagnosis.cause


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
