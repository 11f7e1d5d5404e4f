"""A gateway with traffic and troubles, to look at: simulated backends, and one that does not start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import AsyncIterator

import httpx2

from gateway.sim.server import SimConfig
from tests.ports import free_port
from tests.stories.support import World, gateway

LOG = pathlib.Path(__file__).parents[1] / "data/logs/kv_small.txt"
LARGE, SMALL, CODER = "qwen3-72b", "llama3-8b", "coder-32b"
_CLIENTS = 5.0  # requests a second
_PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about queues.",
    "Summarise: " + "words and " * 300,
)
_SERVER = "import sys; print(open(sys.argv[1]).read()); print(sys.argv[2]); sys.exit(1)"


def that_does_not_start(last_words: str = "") -> dict[str, object]:
    """Return a backend whose server tells why it cannot start, and ends."""
    command = [sys.executable, "-c", _SERVER, str(LOG), last_words]
    return {"name": "b2", "launch": {"command": command, "port": free_port()}}


@contextlib.asynccontextmanager
async def scene(broken: dict[str, object] | None = None) -> AsyncIterator[World]:
    """Run three pools; the first backend of the largest can be given faults."""
    quick = {"backoff": "1s", "max_backoff": "2s", "max_restarts": 2}
    pools = {
        LARGE: {"backends": ["<0>", "<1>", "<2>"], "queue": {"max_requests": 40}},
        SMALL: {"backends": ["<3>", "<4>"]},
        CODER: {"backends": ["<5>", broken or that_does_not_start()], "supervision": quick},
    }
    sims = [SimConfig(model=name) for name in (LARGE,) * 3 + (SMALL,) * 2 + (CODER,)]
    listed = "pools: " + json.dumps(pools)
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(*sims, pools=listed, extra=f"state: {folder}", wait=False) as world:
            await world.ready(len(sims))
            yield world


async def traffic(world: World) -> None:
    """Send requests to every pool until cancelled; some clients leave early."""
    rng = random.Random(1)

    async def one(http: httpx2.AsyncClient) -> None:
        body = {
            "model": rng.choice((LARGE, LARGE, SMALL, CODER)),
            "stream": True,
            "max_tokens": rng.randrange(8, 160),
            "messages": [{"role": "user", "content": rng.choice(_PROMPTS)}],
        }
        most = rng.randrange(1, 20) if rng.random() < 0.05 else 1_000_000
        with contextlib.suppress(httpx2.HTTPError):
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                async for _ in reply.aiter_lines():
                    most -= 1
                    if most == 0:
                        return

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one(world.http), name="a client")
            await asyncio.sleep(rng.expovariate(_CLIENTS))
