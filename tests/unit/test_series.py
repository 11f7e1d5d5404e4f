"""The last hour in memory: what a bucket holds, and what was counted of late."""

import asyncio
import math
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.traffic import Queued
from gateway.core.types import (
    Caller,
    Endpoint,
    LoadSample,
    Outcome,
    Phase,
    RequestRecord,
    ShedReason,
    Usage,
    UsageSource,
)
from gateway.observe.buckets import TTFT_BUCKETS
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.recent import quantile
from gateway.observe.series import BUCKETS, STEP_S, Series
from gateway.ops.series import SeriesTold, series_told
from gateway.store.replicas import Told


class HeldClock:
    at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return 1_700_000_000.0 + self.at


@dataclass
class Reading:
    pool: str = "m"
    name: str = "b1"
    phase: Phase = Phase.READY
    in_flight: int = 2
    sample: LoadSample | None = None
    fresh: bool = True

    def stale(self, now):
        return self.sample is None or not self.fresh


@dataclass
class World:
    """A series over metrics, a clock that a test holds, and backends that show what it says."""

    clock: HeldClock = field(default_factory=HeldClock)
    backends: list[Reading] = field(default_factory=lambda: [Reading()])
    queue: int = 0
    fellows: list[Told] = field(default_factory=list)

    def __post_init__(self):
        readings = Readings(
            backends=lambda: tuple(self.backends),
            queues=lambda: {"m": Queued(self.queue)},
            fellows=lambda: self.fellows,
        )
        self.metrics = Metrics(readings, self.clock)
        self.series = Series(self.metrics, self.clock)

    def ends(self, count=1, outcome=Outcome.OK, status=200, *, model="m", ttft_s=0.2, **more):
        """So many requests end."""
        for number in range(count):
            record = RequestRecord(f"r{number}", Endpoint.CHAT, self.clock.at)
            record.pool, record.model, record.backend_id = "m", model, "m/b1"
            record.outcome, record.status, record.stream = outcome, status, True
            record.ended_at = self.clock.at + 2.0
            if outcome is Outcome.OK:
                record.sent_at = self.clock.at
                record.first_byte_at = self.clock.at + ttft_s
                record.usage = Usage(10, 19, UsageSource.UPSTREAM)
            for name, value in more.items():
                setattr(record, name, value)
            self.metrics.settle(record)
            self.series.posted([record])

    def passes(self, seconds=STEP_S):
        """Time passes, and what runs each bucket runs."""
        self.clock.at += seconds
        self.series.end_bucket()

    def told(self, minutes=60):
        told = asyncio.run(series_told(self.series, minutes))
        return msgspec.json.decode(msgspec.json.encode(told), type=SeriesTold)


@pytest.fixture
def world():
    return World()


def test_what_other_workers_carry_counts_too(world):
    world.queue = 1
    world.fellows = [
        Told(in_flight={"m/b1": 3, "gone/b1": 9}, queued={"m": Queued(4, 900, 2.5)}),
        Told(in_flight={"m/b1": 1}),
    ]
    world.passes()
    told = world.told()
    assert told["pools"]["m"]["in_flight"] == [2 + 3 + 1]
    assert told["pools"]["m"]["queued"] == [1 + 4]
    assert told["backends"]["m/b1"]["in_flight"] == [2 + 3 + 1]
    assert set(told["pools"]) == {"m"}


def test_what_other_workers_carry_counts_once_while_a_replaced_backend_leaves(world):
    world.backends.append(Reading(in_flight=1))
    world.fellows = [Told(in_flight={"m/b1": 3})]
    world.passes()
    told = world.told()
    assert told["pools"]["m"]["in_flight"] == [2 + 1 + 3]
    assert told["backends"]["m/b1"]["in_flight"] == [2 + 3]


def test_first_tokens_that_other_workers_saw_of_a_backend_count_too(world):
    other = World(backends=[])  # it counts; what there is, the first worker tells
    other.ends(3, ttft_s=2.0)
    world.ends(1, ttft_s=0.2)
    world.metrics.hear([other.metrics.tell()])
    world.passes()
    told = world.told()["backends"]["m/b1"]
    assert 1.0 <= told["ttft_p50_s"][0] <= 2.0


