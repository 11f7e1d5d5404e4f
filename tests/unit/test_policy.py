"""The rules of healing: what is decided about a few pools over time."""

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from gateway.config.supervision import LaunchConfig, Remedy, SupervisionConfig
from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Restart, Setback, Sign, Suspend, Wait, Why
from gateway.heal.members import ALL_GPUS, Circumstances, Member, gpus_of
from gateway.heal.policy import decide, opens_in_min
from gateway.heal.record import History, Record
from gateway.heal.states import (
    Absent,
    Draining,
    Failed,
    Replacing,
    Serving,
    Starting,
    Suspect,
    calls_for,
)


class Ward:
    """A few pools over time. `see` looks at what is given, all else is as it was last."""

    def __init__(self, policy=None, at=1000.0, **sizes):
        self.history, self.policy = History(), policy or SupervisionConfig()
        self.now, self.minute, self.holds = at, 0, {}
        self.signs = {}
        self.members = {
            f"{pool}/{name}": Member(f"{pool}/{name}", pool, Phase.READY, at, Serving(at, "one"))
            for pool, count in (sizes or {"p": 4}).items()
            for name in "abcdefgh"[:count]
        }
        self.leads = {each.pool for each in self.members.values()}
        self.see()

    def change(self, backend_id, **changes):
        """Change a backend; a state is given as what makes it of the time."""
        before = self.members[backend_id]
        phase, state = changes.get("phase"), changes.get("state")
        if phase is not None and phase is not before.phase:
            changes.setdefault("since", self.now)
        if callable(state):
            changes["state"] = state = state(self.now)
        ceased = isinstance(before.state, Serving) and isinstance(state, Suspect | Failed)
        signs = changes.pop("signs", self.signs.get(backend_id, ()))
        fails = Cause.ERRORS in signs and Cause.ERRORS not in self.signs.get(backend_id, ())
        if ceased or fails:
            changes.setdefault("bad_at", self.now)
        self.signs[backend_id] = signs
        self.members[backend_id] = replace(before, **changes)

    def judged(self, member):
        signs = {each: Sign(each, each.value) for each in self.signs.get(member.backend_id, ())}
        if member.state is None:
            return member
        return replace(member, sign=calls_for(member.state, signs, self.now))

    def see(self, after=1.0, **changed):
        """Look once, `after` seconds later; `a={...}` changes p/a. Returns the decisions by backend."""
        self.now += after
        for name, changes in changed.items():
            self.change(f"p/{name}", **changes)
        policies = dict.fromkeys(self.leads | {"p", "q"}, self.policy)
        circumstances = Circumstances(self.now, self.leads, self.minute, self.holds)
        members = [self.judged(each) for each in self.members.values()]
        self.history, decisions = decide(members, self.history, policies, circumstances)
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

    def came_to(self, setback, order):
        self.history = self.history.came_to(setback, order)


def serves(incarnation="one"):
    return {"state": lambda now: Serving(now, incarnation)}


def dead(incarnation="one", cause=Cause.EXITED, **more):
    sign = Sign(cause, "its process exited with code 1")
    return {
        "phase": Phase.DOWN,
        "state": lambda now: Failed(now, incarnation, sign=sign, **more),
    }


def proven(incarnation="one", cause=Cause.FROZEN):
    sign = Sign(cause, "requests are running without progress")
    return {
        "phase": Phase.DOWN,
        "state": lambda now: Suspect(now, incarnation, sign=sign, failures=2, out=True),
    }


def hung(incarnation="one"):
    sign = Sign(Cause.START_HUNG, "silent")
    return {
        "phase": Phase.STARTING,
        "state": lambda now: Failed(now, incarnation, sign=sign, lives=True),
    }


def restarts(order):
    return {
        "phase": Phase.STARTING,
        "state": lambda now: Replacing(
            now, order.incarnation, order=order, before=Serving(0, "one")
        ),
    }


def starts(incarnation="two", ours=True):
    return {
        "phase": Phase.STARTING,
        "ours": ours,
        "signs": (),
        "state": lambda now: Starting(now, incarnation, ours=ours),
    }


DEAD = dead()
FROZEN = proven()
WELL = {"phase": Phase.READY, "signs": (), "bad_at": None}
ASLEEP = {"phase": Phase.DOWN, "asleep": True}


def well(incarnation="one"):
    return WELL | serves(incarnation)


