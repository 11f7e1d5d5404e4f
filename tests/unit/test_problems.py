"""What is wrong now: each problem is found, with its numbers, its cause and the next step, and ends when it ends."""

import types
from dataclasses import replace

import pytest

from gateway.admin.condition import pause_s
from gateway.core.exclusion import Exclusion
from gateway.core.gpu import GpuLoad
from gateway.core.types import (
    Endpoint,
    LoadSample,
    Outcome,
    ProbeFailed,
    ProbePassed,
    RequestRecord,
    Scraped,
    ServedModel,
    ShedReason,
)
from gateway.observe.instruments import OTHER as OTHERS
from gateway.ops.backendproblems import cause_of, state_and_cause, state_problem
from gateway.ops.callers import Callers
from gateway.ops.gatewayproblems import Own, own_problems
from gateway.ops.poolproblems import pool_problems
from gateway.ops.problems import Known, Problem
from gateway.ops.recent import Lately
from gateway.ops.reloads import Reload
from gateway.pools.health import Order
from tests.unit.test_overview import BASE, ONE, TWO, Fleet

MIB = 1024 * 1024


@pytest.fixture
def fleet():
    fleet = Fleet(m={"backends": [ONE, TWO]})
    fleet.ready("m/b1", "m/b2")
    for each in ("m/b1", "m/b2"):
        fleet.loaded(each)
    return fleet


def ends(fleet, count, outcome=Outcome.OK, status=200, *, model="m", **more):
    """So many requests of pool m end."""
    for number in range(count):
        record = RequestRecord(f"r{number}", Endpoint.CHAT, fleet.clock.at)
        record.pool, record.model, record.outcome, record.status = "m", model, outcome, status
        record.ended_at = fleet.clock.at
        for name, value in more.items():
            setattr(record, name, value)
        fleet.metrics.settle(record)


def passes(fleet, seconds):
    """Time passes, with buckets and scrapes as they come."""
    for _ in range(int(seconds)):
        fleet.clock.at += 1.0
        for each in fleet.table:
            fleet.table.observe(each.id, ProbePassed(fleet.clock.at))
            writes = LoadSample(fleet.clock.at, 3, 1, 0.25, progress=fleet.clock.at)
            fleet.table.observe(each.id, Scraped(writes))
        if fleet.clock.at % 10 == 0:
            fleet.series.end_bucket()


def found(fleet, kind):
    """The one problem of a kind."""
    (problem,) = [each for each in fleet.overview()["problems"] if each["kind"] == kind]
    return problem


@pytest.mark.parametrize(("took_ms", "pause"), [(0.0, 1.0), (0.6, 1.0), (4.0, 2.0), (100.0, 5.0)])
def test_it_looks_each_second_or_so_rarely_that_it_costs_little(took_ms, pause):
    assert pause_s(took_ms / 1000) == pytest.approx(pause)


# --- pools and models -----------------------------------------------------------------------------


def test_a_pool_that_fails_most_requests_is_down_though_its_backends_are_ready(fleet):
    ends(fleet, 3)
    ends(fleet, 9, Outcome.BACKEND_ERROR, 502)
    told = fleet.overview()
    assert (told["state"], told["verdict"]["state"], told["pools"][0]["state"]) == ("down",) * 3
    problem = found(fleet, "requests_fail")
    assert (problem["severity"], problem["subject"]) == ("down", "pool m")
    assert "9 of 12 requests of the last" in problem["sentence"]
    assert problem["cause"] == "9 backend error (502)."


def test_a_pool_whose_servers_died_under_requests_tells_that_they_cannot_be_reached(fleet):
    ends(fleet, 12, Outcome.STREAM_BROKEN, 502)
    for each in ("m/b1", "m/b2"):
        for _ in range(3):
            fleet.table.observe(each, ProbeFailed(fleet.clock.at, "refused"))
    problem = found(fleet, "requests_fail")
    assert problem["cause"].startswith("Backend b1 is unreachable: ")
    assert problem["cause"].endswith(" 12 stream broken (502).")
    assert problem["next"].startswith("See that vLLM runs there")


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 request failed or was"), (2, "2 requests failed or were")]
)
def test_a_pool_that_is_down_tells_how_many_requests_that_hurt(fleet, count, words):
    ends(fleet, count, Outcome.SHED, 503)
    for each in ("m/b1", "m/b2"):
        for _ in range(3):
            fleet.table.observe(each, ProbeFailed(fleet.clock.at, "refused"))
    assert f"; {words} refused in 5 min" in found(fleet, "pool_down")["sentence"]


