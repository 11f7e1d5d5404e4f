"""Where traces are sent, which trace a request belongs to, and how many may wait."""

import asyncio

import pytest

from gateway.config.models import Config
from gateway.core.aio import start
from gateway.core.tracing import Trace
from gateway.core.traffic import Waited
from gateway.core.types import Outcome, RequestRecord, ShedReason
from gateway.ingress.heads import trace_parent
from gateway.observe.otlp import MOST_WAITING, Traces
from gateway.observe.spans import spans_of
from tests.admindesk import HeldClock
from tests.otlpreceiver import receiver

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def config(**traces):
    return Config.model_validate({"pools": {"m": {"backends": ["http://h:1"]}}, "traces": traces})


def record(number, sampled=True):
    trace = Trace(f"{number + 1:032x}", f"{number + 1:016x}", sampled)
    return RequestRecord(f"r{number}", None, 1.0, trace=trace, outcome=Outcome.OK, ended_at=2.0)


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://h", "http://", "grpc://h:4317"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ValueError, match="must be a URL such as"):
        config(endpoint=endpoint)


def test_without_an_endpoint_there_are_no_traces():
    assert config().traces.endpoint is None
    assert config(endpoint="").traces.endpoint is None


@pytest.mark.parametrize("sample", [-0.1, 1.1])
def test_a_share_is_from_nothing_to_all(sample):
    with pytest.raises(ValueError, match="sample"):
        config(sample=sample)


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (PARENT, True),
        (PARENT[:-2] + b"00", False),
        (PARENT[:-2] + b"03", True),
        (PARENT[:-2] + b"02", False),
    ],
)
def test_the_last_flag_says_whether_a_trace_is_recorded(value, sampled):
    assert trace_parent([(b"traceparent", value)]).sampled is sampled


@pytest.mark.parametrize(
    "values", [[], [b"nonsense"], [PARENT, PARENT], [b"ff" + PARENT[2:]], [PARENT[:-3]]]
)
def test_what_is_no_valid_parent_is_none(values):
    assert trace_parent([(b"traceparent", each) for each in values]) is None


def test_each_attempt_has_a_span_of_its_own():
    trace = Trace("1" * 32, "2" * 16, True, state=b"tracestate: a=b\r\n")
    first = trace.begin_attempt()
    assert (
        first == f"traceparent: 00-{'1' * 32}-{trace.attempt_id}-01\r\ntracestate: a=b\r\n".encode()
    )
    assert trace.begin_attempt() != first


@pytest.mark.parametrize("reason", [ShedReason.TOO_LATE, ShedReason.NO_BACKEND])
def test_a_request_that_waited_and_was_refused_for_it_has_a_span_of_its_wait(reason):
    waited = record(1)
    waited.outcome, waited.shed_reason = Outcome.SHED, reason
    waited.waits = (Waited("m", 1.5, 21.5),)
    waited.ended_at = 21.5
    (span,) = [each for each in spans_of(waited, 0.0) if each.name == "queue"]
    assert (span.began_at, span.ended_at) == (1.5, 21.5)


def test_a_refusal_at_once_is_no_wait():
    refused = record(1)
    refused.outcome, refused.shed_reason = Outcome.SHED, ShedReason.TOO_LATE
    refused.waits = (Waited("m", 1.5, 1.5004),)
    assert [each.name for each in spans_of(refused, 0.0)] == ["unknown"]


def test_what_waits_is_bounded_and_what_is_too_much_is_counted():
    traces = Traces("http://127.0.0.1:1", {}, HeldClock())
    traces.posted([record(number) for number in range(MOST_WAITING + 3)])
    traces.posted([record(1, sampled=False)])
    assert (len(traces._waiting), traces.lost) == (MOST_WAITING, 3)


def test_a_turn_sends_what_waits_in_few_requests_while_more_comes():
    """What comes meanwhile waits for the next turn: else a collector gets a request for each trace or two."""

    async def main(url):
        traces = Traces(url, {}, HeldClock())
        traces.posted([record(0)])

        async def requests_end():
            while True:
                traces.posted([record(1)])
                await asyncio.sleep(0)

        load = start(requests_end(), name="load")
        await traces.close()
        load.cancel()

    with receiver() as got:
        asyncio.run(main(got.url))
    assert len(got.raw) == 1
