"""The limits of a key, as its client sees them, and given back on every way out."""

import asyncio
import contextlib
from dataclasses import replace

import httpx2
import pytest

from gateway.core.aio import start
from gateway.core.limits import KeyLimits
from gateway.process import reload
from gateway.sim.config import SimConfig
from gateway.usage.journal import every_entry
from tests import keyfiles as keys
from tests.stories.support import gateway, story

SIM = SimConfig(model="m", speed=0)
SLOW = SimConfig(model="m", decode_step_s=0.05)


@contextlib.asynccontextmanager
async def limited(*sims, limits, **more):
    """A gateway, and the headers of a key with limits."""
    async with gateway(*(sims or (SIM,)), **more) as world:
        made = keys.create(world.path.parent / "keys.yaml", name="ci", limits=limits)
        assert (await reload(world.process)).done
        yield world, {"authorization": f"Bearer {made.key}"}


@story
async def test_a_key_may_send_so_many_requests_and_hears_when_it_may_again():
    async with limited(limits=KeyLimits(requests_per_minute=3)) as (world, ci):
        replies = [await world.chat(headers=ci, max_tokens=2) for _ in range(5)]
        assert [each.status_code for each in replies] == [200, 200, 200, 429, 429]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in replies[:3]] == [
            "2",
            "1",
            "0",
        ]
        assert replies[0].headers["x-ratelimit-limit-requests"] == "3"
        refused = replies[3]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (
            "requests_per_minute: 3; 3 used, 1 requested. It fits in"
            in refused.json()["error"]["message"]
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert "x-should-retry" not in refused.headers
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
        assert (await world.chat(max_tokens=2)).status_code == 200  # another key
        told = await world.http.get(
            f"{world.admin_url}/admin/v1/decisions/{refused.headers['x-request-id']}"
        )
        assert "requests_per_minute" in told.text


@story
async def test_keys_without_limits_hear_of_none():
    async with gateway(SIM) as world:
        reply = await world.chat(max_tokens=2)
        assert not any(name.startswith("x-ratelimit") for name in reply.headers)


@story
async def test_a_prompt_that_can_never_fit_is_told_so_without_a_time_to_come_again():
    limits = KeyLimits(output_tokens_per_minute=100, input_tokens_per_minute=4)
    async with limited(limits=limits) as (world, ci):
        body = {"model": "m", "prompt": [1] * 50, "max_tokens": 1}
        reply = await world.http.post("/v1/completions", json=body, headers=ci)
        assert reply.status_code == 429
        assert "can never fit" in reply.json()["error"]["message"]
        assert "retry-after" not in reply.headers
        assert reply.headers["x-should-retry"] == "false"


@story
async def test_what_a_reply_did_not_use_is_given_back():
    async with limited(limits=KeyLimits(output_tokens_per_minute=600)) as (world, ci):
        for _ in range(5):
            assert (await world.chat(headers=ci)).json()["usage"]["completion_tokens"] == 24
        await world.until(lambda: not world.process.ingress.live)
        reply = await world.chat(headers=ci, max_tokens=1)
        left = int(reply.headers["x-ratelimit-remaining-output-tokens"])
        assert 600 - 5 * 24 - 1 <= left < 600 - 24  # some refilled meanwhile


async def order(sim, verb, **more):
    async with httpx2.AsyncClient(trust_env=False) as http:
        asked = {"lora_name": "sql", **more}
        reply = await http.post(f"{sim.url}/v1/{verb}_lora_adapter", json=asked)
        assert reply.status_code == 200


@story
async def test_an_adapter_that_moves_to_another_pool_has_the_limits_of_that_pool():
    limits = KeyLimits(models=(("b", KeyLimits(requests_per_minute=1)),))
    sims = (SimConfig(model="a", speed=0), SimConfig(model="b", speed=0))
    pools = "pools: {a: {backends: [<0>]}, b: {backends: [<1>]}}"
    async with limited(*sims, limits=limits, pools=pools) as (world, ci):
        a, b = (world.process.table.get(name) for name in ("a/b1", "b/b1"))
        await order(world.sims[0], "load", lora_path="/l/sql")
        await world.until(lambda: "sql" in a.adapters)
        assert (await world.chat(model="sql", headers=ci, max_tokens=1)).status_code == 200
        await order(world.sims[0], "unload")
        await order(world.sims[1], "load", lora_path="/l/sql")
        await world.until(lambda: "sql" in b.adapters and "sql" not in a.adapters)
        replies = [await world.chat(model="sql", headers=ci, max_tokens=1) for _ in range(3)]
        assert [each.status_code for each in replies] == [200, 429, 429]


async def left_midway(world, ci):
    body = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 1000}
    async with world.http.stream("POST", "/v1/completions", json=body, headers=ci) as reply:
        assert reply.status_code == 200
        async for _ in reply.aiter_lines():
            break


