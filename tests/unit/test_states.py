"""The state of a supervised backend: its table, and what the pool table shows of it."""

import pytest

from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Restart, Sign
from gateway.heal.states import (
    LATER,
    LONGEST_PAUSE,
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Serving,
    Starting,
    Suspect,
    Suspended,
    calls_for,
    checked,
    lives,
    tending,
)

SIGN = Sign(Cause.FROZEN, "no progress for 31 s")
ORDER = Restart("p/a", Cause.SLOW, "slow", "one", planned=True, attempt=1)
SERVING = Serving(1.0, "one")
EVERY = (
    Absent(1.0, None),
    Starting(1.0, "one"),
    Proving(1.0, "one"),
    SERVING,
    Suspect(1.0, "one", sign=SIGN),
    Draining(1.0, "one", order=ORDER, before=SERVING, until=9.0, told="finishing"),
    Replacing(1.0, "one", order=ORDER, before=SERVING),
    Failed(1.0, "one", sign=Sign(Cause.EXITED, "its process ended"), told="it died"),
    Suspended(1.0, "one", sign=SIGN, told="suspended, 5 restarts did not help"),
)


def test_the_table_covers_every_state():
    assert set(LATER) == {type(each) for each in EVERY}
    assert all(later <= set(LATER) for later in LATER.values())


