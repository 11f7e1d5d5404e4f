"""Hints that something in the shared store changed: a channel of Redis, on a connection of its own.

A hint may be lost, and nothing depends on one: whoever waits for it looks anyhow, only later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from redis import exceptions as failures

from gateway.core.aio import periodic
from gateway.store.address import client_of
from gateway.store.link import CONNECT_S, LOST

_QUIET_S: Final = 30.0  # that a connection may be silent
_AGAIN_S: Final = 2.0
_NOT_ALLOWED_S: Final = 300.0  # its user may not subscribe


async def follow_hints(url: str, channel: str, wake: Callable[[], None]) -> None:
    """Call `wake` after each hint, and each time that some may have been missed, until cancelled."""
    again_s = _AGAIN_S

    async def turn() -> None:
        nonlocal again_s
        try:
            await _listen(url, channel, wake)
        except failures.NoPermissionError:
            again_s = _NOT_ALLOWED_S
        except LOST:
            again_s = _AGAIN_S  # `Link` says why, as soon as anything is asked

    await periodic(turn, every_s=lambda: again_s, name="hints")


async def _listen(url: str, channel: str, wake: Callable[[], None]) -> None:
    client = client_of(url, connect_s=CONNECT_S, reply_s=_QUIET_S)
    try:
        async with client.pubsub() as hub:
            await hub.subscribe(channel)
            while True:
                message = await hub.get_message(timeout=_QUIET_S)
                if message is not None:  # the first one says that we listen from now on
                    wake()
    finally:
        with contextlib.suppress(failures.RedisError, OSError):
            await client.aclose()
