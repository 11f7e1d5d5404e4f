"""Listeners that somebody else opened: systemd, or the gateway whose place this process takes.

systemd passes them as sd_listen_fds(3) says: LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES. The names are `public`
and `admin` (`FileDescriptorName=` of the socket unit). A single one with another name is the public one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Final

from gateway.config.models import Config
from gateway.config.units import Listen
from gateway.core.errors import ConfigError
from gateway.ingress.listener import Listeners, bind, prepare

PUBLIC: Final = "public"
ADMIN: Final = "admin"
_FIRST: Final = 3  # SD_LISTEN_FDS_START
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


@dataclass(frozen=True, slots=True)
class Given:
    """Listeners that were open before this process, by name."""

    sockets: Mapping[str, socket.socket] = field(default_factory=dict)
    kept: bool = False  # systemd has them open too, so they outlast this process


def from_systemd(environ: MutableMapping[str, str]) -> Given:
    """Return the listeners that systemd passed to this very process; what told of them is removed.

    Raises:
        ConfigError: they are not what a gateway listens on.
    """
    passed = {name: environ.pop(name, "") for name in _VARIABLES}
    if passed["LISTEN_PID"] != str(os.getpid()) or not passed["LISTEN_FDS"].isdecimal():
        return Given()
    count = int(passed["LISTEN_FDS"])
    names = passed["LISTEN_FDNAMES"].split(":") if passed["LISTEN_FDNAMES"] else [""] * count
    names += [""] * (count - len(names))
    if count == 1 and names[0] not in (PUBLIC, ADMIN):
        names = [PUBLIC]
    sockets: dict[str, socket.socket] = {}
    for number, name in enumerate(names[:count], _FIRST):
        os.set_inheritable(number, False)
        given = socket.socket(fileno=number)
        if problem := _unfit(given, name, sockets):
            for each in (given, *sockets.values()):
                each.close()
            raise ConfigError([problem])
        sockets[name] = given
    return Given(sockets, kept=bool(sockets))


def from_parent(public: int, admin: int, *, kept: bool) -> Given:
    """Return the listeners that the parent of several workers passed, by their file descriptors."""
    for number in (public, admin):
        os.set_inheritable(number, False)
    sockets = {PUBLIC: socket.socket(fileno=public), ADMIN: socket.socket(fileno=admin)}
    return Given(sockets, kept)


def listeners(config: Config, given: Given) -> Listeners:
    """Return the two listeners: those that were given, where they are where the settings say; else new ones.

    Raises:
        ConfigError: systemd listens somewhere else than the settings say.
        OSError: as `bind`; nothing that was opened here stays open.
    """
    with contextlib.ExitStack() as opened:
        public = _listener(PUBLIC, "listen", config.listen, given, opened)
        admin = _listener(ADMIN, "admin.listen", config.admin.listen, given, opened)
        opened.pop_all()
        return Listeners(public, admin, given.kept)


def _listener(
    name: str, setting: str, where: Listen, given: Given, opened: contextlib.ExitStack
) -> socket.socket:
    found = given.sockets.get(name)
    if found is None:
        return opened.enter_context(bind(where))
    if is_at(found, where):
        prepare(found)
        return found
    if given.kept:
        raise ConfigError(
            [
                f"systemd passed a socket that listens on {place(found)}, but `{setting}` says {where}."
                " Make `ListenStream=` of the socket unit and the setting agree."
            ]
        )
    found.close()  # the settings changed since it was opened
    return opened.enter_context(bind(where))


def is_at(listener: socket.socket, where: Listen) -> bool:
    """Whether a listener is where the settings say. A port of 0 is any port; all addresses are one."""
    name = listener.getsockname()
    if where.unix is not None or not isinstance(name, tuple):
        return where.unix is not None and name == str(where.unix)
    host, port = str(name[0]), int(name[1])
    if where.port not in (0, port):
        return False
    return host in _addresses(where.host) or {host, where.host} <= _EVERYWHERE


def place(listener: socket.socket) -> str:
    """Return where a listener is, as the settings would say it."""
    name = listener.getsockname()
    if isinstance(name, tuple):
        return str(Listen(host=str(name[0]), port=int(name[1])))
    return f"unix:{name}"


def _addresses(host: str) -> frozenset[str]:
    try:
        return frozenset({str(ipaddress.ip_address(host))})
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset(str(each[4][0]) for each in found)


def _unfit(given: socket.socket, name: str, others: Mapping[str, socket.socket]) -> str | None:
    """Return why the gateway cannot have this socket of systemd's; None where it can."""
    if name not in (PUBLIC, ADMIN):
        return (
            f"systemd passed a socket with the name {name or '(none)'}. The names are {PUBLIC} and"
            f" {ADMIN}: set `FileDescriptorName=` in its socket unit."
        )
    if name in others:
        return f"systemd passed two sockets with the name {name}; the gateway has one of each."
    listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if given.type != socket.SOCK_STREAM or not listens:
        return (
            f"systemd passed a socket with the name {name} that accepts no connections. Its socket unit"
            " needs `ListenStream=` and `Accept=no`."
        )
    return None