async def broke(world, ci):
    world.sims[0].inject("reset_after:3@1")
    with contextlib.suppress(httpx2.HTTPError):
        await world.chat(headers=ci, max_tokens=20, stream=True)


@pytest.mark.parametrize("way", [left_midway, broke])
@story
async def test_what_ran_makes_room_on_every_way_out(way):
    async with limited(SLOW, limits=KeyLimits(concurrent_requests=1)) as (world, ci):
        loop = asyncio.get_running_loop()
        running = loop.create_task(world.chat(headers=ci, max_tokens=40))
        await world.until(lambda: world.in_flight() == 1)
        refused = await world.chat(headers=ci, max_tokens=2)
        assert refused.status_code == 429
        assert "concurrent_requests: 1; 1 running" in refused.json()["error"]["message"]
        assert (await running).status_code == 200
        await way(world, ci)
        await world.until(lambda: not world.process.ingress.live)
        assert not world.process.handler.limiter.levels.running


@story
async def test_a_request_that_no_backend_took_costs_nothing():
    limits = KeyLimits(requests_per_minute=1, output_tokens_per_minute=50)
    pool = {"queue": {"max_requests": 0}}
    async with limited(SIM, limits=limits, pool=pool) as (world, ci):
        await world.sims[0].stop()
        await world.until(lambda: world.process.table.serving()[0] == 0)
        for _ in range(5):
            reply = await world.chat(headers=ci, max_tokens=50)
            assert reply.status_code == 503


@story
async def test_a_request_for_which_no_server_was_found_costs_nothing():
    async with limited(limits=KeyLimits(tokens_per_day=1000, requests_per_minute=9)) as (world, ci):
        await world.sims[0].stop()
        assert (await world.chat(headers=ci, max_tokens=200)).status_code == 502
        levels = world.process.handler.limiter.levels.amounts
        assert {round(used, 2) for _, used, _ in levels.values()} == {0.0}


@story
async def test_what_an_engine_refuses_as_wrong_is_a_request_and_takes_no_tokens():
    async with limited(limits=KeyLimits(tokens_per_day=1000)) as (world, ci):
        world.sims[0].inject("http_500:400")
        assert (await world.chat(headers=ci, max_tokens=200)).status_code == 400
        levels = world.process.handler.limiter.levels.amounts
        assert [used for _, used, _ in levels.values()] == [0.0]


@pytest.mark.parametrize("fault", ["http_500", "html_error", "reset_before_headers"])
@story
async def test_a_request_that_its_backend_failed_takes_no_tokens_and_costs_no_money(fault):
    """Else retries during an outage use up the budget of a day, and nothing was answered."""
    prices = "prices: {models: {m: {input: 1, output: 1}}}"
    limits = KeyLimits(requests_per_minute=9, tokens_per_day=1000, budget_per_day=1.0)
    async with limited(limits=limits, extra=prices) as (world, ci):
        world.sims[0].inject(fault)
        assert (await world.chat(headers=ci, max_tokens=200)).status_code in (500, 502)
        await world.until(lambda: not world.process.ingress.live)
        levels = world.process.handler.limiter.levels.amounts
        used = {amount: used for (_, amount, _), (_, used, _) in levels.items()}
        assert 0 < used.pop(0) <= 1  # it was a request
        assert set(used.values()) == {0.0}
        world.process.ledger.post()
        await world.process.accounts.turn()
        (line,) = every_entry(world.process.config.state / "usage")
        assert (line.input, line.output, line.money, line.source) == (0, 0, 0.0, "failed")


async def tokens_today(world, headers):
    told = (await world.http.get("/v1/key", headers=headers)).json()["standing"]
    return next(each["used"] for each in told if each["rule"] == "tokens_per_day")


def of_key(**changes):
    async def change(world):
        file = world.path.parent / "keys.yaml"
        (key,) = [each for each in keys.list_keys(file) if each.name == "ci"]
        keys.run(keys.keys_of(file).update(key.id, changes))

    return change


