import json

import msgspec
import pytest

from gateway.admission.gate import Gate
from gateway.config.models import Config
from gateway.core.endings import Ending
from gateway.core.types import (
    Endpoint,
    LoadSample,
    ModelsSeen,
    Need,
    Phase,
    ProbeFailed,
    ProbePassed,
    Scraped,
    ServedModel,
    TrafficFailed,
)
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.series import Series
from gateway.ops.gatewayproblems import Own
from gateway.ops.moment import Moment, rfc3339
from gateway.ops.overview import Facts, Overview, overview
from gateway.ops.problems import Known
from gateway.ops.recent import Lately
from gateway.ops.states import backend_state, pool_state
from gateway.pools.facts import Tending
from gateway.pools.health import Order
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser
from gateway.store.replicas import Replica, Told
from tests.orderdesk import alone

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
BASE = ServedModel("m", None, 4096)


class HeldClock:
    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return 1_700_000_000.0 + self.at


class Fleet:
    """A table with its configuration, told what happens and asked for the overview."""

    def __init__(self, **pools):
        self.clock = HeldClock()
        self.config = Config.model_validate({"pools": pools})
        self.table = PoolTable(self.clock)
        self.replicas = alone(self.clock)
        self.table.apply(self.config.pools)
        self.metrics = Metrics(Readings(bodies=lambda: (5, 9)), self.clock)
        self.series, self.known = Series(self.metrics, self.clock), Known()
        self.own, self.failed, self.gpus, self.why_drained = Own(), {}, {}, ""
        self.gate = Gate(self.table, Chooser(self.table), self.clock)
        self.gate.configure(self.config.pools, {0})

    def ready(self, *ids, models=(BASE,)):
        for each in ids:
            self.table.observe(each, ProbePassed(self.clock.at))
            self.table.observe(each, ModelsSeen(self.clock.at, models, version="0.32.0"))

    def loaded(self, backend_id, kv=0.25, at=None):
        sample = LoadSample(self.clock.at if at is None else at, 3, 1, kv)
        self.table.observe(backend_id, Scraped(sample))

    def down(self, backend_id):
        for _ in range(3):
            self.table.observe(backend_id, ProbeFailed(self.clock.at, "refused"))

    def overview(self, *, draining=False):
        facts = Facts(
            table=self.table,
            metrics=self.metrics,
            config=self.config,
            file=None,
            draining=draining,
            started_at=90.0,
            gate=self.gate,
            units={},
            holds={},
            why_held=lambda pool: "",
            why_drained=lambda backend_id: self.why_drained,
            trial=lambda pool: None,
            replicas=self.replicas,
            lately=Lately(self.series),
            failed=self.failed,
            ended={},
            own=self.own,
            gpus=self.gpus,
            known=self.known,
        )
        return overview(facts, Moment(self.clock.now(), self.clock.wall()))

    def pool(self, name="m"):
        return next(pool for pool in self.overview()["pools"] if pool["name"] == name)

    def backend(self, place=0):
        return self.pool()["backends"][place]

    def verdict(self, *, draining=False):
        return self.overview(draining=draining)["verdict"]["sentence"]

    def problems(self):
        """What is wrong: kind and subject, the worst first."""
        return [(each["kind"], each["subject"]) for each in self.overview()["problems"]]


@pytest.fixture
def fleet():
    fleet = Fleet(m={"backends": [ONE, TWO], "aliases": ["gpt"]})
    fleet.ready("m/b1", "m/b2")
    return fleet


