"""One systemd unit, over the system bus: its properties, its jobs, and the messages for refusals.

systemd signals each change of a property, so properties are read again only then, and every 10 s
in case a signal was lost. https://www.freedesktop.org/software/systemd/man/org.freedesktop.systemd1.html
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from gateway.core.aio import InTime
from gateway.launch.launcher import LaunchError, Obstacle

_CALL_S: Final = 10.0  # for one answer, which comes within milliseconds
_FRESH_S: Final = 10.0
_MATCHES: Final = (  # signals that we subscribe to: changes of the unit, its load and unload, ends of its jobs
    "type='signal',sender='{systemd}',interface='org.freedesktop.DBus.Properties',path='{path}'",
    "type='signal',sender='{systemd}',interface='{systemd}.Manager',member='UnitNew',arg0='{unit}'",
    "type='signal',sender='{systemd}',interface='{systemd}.Manager',member='UnitRemoved',arg0='{unit}'",
    "type='signal',sender='{systemd}',interface='{systemd}.Manager',member='JobRemoved',arg2='{unit}'",
)
_SYSTEMD: Final = "org.freedesktop.systemd1"
_MANAGER: Final = (_SYSTEMD, "/org/freedesktop/systemd1", f"{_SYSTEMD}.Manager")
_BUS: Final = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")

# Names of errors, of the bus and of systemd.
_REFUSED: Final = frozenset(
    f"org.freedesktop.DBus.Error.{name}"
    for name in ("AccessDenied", "AuthFailed", "InteractiveAuthorizationRequired")
)
_NO_UNIT: Final = f"{_SYSTEMD}.NoSuchUnit"
_BAD_UNIT: Final = frozenset(
    f"{_SYSTEMD}.{name}" for name in ("UnitMasked", "BadUnitSetting", "LoadFailed")
)


class SystemdUnit:
    """The unit, with a connection of its own: the first call opens it, and the next one after a loss."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = asyncio.Lock()
        self._bus: Any = None
        self._library: Any = None
        self._path = ""
        self._shown: Mapping[str, Any] = {}
        self._read_at = 0.0  # of the loop's clock
        self._stale = True
        self._news = asyncio.Event()
        self._ended_jobs: deque[tuple[str, str]] = deque(maxlen=16)  # path, result

    async def properties(self, *, max_age_s: float = _FRESH_S) -> Mapping[str, Any]:
        """Return what systemd says of the unit and its service.

        Raises:
            LaunchError: there is no such unit, it cannot be used, or systemd does not answer.
        """
        async with self._talking():
            now = asyncio.get_running_loop().time()
            if self._stale or now - self._read_at > max_age_s:
                # A change during the read makes it stale again.
                self._stale, self._read_at = False, now
                try:
                    self._shown = await self._read()
                except BaseException:
                    self._stale = True
                    raise
            return self._shown

    async def reset_failed(self) -> None:
        """Reset the unit's failures, so that its start limit does not refuse the next start."""
        async with self._talking():
            await self._call(_MANAGER, "ResetFailedUnit", "s", self.name)

    async def begin(self, verb: str) -> str:
        """Queue a job, "Restart" or "Stop", and return its path."""
        async with self._talking():
            (job,) = await self._call(_MANAGER, f"{verb}Unit", "ss", self.name, "replace")
        return str(job)

    def result_of(self, job: str) -> str:
        """Return how a job ended (`done`, `failed`, `canceled`, ...); empty while it goes on."""
        return next((result for path, result in self._ended_jobs if path == job), "")

    async def news(self, patience_s: float) -> None:
        """Wait until systemd signals anything about the unit, at most `patience_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        self._news.clear()

    async def close(self) -> None:
        """Close the connection."""
        if self._bus is not None:
            bus, self._bus = self._bus, None
            bus.disconnect()
            with contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(1):
                    await bus.wait_for_disconnect()

    # --- the bus ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _talking(self) -> AsyncIterator[None]:
        """Give the connection to one caller at a time, and turn its errors into messages for people."""
        async with self._lock:
            try:
                async with InTime(_CALL_S):
                    if self._bus is None or not self._bus.connected:
                        await self._open()
                    yield
            except TimeoutError as error:
                raise LaunchError(
                    f"systemd did not answer for {self.name} within {_CALL_S:.0f} s"
                ) from error
            except (OSError, EOFError) as error:
                raise LaunchError(_no_bus(error)) from error

    async def _open(self) -> None:
        self._library = library = importlib.import_module("dbus_fast")
        self._stale = True
        self._ended_jobs.clear()
        bus = importlib.import_module("dbus_fast.aio").MessageBus(bus_type=library.BusType.SYSTEM)
        try:
            self._bus = await bus.connect()
        except library.AuthError as error:
            raise LaunchError(_no_bus(error)) from error
        try:
            await self._follow()
        except BaseException:
            self._bus = None  # half set up it is of no use: the next call begins anew
            bus.disconnect()
            raise

    async def _follow(self) -> None:
        """Subscribe to the signals of the unit."""
        self._bus.add_message_handler(self._heard)
        await self._call(_MANAGER, "Subscribe")
        (self._path,) = await self._call(_MANAGER, "LoadUnit", "s", self.name)
        for match in _MATCHES:
            rule = match.format(systemd=_SYSTEMD, path=self._path, unit=self.name)
            await self._call(_BUS, "AddMatch", "s", rule)
        # systemd unloads a unit that ended well and that nothing refers to, and forgets how it ended.
        with contextlib.suppress(LaunchError):  # it takes a permission, which old polkit rules lack
            await self._call(_MANAGER, "RefUnit", "s", self.name)

    async def _read(self) -> Mapping[str, Any]:
        where = (_SYSTEMD, self._path, "org.freedesktop.DBus.Properties")
        shown: dict[str, Any] = {}
        for kind in ("Unit", "Service"):
            (found,) = await self._call(where, "GetAll", "s", f"{_SYSTEMD}.{kind}")
            shown |= {name: variant.value for name, variant in found.items()}
        match shown.get("LoadState"):
            case "not-found":
                raise _no_unit(self.name)
            case "loaded":
                return shown
            case state:
                said = (
                    f"systemd cannot use {self.name}: {state}; see `systemctl status {self.name}`"
                )
                raise LaunchError(said, Obstacle.CANNOT_HELP)

    async def _call(
        self, where: tuple[str, str, str], member: str, signature: str = "", *body: Any
    ) -> list[Any]:
        destination, path, interface = where
        message = self._library.Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=list(body),
        )
        reply = await self._bus.call(message)
        if reply.message_type is self._library.MessageType.ERROR:
            said = " ".join(map(str, reply.body))
            raise self._refusal(member, reply.error_name, " ".join(said.split())[:300])
        return list(reply.body)

    def _heard(self, message: Any) -> None:
        if message.message_type is not self._library.MessageType.SIGNAL:
            return
        if message.member == "JobRemoved":
            _, job, _, result = message.body
            self._ended_jobs.append((job, result))
        self._stale = True
        self._news.set()

    def _refusal(self, member: str, error: str, said: str) -> LaunchError:
        if error in _REFUSED:
            return LaunchError(
                f"systemd does not let this user restart {self.name} ({said}). Copy"
                " deploy/systemd/49-vllm-gateway.rules to /etc/polkit-1/rules.d/, which allows the"
                " user vllm-gateway to restart the units vllm@*",
                Obstacle.CANNOT_HELP,
            )
        if error == _NO_UNIT:
            return _no_unit(self.name)
        hopeless = error in _BAD_UNIT
        return LaunchError(
            f"systemd refused {member} for {self.name}: {said or error}",
            Obstacle.CANNOT_HELP if hopeless else Obstacle.TRANSIENT,
        )


def _no_unit(unit: str) -> LaunchError:
    return LaunchError(
        f"systemd has no unit {unit}; `systemctl list-units 'vllm*' --all` lists the existing ones",
        Obstacle.CANNOT_HELP,
    )


def _no_bus(error: Exception) -> str:
    return (
        f"cannot reach systemd over the system bus ({error or type(error).__name__}). It takes"
        " systemd and dbus; in a container, use `restart: {docker: ...}` or `restart: {command: [...]}`"
    )
