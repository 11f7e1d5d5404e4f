"""A backend that a reload moved to another address is not blamed for what its old server does."""

import asyncio

import pytest

from gateway.core.aio import start
from gateway.core.types import Phase
from gateway.pools.health import Order
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.05)
POOLS = 'pools: {m: {resume: "off", backends: [{name: a, url: "<0>"}, {name: b, url: "<1>"}]}}'


@story
async def test_streams_that_its_old_server_breaks_off_are_not_held_against_the_new_one():
    async with gateway(SLOW, SLOW, FAST, pools=POOLS, wait=False) as world:
        old, _, new = world.sims
        table = world.process.table
        await world.until(lambda: all(each.phase is Phase.READY for each in table))
        left = table.get("m/a")
        sent = [start(world.chat(max_tokens=60, stream=True), name="stream") for _ in range(14)]
        begun = old.requests
        await world.until(lambda: sum(each.tokens_emitted > 0 for each in begun) >= 6)
        old.inject("frozen")  # what it carries lasts until it stops
        world.path.write_text(world.path.read_text().replace(old.url, new.url))
        assert (await reload(world.process)).done
        moved = table.get("m/a")
        assert moved is not left
        await world.until(lambda: moved.phase is Phase.READY)
        assert left.in_flight >= 6
        await old.stop()
        await world.until(lambda: not left.in_flight)
        assert moved.health.traffic_failures == 0
        assert moved.health.ejection is None
        await asyncio.wait(sent)


REVISIONS = (
    'pools: {m: {resume: "off", backends: '
    '[{name: a, url: "<0>", revision: v1}, {name: b, url: "<1>", revision: v1}]}}'
)


@pytest.mark.parametrize("fails", [True, False])
def test_what_its_old_server_did_is_no_sample_of_the_canary_that_has_its_name(fails):
    @story
    async def none():
        async with gateway(SLOW, SLOW, FAST, pools=REVISIONS, wait=False) as world:
            old, _, new = world.sims
            table = world.process.table
            await world.until(lambda: all(each.phase is Phase.READY for each in table))
            left = table.get("m/a")
            sent = [start(world.chat(max_tokens=40, stream=True), name="stream") for _ in range(14)]
            await world.until(lambda: sum(each.tokens_emitted > 0 for each in old.requests) >= 6)
            if fails:
                old.inject("frozen")
            text = world.path.read_text().replace(
                f'"{old.url}", revision: v1', f'"{new.url}", revision: v2'
            )
            world.path.write_text(
                text.replace("m: {", "m: {canary: {revision: v2, weight: 0.3}, ", 1)
            )
            assert (await reload(world.process)).done
            moved = table.get("m/a")
            assert moved is not left
            assert moved.on_trial
            if fails:
                await old.stop()
            await world.until(lambda: not left.in_flight, seconds=10.0)
            await asyncio.wait(sent)
            await asyncio.sleep(1.0)  # records are posted twice a second
            own = world.process.rollouts.get("m").own
            assert (own.trial.requests, own.trial.failed) == (0, 0)
            assert own.stable.requests > 0  # those of b are samples

    none()


@story
async def test_a_stream_goes_on_with_the_revision_that_began_it_though_a_reload_renamed_that():
    pools = (
        'pools: {m: {backends: [{name: a, url: "<0>", revision: v1}, '
        '{name: b, url: "<1>", revision: v2}, {name: c, url: "<2>", revision: v1}]}}'
    )
    async with gateway(SLOW, SLOW, SLOW, pools=pools, access=True) as world:
        first, table = world.sims[0], world.process.table
        for other in ("m/b", "m/c"):
            table.order(other, Order.CORDON)
        sent = start(world.chat(max_tokens=60, stream=True, temperature=0), name="stream")
        await world.until(lambda: any(each.tokens_emitted for each in first.requests))
        for other in ("m/b", "m/c"):
            table.order(other, Order.RESUME)
        one = f'"{first.url}", revision: v1'
        world.path.write_text(world.path.read_text().replace(one, one.replace("v1", "v2")))
        assert (await reload(world.process)).done
        await first.stop()
        assert (await sent).text.rstrip().endswith("[DONE]")
        (line,) = world.access_lines()
        assert (line["outcome"], line["resumed"], line["backend"]) == ("ok", 1, "c")


@story
async def test_a_long_reply_is_seen_to_be_worked_on_after_a_reload_took_its_backend_away():
    timeouts = "timeouts: {first_byte: 2s, stall: 2s}\n"
    pools = 'pools: {m: {backends: [{name: a, url: "<0>"}, {name: b, url: "<1>"}]}}'
    async with gateway(SLOW, SLOW, pools=pools, extra=timeouts) as world:
        sent = start(world.chat(max_tokens=140), name="reply")  # of 7 s
        await world.until(lambda: any(each.engine.running for each in world.sims))
        busy = next(at for at, each in enumerate(world.sims) if each.engine.running)
        gone = f'{{name: {"ab"[busy]}, url: "{world.sims[busy].url}"}}'
        text = world.path.read_text()
        assert gone in text
        world.path.write_text(text.replace(f"{gone}, ", "").replace(f", {gone}", ""))
        assert (await reload(world.process)).done
        assert len(world.process.table.leaving()) == 1
        assert (await sent).status_code == 200
        await world.until(lambda: not world.process.table.leaving())

        def looks():
            return [
                each for each in asyncio.all_tasks() if each.get_name().endswith(f" m/{'ab'[busy]}")
            ]

        await world.until(lambda: not looks())


@story
async def test_a_rest_that_waited_goes_to_no_backend_that_became_another_revision_meanwhile():
    pools = (
        'pools: {m: {backends: [{name: a, url: "<0>", revision: v1, max_in_flight: 1}, '
        '{name: b, url: "<1>", revision: v1, max_in_flight: 1}]}}'
    )
    async with gateway(SLOW, SLOW, pools=pools, access=True) as world:
        first, second = world.sims
        table = world.process.table
        table.order("m/b", Order.CORDON)
        sent = start(world.chat(max_tokens=60, stream=True, temperature=0), name="stream")
        await world.until(lambda: any(each.tokens_emitted for each in first.requests))
        table.order("m/b", Order.RESUME)
        other = start(world.chat(max_tokens=40, stream=True), name="other")
        await world.until(lambda: any(each.tokens_emitted for each in second.requests))
        await first.stop()
        await world.until(lambda: world.process.handler.gate.queued("m"))
        one = f'"{second.url}", revision: v1'
        world.path.write_text(world.path.read_text().replace(one, one.replace("v1", "v2")))
        assert (await reload(world.process)).done
        await asyncio.wait([sent, other])
        assert len(second.received("/v1/chat/completions")) == 1
        broken = next(each for each in world.access_lines() if each["outcome"] != "ok")
        assert (broken["outcome"], broken["revision"]) == ("stream_broken", "v1")
