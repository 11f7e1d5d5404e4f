"""A system bus with systemd on it: D-Bus on a UNIX socket, units that keep state, jobs and signals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from dbus_fast import Message, MessageType, Variant
from dbus_fast.unpack import unpack_variants

SYSTEMD = "org.freedesktop.systemd1"
MANAGER = f"{SYSTEMD}.Manager"
LOADED: dict[str, Any] = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": b"\xaa" * 16,
    "ActiveExitTimestampMonotonic": 0,
    "InactiveExitTimestampMonotonic": 100,
    "Result": "success",
    "NRestarts": 0,
    "ExecMainCode": 0,
    "ExecMainStatus": 0,
    "ExecMainExitTimestampMonotonic": 0,
}
_TYPES = {
    "InvocationID": "ay",
    "NRestarts": "u",
    "ExecMainCode": "i",
    "ExecMainStatus": "i",
    "RuntimeMaxUSec": "t",
    "ExecMainStartTimestamp": "t",
}


class Systemd:
    """A bus that speaks to each connection as if it were alone on it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "bus"
        self.units: dict[str, dict[str, Any]] = {}
        self.refusals: dict[str, tuple[str, str]] = {}  # member to error name and text
        self.results: dict[str, str] = {}  # of the next jobs, where they do not do what they say
        self.calls: list[tuple[Any, ...]] = []
        self.hangs = False
        self.matches: list[str] = []
        self._clock_us = 1000
        self._jobs = 0
        self._links: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"unix:path={self.path}"

    def unit(self, name: str, **more: Any) -> None:
        """Make a unit, or say that it is so now; whoever subscribed is told."""
        self.units[name] = self.units.get(name, LOADED) | more
        changed = ["org.freedesktop.systemd1.Unit", {}, []]
        self._signal(
            _path(name), "org.freedesktop.DBus.Properties", "PropertiesChanged", "sa{sv}as", changed
        )

    def asked(self, member: str) -> list[tuple[Any, ...]]:
        return [body for name, *body in self.calls if name == member]

    def ends(self, name: str, *, how: int = 1, status: int = 0, by_job: bool = False) -> None:
        """Have a unit's process end; systemd stops a unit before its process ends, or after."""
        self._clock_us += 20
        exit_us = self._clock_us
        good = (how, status) in ((1, 0), (2, 15))
        self.unit(
            name,
            ActiveState="inactive" if good else "failed",
            SubState="dead" if good else "failed",
            Result="success" if good else ("exit-code" if how == 1 else "signal"),
            ExecMainCode=how,
            ExecMainStatus=status,
            ExecMainExitTimestampMonotonic=exit_us,
            ActiveExitTimestampMonotonic=exit_us + (-10 if by_job else 10),
        )

    def cut(self) -> None:
        """Close all connections, as a bus that is restarted does."""
        for link in self._links:
            link.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Systemd]:
        server = await asyncio.start_unix_server(self._serve, path=self.path)
        try:
            yield self
        finally:
            server.close()
            self.cut()

    # --- the protocol -------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            assert await reader.readexactly(1) == b"\0"
            while (line := await reader.readline()) != b"BEGIN\r\n":
                writer.write(b"OK 1234\r\n" if line.startswith(b"AUTH") else b"ERROR\r\n")
            while True:
                self._answer(await _message(reader), writer)
        self._links.discard(writer)
        writer.close()

    def _answer(self, asked: Message, writer: asyncio.StreamWriter) -> None:
        assert asked.message_type is MessageType.METHOD_CALL
        self.calls.append((asked.member, *asked.body))
        if self.hangs:
            return
        if asked.member in self.refusals:
            name, text = self.refusals[asked.member]
            writer.write(_bytes(Message.new_error(asked, name, text)))
            return
        signature, body = self._do(asked)
        writer.write(_bytes(Message.new_method_return(asked, signature, body)))

    def _do(self, asked: Message) -> tuple[str, list[Any]]:
        match asked.member, asked.body:
            case "Hello", _:
                return "s", [":1.7"]
            case "AddMatch", [rule]:
                self.matches.append(rule)
            case "LoadUnit", [name]:
                return "o", [_path(name)]
            case "GetAll", [kind]:
                name = next((each for each in self.units if _path(each) == asked.path), None)
                found = LOADED | {"LoadState": "not-found"} if name is None else self.units[name]
                return "a{sv}", [_variants(found) if kind.endswith("Unit") else {}]
            case "RestartUnit" | "StopUnit", [name, "replace"]:
                return "o", [self._job(asked.member, name)]
        return "", []

    def _job(self, member: str, name: str) -> str:
        self._jobs += 1
        job = f"/org/freedesktop/systemd1/job/{self._jobs}"
        asyncio.get_running_loop().call_later(0.02, self._finish, job, member, name)
        return job

    def _finish(self, job: str, member: str, name: str) -> None:
        result = self.results.get(member, "done")
        self._clock_us += 100
        if result == "done" and member == "RestartUnit":
            self.unit(
                name,
                ActiveState="active",
                SubState="running",
                InvocationID=uuid.uuid4().bytes,
                InactiveExitTimestampMonotonic=self._clock_us,
                ExecMainCode=0,
            )
        elif result == "done":
            self.ends(name, how=2, status=15, by_job=True)
        body = [self._jobs, job, name, result]
        self._signal("/org/freedesktop/systemd1", MANAGER, "JobRemoved", "uoss", body)

    def _signal(self, path: str, interface: str, member: str, signature: str, body: Any) -> None:
        told = Message.new_signal(path, interface, member, signature, body)
        told.sender = SYSTEMD
        for link in self._links:
            link.write(_bytes(told))


async def _message(reader: asyncio.StreamReader) -> Message:
    from dbus_fast._private.unmarshaller import Unmarshaller

    head = await reader.readexactly(16)
    body, fields = (int.from_bytes(head[at : at + 4], "little") for at in (4, 12))
    rest = await reader.readexactly((fields + 7) // 8 * 8 + body)
    found = Unmarshaller(io.BytesIO(head + rest)).unmarshall()
    assert found is not None
    found.body = unpack_variants(found.body)
    return found


def _bytes(message: Message) -> bytes:
    message.serial = message.serial or 1
    return bytes(message._marshall(False))


def _path(name: str) -> str:
    escaped = "".join(c if c.isalnum() else f"_{ord(c):02x}" for c in name)
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def _variants(found: dict[str, Any]) -> dict[str, Variant]:
    def kind(name: str) -> str:
        return "t" if name.endswith("Monotonic") else _TYPES.get(name, "s")

    return {name: Variant(kind(name), value) for name, value in found.items()}
