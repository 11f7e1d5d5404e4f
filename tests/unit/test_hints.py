"""A 404 names the mistake in the URL."""

import pytest

from gateway.core.types import Dialect
from gateway.ingress.hints import ELSEWHERE, dialect_of, hint
from gateway.wire.calls import ENDPOINTS


@pytest.mark.parametrize(
    ("path", "words", "use"),
    [
        ("/v1/v1/chat/completions", "twice", "/v1/chat/completions"),
        ("/v1/v1/messages", "twice", "/v1/messages"),
        ("/v1/v1/models", "twice", "/v1/models"),
        ("/chat/completions", "`/v1` is missing", "/v1/chat/completions"),
        ("/models", "`/v1` is missing", "/v1/models"),
        ("/messages/count_tokens", "`/v1` is missing", "/v1/messages/count_tokens"),
        ("//v1/chat/completions", "double slash", "/v1/chat/completions"),
        ("/v1//chat/completions", "double slash", "/v1/chat/completions"),
        ("/v1/chat/completions/", "slash at the end", "/v1/chat/completions"),
        ("/v1/models/", "slash at the end", "/v1/models"),
        ("/V1/Chat/Completions", "lower case", "/v1/chat/completions"),
        ("/v1/%63hat/completions", "percent-encoding", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "Remove `/api`.", "/v1/chat/completions"),
        (
            "/openai/deployments/m/chat/completions",
            "Remove `/openai/deployments/m`.",
            "/v1/chat/completions",
        ),
        ("/foo/models", "Remove `/foo`.", "/v1/models"),
        # The base URL is that of an endpoint.
        (
            "/v1/chat/completions/chat/completions",
            "Remove `/chat/completions`.",
            "/v1/chat/completions",
        ),
        ("/v1/chat/completions/models", "Remove `/chat/completions`.", "/v1/models"),
        ("/v1/messages/v1/messages", "Remove `/v1/messages`.", "/v1/messages"),
        ("/v1/tokenize", "Remove `/v1`.", "/tokenize"),
        ("/v1/tokenizer_info", "Remove `/v1`.", "/tokenizer_info"),
        ("/tokenizer_info/", "slash at the end", "/tokenizer_info"),
    ],
)
def test_one_mistake_is_named_with_the_url_to_use(path, words, use):
    said = hint(path)
    assert words in said
    assert f"Use {use}." in said


def test_every_mistake_of_several_is_named():
    said = hint("//v1/v1/chat/completions/")
    assert "double slash" in said
    assert "slash at the end" in said
    assert "twice" in said
    assert "Use /v1/chat/completions." in said


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completions/render", "vLLM has this endpoint"),
        ("/v1/responses/render", "vLLM has this endpoint"),
        ("/v1/realtime", "vLLM has this endpoint, but this gateway does not serve it"),
        ("/v1/responses/resp_1", "does not store responses"),
        ("/v1/responses/resp_1/cancel", "does not store responses"),
        ("/v1/responses/compact", "OpenAI has this endpoint, vLLM does not"),
        ("/v1/responses/input_tokens", "OpenAI has this endpoint, vLLM does not"),
        ("/v1/load_lora_adapter", "administrative endpoint"),
        ("/sleep", "administrative endpoint"),
        ("/metrics", "admin"),
        ("/admin/v1/overview", "The admin API is on the gateway's admin listener."),
        ("/ping", "/livez"),
        ("/v1/messages/render", "vLLM has this endpoint"),
        ("/v1/messages/batches", "Send each request by itself to /v1/messages."),
        ("/v1/messages/batches/msgbatch_1/results", "Anthropic has this endpoint, vLLM does not"),
        ("/v1/messages/msg_1", "serves POST /v1/messages and /v1/messages/count_tokens"),
        ("/v1/files", "OpenAI has this endpoint, vLLM does not"),
        ("/v1/threads/thread_1/messages", "OpenAI has this endpoint, vLLM does not"),
        ("/v1/images/generations", "OpenAI has this endpoint, vLLM does not"),
        ("/api/chat", "Ollama"),
        ("/api/tags", "Ollama"),
    ],
)
def test_what_others_serve_is_named(path, words):
    assert words in hint(path)


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/messages/batches", Dialect.MESSAGES),
        ("/v1/v1/messages/batches", Dialect.MESSAGES),
        ("/v1/v1/messages", Dialect.MESSAGES),
        ("/proxy//v1//messages/", Dialect.MESSAGES),
        ("/v1/messages", Dialect.MESSAGES),
        ("/v1/messages_of_others", Dialect.CHAT),
        ("/v1/threads/thread_1/messages", Dialect.CHAT),
        ("/v1/chat/completions", Dialect.CHAT),
        ("/v1/models", Dialect.CHAT),
        ("*", Dialect.CHAT),
        ("/%ff%00", Dialect.CHAT),
    ],
)
def test_errors_have_the_form_of_the_api_that_a_path_is_of(path, dialect):
    assert dialect_of(path) is dialect


def test_nothing_that_is_served_is_told_to_be_elsewhere():
    served = {each.decode() for each in ENDPOINTS}
    told = served & ELSEWHERE.keys()  # what is below them is not served
    assert told == {"/v1/messages", "/v1/responses"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/x",
        "/rerank/x",
        "/",
        "/v1",
        "/nowhere",
        "/v1/nowhere",
        "*",
        "/" * 5000,
        "/%ff%00",
    ],
)
def test_for_the_rest_the_endpoints_are_listed(path):
    said = hint(path)
    assert "/v1/chat/completions" in said
    assert "/v1/models" in said
    assert len(said) < 600


@pytest.mark.parametrize("path", [*ENDPOINTS, b"/v1/models"])
def test_every_endpoint_is_found_behind_each_mistake(path):
    text = path.decode()
    for wrong in (f"/{text}", f"{text}/", f"/v1{text}", text.upper(), f"/proxy{text}"):
        if wrong.encode() in ENDPOINTS:
            continue  # `/v1/rerank` for `/rerank`: both are served
        assert f"Use {text}." in hint(wrong), wrong


@pytest.mark.parametrize(
    "secret", ["gw_abc_0123456789", "sk-0123456789abcdef", "%67w_abc_0123456789"]
)
def test_a_key_that_was_pasted_into_the_url_is_not_repeated(secret):
    said = hint(f"/{secret}/v1/models")
    assert "0123456789" not in said
    assert "Remove `/" in said
    assert "Use /v1/models." in said


def test_control_characters_of_the_url_are_shown_escaped():
    assert "Remove `/a\\nb`." in hint("/a%0ab/v1/models")