def test_why_a_server_cannot_be_started_is_told_once():
    why = "m/b1: the program vllm does not exist"
    tended = {"diagnosis": None, "trouble": why, "waits": None, "running": False}
    backend = {
        "state": "failed",
        "detail": f"it could not be started: {why}",
        "supervision": tended,
    }
    assert cause_of(backend, {}) == f"It could not be started: {why}."
    told = cause_of(backend | {"detail": "its process ended"}, {})
    assert told == f"Its process ended. It could not be restarted: {why}."
    blind = {"state": "starting", "detail": "looking for its process"}
    told = cause_of(backend | blind | {"supervision": tended | {"running": None}}, {})
    assert told == f"Looking for its process. Its process cannot be inspected: {why}."


@pytest.mark.parametrize(
    ("state", "told", "step"),
    [
        ("failed", "", "See to that; it is started again by itself."),
        ("suspended", "suspended, ", "See to that, then run `vllm-gateway undrain m/b1`."),
    ],
)
def test_what_was_not_started_has_no_log_that_says_why(state, told, step):
    why = "port 8000 is already in use by 42 (python)"
    tended = {"diagnosis": None, "trouble": why, "waits": None, "running": False}
    backend = {
        "id": "m/b1",
        "name": "b1",
        "state": state,
        "reason": "",
        "phase_age_s": 1.0,
        "detail": f"{told}it could not be started: {why}",
        "supervision": tended | {"launched": True, "outdated": False},
    }
    problem = state_problem(backend, 1.0, {})
    assert problem.remedy == step
    assert "its process ended" not in problem.what
    ended = backend | {"supervision": {**backend["supervision"], "trouble": ""}}
    assert "vllm-gateway logs m/b1" in state_problem(ended, 1.0, {}).remedy
    said = f"Backend b1 is {state}: it could not be started: {why}"
    assert state_and_cause(backend, {}) == said


def test_the_last_seconds_count_so_an_outage_shows_at_once_and_so_does_its_end(fleet):
    ends(fleet, 400)
    passes(fleet, 20)
    assert fleet.problems() == []
    ends(fleet, 8, Outcome.BACKEND_TIMEOUT, 504)
    assert ("requests_fail", "pool m") in fleet.problems()
    passes(fleet, 20)
    ends(fleet, 10)
    assert ("requests_fail", "pool m") not in fleet.problems()


def test_three_in_a_row_that_end_well_end_an_outage_and_two_do_not(fleet):
    ends(fleet, 12, Outcome.BACKEND_ERROR, 502)
    passes(fleet, 40)
    ends(fleet, 2)
    assert ("requests_fail", "pool m") in fleet.problems()
    ends(fleet, 1)
    assert ("requests_fail", "pool m") not in fleet.problems()
    ends(fleet, 1, Outcome.BACKEND_ERROR, 502)
    assert ("requests_fail", "pool m") in fleet.problems()


def test_an_outage_after_which_nobody_asked_says_so(fleet):
    ends(fleet, 12, Outcome.BACKEND_ERROR, 502)
    assert "none came" not in found(fleet, "requests_fail")["sentence"]
    passes(fleet, 40)
    told = found(fleet, "requests_fail")["sentence"]
    assert "all 12 requests of the last" in told
    assert "failed, and none came in the last 30 s" in told


def test_few_requests_that_fail_at_several_moments_are_an_outage_until_one_ends_well(fleet):
    for failed in range(4):
        assert (("requests_fail", "pool m") in fleet.problems()) == (failed >= 3)
        ends(fleet, 1, Outcome.BACKEND_ERROR, 502)
        passes(fleet, 50)
    told = fleet.overview()
    assert (told["state"], told["pools"][0]["state"]) == ("down", "down")
    assert "all 4 requests of the last" in found(fleet, "requests_fail")["sentence"]
    ends(fleet, 1)
    assert fleet.problems() == []


