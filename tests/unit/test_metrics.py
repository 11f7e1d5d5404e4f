import math
import random
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.endings import Ending
from gateway.core.gpu import GpuLoad
from gateway.core.prefix import KvEvents, Prefix
from gateway.core.traffic import Cause, Fallback, Queued, Waited
from gateway.core.types import (
    Endpoint,
    LoadSample,
    Outcome,
    Phase,
    RequestRecord,
    ShedReason,
    Transition,
    Usage,
    UsageSource,
)
from gateway.observe.buckets import TTFT_BUCKETS
from gateway.observe.families import Histogram
from gateway.observe.instruments import INSTRUMENTS
from gateway.observe.metrics import MAX_NAMES, Metrics
from gateway.observe.readings import Readings
from gateway.prefix.approximate import ApproximateIndex


class HeldClock:
    def now(self):
        return 100.0

    def wall(self):
        return 1_700_000_000.0


@dataclass
class Reading:
    pool: str = "m"
    name: str = "b1"
    phase: Phase = Phase.READY
    in_flight: int = 0
    sample: LoadSample | None = None
    limit: int | None = None
    kv_events: KvEvents | None = None
    prefix_index: ApproximateIndex | None = None
    kept_out: bool = False

    def allowed(self, now):
        return self.limit

    def stale(self, now):
        return self.sample is None or now - self.sample.at > 3.0


def metrics(*backends, **more):
    return Metrics(Readings(backends=lambda: backends, **more), HeldClock())


def record(**more):
    fields = {
        "id": "r1",
        "endpoint": Endpoint.CHAT,
        "received_at": 10.0,
        "model": "m",
        "pool": "m",
        "backend_id": "m/b1",
        "attempts": 1,
        "body_at": 10.25,
        "sent_at": 10.5,
        "first_byte_at": 11.0,
        "ended_at": 13.0,
        "status": 200,
        "outcome": Outcome.OK,
        "stream": True,
        "usage": Usage(7, 5, UsageSource.UPSTREAM, cached_tokens=3),
    }
    return RequestRecord(**(fields | more))


LABELS = {each.name: (*each.labels, "le") for each in INSTRUMENTS}


def samples(of):
    """Return every sample: (name, labels as in the table..., le) -> value."""
    found = {}
    for family in text_string_to_metric_families(b"".join(of.pieces()[0]).decode()):
        for sample in family.samples:
            name = re.sub("_(bucket|count|sum)$", "", sample.name)
            labels = [each for each in LABELS.get(name, ()) if each in sample.labels]
            assert len(labels) == len(sample.labels)
            found[sample.name, *(sample.labels[each] for each in labels)] = sample.value
    return found


def settled(*records):
    of = metrics()
    for each in records:
        of.settle(each)
    return samples(of)


def test_a_request_is_counted_by_how_it_ended():
    seen = settled(record(), record(), record(outcome=Outcome.SHED, status=503, usage=None))
    assert seen["gateway_requests_total", "m", "m", "chat", "ok", "200"] == 2
    assert seen["gateway_requests_total", "m", "m", "chat", "shed", "503"] == 1


def test_times_are_told_from_the_head_of_the_request():
    seen = settled(record())
    assert seen["gateway_request_duration_seconds_sum", "m", "m"] == 3.0
    assert seen["gateway_ttft_seconds_sum", "m", "m"] == 1.0
    assert seen["gateway_ttft_seconds_bucket", "m", "m", "0.75"] == 0
    assert seen["gateway_ttft_seconds_bucket", "m", "m", "1.0"] == 1
    assert seen["gateway_ttft_seconds_count", "m", "m"] == 1


def test_the_first_token_is_of_the_backend_that_gave_it():
    went_on = record(attempts=2, backend_id="m/b2", sent_at=11.5, resumed=1)
    seen = settled(record(), went_on)
    assert seen["gateway_backend_ttft_seconds_sum", "m", "b1"] == 0.5
    assert seen["gateway_ttft_seconds_count", "m", "m"] == 2
    assert ("gateway_backend_ttft_seconds_sum", "m", "b2") not in seen


