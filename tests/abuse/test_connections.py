"""More connections than there is room for: who matters is still served."""

import asyncio
import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import sys
import time

import pytest

from gateway.sim.server import SimServer
from tests import keyfiles as keys
from tests.abuse.support import FAST, front_of, gateway, head, ledger, page, raw, scripted, story
from tests.stories.stubs import free_url

PATIENT = functools.partial(story, seconds=55)  # a process starts, on whatever machine this is


def chat(key):
    body = b'{"model":"m","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
    return head(key=key, length=len(body)) + body


class Launched:
    """A gateway in a process of its own, whose descriptors are limited."""

    def __init__(self, process, public_port, admin_port, key):
        self.process, self.pid, self.key = process, process.pid, key
        self.public_port, self.admin_port = public_port, admin_port

    async def get(self, path, *, admin=False):
        async with raw(self.admin_port if admin else self.public_port) as client:
            await client.send(head("GET", path, "connection: close"))
            return await client.reply()

    async def chat(self):
        async with raw(self.public_port) as client:
            await client.send(chat(self.key))
            return await client.reply()

    async def shed(self):
        text = (await self.get("/metrics", admin=True)).body.decode()
        found = re.findall(r'gateway_connections_shed_total\{reason="(\w+)"\} (\S+)', text)
        return {reason: int(float(count)) for reason, count in found}

    def cpu_s(self):
        with open(f"/proc/{self.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def launched(folder, descriptors, *, soft=None):
    async with SimServer(FAST) as sim:
        public, admin = (free_url().removeprefix("http://") for _ in range(2))
        path = folder / "gateway.yaml"
        path.write_text(
            f"listen: {public}\nadmin: {{listen: {admin}}}\n"
            f"health: {{interval: 100ms, fall: 1}}\npools: {{m: {{backends: ['{sim.url}']}}}}\n"
            "shutdown: {grace: 0s}\n"
        )
        key = keys.create(folder / "keys.yaml", name="test", wall_now=time.time()).key
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from gateway.cli.main import main; main()", "serve", "-c", str(path),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_NOFILE, (soft or descriptors, descriptors)
            ),
        )  # fmt: skip
        ports = [int(each.rpartition(":")[2]) for each in (public, admin)]
        gate = Launched(process, *ports, key)
        try:
            await until_ready(gate)
            yield gate
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def until_ready(gate):
    async with asyncio.timeout(40):
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                if (await gate.get("/readyz")).status == 200:
                    return
            await asyncio.sleep(0.05)


def slow_heads(stack, port, count):
    for _ in range(count):
        held = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        with contextlib.suppress(ConnectionError):
            held.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: ")


def test_two_hundred_descriptors_and_four_hundred_slow_heads(tmp_path):
    @PATIENT
    async def check():
        with contextlib.ExitStack() as held:
            await attack(held)

    async def attack(held):
        async with launched(tmp_path, 200) as gate:
            await asyncio.to_thread(slow_heads, held, gate.public_port, 400)
            for _ in range(3):
                assert (await gate.get("/livez")).status == 200
                assert (await gate.get("/readyz")).status == 200
                assert (await gate.get("/readyz", admin=True)).status == 200
                assert (await gate.chat()).status == 200
                await asyncio.to_thread(slow_heads, held, gate.public_port, 50)
            shed = await gate.shed()
            assert shed["slow_head"] >= 300
            assert shed["refused"] == shed["address"] == 0
            metrics = (await gate.get("/metrics", admin=True)).body.decode()
            assert 'to="down"' not in metrics

    check()


def test_the_limit_of_open_files_is_raised_and_few_are_open_at_rest(tmp_path):
    @PATIENT
    async def check():
        async with launched(tmp_path, 400, soft=100) as gate:
            assert resource.prlimit(gate.pid, resource.RLIMIT_NOFILE) == (400, 400)
            assert len(os.listdir(f"/proc/{gate.pid}/fd")) < 56

    check()


def test_no_descriptor_left_neither_ends_nor_spins_the_listener(tmp_path):
    @PATIENT
    async def check():
        with contextlib.ExitStack() as held:
            await attack(held)

    async def attack(held):
        async with launched(tmp_path, 200) as gate:
            open_now = len(os.listdir(f"/proc/{gate.pid}/fd"))
            resource.prlimit(gate.pid, resource.RLIMIT_NOFILE, (open_now, 200))
            before = gate.cpu_s()
            await asyncio.to_thread(slow_heads, held, gate.public_port, 30)
            await asyncio.sleep(1.0)
            assert gate.cpu_s() - before < 0.7
            held.close()
            resource.prlimit(gate.pid, resource.RLIMIT_NOFILE, (200, 200))
            await until_ready(gate)
            assert (await gate.chat()).status == 200

    check()


@story
async def test_a_full_gateway_closes_the_idle_and_never_the_busy():
    go_on = asyncio.Event()

    async def answer(asked):
        await go_on.wait()
        return page(b'{"choices":[]}').replace(
            b"content-l", b"content-type: application/json\r\ncontent-l"
        )

    async with scripted(answer) as backend:
        async with front_of(backend, extra="limits: {connections: 3}") as world, ledger(world):
            async with raw(world) as busy, raw(world) as idle, raw(world) as other:
                request = chat(world.key)
                await busy.send(request)
                for client in (idle, other):
                    await client.send(head("GET", "/livez"))
                    assert (await client.reply()).status == 200
                async with raw(world) as new:
                    await new.send(request)
                    assert await idle.closed()
                    await other.send(request)  # all three have a request in progress now
                    await world.until(lambda: len(backend.asked) == 3)
                    async with raw(world) as late:
                        reply = await late.reply()
                        assert reply.status == 503
                        assert reply.headers["connection"] == "close"
                        assert int(reply.headers["retry-after"]) >= 1
                        error = json.loads(reply.body)["error"]
                        assert error["code"] == "too_many_connections"
                        assert "`limits.connections`" in error["message"]
                        assert "3 connections" in error["message"]
                    go_on.set()
                    for client in (busy, other, new):
                        assert (await client.reply()).status == 200
            metrics = await world.metrics()
            assert 'gateway_connections_shed_total{reason="idle"} 1.0' in metrics
            assert 'gateway_connections_shed_total{reason="refused"} 1.0' in metrics


@story
async def test_one_address_cannot_have_them_all():
    async with gateway(FAST, extra="limits: {connections_per_address: 2}") as world:
        async with ledger(world), raw(world) as one, raw(world) as two:
            for client in (one, two):
                await client.send(head("GET", "/livez"))
                assert (await client.reply()).status == 200
            async with raw(world) as three:
                reply = await three.reply()
                assert reply.status == 503
                assert b"`limits.connections_per_address`" in reply.body


@pytest.mark.parametrize("name", ["connections", "connections_per_address"])
def test_a_limit_of_no_connections_is_a_mistake(name):
    from gateway.config.limits import LimitsConfig

    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LimitsConfig.model_validate({name: 0})
