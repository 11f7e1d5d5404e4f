"""Who looks on at a reply that is passed on, and the usage that is recorded of it."""

from types import SimpleNamespace

import pytest
from msgspec import structs

from gateway.core.errors import BackendBroke, MisdirectedReply, ReplyTooLarge, RequestQuarantined
from gateway.core.limits import Amounts
from gateway.core.types import (
    Call,
    Demand,
    Dialect,
    Endpoint,
    Need,
    Outcome,
    RequestRecord,
    Usage,
    UsageSource,
)
from gateway.ingress.answers import answer, as_told, own_headers, unfit, used, watch_over
from gateway.ingress.charging import actual_of
from gateway.resume.stream import TrailedStream
from gateway.upstream.engineids import engine_id
from gateway.upstream.reply import Reply
from gateway.wire.sse import ABORTED

CHAT = Call(Endpoint.CHAT, Dialect.CHAT, "m", stream=False, body=b"{}")
AUDIO = Call(Endpoint.TRANSCRIPTIONS, Dialect.PLAIN, "m", stream=False, body=b"")
OWN, OTHER = engine_id().encode(), engine_id().encode()
SAYS_ABORT = (
    b'"}, "finish_reason": "abort"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}'
)


def reply(content_type=b"application/json", status=200):
    return Reply(status, {b"content-type": content_type}, None, None)


def asked(call=CHAT, window_tokens=None):
    return SimpleNamespace(call=call, route=SimpleNamespace(widest_tokens=window_tokens))


def record(*, exact=False):
    made = RequestRecord("r", Endpoint.CHAT, 0.0)
    made.demand, made.need = Demand(1200, exact), Need(9, 5)
    return made


def test_a_reply_too_large_to_collect_hides_what_was_cached_where_tenants_are_apart():
    for veil in (False, True):
        watch = watch_over(reply(), CHAT, "r", 1 << 20, veil=veil)
        told = watch.feed(b"x" * 300_000) + watch.feed(b'"usage":{"cached_to')
        told += watch.feed(b'kens":8}}') + watch.close()
        assert (b'"cached_tokens":0}}' in told, b'"cached_tokens":8}}' in told) == (veil, not veil)


@pytest.mark.parametrize(("call", "complete"), [(CHAT, False), (AUDIO, True)])
def test_a_reply_too_large_to_collect_says_near_its_end_that_it_was_aborted(call, complete):
    watch = watch_over(reply(), call, "r", 1 << 20)
    for piece in (b"x" * 300_000, SAYS_ABORT):
        assert watch.feed(piece) is piece
    watch.close()
    assert watch.complete is complete


def call(dialect):
    return Call(Endpoint.CHAT, dialect, "m", stream=False, body=b"{}")


@pytest.mark.parametrize(
    ("dialect", "pieces", "complete"),
    [
        (Dialect.CHAT, (b'{"choices":[{"finish_rea', b'son":"abort"},', b"x" * 9000), False),
        (Dialect.CHAT, (b'{"choices":[{"finish_reason":"stop"},', b"x" * 9000), True),
        (Dialect.RESPONSES, (b'"status":"failed"', b'"status":"completed","usage":{}}'), True),
        (Dialect.RESPONSES, (b'"status":"completed"', b'"status":"cancelled","usage":{}}'), False),
        (Dialect.MESSAGES, (b"x" * 9000, b'"stop_reason":null,"usage":{}}'), False),
        (Dialect.MESSAGES, (b"x" * 9000, b'"stop_reason":"end_turn","usage":{}}'), True),
    ],
)
def test_an_abort_is_found_wherever_a_large_reply_says_it(dialect, pieces, complete):
    watch = watch_over(reply(), call(dialect), "r", 1 << 20)
    for piece in pieces:
        watch.feed(piece)
    watch.close()
    assert watch.complete is complete


def test_a_reply_that_grows_over_the_limit_is_passed_on_no_further_and_is_no_success():
    watch = watch_over(reply(), CHAT, "r", 100)
    assert [watch.feed(b"x" * 60), watch.feed(b"x" * 60)] == [b"x" * 60, b""]
    assert "more than 100 bytes" in str(watch.excess)
    watch.close()
    assert not watch.complete