def test_inter_token_time_is_the_mean_of_a_complete_stream():
    seen = settled(record())
    assert seen["gateway_inter_token_seconds_sum", "m", "m"] == pytest.approx(2.0 / 4)


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"outcome": Outcome.STREAM_BROKEN},
        {"usage": None},
        {"usage": Usage(7, 1, UsageSource.UPSTREAM)},
    ],
)
def test_without_a_complete_stream_there_is_no_inter_token_time(more):
    seen = settled(record(**more))
    assert ("gateway_inter_token_seconds_count", "m", "m") not in seen


def test_overhead_leaves_out_the_upload_and_the_queue():
    seen = settled(record(queue_s=0.125))
    assert seen["gateway_overhead_seconds_sum", "chat"] == 0.125


def test_overhead_of_a_retried_request_is_not_ours_to_tell():
    assert ("gateway_overhead_seconds_count", "chat") not in settled(record(attempts=2))


def test_a_request_that_was_not_sent_has_no_duration():
    seen = settled(record(sent_at=None, first_byte_at=None, attempts=0, usage=None))
    assert ("gateway_request_duration_seconds_count", "m", "m") not in seen
    assert ("gateway_upstream_attempts_total", "m") not in seen


def test_tokens_are_counted_by_kind_and_source():
    seen = settled(record(), record(usage=Usage(1, 1, UsageSource.COUNTED)))
    assert seen["gateway_tokens_total", "m", "m", "prompt"] == 8
    assert seen["gateway_tokens_total", "m", "m", "cached"] == 3
    assert seen["gateway_tokens_total", "m", "m", "completion"] == 6
    assert seen["gateway_usage_source_total", "upstream"] == 1
    assert seen["gateway_usage_source_total", "counted"] == 1


@pytest.mark.parametrize("reason", list(ShedReason))
def test_a_shed_request_counts_under_its_reason(reason):
    seen = settled(record(outcome=Outcome.SHED, status=503, shed_reason=reason))
    counted = {key: value for key, value in seen.items() if key[0] == "gateway_shed_total"}
    assert counted == {("gateway_shed_total", "m", reason.value): 1}


def test_a_shed_without_a_reason_of_ours_is_the_engines():
    seen = settled(record(outcome=Outcome.SHED, status=503))
    assert seen["gateway_shed_total", "m", "engine"] == 1


def test_a_request_that_did_not_wait_is_no_wait_of_0():
    assert ("gateway_queue_wait_seconds_count", "m") not in settled(record())


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.SHED, Outcome.CLIENT_GONE])
def test_a_wait_is_told_whatever_became_of_the_request(outcome):
    waits = (Waited("m", 0.0, 0.3),)
    seen = settled(record(queue_s=0.3, waits=waits, outcome=outcome))
    assert seen["gateway_queue_wait_seconds_sum", "m"] == 0.3
    assert seen["gateway_queue_wait_seconds_bucket", "m", "0.25"] == 0
    assert seen["gateway_queue_wait_seconds_bucket", "m", "0.5"] == 1


def test_each_wait_is_one_of_the_pool_in_whose_queue_it_was():
    fallback = Fallback("big", Cause.OVERLOAD)
    waits = (Waited("big", 0.0, 2.0), Waited("m", 2.0, 2.5))
    seen = settled(record(queue_s=2.5, waits=waits, fallback=fallback))
    assert seen["gateway_queue_wait_seconds_sum", "big"] == 2.0
    assert seen["gateway_queue_wait_seconds_sum", "m"] == 0.5


def test_what_waits_is_read_when_scraped():
    waiting = {"m": Queued(3, 900, 1.5), "n": Queued()}
    of = metrics(queues=lambda: waiting)
    seen = samples(of)
    assert seen["gateway_queue_requests", "m"] == 3
    assert seen["gateway_queue_tokens", "m"] == 900
    assert seen["gateway_queue_requests", "n"] == 0
    del waiting["m"]
    assert ("gateway_queue_requests", "m") not in samples(of)


def test_a_limit_is_told_while_there_is_one():
    backend = Reading(limit=32)
    of = metrics(backend)
    assert samples(of)["gateway_backend_limit", "m", "b1"] == 32
    backend.limit = None
    assert ("gateway_backend_limit", "m", "b1") not in samples(of)


def test_cuts_of_a_limit_are_counted_by_their_sign():
    of = metrics()
    for sign in ("waiting", "late", "late"):
        of.limit_cut("org/m/b1", sign)
    seen = samples(of)
    assert seen["gateway_backend_limit_cuts_total", "org/m", "b1", "waiting"] == 1
    assert seen["gateway_backend_limit_cuts_total", "org/m", "b1", "late"] == 2


