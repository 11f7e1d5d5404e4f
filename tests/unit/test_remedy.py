import math
from dataclasses import replace

import pytest

from gateway.config.supervision import SupervisionConfig
from gateway.core.types import Phase
from gateway.heal.backoff import Policy, policy_of, replaced
from gateway.heal.healing import Cause, Facts, Moment, Restart, Sign, Suspend, Wait, Why
from gateway.heal.remedy import History, clear, decide, operated, settled, withdrawn
from gateway.launch.launcher import Runs, Seen


class Ward:
    """A few pools over time. `see` looks at what is given, all else is as it was last."""

    def __init__(self, policy=None, at=1000.0, **sizes):
        self.history, self.policy = History(), policy or Policy()
        self.now, self.minute, self.holds = at, 0, {}
        self.facts = {
            f"{pool}/{name}": Facts(f"{pool}/{name}", pool, Phase.READY, seen=alive("one"))
            for pool, count in (sizes or {"p": 4}).items()
            for name in "abcdefgh"[:count]
        }
        self.leads = {each.pool for each in self.facts.values()}
        self.see()

    def change(self, backend_id, **changes):
        phase = changes.get("phase")
        if phase is not None and phase is not self.facts[backend_id].phase:
            changes.setdefault("since", self.now)
        self.facts[backend_id] = replace(self.facts[backend_id], **changes)

    def see(self, after=1.0, **changed):
        """Look once, `after` seconds later; `a={...}` changes p/a. Returns the decisions by backend."""
        self.now += after
        for name, changes in changed.items():
            self.change(f"p/{name}", **changes)
        policies = dict.fromkeys(self.leads | {"p", "q"}, self.policy)
        moment = Moment(self.now, self.leads, self.minute, self.holds)
        facts = [*self.facts.values()]
        self.history, decisions = decide(facts, self.history, policies, moment)
        return {each.backend_id: each for each in decisions}

    def look_until(self, at, **changed):
        """Look each second up to `at`; returns the last decisions."""
        found = self.see(**changed)
        while self.now < at:
            found = self.see()
        return found

    def order_comes(self, name, within):
        """Look each second until the restart of p/`name` is ordered; returns after how long."""
        for waited in range(1, within + 1):
            if isinstance(self.see().get(f"p/{name}"), Restart):
                return waited
        return None

    def pass_time(self, seconds):
        return self.look_until(self.now + seconds)


def alive(incarnation):
    return Seen(incarnation, Runs.RUNNING)


def dead(incarnation="one", code=1):
    return Seen(incarnation, Runs.ENDED, exit_code=code)


DEAD = {"seen": dead()}
FROZEN = {"phase": Phase.DOWN, "reason": "no_progress"}
WELL = {"phase": Phase.READY, "reason": "healthy", "restarting": False, "starting": False}


def signed(*causes):
    return {"signs": tuple(Sign(each, each.value) for each in causes)}


def why(decision):
    assert isinstance(decision, Wait), decision
    return decision.why


def test_what_is_well_is_left_alone():
    ward = Ward()
    assert ward.pass_time(100) == {}


def test_a_process_that_exited_is_started_anew_at_once_with_its_evidence():
    ward = Ward()
    order = ward.see(a=DEAD)["p/a"]
    assert order == Restart("p/a", Cause.EXITED, order.evidence, "one", planned=False, attempt=1)
    assert "exited with code 1" in order.evidence


def test_one_that_runs_and_is_ill_is_restarted_without_a_drain_if_it_does_not_serve():
    order = Ward().see(a=FROZEN)["p/a"]
    assert (order.cause, order.planned, order.incarnation) == (Cause.FROZEN, False, "one")


@pytest.mark.parametrize("cause", [Cause.ERRORS, Cause.MEMORY, Cause.SLOW])
def test_one_that_serves_is_drained_first(cause):
    order = Ward().see(a=signed(cause))["p/a"]
    assert (order.cause, order.planned) == (cause, True)


