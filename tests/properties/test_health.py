from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.endings import Ending
from gateway.core.types import (
    LoadSample,
    ModelsSeen,
    Phase,
    ProbeFailed,
    ProbePassed,
    Scraped,
    ScrapeFailed,
    ServedModel,
    TrafficFailed,
    TrafficOk,
)
from gateway.pools.facts import HealthState, Policy, Tending
from gateway.pools.health import Order, advance, obey, tend

POLICY = Policy()
MODELS = (ServedModel("m", None, 4096),)
BY_OBSERVATION = frozenset({Phase.READY, Phase.DEGRADED, Phase.DOWN})

failures = st.sampled_from(Ending)
samples = st.builds(
    LoadSample,
    at=st.just(0.0),
    running=st.integers(0, 3),
    waiting=st.integers(0, 3),
    kv_usage_ratio=st.none() | st.integers(0, 100).map(lambda percent: percent / 100),
    progress=st.integers(0, 3).map(float),
    asleep=st.booleans(),
)
makers = st.one_of(
    st.just(ProbePassed),
    st.just(lambda at: ProbeFailed(at, "refused")),
    st.just(lambda at: ScrapeFailed(at)),
    st.just(lambda at: ModelsSeen(at, MODELS)),
    st.just(TrafficOk),
    failures.map(lambda reason: lambda at: TrafficFailed(at, reason)),
    samples.map(lambda sample: lambda at: Scraped(replace(sample, at=at))),
)
orders = st.sampled_from(Order)
tendings = st.sampled_from(
    [
        None,
        Tending(Phase.DRAINING, "restart", "drains first"),
        Tending(Phase.STARTING, "restart", "starts anew"),
        Tending(Phase.DOWN, "suspended", "crashed too often"),
    ]
)
ORDERED = (Order, Tending, type(None))
# Each step waits a while, then something is seen or ordered. Repeats make thresholds reachable.
steps = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 6), makers | orders | tendings), max_size=40
)


def walk(steps, state, at=0.0):
    """Yield (before, what happened, after) for each step."""
    for pause, times, what in steps:
        for _ in range(times):
            at += pause
            before = state
            if isinstance(what, Order):
                state = obey(state, what, at, POLICY)
            elif isinstance(what, ORDERED):
                state = tend(state, what, at, POLICY)
            else:
                state = advance(state, what(at), POLICY)
            yield before, what, state, at


def end_of(steps):
    """Return the state that the steps lead to, and when."""
    new = HealthState(since=0.0)
    return next(((state, at) for _, _, state, at in reversed([*walk(steps, new)])), (new, 0.0))


@given(steps)
def test_no_forbidden_transition_ever_happens(steps):
    for before, what, after, at in walk(steps, HealthState(since=0.0)):
        if after.phase is not before.phase:
            assert before.phase is not Phase.STOPPED
            assert after.since == at
            if not isinstance(what, ORDERED):
                assert after.phase in BY_OBSERVATION
                assert before.phase in BY_OBSERVATION | {Phase.STARTING}
        else:
            assert after.since == before.since


@given(steps)
def test_from_every_state_but_stopped_there_is_a_way_back_to_ready(steps):
    state, at = end_of(steps)
    if state.phase is Phase.STOPPED:
        return
    state = tend(obey(state, Order.RESUME, at, POLICY), None, at, POLICY)
    good = [
        *(ProbePassed(at + 1), ModelsSeen(at + 1, MODELS), ProbePassed(at + 2)),
        *(TrafficOk(at + 3), Scraped(LoadSample(at + 3, 0, 0, 0.0))),
    ]
    for observation in good:
        state = advance(state, observation, POLICY)
    assert state.phase is Phase.READY


@given(steps)
def test_time_alone_with_passing_probes_and_metrics_heals_what_traffic_did(steps):
    """No request may be needed to get back into service: none is sent to one that is out of it."""
    state, at = end_of(steps)
    if state.phase is Phase.STOPPED:
        return
    state = tend(obey(state, Order.RESUME, at, POLICY), None, at, POLICY)
    for second in range(1, 40):
        state = advance(state, ModelsSeen(at + second, MODELS), POLICY)
        state = advance(state, ProbePassed(at + second), POLICY)
        state = advance(state, Scraped(LoadSample(at + second, 0, 0, 0.0)), POLICY)
    assert state.phase is Phase.READY


@given(steps, st.integers(0, 10**6), st.integers(0, 10**6))
def test_how_full_a_backend_is_never_changes_its_phase(steps, running, waiting):
    """The same history with more load in its scrapes goes through the same phases."""

    def loaded(what):
        def make(at):
            observation = what(at)
            if not isinstance(observation, Scraped):
                return observation
            sample = observation.sample
            busy, usage = sample.running and sample.running + running, sample.kv_usage_ratio
            fuller = None if usage is None else (1 + usage) / 2
            more = {"running": busy, "waiting": sample.waiting + waiting, "kv_usage_ratio": fuller}
            return Scraped(replace(sample, **more))

        return what if isinstance(what, ORDERED) else make

    plain = [after.phase for _, _, after, _ in walk(steps, HealthState(since=0.0))]
    other = [(pause, times, loaded(what)) for pause, times, what in steps]
    assert plain == [after.phase for _, _, after, _ in walk(other, HealthState(since=0.0))]


@given(steps)
def test_no_count_of_failures_moves_a_backend_that_never_started(steps):
    only_failures = [
        (pause, times, what)
        for pause, times, what in steps
        if not isinstance(what, ORDERED)
        and isinstance(what(0.0), ProbeFailed | TrafficFailed | ScrapeFailed)
    ]
    for _, _, state, _ in walk(only_failures, HealthState(since=0.0)):
        assert state.phase is Phase.STARTING