@pytest.mark.parametrize(
    ("more", "stage"),
    [
        ({"sent_at": None, "first_byte_at": None}, "before_send"),
        ({"first_byte_at": None}, "before_first_byte"),
        ({}, "streaming"),
    ],
)
def test_a_client_that_left_is_counted_by_how_far_it_came(more, stage):
    seen = settled(record(outcome=Outcome.CLIENT_GONE, status=499, **more))
    assert seen["gateway_client_disconnects_total", "m", stage] == 1


def test_retries_of_the_clients_sdk_are_counted_once_each():
    seen = settled(record(client_retry=2), record(client_retry=0))
    assert seen["gateway_client_retries_total", "m"] == 1


def test_a_record_without_outcome_counts_as_a_bug():
    seen = settled(record(outcome=None, status=0))
    assert seen["gateway_requests_total", "m", "m", "chat", "bug", "none"] == 1


def test_an_unheard_of_status_is_not_a_label():
    seen = settled(record(status=799))
    assert seen["gateway_requests_total", "m", "m", "chat", "ok", "_other"] == 1


# --- bounded labels -------------------------------------------------------------------------------


def random_names(count):
    rng = random.Random(4)
    return (f"model-{rng.random()}" for _ in range(count))


def test_names_that_were_not_resolved_never_become_labels():
    of = metrics()
    of.settle(record(model=None, pool=None, usage=None))
    before = len(samples(of))
    for name in random_names(10_000):
        of.settle(record(model=name, pool=None, usage=None))
    assert len(samples(of)) == before
    assert not any("model-" in part for key in samples(of) for part in key)


def test_even_resolved_names_are_capped():
    of = metrics()
    for name in random_names(MAX_NAMES + 1):
        of.settle(record(model=name))
    before = b"".join(of.pieces()[0]).count(b"\n")
    for name in random_names(10_000):
        of.settle(record(model=name))
    lines = b"".join(of.pieces()[0]).splitlines()
    assert len(lines) == before
    requests = [each for each in lines if each.startswith(b"gateway_requests_total{")]
    assert len(requests) == MAX_NAMES + 1  # one for all other names
    counted = sum(float(each.rpartition(b" ")[2]) for each in requests)
    assert counted == 10_000 + MAX_NAMES + 1


# --- backends -------------------------------------------------------------------------------------


def test_backends_are_read_when_scraped():
    backend = Reading(in_flight=4, sample=LoadSample(99.0, 3, 2, 0.5))
    of = metrics(backend)
    seen = samples(of)
    assert seen["gateway_inflight_requests", "m", "b1"] == 4
    assert seen["gateway_backend_running", "m", "b1"] == 3
    assert seen["gateway_backend_waiting", "m", "b1"] == 2
    assert seen["gateway_backend_kv_usage_ratio", "m", "b1"] == 0.5
    assert seen["gateway_backend_scrape_age_seconds", "m", "b1"] == 1.0
    backend.in_flight = 0
    assert samples(of)["gateway_inflight_requests", "m", "b1"] == 0


def test_the_size_of_a_prefix_index_is_told_where_there_is_one():
    index = ApproximateIndex()
    name = "gateway_prefix_index_hashes"
    readings = metrics(Reading(prefix_index=index), Reading(name="b2"))
    assert samples(readings)[name, "m", "b1"] == 0
    index.sent(Prefix([3, 2, 1], (30, 20, 10), 30, 30, 1))
    found = {key: value for key, value in samples(readings).items() if key[0] == name}
    assert found == {(name, "m", "b1"): 3}


def test_how_well_kv_events_are_followed_is_told_where_they_are():
    told = KvEvents(known=True, engines=1, blocks=9, losses=2, garbled=3, strange=4)
    seen = samples(metrics(Reading(kv_events=told), Reading(name="b2")))
    found = {key: value for key, value in seen.items() if "kv_events" in key[0]}
    assert found == {
        ("gateway_kv_events_known", "m", "b1"): 1,
        ("gateway_kv_events_losses_total", "m", "b1"): 2,
        ("gateway_kv_events_garbled_total", "m", "b1"): 7,
    }


