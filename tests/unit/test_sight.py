"""Where a look leads: every state, and everything that a launcher may say."""

from dataclasses import replace

import pytest

from gateway.core.types import Phase
from gateway.heal.decisions import Cause
from gateway.heal.sight import DEAD_S, SILENT_S, after_look, doubt, how_it_ended
from gateway.heal.states import (
    LATER,
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Serving,
    Starting,
    Suspect,
    Suspended,
)
from gateway.launch.launcher import Runs, Seen
from gateway.pools.facts import HealthState
from gateway.pools.table import Backend
from tests.unit.test_states import EVERY, SIGN

NEW = Absent(1.0, None, looked=False)
HUNG = Failed(1.0, "one", sign=SIGN, lives=True)
AWAITED = Starting(1.0, None, before="one", ours=True)
FOUND = Starting(1.0, "one", owes=False)
MORE = (*EVERY, NEW, HUNG, AWAITED, FOUND, Suspended(1.0, "one", sign=SIGN, lives=True))
LIVING = [each for each in EVERY if isinstance(each, Starting | Proving | Serving | Suspect)]


def look(state, runs, incarnation="one", launches=True, **more):
    return after_look(state, Seen(incarnation, runs, **more), 9.0, launches=launches)


@pytest.mark.parametrize("state", MORE, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("runs", Runs)
@pytest.mark.parametrize("incarnation", ["one", "two", None])
@pytest.mark.parametrize("launches", [True, False])
def test_a_look_leads_nowhere_that_the_table_does_not_have(state, runs, incarnation, launches):
    after = look(state, runs, incarnation, launches)
    assert after is state or type(after) in LATER[type(state)]
    assert look(after, runs, incarnation, launches) is after, "a second look is none more"


@pytest.mark.parametrize("state", [EVERY[5], EVERY[6]], ids=["Draining", "Replacing"])
@pytest.mark.parametrize("runs", Runs)
def test_what_is_being_restarted_is_not_looked_at(state, runs):
    assert isinstance(state, Draining | Replacing)
    assert look(state, runs, "two") is state


@pytest.mark.parametrize("state", LIVING, ids=lambda each: type(each).__name__)
def test_what_runs_as_before_changes_nothing_and_another_incarnation_starts(state):
    assert look(state, Runs.RUNNING) is state
    after = look(state, Runs.RUNNING, "two")
    assert isinstance(after, Starting)
    assert (after.incarnation, after.ours, after.owes) == ("two", False, True)


@pytest.mark.parametrize(
    "state", [*LIVING, HUNG, AWAITED, EVERY[0], EVERY[7]], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("pending", [False, True])
def test_what_probes_found_of_another_incarnation_is_forgotten(state, pending):
    before = look(state, Runs.PENDING) if pending else state
    assert look(before, Runs.RUNNING, "two").fresh


@pytest.mark.parametrize("state", LIVING, ids=lambda each: type(each).__name__)
def test_what_ends_has_failed_and_is_to_be_examined(state):
    after = look(state, Runs.ENDED, exit_code=1)
    assert (after.lives, after.examined) == (False, False)
    starting = isinstance(state, Starting | Proving)
    assert after.sign.cause is (Cause.START_FAILED if starting else Cause.EXITED)
    assert look(after, Runs.ENDED) is after


def test_one_that_was_found_and_ends_has_exited():
    assert look(FOUND, Runs.ENDED).sign.cause is Cause.EXITED


def test_one_that_never_gave_a_token_and_ends_has_not_started():
    after = look(Suspect(1.0, "one", sign=SIGN, proved=False), Runs.ENDED, exit_code=1)
    assert after.sign.cause is Cause.START_FAILED
    assert after.sign.evidence == "its process exited with code 1 while it started"


def test_what_ended_before_our_time_is_due_and_not_examined():
    after = look(NEW, Runs.ENDED, exit_code=3)
    assert isinstance(after, Absent)
    assert after.due


def test_what_is_found_running_owes_no_token():
    after = look(NEW, Runs.RUNNING)
    assert (after.incarnation, after.owes) == ("one", False)


def test_what_a_launch_replaces_may_be_seen_for_a_while():
    assert look(AWAITED, Runs.RUNNING, "one") is AWAITED
    assert look(AWAITED, Runs.ENDED, "one", exit_code=1) is AWAITED
    assert look(AWAITED, Runs.RUNNING, "two").incarnation == "two"
    assert look(AWAITED, Runs.ENDED, "two").sign.cause is Cause.START_FAILED


@pytest.mark.parametrize(
    "state", [*LIVING, EVERY[0], EVERY[7]], ids=lambda each: type(each).__name__
)
def test_what_its_service_manager_works_on_is_waited_for(state):
    after = look(state, Runs.PENDING, detail="pulling the image")
    assert isinstance(after, Starting)
    assert after.pending == "pulling the image"
    back = look(after, Runs.RUNNING, after.incarnation or "two")
    assert (back.pending, back.incarnation is None) == ("", False)


@pytest.mark.parametrize("state", LIVING[1:], ids=lambda each: type(each).__name__)
def test_what_was_taken_away_on_purpose_is_absent_and_only_launched_ones_are_due(state):
    for launches in (True, False):
        after = look(state, Runs.ABSENT, None, launches=launches)
        assert isinstance(after, Absent)
        assert after.due is launches


def test_a_start_that_failed_stays_failed_while_nothing_is_there():
    failed = EVERY[7]
    assert look(failed, Runs.ABSENT, None) is failed
    assert look(failed, Runs.ENDED) is failed
    assert isinstance(look(failed, Runs.RUNNING, "two"), Starting)


def test_what_was_pending_and_is_taken_away_is_absent_but_not_what_we_are_starting():
    pending = look(EVERY[3], Runs.PENDING, None, launches=False)
    assert isinstance(look(pending, Runs.ABSENT, None, launches=False), Absent)
    awaited = look(AWAITED, Runs.PENDING, None, launches=False)
    assert look(awaited, Runs.ABSENT, None, launches=False) == AWAITED


def test_what_we_stopped_and_could_not_start_stays_due_though_nothing_is_there():
    owed = replace(EVERY[7], owed=True)
    assert look(owed, Runs.ABSENT, None, launches=False) is owed
    assert isinstance(look(EVERY[7], Runs.ABSENT, None, launches=False), Absent)


def test_one_that_hung_and_ended_is_examined_anew():
    assert look(HUNG, Runs.RUNNING) is HUNG
    after = look(HUNG, Runs.ENDED, exit_code=1)
    assert (after.sign.cause, after.examined) == (Cause.START_FAILED, False)


def test_a_suspension_stays_and_knows_what_runs():
    suspended = EVERY[8]
    assert isinstance(suspended, Suspended)
    alive = look(suspended, Runs.RUNNING, "two")
    assert (type(alive), alive.lives, alive.incarnation) == (Suspended, True, "two")
    assert not look(alive, Runs.ENDED, "two").lives


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Seen("one", Runs.ENDED, exit_code=-9), "killed by signal 9"),
        (Seen("one", Runs.ENDED, exit_code=1), "exited with code 1"),
        (Seen("one", Runs.ENDED), "its process ended"),
        (Seen(), "it has no running process"),
        (Seen("one", Runs.ENDED, detail="OOMKilled"), "(OOMKilled)"),
    ],
)
def test_an_end_is_told_with_how_it_ended(seen, said):
    assert said in how_it_ended(seen, starting=False)
    assert said in how_it_ended(seen, starting=True)
    assert "while it started" in how_it_ended(seen, starting=True)