@pytest.mark.parametrize(
    ("phase", "reason", "supervised", "state"),
    [
        (Phase.STARTING, "new", {}, "starting"),
        (Phase.STARTING, "refused", {}, "unreachable"),  # nobody here starts it
        (Phase.STARTING, "refused", {"starting": True}, "starting"),
        (Phase.STARTING, "models_http_401", {}, "unreachable"),
        (Phase.STARTING, "restart", {"starting": True}, "restarting"),
        (Phase.STARTING, "pending", {"starting": True}, "pending"),
        (Phase.STARTING, "start_failed", {}, "failed"),
        (Phase.STARTING, "start_failed", {"suspended": True}, "suspended"),
        (Phase.DOWN, "exited", {}, "failed"),
        (Phase.DOWN, "frozen", {}, "frozen"),
        (Phase.DOWN, "no_progress", {}, "frozen"),
        (Phase.DOWN, "asleep", {}, "asleep"),
        (Phase.DOWN, "timeout", {}, "unreachable"),
        (Phase.DOWN, "tls_untrusted", {}, "unreachable"),
        (Phase.DOWN, "tls_expired", {}, "unreachable"),
        (Phase.DOWN, "tls_name", {}, "unreachable"),
        (Phase.DOWN, "http_503", {}, "down"),
        (Phase.DRAINING, "draining", {}, "draining"),
        (Phase.DRAINING, "restart", {}, "restarting"),
        (Phase.DEGRADED, "traffic", {}, "failing"),
        (Phase.DEGRADED, "success_rate", {}, "failing"),
        (Phase.DEGRADED, "probation", {}, "degraded"),
        (Phase.DEGRADED, "metrics_stale", {}, "degraded"),
        (Phase.READY, "healthy", {"suspended": True}, "ready"),
    ],
)
def test_a_backend_s_state_says_what_is_the_matter_with_it(phase, reason, supervised, state):
    assert backend_state(phase, reason, **supervised) == state


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["ready", "suspended"], "degraded"),
        (["degraded", "unreachable"], "degraded"),
        (["failing", "starting"], "down"),  # most requests fail
        (["suspended", "starting"], "starting"),
        (["restarting", "failed"], "starting"),
        (["pending", "failed"], "starting"),
        (["suspended", "failed", "unreachable", "cordoned"], "down"),
    ],
)
def test_a_pool_is_down_unless_a_backend_serves_or_is_on_its_way(states, state):
    assert pool_state(states, saturated=[False] * len(states)) == state


def test_the_worst_pool_is_the_headline_and_the_worst_backend_is_told_first():
    fleet = Fleet(a={"backends": [ONE]}, m={"backends": [TWO, "http://h:1", "http://h:2"]})
    fleet.ready("m/b1")
    fleet.table.tend("m/b2", Tending(Phase.STARTING, "restart", "loading weights"))
    fleet.table.tend("m/b3", Tending(Phase.DOWN, "suspended", "it failed five times"))
    told = fleet.overview()
    assert told["state"] == "starting"  # of pool a, which nobody has looked at yet
    fleet.table.observe("a/b1", ProbeFailed(fleet.clock.at, "refused"))
    told = fleet.overview()
    assert told["state"] == "down"
    sentence = told["verdict"]["sentence"]
    assert sentence.startswith("Pool a is down: its only backend is not ready. Since ")
    assert "Backend b1 is unreachable: " in sentence
    assert [each["subject"] for each in told["problems"]] == [
        "pool a",
        "backend m/b3",
        "backend m/b2",
    ]
    assert told["problems"][1]["cause"] == "It failed five times."


def test_a_pool_is_told_with_all_its_names(fleet):
    lora = ServedModel("lora-a", "m", None)
    fleet.ready("m/b1", "m/b2", models=(ServedModel("m", None, 4096), lora))
    pool = fleet.pool()
    assert pool["aliases"] == ["gpt"]
    assert pool["adapters"] == ["lora-a"]
    assert pool["window_tokens"] == 4096
    assert pool["endpoints"] is None
    assert pool["state"] == "ready"
    assert pool["backends"][0]["models"] == ["m", "lora-a"]
    assert pool["backends"][0]["version"] == "0.32.0"


def test_endpoints_are_told_when_every_backend_tells_them(fleet):
    seen = ModelsSeen(100.0, (), endpoints=frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS}))
    for each in ("m/b1", "m/b2"):
        fleet.table.observe(each, seen)
    assert fleet.pool()["endpoints"] == ["chat", "completions"]


def test_fresh_load_is_told(fleet):
    fleet.loaded("m/b1")
    fleet.table.take("m/b1", 100.0)
    fleet.clock.at = 101.0
    backend = fleet.backend()
    assert (backend["running"], backend["waiting"], backend["kv_usage_ratio"]) == (3, 1, 0.25)
    assert (backend["in_flight"], backend["scrape_age_s"], backend["stale"]) == (1, 1.0, False)


def test_stale_load_is_null_and_says_how_old_it_is(fleet):
    fleet.loaded("m/b1")
    fleet.clock.at = 109.0
    backend = fleet.backend()
    assert backend["running"] is backend["waiting"] is backend["kv_usage_ratio"] is None
    assert backend["stale"]
    assert backend["scrape_age_s"] == 9.0


