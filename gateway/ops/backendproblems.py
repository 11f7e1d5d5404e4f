"""What is wrong with a backend: its state, and what a state does not show. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.core.exclusion import Exclusion
from gateway.core.printable import count
from gateway.ops.gpus import gpu_problems
from gateway.ops.problems import Problem, ProblemKind, sentence
from gateway.ops.states import BackendState

if TYPE_CHECKING:
    from gateway.ops.overview import BackendOverview
    from gateway.ops.supervision import SupervisionOverview

_LOST_REQUESTS: Final = 8  # of ours, that an engine does not run; fewer are on their way
_LOST_S: Final = 8.0  # three scrapes
_STALE_S: Final = 15.0  # of a backend that has just come up, they are not known yet
_SLOW: Final = 2.0  # less is how equal servers may differ for a while
_SLOW_S: Final = 2.0  # the measure looks back 5 s itself
_DIAGNOSE: Final = "`vllm-gateway logs {id} | vllm-gateway diagnose -`"

# What supervision waits for, so that it does not restart what ails (`heal.decisions.Why`).
WHY_NOT: Final = {
    "unseen": "its process cannot be inspected",
    "held": "an operator drained it",
    "busy": "it is busy and making progress",
    "suspended": "restarts are suspended, as they did not help",
    "manual": "`automatic` is off",
    "on_hold": "restarts are on hold",
    "no_store": "the store that replicas share (`redis`) does not answer",
    "follower": "another replica is in charge",
    "ordered": "it was already ordered to restart",
    "suspected": "several backends failed at once, which may be the gateway's own fault",
    "window": "outside the restart window",
    "backoff": "pausing between restarts",
    "turn": "another backend is restarting",
    "budget": "too many backends of the pool are out already",
    "last": "it is the only backend that serves",
    "gpu": "another start uses its GPUs",
}


# Where it waits for one of these without an end, only an operator has it started.
_BY_HAND: Final = {
    "manual": "Run `vllm-gateway restart {id}` to start it.",
    "on_hold": "`vllm-gateway restart {id}` starts it now; `vllm-gateway hold --lift` ends the hold.",
}


# Where nothing was started, its log does not say why: what its launcher said does.
_NOT_STARTED: Final = {
    "failed": "See to that; it is started again by itself.",
    "suspended": "See to that, then run `vllm-gateway undrain {id}`.",
}


_CHANGED_SINCE: Final = (
    "Its `launch` was changed as it started, which holds from its next start on:"
    " `vllm-gateway restart {id} --force` begins that now."
)


@dataclass(frozen=True, slots=True)
class _State:
    """How a state is told; `tended` is the remedy where the gateway launched the backend."""

    kind: ProblemKind
    what: str
    remedy: str
    tended: str = ""


_STATES: Final[Mapping[BackendState, _State]] = {
    "suspended": _State(
        "suspended",
        "is suspended: restarts did not help, and it is left alone",
        "Repair it, then run `vllm-gateway undrain {id}`.",
        f"Read {_DIAGNOSE}, repair it, then run `vllm-gateway undrain {{id}}`.",
    ),
    "crash-looping": _State(
        "crash_looping",
        "crashes again and again",
        "Read its log where it runs.",
        f"Read {_DIAGNOSE}.",
    ),
    "failed": _State(
        "failed",
        "has failed: its process ended",
        "It is started again by itself. If it keeps failing, read its log where it runs.",
        f"It is started again by itself. If it keeps failing, read {_DIAGNOSE}.",
    ),
    "unreachable": _State(
        "unreachable",
        "cannot be reached",
        "See that vLLM runs there and that its address in `pools` is right:"
        " `vllm-gateway check FILE --probe`.",
        f"Read {_DIAGNOSE}.",
    ),
    "frozen": _State(
        "frozen",
        "is frozen: its process lives, and its engine makes no progress",
        "Restart vLLM there. With `restart` or `launch` in its settings the gateway does that by itself.",
        "It is restarted by itself, unless that is on hold; `vllm-gateway restart {id}` does it now.",
    ),
    "down": _State(
        "backend_down",
        "is down: its health checks fail",
        "Read vLLM's log where it runs, and restart it.",
        f"Read {_DIAGNOSE}.",
    ),
    "failing": _State(
        "failing",
        "answers its checks, but the requests sent to it fail",
        "Read vLLM's log where it runs; `vllm-gateway drain {id}` keeps requests from it.",
        f"Read {_DIAGNOSE}; `vllm-gateway drain {{id}}` keeps requests from it.",
    ),
    "asleep": _State(
        "asleep",
        "is asleep: its engine was put to sleep",
        "Wake it: `POST /wake_up` at its address.",
    ),
    "cordoned": _State(
        "cordoned",
        "gets no new requests, by an operator's order",
        "Run `vllm-gateway undrain {id}` when it may serve again.",
    ),
    "draining": _State(
        "draining",
        "is being drained: its requests finish, and it gets no new ones",
        "Run `vllm-gateway undrain {id}` when it may serve again.",
    ),
    "pending": _State(
        "pending",
        "waits for its service manager",
        "Wait, or look at what the service manager says of it.",
    ),
    "restarting": _State(
        "restarting", "is being restarted", "Wait; `vllm-gateway events` says why."
    ),
    "starting": _State(
        "starting",
        "is starting",
        "Wait until vLLM has loaded the model; its own log says how far it is.",
        "Wait; `vllm-gateway logs {id}` says how far it is.",
    ),
    "degraded": _State(
        "backend_degraded",
        "serves, with something wrong",
        "Read vLLM's log where it runs.",
        f"Read {_DIAGNOSE}.",
    ),
}


_SILENT: Final = _State(
    "frozen",
    "seems to be frozen: its server answers, and its engine writes nothing",
    "If it stays so, restart vLLM there. With `restart` or `launch` in its settings the gateway does that.",
    "If it stays so, it is restarted by itself; `vllm-gateway restart {id}` does it now.",
)


def state_problem(
    backend: BackendOverview, now: float, failures: Mapping[str, int]
) -> Problem | None:
    """Return what a backend's state says; None if it is ready. `failures`: of requests, by reason."""
    told = _SILENT if backend["reason"] == "silent" else _STATES.get(backend["state"])
    if told is None:
        return None
    return Problem(
        kind=told.kind,
        severity="degraded",
        subject=f"backend {backend['id']}",
        what=f"Backend {backend['id']} {_what(backend, told)}",
        cause=cause_of(backend, failures),
        remedy=_remedy(backend, told).format(id=backend["id"]),
        since=now - backend["phase_age_s"],
    )


