"""Subscribe to the KV events of one engine, and feed its follower.

One task owns the sockets: the subscription, the library's monitor of its connection, and a socket for each
replay. A gap in the messages leads to a replay. If the engine offers none, the follower starts over with
the next message.
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
# Messages that wait here. Beyond that the engine's own queue holds 100,000 (`hwm`), and drops the rest.
_MOST_WAITING: Final = 256
_MOST_REPLAYED: Final = 1_000  # messages; an engine queues as many of a replay, and drops the rest
_TURN_S: Final = 0.005  # longest time without giving others their turn; a large message takes 2 ms
_LATE_S: Final = 1.0  # when messages have waited for so long, the mirror is out of date
# vLLM checks for replay requests at least every 0.1 s, unless its engine keeps the interpreter busy.
_SILENT_S: Final = 3.0
_PAUSE_S: Final = 0.5  # a replay comes without pauses: after such a silence its rest was dropped
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

    async def run(self) -> None:
        """Follow the engine until cancelled, through all its restarts.

        Cancel: the sockets are closed, and the follower is out of date.
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
        connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        word = "connected" if connected else "disconnected"
        log.debug(
            "kv events %s: %s", word, self.source.events, extra={"event": f"kv_events_{word}"}
        )
        if connected and not await self._catch_up():
            self._follower.forget()

    async def _drain(self, socket: _Socket) -> None:
        """Follow all messages that are there, in short turns of the loop."""
        follower, clock = self._follower, self._clock
        began = turn_began = clock.now()
        with suppress(zmq.Again):
            while True:
                frames = socket.blocking.recv_multipart(zmq.NOBLOCK)
                try:
                    await self._follow(*published(frames))
                except Garbled:
                    follower.garbled += 1
                now = clock.now()
                if now - turn_began > _TURN_S:
                    follower.is_late = now - began > _LATE_S
                    await asyncio.sleep(0)
                    turn_began = clock.now()
        follower.is_late = False

    async def _follow(self, number: int, payload: bytes) -> None:
        follower = self._follower
        if follower.published(number, payload):
            return
        if not await self._catch_up() or not follower.published(number, payload):
            follower.begin_with(number, payload)

    async def _catch_up(self) -> bool:
        """Follow a replay of what is missing; return False if the engine offers none."""
        if self.source.replay is None:
            return False
        with suppress(TimeoutError, Garbled):
            for _ in range(_MOST_REPLAYS):
                if await self._replay(self.source.replay):
                    return True
        return False

    async def _replay(self, address: str) -> bool:
        """Request a replay; return False if it must be requested again.

        Raises:
            TimeoutError: the engine does not answer.
            Garbled: it answers something else.
        """
        follower, answered = self._follower, False
        with closing(_Socket(self._context, zmq.DEALER, _MOST_REPLAYED)) as socket:
            socket.asynchronous.connect(address)
            await socket.asynchronous.send_multipart(replay_from(follower.replay_begins()))
            while True:
                try:
                    async with asyncio.timeout(_PAUSE_S if answered else _SILENT_S):
                        frames = await socket.asynchronous.recv_multipart()
                except TimeoutError:
                    if not answered:
                        raise
                    return False
                answered, message = True, replayed(frames)
                if message is None:
                    return follower.replay_ended()
                if not follower.replayed(*message):
                    return False
                await asyncio.sleep(0)


class _Socket:
    """A socket with two sides: one to wait for messages, one to read those that are there."""

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
