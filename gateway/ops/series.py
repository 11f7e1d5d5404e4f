"""The body of `GET /admin/v1/series`: the last hour of every pool and backend, in steps of 10 s.

A list has one value for each step, the oldest first; the last step ended at `now`. What was not known is
null, never 0. Counts are those of one step.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from msgspec import Raw
from typing_extensions import TypedDict

from gateway.observe.series import (
    BACKEND_COLUMNS,
    BUCKETS,
    PHASES,
    POOL_COLUMNS,
    STEP_S,
    Series,
    Track,
)

Values = list[float | None]


class PoolSeries(TypedDict):
    """The steps of one pool."""

    requests: Values  # that ended
    errors: Values  # of these, those that failed by no fault of the caller
    shed: Values  # of these, those that were refused for capacity
    ttft_p50_s: Values
    ttft_p95_s: Values
    gap_p95_s: Values
    tokens: Values  # that were written for requests that ended
    queued: Values  # at the end of the step, as the next
    in_flight: Values


class BackendSeries(TypedDict):
    """The steps of one backend. All but the first tokens is as at the end of a step."""

    pool: str
    phase: list[str | None]
    kv: Values  # used share of its KV cache
    running: Values
    waiting: Values
    in_flight: Values
    ttft_p50_s: Values  # from sending a request there
    ttft_p95_s: Values
    tokens: Values  # that its engine wrote in the step, for all of its clients


class SeriesTold(TypedDict):
    """The whole answer; `now` is seconds since the epoch. Backends are named POOL/NAME."""

    now: float
    step_s: float
    pools: dict[str, PoolSeries]
    backends: dict[str, BackendSeries]


async def series_told(series: Series, minutes: int) -> SeriesTold:
    """Return the last minutes, or as many as there are; streams come first. Cancel: nothing changes.

    Each track is JSON already: all at once, those of 500 pools would hold up every stream.
    """
    turn, now = series.turn, series.ended_wall
    count = min(int(minutes * 60 / STEP_S), turn, BUCKETS)
    pools: dict[str, Any] = {}
    backends: dict[str, Any] = {}
    for name, track in list(series.pools.items()):
        pools[name] = Raw(msgspec.json.encode(_pool(track, turn, count)))
        await asyncio.sleep(0)
    for name, track in list(series.backends.items()):
        backends[name] = Raw(msgspec.json.encode(_backend(track, turn, count)))
        await asyncio.sleep(0)
    return SeriesTold(now=round(now, 3), step_s=STEP_S, pools=pools, backends=backends)


def _pool(track: Track, turn: int, count: int) -> PoolSeries:
    return cast("PoolSeries", {name: track.read(name, turn, count) for name in POOL_COLUMNS})


def _backend(track: Track, turn: int, count: int) -> BackendSeries:
    found: dict[str, Any] = {name: track.read(name, turn, count) for name in BACKEND_COLUMNS}
    phases = [None if each is None else PHASES[int(each)].value for each in found["phase"]]
    return cast("BackendSeries", {"pool": track.pool, **found, "phase": phases})
