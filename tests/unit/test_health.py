from dataclasses import replace

import pytest

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
from gateway.pools.health import Order, advance, listen, obey, tend
from gateway.pools.progress import Listened

POLICY = Policy()
MODELS = (ServedModel("m", None, 4096),)


def after(state, *observations):
    for observation in observations:
        state = advance(state, observation, POLICY)
    return state


def models(at=0.0):
    return ModelsSeen(at, MODELS)


def scraped(at, *, running=0, progress=0.0, **more):
    return Scraped(LoadSample(at, running, 0, 0.1, progress=progress, **more))


def failing(count, reason, at=1.0):
    return [TrafficFailed(at, Ending(reason))] * count


NEW = HealthState(since=0.0)
READY = after(NEW, models(), ProbePassed(0.0))
DOWN = after(READY, *[ProbeFailed(1.0, "refused")] * 3)


def test_a_new_backend_is_ready_after_one_probe_once_its_models_are_known():
    assert after(NEW, ProbePassed(1.0)).phase is Phase.STARTING
    assert after(NEW, models(1.0)).phase is Phase.STARTING
    assert after(NEW, ProbePassed(1.0), models(1.0)).phase is Phase.READY
    assert after(NEW, models(1.0), ProbePassed(1.0)).phase is Phase.READY


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("refused", "connection refused"),
        ("timeout", "no answer in time"),
        ("dns", "the host name cannot be resolved"),
        ("tls", "the TLS handshake failed; does it speak TLS (vLLM's `--ssl-certfile`)?"),
        ("http_404", "there is no such path (404); does vLLM listen there?"),
        ("http_500", "it answers with status 500"),
        ("http_503", "it answers with status 503"),
        ("models_http_401", "/v1/models: it rejects the gateway's key; set api_key"),
        ("models_too_large", "/v1/models: the response is not vLLM's"),
        ("exited", "exited"),
    ],
)
def test_a_backend_that_never_started_stays_starting_and_says_why_in_words(reason, said):
    state = after(NEW, *[ProbeFailed(float(at), reason) for at in range(1000)])

    assert state.phase is Phase.STARTING
    assert state.reason == reason
    assert state.detail == f"last health check: {said}"
    assert state.since == 0.0


def test_a_backend_that_is_down_says_why_in_words():
    assert DOWN.reason == "refused"
    assert DOWN.detail.endswith("failed in a row, most recently: connection refused")


def test_of_one_that_fewer_failed_health_checks_took_out_no_more_are_told():
    last = "its last failed health check: connection refused"
    refused = ProbeFailed(2.0, "refused")
    for first in ([ProbeFailed(1.0, "http_503")], failing(5, "connect")):
        assert after(READY, *first, refused).detail == last
    assert after(DOWN, ProbePassed(2.0)).detail == last
    assert after(DOWN, ProbePassed(2.0), refused, refused, refused).detail == DOWN.detail


def test_probes_that_time_out_do_not_take_out_a_server_that_answers_requests():
    state = READY
    for second in range(1, 20):
        state = after(state, ProbeFailed(float(second), "timeout"))
        state = listen(state, said(heard_at=second + 0.5), second + 0.5, POLICY)
    assert (state.phase, state.reason) == (Phase.DEGRADED, "slow_health")
    assert "19 health checks" in state.detail
    assert after(state, ProbePassed(20.0)).phase is Phase.READY


def test_a_step_that_the_metrics_show_keeps_it_in_as_a_byte_does():
    state = READY
    for second in range(1, 20):
        state = after(state, ProbeFailed(float(second), "timeout"))
        state = after(state, scraped(second + 0.5, running=1, progress=float(second)))
    assert (state.phase, state.reason) == (Phase.DEGRADED, "slow_health")


def test_it_is_down_once_the_signs_of_life_end():
    state = after(READY, ProbeFailed(1.0, "timeout"))
    state = listen(state, said(heard_at=1.5), 1.5, POLICY)
    state = after(state, ProbeFailed(2.0, "timeout"), ProbeFailed(3.0, "timeout"))
    state = listen(state, said(heard_at=1.5), 3.5, POLICY)  # heard before
    assert state.phase is Phase.DEGRADED
    assert after(state, ProbeFailed(4.0, "timeout")).phase is Phase.DOWN


