"""The spans of any request that ended: one tree, in its time, with nothing in it that must stay inside."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.asked import Caller
from gateway.core.endings import Attempt, Ending
from gateway.core.tracing import Parent, Trace, new_span_id, new_trace_id
from gateway.core.traffic import Waited
from gateway.core.types import Endpoint, Outcome, RequestRecord, ShedReason, Usage, UsageSource
from gateway.observe.spans import Kind, spans_of

AHEAD_S = 1_700_000_000.0
HIDDEN = ("key-id", "203.0.113.9", "what the client reads")
seconds = st.floats(0, 5)


def waits(draw, record, now):
    """Have it wait now, or not, in the queue of its pool or of another one; return when that is over."""
    began_at, now = now, now + draw(st.sampled_from([0.0, 0.5]))
    if now > began_at:
        record.waits += (Waited(draw(st.sampled_from(["m", "n"])), began_at, now),)
    return now


@st.composite
def records(draw):
    """A request as a handler leaves it: times in their order, attempts one after the other."""
    now = draw(st.floats(0, 1000))
    record = RequestRecord(
        "req_1",
        draw(st.sampled_from([None, *Endpoint])),
        now,
        caller=draw(st.sampled_from([None, Caller("key-id", "name", "acme")])),
        model=draw(st.sampled_from([None, "m"])),
        stream=draw(st.booleans()),
        status=draw(st.sampled_from([200, 400, 502, 503])),
        outcome=draw(st.sampled_from(Outcome)),
        error_code=draw(st.sampled_from([None, "backend_error"])),
        message="what the client reads",
        client="203.0.113.9",
        resumed=draw(st.integers(0, 3)),
        usage=draw(st.sampled_from([None, Usage(3, 4, UsageSource.UPSTREAM, 2)])),
    )
    record.trace = trace = Trace(
        new_trace_id(),
        new_span_id(),
        draw(st.booleans()),
        draw(st.sampled_from([None, "b7ad6b7169203331"])),
        draw(
            st.sampled_from(
                [None, Parent("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)]
            )
        ),
    )
    for _ in range(draw(st.integers(0, 3))):
        now = waits(draw, record, now)
        trace.begin_attempt()
        sent_at, now = now, now + draw(seconds)
        ending = draw(st.sampled_from(Ending))
        failed = Attempt("m/b1", "engine", sent_at, now, ending, trace.attempt_id)
        record.failed = (*record.failed, failed)
        record.attempts += 1
    now = waits(draw, record, now)
    if draw(st.booleans()):
        trace.begin_attempt()
        record.attempts, record.sent_at, record.backend_id = record.attempts + 1, now, "m/b2"
    if record.attempts:
        record.first_byte_at = draw(st.sampled_from([None, now]))
    record.ended_at = now + draw(seconds)
    return record


@given(records())
def test_spans_are_one_tree_within_the_time_of_their_request(record):
    spans = list(spans_of(record, AHEAD_S))
    if not record.trace.sampled:
        assert spans == []
        return
    request, *others = spans
    assert request.parent_id == record.trace.parent_id
    assert len({each.span_id for each in spans}) == len(spans)
    assert {each.trace_id for each in spans} == {record.trace.trace_id}
    assert {each.parent_id for each in others} <= {each.span_id for each in spans}
    for each in spans:
        assert each.began_at <= each.ended_at
        assert request.began_at - 1e-5 <= each.began_at
        assert each.ended_at <= request.ended_at + 1e-5
    assert sum(each.kind is Kind.CLIENT for each in spans) == record.attempts


@given(records(), st.sampled_from([None, *ShedReason]))
def test_each_wait_is_a_span_in_its_place_but_one_that_was_a_refusal_at_once(record, reason):
    record.pool, record.shed_reason, record.trace.sampled = "m", reason, True
    at_once = (ShedReason.NO_ROOM, ShedReason.QUEUE_FULL, ShedReason.TENANT_QUEUE_FULL)
    waited = list(record.waits)
    in_own = [each for each in waited if each.pool == "m"]
    if in_own and reason in at_once:
        waited.remove(in_own[-1])
    told = [each for each in spans_of(record, AHEAD_S) if each.name == "queue"]
    assert [(each.began_at, each.ended_at) for each in told] == [
        (each.began_at + AHEAD_S, each.ended_at + AHEAD_S) for each in waited
    ]


@given(records())
def test_a_span_tells_what_went_wrong_and_nothing_of_the_client_or_its_key(record):
    spans = list(spans_of(record, AHEAD_S))
    for each in spans:
        assert not any(hidden in repr(each) for hidden in HIDDEN)
    if spans:
        well = record.outcome in (Outcome.OK, Outcome.CLIENT_GONE)
        assert (spans[0].error is None) == well
        attempts = [each for each in spans if each.kind is Kind.CLIENT]
        failed = [each.ending.value for each in record.failed]
        assert [each.error for each in attempts[: len(failed)]] == failed
