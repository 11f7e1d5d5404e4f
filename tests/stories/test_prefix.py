"""Requests go where their prompt was read before, while that is quicker."""

import asyncio
import dataclasses
import json
import time

import pytest

from gateway.core.aio import start
from gateway.prefix.ranked import RankedIndex
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests.stories.support import FAST, gateway, story

TELLS = dataclasses.replace(FAST, prompt_tokens_details=True)
READS_SLOWLY = SimConfig(model="m", prefill_tokens_per_s=20_000, decode_step_s=0.002)
GROUPS = 6


def system(group):
    return f"You are helper number {group}. " + f"Rule {group}: be kind to trains. " * 60


async def ask(world, group, question, **more):
    headers = more.pop("headers", None)
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": system(group)},
            {"role": "user", "content": f"Question {question}"},
        ],
        "max_tokens": 2,
        **more,
    }
    reply = await world.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply


def hit_ratio(world):
    totals = [engine.totals for sim in world.sims for engine in sim.state.engines]
    return sum(each.prefix_hits for each in totals) / sum(each.prefix_queries for each in totals)


def groups_of(sim):
    """Return which groups' requests a backend had."""
    bodies = [each.body.decode() for each in sim.received("/v1/chat/completions")]
    return {group for group in range(GROUPS) for body in bodies if f"number {group}." in body}


@story
async def test_prompts_that_begin_alike_go_to_one_backend_while_it_has_room():
    async with gateway(FAST, FAST, FAST) as world:
        for question in range(8):
            for group in range(GROUPS):
                await ask(world, group, question, stream=question % 2 == 0)
        homes = [groups_of(sim) for sim in world.sims]
        assert sum(map(len, homes)) == GROUPS  # each at one of them
        assert hit_ratio(world) > 0.8
        await world.settled()


@story
async def test_agents_whose_first_line_and_marks_change_with_each_turn_stay_where_their_prompt_is_cached():
    """So Claude Code writes its requests; vLLM drops the line, and reads no marks."""
    mark = {"cache_control": {"type": "ephemeral"}}
    async with gateway(FAST, FAST, FAST) as world:
        said = {agent: [] for agent in range(GROUPS)}
        for turn in range(8):
            for agent, parts in said.items():
                parts.append({"type": "text", "text": f"number {agent}. Look at it. " * 80})
                turns = [{"role": "user", "content": [*parts[:-1], parts[-1] | mark]}]
                line = f"x-anthropic-billing-header: cc_version=2.1; cch={turn}{agent}9f;"
                system = [
                    {"type": "text", "text": line},
                    {"type": "text", "text": "Be kind. " * 90},
                ]
                body = {"model": "m", "max_tokens": 2, "system": system}
                reply = await world.http.post("/v1/messages", json=body | {"messages": turns})
                assert reply.status_code == 200, reply.text
        asked = [sim.received("/v1/messages") for sim in world.sims]
        bodies = [" ".join(each.body.decode() for each in requests) for requests in asked]
        homes = [{agent for agent in said if f"number {agent}." in text} for text in bodies]
        assert sum(map(len, homes)) == GROUPS  # each at one of them
        assert hit_ratio(world) > 0.7


@story
async def test_without_it_they_go_anywhere():
    async with gateway(FAST, FAST, FAST, pool={"prefix": "off"}) as world:
        for question in range(8):
            for group in range(GROUPS):
                await ask(world, group, question)
        assert sum(len(groups_of(sim)) for sim in world.sims) > GROUPS
        assert all(each.prefix_index is None for each in world.process.table)


@story
async def test_one_hot_beginning_spreads_over_the_backends_that_its_load_needs():
    async with gateway(READS_SLOWLY, READS_SLOWLY, READS_SLOWLY) as world:
        async with asyncio.TaskGroup() as group:  # so each has shown how fast it reads
            for number in range(1, GROUPS):
                group.create_task(ask(world, number, "first", stream=True))
        assert all(groups_of(sim) for sim in world.sims)
        await ask(world, 0, "first", stream=True)
        before = [len(sim.received("/v1/chat/completions")) for sim in world.sims]
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                read = f"{number} " * 800  # by whoever gets it, whatever it holds
                group.create_task(ask(world, 0, read, max_tokens=20, stream=True))
        after = [len(sim.received("/v1/chat/completions")) for sim in world.sims]
        counts = [now - then for then, now in zip(before, after, strict=True)]
        assert min(counts) >= 10, counts
        await world.settled()


@story
async def test_a_restart_forgets():
    async with gateway(FAST, FAST) as world:
        for question in range(3):
            await ask(world, 0, question)
        place = next(place for place, sim in enumerate(world.sims) if groups_of(sim))
        backend = world.process.table.get(f"m/b{place + 1}")
        assert len(backend.prefix_index) > 0
        sim = world.sims[place]
        await sim.stop()
        await world.until(lambda: len(backend.prefix_index) == 0)
        await sim.start()


@story
async def test_an_engine_whose_cache_was_reset_is_believed_no_longer():
    sims = [dataclasses.replace(TELLS, dev_mode=True)] * 2
    async with gateway(*sims) as world:
        for question in range(8):
            await ask(world, 0, question)
        backend = next(each for each in world.process.table if each.prefix_index.young)
        assert backend.prefix_index.trust == 1.0
        for question in range(60):
            for sim in world.sims:
                await world.http.post(sim.url + "/reset_prefix_cache")
            await ask(world, 0, question + 100)
        world.process.ledger.post()
        assert backend.prefix_index.trust < 0.7


