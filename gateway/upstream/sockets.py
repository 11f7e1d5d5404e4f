"""What the system knows of a backend's connection, and the event loop has not seen yet."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import socket
import sys
import termios
from array import array
from typing import Any, Final

from gateway.core.endings import Ending
from gateway.core.errors import ConnectFailed, NothingFree

_LINUX: Final = sys.platform == "linux"
_count: Final = array("i", [0])  # one for all calls: twice as fast as a new one for each
_TIMED_OUT: Final = b"HTTP/1.1 408"
# connect(2) and socket(2): what this machine lacks, whoever is at the other end.
_NOTHING_FREE: Final = frozenset(
    {errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
)
_INET: Final = (socket.AF_INET, socket.AF_INET6)


class Socket:
    """The socket below a transport. Only looks; it reads and writes nothing."""

    __slots__ = ("_fd", "_is_plain", "_is_tcp", "_transport", "poll")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        raw: Any = transport.get_extra_info("socket")
        self._fd: int = raw.fileno()
        self._is_plain = transport.get_extra_info("ssl_object") is None
        self._is_tcp = raw.family in _INET
        readable = select.poll()
        readable.register(self._fd, select.POLLIN)
        self.poll = readable.poll  # `poll(0)` is empty while nothing can be read, nor the end

    def peek(self) -> bytes:
        """Return the first bytes to read, and leave them there; none below TLS, which has its own."""
        if not self._is_plain:
            return b""
        try:
            with socket.fromfd(self._fd, socket.AF_INET, socket.SOCK_STREAM) as copy:
                return copy.recv(len(_TIMED_OUT), socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # reset, taken by the loop meanwhile, or no descriptor is free
            return b""

    def has_acknowledged_any_of(self, sent_bytes: int) -> bool:
        """Whether the other side's system may have any of the bytes that were sent last; 0.4 us.

        Every TCP segment acknowledges what its sender has received until then. So what arrived while
        nothing was acknowledged was sent before. Other sockets and systems tell nothing: True.
        """
        if not (_LINUX and self._is_tcp):
            return True
        fcntl.ioctl(self._fd, termios.TIOCOUTQ, _count)
        return _count[0] + self._transport.get_write_buffer_size() < sent_bytes


class ConnectTooSlow(ConnectFailed):
    """No connection could be made in time: its server may be busy. No more is wrong than with a late answer."""

    ending = Ending.CONNECT_TIMEOUT


def says_timed_out(data: bytes) -> bool:
    """Whether a server only says why it closes an idle connection (RFC 9110 section 15.5.9)."""
    return data.startswith(_TIMED_OUT)


def connect_failed(error: OSError | UnicodeError) -> ConnectFailed:
    """Return the error for a connection that could not be made: `NothingFree` if this machine lacks something."""
    if isinstance(error, OSError) and error.errno in _NOTHING_FREE:
        return NothingFree(
            f"the gateway could make no connection to the backend: {os.strerror(error.errno)}"
        )
    if isinstance(error, TimeoutError):
        return ConnectTooSlow("no connection to the backend could be made in time")
    return ConnectFailed("no connection to the backend could be made")
