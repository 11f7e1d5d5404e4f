"""The watchers against simulated servers, and stubs that misbehave, on real sockets."""

import asyncio
import contextlib
import functools
import json
import os
import socket
import ssl

import httpx2
import pytest

from gateway.config.models import Config
from gateway.control import fetch
from gateway.control.discovery import Watchers
from gateway.control.fetch import FetchError, open_client, reason_of
from gateway.core.aio import SystemClock
from gateway.core.types import Endpoint, Phase
from gateway.pools.table import Backend, PoolTable
from gateway.sim.server import SimConfig, SimServer

FAST = {
    "interval": "50ms",
    "timeout": "400ms",
    "scrape_interval": "30ms",
    "scrape_stale": "300ms",
    "models_interval": "60ms",
    "progress": "200ms",
}


def config(urls, **health):
    pool = {"m": {"backends": urls}}
    return Config.model_validate({"pools": pool, "health": {**FAST, **health}})


class Watched:
    """A pool table with its watchers."""

    def __init__(self, urls, **health):
        settings = config(urls, **health)
        self.table = PoolTable(SystemClock())
        self.table.apply(settings.pools, settings.health)
        self.watchers = Watchers(self.table, settings.health, SystemClock())

    def reload(self, urls):
        self.table.apply(config(urls).pools)

    def phase(self, name="b1"):
        return self.table.get(f"m/{name}").phase

    def reason(self, name="b1"):
        return self.table.get(f"m/{name}").reason

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def ready(self, name="b1"):
        await self.until(lambda: self.phase(name) is Phase.READY)


@contextlib.asynccontextmanager
async def watching(urls, **health):
    watched = Watched(urls, **health)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watched.watchers.run())
        try:
            yield watched
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def stub(answer):
    """A server that answers each request with `answer(path)`: bytes, or None for silence."""

    async def serve(reader, writer):
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    heads.append(head)
                    reply = answer(head.split()[1].decode())
                    if reply is None:
                        await asyncio.Event().wait()
                    writer.write(reply)
                    await writer.drain()
        finally:
            writer.transport.abort()

    heads: list[bytes] = []
    tasks = set()

    def accept(reader, writer):
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # lets the transports finish closing