def signed(*causes):
    return {"signs": causes}


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
    assert why(Ward().see(a=ill | held)["p/a"]) is Why.HELD


@pytest.mark.parametrize("cause", [Cause.ERRORS, Cause.MEMORY])
def test_a_saturated_backend_is_not_restarted(cause):
    ward = Ward()
    assert why(ward.see(a=signed(cause) | {"saturated": True})["p/a"]) is Why.BUSY
    assert isinstance(ward.see(a={"saturated": False})["p/a"], Restart)


def test_a_full_queue_is_what_comes_of_a_collapse_and_does_not_excuse_it():
    order = Ward().see(a=signed(Cause.SLOW) | {"saturated": True})["p/a"]
    assert (order.cause, order.planned) == (Cause.SLOW, True)


@pytest.mark.parametrize(
    "state",
    [
        starts("one", ours=False),
        starts("one"),
        ASLEEP | signed(Cause.SLOW),
        {"phase": Phase.STOPPED} | dead() | {"phase": Phase.STOPPED},
        {"phase": Phase.DOWN, "state": None, "sign": Sign(Cause.SLOW, "slow")},
        {"phase": Phase.READY, "state": lambda now: Absent(now, None)},
        {"state": lambda now: Suspect(now, "one", sign=Sign(Cause.FROZEN, ""), failures=1)},
        {
            "state": lambda now: Suspect(
                now, "one", sign=Sign(Cause.FROZEN, ""), failures=5, proof_at=math.inf
            )
        },
    ],
    ids=[
        *("starting", "starting, ours", "asleep", "removed", "not ours", "scaled to zero"),
        *("one test failed", "silent for too short a time"),
    ],
)
def test_these_are_not_even_looked_at(state):
    ward = Ward()
    ward.see(a=state)
    assert ward.pass_time(1000) == {}


def test_one_under_restart_is_not_judged():
    ward = Ward()
    order = ward.see(a=signed(Cause.SLOW))["p/a"]
    drains = {
        "state": lambda now: Draining(now, "one", order=order, before=Serving(0, "one"), until=0)
    }
    assert ward.see(a=drains | {"phase": Phase.DRAINING}) == {}
    assert ward.see(a=restarts(order)) == {}


def test_a_start_that_hangs_or_fails_is_restarted():
    ward = Ward()
    assert ward.see(a=starts("one"), b=starts("one")) == {}
    found = ward.see(a=hung(), b=dead(cause=Cause.START_FAILED))
    assert found["p/a"].cause is Cause.START_HUNG
    assert found["p/b"].cause is Cause.START_FAILED


def test_a_start_with_settings_that_changed_since_is_begun_anew_and_needs_no_other_turn():
    ward = Ward()
    changed = {"signs": (Cause.OPERATOR,)}
    assert set(ward.see(a=starts("one") | changed, b=starts("two"))) == {"p/a"}


def test_a_server_that_was_found_running_comes_up_first_though_its_settings_changed():
    """Streams of another gateway, or of the one before, may run there: it is drained once it serves."""
    ward, found = Ward(), starts("one", ours=False) | {"signs": (Cause.OPERATOR,)}
    assert not ward.see(a=found, b=starts("two"))


def test_what_cannot_be_seen_has_no_incarnation_to_name():
    ward = Ward()
    assert why(ward.see(a=FROZEN | {"visible": False})["p/a"]) is Why.UNSEEN


def test_what_ended_is_not_restarted_before_it_was_examined():
    ward = Ward()
    assert ward.see(a=dead(examined=False)) == {}
    assert isinstance(ward.see(a=DEAD)["p/a"], Restart)


def test_what_a_service_manager_does_not_run_on_purpose_is_left_to_it():
    ward = Ward()
    assert ward.see(a={"state": lambda now: Absent(now, None), "phase": Phase.DOWN}) == {}
    assert ward.see(a={"state": lambda now: Absent(now, None, due=True)})["p/a"].attempt == 1


# --- one restart per incarnation ------------------------------------------------------------------


def carried_out(ward, name="a", incarnation="two"):
    """The order is carried out, and another incarnation starts."""
    return ward.see(**{name: starts(incarnation)})


def test_an_incarnation_that_was_restarted_and_runs_is_not_restarted_again():
    ward = Ward()
    order = ward.see(a=FROZEN)["p/a"]
    assert ward.see(a=restarts(order)) == {}
    found = ward.see(a=FROZEN)  # its launcher says that it did, and shows the same
    for _ in range(5000):
        assert why(found["p/a"]) is Why.ORDERED
        found = ward.see(5.0)


