"""What clients read when something is refused or fails, and what they read of a model."""

from __future__ import annotations

import json
import time

import pytest

from gateway.core.errors import (
    AccessError,
    BackendTimeout,
    ContextLengthExceeded,
    GatewayError,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RequestError,
    ShuttingDown,
)
from gateway.core.types import Dialect, ShedReason
from gateway.wire.replies import (
    clean,
    error_body,
    error_headers,
    model_entry,
    normalise_upstream_error,
)

OPENAI = [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.PLAIN]


def all_errors() -> list[type[GatewayError]]:
    found = [GatewayError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def overloaded(retry_after_s: float = 1.0) -> Overloaded:
    return Overloaded("m", reason=ShedReason.QUEUE_FULL, retry_after_s=retry_after_s)


def raised(kind: type[GatewayError], message: str) -> GatewayError:
    if kind is Overloaded:
        return Overloaded(message, reason=ShedReason.TOO_LATE, retry_after_s=1)
    return kind(message)


@pytest.mark.parametrize("kind", all_errors())
@pytest.mark.parametrize("dialect", OPENAI)
def test_every_error_has_the_four_keys_and_a_string_code(kind, dialect):
    error = json.loads(error_body(raised(kind, "what happened"), "req-1", dialect))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "what happened" in error["message"]
    assert isinstance(error["code"], str)
    assert error["code"]


def test_an_error_keeps_its_code_and_param():
    error = json.loads(error_body(RequestError("m", code="c", param="p"), "r"))["error"]
    assert error == {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("m"), "invalid_request_error"),
        (MethodNotAllowed("m"), "invalid_request_error"),
        (AccessError("m"), "authentication_error"),
        (ModelNotFound("m"), "not_found_error"),
        (overloaded(), "overloaded_error"),
        (GatewayError("m"), "api_error"),
    ],
)
def test_anthropic_endpoints_get_anthropics_form(error, kind):
    assert json.loads(error_body(error, "req-1", Dialect.MESSAGES)) == {
        "type": "error",
        "error": {
            "type": kind,
            "message": "m",
            "details": {"error_code": error.code or error.type},
        },
        "request_id": "req-1",
    }


def test_too_long_a_prompt_is_told_in_the_words_each_api_knows():
    error = ContextLengthExceeded(
        "This model's maximum context length is 8 tokens.", param="messages"
    )
    assert b"prompt is too long" in error_body(error, "r", Dialect.MESSAGES)
    assert b"exceeds the context window" in error_body(error, "r", Dialect.RESPONSES)
    for dialect in OPENAI:
        assert b"maximum context length is 8 tokens" in error_body(error, "r", dialect)


@pytest.mark.parametrize("dialect", [Dialect.MESSAGES, Dialect.RESPONSES])
def test_a_prompt_is_not_called_too_long_where_the_output_is(dialect):
    """LangChain would shorten a conversation that fits, in vain."""
    ours = "input length and `max_tokens` exceed context limit: 100 + 40000 > 32768"
    if dialect is Dialect.MESSAGES:
        error = ContextLengthExceeded(ours, param="messages")
        assert json.loads(error_body(error, "r", dialect))["error"]["message"] == ours
    told = "max_output_tokens=64000 cannot be greater than max_model_len=32768."
    _, engines, _ = normalised(400, envelope(told, param="max_output_tokens"), dialect)
    assert engines["message"].startswith(
        "This model's maximum context length is 32768 tokens. max_"
    )


@pytest.mark.parametrize(
    ("seconds", "whole", "millis"),
    [(0.2, b"1", b"1000"), (2.25, b"3", b"2250"), (500.0, b"30", b"30000")],
)
def test_retry_after_is_clamped_and_never_shorter_than_meant(seconds, whole, millis):
    headers = dict(error_headers(overloaded(seconds)))
    assert headers[b"retry-after"] == whole
    assert headers[b"retry-after-ms"] == millis


def test_headers_say_what_a_client_can_do():
    assert dict(error_headers(RequestError("m"))) == {b"content-type": b"application/json"}
    refused = dict(error_headers(AccessError("m")))
    assert (refused[b"www-authenticate"], refused[b"x-should-retry"]) == (b"Bearer", b"false")
    assert dict(error_headers(MethodNotAllowed("m")))[b"allow"] == b"POST"
    assert dict(error_headers(ShuttingDown("m")))[b"x-gateway-shed-reason"] == b"draining"
    assert dict(error_headers(BackendTimeout("m")))[b"x-should-retry"] == b"false"


# --- backends' errors ---------------------------------------------------------------------------


