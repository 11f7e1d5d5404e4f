"""What could not be done about a server is told as long as that is so, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.fleet import launcher_of
from gateway.heal.observed import Timing
from gateway.heal.states import Starting
from gateway.launch.launcher import Obstacle
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, held, launched, machine, managed, writes
from tests.stories.support import story

TESTED = {"supervision": {"canary": "200ms", "backoff": "10m", "max_backoff": "10m"}}
QUICKLY = Timing(0.02, token_s=0.3, last_words_s=0.1)


async def trouble(world, backend_id="m/b1"):
    """What `status -o json` tells of it."""
    told = (await world.admin("GET", "/admin/v1/overview")).json()
    (found,) = [b for p in told["pools"] for b in p["backends"] if b["id"] == backend_id]
    return found["supervision"]["trouble"]


async def both(on):
    """Two servers of a service manager's, which run."""
    for name in ("m/b1", "m/b2"):
        await on[name].begin()
    return managed(on["m/b1"]), managed(on["m/b2"])


# --- another server has its place ------------------------------------------------------------------


@story
async def test_a_restart_whose_server_was_replaced_during_its_drain_leaves_no_trouble():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.speed = on["m/b2"].speed = 1.0
        async with fleet(on, *await both(on)) as world, asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(world.chat(stream=True, max_tokens=60))
            await world.until(lambda: writes(slot))
            with held(slot):
                assert (await world.order("restart")).json()["changed"]
                await world.until(lambda: world.phase() is Phase.DRAINING)
                await slot.end()
                slot.plan(Script(listens=up))
                await slot.begin()
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED, "m/b1"))
            await world.until(lambda: isinstance(world.unit().state, Starting))
            assert await trouble(world) == ""
            up.set()
            await world.serves()
            assert slot.starts == []


@story
async def test_a_start_that_another_gateway_made_first_leaves_no_trouble():
    async with machine() as on:
        slot = on["m/b1"]

        def late(backend, config):
            """Make a launcher that finds, once it is to start the server, that another gateway was faster."""
            launcher = on.launcher(backend, config)
            carry_out = launcher.restart

            async def restart(expected, **more):
                launcher.restart = carry_out
                await slot.begin()
                return await carry_out(expected, **more)

            launcher.restart = restart
            return launcher

        async with fleet(on, launched(slot), make_launcher=late) as world:
            assert "m/b1#1 runs" in world.told(EventKind.LAUNCH_FAILED)[0].detail
            await world.turns()
            assert slot.starts == []
            assert await trouble(world) == ""


# --- other settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["as before", "as others"])
@story
async def test_settings_that_could_not_be_started_leave_no_trouble_once_they_are_changed(again):
    async with machine() as on:
        slot = on["m/b1"]
        async with fleet(on, launched(slot), launched(on["m/b2"])) as world:
            slot.refuses, slot.obstacle = ["there is no such program"] * 99, Obstacle.CANNOT_HELP
            launch = world.settings["pools"]["m"]["backends"][0]["launch"]
            launch["args"] = {"max-model-len": 4096}
            await world.reload()
            await world.until(lambda: world.unit().observed.trouble)
            slot.refuses = []
            del launch["args"]
            if again == "as others":
                launch["args"] = {"max-model-len": 2048}
            await world.reload()
            await world.serves()
            await world.turns()
            assert await trouble(world) == ""


@story
async def test_a_scheduled_restart_that_failed_leaves_no_trouble_once_none_is_scheduled():
    async with machine() as on:
        often = {"supervision": TESTED["supervision"] | {"restart_every": "1s"}}
        async with fleet(on, *await both(on), **often) as world:
            on["m/b1"].obstacle, on["m/b1"].refuses = Obstacle.TRANSIENT, ["systemd is away"] * 99
            await world.until(lambda: world.unit().observed.trouble and world.unit().decision)
            assert await trouble(world) == "systemd is away"
            del world.settings["pools"]["m"]["supervision"]["restart_every"]
            await world.reload()
            await world.until(lambda: world.unit().decision is None)
            assert await trouble(world) == ""


# --- it serves again by itself ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a command", "a service manager"])
@story
async def test_a_restart_that_failed_leaves_no_trouble_once_its_server_serves_by_itself(how):
    async with machine() as on:
        every, slot, make = await both(on), on["m/b1"], None
        if how == "a command":
            every[0]["restart"], make = {"command": ["sh", "-c", "echo no; exit 3"]}, launcher_of
            every[1].pop("restart")
        slot.refuses = ["systemd is away"] * 99
        known = {"make_launcher": make, "timing": QUICKLY, **TESTED}
        async with fleet(on, *every, **known) as world:
            slot.sim.inject("frozen")
            await world.until(lambda: world.unit().observed.trouble)
            assert await trouble(world)
            await world.turns(3)
            assert await trouble(world)
            slot.sim.clear()
            await world.serves()
            await world.turns()
            assert await trouble(world) == ""
