"""Replies on the wire: errors, those of backends too, in the form that clients know; model lists.

Every error has the four keys and a string code; on the Anthropic endpoints it has Anthropic's form.
Source: openai-openapi ErrorResponse and Error; Anthropic API reference, "Errors".
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from gateway.core.errors import (
    AccessError,
    BackendTimeout,
    GatewayError,
    MethodNotAllowed,
    Rejected,
    TookTooLong,
    TooManyFailedKeys,
)
from gateway.core.ratelimited import RateLimited
from gateway.core.types import Dialect
from gateway.wire.clean import MAX_MESSAGE_CHARS, MAX_REFUSAL_CHARS, clean

HEADER_PREFIX: Final = b"x-gateway-"
MAX_READ_BYTES: Final = 64 * 1024  # of a backend's error; more is no error text
CONTEXT_CODE: Final = "context_length_exceeded"
RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 30.0  # SDKs do not retry at all, or sleep unboundedly, when told more
_JSON: Final = (b"content-type", b"application/json")
_LONG_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One error as clients read it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None


# --- our own errors ------------------------------------------------------------------------------


def fault_of(error: GatewayError) -> Fault:
    """Describe one of our own errors."""
    return Fault(error.status, error.type, error.code or error.type, error.message, error.param)


def error_body(error: GatewayError, request_id: str, dialect: Dialect = Dialect.CHAT) -> bytes:
    """Write an error reply in the form of the endpoint's dialect."""
    return fault_body(fault_of(error), request_id, dialect)


def error_headers(error: GatewayError, *, retried: bool = False) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to an error reply.

    A client is asked once to come again; one that was `retried` already would only add to the load.
    """
    headers = [_JSON]
    if error.retry_after_s is not None:
        headers += _retry_after(error.retry_after_s)
    if isinstance(error, AccessError):
        # Claude Code tries a refused key for three minutes, unless it is told not to.
        headers += [(b"www-authenticate", b"Bearer"), (b"x-should-retry", b"false")]
    elif isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))
    elif isinstance(error, Rejected):
        headers.append((HEADER_PREFIX + b"shed-reason", error.shed_reason.value.encode()))
        if retried:
            headers.append((b"x-should-retry", b"false"))
    elif isinstance(error, BackendTimeout | TookTooLong | TooManyFailedKeys) or (
        isinstance(error, RateLimited) and (error.retry_after_s or _LONG_S) >= _LONG_S
    ):
        # The backend may still work on it; a wrong key stays wrong; what is too large never fits; and SDKs do
        # not wait for a limit of a day.
        headers.append((b"x-should-retry", b"false"))
    return headers


def fault_body(fault: Fault, request_id: str, dialect: Dialect) -> bytes:
    """Write a fault in the form of the endpoint's dialect."""
    fault = _in_words_of(dialect, fault)
    if dialect is Dialect.MESSAGES:
        return msgspec.json.encode(anthropic_error(fault) | {"request_id": request_id})
    return openai_error(fault)


def openai_error(fault: Fault) -> bytes:
    """Write `{"error": {...}}` with its four keys.

    LangChain looks for the code of an overflow in the exception's text, and since version 3 of the
    OpenAI SDK that is the message alone: so the message says it too.
    """
    message = fault.message
    if fault.code == CONTEXT_CODE and CONTEXT_CODE not in message:
        message = f"{message} ({CONTEXT_CODE})"
    return msgspec.json.encode(
        {
            "error": {
                "message": message,
                "type": fault.type,
                "param": fault.param,
                "code": fault.code,
            }
        }
    )


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STATUSES: Final = {kind: status for status, kind in _ANTHROPIC_TYPES.items()}


def anthropic_error(fault: Fault) -> dict[str, Any]:
    """Return a fault as Anthropic's API tells it; its SDKs show the code as `error_code`."""
    other = "invalid_request_error" if fault.status < 500 else "api_error"
    kind, details = _ANTHROPIC_TYPES.get(fault.status, other), {"error_code": fault.code}
    return {"type": "error", "error": {"type": kind, "message": fault.message, "details": details}}


