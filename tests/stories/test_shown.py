"""What `status` and `explain` print is what the README shows, but for figures and ids; `--watch` goes on, and `top`
has a terminal of its own."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import termios
from pathlib import Path

from gateway.core.types import Phase
from gateway.sim.server import SimConfig
from tests.stories.served import PROGRAM
from tests.stories.support import gateway, story

README = (Path(__file__).parents[2] / "README.md").read_text()
SIM = SimConfig(model="qwen3-8b", decode_step_s=0.02)


def sample(before):
    """What the README shows after some words."""
    return re.search(rf"{re.escape(before)}.*?```\n(.*?)```", README, re.S)[1]


def shape(text):
    """The lines of an output without what differs each time: figures, ids and the width of columns."""
    for name, plain in {"qwen3-8b": "POOL", "b1": "ONE", "b2": "TWO", "gpt-4o": "ALIAS"}.items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", plain, text)
    text = re.sub(r"key \w+ \(\w+\)", "key ID (NAME)", re.sub(r"\[\d+\]", "[N]", text))
    text = re.sub(r"[^\s()]*\d[^\s():.%]*", "#", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


async def printed(world, *words):
    ran = await asyncio.create_subprocess_exec(
        PROGRAM, *words, "--server", world.admin_url,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    async with asyncio.timeout(20):
        text, _ = await ran.communicate()
    return text.decode()


@contextlib.asynccontextmanager
async def streams(world, count, **more):
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(world.chat(stream=True, max_tokens=2000, **more)) for _ in range(count)
    ]
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


@story
async def test_status_prints_what_the_readme_shows():
    pools = "pools: {qwen3-8b: {backends: [<0>, <1>]}}"
    async with gateway(SIM, SIM, pools=pools) as world:
        world.sims[0].inject("refuse")
        first, other = world.process.table.backends("qwen3-8b")
        await world.until(lambda: first.phase is Phase.DOWN)
        for _ in range(4):
            await world.chat(model="qwen3-8b", stream=True, max_tokens=4)
        async with streams(world, 3, model="qwen3-8b"):
            await world.until(lambda: other.sample is not None and other.sample.running == 3)
            await world.until(lambda: first.stale(world.process.clock.now()), seconds=10)
            told = await printed(world, "status")
    shown = told.partition("\nLast changes of backends")[0]
    assert shape(shown) == shape(sample("vllm-gateway top` has keys"))


@story
async def test_explain_prints_what_the_readme_shows():
    backends = "[{url: <0>, max_in_flight: 1}, {url: <1>, max_in_flight: 1}]"
    settings = f"aliases: [gpt-4o], queue: {{max_wait: 2s}}, backends: {backends}"
    async with gateway(SIM, SIM, pools=f"pools: {{qwen3-8b: {{{settings}}}}}") as world:
        told_of = {"model": "gpt-4o", "text": "Tell me a story of a lighthouse. " * 12}
        async with streams(world, 2, **told_of):
            await world.until(lambda: world.in_flight() == 2)
            reply = await world.chat(**told_of, stream=True)
            assert reply.status_code == 503
            told = await printed(world, "explain", reply.headers["x-request-id"])
    assert shape(told) == shape(sample("takes the newest that did not end well, `--key ID`"))


@story
async def test_a_watched_status_is_shown_again_and_again_until_ctrl_c():
    async with gateway(SIM, pools="pools: {qwen3-8b: {backends: [<0>]}}") as world:
        watching = await asyncio.create_subprocess_exec(
            PROGRAM, "status", "--watch", "--server", world.admin_url,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONUTF8": "1"},
        )  # fmt: skip
        try:
            async with asyncio.timeout(20):
                first = await watching.stdout.readuntil(b"again in 2 s\n")
                world.sims[0].inject("refuse")
                (backend,) = world.process.table
                await world.until(lambda: backend.phase is Phase.DOWN)
                second = await watching.stdout.readuntil(b"again in 2 s\n")
                if b"DOWN" not in second:  # it was asked for before
                    second = await watching.stdout.readuntil(b"again in 2 s\n")
                watching.send_signal(signal.SIGINT)
                assert await watching.wait() == 0
        finally:
            if watching.returncode is None:
                watching.kill()
                await watching.wait()
    assert first.decode().startswith("● OK")
    assert second.decode().startswith("○ DOWN")


@story
async def test_top_takes_keys_on_a_real_terminal_and_puts_it_back():
    async with gateway(SIM, SIM, pools="pools: {qwen3-8b: {backends: [<0>, <1>]}}") as world:
        ours, theirs = pty.openpty()
        os.set_blocking(ours, False)
        before, drawn = termios.tcgetattr(theirs), bytearray()

        def sees(words):
            with contextlib.suppress(BlockingIOError):
                drawn.extend(os.read(ours, 65536))
            return words in drawn

        top = await asyncio.create_subprocess_exec(
            PROGRAM, "top", "--server", world.admin_url, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "PYTHONUTF8": "1"},
        )  # fmt: skip
        try:
            await world.until(lambda: sees(b"qwen3-8b/b1"), seconds=15)
            assert drawn.startswith(b"\x1b[?1049h")  # a screen of its own
            os.write(ours, b"d")
            await world.until(lambda: sees(b"y does it"))
            os.write(ours, b"y")
            backend = world.process.table.get("qwen3-8b/b1")
            held = (Phase.CORDONED, Phase.DRAINING)
            await world.until(lambda: sees(b"") and backend.phase in held)  # what it draws is read
            os.write(ours, b"q")
            await world.until(lambda: sees(b"\x1b[?1049l"))
            async with asyncio.timeout(10):
                assert await top.wait() == 0
            assert termios.tcgetattr(theirs) == before
        finally:
            if top.returncode is None:
                top.kill()
                await top.wait()
            os.close(ours)
            os.close(theirs)