def of_tenant(limits):
    async def change(world):
        others = [each for each in world.path.read_text().splitlines() if "tenants:" not in each]
        world.path.write_text("\n".join([*others, f"tenants: {{ci: {{limits: {limits}}}}}"]))

    return change


@pytest.mark.parametrize(
    ("limits", "away", "back"),
    [
        (True, of_key(limits=None), of_key(limits={"tokens_per_day": 9000})),
        (True, of_key(tenant="other"), of_key(tenant="ci")),
        (False, of_tenant("{requests_per_minute: 600}"), of_tenant("{tokens_per_day: 9000}")),
    ],
    ids=["key", "tenant of a key", "tenant"],
)
@story
async def test_a_limit_that_comes_back_counts_what_was_used_without_it(limits, away, back):
    """Else a budget that is lifted for an afternoon has forgotten that afternoon for the rest of the month."""
    own = KeyLimits(tokens_per_day=9000) if limits else None
    tenants = "" if limits else "tenants: {ci: {limits: {tokens_per_day: 9000}}}"
    async with limited(limits=own, extra=tenants) as (world, ci):

        async def after(change):
            await world.until(lambda: not world.process.ingress.live)
            world.process.ledger.post()
            await change(world)
            assert (await reload(world.process)).done

        assert (await world.chat(headers=ci, max_tokens=20)).status_code == 200
        used = await tokens_today(world, ci)
        await after(away)
        assert (await world.chat(headers=ci, max_tokens=20)).status_code == 200
        await after(back)
        assert await tokens_today(world, ci) == 2 * used


@pytest.mark.parametrize("stream", [False, True])
@story
async def test_a_request_that_two_servers_died_of_takes_no_tokens(stream):
    """Its client got a 400 and nothing else."""
    limits, sims = KeyLimits(tokens_per_day=100_000), [SIM] * 4
    async with limited(*sims, limits=limits) as (world, ci):
        for sim in world.sims:
            sim.inject("die_on_prompt:poison")
        told = {"headers": ci, "max_tokens": 4000, "stream": stream}
        while (reply := await world.chat("poison", **told)).status_code != 400:
            assert reply.status_code == 502
        assert reply.json()["error"]["code"] == "request_quarantined"
        await world.settled()
        assert await tokens_today(world, ci) == 0
        world.process.ledger.post()
        await world.process.accounts.turn()
        entries = every_entry(world.process.config.state / "usage")
        assert {(each.input, each.output) for each in entries} == {(0, 0)}


@story
async def test_what_an_engine_refuses_as_wrong_takes_no_tokens_though_it_waited_in_public():
    pools = "pools: {m: {backends: [{url: <0>, max_in_flight: 1}], queue: {announce: true}}}"
    limits = KeyLimits(tokens_per_day=100_000)
    async with limited(SLOW, limits=limits, pools=pools, access=True) as (world, ci):
        async with asyncio.TaskGroup() as group:
            holder = group.create_task(world.chat(max_tokens=2000))  # another key's
            await world.until(lambda: world.in_flight() == 1)
            waits = group.create_task(world.chat(headers=ci, max_tokens=4000, stream=True))
            await world.until(lambda: any(each.bytes_out for each in world.process.ingress.live))
            world.sims[0].inject("http_500:400")
            holder.cancel()
            reply = await waits
        assert ": queued position=1" in reply.text
        assert '"code":"invalid_request"' in reply.text
        await world.settled()
        assert await tokens_today(world, ci) == 0
        outcomes = [each["outcome"] for each in world.access_lines()]
        assert "upstream_rejected" in outcomes


