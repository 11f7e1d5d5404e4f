"""What the overview tells of a backend under supervision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from typing_extensions import TypedDict

from gateway.heal.autopsy import cause_of
from gateway.heal.decisions import Wait
from gateway.heal.states import Draining, Proving, Replacing, Starting, begins
from gateway.heal.supervised import Supervised
from gateway.ops.moment import Moment


class WaitOverview(TypedDict):
    """Why a backend that ails is not restarted now."""

    cause: str
    evidence: str
    why: str  # heal.decisions.Why
    until: str | None  # null: time does not end it


class DiagnosisOverview(TypedDict):
    """Why its process ended, or hangs in its start."""

    kind: str  # named as by `vllm-gateway diagnose`
    cause: str  # with what helps best
    evidence: str


class SupervisionOverview(TypedDict):
    """One backend under supervision."""

    state: str  # its `heal.states`, lower case
    own_restarts: int  # that its service manager made by itself since this gateway looks
    launched: bool  # by this gateway; else only restarted by it
    incarnation: str | None  # what runs, or ran last
    running: bool | None  # null: nobody can tell now
    starting: bool
    restarting: bool
    waits_for: str  # until whose start on its GPUs its own waits; empty: it does not wait
    outdated: bool  # it runs, or starts, with other `launch` settings than are configured now
    suspended: bool  # left alone until an operator restarts or undrains it
    trouble: str  # what its launcher last failed at; empty: nothing
    waits: WaitOverview | None
    diagnosis: DiagnosisOverview | None  # null once it starts again, or if its log tells nothing


class HoldOverview(TypedDict):
    """Automatic restarts are on hold, by an operator's order."""

    pool: str | None  # null: of all pools
    until: str | None  # null: until it is lifted
    reason: str  # why; empty: nobody said, or it was ordered at another gateway


def holds_told(
    holds: Mapping[str | None, float], why: Callable[[str | None], str], moment: Moment
) -> list[HoldOverview]:
    """Return the holds in force as they are told."""
    return [
        HoldOverview(
            pool=pool, until=None if until == inf else moment.told(until), reason=why(pool)
        )
        for pool, until in holds.items()
    ]


def reason_of(reason: str, unit: Supervised | None) -> str:
    """Return the short word of a phase; `new` in place of `restart` where nothing of it ran before."""
    first = unit is not None and begins(unit.state)
    return "new" if first and reason == "restart" else reason


def supervision(unit: Supervised, moment: Moment) -> SupervisionOverview:
    """Return a unit as it is told."""
    observed, decision, diagnosis = unit.observed, unit.decision, unit.diagnosis
    why = "" if diagnosis is None else cause_of(diagnosis)
    seen, waits = observed.seen, decision if isinstance(decision, Wait) else None
    return SupervisionOverview(
        state=type(unit.state).__name__.lower(),
        own_restarts=observed.own_restarts,
        launched=unit.launcher.launches,
        incarnation=None if seen is None else seen.incarnation,
        running=None if seen is None else seen.running,
        starting=isinstance(unit.state, Starting | Proving),
        restarting=isinstance(unit.state, Draining | Replacing) or unit.ordered is not None,
        waits_for=waits.waits_for if waits is not None else "",
        outdated=unit.outdated,
        suspended=unit.suspended,
        trouble=observed.unseen or observed.trouble,
        waits=None if waits is None else _waits(waits, moment),
        diagnosis=DiagnosisOverview(
            kind=diagnosis.kind.value, cause=why, evidence=diagnosis.evidence
        )
        if diagnosis is not None and why
        else None,
    )


def _waits(wait: Wait, moment: Moment) -> WaitOverview:
    return WaitOverview(
        cause=wait.cause.value,
        evidence=wait.evidence,
        why=wait.why.value,
        until=None if wait.until is None else moment.told(wait.until),
    )
