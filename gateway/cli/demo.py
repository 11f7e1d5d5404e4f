"""`vllm-gateway demo`: a gateway in front of three simulated backends, in one process, on loopback.

Two pools, one of them with two LoRA adapters; a key made for the occasion; nothing outlives it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx2

from gateway.access.filestore import FileKeys
from gateway.app import build, handle_signals
from gateway.cli.console import VerbError
from gateway.config.load import load_config
from gateway.ingress import inherited
from gateway.observe.outlet import Outlet
from gateway.process import Process
from gateway.running import run
from gateway.sim.server import SimConfig, SimServer

MODEL: Final = "qwen3-8b"
ADAPTERS: Final = ("qwen3-8b-sql", "qwen3-8b-legal")
SMALL: Final = "llama3-1b"
# Clients for Messages state up to 128,000 tokens where they are told no limit: those are to fit, and not be used up.
_LIKE: Final = SimConfig(max_model_len=131_072, ends_itself=True)
_PATIENCE_S: Final = 2.5  # for all backends to serve
_PROMPTS: Final = (
    "Why is the sky blue?",
    "Write a haiku about queues.",
    "Summarise: " + "words and " * 200,
)

_NO_UPGRADE: Final = "This is a demo: its backends run in this process and end with it. Press Ctrl-C, and start it again."
_BANNER: Final = """\
vllm-gateway demo: {backends} simulated vLLM backends, no GPU needed. Press Ctrl-C to stop.

  base URL   {url}/v1
  API key    {key}
  models     {models}
  dashboard  {admin}/
  admin      {admin}/admin/v1/overview   {admin}/metrics

  curl {url}/v1/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "max_tokens": 32, "messages": [{{"role": "user", "content": "hello"}}]}}'

  # Python: pip install openai
  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  print(client.chat.completions.create(model="{model}", max_tokens=32, messages=[{{"role": "user", "content": "hello"}}]))

  // Node: npm install openai
  import OpenAI from "openai";
  const client = new OpenAI({{ baseURL: "{url}/v1", apiKey: "{key}" }});
  console.log(await client.chat.completions.create({{ model: "{model}", max_tokens: 32, messages: [{{ role: "user", content: "hello" }}] }}));
"""


async def demo(port: int, admin_port: int, *, traffic: bool, fault: str | None) -> None:
    """Run the demo until Ctrl-C. A port of 0 takes a free one.

    Raises:
        ValueError: `fault` is not the name of a fault of the simulator.
        VerbError: a port is taken.
    """
    configs = (
        replace(_LIKE, model=MODEL, adapters=ADAPTERS),
        replace(_LIKE, model=MODEL, adapters=ADAPTERS[:1]),
        replace(_LIKE, model=SMALL),
    )
    sims = [SimServer(config) for config in configs]
    try:
        for sim in sims:
            await sim.start()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gateway.yaml")
            path.write_text(_config(port, admin_port, sims))
            made = await FileKeys(Path(folder, "keys.yaml"), dict, time.time).create(
                {"name": "demo"}
            )
            process = build(load_config(path), path, Outlet())
            process.upgrades.refusal = _NO_UPGRADE
            handle_signals(asyncio.get_running_loop(), process)
            try:
                sockets = inherited.listeners(process.config, inherited.Given())
            except OSError as error:
                taken = f"{error.filename}: {error.strerror}"
                raise VerbError(taken, "try --port 0 --admin-port 0") from error
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(run(process, sockets), name="gateway")
                await process.listening.wait()
                await _all_known(process)
                print(_banner(process, made.key, len(sims)), flush=True)
                if fault is not None:
                    sims[0].inject(fault)
                    print(f"Fault injected into the first backend: {fault}", flush=True)
                load = (
                    group.create_task(_traffic(process, made.key), name="traffic")
                    if traffic
                    else None
                )
                await process.stopping.wait()
                if load is not None:
                    load.cancel()
                await asyncio.wait([serving])
    finally:
        for sim in sims:
            await sim.stop()


def _config(port: int, admin_port: int, sims: list[SimServer]) -> str:
    first, second, third = (sim.url for sim in sims)
    return f"""\
version: 1
listen: 127.0.0.1:{port}
admin: {{listen: "127.0.0.1:{admin_port}"}}
keys: {{file: keys.yaml}}
log: {{access: false, level: warning}}
health: {{interval: 500ms}}
shutdown: {{grace: 2s}}
pools:
  {MODEL}: {{backends: ["{first}", "{second}"]}}
  {SMALL}: {{backends: ["{third}"]}}
"""


async def _all_known(process: Process) -> None:
    """Wait until every backend serves, so that the first pasted snippet works."""
    deadline = process.clock.now() + _PATIENCE_S
    while process.clock.now() < deadline:
        serving, total = process.table.serving()
        if serving == total:
            return
        await asyncio.sleep(0.02)


def _banner(process: Process, key: str, backends: int) -> str:
    return _BANNER.format(
        url=f"http://127.0.0.1:{process.public_port}",
        admin=f"http://127.0.0.1:{process.admin_port}",
        key=key,
        models=", ".join(sorted(process.handler.catalog().entries)),
        model=MODEL,
        backends=backends,
    )


async def _traffic(process: Process, key: str) -> None:
    """Send a few requests a second to every model until cancelled; one in ten clients leaves early."""
    rng = random.Random()
    url = f"http://127.0.0.1:{process.public_port}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}"}

    async def one(http: httpx2.AsyncClient) -> None:
        tokens = rng.randrange(8, 120)
        prompt = f"{rng.choice(_PROMPTS)} [[sim:tokens={tokens}]]"
        body = {
            "model": rng.choice((MODEL, SMALL, *ADAPTERS)),
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": prompt}],
        }
        leaves_after = rng.randrange(1, 20) if rng.random() < 0.1 else None
        try:
            async with http.stream("POST", url, json=body, headers=headers) as reply:
                seen = 0
                async for _ in reply.aiter_lines():
                    seen += 1
                    if seen == leaves_after:
                        return
        except httpx2.HTTPError:
            return  # what a planted fault does to clients is for the metrics to tell

    async with (
        httpx2.AsyncClient(trust_env=False, timeout=60) as http,
        asyncio.TaskGroup() as group,
    ):
        while True:
            group.create_task(one(http), name="demo request")
            await asyncio.sleep(rng.expovariate(6.0))
