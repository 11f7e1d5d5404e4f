"""No door is one-way: what recovers serves again, what is due stays due, and orders outlive a gateway."""

from __future__ import annotations

import asyncio
import math
import re
import sys

import pytest

from gateway.core.aio import SystemClock
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.decisions import Why
from gateway.heal.fleet import launcher_of
from gateway.heal.observed import Timing
from gateway.heal.states import Failed, Proving, Serving, Starting, Suspect
from gateway.launch.launcher import Obstacle
from gateway.store.memory import MemoryStore
from tests import loopback
from tests.fakelaunch import Script
from tests.stories.supervised import FAST, fleet, held, launched, machine, managed, pool
from tests.stories.support import story
from tests.stories.test_supervision_signs import Forward

TESTED = {"supervision": {"canary": "200ms"}}
QUICKLY = Timing(0.02, token_s=0.3, last_words_s=0.1)
RARELY = Timing(0.1, token_s=1.0, last_words_s=0.1)  # the pauses grow to 3 s


class Slow:
    """The machine's clocks. `slows` has the first run at a hundredth of its pace, so that nothing comes due."""

    wall = staticmethod(SystemClock.wall)

    def __init__(self):
        self._slow_at = math.inf

    def now(self):
        now = SystemClock.now()
        return min(now, self._slow_at) + max(0.0, now - self._slow_at) / 100

    def slows(self):
        self._slow_at = SystemClock.now()


def two(on, **more):
    return launched(on["m/b1"], **more), launched(on["m/b2"], **more)


async def hold(world):
    assert (await world.admin("POST", "/admin/v1/restarts:hold", {"pool": "m"})).status_code == 200
    await world.turns(3)


async def somebody_else_asks(world):
    body = {"model": "m", "prompt": "a", "max_tokens": 20}
    url = f"http://127.0.0.1:{world.slot().port}/v1/completions"
    async with loopback.client() as http:
        assert (await http.post(url, json=body)).status_code == 200


# --- what recovers serves again -------------------------------------------------------------------


@story
async def test_an_engine_that_froze_under_a_hold_serves_again_when_it_works_again():
    async with machine() as on, fleet(on, *two(on), timing=QUICKLY, **TESTED) as world:
        await hold(world)
        sim = world.slot().sim
        sim.inject("frozen")
        await world.until(lambda: world.backend().reason == "frozen")
        await world.until(lambda: world.unit().decision is not None)
        assert world.unit().decision.why is Why.ON_HOLD
        sim.clear()
        await world.serves()
        assert world.slot().sim is sim
        assert not world.told(EventKind.RESTART)


@story
@pytest.mark.parametrize("fault", ["refuse", "frozen"])
async def test_proof_that_is_older_than_a_sign_of_life_is_none(fault):
    clock = Slow()
    async with (
        machine() as on,
        fleet(on, *two(on), timing=RARELY, clock=clock, **TESTED) as world,
    ):
        await hold(world)
        sim = world.slot().sim
        sim.inject(fault)
        await world.until(lambda: getattr(world.unit().state, "failures", 0) > 4)
        clock.slows()
        test_at, failed_at = world.unit().state.test_at, clock.now()
        sim.clear()
        await somebody_else_asks(world)
        await world.until(lambda: world.backend().health.up)
        await world.until(lambda: fault == "refuse" or world.backend().pulse.moved_at > failed_at)
        assert clock.now() < test_at - 1.0, "the next test request was not due"
        assert (await world.admin("POST", "/admin/v1/restarts:lift", {"pool": "m"})).is_success
        await world.serves()
        assert world.slot().sim is sim
        assert not world.told(EventKind.RESTART)


@story
async def test_what_failed_before_a_sign_of_life_does_not_count():
    async with machine() as on, fleet(on, *two(on), timing=RARELY, **TESTED) as world:
        await hold(world)
        sim = world.slot().sim
        sim.inject("refuse")
        await world.until(lambda: getattr(world.unit().state, "failures", 0) > 3)
        sim.clear()
        sim.inject("frozen")
        await world.until(lambda: world.backend().health.up)
        await world.until(lambda: world.unit().state.failures == 1)
        assert world.unit().calls_for() is None, "one test request that failed is no proof"
        await world.until(lambda: world.unit().calls_for() is not None)


@story
async def test_without_automatic_too():
    manual = {"supervision": {"canary": "200ms", "automatic": False}}
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        backends = managed(on["m/b1"]), managed(on["m/b2"])
        async with fleet(on, *backends, timing=QUICKLY, **manual) as world:
            sim = world.slot().sim
            sim.inject("http_500")
            await world.until(lambda: world.backend().reason == "frozen")
            sim.clear()
            await world.serves()
            assert world.slot().starts == []