# --- who is never restarted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "held", [{"held": True}, {"phase": Phase.CORDONED}, {"phase": Phase.DRAINING}]
)
@pytest.mark.parametrize("ill", [DEAD, signed(Cause.SLOW, Cause.FROZEN)])
def test_what_an_operator_holds_is_left_to_them(held, ill):
    assert why(Ward().see(a=held | ill)["p/a"]) is Why.HELD


@pytest.mark.parametrize("cause", [Cause.ERRORS, Cause.MEMORY])
def test_a_saturated_backend_is_not_restarted(cause):
    ward = Ward()
    assert why(ward.see(a=signed(cause) | {"saturated": True})["p/a"]) is Why.BUSY
    assert isinstance(ward.see(a={"saturated": False})["p/a"], Restart)


def test_a_saturated_backend_whose_canary_failed_is_frozen_only_once_nothing_moves():
    ward = Ward()
    found = ward.see(a=signed(Cause.FROZEN) | {"saturated": True, "moved_at": ward.now})
    assert why(found["p/a"]) is Why.BUSY
    assert ward.order_comes("a", 100) == 29


def test_tokens_that_flow_prove_an_engine_alive_whatever_its_probes_say():
    ward = Ward()
    ward.see(a={"phase": Phase.DOWN, "reason": "timeout"})
    for _ in range(100):
        found = ward.see(a={"moved_at": ward.now})
    assert why(found["p/a"]) is Why.BUSY
    assert ward.order_comes("a", 100) == 29


def test_the_last_tokens_before_it_went_down_do_not():
    ward = Ward()
    ward.see(a={"phase": Phase.DOWN, "reason": "http_503", "moved_at": ward.now + 1})
    assert isinstance(ward.pass_time(5)["p/a"], Restart)


def test_a_full_queue_is_what_comes_of_a_collapse_and_does_not_excuse_it():
    order = Ward().see(a=signed(Cause.SLOW) | {"saturated": True})["p/a"]
    assert (order.cause, order.planned) == (Cause.SLOW, True)


@pytest.mark.parametrize(
    "state",
    [
        {"phase": Phase.STARTING, "reason": "refused"},
        {"phase": Phase.DOWN, "reason": "refused", "starting": True},
        {"phase": Phase.DOWN, "reason": "asleep", "asleep": True},
        {"phase": Phase.STOPPED, "seen": dead()},
        {"phase": Phase.DRAINING, "restarting": True},
        {"phase": Phase.DOWN, "reason": "refused", "supervised": False},
    ],
    ids=["never seen healthy", "starting", "asleep", "removed", "under restart", "not ours"],
)
def test_these_are_not_even_looked_at(state):
    ward = Ward()
    ward.see(a=state | signed(Cause.FROZEN if "supervised" in state else Cause.SLOW))
    assert ward.pass_time(1000) == {}


def test_a_start_that_hangs_or_fails_is_restarted():
    ward = Ward()
    starting = {"phase": Phase.STARTING, "starting": True}
    assert ward.see(a=starting, b=starting) == {}
    found = ward.see(a=signed(Cause.START_HUNG), b=DEAD)
    assert found["p/a"].cause is Cause.START_HUNG
    assert found["p/b"].cause is Cause.START_FAILED


def test_what_cannot_be_seen_has_no_incarnation_to_name():
    ward = Ward()
    ward.see(a={"seen": None, "phase": Phase.DOWN, "reason": "refused"})
    assert why(ward.pass_time(40)["p/a"]) is Why.UNSEEN


# --- one restart per incarnation ------------------------------------------------------------------


def carried_out(ward, name="a", incarnation="two"):
    """The order is taken up, and another incarnation starts."""
    ward.see(**{name: {"restarting": True}})
    started = {"phase": Phase.DOWN, "reason": "refused", "starting": True, "restarting": False}
    return ward.see(**{name: started | {"seen": alive(incarnation), "signs": ()}})