def test_metrics_of_an_idle_engine_are_no_sign_of_life():
    state = READY
    for second in range(1, 4):
        state = after(state, scraped(second - 0.5), ProbeFailed(float(second), "timeout"))
    assert (state.phase, state.reason) == (Phase.DOWN, "timeout")


@pytest.mark.parametrize("reason", ["refused", "http_500", "reset"])
def test_what_an_old_stream_still_says_does_not_outweigh_refused_probes(reason):
    state = READY
    for second in range(1, 4):
        state = after(state, ProbeFailed(float(second), reason))
        state = listen(state, said(heard_at=second + 0.5), second + 0.5, POLICY)
    assert (state.phase, state.reason) == (Phase.DOWN, reason)


def test_three_failed_probes_in_a_row_bring_it_down():
    state = after(READY, ProbeFailed(1.0, "timeout"), ProbeFailed(2.0, "timeout"))
    assert state.phase is Phase.READY
    state = after(state, ProbeFailed(3.0, "refused"))
    assert (state.phase, state.reason, state.since) == (Phase.DOWN, "refused", 3.0)


def test_a_passed_probe_starts_the_count_of_failures_anew():
    one_bad = (ProbeFailed(1.0, "timeout"), ProbeFailed(1.0, "timeout"), ProbePassed(1.0))
    assert after(READY, *one_bad * 50).phase is Phase.READY


def test_it_comes_back_after_two_passes_with_its_models_read_anew():
    assert after(DOWN, ProbePassed(2.0), ProbePassed(2.5), ProbePassed(3.0)).phase is Phase.DOWN
    assert after(DOWN, models(2.0), ProbePassed(2.0)).phase is Phase.DOWN
    state = after(DOWN, models(2.0), ProbePassed(2.0), ProbePassed(2.5))
    assert (state.phase, state.since) == (Phase.READY, 2.5)


def test_a_failure_between_two_passes_keeps_it_down():
    state = after(
        DOWN,
        models(2.0),
        ProbePassed(2.0),
        ProbeFailed(2.5, "reset"),
        models(3.0),
        ProbePassed(3.0),
    )
    assert (state.phase, state.reason) == (Phase.DOWN, "reset")


def test_a_burst_of_refused_connects_brings_it_down_before_the_probes_do():
    assert after(READY, *failing(4, "connect")).phase is Phase.READY
    state = after(READY, *failing(5, "connect"))
    assert (state.phase, state.reason) == (Phase.DOWN, "connect")
    assert "5 requests" in state.detail


def test_failed_streams_in_a_row_degrade_it_and_one_success_brings_it_back():
    assert after(READY, *failing(4, "stream")).phase is Phase.READY
    state = after(READY, *failing(5, "stream"))
    assert (state.phase, state.reason) == (Phase.DEGRADED, "traffic")
    assert "stream" in state.detail
    assert after(state, TrafficOk(2.0)).phase is Phase.READY


def test_a_success_between_failures_counts():
    assert after(READY, *[*failing(4, "stream"), TrafficOk(1.0)] * 20).phase is Phase.READY


def test_failures_of_other_kinds_between_refused_connects_do_not_bring_it_down():
    state = after(READY, *[*failing(4, "connect"), *failing(1, "timeout")] * 3)
    assert state.phase is Phase.DEGRADED


def test_a_stale_idle_connection_is_nobodys_fault():
    assert after(READY, *failing(100, "stale")) == READY


def test_degraded_by_traffic_is_tried_again_after_a_while_and_then_falls_at_once():
    state = after(READY, *failing(5, "stream", at=10.0))
    assert after(state, ProbePassed(39.0)).phase is Phase.DEGRADED
    retried = after(state, ProbePassed(40.0))
    assert retried.phase is Phase.READY
    assert after(retried, *failing(1, "stream", at=41.0)).phase is Phase.DEGRADED
    assert after(retried, TrafficOk(41.0), *failing(1, "stream", at=42.0)).phase is Phase.READY


