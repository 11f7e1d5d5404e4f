"""The choice of a backend for one request, or the refusal that says why there is none."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

from gateway.core.errors import Overloaded, Rejected, Unavailable
from gateway.core.types import Call, Demand, Exclusion, Route
from gateway.pools.table import Backend
from gateway.routing.filters import eligible, reasons
from gateway.routing.pick import pick


def choose(  # noqa: PLR0913 - what is asked, of whom, and when
    backends: Sequence[Backend],
    route: Route,
    call: Call,
    demand: Demand,
    tried: Collection[str],
    now: float,
    rng: random.Random,
) -> Backend:
    """Return the best of the eligible backends.

    Raises:
        Overloaded: those that could take it are saturated (503).
        Unavailable: none serves it now (503).
    """
    found = eligible(backends, route, call, demand, tried, now)
    if found:
        return pick(found, now, rng)
    raise refusal(route, reasons(backends, route, call, demand, tried, now), rng)


def refusal(route: Route, why: Mapping[str, Exclusion], rng: random.Random) -> Rejected:
    """Return the refusal for a request that found no backend, with what was wrong with each."""
    counts: dict[str, int] = {}
    for reason in why.values():
        counts[reason.value] = counts.get(reason.value, 0) + 1
    tally = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none configured"
    if Exclusion.SATURATED in why.values():
        wait_s = rng.uniform(1.0, 3.0)
        return Overloaded(
            f"`{route.requested}` is overloaded: of its {len(why)} backends {tally}. "
            f"Retry in {math.ceil(wait_s)} s.",
            retry_after_s=wait_s,
        )
    return Unavailable(
        f"`{route.requested}`: none of its {len(why)} backends can serve this now ({tally}).",
        param="model",
        retry_after_s=rng.uniform(2.0, 5.0),
    )
