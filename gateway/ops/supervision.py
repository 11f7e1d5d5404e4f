"""What the overview tells of a backend under supervision."""

from __future__ import annotations

from typing import TypedDict

from gateway.heal.charge import Charge
from gateway.heal.healing import Wait
from gateway.ops.moment import Moment


class WaitOverview(TypedDict):
    """Why a backend that ails is not restarted now."""

    cause: str
    evidence: str
    why: str  # control.healing.Why
    until: str | None  # null: time does not end it


class DiagnosisOverview(TypedDict):
    """Why its process ended, or hangs in its start."""

    kind: str  # named as by `vllm-gateway diagnose`
    cause: str
    evidence: str


class SupervisionOverview(TypedDict):
    """One backend under supervision."""

    launched: bool  # by this gateway; else only restarted by it
    incarnation: str | None  # what runs, or ran last
    running: bool | None  # null: nobody can tell now
    starting: bool
    restarting: bool
    waits_for: str  # until whose start on its GPUs its own waits; empty: it does not wait
    suspended: bool  # left alone until an operator restarts or undrains it
    trouble: str  # what its launcher last failed at; empty: nothing
    waits: WaitOverview | None
    diagnosis: DiagnosisOverview | None  # null once it is launched anew


def supervision(charge: Charge, moment: Moment) -> SupervisionOverview:
    """Return a charge as it is told."""
    seen, decision, diagnosis = charge.seen, charge.decision, charge.diagnosis
    return SupervisionOverview(
        launched=charge.launcher.launches,
        incarnation=None if seen is None else seen.incarnation,
        running=None if seen is None else seen.running,
        starting=charge.starting,
        restarting=charge.restarting,
        waits_for=charge.waits_for,
        suspended=charge.suspended,
        trouble=charge.trouble,
        waits=_waits(decision, moment) if isinstance(decision, Wait) else None,
        diagnosis=None
        if diagnosis is None
        else DiagnosisOverview(
            kind=diagnosis.kind.value, cause=diagnosis.cause, evidence=diagnosis.evidence
        ),
    )


def _waits(wait: Wait, moment: Moment) -> WaitOverview:
    return WaitOverview(
        cause=wait.cause.value,
        evidence=wait.evidence,
        why=wait.why.value,
        until=None if wait.until is None else moment.told(wait.until),
    )