def test_few_requests_that_fail_now_and_then_are_no_outage(fleet):
    for failed in (True, False, True, False, True, False, True):
        ends(fleet, 1, *((Outcome.BACKEND_ERROR, 502) if failed else ()))
        ends(fleet, 0 if failed else 1)
        passes(fleet, 30)
    assert fleet.overview()["pools"][0]["state"] == "ready"


def test_a_model_that_few_ask_for_and_that_fails_each_time_is_named(fleet):
    for _ in range(3):
        ends(fleet, 10)
        ends(fleet, 1, Outcome.BACKEND_ERROR, 500, model="sql")
        passes(fleet, 60)
    assert "all 3 requests" in found(fleet, "model_fails")["sentence"]


@pytest.mark.parametrize(("ok", "failed"), [(0, 4), (6, 6), (0, 0)])
def test_a_few_failures_and_half_of_the_requests_are_no_outage(fleet, ok, failed):
    ends(fleet, ok)
    ends(fleet, failed, Outcome.BACKEND_ERROR, 502)
    assert fleet.overview()["pools"][0]["state"] == "ready"


def test_what_callers_did_wrong_is_no_failure(fleet):
    ends(fleet, 20, Outcome.REJECTED, 400)
    ends(fleet, 20, Outcome.UPSTREAM_REJECTED, 422)
    ends(fleet, 20, Outcome.CLIENT_GONE, 499)
    assert fleet.problems() == []


def test_a_model_that_fails_is_named_where_its_pool_serves(fleet):
    ends(fleet, 100)
    ends(fleet, 9, Outcome.BACKEND_ERROR, 500, model="sql")
    problem = found(fleet, "model_fails")
    assert (problem["severity"], problem["subject"]) == ("down", "model sql of pool m")
    assert "all 9 requests" in problem["sentence"]


def test_a_model_that_nobody_serves_is_named_where_its_pool_serves(fleet):
    ends(fleet, 100)
    ends(fleet, 9, Outcome.SHED, 503, model="sql", shed_reason=ShedReason.NO_BACKEND)
    problem = found(fleet, "model_fails")
    assert "Model sql of pool m fails most requests: all 9 requests" in problem["sentence"]
    assert problem["cause"] == "9 shed (503). Backends that have it: none."


def test_many_models_counted_as_one_are_no_failing_model_where_all_was_for_capacity(fleet):
    """Beyond 1,000 names, the others share one: some of these are served."""
    ends(fleet, 10)
    ends(fleet, 10, Outcome.SHED, 503, model=OTHERS)
    assert fleet.problems() == [("shed", "pool m")]


def test_a_saturated_pool_is_no_failing_model(fleet):
    for each in ("m/b1", "m/b2"):
        fleet.loaded(each, kv=0.99)
    ends(fleet, 9, Outcome.SHED, 503, shed_reason=ShedReason.QUEUE_FULL)
    assert fleet.problems() == [("saturated", "pool m")]


def test_a_burst_that_was_refused_is_no_failing_model_once_it_is_over(fleet):
    ends(fleet, 8)
    ends(fleet, 12, Outcome.SHED, 503, shed_reason=ShedReason.QUEUE_FULL)
    assert fleet.problems() == [("shed", "pool m")]


def test_some_failures_and_refusals_are_told_with_their_numbers(fleet):
    ends(fleet, 90)
    ends(fleet, 10, Outcome.STREAM_BROKEN, 200)
    ends(fleet, 7, Outcome.SHED, 503, shed_reason=ShedReason.QUEUE_FULL)
    assert fleet.problems() == [("shed", "pool m"), ("errors", "pool m")]
    assert "10 of 100 requests to pool m failed" in found(fleet, "errors")["sentence"]
    assert "7 requests to pool m were refused" in found(fleet, "shed")["sentence"]
    assert found(fleet, "shed")["cause"] == "By reason, in 5 min: 7 queue full."


def test_what_an_operator_took_out_is_not_named_where_requests_fail(fleet):
    fleet.table.order("m/b2", Order.DRAIN)
    ends(fleet, 90)
    ends(fleet, 10, Outcome.STREAM_BROKEN, 200)
    assert found(fleet, "errors")["cause"] == ""
    fleet.table.order("m/b2", Order.RESUME)
    fleet.down("m/b2")
    assert found(fleet, "errors")["cause"] == "Not ready: m/b2."


