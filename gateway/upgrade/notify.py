"""Tell systemd about this process (sd_notify(3)); nothing happens unless it asked for that."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

SOCKET: Final = "NOTIFY_SOCKET"


def notify(**fields: object) -> None:
    """Send fields such as `READY=1` in one datagram, without waiting for a manager that does not take it."""
    address = os.environ.get(SOCKET)
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    text = "\n".join(f"{name}={value}" for name, value in fields.items())
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager,
    ):
        manager.sendto(text.encode(), address)