def test_what_failed_before_it_went_down_is_not_held_against_the_restarted_one():
    state = after(READY, *failing(7, "stream"), *[ProbeFailed(2.0, "refused")] * 3)
    state = after(state, *failing(9, "broke"), models(3.0), ProbePassed(3.0), ProbePassed(3.5))
    assert state.phase is Phase.READY
    assert state.traffic_failures == 0


def test_work_without_progress_brings_it_down_though_probes_pass():
    state = after(READY, scraped(100.0, running=3, progress=50.0))
    for at in range(101, 130):
        state = after(state, ProbePassed(at), scraped(at, running=3, progress=50.0))
        assert state.phase is Phase.READY
    state = after(state, ProbePassed(130.0), scraped(130.0, running=3, progress=50.0))
    assert (state.phase, state.reason) == (Phase.DOWN, "no_progress")
    assert "30 s" in state.detail
    assert after(state, ProbePassed(131.0)).phase is Phase.DOWN


FROZEN = after(READY, scraped(0.0, running=1, progress=5.0), scraped(60.0, running=1, progress=5.0))


@pytest.mark.parametrize(
    "sign_of_life",
    [
        scraped(61.0, running=1, progress=6.0),
        scraped(61.0, running=0, progress=5.0),
        scraped(61.0, running=1, progress=0.0),
    ],
    ids=["progress", "nothing runs any more", "counters of a new process"],
)
def test_a_frozen_engine_that_moves_again_is_ready(sign_of_life):
    assert FROZEN.phase is Phase.DOWN
    assert after(FROZEN, sign_of_life).phase is Phase.READY


def chunk(at, *, running=1, waiting=0, kv=0.1, steps=0.0):
    return Scraped(LoadSample(at, running, waiting, kv, progress=5.0, steps=steps))


@pytest.mark.parametrize(
    "moves",
    [
        lambda at: chunk(at, kv=at / 1000),
        lambda at: chunk(at, steps=at),
        lambda at: chunk(at, waiting=int(at) % 2),
    ],
    ids=["the usage of the cache", "a counter of every step", "the queue"],
)
def test_what_a_step_without_a_token_moves_is_progress(moves):
    state = after(READY, chunk(0.0), *[moves(float(at)) for at in range(1, 200)])
    assert state.phase is Phase.READY


def said(heard_at=-1.0, quiet=0.0, patience=4.0, reading=0.0):
    return Listened(heard_at, quiet, patience, reading)


def heard(state, at, **more):
    return listen(state, said(**more), at, POLICY)


def test_a_byte_on_one_of_our_streams_is_progress():
    state = after(READY, chunk(0.0))
    for at in range(1, 200):
        state = after(heard(state, at, heard_at=float(at)), chunk(float(at)))
        assert state.phase is Phase.READY
    assert after(state, chunk(228.0)).phase is Phase.READY
    assert after(state, chunk(229.0)).reason == "no_progress"
    assert heard(FROZEN, 61.0, heard_at=61.0).phase is Phase.READY


def test_a_prompt_that_is_read_has_the_time_that_its_size_needs():
    state = heard(after(READY, chunk(0.0)), 0.0, reading=90.0)
    assert after(state, chunk(89.0)).phase is Phase.READY
    assert after(state, chunk(90.0)).reason == "no_progress"


def test_a_silence_longer_than_usual_is_a_suspicion_and_the_next_sign_of_life_ends_it():
    assert heard(READY, 1.0, quiet=3.9).phase is Phase.READY
    state = heard(READY, 1.0, quiet=4.0)
    assert (state.phase, state.reason) == (Phase.DEGRADED, "silent")
    assert "4 s" in state.detail
    assert heard(state, 2.0, heard_at=2.0).phase is Phase.READY
    state = heard(after(READY, chunk(0.0)), 1.0, quiet=4.0)
    assert after(state, chunk(2.0)).phase is Phase.DEGRADED
    assert after(state, chunk(2.0, steps=1.0)).phase is Phase.READY
    stopped = obey(READY, Order.STOP, 1.0, POLICY)
    assert heard(stopped, 2.0, quiet=9.0) is stopped