def _remedy(backend: BackendOverview, told: _State) -> str:
    tended = backend["supervision"]
    if tended is None:
        return told.remedy
    waits = tended["waits"]
    endless = waits["why"] if waits is not None and waits["until"] is None else ""
    if backend["state"] == "failed" and endless in _BY_HAND:
        return _BY_HAND[endless]
    if _not_started(backend):
        return _NOT_STARTED[backend["state"]]
    if backend["state"] in ("restarting", "starting") and tended["outdated"]:
        return _CHANGED_SINCE
    ours = tended["launched"] or told.kind == "frozen"
    return told.tended if ours and told.tended else told.remedy


def _what(backend: BackendOverview, told: _State) -> str:
    if told.kind == "failed" and _not_started(backend):
        return "has failed to start"
    if backend["state"] == "crash-looping":
        return f"{told.what} ({backend['ended']} times in 10 min)"
    return told.what


def _not_started(backend: BackendOverview) -> bool:
    """Whether its launcher could not even start it."""
    tended = backend["supervision"]
    trouble = tended["trouble"] if tended is not None else ""
    return backend["state"] in _NOT_STARTED and trouble != "" and trouble in backend["detail"]


def cause_of(backend: BackendOverview, failures: Mapping[str, int]) -> str:
    """Return why a backend is in its state, in a sentence or two."""
    tended = backend["supervision"]
    diagnosis = None if tended is None else tended["diagnosis"]
    told = backend["detail"]
    if diagnosis is not None:
        told = diagnosis["cause"]
    elif backend["state"] == "failing" and failures:
        told += (
            f"; in 5 min: {', '.join(f'{number} {reason}' for reason, number in failures.items())}"
        )
    return " ".join(filter(None, (sentence(told), _waits(tended, told))))


def state_and_cause(backend: BackendOverview, failures: Mapping[str, int]) -> str:
    """Return a backend's state with its cause, as a clause."""
    state, cause = backend["state"], cause_of(backend, failures).rstrip(".")
    if cause[1:2].islower():  # no abbreviation
        cause = cause[0].lower() + cause[1:]
    return f"Backend {backend['name']} is {state}: {cause.removeprefix(f'{state}: ').removeprefix(f'{state}, ')}"


