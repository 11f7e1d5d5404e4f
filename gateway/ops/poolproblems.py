"""What is wrong with a pool, with a model of it, and with its backends. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gateway.core.exclusion import Exclusion
from gateway.core.printable import count
from gateway.observe.instruments import OTHER
from gateway.observe.recent import Tally
from gateway.ops.backendproblems import (
    adapter_remedy,
    hidden_problems,
    kv_problem,
    kv_use,
    state_and_cause,
    state_problem,
)
from gateway.ops.problems import MOST_ALIKE, Problem, sentence
from gateway.ops.recent import Failing, Lately
from gateway.ops.states import BACKENDS_WORST_FIRST, SERVING

if TYPE_CHECKING:
    from gateway.ops.overview import BackendOverview, PoolOverview

_NAMED: Final = 3  # backends of a pool that a sentence names; the rest are counted
_SOME_ERRORS: Final = 3
_ERROR_SHARE: Final = 0.02
_SHED_S: Final = 60.0
_AS_ORDERED: Final = frozenset({"ready", "cordoned", "draining"})  # nothing is wrong with these
_KV: Final = (Exclusion.KV_FULL.value, Exclusion.NO_KV_ROOM.value)

Failed = Mapping[str, Mapping[str, str]]  # why adapters could not be loaded, by backend and adapter


def pool_problems(
    pool: PoolOverview, lately: Lately, failed: Failed, now: float
) -> Iterator[Problem]:
    """Yield what is wrong with a pool; `failed`: why adapters could not be loaded."""
    failing, tally = lately.pool_failing(pool["name"]), lately.pool(pool["name"])
    failures = lately.failures
    if pool["state"] in ("down", "starting") and not failing:
        yield _down(pool, tally, failures, now)
    elif failing:
        yield _failing_pool(pool, failing, failures, now)
    elif pool["state"] == "saturated":
        yield _saturated(pool, lately.pool(pool["name"], _SHED_S))
    else:
        yield from _some_fail(pool, lately)
    yield from _other_models(pool)
    missing = _missing_adapters(pool, lately, failed)
    told = [each.subject for each in missing]
    if not failing:
        yield from (each for each in _models(pool, lately) if each.subject not in told)
    yield from missing
    yield from _backends(pool, failures, failed, told, now)


def _down(
    pool: PoolOverview, tally: Tally, failures: Mapping[str, Mapping[str, int]], now: float
) -> Problem:
    name, backends = pool["name"], pool["backends"]
    lost = tally.errors + tally.shed
    were = "was" if lost == 1 else "were"
    hurt = f"; {count(lost, 'request')} failed or {were} refused in 5 min" if lost else ""
    return Problem(
        kind="pool_down",
        severity="down",
        subject=f"pool {name}",
        what=f"Pool {name} is {pool['state']}: {_none_of(len(backends))} ready{hurt}",
        cause=_why_down(pool, failures),
        remedy=_remedy_of_worst(pool, now) or "Add a backend to the pool.",
        since=max((now - each["phase_age_s"] for each in backends), default=None),
        weight=lost,
    )


def _why_down(pool: PoolOverview, failures: Mapping[str, Mapping[str, int]]) -> str:
    troubled = _worst_first(pool["backends"])
    told = [state_and_cause(each, failures.get(each["id"], {})) for each in troubled[:_NAMED]]
    if len(troubled) > _NAMED:
        told.append(f"{len(troubled) - _NAMED} more")
    return f"{'. '.join(told)}." if told else ""


def _remedy_of_worst(pool: PoolOverview, now: float) -> str:
    troubled = _worst_first(pool["backends"])
    found = state_problem(troubled[0], now, {}) if troubled else None
    return "" if found is None else found.remedy


def _failing_pool(
    pool: PoolOverview, failing: Failing, failures: Mapping[str, Mapping[str, int]], now: float
) -> Problem:
    """Tell of it by what backends are, where none serves; else by what became of requests."""
    blamed = {
        each["id"]: failures[each["id"]] for each in pool["backends"] if each["id"] in failures
    }
    worst = max(blamed, key=lambda each: sum(blamed[each].values()), default="")
    log = f"`vllm-gateway logs {worst} | vllm-gateway diagnose -`" if worst else "vLLM's log"
    cause = _why_failing(failing, blamed)
    remedy = f"Read {log}; `vllm-gateway explain ID` tells of one request."
    if not any(each["state"] in SERVING | {"failing"} for each in pool["backends"]):
        cause = f"{_why_down(pool, failures)} {cause}"
        remedy = _remedy_of_worst(pool, now) or remedy
    return Problem(
        kind="requests_fail",
        severity="down",
        subject=f"pool {pool['name']}",
        what=f"Pool {pool['name']} fails most requests: {failing.told}",
        cause=cause,
        remedy=remedy,
        weight=failing.errors,
    )


def _why_failing(failing: Failing, blamed: Mapping[str, Mapping[str, int]]) -> str:
    kinds = ", ".join(
        f"{number} {outcome.replace('_', ' ')} ({code})"
        for (outcome, code), number in failing.endings.items()
    )
    by = "; ".join(
        f"{backend}: {', '.join(f'{number} {reason}' for reason, number in reasons.items())}"
        for backend, reasons in blamed.items()
    )
    return " ".join(
        filter(None, (sentence(kinds), sentence(f"attempts that failed: {by}" if by else "")))
    )


def _saturated(pool: PoolOverview, tally: Tally) -> Problem:
    name, queue, backends = pool["name"], pool["queue"], pool["backends"]
    fate = f"{count(queue['requests'], 'request')} waiting"
    if queue["oldest_s"] is not None:
        fate += f", the oldest for {queue['oldest_s']:.0f} s"
    if queue["requests"] >= queue["max_requests"]:
        fate = "its queue is full, and new requests are refused"
    if tally.shed:
        fate += f"; {tally.shed} refused in the last minute"
    full = [each for each in backends if each["obstacle"] in _KV]
    causes = [_obstacle(each) for each in backends if each["saturated"]]
    remedy = "Add a backend, or ask for less: fewer or shorter requests (`limits` of keys)."
    if full:
        remedy = kv_problem(full[0]).remedy
    elif any(each["obstacle"] == Exclusion.ENGINE_QUEUED.value for each in backends):
        remedy = "Add a backend, or raise `--max-num-seqs` of vLLM."
    return Problem(
        kind="saturated",
        severity="degraded",
        subject=f"pool {name}",
        what=f"Pool {name} is saturated: no backend has room, {fate}",
        cause=" ".join(causes[:_NAMED]),
        remedy=remedy,
        weight=queue["requests"] + tally.shed,
    )


def _obstacle(backend: BackendOverview) -> str:
    name, running, waiting = backend["name"], backend["running"], backend["waiting"]
    if backend["obstacle"] in _KV:
        return f"The KV cache of {name} is full: {kv_use(backend)}."
    if backend["obstacle"] == Exclusion.ENGINE_QUEUED.value:
        return f"The engine of {name} queues: {running or 0} running, {waiting or 0} waiting."
    if backend["obstacle"] == Exclusion.READING.value:
        return f"{name} still reads prompts that were sent to it."
    return f"{name} has {backend['in_flight']} of at most {backend['limit']} requests."


def _some_fail(pool: PoolOverview, lately: Lately) -> Iterator[Problem]:
    """Yield that a part of the requests fails, or was refused within the last minute."""
    name, tally = pool["name"], lately.pool(pool["name"], _SHED_S)
    if tally.errors >= _SOME_ERRORS and tally.errors > _ERROR_SHARE * tally.judged:
        ailing = (each["id"] for each in pool["backends"] if each["state"] not in _AS_ORDERED)
        blamed = ", ".join(ailing)
        yield Problem(
            kind="errors",
            severity="degraded",
            subject=f"pool {name}",
            what=f"{tally.errors} of {tally.judged} requests to pool {name} failed in the last minute",
            cause=sentence(f"not ready: {blamed}" if blamed else ""),
            remedy="`vllm-gateway events` says what happened to its backends.",
            weight=tally.errors,
        )
    if tally.shed:
        reasons = lately.recent.shed(name)
        told = ", ".join(
            f"{number} {reason.replace('_', ' ')}" for reason, number in reasons.items()
        )
        yield Problem(
            kind="shed",
            severity="degraded",
            subject=f"pool {name}",
            what=f"{count(tally.shed, 'request')} to pool {name} were refused for capacity in the last minute",
            cause=sentence(f"by reason, in 5 min: {told}" if told else ""),
            remedy="`vllm-gateway explain ID` names the setting that decided; add a backend if it lasts.",
            weight=tally.shed,
        )


def _models(pool: PoolOverview, lately: Lately) -> Iterator[Problem]:
    """Yield the models that fail, or that nobody serves, where the pool as a whole serves."""
    serves = pool["state"] in ("ready", "degraded")
    served = {pool["name"], *pool["aliases"], OTHER}  # the last: many, of which some are served
    for each in _serving(pool):
        served.update(set(each["models"]) - each["adapters_kept_back"].keys())
    for model, _ in lately.models(pool["name"]):
        # What was refused for capacity was served soon after, if anybody serves it.
        refused = serves and model not in served
        failing = lately.model_failing(pool["name"], model, refused=refused)
        if failing is not None:
            having = [each for each in pool["backends"] if model in each["models"]]
            told = ", ".join(f"{each['id']} ({each['state']})" for each in having)
            yield Problem(
                kind="model_fails",
                severity="down",
                subject=f"model {model} of pool {pool['name']}",
                group=f"models of pool {pool['name']}",
                what=f"Model {model} of pool {pool['name']} fails most requests: {failing.told}",
                cause=f"{_why_failing(failing, {})} Backends that have it: {told or 'none'}.",
                remedy=f"`vllm-gateway adapters list` tells where it is; `vllm-gateway route --model {model}`"
                " what would happen to a request.",
                weight=failing.errors,
            )


def _other_models(pool: PoolOverview) -> Iterator[Problem]:
    """Yield the backends that serve another model than their pool's, as after a start with other settings."""
    serving, group = _serving(pool), f"backends of pool {pool['name']}"
    without = [each for each in serving if each["base_model"] is None]
    for each in without:
        yield Problem(
            kind="other_model",
            severity="down" if len(without) == len(serving) else "degraded",
            subject=f"backend {each['id']}",
            group=group,
            what=f"Backend {each['id']} does not serve the model of its pool, and gets no requests for it",
            cause=f"It serves {', '.join(each['models'][:_NAMED]) or 'no model'}.",
            remedy="Start it with that model (vLLM's `--served-model-name`), or correct `served_model` of the pool.",
        )
    named = {each["base_model"]: each["name"] for each in serving if each["base_model"] is not None}
    if len(named) > 1 and pool["canary"] is None:
        told = ", ".join(f"{name} serves `{model}`" for model, name in [*named.items()][:_NAMED])
        yield Problem(
            kind="other_model",
            severity="note",
            subject=f"pool {pool['name']}",
            group=group,
            what=f"The backends of pool {pool['name']} serve different models: {told}",
            cause="A request gets the answer of either.",
            remedy="If it is the same model, give all of them the same `--served-model-name`; or set `served_model`"
            " of the pool to the one that is meant.",
        )


