"""Operators order, the configuration changes, gateways end: what supervision makes of it, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys

import pytest

from gateway.core.aio import SystemClock
from gateway.core.events import EventKind
from gateway.core.types import SERVING, Phase
from gateway.heal.decisions import Why
from gateway.heal.intent import Mark
from gateway.heal.observed import Timing
from gateway.heal.states import Draining
from gateway.heal.supervisor import Supervisor
from gateway.launch import proc
from gateway.pools.table import PoolTable
from gateway.store.memory import MemoryStore
from gateway.store.shared import StoreUnavailable
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, held, launched, machine, managed, pool, writes
from tests.stories.support import frames, of_processes, story


def two(on, **more):
    return launched(on["m/b1"], **more), launched(on["m/b2"], **more)


# --- orders over HTTP -----------------------------------------------------------------------------


@story
async def test_undrain_of_one_that_is_down_does_not_call_it_in_service():
    manual = {"supervision": {"automatic": False}}
    async with machine() as on, fleet(on, *two(on), wait=False, **manual) as world:
        await world.until(lambda: world.unit().decision is not None)
        undrain = (await world.order("undrain")).json()
        assert not undrain["changed"]
        assert "m/b1 is not drained, but starting: " in undrain["sentence"]


@story
async def test_a_drain_takes_no_new_work_and_undrain_puts_it_back():
    async with machine() as on, fleet(on, *two(on)) as world:
        told = (await world.order("drain", reason="disk")).json()
        assert told["changed"]
        assert "m/b1 takes no new work" in told["sentence"]
        assert world.phase() is Phase.DRAINING
        _, out, _ = await cli(world, "status")
        assert "  why   Takes no new requests; running ones finish: disk.\n" in out
        assert not (await world.order("drain")).json()["changed"]  # it is so already
        before = world.slot().received
        for _ in range(6):
            assert (await world.chat(max_tokens=1)).status_code == 200
        assert world.slot().received == before
        assert (await world.order("undrain")).json()["changed"]
        assert world.phase() is Phase.READY
        assert not (await world.order("undrain")).json()["changed"]
        orders = world.told(EventKind.OPERATOR)
        assert [(each.label, each.detail) for each in orders] == [
            ("drain", "disk"),
            ("undrain", "undrain ordered by an operator"),
        ]


@story
async def test_what_an_operator_drained_is_not_restarted_when_it_dies():
    async with machine() as on, fleet(on, *two(on)) as world:
        await world.order("drain")
        await world.slot().die()
        await world.until(lambda: world.unit().decision is not None)
        assert world.unit().decision.why is Why.HELD
        assert len(world.slot().starts) == 1


@story
async def test_a_dry_run_tells_what_it_would_touch_and_changes_nothing():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world, asyncio.TaskGroup() as group:
            running = [group.create_task(world.chat(stream=True, max_tokens=300)) for _ in range(4)]
            await world.until(lambda: world.in_flight() == 4)
            for verb in ("drain", "restart"):
                told = (await world.order(verb, dry_run=True)).json()
                assert told["would_change"]
                assert not told["changed"]
                assert told["requests"] == world.backend().in_flight > 0
                assert told["oldest_s"] >= 0
            assert world.phase() is Phase.READY
            assert not world.told(EventKind.OPERATOR)
            for each in running:
                each.cancel()


@story
async def test_the_last_backend_that_serves_is_not_taken_out_without_force():
    async with machine() as on, fleet(on, *two(on)) as world:
        await world.order("drain", "m/b2")
        for verb in ("drain", "restart"):
            refused = await world.order(verb)
            assert refused.status_code == 409
            assert refused.json()["code"] == "last_backend"
            asked = (await world.order(verb, dry_run=True)).json()
            assert asked["last"]
            assert (
                "it is the last backend that serves m, so this needs `--force`" in asked["sentence"]
            )
            forced = (await world.order(verb, dry_run=True, force=True)).json()
            assert "force" not in forced["sentence"]
        assert world.phase() is Phase.READY
        assert (await world.order("drain", force=True)).json()["changed"]
        assert world.phase() is Phase.DRAINING


@story
async def test_one_whose_restart_is_ordered_and_not_begun_is_no_other_that_serves():
    async with machine() as on, fleet(on, *two(on), timing=Timing()) as world:  # a turn a second
        assert (await world.order("restart", "m/b1")).json()["changed"]
        assert world.phase("m/b1") is Phase.READY
        refused = await world.order("restart", "m/b2")
        assert (refused.status_code, refused.json()["code"]) == (409, "last_backend")
        assert (await world.order("restart", "m/b2", dry_run=True)).json()["last"]
        await world.until(lambda: on["m/b1"].starts)
        assert world.phase("m/b2") is Phase.READY


@story
async def test_orders_that_make_no_sense_are_refused_with_what_there_is():
    plain = {"name": "b2", "url": "http://127.0.0.1:9"}
    async with machine() as on, fleet(on, launched(on["m/b1"]), plain) as world:
        unknown = await world.order("drain", "m/b9")
        assert unknown.status_code == 404
        assert "m/b1, m/b2" in unknown.json()["detail"]
        nobody = await world.order("restart", "m/b2")
        assert nobody.status_code == 409
        assert nobody.json()["code"] == "not_supervised"
        assert (await world.admin("GET", "/admin/v1/backends/m/b2/logs")).status_code == 409
        assert (await world.admin("GET", "/admin/v1/backends/m/b9/logs")).status_code == 404
        wrong = await world.admin("POST", "/admin/v1/backends/m/b1:drain", {"dryrun": True})
        assert wrong.status_code == 400
        assert world.phase() is Phase.READY


@story
async def test_orders_are_not_taken_from_web_pages_nor_without_the_token():
    token = {"admin": {"listen": "127.0.0.1:0", "token": "t0p-secret-token-of-16+"}}
    async with machine() as on, fleet(on, *two(on), extra=token) as world:
        bearer = {"authorization": "Bearer t0p-secret-token-of-16+"}
        path = "/admin/v1/backends/m/b1:drain"
        assert (
            await world.admin("POST", path, {}, headers={"authorization": ""})
        ).status_code == 401
        form = await world.admin("POST", path, headers=bearer, data={"force": "true"})
        assert form.status_code == 415
        text = bearer | {"content-type": "text/plain"}
        assert (await world.admin("POST", path, headers=text, content="{}")).status_code == 415
        page = bearer | {"origin": "http://evil.example"}
        assert (await world.admin("POST", path, {}, headers=page)).status_code == 403
        assert world.phase() is Phase.READY
        assert (await world.admin("POST", path, {}, headers=bearer)).status_code == 200


@story
async def test_an_ordered_restart_lets_streams_end_well_first():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            first = world.slot().sim
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(world.chat(stream=True, max_tokens=60)) for _ in range(6)
                ]
                await world.until(lambda: world.in_flight() == 6)
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    assert (await world.order("restart", reason="new driver")).json()["changed"]
                    assert not (await world.order("restart")).json()["changed"]  # it is under way
                    await world.until(lambda: world.phase() is Phase.DRAINING)
                    undrain = (await world.order("undrain")).json()
                    assert not undrain["changed"]
                    said = "m/b1 is restarting, and undrain does not stop that"
                    assert said in undrain["sentence"]
                    assert world.slot().sim is first
            for each in running:
                assert frames(each.result().text)[-1] == "[DONE]"
                assert "error" not in each.result().text
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
            assert world.slot().sim is not first
            (restart,) = world.told(EventKind.RESTART)
            assert restart.label == "operator"
            assert "new driver" in restart.detail
            assert await world.counted("gateway_backend_restarts_total", cause="operator") == 1
            assert await world.counted("gateway_backend_restarts_total") == 1


@contextlib.asynccontextmanager
async def drained_to_restart(world):
    """Have streams run at m/b1 for as long as this lasts, which an automatic restart waits for."""
    slot = world.slot()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(world.chat(stream=True, max_tokens=60))
        await world.until(lambda: writes(slot))
        with held(slot):
            yield


@pytest.mark.parametrize("order", ["drain", "hold"])
@story
async def test_an_operators_order_calls_an_automatic_restart_off_that_is_still_drained_for(order):
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with drained_to_restart(world):
                launch = world.settings["pools"]["m"]["backends"][0]["launch"]
                launch["args"] = {"max-model-len": 4096}
                await world.reload()
                await world.until(lambda: isinstance(world.unit().state, Draining))
                if order == "drain":
                    await world.order("drain", reason="a fan is loud")
                else:
                    assert (await world.admin("POST", "/admin/v1/restarts:hold", {})).is_success
            await world.until(lambda: world.unit().decision is not None)
            waits = Why.HELD if order == "drain" else Why.ON_HOLD
            assert world.unit().decision.why is waits
            assert (slot.running, slot.stops) == (True, [])
            (told,) = [e for e in world.told(EventKind.OPERATOR) if e.label == "called_off"]
            assert told.detail.startswith("its restart was called off: an operator ")
            await slot.die()  # by hand
            await world.turns(20)
            assert len(slot.starts) == 1
            if order == "drain":
                assert (await world.order("undrain")).json()["changed"]
            else:
                assert (await world.admin("POST", "/admin/v1/restarts:lift", {})).is_success
            await world.until(lambda: world.backend().window_tokens == 4096)
            await world.serves()


@pytest.mark.parametrize("pool", [None, "m"])
@story
async def test_a_hold_calls_a_restart_off_from_the_moment_of_its_answer(pool):
    async with machine() as on, fleet(on, *two(on)) as world:
        shared, scope = world.process.supervisor.fleet.shared, {"pool": pool}
        assert not shared.on_hold("m")
        held = await world.admin("POST", "/admin/v1/restarts:hold", {**scope, "for_s": 3600})
        assert (held.is_success, shared.on_hold("m")) == (True, True)
        assert (await world.admin("POST", "/admin/v1/restarts:lift", scope)).is_success
        await world.until(lambda: not shared.on_hold("m"))


@story
async def test_what_a_person_stops_at_its_service_manager_during_the_drain_stays_stopped():
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed = on["m/b2"].speed = 1.0
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        every = managed(slot), managed(on["m/b2"])
        async with fleet(on, *every) as world:
            async with drained_to_restart(world):
                world.settings["pools"]["m"]["supervision"]["restart_every"] = "1s"
                await world.reload()
                await world.until(lambda: isinstance(world.unit().state, Draining))
                slot.gone = True
                await slot.end()
            await world.until(lambda: world.told(EventKind.EXITED, "m/b1"))
            await world.turns(20)
            assert (slot.running, slot.starts) == (False, [])


@story
async def test_a_restart_that_an_operator_ordered_goes_on_under_a_hold():
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with drained_to_restart(world):
                assert (await world.order("restart")).json()["changed"]
                await world.until(lambda: isinstance(world.unit().state, Draining))
                assert (await world.admin("POST", "/admin/v1/restarts:hold", {})).is_success
            await world.until(lambda: len(slot.starts) == 2)
            await world.serves()


@story
async def test_what_finishes_at_another_process_is_not_told_as_no_request():
    async with machine() as on, fleet(on, *two(on)) as world:
        table = world.process.table
        before, table.carried_elsewhere = table.carried_elsewhere, lambda backend_id, since: True
        await world.order("restart")
        await world.until(lambda: isinstance(world.unit().state, Draining))
        assert world.backend().health.detail.startswith("finishing its requests, then restarting: ")
        table.carried_elsewhere = before
        await world.until(lambda: len(on["m/b1"].starts) == 2)


@story
async def test_restarts_on_hold_wait_until_the_hold_is_lifted():
    async with machine() as on, fleet(on, *two(on)) as world:
        order = {"pool": "m", "for_s": 600, "reason": "new kernel"}
        held = await world.admin("POST", "/admin/v1/restarts:hold", order)
        assert held.json() == {"pool": "m", "held": True, "for_s": 600, "others": []}
        await world.turns(3)
        (hold,) = (await world.admin("GET", "/admin/v1/overview")).json()["holds"]
        assert (hold["pool"], hold["reason"]) == ("m", "new kernel")
        _, out, _ = await cli(world, "status")
        ends = hold["until"][:19].replace("T", " ")
        assert out.count(f"Automatic restarts of pool m are on hold until {ends} UTC,") == 1
        assert out.count("on hold") == 1
        assert "  why   New kernel.\n" in out
        assert await world.counted("gateway_restarts_held", pool="m") == 1
        await world.slot().die()
        await world.until(lambda: world.unit().decision is not None)
        assert world.unit().decision.why is Why.ON_HOLD
        assert len(world.slot().starts) == 1
        lifted = await world.admin("POST", "/admin/v1/restarts:lift", {"pool": "m"})
        assert not lifted.json()["held"]
        await world.until(lambda: len(world.slot().starts) == 2)
        await world.serves()
        nowhere = await world.admin("POST", "/admin/v1/restarts:hold", {"pool": "x"})
        assert nowhere.status_code == 404
        events = "gateway_supervision_events_total"
        assert await world.counted(events, pool="m", backend="b1", kind="exited") == 1
        assert await world.counted(events, kind="hold") == 2
        assert await world.counted("gateway_backend_restarts_total", cause="exited") == 1


@story
async def test_logs_and_events_are_told_without_prompts_and_secrets():
    async with machine() as on:
        slot = on["m/b1"]
        told = launched(slot, env={"HF_TOKEN": "hf_abcdefghijklmnopqrstuv"})
        async with fleet(on, told, launched(on["m/b2"])) as world:
            slot.script.log = "INFO: up\nINFO: ready\n"
            logs = await world.admin("GET", "/admin/v1/backends/m/b1/logs?bytes=12")
            assert logs.text == "INFO: ready\n"[-12:]
            await world.chat("my secret prompt", max_tokens=1)
            await slot.die(
                1, "ERROR 'prompt': 'my secret prompt' HF_TOKEN=hf_abcdefghijklmnopqrstuv"
            )
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
            events = (await world.admin("GET", "/admin/v1/events?limit=3")).json()
            assert len(events["data"]) == 3
            assert events["has_more"]
            assert events["data"][0]["kind"] == "started"  # the newest first
            every = (await world.admin("GET", "/admin/v1/events?limit=1000")).text
            assert "my secret prompt" not in every
            assert "hf_abcdefghijklmnopqrstuv" not in every
            assert world.key not in every


async def cli(world, *words):
    """Run a verb of the command line as its users do."""
    command = [
        sys.executable,
        "-c",
        "from gateway.cli.main import main; main()",
        *words,
        "--server",
        world.admin_url,
    ]
    ran = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=20
    )
    return ran.returncode, ran.stdout, ran.stderr


@story
async def test_events_outlive_the_gateway(tmp_path):
    async with machine() as on:
        stays = launched(on["m/b1"], on_exit="leave")
        async with fleet(on, stays, folder=tmp_path):
            pass
        async with fleet(on, stays, folder=tmp_path) as world:
            await world.until(
                lambda: any(e.label == "found" for e in world.told(EventKind.STARTED))
            )
            events = (await world.admin("GET", "/admin/v1/events?limit=9")).json()["data"]
            told = [(each["backend"], each["kind"], each["label"]) for each in reversed(events)]
            assert told == [
                ("m/b1", "launch", "exited"),
                ("m/b1", "started", "started"),
                ("m/b1", "started", "found"),
            ]


@of_processes
async def test_operators_order_by_the_command_line():
    async with machine() as on, fleet(on, *two(on)) as world:
        on["m/b1"].script.log = "INFO: ready\n"
        code, out, _ = await cli(world, "drain", "m/b1", "--dry-run")
        assert (code, out.startswith("dry run: m/b1 takes no new work")) == (0, True)
        code, out, _ = await cli(world, "drain", "m/b1", "--wait")
        assert (code, world.phase()) == (0, Phase.DRAINING)
        code, _, err = await cli(world, "drain", "m/b2")
        assert code == 5
        assert "last backend" in err
        assert (await cli(world, "undrain", "m/b1"))[0] == 0
        assert world.phase() is Phase.READY
        code, out, _ = await cli(world, "restart", "m/b1", "--wait", "-o", "json")
        assert (code, json.loads(out)["changed"]) == (0, True)
        assert len(on["m/b1"].starts) == 2
        code, _, err = await cli(world, "drain", "m/b9")
        assert (code, "There is no backend m/b9" in err) == (4, True)
        code, out, _ = await cli(world, "logs", "m/b1")
        assert (code, out) == (0, "")


@of_processes
async def test_who_lifts_one_hold_is_told_of_the_others_that_last():
    async with machine() as on, fleet(on, *two(on)) as world:
        for scope, lifted, lasts in (("m", None, "m"), (None, "m", None)):
            held = await world.admin("POST", "/admin/v1/restarts:hold", {"pool": scope})
            assert held.is_success
            await world.turns(3)
            by_pool = [] if lifted is None else ["--pool", lifted]
            code, _, err = await cli(world, "hold", "--lift", *by_pool)
            of, option = ("all pools", "") if lasts is None else (lasts, f" --pool {lasts}")
            told = f"but those of {of} are on hold still: `vllm-gateway hold --lift{option}`\n"
            assert (code, err.endswith(told)) == (0, True), err
            assert world.process.supervisor.fleet.shared.on_hold("m")
            order = {"pool": scope}
            last = (await world.admin("POST", "/admin/v1/restarts:lift", order)).json()
            assert (last["held"], last["others"]) == (False, [])


@of_processes
async def test_operators_hold_restarts_for_a_time_by_the_command_line():
    async with machine() as on, fleet(on, *two(on)) as world:
        _, _, err = await cli(world, "hold", "--for", "30m")
        assert err == "automatic restarts of all pools are on hold for 30m\n"
        assert "automatic restarts are on hold for 30m." in (await cli(world, "events"))[1]
        await world.turns(3)
        assert (
            "Automatic restarts of all pools are on hold until " in (await cli(world, "status"))[1]
        )
        assert (await cli(world, "hold", "--lift"))[0] == 0
        code, out, _ = await cli(world, "events")
        assert code == 0
        assert "automatic restarts are allowed again" in out.splitlines()[1]  # the newest first


@of_processes
async def test_operators_hold_restarts_until_they_lift_that_by_the_command_line():
    async with machine() as on, fleet(on, *two(on)) as world:
        assert (await cli(world, "hold"))[0] == 0
        await world.turns(3)
        assert "of all pools are on hold until it is lifted," in (await cli(world, "status"))[1]
        assert (await cli(world, "hold", "--lift"))[0] == 0
        await world.turns(3)
        assert "on hold" not in (await cli(world, "status"))[1]


@pytest.mark.parametrize("settings", [{"max_restarts": 2}, {"automatic": False}])
@story
async def test_whoever_waits_for_a_restart_is_told_when_it_has_failed_for_good(settings):
    broken = False
    async with machine() as on:
        on["m/b1"].judge = lambda flags: Script(1, "boom") if broken else Script()
        async with fleet(on, *two(on), wait=False, supervision=settings) as world:
            await world.order("restart", "m/b1")
            await world.order("restart", "m/b2")
            await world.serves()
            broken = True
            code, _, err = await cli(world, "restart", "m/b1", "--wait")
            assert code == 1
            assert "will not be restarted automatically" in err
            assert world.backend().health.detail in err


# --- by itself, and not ---------------------------------------------------------------------------


@story
async def test_without_automatic_it_only_tells_and_an_operator_restarts():
    async with machine() as on:
        manual = {"supervision": {"automatic": False}}
        async with fleet(on, *two(on), wait=False, **manual) as world:
            await world.until(lambda: world.unit().decision is not None)
            assert world.unit().decision.why is Why.MANUAL
            assert (await world.order("restart")).json()["changed"]
            assert (await world.order("restart", "m/b2")).json()["changed"]
            await world.serves()
            await world.slot().die()
            await world.until(lambda: world.told(EventKind.EXITED))
            await world.turns()
            assert len(world.slot().starts) == 1


@story
async def test_a_rolling_restart_takes_one_at_a_time():
    async with machine() as on:
        backends = [launched(on[f"m/b{n}"]) for n in (1, 2, 3)]
        rolling = {"supervision": {"restart_every": "700ms"}}
        fewest = []
        async with fleet(on, *backends, **rolling) as world:

            def look(transition):
                fewest.append(world.process.table.serving()[0])

            world.process.table.on_transition.append(look)
            await world.until(lambda: all(len(on[f"m/b{n}"].starts) >= 2 for n in (1, 2, 3)))
            assert min(fewest) == 2
            assert {each.label for each in world.told(EventKind.RESTART)} == {"scheduled"}


# --- the configuration changes --------------------------------------------------------------------


@story
async def test_a_changed_command_line_is_a_planned_restart():
    async with machine() as on, fleet(on, *two(on)) as world:
        world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-model-len": 4096}
        await world.reload()
        await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
        assert world.backend().window_tokens == 4096
        (restart,) = world.told(EventKind.RESTART)
        assert "its `launch` settings changed" in restart.detail
        assert len(on["m/b2"].starts) == 1
        await world.turns()
        assert len(on["m/b1"].starts) == 2


@story
async def test_a_command_line_that_changes_while_another_is_begun_is_applied_after_it():
    async with machine() as on, fleet(on, *two(on)) as world:
        slot, stopped = world.slot(), asyncio.Event()
        slot.lasts = stopped
        await world.order("restart")
        await world.until(lambda: slot.stops)
        world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-model-len": 4096}
        await world.reload()
        stopped.set()
        await world.until(lambda: len(slot.starts) == 3)
        await world.serves()
        assert world.backend().window_tokens == 4096
        assert "its `launch` settings changed" in world.told(EventKind.RESTART)[-1].detail
        await world.turns()
        assert len(slot.starts) == 3


@story
async def test_a_command_line_that_is_changed_and_changed_back_restarts_nothing():
    async with machine() as on, fleet(on, *two(on)) as world:
        assert (await world.admin("POST", "/admin/v1/restarts:hold", {})).is_success
        launch = world.settings["pools"]["m"]["backends"][0]["launch"]
        launch["args"] = {"max-model-len": 4096}
        await world.reload()
        await world.until(lambda: world.unit().decision is not None)
        del launch["args"]
        await world.reload()
        assert (await world.admin("POST", "/admin/v1/restarts:lift", {})).is_success
        await world.turns(20)
        assert len(on["m/b1"].starts) == 1
        assert world.unit().decision is None


@story
async def test_a_command_line_that_is_changed_back_while_another_is_begun_is_applied_after_it():
    async with machine() as on, fleet(on, *two(on)) as world:
        slot, stopped = world.slot(), asyncio.Event()
        slot.lasts = stopped
        launch = world.settings["pools"]["m"]["backends"][0]["launch"]
        launch["args"] = {"max-model-len": 4096}
        await world.reload()
        await world.until(lambda: slot.stops)
        del launch["args"]
        await world.reload()
        stopped.set()
        await world.until(lambda: len(slot.starts) == 3)
        await world.serves()
        assert world.backend().window_tokens == 8192
        await world.turns()
        assert len(slot.starts) == 3


@story
async def test_what_is_to_become_of_it_at_the_end_is_no_reason_to_restart():
    async with machine() as on:
        async with fleet(on, *two(on)) as world:
            world.settings["pools"]["m"]["backends"][0]["launch"]["on_exit"] = "leave"
            await world.reload()
            await world.turns()
            assert not world.told(EventKind.RESTART)
        assert on["m/b1"].running
        assert not on["m/b2"].running


@story
async def test_alone_in_its_pool_it_keeps_its_command_line_while_it_may_have_work():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-model-len": 4096}
        await world.reload()
        await world.until(lambda: world.unit().decision is not None)
        assert world.unit().decision.why is Why.LAST
        assert (await world.order("restart", force=True)).json()["changed"]
        await world.until(lambda: world.backend().window_tokens == 4096)
        await world.serves()
        await world.turns()
        assert len(on["m/b1"].starts) == 2


@story
async def test_another_port_moves_the_server_once_its_streams_have_ended():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            first = world.slot().sim
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(world.chat(stream=True, max_tokens=60)) for _ in range(4)
                ]
                await world.until(lambda: world.backend().in_flight > 0)
                world.slot().move()
                backend = world.settings["pools"]["m"]["backends"][0]
                backend["launch"]["port"] = world.slot().port
                await world.reload()
            for each in running:
                assert frames(each.result().text)[-1] == "[DONE]"
                assert "error" not in each.result().text
            await world.serves()
            assert world.slot().sim is not first
            assert world.slot().sim.port == world.slot().port
            assert len(world.slot().starts) == 2
            assert not world.told(EventKind.EXITED)


@story
async def test_another_port_once_more_cuts_no_stream_of_the_first_server():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            first = world.slot().sim
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(world.chat(stream=True, max_tokens=60)) for _ in range(4)
                ]
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    for _ in range(2):
                        world.slot().move()
                        backend = world.settings["pools"]["m"]["backends"][0]
                        backend["launch"]["port"] = world.slot().port
                        await world.reload()
            for each in running:
                assert frames(each.result().text)[-1] == "[DONE]"
                assert "error" not in each.result().text
            assert await world.counted("gateway_streams_resumed_total") == 0
            await world.serves()
            assert world.slot().sim is not first
            assert world.slot().sim.port == world.slot().port
            assert len(world.slot().starts) == 2


@story
async def test_servers_that_move_to_other_ports_together_are_nothing_to_suspect_ourselves_for():
    async with machine() as on, fleet(on, *two(on)) as world:
        for slot, backend in zip(
            on.slots.values(), world.settings["pools"]["m"]["backends"], strict=True
        ):
            slot.move()
            backend["launch"]["port"] = slot.port
        await world.reload()
        await world.until(lambda: all(len(each.starts) == 2 for each in on.slots.values()))
        await world.serves()
        assert [each.bad_at for each in world.process.supervisor.units.values()] == [None, None]


@story
async def test_a_backend_that_is_removed_finishes_and_is_stopped():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(world.chat(stream=True, max_tokens=60)) for _ in range(4)
                ]
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    del world.settings["pools"]["m"]["backends"][0]
                    await world.reload()
                    await world.turns()
                    assert on["m/b1"].running
            for each in running:
                assert frames(each.result().text)[-1] == "[DONE]"
            await world.until(lambda: not on["m/b1"].running)
            assert on["m/b2"].running
            await world.turns()
            assert len(on["m/b1"].starts) == 1


@story
async def test_a_server_that_cannot_be_stopped_is_told_of():
    async with machine() as on:
        async with fleet(on, *two(on)) as world:
            on["m/b1"].stays = "42 (python) did not end within 10 s of SIGKILL"
            del world.settings["pools"]["m"]["backends"][0]
            await world.reload()
            await world.until(lambda: world.told(EventKind.LEFT_BEHIND, "m/b1"))
            (told,) = world.told(EventKind.LEFT_BEHIND, "m/b1")
            assert "could not be stopped" in told.detail
            assert "did not end within 10 s" in told.detail
            on["m/b2"].stays = "43 (python) did not end within 10 s of SIGKILL"
        assert world.told(EventKind.LEFT_BEHIND, "m/b2")
        on["m/b1"].stays = on["m/b2"].stays = ""


@story
async def test_one_that_others_start_from_now_on_serves_by_its_probes():
    async with machine() as on, fleet(on, *two(on)) as world:
        slot, found = world.slot(), asyncio.Event()
        slot.logs = found
        await slot.die()
        await world.until(lambda: slot.reading)
        url = f"http://127.0.0.1:{world.slot().port}"
        world.settings["pools"]["m"]["backends"][0] = {"name": "b1", "url": url}
        await world.reload()
        found.set()  # why it ended; that is nobody's any more
        assert "m/b1" not in world.process.supervisor.units
        await world.until(lambda: not world.process.supervisor.fleet.leaving)
        await world.slot().end()
        await world.slot().begin()
        await world.serves("m/b1")


@story
async def test_a_backend_that_is_added_is_launched():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        world.settings["pools"]["m"]["backends"].append(launched(on["m/b2"]))
        await world.reload()
        await world.serves("m/b1", "m/b2")
        assert len(on["m/b1"].starts) == 1


# --- the end of a gateway -------------------------------------------------------------------------


@story
async def test_at_the_end_what_was_launched_is_stopped_or_left_as_configured():
    async with machine() as on:
        stops, leaves = launched(on["m/b1"]), launched(on["m/b2"], on_exit="leave")
        async with fleet(on, stops, leaves):
            pass
        assert not on["m/b1"].running
        assert on["m/b1"].stops == [30.0]
        assert on["m/b2"].running
        async with fleet(on, stops, leaves) as world:  # the next gateway
            assert len(on["m/b1"].starts) == 2
            assert len(on["m/b2"].starts) == 1
            assert not world.told(EventKind.EXITED)
            assert not world.told(EventKind.RESTART)
        assert all(each.closed for each in on.made)


@story
async def test_who_is_not_in_charge_stops_nothing_at_its_end():
    async with machine() as on:
        async with fleet(on, launched(on["m/b1"])) as world:
            process, config = world.process, world.process.config
            store = MemoryStore(process.clock)
            waits = Supervisor(
                process.table, process.clock, store, config, make_launcher=on.launcher
            )
            waits.stand_by()
            await waits.close()  # the upgrade failed
            assert on["m/b1"].running
            heir = proc.find(os.getpid())
            await process.supervisor.hand_over(heir)
        assert on["m/b1"].running
        assert not on["m/b1"].stops


@story
async def test_operators_see_the_end_until_the_last_server_has_stopped():
    async with machine() as on:
        on["m/b1"].lasts = asyncio.Event()
        async with fleet(on, *two(on)) as world:
            world.process.stopping.set()
            await world.until(lambda: on["m/b1"].stops)
            assert (await world.admin("GET", "/livez")).status_code == 200
            assert (await world.admin("GET", "/readyz")).status_code == 503
            on["m/b1"].lasts.set()
        assert not on["m/b1"].running


@story
async def test_what_goes_is_stopped_by_the_gateway_that_let_it_go_though_another_is_in_charge():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(world.chat(stream=True, max_tokens=100))
                await world.until(lambda: world.backend().in_flight > 0)
                del world.settings["pools"]["m"]["backends"][0]
                await world.reload()
                await world.process.supervisor.fleet.close(stop=False)
                assert not on["m/b1"].running
                assert on["m/b2"].running


@story
async def test_what_another_gateway_started_in_place_of_what_goes_is_left_alone():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(world.chat(stream=True, max_tokens=60))
                await world.until(lambda: writes(world.slot()))
                with held(world.slot()):
                    del world.settings["pools"]["m"]["backends"][0]
                    await world.reload()
                    await on["m/b1"].end()
                await on["m/b1"].begin()
            await world.until(lambda: not world.process.supervisor.fleet.leaving)
            assert on["m/b1"].running
        assert on["m/b1"].stops == []


@story
async def test_at_the_end_what_was_being_drained_to_go_is_stopped_too():
    async with machine() as on:
        on["m/b1"].speed = on["m/b2"].speed = 1.0
        async with fleet(on, *two(on)) as world:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(world.chat(stream=True, max_tokens=2000))
                await world.until(lambda: world.backend().in_flight > 0)
                del world.settings["pools"]["m"]["backends"][0]
                await world.reload()
                world.process.stopping.set()
        assert not on["m/b1"].running
        assert not on["m/b2"].running


# --- several gateways -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two_gateways(on):
    """Two gateways that share a store, and that store."""
    store = MemoryStore(SystemClock())
    for name in ("m/b1", "m/b2"):
        await on[name].begin()
    backends = managed(on["m/b1"]), managed(on["m/b2"])
    async with (
        fleet(on, *backends, store=store) as one,
        fleet(on, *backends, store=store) as other,
    ):
        yield one, other, store


@story
async def test_two_gateways_restart_an_incarnation_once():
    async with machine() as on, two_gateways(on) as (one, other, _):
        for round_ in range(1, 4):
            await on["m/b1"].die()
            await one.until(lambda n=round_: len(on["m/b1"].starts) >= n)
            await one.serves()
            await other.serves()
        await one.turns()
        await other.turns()
        assert len(on["m/b1"].starts) == 3
        told = [*one.told(EventKind.RESTART), *other.told(EventKind.RESTART)]
        assert len(told) == 3


@contextlib.asynccontextmanager
async def pair(on):
    """Two gateways that share a store, and hear of each other."""
    async with two_gateways(on) as (one, other, store):
        for each in (one, other):
            each.process.replicas.store = store
        for each in (one, other):
            await each.until(lambda e=each: len(e.process.replicas.every) == 2)
        yield one, other


@story
async def test_a_restart_at_one_gateway_waits_for_the_requests_of_another_which_sends_no_more():
    async with machine() as on, pair(on) as (one, other):
        async with asyncio.TaskGroup() as group:
            with held(on["m/b1"], on["m/b2"]):
                asked = [group.create_task(other.chat(max_tokens=3)) for _ in range(6)]
                await other.until(lambda: other.backend().in_flight == 3)
                carried = one.process.replicas.at_other_gateways
                await one.until(lambda: carried("m/b1") == 3)
                told = (await one.order("restart")).json()
                assert (told["requests"], told["oldest_s"]) == (3, None)
                await other.until(lambda: other.phase() is Phase.DRAINING)
                assert "another gateway restarts" in other.backend().health.detail
                again = (await other.order("restart")).json()
                assert "is already restarting" in again["sentence"]
                asked += [group.create_task(other.chat(max_tokens=3)) for _ in range(4)]
                await other.until(lambda: other.backend("m/b2").in_flight == 7)
                assert (on["m/b1"].starts, other.backend().in_flight) == ([], 3)
        assert {each.result().status_code for each in asked} == {200}
        await one.until(lambda: on["m/b1"].starts)
        for each in (one, other):
            await each.serves()
            assert each.unit().decision is None
        assert len(on["m/b1"].starts) == 1


@story
async def test_what_another_gateway_drained_serves_again_when_that_one_ends():
    async with machine() as on, pair(on) as (one, other):
        async with asyncio.TaskGroup() as group:
            with held(on["m/b1"]):
                asked = [group.create_task(other.chat(max_tokens=3)) for _ in range(2)]
                await one.until(lambda: one.process.replicas.at_other_gateways("m/b1"))
                await one.order("restart")
                await other.until(lambda: other.phase() is Phase.DRAINING)
                one.process.stopping.set()
                # Held for long it seems degraded, and serves.
                await other.until(lambda: other.phase() in SERVING)
        assert {each.result().status_code for each in asked} == {200}


@contextlib.asynccontextmanager
async def crash_loop(on):
    """Two gateways that share a store; the first leads, and has suspended b1. Closing `first` ends it."""
    broken = [True]
    slot = on["m/b1"]
    for name in ("m/b1", "m/b2"):
        await on[name].begin()
    slot.judge = lambda flags: Script(exit_code=1, log="boom") if broken else Script()
    backends = managed(slot), managed(on["m/b2"])
    few = {"store": MemoryStore(SystemClock()), "supervision": {"max_restarts": 2}}
    async with contextlib.AsyncExitStack() as first:
        one = await first.enter_async_context(fleet(on, *backends, **few))
        async with fleet(on, *backends, **few) as other:
            await slot.die()
            await one.until(lambda: one.unit().suspended)
            await other.until(lambda: other.backend().reason == "suspended")
            yield one, other, first, broken


@story
async def test_what_one_gateway_suspended_no_other_restarts_not_even_as_the_next_leader():
    async with machine() as on, crash_loop(on) as (one, other, first, _):
        before = len(on["m/b1"].starts)
        assert other.backend().reason == "suspended"
        assert "by another replica" in other.backend().health.detail
        assert len(other.told(EventKind.SUSPENDED)) == len(one.told(EventKind.SUSPENDED)) == 1
        await first.aclose()
        await other.turns()
        assert other.unit().decision.why is Why.SUSPENDED
        assert len(on["m/b1"].starts) == before


@pytest.mark.parametrize("verb", ["restart", "undrain"])
@story
async def test_an_order_at_any_gateway_ends_a_suspension_in_all(verb):
    async with machine() as on, crash_loop(on) as (one, other, _, broken):
        before = len(on["m/b1"].starts)
        broken.clear()
        assert (await other.order(verb)).json()["changed"]
        await one.until(lambda: not one.unit().suspended)
        for each in (one, other):
            await each.serves()
            await each.turns()
            assert not each.unit().suspended
        assert len(on["m/b1"].starts) == before + 1


@story
async def test_a_drain_at_one_gateway_is_one_at_all_until_it_is_undone_at_any():
    async with machine() as on:
        store = MemoryStore(SystemClock())
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        unsupervised = managed(on["m/b2"])
        del unsupervised["restart"]
        backends = managed(on["m/b1"]), unsupervised
        async with (
            fleet(on, *backends, store=store) as one,
            fleet(on, *backends, store=store) as other,
        ):
            for name in ("m/b1", "m/b2"):
                assert (await one.order("drain", name, force=True)).json()["changed"]
                await other.until(lambda n=name: other.phase(n) is Phase.DRAINING)
                assert (await other.order("undrain", name)).json()["changed"]
                await one.until(lambda n=name: one.phase(n) is Phase.READY)
            await one.order("drain")
            await other.until(lambda: other.phase() is Phase.DRAINING)
            await on["m/b1"].die()
            for each in (one, other):
                await each.until(lambda e=each: e.unit().decision is not None)
                assert each.unit().decision.why is Why.HELD
            assert on["m/b1"].starts == []


class Deaf(MemoryStore):
    """A store that can be lost."""

    lost = False

    async def holds(self):
        if self.lost:
            raise StoreUnavailable
        return await super().holds()

    async def acquire(self, name, holder):
        if self.lost:
            raise StoreUnavailable
        return await super().acquire(name, holder)

    async def claim_restart(self, backend_id, incarnation, attempt=1):
        if self.lost:
            raise StoreUnavailable
        return await super().claim_restart(backend_id, incarnation, attempt)


@story
async def test_without_the_shared_store_nothing_is_restarted_and_requests_go_on():
    async with machine() as on:
        store = Deaf(SystemClock())
        async with fleet(on, *two(on), store=store) as world:
            store.lost = True
            await world.slot().die()
            await world.until(lambda: world.told(EventKind.RESTART))
            await world.turns()
            assert len(on["m/b1"].starts) == 1
            assert (await world.chat(max_tokens=1)).status_code == 200
            store.lost = False
            await world.serves()
            assert len(on["m/b1"].starts) == 2


# --- GPUs -----------------------------------------------------------------------------------------


async def starts_together(gpus):
    """Start two backends on these GPUs; return how many begin while neither has come up."""
    async with machine() as on:
        up = asyncio.Event()
        for name in ("m/b1", "m/b2"):
            on[name].plan(Script(listens=up))
        backends = [
            launched(on[f"m/b{n}"], gpus=each, args={"gpu-memory-utilization": 0.4})
            for n, each in enumerate(gpus, 1)
        ]
        async with fleet(on, *backends, wait=False) as world:
            await world.until(lambda: len(world.told(EventKind.LAUNCH)) >= 1)
            await world.turns()
            begun = len(on["m/b1"].starts) + len(on["m/b2"].starts)
            up.set()
            await world.serves()
            assert len(on["m/b1"].starts) == len(on["m/b2"].starts) == 1
            return begun


@pytest.mark.parametrize(
    ("gpus", "together"),
    [(([0], [0]), 1), (([0], [1]), 2), (([0, 1], [1, 2]), 1), (([0], []), 1)],
    ids=["one", "two", "overlapping", "all"],
)
@story
async def test_backends_on_one_gpu_start_one_after_the_other(gpus, together):
    assert await starts_together(gpus) == together


@story
async def test_a_healthy_backend_serves_until_it_is_its_turn_on_its_gpu():
    async with machine() as on:
        shares = {"gpus": [0], "args": {"gpu-memory-utilization": 0.4}}
        one, other = launched(on["m/b1"], **shares), launched(on["m/b2"], gpus=[1])
        async with fleet(on, one, other) as world:
            up, late = asyncio.Event(), on["x/late"]
            late.model = "x"
            late.plan(Script(listens=up))
            world.settings["pools"]["x"] = pool(launched(late, **shares))
            await world.reload()
            await world.until(lambda: late.running)
            assert (await world.order("restart")).json()["changed"]
            await world.turns()
            assert world.phase() is Phase.READY
            told = (await world.admin("GET", "/admin/v1/overview")).json()
            (waits,) = [b for p in told["pools"] for b in p["backends"] if b["id"] == "m/b1"]
            assert waits["supervision"]["waits_for"] == "until x/late has started on GPU 0"
            _, out, _ = await cli(world, "status")
            assert "waiting to start until x/late has started on GPU 0" in out
            up.set()
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
            assert world.unit().decision is None


@story
async def test_a_reload_of_one_that_has_handed_over_ends_no_stream_of_its_own():
    async with machine() as on:
        on["m/b1"].speed = 1.0
        async with fleet(on, launched(on["m/b1"])) as world, asyncio.TaskGroup() as group:
            stream = group.create_task(world.chat(stream=True, max_tokens=60))
            await world.until(lambda: world.backend().in_flight > 0)
            await world.process.supervisor.hand_over(proc.find(os.getpid()))
            await world.reload()
            assert world.phase() is Phase.READY
            text = (await stream).text
        assert frames(text)[-1] == "[DONE]"
        assert '"error"' not in text


@story
async def test_who_only_follows_takes_a_server_that_a_reload_brings_for_what_its_probes_say():
    async with machine() as on:
        async with fleet(on, *two(on)) as world:
            process = world.process
            store, table = MemoryStore(process.clock), PoolTable(process.clock)
            table.apply(process.config.pools)
            config = process.config
            follows = Supervisor(table, process.clock, store, config, make_launcher=on.launcher)
            follows.stand_by()
            follows.intent.say(Mark.SUSPENDED, "m/b2", on=True)  # as of its start
            process.supervisor.intent.say(Mark.DRAINED, "m/b1", on=True)  # since then
            kept = (config.state / "intent.json").read_bytes()
            world.settings["pools"]["m"]["backends"][0]["api_key"] = "another"
            world.settings["pools"]["m"]["backends"][1]["launch"]["args"] = {"seed": 2}
            await world.reload()
            table.apply(process.config.pools)
            follows.apply(process.config)
            assert [each.health.tended for each in table] == [None, None]
            assert (config.state / "intent.json").read_bytes() == kept


@story
async def test_who_only_follows_stops_no_server_that_a_reload_takes_away():
    async with machine() as on:
        async with fleet(on, *two(on)) as world:
            config, clock = world.process.config, world.process.clock
            table = PoolTable(clock)
            table.apply(config.pools)
            follows = Supervisor(
                table, clock, MemoryStore(clock), config, make_launcher=on.launcher
            )
            follows.stand_by()
            (name, settings), *_ = config.pools.items()
            fewer = {name: settings.model_copy(update={"backends": settings.backends[1:]})}
            table.apply(fewer)
            follows.apply(config.model_copy(update={"pools": fewer}))
            await follows.close()
            assert on["m/b1"].running
            assert not on["m/b1"].stops
