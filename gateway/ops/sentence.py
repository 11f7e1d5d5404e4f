"""How things are, in one or two sentences: the top of `status`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.core.types import Phase
from gateway.ops.states import BACKENDS_WORST_FIRST, POOLS_WORST_FIRST

if TYPE_CHECKING:
    from gateway.ops.overview import PoolOverview

_NAMED: Final = 3  # pools and backends that a sentence names; the rest are counted


def verdict(pools: Sequence[PoolOverview], *, draining: bool = False) -> str:
    """Return how things are in one or two sentences, the worst first."""
    in_flight = sum(backend["in_flight"] for pool in pools for backend in pool["backends"])
    parts = []
    if draining:
        left = _count(in_flight, "request")
        parts.append(f"Shutting down: {left} still in flight; new requests are refused.")
    bad = sorted(
        (pool for pool in pools if pool["state"] != "ready"),
        key=lambda pool: POOLS_WORST_FIRST.index(pool["state"]),
    )
    parts += [_pool_sentence(pool) for pool in bad[:_NAMED]]
    if len(bad) > _NAMED:
        parts.append(f"{_count(len(bad) - _NAMED, 'more pool')} not ready.")
    if not bad and not draining:
        backends = sum(len(pool["backends"]) for pool in pools)
        parts.append(
            f"Ready: {_count(len(pools), 'pool')}, {_count(backends, 'backend')}, "
            f"{_count(in_flight, 'request')} in flight."
        )
    elif bad and len(bad) < len(pools):
        parts.append("Everything else is ready.")
    return " ".join(parts)


def _pool_sentence(pool: PoolOverview) -> str:
    name, backends = pool["name"], pool["backends"]
    ready = sum(each["phase"] == Phase.READY.value for each in backends)
    troubled = sorted(
        (each for each in backends if each["state"] != "ready"),
        key=lambda each: BACKENDS_WORST_FIRST.index(each["state"]),
    )
    match pool["state"]:
        case "saturated":
            queue = pool["queue"]
            fate = f"{_count(queue['requests'], 'request')} waiting"
            if queue["requests"] >= queue["max_requests"]:
                fate = "its queue is full and new requests are refused"
            return f"{name} is saturated: no backend has room, {fate}."
        case "down":
            head = f"{name} is down: {_none_of(len(backends))} serving"
        case "starting":
            head = f"{name} is starting: {_none_of(len(backends))} ready yet"
        case _:
            head = f"{name}: {ready} of {_count(len(backends), 'backend')} ready"
    told = [
        f"{each['name']} {each['state']} for {_duration(each['phase_age_s'])}: {each['detail']}"
        for each in troubled[:_NAMED]
    ]
    if len(troubled) > _NAMED:
        told.append(f"{len(troubled) - _NAMED} more")
    return f"{head} ({'; '.join(told)})." if told else f"{head}."


def _none_of(backends: int) -> str:
    return "its only backend is not" if backends == 1 else f"none of {backends} backends is"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    """Return `8 s`, `6 min`, `3 h` or `12 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