@story
async def test_a_start_that_hung_and_comes_up_later_serves():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.plan(Script(listens=up))
        patience = {"supervision": {"patience": {"config": "400ms"}, "backoff": "1h"}}
        async with fleet(on, launched(slot), wait=False, **patience) as world:
            await world.until(lambda: slot.starts)
            await hold(world)
            await world.until(lambda: isinstance(world.unit().state, Failed))
            assert world.unit().state.lives
            up.set()
            await world.serves()
            assert len(slot.starts) == 1


@story
async def test_one_that_is_suspended_and_works_after_all_serves_and_stays_suspended():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.judge = lambda flags: Script(listens=up)
        few = {"supervision": {"patience": {"config": "400ms"}, "max_restarts": 1}}
        async with fleet(on, launched(slot), wait=False, **few) as world:
            await world.until(lambda: world.unit().suspended)
            await world.until(lambda: world.backend().reason == "suspended")
            up.set()
            await world.serves()
            assert world.unit().suspended
            await slot.die()
            await world.until(lambda: world.backend().reason == "suspended")
            assert len(slot.starts) == 2


@story
async def test_undrain_puts_back_what_is_suspected_and_says_so():
    async with machine() as on, fleet(on, *two(on), timing=QUICKLY, **TESTED) as world:
        await hold(world)
        world.slot().sim.inject("http_500")
        await world.until(lambda: isinstance(world.unit().state, Suspect))
        await world.until(lambda: world.phase() is Phase.DOWN)
        answer = (await world.order("undrain")).json()
        assert answer["changed"]
        assert "goes back into service, though no progress for" in answer["sentence"]
        world.slot().sim.clear()
        await world.serves()


@story
async def test_one_failed_test_request_is_no_proof():
    async with machine() as on, fleet(on, *two(on), timing=QUICKLY, **TESTED) as world:
        sim = world.slot().sim
        sim.inject("http_500@1")
        await world.until(
            lambda: any(t.reason == "suspect" for t in world.process.table.transitions)
        )
        await world.serves()
        await world.turns(20)
        assert world.slot().sim is sim
        assert not world.told(EventKind.RESTART)
        labels = [each.label for each in world.told(EventKind.SUSPECT)]
        assert labels == ["frozen", "cleared"]


@story
async def test_the_only_one_that_serves_stays_in_rotation_until_there_is_proof():
    async with machine() as on:
        one = launched(on["m/b1"])
        async with fleet(on, one, timing=QUICKLY, **TESTED) as world:
            sim = world.slot().sim
            sim.inject("http_500@1")
            await world.until(lambda: world.process.supervisor.units["m/b1"].bad_at is not None)
            await world.until(
                lambda: isinstance(world.process.supervisor.units["m/b1"].state, Serving)
            )
            assert "suspect" not in {each.reason for each in world.process.table.transitions}
            sim.inject("frozen")
            await world.until(lambda: world.told(EventKind.RESTART))
            assert "test requests in a row failed" in world.told(EventKind.RESTART)[0].detail


# --- what is due stays due ------------------------------------------------------------------------


@story
async def test_a_service_manager_that_is_away_uses_up_no_restart():
    async with machine() as on:
        slot = on["m/b1"]
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        few = {"supervision": {"canary": "200ms", "max_restarts": 1}}
        backends = managed(slot), managed(on["m/b2"])
        async with fleet(on, *backends, timing=QUICKLY, **few) as world:
            slot.obstacle, slot.refuses = Obstacle.TRANSIENT, ["Docker did not answer"] * 4
            slot.sim.inject("frozen")
            await world.until(lambda: len(slot.starts) == 1, seconds=40.0)
            await world.serves()
            assert [each.detail for each in world.told(EventKind.LAUNCH_FAILED)] == [
                "Docker did not answer"
            ] * 4
            assert not world.told(EventKind.SUSPENDED)


