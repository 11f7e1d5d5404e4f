"""Which endings count against a backend, when its pool leaves it out, and how it comes back."""

from functools import partial

import pytest

from gateway.config.models import Config
from gateway.core.endings import FAILED, Ending
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    Exclusion,
    ModelsSeen,
    Need,
    Phase,
    ProbeFailed,
    ProbePassed,
    Route,
    ServedModel,
    TrafficFailed,
    TrafficOk,
)
from gateway.pools.attribution import CLASS_OF, Failure
from gateway.pools.ejection import out_s
from gateway.pools.facts import Policy, Tending
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser

MODELS = (ServedModel("m", None, 4096),)
HARD = [each for each in Ending if CLASS_OF[each] is Failure.HARD]


class ManualClock:
    """Time as the test says."""

    def __init__(self, at):
        self.at = at

    def now(self):
        return self.at

    wall = now


class Pool:
    """A pool of so many backends that serve, and a clock."""

    def __init__(self, size):
        self.clock = ManualClock(1000.0)
        self.table = PoolTable(self.clock)
        urls = [f"http://127.0.0.1:{port}" for port in range(8001, 8001 + size)]
        config = Config.model_validate({"pools": {"m": {"backends": urls}}})
        self.table.apply(config.pools)
        self.chooser = Chooser(self.table)
        for backend in self.table:
            self.passes(backend.name)

    def __getitem__(self, name):
        return self.table.get(f"m/{name}")

    def passes(self, name):
        self.table.observe(f"m/{name}", ModelsSeen(self.clock.at, MODELS))
        for _ in range(2):
            self.table.observe(f"m/{name}", ProbePassed(self.clock.at))

    def down(self, name):
        for _ in range(3):
            self.table.observe(f"m/{name}", ProbeFailed(self.clock.at, "refused"))

    def attempt(self, name, ending=None):
        """Send one request there, which ends so."""
        backend = self[name]
        slot = self.table.take(backend.id, self.clock.at)
        self.ends(slot, ending)

    def ends(self, slot, ending=None):
        backend, at = self.table.get(slot.backend_id), self.clock.at
        trial = backend.tries(slot)
        said = TrafficOk(at, trial) if ending is None else TrafficFailed(at, ending, trial)
        self.table.observe(backend.id, said)
        slot.release()

    def fails(self, name, times=5):
        for _ in range(times):
            self.attempt(name, Ending.HTTP_5XX)

    def later(self, seconds):
        self.clock.at += seconds
        for members in self.table.pools().values():
            for backend in members:
                backend.tally.tick(self.clock.at)

    def asks(self, tried=()):
        call = Call(Endpoint.CHAT, Dialect.CHAT, "m", False, b"{}")
        ask = Ask(Route("m", "m", "m"), call, Demand(10, exact=True), Caller("k", "n", "t", 0))
        ask.need = Need(10, 10)
        ask.tried = dict.fromkeys(tried, self.clock.at)
        return ask

    def chosen(self, tried=()):
        found = self.chooser.find(self.asks(tried), self.clock.at)
        return None if found is None else found.name

    def excluded(self):
        why = self.chooser.explain(self.asks(), self.clock.at).excluded
        return {backend_id.removeprefix("m/"): each for backend_id, each in why.items()}


def test_every_ending_has_its_class():
    assert set(CLASS_OF) == set(Ending)
    assert {each for each in Ending if CLASS_OF[each] is Failure.NACK} == {Ending.FULL}
    neutral = {each for each in Ending if CLASS_OF[each] is Failure.NEUTRAL}
    assert neutral == {
        Ending.OURS, Ending.STALE, Ending.MOVED, Ending.REST_REFUSED, Ending.DOWN, Ending.REFUSED,
    }  # fmt: skip


