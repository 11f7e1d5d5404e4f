"""Operators ask why a request waits, was refused, or would be; the answer is what really happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path

from gateway.core.limits import KeyLimits
from gateway.core.traffic import Queued
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests import loopback
from tests.stories.support import gateway, story

LONG = SimConfig(model="m", reply_tokens=4000)  # 40 s: as long as it is listened to
ONE_PLACE = """\
pools:
  m:
    backends:
      - url: <0>
        max_in_flight: 1
    queue:
      max_requests: 1
"""
PROGRAM = Path(sys.executable).with_name("vllm-gateway")


@contextlib.asynccontextmanager
async def admin(world):
    async with loopback.client(base_url=world.admin_url + "/admin/v1/") as http:
        yield http


async def verb(world, *words):
    """Run the command line against the gateway; return its exit code and standard output."""
    program = await asyncio.create_subprocess_exec(
        PROGRAM, *words, "--server", world.admin_url, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await program.communicate()
    return program.returncode, out.decode()


async def route(world, **query):
    async with admin(world) as http:
        return (await http.get("route", params={"model": "m", "tokens": 5, **query})).json()


async def explain(world, request_id):
    async with admin(world) as http:
        return (await http.get(f"decisions/{request_id}")).json()


@contextlib.asynccontextmanager
async def held(world, headers=None):
    """Hold the one place with a stream, until the end of the block."""
    body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}
    async with world.http.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as reply:
        assert reply.status_code == 200
        yield


@contextlib.asynccontextmanager
async def waiting(world, request_id):
    """Have a request wait for the place; yields the task that gets its reply."""
    asked = world.chat(max_tokens=1, headers={"x-request-id": request_id})
    task = asyncio.get_running_loop().create_task(asked)
    await world.until(lambda: world.process.handler.gate.queues()["m"][0] == 1)
    try:
        yield task
    finally:
        task.cancel()


@story
async def test_a_request_explains_itself_while_it_waits_and_after():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        async with contextlib.AsyncExitStack() as stack:
            async with held(world):
                task = await stack.enter_async_context(waiting(world, "wanted-1"))
                told = await explain(world, "wanted-1")
                assert (told["state"], told["position"]) == ("waiting", 1)
                assert 29 < told["may_wait_s"] <= 30  # since it came, not since it joined the queue
                (backend,) = told["backends"]
                assert (backend["verdict"], backend["expected_s"]) == ("at_limit", None)
                assert told["setting"] == backend["setting"]
                assert told["setting"]["name"] == "pools.m.backends[0].max_in_flight"
                name, _, line = told["setting"]["origin"].partition(":")
                text = world.path.read_text().splitlines()
                assert (name, text[int(line) - 1].strip()) == ("gateway.yaml", "max_in_flight: 1")
                code, out = await verb(world, "explain", "wanted-1")
                assert code == 0
                assert out.startswith("wanted-1 has been waiting ")
                assert "m/b1     at limit" in out
                overview = await stack.enter_async_context(admin(world))
                (pool,) = (await overview.get("overview")).json()["pools"]
                assert (pool["state"], pool["queue"]["requests"]) == ("saturated", 1)
                assert pool["queue"]["oldest_s"] > 0
            reply = await task
        assert (reply.status_code, reply.headers["x-request-id"]) == (200, "wanted-1")
        told = await explain(world, "wanted-1")
        assert (told["state"], told["backend"]) == ("admitted", "m/b1")
        assert told["waited_s"] > 0
        assert told["sentence"].endswith(" for m and was sent to m/b1.")
        assert "hello" not in json.dumps(told)


@story
async def test_a_shed_request_explains_itself_in_the_words_its_client_got():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        async with held(world), waiting(world, "first"):
            reply = await world.chat(headers={"x-request-id": "second"})
            told = await explain(world, "second")
        assert (reply.status_code, reply.headers["x-gateway-shed-reason"]) == (503, "queue_full")
        assert (told["state"], told["status"], told["shed_reason"]) == (
            "refused",
            503,
            "queue_full",
        )
        assert told["message"] == reply.json()["error"]["message"]
        assert told["setting"]["name"] == "pools.m.queue.max_requests"
        await world.settled()
        await world.until(lambda: world.process.handler.gate.queues()["m"][0] == 0)
        assert (await explain(world, "first"))["state"] == "left"


@story
async def test_a_request_that_goes_at_once_has_no_decision_of_the_gate():
    async with gateway(SimConfig(model="m", speed=0), pools=ONE_PLACE) as world:
        reply = await world.chat(headers={"x-request-id": "quick"})
        assert reply.status_code == 200
        assert (await explain(world, "quick"))["code"] == "decision_not_found"
        assert (await verb(world, "explain", "never"))[0] == 4


@story
async def test_what_a_dry_run_says_is_what_a_request_then_does():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        told = await route(world, output=1)
        assert (told["verdict"], told["backend"]) == ("now", "m/b1")
        assert (await world.chat(max_tokens=1)).status_code == 200

        async with held(world):
            told = await route(world)
            assert (told["verdict"], told["position"]) == ("wait", 1)
            assert world.process.handler.gate.queues()["m"] == Queued()
            async with waiting(world, "real"):
                real = await explain(world, "real")
                assert real["position"] == told["position"]
                assert real["backends"] == told["backends"]
                assert real["setting"] == told["setting"]

                told = await route(world)
                reply = await world.chat()
                assert told["verdict"] == "refused"
                assert told["status"] == reply.status_code
                assert told["code"] == reply.json()["error"]["code"]
                assert told["shed_reason"] == reply.headers["x-gateway-shed-reason"]
                code, out = await verb(world, "route", "--model", "m", "--tokens", "5")
                assert (code, out.splitlines()[0]) == (
                    0,
                    "It would be refused at once: 503 queue_full.",
                )


@story
async def test_a_dry_run_says_which_limit_would_refuse_a_request_and_uses_nothing_up():
    limits = KeyLimits(requests_per_minute=2, input_tokens_per_minute=1000)
    async with gateway(LONG, pools=ONE_PLACE) as world:
        made = keys.create(world.path.parent / "keys.yaml", name="ci", limits=limits)
        assert (await reload(world.process)).done
        headers = {"authorization": f"Bearer {made.key}"}
        for _ in range(5):
            assert (await route(world, key=made.id))["verdict"] == "now"
        told = await route(world, key=made.id, tokens=2000)
        assert (told["code"], told["backends"]) == ("rate_limit_exceeded", [])
        assert "input_tokens_per_minute: 1,000; 0 used, 2,000 requested" in told["message"]
        assert told["retry_after_s"] is None  # it can never fit
        assert (await world.chat(headers=headers, max_tokens=1)).status_code == 200
        async with held(world, headers=headers):
            told = await route(world, key=made.id)
            reply = await world.chat(headers=headers, max_tokens=1)
            assert 0 < told["retry_after_s"] <= 30
            assert (told["status"], told["code"]) == (429, reply.json()["error"]["code"])
            assert told["message"].split(";")[0] == reply.json()["error"]["message"].split(";")[0]
            code, out = await verb(world, "route", "--model", "m", "--key", made.id)
            assert (code, out.splitlines()[0]) == (
                0,
                "It would be refused: 429 rate_limit_exceeded.",
            )
            assert "requests_per_minute" in out


@story
async def test_a_dry_run_refuses_what_can_never_be_served_as_the_gateway_does():
    async with gateway(SimConfig(model="m", speed=0, max_model_len=512), pools=ONE_PLACE) as world:
        text = "word " * 1000
        reply = await world.chat(text)
        told = await route(world, tokens=1000)
        assert (told["verdict"], told["status"]) == ("refused", reply.status_code)
        assert told["code"] == reply.json()["error"]["code"] == "context_length_exceeded"
        code, _ = await verb(world, "route", "--model", "nope")
        assert code == 4
        assert (await world.chat(model="nope")).status_code == 404


@story
async def test_what_an_engine_refuses_is_told_with_the_model_and_kept():
    async with gateway(SimConfig(model="m", speed=0)) as world:
        world.sims[0].inject("admission_503")
        reply = await world.chat(headers={"x-request-id": "at-once"})
        assert reply.headers["x-gateway-shed-reason"] == "engine"
        message = reply.json()["error"]["message"]
        assert message.startswith("Model `m` is overloaded: the engine refused this request (")
        assert message.endswith(f"Retry in {reply.headers['retry-after']} s.")
        told = await explain(world, "at-once")
        assert (told["state"], told["status"], told["shed_reason"]) == ("refused", 503, "engine")
        assert (told["backend"], told["setting"]) == ("m/b1", None)
        assert told["message"] == message
        assert told["sentence"] == "at-once for m was sent to m/b1, which answered 503 engine."
        assert [each["verdict"] for each in told["backends"]] == ["already_tried"]
        assert (await verb(world, "explain", "at-once"))[0] == 0


@story
async def test_what_an_engine_refuses_after_a_wait_is_not_told_as_sent():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        async with contextlib.AsyncExitStack() as stack:
            async with held(world):
                task = await stack.enter_async_context(waiting(world, "waited"))
                world.sims[0].inject("admission_503")
            reply = await task
        assert reply.headers["x-gateway-shed-reason"] == "engine"
        told = await explain(world, "waited")
        assert (told["state"], told["position"], told["backend"]) == ("refused", 1, "m/b1")
        pattern = r"waited waited (\S+) s for m, was sent to m/b1, which answered 503 engine\."
        said = re.fullmatch(pattern, told["sentence"])
        assert abs(float(said[1]) - told["waited_s"]) < 0.051  # each is rounded by itself
        assert told["message"] == reply.json()["error"]["message"]


@story
async def test_an_id_that_comes_again_is_explained_by_its_last_request_alone():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        async with contextlib.AsyncExitStack() as stack:
            async with held(world):
                task = await stack.enter_async_context(waiting(world, "same"))
            assert (await task).status_code == 200
        world.sims[0].inject("admission_503")
        await world.chat(headers={"x-request-id": "same"})
        told = await explain(world, "same")
        assert (told["waited_s"], told["position"], told["shed_reason"]) == (0, None, "engine")


@story
async def test_what_waits_when_the_gateway_stops_is_kept_as_refused():
    async with gateway(LONG, pools=ONE_PLACE) as world, held(world):
        async with waiting(world, "stopped") as task:
            world.process.stopping.set()
            reply = await task
        kept = world.process.handler.gate.decisions.get("stopped")
        assert reply.headers["x-gateway-shed-reason"] == "draining"
        assert (kept.state.value, kept.shed_reason.value) == ("refused", "draining")
        assert kept.message == reply.json()["error"]["message"]
