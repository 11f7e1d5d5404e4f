"""Ten incidents, as they happen to gateways: each plants one fault under traffic.

A scene is entered when the fault is in. What operators are told of it is asked over HTTP, as the command
line and the dashboard do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx2

from gateway.core.limits import KeyLimits
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests.fakelaunch import Script
from tests.redisserver import redis_server
from tests.stories.supervised import fleet, launched, machine
from tests.stories.support import World, gateway

WITHIN_S = 15.0  # the promise; tests are more patient, as machines that run many are slow
_MIB = 1024 * 1024

Play = Callable[[], "contextlib.AbstractAsyncContextManager[World]"]


@dataclass(frozen=True)
class Incident:
    """One incident: what happens, and what operators must be told."""

    name: str
    planted: str  # how, for the report
    play: Play
    kinds: tuple[str, ...]  # of the problem; any of them names the cause
    words: tuple[str, ...]  # that its sentence, cause or next step has
    alert: str  # its name in deploy/prometheus/alerts.yaml


@dataclass(frozen=True)
class Told:
    """What an operator reads: the verdict, and the problem that names the cause."""

    after_s: float
    verdict: str
    state: str
    problem: dict[str, str]


async def told_of(incident: Incident, world: World, patience_s: float) -> Told:
    """Ask until the cause is named; return what was said, and after how long."""
    began = time.monotonic()
    said: dict[str, object] = {}
    async with httpx2.AsyncClient(trust_env=False, timeout=10) as http:
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    said = (await http.get(world.admin_url + "/admin/v1/overview")).json()
                    for problem in said["problems"]:
                        text = " ".join((problem["sentence"], problem["cause"], problem["next"]))
                        if problem["kind"] in incident.kinds and all(
                            w in text for w in incident.words
                        ):
                            verdict = said["verdict"]
                            after_s = time.monotonic() - began
                            return Told(after_s, verdict["sentence"], verdict["state"], problem)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"{incident.name}: not named within {patience_s:.0f} s: {said.get('problems')}"
            ) from None


@contextlib.asynccontextmanager
async def traffic(world: World, count: int = 4, **more: object) -> AsyncIterator[None]:
    """Have so many clients ask one thing after the other, whatever becomes of it."""

    async def client() -> None:
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                await world.chat(**({"stream": True, "max_tokens": 200} | more))
            await asyncio.sleep(0.02)

    loop = asyncio.get_running_loop()
    clients = [loop.create_task(client()) for _ in range(count)]
    try:
        yield
    finally:
        for each in clients:
            each.cancel()
        await asyncio.wait(clients)


async def _streaming(world: World, count: int) -> None:
    await world.until(lambda: world.in_flight() >= count, 10)


@contextlib.asynccontextmanager
async def frozen() -> AsyncIterator[World]:
    """An engine that stands still, though its server answers."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):
        await _streaming(world, 3)
        world.sims[0].inject("frozen")
        yield world


@contextlib.asynccontextmanager
async def crash_loop() -> AsyncIterator[World]:
    """A launched server that ends soon after each start."""
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
        " 23.64 GiB of which 512.00 MiB is free.\n"
    )
    async with machine() as on:
        on["m/b1"].judge = lambda flags: Script(exit_code=1, log=log)
        patient = {"supervision": {"max_restarts": 100}}
        async with fleet(on, launched(on["m/b1"]), wait=False, **patient) as world:
            yield world


@contextlib.asynccontextmanager
async def kv_full() -> AsyncIterator[World]:
    """A KV cache that holds no more: somebody else's long prompts fill it."""
    small = SimConfig(model="m", max_model_len=4096, num_blocks=256, decode_step_s=0.05)
    body = {"model": "m", "prompt": [*range(1, 3901)], "max_tokens": 180, "ignore_eos": True}

    async def other() -> None:
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as http:
            while True:
                reply = await http.post(world.sims[0].url + "/v1/completions", json=body)
                reply.raise_for_status()

    async with gateway(small, as_shipped=True) as world:
        others = [asyncio.get_running_loop().create_task(other()) for _ in range(2)]
        try:
            async with traffic(world, max_tokens=50):
                yield world
        finally:
            for each in others:
                each.cancel()
            await asyncio.wait(others)