@pytest.mark.parametrize("ending", [each for each in HARD if each is not Ending.CONNECT])
def test_five_hard_failures_in_a_row_eject_a_backend(ending):
    pool = Pool(2)
    for _ in range(4):
        pool.attempt("b1", ending)
    assert pool["b1"].phase is Phase.READY
    pool.attempt("b1", ending)
    assert (pool["b1"].phase, pool["b1"].reason) == (Phase.DEGRADED, "traffic")
    assert pool["b1"].kept_out
    assert pool.excluded() == {"b1": Exclusion.EJECTED}
    assert {pool.chosen() for _ in range(20)} == {"b2"}
    assert (
        f"5 requests in a row failed, most recently: it {FAILED[ending]}"
        in pool["b1"].health.detail
    )


@pytest.mark.parametrize("ending", [each for each in Ending if each not in HARD])
def test_what_is_not_the_backend_s_fault_never_ejects_it(ending):
    pool = Pool(2)
    for _ in range(500):
        pool.attempt("b1", ending)
    assert pool["b1"].phase is Phase.READY
    assert pool["b1"].tally.failed == 0


def test_a_success_between_failures_starts_their_count_anew():
    pool = Pool(2)
    for _ in range(20):
        pool.fails("b1", 1)
        for _ in range(9):
            pool.attempt("b1")
    assert pool["b1"].phase is Phase.READY


def test_too_small_a_share_of_successes_ejects_it():
    pool = Pool(2)
    for _ in range(3):  # 3 of 9: too few to tell
        pool.attempt("b1")
        pool.attempt("b1")
        pool.fails("b1", 1)
    assert pool["b1"].phase is Phase.READY
    pool.attempt("b1")
    pool.fails("b1", 1)
    assert (pool["b1"].phase, pool["b1"].reason) == (Phase.DEGRADED, "success_rate")
    told = "11 requests were sent and 4 failed in the last 30 s, most recently: it"
    assert told in pool["b1"].health.detail


def test_streams_from_long_ago_that_fail_are_told_beside_what_was_sent_lately():
    pool = Pool(2)
    pool.later(0)
    streams = [pool.table.take("m/b1", pool.clock.at) for _ in range(12)]
    for _ in range(8):
        pool.later(5)
    for _ in range(10):
        pool.attempt("b1")
    for each in streams:
        pool.ends(each, Ending.BROKE)
        pool.ends(pool.table.take("m/b2", pool.clock.at))
    assert "10 requests were sent and 3 failed in the last 30 s" in pool["b1"].health.detail


def test_failures_count_for_half_a_minute():
    pool = Pool(2)
    pool.later(0)
    for _ in range(4):
        pool.attempt("b1")
        pool.fails("b1", 1)
    for _ in range(8):
        pool.later(5)
    for _ in range(10):
        pool.attempt("b1")
    pool.fails("b1", 1)
    assert pool["b1"].phase is Phase.READY


def test_long_streams_that_go_on_count_with_what_fails_at_once():
    pool = Pool(2)
    for _ in range(40):
        pool.table.take("m/b1", pool.clock.at)  # they run on
    pool.fails("b1", 4)
    assert pool["b1"].phase is Phase.READY


def test_what_fails_at_the_peers_too_is_what_is_asked():
    pool = Pool(4)
    for _ in range(20):
        for name in ("b1", "b2", "b3", "b4"):
            pool.attempt(name)
            pool.attempt(name)
            pool.fails(name, 1)
    assert not any(each.kept_out for each in pool.table)
    assert {each.phase for each in pool.table} == {Phase.READY}


def test_the_only_backend_is_never_left_out():
    pool = Pool(1)
    pool.fails("b1", 50)
    assert pool["b1"].phase is Phase.DEGRADED
    assert pool.chosen() == "b1"
    assert pool["b1"].health.ejection is None


def test_at_most_half_of_a_pool_is_left_out():
    pool = Pool(5)
    for name in ("b3", "b4", "b5"):
        for _ in range(50):
            pool.attempt(name)
    for name in ("b1", "b2", "b3"):
        pool.fails(name)
    assert [each.kept_out for each in pool.table] == [True, True, False, False, False]