def normalised(status: int, body: object, dialect: Dialect = Dialect.CHAT):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, out, headers = normalise_upstream_error(status, raw, dialect, "req-1")
    return status, json.loads(out)["error"], dict(headers)


def envelope(message: str, code: object = 400, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


def test_an_int_code_becomes_a_string_and_the_text_stays():
    status, error, _ = normalised(400, envelope("`temperature` is odd", param="temperature"))
    assert status == 400
    assert error == {
        "message": "`temperature` is odd",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_request",
    }


def test_a_string_code_stays():
    assert normalised(400, envelope("m", code="bad_thing"))[1]["code"] == "bad_thing"


def test_fields_are_named_as_the_client_knows_them():
    assert normalised(400, envelope("m", param="body.max_tokens"))[1]["param"] == "max_tokens"
    assert normalised(400, envelope("m", param="body"))[1]["param"] is None
    assert normalised(400, envelope("m", param="x" * 500))[1]["param"] is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"object": "error", "message": "flat", "type": "x", "param": None, "code": 400}, "flat"),
        ({"error": "a string"}, "a string"),
        ({"detail": "other words"}, "other words"),
        ({"detail": [{"loc": ["body"], "msg": "m"}]}, '[{"loc":["body"],"msg":"m"}]'),
        ({"type": "error", "error": {"type": "BadRequestError", "message": "m"}}, "m"),
    ],
)
def test_every_form_of_an_error_is_read(body, message):
    assert normalised(400, body)[1]["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Bad Gateway</html>",
        b"\xff\xfe",
        b"[]",
        b"5",
        b"{",
        b"[" * 50_000,
        b'{"a":"' + b"x" * 99_000 + b'"}',
        b'{"error": {"code": true}}',
        b'{"error": null}',
    ],
)
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503, 504])
def test_garbage_gets_words_of_our_own(body, status):
    _, error, _ = normalised(status, body)
    assert error["message"]
    assert "html" not in error["message"]
    assert isinstance(error["code"], str)


CONTEXT = [
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least "
    "2049 input tokens, which exceeds this limit even without any output tokens.",
    "This model's maximum context length is 2048 tokens. However, you requested 2723 tokens "
    "(1699 in the messages, 1024 in the completion). Please reduce the length of the messages.",
    "Input length (3000) exceeds model's maximum context length (2048).",
    "The decoder prompt (length 3000) is longer than the maximum model length of 2048. Make sure",
    "The engine prompt length 3000 exceeds the max_model_len 2048. Please reduce prompt.",
]


@pytest.mark.parametrize("text", CONTEXT)
@pytest.mark.parametrize("dialect", OPENAI)
def test_every_way_to_say_too_long_gets_the_code_and_the_words_clients_look_for(text, dialect):
    status, error, _ = normalised(400, envelope(text, param="input_tokens"), dialect)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in error["message"]
    assert error["param"] in ("messages", "prompt", "input")


def test_too_much_output_names_the_field_that_asked_for_it():
    text = "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer"
    _, error, _ = normalised(400, envelope(text, param="max_tokens"))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, {"error": "Unauthorized"}, (502, "server_error", "backend_error")),
        (403, b"", (502, "server_error", "backend_error")),
        (404, envelope("no such", 404, "model"), (404, "invalid_request_error", "model_not_found")),
        (404, envelope("no such", 404, "response_id"), (404, "invalid_request_error", "not_found")),
        (404, {"detail": "Not Found"}, (404, "invalid_request_error", "endpoint_not_supported")),
        (
            405,
            {"detail": "Method Not Allowed"},
            (404, "invalid_request_error", "endpoint_not_supported"),
        ),
        (413, b"", (413, "invalid_request_error", "request_too_large")),
        (422, envelope("m", 422), (400, "invalid_request_error", "invalid_request")),
        (429, b"", (429, "requests", "rate_limit_exceeded")),
        (500, envelope("m", 500), (500, "server_error", "backend_error")),
        (
            501,
            envelope("The model does not support Chat Completions API", 501),
            (404, "invalid_request_error", "endpoint_not_supported"),
        ),
        (501, b"", (404, "invalid_request_error", "endpoint_not_supported")),
        (501, envelope("m", 501), (400, "invalid_request_error", "invalid_request")),
        (503, envelope("m", 503), (503, "service_unavailable_error", "server_is_overloaded")),
        (504, b"", (504, "server_error", "backend_timeout")),
        (302, b"", (502, "server_error", "backend_error")),
    ],
)
def test_a_status_becomes_what_it_means_here(status, body, expected):
    told, error, _ = normalised(status, body)
    assert (told, error["type"], error["code"]) == expected


