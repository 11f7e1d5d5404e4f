"""What tests of abuse share: a raw client, a raw backend that follows a script, and a ledger.

    async with gateway(FAST, extra="timeouts: {body: 300ms}") as world, ledger(world) as book:
        async with raw(world) as client:
            await client.send(head("POST", "/nope", chunked=True) + b"0\\r\\n")
            reply = await client.reply()

    async with scripted(lambda asked: page(b"{}")) as backend, front_of(backend) as world: ...

The ledger compares before and after: requests in progress, slots, backend connections, descriptors.
It fails when any is left over, and when memory or the loop's lag went over the bounds given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tests.stories.stubs import page
from tests.stories.support import FAST, World, gateway, story

__all__ = [
    "FAST", "Asked", "Book", "Client", "Reply", "World", "front_of", "gateway", "head", "ledger", "page",
    "raw", "scripted", "story",
]  # fmt: skip

_MODELS = (
    b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm",'
    b'"root":"m","parent":null,"max_model_len":4096}]}'
)
_PAGES = {"/health": b"", "/version": b'{"version":"0.32.0"}', "/v1/models": _MODELS}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.01


# --- a client, byte by byte -------------------------------------------------------------------------


@dataclass
class Reply:
    """One whole reply. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection that sends what it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> bool:
        """Send; False when the other side has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            return False
        return True

    async def flood(self, piece: bytes, most_bytes: int) -> int:
        """Send `piece` again and again; return how many bytes were taken until the connection closed."""
        sent = 0
        while sent < most_bytes and not self.reader.at_eof() and await self.send(piece):
            sent += len(piece)
            await asyncio.sleep(0)  # the gateway runs in this loop, too
        return sent

    async def reply(self, seconds: float = 10.0) -> Reply:
        """Read one reply; interim ones (1xx) are passed over."""
        async with asyncio.timeout(seconds):
            while True:
                lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                status = int(lines[0].split()[1])
                if status >= 200:
                    break
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
            return Reply(status, headers, await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.rest()
        body = b""
        while size := int((await self.reader.readline()).split(b";")[0], 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def rest(self, seconds: float = 10.0) -> bytes:
        """Return everything until the connection closes; fail when it does not in time."""
        got = b""
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):
                while data := await self.reader.read(65536):
                    got += data
        return got

    async def closed(self, seconds: float = 10.0) -> bool:
        """Say whether the connection is closed in time."""
        try:
            await self.rest(seconds)
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """Close with a reset."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw(where: World | int) -> AsyncIterator[Client]:
    """Open a connection to a world's public port, or to a port."""
    port = where if isinstance(where, int) else where.process.public_port
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        client.abort()


def head(
    method: str = "POST", path: str = "/v1/chat/completions", *lines: str, key: str = "",
    length: int | None = None, chunked: bool = False,
) -> bytes:  # fmt: skip
    """Return a request head."""
    all_lines = [f"{method} {path} HTTP/1.1", "host: localhost", *lines]
    if key:
        all_lines.append(f"authorization: Bearer {key}")
    if length is not None:
        all_lines.append(f"content-length: {length}")
    if chunked:
        all_lines.append("transfer-encoding: chunked")
    if length or chunked:
        all_lines.append("content-type: application/json")
    return "\r\n".join([*all_lines, "", ""]).encode()


# --- a backend that follows a script ----------------------------------------------------------------


@dataclass
class Asked:
    """One request as a scripted backend sees it; `writer` says anything at any time."""

    method: str
    path: str
    head: bytes
    body: bytes
    writer: asyncio.StreamWriter


@dataclass
class Scripted:
    """A backend that looks healthy and answers POSTs by script. `asked` are those POSTs."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0  # all that were ever opened for a POST


@contextlib.asynccontextmanager
async def scripted(
    answer: Callable[[Asked], object], pages: Mapping[str, bytes | None] = MappingProxyType({})
) -> AsyncIterator[Scripted]:
    """Run a backend; `answer(asked)` returns bytes to write, an awaitable of such, or None to close.

    An awaitable may write to `asked.writer` itself and return b"" to keep the connection. `pages` are
    bodies of what is asked with GET, whole replies where they begin with `HTTP/`; None: no answer.
    They may change under way.
    """
    backend = Scripted()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        used = False
        try:
            while True:
                asked = await _asked(reader, writer)
                if asked.method == "GET":
                    known = {**_PAGES, **pages}
                    body = known.get(asked.path, b"")
                    if body is None:
                        await asyncio.Event().wait()
                    found = "200 OK" if asked.path in known else "404 Not Found"
                    said: object = body if body.startswith(b"HTTP/") else page(body, found)
                else:
                    backend.connections += not used
                    used = True
                    backend.asked.append(asked)
                    said = answer(asked)
                    if hasattr(said, "__await__"):
                        said = await said
                if said is None:
                    return
                writer.write(said)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield backend
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # lets the transports finish closing


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
    asked_head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = asked_head.decode("latin-1").split(" ", 2)
    length = 0
    for line in asked_head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return Asked(method, path, asked_head, await reader.readexactly(length), writer)


@contextlib.asynccontextmanager
async def front_of(*backends: Scripted, extra: str = "", **pool: object) -> AsyncIterator[World]:
    """Run a gateway whose pool `m` has these backends; wait until they are ready."""
    import json

    pools = "pools: " + json.dumps({"m": {"backends": [each.url for each in backends], **pool}})
    async with gateway(FAST, pools=pools, extra=extra, wait=False) as world:
        await world.ready(len(backends))
        yield world


# --- what is held -----------------------------------------------------------------------------------


@dataclass
class Book:
    """Readings of one process that is gateway, clients and backends in one."""

    descriptors: int
    memory_mib: float
    peak_mib: float = 0.0
    lag_s: float = 0.0  # the longest time that the loop did not run

    @property
    def growth_mib(self) -> float:
        """How much the resident memory has grown at most since the beginning."""
        return max(0.0, self.peak_mib - self.memory_mib)


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def memory_mib() -> float:
    """Return this process's resident memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES / 2**20


@contextlib.asynccontextmanager
async def ledger(
    world: World, *, most_mib: float | None = None, most_lag_s: float | None = None
) -> AsyncIterator[Book]:
    """Read before, sample meanwhile, compare after. Open it inside `gateway()`, around the attack.

    `most_mib` bounds how far resident memory may grow at any moment, `most_lag_s` how long the loop
    may stand still. Clients of this process count, too: let them send small pieces, and close them
    inside (`raw` does; the pool of `world.http` keeps its connections).
    """
    loop = asyncio.get_running_loop()
    book = Book(descriptors(), memory_mib())

    async def sample() -> None:
        while True:
            due = loop.time() + _SAMPLE_S
            await asyncio.sleep(_SAMPLE_S)
            book.lag_s = max(book.lag_s, loop.time() - due)
            book.peak_mib = max(book.peak_mib, memory_mib())

    sampler = loop.create_task(sample())
    try:
        yield book
        await asyncio.sleep(_SAMPLE_S)  # one more sample, however short the attack was
    finally:
        sampler.cancel()
        await asyncio.wait([sampler])
    await world.settled()
    await world.until(lambda: not world.process.ingress.connections, 10)
    # Idle connections to backends and probes come and go by themselves.
    await world.until(lambda: descriptors() <= book.descriptors + 2 * len(world.sims) + 4, 10)
    if most_mib is not None:
        assert book.growth_mib <= most_mib, f"memory grew by {book.growth_mib:.0f} MiB"
    if most_lag_s is not None:
        assert book.lag_s <= most_lag_s, f"the loop stood still for {book.lag_s:.2f} s"
