"""A gateway that is killed before it could stop a server that is not configured any more."""

import asyncio
import contextlib
import functools
import json
import os
import signal

import httpx2
import pytest

from tests import loopback
from tests.ports import free_port
from tests.stories.served import PROGRAM, runs, served
from tests.stories.support import story as story_within

pytestmark = pytest.mark.timeout(180)
story = functools.partial(story_within, seconds=170.0)  # processes start, and a machine may be busy


def settings(*ports):
    every = [
        {
            "name": f"b{port}",
            "launch": {
                "command": [str(PROGRAM), "sim", "--port", str(port), "--model", "m"],
                "port": port,
            },
        }
        for port in ports
    ]
    return "pools: " + json.dumps({"m": {"backends": every}})


@story
async def test_the_next_gateway_tells_of_a_server_that_was_to_be_stopped_and_runs_on():
    stays, goes = free_port(), free_port()
    async with served(pools=settings(stays, goes)) as world:

        def server(port):
            record = world.folder / f"state/run/m--b{port}.json"
            return json.loads(record.read_text())["pid"] if record.exists() else 0

        await world.until(lambda: server(stays) and server(goes))
        left = server(goes)
        try:
            os.kill(world.pids[-1], signal.SIGKILL)
            world.started.wait()
            text = world.path.read_text()
            world.path.write_text(text.replace(settings(stays, goes), settings(stays)))
            world.start()
            await world.serves()
            await world.until(lambda: world.lines("supervision_left_behind"))
            (line,) = world.lines("supervision_left_behind")
            assert line["backend"] == f"m/b{goes}"
            assert line["level"] == "WARNING"
            async with loopback.client(base_url=world.admin_url) as http:
                every = (await http.get("/admin/v1/events")).json()["data"]
            (told,) = [each for each in every if each["kind"] == "left_behind"]
            assert f"its server still runs as process {left}" in told["detail"]
            assert runs(left)
        finally:
            if runs(left):
                os.kill(left, signal.SIGKILL)


async def says_ready(url):
    async with loopback.client() as http:
        with contextlib.suppress(httpx2.HTTPError):
            return (await http.get(f"{url}/readyz")).status_code == 200
    return False


@story
async def test_a_gateway_that_ends_leaves_the_servers_of_another_one_with_its_state_folder_alone():
    port, public, admin = free_port(), free_port(), free_port()
    async with served(pools=settings(port)) as world:
        (record,) = (world.folder / "state/run").glob("*.json")
        server = json.loads(record.read_text())["pid"]
        text = world.path.read_text().replace(str(world.port), str(public))
        second = world.folder / "second.yaml"
        second.write_text(text.replace(str(world.admin_port), str(admin)))
        world.start(PROGRAM, "serve", "-c", second)
        async with asyncio.timeout(40):
            while not await says_ready(f"http://127.0.0.1:{admin}"):
                await asyncio.sleep(0.05)
        world.started.terminate()
        await asyncio.to_thread(world.started.wait)
        assert runs(server)
        assert json.loads(record.read_text())["pid"] == server
        assert await says_ready(world.admin_url)
        assert len(world.lines("supervision_stopped")) == 0