def test_requests_that_give_up_are_no_progress_so_a_frozen_engine_stays_suspect_until_it_is_down():
    state = after(READY, chunk(0.0))
    reasons = []
    for tick in range(
        1, 121
    ):  # half seconds: each client gives up after 6 s, the next one comes 2 s later
        at = tick / 2
        state = heard(state, at, quiet=at % 8 if at % 8 < 6 else 0.0)
        if tick % 2 == 0:
            state = after(state, chunk(at))
        if state.reason not in reasons[-1:]:
            reasons.append(state.reason)
    assert reasons == ["healthy", "silent", "no_progress"]


def test_a_silence_that_nothing_tells_of_any_more_is_forgotten_after_a_while_for_it_takes_a_request_to_know():
    blind, idle = READY, after(READY, scraped(0.0), scraped(9.0))
    for state in (
        heard(blind, 10.0, quiet=4.0),
        after(heard(idle, 10.0, quiet=4.0), scraped(39.0)),
    ):
        assert heard(state, 39.9).reason == "silent"
        assert heard(state, 40.0).phase is Phase.READY


def test_one_that_was_stuck_is_only_in_doubt_once_no_metrics_tell_so_any_more():
    state = after(FROZEN, ProbePassed(70.0), ScrapeFailed(70.0))
    assert (state.phase, state.reason) == (Phase.DOWN, "no_progress")
    state = after(state, ProbePassed(70.1), ScrapeFailed(70.1))
    assert (state.phase, state.reason) == (Phase.DEGRADED, "metrics_stale")
    assert after(state, scraped(71.0, running=1, progress=5.0)).reason == "no_progress"


def test_an_idle_engine_makes_no_progress_and_is_well():
    state = after(READY, *[scraped(float(at), progress=7.0) for at in range(0, 600)])
    assert state.phase is Phase.READY
    state = after(state, scraped(600.0, running=1, progress=7.0))
    assert state.phase is Phase.READY


def test_a_gap_in_the_metrics_is_not_taken_for_a_standstill():
    state = after(READY, scraped(0.0, progress=7.0), scraped(120.0, running=1, progress=7.0))
    assert state.phase is Phase.READY


def test_a_server_that_died_frozen_comes_back_without_its_past():
    state = after(FROZEN, *[ProbeFailed(62.0, "refused")] * 3)
    assert state.reason == "refused"
    assert after(state, models(90.0), ProbePassed(90.0), ProbePassed(91.0)).phase is Phase.READY


def test_an_engine_asleep_is_down_until_it_wakes():
    state = after(READY, scraped(1.0, asleep=True))
    assert (state.phase, state.reason) == (Phase.DOWN, "asleep")
    assert after(state, ProbePassed(2.0), ProbePassed(3.0)).phase is Phase.DOWN
    assert after(state, scraped(4.0)).phase is Phase.READY


def test_an_engine_found_asleep_at_the_start_is_never_ready():
    state = after(NEW, scraped(0.5, asleep=True), models(1.0), ProbePassed(1.0))
    assert (state.phase, state.reason) == (Phase.DOWN, "asleep")


def test_a_full_backend_is_busy_not_sick():
    full = LoadSample(1.0, 500, 5000, 1.0, progress=1.0, preemptions=1e6)
    state = after(READY, *[Scraped(replace(full, at=float(at), progress=at)) for at in range(100)])
    assert state.phase is Phase.READY


@pytest.mark.parametrize("seen", [ProbePassed(11.1), ScrapeFailed(11.1)])
def test_lost_metrics_degrade_it_until_they_are_back(seen):
    state = after(READY, scraped(1.0))
    assert after(state, ProbePassed(10.9), ScrapeFailed(10.9)).phase is Phase.READY
    state = after(state, seen)
    assert (state.phase, state.reason) == (Phase.DEGRADED, "metrics_stale")
    assert after(state, scraped(12.0)).phase is Phase.READY


def test_a_backend_without_metrics_is_judged_by_its_probes():
    seen = [ScrapeFailed(float(at)) for at in range(100)]
    assert after(READY, *seen, ProbePassed(100.0)).phase is Phase.READY


