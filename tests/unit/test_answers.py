"""Who looks on at a reply that is passed on, and the usage that is recorded of it."""

import pytest

from gateway.core.types import (
    Call,
    Demand,
    Dialect,
    Endpoint,
    Need,
    RequestRecord,
    Usage,
    UsageSource,
)
from gateway.ingress.answers import answer, used, watch_over
from gateway.upstream.reply import Reply

CHAT = Call(Endpoint.CHAT, Dialect.CHAT, "m", stream=False, body=b"{}")
AUDIO = Call(Endpoint.TRANSCRIPTIONS, Dialect.PLAIN, "m", stream=False, body=b"")
SAYS_ABORT = (
    b'"}, "finish_reason": "abort"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}'
)


def reply(content_type=b"application/json", status=200):
    return Reply(status, {b"content-type": content_type}, None, None)


def record(*, exact=False):
    made = RequestRecord("r", Endpoint.CHAT, 0.0)
    made.demand, made.need = Demand(1200, exact), Need(9, 5)
    return made


@pytest.mark.parametrize(("call", "complete"), [(CHAT, False), (AUDIO, True)])
def test_a_reply_too_large_to_collect_says_near_its_end_that_it_was_aborted(call, complete):
    watch = watch_over(reply(), call, "r")
    for piece in (b"x" * 300_000, SAYS_ABORT):
        assert watch.feed(piece) is piece
    watch.close()
    assert watch.complete is complete


def test_a_stream_is_judged_in_its_dialect():
    watch = watch_over(reply(b"text/event-stream; charset=utf-8"), CHAT, "r")
    watch.feed(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n')
    watch.close()
    assert (watch.complete, watch.failed) == (False, "abort")


def test_the_usage_is_the_backends_own_where_it_told_one():
    watch = watch_over(reply(), CHAT, "r")
    watch.feed(SAYS_ABORT)
    assert used(watch, reply(), record()) == Usage(7, 2, UsageSource.UPSTREAM)


@pytest.mark.parametrize(
    ("exact", "source"), [(True, UsageSource.COUNTED), (False, UsageSource.ESTIMATED)]
)
def test_else_it_is_what_came_and_the_prompt_that_was_expected_not_its_bound(exact, source):
    watch = watch_over(reply(b"text/event-stream"), CHAT, "r")
    watch.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n')
    assert used(watch, reply(), record(exact=exact)) == Usage(9, 1, source)


def test_an_error_has_no_usage():
    watch = watch_over(reply(status=400), CHAT, "r")
    watch.feed(b'{"error": {}}')
    assert used(watch, reply(status=400), record()) is None


def test_the_usage_of_raw_vectors_is_in_a_header_that_the_client_gets():
    metadata = b'{"id": "e", "usage": {"prompt_tokens": 5, "total_tokens": 5}}'
    kind = b"application/octet-stream"
    headers = {b"metadata": metadata, b"content-type": kind, b"server": b"uvicorn"}
    call = Call(Endpoint.EMBEDDINGS, Dialect.PLAIN, "m", stream=False, body=b"{}")
    said = answer(Reply(200, headers, b"\0" * 64, None), call, "r")
    assert said.headers == [(b"content-type", kind), (b"metadata", metadata)]
    assert said.usage == Usage(5, 0, UsageSource.UPSTREAM)
    large = Reply(200, headers, None, None)
    watch = watch_over(large, call, "r")
    watch.feed(b"\0" * 300_000)
    assert used(watch, large, record()) == Usage(5, 0, UsageSource.UPSTREAM)


def test_a_reply_without_a_type_is_json():
    said = answer(Reply(200, {}, b"{}", None), AUDIO, "r")
    assert said.headers == [(b"content-type", b"application/json")]