def test_the_last_five_minutes_are_told_of_pools_and_models(fleet):
    passes(fleet, 60)
    ends(fleet, 3)
    ends(fleet, 1, Outcome.BACKEND_ERROR, 502, model="sql")
    pool = fleet.pool()
    assert (pool["last_5_min"]["requests"], pool["last_5_min"]["errors"]) == (4, 1)
    assert pool["last_5_min"]["errors_by"] == {"backend_error 502": 1}
    assert pool["last_5_min"]["requests_per_s"] == pytest.approx(4 / 60, abs=0.01)
    assert [(each["name"], each["last_5_min"]["requests"]) for each in pool["models"]] == [
        ("m", 3),
        ("sql", 1),
    ]


# --- backends and adapters ------------------------------------------------------------------------


def test_a_slow_peer_is_told_once_that_has_lasted(fleet):
    fleet.table.get("m/b2").slowness = 3.2
    assert fleet.problems() == []
    fleet.clock.at += 6.0
    for each in ("m/b1", "m/b2"):
        fleet.loaded(each)
    fleet.table.get("m/b2").slowness = 3.2
    assert fleet.problems() == [("slow", "backend m/b2")]
    assert "3.2 times slower" in found(fleet, "slow")["sentence"]
    fleet.table.get("m/b2").slowness = 1.0
    assert fleet.problems() == []


def test_a_backend_that_has_far_more_of_our_requests_than_its_engine_runs_is_told(fleet):
    for _ in range(20):
        fleet.table.take("m/b1", fleet.clock.at)
    assert fleet.problems() == []
    passes(fleet, 8)
    assert fleet.problems() == [("lost_requests", "backend m/b1")]
    told = found(fleet, "lost_requests")["sentence"]
    assert "20 requests of this gateway, and its engine runs and queues only 4" in told


def test_requests_whose_sound_is_on_its_way_are_not_lost(fleet):
    """The engine cannot have them yet."""
    for _ in range(20):
        fleet.table.take("m/b1", fleet.clock.at)
    fleet.own = Own(callers=Callers(uploading={"m/b1": 12}))
    fleet.problems()
    passes(fleet, 8)
    assert fleet.problems() == []
    fleet.own = Own(callers=Callers(uploading={"m/b1": 2}))
    fleet.problems()
    passes(fleet, 8)
    assert fleet.problems() == [("lost_requests", "backend m/b1")]


def test_metrics_that_are_out_of_date_are_told_after_a_while(fleet):
    fleet.clock.at += 5.0
    assert fleet.problems() == []
    fleet.clock.at += 16.0
    assert fleet.problems() == [
        ("metrics_stale", "backend m/b1"),
        ("metrics_stale", "backend m/b2"),
    ]
    assert fleet.overview()["verdict"]["state"] == "ok"  # nobody waits there


def test_an_adapter_that_no_backend_could_load_is_down_and_on_one_of_two_degraded(fleet):
    one, two = fleet.table.get("m/b1"), fleet.table.get("m/b2")
    fleet.failed = {"m/b1": {"sql": "no adapter found for /loras/sql"}}
    one.lacking = {"sql": Exclusion.ADAPTER_FAILED}
    two.models = {**two.models, "sql": types.SimpleNamespace(name="sql", parent=BASE.name)}
    assert fleet.problems() == [("adapter_failed", "model sql on backend m/b1")]
    assert found(fleet, "adapter_failed")["cause"] == "No adapter found for /loras/sql."
    two.lacking = {"sql": Exclusion.ADAPTER_FAILED}
    two.models.pop("sql")
    assert fleet.problems() == [("adapter_missing", "model sql of pool m")]
    ends(fleet, 9, Outcome.SHED, 503, model="sql", shed_reason=ShedReason.NO_BACKEND)
    assert fleet.problems()[0] == ("adapter_missing", "model sql of pool m")
    assert "model_fails" not in [kind for kind, _ in fleet.problems()]
    problem = found(fleet, "adapter_missing")
    assert "could not be loaded; all 9 requests of the last" in problem["sentence"]
    assert problem["severity"] == "down"
    assert "vllm-gateway adapters load m/b1 sql" in problem["next"]