def _waits(tended: SupervisionOverview | None, told: str) -> str:
    if tended is None:
        return ""
    if trouble := tended["trouble"]:
        what = (
            "its process cannot be inspected"
            if tended["running"] is None
            else "it could not be restarted"
        )
        return "" if trouble in told else sentence(f"{what}: {trouble}")
    waits = tended["waits"]
    if waits is None:
        return ""
    until = f" until {waits['until'][11:19]} UTC" if waits["until"] else ""
    return f"It is not restarted{until}: {WHY_NOT.get(waits['why'], waits['why'])}."


def hidden_problems(backend: BackendOverview, failed: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with a backend that serves; `failed`: why it could not load adapters."""
    if backend["state"] not in ("ready", "degraded"):
        return
    backend_id, subject = backend["id"], f"backend {backend['id']}"
    if (slowness := backend["slowness"]) >= _SLOW:
        yield Problem(
            kind="slow",
            severity="degraded",
            subject=subject,
            what=f"Backend {backend_id} writes tokens {slowness:.1f} times slower than its fastest peer",
            cause="Requests go to its peers first. Its GPU may be throttled, or another process may use it.",
            remedy=f"Look at its GPU with `nvidia-smi`; `vllm-gateway drain {backend_id}` keeps requests from it.",
            weight=slowness,
            after_s=_SLOW_S,
        )
    if engine_lost(backend):
        running = (backend["running"] or 0) + (backend["waiting"] or 0)
        yield Problem(
            kind="lost_requests",
            severity="degraded",
            subject=subject,
            what=f"Backend {backend_id} has {count(backend['in_flight'], 'request')} of this gateway,"
            f" and its engine runs and queues only {running}",
            cause="The others are lost in its API server, or what it reports is wrong.",
            remedy=f"Look at vLLM's log there; `vllm-gateway restart {backend_id}` ends what hangs.",
            after_s=_LOST_S,
        )
    if backend["obstacle"] in (Exclusion.KV_FULL.value, Exclusion.NO_KV_ROOM.value):
        yield kv_problem(backend)
    if backend["stale"] and backend["engine"] == "vllm":
        yield Problem(
            kind="metrics_stale",
            severity="note" if not backend["in_flight"] else "degraded",
            subject=subject,
            what=f"The metrics of backend {backend_id} are out of date",
            cause="Its load is unknown, so it gets fewer requests.",
            remedy="See that `/metrics` answers there; start vLLM without `--disable-log-stats`.",
            after_s=_STALE_S,
        )
    yield from gpu_problems(backend_id, backend["gpus"])
    for adapter, why in backend["adapters_kept_back"].items():
        if why == Exclusion.ADAPTER_FAILED.value:
            yield Problem(
                kind="adapter_failed",
                severity="degraded",
                subject=f"model {adapter} on backend {backend_id}",
                what=f"Adapter {adapter} could not be loaded on backend {backend_id}",
                cause=sentence(failed.get(adapter, "")),
                remedy=adapter_remedy(backend_id, adapter),
            )


def kv_problem(backend: BackendOverview) -> Problem:
    """Return that the KV cache of a backend is full."""
    return Problem(
        kind="kv_full",
        severity="degraded",
        subject=f"backend {backend['id']}",
        what=f"The KV cache of backend {backend['id']} is full ({kv_use(backend)})",
        cause="It gets no new requests until some of its own end.",
        remedy="Add a backend, raise `--gpu-memory-utilization` of vLLM, or lower `max_context` of the pool.",
    )


def kv_use(backend: BackendOverview) -> str:
    """Return how full the KV cache of a backend is, and by what; what is not known is left out."""
    told: list[tuple[float | None, str, str]] = [
        (backend["kv_usage_ratio"], ".0%", "used"),
        (backend["running"], "d", "running"),
        (backend["waiting"], "d", "waiting"),
    ]
    if backend["obstacle"] == Exclusion.NO_KV_ROOM.value:
        told.insert(1, (backend["kv_projected_ratio"], ".0%", "with what its requests will need"))
    return ", ".join(f"{value:{form}} {what}" for value, form, what in told if value is not None)


def engine_lost(backend: BackendOverview) -> bool:
    """Whether a backend has far more of our requests than its engine knows."""
    if backend["running"] is None or backend["waiting"] is None:
        return False
    sent = backend["in_flight"] - backend["uploading"]
    lost = sent - backend["running"] - backend["waiting"]
    return lost >= _LOST_REQUESTS and 2 * lost > backend["in_flight"]


def adapter_remedy(backend_id: str, adapter: str) -> str:
    """Return what to do about an adapter that could not be loaded."""
    return (
        "See that its path is readable on the backend's machine, then run"
        f" `vllm-gateway adapters load {backend_id} {adapter}`."
    )