def test_load_that_was_never_seen_is_null(fleet):
    backend = fleet.backend()
    assert backend["running"] is backend["kv_usage_ratio"] is backend["scrape_age_s"] is None
    assert backend["stale"]


def test_times_are_wall_times(fleet):
    fleet.clock.at = 130.0
    backend = fleet.backend()
    assert backend["since"] == rfc3339(1_700_000_100.0) == "2023-11-14T22:15:00.000Z"
    assert backend["phase_age_s"] == 30.0
    assert fleet.overview()["uptime_s"] == 40.0


def test_the_newest_transitions_come_first(fleet):
    fleet.clock.at = 120.0
    fleet.down("m/b2")
    newest, *older = fleet.overview()["transitions"]
    assert (newest["backend"], newest["before"], newest["after"]) == ("m/b2", "ready", "down")
    assert newest["at"] == "2023-11-14T22:15:20.000Z"
    assert newest["reason"] == "refused"
    assert {each["after"] for each in older} == {"ready"}


def test_transitions_are_bounded(fleet):
    for _ in range(100):
        fleet.table.order("m/b1", Order.CORDON)
        fleet.table.order("m/b1", Order.RESUME)
    assert len(fleet.overview()["transitions"]) == 50


def test_totals_are_sums(fleet):
    fleet.down("m/b2")
    fleet.table.take("m/b1", 100.0)
    totals = fleet.overview()["totals"]
    assert totals == {
        "backends": 2,
        "backends_ready": 1,
        "in_flight": 1,
        "requests": {},
        "body_bytes": 5,
        "body_bytes_limit": 9,
    }


def test_requests_at_a_backend_that_a_reload_took_away_are_in_flight_until_they_end(fleet):
    slot = fleet.table.take("m/b2", 100.0)
    fleet.table.apply(Config.model_validate({"pools": {"m": {"backends": [ONE]}}}).pools)
    assert fleet.overview()["totals"]["in_flight"] == 1
    slot.release()
    assert fleet.overview()["totals"]["in_flight"] == 0


def test_so_they_are_where_another_worker_carries_them(fleet):
    told = Told(group="workers", worker=2, in_flight={"m/b1": 2, "m/gone": 3})
    fleet.replicas.every = [Replica("2", told, fleet.clock.at)]
    fleet.replicas.group, fleet.replicas.answered_at = "workers", fleet.clock.at
    fleet.table.take("m/b1", 100.0)
    assert fleet.backend()["in_flight"] == 3
    assert fleet.overview()["totals"]["in_flight"] == 6


def test_one_that_fails_and_that_its_pool_cannot_spare_says_so():
    fleet = Fleet(m={"backends": [f"http://127.0.0.1:{port}" for port in (8001, 8002)]})
    fleet.ready("m/b1", "m/b2")
    for _ in range(5):
        fleet.table.observe("m/b1", TrafficFailed(fleet.clock.at, Ending.HTTP_5XX))
    told = fleet.overview()["pools"][0]["backends"][0]
    assert (told["state"], told["phase"]) == ("failing", "degraded")
    assert told["detail"].endswith("it gets no new requests for 30 s, then one at a time")
    fleet.down("m/b2")
    told = fleet.overview()["pools"][0]["backends"][0]
    assert told["detail"] == (
        "5 requests in a row failed, most recently: it answered with a server error;"
        " it still gets requests, as fewer than half of its pool would be left"
    )


def test_the_overview_is_json_of_the_documented_shape(fleet):
    fleet.loaded("m/b1")
    fleet.metrics.configured("abc", "s")
    text = msgspec.json.encode(fleet.overview())
    assert msgspec.json.decode(text, type=Overview)["config"] == {"file": None, "hash": "abc"}
    assert json.loads(text)["schema_version"] == 2
    assert set(json.loads(text)) == set(Overview.__annotations__)


# --- states and the sentence ----------------------------------------------------------------------


def test_all_is_well(fleet):
    fleet.table.take("m/b1", 100.0)
    assert fleet.verdict() == "All is well: 1 pool, 2 backends, 1 request in flight."
    assert fleet.overview()["verdict"]["state"] == "ok"
    assert fleet.problems() == []
    assert fleet.overview()["state"] == "ready"


