"""LoRA adapters while another process of the gateway takes over: real processes, real sockets."""

import asyncio
import functools
import json

import httpx2
import pytest

from gateway.core.aio import start
from tests.stories.served import runs, served
from tests.stories.support import FAST, frames
from tests.stories.support import story as story_within
from tests.stories.test_adapters import SIM, held, lora
from tests.stories.test_upgrade import (
    ENDS_LATE,
    SLOW,
    admin,
    ask,
    chat,
    client,
    from_a_copy,
    installed,
)

story = functools.partial(story_within, seconds=58.0)  # processes start, and a machine may be busy
PATIENT = httpx2.Limits(keepalive_expiry=None)  # its connections stay open


def one_of_two(**more):
    """Return a pool whose server keeps one of the adapters a and b."""
    backends = [{"url": "<0>", "max_cpu_loras": 1}]
    adapters = [lora("a"), lora("b")]
    queue = {"max_wait": "30s"}
    pool = {"backends": backends, "adapters": adapters, "queue": queue, **more}
    return "pools: " + json.dumps({"m": pool})


async def waits(world):
    """Wait until a request waits in the process that is in charge."""
    async with asyncio.timeout(20):
        while (await admin(world, "/admin/v1/overview"))["pools"][0]["queue"]["requests"] == 0:
            await asyncio.sleep(0.02)


async def waits_while_another_takes_over(extra=""):
    """Have a request wait for an adapter that nobody asks the new process for."""
    async with (
        served(SLOW, pools=one_of_two(), extra=extra) as world,
        client(world) as streams,
        client(world) as http,
    ):
        assert (await ask(http, model="a", max_tokens=1)).status_code == 200
        body = chat(model="a", stream=True, max_tokens=60)
        async with streams.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.aiter_text()
            text = await anext(pieces)
            world.sims[0].inject("frozen")  # so its adapter stays while the upgrade lasts
            asked = start(ask(http, model="b", max_tokens=1), name="asked")
            await waits(world)
            ran = await world.upgrade()
            assert ran.returncode == 0, ran.stderr
            assert not asked.done()
            world.sims[0].clear()
            text += "".join([each async for each in pieces])
        assert frames(text)[-1] == "[DONE]"
        served_last = await asked
        assert served_last.status_code == 200, served_last.text
        assert held(world).keys() == {"b"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("extra", ["", "workers: 2"])
def test_a_request_that_waits_for_an_adapter_as_another_process_takes_over_is_served(extra):
    story_within(waits_while_another_takes_over, seconds=110.0)(extra)


@story
async def test_the_last_request_of_a_kept_connection_has_an_adapter_that_came_or_comes_after_an_upgrade():
    async with served(SIM, pools=one_of_two()) as world:
        async with client(world, limits=PATIENT) as one, client(world, limits=PATIENT) as two:
            for http in (one, two):
                assert (await ask(http, model="a", max_tokens=1)).status_code == 200
            assert (await world.upgrade()).returncode == 0
            async with client(world) as other:
                assert (await ask(other, model="b", max_tokens=1)).status_code == 200
            came = await ask(one, model="b", max_tokens=1)
            comes = await ask(two, model="a", max_tokens=1)
            for reply in (came, comes):
                assert reply.status_code == 200, reply.text
                assert reply.headers["connection"] == "close"  # it is from the old process
        await world.until(lambda: not runs(world.pids[0]))
        kept = json.loads((world.folder / "state" / "adapters.json").read_text())
        assert [*kept["loaded"].values()] == [["a"]]


@story
async def test_adapters_are_loaded_by_the_old_process_after_an_upgrade_that_failed_late():
    async with served(FAST, pools=one_of_two(), starts=from_a_copy) as world, client(world) as http:
        assert (await ask(http, model="a", max_tokens=1)).status_code == 200
        installed(world, ENDS_LATE)
        assert (await world.upgrade()).returncode == 1
        for name in ("b", "a"):
            assert (await ask(http, model=name, max_tokens=1)).status_code == 200
