"""Reloads that take launched servers away, put them back, or let others have their place."""

import asyncio
import contextlib
import sys

import pytest

from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.decisions import Why
from gateway.heal.fleet import launcher_of
from gateway.launch.launcher import Obstacle
from tests import loopback
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, held, launched, machine, managed, pool, writes
from tests.stories.support import frames, of_processes, story

SERVER = """
import sys
from gateway.sim.server import SimConfig, run
print("INFO:     Application startup complete.", flush=True)
run(SimConfig(model="m", port=int(sys.argv[1]), speed=1.0))
"""

# What vLLM says where another server has the memory of its GPU.
TAKEN = """\
(APIServer pid=7) INFO 11-21 10:09:36 [api_server.py:1896] vLLM API server version 0.10.2
(EngineCore_0 pid=8) ERROR 11-21 10:09:55 [core.py:1] EngineCore failed to start.
(EngineCore_0 pid=8) ERROR 11-21 10:09:55 [core.py:1] ValueError: Free memory on device (2.11/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def backends(world):
    """The backends of pool m in the settings, to be changed."""
    return world.settings["pools"]["m"]["backends"]


def on_two_gpus(on):
    """Two servers that take real time for each token, each with a GPU of its own."""
    on["m/b1"].speed = on["m/b2"].speed = 1.0
    return launched(on["m/b1"], gpus=[0]), launched(on["m/b2"], gpus=[1])


@contextlib.asynccontextmanager
async def streams(world, count=4, tokens=120):
    """Have streams run at m/b1 at least, for as long as this lasts; then each comes to its good end."""
    async with asyncio.TaskGroup() as group:
        begun = [
            group.create_task(world.chat(stream=True, max_tokens=tokens)) for _ in range(count)
        ]
        await world.until(lambda: writes(world.slot()))
        with held(world.slot()):
            yield
    for each in begun:
        assert frames(each.result().text)[-1] == "[DONE]"
        assert "error" not in each.result().text


@contextlib.asynccontextmanager
async def stream_of(world, port):
    """Have one stream run at a server that is a process, for as long as this lasts; then it ends well."""
    faults = f"http://127.0.0.1:{port}/sim/faults"
    async with asyncio.TaskGroup() as group, loopback.client() as http:
        begun = group.create_task(world.chat(stream=True, max_tokens=300))
        await world.until(lambda: world.backend().in_flight > 0)
        assert (await http.post(faults, json={"fault": "frozen"})).status_code == 200
        assert not begun.done()
        yield
        assert (await http.delete(faults)).status_code == 200
    assert frames(begun.result().text)[-1] == "[DONE]"
    assert "error" not in begun.result().text


@contextlib.asynccontextmanager
async def clients(world, tokens, count=6):
    """Have clients stream one answer after the other. Yields lists of the good and of the broken ones.

    Such a stream cannot go on elsewhere: what its server does not finish is broken.
    """
    done, broken, over = [], [], asyncio.Event()

    async def client():
        while not over.is_set():
            reply = await world.chat(stream=True, max_tokens=tokens, temperature=1.0, seed=7)
            good = reply.status_code == 200 and "error" not in reply.text
            good = good and frames(reply.text)[-1] == "[DONE]"
            (done if good else broken).append(reply.text[-300:])

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(client())
        await world.until(lambda: world.backend().in_flight > 0)
        yield done, broken
        over.set()


# --- another server gets its place ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["another name", "another pool"])
@of_processes
async def test_a_renamed_backend_is_started_once_its_old_server_has_left_the_port(how):
    async with machine() as on:
        slot = on["m/b1"]
        command = [sys.executable, "-c", SERVER, str(slot.port)]
        backend = {"name": "b1", "launch": {"command": command, "port": slot.port}}
        several = {"drain": "20s", "max_restarts": 5}
        async with fleet(
            on, backend, make_launcher=launcher_of, wait=False, supervision=several
        ) as world:
            await world.serves()
            async with stream_of(world, slot.port):
                pools = world.settings["pools"]
                if how == "another name":
                    backends(world)[0] = {**backend, "name": "c1"}
                    new = "m/c1"
                else:
                    pools["k"] = pools.pop("m")
                    new = "k/b1"
                await world.reload()
                await world.turns()
                told = "waiting to start until the server of m/b1 has ended"
                assert world.backend(new).health.detail == told
            assert not world.told(EventKind.LAUNCH_FAILED)
            assert not world.told(EventKind.SUSPENDED)
            await world.serves(new)


@story
async def test_a_renamed_backend_gets_its_gpu_once_its_old_server_has_ended():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            beside = []
            on["m/c1"].judge = lambda flags: beside.append(on["m/b1"].running) or Script()
            async with streams(world):
                backends(world)[0] = launched(on["m/c1"], gpus=[0])
                await world.reload()
            await world.serves("m/c1")
            assert beside == [False]


@story
async def test_a_model_that_takes_the_gpu_of_another_in_one_reload_comes_up():
    async with machine() as on:
        pauses = {"backoff": "500ms", "max_backoff": "10s", "drain": "15s"}
        async with fleet(on, *on_two_gpus(on), supervision=pauses) as world:
            other = on["k/c1"]
            other.judge = lambda flags: (
                Script(exit_code=1, log=TAKEN) if on["m/b1"].running else Script()
            )
            async with streams(world):
                del backends(world)[0]
                world.settings["pools"]["k"] = pool(launched(other, gpus=[0]), supervision=pauses)
                await world.reload()
            await world.serves("k/c1")
            assert len(other.starts) == 1
            assert not world.told(EventKind.SUSPENDED)


@story
async def test_a_server_that_moves_to_the_gpu_of_one_that_leaves_waits_for_its_end():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            beside = []
            on["m/b2"].judge = lambda flags: beside.append(on["m/b1"].running) or Script()
            async with streams(world):
                del backends(world)[0]
                backends(world)[0]["launch"]["gpus"] = [0]
                await world.reload()
                assert (await world.order("restart", "m/b2", force=True)).json()["changed"]
            await world.until(lambda: len(on["m/b2"].starts) == 2)
            assert beside == [False]


@story
async def test_a_server_that_was_to_move_to_the_gpu_of_one_that_leaves_and_is_removed_is_stopped():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with streams(world):
                backends(world)[:] = [launched(on["m/b2"], gpus=[0])]
                await world.reload()  # b2 is to move to the GPU of b1, which finishes its streams
                await world.turns()
                backends(world)[:] = [launched(on["m/c1"], gpus=[2])]
                await world.reload()
                await world.until(lambda: not on["m/b2"].running)
            await world.until(lambda: not on["m/b1"].running)


@pytest.mark.parametrize("key", [None, "another"])
@story
async def test_a_server_that_is_to_move_to_the_gpu_of_one_that_leaves_serves_meanwhile(key):
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with streams(world):
                moved = launched(on["m/b2"], gpus=[0])
                backends(world)[:] = [moved]
                await world.reload()
                backends(world)[:] = [moved | {"api_key": key}]
                await world.reload()
                await world.serves("m/b2")


@story
async def test_what_needs_nothing_of_a_server_that_leaves_starts_at_once():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with streams(world):
                backends(world)[0] = launched(on["m/c1"], gpus=[2])
                await world.reload()
                await world.serves("m/c1")
                assert on["m/b1"].running


# --- it is put back -------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["it", "its launch", "its launch, at its address"])
@story
async def test_a_backend_that_is_put_back_at_once_serves_on_and_breaks_no_stream(without):
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            every = backends(world)
            before = [*every]
            async with clients(world, tokens=60) as (done, broken):
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    if without == "it":
                        del every[0]
                    else:
                        port = world.slot().port if "address" in without else 1
                        every[0] = {"name": "b1", "url": f"http://127.0.0.1:{port}"}
                    await world.reload()
                    await world.turns()
                    every[:] = before  # a mistake that is taken back at once
                    await world.reload()
                await world.until(lambda: world.phase() is Phase.READY)
                await world.until(lambda: not world.process.supervisor.fleet.leaving)
                already = len(done)
                await world.until(lambda: len(done) >= already + 12)
            assert not broken
            assert len(on["m/b1"].starts) == 1
            assert not on["m/b1"].stops


@story
async def test_a_backend_that_is_put_back_and_removed_again_finishes_what_it_carries():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with streams(world):
                gone = backends(world).pop(0)
                await world.reload()
                backends(world).insert(0, gone)
                await world.reload()
                await world.turns()
                backends(world).pop(0)
                await world.reload()
                await world.turns()
                assert on["m/b1"].running
            await world.until(lambda: not on["m/b1"].running)


@story
async def test_a_backend_that_is_put_back_and_restarted_finishes_what_it_carries():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with clients(world, tokens=60) as (_, broken):
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    gone = backends(world).pop(0)
                    await world.reload()
                    backends(world).insert(0, gone)
                    await world.reload()
                    assert (await world.order("restart")).json()["changed"]
                    await world.until(lambda: world.told(EventKind.RESTART))
                    await world.turns()
                    assert not on["m/b1"].stops
                await world.until(lambda: len(on["m/b1"].starts) == 2)
                await world.serves()
            assert not broken


@story
async def test_a_backend_that_is_put_back_as_its_server_stops_is_started_again():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            slot, stopped = world.slot(), asyncio.Event()
            slot.lasts = stopped
            gone = backends(world).pop(0)
            await world.reload()
            await world.until(lambda: slot.stops)
            backends(world).insert(0, gone)
            await world.reload()
            await world.turns()
            assert len(slot.starts) == 1
            stopped.set()
            await world.until(lambda: len(slot.starts) == 2)
            await world.serves()


@story
async def test_another_port_that_is_taken_back_while_the_old_server_finishes_stops_nothing():
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            launch = backends(world)[0]["launch"]
            before = launch["port"]
            async with streams(world):
                launch["port"] = on["x/free"].port
                await world.reload()
                await world.turns()
                launch["port"] = before
                await world.reload()
                await world.serves()
            await world.until(lambda: not world.process.supervisor.fleet.leaving)
            assert on["m/b1"].running
            assert len(on["m/b1"].starts) == 1


# --- its address stays ----------------------------------------------------------------------------


@pytest.mark.parametrize("becomes", ["a plain url", "a unit of systemd"])
@story
async def test_a_server_that_others_start_from_now_on_gets_no_request_that_its_stop_would_cut(
    becomes,
):
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            async with clients(world, tokens=30) as (done, broken):  # 0.5 s each
                await world.until(lambda: len(done) > 12)
                plain = {"name": "b1", "url": f"http://127.0.0.1:{world.slot().port}"}
                backends(world)[0] = plain if becomes == "a plain url" else managed(world.slot())
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    await world.reload()
                    assert world.phase() is Phase.DRAINING
                    before, carried = world.slot().received, world.backend().in_flight
                await world.until(lambda: world.slot().past)  # its next one may run at once
                received = world.slot().past[0].received("/v1/chat/completions")
                assert len(received) <= before + carried  # some were on their way
            assert not broken
            if becomes == "a plain url":
                await world.until(lambda: world.phase() is Phase.DOWN)
                await world.slot().begin()
            await world.serves("m/b1")


KEY = {"api_key": "sk-another-key-123456"}


@pytest.mark.parametrize(
    ("reloads", "name"),
    [
        ([KEY], "b1"),
        ([{}, KEY], "b1"),
        ([{"name": "c1"}], "c1"),
        ([{}, {"name": "c1"}], "c1"),
        ([KEY | {"launch": ["vllm", "serve", "m", "--other"]}, KEY], "b1"),
    ],
)
@story
async def test_a_server_that_is_to_be_stopped_gets_no_request_whatever_its_address_is_called(
    reloads, name
):
    async with machine() as on:
        async with fleet(on, *on_two_gpus(on)) as world:
            slot = world.slot()
            async with streams(world):
                for more in reloads:
                    if "launch" in more:
                        command = {"command": more["launch"]}
                        backends(world)[0] = {**launched(slot, **command), **KEY}
                    else:
                        address = {"url": f"http://127.0.0.1:{slot.port}"}
                        backends(world)[0] = {"name": "b1", **address, **more}
                    await world.reload()
                await world.until(lambda: world.backend(f"m/{name}").models)
                await world.turns()
                assert world.phase(f"m/{name}") is Phase.DRAINING
                assert slot.running
            await world.until(lambda: not slot.running)
            await world.until(lambda: world.phase(f"m/{name}") is Phase.DOWN)
            await slot.begin()
            await world.until(lambda: world.phase(f"m/{name}") is Phase.READY)


# --- it comes and goes ----------------------------------------------------------------------------


@story
async def test_a_backend_that_is_removed_and_put_back_many_times_has_not_failed():
    async with machine() as on:
        slot = on["m/b1"]
        limited = {"max_restarts": 3}
        both = launched(slot), launched(on["m/b2"])
        async with fleet(on, *both, supervision=limited) as world:
            for number in range(2, 7):
                gone = backends(world).pop(0)
                await world.reload()
                await world.until(lambda: not world.process.supervisor.fleet.leaving)
                assert not slot.running
                backends(world).insert(0, gone)
                await world.reload()
                await world.until(lambda n=number: len(slot.starts) >= n or world.unit().suspended)
                assert not world.told(EventKind.SUSPENDED)
                await world.serves()
                assert world.process.supervisor.history.of("m/b1").in_a_row <= 1


@story
async def test_a_backend_whose_key_is_changed_was_not_restarted_by_anybody():
    async with machine() as on:
        await on["m/b1"].begin()
        command = {"restart": {"command": ["true"]}}  # what it runs has no name but ours
        async with fleet(on, managed(on["m/b1"]) | command, make_launcher=launcher_of) as world:
            await world.turns()
            backends(world)[0]["api_key"] = "another"
            await world.reload()
            await world.serves()
            await world.turns()
            assert world.process.supervisor.history.of("m/b1").restarts == ()


@story
async def test_what_is_changed_as_it_starts_is_begun_anew_at_once():
    async with machine() as on:
        slot, never = on["m/b1"], asyncio.Event()
        slot.plans.append(Script(listens=never))
        async with fleet(on, launched(slot), wait=False) as world:
            await world.until(lambda: slot.running)
            backends(world)[0]["launch"]["args"] = {"max-model-len": 4096}
            await world.reload()
            await world.serves()
            assert world.backend().window_tokens == 4096
            (restart,) = world.told(EventKind.RESTART)
            assert "its `launch` settings changed" in restart.detail
            await world.turns()
            assert len(slot.starts) == 2


@story
async def test_a_start_goes_on_whose_changed_settings_cannot_be_started():
    async with machine() as on:
        slot, comes = on["m/b1"], asyncio.Event()
        slot.plans.append(Script(listens=comes))
        few = {"supervision": {"max_restarts": 1}}
        async with fleet(on, launched(slot), wait=False, **few) as world:
            await world.until(lambda: slot.running)
            slot.refuses, slot.obstacle = ["there is no such program"] * 2, Obstacle.CANNOT_HELP
            backends(world)[0]["launch"]["args"] = {"max-model-len": 4096}
            await world.reload()
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            await world.turns()
            comes.set()
            await world.serves()
            assert len(slot.starts) == 1


@story
async def test_what_is_changed_as_it_starts_is_told_and_can_be_ordered_under_a_hold():
    async with machine() as on:
        slot, never = on["m/b1"], asyncio.Event()
        slot.plans.append(Script(listens=never))
        async with fleet(on, launched(slot), launched(on["m/b2"]), wait=False) as world:
            await world.until(lambda: slot.running)
            assert (await world.admin("POST", "/admin/v1/restarts:hold", {})).is_success
            backends(world)[0]["launch"]["args"] = {"max-model-len": 4096}
            await world.reload()
            await world.until(lambda: world.unit().decision is not None)
            assert world.unit().decision.why is Why.ON_HOLD
            told = (await world.admin("GET", "/admin/v1/overview")).json()["problems"]
            (step,) = [each["next"] for each in told if each["subject"] == "backend m/b1"]
            assert "`vllm-gateway restart m/b1 --force` begins that now." in step
            refused = (await world.order("restart")).json()
            assert not refused["changed"]
            assert "is already restarting, and `--force` begins that anew" in refused["sentence"]
            assert (await world.order("restart", force=True)).json()["changed"]
            await world.serves("m/b1")
            assert len(slot.starts) == 2
