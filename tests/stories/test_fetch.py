"""A backend's pages against servers that misbehave, on real sockets."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import time

import pytest

from gateway.config.models import Config, HealthConfig
from gateway.core.aio import SystemClock
from gateway.counting.counters import PromptCounters
from gateway.counting.tokens import BackendCounter
from gateway.pools.table import Backend, PoolTable
from gateway.process import reload
from gateway.sim.server import SimConfig
from gateway.watch.discovery import Watchers
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.stories.stubs import free_url, page, stub
from tests.stories.support import gateway, story

MIB = 1024 * 1024
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunks(*parts):
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
    return CHUNKED + framed


def digest(body):
    return len(body), hashlib.sha256(body).hexdigest()  # no report may show megabytes


def open_pages(url, key=None):
    return contextlib.closing(Pages(Backend("m", "b1", url, key)))


async def failure_of(url, path="/", timeout_s=1.0):
    with open_pages(url) as pages, pytest.raises(FetchError) as caught:
        await pages.get(path, timeout_s=timeout_s)
    return caught.value.reason


def sockets():
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return count


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(serve):
    """A server that has each connection served by `serve(reader, writer)`."""

    async def one(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def once(sent):
    """Say this to the first question of each connection, and close it."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return serve


# --- what is asked and answered -------------------------------------------------------------------


@story
async def test_a_question_says_who_asks_and_wants_nothing_packed():
    async with stub(lambda path: page(b"ok")) as (url, heads):
        with open_pages(url, "secret") as pages:
            assert await pages.get("/health", timeout_s=5) == b"ok"
    asked, *lines = heads[0].decode().split("\r\n")
    assert asked == "GET /health HTTP/1.1"
    assert set(lines) - {""} == {
        f"host: {url.removeprefix('http://')}",
        "authorization: Bearer secret",
        "accept: */*",
        "accept-encoding: identity",
        "user-agent: vllm-gateway",
    }


@story
async def test_a_stop_of_this_process_is_no_silence_of_the_server():
    async with stub(lambda path: page(b"ok")) as (url, _):
        with open_pages(url) as pages:
            asyncio.get_running_loop().call_soon(time.sleep, 1.5)  # once it is asked
            assert await pages.get("/health", timeout_s=1.0) == b"ok"


@story
async def test_without_a_key_none_is_sent():
    async with stub(lambda path: page()) as (url, heads):
        with open_pages(url) as pages:
            await pages.get("/health", timeout_s=5)
    assert b"authorization" not in heads[0]


@story
async def test_a_posted_question_is_answered_with_status_and_body_whatever_the_status():
    async def serve(reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-type: application/json\r\ncontent-length: 7\r\n" in head
            assert b"authorization: Bearer secret\r\n" in head
            body = await reader.readexactly(7)
            writer.write(page(head.split()[1] + body, "404 Not Found"))

    async with serving(serve) as url:
        with open_pages(url, "secret") as pages:
            asked = await pages.post("/tokenize", b'{"a":1}', timeout_s=5)
    assert asked == (404, b'/tokenize{"a":1}')


LONG = os.urandom(MIB)


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (page(LONG), LONG),
        (chunks(LONG[:200_000], LONG[200_000:]), LONG),
        (chunks(b"short"), b"short"),
        (page(b"x" * (4 * MIB)), b"x" * (4 * MIB)),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 2\r\n\r\nok",
            b"ok",
        ),
        (page(), b""),
    ],
    ids=["long", "chunked", "short and chunked", "as long as may be", "event stream", "empty"],
)
def test_a_page_is_given_whole_and_the_connection_is_kept(reply, body):
    @story
    async def check():
        async with stub(lambda path: reply) as (url, heads):
            with open_pages(url) as pages:
                assert digest(await pages.get("/", timeout_s=5)) == digest(body)
                before = sockets()
                assert digest(await pages.get("/", timeout_s=5)) == digest(body)
                assert sockets() == before
        assert len(heads) == 2

    check()


@pytest.mark.parametrize("body", [b"short", LONG], ids=["short", "long"])
def test_a_page_without_length_ends_with_its_connection(body):
    @story
    async def check():
        async with serving(once(b"HTTP/1.1 200 OK\r\n\r\n" + body)) as url:
            with open_pages(url) as pages:
                assert digest(await pages.get("/", timeout_s=5)) == digest(body)
                assert digest(await pages.get("/", timeout_s=5)) == digest(body)

    check()