def test_a_gpu_with_little_memory_left_beside_what_vllm_takes_is_told(fleet):
    gib = 1 << 30
    roomy, full = (
        GpuLoad(place, int(used * gib), 80 * gib, 0.5, 0.92) for place, used in ((0, 75), (1, 79.4))
    )
    fleet.gpus = {"m/b1": (roomy,)}
    assert fleet.problems() == []
    fleet.gpus = {"m/b1": (replace(full, planned_ratio=None),)}  # a cache of fixed size
    assert fleet.problems() == []
    fleet.gpus = {"m/b1": (roomy, full)}
    problem = found(fleet, "gpu_memory")
    assert (problem["severity"], problem["subject"]) == ("note", "backend m/b1")
    assert "GPU 1 of backend m/b1 has 0.6 of 80.0 GiB of memory left" in problem["sentence"]
    assert "91% of what" in problem["cause"]
    assert "take 92% of it" in problem["cause"]
    assert [each["index"] for each in fleet.backend()["gpus"]] == [0, 1]
    fleet.gpus = {"m/b1": (replace(full, part=3),)}
    assert "GPU 1, MIG part 3 of backend m/b1 has" in found(fleet, "gpu_memory")["sentence"]


# --- the gateway itself ---------------------------------------------------------------------------


def tried(*findings, effect=(), at=1_700_000_090.0, by="anna"):
    return Reload(1, at, by, "", not findings, "abc", effect, findings)


@pytest.mark.parametrize(
    ("own", "kind", "severity", "words"),
    [
        (
            Own(reloads=[tried("gw.yaml:3:1 error unknown key `pols`", "another")]),
            *("reload_failed", "degraded"),
            [
                *("by anna, was refused", " gw.yaml:3:1 error unknown key `pols` (1 more)"),
                "vllm-gateway reload",
            ],
        ),
        (
            Own(reloads=[tried("gw.yaml:3:1 error x", by="local")]),
            *("reload_failed", "degraded"),
            ["The last reload, asked for on this machine, was refused"],
        ),
        (
            Own(reloads=[tried()], file_changed_wall=1_700_000_095.0, settings_file="gw.yaml"),
            *("reload_pending", "note"),
            ["gw.yaml was changed, and the change is not in force", "--dry-run"],
        ),
        (
            Own(reloads=[tried(effect=("needs a restart: listen 1 -> 2",))]),
            *("reload_pending", "note"),
            ["only with a new process", "listen 1 -> 2", "vllm-gateway upgrade"],
        ),
        (
            Own(disk="/var", disk_free_bytes=9 * MIB, disk_least_bytes=128 * MIB),
            *("disk_low", "degraded"),
            ["The disk of /var is nearly full: 9 MiB are left", "128 MiB", "`state`"],
        ),
        (
            Own(disk="/srv", disk_unwritable="/srv: Permission denied"),
            *("state_unwritable", "degraded"),
            ["The state folder /srv cannot be written", "Permission denied", "drains", "`state`"],
        ),
        (
            Own(disk="/srv", state_shared_with="process 7 on gw1"),
            *("state_shared", "degraded"),
            ["The state folder /srv is used by another gateway, too: process 7 on gw1", "holds"],
        ),
        (
            Own(callers=Callers({"ci": 34}, {"ci": "requests_per_minute: 60; 60 used"})),
            *("key_over_limit", "note"),
            ["Key ci is over its limit: 34 requests", "60 used", "keys effective ci"],
        ),
        (
            Own(callers=Callers({"oidcab2cd3ef4gh5": 34})),
            *("key_over_limit", "note"),
            ["oidcab2cd3ef4gh5 is over its limit: 34 requests", "`tiers`", "`keys.oidc`"],
        ),
        (
            Own(callers=Callers(slow={"ci": 12.0}, stalled={"ci": 1})),
            *("client_slow", "note"),
            ["has not read for 12 s", "timeouts.client_write"],
        ),
        (
            Own(callers=Callers(stalled={"ci": 2})),
            *("client_slow", "note"),
            ["2 streams of key ci cut in 5 min", "60 s"],
        ),
        (
            Own(callers=Callers(unknown_models=3, unknown_model="no model gpt-9")),
            *("unknown_model", "note"),
            ["3 requests in 5 min", "no model gpt-9", "`aliases`"],
        ),
        (Own(keys_known=False), "keys_unknown", "down", ["No request is let in", "`redis`"]),
        (
            Own(keys_trouble="keys.yaml:7:5: error: expires: expected a time"),
            *("keys_invalid", "degraded"),
            ["still works", "keys.yaml:7:5", "vllm-gateway check FILE"],
        ),
    ],
)
def test_what_is_wrong_with_the_gateway_itself_is_told(fleet, own, kind, severity, words):
    fleet.own = own
    problem = found(fleet, kind)
    text = " ".join((problem["sentence"], problem["cause"], problem["next"]))
    assert problem["severity"] == severity
    assert [each for each in words if each not in text] == []
    state = fleet.overview()["verdict"]["state"]
    assert state == ("ok" if severity == "note" else severity)
    assert problem["sentence"] in fleet.verdict()