def page(body=b"", status="200 OK"):
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def story(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            async with asyncio.timeout(20):
                await test(*args, **kwargs)

        asyncio.run(main())

    return run


def free_url():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


# --- coming up ------------------------------------------------------------------------------------


@story
async def test_a_backend_that_answers_is_ready_with_all_it_tells():
    paths = ("/v1/chat/completions", "/v1/embeddings")
    settings = SimConfig(model="m", adapters=("lora-a",), max_model_len=2048, paths=paths)
    async with SimServer(settings) as sim, watching([sim.url]) as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert backend.window_tokens == 2048
        assert backend.adapters == ("lora-a",)
        assert backend.base_model == "m"
        assert backend.endpoints == {Endpoint.CHAT, Endpoint.EMBEDDINGS}
        assert backend.version == "0.32.0"
        await watched.until(lambda: backend.sample is not None)
        assert backend.sample.running == 0


@pytest.mark.parametrize("settings", [{"dp": 2}, {"old_metrics": True}])
@story
async def test_data_parallel_and_old_servers_show_their_load(settings):
    async with SimServer(SimConfig(model="m", **settings)) as sim, watching([sim.url]) as watched:
        await watched.until(lambda: watched.table.get("m/b1").sample is not None)
        assert watched.table.get("m/b1").sample.kv_usage_ratio == 0


@story
async def test_the_key_of_the_backend_is_sent():
    sim = SimServer(SimConfig(model="m", api_key="sesame"))
    async with sim, watching([{"url": sim.url, "api_key": "sesame"}]) as watched:
        await watched.ready()


@story
async def test_a_wrong_key_is_named_as_the_reason_for_not_starting():
    async with (
        SimServer(SimConfig(model="m", api_key="sesame")) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.until(lambda: watched.reason() == "models_http_401")
        assert watched.phase() is Phase.STARTING


@story
async def test_a_backend_that_is_not_there_yet_is_waited_for():
    async with SimServer(SimConfig(model="m")) as sim:
        sim.inject("refuse")
        async with watching([sim.url]) as watched:
            await watched.until(lambda: watched.reason() == "refused")
            assert watched.phase() is Phase.STARTING
            sim.clear()
            await watched.ready()


@story
async def test_a_server_that_lists_no_model_is_not_ready():
    async with stub(lambda path: page(b"ok")) as (url, _), watching([url]) as watched:
        await watched.until(lambda: watched.reason() == "models_garbage")
        assert watched.phase() is Phase.STARTING


@story
async def test_a_server_without_description_or_metrics_serves_all_the_same():
    models = json.dumps({"data": [{"id": "m", "parent": None, "max_model_len": 64}]}).encode()
    pages = {"/health": page(), "/v1/models": page(models)}
    missing = page(b"{}", "404 Not Found")
    async with (
        stub(lambda path: pages.get(path, missing)) as (url, heads),
        watching([url]) as watched,
    ):
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert (backend.endpoints, backend.version, backend.sample) == (None, None, None)
        asked = sum(head.startswith(b"GET /v1/models ") for head in heads)
        await watched.until(
            lambda: sum(head.startswith(b"GET /v1/models ") for head in heads) > asked + 1
        )
        # What a server says it has not is not asked for again and again.
        assert sum(head.startswith(b"GET /openapi.json ") for head in heads) == 1


@story
async def test_a_description_that_came_too_late_is_read_with_the_next_model_list():
    models = json.dumps({"data": [{"id": "m", "parent": None, "max_model_len": 64}]}).encode()
    openapi = json.dumps({"paths": {"/v1/chat/completions": {"post": {}}}}).encode()
    pages = {
        "/health": page(),
        "/v1/models": page(models),
        "/version": page(b'{"version":"1"}'),
    }
    late = [None]

    def answer(path):
        if path == "/openapi.json":
            return late.pop() if late else page(openapi)
        return pages.get(path, page(b"", "404 Not Found"))

    async with stub(answer) as (url, _), watching([url], timeout="100ms") as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert backend.endpoints is None
        await watched.until(lambda: backend.endpoints == {Endpoint.CHAT})
        assert backend.version == "1"


# --- going down and coming back -------------------------------------------------------------------


@story
async def test_a_backend_that_refuses_goes_down_and_comes_back_with_its_new_models():
    async with (
        SimServer(SimConfig(model="m", adapters=("lora-a",))) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.ready()
        sim.inject("refuse")
        await watched.until(lambda: watched.phase() is Phase.DOWN)
        assert watched.reason() == "refused"
        sim.clear()
        sim.inject("lost_adapter")
        await watched.ready()
        assert watched.table.get("m/b1").adapters == ()


@story
async def test_an_unhealthy_backend_is_down_with_its_status():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        sim.inject("health_500")
        await watched.until(lambda: watched.phase() is Phase.DOWN)
        assert watched.reason() == "http_500"


@story
async def test_a_lost_adapter_is_not_routed_any_more_and_the_backend_stays():
    async with (
        SimServer(SimConfig(model="m", adapters=("lora-a",))) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.ready()
        epoch = watched.table.epoch
        sim.inject("lost_adapter")
        await watched.until(lambda: not watched.table.get("m/b1").adapters)
        assert watched.phase() is Phase.READY
        assert watched.table.epoch > epoch


@story
async def test_a_frozen_engine_is_down_though_health_is_200_and_ready_when_it_moves():
    async with (
        SimServer(SimConfig(model="m", decode_step_s=0.02)) as sim,
        watching([sim.url]) as watched,
        httpx2.AsyncClient(trust_env=False) as http,
    ):
        await watched.ready()
        body = {"model": "m", "prompt": "hello", "max_tokens": 2000}
        async with asyncio.TaskGroup() as group:
            request = http.post(f"{sim.url}/v1/completions", json=body, timeout=30)
            task = group.create_task(request)
            backend = watched.table.get("m/b1")
            await watched.until(lambda: backend.sample is not None and backend.sample.running)
            await asyncio.sleep(0.3)
            assert watched.phase() is Phase.READY
            sim.inject("frozen")
            await watched.until(lambda: watched.phase() is Phase.DOWN)
            assert watched.reason() == "no_progress"
            sim.clear()
            await watched.ready()
            task.cancel()


@story
async def test_garbage_metrics_leave_the_load_unknown_and_the_backend_in_service():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        await watched.until(lambda: backend.sample is not None)
        sim.inject("garbage_metrics")
        await watched.until(lambda: backend.stale(SystemClock.now()))
        assert watched.phase() is Phase.READY
        sim.clear()
        await watched.until(lambda: not backend.stale(SystemClock.now()))


@story
async def test_one_silent_backend_delays_no_other():
    async with (
        stub(lambda path: None) as (silent, _),
        SimServer(SimConfig(model="m")) as sim,
        watching([silent, sim.url], timeout="5s") as watched,
    ):
        async with asyncio.timeout(1):
            await watched.ready("b2")
        backend = watched.table.get("m/b2")
        await watched.until(lambda: backend.scrape_count > 5)
        assert watched.phase("b1") is Phase.STARTING


# --- membership -----------------------------------------------------------------------------------


@story
async def test_watchers_follow_the_configuration():
    one, two = SimServer(SimConfig(model="m")), SimServer(SimConfig(model="m"))
    async with one, two, watching([one.url]) as watched:
        await watched.ready()
        watched.reload([one.url, two.url])
        await watched.ready("b2")
        watched.reload([{"name": "b2", "url": two.url}])
        await asyncio.sleep(0.1)
        seen, other = len(one.requests), len(two.requests)
        await watched.until(lambda: len(two.requests) > other + 10)
        assert len(one.requests) == seen


@story
async def test_what_the_old_server_says_is_not_taken_for_the_new_one_of_that_name():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        watched.reload([free_url()])
        await watched.until(lambda: watched.reason() == "refused")
        assert watched.phase() is Phase.STARTING
        assert watched.table.get("m/b1").sample is None


@story
async def test_other_intervals_take_effect_without_a_restart():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        watched.watchers.health = config([sim.url], scrape_interval="30s").health
        await asyncio.sleep(0.1)
        count = watched.table.get("m/b1").scrape_count
        await asyncio.sleep(0.2)
        assert watched.table.get("m/b1").scrape_count == count


# --- fetching -------------------------------------------------------------------------------------


async def failure_of(url, path="/", timeout_s=1.0):
    async with open_client(Backend("m", "b1", url)) as client:
        with pytest.raises(FetchError) as caught:
            await fetch.fetch(client, path, timeout_s=timeout_s)
    return caught.value.reason


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
        (page(b"x" * (4 * 1024 * 1024 + 1)), "too_large"),
        (None, "timeout"),
    ],
    ids=["status", "redirect", "bad redirect", "not http", "too large", "silence"],
)
@story
async def test_an_unusable_page_is_a_short_word(reply, reason):
    async with stub(lambda path: reply) as (url, _):
        timeout_s = 0.1 if reply is None else 5.0
        assert await failure_of(url, timeout_s=timeout_s) == reason


@story
async def test_an_address_where_nobody_listens_refuses():
    assert await failure_of(free_url()) == "refused"


@story
async def test_a_server_that_is_silent_in_the_tls_handshake_costs_no_socket():
    async with stub(lambda path: page()) as (url, _):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert await failure_of(url.replace("http:", "https:"), timeout_s=0.2) == "timeout"
        await asyncio.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before


@story
async def test_a_page_that_drips_is_cut_at_the_deadline():
    async def drip(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await failure_of(url, timeout_s=0.2) == "timeout"
        await asyncio.sleep(0.1)


def test_every_failure_of_the_http_client_has_a_word():
    kinds = [
        kind
        for kind in vars(httpx2).values()
        if isinstance(kind, type) and issubclass(kind, httpx2.HTTPError)
    ]
    assert len(kinds) > 15
    words = {"timeout", "reset", "unreachable", "error"}
    for kind in kinds:
        error = kind.__new__(kind)
        assert reason_of(error) in words


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (ConnectionRefusedError(), "refused"),
        (socket.gaierror(), "dns"),
        (ssl.SSLError(), "tls"),
        (OSError("no route"), "unreachable"),
        (OSError(), "unreachable"),
    ],
)
def test_a_failed_connect_says_what_was_behind_it(cause, word):
    error = httpx2.ConnectError("failed")
    error.__cause__ = ExceptionGroup("all attempts", [OSError("other"), cause])
    assert reason_of(error) == word