def test_a_bucket_holds_what_ended_within_it(world):
    world.ends(3)
    world.ends(2, Outcome.BACKEND_ERROR, 502)
    world.ends(1, Outcome.SHED, 503, shed_reason=ShedReason.QUEUE_FULL)
    world.queue = 4
    world.passes()
    world.ends(1)
    world.queue = 0
    world.passes()
    pool = world.told()["pools"]["m"]
    assert pool["requests"] == [6, 1]
    assert pool["errors"] == [2, 0]
    assert pool["shed"] == [1, 0]
    assert pool["tokens"] == [57, 19]
    assert pool["queued"] == [4, 0]
    assert pool["in_flight"] == [2, 2]
    assert all(0.1 <= value <= 0.25 for value in pool["ttft_p50_s"])
    assert pool["gap_p95_s"][0] == pytest.approx(0.1, abs=0.03)


def test_a_step_without_requests_has_counts_of_0_and_no_times(world):
    world.passes()
    pool = world.told()["pools"]["m"]
    assert (pool["requests"], pool["ttft_p50_s"], pool["gap_p95_s"]) == ([0], [None], [None])


def test_of_a_backend_it_holds_what_its_engine_shows(world):
    backend = world.backends[0]
    backend.sample = LoadSample(100.0, 3, 1, 0.5, generation_tokens=1000.0)
    world.ends(2, ttft_s=0.3)
    world.passes()
    backend.sample = LoadSample(110.0, 5, 0, 0.75, generation_tokens=1400.0)
    backend.phase = Phase.DEGRADED
    world.passes()
    backend.fresh = False
    world.passes()
    told = world.told()["backends"]["m/b1"]
    assert told["pool"] == "m"
    assert told["phase"] == ["ready", "degraded", "degraded"]
    assert told["kv"] == [0.5, 0.75, None]
    assert told["running"] == [3, 5, None]
    assert told["waiting"] == [1, 0, None]
    assert told["tokens"] == [None, 400, None]
    assert 0.25 <= told["ttft_p50_s"][0] <= 0.5
    assert told["ttft_p50_s"][1:] == [None, None]


def test_an_engine_that_began_anew_wrote_an_unknown_number_of_tokens(world):
    for total in (1000.0, 50.0, 80.0):
        world.backends[0].sample = LoadSample(100.0, 1, 0, 0.1, generation_tokens=total)
        world.passes()
    assert world.told()["backends"]["m/b1"]["tokens"] == [None, None, 30]


def test_an_hour_is_kept_and_no_more(world):
    for number in range(BUCKETS + 10):
        world.ends(number % 3)
        world.passes()
    told = world.told()
    assert len(told["pools"]["m"]["requests"]) == BUCKETS
    assert told["pools"]["m"]["requests"][-3:] == [number % 3 for number in range(367, 370)]
    assert world.told(minutes=1)["pools"]["m"]["requests"] == told["pools"]["m"]["requests"][-6:]
    assert (told["step_s"], told["now"]) == (10.0, 1_700_000_000.0 + world.clock.at)


def test_streams_go_on_between_one_pool_or_backend_and_the_next(world):
    turns = 0

    def others():
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(others)

    async def asked():
        asyncio.get_running_loop().call_soon(others)
        return await series_told(world.series, 60), turns

    world.backends += [Reading(pool="n"), Reading(pool="n", name="b2")]
    world.passes()
    told, seen = asyncio.run(asked())
    assert seen == len(told["pools"]) + len(told["backends"]) == 5
    tracks = [*told["pools"].values(), *told["backends"].values()]
    assert {type(each) for each in tracks} == {msgspec.Raw}  # written between the turns, too


def test_a_bucket_that_ends_while_the_hour_is_told_changes_nothing_of_it(world):
    world.backends.append(Reading(pool="n", in_flight=7))
    for _ in range(BUCKETS):
        world.passes()

    async def asked():
        world.backends[-1].in_flight = 9
        asyncio.get_running_loop().call_soon(world.passes)
        return await series_told(world.series, 60)

    told = msgspec.json.decode(msgspec.json.encode(asyncio.run(asked())))
    assert told["pools"]["n"]["in_flight"] == [7] * BUCKETS
    assert world.told()["pools"]["n"]["in_flight"] == [7] * (BUCKETS - 1) + [9]


