"""Attempts after failures, whatever fails and in whatever order: how many there are, and of what."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import (
    BackendBroke,
    BackendTimeout,
    ConnectFailed,
    EngineFull,
    StaleConnection,
    StreamBroke,
)
from gateway.core.exclusion import Chance
from gateway.upstream.attempts import (
    BUDGET_FLOOR,
    BUDGET_RATIO,
    MAX_ATTEMPTS,
    Budget,
    Next,
    adds_load,
    after,
    pause_s,
)

KINDS = [BackendBroke, BackendTimeout, ConnectFailed, EngineFull, StaleConnection, StreamBroke]
failures = st.tuples(st.sampled_from(KINDS), st.none() | st.floats(0.1, 10))
steps = st.lists(
    st.tuples(
        st.integers(0, 20), st.sampled_from(["one", "two"]), st.integers(0, 100), st.booleans()
    )
)


@given(steps)
def test_the_budget_is_never_exceeded_in_any_order_of_beginnings_and_ends(steps):
    budget, under_way = Budget(), {}
    for request, pool, active, begins in steps:
        if not begins:
            budget.end(request)
            under_way.pop(request, None)
            continue
        others = [each for each, of in under_way.items() if of == pool and each != request]
        may = len(others) < max(BUDGET_FLOOR, BUDGET_RATIO * active // 1)
        assert budget.begin(request, pool, active) is may
        under_way.pop(request, None)
        if may:
            under_way[request] = pool
            assert budget.under_way(pool) <= max(BUDGET_FLOOR, BUDGET_RATIO * active)
    for pool in ("one", "two"):
        assert budget.under_way(pool) == [*under_way.values()].count(pool)


@given(st.lists(failures, min_size=1, max_size=20), st.sampled_from(Chance), st.floats(0.1, 60))
def test_a_request_is_sent_three_times_at_most_and_once_more_only_where_nothing_was_executed(
    failed, chance, left_s
):
    attempts, fresh, waited_s = 1, 0, 0.0
    step = None
    for kind, asked_s in failed:
        if step is Next.FRESH_CONNECTION and kind is StaleConnection:
            return  # a fresh connection was never idle
        error = kind("x", asked_s) if kind is EngineFull else kind("x")
        step = after(
            error,
            attempts=attempts,
            repeatable=True,
            over=False,
            chance=chance,
            left_s=left_s - waited_s,
        )
        if step is Next.TELL:
            return
        assert isinstance(error, StaleConnection | ConnectFailed | EngineFull)
        assert step is not Next.ELSEWHERE or chance is not Chance.NEVER
        assert adds_load(error, over=False) or isinstance(error, ConnectFailed | StaleConnection)
        pause = pause_s(step, error, attempts, 0.999)
        assert 0 <= pause <= (2.0 if step is Next.AGAIN else 0.25)
        assert waited_s + pause <= left_s or step is not Next.AGAIN
        waited_s += pause
        fresh += step is Next.FRESH_CONNECTION
        assert fresh <= 1
        attempts += 1
        assert attempts <= MAX_ATTEMPTS
    assert len(failed) < MAX_ATTEMPTS