@story
async def test_an_answer_may_be_longer_than_a_page():
    async with stub(lambda path: page(b"x" * (6 * MIB))) as (url, _):
        with open_pages(url) as pages:
            status, body = await pages.post("/tokenize", b"", timeout_s=5)
    assert (status, len(body)) == (200, 6 * MIB)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (page(b"", "503 Service Unavailable"), "http_503"),
        (
            b"HTTP/1.1 307 Moved\r\nlocation: http://10.0.0.1/\r\ncontent-length: 0\r\n\r\n",
            "http_307",
        ),
        (b"HTTP/1.1 307 Moved\r\nlocation: http://[/\r\ncontent-length: 0\r\n\r\n", "http_307"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "reset"),
        (CHUNKED + b"no length\r\n", "reset"),
        (page(b"x" * (4 * MIB + 1)), "too_large"),
        (chunks(*[b"x" * MIB] * 4, b"x"), "too_large"),
        (None, "timeout"),
    ],
    ids=[
        *("status", "redirect", "bad redirect", "not http", "bad chunk"),
        *("too large", "too large and chunked", "silence"),
    ],
)
def test_an_unusable_page_is_a_short_word(reply, reason):
    @story
    async def check():
        before = sockets()
        async with stub(lambda path: reply) as (url, _):
            timeout_s = 0.1 if reply is None else 5.0
            assert await failure_of(url, timeout_s=timeout_s) == reason
        await until(lambda: sockets() <= before)

    check()


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 2", page(b"short")[:-1], page(LONG)[:-1], chunks(LONG)[:-1]],
    ids=["nothing", "head", "short", "long", "chunked"],
)
def test_a_page_that_is_cut_is_no_page(sent):
    @story
    async def check():
        async with serving(once(sent)) as url:
            assert await failure_of(url, timeout_s=5) == "reset"

    check()


@story
async def test_an_address_where_nobody_listens_refuses():
    url = free_url()
    assert await failure_of(url) == "refused"
    assert await failure_of(url.replace("127.0.0.1", "localhost")) == "refused"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64])
def test_a_host_that_has_no_address_is_not_known(host):
    story(failure_is)(f"http://{host}:8000", "dns", 10)


async def failure_is(url, reason, timeout_s):
    assert await failure_of(url, timeout_s=timeout_s) == reason


@story
async def test_a_server_that_speaks_no_tls_fails_the_handshake():
    async def serve(reader, writer):
        await reader.read(1)
        writer.write(page(b"", "400 Bad Request"))
        await writer.drain()

    async with serving(serve) as url:
        assert await failure_of(url.replace("http:", "https:")) == "tls"


# --- deadlines ------------------------------------------------------------------------------------


@story
async def test_a_server_that_is_silent_in_the_tls_handshake_costs_no_socket():
    async with stub(lambda path: page()) as (url, _):
        before = sockets()
        for _ in range(3):
            assert await failure_of(url.replace("http:", "https:"), timeout_s=0.2) == "timeout"
        await until(lambda: sockets() <= before)


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-more: 1\r\n"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n", b"x"),
        (page(LONG)[:-10_000], b"x"),
        (CHUNKED, b"1\r\nx\r\n"),
    ],
    ids=["head", "body", "long body", "chunks"],
)
def test_a_page_that_drips_is_cut_at_the_deadline(first, drop):
    @story
    async def check():
        cut = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            try:
                while True:
                    writer.write(drop)
                    await writer.drain()
                    await asyncio.sleep(0.02)
            finally:
                cut.set()

        async with serving(serve) as url:
            assert await failure_of(url, timeout_s=0.2) == "timeout"
            await until(cut.is_set)

    check()


# --- connections ----------------------------------------------------------------------------------


class Idler:
    """Answers and closes the connection when the next question comes on it."""

    def __init__(self):
        self.asked = 0
        self.connections = 0

    async def __call__(self, reader, writer):
        self.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(page(b"ok"))
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1


@pytest.mark.parametrize("method", ["get", "post"])
def test_a_connection_that_died_idle_costs_no_question(method):
    @story
    async def check():
        idler = Idler()

        async def ask():
            if method == "get":
                return await pages.get("/", timeout_s=5)
            return (await pages.post("/", b"", timeout_s=5))[1]

        async with serving(idler) as url:
            with open_pages(url) as pages:
                assert [await ask() for _ in range(3)] == [b"ok"] * 3
        assert (idler.asked, idler.connections) == (2, 3)

    check()


@story
async def test_a_fresh_connection_that_dies_unanswered_is_not_asked_again():
    asked = 0

    async def serve(reader, writer):
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1

    async with serving(serve) as url:
        assert await failure_of(url, timeout_s=5) == "reset"
    assert asked == 1


@story
async def test_an_idle_connection_that_the_server_closes_is_forgotten():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(page())
        await writer.drain()

    before = sockets()
    async with serving(serve) as url:
        pages = Pages(Backend("m", "b1", url))
        await pages.get("/", timeout_s=5)
        await until(lambda: sockets() <= before + 1)  # the listener's
    pages.close()


