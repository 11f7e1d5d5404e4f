"""A server in a container, restarted by the Docker Engine API over its UNIX socket.

Its incarnation is the container's id and when it was started. Orders name the id, never the name of the
container: an order for an old container does not hit a new one with the same name.
Podman's socket speaks the same API.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx2

from gateway.core.aio import InTime
from gateway.launch import proc
from gateway.launch.containers import (
    Output,
    has_started,
    is_a_stop,
    obstacle,
    seen_container,
    unix_seconds,
)
from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Seen,
    Superseded,
    check_order,
)

SOCKET: Final = Path("/var/run/docker.sock")
_CALL_S: Final = 30.0  # beyond the grace
# Enough for the tracebacks of some hundred requests that died; the cause stands above them.
_LOG_LINES: Final = 40_000
_ANSWER_BYTES: Final = 4 * 1024 * 1024
# The newest API version whose answers are known here (Docker 25); older daemons are asked in theirs.
_VERSION: Final = (1, 44)


class DockerLauncher:
    """Restarts one container, whose name the settings have found valid: it stands in paths."""

    launches = False

    def __init__(self, name: str, socket: Path | None = None) -> None:
        self._name = name
        self._who = f"the container {name}"
        self.socket = socket or _socket_of(os.environ)
        self._http = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(self.socket), verify=False),  # no TLS there
            base_url="http://docker",
            timeout=None,  # `_talk` sets it
            trust_env=False,
        )
        self._prefix = ""  # /v1.44, once the daemon was asked

    async def look(self) -> Seen:
        """Return what Docker says of the container; one that a person stopped is absent."""
        found = await self._inspect()
        seen = seen_container(found)
        if seen.began_at is not None:  # before its machine did: the clock was wrong then
            seen = replace(seen, began_at=max(seen.began_at, proc.booted_at()))
        if seen.state is Runs.ENDED and await self._was_stopped(found):
            return replace(seen, state=Runs.ABSENT, detail="it was stopped (`docker stop`)")
        return seen

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Restart the container: its stop signal, SIGKILL after `grace_s`, and start."""
        changes.refuse(f"{self._who} has a fixed command line; recreate it to change that")
        found = await self._inspect()
        check_order(self._who, seen_container(found), expected)
        await self._order(found["Id"], "restart", grace_s)
        return (await self.look()).incarnation

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Stop the container; its restart policy does not start it again after that."""
        found = await self._inspect()
        check_order(self._who, seen_container(found), expected)
        await self._order(found["Id"], "stop", grace_s)
        if (await self.look()).running:
            raise LaunchError(f"{self._who} still runs although Docker stopped it")

    async def log(self, max_bytes: int) -> str:
        """Return the end of the container's output since it was last started."""
        found = await self._inspect()
        if seen_container(found).incarnation is None or max_bytes <= 0:
            return ""
        # For a log driver that cannot be read (such as syslog), Docker answers 500: there is no log.
        since = found["State"]["StartedAt"]
        path = f"/containers/{found['Id']}/logs"
        query = f"?stdout=1&stderr=1&tail={_LOG_LINES}&since={unix_seconds(since)}"
        text = Output(framed=not found["Config"].get("Tty"), max_bytes=max_bytes)
        async with self._talk("GET", path + query, _CALL_S) as reply:
            if reply.status_code == httpx2.codes.OK:
                async for chunk in reply.aiter_bytes():
                    text.feed(chunk)
        return text.end.decode(errors="ignore")

    async def close(self) -> None:
        """Close the connections to the daemon."""
        await self._http.aclose()

    # --- the API ----------------------------------------------------------------------------------

    async def _inspect(self) -> dict[str, Any]:
        path = f"/containers/{quote(self._name, safe='')}/json"
        async with self._talk("GET", path, _CALL_S) as reply:
            if reply.status_code == httpx2.codes.NOT_FOUND:
                raise LaunchError(
                    f"there is no container {self._name}; `docker ps --all` lists all containers",
                    Obstacle.CANNOT_HELP,
                )
            await self._fail_unless(reply, httpx2.codes.OK)
            return _mapping(await _body(reply), self.socket)

    async def _was_stopped(self, found: dict[str, Any]) -> bool:
        """Return whether Docker was told to stop it since its start; the daemon keeps its last events."""
        if not has_started(found["State"]):
            return False
        filters = {"container": [found["Id"]], "event": ["kill", "stop"]}
        query = {
            "since": unix_seconds(found["State"]["StartedAt"]),
            "until": f"{time.time():.9f}",
            "filters": json.dumps(filters),
        }
        async with self._talk("GET", f"/events?{urlencode(query)}", _CALL_S) as reply:
            if reply.status_code != httpx2.codes.OK:
                return False
            lines = (await _body(reply)).splitlines()
        events = [_mapping(line, self.socket) for line in lines if line.strip()]
        return any(map(is_a_stop, events))

    async def _order(self, container: str, verb: str, grace_s: float) -> None:
        path = f"/containers/{quote(container, safe='')}/{verb}?t={math.ceil(grace_s)}"
        async with self._talk("POST", path, grace_s + _CALL_S) as reply:
            if reply.status_code == httpx2.codes.NOT_FOUND:
                raise Superseded(f"{self._who} was removed or recreated in the meantime")
            done = (httpx2.codes.NO_CONTENT, httpx2.codes.NOT_MODIFIED)  # 304: stopped already
            await self._fail_unless(reply, *done)

    async def _fail_unless(self, reply: httpx2.Response, *good: int) -> None:
        if reply.status_code in good:
            return
        try:
            said = str(_mapping(await _body(reply), self.socket).get("message", ""))
        except LaunchError:
            said = ""
        if reply.status_code == httpx2.codes.BAD_REQUEST:
            self._prefix = ""  # the daemon may be another version by now: ask again
        raise LaunchError(
            f"Docker refused ({reply.status_code}) the request for {self._who}:"
            f" {said[:300] or 'no reason given'}",
            obstacle(said),
        )

    @asynccontextmanager
    async def _talk(
        self, method: str, path: str, timeout_s: float
    ) -> AsyncIterator[httpx2.Response]:
        try:
            async with InTime(timeout_s):
                if not self._prefix:
                    self._prefix = await self._negotiate()
                async with self._http.stream(method, self._prefix + path) as reply:
                    yield reply
        except TimeoutError as error:
            raise LaunchError(
                f"Docker did not answer {method} {path.partition('?')[0]} within {timeout_s:.0f} s"
            ) from error
        except httpx2.HTTPError as error:
            raise _unreachable(error, self.socket) from error

    async def _negotiate(self) -> str:
        reply = await self._http.get("/version")
        told = _mapping(reply.content, self.socket)
        newest, oldest = _version(told.get("ApiVersion")), _version(told.get("MinAPIVersion"))
        if newest is None:
            raise LaunchError(f"what listens on {self.socket} is not a Docker daemon")
        major, minor = max(min(_VERSION, newest), oldest or (1, 0))
        return f"/v{major}.{minor}"