def test_an_incarnation_that_runs_is_ordered_once_whatever_happens():
    ward = Ward()
    assert isinstance(ward.see(a=FROZEN)["p/a"], Restart)
    assert ward.see(a={"restarting": True}) == {}
    found = ward.see(a={"restarting": False})
    for _ in range(5000):
        assert why(found["p/a"]) is Why.ORDERED
        found = ward.see(5.0)


def test_an_order_that_nobody_takes_up_is_not_given_again():
    ward = Ward()
    assert isinstance(ward.see(a=FROZEN)["p/a"], Restart)
    assert ward.pass_time(29) == {}
    assert why(ward.pass_time(1000)["p/a"]) is Why.ORDERED


def test_an_incarnation_that_comes_back_is_still_the_one_that_was_ordered():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.see(a={"seen": alive("one"), "starting": False})
    assert why(ward.pass_time(1000)["p/a"]) is Why.ORDERED


def test_another_incarnation_may_be_ordered():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.see(a=WELL)
    order = ward.look_until(ward.now + 11, a=FROZEN)["p/a"]
    assert isinstance(order, Restart)
    assert (order.incarnation, order.attempt) == ("two", 1)


def test_a_launch_that_failed_is_tried_again_as_another_attempt():
    ward = Ward()
    assert ward.see(a={"seen": dead("one")})["p/a"].attempt == 1
    ward.see(a={"restarting": True})
    found = ward.see(a={"restarting": False})["p/a"]
    assert (why(found), found.until) == (Why.BACKOFF, ward.now + 10)
    order = ward.pass_time(10)["p/a"]
    assert (order.incarnation, order.attempt) == ("one", 2)


def test_the_first_launch_of_all_is_no_restart_so_its_failure_is_the_first():
    ward = Ward()
    assert ward.see(a={"seen": Seen()})["p/a"].attempt == 1
    ward.see(a={"restarting": True})
    order = ward.see(a={"restarting": False})["p/a"]
    assert (order.incarnation, order.attempt) == (None, 2)
    ward.see(a={"restarting": True})
    found = ward.see(a={"restarting": False})["p/a"]
    assert (why(found), found.until) == (Why.BACKOFF, ward.now + 10)


def test_one_that_was_stopped_and_not_started_is_tried_again():
    ward = Ward()
    ward.see(a=FROZEN)
    ward.see(a={"restarting": True})
    ward.see(a={"restarting": False, "seen": dead()})
    order = ward.pass_time(10)["p/a"]
    assert (order.cause, order.attempt) == (Cause.EXITED, 2)


def test_an_order_that_ended_at_once_need_not_be_seen_under_way():
    ward = Ward()
    ward.see(a=DEAD)
    ward.history = settled(ward.history, "p/a")
    assert why(ward.see()["p/a"]) is Why.BACKOFF
    assert ward.pass_time(10)["p/a"].attempt == 2


def test_an_order_given_up_in_its_drain_is_as_if_never_given():
    ward = Ward()
    before = ward.history.pasts["p/a"]
    order = ward.see(a=signed(Cause.SLOW))["p/a"]
    ward.history = withdrawn(ward.history, order)
    past = ward.history.pasts["p/a"]
    assert (past.restarts, past.in_a_row) == (before.restarts, before.in_a_row)
    assert ward.see()["p/a"] == order
    carried_out(ward)
    after = withdrawn(ward.history, order)
    assert after == ward.history, "too late"


# --- backoff, crash loops -------------------------------------------------------------------------


def crash(ward, number):
    """It dies; wait for the order, let it be carried out and come up. Returns the wait, or Suspend."""
    died_at = ward.now + 1
    found = ward.see(a={"seen": dead(f"i{number}")} | WELL)["p/a"]
    while isinstance(found, Wait) and ward.now < died_at + 400:
        found = ward.see()["p/a"]
    waited_s = ward.now - died_at
    if isinstance(found, Restart):
        carried_out(ward, incarnation=f"i{number + 1}")
        ward.see(a=WELL)
        return waited_s
    return found


