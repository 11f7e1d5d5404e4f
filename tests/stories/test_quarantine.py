"""A request that kills servers: at most two die of it, and everybody else is served."""

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.stubs import page, stub
from tests.stories.support import FAST, frames, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.02)
PROGRAM = Path(sys.executable).with_name("vllm-gateway")
POISON = "the poison prompt"


def dead(world):
    return [sim for sim in world.sims if sim.state.dead]


def poisoned(world):
    for sim in world.sims:
        sim.inject(f"die_on_prompt:{POISON}")


async def admin(world, path, order=None):
    async with loopback.client(base_url=world.admin_url) as http:
        reply = await (http.get(path) if order is None else http.post(path, json=order))
        return reply.json()


@pytest.mark.parametrize(
    ("stream", "pool"), [(False, {}), (True, {}), (False, {"resume_replies": 1})], ids=str
)
def test_a_request_that_kills_its_server_kills_two_of_four_and_is_refused_then(stream, pool):
    @story
    async def check():
        async with gateway(FAST, FAST, FAST, FAST, pool=pool) as world:
            poisoned(world)
            replies = []
            for _ in range(6):  # as an SDK comes again
                replies.append(await world.chat(POISON, max_tokens=5, stream=stream))
            assert len(dead(world)) == 2
            last = replies[-1]
            assert last.status_code == 400
            error = last.json()["error"]
            assert error["code"] == "request_quarantined"
            assert "two servers crashed" in error["message"]
            assert POISON not in last.text
            for _ in range(10):
                assert (await world.chat("something else", max_tokens=1)).status_code == 200

            (kept,) = (await admin(world, "/admin/v1/quarantine"))["data"]
            assert kept["id"] in error["message"]
            assert kept["pool"] == "m"
            assert len(kept["deaths"]) == 2
            refused = [each.status_code for each in replies].count(400)
            assert kept["refused"] == {"test": refused}
            assert "gateway_quarantined_total{" in await world.metrics()
            events = (await admin(world, "/admin/v1/events"))["data"]
            assert [each["kind"] for each in events].count("quarantined") == 1
            assert POISON not in json.dumps(events)

            lifted = await admin(world, f"/admin/v1/quarantine/{kept['id']}:lift", {})
            assert lifted == {"id": kept["id"], "lifted": True}
            for sim in world.sims:
                sim.clear()
            await world.ready(2)
            assert (await world.chat(POISON, max_tokens=1, stream=stream)).status_code == 200

    check()


@contextlib.asynccontextmanager
async def dies_with(text, config=SLOW):
    """Have each server die once it has written some of the answer to a chat, and check that two do."""
    async with gateway(config, config, config, config) as world:
        down = []

        async def killer():
            while True:
                for sim in world.sims:
                    if sim not in down and any(each.tokens_emitted > 3 for each in sim.requests):
                        down.append(sim)
                        await sim.stop()
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            kills = group.create_task(killer())
            reply = await world.chat(text, stream=True, max_tokens=200)
            kills.cancel()
        assert len(down) == 2
        last = json.loads(frames(reply.text)[-2])
        assert last["error"]["code"] == "request_quarantined"
        yield world


@story
async def test_a_stream_that_goes_on_elsewhere_does_not_take_the_whole_pool_with_it():
    async with dies_with(POISON) as world:
        again = await world.chat(POISON, stream=True, max_tokens=200)
        assert again.status_code == 400


@story
async def test_nor_does_one_whose_large_body_is_gone_by_then():
    long = replace(SLOW, max_model_len=65536, prefill_tokens_per_s=10**7)
    async with dies_with("a long prompt " * 6000, long) as world:
        assert len([*world.process.handler.retrying.quarantine]) == 1


@story
async def test_different_large_streams_with_one_request_id_are_different_requests():
    """Some clients give all that they send in one job the same `x-request-id`."""
    long = replace(SLOW, max_model_len=65536, prefill_tokens_per_s=10**7)
    job = {"x-request-id": "job-7"}
    async with gateway(long, long, long) as world:

        def writing():
            backends = zip(world.sims, world.process.table, strict=True)
            busy = [sim for sim, backend in backends if backend.in_flight and asked(sim)]
            return [sim for sim in busy if asked(sim)[-1].tokens_emitted > 3]

        for text in ("one long prompt ", "another one "):
            async with asyncio.TaskGroup() as group:
                sent = group.create_task(
                    world.chat(text * 6000, stream=True, max_tokens=60, headers=job)
                )
                await world.until(writing)
                await writing()[0].stop()
            assert '"error"' not in sent.result().text
            assert frames(sent.result().text)[-1] == "[DONE]"


@pytest.mark.parametrize("fault", ["reset_before_headers", "http_500", "truncate_after:3"])
def test_what_fails_where_the_server_lives_is_never_refused(fault):
    @story
    async def check():
        async with gateway(FAST, FAST, FAST) as world:
            for sim in world.sims:
                sim.inject(f"{fault}@3")
            statuses = [(await world.chat("x", max_tokens=5)).status_code for _ in range(40)]
            assert 400 not in statuses
            assert statuses[-1] == 200
            assert [*world.process.handler.retrying.quarantine] == []

    check()