@pytest.mark.parametrize(
    "own",
    [
        Own(reloads=[tried()]),
        Own(disk_free_bytes=200 * MIB, disk_least_bytes=128 * MIB),
        Own(disk_free_bytes=None, disk_least_bytes=128 * MIB),
        Own(),
    ],
)
def test_what_is_in_order_is_no_problem(fleet, own):
    fleet.own = own
    assert fleet.problems() == []


def test_a_note_does_not_hide_that_all_is_well(fleet):
    fleet.own = Own(callers=Callers({"ci": 1}))
    assert fleet.verdict().startswith(
        "All is well: 1 pool, 2 backends, 0 requests in flight. Key ci"
    )


# --- since when, and in which order ---------------------------------------------------------------


def problem(kind="slow", **more):
    fixed = {"severity": "degraded", "subject": "backend m/b1", "what": "It is", "remedy": "Do."}
    return Problem(kind=kind, **(fixed | more))


def test_a_problem_is_dated_from_when_it_was_first_found_and_anew_when_it_comes_back():
    known = Known()
    assert [each.since for each in known.dated([problem()], 100.0)] == [100.0]
    assert [each.since for each in known.dated([problem()], 130.0)] == [100.0]
    assert known.dated([], 140.0) == []
    assert [each.since for each in known.dated([problem()], 150.0)] == [150.0]
    assert [each.since for each in known.dated([problem(since=90.0)], 160.0)] == [90.0]


def test_what_began_by_a_clock_that_is_ahead_is_told_at_once():
    (told,) = Known().dated([problem(since=107.0)], 100.0)
    assert told.since == 100.0


def test_what_passes_at_once_is_not_told():
    known = Known()
    assert known.dated([problem(after_s=8.0)], 100.0) == []
    assert known.dated([problem(after_s=8.0)], 107.0) == []
    assert len(known.dated([problem(after_s=8.0)], 108.0)) == 1


def test_the_worst_comes_first():
    order = [
        problem("pool_down", severity="down", subject="pool b", weight=9.0),
        problem("pool_down", severity="down", subject="pool a"),
        problem("model_fails", severity="down"),
        problem("suspended"),
        problem("slow"),
        problem("client_slow", severity="note"),
    ]
    assert [each.key for each in Known().dated(reversed(order), 1.0)] == [
        each.key for each in order
    ]


def test_a_cause_from_a_log_is_cut():
    fleet = Fleet(m={"backends": [ONE]})
    fleet.own = Own(reloads=[tried("x" * 5000)])
    assert len(found(fleet, "reload_failed")["cause"]) == 400


def test_each_hold_of_restarts_is_a_problem_of_its_own():
    holds = [{"pool": pool, "until": None, "reason": "x"} for pool in (None, "a", "b")]
    overview = {"draining": False, "store": None, "holds": holds}
    subjects = [each.subject for each in own_problems(overview, Own(), 0.0)]
    assert subjects == ["restarts of all pools", "restarts of pool a", "restarts of pool b"]


def test_many_backends_are_told_as_one_only_with_others_of_their_kind(fleet):
    told = fleet.overview()
    (pool,) = told["pools"]
    one = pool["backends"][0] | {"state": "degraded"}
    reasons = ["silent", *["slow_health"] * 5]
    backends = [
        one | {"id": f"m/b{n}", "name": f"b{n}", "reason": each} for n, each in enumerate(reasons)
    ]
    found = [
        *pool_problems(pool | {"backends": backends}, Lately(fleet.series), {}, fleet.clock.at)
    ]
    assert [each.subject for each in found] == ["backend m/b0", "backends of pool m"]
    assert found[0].kind != found[1].kind


