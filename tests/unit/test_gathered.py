"""What several workers counted, told by one of them."""

from prometheus_client.parser import text_string_to_metric_families

from gateway.core.traffic import Queued
from gateway.core.types import Endpoint, Outcome, RequestRecord, Usage, UsageSource
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings


class HeldClock:
    def __init__(self, at=100.0):
        self.at = at

    def now(self):
        return self.at

    wall = now


def worker(at=100.0, queued=0, tenant_tokens=None):
    kept = {"gateway_open_connections": {("client",): 3}, "gateway_kept_body_bytes": {(): 7}}
    if tenant_tokens is not None:
        kept["gateway_tenant_tokens_total"] = tenant_tokens
    return Metrics(
        Readings(
            queues=lambda: {"m": Queued(queued, 10 * queued)},
            bodies=lambda: (5, 512),
            kept=lambda: kept,
        ),
        HeldClock(at),
    )


def serve(metrics, count=1, seconds=0.2):
    for _ in range(count):
        record = RequestRecord("r", Endpoint.CHAT, 1.0, stream=True)
        record.model, record.pool, record.outcome, record.status = "m", "m", Outcome.OK, 200
        record.sent_at, record.first_byte_at, record.ended_at = 1.0, 1.0 + seconds, 2.0
        record.attempts, record.usage = 1, Usage(10, 5, UsageSource.UPSTREAM)
        metrics.settle(record)


def values(metrics):
    made, _ = metrics.pieces()
    text = b"".join(made).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gateway_")
    }


def total(metrics, name):
    return sum(value for (each, *_), value in values(metrics).items() if each == name)


def test_counters_and_histograms_are_added_up_once():
    one, two, three = worker(), worker(), worker()
    serve(one, 2)
    serve(two, 3)
    serve(three, 4, seconds=0.02)
    for _ in range(3):  # telling again counts nothing again
        one.hear([two.tell(), three.tell()])
    assert total(one, "gateway_requests_total") == 9
    assert one.total_requests() == {"ok": 9}
    assert total(one, "gateway_ttft_seconds_count") == 9
    assert abs(total(one, "gateway_ttft_seconds_sum") - (5 * 0.2 + 4 * 0.02)) < 1e-9
    assert total(one, "gateway_tokens_total") == 9 * 15
    serve(two)
    one.hear([two.tell(), three.tell()])
    assert total(one, "gateway_requests_total") == 10


def test_sums_never_fall_when_a_worker_dies_or_is_slow_to_answer():
    one, two, slow = worker(), worker(), worker()
    serve(two, 3)
    serve(slow, 2)
    one.hear([two.tell(), slow.tell()])
    one.hear([])
    assert total(one, "gateway_requests_total") == 5
    heir = worker(at=200.0)
    serve(heir)
    one.hear([heir.tell(), slow.tell()])
    assert total(one, "gateway_requests_total") == 6


def test_a_report_that_a_newer_one_overtook_adds_nothing():
    """Two look at the same time, and who asked first waits longer for a third worker."""
    one, two = worker(), worker(queued=2)
    serve(two, 3)
    first = two.tell()
    serve(two, 2)
    for _ in range(2):
        one.hear([two.tell()])
        one.hear([first])
        assert total(one, "gateway_requests_total") == 5
        assert total(one, "gateway_queue_requests") == 2


def test_what_was_counted_before_this_worker_began_is_not_counted_here():
    before = worker(at=50.0)
    serve(before, 7)
    one = worker(at=100.0)
    one.hear([before.tell()])
    assert total(one, "gateway_requests_total") == 0
    serve(before, 2)
    one.hear([before.tell()])
    assert total(one, "gateway_requests_total") == 2


def test_a_gauge_is_summed_where_each_has_its_part_as_long_as_they_answer():
    one, two = worker(queued=2), worker(queued=3)
    one.hear([two.tell()])
    assert total(one, "gateway_queue_requests") == 5
    assert total(one, "gateway_queue_tokens") == 50
    assert total(one, "gateway_open_connections") == 6
    assert total(one, "gateway_request_body_bytes") == 10
    assert total(one, "gateway_kept_body_bytes") == 14
    assert one.bodies() == (10, 1024)  # what `status` tells
    one.hear([])
    assert total(one, "gateway_queue_requests") == 2


def test_what_all_workers_see_alike_counts_once():
    one, two = worker(), worker()
    for each in (one, two):
        each.configured("abc", "s")
        each.reloaded(ok=True)
        each.limit_cut("m/b1", "late")
    one.hear([two.tell()])
    assert total(one, "gateway_config_reloads_total") == 1
    assert total(one, "gateway_backend_limit_cuts_total") == 1
    assert total(one, "gateway_config_info") == 1


def test_what_others_keep_is_added_without_growing_at_each_scrape():
    one = worker(tenant_tokens={("acme", "input"): 5})
    two = worker(tenant_tokens={("acme", "input"): 7, ("other", "input"): 1})
    for _ in range(3):
        one.hear([two.tell()])
        assert total(one, "gateway_tenant_tokens_total") == 13


def test_a_worker_of_another_version_is_left_out():
    one, two = worker(), worker()
    serve(two)
    one.hear([{"life": 4}, "nonsense", two.tell()])
    assert total(one, "gateway_requests_total") == 1


def test_histograms_that_only_another_version_has_are_left_out_and_the_rest_counts():
    one, two = worker(), worker()
    serve(two)
    told = two.tell()
    (labels, cell), *_ = told["cells"]["gateway_ttft_seconds"]
    told["cells"]["gateway_ttft_seconds"] = [(labels, [*cell, 1.0])]
    told["cells"]["gateway_of_the_next_version_seconds"] = [(["m"], [1.0, 0.0, 0.5])]
    one.hear([told])
    assert total(one, "gateway_requests_total") == 1
    assert total(one, "gateway_request_duration_seconds_count") == 1
    assert total(one, "gateway_ttft_seconds_count") == 0
