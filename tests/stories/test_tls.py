"""Backends behind TLS: all that talks to one goes over it, and a certificate that is not trusted is told."""

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import replace

import pytest

from gateway.core.endings import Ending
from gateway.core.errors import ConnectFailed
from gateway.core.types import Phase
from gateway.pools.table import Backend
from gateway.sim.server import SimServer
from gateway.upstream.client import BackendConnections
from gateway.upstream.connection import Connection
from gateway.watch.fetch import FetchError, Pages
from tests.certificates import secured, trusting
from tests.stories.served import program
from tests.stories.support import FAST, frames, gateway, story

CHAT, AUDIO = "/v1/chat/completions", "/v1/audio/transcriptions"


def told(test):
    """Run a story with the folder of the test."""
    return lambda tmp_path: story(test)(tmp_path)


# --- requests -------------------------------------------------------------------------------------


@told
async def test_chats_are_answered_whole_and_streamed_over_connections_that_are_kept(folder):
    sim = secured(folder)
    with trusting(sim):
        async with gateway(sim) as world:
            assert world.sims[0].url.startswith("https://")
            whole = await world.chat(max_tokens=3)
            assert whole.status_code == 200
            for _ in range(3):
                await world.rested()
                stream = await world.chat(max_tokens=3, stream=True)
                assert _text(stream) == whole.json()["choices"][0]["message"]["content"]
            chats = world.sims[0].received(CHAT)
            assert [each.reused for each in chats] == [False, True, True, True]
            await world.settled()


@story
async def test_a_server_that_is_too_busy_for_new_connections_has_not_refused_them():
    """What it was sent before goes on, so it is no more down than one that is late with an answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts nothing, and reads no hello
        backend = Backend("m", "b1", f"https://127.0.0.1:{silent.getsockname()[1]}")
        with contextlib.closing(
            BackendConnections(backend, keep_alive_s=1.0, connect_s=0.1)
        ) as connections:
            with pytest.raises(ConnectFailed) as failed:
                await connections.connect(Connection)
        assert failed.value.ending is Ending.CONNECT_TIMEOUT


@pytest.mark.parametrize("size", [1024, 4 << 20])
def test_an_upload_reaches_it_to_the_last_byte(tmp_path, size):
    sound, sim = os.urandom(size), secured(tmp_path)

    @story
    async def check():
        with trusting(sim):
            async with gateway(sim) as world:
                reply = await world.http.post(
                    AUDIO, data={"model": "m"}, files={"file": ("a.wav", sound, "audio/wav")}
                )
                assert reply.status_code == 200, reply.text
                (upload,) = world.sims[0].received(AUDIO)
                assert sound in upload.body
                await world.settled()

    check()


@told
async def test_an_idle_connection_that_it_closes_costs_no_request(folder):
    sim = secured(folder)
    with trusting(sim):
        async with gateway(sim) as world:
            await world.chat(max_tokens=1)
            world.sims[0].inject("keepalive_close@5")
            for _ in range(5):
                assert (await world.chat(max_tokens=1)).status_code == 200
            await world.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(tmp_path, stream):
    sim = replace(secured(tmp_path), speed=1.0, decode_step_s=0.02)

    @story
    async def check():
        with trusting(sim):
            async with gateway(sim) as world:
                asked = asyncio.get_running_loop().create_task(
                    world.chat(max_tokens=500, stream=stream)
                )
                await world.until(lambda: world.sims[0].engine.running == 1)
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                await world.until(lambda: world.sims[0].engine.running == 0)
                await world.settled()

    check()


@told
async def test_a_stream_whose_connection_is_cut_goes_on_at_another(folder):
    sim = secured(folder)
    with trusting(sim):
        # The second one is asked once the first has failed.
        listed = "pools: {m: {backends: [{url: <0>}, {url: <1>, weight: 0.000000001}]}}"
        async with gateway(sim, sim, pools=listed) as world:
            undisturbed = await world.chat(max_tokens=12, stream=True, temperature=0)
            world.sims[0].inject("reset_after:5")
            stream = await world.chat(max_tokens=12, stream=True, temperature=0)
            assert _text(stream) == _text(undisturbed)
            assert [len(each.received(CHAT)) for each in world.sims] == [2, 1]
            await world.settled()


def _text(reply):
    data = frames(reply.text)
    assert data[-1] == "[DONE]"
    choices = [choice for each in data[:-1] for choice in json.loads(each)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(each["delta"].get("content", "") for each in choices)


# --- certificates ---------------------------------------------------------------------------------


@told
async def test_why_a_certificate_is_not_accepted_is_told(folder):
    other, ended, unknown = (folder / name for name in ("other", "ended", "unknown"))
    for each in (other, ended, unknown):
        each.mkdir()
    known = {
        "tls_name": secured(other, host="127.0.0.2"),
        "tls_expired": secured(ended, expired=True),
    }
    for reason, sim in known.items():
        with trusting(sim):
            assert await _reason(sim) == reason
    assert await _reason(secured(unknown)) == "tls_untrusted"


async def _reason(sim):
    async with SimServer(sim) as server:
        with contextlib.closing(Pages(Backend("m", "b1", server.url))) as pages:
            with pytest.raises(FetchError) as failed:
                await pages.get("/health", timeout_s=5)
            return failed.value.reason


@told
async def test_a_backend_whose_certificate_is_not_trusted_gets_no_requests(folder):
    async with gateway(secured(folder), FAST, wait=False) as world:
        first, second = world.process.table.backends("m")
        await world.until(lambda: second.phase is Phase.READY)
        await world.until(lambda: first.reason == "tls_untrusted")
        for _ in range(4):
            assert (await world.chat(max_tokens=1)).status_code == 200


@told
async def test_check_says_what_to_do_about_a_certificate_that_is_not_trusted(folder):
    async with SimServer(secured(folder)) as server:
        file = folder / "gateway.yaml"
        file.write_text(f"pools: {{m: {{backends: ['{server.url}']}}}}\nkeys: none")
        told = await program("check", str(file), "--probe")
        assert (
            f"b1 ({server.url}) /health: the authority of its certificate is not trusted here"
            in told
        )
        with trusting(server.config):
            assert "m/b1 ok vLLM 0.32.0" in await program("check", str(file), "--probe")
