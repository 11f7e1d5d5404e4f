"""A backend on a UNIX socket: all that talks to it goes there."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import sys
import uuid
from pathlib import Path

import pytest

from gateway.config.supervision import LaunchConfig
from gateway.core.errors import ConnectFailed
from gateway.core.types import Phase, Route
from gateway.counting.counters import PromptCounters
from gateway.launch.launcher import Changes, LaunchError, Runs, Seen
from gateway.launch.process import ProcessLauncher
from gateway.pools.table import Backend
from gateway.sim.server import SimConfig, SimServer
from gateway.upstream.client import Client, Outgoing
from gateway.upstream.silence import ENDLESS, Silence
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.stories.launched import left
from tests.stories.support import FAST, frames, gateway, story

CHAT, AUDIO = "/v1/chat/completions", "/v1/audio/transcriptions"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
GRACE_S = 20.0
SCRIPT = str(Path(sys.executable).with_name("vllm-gateway"))


def on(folder, **more):
    return SimConfig(**{"model": "m", "speed": 0, "uds": str(folder / "m.sock"), **more})


def told(test):
    """Run a story with the folder of the test."""
    return lambda tmp_path: story(test)(tmp_path)


# --- requests -------------------------------------------------------------------------------------


@told
async def test_chats_are_answered_whole_and_streamed_over_connections_that_are_kept(folder):
    async with gateway(on(folder)) as world:
        whole = await world.chat(max_tokens=3)
        assert whole.status_code == 200
        await world.rested()
        stream = await world.chat(max_tokens=3, stream=True)
        data = frames(stream.text)
        assert data[-1] == "[DONE]"
        text = "".join(
            choice["delta"].get("content", "")
            for each in data[:-1]
            for choice in json.loads(each)["choices"]
        )
        assert text == whole.json()["choices"][0]["message"]["content"]
        chats = world.sims[0].received(CHAT)
        assert [each.reused for each in chats] == [False, True]
        assert [each.header("host") for each in chats] == ["localhost"] * 2
        await world.settled()


@pytest.mark.parametrize("size", [1024, 4 << 20])
def test_an_upload_reaches_it_to_the_last_byte(tmp_path, size):
    sound = os.urandom(size)

    @story
    async def check():
        async with gateway(on(tmp_path)) as world:
            reply = await world.http.post(
                AUDIO, data={"model": "m"}, files={"file": ("a.wav", sound, "audio/wav")}
            )
            assert reply.status_code == 200, reply.text
            (upload,) = world.sims[0].received(AUDIO)
            assert sound in upload.body
            assert (await world.chat(max_tokens=1)).status_code == 200
            await world.settled()

    check()


@told
async def test_an_idle_connection_that_it_closes_costs_no_request(folder):
    async with gateway(on(folder)) as world:
        await world.chat(max_tokens=1)
        world.sims[0].inject("keepalive_close@5")
        for _ in range(5):
            assert (await world.chat(max_tokens=1)).status_code == 200
        await world.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(tmp_path, stream):
    @story
    async def check():
        async with gateway(on(tmp_path, speed=1.0, decode_step_s=0.02)) as world:
            asked = asyncio.get_running_loop().create_task(
                world.chat(max_tokens=500, stream=stream)
            )
            await world.until(lambda: world.sims[0].engine.running == 1)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            await world.until(lambda: world.sims[0].engine.running == 0)
            await world.settled()
            assert 'outcome="client_gone"' in await world.metrics()

    check()


@told
async def test_without_a_listener_requests_go_elsewhere_and_it_is_down(folder):
    async with gateway(on(folder), FAST) as world:
        first = world.process.table.backends("m")[0]
        world.sims[0].inject("refuse")
        for _ in range(4):  # a fifth in a row would be told of it before the probes are
            assert (await world.chat(max_tokens=1)).status_code == 200
        await world.until(lambda: first.phase is Phase.DOWN)
        assert first.reason == "refused"
        world.sims[0].clear()
        await world.until(lambda: first.phase is Phase.READY)


@contextlib.asynccontextmanager
async def full(where):
    """A listener whose backlog is full, and the connections that fill it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
        listener.bind(where)
        listener.listen(0)
        refused = 0
        while refused != errno.EAGAIN:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            refused = client.connect_ex(where)
        yield listener


async def send(where, *, connect_s):
    client = Client(connect_s=connect_s, keep_alive_s=3, receive_bytes=32768)
    out = Outgoing(CHAT.encode(), b"application/json", "r1", b"{}")
    silence = Silence(ENDLESS, asyncio.get_running_loop().time())
    try:
        connections = client.connections(Backend("m", "b1", f"unix:{where}"))
        return await connections.send(out, silence, fresh=False)
    finally:
        client.close()
        await asyncio.sleep(0)