@story
async def test_replies_that_never_tell_what_was_cached_say_nothing_against_the_cache_beside_such_as_do():
    """By default vLLM tells it in replies of `/v1/responses`, and in no others."""
    async with gateway(FAST, FAST) as world:
        asked = {"model": "m", "instructions": system(0), "input": "What?", "max_output_tokens": 2}
        for question in range(40):
            for group in range(GROUPS):
                await ask(world, group, question, stream=question % 2 == 0)
            told = await world.http.post("/v1/responses", json=asked)
            assert told.json()["usage"]["input_tokens_details"]["cached_tokens"] >= 0
        world.process.ledger.post()
        assert [each.prefix_index.trust > 0.9 for each in world.process.table] == [True, True]
        homes = [groups_of(sim) for sim in world.sims]
        assert sum(map(len, homes)) == GROUPS


@pytest.mark.parametrize("sim", [TELLS, FAST], ids=["replies", "counter"])
def test_text_of_more_bytes_than_usual_for_its_tokens_is_believed_to_be_cached_as_any_other(sim):
    """Chinese, as Python's `json` and `requests` write it: six bytes for each character."""

    @story
    async def believed():
        large, said = dataclasses.replace(sim, max_model_len=200_000), []
        async with gateway(large, large) as world:
            (home, other) = world.process.table
            for turn in range(40):
                said += [{"role": "user", "content": f"{turn} " + "请善待火车。" * 40}]
                asked = {"model": "m", "max_tokens": 2, "messages": said, "user": "u"}
                reply = await world.http.post(
                    "/v1/chat/completions",
                    content=json.dumps(asked),
                    headers={"content-type": "application/json"},
                )
                assert reply.status_code == 200, reply.text
                world.process.ledger.post()
                seen = [each.sample for each in (home, other)]
                await world.until(
                    lambda seen=seen: all(each.sample not in seen for each in (home, other))
                )
            home = home if len(home.prefix_index) else other
            assert home.prefix_index.trust > 0.85
            ((_, last),) = home.sessions.last.items()
            assert last.trust > 0.85

    believed()


@story
async def test_tenants_with_caches_apart_follow_no_other_tenants_prompts():
    async with gateway(FAST, FAST, pool={"prefix_cache": "per_tenant"}) as world:
        file = world.path.parent / "keys.yaml"
        other = keys.create(file, name="other", tenant="other", wall_now=time.time())
        assert (await reload(world.process)).done
        await ask(world, 0, 1)
        backend = next(each for each in world.process.table if each.prefix_index.young)
        before = len(backend.prefix_index)
        headers = {"authorization": f"Bearer {other.key}"}
        await ask(world, 0, 1, headers=headers)
        kept = [len(each.prefix_index) for each in world.process.table]
        assert sum(kept) == 2 * before


@story
async def test_a_prompt_whose_client_left_before_it_was_read_is_not_held():
    slow = SimConfig(model="m", prefill_tokens_per_s=100)
    async with gateway(slow, slow) as world:
        asked = start(ask(world, 0, 1, stream=True), name="asks")
        await world.until(lambda: any(len(each.prefix_index) for each in world.process.table))
        asked.cancel()
        await world.settled()
        assert all(len(each.prefix_index) == 0 for each in world.process.table)


@story
async def test_several_engines_of_one_server_each_get_their_own_conversations():
    async with gateway(dataclasses.replace(FAST, dp=3)) as world:
        await world.until(lambda: isinstance([*world.process.table][0].prefix_index, RankedIndex))
        for question in range(6):
            for group in range(GROUPS):
                await ask(world, group, question, stream=question % 2 == 0)
        ranks = {}
        for each in world.sims[0].received("/v1/chat/completions"):
            (group,) = (n for n in range(GROUPS) if f"number {n}." in each.body.decode())
            ranks.setdefault(group, set()).add(each.header("x-data-parallel-rank"))
        assert all(len(each) == 1 for each in ranks.values())
        assert len(set.union(*ranks.values())) > 1
        assert hit_ratio(world) > 0.8
        await world.settled()


@story
async def test_an_engine_is_named_only_where_the_endpoint_lets_it():
    async with gateway(dataclasses.replace(FAST, dp=2)) as world:
        await world.until(lambda: isinstance([*world.process.table][0].prefix_index, RankedIndex))
        headers = {"x-data-parallel-rank": "7"}  # a client's is never passed on
        body = {"model": "m", "max_output_tokens": 2, "input": system(0)}
        reply = await world.http.post("/v1/responses", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        await ask(world, 0, "one", headers=headers)
        (first,) = world.sims[0].received("/v1/responses")
        (second,) = world.sims[0].received("/v1/chat/completions")
        assert first.header("x-data-parallel-rank") is None
        assert second.header("x-data-parallel-rank") in ("0", "1")


@story
async def test_metrics_and_explain_tell_what_was_expected_to_be_cached():
    async with gateway(TELLS, TELLS) as world:
        for question in range(4):
            await ask(world, 0, question)
        told = await world.metrics()
        expected, cached = (
            float(next(line for line in told.splitlines() if f'kind="{kind}"' in line).split()[-1])
            for kind in ("expected", "cached")
        )
        assert 0.5 * cached < expected < 1.5 * cached


@story
async def test_explain_tells_what_each_backend_was_thought_to_hold():
    full = dataclasses.replace(READS_SLOWLY, prefill_tokens_per_s=2000)
    settings = {
        "backends": [{"url": "<0>", "max_in_flight": 1}, {"url": "<1>", "max_in_flight": 1}]
    }
    async with gateway(full, full, pools=f"pools: {json.dumps({'m': settings})}") as world:
        await ask(world, 0, "first")
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(ask(world, 0, number))
        waited = next(iter(world.process.handler.gate.decisions))
        told = [each.cached_tokens for each in waited.said]
        assert max(told) > 0
