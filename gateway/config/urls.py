"""URLs of backends, and what is wrong with one. They are not repeated in messages: one might hold a password."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pydantic_core import PydanticCustomError

from gateway.config.sockets import PREFIX, socket_of

MOST_PORT: Final = 65535
_BACKEND_HINT: Final = (
    "write the backend's URL like http://10.0.0.11:8000 or unix:/run/vllm/b1.sock"
)


def check_backend_url(value: str) -> str:
    """Return the origin `scheme://host:port` of a backend, or `unix:/path` of its socket."""
    if not value.strip():
        raise PydanticCustomError("empty", "a backend needs either `url` or `launch`")
    if value.strip().startswith(PREFIX):
        return f"{PREFIX}{socket_of(value.strip())}"
    try:
        parts = urlsplit(value.strip())
        port = parts.port
    except ValueError as error:
        raise PydanticCustomError("bad_url", _why_no_url(value)) from error
    if _server(value).rpartition("]")[2].count(":") > (port is not None):
        raise PydanticCustomError("bad_url", _why_no_url(value))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PydanticCustomError("bad_url", _BACKEND_HINT)
    if not parts.netloc.isascii() or any(char.isspace() for char in parts.netloc):
        raise PydanticCustomError("bad_url", "the host must be ASCII (punycode) without spaces")
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError(
            "bad_url", "a URL may not contain a user or password; use api_key"
        )
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise PydanticCustomError(
            "bad_url", "write only scheme, host and port, without /v1 or any other path or query"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")


def _server(url: str) -> str:
    """Return the host and the port of a URL."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def _why_no_url(value: str) -> str:
    """Say what is wrong with the host or the port of a URL, which are not repeated."""
    server = _server(value)
    if server.count("[") != server.count("]") or ("[" not in server and server.count(":") > 1):
        return "write an IPv6 address in brackets, like 'http://[::1]:8000'"
    if (port := server.rpartition(":")[2]).isdecimal() and int(port) > MOST_PORT:
        return "the port in the URL is above 65535"
    return "the port in the URL is not a number"