async def answer(reader, writer):
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
    writer.close()


@told
async def test_a_full_backlog_is_waited_for(folder):
    where = str(folder / "m.sock")
    async with full(where) as listener, asyncio.TaskGroup() as group:
        sent = group.create_task(send(where, connect_s=10))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.wait([sent])
        server = await asyncio.start_unix_server(answer, sock=listener)
        assert (await sent).status == 200
        server.close()


@told
async def test_a_backlog_that_stays_full_is_no_connection(folder):
    where = str(folder / "m.sock")
    pages = Pages(Backend("m", "b1", f"unix:{where}"))
    async with full(where):
        with pytest.raises(ConnectFailed):
            await send(where, connect_s=0.1)
        with pytest.raises(FetchError, match="timeout"):  # a probe's word for one that hangs
            await pages.get("/health", timeout_s=0.5)


# --- what watches it ------------------------------------------------------------------------------


@told
async def test_probes_scrapes_and_model_lists_reach_it(folder):
    async with gateway(on(folder, adapters=("sql",)), FAST) as world:
        first = world.process.table.backends("m")[0]
        assert first.url == f"unix:{folder}/m.sock"
        assert (first.phase, first.version, first.adapters) == (Phase.READY, "0.32.0", ("sql",))
        scrapes = first.scrape_count
        await world.until(lambda: first.scrape_count > scrapes + 2)
        assert first.sample is not None
        (health, *_) = world.sims[0].received("/health")
        assert health.header("host") == "localhost"


@told
async def test_each_backend_counts_prompts_where_it_is(folder):
    async with SimServer(on(folder)) as local, SimServer(FAST) as far:
        counters = PromptCounters({}, Pages, deadline_s=5)
        body = {"model": "m", "messages": [{"role": "user", "content": "12345678"}]}
        call = parse_call(ENDPOINTS[CHAT.encode()], json.dumps(body).encode())
        route = Route("m", "m", "m")
        counts = [
            await counters.count(call, route, [Backend("m", sim.url, sim.url)])
            for sim in (local, far, local)
        ]
        assert counts[0] is not None
        assert len(set(counts)) == 1
        assert [len(sim.received("/tokenize")) for sim in (local, far)] == [2, 1]
        counters.close()


@told
async def test_a_socket_that_is_not_there_refuses_like_one_that_nobody_listens_on(folder):
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(folder / "left.sock"))
    left_behind.close()
    for name in ("none.sock", "left.sock", "no/folder.sock"):
        pages = Pages(Backend("m", "b1", f"unix:{folder}/{name}"))
        with pytest.raises(FetchError, match="refused"):
            await pages.get("/health", timeout_s=1)


# --- launched -------------------------------------------------------------------------------------


@told
async def test_a_launched_server_listens_there_again_after_it_was_killed(folder):
    token = f"m-{uuid.uuid4().hex}"
    where = folder / "run" / "m.sock"
    config = LaunchConfig(command=(SCRIPT, "sim", "--model", token), socket=where)
    launcher = ProcessLauncher(config, pool="m", backend="b1", state=folder / "state")
    backend = Backend("m", "b1", f"unix:{where}")

    async def serving():
        with contextlib.closing(Pages(backend)) as pages:
            async with asyncio.timeout(15):
                while True:
                    assert (await launcher.look()).running, await launcher.log(4000)
                    with contextlib.suppress(FetchError):
                        return await pages.get("/v1/models", timeout_s=1)
                    await asyncio.sleep(0.05)

    first = await launcher.restart(None, grace_s=GRACE_S, changes=Changes())
    try:
        assert token.encode() in await serving()
        assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700

        (pid,) = left(token)
        os.kill(pid, signal.SIGKILL)
        while (await launcher.look()).running:
            await asyncio.sleep(0.01)
        assert where.is_socket()
        second = await launcher.restart(first, grace_s=GRACE_S, changes=Changes())
        assert token.encode() in await serving()
        assert await launcher.look() == Seen(second, Runs.RUNNING)
        await launcher.stop(second, grace_s=GRACE_S)
        assert left(token) == []

        with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
            other.bind(str(where))
            with pytest.raises(LaunchError, match=f"m/b1: the socket {where} is already in use by"):
                await launcher.restart(second, grace_s=GRACE_S, changes=Changes())
    finally:
        for pid in left(token):
            os.kill(pid, signal.SIGKILL)
