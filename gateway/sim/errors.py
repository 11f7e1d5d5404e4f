"""vLLM's error replies as captured from 0.32: an int code in OpenAI's form, none in Anthropic's."""

from __future__ import annotations

from typing import Any, Final

ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
BUSY: Final = (
    "The engine is currently busy and cannot accept new requests."
    " Please try again later or on a different instance."
)
STOPPING: Final = "cannot schedule new futures after shutdown"


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

    def body(self, *, anthropic: bool = False) -> dict[str, Any]:
        """Return the JSON body, in Anthropic's shape if asked."""
        if self.plain is not None:
            return self.plain
        # Validation happens before the handler that knows the dialect: always the OpenAI shape.
        if anthropic and self.kind != "Bad Request":
            return {"type": "error", "error": {"type": self.kind, "message": self.message}}
        return {"error": envelope(self.message, self.kind, self.param, self.status)}


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


def missing(name: str, fields: int) -> SimError:
    """Refuse a body that lacks a field."""
    return invalid("missing", f"body.{name}", "Field required", f"'<dict of {fields} items>'")


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
