"""What every verb of the command line shares: exit codes, failures, JSON, tables, asking a gateway.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

from gateway.cli.terminal import Terminal, is_number

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

T = TypeVar("T")

_UNDECODED: Final = re.compile("[\udc80-\udcff]")  # how Python has a byte that it could not decode
_STEPS: Final = 10  # all of an answer may take this many times what a step of it may
_CHUNK: Final = 64 * 1024
_KEY_BEGINS: Final = "gw_"  # as `access.secret` makes them


class Exit(IntEnum):
    """What the exit code says."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INVALID_CONFIG = 3
    NOT_FOUND = 4
    NOT_ALLOWED = 5
    DEGRADED = 8


class VerbError(Exception):
    """A verb that cannot go on: a sentence, what to do, and the exit code."""

    def __init__(self, message: str, hint: str = "", code: Exit = Exit.FAILURE) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def print_failure(error: Exception) -> Exit:
    """Print one line and a hint about whatever ended a verb; return the exit code."""
    hint, code = "", Exit.FAILURE
    if isinstance(error, VerbError):
        message, hint, code = str(error), error.hint, error.code
    elif isinstance(error, BrokenPipeError):  # whoever read the output wants no more, as `head`
        return code
    elif isinstance(error, OSError):
        message = _told(error)
    elif isinstance(error, UnicodeEncodeError) and _UNDECODED.match(error.object, error.start):
        message = "a word of the command line is not text in the encoding of this locale"
        hint, code = "write it in UTF-8, with LC_ALL=C.UTF-8", Exit.USAGE
    elif hasattr(error, "findings"):  # ConfigError, by its shape: importing it takes 12 ms
        print("\n".join(error.findings), file=sys.stderr)
        return Exit.INVALID_CONFIG
    else:
        message = f"this is a bug: {type(error).__name__}: {error}"
        hint = "run it again with -vv for the traceback, and please report it"
    print(f"vllm-gateway: {message or error}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return code


@contextlib.contextmanager
def hint_if_taken(hint: str) -> Iterator[None]:
    """Have a hint told where an address is taken by another program."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise VerbError(_told(error), hint) from error


def _told(error: OSError) -> str:
    return ": ".join(str(part) for part in (error.filename, error.strerror) if part)


def option(name: str, parse: Callable[[str], T], text: str) -> T:
    """Return what was written for an option.

    Raises:
        VerbError: `parse` does not take it.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise VerbError(f"{name}: {error}", code=Exit.USAGE) from error


def duration(text: str) -> float:
    """Return the seconds of `30s` or `1h`; ValueError for what is none."""
    from gateway.config.units import parse_duration  # takes as long to import as all the rest

    return parse_duration(text)


def print_json(value: object) -> None:
    """Print a result for programs."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    sys.stdout.write(text + "\n")


def print_table(rows: Sequence[Mapping[str, object]], *, empty: str = "none") -> None:
    """Print rows for people, numbers to the right, as wide as they are; names of columns are the keys of the first."""
    terminal = Terminal(colour=Terminal.of_stdout().colour)
    lines = terminal.table(rows, is_number=is_number) if rows else [empty]
    sys.stdout.write("\n".join(lines) + "\n")


def print_list(
    told: Mapping[str, Any],
    output: str,
    row: Callable[[dict[str, Any]], Mapping[str, object]],
    *,
    empty: str,
) -> None:
    """Print a list that an admin listener answered: for programs as it is, for people each entry by its `row`."""
    if output == "json":
        print_json(told)
    else:
        print_table([row(each) for each in told.get("data", [])], empty=empty)


def ask(  # noqa: PLR0913 - what a request has
    server: str,
    path: str,
    token: str,
    *,
    order: Mapping[str, object] | None = None,
    method: str = "",
    if_match: str | None = None,
    timeout_s: float = 5.0,
) -> dict[str, Any]:
    """Return the JSON object that an admin listener answers; see `fetch`.

    Raises:
        VerbError: it does not answer, or not that.
    """
    body = fetch(
        server, path, token, order=order, method=method, if_match=if_match, timeout_s=timeout_s
    )
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise VerbError(f"{server} did not return JSON for {path}", _OTHER_PORT) from error
    if not isinstance(answer, dict):
        raise VerbError(f"{server} did not return a JSON object for {path}", _OTHER_PORT)
    return answer


def ask_all(server: str, path: str, token: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return a whole list of an admin listener, of however many pages; see `ask`."""
    told = page = ask(server, path, token, timeout_s=timeout_s)
    sign = "&" if "?" in path else "?"
    while page.get("has_more"):
        after = urlencode({"after": page["last_id"]})
        page = ask(server, f"{path}{sign}{after}", token, timeout_s=timeout_s)
        told = {**told, **page, "data": told["data"] + page["data"], "first_id": told["first_id"]}
    return told


def fetch(  # noqa: PLR0913 - what a request has
    server: str,
    path: str,
    token: str,
    *,
    order: Mapping[str, object] | None = None,
    method: str = "",
    if_match: str | None = None,
    timeout_s: float = 5.0,
) -> bytes:
    """Return the body that an admin listener answers with 200.

    Args:
        server: its URL, or `unix:/path`.
        path: from the root, such as /admin/v1/overview.
        token: sent as a bearer token unless empty.
        order: is sent; None only reads.
        method: default POST with an order, else GET.
        if_match: a version; the order is refused if the subject has another one.
        timeout_s: for each step; ten times that for the whole answer.

    Raises:
        VerbError: it does not answer, or with another status.
    """
    # http.client, because importing httpx2 takes as long again as everything else here.
    import http.client

    connection = _connection(server, timeout_s)
    headers: dict[str, str | bytes] = {}
    if token:
        headers["Authorization"] = f"Bearer {_sendable(token)}".encode()
    if if_match is not None:
        headers["If-Match"] = f'"{if_match}"'
    content: bytes | None = None
    if order is not None:
        content = json.dumps(order, ensure_ascii=False).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.request(
            method or ("GET" if content is None else "POST"), path, body=content, headers=headers
        )
        reply = connection.getresponse()
        with reply:  # it has the socket until its end
            body = _whole(reply, _STEPS * timeout_s)
    except UnicodeError as error:
        raise VerbError(
            f"cannot reach {server}: no host has such a name", code=Exit.USAGE
        ) from error
    except OSError as error:
        raise _unreachable(server, error) from error
    except (http.client.HTTPException, ValueError) as error:
        raise VerbError(f"{server} does not speak HTTP: {error!r}", _OTHER_PORT) from error
    finally:
        connection.close()
    if reply.status == http.client.UNAUTHORIZED:
        raise _no_entry(server, token)
    if reply.status != http.client.OK:
        raise _problem(path, reply.status, body) or VerbError(
            f"{server} returned {reply.status} for {path}", _OTHER_PORT, Exit.NOT_FOUND
        )
    return body


def _whole(reply: HTTPResponse, within_s: float) -> bytes:
    """Return a body.

    Raises:
        OSError: it comes to no end, as one that trickles never lasts too long at any single step.
        HTTPException: it is cut.
    """
    import http.client

    body, ends_at = bytearray(), time.monotonic() + within_s
    while chunk := reply.read1(_CHUNK):
        body += chunk
        if time.monotonic() > ends_at:
            raise TimeoutError(f"its answer does not end within {within_s:g} s")
    if reply.length:
        raise http.client.IncompleteRead(bytes(body), reply.length)
    return bytes(body)


def _sendable(token: str) -> str:
    """Return a token without the line end that a file or a secret often has.

    Raises:
        VerbError: no header can hold it; does not repeat it.
    """
    if not token.strip().isprintable():
        told = "the admin token has a line end or another control character in it"
        raise VerbError(told, code=Exit.USAGE)
    return token.strip()


def _unreachable(server: str, error: OSError) -> VerbError:
    hint = "is the gateway running? start it with `vllm-gateway serve -c FILE`, or use --server URL"
    if "WRONG_VERSION_NUMBER" in str(error):
        hint = "what answers there speaks no TLS: write http://, as the gateway itself has none"
    return VerbError(f"cannot reach {server}: {error.strerror or error}", hint)


def _no_entry(server: str, token: str) -> VerbError:
    # `redact` hides the word behind an option that takes a secret.
    if not token:
        hint = "set GATEWAY_ADMIN_TOKEN, or give --token"
        return VerbError(f"{server} requires its admin token", hint, Exit.NOT_ALLOWED)
    hint = "compare it with `admin.token` and `admin.tokens` of the gateway's settings"
    if token.startswith(_KEY_BEGINS):
        hint = (
            "it is an API key: was it revoked, has it expired, and is it of kind `admin`?"
            " `vllm-gateway keys list -c FILE` tells"
        )
    return VerbError(f"{server} does not accept this token", hint, Exit.NOT_ALLOWED)


def _problem(path: str, status: int, body: bytes) -> VerbError | None:
    """Return what a gateway itself says of a failure; None when that is not in the body."""
    try:
        told = json.loads(body)
        code, detail = told["code"], told["detail"]
    except (ValueError, TypeError, KeyError):
        return None
    if code == "not_found":
        hint = "is a name empty here, or the gateway of another version than this command?"
        return VerbError(f"this gateway has nothing at {path}", hint, Exit.NOT_FOUND)
    exits = {
        **{400: Exit.USAGE, 422: Exit.USAGE},
        **{403: Exit.NOT_ALLOWED, 404: Exit.NOT_FOUND, 409: Exit.NOT_ALLOWED},
    }
    ended = Exit.INVALID_CONFIG if code == "config_invalid" else exits.get(status, Exit.FAILURE)
    every = [each.get("detail") for each in told.get("errors") or () if isinstance(each, dict)]
    more = "".join(f"\n  {each}" for each in every) if len(every) > 1 else ""
    return VerbError(f"{detail}{more}", code=ended)


_OTHER_PORT: Final = "the admin listener has its own port; see `admin.listen` in the settings"


def _connection(server: str, timeout_s: float) -> HTTPConnection:
    """Return a connection to `http://host:port`, `https://...` or `unix:/path`."""
    import http.client

    from gateway.cli.local import LocalConnection

    if server.startswith("unix:"):
        return LocalConnection(server.removeprefix("unix:"), timeout_s)
    try:
        parts = urlsplit(server if "://" in server else f"http://{server}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise VerbError(f"{server} is not a URL: {error}", code=Exit.USAGE) from error
    kinds: dict[str, type[HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    if parts.username is not None or parts.path.strip("/") or parts.query:
        told = "the URL of an admin listener has no user, password or path"
        raise VerbError(
            told, "write it like http://127.0.0.1:9090, and the token as --token", Exit.USAGE
        )
    if host is None or parts.scheme not in kinds:
        hint = "write it like http://127.0.0.1:9090 or unix:/run/gw-admin.sock"
        raise VerbError(f"{server} is not a URL", hint, Exit.USAGE)
    return kinds[parts.scheme](host, port, timeout=timeout_s)
