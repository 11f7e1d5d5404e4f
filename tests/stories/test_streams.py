"""The gateway starts and serves with its standard streams closed, and writes to nothing else instead."""

import asyncio
import os
import sys
from pathlib import Path

import httpx2
import pytest

from gateway.sim.server import SimConfig, SimServer
from tests import keyfiles as keys
from tests import loopback
from tests.stories.stubs import free_url
from tests.stories.support import story

PROGRAM = Path(sys.executable).with_name("vllm-gateway")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_stop_the_start(closed, tmp_path):
    @story
    async def check():
        public, admin = (free_url().removeprefix("http://") for _ in range(2))
        async with SimServer(SimConfig(model="m", speed=0)) as sim:
            (tmp_path / "gateway.yaml").write_text(
                f"listen: {public}\nadmin: {{listen: {admin}}}\nshutdown: {{grace: 0s}}\n"
                f"pools: {{m: {{backends: ['{sim.url}']}}}}\n"
            )
            key = keys.create(tmp_path / "keys.yaml", name="test").key
            program = await asyncio.create_subprocess_exec(
                "sh", "-c", f'exec "$0" serve -c gateway.yaml {closed}', PROGRAM, cwd=tmp_path
            )
            try:
                async with loopback.client(base_url=f"http://{public}") as http:
                    while not await ready(http, program):
                        await asyncio.sleep(0.05)
                    body = {"model": "m", "max_tokens": 2, "messages": []}
                    body["messages"] = [{"role": "user", "content": "hi"}]
                    headers = {"authorization": f"Bearer {key}"}
                    for _ in range(3):
                        reply = await http.post("/v1/chat/completions", json=body, headers=headers)
                        assert reply.status_code == 200
                for fd in (0, 1, 2):  # none of them became a socket or a file of the gateway
                    there = os.readlink(f"/proc/{program.pid}/fd/{fd}")
                    assert "socket" not in there
                    assert str(tmp_path) not in there
            finally:
                program.terminate()
                await program.wait()
            assert program.returncode == 0

    check()


async def ready(http: httpx2.AsyncClient, program: asyncio.subprocess.Process) -> bool:
    assert program.returncode is None, "the program ended"
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("words", [["--version"], ["keys", "list", "-c", "gateway.yaml"]])
def test_other_verbs_do_not_fail_for_it_either(words, tmp_path):
    @story
    async def check():
        (tmp_path / "gateway.yaml").write_text("pools: {m: {backends: ['http://127.0.0.1:1']}}\n")
        keys.create(tmp_path / "keys.yaml", name="test")
        program = await asyncio.create_subprocess_exec(
            "sh", "-c", 'exec "$0" "$@" >&-', PROGRAM, *words, cwd=tmp_path,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await program.communicate()
        assert (program.returncode, said) == (0, b"")

    check()