def test_a_backend_is_in_exactly_one_phase():
    seen = samples(metrics(Reading(phase=Phase.DOWN)))
    phases = {key[3]: value for key, value in seen.items() if key[0] == "gateway_backend_phase"}
    assert phases == {phase.value: float(phase is Phase.DOWN) for phase in Phase}


@pytest.mark.parametrize("sample", [None, LoadSample(90.0, 3, 2, 0.5)])
def test_a_stale_load_is_absent_and_never_0(sample):
    seen = samples(metrics(Reading(sample=sample)))
    assert ("gateway_backend_running", "m", "b1") not in seen
    assert ("gateway_backend_waiting", "m", "b1") not in seen
    assert ("gateway_backend_kv_usage_ratio", "m", "b1") not in seen
    age = seen["gateway_backend_scrape_age_seconds", "m", "b1"]
    assert age == (math.inf if sample is None else 10.0)


def test_a_backend_that_left_takes_its_series_along():
    backends = [Reading(sample=LoadSample(99.0, 3, 2, 0.5))]
    of = Metrics(Readings(backends=lambda: backends), HeldClock())
    assert ("gateway_inflight_requests", "m", "b1") in samples(of)
    backends.clear()
    assert not any("b1" in key for key in samples(of))


def test_gpus_are_told_of_backends_that_are_there_by_the_name_of_their_pool():
    gpus = {each: [GpuLoad(0, 5, 10, 0.5, None)] for each in ("Qwen/Qwen3-8B/b1", "m/gone")}
    seen = samples(metrics(Reading(pool="Qwen/Qwen3-8B"), gpus=lambda: gpus))
    told = [key for key in seen if key[0] == "gateway_gpu_memory_used_bytes"]
    assert told == [("gateway_gpu_memory_used_bytes", "Qwen/Qwen3-8B", "b1", "0")]


def test_a_replaced_backend_adds_its_last_requests_and_nothing_else():
    seen = samples(
        metrics(
            Reading(in_flight=1, limit=32), Reading(in_flight=2, limit=2, phase=Phase.DRAINING)
        ),
    )
    assert seen["gateway_inflight_requests", "m", "b1"] == 3
    assert seen["gateway_backend_limit", "m", "b1"] == 32
    assert seen["gateway_backend_phase", "m", "b1", "ready"] == 1
    assert seen["gateway_backend_phase", "m", "b1", "draining"] == 0


def test_transitions_and_failures_count_under_names_with_slashes():
    of = metrics()
    of.transition(Transition("org/m/b1", Phase.READY, Phase.DOWN, "refused", "...", 1.0))
    of.upstream_failed("org/m/b1", Ending.CONNECT)
    seen = samples(of)
    assert seen["gateway_backend_transitions_total", "org/m", "b1", "down", "refused"] == 1
    assert seen["gateway_upstream_failures_total", "org/m", "b1", "connect"] == 1


def test_restarts_on_hold_are_told_by_pool():
    of = metrics(kept=lambda: {"gateway_restarts_held": {("m",): True, ("x",): False}})
    seen = samples(of)
    assert seen["gateway_restarts_held", "m"] == 1
    assert seen["gateway_restarts_held", "x"] == 0


def test_the_verdict_on_a_canary_is_told_for_each_pool_that_has_one():
    found = {("m", "open"): True, ("m", "worse"): False, ("m", "fine"): False}
    name = "gateway_canary_verdict"
    of = metrics(kept=lambda: {name: found})
    seen = samples(of)
    assert [seen[name, "m", each] for each in ("open", "worse", "fine")] == [1, 0, 0]
    found.clear()  # a reload took the canary away
    assert name not in {key[0] for key in samples(of)}


def test_what_became_of_adapters_is_told_by_pool_and_result():
    name, lasted = "gateway_adapter_changes_total", "gateway_adapter_load_seconds_total"
    kept = {name: {("m", "loaded"): 3, ("m", "failed"): 1}, lasted: {("m",): 4.5}}
    seen = samples(metrics(kept=lambda: kept))
    assert {key: value for key, value in seen.items() if key[0] == name} == {
        (name, "m", "loaded"): 3,
        (name, "m", "failed"): 1,
    }
    assert seen[lasted, "m"] == 4.5