@story
async def test_closing_leaves_no_connection():
    before = sockets()
    async with stub(lambda path: page()) as (url, _):
        with open_pages(url) as pages:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(pages.get("/", timeout_s=5))
            assert sockets() >= before + 8
        await until(lambda: sockets() <= before + 1)


@story
async def test_a_question_that_is_under_way_is_answered_though_its_pages_are_closed():
    answer = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await answer.wait()
        writer.write(page(b"ok"))
        await reader.readexactly(1)

    asked = asyncio.Event()
    before = sockets()
    async with serving(serve) as url, asyncio.TaskGroup() as group:
        with open_pages(url) as pages:
            task = group.create_task(pages.get("/", timeout_s=5))
            await asked.wait()
        answer.set()
        assert await task == b"ok"
        await until(lambda: sockets() <= before + 1)


class Slow:
    """Answers counts only when it is told to, and knows how many it had at a time."""

    def __init__(self):
        self.release = asyncio.Event()
        self.now = self.most = self.asked = 0

    async def __call__(self, reader, writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.asked += 1
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await self.gone_or_released(reader)
            finally:
                self.now -= 1
            writer.write(page(b'{"count": 7, "max_model_len": 9, "tokens": [1]}'))

    async def gone_or_released(self, reader):
        while not self.release.is_set():
            if reader.at_eof() or reader.exception() is not None:
                raise ConnectionError
            await asyncio.sleep(0.005)


def count(pages, deadline_s):
    call = parse_call(ENDPOINTS[b"/v1/completions"], b'{"model": "m", "prompt": "hi"}')
    return BackendCounter(pages, deadline_s=deadline_s).count(call, "m")


@story
async def test_a_server_is_waited_for_no_longer_than_the_deadline_of_a_count():
    slow = Slow()
    async with serving(slow) as url:
        with open_pages(url) as pages:
            with pytest.raises(FetchError, match="timeout"):
                await count(pages, 0.5)  # time enough to be asked
            assert slow.asked == 1
            await until(lambda: slow.now == 0)


@story
async def test_a_server_is_asked_few_questions_at_a_time_and_a_cancelled_ones_place_is_free():
    slow = Slow()
    async with serving(slow) as url, asyncio.TaskGroup() as group:
        with open_pages(url) as pages:
            tasks = [group.create_task(count(pages, 5)) for _ in range(20)]
            await until(lambda: slow.now == 4)
            tasks[0].cancel()  # its place goes to the next
            await until(lambda: slow.asked == 5)
            slow.release.set()
            assert [await task for task in tasks[1:]] == [7] * 19
    assert slow.most <= 5  # it sees a moment later that one has gone


# --- who holds them -------------------------------------------------------------------------------


@story
async def test_a_backend_that_leaves_the_configuration_leaves_no_connection_behind():
    held = set()

    async def serve(reader, writer):
        held.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(page())
        finally:
            held.discard(writer)

    def pools(url):
        return Config.model_validate({"pools": {"m": {"backends": [url]}}}).pools

    table = PoolTable(SystemClock())
    async with serving(serve) as url, asyncio.TaskGroup() as group:
        table.apply(pools(url))
        watchers = Watchers(table, HealthConfig(), SystemClock())
        watching = group.create_task(watchers.run())
        await until(lambda: held)
        table.apply(pools(free_url()))
        await until(lambda: not held)
        watching.cancel()


@story
async def test_a_reload_drops_the_connections_that_prompts_were_counted_over():
    small = SimConfig(model="m", speed=0, max_model_len=64)
    async with gateway(small) as world:

        async def counted():
            assert (await world.chat("count me " * 6, max_tokens=1)).status_code == 200
            return [each.reused for each in world.sims[0].received("/tokenize")]

        assert await counted() == [False]
        assert await counted() == [False, True]
        assert (await reload(world.process)).done
        assert await counted() == [False, True, False]


@story
async def test_who_was_asked_to_count_is_let_go_at_a_reload_and_at_the_end():
    asked = []

    class Asked:
        def __init__(self, backend):
            self.closed = False
            asked.append(self)

        async def post(self, path, body, *, timeout_s):
            return 200, b'{"count": 7, "max_model_len": 64, "tokens": []}'

        def close(self):
            self.closed = True

    async with gateway(SimConfig(model="m", speed=0, max_model_len=64)) as world:
        handler = world.process.handler

        async def count_one():
            counters = PromptCounters(world.process.config.pools, Asked, deadline_s=5)
            handler.settings = dataclasses.replace(handler.settings, counters=counters)
            assert (await world.chat("count me " * 6, max_tokens=1)).status_code == 200

        await count_one()
        assert (await reload(world.process)).done
        assert [each.closed for each in asked] == [True]
        await count_one()
        assert [each.closed for each in asked] == [True, False]
    assert [each.closed for each in asked] == [True, True]