@story
async def test_one_whose_port_another_program_has_is_started_once_that_has_ended():
    async with machine() as on:
        slot, taken = on["m/b1"], "port 1 is already in use by 7 (python). Stop it"
        slot.obstacle, slot.refuses = Obstacle.PORT, [taken] * 9999
        few = {"supervision": {"max_restarts": 1}}
        async with fleet(on, *two(on), wait=False, **few) as world:
            await world.until(lambda: len(world.told(EventKind.LAUNCH_FAILED)) > 4)
            told = (await world.admin("GET", "/admin/v1/overview")).json()["problems"]
            (problem,) = [each for each in told if each["subject"] == "backend m/b1"]
            assert "Backend m/b1 has failed to start. " in problem["sentence"]
            assert problem["cause"] == f"It could not be started: {taken}."
            assert problem["next"] == "See to that; it is started again by itself."
            slot.refuses = []
            await world.serves()
            assert not world.told(EventKind.SUSPENDED)


@story
async def test_a_restart_that_an_operator_ordered_is_not_lost_by_a_reload():
    async with machine() as on:
        slot = on["m/b1"]
        async with fleet(on, *two(on)) as world:
            slot.lasts = asyncio.Event()
            slot.move()
            world.settings["pools"]["m"]["backends"][0]["launch"]["port"] = slot.port
            await world.reload()
            await world.until(lambda: slot.stops)  # the server before it takes its time to stop
            assert (await world.order("restart", force=True)).json()["changed"]
            assert world.unit().ordered is not None
            slot.lasts.set()
            await world.serves()
            launches = world.told(EventKind.LAUNCH, "m/b1")
            assert [each.label for each in launches][-1] == "operator"
            assert len(slot.starts) == 2


@pytest.mark.parametrize("ordered", ["before", "before, and begun", "after"])
@story
async def test_a_restart_that_an_operator_orders_about_a_reload_of_its_key_is_carried_out_and_cuts_nothing(
    ordered,
):
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(world.chat(max_tokens=60)) for _ in range(4)]
                await world.until(lambda: world.backend().in_flight)
                with held(on["m/b1"]):
                    if ordered != "after":
                        assert (await world.order("restart", reason="a leak")).json()["changed"]
                    if ordered == "before, and begun":
                        await world.until(lambda: world.phase() is Phase.DRAINING)
                    world.settings["pools"]["m"]["backends"][0]["api_key"] = "secret"
                    await world.reload()
                    if ordered == "after":
                        assert (await world.order("restart", reason="a leak")).json()["changed"]
            assert {each.result().status_code for each in asked} == {200}
            await world.until(lambda: len(on["m/b1"].starts) == 2)
            await world.serves()
            assert "a leak" in world.told(EventKind.RESTART)[-1].detail
            await world.turns(20)
            assert len(on["m/b1"].starts) == 2


# --- orders outlive a gateway ---------------------------------------------------------------------


@story
async def test_drains_and_holds_outlive_the_gateway(tmp_path):
    async with machine() as on:
        told = two(on, on_exit="leave")
        async with fleet(on, *told, folder=tmp_path) as world:
            await world.order("drain", reason="disk")
            await hold(world)
        async with fleet(on, *told, folder=tmp_path, wait=False) as world:
            await world.serves("m/b2")
            assert world.phase() is Phase.DRAINING
            await world.turns(3)
            assert world.process.supervisor.held() == {"m": True}
            await on["m/b2"].die()
            await world.until(lambda: world.unit("m/b2").decision is not None)
            assert world.unit("m/b2").decision.why is Why.ON_HOLD
            assert (await world.order("undrain")).json()["changed"]
            await world.until(lambda: world.phase() is Phase.READY)
        async with fleet(on, *told, folder=tmp_path, wait=False) as world:
            await world.serves("m/b1")


@story
async def test_what_was_put_back_just_before_its_gateway_ends_serves_at_all_others_and_at_the_next(
    tmp_path,
):
    async with machine() as on:
        store = MemoryStore(SystemClock())
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        managed_ones = managed(on["m/b1"]), managed(on["m/b2"])
        async with fleet(on, *managed_ones, store=store) as other:
            rarely = Timing()  # a turn a second: it ends before the next one
            here = {"store": store, "folder": tmp_path, "timing": rarely}
            async with fleet(on, *managed_ones, **here) as one:
                assert (await one.order("drain")).json()["changed"]
                await other.until(lambda: other.phase() is Phase.DRAINING)
                assert (await one.order("undrain")).json()["changed"]
            await other.until(lambda: other.phase() is Phase.READY)
            async with fleet(on, *managed_ones, **here, wait=False) as one:
                await one.serves("m/b2")
                await one.turns(2)
                assert one.phase() is Phase.READY