@story
async def test_a_key_reads_what_it_has_used_and_uses_nothing_by_that():
    limits = KeyLimits(requests_per_minute=6, tokens_per_day=1000, concurrent_requests=2)
    async with limited(SLOW, limits=limits) as (world, ci):
        for _ in range(3):
            assert (await world.chat(headers=ci, max_tokens=2)).status_code == 200

        async def stands():
            told = (await world.http.get("/v1/key", headers=ci)).json()["standing"]
            return {each["rule"]: each for each in told}

        async with asyncio.TaskGroup() as group:
            group.create_task(world.chat(headers=ci, max_tokens=20))
            await world.until(lambda: [*world.process.table][0].in_flight == 1)
            for _ in range(3):
                found = await stands()
            assert found["concurrent_requests"]["used"] == 1
        found = await stands()
        assert {rule: each["limit"] for rule, each in found.items()} == {
            "requests_per_minute": 6,
            "tokens_per_day": 1000,
            "concurrent_requests": 2,
        }
        assert found["concurrent_requests"]["used"] == 0
        assert 0 < found["requests_per_minute"]["used"] <= 4  # it empties meanwhile
        assert found["tokens_per_day"]["used"] > 26
        for each in found.values():
            assert each["remaining"] == each["limit"] - each["used"]
        assert 0 < found["requests_per_minute"]["resets_in_s"] <= 40
        unknown = await world.http.get("/v1/key?model=nobody-has-it", headers=ci)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        known = await world.http.get("/v1/key?model=m", headers=ci)
        assert len(known.json()["standing"]) == 3
        assert 0 < found["tokens_per_day"]["resets_in_s"] <= 86_400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["error_frame_after:0", "truncate_after:0"])
def test_what_failed_before_its_first_byte_takes_no_tokens(fault, stream):
    @story
    async def check():
        limits = KeyLimits(input_tokens_per_minute=1000)
        async with limited(limits=limits) as (world, ci):
            world.sims[0].inject(fault)
            failed = await world.chat("x" * 2000, headers=ci, max_tokens=5, stream=stream)
            assert failed.status_code in (500, 502)
            await world.settled()
            world.sims[0].clear()
            after = await world.chat("hi", headers=ci, max_tokens=1)
            assert int(after.headers["x-ratelimit-remaining-input-tokens"]) > 900

    check()


@story
async def test_a_stream_that_failed_when_its_client_had_comments_only_takes_no_tokens():
    reads_slowly = replace(SIM, speed=1.0, prefill_tokens_per_s=1.0)  # it comes to no token
    limits, often = KeyLimits(input_tokens_per_minute=1000), "timeouts: {heartbeat: 500ms}"
    async with limited(reads_slowly, limits=limits, extra=often) as (world, ci):
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(world.chat("word " * 200, headers=ci, stream=True))
            await world.until(lambda: any(each.bytes_out for each in world.process.ingress.live))
            await world.sims[0].stop()
        assert sent.result().text.startswith(": keep-alive")
        assert '"error"' in sent.result().text
        await world.settled()
        (told,) = (await world.http.get("/v1/key", headers=ci)).json()["standing"]
        assert (told["rule"], told["used"]) == ("input_tokens_per_minute", 0)


@story
async def test_a_reply_that_nobody_could_end_takes_no_tokens():
    limits = KeyLimits(input_tokens_per_minute=1000)
    replies = {"resume_replies": "1"}
    async with limited(SIM, SIM, limits=limits, pool=replies, access=True) as (world, ci):
        for each in world.sims:
            each.inject("reset_after:7")
        failed = await world.chat("x" * 2000, headers=ci, max_tokens=40)
        assert failed.status_code == 502
        await world.settled()
        assert world.access_lines()[-1]["outcome"] == "backend_error"
        for each in world.sims:
            each.clear()
        after = await world.chat("hi", headers=ci, max_tokens=1)
        assert int(after.headers["x-ratelimit-remaining-input-tokens"]) > 900


@pytest.mark.parametrize("replies", ["1", "off"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_the_gateway_ends_as_it_stops_takes_what_its_client_got(replies, stream):
    """Who got nothing of a reply asks the next gateway for all of it, which counts the day's tokens on."""

    @story
    async def check():
        limits, pool = KeyLimits(tokens_per_day=100_000), {"resume_replies": replies}
        async with limited(SLOW, SLOW, limits=limits, pool=pool) as (world, ci):
            folder = world.process.config.state / "usage"
            asked = start(world.chat(headers=ci, max_tokens=2000, stream=stream), name="asked")

            def written():
                return sum(each.tokens_emitted for sim in world.sims for each in sim.requests)

            await world.until(lambda: written() > 5)
            world.process.stopping.set()
            reply = await asked
            assert reply.status_code == (200 if stream else 503)
            assert '"code":"shutting_down"' in reply.text
            await world.until(lambda: [*every_entry(folder)])
            (line,) = every_entry(folder)
        assert line.output == max(0, reply.text.count('"content":') - 1)
        assert line.source == ("counted" if stream else "failed")

    check()