async def _body(reply: httpx2.Response) -> bytes:
    body = bytearray()
    async for chunk in reply.aiter_bytes():
        body += chunk
        if len(body) > _ANSWER_BYTES:
            break  # Docker never says so much about one container; the part will not parse
    return bytes(body)


def _mapping(body: bytes, socket: Path) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LaunchError(f"what listens on {socket} does not respond like a Docker daemon")
    return found


def _version(text: object) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


def _socket_of(variables: Mapping[str, str]) -> Path:
    host = variables.get("DOCKER_HOST", "")
    return Path(host.removeprefix("unix://")) if host.startswith("unix://") else SOCKET


def _unreachable(error: httpx2.HTTPError, socket: Path) -> LaunchError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    match cause:
        case FileNotFoundError():
            return LaunchError(
                f"there is no Docker socket at {socket}; is Docker installed? In a container,"
                " mount the socket. For another path, set DOCKER_HOST=unix:///path"
            )
        case PermissionError():
            return LaunchError(
                f"this user may not use {socket}; add the user to the file's group (`docker`)."
                " That group has the power of root",
                Obstacle.CANNOT_HELP,
            )
        case ConnectionRefusedError():
            return LaunchError(
                f"nothing listens on {socket}; start Docker with `systemctl start docker`"
            )
        case _:
            return LaunchError(f"Docker did not answer on {socket}: {type(error).__name__}")
