"""vLLM's error replies as captured from 0.32 and 0.33: an int code in OpenAI's form, none in Anthropic's."""

from __future__ import annotations

from typing import Any, Final

ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
BUSY: Final = (
    "The engine is currently busy and cannot accept new requests."
    " Please try again later or on a different instance."
)
STOPPING: Final = "cannot schedule new futures after shutdown"
# What clients are told since 0.33 in place of what is meant for logs, and the types of Anthropic's API.
_NEWER_WORDS: Final = {ENGINE_DEAD: "The server had an error while processing your request."}
_NEWER_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    503: "overloaded_error",
}


def newer_words(message: str) -> str:
    """Return what vLLM 0.33 says where 0.32 says this."""
    return _NEWER_WORDS.get(message, message)


class SimError(Exception):
    """A reply that is an error. `plain` bodies have a shape of their own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
        plain: dict[str, Any] | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.plain = plain
        self.allow = allow

    def body(self, *, anthropic: bool = False, newer: bool = False) -> dict[str, Any]:
        """Return the JSON body, in Anthropic's shape if asked; `newer`: as of 0.33."""
        if self.plain is not None:
            return self.plain
        message = newer_words(self.message) if newer else self.message
        # Validation happens before the handler that knows the dialect: always the OpenAI shape.
        if anthropic and self.kind != "Bad Request":
            kind = _NEWER_TYPES.get(self.status, "api_error") if newer else self.kind
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": envelope(message, self.kind, self.param, self.status)}


def envelope(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """Return the inside of vLLM's error body."""
    return {"message": message, "type": kind, "param": param, "code": code}


def bad_value(message: str, param: str, value: object) -> SimError:
    """Refuse a value that is well formed and wrong."""
    return SimError(400, f"{message} (parameter={param}, value={value})", param=param)


def invalid(kind: str, loc: str, text: str, value: str, reason: str | None = None) -> SimError:
    """Refuse a body that does not have the form of the endpoint."""
    ctx = f", 'ctx': {{'error': {reason!r}}}" if reason is not None else ""
    detail = f"{{'type': {kind!r}, 'loc': {loc!r}, 'msg': {text!r}, 'input': {value}{ctx}}}"
    return SimError(400, f"1 validation error:\n  {detail}", kind="Bad Request", param=loc)


def shown(value: object) -> str:
    """Return how vLLM shows a wrong value: of a container how large it is, and not what it holds."""
    if isinstance(value, list | dict):
        return f"'<{type(value).__name__} of {len(value)} items>'"
    return ascii(value)


def missing(name: str, fields: int) -> SimError:
    """Refuse a body that lacks a field."""
    return invalid("missing", f"body.{name}", "Field required", f"'<dict of {fields} items>'")


def wrong_method(allow: str) -> SimError:
    """Refuse a method that the path does not have."""
    return SimError(405, "", plain={"detail": "Method Not Allowed"}, allow=allow)


def engine_dead() -> SimError:
    """Answer for an engine that died."""
    return SimError(500, ENGINE_DEAD, kind="InternalServerError")


def stopping() -> SimError:
    """Answer for a server that was told to stop, and drains."""
    return SimError(500, STOPPING, kind="InternalServerError")


def busy() -> SimError:
    """Refuse for capacity: the admission limit is reached."""
    return SimError(503, BUSY, kind="Service Unavailable")


def unknown_model(name: str, base: str) -> SimError:
    """Refuse a model that is neither the base nor an adapter."""
    text = f"The model `{name}` does not exist. Valid aliases: {base}."
    return SimError(404, text, kind="NotFoundError", param="model")