_TOO_LONG: Final = {
    # What clients of these two APIs look for to shorten the conversation; the second: too much output.
    Dialect.MESSAGES: ("prompt is too long", "exceed context limit"),
    Dialect.RESPONSES: ("Your input exceeds the context window of this model",),
}


def _in_words_of(dialect: Dialect, fault: Fault) -> Fault:
    """Return a fault with the words by which a dialect's clients see that their prompt is too long."""
    words = _TOO_LONG.get(dialect, ())
    by_prompt = fault.code == CONTEXT_CODE and fault.param not in _LIMITING_PARAMS
    lacking = by_prompt and words and not any(each in fault.message for each in words)
    return replace(fault, message=f"{words[0]}. {fault.message}") if lacking else fault


def _retry_after(seconds: float) -> list[tuple[bytes, bytes]]:
    """Say when to come back: whole seconds, and milliseconds for the SDKs that read them."""
    seconds = min(max(seconds, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
    return [
        (b"retry-after", b"%d" % math.ceil(seconds)),
        (b"retry-after-ms", b"%d" % round(seconds * 1000)),
    ]


# --- backends' errors ----------------------------------------------------------------------------

# Source: the texts of vLLM 0.32 and of the releases before it, and of other engines (llama.cpp, SGLang and
# TGI as of 2026), each with the window as a number.
_CONTEXT_LENGTH: Final = re.compile(
    r"maximum context length is (\d+)"
    r"|maximum context length \((\d+)\)"
    r"|longer than the maximum model length of (\d+)"
    r"|exceeds the max_model_len (\d+)"
    r"|cannot be greater than max_model_len ?= ?(\d+)"
    r"|available context size \((\d+)"  # llama.cpp
    r"|model's context length \((\d+)"  # SGLang
    r"|maximum context length of (\d+)"  # SGLang
    r"|must be <= (\d+)\. Given: \d+ `inputs` tokens"  # TGI
)


@dataclass(frozen=True, slots=True)
class _BackendError:
    """What a backend's error says, as far as it could be read."""

    message: str = ""
    param: str | None = None
    code: str | int | None = None
    is_route_error: bool = False  # the web framework's own words: the path is not there


def normalise_upstream_error(
    status: int, body: bytes, dialect: Dialect, request_id: str
) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Turn a backend's error reply into ours: status, body, headers.

    vLLM's text is kept, without addresses and paths: 1 KiB of a failure, 16 KiB of what it says about
    the request. Codes become strings.
    """
    fault = upstream_fault(status, body, dialect)
    headers = [_JSON]
    if fault.status in (429, 503):
        headers += _retry_after(random.uniform(1.0, 3.0))  # spread: many are refused at one moment
    return fault.status, fault_body(fault, request_id, dialect), headers


def upstream_fault(status: int, body: bytes, dialect: Dialect) -> Fault:
    """Judge a backend's error reply.

    `status` 200 means an error frame inside a stream: the status is then the frame's own code.
    """
    error = _read(body)
    if status == 200:
        status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    message = clean(error.message, MAX_REFUSAL_CHARS if status < 500 else MAX_MESSAGE_CHARS)
    window = _CONTEXT_LENGTH.search(message)
    if status < 500 and window is not None:
        return _context_fault(message, window, error.param, dialect)
    if status in (401, 403) and not error.is_route_error:
        words = "The backend rejected the gateway's own key. The operator of this gateway must fix this."
        return Fault(502, "server_error", "backend_error", words)
    if 400 <= status < 500 or status == 501:
        lacking = status != 404 and lacks_endpoint(status, body)
        return _caller_fault(status, error, message, lacking=lacking)
    if status == 503:
        words = message or "The backend is overloaded. Please try again later."
        return Fault(503, "service_unavailable_error", "server_is_overloaded", words)
    if status == 504:
        return Fault(504, "server_error", "backend_timeout", message or "The backend timed out.")
    words = message or f"The backend failed (HTTP {status}) without a readable message."
    return Fault(status if status >= 500 else 502, "server_error", "backend_error", words)


def _context_fault(
    message: str, window: re.Match[str], param: str | None, dialect: Dialect
) -> Fault:
    if "maximum context length is" not in message:
        tokens = next(group for group in window.groups() if group is not None)
        message = f"This model's maximum context length is {tokens} tokens. {message}"
    if param not in _LIMITING_PARAMS:
        param = {
            Dialect.COMPLETIONS: "prompt",
            Dialect.RESPONSES: "input",
            Dialect.PLAIN: "input",
        }.get(dialect, "messages")
    return Fault(400, "invalid_request_error", "context_length_exceeded", message, param)


_LIMITING_PARAMS: Final = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
# Of a server that was started for other tasks, and of a model. Source: vLLM 0.32, llama.cpp as of 2026.
_NO_ENDPOINT, _NO_MODEL = "does not support", "does not exist"


def lacks_endpoint(status: int, body: bytes) -> bool:
    """Whether a reply says that a backend has no such endpoint, and not what is wrong with a request."""
    message = _read(body).message
    if status == 501:
        return _NO_ENDPOINT in message or not message
    return status == 405 or (status == 404 and _NO_MODEL not in message)


def _caller_fault(status: int, error: _BackendError, message: str, *, lacking: bool) -> Fault:
    """Return the fault of a request that would fail on every backend alike."""
    kind = "invalid_request_error"
    if error.is_route_error or lacking:
        words = "This model's backends do not serve this endpoint."
        return Fault(404, kind, "endpoint_not_supported", words)
    if status == 404:
        code = "model_not_found" if error.param in ("model", None) else "not_found"
        return Fault(404, kind, code, message or "Not found.", error.param)
    if status == 429:
        words = message or "Rate limit reached. Please try again later."
        return Fault(429, "requests", "rate_limit_exceeded", words)
    if status == 413:
        return Fault(413, kind, "request_too_large", message or "The body is too large.")
    code = error.code if isinstance(error.code, str) and error.code else "invalid_request"
    words = (
        message or f"The backend refused the request (HTTP {status}) without a readable message."
    )
    return Fault(400, kind, code, words, error.param)  # 422 too: clients know 400


def _read(body: bytes) -> _BackendError:
    """Read vLLM's envelope, the flat form before 0.10, a bare string, or a `detail`."""
    try:
        parsed = msgspec.json.decode(body) if len(body) <= MAX_READ_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return _BackendError()
    error = parsed.get("error")
    if isinstance(error, str):
        return _BackendError(message=error)
    if "detail" in parsed and error is None:
        detail = parsed["detail"]
        known = detail in ("Not Found", "Method Not Allowed")
        return _BackendError(message=_as_text(detail), is_route_error=known)
    source: dict[str, Any] = error if isinstance(error, dict) else parsed
    code = source.get("code", _STATUSES.get(_as_text(source.get("type"))))  # Anthropic's has none
    return _BackendError(
        message=_as_text(source.get("message")),
        param=_field(source.get("param")),
        code=code if isinstance(code, str | int) and not isinstance(code, bool) else None,
    )


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def _field(value: object) -> str | None:
    """Return a param in the client's terms: `body.max_tokens` is `max_tokens`."""
    if not isinstance(value, str) or len(value) > 128:
        return None
    return value.removeprefix("body.") if value not in ("", "body") else None


# --- model lists ---------------------------------------------------------------------------------


def model_entry(
    name: str,
    *,
    parent: str | None,
    root: str,
    window_tokens: int | None,
    status: str,
    created: int,
) -> dict[str, object]:
    """Describe one model, `created` so many seconds after the epoch; its window has all names that clients look for.

    Source: vLLM and Cline read `max_model_len`; OpenRouter and opencode `context_length`.
    """
    entry: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm-gateway",
        "root": root,
        "parent": parent,
        "status": status,
    }
    if window_tokens is not None:
        for key in ("max_model_len", "context_length", "context_window", "max_context_length"):
            entry[key] = window_tokens
    return entry