@contextlib.asynccontextmanager
async def adapter_missing() -> AsyncIterator[World]:
    """An adapter whose path is not on the backend's machine."""
    pool = {"adapters": [{"name": "sql", "path": "/loras/missing"}]}
    async with gateway(SimConfig(model="m"), pool=pool, as_shipped=True) as world:
        async with traffic(world, model="sql"):
            yield world


@contextlib.asynccontextmanager
async def redis_gone() -> AsyncIterator[World]:
    """A Redis that is killed."""
    with redis_server() as server:
        extra = f"redis: {server.url}"
        async with (
            gateway(SimConfig(model="m"), extra=extra, as_shipped=True) as world,
            traffic(world),
        ):
            server.kill()
            yield world


@contextlib.asynccontextmanager
async def bad_reload() -> AsyncIterator[World]:
    """A file with a misspelt setting is reloaded."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):
        world.path.write_text(world.path.read_text().replace("shutdown:", "shutdwon:"))
        assert not (await reload(world.process)).done
        yield world


@contextlib.asynccontextmanager
async def slow_peer() -> AsyncIterator[World]:
    """One of two backends needs five times as long for each token."""
    quick, slow = SimConfig(model="m"), SimConfig(model="m", decode_step_s=0.05)
    async with gateway(quick, slow, as_shipped=True) as world, traffic(world, 12):
        yield world


@contextlib.asynccontextmanager
async def key_over_limit() -> AsyncIterator[World]:
    """A key that may send three requests a minute sends eight."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):
        limits = KeyLimits(requests_per_minute=3)
        made = keys.create(world.path.parent / "keys.yaml", name="ci", limits=limits)
        assert (await reload(world.process)).done
        for _ in range(8):
            await world.chat(headers={"authorization": f"Bearer {made.key}"}, max_tokens=1)
        yield world


@contextlib.asynccontextmanager
async def slow_client() -> AsyncIterator[World]:
    """A client that asks for a long stream and does not read it."""
    long = SimConfig(model="m", speed=0, max_model_len=200_000, num_blocks=20_000)
    async with gateway(long, as_shipped=True) as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port, limit=16)
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "max_tokens": 60_000,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {world.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        try:
            await _streaming(world, 1)
            yield world
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def disk_full() -> AsyncIterator[World]:
    """The disk of the state folder has 40 MiB left."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):
        world.process.disk.free = lambda folder: 40 * _MIB
        yield world


INCIDENTS = (
    Incident(
        "An engine is frozen", "the engine stops; `/health` and `/metrics` still answer", frozen,
        ("frozen", "pool_down"), ("m/b1", "Nothing came from it"), "BackendFrozen",
    ),
    Incident(
        "A crash loop", "each start of vLLM ends for lack of GPU memory", crash_loop,
        ("crash_looping", "pool_down", "suspended"), ("crash", "memory"), "BackendCrashLoops",
    ),
    Incident(
        "A KV cache is full", "long prompts fill it", kv_full,
        ("saturated", "kv_full"), ("KV cache", "full"), "PoolSaturated",
    ),
    Incident(
        "An adapter is missing", "its path is not there", adapter_missing,
        ("adapter_missing",), ("sql", "/loras/missing"), "AdapterMissing",
    ),
    Incident("Redis is gone", "it is killed", redis_gone, ("store_lost",), ("Redis",), "SharedStoreLost"),
    Incident(
        "A bad reload", "a misspelt setting", bad_reload,
        ("reload_failed",), ("shutdwon", "vllm-gateway reload"), "ReloadFailed",
    ),
    Incident(
        "One slow peer", "one of two needs five times as long for a token", slow_peer,
        ("slow",), ("m/b2", "slower"), "BackendSlow",
    ),
    Incident(
        "A key is over its limit", "8 requests, where 3 a minute are allowed", key_over_limit,
        ("key_over_limit",), ("requests_per_minute", "refused"), "KeyOverLimit",
    ),
    Incident(
        "A client is too slow", "it asks for a long stream, and does not read", slow_client,
        ("client_slow",), ("not read", "timeouts.client_write"), "ClientTooSlow",
    ),
    Incident(
        "The disk is nearly full", "40 MiB are left for the state folder", disk_full,
        ("disk_low",), ("nearly full", "40 MiB"), "DiskLow",
    ),
)  # fmt: skip
