"""Read the KV events of one engine into its follower.

One task owns the sockets: a subscription, what the library tells of its connection, and for a replay
a socket of its own. A message that does not follow the last one leads to a replay; where there is
none to be had, the engine is followed anew from there.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing, suppress
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.core.aio import Clock
from gateway.prefix.follower import Follower
from gateway.wire.kvevents import Garbled, published, replay_from, replayed
from gateway.wire.kvsources import Source

log = logging.getLogger("gateway.watch")

# A step of 16,384 tokens is a message of 0.1 MB; a prompt of a million tokens that another engine
# computed comes in one of 6 MB.
_MOST_MESSAGE_BYTES: Final = 8 << 20
# What waits here; then the engine's own queue holds 100,000 (`hwm`), and drops what is more.
_MOST_WAITING: Final = 256
_MOST_REPLAYED: Final = 1_000  # an engine holds as many, and drops what is more of a replay
_TURN: Final = 32  # messages between two looks of others at the loop
_LATE_S: Final = 1.0  # so long behind, and what the mirror shows is old
# vLLM looks for a question at least every 0.1 s, unless its engine keeps the interpreter busy.
_SILENT_S: Final = 3.0
_MOST_REPLAYS: Final = 32  # in a row; each brings a thousand messages at least
_HEARTBEAT_MS: Final = 2_000
_DEAD_MS: Final = 6_000
_RECONNECT_MS: Final = 100
_MOST_RECONNECT_MS: Final = 5_000


class Subscriber:
    """Follows one engine over ZMQ; run it as a task."""

    def __init__(
        self, context: zmq.asyncio.Context, source: Source, follower: Follower, clock: Clock
    ) -> None:
        self.source = source
        self._context = context
        self._follower = follower
        self._clock = clock
        self._drained_at = 0.0

    async def run(self) -> None:
        """Follow the engine until cancelled, through all its ends and starts.

        Cancel: the sockets are closed, and the follower knows nothing any more.
        """
        follower = self._follower
        with closing(_Socket(self._context, zmq.SUB, _MOST_WAITING)) as socket:
            socket.asynchronous.subscribe(b"")
            monitor = socket.asynchronous.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            poller = zmq.asyncio.Poller()
            poller.register(socket.asynchronous, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            socket.asynchronous.connect(self.source.events)
            try:
                while True:
                    ready = dict(await poller.poll())
                    if monitor in ready:
                        await self._connection(await monitor.recv_multipart())
                    if socket.asynchronous in ready:
                        await self._drain(socket)
            finally:
                follower.disconnected()
                socket.asynchronous.disable_monitor()

    async def _connection(self, frames: list[bytes]) -> None:
        """Note that the connection came or went."""
        self._follower.disconnected()
        came = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        log.debug("kv events %s: %s", "connected" if came else "disconnected", self.source.events)
        if came and not await self._catch_up():
            self._follower.forget()

    async def _drain(self, socket: _Socket) -> None:
        """Follow all messages that are there, in turns."""
        follower, count = self._follower, 0
        self._drained_at = self._clock.now()
        with suppress(zmq.Again):
            while True:
                frames = socket.blocking.recv_multipart(zmq.NOBLOCK)
                count += 1
                try:
                    await self._follow(*published(frames))
                except Garbled:
                    follower.garbled += 1
                if count % _TURN == 0:
                    follower.is_late = self._clock.now() - self._drained_at > _LATE_S
                    await asyncio.sleep(0)
        follower.is_late = False

    async def _follow(self, number: int, payload: bytes) -> None:
        follower = self._follower
        if follower.published(number, payload):
            return
        if not await self._catch_up() or not follower.published(number, payload):
            follower.begin_with(number, payload)

    async def _catch_up(self) -> bool:
        """Follow what the engine repeats; False when it cannot be had."""
        if self.source.replay is None:
            return False
        with suppress(TimeoutError, Garbled):
            for _ in range(_MOST_REPLAYS):
                if await self._replay(self.source.replay):
                    return True
        return False

    async def _replay(self, address: str) -> bool:
        """Ask for what is missing; False when it must be asked for again.

        Raises:
            TimeoutError: the engine is silent.
            Garbled: it answers something else.
        """
        follower = self._follower
        with closing(_Socket(self._context, zmq.DEALER, _MOST_REPLAYED)) as socket:
            socket.asynchronous.connect(address)
            await socket.asynchronous.send_multipart(replay_from(follower.replay_begins()))
            while True:
                async with asyncio.timeout(_SILENT_S):
                    frames = await socket.asynchronous.recv_multipart()
                message = replayed(frames)
                if message is None:
                    return follower.replay_ended()
                if not follower.replayed(*message):
                    return False
                await asyncio.sleep(0)


class _Socket:
    """A socket that is waited for, and read without waiting when something is there."""

    def __init__(self, context: zmq.asyncio.Context, kind: int, most_waiting: int) -> None:
        self.asynchronous: zmq.asyncio.Socket = context.socket(kind)
        options: dict[int, Any] = {
            zmq.LINGER: 0,
            zmq.RCVHWM: most_waiting,
            zmq.MAXMSGSIZE: _MOST_MESSAGE_BYTES,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _DEAD_MS,
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _MOST_RECONNECT_MS,
            zmq.IPV6: 1,
        }
        for option, value in options.items():
            self.asynchronous.setsockopt(option, value)
        self.blocking: zmq.Socket[bytes] = zmq.Socket.shadow(self.asynchronous.underlying)

    def close(self) -> None:
        """Close it; what waits to be sent is dropped."""
        self.asynchronous.close(linger=0)
