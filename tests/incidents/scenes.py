"""Ten incidents, as they happen to gateways: in each, one fault is planted under traffic.

A scene is a gateway with traffic, in order as yet, and what plants the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import httpx2

from gateway.core.limits import KeyLimits
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests import loopback
from tests.fakelaunch import Script
from tests.redisserver import redis_server
from tests.stories.supervised import fleet, launched, machine
from tests.stories.support import World, gateway

WITHIN_S = 15.0  # after the fault, the cause is named
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Scene:
    """A gateway with traffic, and what plants the fault."""

    world: World
    plant: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Incident:
    """One incident: what happens, and what operators must be told."""

    name: str
    planted: str  # how, for the report
    scene: Callable[[], contextlib.AbstractAsyncContextManager[Scene]]
    kinds: tuple[str, ...]  # of the problem; any of them names the cause
    words: tuple[str, ...]  # that its sentence, cause or next step has
    alert: str  # its name in deploy/prometheus/alerts.yaml

    def named_in(self, text: str) -> bool:
        """Whether a text names the cause."""
        return all(word in text for word in self.words)


@contextlib.asynccontextmanager
async def traffic(world: World, count: int = 4, **more: object) -> AsyncIterator[None]:
    """Have so many clients ask one thing after the other, whatever becomes of it."""

    async def client() -> None:
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                await world.chat(**({"stream": True, "max_tokens": 200} | more))
            await asyncio.sleep(0.02)

    async with _going_on([client] * count):
        yield


@contextlib.asynccontextmanager
async def _going_on(what: list[Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(each()) for each in what]
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


async def _streaming(world: World, count: int) -> None:
    await world.until(lambda: world.in_flight() >= count, 10)


@contextlib.asynccontextmanager
async def frozen() -> AsyncIterator[Scene]:
    """An engine that stands still, though its server answers."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):

        async def plant() -> None:
            await _streaming(world, 3)
            world.sims[0].inject("frozen")

        yield Scene(world, plant)


@contextlib.asynccontextmanager
async def crash_loop() -> AsyncIterator[Scene]:
    """A launched server that ends, and then soon after each start."""
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
        " 23.64 GiB of which 512.00 MiB is free.\n"
    )
    async with machine() as on:
        slot = on["m/b1"]
        patient = {"supervision": {"max_restarts": 100}}
        async with fleet(on, launched(slot), **patient) as world, traffic(world):

            async def plant() -> None:
                slot.judge = lambda flags: Script(exit_code=1, log=log)
                await slot.die(1, log)

            yield Scene(world, plant)


@contextlib.asynccontextmanager
async def kv_full() -> AsyncIterator[Scene]:
    """A KV cache that holds no more: somebody else's long prompts fill it."""
    small = SimConfig(model="m", max_model_len=4096, num_blocks=256, decode_step_s=0.05)
    body = {"model": "m", "prompt": [*range(1, 3901)], "max_tokens": 180, "ignore_eos": True}
    begun = asyncio.Event()

    async def other() -> None:
        await begun.wait()
        async with loopback.client(timeout=60) as http:
            while True:
                reply = await http.post(world.sims[0].url + "/v1/completions", json=body)
                reply.raise_for_status()

    async def plant() -> None:
        begun.set()

    async with gateway(small, as_shipped=True) as world:
        async with _going_on([other] * 2), traffic(world, max_tokens=50):
            yield Scene(world, plant)


@contextlib.asynccontextmanager
async def adapter_missing() -> AsyncIterator[Scene]:
    """An adapter is added whose path is not on the backend's machine."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):

        async def plant() -> None:
            listed = '"adapters": [{"name": "sql", "path": "/loras/missing"}], "backends"'
            world.path.write_text(world.path.read_text().replace('"backends"', listed))
            assert (await reload(world.process)).done

        async with traffic(world, model="sql"):
            yield Scene(world, plant)


@contextlib.asynccontextmanager
async def redis_gone() -> AsyncIterator[Scene]:
    """A Redis that is killed."""
    with redis_server() as server:
        extra = f"redis: {server.url}"
        async with (
            gateway(SimConfig(model="m"), extra=extra, as_shipped=True) as world,
            traffic(world),
        ):

            async def plant() -> None:
                server.kill()

            yield Scene(world, plant)


@contextlib.asynccontextmanager
async def bad_reload() -> AsyncIterator[Scene]:
    """A file with a misspelt setting is reloaded."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):

        async def plant() -> None:
            world.path.write_text(world.path.read_text().replace("shutdown:", "shutdwon:"))
            assert not (await reload(world.process)).done

        yield Scene(world, plant)


@contextlib.asynccontextmanager
async def slow_peer() -> AsyncIterator[Scene]:
    """One of two backends comes to need five times as long for each token."""
    pair = [SimConfig(model="m")] * 2
    async with gateway(*pair, as_shipped=True) as world, traffic(world, 12):

        async def plant() -> None:
            engine = world.sims[1].engine
            engine.config = replace(engine.config, decode_step_s=0.05)

        yield Scene(world, plant)


@contextlib.asynccontextmanager
async def key_over_limit() -> AsyncIterator[Scene]:
    """A key that may send three requests a minute sends eight."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):
        limits = KeyLimits(requests_per_minute=3)
        made = keys.create(world.path.parent / "keys.yaml", name="ci", limits=limits)
        assert (await reload(world.process)).done

        async def plant() -> None:
            for _ in range(8):
                await world.chat(headers={"authorization": f"Bearer {made.key}"}, max_tokens=1)

        yield Scene(world, plant)


@contextlib.asynccontextmanager
async def slow_client() -> AsyncIterator[Scene]:
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

        async def plant() -> None:
            writer.write(head.encode() + body)
            await _streaming(world, 1)

        try:
            yield Scene(world, plant)
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def disk_full() -> AsyncIterator[Scene]:
    """The disk of the state folder has 40 MiB left."""
    async with gateway(SimConfig(model="m"), as_shipped=True) as world, traffic(world):

        async def plant() -> None:
            world.process.disk.free = lambda folder: 40 * _MIB

        yield Scene(world, plant)


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
        ("saturated", "kv_full"), ("KV cache", "full"), "KvCacheFull",
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