def test_what_an_engine_has_not_implemented_is_told():
    """vLLM answers 501 to an image as a `data:` URL that is not base64; its endpoint is there."""
    words = "Only base64 data URLs are supported for now."
    status, error, _ = normalised(501, envelope(words, 501))
    assert (status, error["message"]) == (400, words)


def test_the_gateways_own_key_is_not_the_clients_matter():
    assert "gateway's own key" in normalised(401, {"error": "Unauthorized"})[1]["message"]


def test_an_overloaded_backend_says_when_to_come_back_and_not_to_all_the_same():
    waits = {int(normalised(503, b"")[2][b"retry-after-ms"]) for _ in range(50)}
    assert len(waits) > 5
    assert all(1000 <= wait <= 3000 for wait in waits)
    assert normalised(500, b"")[2].get(b"retry-after") is None


def test_a_window_in_a_crash_is_no_fault_of_the_prompt():
    assert normalised(500, envelope(CONTEXT[0], 500))[1]["code"] == "backend_error"


@pytest.mark.parametrize(
    ("text", "clear"),
    [
        ("see http://10.0.0.1:8000/v1 and https://vllm-0.internal/x", "see <url> and <url>"),
        ("connect to 10.1.2.3:8000 failed", "connect to <host> failed"),
        ("connect to localhost:8000", "connect to <host>"),
        ("connect to [fe80::1]:8000", "connect to <host>"),
        ("vllm-0.vllm.svc.cluster.local:8000 is gone", "<host> is gone"),
        ('File "/opt/venv/lib/x.py", line 3', 'File "<path>", line 3'),
        ("no adapter at /models/lora-a", "no adapter at <path>"),
        ("tcp://*:5557", "<url>"),
        ("either and/or 0.32.0, ratio 1/2 at 12:30", "either and/or 0.32.0, ratio 1/2 at 12:30"),
    ],
)
def test_addresses_and_paths_stay_inside(text, clear):
    assert clean(text) == clear


def test_a_long_text_is_cut():
    assert len(clean("x" * 100_000)) == 1024
    assert clean("x" * 100_000).endswith("…")


@pytest.mark.parametrize("text", ["a-" * 40_000, "a." * 40_000, "1.2.3." * 9_000, "[0:a" * 9_000])
def test_no_text_takes_long_to_clean(text):
    began = time.process_time()
    clean(text, 16 * 1024)
    assert time.process_time() - began < 1.0  # 10 ms; a pattern that goes back takes minutes


def test_what_vllm_says_about_a_request_passes_in_full():
    told = "15 validation errors:\n" + "".join(
        f"  {{'type': 'missing', 'loc': 'body.messages.{n}.ChatCompletionUserMessageParam.content'}}\n"
        for n in range(100)
    )
    raw = json.dumps(envelope(told, 400)).encode()
    _, out, _ = normalise_upstream_error(400, raw, Dialect.CHAT, "req-1")
    assert json.loads(out)["error"]["message"] == told.strip()
    endless = json.dumps(envelope("x" * 50_000, 400)).encode()
    _, out, _ = normalise_upstream_error(400, endless, Dialect.CHAT, "req-1")
    assert len(json.loads(out)["error"]["message"]) == 16 * 1024
    failure = json.dumps(envelope("x" * 50_000, 500)).encode()
    _, out, _ = normalise_upstream_error(500, failure, Dialect.CHAT, "req-1")
    assert len(json.loads(out)["error"]["message"]) == 1024


def test_an_anthropic_error_of_a_backend_stays_anthropic():
    raw = json.dumps(envelope("no such", 404, "model")).encode()
    status, out, _ = normalise_upstream_error(404, raw, Dialect.MESSAGES, "req-1")
    assert status == 404
    assert json.loads(out) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "no such",
            "details": {"error_code": "model_not_found"},
        },
        "request_id": "req-1",
    }


# --- models -------------------------------------------------------------------------------------


def test_a_model_tells_its_window_under_every_name_that_clients_look_for():
    entry = model_entry("a", parent=None, root="r", window_tokens=2048, status="ready", created=7)
    assert entry["id"] == "a"
    assert entry["object"] == "model"
    assert entry["created"] == 7
    for key in ("max_model_len", "context_length", "context_window", "max_context_length"):
        assert entry[key] == 2048


def test_an_unknown_window_is_not_told():
    entry = model_entry(
        "a", parent="p", root="r", window_tokens=None, status="unavailable", created=7
    )
    assert (entry["parent"], entry["root"], entry["status"]) == ("p", "r", "unavailable")
    assert "max_model_len" not in entry