# --- evidence against one that serves -------------------------------------------------------------


def seen_as(phase, reason, **more):
    backend = Backend("m", "a", "http://127.0.0.1:1")
    backend.health = HealthState(0.0, phase, reason, "detail", **more)
    backend.phase, backend.reason = phase, reason
    return doubt(backend)


def test_what_probes_and_progress_say_is_evidence_and_no_proof():
    frozen = seen_as(Phase.DOWN, "no_progress")
    assert (frozen.sign.cause, frozen.proof_s) == (Cause.FROZEN, 0.0)
    dead = seen_as(Phase.DOWN, "http_503")
    assert (dead.sign.cause, dead.proof_s) == (Cause.ENGINE_DEAD, DEAD_S)
    silent = seen_as(Phase.DOWN, "timeout")
    assert (silent.sign.cause, silent.proof_s) == (Cause.ENGINE_DEAD, SILENT_S)
    assert silent.sign.evidence == "its process runs but does not serve: detail"


@pytest.mark.parametrize(
    "reason",
    [
        "dns",
        "tls",
        "tls_untrusted",
        "tls_expired",
        "tls_name",
        "http_401",
        "models_http_404",
        "unreachable",
    ],
)
def test_what_no_restart_cures_is_none(reason):
    assert seen_as(Phase.DOWN, reason) is None


def test_one_that_serves_sleeps_or_is_out_by_order_is_not_doubted():
    assert seen_as(Phase.READY, "healthy") is None
    assert seen_as(Phase.DEGRADED, "traffic") is None
    assert seen_as(Phase.DOWN, "asleep", asleep=True) is None
    assert seen_as(Phase.DRAINING, "draining", held=Phase.DRAINING) is None
