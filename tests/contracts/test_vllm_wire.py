"""Facts about vLLM that the gateway leans on, as captured from a real 0.32.0 engine.

`tests/data/vllm-0.32` holds what it sent: a two-million-parameter model on a CPU, on loopback.
`tests/data/vllm-0.33` holds what 0.33.0 sends in another form.
A new release is taken in by capturing these again: whatever fails here, changed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.types import Dialect, Endpoint, ServedModel, Usage, UsageSource
from gateway.wire.chunks import framed
from gateway.wire.frames import json_aborted, json_usage
from gateway.wire.metricspage import parse_metrics
from gateway.wire.replies import Fault, normalise_upstream_error
from gateway.wire.sse import StreamWatch
from gateway.wire.vllm import parse_models, parse_openapi_endpoints, parse_tokenize

DATA = Path(__file__).parents[1] / "data" / "vllm-0.32"
NEWER = DATA.with_name("vllm-0.33")


def captured(name: str, folder: Path = DATA) -> bytes:
    return (folder / name).read_bytes()


def watched(
    name: str, dialect: Dialect, folder: Path = DATA, *, choices: int = 1, hide: bool = False
):
    watch = StreamWatch(dialect, choices=choices, hide_usage=hide, request_id="r")
    out = watch.feed(captured(name, folder))
    return watch, out


@pytest.mark.parametrize(
    ("name", "dialect", "choices", "usage"),
    [
        ("chat_usage.sse", Dialect.CHAT, 1, (17, 3, 0)),
        ("chat_n2.sse", Dialect.CHAT, 2, (17, 4, 0)),
        ("completions_2.sse", Dialect.COMPLETIONS, 2, None),
        ("responses.sse", Dialect.RESPONSES, 1, (17, 3, 0)),
        ("messages.sse", Dialect.MESSAGES, 1, (17, 3, 0)),
    ],
)
def test_a_good_stream_passes_unchanged_and_is_complete(name, dialect, choices, usage):
    watch, out = watched(name, dialect, choices=choices)
    assert out + watch.close() == captured(name)
    assert (watch.complete, watch.failed) == (True, False)
    expected = None if usage is None else Usage(*usage[:2], UsageSource.UPSTREAM, usage[2])
    assert watch.usage == expected


def test_an_unfinished_chunk_has_the_shape_that_is_passed_on_unparsed():
    for name, dialect in (
        ("chat_usage.sse", Dialect.CHAT),
        ("responses.sse", Dialect.RESPONSES),
        ("messages.sse", Dialect.MESSAGES),
    ):
        frames = [each + b"\n\n" for each in captured(name).split(b"\n\n")[:-1]]
        watch = StreamWatch(dialect, choices=1, hide_usage=False, request_id="r")
        assert any(watch.feed(frame) is frame for frame in frames[:-1])


@pytest.mark.parametrize("folder", [DATA, NEWER])
@pytest.mark.parametrize(
    ("name", "dialect", "mark"),
    [
        ("chat_stream", Dialect.CHAT, b'"delta":{"content":'),
        ("completions_stream", Dialect.COMPLETIONS, b'"finish_reason":null'),
        ("messages_stream", Dialect.MESSAGES, b"event: content_block_delta"),
    ],
)
def test_a_token_like_those_before_it_is_told_by_sight(name, dialect, mark, folder):
    sent = captured(f"http/{name}.txt", folder).partition(b"\r\n\r\n")[2]
    token = next(each for each in sent.split(b"\r\n") if mark in each)
    watch = StreamWatch(dialect, choices=1, hide_usage=False, request_id="r")
    for _ in range(2):
        watch.feed(token)
    assert watch.by_sight(framed(token)) == framed(token)
    assert watch.events == 3


def test_the_last_usage_chunk_has_no_choices_and_can_be_dropped_for_its_fingerprint():
    watch, out = watched("chat_usage.sse", Dialect.CHAT, hide=True)
    *before, end, usage, done, _ = captured("chat_usage.sse").split(b"\n\n")
    assert b'"choices":[],"usage":{' in usage
    fingerprint = re.search(rb'"system_fingerprint":"[^"]+"', usage)[0]
    assert out == b"\n\n".join([*before, end[:-1] + b"," + fingerprint + b"}", done, b""])
    assert watch.complete


def test_done_follows_an_error_frame():
    for name, dialect, status, folder in (
        ("chat_engine_died.sse", Dialect.CHAT, 500, DATA),
        ("completions_engine_died.sse", Dialect.COMPLETIONS, 500, DATA),
        ("completions_busy.sse", Dialect.COMPLETIONS, 503, DATA),
        ("chat_engine_died.sse", Dialect.CHAT, 500, NEWER),
        ("completions_engine_died.sse", Dialect.COMPLETIONS, 500, NEWER),
    ):
        assert captured(name, folder).endswith(b"data: [DONE]\n\n")
        watch, out = watched(name, dialect, folder)
        assert (watch.complete, watch.failed, watch.fault.status) == (False, True, status)
        assert out.count(b'data: {"error"') == 1
        assert out.endswith(b"data: [DONE]\n\n")


def test_admission_control_refuses_a_stream_inside_a_200():
    watch, _ = watched("completions_busy.sse", Dialect.COMPLETIONS)
    assert (watch.events, watch.fault.status) == (0, 503)


@pytest.mark.parametrize("folder", [DATA, NEWER])
def test_a_message_stream_whose_engine_died_ends_with_an_error_and_no_stop(folder):
    raw = captured("messages_engine_died.sse", folder)
    assert b"message_stop" not in raw
    watch, out = watched("messages_engine_died.sse", Dialect.MESSAGES, folder)
    assert watch.failed
    assert out.count(b"event: error\n") == 1
    assert b"https://" not in out
    assert watch.close() == b""


def test_a_response_stream_whose_engine_died_just_ends():
    raw = captured("responses_cut.sse")
    assert b"response.completed" not in raw
    watch, out = watched("responses_cut.sse", Dialect.RESPONSES)
    assert out == raw
    ending = watch.broken(Fault(502, "server_error", "backend_error", "gone"))
    assert b'"type":"error"' in ending
    assert watch.failed


def test_replies_that_are_no_stream_tell_their_usage():
    for name, expected in (
        ("chat.json", (17, 2, 0)),
        ("completions.json", (1, 2, 0)),
        ("responses.json", (17, 3, 0)),
        ("messages.json", (17, 3, 0)),
    ):
        body = captured(name)
        usage = Usage(*expected[:2], UsageSource.UPSTREAM, expected[2])
        assert json_usage(body) == usage
        assert json_usage(body[-1024:]) == usage
        assert not json_aborted(body)


ERRORS = {each["case"]: each for each in json.loads(captured("errors.json"))}


@pytest.mark.parametrize(
    ("case", "status", "code", "param"),
    [
        ("unknown model", 404, "model_not_found", "model"),
        ("unknown route", 404, "endpoint_not_supported", None),
        ("wrong method", 404, "endpoint_not_supported", None),
        ("no key", 502, "backend_error", None),
        ("bad json", 400, "invalid_request", "1"),
        ("too many output tokens", 400, "context_length_exceeded", "max_tokens"),
        ("negative output", 400, "invalid_request", "max_tokens"),
        ("too many characters", 400, "context_length_exceeded", "messages"),
        ("too many tokens", 400, "context_length_exceeded", "messages"),
        ("too long, messages", 400, "context_length_exceeded", "messages"),
        ("field missing, messages", 400, "invalid_request", "max_tokens"),
        ("background", 400, "invalid_request", "background"),
        ("previous response", 404, "not_found", "response_id"),
        ("content type", 400, "invalid_request", None),
        ("busy", 503, "server_is_overloaded", None),
        ("engine died", 500, "backend_error", None),
    ],
)
def test_every_error_is_understood(case, status, code, param):
    told = ERRORS[case]
    body = json.dumps(told["body"]).encode()
    got, out, headers = normalise_upstream_error(told["status"], body, Dialect.CHAT, "r")
    error = json.loads(out)["error"]
    assert (got, error["code"], error["param"]) == (status, code, param)
    assert (b"retry-after" in dict(headers)) == (status == 503)


def test_every_captured_error_is_tested():
    (marks,) = test_every_error_is_understood.pytestmark
    assert {row[0] for row in marks.args[1]} == set(ERRORS)


def test_the_metrics_page_is_read_as_the_general_parser_reads_it():
    body = captured("metrics.txt")
    sample = parse_metrics(body, 1.0)
    assert sample is not None
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for each in family.samples:
            values[each.name] = values.get(each.name, 0.0) + each.value
    assert sample.running == values["vllm:num_requests_running"] == 5
    assert sample.waiting == values["vllm:num_requests_waiting"]
    assert sample.kv_usage_ratio == values["vllm:kv_cache_usage_perc"]
    assert sample.preemptions == values["vllm:num_preemptions_total"]
    assert sample.progress == (
        values["vllm:prompt_tokens_total"]
        + values["vllm:generation_tokens_total"]
        + values["vllm:iteration_tokens_total_count"]
    )
    assert sample.kv_capacity_tokens == 1_048_576
    assert sample.running_adapters == ("lora-a",)
    assert not sample.asleep


def test_an_adapter_has_a_parent_and_no_window():
    assert parse_models(captured("models.json")) == (
        ServedModel("tiny", None, 2048),
        ServedModel("lora-a", "tiny", None, "/models/lora-a"),
    )


def test_the_routes_tell_what_a_generating_server_serves():
    assert parse_openapi_endpoints(captured("openapi.json")) == {
        Endpoint.CHAT,
        Endpoint.CHAT_BATCH,
        Endpoint.GENERATIVE_SCORING,
        Endpoint.DECISIONS,
        Endpoint.COMPLETIONS,
        Endpoint.RESPONSES,
        Endpoint.MESSAGES,
        Endpoint.COUNT_TOKENS,
        Endpoint.TOKENIZE,
        Endpoint.DETOKENIZE,
    }


def test_tokenize_counts_a_chat_as_the_chat_itself_does():
    assert parse_tokenize(captured("tokenize.json")) == (17, 2048)
    usage = json_usage(captured("chat.json"))
    assert usage is not None
    assert usage.prompt_tokens == 17