def test_pauses_double_from_the_second_restart_in_a_row_up_to_the_longest():
    ward = Ward(Policy(max_restarts=100))
    ward.see(a={"seen": alive("i0")})
    ward.history = clear(ward.history, "p/a")  # that incarnation was another's doing
    waits = [crash(ward, number) for number in range(8)]
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]


def test_ten_well_minutes_end_the_row():
    ward = Ward(Policy(max_restarts=100))
    ward.see(a={"seen": alive("i0")})
    ward.history = clear(ward.history, "p/a")
    assert [crash(ward, number) for number in range(3)] == [0, 10, 20]
    ward.pass_time(590)
    assert crash(ward, 3) == 40
    ward.pass_time(601)
    assert crash(ward, 4) == 0


def test_a_crash_loop_suspends_it_once_until_an_operator_clears_it():
    ward = Ward()
    ward.see(a={"seen": alive("i0")})
    ward.history = clear(ward.history, "p/a")
    for number in range(5):
        assert crash(ward, number) is not None
    verdict = crash(ward, 5)
    assert isinstance(verdict, Suspend)
    assert "5 restarts within 1800 s" in verdict.evidence
    assert "exited with code 1" in verdict.evidence
    assert why(ward.pass_time(5000)["p/a"]) is Why.SUSPENDED
    ward.history = clear(ward.history, "p/a")
    assert isinstance(ward.see()["p/a"], Restart)


def test_restarts_long_ago_do_not_make_a_crash_loop():
    ward = Ward()
    ward.see(a={"seen": alive("i0")})
    for number in range(12):
        assert not isinstance(crash(ward, number), Suspend)
        ward.pass_time(460)


def test_a_replica_that_takes_over_knows_of_the_crash_loop_it_finds():
    ward = Ward()
    ward.leads = set()
    for number in range(5):
        ward.see(a={"seen": alive(f"i{number}")})
        ward.pass_time(10)
        ward.see(a={"seen": dead(f"i{number}")})
        ward.pass_time(10)
    ward.leads = {"p"}
    assert isinstance(ward.see()["p/a"], Suspend)


def test_what_ails_now_and_then_is_not_new_each_time():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.see(a=WELL)
    for _ in range(4):
        assert why(ward.see(a=signed(Cause.FROZEN))["p/a"]) is Why.BACKOFF
        ward.see(a={"signs": ()})
    ward.see(2.0)
    assert isinstance(ward.see(a=signed(Cause.FROZEN))["p/a"], Restart)


# --- how much of a pool ---------------------------------------------------------------------------


def test_one_restart_at_a_time_of_those_whose_process_lives():
    ward = Ward()
    ward.see(a=FROZEN)
    ward.see(a={"restarting": True})
    ward.see(20.0)  # not at once: that would make us suspect ourselves
    ward.pass_time(20)
    assert why(ward.see(b=FROZEN)["p/b"]) is Why.TURN
    ward.see(a={"restarting": False, "starting": True, "seen": alive("two")})
    assert why(ward.see()["p/b"]) is Why.TURN
    assert isinstance(ward.see(a=WELL)["p/b"], Restart)


def test_a_start_that_hangs_does_not_keep_the_others_waiting():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.pass_time(20)
    assert why(ward.see(b=FROZEN)["p/b"]) is Why.TURN
    assert isinstance(ward.see(a=signed(Cause.START_HUNG))["p/b"], Restart)


def test_those_that_exited_wait_for_nobody():
    ward = Ward()
    found = ward.see(a=DEAD, b=DEAD, c=DEAD, d=DEAD)
    assert all(isinstance(each, Restart) for each in found.values())
    assert len(found) == 4