def _missing_adapters(pool: PoolOverview, lately: Lately, failed: Failed) -> list[Problem]:
    """Return the adapters that no backend has, and that could not be loaded."""
    serving, found = _serving(pool), {}
    for backend in serving:
        for adapter, why in backend["adapters_kept_back"].items():
            if why != Exclusion.ADAPTER_FAILED.value or adapter in found:
                continue
            if any(
                adapter not in each["adapters_kept_back"] and adapter in each["models"]
                for each in serving
            ):
                continue
            failing = lately.model_failing(pool["name"], adapter, refused=True)
            hurt = f"; {failing.told}" if failing else ""
            found[adapter] = Problem(
                kind="adapter_missing",
                severity="down",
                subject=f"model {adapter} of pool {pool['name']}",
                group=f"models of pool {pool['name']}",
                what=f"Adapter {adapter} of pool {pool['name']} is on no backend: it could not be loaded{hurt}",
                cause=sentence(failed.get(backend["id"], {}).get(adapter, "")),
                remedy=adapter_remedy(backend["id"], adapter),
            )
    return list(found.values())


def _backends(
    pool: PoolOverview,
    failures: Mapping[str, Mapping[str, int]],
    failed: Failed,
    told: Sequence[str],
    now: float,
) -> Iterator[Problem]:
    """Yield what is wrong with each backend; many of one kind are told as one. `told`: subjects.

    Where a pool is down, its only backend was told as the cause.
    """
    alone = len(pool["backends"]) == 1 and pool["state"] in ("down", "starting")
    by_kind: dict[str, list[tuple[BackendOverview, Problem]]] = {}
    for backend in () if alone else _worst_first(pool["backends"]):
        found = state_problem(backend, now, failures.get(backend["id"], {}))
        if found is not None:
            by_kind.setdefault(found.kind, []).append((backend, found))
    for alike in by_kind.values():
        if len(alike) > MOST_ALIKE:
            yield _many(pool, alike, now)
        else:
            yield from (problem for _, problem in alike)
    for backend in pool["backends"]:
        for problem in hidden_problems(backend, failed.get(backend["id"], {})):
            subject = f"{problem.subject.split(' on ')[0]} of pool {pool['name']}"
            if subject not in told and not (
                problem.kind == "kv_full" and pool["state"] == "saturated"
            ):
                yield replace(problem, group=f"backends of pool {pool['name']}")


def _many(
    pool: PoolOverview, alike: Sequence[tuple[BackendOverview, Problem]], now: float
) -> Problem:
    worst, first = alike[0]
    names = ", ".join(backend["name"] for backend, _ in alike[:_NAMED])
    states = " or ".join(dict.fromkeys(backend["state"] for backend, _ in alike))
    return replace(
        first,
        subject=f"backends of pool {pool['name']}",
        what=f"{len(alike)} backends of pool {pool['name']} are {states}"
        f" ({names} and {len(alike) - _NAMED} more)",
        cause=f"Of {worst['name']}: {first.cause}" if first.cause else "",
        since=min(problem.since or now for _, problem in alike),
        weight=len(alike),
    )


def _serving(pool: PoolOverview) -> list[BackendOverview]:
    return [each for each in pool["backends"] if each["state"] in SERVING]


def _worst_first(backends: Sequence[BackendOverview]) -> list[BackendOverview]:
    troubled = (each for each in backends if each["state"] != "ready")
    return sorted(troubled, key=lambda each: BACKENDS_WORST_FIRST.index(each["state"]))


def _none_of(backends: int) -> str:
    return "its only backend is not" if backends == 1 else f"none of its {backends} backends is"