@pytest.mark.parametrize(
    ("headers", "beginning", "error"),
    [
        ({}, b"{}", None),
        ({b"content-type": b"application/json; charset=utf-8"}, b"{}", None),
        ({b"content-type": b"application/vnd.x+json"}, b"{}", None),
        ({b"content-type": b"application/octet-stream"}, b"\0", None),
        ({b"content-type": b"text/vtt"}, b"WEBVTT", None),
        ({b"content-type": b"text/event-stream"}, b"data: {}", None),
        ({b"content-encoding": b"identity"}, b"{}", None),
        ({b"content-type": b"text/html"}, b"<html>", BackendBroke),
        ({b"content-type": b"application/xml"}, b"<x>", BackendBroke),
        ({b"content-encoding": b"gzip"}, b"\x1f\x8b", BackendBroke),
        ({b"content-length": b"101"}, b"{}", ReplyTooLarge),
        ({}, b'{"id":"chatcmpl-%(own)b","x":1}', None),
        ({}, b'data: {"id":"cmpl-%(own)b-0","x":1}', None),
        ({}, b'{"id":"chatcmpl-%(other)b","x":1}', MisdirectedReply),
        ({}, b'data: {"id":"cmpl-%(other)b-0","x":1}', MisdirectedReply),
        ({}, b'{"id":"chatcmpl-%b","x":1}' % (b"0" * 40), None),  # of a gateway in between
        ({}, b'{"text":"chatcmpl-%(other)b"}', None),  # said by the model
    ],
)
def test_only_what_can_be_read_and_is_for_this_request_is_passed_on(headers, beginning, error):
    told = beginning % {b"own": OWN, b"other": OTHER}
    found = unfit(Reply(200, headers, None, None), OWN.decode(), 100, told)
    assert (found is None) if error is None else (type(found) is error)


def test_a_reply_that_is_too_large_is_what_its_client_asked_for():
    """It takes the tokens that its engine told, else those that were reserved: they were made."""
    error = unfit(Reply(200, {b"content-length": b"101"}, None, None), OWN.decode(), 100, b"{}")
    assert error is not None
    assert (error.status, error.outcome) == (502, Outcome.REJECTED)
    taken = Amounts(1, 30, 70, 100, 0)
    made = RequestRecord("r", Endpoint.CHAT, 0.0, attempts=1)
    made.outcome, made.error_code = error.outcome, error.code
    assert actual_of(made, taken) == taken
    made.usage = Usage(40, 900, UsageSource.UPSTREAM)
    assert actual_of(made, taken) == Amounts(1, 40, 900, 940, 0)
    made.usage = None
    made.outcome = Outcome.BACKEND_ERROR
    assert actual_of(made, taken) == Amounts(1)


@pytest.mark.parametrize("answering", [False, True])
def test_what_is_refused_before_its_client_has_any_of_an_answer_takes_no_tokens(answering):
    """The servers that it killed may have told of its prompt; what its client has of an answer counts."""
    down = SimpleNamespace(started=answering, answering=answering, trailed=None)
    made = RequestRecord("r", Endpoint.CHAT, 0.0, attempts=2)
    made.usage = told = Usage(4000, 3, UsageSource.COUNTED)
    as_told(RequestQuarantined("two servers crashed"), down, made)
    assert made.usage == (told if answering else None)


