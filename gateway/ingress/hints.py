"""What is wrong with a URL that is not served, and in whose form that is to be told. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote

from gateway.core.printable import printable
from gateway.core.types import Dialect
from gateway.observe.redact import redact
from gateway.wire.calls import ENDPOINTS

_SERVED: Final = frozenset(path.decode() for path in ENDPOINTS) | {
    "/v1/models",
    "/v1/key",
    "/tokenizer_info",
    "/livez",
    "/readyz",
    "/health",
}
_READ: Final = ("/v1/models", "/v1/key")  # by GET
_READ_CHARS: Final = 512  # of a path; no path that is served is near as long
_ANTHROPICS: Final = re.compile("/v1/+messages(?:/|$)")  # whatever a base URL puts before it


def hint(path: str) -> str:
    """Return the mistakes in a path that is not served, and the path to use; else what is served."""
    wrong, mended = [], path[:_READ_CHARS]
    for what, mend in _MISTAKES:
        if mended in _SERVED:
            break
        before, mended = mended, mend(mended)
        if mended != before:
            extra = _extra(before, mended)
            wrong.append(what.format(printable(redact(extra))))  # it may be a pasted key
    elsewhere = _elsewhere(path)
    if mended in _SERVED and elsewhere != _OPENAI:  # not /v1/threads/…/messages
        return f"{'. '.join(wrong)}. Use {mended}."
    return elsewhere or _list()


def dialect_of(path: str) -> Dialect:
    """Return in whose form a client reads errors of a path that may not be served: Anthropic's, or OpenAI's."""
    return Dialect.MESSAGES if _ANTHROPICS.search(path[:_READ_CHARS]) else Dialect.CHAT


def _extra(path: str, served: str) -> str:
    """Return what stands before the served path that this one ends in, or behind the `/v1` of that."""
    if path.endswith(served):
        return path.removesuffix(served)
    extra = path.removesuffix(served.removeprefix("/v1"))
    return extra.removeprefix("/v1") if extra.startswith("/v1/") else extra


def _once(path: str) -> str:
    return re.sub(r"^(/v1){2,}/", "/v1/", path)


def _with_v1(path: str) -> str:
    return f"/v1{path}" if f"/v1{path}" in _SERVED else path


def _without_prefix(path: str) -> str:
    """Return the served path that this one ends in, `/v1` before it or not."""
    ends = [served for served in _SERVED if path.endswith(served.removeprefix("/v1"))]
    return max(ends, key=lambda served: (path.endswith(served), len(served)), default=path)


_MISTAKES: Final[tuple[tuple[str, Callable[[str], str]], ...]] = (
    ("Remove the percent-encoding", unquote),
    ("Remove the double slash", lambda path: re.sub(r"/{2,}", "/", path)),
    ("Remove the slash at the end", lambda path: path.rstrip("/")),
    ("Use lower case", str.lower),
    ("`/v1` appears twice: remove it from the base URL", _once),
    ("`/v1` is missing: add it to the base URL", _with_v1),
    ("Remove `{}`", _without_prefix),
)

_VLLM: Final = "vLLM has this endpoint, but this gateway does not serve it."
_OPERATORS: Final = "This is an administrative endpoint of vLLM. Call it on the vLLM server itself."
_OPENAI: Final = "OpenAI has this endpoint, vLLM does not."
_OLLAMA: Final = (
    "This looks like Ollama's API: set the client to OpenAI's, with `/v1` in its base URL."
)
_HEALTH: Final = "To check the health of this gateway, use GET /livez or GET /readyz."

# Source: the routes of vLLM 0.32; OpenAI's, Anthropic's and Ollama's references. The longest beginning counts.
ELSEWHERE: Final[Mapping[str, str]] = {
    "/v1/responses": "This gateway does not store responses. Send the whole conversation with each request.",
    "/v1/messages": "Of Anthropic's API this gateway serves POST /v1/messages and /v1/messages/count_tokens.",
    "/v1/messages/batches": "Anthropic has this endpoint, vLLM does not. Send each request by itself to /v1/messages.",
    "/metrics": "Metrics are on the gateway's admin listener.",
    "/admin": "The admin API is on the gateway's admin listener.",
    **dict.fromkeys(("/ping", "/load", "/ready", "/version"), _HEALTH),
    **dict.fromkeys(
        (
            "/cohere", "/inference/v1", "/invocations",
            "/v1/chat/completions/derender", "/v1/chat/completions/render",
            "/v1/completions/derender", "/v1/completions/render", "/v1/messages/render",
            "/v1/realtime", "/v1/responses/render",
        ),
        _VLLM,
    ),
    **dict.fromkeys(
        (
            "/abort_requests", "/collective_rpc", "/docs", "/fault_tolerance", "/get_world_size",
            "/is_paused", "/is_sleeping", "/openapi.json", "/pause", "/release_kv_cache_memory",
            "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume",
            "/scale_elastic_ep", "/server_info", "/sleep", "/start_profile", "/stop_profile",
            "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up",
        ),
        _OPERATORS,
    ),
    **dict.fromkeys(
        (
            "/v1/assistants", "/v1/audio/speech", "/v1/batches", "/v1/conversations", "/v1/files",
            "/v1/fine_tuning", "/v1/images", "/v1/moderations", "/v1/responses/compact",
            "/v1/responses/input_tokens", "/v1/threads", "/v1/uploads", "/v1/vector_stores", "/v1/videos",
        ),
        _OPENAI,
    ),
    **dict.fromkeys(
        ("/api/chat", "/api/embed", "/api/embeddings", "/api/generate", "/api/show", "/api/tags"),
        _OLLAMA,
    ),
}  # fmt: skip


def _elsewhere(path: str) -> str | None:
    """Return who serves such a path, by its first parts."""
    parts = path[:_READ_CHARS].split("/")
    for count in range(len(parts), 1, -1):
        if (words := ELSEWHERE.get("/".join(parts[:count]))) is not None:
            return words
    return None


def _list() -> str:
    """Return what is served, as far as clients call it."""
    posts = ", ".join(
        sorted(path for path in _SERVED if path.startswith("/v1/") and path not in _READ)
    )
    return f"This gateway serves GET /v1/models and POST {posts}."