@story
async def test_a_suspension_outlives_the_gateway_with_its_reason(tmp_path):
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = lambda flags: Script(exit_code=3)
        few = {"supervision": {"max_restarts": 1}}
        async with fleet(on, launched(slot), folder=tmp_path, wait=False, **few) as world:
            await world.until(lambda: world.unit().suspended)
            detail = world.backend().health.detail
        async with fleet(on, launched(slot), folder=tmp_path, wait=False, **few) as world:
            await world.until(lambda: world.backend().reason == "suspended")
            assert world.backend().health.detail == detail
            assert len(slot.starts) == 2
            slot.judge = lambda flags: Script()
            assert (await world.order("undrain")).json()["changed"]
            await world.serves()
            assert world.told(EventKind.RESTART)[-1].detail == "an operator ended its suspension"


# --- starts that a restart cannot help ------------------------------------------------------------


BAD_FLAG = "vllm: error: unrecognized arguments: --max-modle-len 4096\n"


@pytest.mark.parametrize("how", ["flag", "program"])
@story
async def test_a_start_that_a_restart_cannot_help_is_tried_once_more_and_nobody_waits_for_it(how):
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = lambda flags: Script(exit_code=2, log=BAD_FLAG)
        if how == "program":
            slot.obstacle, slot.refuses = Obstacle.CANNOT_HELP, ["there is no vllm in PATH"] * 9
        async with fleet(on, launched(slot), wait=False) as world:
            await world.until(lambda: world.unit().suspended)
            assert len(slot.starts) + 9 * (how == "program") - len(slot.refuses) == 2
            assert "a restart cannot help" in world.backend().health.detail
            assert (await world.chat(max_tokens=1)).status_code == 503
            told = [each for each in world.process.table.transitions if each.after is Phase.DOWN]
            assert told[0].reason == "start_failed"  # nobody waited for the second try either


WELL = """\
(APIServer pid=7) INFO 11-21 10:09:36 [api_server.py:1896] vLLM API server version 0.10.2
(EngineCore_0 pid=8) INFO 11-21 10:09:50 [gpu.py:1] Model loading took 7.3 GiB and 4.1 seconds
(APIServer pid=7) INFO 11-21 10:10:01 [launcher.py:36] Route: /health, Methods: GET
INFO:     Started server process [7]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
"""


@pytest.mark.parametrize("exit_code", [0, 1, -15])
@story
async def test_a_start_whose_end_its_log_does_not_explain_gets_all_its_restarts(exit_code):
    async with machine() as on:
        slot = on["m/b1"]
        few = {"wait": False, "timing": FAST, "supervision": {"max_restarts": 3}}
        slot.judge = lambda flags: Script(faults=("frozen",))  # its first token never comes
        async with fleet(on, launched(slot), **few) as world:
            for count in range(1, 5):
                await world.until(
                    lambda n=count: (
                        len(slot.starts) == n and isinstance(world.unit().state, Proving)
                    )
                )
                await slot.die(exit_code, log=WELL)
            await world.until(lambda: world.unit().suspended)
            assert "3 restarts within" in world.backend().health.detail


@story
async def test_who_cannot_wait_for_a_backoff_and_the_start_after_it_hears_both_at_once():
    async with machine() as on:
        slow = {"supervision": {"backoff": "100s", "max_backoff": "100s"}}
        async with fleet(on, launched(on["m/b1"]), **slow) as world:
            await world.slot().die()  # the first restart comes at once, and its start is learnt
            await world.until(lambda: len(world.slot().starts) == 2)
            await world.serves()
            await world.slot().die()
            await world.until(lambda: world.unit().decision is not None)
            reply = await world.chat(max_tokens=1)
            assert reply.status_code == 503
            told = re.search(r"expected to serve in about (\d+) s", reply.text)
            assert told is not None, reply.text
            assert 80 <= int(told[1]) <= 110
            assert reply.headers["retry-after"] == "30"  # the most that clients are told


@story
async def test_who_comes_while_the_end_of_the_only_one_is_examined_waits_for_its_next_start():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        slot = world.slot()
        await slot.die()  # so that it is known how long its starts take
        await world.until(lambda: len(slot.starts) == 2)
        await world.serves()
        slot.logs = asyncio.Event()
        await slot.die()
        await world.until(lambda: slot.reading and world.phase() is Phase.DOWN)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(world.chat(max_tokens=1))
            await world.turns(20)
            assert not asked.done()
            slot.logs.set()
        assert asked.result().status_code == 200