def test_a_stream_is_judged_in_its_dialect():
    watch = watch_over(reply(b"text/event-stream; charset=utf-8"), CHAT, "r", 1 << 20)
    watch.feed(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n')
    watch.close()
    assert (watch.complete, watch.fault) == (False, ABORTED)


def test_the_usage_is_the_backends_own_where_it_told_one():
    watch = watch_over(reply(), CHAT, "r", 1 << 20)
    watch.feed(SAYS_ABORT)
    assert used(watch, reply(), record(), asked()) == Usage(7, 2, UsageSource.UPSTREAM)


@pytest.mark.parametrize(
    ("exact", "source"), [(True, UsageSource.COUNTED), (False, UsageSource.ESTIMATED)]
)
def test_else_it_is_what_came_and_the_prompt_that_was_expected_not_its_bound(exact, source):
    stream = reply(b"text/event-stream")
    watch = watch_over(stream, CHAT, "r", 1 << 20)
    watch.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n')
    assert used(watch, stream, record(exact=exact), asked()) == Usage(9, 1, source)


@pytest.mark.parametrize(("window_tokens", "output"), [(4096, 4096), (None, 3)])
def test_an_event_of_more_tokens_than_can_be_is_charged_what_can_be(window_tokens, output):
    call = structs.replace(CHAT, stream=True, event_tokens=10**9)
    stream = reply(b"text/event-stream")
    watch = watch_over(stream, call, "r", 1 << 20)
    for _ in range(3):
        watch.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    assert used(watch, stream, record(), asked(call, window_tokens)).completion_tokens == output


@pytest.mark.parametrize(
    "frames",
    [
        [b'"delta":{"content":"a b c"},"finish_reason":null,"token_ids":[5,6,7]'],
        [
            b'"delta":{},"finish_reason":null,"token_ids":[5]',
            b'"delta":{"content":"a"},"finish_reason":null,"token_ids":[6,7]',
        ],
    ],
)
def test_of_a_stream_whose_token_ids_are_kept_they_are_counted_not_its_events(frames):
    """A busy engine puts several into one event, and one more event tells the role."""
    watch = TrailedStream(CHAT, Demand(1200, exact=False), request_id="r")
    head = b'data: {"id":"a","choices":[{"index":0,'
    watch.feed(head + b'"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2]}\n\n')
    for each in frames:
        watch.feed(head + each + b"}]}\n\n")
    stream = reply(b"text/event-stream")
    assert used(watch, stream, record(), asked()) == Usage(2, 3, UsageSource.COUNTED)


def test_a_large_reply_may_tell_its_usage_before_all_else():
    """Source: vLLM 0.32's RerankResponse, whose results follow its usage."""
    watch = watch_over(reply(), AUDIO, "r", 1 << 20)
    watch.feed(b'{"id":"rerank-1","model":"m","us')
    watch.feed(b'age":{"prompt_tokens":7,"total_tokens":7},"results":[' + b"x" * 300_000)
    watch.feed(b"]}")
    assert used(watch, reply(), record(), asked()) == Usage(7, 0, UsageSource.UPSTREAM)


def test_the_reads_that_a_large_reply_came_in_are_no_tokens():
    watch = watch_over(reply(), AUDIO, "r", 1 << 20)
    watch.feed(b"x" * 300_000)
    watch.feed(b"x")
    assert used(watch, reply(), record(), asked()) is None


def test_an_error_has_no_usage():
    watch = watch_over(reply(status=400), CHAT, "r", 1 << 20)
    watch.feed(b'{"error": {}}')
    assert used(watch, reply(status=400), record(), asked()) is None


def test_the_usage_of_raw_vectors_is_in_a_header_that_the_client_gets():
    metadata = b'{"id": "e", "usage": {"prompt_tokens": 5, "total_tokens": 5}}'
    kind = b"application/octet-stream"
    headers = {b"metadata": metadata, b"content-type": kind, b"server": b"uvicorn"}
    call = Call(Endpoint.EMBEDDINGS, Dialect.PLAIN, "m", stream=False, body=b"{}")
    said = answer(Reply(200, headers, b"\0" * 64, None), call, "r", "", 1 << 20)
    assert said.lines == b"content-type: %b\r\nmetadata: %b\r\n" % (kind, metadata)
    assert said.usage == Usage(5, 0, UsageSource.UPSTREAM)
    large = Reply(200, headers, None, None)
    watch = watch_over(large, call, "r", 1 << 20)
    watch.feed(b"\0" * 300_000)
    assert used(watch, large, record(), asked()) == Usage(5, 0, UsageSource.UPSTREAM)


def test_a_reply_without_a_type_is_json():
    said = answer(Reply(200, {}, b"{}", None), AUDIO, "r", "", 1 << 20)
    assert said.lines == b"content-type: application/json\r\n"


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"7", b"null", b'{"choices":[{"message":{"content":"ab']
)
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.RESPONSES, Dialect.MESSAGES])
def test_what_is_no_json_object_is_no_answer_of_a_model(dialect, body):
    with pytest.raises(BackendBroke, match="something else"):
        answer(Reply(200, {}, body, None), call(dialect), "r", "", 1 << 20)
    assert answer(Reply(200, {}, b"{}", None), CHAT, "r", "", 1 << 20).body == b"{}"
    assert answer(Reply(200, {}, body, None), AUDIO, "r", "", 1 << 20).body == body


def test_a_client_is_told_how_long_it_waited_for_a_place_and_not_how_long_it_took_to_send():
    made = RequestRecord("r", Endpoint.CHAT, 100.0, body_at=120.0, queue_s=1.5, sent_at=121.5)
    assert b"server-timing: queue;dur=1500.0, backend;dur=250.0\r\n" in own_headers(made, 121.75)