def test_what_another_replica_claimed_is_left_to_it():
    ward = Ward()
    order = ward.see(a=FROZEN)["p/a"]
    ward.came_to(Setback.ANOTHERS, order)
    found = ward.pass_time(1000)["p/a"]
    assert why(found) is Why.ORDERED
    # It ended before it could do so, if the same server runs on that long.
    assert found.until is not None
    ward.look_until(found.until - 2)
    assert ward.order_comes("a", 5)


@pytest.mark.parametrize("setback", [Setback.FAILED, Setback.NOT_NOW])
def test_what_a_launcher_could_not_do_stays_due_with_pauses(setback):
    ward = Ward()
    order, waits = ward.see(a=FROZEN)["p/a"], []
    for attempt in (2, 3, 4, 5):
        ward.came_to(setback, order)
        waits.append(ward.order_comes("a", 100))
        order = ward.see(0.0)["p/a"] if waits[-1] is None else last_order(ward)
        assert order.attempt == attempt
    assert waits == [11, 21, 41, 81]


def test_what_is_not_the_servers_fault_never_suspends_it():
    ward = Ward()
    order = ward.see(a=FROZEN)["p/a"]
    for _ in range(12):
        ward.came_to(Setback.NOT_NOW, order)
        assert ward.order_comes("a", 400) is not None
        order = last_order(ward)
    assert ward.history.of("p/a").restarts[:-1] == ()


def last_order(ward):
    """The order that the last look gave: its attempt is remembered."""
    tried = ward.history.of("p/a").orders_for("one")
    return Restart("p/a", Cause.FROZEN, "", "one", planned=False, attempt=tried.times)


def test_an_incarnation_that_comes_back_is_still_the_one_that_was_ordered():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.see(a=FROZEN)
    assert why(ward.pass_time(1000)["p/a"]) is Why.ORDERED


def test_another_incarnation_may_be_ordered():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.see(a=well("two"))
    order = ward.look_until(ward.now + 11, a=proven("two"))["p/a"]
    assert isinstance(order, Restart)
    assert (order.incarnation, order.attempt) == ("two", 1)


def test_a_launch_that_failed_is_tried_again_as_another_attempt():
    ward = Ward()
    order = ward.see(a=DEAD)["p/a"]
    assert order.attempt == 1
    ward.see(a=restarts(order))
    ward.came_to(Setback.FAILED, order)
    found = ward.see(a=dead(cause=Cause.START_FAILED))["p/a"]
    assert (why(found), found.until) == (Why.BACKOFF, ward.now + 10)
    order = ward.pass_time(10)["p/a"]
    assert (order.incarnation, order.attempt) == ("one", 2)


def test_the_first_launch_of_all_is_no_restart_so_its_failure_is_the_first():
    ward = Ward()
    absent = {"state": lambda now: Absent(now, None, due=True), "phase": Phase.STARTING}
    assert ward.see(a=absent)["p/a"].attempt == 1
    order = ward.see(a=dead(None, cause=Cause.START_FAILED))["p/a"]
    assert (order.incarnation, order.attempt) == (None, 2)
    found = ward.see(a=dead(None, cause=Cause.START_FAILED))["p/a"]
    assert (why(found), found.until) == (Why.BACKOFF, ward.now + 10)


def test_the_first_launch_of_one_that_ended_with_the_gateway_before_is_no_restart_either():
    ward = Ward(SupervisionConfig(max_restarts=1))
    ward.history = History()
    ended = {"state": lambda now: Absent(now, "i0", due=True), "phase": Phase.STARTING}
    assert ward.see(a=ended)["p/a"].attempt == 1
    order = ward.see(a=dead("i1") | {"ours": True})["p/a"]
    assert isinstance(order, Restart)
    assert isinstance(ward.see(a=dead("i2") | {"ours": True})["p/a"], Suspend)


def test_one_that_was_stopped_and_not_started_is_tried_again():
    ward = Ward()
    order = ward.see(a=FROZEN)["p/a"]
    ward.see(a=restarts(order))
    ward.see(a=DEAD)
    order = ward.pass_time(10)["p/a"]
    assert (order.cause, order.attempt) == (Cause.EXITED, 2)