@story
async def test_a_backend_where_something_was_lost_is_probed_at_once():
    seldom = "health: {interval: 60s}"  # once it serves, no probe is due
    async with gateway(FAST, as_shipped=True, extra=seldom) as world:
        before = len(world.sims[0].received("/health"))
        world.sims[0].inject("reset_before_headers@1")
        assert (await world.chat(max_tokens=1)).status_code == 502
        await world.until(lambda: len(world.sims[0].received("/health")) == before + 1)


@story
async def test_an_error_of_a_backend_whose_probe_hangs_is_told_while_it_hangs():
    """A silence proves no death, so the client is not held until all the time for a proof has passed."""

    def answer(path):
        if path == "/v1/models":
            return page(b'{"object":"list","data":[{"id":"m"}]}')
        if path.endswith("completions"):
            asked.append(path)
            return page(b'{"error":{"message":"it broke"}}', "500 Internal Server Error")
        return None if asked else page()

    asked = []
    async with stub(answer) as (first, _), stub(answer) as (second, _):
        pools = f"pools: {{m: {{backends: [{first}, {second}]}}}}"
        async with gateway(pools=pools, health="timeout: 20s") as world:
            await world.ready(2)
            assert (await world.chat(max_tokens=1)).status_code == 500
            assert world.process.handler.retrying.quarantine.watched, "the loss was decided first"


@story
async def test_the_verbs_show_and_lift_it():
    async with gateway(FAST, FAST, FAST) as world:
        poisoned(world)
        while (await world.chat(POISON, max_tokens=5)).status_code != 400:
            pass

        def verb(*words):
            command = [str(PROGRAM), "quarantine", *words]
            command += ["--server", world.admin_url]
            return subprocess.run(command, capture_output=True, text=True, timeout=20)

        listed = await asyncio.to_thread(verb, "list", "-o", "json")
        (kept,) = json.loads(listed.stdout)["data"]
        table = await asyncio.to_thread(verb, "list")
        assert kept["id"] in table.stdout
        assert "test: 1" in table.stdout
        lifted = await asyncio.to_thread(verb, "lift", kept["id"])
        assert lifted.stdout == f"{kept['id']} may be sent again\n"
        again = await asyncio.to_thread(verb, "lift", kept["id"])
        assert again.returncode == 4
        assert "No request in quarantine" in again.stderr
        assert "no request is in quarantine" in (await asyncio.to_thread(verb, "list")).stdout


@story
async def test_who_was_there_by_chance_is_served_on_after_one_death():
    async with gateway(SLOW, SLOW) as world:
        async with asyncio.TaskGroup() as group:
            sent = [
                group.create_task(world.chat(f"number {each}", stream=True, max_tokens=60))
                for each in range(8)
            ]
            await world.until(lambda: all(each.in_flight for each in world.process.table))
            await asyncio.sleep(0.2)
            await world.sims[0].stop()
        for each in sent:
            assert frames(each.result().text)[-1] == "[DONE]"
            assert '"error"' not in each.result().text
        again = [await world.chat(f"number {each}", stream=True, max_tokens=5) for each in range(8)]
        assert {each.status_code for each in again} == {200}


@story
async def test_equal_requests_on_servers_that_stop_at_once_are_refused_to_nobody():
    async with gateway(SLOW, SLOW, SLOW, SLOW) as world:
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(world.chat("hi", max_tokens=60)) for _ in range(8)]
            await world.until(lambda: all(each.in_flight == 2 for each in world.process.table))
            for sim in world.sims[:2]:
                group.create_task(sim.stop())
        assert {each.result().status_code for each in sent} == {200}
        for _ in range(4):
            assert (await world.chat("hi", max_tokens=1)).status_code == 200


def asked(sim):
    return [each for each in sim.requests if each.path.endswith("completions")]


@story
async def test_streams_outlive_two_servers_that_go_one_after_the_other():
    """As when somebody restarts them in turn: several were at both, and had come further meanwhile."""
    async with gateway(SLOW, SLOW, SLOW) as world:
        first, second, _ = world.sims
        async with asyncio.TaskGroup() as group:
            sent = [
                group.create_task(world.chat(f"number {each}", stream=True, max_tokens=250))
                for each in range(12)
            ]
            for sim, served in ((first, 4), (second, 6)):
                await world.until(lambda sim=sim, served=served: len(asked(sim)) == served)
                await world.until(lambda sim=sim: all(m.tokens_emitted > 50 for m in asked(sim)))
                await sim.stop()
        for each in sent:
            assert '"error"' not in each.result().text
            assert frames(each.result().text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_two_servers_abort_as_they_stop_is_not_refused(stream):
    @story
    async def check():
        async with gateway(SLOW, SLOW, SLOW) as world:
            for sim in world.sims:
                sim.inject("abort_finish:20")

            async def stop_two():
                for _ in range(2):
                    await world.until(lambda: any(map(asked, going_on())))
                    stopping = next(filter(asked, going_on()))
                    stopped.append(stopping)
                    stopping.inject("refuse")
                going_on()[0].clear()

            def going_on():
                return [each for each in world.sims if each not in stopped]

            stopped = []
            async with asyncio.TaskGroup() as group:
                group.create_task(stop_two())
                reply = await world.chat(stream=stream, max_tokens=60, temperature=0)
            assert reply.status_code == 200
            assert '"error"' not in reply.text

    check()