@story
async def test_a_start_waits_only_for_starts_on_its_gpus_and_not_for_broken_ones():
    async with machine() as on:
        broken, well = on["m/b1"], on["x/b1"]
        broken.judge = lambda flags: Script(exit_code=1, log="boom")
        well.model = "x"
        slow = {"supervision": {"backoff": "1h", "max_backoff": "1h", "max_restarts": 50}}
        async with fleet(on, launched(broken), wait=False, **slow) as world:
            await world.until(lambda: len(broken.starts) == 2)  # the third comes in an hour
            world.settings["pools"]["x"] = pool(launched(well))
            await world.reload()
            await world.serves("x/b1")
            assert len(broken.starts) == 2


@story
async def test_one_that_serves_is_not_taken_out_because_restarts_did_not_help():
    async with machine() as on:
        few = {"supervision": {"max_restarts": 1}}
        async with fleet(on, *two(on), **few) as world:
            await world.slot().die()
            await world.until(lambda: world.told(EventKind.RESTART))
            await world.serves()
            await world.order("drain", "m/b2")  # so that all requests come to b1
            for _ in range(3):  # never five in a row, which takes it out by itself
                world.slot().sim.inject("http_500@4")
                assert [(await world.chat(max_tokens=1)).status_code for _ in range(5)][-1] == 200
            await world.order("undrain", "m/b2")
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            await world.turns()
            assert world.unit().suspended
            assert world.phase() is Phase.READY
            assert (await world.chat(max_tokens=1)).status_code == 200


@story
async def test_one_that_no_test_request_can_try_is_restarted_when_it_answers_nothing():
    async with machine() as on:
        backends = [each | {"endpoints": ["transcriptions"]} for each in two(on)]
        clock = Forward()
        async with fleet(on, *backends, clock=clock) as world:
            world.slot().sim.inject("refuse")
            await world.until(lambda: isinstance(world.unit().state, Suspect))
            await world.until(lambda: world.unit().state.failures >= 2)
            clock.ahead_s += 40.0
            await world.until(lambda: world.told(EventKind.RESTART))
            assert world.told(EventKind.RESTART)[0].label == "engine_dead"
            await world.serves()


SILENT_FOR_LONG = """
import pathlib, sys, time
from gateway.sim.server import SimConfig, run
speaks, serves = map(pathlib.Path, sys.argv[2:4])
while not speaks.exists(): time.sleep(0.01)
while not serves.exists():
    print("INFO 11-21 10:10:05 [weight_utils.py:600] Time spent downloading weights: 900 s", flush=True)
    time.sleep(0.01)
run(SimConfig(model="m", port=int(sys.argv[1]), speed=0))
"""


@story
async def test_a_start_that_hung_and_speaks_again_goes_on(tmp_path):
    async with machine() as on:
        port, speaks, serves = on["m/b1"].port, tmp_path / "speaks", tmp_path / "serves"
        command = [sys.executable, "-c", SILENT_FOR_LONG, str(port), str(speaks), str(serves)]
        backend = {"name": "b1", "launch": {"command": command, "port": port}}
        patience = {"supervision": {"patience": {"config": "2s"}}}
        async with fleet(on, backend, make_launcher=launcher_of, wait=False, **patience) as world:
            await world.until(lambda: isinstance(world.unit().state, Starting))
            await hold(world)
            await world.until(lambda: isinstance(world.unit().state, Failed))
            speaks.touch()
            await world.until(lambda: isinstance(world.unit().state, Starting))
            lifted = await world.admin("POST", "/admin/v1/restarts:lift", {"pool": "m"})
            assert lifted.is_success
            await world.turns(5)
            assert isinstance(world.unit().state, Starting)
            assert world.unit().state.ours, "else nobody learns how long it takes"
            serves.touch()
            await world.serves()
            assert not world.told(EventKind.RESTART)


@story
async def test_a_start_that_hung_goes_on_where_an_operator_gives_it_more_time(tmp_path):
    async with machine() as on:
        slot, listens = on["m/b1"], asyncio.Event()
        slot.plan(Script(listens=listens))
        patience = {"supervision": {"patience": {"total": "1s"}}}
        async with fleet(on, launched(slot), wait=False, **patience) as world:
            await world.until(lambda: isinstance(world.unit().state, Starting))
            await hold(world)
            await world.until(lambda: isinstance(world.unit().state, Failed))
            world.settings["pools"]["m"]["supervision"]["patience"]["total"] = "1h"
            await world.reload()
            await world.until(lambda: isinstance(world.unit().state, Starting))
            assert (await world.admin("POST", "/admin/v1/restarts:lift", {"pool": "m"})).is_success
            await world.turns(5)
            assert isinstance(world.unit().state, Starting)
            listens.set()
            await world.serves()
            assert not world.told(EventKind.RESTART)