@pytest.mark.parametrize("before", EVERY, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("after", EVERY, ids=lambda each: type(each).__name__)
def test_every_transition_is_one_of_the_table(before, after):
    if type(after) in LATER[type(before)]:
        assert checked(before, after) is after
    else:
        with pytest.raises(AssertionError, match="is not allowed"):
            checked(before, after)


def test_what_it_forbids():
    """Nothing that serves is stopped without a drain, an end or a suspicion; nothing skips its proof."""
    assert Suspended not in LATER[Serving]
    assert LATER[Draining] == {Replacing, Starting, Serving, Suspect}  # or as it was before
    for state in (Absent, Failed, Suspended):
        assert Serving not in LATER[state]
    for state in (Failed, Suspended, Absent, Proving):
        assert Draining not in LATER[state]


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        *zip(
            EVERY,
            [
                (Phase.STARTING, "restart", "waiting to be started"),
                (Phase.STARTING, "restart", ""),
                (Phase.STARTING, "restart", ""),
                None,
                None,
                (Phase.DRAINING, "restart", "finishing"),
                (Phase.STARTING, "restart", "restarting: slow, slow"),
                (Phase.DOWN, "exited", "it died"),
                (Phase.DOWN, "suspended", "suspended, 5 restarts did not help"),
            ],
            strict=True,
        )
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_the_pool_table_shows(state, shown):
    found = tending(state, launched=True)
    assert (found and (found.phase, found.reason, found.detail)) == shown


def test_one_that_was_found_running_and_what_others_start_is_left_to_its_probes():
    assert tending(Starting(1.0, "one", owes=False), launched=True) is None
    assert tending(Absent(1.0, None), launched=False) is None


def test_clients_do_not_wait_for_a_start_that_a_restart_cannot_help():
    sign = Sign(Cause.START_FAILED, "no such flag")
    assert tending(Failed(1.0, "one", sign=sign), launched=True).phase is Phase.STARTING
    hopeless = Failed(1.0, "one", sign=sign, hopeless=True)
    assert tending(hopeless, launched=True).phase is Phase.DOWN


def test_a_suspension_says_what_still_runs():
    told = tending(Suspended(1.0, "one", sign=SIGN, lives=True, told="suspended."), launched=True)
    assert told.detail.startswith("suspended. Its server still runs (one)")


# --- suspicion ------------------------------------------------------------------------------------


def failed(state, *ats, how="timeout"):
    for at in ats:
        state = state.after_failure(how, at, 5.0, 1.0)
    return state


def test_it_stays_in_rotation_until_a_test_request_has_failed():
    suspect = Suspect(10.0, "one", sign=SIGN)
    assert tending(suspect, launched=True) is None
    shown = tending(failed(suspect, 20.0), launched=True)
    assert (shown.phase, shown.reason) == (Phase.DOWN, "suspect")
    assert tending(failed(suspect, 20.0, 21.0), launched=True).reason == "frozen"
    assert shown.detail == "no progress for 31 s, and a test request failed (no answer in time)"


def test_the_only_one_that_serves_stays_in_rotation_until_two_have_failed():
    suspect = Suspect(10.0, "one", sign=SIGN)
    once = suspect.after_failure("timeout", 20.0, 5.0, 1.0, alone=True)
    assert tending(once, launched=True) is None
    twice = once.after_failure("timeout", 21.0, 5.0, 1.0, alone=True)
    assert tending(twice, launched=True).reason == "frozen"


def test_two_test_requests_in_a_row_are_proof():
    suspect = Suspect(10.0, "one", sign=SIGN)
    assert calls_for(failed(suspect, 20.0), {}, 99.0) is None
    found = calls_for(failed(suspect, 20.0, 30.0), {}, 30.0)
    assert found.cause is Cause.FROZEN
    assert found.evidence.endswith("and 2 test requests in a row failed (no answer in time)")


def test_an_engine_that_answers_errors_gets_time_to_end_by_itself():
    suspect = failed(Suspect(10.0, "one", sign=SIGN), 10.0, 10.1, how="http_500")
    assert calls_for(suspect, {}, 14.9) is None
    assert calls_for(suspect, {}, 15.0) is not None


def test_one_that_only_its_probes_speak_against_has_to_be_silent_for_long():
    suspect = failed(Suspect(10.0, "one", sign=SIGN, proof_at=40.0), 10.0, 10.1, how="refused")
    assert calls_for(suspect, {}, 39.9) is None
    assert calls_for(suspect, {}, 40.0) is not None


def test_test_requests_go_on_with_longer_pauses():
    state, pauses = Suspect(0.0, "one", sign=SIGN), []
    for _ in range(8):
        state = state.after_failure("timeout", 100.0, 5.0, 1.0)
        pauses.append(state.test_at - 100.0)
    assert pauses == [
        0.0,
        4.0,
        8.0,
        16.0,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
    ]


def test_a_sign_of_life_since_the_last_test_request_counts_until_the_next_one():
    suspect = Suspect(10.0, "one", sign=SIGN)
    assert not suspect.revives(99.0, answers=True), "nothing was tested yet"
    silent = failed(suspect, 20.0, 30.0)
    assert [silent.revives(at, answers=True) for at in (30.0, 30.1)] == [False, True]
    assert not failed(silent, 30.2).revives(30.1, answers=True)
    assert not failed(suspect, 20.0, how="http_500").revives(99.0, answers=True), (
        "it moves, and errs"
    )
    away = suspect.after_failure("refused", 20.0, 5.0, 1.0, answers=False)
    assert [away.revives(0.0, answers=answers) for answers in (False, True)] == [False, True]
    back = away.after_failure("http_500", 21.0, 5.0, 1.0, answers=True)
    assert not back.revives(0.0, answers=True), "it answers, and gives no token"


# --- what calls for a restart ---------------------------------------------------------------------


def test_what_calls_for_a_restart():
    slow, errors = Sign(Cause.SLOW, ""), Sign(Cause.ERRORS, "")
    judged = {each.cause: each for each in (slow, errors)}
    assert calls_for(SERVING, {}, 5.0) is None
    assert calls_for(SERVING, judged, 5.0) is errors, "the gravest"
    assert calls_for(Starting(1.0, "one"), judged, 5.0) is None
    assert calls_for(Proving(1.0, "one"), judged, 5.0) is None
    assert calls_for(Absent(1.0, None), judged, 5.0) is None
    assert calls_for(Absent(1.0, None, due=True), {}, 5.0).cause is Cause.EXITED
    assert calls_for(Failed(1.0, "one", sign=SIGN), judged, 5.0) is SIGN
    assert calls_for(Failed(1.0, "one", sign=SIGN, examined=False), judged, 5.0) is None


def test_what_lives():
    assert [lives(each) for each in EVERY] == [False, *[True] * 6, False, False]
    assert not lives(Replacing(1.0, None, order=ORDER, before=Absent(1.0, None)))