def test_while_the_gateway_stood_still_nothing_is_known(world):
    world.passes()
    world.passes(3 * STEP_S)
    assert world.told()["pools"]["m"]["requests"] == [0, None, None, 0]


def test_of_more_than_an_hour_that_it_stood_still_nothing_is_left_of_before(world):
    for held in range(BUCKETS):
        world.backends[0].in_flight = held
        world.passes()
    world.passes((BUCKETS + 5) * STEP_S)
    told = world.told()["backends"]["m/b1"]["in_flight"]
    assert [each for each in told if each is not None] == [BUCKETS - 1]


def test_a_server_that_took_the_name_of_another_did_not_write_all_its_tokens_now(world):
    def wrote(tokens):
        return LoadSample(world.clock.at, 1, 0, 0.2, generation_tokens=tokens)

    for backend, tokens in (("one", 1000.0), ("one", 1400.0), ("other", 5e8), ("other", 5e8 + 9)):
        if backend == "other" and tokens == 5e8:
            world.backends = [Reading()]
        world.backends[0].sample = wrote(tokens)
        world.passes()
    assert world.told()["backends"]["m/b1"]["tokens"] == [None, 400, None, 9]


def test_a_pool_that_has_no_backend_any_more_shows_who_is_refused(world):
    world.passes()
    world.backends, world.queue = [], 7
    world.ends(40, Outcome.SHED, 503)
    world.passes()
    told = world.told()["pools"]["m"]
    assert (told["shed"][-1], told["queued"][-1], told["in_flight"][-1]) == (40, 7, 0)


def test_a_backend_that_left_stays_for_an_hour(world):
    world.passes()
    world.backends = [Reading(name="b2")]
    for _ in range(BUCKETS - 1):
        world.passes()
    assert world.told()["backends"]["m/b1"]["in_flight"][0] == 2
    world.passes()
    assert set(world.told()["backends"]) == {"m/b2"}


def window_of(world, seconds):
    return world.series.windows([seconds])[seconds]


def test_what_was_counted_of_late_is_told_by_pool_and_by_model(world):
    world.ends(5)
    for _ in range(31):
        world.passes()
    world.ends(2)
    world.ends(1, Outcome.BACKEND_TIMEOUT, 504, model="sql")
    world.ends(1, Outcome.CLIENT_GONE, 499, model="sql")
    window = window_of(world, 300.0)
    pool, sql = window.pools()["m"], window.models()["m", "sql"]
    assert (window.seconds, pool.requests, pool.errors, pool.left) == (300.0, 4, 1, 1)
    assert (sql.requests, sql.errors, sql.judged, sql.tokens) == (2, 1, 1, 0)
    assert window_of(world, 30.0).pools()["m"].requests == 4
    world.passes()
    world.passes()
    assert "m" not in window_of(world, 10.0).pools()


def test_a_window_reaches_to_the_start_at_most(world):
    world.clock.at += 4.0
    assert window_of(world, 300.0).seconds == 4.0


def test_whose_requests_were_refused_by_a_limit_is_kept_for_five_minutes(world):
    caller = Caller("ci", "ci-bot", "t")
    world.ends(3, Outcome.REJECTED, 429, caller=caller)
    world.ends(1, Outcome.CLIENT_STALLED, 200, caller=caller)
    assert world.series.callers(Outcome.REJECTED) == {"ci": 3}
    assert world.series.callers(Outcome.CLIENT_STALLED) == {"ci": 1}
    for _ in range(30):
        world.passes()
    assert world.series.callers(Outcome.REJECTED) == {"ci": 3}
    world.passes()
    assert world.series.callers(Outcome.REJECTED) == {}


@given(st.lists(st.floats(0.0005, 2000.0), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_a_quantile_lies_within_the_bucket_that_holds_it(values, share):
    counts = [0] * (len(TTFT_BUCKETS) + 1)
    for value in values:
        counts[next((p for p, b in enumerate(TTFT_BUCKETS) if value <= b), len(TTFT_BUCKETS))] += 1
    found = quantile(counts, TTFT_BUCKETS, share)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    place = next(p for p, b in enumerate(TTFT_BUCKETS) if exact <= b)
    lower = TTFT_BUCKETS[place - 1] if place else 0.0
    assert lower - 1e-9 <= found <= TTFT_BUCKETS[place] + 1e-9
