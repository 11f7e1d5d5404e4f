"""The health of one backend: a pure phase machine, fed with observations and operators' orders.

What is seen (probes, scrapes, model lists, real traffic) changes *facts*; the phase is what the
facts add up to. The first line that applies wins:

    told to stop                                          STOPPED   final
    an operator's order                                   CORDONED or DRAINING, until undone
    the supervisor works on it                            DRAINING, STARTING or DOWN, until it is done
    never seen healthy                                    STARTING  patient: a failure is the reason
    `fall` failed probes, or one that answered 503,
      or `burst` refused connects                         DOWN      its last failure
      but probes that only time out count from the
      last sign of life: a byte, or a step
    the engine sleeps                                     DOWN      asleep
    work runs, no progress for `progress_s`, nor for as
      long as the prompt that is read may take, by
      metrics that still come                             DOWN      no_progress
    ejected: too many of its requests failed              DEGRADED  traffic or success_rate
    ejected, and tried again by one request at a time     DEGRADED  probation
    `burst` requests in a row failed                      DEGRADED  traffic
    our requests hear nothing for longer than is usual,
      until it makes progress, or for `ejection_s` after
      they left one whose engine shows no work            DEGRADED  silent
    `fall` probes timed out, with signs of life between   DEGRADED  slow_health
    metrics were seen, then none for `metrics_stale_s`    DEGRADED  metrics_stale
    otherwise                                             READY

               one pass + models             burst, ejected, silent, slow_health, metrics_stale
    STARTING ---------------------> READY <------------------------------> DEGRADED
                                      ^ |  ok, or `ejection_s` over           |
          `rise` passes + models read | | fall, burst, asleep, no_progress    |
                                      | v                                     |
                                      DOWN <----------------------------------+

    any of these --CORDON--> CORDONED, --DRAIN--> DRAINING; any --STOP--> STOPPED
    any of these --tend--> DRAINING before a restart, STARTING during it, DOWN when suspended
    CORDONED, DRAINING --RESUME--> what the facts, or the supervisor, say by then

Forbidden: out of STOPPED; back to STARTING, save by a restart or by resuming a backend that never
started; into or out of CORDONED and DRAINING by observation.

What fails in requests is soft evidence, for the server lives: `pools.attribution` says which endings count,
and `pools.ejection` whether a pool can do without the backend. One that it cannot spare is DEGRADED only.

Why it is so: `/health` 200 proves only that the API process lives, so progress is judged apart
(`pools.progress`). Silence alone takes only new requests elsewhere, where another backend can take
them: a suspicion, which the next sign of life ends. A full backend is busy, not sick: how high its KV
usage is, or how long its queue, decides nothing here. What a client did wrong (4xx, leaving) is never
observed at all. A server that went down has to show its model list anew before it serves: a restarted
one has lost the adapters loaded at run time.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, assert_never

from msgspec.structs import replace

from gateway.core.endings import FAILED, Ending
from gateway.core.types import (
    LoadSample,
    ModelsSeen,
    Observation,
    Phase,
    ProbeFailed,
    ProbePassed,
    Scraped,
    ScrapeFailed,
    TrafficFailed,
    TrafficOk,
)
from gateway.pools.attribution import is_hard
from gateway.pools.ejection import ejected, told
from gateway.pools.facts import Accused, HealthState, Policy, Tending
from gateway.pools.progress import Listened, Progress, listened, moved, scraped
from gateway.pools.unanswered import in_words


class Order(Enum):
    """What an operator, or a changed configuration, wants of a backend."""

    CORDON = "cordon"  # no new work
    DRAIN = "drain"  # no new work, because it is to go
    RESUME = "resume"  # undo either
    STOP = "stop"  # out for good


_HELD: Final = {Order.CORDON: Phase.CORDONED, Order.DRAIN: Phase.DRAINING, Order.RESUME: None}


def advance(state: HealthState, observation: Observation, policy: Policy) -> HealthState:
    """Return the state after one observation."""
    if state.phase is Phase.STOPPED:
        return state
    match observation:
        case ProbePassed(at, asked_at):
            state = _rise(_probe_passed(state, at, policy), policy)
            state = replace(state, probed_at=asked_at, probe_failure="")
        case ProbeFailed(at, reason, asked_at):
            state = _probe_failed(state, reason, policy)
            state = replace(state, probed_at=asked_at, probe_failure=reason)
        case Scraped(sample):
            at = sample.at
            state = _scraped(state, sample, policy)
        case ScrapeFailed(at):
            state = replace(state, metrics_lost=_metrics_lost(state, at, policy))
        case ModelsSeen(at):
            state = _rise(replace(state, models_known=True), policy)
        case TrafficOk(at):
            state = _traffic_ok(state, observation)
        case TrafficFailed(at):
            state = _traffic_failed(state, observation, policy)
        case _:
            assert_never(observation)
    return _judged(state, at, policy)


def listen(state: HealthState, said: Listened, at: float, policy: Policy) -> HealthState:
    """Return the state after our requests told what they heard."""
    if state.phase is Phase.STOPPED:
        return state
    heard = said.heard_at > state.heard_at
    if heard:
        state = replace(state, heard_at=said.heard_at, unheard_failures=0)
    progress = listened(state.progress, said, at, policy.ejection_s, heard=heard)
    return _judged(replace(state, progress=progress), at, policy)


def obey(state: HealthState, order: Order, at: float, policy: Policy) -> HealthState:
    """Return the state after an order; one that changes nothing returns the state as it is."""
    if state.phase is Phase.STOPPED:
        return state
    if order is Order.STOP:
        return replace(
            state,
            phase=Phase.STOPPED,
            since=at,
            reason="removed",
            detail="removed from the settings",
        )
    return _judged(replace(state, held=_HELD[order]), at, policy)


def tend(state: HealthState, tending: Tending | None, at: float, policy: Policy) -> HealthState:
    """Return the state while the supervisor works on a backend, or, with None, when it has ended.

    On the way into STARTING, and when it is `fresh`, all facts are forgotten: they were those of
    another process.
    """
    if state.phase is Phase.STOPPED:
        return state
    before = state.tended.phase if state.tended is not None else None
    if tending is not None and (tending.fresh or tending.phase is Phase.STARTING is not before):
        state = replace(_trusted(_fall(state, "new")), started=False, forgot_at=at)
    return _judged(replace(state, tended=tending), at, policy)


def eject(
    state: HealthState, accused: Accused, evidence: str, at: float, policy: Policy
) -> HealthState:
    """Return the state of one that its pool can do without, and that gets no new requests for a while."""
    return _judged(ejected(state, accused, evidence, at, policy), at, policy)


# --- what each observation teaches ----------------------------------------------------------------


def _probe_passed(state: HealthState, at: float, policy: Policy) -> HealthState:
    failures, ejection = state.traffic_failures, state.ejection
    if ejection is not None and state.up and not ejection.probation and at >= ejection.until:
        ejection = replace(ejection, probation=True)
    elif failures >= policy.burst and at >= state.retry_at and ejection is None:
        failures = policy.burst - 1  # tried again: one more failure takes it out at once
    return replace(
        state,
        ejection=ejection,
        probe_passes=state.probe_passes + 1,
        probe_failures=0,
        unheard_failures=0,
        traffic_failures=failures,
        metrics_lost=_metrics_lost(state, at, policy),
    )


def _probe_failed(state: HealthState, reason: str, policy: Policy) -> HealthState:
    failures, unheard = state.probe_failures + 1, state.unheard_failures + 1
    state = replace(state, probe_passes=0, probe_failures=failures, unheard_failures=unheard)
    # vLLM answers 503 when its engine is dead, and for nothing else (v1 async_llm.check_health).
    if not state.up or reason == "http_503":
        return _fall(state, reason)
    # A server short of processor time answers late: what it serves meanwhile is better evidence.
    counted = unheard if reason == "timeout" else failures
    return _fall(state, reason) if counted >= policy.fall else state


def _fall(state: HealthState, reason: str) -> HealthState:
    """Not up: whatever was known of the process may be of one that is gone."""
    return replace(
        state,
        up=False,
        trouble=reason,
        probe_passes=0,
        models_known=False,
        asleep=False,
        progress=Progress(),
        metrics_at=None,
        metrics_lost=False,
    )


def _rise(state: HealthState, policy: Policy) -> HealthState:
    needed = policy.rise if state.started else 1
    if state.up or not state.models_known or state.probe_passes < needed:
        return state
    return replace(_trusted(state), up=True, started=True)


def _scraped(state: HealthState, sample: LoadSample, policy: Policy) -> HealthState:
    before = state.progress.sample
    lives = before is not None and moved(before, sample)
    return replace(
        state,
        unheard_failures=0 if lives else state.unheard_failures,
        progress=scraped(state.progress, sample, policy.progress_s, policy.ejection_s),
        asleep=sample.asleep,
        metrics_at=sample.at,
        metrics_lost=False,
    )


def _metrics_lost(state: HealthState, at: float, policy: Policy) -> bool:
    """A backend that never showed metrics has lost none: it is judged by its probes alone."""
    return state.metrics_at is not None and at - state.metrics_at > policy.metrics_stale_s


def _traffic_ok(state: HealthState, ok: TrafficOk) -> HealthState:
    """What was sent before an ejection says nothing about it: only a trial ends it."""
    if state.ejection is None:
        return replace(state, connect_failures=0, traffic_failures=0)
    if not (ok.trial and state.ejection.probation):
        return replace(state, connect_failures=0)
    return replace(_trusted(state), ejections=state.ejection.times, cleared_at=ok.at)


def _traffic_failed(state: HealthState, failed: TrafficFailed, policy: Policy) -> HealthState:
    if not is_hard(failed.ending):
        return state
    connects = state.connect_failures + 1 if failed.ending is Ending.CONNECT else 0
    state = replace(
        state,
        connect_failures=connects,
        traffic_failures=state.traffic_failures + 1,
        traffic_reason=FAILED[failed.ending],
        retry_at=failed.at + policy.ejection_s,
    )
    if state.up and connects >= policy.burst:
        return _fall(state, "connect")
    ejection = state.ejection
    if failed.trial and ejection is not None and ejection.probation:
        return ejected(state, ejection.accused, ejection.evidence, failed.at, policy)
    return state


def _trusted(state: HealthState) -> HealthState:
    """No request that failed is held against it any more."""
    return replace(state, connect_failures=0, traffic_failures=0, ejection=None, ejections=0)


# --- what the facts add up to ---------------------------------------------------------------------


def _judged(state: HealthState, at: float, policy: Policy) -> HealthState:
    phase, reason, detail = _verdict(state, policy)
    if phase is state.phase and reason == state.reason and detail == state.detail:
        return state
    since = state.since if phase is state.phase else at
    return replace(state, phase=phase, reason=reason, detail=detail, since=since)


def _verdict(state: HealthState, policy: Policy) -> tuple[Phase, str, str]:
    if state.held is Phase.CORDONED:
        return Phase.CORDONED, "cordoned", "takes no new requests until it is resumed"
    if state.held is Phase.DRAINING:
        return Phase.DRAINING, "draining", "takes no new requests; running ones finish"
    if state.tended is not None:
        return state.tended.phase, state.tended.reason, state.tended.detail
    if not state.up:
        return _not_up(state, policy)
    if state.asleep:
        return Phase.DOWN, "asleep", "the engine is asleep"
    if (stuck_s := state.progress.stuck_s) and not state.metrics_lost:
        why = f"requests are running, but the engine made no progress for {stuck_s:.0f} s"
        return Phase.DOWN, "no_progress", why
    doubt = _doubt(state, policy)
    return (Phase.DEGRADED, *doubt) if doubt else (Phase.READY, "healthy", "health checks pass")


def _doubt(state: HealthState, policy: Policy) -> tuple[str, str] | None:
    """Return why one that serves is the second choice, or gets nothing, if it is so."""
    if (ejection := state.ejection) is not None:
        return told(ejection, policy)
    if state.traffic_failures >= policy.burst:
        why = f"{policy.burst} or more requests failed in a row, most recently: it {state.traffic_reason}"
        return "traffic", why
    if silent_s := state.progress.silent_s:
        why = f"nothing came from it for {silent_s:.0f} s while requests waited: longer than usual"
        return "silent", why
    if state.probe_failures >= policy.fall:
        why = f"it serves requests, but {state.probe_failures} health checks in a row timed out"
        return "slow_health", why
    if state.metrics_lost:
        why = (
            f"health checks pass, but there have been no metrics for {policy.metrics_stale_s:.0f} s"
        )
        return "metrics_stale", why
    return None


def _not_up(state: HealthState, policy: Policy) -> tuple[Phase, str, str]:
    if not state.started:
        seen = f"last health check: {in_words(state.trouble)}"
        return Phase.STARTING, state.trouble, "not checked yet" if state.trouble == "new" else seen
    if state.trouble == "connect":
        return Phase.DOWN, "connect", f"{policy.burst} requests in a row could not connect"
    if state.trouble == "http_503":
        return Phase.DOWN, state.trouble, "/health reports that the engine is dead (503)"
    many = f"{policy.fall} or more health checks failed in a row, most recently"
    why = many if state.probe_failures >= policy.fall else "its last failed health check"
    return Phase.DOWN, state.trouble, f"{why}: {in_words(state.trouble)}"
