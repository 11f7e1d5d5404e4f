"""`top` over a gateway that runs: it looks, and its keys give orders."""

import asyncio

from gateway.cli.top import Screen
from gateway.cli.topview import Focus
from gateway.core.types import Phase
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story


async def press(screen, key):
    assert await asyncio.to_thread(screen.press, key)
    await asyncio.to_thread(screen.look)
    return " ".join(screen.view.below)


@story
async def test_a_backend_is_drained_after_its_order_was_shown_and_confirmed():
    async with gateway(SimConfig(model="m"), SimConfig(model="m")) as world:
        screen = Screen(world.admin_url, "")
        await asyncio.to_thread(screen.look)
        assert screen.lists.ids[Focus.BACKENDS] == ["m/b1", "m/b2"]
        table = world.process.table
        said = await press(screen, "d")
        assert "m/b1" in said
        await press(screen, "x")  # not confirmed
        await press(screen, "y")
        assert table.get("m/b1").phase is Phase.READY
        await press(screen, "d")
        await press(screen, "y")
        assert (
            table.get("m/b1").phase is Phase.DRAINING or table.get("m/b1").phase is Phase.CORDONED
        )
        await press(screen, "u")
        await press(screen, "y")
        await world.ready(2)


@story
async def test_keys_that_come_together_are_all_obeyed_but_none_answers_a_question_that_was_not_shown():
    async with gateway(SimConfig(model="m"), SimConfig(model="m"), SimConfig(model="m")) as world:
        screen = Screen(world.admin_url, "")
        await asyncio.to_thread(screen.look)
        assert await asyncio.to_thread(screen.typed, "\x1b[B\x1b[B\x1b[A")
        assert screen.lists.selected(screen.view) == "m/b2"
        assert await asyncio.to_thread(screen.typed, "dy")
        assert "m/b2" in " ".join(screen.view.below)
        assert world.process.table.get("m/b2").phase is Phase.READY
        assert not await asyncio.to_thread(screen.typed, "jq")


@story
async def test_restarts_are_held_and_a_stream_is_explained():
    async with gateway(SimConfig(model="m", decode_step_s=0.05)) as world:
        asked = asyncio.get_running_loop().create_task(world.chat(stream=True, max_tokens=200))
        await world.until(lambda: world.in_flight() == 1)
        screen = Screen(world.admin_url, "")
        await asyncio.to_thread(screen.look)
        assert "pool m?" in await press(screen, "h")
        await press(screen, "y")
        await world.until(lambda: world.process.supervisor.held()["m"])
        await asyncio.to_thread(screen.look)
        assert "End the hold" in await press(screen, "h")
        await press(screen, "\t")
        await press(screen, "\t")
        stream = screen.lists.selected(screen.view)
        assert stream is not None
        assert stream in await press(screen, "e")
        asked.cancel()
        await asyncio.wait([asked])


@story
async def test_a_gateway_that_goes_away_is_said_so_and_the_screen_stays():
    async with gateway(SimConfig(model="m")) as world:
        screen = Screen(world.admin_url, "")
        await asyncio.to_thread(screen.look)
    await asyncio.to_thread(screen.look)
    assert "cannot reach" in " ".join(screen.view.below)
    assert screen.lists.ids[Focus.BACKENDS] == ["m/b1"]
