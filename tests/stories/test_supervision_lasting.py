"""What lasts over reloads and gateways, and what does not: servers that leave, suspensions, the state folder."""

import asyncio

import pytest

from gateway.core.aio import start
from gateway.heal.fleet import launcher_of
from gateway.heal.observed import Timing
from tests.fakelaunch import Script, machine
from tests.stories.supervised import fleet, held, launched, managed
from tests.stories.support import story


def chats(world, count):
    """Send streams that last until what holds them is let go."""
    bodies = [
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"hi {n}"}]}
        for n in range(count)
    ]
    return [
        start(world.http.post("/v1/chat/completions", json=each), name="stream") for each in bodies
    ]


@pytest.mark.parametrize("key_changes_before", [False, True])
def test_a_server_that_leaves_finishes_what_it_has_from_before_an_earlier_reload_too(
    key_changes_before,
):
    @story
    async def finishes():
        async with (
            machine() as on,
            fleet(on, launched(on["m/b1"]), launched(on["m/b2"])) as world,
        ):
            slot, backend = on["m/b1"], world.backend()
            with held(slot, on["m/b2"]):
                sent = chats(world, 4)
                await world.until(lambda: backend.in_flight >= 2)
                settings = world.settings["pools"]["m"]["backends"]
                if key_changes_before:
                    settings[0] = {**settings[0], "api_key": "sk-another-key-123456"}
                    await world.reload()
                    await world.until(lambda: world.unit().observed.seen is not None)
                    assert world.backend() is not backend
                world.settings["pools"]["m"]["backends"] = settings[1:]
                await world.reload()
                await asyncio.sleep(1.0)
                assert slot.running
            replies = [await each for each in sent]
            assert [(each.status_code, "error" in each.text) for each in replies] == [
                (200, False)
            ] * 4
            await world.until(lambda: not slot.running)

    finishes()


@pytest.mark.parametrize("on_exit", ["stop", "leave"])
def test_a_server_that_was_leaving_does_not_outlive_the_gateway(on_exit):
    @story
    async def ends():
        async with machine() as on:
            slot, stays = on["m/b1"], on["m/b2"]
            servers = [launched(each, on_exit=on_exit) for each in (slot, stays)]
            async with fleet(on, *servers) as world:
                backend = world.backend()
                with held(slot):
                    sent = chats(world, 2)
                    await world.until(lambda: backend.in_flight)
                    world.settings["pools"]["m"]["backends"] = servers[1:]
                    await world.reload()
                    world.process.hurry.set()
                    world.process.stopping.set()
                    await world.until(lambda: not slot.running, seconds=10.0)
                for each in sent:
                    each.cancel()
            assert stays.running is (on_exit == "leave")

    ends()


@pytest.mark.parametrize("how", ["removed and added", "another gateway"])
def test_a_suspension_ends_with_the_command_line_that_it_was_about(how, tmp_path):
    @story
    async def ends():
        async with machine() as on:
            slot, other = on["m/b1"], launched(on["m/b2"])
            slot.judge = lambda flags: Script() if "max-num-seqs" in flags else Script(exit_code=1)
            settings = {
                "wait": False,
                "folder": tmp_path,
                "supervision": {"max_restarts": 2, "within": "1h"},
            }
            mended = launched(slot, args={"max-num-seqs": 8})
            async with fleet(on, launched(slot), other, **settings) as world:
                await world.until(lambda: world.unit().suspended)
                if how == "removed and added":
                    world.settings["pools"]["m"]["backends"] = [other]
                    await world.reload()
                    await asyncio.sleep(0.3)
                    world.settings["pools"]["m"]["backends"] = [mended, other]
                    await world.reload()
                    await world.until(lambda: not world.unit().suspended)
                    await world.until(lambda: slot.running)
            if how == "another gateway":
                async with fleet(on, launched(slot), other, **settings) as world:
                    await asyncio.sleep(0.5)
                    assert world.unit().suspended  # by the same command line
                async with fleet(on, mended, other, **settings) as world:
                    await world.until(lambda: slot.running)
                    assert not world.unit().suspended

    ends()


@story
async def test_a_start_that_only_a_look_can_show_is_looked_at_with_pauses():
    async with machine() as on:
        for each in ("m/b1", "m/b2"):
            await on[each].begin()
        slot = on["m/b1"]
        slot.late = 1_000_000  # its service manager tells of the one before for so many looks
        servers = managed(slot), managed(on["m/b2"])
        async with fleet(on, *servers, timing=Timing(every_s=0.5)) as world:
            await world.order("restart")
            await world.until(lambda: slot.starts)
            await world.until(lambda: world.backend().health.up)
            await asyncio.sleep(0.3)
            looks = len(slot.shown)
            await asyncio.sleep(2.0)
            assert looks - len(slot.shown) <= 10
            slot.late = 0
            slot.shown.clear()


def test_servers_stay_in_their_state_folder_until_a_restart(tmp_path):
    @story
    async def stay():
        async with machine() as on:
            server = launched(on["m/b1"])
            server["launch"]["command"] = ["sh", "-c", "sleep 77; :", "x"]
            real = {"make_launcher": launcher_of, "folder": tmp_path, "timing": Timing(every_s=0.1)}
            extra = {"state": str(tmp_path / "one")}
            async with fleet(on, server, wait=False, extra=extra, **real) as world:
                await world.until(lambda: world.unit().state.incarnation)
                world.settings["state"] = str(tmp_path / "two")
                world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-num-seqs": 8}
                await world.reload()
                await asyncio.sleep(2.0)
                assert not (tmp_path / "two").exists()

    stay()
