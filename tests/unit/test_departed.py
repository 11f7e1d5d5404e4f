"""What was counted of backends that left is dropped in time, and not before it was read."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from gateway.core.endings import Ending
from gateway.core.events import Event, EventKind
from gateway.core.types import Endpoint, Outcome, RequestRecord
from gateway.observe.departed import KEPT_S, LOOK_EVERY_S, MOST
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.series import RECENT_S, Series


class World:
    """A process whose backends, all of the pool m, come and go."""

    def __init__(self, *names, at=100.0):
        self.names, self.at = list(names), at
        self.metrics = Metrics(Readings(backends=self.backends), self)

    def now(self):
        return self.at

    wall = now

    def backends(self):
        return [
            SimpleNamespace(
                pool="m", name=name, phase=None, kept_out=False, in_flight=0, sample=None,
                kv_events=None, prefix_index=None, allowed=lambda now: None,
            )
            for name in self.names
        ]  # fmt: skip

    def fails(self, name):
        self.metrics.upstream_failed(f"m/{name}", Ending.CONNECT)

    def serves(self, name):
        record = RequestRecord("r", Endpoint.CHAT, 1.0, stream=True)
        record.model, record.pool, record.outcome, record.status = "m", "m", Outcome.OK, 200
        record.backend_id, record.attempts = f"m/{name}", 1
        record.sent_at, record.first_byte_at, record.ended_at = 1.0, 1.2, 2.0
        self.metrics.settle(record)

    def passes(self, seconds):
        """Time passes, and the metrics are scraped now and then."""
        end = self.at + seconds
        while self.at < end:
            self.at = min(self.at + LOOK_EVERY_S, end)
            self.shown()

    def shown(self, metric="gateway_upstream_failures_total", label="backend"):
        made, _ = self.metrics.pieces()
        families = text_string_to_metric_families(b"".join(made).decode())
        return {
            sample.labels[label]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == metric
        }


def test_a_backend_that_left_is_told_for_an_hour_and_then_dropped():
    world = World("b1", "b2")
    for name in ("b1", "b2"):
        world.fails(name)
        world.serves(name)
    world.names.remove("b2")
    world.passes(KEPT_S)
    assert world.shown() == {"b1": 1, "b2": 1}
    world.passes(2 * LOOK_EVERY_S)
    assert world.shown() == {"b1": 1}
    assert world.shown("gateway_backend_ttft_seconds_count") == {"b1": 1}
    assert sum(world.shown("gateway_requests_total", "outcome").values()) == 2


def test_one_that_comes_back_goes_on_counting():
    world = World("b1")
    world.fails("b1")
    world.names.clear()
    world.passes(KEPT_S / 2)
    world.names.append("b1")
    world.passes(KEPT_S)
    world.names.clear()
    world.passes(KEPT_S / 2)
    world.fails("b1")
    assert world.shown() == {"b1": 2}


def test_pods_that_come_and_go_are_kept_up_to_a_number():
    world = World()
    for number in range(MOST + 50):
        world.fails(f"pod{number}")
        if number == 49:
            world.passes(2 * LOOK_EVERY_S)
    world.passes(2 * LOOK_EVERY_S)
    assert world.shown().keys() == {f"pod{number}" for number in range(50, MOST + 50)}


def test_events_of_a_pool_or_the_gateway_are_no_backends():
    world = World()
    for of in ("", "m"):
        world.metrics.event(Event(1.0, EventKind.HOLD, of, "hold", ""))
    world.passes(2 * KEPT_S)
    assert world.shown("gateway_supervision_events_total").keys() == {"", "m"}


def test_what_another_worker_counted_is_dropped_for_good_and_counted_anew():
    world, other = World("b1"), World("b1")
    other.fails("b1")
    other.fails("b1")
    other.serves("b1")
    world.metrics.hear([other.metrics.tell()])
    assert world.shown() == {"b1": 2}
    world.names.clear()
    other.names.clear()
    world.passes(KEPT_S + 2 * LOOK_EVERY_S)
    world.metrics.hear([other.metrics.tell()])  # it looks later
    assert world.shown() == {}
    assert world.shown("gateway_backend_ttft_seconds_count") == {}
    other.passes(KEPT_S + 2 * LOOK_EVERY_S)
    other.fails("b1")
    world.metrics.hear([other.metrics.tell()])
    assert world.shown() == {"b1": 1}


def window_after_a_drop(count):
    """Return the last five minutes, of a backend that `count`s in them for the first time since it was dropped."""
    world = World("b1")
    series = Series(world.metrics, world)
    for _ in range(100):
        count(world, "b1")
    world.shown()
    world.names.clear()
    world.passes(KEPT_S)
    series.end_bucket()  # which still has what was counted before
    world.passes(LOOK_EVERY_S)
    world.names.append("b1")
    count(world, "b1")
    return series.windows([RECENT_S])[RECENT_S]


def test_what_is_counted_anew_after_a_drop_is_not_less_than_nothing():
    (counts,) = window_after_a_drop(World.serves).backend_ttfts().values()
    assert (sum(counts), min(counts)) == (1, 0)


def test_a_failure_that_is_counted_anew_after_a_drop_is_told():
    failures = window_after_a_drop(World.fails).failures()
    assert [sum(told.values()) for told in failures.values()] == [1]