def test_an_order_given_up_before_its_claim_is_as_if_never_given():
    ward = Ward()
    before = ward.history.of("p/a")
    order = ward.see(a=signed(Cause.SLOW))["p/a"]
    ward.came_to(Setback.GIVEN_UP, order)
    record = ward.history.of("p/a")
    assert (record.restarts, record.in_a_row) == (before.restarts, before.in_a_row)
    assert ward.see()["p/a"] == order
    carried_out(ward)
    ward.see(a=FROZEN)
    after = ward.history.came_to(Setback.GIVEN_UP, replace(order, attempt=7))
    assert after == ward.history, "of another order"


def test_a_start_that_a_restart_cannot_help_is_tried_once_more_and_then_suspended():
    ward = Ward()
    absent = {"state": lambda now: Absent(now, None, due=True), "phase": Phase.STARTING}
    ward.see(a=absent)
    hopeless = dead("i1", cause=Cause.START_FAILED, hopeless=True)
    assert isinstance(ward.see(a=hopeless | {"ours": True})["p/a"], Restart)
    found = ward.see(a=dead("i2", cause=Cause.START_FAILED, hopeless=True) | {"ours": True})["p/a"]
    assert isinstance(found, Suspend)
    assert "a restart cannot help" in found.evidence


def test_a_crash_does_not_cost_the_start_after_it_its_second_chance():
    """It crashed, and its program is just being installed: that start failed for the first time."""
    ward = Ward()
    assert isinstance(ward.see(a=dead("one") | {"ours": True})["p/a"], Restart)
    hopeless = dead("i1", cause=Cause.START_FAILED, hopeless=True) | {"ours": True}
    assert why(ward.see(a=hopeless)["p/a"]) is Why.BACKOFF
    assert isinstance(ward.see(60.0)["p/a"], Restart)
    hopeless = dead("i2", cause=Cause.START_FAILED, hopeless=True) | {"ours": True}
    assert isinstance(ward.see(a=hopeless)["p/a"], Suspend)


# --- backoff, crash loops -------------------------------------------------------------------------


def crash(ward, number):
    """It dies; wait for the order, let it be carried out and come up. Returns the wait, or Suspend."""
    died_at = ward.now + 1
    found = ward.see(a=dead(f"i{number}") | {"ours": True})["p/a"]
    while isinstance(found, Wait) and ward.now < died_at + 400:
        found = ward.see()["p/a"]
    waited_s = ward.now - died_at
    if isinstance(found, Restart):
        carried_out(ward, incarnation=f"i{number + 1}")
        ward.see(a=well(f"i{number + 1}"))
        return waited_s
    return found


def test_pauses_double_from_the_second_restart_in_a_row_up_to_the_longest():
    ward = Ward(SupervisionConfig(max_restarts=100))
    ward.see(a=serves("i0"))
    ward.history = ward.history.clear("p/a")  # that incarnation was another's doing
    waits = [crash(ward, number) for number in range(8)]
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]


def test_ten_well_minutes_end_the_row():
    ward = Ward(SupervisionConfig(max_restarts=100))
    ward.see(a=serves("i0"))
    ward.history = ward.history.clear("p/a")
    assert [crash(ward, number) for number in range(3)] == [0, 10, 20]
    ward.pass_time(590)
    assert crash(ward, 3) == 40
    ward.pass_time(601)
    assert crash(ward, 4) == 0


def test_a_crash_loop_suspends_it_once_until_an_operator_clears_it():
    ward = Ward()
    ward.see(a=serves("i0"))
    ward.history = ward.history.clear("p/a")
    for number in range(5):
        assert crash(ward, number) is not None
    verdict = crash(ward, 5)
    assert isinstance(verdict, Suspend)
    assert "5 restarts within 1800 s" in verdict.evidence
    assert "exited with code 1" in verdict.evidence
    ward.see(a={"suspended": True})
    assert why(ward.pass_time(5000)["p/a"]) is Why.SUSPENDED
    ward.change("p/a", suspended=False)
    ward.history = ward.history.clear("p/a")
    assert isinstance(ward.see()["p/a"], Restart)


def test_restarts_long_ago_do_not_make_a_crash_loop():
    ward = Ward()
    ward.see(a=serves("i0"))
    for number in range(12):
        assert not isinstance(crash(ward, number), Suspend)
        ward.pass_time(460)