def test_one_backend_down_is_a_degraded_pool_with_its_evidence(fleet):
    fleet.down("m/b2")
    fleet.clock.at = 100.0 + 6 * 60 + 5
    backend = fleet.backend(1)
    assert fleet.pool()["state"] == "degraded"
    assert fleet.problems() == [("unreachable", "backend m/b2")]
    assert fleet.verdict() == (
        "Backend m/b2 cannot be reached. Since 22:15:00 UTC (6 min)."
        f" {backend['detail'].capitalize()}."
    )
    assert fleet.overview()["verdict"]["state"] == "degraded"


def test_no_backend_is_a_pool_that_is_down(fleet):
    fleet.down("m/b1")
    fleet.down("m/b2")
    assert fleet.pool()["state"] == fleet.overview()["state"] == "down"
    assert fleet.problems()[0] == ("pool_down", "pool m")
    assert fleet.overview()["verdict"]["state"] == "down"
    assert fleet.verdict().startswith(
        "Pool m is down: none of its 2 backends is ready. Since 22:15:00 UTC (0 s)."
        " Backend b1 is unreachable: 3 or more health checks failed"
    )


def test_a_pool_out_of_which_all_were_ordered_is_down(fleet):
    fleet.table.order("m/b1", Order.CORDON)
    fleet.table.order("m/b2", Order.DRAIN)
    assert fleet.pool()["state"] == "down"
    fleet.why_drained = "new fan"
    assert (
        "Backend b1 is cordoned: takes no new requests until it is resumed: new fan."
        " Backend b2 is draining: takes no new requests; running ones finish: new fan."
    ) in fleet.verdict()


def test_a_new_pool_is_starting():
    fleet = Fleet(m={"backends": [ONE]})
    assert fleet.pool()["state"] == "starting"
    assert fleet.problems() == [("pool_down", "pool m")]
    assert fleet.verdict().startswith("Pool m is starting: its only backend is not ready. Since ")


def test_a_pool_without_room_is_saturated(fleet):
    fleet.loaded("m/b1", kv=0.95)
    assert fleet.pool()["state"] == "ready"
    fleet.loaded("m/b2", kv=0.95)
    assert fleet.pool()["state"] == "saturated"
    assert fleet.backend()["saturated"]
    assert fleet.verdict() == (
        "Pool m is saturated: no backend has room, 0 requests waiting. Since 22:15:00 UTC (0 s)."
        " The KV cache of b1 is full: 95% used, 3 running, 1 waiting."
        " The KV cache of b2 is full: 95% used, 3 running, 1 waiting."
    )
    assert fleet.problems() == [("saturated", "pool m")]


def test_where_nothing_may_wait_requests_are_shed():
    fleet = Fleet(m={"backends": [ONE], "queue": {"max_requests": 0}})
    fleet.ready("m/b1")
    fleet.loaded("m/b1", kv=0.95)
    assert fleet.verdict().startswith(
        "Pool m is saturated: no backend has room, its queue is full, and new requests are refused."
    )


def test_the_limit_and_what_a_kv_cache_is_thought_to_hold_are_told(fleet):
    sample = LoadSample(100.0, 3, 1, 0.25, kv_capacity_tokens=1000)
    fleet.table.observe("m/b1", Scraped(sample))
    fleet.table.take("m/b1", 100.0, Need(50, 100, streams=True))
    assert (fleet.backend()["limit"], fleet.backend()["kv_projected_ratio"]) == (1024, 0.4)
    assert fleet.backend(1)["kv_projected_ratio"] is None


def test_a_kv_cache_that_its_requests_are_going_to_fill_tells_by_how_much(fleet):
    seen = LoadSample(100.0, 3, 1, 0.25, kv_capacity_tokens=1000)
    for each in ("m/b1", "m/b2"):
        fleet.table.observe(each, Scraped(seen))
    fleet.table.take("m/b1", 100.0, Need(250, 480, streams=True))
    assert fleet.verdict().startswith(
        "The KV cache of backend m/b1 is full (25% used, 98% with what its requests will need, 3 running, 1 waiting)."
    )
    fleet.clock.at = 110.0  # its metrics are out of date
    fleet.table.take("m/b2", 110.0, Need(250, 730, streams=True))
    assert fleet.verdict().startswith(
        "The KV cache of backend m/b2 is full (98% with what its requests will need). Since "
    )