@pytest.mark.parametrize(
    ("size", "out", "may"),
    [(4, 0, True), (4, 1, False), (7, 1, False), (8, 1, True), (8, 2, False)],
)
def test_at_most_a_quarter_and_at_least_one_may_be_out(size, out, may):
    ward = Ward(p=size)
    asleep = {"phase": Phase.DOWN, "reason": "asleep", "asleep": True}
    ward.see(**{name: asleep for name in "bcd"[:out]})
    found = ward.see(a=signed(Cause.SLOW))["p/a"]
    assert isinstance(found, Restart) if may else why(found) is Why.BUDGET


@pytest.mark.parametrize("out", [{"held": True, "phase": Phase.CORDONED}, FROZEN, DEAD])
def test_whatever_is_out_counts(out):
    ward = Ward()
    ward.see(b=out)
    assert why(ward.see(a=signed(Cause.MEMORY))["p/a"]) in (Why.BUDGET, Why.TURN)


def test_one_that_is_down_costs_nothing_more():
    ward = Ward()
    asleep = {"phase": Phase.DOWN, "asleep": True}
    ward.see(b=asleep, c=asleep, d=asleep)
    assert isinstance(ward.see(a=FROZEN)["p/a"], Restart)


def test_of_several_the_gravest_goes_first_then_the_one_that_ailed_longest():
    ward = Ward(p=8)
    ward.holds = {"p": math.inf}
    ward.see(b=signed(Cause.SLOW))
    ward.see(a=signed(Cause.SLOW), h=signed(Cause.MEMORY))
    ward.holds = {}
    found = ward.see()
    assert isinstance(found["p/h"], Restart)
    assert why(found["p/b"]) is why(found["p/a"]) is Why.TURN
    carried_out(ward, "h")
    found = ward.see(h=WELL)
    assert isinstance(found["p/b"], Restart)


@pytest.mark.parametrize("cause", [Cause.SLOW, Cause.ERRORS, Cause.MEMORY])
def test_the_last_one_that_serves_stays_while_it_may_have_work(cause):
    ward = Ward(p=1)
    assert why(ward.see(a=signed(cause) | {"running": 1})["p/a"]) is Why.LAST
    assert why(ward.look_until(ward.now + 300, a={"running": 0})["p/a"]) is Why.LAST
    assert isinstance(ward.pass_time(1)["p/a"], Restart)


def test_a_pool_of_one_that_is_down_is_restarted():
    assert isinstance(Ward(p=1).see(a=FROZEN | {"in_flight": 3})["p/a"], Restart)


# --- ourselves suspected --------------------------------------------------------------------------

REFUSED = {"phase": Phase.DOWN, "reason": "http_503"}


def test_half_of_a_pool_going_bad_together_is_our_own_blindness_for_a_minute():
    ward = Ward()
    ward.see(a=FROZEN | {"held": True})  # not by itself
    ward.see(b=REFUSED)
    struck_at = ward.see(5.0, c=REFUSED) and ward.now
    found = ward.look_until(struck_at + 59)
    assert (why(found["p/b"]), found["p/b"].until) == (Why.SUSPECTED, struck_at + 60)
    assert isinstance(ward.see()["p/b"], Restart)


def test_a_process_that_exited_is_no_illusion():
    found = Ward().see(a=FROZEN, b=FROZEN, c=DEAD)
    assert why(found["p/a"]) is Why.SUSPECTED
    assert isinstance(found["p/c"], Restart)


@pytest.mark.parametrize(
    "pools", [{"p": 4}, {"p": 1}, {"p": 2}], ids=["of four", "of one", "of two"]
)
def test_one_alone_is_no_reason_to_suspect_ourselves(pools):
    assert isinstance(Ward(**pools).see(a=FROZEN)["p/a"], Restart)


def test_backends_of_two_pools_going_bad_together_are():
    ward = Ward(p=4, q=4)
    ward.change("q/a", **FROZEN)
    assert why(ward.see(a=FROZEN)["p/a"]) is Why.SUSPECTED


def test_what_goes_bad_one_after_the_other_is_not_together():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.pass_time(12)
    assert isinstance(ward.see(a=WELL, b=FROZEN)["p/b"], Restart)