def test_what_is_down_counts_in_that_half():
    pool = Pool(4)
    pool.down("b2")
    pool.down("b3")
    pool.fails("b1")
    assert pool["b1"].phase is Phase.DEGRADED  # the second choice, as before
    assert pool["b1"].health.ejection is None


def test_where_fewer_than_half_are_left_soft_evidence_is_ignored_and_hard_is_not():
    pool = Pool(4)
    pool.fails("b1")
    pool.down("b2")
    assert pool.chosen(["m/b3", "m/b4"]) == "b1"  # rather than to refuse what nobody executed
    assert pool["b1"].kept_out
    pool.down("b3")
    assert not pool["b1"].kept_out
    assert set(pool.excluded()) == {"b2", "b3"}
    pool["b4"].limit.fix(1)
    pool.table.take("m/b4", pool.clock.at)
    assert pool.chosen() == "b1"
    pool.passes("b2")
    assert pool["b1"].kept_out
    assert pool.excluded()["b1"] is Exclusion.EJECTED


def test_it_is_chosen_where_nobody_else_has_the_adapter():
    pool = Pool(3)
    adapter = (*MODELS, ServedModel("sql", "m", None))
    pool.table.observe("m/b1", ModelsSeen(pool.clock.at, adapter))
    pool.fails("b1")
    ask = pool.asks()
    ask.route = Route("sql", "m", "m", adapter="sql")
    assert pool.chooser.find(ask, pool.clock.at) is pool["b1"]
    assert pool.chooser.explain(ask, pool.clock.at).backend_id == "m/b1"


def ejected(size=2):
    pool = Pool(size)
    pool.fails("b1")
    return pool


def on_probation(size=2):
    pool = ejected(size)
    pool.later(29.9)
    pool.passes("b1")
    assert pool["b1"].probation is None
    pool.later(0.1)
    pool.passes("b1")
    assert (pool["b1"].phase, pool["b1"].reason) == (Phase.DEGRADED, "probation")
    return pool


def test_after_its_time_one_request_at_a_time_tries_it():
    pool = on_probation()
    take = partial(pool.table.take, "m/b1", pool.clock.at)
    assert "b1" not in pool.excluded()
    slot = take()
    assert pool.excluded() == {"b1": Exclusion.PROBATION}
    slot.release()  # its client left
    assert "b1" not in pool.excluded()
    slot = take()
    pool.ends(slot, Ending.FULL)
    assert "b1" not in pool.excluded()


def test_a_long_trial_keeps_others_away_for_half_a_minute_and_each_of_them_decides():
    for decides in (0, 1):
        pool, slots = on_probation(), []
        for _ in range(2):
            assert "b1" not in pool.excluded()
            slots.append(pool.table.take("m/b1", pool.clock.at))
            pool.later(29.9)
            assert pool.excluded() == {"b1": Exclusion.PROBATION}
            pool.later(0.1)
        pool.ends(slots[decides])
        assert pool["b1"].phase is Phase.READY
        pool.ends(slots[1 - decides])
        assert pool["b1"].in_flight == 0


def test_a_trial_that_ends_well_brings_it_back_and_it_starts_slowly():
    pool = on_probation()
    full = pool["b1"].limit.value
    pool.attempt("b1")
    assert (pool["b1"].phase, pool["b1"].kept_out, pool["b1"].probation) == (
        Phase.READY,
        False,
        None,
    )
    assert pool["b1"].limit.effective(pool.clock.at) <= full // 10
    assert pool["b1"].tally.lately() == (0, 0)


def test_each_failed_trial_doubles_the_time_and_the_first_one_after_a_long_while_does_not():
    pool, policy = on_probation(), Policy()
    waits = []
    for _ in range(6):
        pool.attempt("b1", Ending.STREAM)
        assert pool["b1"].probation is None
        waits.append(pool["b1"].health.ejection.until - pool.clock.at)
        pool.later(waits[-1])
        pool.passes("b1")
    assert waits == [60.0, 120.0, 240.0, 300.0, 300.0, 300.0]
    assert out_s(10_000, policy) == 300.0
    pool.attempt("b1")
    pool.fails("b1")
    assert pool["b1"].health.ejection.times == 8  # it failed again soon
    pool.later(300)
    pool.passes("b1")
    pool.attempt("b1")
    pool.later(policy.forgiven_s)
    pool.fails("b1")
    assert pool["b1"].health.ejection.times == 1