def test_a_replica_that_takes_over_knows_of_the_crash_loop_it_finds():
    ward = Ward()
    ward.leads = set()
    for number in range(5):
        ward.see(a=well(f"i{number}") | {"ours": False})
        ward.pass_time(10)
        ward.see(a=dead(f"i{number}"))
        ward.pass_time(10)
    ward.leads = {"p"}
    assert isinstance(ward.see()["p/a"], Suspend)


def test_what_ails_now_and_then_is_not_new_each_time():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    for _ in range(4):
        ward.see(a=well("two"))
        assert why(ward.see(a=proven("two"))["p/a"]) is Why.BACKOFF
    ward.see(3.0, a=well("two"))
    assert isinstance(ward.see(1.0, a=proven("two"))["p/a"], Restart)


# --- how much of a pool ---------------------------------------------------------------------------


def test_one_restart_at_a_time_of_those_whose_process_lives():
    ward = Ward()
    order = ward.see(a=FROZEN)["p/a"]
    ward.see(a=restarts(order))
    ward.see(20.0)  # not at once: that would make us suspect ourselves
    ward.pass_time(20)
    assert why(ward.see(b=FROZEN)["p/b"]) is Why.TURN
    ward.see(a=starts("two"))
    assert why(ward.see()["p/b"]) is Why.TURN
    assert isinstance(ward.see(a=well("two"))["p/b"], Restart)


def test_a_start_that_hangs_does_not_keep_the_others_waiting():
    ward = Ward()
    ward.see(a=FROZEN)
    carried_out(ward)
    ward.pass_time(20)
    assert why(ward.see(b=FROZEN)["p/b"]) is Why.TURN
    assert isinstance(ward.see(a=hung("two"))["p/b"], Restart)


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
    ward.see(**{name: ASLEEP for name in "bcd"[:out]})
    found = ward.see(a=signed(Cause.SLOW))["p/a"]
    assert isinstance(found, Restart) if may else why(found) is Why.BUDGET


@pytest.mark.parametrize("out", [{"held": True, "phase": Phase.CORDONED}, FROZEN, DEAD])
def test_whatever_is_out_counts(out):
    ward = Ward()
    ward.see(b=out)
    assert why(ward.see(a=signed(Cause.MEMORY))["p/a"]) in (Why.BUDGET, Why.TURN)


def test_one_that_the_last_leader_still_drains_is_out_and_has_its_turn():
    ward = Ward(p=8)
    found = ward.see(b={"drained_elsewhere": True}, a=signed(Cause.MEMORY), c=FROZEN)
    assert why(found["p/a"]) is why(found["p/c"]) is Why.TURN
    found = ward.see(b={"drained_elsewhere": False})
    assert isinstance(found["p/c"], Restart)


def test_one_that_another_replica_drains_waits_for_its_turn_and_no_operator_is_told_to_hold_it():
    drained = {"phase": Phase.DRAINING, "drained_elsewhere": True}
    assert why(Ward().see(a=signed(Cause.MEMORY) | drained)["p/a"]) is Why.TURN
    assert why(Ward().see(a=signed(Cause.MEMORY) | drained | {"held": True})["p/a"]) is Why.HELD


def test_one_that_is_down_costs_nothing_more():
    ward = Ward()
    ward.see(b=ASLEEP, c=ASLEEP, d=ASLEEP)
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
    found = ward.see(h=well("two"))
    assert isinstance(found["p/b"], Restart)


@pytest.mark.parametrize("cause", [Cause.SLOW, Cause.ERRORS, Cause.MEMORY])
def test_the_last_one_that_serves_stays_while_it_may_have_work(cause):
    ward = Ward(p=1)
    assert why(ward.see(a=signed(cause) | {"idle": False})["p/a"]) is Why.LAST
    assert why(ward.look_until(ward.now + 300, a=signed(cause) | {"idle": True})["p/a"]) is Why.LAST
    assert isinstance(ward.pass_time(1)["p/a"], Restart)


def test_a_pool_of_one_that_is_down_is_restarted():
    assert isinstance(Ward(p=1).see(a=FROZEN | {"idle": False})["p/a"], Restart)


# --- ourselves suspected --------------------------------------------------------------------------

REFUSED = proven(cause=Cause.ENGINE_DEAD)


def test_half_of_a_pool_going_bad_together_is_our_own_blindness_for_a_minute():
    ward = Ward()
    ward.see(a=FROZEN | {"held": True, "bad_at": None})  # not by itself
    ward.holds = {"p": ward.now + 7}
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
    assert isinstance(ward.see(a=well("two"), b=FROZEN)["p/b"], Restart)


