"""An engine's publisher of KV events as vLLM's is: a PUB socket, and a ROUTER that replays."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio

from tests.kvengine import Engine

END = b"\xff" * 8


class Publisher:
    """Publishes what its engine does, unless it is told to lose it; answers replays while it lives."""

    def __init__(self, engine=None, *, port=0, replay_port=0, replays=True, most=10_000):
        self.engine = engine or Engine()
        self._context = context = zmq.asyncio.Context()
        self.replays = 0
        self.is_silent = False
        self._most = most  # of a replay that fit the queue: what is more is dropped, the end too
        self._publish, self.port = bound(context, zmq.PUB, port)
        self._replay, self.replay_port = bound(context, zmq.ROUTER, replay_port)
        self._task = asyncio.ensure_future(self._answer()) if replays else None  # noqa: TID251

    async def send(self, messages, *, lost=False):
        for number, payload in messages:
            if not lost:
                await self._publish.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def send_raw(self, *frames):
        await self._publish.send_multipart(frames)

    async def _answer(self):
        while True:
            client, _, number = await self._replay.recv_multipart()
            self.replays += 1
            if self.is_silent:
                continue
            kept = self.engine.replay(int.from_bytes(number, "big"))
            for at, payload in kept[: self._most]:
                await self._replay.send_multipart(
                    [client, b"", b"", at.to_bytes(8, "big"), payload]
                )
            if len(kept) <= self._most:
                await self._replay.send_multipart([client, b"", b"", END, b""])

    async def close(self):
        """End as the process of an engine does: the ports are free then."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)


def bound(context, kind, port):
    socket = context.socket(kind)
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    return socket, int(socket.get(zmq.LAST_ENDPOINT).decode().rpartition(":")[2])