def test_only_the_trial_decides_not_what_was_sent_before():
    pool = Pool(2)
    old = [pool.table.take("m/b1", pool.clock.at) for _ in range(4)]
    pool.fails("b1")
    pool.ends(old[0])
    pool.ends(old[1], Ending.STREAM)
    assert pool["b1"].health.ejection.times == 1
    pool.later(30)
    pool.passes("b1")
    pool.ends(old[2])
    pool.ends(old[3], Ending.STREAM)
    assert pool["b1"].reason == "probation"


def test_a_restarted_one_is_trusted():
    pool = ejected()
    pool.down("b1")
    pool.passes("b1")
    assert (pool["b1"].phase, pool["b1"].kept_out) == (Phase.READY, False)
    assert pool["b1"].health.ejection is None


def test_every_step_is_told():
    pool = on_probation()
    pool.attempt("b1", Ending.BROKE)
    pool.later(60)
    pool.passes("b1")
    pool.attempt("b1")
    steps = [
        (each.after, each.reason) for each in pool.table.transitions if each.backend_id == "m/b1"
    ]
    assert steps[1:] == [
        (Phase.DEGRADED, "traffic"),
        (Phase.DEGRADED, "probation"),
        (Phase.DEGRADED, "traffic"),
        (Phase.DEGRADED, "probation"),
        (Phase.READY, "healthy"),
    ]
    assert "(time 2 in a row)" in pool.table.transitions[-3].detail


# --- what is no evidence ----------------------------------------------------------------------------


def test_a_backend_on_probation_is_the_last_choice_in_a_pool_that_is_short_too():
    pool = Pool(3)
    pool.fails("b1")
    pool.down("b2")
    pool.later(31)
    pool.passes("b1")
    assert pool["b1"].probation is not None
    assert not pool["b1"].kept_out
    assert {pool.chosen() for _ in range(50)} == {"b3"}


def test_what_no_engine_works_on_is_an_attempt_if_it_ends_well_too():
    pool = Pool(3)
    for _ in range(10):
        for name in ("b1", "b2", "b3"):
            pool.attempt(name)
    for each in range(1000):
        slot = pool.table.visit("m/b1", pool.clock.at)
        pool.ends(slot, Ending.HTTP_5XX if each % 250 == 0 else None)
    assert pool["b1"].phase is Phase.READY


def test_exactly_eight_of_ten_that_end_well_are_enough():
    pool = Pool(2)
    for _ in range(8):
        pool.attempt("b1")
    pool.fails("b1", 2)
    assert pool["b1"].phase is Phase.READY
    pool.fails("b1", 1)
    assert pool["b1"].phase is Phase.DEGRADED


def test_the_next_process_is_not_judged_by_what_failed_in_the_one_before():
    pool = Pool(3)
    pool.later(5)
    for _ in range(12):
        pool.attempt("b2")
        pool.attempt("b3")
        pool.attempt("b1", Ending.BROKE)
    pool.table.tend("m/b1", Tending(Phase.STARTING, "restart", "it is restarted"))
    for _ in range(4):
        pool.later(4)
    pool.passes("b1")
    pool.table.tend("m/b1", None)
    for _ in range(20):
        pool.attempt("b1")
    pool.attempt("b1", Ending.BROKE)
    assert pool["b1"].phase is Phase.READY


def test_a_server_that_was_down_is_not_judged_by_what_failed_before():
    pool = Pool(3)
    pool.fails("b1", 4)
    pool.down("b1")
    pool.passes("b1")
    for _ in range(8):
        pool.attempt("b1")
    pool.attempt("b1", Ending.BROKE)
    assert pool["b1"].phase is Phase.READY