def test_restarts_of_ours_and_sleepers_are_nothing_to_suspect():
    ward = Ward()
    order = ward.see(a=signed(Cause.SLOW))["p/a"]
    ward.see(a=restarts(order), b=ASLEEP, c=ASLEEP)
    ward.see(a=starts("two"))
    ward.see(a=well("two"))
    assert isinstance(ward.see(d=FROZEN)["p/d"], Restart)


def test_servers_that_the_configuration_replaced_are_nothing_to_suspect():
    ward = Ward()
    absent = {"state": lambda now: Absent(now, None, due=True), "phase": Phase.STARTING}
    assert isinstance(ward.see(a=absent, b=absent, c=FROZEN)["p/c"], Restart)


def test_after_we_stood_still_nothing_is_believed_for_a_while():
    ward = Ward(p=8)
    found = ward.see(30.0, a=FROZEN, c=DEAD)
    assert (why(found["p/a"]), found["p/a"].until) == (Why.SUSPECTED, ward.now + 10)
    assert isinstance(found["p/c"], Restart)
    ward.see(c=well("two") | {"ours": True})
    assert ward.order_comes("a", 100) == 9


def test_time_that_goes_back_stands_still():
    ward = Ward(p=8)
    order = ward.see(a=DEAD)["p/a"]
    ward.see(a=restarts(order))
    until = ward.see(a=DEAD)["p/a"].until
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
    assert why(Ward(SupervisionConfig(automatic=False)).see(a=DEAD)["p/a"]) is Why.MANUAL


def test_an_operators_restart_forgets_failures_and_is_the_one_of_its_incarnation():
    ward = Ward()
    ward.leads, ward.holds = set(), {None: math.inf}
    order = {"ordered": Sign(Cause.OPERATOR, "ordered by alice")}
    found = ward.see(a=FROZEN | order)["p/a"]
    assert found == Restart("p/a", Cause.OPERATOR, "ordered by alice", "one", True, 1)
    assert ward.history.of("p/a").restarts == ()
    ward.leads, ward.holds = {"p"}, {}
    assert why(ward.see(a={"ordered": None})["p/a"]) is Why.ORDERED
    assert ward.see(a=order)["p/a"].attempt == 2
    carried_out(ward)
    ward.change("p/a", ordered=None)
    assert isinstance(ward.see(a=dead("two"))["p/a"], Restart)


def test_an_operator_may_clear_a_backend_that_nothing_is_known_of():
    assert History().clear("p/a").of("p/a").restarts == ()


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "together"),
    [
        (([0], [0]), 1),
        (([0], [1]), 2),
        (([0, 1], [1, 2]), 1),
        (([0], [ALL_GPUS]), 1),
        (([ALL_GPUS], [ALL_GPUS]), 1),
        (([], []), 2),
        (([ALL_GPUS], []), 2),
    ],
)
def test_starts_on_one_gpu_go_one_after_the_other(gpus, together):
    ward = Ward(p=1, q=1)
    for pool, each in zip("pq", gpus, strict=True):
        ward.change(f"{pool}/a", **DEAD, gpus=each)
    found = [*ward.see().values()]
    assert [type(each) for each in found].count(Restart) == together
    waits = [each for each in found if isinstance(each, Wait)]
    assert {why(each) for each in waits} <= {Why.GPU}
    assert all(each.waits_for.startswith("until p/a has started") for each in waits)


@pytest.mark.parametrize(
    ("more", "remedies", "gpus"),
    [
        ({}, (), (ALL_GPUS,)),
        ({"gpus": [0, 2]}, (), (0, 2)),
        ({"gpus": [0]}, (Remedy.SERIAL_START,), (ALL_GPUS,)),
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, (), ()),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, (), ()),
        ({"args": {"device": "cpu"}}, (), ()),
        ({"gpus": [0], "env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, (), (0,)),
    ],
)
def test_a_start_that_names_no_gpus_may_use_all_unless_it_runs_on_the_cpu(more, remedies, gpus):
    launch = LaunchConfig.model_validate({"command": ["vllm", "serve", "m"], "port": 1} | more)
    assert gpus_of(launch, remedies) == gpus
    assert gpus_of(None, remedies) == ()