def test_probes_that_disagree_are_worth_looking_at_more_often():
    assert READY.settled
    assert not NEW.settled
    assert not DOWN.settled
    assert not after(READY, ProbeFailed(1.0, "timeout")).settled


@pytest.mark.parametrize(
    ("order", "phase"), [(Order.CORDON, Phase.CORDONED), (Order.DRAIN, Phase.DRAINING)]
)
def test_only_a_resume_undoes_an_order_and_it_leads_to_what_is_true_by_then(order, phase):
    held = obey(READY, order, 1.0, POLICY)
    assert (held.phase, held.since) == (phase, 1.0)
    seen = after(held, ProbePassed(2.0), models(2.0), scraped(2.0), TrafficOk(2.0))
    assert seen.phase is phase
    assert obey(seen, Order.RESUME, 3.0, POLICY).phase is Phase.READY
    down = after(held, *[ProbeFailed(2.0, "refused")] * 3)
    assert down.phase is phase
    assert obey(down, Order.RESUME, 3.0, POLICY).phase is Phase.DOWN
    never = obey(NEW, order, 1.0, POLICY)
    assert obey(never, Order.RESUME, 2.0, POLICY).phase is Phase.STARTING


def test_an_order_given_twice_changes_nothing():
    for order in Order:
        once = obey(READY, order, 1.0, POLICY)
        assert obey(once, order, 2.0, POLICY) == once


def test_stopped_is_final():
    stopped = obey(READY, Order.STOP, 1.0, POLICY)
    assert stopped.phase is Phase.STOPPED
    assert after(stopped, models(2.0), ProbePassed(2.0), ProbePassed(3.0)) == stopped
    for order in Order:
        assert obey(stopped, order, 2.0, POLICY) == stopped


RESTART = Tending(Phase.STARTING, "restart", "starts anew")


def test_a_restart_goes_through_draining_and_starting_and_forgets_the_process_before():
    drained = tend(READY, Tending(Phase.DRAINING, "restart", "drains first"), 10.0, POLICY)
    assert (drained.phase, drained.since) == (Phase.DRAINING, 10.0)
    starting = tend(drained, RESTART, 20.0, POLICY)
    assert (starting.phase, starting.started, starting.up) == (Phase.STARTING, False, False)
    assert not starting.models_known
    seen = after(starting, models(21.0), ProbePassed(21.0))
    assert (seen.phase, seen.up) == (Phase.STARTING, True)  # the supervisor still tries it
    assert tend(seen, None, 22.0, POLICY).phase is Phase.READY


def test_what_was_seen_while_it_starts_is_kept_when_the_stage_of_the_start_changes():
    starting = tend(READY, RESTART, 20.0, POLICY)
    seen = after(starting, models(21.0), ProbePassed(21.0))
    stage = tend(seen, Tending(Phase.STARTING, "canary", "tries one token"), 22.0, POLICY)
    assert (stage.up, stage.models_known, stage.detail) == (True, True, "tries one token")


def test_what_was_seen_of_the_process_before_is_forgotten_when_a_fresh_one_begins():
    starting = tend(READY, RESTART, 20.0, POLICY)
    seen = after(starting, models(21.0), ProbePassed(21.0))  # the old one still answers
    fresh = tend(seen, replace(RESTART, fresh=True), 22.0, POLICY)
    assert (fresh.up, fresh.models_known, fresh.started) == (False, False, False)
    assert fresh.phase is Phase.STARTING


def test_an_operator_s_order_outlasts_the_supervisor_s_work():
    cordoned = obey(tend(READY, RESTART, 20.0, POLICY), Order.CORDON, 21.0, POLICY)
    assert tend(cordoned, None, 22.0, POLICY).phase is Phase.CORDONED
    assert obey(cordoned, Order.RESUME, 22.0, POLICY).phase is Phase.STARTING


def test_a_suspended_backend_is_down_whatever_its_probes_say():
    suspended = tend(READY, Tending(Phase.DOWN, "suspended", "crashed too often"), 10.0, POLICY)
    assert after(suspended, ProbePassed(11.0), ProbePassed(12.0)).phase is Phase.DOWN
