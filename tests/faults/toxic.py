"""A TCP proxy that spoils what passes: delays, bandwidth, slices, limits, endings, wrong bytes.

    async with toxic(sim.url) as proxy:
        proxy.down = Toxic(latency_s=0.2, jitter_s=0.2)                 what the server says
        proxy.up = Toxic(limit_bytes=100, ending=Ending.RESET)         what the client says
        proxy.url                                                       connect here

A toxic may be changed at any time: each piece passes by the toxic of the moment. Bytes are counted
from the beginning of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() then sends a reset
_READ_BYTES = 65_536
_PIECES = 64  # that wait in one direction at most


class Ending(enum.Enum):
    """What happens when `limit_bytes` have passed."""

    CLOSE = "close"  # both directions, in order (FIN)
    HALF_CLOSE = "half_close"  # this direction only
    RESET = "reset"
    SILENCE = "silence"  # nothing more passes, the connection stays open


@dataclass(frozen=True)
class Toxic:
    """What is done to the bytes of one direction. By default nothing."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # more latency, at most this
    bytes_per_s: float | None = None
    slice_bytes: int | None = None  # pieces of this size, each sent by itself
    limit_bytes: int | None = None  # then `ending`
    ending: Ending = Ending.CLOSE
    corrupt_at: int | None = None  # all bits of this byte are turned
    close_delay_s: float = 0.0  # from the sender's end until the receiver learns of it


HARMLESS = Toxic()
BLACKHOLE = Toxic(limit_bytes=0, ending=Ending.SILENCE)


class ToxicProxy:
    """One listener in front of one server. Made by `toxic`."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.up = HARMLESS
        self.down = HARMLESS
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._unheard: list[socket.socket] = []
        self._taken: set[socket.socket] = set()  # whose task has not begun
        self._target = host, port
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def open(self) -> int:
        """How many connections are open."""
        return len(self._tasks)

    def hear(self) -> None:
        """Take connections."""
        for each in self._unheard:
            each.close()
        self._unheard.clear()
        self._listener.listen(100)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def deafen(self) -> None:
        """Take no more connections, and refuse none: the backlog is full, what comes is not answered."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.listen(0)
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(self._listener.getsockname())
            self._unheard.append(client)

    def reset(self) -> None:
        """End all connections that are open."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End all connections, and the listener."""
        asyncio.get_running_loop().remove_reader(self._listener)
        for each in (self._listener, *self._unheard):
            each.close()
        self.reset()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for each in self._taken:
            each.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._taken.add(sock)
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._serve(sock), name="toxic")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        self._taken.discard(sock)
        reader, writer = await asyncio.open_connection(sock=sock)
        upstream: asyncio.StreamWriter | None = None
        try:
            answers, upstream = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                up = _Pipe(self, "up", reader, upstream, writer)
                down = _Pipe(self, "down", answers, writer, upstream)
                for each in (up, down):
                    group.create_task(each.fetch(), name="toxic")
                    group.create_task(each.deliver(), name="toxic")
        except (OSError, ExceptionGroup):
            pass  # one side is gone, and so is the other
        finally:
            for each in (writer, upstream):
                if each is not None:
                    each.transport.abort()

    def delay_s(self, toxic: Toxic) -> float:
        """Return how long a piece that comes now is held back."""
        return toxic.latency_s + self._chance.random() * toxic.jitter_s


class _Pipe:
    """One direction of one connection: `fetch` takes pieces in, `deliver` lets them out when due."""

    def __init__(
        self,
        proxy: ToxicProxy,
        direction: str,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._direction = direction
        self._source = source
        self._target = target
        self._back = back  # the writer of the other direction
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES)
        self._passed = 0

    @property
    def _toxic(self) -> Toxic:
        toxic: Toxic = getattr(self._proxy, self._direction)
        return toxic

    async def fetch(self) -> None:
        """Take in what the sender says, and its end as an empty piece."""
        while True:
            try:
                data = await self._source.read(_READ_BYTES)
            except ConnectionError:
                _reset(self._target)
                raise
            toxic = self._toxic
            wait_s = self._proxy.delay_s(toxic) if data else toxic.close_delay_s
            await self._queue.put((time.monotonic() + wait_s, data))
            if not data:
                return

    async def deliver(self) -> None:
        """Let each piece out when it is due; end as the toxic says or as the sender did."""
        while True:
            due, data = await self._queue.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not data:
                self._target.write_eof()
                return
            for piece in self._pieces(data):
                self._target.write(self._corrupted(piece))
                await self._target.drain()
                self._passed += len(piece)
                await self._pause(len(piece))
            if self._spent():
                await self._end()
                return

    def _spent(self) -> bool:
        limit = self._toxic.limit_bytes
        return limit is not None and self._passed >= limit

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        while data and not self._spent():
            toxic = self._toxic
            size = len(data) if toxic.slice_bytes is None else toxic.slice_bytes
            if toxic.limit_bytes is not None:
                size = min(size, toxic.limit_bytes - self._passed)
            yield data[:size]
            data = data[size:]

    async def _pause(self, size: int) -> None:
        toxic = self._toxic
        if toxic.bytes_per_s is not None:
            await asyncio.sleep(size / toxic.bytes_per_s)
        elif toxic.slice_bytes is not None:
            await asyncio.sleep(0)  # so that the receiver reads each by itself

    def _corrupted(self, piece: bytes) -> bytes:
        at = self._toxic.corrupt_at
        if at is None or not self._passed <= at < self._passed + len(piece):
            return piece
        wrong = bytearray(piece)
        wrong[at - self._passed] ^= 0xFF
        return bytes(wrong)

    async def _end(self) -> None:
        match self._toxic.ending:
            case Ending.HALF_CLOSE:
                self._target.write_eof()
            case Ending.CLOSE:
                self._target.close()
                self._back.close()
            case Ending.RESET:
                _reset(self._target)
                _reset(self._back)
            case Ending.SILENCE:
                while True:  # what comes is dropped; the sender may go on for ever
                    await self._queue.get()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()


@contextlib.asynccontextmanager
async def toxic(url: str, *, seed: int = 1, **directions: Toxic) -> AsyncIterator[ToxicProxy]:
    """Run a proxy on loopback in front of `http://host:port`; `up` and `down` may be given at once."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    proxy = ToxicProxy(host, int(port), seed)
    for name, value in directions.items():
        setattr(proxy, name, value)
    proxy.hear()
    try:
        yield proxy
    finally:
        await proxy.close()