def test_a_start_that_failed_gives_its_gpus_back_and_goes_behind_what_did_not():
    ward = Ward(p=1, q=1)
    ward.change("p/a", gpus=[0])
    ward.change("q/a", gpus=[0])
    ward.see(a=DEAD)
    carried_out(ward)
    ward.change("q/a", **DEAD)
    assert why(ward.see()["q/a"]) is Why.GPU
    found = ward.see(a=dead("two", cause=Cause.START_FAILED) | {"ours": True})
    assert isinstance(found["q/a"], Restart)
    ward.change("q/a", **starts("two"))
    assert why(ward.pass_time(60)["p/a"]) is Why.GPU
    ward.change("q/a", **dead("two"), ours=True)
    ward.history = ward.history.clear("q/a")
    found = ward.see()
    assert isinstance(found["q/a"], Restart)
    assert why(found["p/a"]) is Why.GPU, "it failed more often"


# --- the schedule ---------------------------------------------------------------------------------

DAY = 86_400.0
DAILY = SupervisionConfig(restart_every="1d", restart_window="02:00-05:00")


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
    found = ward.see(**{name: well("two") | {"age_s": 1.0}})
    assert [type(each) for each in found.values()].count(Restart) == 1


def test_backends_that_started_together_do_not_come_due_together():
    ward = Ward(SupervisionConfig(restart_every="1000s"))
    ward.leads = set()
    due_at = {}
    for age in range(700, 1010, 10):
        old = {"age_s": float(age)}
        for name in ward.see(a=old, b=old, c=old, d=old):
            due_at.setdefault(name, age)
    assert sorted(due_at.values()) == [820, 880, 940, 1000]


def test_without_a_known_age_it_counts_from_when_it_was_first_seen():
    ward = Ward(SupervisionConfig(restart_every="1000s"), p=2)
    ward.leads = set()
    assert "p/a" not in ward.pass_time(990)
    assert "p/a" in ward.pass_time(10)


def test_scheduled_restarts_do_not_count_as_failures():
    ward = Ward(SupervisionConfig(restart_every="100s"), p=2)
    ward.see(a={"age_s": 100.0})
    carried_out(ward)
    record = ward.history.of("p/a")
    assert (record.restarts, record.in_a_row) == ((), 0)


@pytest.mark.parametrize("setback", [Setback.FAILED, Setback.NOT_NOW])
def test_a_scheduled_restart_that_could_not_be_carried_out_waits_for_ten_well_minutes(setback):
    ward = Ward(SupervisionConfig(restart_every="100s"), p=2)
    order = ward.see(a={"age_s": 100.0})["p/a"]
    for attempt in (2, 3):
        ward.see(a=restarts(order))
        ward.came_to(setback, order)
        since = ward.now
        found = ward.see(a=well())["p/a"]
        while isinstance(found, Wait):
            assert found.why is Why.BACKOFF
            found = ward.see(10.0)["p/a"]
        assert (found.cause, found.attempt) == (Cause.SCHEDULED, attempt)
        assert 600 <= ward.now - since <= 620
        assert ward.history.of("p/a").restarts == ()
        order = found


@pytest.mark.parametrize(
    ("window", "minute", "opens_in"),
    [
        (None, 700, 0),
        ("02:00-05:00", 120, 0),
        ("02:00-05:00", 299, 0),
        ("02:00-05:00", 300, 1260),
        ("02:00-05:00", 0, 120),
        ("23:00-01:00", 1380, 0),
        ("23:00-01:00", 30, 0),
        ("23:00-01:00", 60, 1320),
        ("02:00-02:00", 60, 0),
        ("23:30-05:05", 1409, 1),
        ("23:30-05:05", 304, 0),
        ("23:30-05:05", 305, 1105),
    ],
)
def test_a_window_may_wrap_midnight(window, minute, opens_in):
    assert opens_in_min(window, minute) == opens_in


def test_a_backend_that_left_is_forgotten_after_a_day():
    ward = Ward()
    del ward.members["p/a"]
    ward.see(3600.0)
    assert "p/a" in ward.history.records
    ward.see(DAY)
    ward.see()
    assert "p/a" not in ward.history.records


def test_as_many_restarts_are_remembered_as_a_setting_may_allow():
    record, most = Record(), 10_000
    for now in range(most + 10):
        record = record.counted(float(now))
    assert record.restarts_since(-1.0) == most
    SupervisionConfig(max_restarts=most)
    with pytest.raises(ValidationError):
        SupervisionConfig(max_restarts=most + 1)