def test_the_worst_pool_comes_first_and_the_good_ones_last():
    fleet = Fleet(
        a={"backends": [ONE]},
        b={"backends": [ONE, TWO]},
        c={"backends": [TWO]},
    )
    fleet.ready("a/b1", "b/b1", "b/b2", "c/b1")
    fleet.down("b/b1")
    fleet.down("c/b1")
    assert fleet.problems() == [("pool_down", "pool c"), ("unreachable", "backend b/b1")]
    assert fleet.verdict().startswith("Pool c is down")
    assert fleet.verdict().endswith(" 1 more problem.")
    assert fleet.overview()["state"] == "down"


def test_many_troubles_are_counted_not_listed():
    many = [f"http://127.0.0.1:{port}" for port in range(8001, 8010)]
    fleet = Fleet(**{f"p{number}": {"backends": many} for number in range(9)})
    sentence = fleet.verdict()
    assert ". 6 more." in sentence
    assert "17 more problems." in sentence
    assert len(sentence) < 600
    assert "9 backends of pool p0 are starting (b1, b2, b3 and 6 more). Since " in str(
        fleet.overview()["problems"]
    )


def test_draining_is_said_first(fleet):
    fleet.down("m/b1")
    sentence = fleet.verdict(draining=True)
    assert sentence.startswith(
        "The gateway shuts down: 0 requests in flight, and soon no new connections. Since "
    )
    kinds = [each["kind"] for each in fleet.overview(draining=True)["problems"]]
    assert kinds == ["shutting_down", "unreachable"]
    assert fleet.overview(draining=True)["draining"]


@pytest.mark.parametrize(
    ("age_s", "told"), [(8, "8 s"), (359, "5 min"), (7300, "2 h"), (12 * 86400, "12 d")]
)
def test_ages_are_told_in_one_unit(fleet, age_s, told):
    fleet.down("m/b2")
    fleet.clock.at += age_s
    assert f" UTC ({told})." in fleet.verdict()


# --- many alike -------------------------------------------------------------------------------------


def large_fleet(count):
    fleet = Fleet(m={"backends": [f"http://h:{port}" for port in range(1, count + 1)]})
    ids = [f"m/b{number}" for number in range(1, count + 1)]
    fleet.ready(*ids)
    return fleet, ids


def test_what_has_lasted_is_told_while_one_more_joins_that_has_not():
    fleet, ids = large_fleet(6)

    def passes(seconds, stale):
        for _ in range(seconds):
            fleet.clock.at += 1
            for each in ids:
                fleet.table.observe(each, ProbePassed(fleet.clock.at))
                if each not in stale:
                    at = fleet.clock.at
                    sample = LoadSample(at, 3, 1, 0.25, progress=at)
                    fleet.table.observe(each, Scraped(sample))
            fleet.problems()
        return [each for each in fleet.problems() if each[0] == "metrics_stale"]

    four = passes(60, ids[:4])
    assert [subject for _, subject in four] == [f"backend {each}" for each in ids[:4]]
    assert passes(12, ids[:5]) == four
    assert passes(30, ids[:5]) == [("metrics_stale", "backends of pool m")]


def test_many_alike_are_told_since_the_first_of_them():
    fleet, ids = large_fleet(7)
    for each in ids[1:5]:
        fleet.down(each)
    fleet.clock.at += 3 * 3600
    fleet.down(ids[0])
    fleet.clock.at += 60
    (problem,) = [each for each in fleet.overview()["problems"] if each["kind"] == "unreachable"]
    assert problem["since"] == rfc3339(fleet.clock.wall() - 3 * 3600 - 60)


def test_a_backend_that_reads_is_not_said_to_be_at_its_limit(fleet):
    for each in fleet.table:
        fleet.loaded(each.id)
        each.limit.reading.rate.learn(fleet.clock.at, 1.0, 8_000)
        fleet.table.take(each.id, fleet.clock.at, Need(12_000, 10, streams=True))
    assert fleet.backend()["obstacle"] == "reading"
    (problem,) = fleet.overview()["problems"]
    assert "still reads prompts that were sent to it" in problem["cause"]
    assert "at most" not in problem["cause"]