def test_restarts_of_ours_and_sleepers_are_nothing_to_suspect():
    ward = Ward()
    asleep = {"phase": Phase.DOWN, "reason": "asleep", "asleep": True}
    ward.see(a=signed(Cause.SLOW))
    ward.see(a={"phase": Phase.DRAINING, "restarting": True}, b=asleep, c=asleep)
    ward.see(a={"phase": Phase.DOWN, "starting": True, "seen": alive("two"), "restarting": False})
    ward.see(a=WELL | {"signs": ()})
    assert isinstance(ward.see(d=FROZEN)["p/d"], Restart)


def test_servers_that_the_configuration_replaced_are_nothing_to_suspect():
    ward = Ward()
    for name in "ab":  # stopped between two looks
        ward.history = replaced(ward.history, f"p/{name}")
    assert isinstance(ward.see(a=DEAD, b=DEAD, c=FROZEN)["p/c"], Restart)


def test_after_we_stood_still_nothing_is_believed_for_a_while():
    ward = Ward(p=8)
    found = ward.see(30.0, a=FROZEN, c=DEAD)
    assert (why(found["p/a"]), found["p/a"].until) == (Why.SUSPECTED, ward.now + 10)
    assert isinstance(found["p/c"], Restart)
    ward.see(c=WELL | {"seen": alive("two")})
    assert ward.order_comes("a", 100) == 9


def test_time_that_goes_back_stands_still():
    ward = Ward(p=8)
    ward.see(a=DEAD)
    ward.see(a={"restarting": True})
    until = ward.see(a={"restarting": False})["p/a"].until
    assert ward.see(-500.0)["p/a"].until == until
    assert isinstance(ward.see(500.0, b=FROZEN)["p/b"], Restart), "it is not we who stood still"


# --- orders from outside --------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["p", "p/a", None])
def test_on_hold_nothing_is_restarted_until_the_hold_ends(scope):
    ward = Ward()
    ward.holds = {scope: ward.now + 50}
    found = ward.see(a=DEAD)["p/a"]
    assert (why(found), found.until) == (Why.ON_HOLD, ward.holds[scope])
    ward.look_until(ward.holds[scope] - 1)
    assert isinstance(ward.see()["p/a"], Restart)


def test_a_hold_for_good_has_no_end_and_one_of_another_pool_does_not_matter():
    ward = Ward(p=2, q=2)
    ward.holds = {"q": math.inf}
    ward.change("q/a", **DEAD)
    found = ward.see(a=DEAD)
    assert isinstance(found["p/a"], Restart)
    assert (why(found["q/a"]), found["q/a"].until) == (Why.ON_HOLD, None)


def test_without_the_lease_nothing_is_done():
    ward = Ward()
    ward.leads = set()
    assert why(ward.see(a=DEAD)["p/a"]) is Why.FOLLOWER


def test_what_is_not_automatic_is_only_told():
    assert why(Ward(Policy(automatic=False)).see(a=DEAD)["p/a"]) is Why.MANUAL


def test_an_operators_restart_lifts_a_suspension_and_is_the_one_of_its_incarnation():
    ward = Ward()
    suspended = replace(ward.history.pasts["p/a"], suspended=True)
    ward.history = ward.history.after("p/a", suspended)
    ward.history, order = operated(ward.history, "p/a", "one", ward.now, "alice")
    assert order == Restart("p/a", Cause.OPERATOR, "ordered by alice", "one", True, 1)
    assert ward.see(a=FROZEN) == {}
    ward.history = settled(ward.history, "p/a")
    assert why(ward.see()["p/a"]) is Why.ORDERED
    ward.history, again = operated(ward.history, "p/a", "one", ward.now, "alice")
    assert again.attempt == 2
    carried_out(ward)
    assert isinstance(ward.see(a={"seen": dead("two")})["p/a"], Restart)


