"""The choice of a backend, over any state of a pool."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.models import Config
from gateway.core.endings import Ending
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    LoadSample,
    ModelsSeen,
    Need,
    Phase,
    ProbeFailed,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
    TrafficFailed,
)
from gateway.pools.health import Order
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser

NOW = 100.0
ROUTE = Route("m", "m", "m")
CALL = Call(Endpoint.CHAT, Dialect.CHAT, "m", stream=False, body=b"{}")


class ManualClock:
    def now(self):
        return NOW

    def wall(self):
        return NOW


SAMPLES = st.builds(
    LoadSample,
    at=st.sampled_from([NOW, NOW - 60]),
    running=st.integers(0, 50),
    waiting=st.integers(0, 50),
    kv_usage_ratio=st.none() | st.floats(0, 1),
    kv_capacity_tokens=st.sampled_from([None, 500, 10_000]),
)
STATES = st.fixed_dictionaries(
    {
        "sample": st.none() | SAMPLES,
        "taken": st.integers(0, 3),
        "window": st.sampled_from([None, 100, 4096]),
        "fate": st.sampled_from(["ready", "ready", "degraded", "down", "cordoned", "starting"]),
        "limit": st.sampled_from([None, 1, 3]),
        "endpoints": st.sampled_from([None, frozenset({Endpoint.CHAT}), frozenset()]),
        "model": st.sampled_from(["m", "m", "adapter-only"]),
    }
)
CALLERS = st.builds(Caller, st.just("k"), st.just("n"), st.just("t"), st.integers(0, 1))
DEMANDS = st.builds(Demand, st.integers(0, 5000), st.booleans(), st.none() | st.integers(1, 500))


def pool_of(states):
    """Build a pool whose backends have come to the given states by observations."""
    backends = [
        {"url": f"http://127.0.0.1:{port}", "max_in_flight": state["limit"]}
        for port, state in enumerate(states, start=8001)
    ]
    table = PoolTable(ManualClock())
    table.apply(Config.model_validate({"pools": {"m": {"backends": backends}}}).pools)
    for backend, state in zip(tuple(table), states, strict=True):
        parent = None if state["model"] == "m" else "elsewhere"
        listed = (ServedModel(state["model"], parent, state["window"]),)
        if state["fate"] != "starting":
            table.observe(backend.id, ModelsSeen(NOW, listed, state["endpoints"]))
            table.observe(backend.id, ProbePassed(NOW))
        if state["sample"] is not None:
            table.observe(backend.id, Scraped(state["sample"]))
        for _ in range(5):
            if state["fate"] == "degraded":
                table.observe(backend.id, TrafficFailed(NOW, Ending.BROKE))
            elif state["fate"] == "down":
                table.observe(backend.id, ProbeFailed(NOW, "refused"))
        if state["fate"] == "cordoned":
            table.order(backend.id, Order.CORDON)
        for _ in range(state["taken"]):
            table.take(backend.id, NOW)
    return table


@given(
    states=st.lists(STATES, min_size=1, max_size=6),
    demand=DEMANDS,
    caller=CALLERS,
    need=st.builds(Need, st.integers(0, 5000), st.integers(0, 500)),
    top_priority=st.sampled_from([None, 1]),
    tried=st.sets(st.integers(1, 6), max_size=3),
    barred=st.sets(st.integers(1, 6), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_the_choice_may_take_the_request_or_the_reasons_account_for_all(
    states, demand, caller, need, top_priority, tried, barred, seed
):
    table = pool_of(states)
    tried = dict.fromkeys((f"m/b{place}" for place in tried), math.inf)
    barred = {f"m/b{place}" for place in barred}
    ask = Ask(ROUTE, CALL, demand, caller, need, top_priority, tried)
    chooser = Chooser(table, random.Random(seed))
    told, choice = chooser.explain(ask, NOW), chooser.find(ask, NOW, barred)
    assert len({table.get(each).phase for each in told.expected_s}) <= 1
    if choice is not None:
        assert choice.id not in {*tried, *barred, *told.excluded}
        assert choice.phase in (Phase.READY, Phase.DEGRADED)
    if told.expected_s.keys() - barred:
        assert choice.id in told.expected_s
    if not told.expected_s:
        assert choice is None
        assert set(told.excluded) == table.ids()


@given(
    states=st.lists(STATES, min_size=1, max_size=6),
    demand=DEMANDS,
    caller=CALLERS,
    seed=st.integers(0, 2**32),
)
def test_an_explanation_says_what_the_choice_does(states, demand, caller, seed):
    table = pool_of(states)
    ask = Ask(ROUTE, CALL, demand, caller)
    before = [backend.in_flight for backend in table]
    chooser = Chooser(table, random.Random(seed))
    told, choice = chooser.explain(ask, NOW), chooser.find(ask, NOW)
    assert (told.backend_id is None) == (choice is None) == (not told.expected_s)
    if choice is not None:
        least = min(told.expected_s.values())
        assert told.expected_s[choice.id] == told.expected_s[told.backend_id] == least
        assert all(seconds > 0 for seconds in told.expected_s.values())
    assert [backend.in_flight for backend in table] == before


@settings(max_examples=250)  # of which some hundred have one that is best
@given(
    states=st.lists(STATES, min_size=2, max_size=6),
    seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
)
def test_chance_decides_nothing_when_one_is_best(states, seeds):
    table, ask = pool_of(states), Ask(ROUTE, CALL, Demand(10, True), Caller("k", "n", "t"))
    costs = sorted(Chooser(table).explain(ask, NOW).expected_s.values())
    if costs and costs.count(costs[0]) == 1:
        first, second = (Chooser(table, random.Random(seed)).find(ask, NOW) for seed in seeds)
        assert first is second