def test_many_of_one_kind_in_two_states_are_one_problem_with_one_series(fleet):
    (pool,) = fleet.overview()["pools"]
    states = [("degraded", "silent")] * 5 + [("frozen", "frozen")] * 5
    backends = [
        pool["backends"][0] | {"id": f"m/b{n}", "name": f"b{n}", "state": state, "reason": reason}
        for n, (state, reason) in enumerate(states)
    ]
    (found,) = pool_problems(pool | {"backends": backends}, Lately(fleet.series), {}, 100.0)
    assert (found.kind, found.subject) == ("frozen", "backends of pool m")
    assert found.what == "10 backends of pool m are frozen or degraded (b5, b6, b7 and 7 more)"


def test_problems_of_many_adapters_and_backends_are_few():
    fleet = Fleet(m={"backends": [f"http://127.0.0.1:{8001 + place}" for place in range(50)]})
    fleet.ready(*(each.id for each in fleet.table))  # their metrics were never read
    lacking = {f"a{place}": Exclusion.ADAPTER_FAILED for place in range(100)}
    for each in fleet.table:
        each.lacking = lacking
    ends(fleet, 2000)
    for place in range(100):
        ends(fleet, 10 if place == 42 else 9, Outcome.BACKEND_ERROR, 502, model=f"b{place}")
    fleet.table.take("m/b9", fleet.clock.at)
    fleet.problems()
    fleet.clock.at += 20.0
    fleet.table.get("m/b1").lacking = {}
    fleet.table.get("m/b1").models = {"m": BASE, **dict.fromkeys(["a0", "a1"], BASE)}
    told = fleet.overview()["problems"]
    assert [(each["kind"], each["subject"], each["severity"]) for each in told] == [
        ("model_fails", "models of pool m", "down"),
        ("adapter_missing", "models of pool m", "down"),
        ("errors", "pool m", "degraded"),
        ("adapter_failed", "backends of pool m", "degraded"),
        ("metrics_stale", "backends of pool m", "degraded"),  # one of them has a request
    ]
    assert told[0]["sentence"].startswith(
        "Model b42 of pool m fails most requests: all 10 requests of the last 20 s failed;"
        " so it is with 99 more. Since "
    )


def test_many_clients_that_do_not_read_are_few_problems():
    slow = {f"k{place}": 10.0 + place for place in range(5000)}
    overview = {"draining": False, "store": None, "holds": []}
    told = [*own_problems(overview, Own(callers=Callers(slow=slow)), 0.0)]
    assert [each.subject for each in told] == ["client k4999", "client k4998", "client k4997"]


OTHER = ServedModel("other", None, 4096)


def named(**pool):
    fleet = Fleet(m={"backends": [ONE, TWO], **pool})
    fleet.ready("m/b1", "m/b2")
    return fleet


def test_a_server_that_came_back_with_another_model_than_its_pools_is_told():
    fleet = named(served_model="m")
    assert fleet.problems() == []
    fleet.ready("m/b1", models=(OTHER,))
    assert fleet.problems() == [("other_model", "backend m/b1")]
    told = found(fleet, "other_model")
    assert (told["severity"], told["cause"]) == ("degraded", "It serves other.")
    fleet.ready("m/b2", models=(OTHER,))
    severities = [each["severity"] for each in fleet.overview()["problems"]]
    assert severities == ["down", "down"]  # nobody serves it
    fleet.ready("m/b1", "m/b2")
    assert fleet.problems() == []


def test_servers_of_one_pool_that_serve_different_models_are_told():
    fleet = named()
    fleet.ready("m/b2", models=(OTHER,))
    assert fleet.problems() == [("other_model", "pool m")]
    told = found(fleet, "other_model")
    assert told["severity"] == "note"
    assert "b1 serves `m`, b2 serves `other`" in told["sentence"]
    fleet.ready("m/b1", models=(OTHER,))
    assert fleet.problems() == []  # they agree, and nothing says which is meant