def test_how_many_requests_each_side_of_a_canary_got_is_told():
    name = "gateway_canary_requests_total"
    seen = samples(metrics(kept=lambda: {name: {("m", "canary"): 2, ("m", "others"): 18}}))
    assert (seen[name, "m", "canary"], seen[name, "m", "others"]) == (2, 18)


# --- the process ----------------------------------------------------------------------------------


def test_only_the_configuration_in_force_is_told():
    of = metrics()
    assert of.config_hash is None
    of.configured("aaa", "s")
    of.configured("bbb", "s")
    of.reloaded(ok=True)
    of.reloaded(ok=False)
    seen = samples(of)
    assert [key for key in seen if key[0] == "gateway_config_info"] == [
        ("gateway_config_info", "bbb", "s")
    ]
    assert of.config_hash == "bbb"
    assert seen["gateway_config_last_reload_success_timestamp_seconds",] == 1_700_000_000.0
    assert seen["gateway_config_reloads_total", "success"] == 1
    assert seen["gateway_config_reloads_total", "failure"] == 1


def test_readings_of_others_are_told():
    connections = {("client",): 3, ("backend",): 2}
    kept = {"gateway_open_connections": connections, "gateway_access_log_dropped_total": {(): 9}}
    of = metrics(kept=lambda: kept)
    of.loop_lag(0.02)
    seen = samples(of)
    assert seen["gateway_open_connections", "client"] == 3
    assert seen["gateway_open_connections", "backend"] == 2
    assert seen["gateway_access_log_dropped_total",] == 9
    assert seen["gateway_event_loop_lag_seconds_bucket", "0.025"] == 1


def test_what_request_bodies_hold_is_told_when_scraped():
    held = [3 * 2**20, 512 * 2**20]
    of = metrics(bodies=lambda: tuple(held))
    seen = samples(of)
    assert seen["gateway_request_body_bytes",] == 3 * 2**20
    assert seen["gateway_request_body_limit_bytes",] == 512 * 2**20
    held[0] = 0
    assert samples(of)["gateway_request_body_bytes",] == 0


def test_totals_are_by_outcome():
    of = metrics()
    of.settle(record())
    of.settle(record(endpoint=Endpoint.COMPLETIONS))
    of.settle(record(outcome=Outcome.BUG))
    assert of.total_requests() == {"ok": 2, "bug": 1}


def test_openmetrics_is_told_to_those_who_ask_for_it():
    of = metrics(Reading())
    of.settle(record())
    made, content_type = of.pieces("application/openmetrics-text; version=1.0.0; charset=utf-8")
    body = b"".join(made)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert any(family.name == "gateway_requests" for family in parse_openmetrics(body.decode()))


def test_pieces_are_small_and_add_up():
    backends = [Reading(name=f"b{place}") for place in range(200)]
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        of = metrics(*backends)
        made, content_type = of.pieces(accept)
        parts = list(made)
        assert max(part.count(b"\n") for part in parts) <= 102
        encode, expected_type = choose_encoder(accept)
        assert content_type == expected_type
        assert lines(b"".join(parts)) == lines(encode(of.registry))


def lines(text):
    """Return the lines without those whose value changes by looking."""
    return [line for line in text.splitlines() if not line.startswith(b"process_")]


def test_hostile_names_stay_inside_their_label():
    of = metrics()
    name = 'a"} 1\ngateway_evil_total 1\\'
    of.settle(record(model=name))
    seen = samples(of)
    assert ("gateway_evil_total",) not in seen
    assert seen["gateway_requests_total", "m", name, "chat", "ok", "200"] == 1


@given(
    st.lists(st.floats(0, 5000) | st.sampled_from(TTFT_BUCKETS), max_size=50), st.integers(0, 50)
)
def test_a_histogram_counts_like_the_definition(values, at_once):
    histogram = Histogram(TTFT_BUCKETS)
    histogram.observe(("m",), *values[:at_once])
    for value in values[at_once:]:
        histogram.observe(("m",), value)
    cell = histogram.cells.get(("m",), [0] * (len(TTFT_BUCKETS) + 2))
    for place, bound in enumerate(TTFT_BUCKETS):
        assert sum(cell[: place + 1]) == sum(value <= bound for value in values)
    assert sum(cell[:-1]) == len(values)
    assert cell[-1] == pytest.approx(sum(values))