def test_an_operator_may_clear_a_backend_that_nothing_is_known_of():
    assert clear(History(), "p/a").pasts["p/a"].restarts == ()
    assert settled(History(), "p/a").pasts["p/a"].ordered_at is None
    order = Restart("p/a", Cause.SLOW, "", "one", planned=True, attempt=1)
    assert withdrawn(History(), order) == History()


# --- the schedule ---------------------------------------------------------------------------------

DAY = 86_400.0
DAILY = Policy(restart_every_s=DAY, window=(120, 300))


def test_scheduled_restarts_begin_in_their_window_only():
    ward = Ward(DAILY, p=2)
    ward.minute = 60
    found = ward.see(a={"age_s": DAY})["p/a"]
    assert (why(found), found.until) == (Why.WINDOW, ward.now + 3600)
    ward.minute = 120
    order = ward.see()["p/a"]
    assert (order.cause, order.planned) == (Cause.SCHEDULED, True)


def test_a_schedule_rolls_through_the_pool():
    ward = Ward(DAILY)
    ward.minute = 200
    old = {"age_s": DAY}
    found = ward.see(a=old, b=old, c=old, d=old)
    assert [type(each) for each in found.values()].count(Restart) == 1
    order = next(each for each in found.values() if isinstance(each, Restart))
    name = order.backend_id[-1]
    carried_out(ward, name)
    assert not any(isinstance(each, Restart) for each in ward.see().values())
    found = ward.see(**{name: WELL | {"age_s": 1.0}})
    assert [type(each) for each in found.values()].count(Restart) == 1


def test_backends_that_started_together_do_not_come_due_together():
    ward = Ward(Policy(restart_every_s=1000.0))
    ward.leads = set()
    due_at = {}
    for age in range(700, 1010, 10):
        old = {"age_s": float(age)}
        for name in ward.see(a=old, b=old, c=old, d=old):
            due_at.setdefault(name, age)
    assert sorted(due_at.values()) == [820, 880, 940, 1000]


def test_without_a_known_age_it_counts_from_when_it_was_first_seen():
    ward = Ward(Policy(restart_every_s=1000.0), p=2)
    ward.leads = set()
    assert "p/a" not in ward.pass_time(990)
    assert "p/a" in ward.pass_time(10)


def test_scheduled_restarts_do_not_count_as_failures():
    ward = Ward(Policy(restart_every_s=100.0), p=2)
    ward.see(a={"age_s": 100.0})
    carried_out(ward)
    past = ward.history.pasts["p/a"]
    assert (past.restarts, past.in_a_row) == ((), 0)


@pytest.mark.parametrize(
    ("window", "minute", "opens_in"),
    [
        (None, 700, 0),
        ((120, 300), 120, 0),
        ((120, 300), 299, 0),
        ((120, 300), 300, 1260),
        ((120, 300), 0, 120),
        ((1380, 60), 1380, 0),
        ((1380, 60), 30, 0),
        ((1380, 60), 60, 1320),
        ((120, 120), 60, 0),
    ],
)
def test_a_window_may_wrap_midnight(window, minute, opens_in):
    assert Policy(window=window).opens_in(minute) == opens_in


def test_the_settings_become_the_policy():
    assert policy_of(SupervisionConfig()) == Policy()
    given = {
        "automatic": False,
        "max_unavailable": 0.5,
        "backoff": "1s",
        "max_backoff": "1m",
        "max_restarts": 3,
        "within": "10m",
        "restart_every": "1d",
        "restart_window": "23:30-05:05",
    }
    assert policy_of(SupervisionConfig.model_validate(given)) == Policy(
        False, 0.5, 1.0, 60.0, 3, 600.0, DAY, (1410, 305)
    )


def test_a_backend_that_left_is_forgotten_after_a_day():
    ward = Ward()
    del ward.facts["p/a"]
    ward.see(3600.0)
    assert "p/a" in ward.history.pasts
    ward.see(DAY)
    ward.see()
    assert "p/a" not in ward.history.pasts
