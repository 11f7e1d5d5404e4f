"""A gateway that starts, watches, restarts and stops its backends, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import sys

import pytest

from gateway.adapters.memory import Order
from gateway.core.aio import start
from gateway.core.events import EventKind
from gateway.core.types import ModelsSeen, Phase, ServedModel
from gateway.heal.decisions import Cause
from gateway.heal.fleet import launcher_of
from gateway.heal.observed import Timing
from gateway.heal.states import Failed, Proving, Serving, Starting, under_way
from gateway.launch.launcher import Obstacle
from tests import loopback
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, launched, machine, managed
from tests.stories.support import of_processes, story

# --- starting and coming back ---------------------------------------------------------------------


@story
async def test_a_launched_backend_is_started_at_boot_tried_and_serves():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        assert len(world.slot().starts) == 1
        assert world.slot().sim.received("/v1/completions")  # one token, and a warm-up
        assert (await world.chat(max_tokens=2)).status_code == 200
        assert [each.label for each in world.told(EventKind.LAUNCH)] == ["exited"]
        assert not world.told(EventKind.RESTART)


@story
async def test_one_that_runs_already_is_found_and_serves_without_a_test():
    async with machine() as on:
        await on["m/b1"].begin()
        async with fleet(on, launched(on["m/b1"])) as world:
            await world.until(lambda: world.told(EventKind.STARTED))
            assert world.slot().starts == []
            assert not world.slot().sim.received("/v1/completions")


@story
async def test_one_that_dies_is_out_at_once_and_comes_back():
    async with machine() as on:
        backends = launched(on["m/b1"]), launched(on["m/b2"])
        async with fleet(on, *backends) as world:
            up = asyncio.Event()
            world.slot().plan(Script(listens=up))
            await world.slot().die(exit_code=-9)
            await world.until(lambda: world.phase() is not Phase.READY)
            before = world.slot().received
            for _ in range(10):
                assert (await world.chat(max_tokens=1)).status_code == 200
            assert world.slot().received == before
            up.set()
            await world.serves()
            assert len(world.slot().starts) == 2
            (exited,) = world.told(EventKind.EXITED)
            assert exited.backend_id == "m/b1"
            (restart,) = world.told(EventKind.RESTART)
            assert restart.detail == "its process was killed by signal 9"


@story
async def test_a_managed_one_is_not_stopped_at_the_end():
    async with machine() as on:
        await on["m/b1"].begin()
        async with fleet(on, managed(on["m/b1"])):
            pass
        assert on["m/b1"].running


# --- adapters -------------------------------------------------------------------------------------

WITH_LORA = {"enable-lora": True, "max-cpu-loras": 4}


async def load(world, name, path, backend_id="m/b1"):
    body = {"lora_name": name, "lora_path": path}
    url = f"http://127.0.0.1:{world.slot(backend_id).port}/v1/load_lora_adapter"
    async with loopback.client() as http:
        assert (await http.post(url, json=body)).status_code == 200


@story
async def test_an_adapter_that_comes_back_with_its_server_is_never_unknown_meanwhile():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        world.slot().adapter_load_s = 0.5
        await load(world, "sql", "/adapters/sql-7")
        await world.until(lambda: world.unit().adapters == {"sql": "/adapters/sql-7"})
        await world.slot().die()
        await world.until(lambda: world.backend().models and not world.backend().adapters)
        reply = await world.chat(model="sql", max_tokens=1)
        assert reply.status_code in (200, 503)
        await world.serves()
        assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
        await world.until(lambda: not world.backend().awaited)


@story
async def test_an_adapter_on_the_command_line_is_no_unknown_model_while_its_server_starts():
    async with machine() as on:
        up = asyncio.Event()
        on["m/b1"].plan(Script(listens=up))
        args = {"enable-lora": True, "lora-modules": "sql=/adapters/sql"}
        backend = launched(on["m/b1"], args=args)
        async with fleet(on, backend, wait=False, queue={"max_wait": "100ms"}) as world:
            await world.until(lambda: world.slot().starts)
            for model in ("m", "sql"):
                assert (await world.chat(model=model, max_tokens=1)).status_code == 503
            assert (await world.chat(model="other", max_tokens=1)).status_code == 404
            up.set()


@story
async def test_adapters_loaded_at_run_time_are_there_again_after_a_restart():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        await load(world, "sql", "/adapters/sql-7")
        await world.until(lambda: world.unit().adapters == {"sql": "/adapters/sql-7"})
        await world.slot().die()
        await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
        assert world.slot().sim.state.adapters == {"sql": "/adapters/sql-7"}
        assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
        assert [each.label for each in world.told(EventKind.ADAPTER)] == ["sql"]


@story
async def test_an_adapter_that_ends_its_server_twice_is_not_loaded_a_third_time():
    async with machine() as on:
        slot = on["m/b1"]

        async def ends_with_its_engine():
            while True:
                if slot.running and slot.sim is not None and slot.sim.state.dead:
                    await slot.die()
                await asyncio.sleep(0.01)

        listed = [{"name": name, "path": f"/loras/{name}"} for name in ("deadly", "sql")]
        backend = launched(slot, args=WITH_LORA)
        ends = start(ends_with_its_engine(), name="ends")
        async with fleet(on, backend, wait=False, adapters=listed) as world:
            await world.until(lambda: len(slot.starts) == 3, 20)
            await world.until(lambda: slot.sim and slot.sim.state.adapters == {"sql": "/loras/sql"})
            await world.serves()
            assert (await world.chat(max_tokens=1)).status_code == 200
            assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
            reply = await world.chat(model="deadly", max_tokens=1)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
            (row,) = [
                each for each in world.process.adapters.statuses() if each.adapter == "deadly"
            ]
            assert "servers died as they loaded it" in row.detail
            assert (len(slot.starts), len(world.told(EventKind.SUSPENDED))) == (3, 0)
        ends.cancel()


def test_an_adapter_that_somebody_loaded_is_there_again_after_a_restart_of_the_gateway(tmp_path):
    @story
    async def there_again():
        async with machine() as on:
            backend = launched(on["m/b1"], args=WITH_LORA)
            async with fleet(on, backend, folder=tmp_path) as world:
                await load(world, "sql", "/adapters/sql-7")
                await world.until(lambda: world.backend().adapters == ("sql",))
                await world.until(lambda: world.unit().adapters == {"sql": "/adapters/sql-7"})
            async with fleet(on, backend, folder=tmp_path) as world:
                await world.serves()
                assert len(world.slot().starts) == 2
                assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
                assert world.slot().sim.state.adapters == {"sql": "/adapters/sql-7"}

    there_again()


@pytest.mark.parametrize("while_it_runs", [True, False], ids=["a reload", "a restart"])
def test_of_servers_that_are_configured_no_more_no_adapters_are_kept(tmp_path, while_it_runs):
    held_file = tmp_path / "state" / "held.json"

    def kept():
        return json.loads(held_file.read_text())

    @story
    async def are_forgotten():
        async with machine() as on:
            b1, b2 = (launched(on[each], args=WITH_LORA) for each in ("m/b1", "m/b2"))
            async with fleet(on, b1, b2, folder=tmp_path) as world:
                for each in ("m/b1", "m/b2"):
                    await load(world, "sql", "/adapters/sql-7", each)
                await world.until(lambda: held_file.exists() and len(kept()) == 2)
                if while_it_runs:
                    world.settings["pools"]["m"]["backends"].remove(b2)
                    await world.reload()
                    assert [*kept()] == ["m/b1"]
            async with fleet(on, b1, folder=tmp_path):
                assert "m/b2" not in kept()

    are_forgotten()


@story
async def test_an_adapter_that_was_seen_between_two_looks_is_there_again_too():
    async with machine() as on, fleet(on, launched(on["m/b1"]), timing=Timing(1.0)) as world:
        await load(world, "sql", "/adapters/sql-7")
        await world.until(lambda: world.backend().adapters == ("sql",))
        await world.slot().die()
        await world.until(lambda: len(world.slot().starts) == 2)
        await world.serves()
        assert world.slot().sim.state.adapters == {"sql": "/adapters/sql-7"}


@story
async def test_a_list_of_the_server_before_that_comes_late_keeps_no_adapter_from_the_next():
    rare = {"health": {"interval": "50ms", "scrape_interval": "50ms", "models_interval": "1h"}}
    async with machine() as on:
        async with fleet(on, launched(on["m/b1"]), extra=rare) as world:
            await load(world, "sql", "/adapters/sql-7")
            held = (
                ServedModel("m", None, 8192),
                ServedModel("sql", "m", None, "/adapters/sql-7"),
            )
            late = ModelsSeen(world.process.clock.now(), held, world.backend().endpoints)
            world.process.table.observe("m/b1", late)
            await world.until(lambda: world.unit().adapters == {"sql": "/adapters/sql-7"})
            up, starts = asyncio.Event(), len(world.slot().starts)
            world.slot().plan(Script(listens=up))
            await world.slot().die()
            await world.until(lambda: len(world.slot().starts) > starts)
            world.process.table.observe("m/b1", late)
            up.set()
            await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
            assert world.slot().sim.state.adapters == {"sql": "/adapters/sql-7"}


@story
async def test_an_adapter_that_runs_is_known_before_the_model_list_is_due():
    rare = {"health": {"interval": "50ms", "scrape_interval": "50ms", "models_interval": "1h"}}
    async with machine() as on:
        on["m/b1"].speed = 1.0
        async with fleet(on, launched(on["m/b1"]), extra=rare) as world:
            await load(world, "sql", "/adapters/sql-7")
            read = len(world.slot().sim.received("/v1/models"))
            body = {"model": "sql", "prompt": "hello", "max_tokens": 2000}
            url = f"http://127.0.0.1:{world.slot().port}/v1/completions"
            async with asyncio.TaskGroup() as group, loopback.client() as http:
                asked = group.create_task(http.post(url, json=body, timeout=30))
                await world.until(lambda: world.unit().adapters == {"sql": "/adapters/sql-7"})
                asked.cancel()
            assert len(world.slot().sim.received("/v1/models")) == read + 1
            await world.slot().die()
            await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
            assert world.slot().sim.state.adapters == {"sql": "/adapters/sql-7"}


@story
async def test_adapters_of_the_configuration_are_loaded_from_their_paths():
    adapters = [{"name": "sql", "path": "/a/sql"}, {"name": "fr", "path": "/a/fr"}, "chat"]
    async with (
        machine() as on,
        fleet(on, launched(on["m/b1"], args=WITH_LORA), adapters=adapters) as world,
    ):
        assert world.slot().sim.state.adapters == {"sql": "/a/sql", "fr": "/a/fr"}
        assert (await world.chat(model="fr", max_tokens=1)).status_code == 200


@story
async def test_a_restarted_server_does_not_load_what_an_operator_keeps_away_from_it():
    """It may be what it died of."""
    adapters = [{"name": "sql", "path": "/a/sql"}, {"name": "fr", "path": "/a/fr"}]
    async with (
        machine() as on,
        fleet(on, launched(on["m/b1"], args=WITH_LORA), adapters=adapters) as world,
    ):
        world.process.adapters.order("m/b1", "sql", Order(keep=False))
        await world.until(lambda: world.backend().adapters == ("fr",))
        await world.slot().die()
        await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
        loads = world.slot().sim.received("/v1/load_lora_adapter")
        assert [json.loads(each.body)["lora_name"] for each in loads] == ["fr"]


@story
async def test_a_restarted_server_loads_no_copy_of_an_adapter_whose_copies_are_elsewhere():
    adapters = [
        {"name": name, "path": f"/a/{name}", "replicas": 1, "pin": [pin]}
        for name, pin in (("sql", "b1"), ("fr", "b2"), ("de", "b2"))
    ]
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        backends = managed(on["m/b1"]), managed(on["m/b2"])
        async with fleet(on, *backends, adapters=adapters) as world:
            held = world.backend("m/b1"), world.backend("m/b2")
            placed = [("sql",), ("de", "fr")]
            await world.until(lambda: [tuple(sorted(each.adapters)) for each in held] == placed)
            before = len(world.told(EventKind.STARTED, "m/b1"))
            await world.slot().die()
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) > before)
            assert world.slot().sim.state.adapters == {"sql": "/a/sql"}
            loads = world.slot().sim.received("/v1/load_lora_adapter")
            assert [json.loads(each.body)["lora_name"] for each in loads] == ["sql"]


@story
async def test_an_adapter_that_cannot_be_loaded_is_told_and_the_rest_serves():
    adapters = [{"name": "sql", "path": "/missing"}, {"name": "fr", "path": "/a/fr"}]
    async with (
        machine() as on,
        fleet(on, launched(on["m/b1"], args=WITH_LORA), adapters=adapters) as world,
    ):
        assert world.slot().sim.state.adapters == {"fr": "/a/fr"}
        failed = world.told(EventKind.ADAPTER_FAILED)[0]  # it is tried again while the rest serves
        assert failed.label == "sql"
        assert "No adapter found for /missing" in failed.detail
        known = world.process.adapters.pools["m"].known
        assert known.failures["m/b1", "sql"].refused  # so it is not tried again at once


DIED = (pathlib.Path(__file__).parents[1] / "data/logs/engine_died.txt").read_text()

# --- starts that fail -----------------------------------------------------------------------------

KV_SMALL = (pathlib.Path(__file__).parents[1] / "data/logs/kv_small.txt").read_text()
LOWER = {"remedies": ["lower_max_model_len"], "min_context": 512}


def small_cache(flags):
    """A machine whose KV cache holds 896 tokens."""
    fits = int(flags.get("max-model-len", 2048)) <= 896
    return Script() if fits else Script(exit_code=1, log=KV_SMALL)


def kept(world):
    return json.loads((world.path.parent / "state" / "overrides.json").read_text())


@story
async def test_a_start_that_fails_is_diagnosed_and_the_remedy_is_applied_once_and_kept():
    async with machine() as on:
        on["m/b1"].judge = small_cache
        async with fleet(on, launched(on["m/b1"], args={"max-model-len": 2048}), **LOWER) as world:
            (failed,) = world.told(EventKind.START_FAILED)
            assert failed.label == "kv_cache_too_small_for_max_model_len"
            (remedy,) = world.told(EventKind.REMEDY)
            assert remedy.label == "lower_max_model_len"
            assert "--max-model-len 896" in remedy.detail
            assert [dict(each.args) for each in world.slot().starts] == [{}, {"max-model-len": 896}]
            assert kept(world)["m/b1"]["args"] == {"max-model-len": 896}
            assert world.backend().window_tokens == 896
            await world.slot().die()  # the next start has it from the beginning
            await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
            assert len(world.slot().starts) == 3
            assert len(world.told(EventKind.REMEDY)) == 1


@story
async def test_nothing_is_started_anew_before_its_log_was_read():
    async with machine() as on:
        slot, read = on["m/b1"], asyncio.Event()
        slot.judge, slot.logs = small_cache, read
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **LOWER) as world:
            await world.until(lambda: slot.reading)
            await world.turns()
            assert len(slot.starts) == 1
            read.set()
            await world.serves()
            assert [dict(each.args) for each in slot.starts] == [{}, {"max-model-len": 896}]


@story
async def test_what_is_found_out_of_one_that_was_begun_anew_meanwhile_is_told_and_forgotten():
    async with machine() as on:
        slot, read = on["m/b1"], asyncio.Event()
        async with fleet(on, launched(slot)) as world:
            slot.logs = read
            await slot.die(exit_code=1, log=DIED)
            await world.until(lambda: slot.reading)
            assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: len(slot.starts) == 2)
            slot.script = Script(log=DIED)
            read.set()
            await world.until(lambda: world.told(EventKind.EXITED))
            await world.serves()
            assert world.told(EventKind.EXITED)[0].label == "engine_dead_runtime"
            assert world.unit().diagnosis is None
            assert len(slot.starts) == 2


@story
async def test_a_remedy_outlives_the_gateway_and_ends_with_the_command_line_it_was_for(tmp_path):
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = small_cache
        told = launched(slot, args={"max-model-len": 2048}), launched(on["m/b2"])
        async with fleet(on, *told, folder=tmp_path, **LOWER):
            pass
        async with fleet(on, *told, folder=tmp_path / "", **LOWER) as world:
            assert dict(slot.starts[-1].args) == {"max-model-len": 896}
            assert len(slot.starts) == 3
            started = len(world.told(EventKind.STARTED, "m/b1"))
            backend = world.settings["pools"]["m"]["backends"][0]
            backend["launch"]["args"] = {"max-model-len": 768}
            await world.reload()
            await world.until(lambda: len(slot.starts) == 4)
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) > started)
            assert dict(slot.starts[-1].args) == {}
            assert world.backend().window_tokens == 768
            dropped = world.told(EventKind.REMEDY, "m/b1")[-1]
            assert dropped.label == "dropped"
            assert "--max-model-len 896 (lower_max_model_len)" in dropped.detail
            slot.judge = lambda flags: Script()  # more memory, by now
            backend["launch"]["args"] = {"max-model-len": 2048}
            await world.reload()
            await world.until(lambda: len(slot.starts) == 5)
            assert dict(slot.starts[-1].args) == {}


@story
async def test_a_remedy_of_a_command_line_that_changed_while_no_gateway_ran_is_dropped(tmp_path):
    async with machine() as on:
        on["m/b1"].judge = small_cache
        told = launched(on["m/b1"], args={"max-model-len": 2048})
        async with fleet(on, told, folder=tmp_path, **LOWER) as world:
            assert kept(world)
        told = launched(on["m/b1"], args={"max-model-len": 768})
        async with fleet(on, told, folder=tmp_path, **LOWER) as world:
            assert kept(world) == {}
            labels = [each.label for each in world.told(EventKind.REMEDY)]
            assert labels == ["lower_max_model_len", "dropped"]  # the first by the gateway before


@story
async def test_no_remedy_goes_below_the_floor():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = small_cache
        settings = {**LOWER, "min_context": 1024, "supervision": {"max_restarts": 1}}
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **settings) as world:
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            assert len(slot.starts) == 2
            assert not any(slot.starts)
            assert not world.told(EventKind.REMEDY)


@story
async def test_no_remedy_is_applied_that_is_not_allowed():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = small_cache
        settings = {"min_context": 512, "supervision": {"max_restarts": 1}}
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **settings) as world:
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            assert not any(slot.starts)
            assert "about 896 tokens fit" in world.backend().health.detail


@story
async def test_a_start_that_hangs_is_found_and_begun_anew():
    async with machine() as on:
        slot = on["m/b1"]
        slot.plan(Script(listens=asyncio.Event()))  # it never listens
        patience = {"patience": {"config": "500ms"}}
        async with fleet(on, launched(slot), supervision=patience) as world:
            assert len(slot.starts) >= 2  # more on a machine that is slower than this patience
            failed = world.told(EventKind.START_FAILED)[0]
            assert "supervision.patience.config" in failed.detail
            assert {each.label for each in world.told(EventKind.RESTART)} == {"start_hung"}
            assert slot.stops  # the one that hung was ended


@story
async def test_a_suspension_says_what_still_runs():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = lambda flags: Script(listens=asyncio.Event())  # it never listens
        few = {"patience": {"config": "300ms"}, "max_restarts": 1}
        async with fleet(on, launched(slot), wait=False, supervision=few) as world:
            await world.until(lambda: world.unit().suspended)
            still = f"Its server still runs ({slot.incarnation}) and keeps its port and memory"
            assert still in world.backend().health.detail
            await slot.die(1)
            await world.until(lambda: "still runs" not in world.backend().health.detail)
            slot.judge = lambda flags: Script(1, "boom")
            await world.order("undrain")
            await world.until(lambda: len(world.told(EventKind.SUSPENDED)) == 2)
            assert "still runs" not in world.backend().health.detail


def hangs(log):
    """A start that says this, and then neither listens nor ends."""
    return Script(listens=asyncio.Event(), log=log)


IMPATIENT = {"patience": {"config": "1s"}}
NCCL_SILENT = (
    "(Worker_TP0 pid=7) INFO 11-21 10:09:50 [parallel_state.py:1200] world_size=2 rank=0 "
    "local_rank=0 distributed_init_method=tcp://127.0.0.1:5555 backend=nccl\n"
    "(Worker_TP0 pid=7) INFO 11-21 10:09:51 [pynccl.py:111] vLLM is using nccl==2.27.5\n"
)


@story
async def test_a_start_that_hangs_with_its_error_in_the_log_is_diagnosed_and_the_remedy_applied():
    async with machine() as on:
        slot = on["m/b1"]
        slot.plan(hangs(KV_SMALL))
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, supervision=IMPATIENT, **LOWER) as world:
            failed = world.told(EventKind.START_FAILED)[0]
            assert failed.label == "kv_cache_too_small_for_max_model_len"
            assert "supervision.patience.config" in failed.detail
            assert "about 896 tokens fit" in failed.detail
            assert [each.label for each in world.told(EventKind.REMEDY)] == ["lower_max_model_len"]
            assert [dict(each.args) for each in slot.starts[:2]] == [{}, {"max-model-len": 896}]
            assert world.told(EventKind.RESTART)[0].label == "start_hung"


@story
async def test_workers_that_hang_while_nccl_connects_them_start_without_peer_to_peer():
    async with machine() as on:
        slot = on["m/b1"]
        slot.plan(hangs(NCCL_SILENT))
        remedies = {"remedies": ["nccl_p2p_off"]}
        async with fleet(on, launched(slot), supervision=IMPATIENT, **remedies) as world:
            assert world.told(EventKind.START_FAILED)[0].label == "nccl_error_or_watchdog_timeout"
            assert [dict(each.env) for each in slot.starts[:2]] == [{}, {"NCCL_P2P_DISABLE": "1"}]


@story
async def test_a_start_that_hung_and_serves_after_all_needed_no_remedy():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.plan(Script(listens=up, log=NCCL_SILENT))
        told, remedies = launched(slot), {"remedies": ["nccl_p2p_off"]}
        async with fleet(on, told, wait=False, supervision=IMPATIENT, **remedies) as world:
            await world.until(lambda: slot.starts)
            held = await world.admin("POST", "/admin/v1/restarts:hold", {"pool": "m"})
            assert held.is_success
            await world.until(lambda: world.told(EventKind.REMEDY))
            up.set()
            await world.serves()
            assert [each.label for each in world.told(EventKind.REMEDY)] == [
                "nccl_p2p_off",
                "dropped",
            ]
            assert (await world.order("restart", force=True)).is_success
            await world.until(lambda: len(slot.starts) == 2)
            assert [dict(each.env) for each in slot.starts] == [{}, {}]


@story
async def test_a_start_that_hung_and_serves_after_all_needed_no_remedy_though_its_gateway_was_replaced(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("gateway.heal.unit._FOUND_S", 0.2)
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.plan(Script(listens=up, log=NCCL_SILENT))
        told = launched(slot, on_exit="leave")
        few = {"wait": False, "folder": tmp_path, "remedies": ["nccl_p2p_off"]}
        async with fleet(on, told, supervision=IMPATIENT, **few) as world:
            await world.until(lambda: slot.starts)
            held = await world.admin("POST", "/admin/v1/restarts:hold", {"pool": "m"})
            assert held.is_success
            await world.until(lambda: world.told(EventKind.REMEDY))
        async with fleet(on, told, **few) as world:
            await world.until(lambda: under_way(world.unit().state))
            up.set()
            await world.serves()
            assert [each.label for each in world.told(EventKind.REMEDY)][1:] == ["dropped"]
            assert (await world.order("restart", force=True)).is_success
            await world.until(lambda: len(slot.starts) == 2)
            assert [dict(each.env) for each in slot.starts] == [{}, {}]


@story
async def test_a_start_that_hangs_and_does_not_say_why_gets_no_remedy_and_no_cause():
    async with machine() as on:
        slot = on["m/b1"]
        slot.plan(hangs("INFO 11-21 10:09:50 [model.py:1] Using max model len 2048\n"))
        remedies = {"remedies": ["nccl_p2p_off", "lower_max_model_len", "enforce_eager"]}
        async with fleet(on, launched(slot), supervision=IMPATIENT, **remedies) as world:
            failed = world.told(EventKind.START_FAILED)[0]
            assert failed.label == "launched"
            assert failed.detail.endswith("(supervision.patience.config)")
            assert not world.told(EventKind.REMEDY)
            assert world.unit().diagnosis is None


async def usual_times(on, told, folder):
    """Start a server under a gateway of its own; return how long that is expected to take."""
    up = asyncio.Event()
    on["m/b1"].plan(Script(listens=up))
    async with fleet(on, told, folder=folder, wait=False) as world:
        await world.until(lambda: on["m/b1"].running and world.unit().observed.watch is not None)
        usual_s = dict(world.unit().observed.watch.usual_s)
        up.set()
        await world.serves()
        return usual_s


@story
async def test_how_long_starts_take_is_known_to_the_next_gateway_for_the_same_command_line(
    tmp_path,
):
    async with machine() as on:
        told = launched(on["m/b1"], on_exit="leave")
        assert await usual_times(on, told, tmp_path) == {}
        async with fleet(on, told, folder=tmp_path):  # found running: that tells nothing
            pass
        await on["m/b1"].die()
        assert await usual_times(on, told, tmp_path)
        await on["m/b1"].die()
        other = launched(on["m/b1"], args={"max-model-len": 4096})
        assert await usual_times(on, other, tmp_path) == {}


@story
async def test_one_whose_engine_fails_its_first_token_is_kept_out():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.plan(Script(faults=("http_500",)), Script(listens=up))
        async with fleet(on, launched(slot), launched(on["m/b2"]), wait=False) as world:
            await world.until(lambda: world.told(EventKind.START_FAILED))
            (failed,) = world.told(EventKind.START_FAILED)
            assert "did not compute one token (it answers with status 500)" in failed.detail
            assert not world.told(EventKind.STARTED, "m/b1")
            await world.until(lambda: len(slot.starts) == 2)
            await world.serves("m/b2")
            up.set()
            await world.serves()
            assert [each.after for each in world.process.table.transitions if each.backend_id == "m/b1"].count(Phase.READY) == 1  # fmt: skip


@story
async def test_a_crash_loop_is_suspended_until_an_operator_clears_it():
    async with machine() as on:
        slot, broken = on["m/b1"], [True]
        slot.judge = lambda flags: Script(exit_code=1, log="boom") if broken else Script()
        few = {"supervision": {"max_restarts": 2}}
        async with fleet(on, launched(slot), wait=False, **few) as world:
            await world.until(lambda: world.unit().suspended)
            assert len(slot.starts) == 3  # the launch, and two restarts
            assert world.backend().reason == "suspended"
            await world.turns()
            assert len(slot.starts) == 3
            assert len(world.told(EventKind.SUSPENDED)) == 1
            answer = await world.order("undrain")
            assert answer.json()["changed"]
            await world.until(lambda: len(world.told(EventKind.SUSPENDED)) == 2)
            broken.clear()
            assert (await world.order("restart")).json()["changed"]
            await world.serves()
            assert not world.unit().suspended


def suspension(world):
    """Why it was suspended: the same in the event and in the overview."""
    (suspended,) = world.told(EventKind.SUSPENDED)
    assert world.backend().health.detail.startswith(f"suspended, {suspended.detail}")
    return suspended.detail


@story
async def test_a_suspension_says_what_helps():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = small_cache
        once = {"supervision": {"max_restarts": 1}}
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **once) as world:
            await world.until(lambda: world.unit().suspended)
            helps = "about 896 tokens fit. To fix it: --max-model-len 896"
            assert helps in suspension(world)
            (down,) = (await world.admin("GET", "/admin/v1/overview")).json()["problems"]
            assert helps in down["cause"]


@story
async def test_a_suspension_without_a_known_cause_tells_the_exit_code():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = lambda flags: Script(exit_code=3)
        async with fleet(on, launched(slot), wait=False, supervision={"max_restarts": 1}) as world:
            await world.until(lambda: world.unit().suspended)
            assert suspension(world) == (
                "1 restart within 1800 s did not help: its process exited with code 3 while it"
                " started: its log does not say why"
            )


@story
async def test_a_suspension_of_one_that_was_never_launched_tells_why_once():
    async with machine() as on:
        slot, none = on["m/b1"], "the program vllm does not exist"
        slot.refuses, slot.obstacle = [none] * 3, Obstacle.CANNOT_HELP
        async with fleet(on, launched(slot), wait=False, supervision={"max_restarts": 2}) as world:
            await world.until(lambda: world.unit().suspended)
            assert suspension(world) == (
                f"it was started once more, and a restart cannot help: it could not be started: {none}"
            )


@story
async def test_a_suspension_does_not_name_the_cause_of_an_earlier_start():
    async with machine() as on:
        slot = on["m/b1"]
        slot.plan(Script(exit_code=1, log=KV_SMALL))
        slot.judge = lambda flags: hangs("")
        once = {"supervision": {**IMPATIENT, "max_restarts": 1}}
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **once, **LOWER) as world:
            await world.until(lambda: world.unit().suspended)
            assert len(world.told(EventKind.REMEDY)) == 1
            assert world.unit().diagnosis is None
            assert suspension(world) == (
                "1 restart within 1800 s did not help: silent for 1 s while launched"
                " (supervision.patience.config)"
            )


@story
async def test_a_suspension_does_not_name_how_it_ended_when_it_could_not_be_launched_since():
    async with machine() as on:
        slot, none = on["m/b1"], "the program vllm does not exist"
        async with fleet(on, launched(slot), supervision={"max_restarts": 2}) as world:
            slot.refuses, slot.obstacle = [none] * 2, Obstacle.CANNOT_HELP
            await slot.die(exit_code=1, log=DIED)
            await world.until(lambda: world.unit().suspended)
            assert world.told(EventKind.EXITED)[0].label == "engine_dead_runtime"
            assert world.unit().diagnosis is None
            assert suspension(world).endswith(f": {none}")
            assert "head_dim" not in suspension(world)


@story
async def test_another_command_line_ends_a_suspension():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = small_cache
        few = {"supervision": {"max_restarts": 1}}
        told = launched(slot, args={"max-model-len": 2048})
        async with fleet(on, told, wait=False, **few) as world:
            await world.until(lambda: world.unit().suspended)
            await world.reload()  # nothing changed
            await world.turns()
            assert world.unit().suspended
            world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-model-len": 768}
            await world.reload()
            await world.serves()
            assert not world.unit().suspended


@story
async def test_another_command_line_replaces_what_hangs_and_is_suspended_at_once():
    async with machine() as on:
        slot = on["m/b1"]
        slot.judge = lambda flags: Script(listens=None if flags else asyncio.Event())
        few = {"patience": {"config": "400ms"}, "max_restarts": 1}
        async with fleet(on, launched(slot), wait=False, supervision=few) as world:
            await world.until(lambda: world.unit().suspended)
            assert slot.running
            settings = world.settings["pools"]["m"]
            settings["backends"][0]["launch"]["args"] = {"max-model-len": 4096}
            settings["supervision"]["patience"] = {"config": "1h"}
            await world.reload()
            await world.serves()
            assert world.backend().window_tokens == 4096
            assert len(slot.starts) == 3


@story
async def test_a_launcher_that_fails_is_told_and_asked_again():
    async with machine() as on:
        on["m/b1"].refuses = ["there is no vllm in PATH"]
        async with fleet(on, launched(on["m/b1"]), wait=False) as world:
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED))
            (failed,) = world.told(EventKind.LAUNCH_FAILED)
            assert failed.detail == "there is no vllm in PATH"
            await world.serves()


# --- frozen engines -------------------------------------------------------------------------------


@story
async def test_a_frozen_idle_engine_is_found_by_a_canary():
    async with machine() as on:
        quick = {"supervision": {"canary": "200ms"}}
        backends, timing = (
            (launched(on["m/b1"]), launched(on["m/b2"])),
            Timing(0.02, token_s=0.4),
        )
        async with fleet(on, *backends, timing=timing, **quick) as world:
            first = world.slot().sim
            first.inject("frozen")
            await world.until(lambda: world.slot().sim is not first)
            await world.serves()
            restart = world.told(EventKind.RESTART, "m/b1")[0]
            assert restart.label == "frozen"
            assert "2 test requests in a row failed (no answer in time)" in restart.detail
            suspected, proved = world.told(EventKind.SUSPECT, "m/b1")
            assert (suspected.label, proved.label) == ("frozen", "proved")
            assert "2 test requests in a row failed (no answer in time)" in proved.detail


@story
async def test_a_frozen_engine_is_found_though_looking_at_it_hangs():
    async with machine() as on:
        slot, timing = on["m/b1"], Timing(0.02, token_s=0.2)
        quick = {"supervision": {"canary": "200ms"}}
        async with fleet(on, launched(slot), launched(on["m/b2"]), timing=timing, **quick) as world:
            slot.looks = asyncio.Event()
            await world.until(lambda: slot.waiting)
            slot.sim.inject("frozen")
            await world.until(lambda: world.phase() is Phase.DOWN)
            assert slot.hanging == slot.waiting == 1, "the look that hangs came back before"


@story
async def test_an_engine_that_answers_errors_gets_time_to_end_and_to_say_why():
    async with machine() as on:
        quick = {"supervision": {"canary": "200ms"}}
        timing = Timing(0.02, last_words_s=30.0)
        backends = launched(on["m/b1"]), launched(on["m/b2"])
        async with fleet(on, *backends, timing=timing, **quick) as world:
            world.slot().sim.inject("http_500")
            await world.until(lambda: world.backend().health.reason == "frozen")
            await world.slot().die(exit_code=1, log=DIED)
            await world.until(lambda: world.told(EventKind.RESTART))
            (restart,) = world.told(EventKind.RESTART)
            assert restart.label == "exited"
            (exited,) = world.told(EventKind.EXITED)
            assert exited.label == "engine_dead_runtime"


@story
async def test_a_healthy_idle_engine_is_asked_and_left_alone():
    async with machine() as on:
        quick = {"supervision": {"canary": "100ms"}}
        async with fleet(on, launched(on["m/b1"]), **quick) as world:
            asked = len(world.slot().sim.received("/v1/completions"))
            await world.until(
                lambda: len(world.slot().sim.received("/v1/completions")) >= asked + 3
            )
            assert not world.told(EventKind.RESTART)
            assert world.phase() is Phase.READY


# --- what launchers tell late ---------------------------------------------------------------------


@story
async def test_a_look_that_began_before_a_launch_is_not_taken_for_its_end():
    async with machine() as on:
        slot = on["m/b1"]
        async with fleet(on, launched(slot), launched(on["m/b2"])) as world:
            began = asyncio.Event()
            slot.looks = began  # this look sees that nothing runs, and comes back late
            await slot.die()
            waiting = slot.waiting
            await world.until(lambda: slot.waiting > waiting)
            slot.looks = None
            assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: len(slot.starts) == 2)
            began.set()
            await world.serves()
            await world.turns()
            assert len(slot.starts) == 2
            assert not world.told(EventKind.LAUNCH_FAILED)
            assert not world.told(EventKind.START_FAILED)


@story
async def test_what_runs_before_the_first_look_has_ended_gets_nothing():
    async with machine() as on:
        slot, looked = on["m/b1"], asyncio.Event()
        await slot.begin()  # it outlived its gateway, and may be about to be stopped
        slot.looks = looked
        async with fleet(on, launched(slot), wait=False) as world:
            await world.turns()  # the first one does not wait for the look any longer
            await world.until(lambda: world.backend().health.probe_passes > 0)
            assert world.phase() is Phase.STARTING
            assert world.backend().health.detail == "looking for its process"
            slot.looks = None
            looked.set()
            await world.serves()


@pytest.mark.parametrize("dies", [True, False], ids=["exited", "ordered"])
@story
async def test_where_only_a_look_tells_the_new_one_the_old_one_is_not_taken_for_it(dies):
    async with machine() as on:
        slot = on["m/b1"]
        for each in (slot, on["m/b2"]):
            await each.begin()
        slot.late = 8
        async with fleet(on, managed(slot), managed(on["m/b2"])) as world:
            await world.until(lambda: world.told(EventKind.STARTED, "m/b1"))
            if dies:
                await slot.die()
            else:
                assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
            await world.serves()
            assert len(slot.starts) == 1
            assert world.unit().state.incarnation == slot.incarnation


@story
async def test_a_server_that_its_service_manager_restarts_is_left_to_it():
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        slot = on["m/b1"]
        async with fleet(on, managed(slot), managed(on["m/b2"])) as world:
            slot.pending = True
            await slot.die(exit_code=1)
            await world.until(lambda: world.phase() is not Phase.READY)
            await world.turns(50)
            assert slot.starts == []
            (pool,) = (await world.admin("GET", "/admin/v1/overview")).json()["pools"]
            told = pool["backends"][0]
            assert told["state"] == "pending"
            assert re.fullmatch(
                r"pending for \d+s: its service manager is at work on it", told["detail"]
            )
            await slot.restart_itself()
            await world.serves()
            assert slot.starts == []
            assert not world.told(EventKind.SUSPENDED)


@pytest.mark.parametrize("seen", ["at once", "ended", "pending"])
@story
async def test_what_its_service_manager_starts_again_while_it_is_proven_is_left_to_start(seen):
    """That the process before answered `/health` does not say that the new one does: it loads its model."""
    async with machine() as on:
        slot = on["m/b1"]
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        # A failed health check or two do not say that it is down: another process does.
        seldom = {"interval": "2s", "scrape_interval": "50ms", "models_interval": "50ms"}
        timing = Timing(every_s=0.02, first_token_s=1.0, last_words_s=0.2)
        backends = managed(slot), managed(on["m/b2"])
        async with fleet(on, *backends, timing=timing, extra={"health": seldom}) as world:
            slot.plan(Script(faults=("frozen",)), Script(listens=asyncio.Event()))
            await slot.end()
            await slot.restart_itself()  # it answers, and gives no token
            await world.until(lambda: isinstance(world.unit().state, Proving))
            if seen == "pending":
                slot.pending = True
            await slot.end()
            if seen == "ended":
                await world.until(lambda: isinstance(world.unit().state, Failed))
            elif seen == "pending":
                await world.until(lambda: world.backend().reason == "pending")
            await slot.restart_itself()
            again = slot.number
            await world.until(lambda: isinstance(world.unit().state, Starting))
            await world.turns(60)
            assert isinstance(world.unit().state, Starting)
            assert (slot.number, slot.starts) == (again, [])


@story
async def test_a_crash_loop_of_a_service_manager_is_told_and_not_multiplied():
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        slot = on["m/b1"]
        async with fleet(on, managed(slot), managed(on["m/b2"])) as world:
            for round_ in range(1, 4):
                slot.pending = True
                await slot.die(exit_code=1)
                await world.until(lambda: isinstance(world.unit().state, Starting))
                await slot.restart_itself()
                await world.until(lambda n=round_: world.unit().observed.own_restarts == n)
                await world.serves()
            slot.pending = True
            await slot.die(exit_code=1)
            await world.until(lambda: world.phase() is Phase.STARTING)
            (pool,) = (await world.admin("GET", "/admin/v1/overview")).json()["pools"]
            told = pool["backends"][0]
            assert (told["state"], told["supervision"]["own_restarts"]) == ("crash-looping", 3)
            assert slot.starts == []


@pytest.mark.parametrize("verb", ["undrain", "restart"])
@story
async def test_what_failed_before_an_operator_had_it_begin_anew_is_no_crash_loop(verb):
    async with machine() as on:
        slot, listens = on["m/b1"], asyncio.Event()
        slot.judge = lambda flags: Script(exit_code=1, log="boom")
        async with fleet(on, launched(slot), wait=False, supervision={"max_restarts": 2}) as world:

            async def told():
                (pool,) = (await world.admin("GET", "/admin/v1/overview")).json()["pools"]
                return pool["backends"][0]["state"], pool["backends"][0]["ended"]

            await world.until(lambda: world.unit().suspended)
            starts = len(slot.starts)
            assert await told() == ("suspended", starts)
            slot.judge = lambda flags: Script(listens=listens)  # repaired
            assert (await world.order(verb)).json()["changed"]
            await world.until(lambda: len(slot.starts) > starts)
            await world.until(lambda: isinstance(world.unit().state, Starting))
            assert await told() == ("restarting", 0)
            listens.set()
            await world.serves()


@pytest.mark.parametrize("verb", ["undrain", "restart"])
@story
async def test_restarts_of_a_service_manager_before_an_operators_order_are_no_crash_loop(verb):
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        slot = on["m/b1"]
        async with fleet(on, managed(slot), managed(on["m/b2"])) as world:
            for number in range(1, 4):
                slot.pending = True
                await slot.die(exit_code=1)
                await world.until(lambda: isinstance(world.unit().state, Starting))
                await slot.restart_itself()
                await world.until(lambda n=number: world.unit().observed.own_restarts == n)
                await world.serves()
            assert world.unit().observed.crash_loops()
            if verb == "undrain":
                await world.order("drain")
            assert (await world.order(verb)).json()["changed"]
            assert not world.unit().observed.crash_loops()


@story
async def test_a_look_that_fails_once_forgets_nothing():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        since = world.unit().observed.since
        on["m/b1"].blind = "the disk is slow"
        await world.until(lambda: world.unit().observed.seen is None)
        assert world.unit().observed.unseen == "the disk is slow"
        on["m/b1"].blind = ""
        await world.until(lambda: world.unit().observed.seen is not None)
        await world.turns()
        assert world.unit().observed.unseen == ""
        assert world.unit().observed.since == since
        assert world.phase() is Phase.READY
        assert len(on["m/b1"].starts) == 1


@story
async def test_a_server_that_cannot_be_stopped_serves_on():
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        async with fleet(on, managed(on["m/b1"]), managed(on["m/b2"])) as world:
            on["m/b1"].obstacle = Obstacle.CANNOT_HELP
            on["m/b1"].refuses = ["polkit does not allow it"]
            await world.until(lambda: isinstance(world.unit().state, Serving))
            assert (await world.order("restart")).json()["changed"]
            await world.until(lambda: world.told(EventKind.LAUNCH_FAILED))
            await world.serves()
            assert on["m/b1"].starts == []
            await world.until(lambda: world.unit().observed.trouble == "polkit does not allow it")


# --- real processes -------------------------------------------------------------------------------

SERVER = """
import sys
from gateway.sim.server import SimConfig, run
print("INFO 11-21 10:10:03 [model.py:2152] Using max model len 8192", flush=True)
print("INFO:     Application startup complete.", flush=True)
run(SimConfig(model="m", port=int(sys.argv[1]), speed=0))
"""


@of_processes
async def test_a_real_process_is_launched_killed_launched_again_and_ended():
    async with machine() as on:
        slot = on["m/b1"]
        command = [sys.executable, "-c", SERVER, str(slot.port)]
        backend = {"name": "b1", "launch": {"command": command, "port": slot.port}}
        async with fleet(on, backend, make_launcher=launcher_of, wait=False) as world:
            await world.serves()
            assert (await world.chat(max_tokens=1)).status_code == 200
            pid = int(world.unit().observed.seen.incarnation.split("-")[0])
            logs = await world.admin("GET", "/admin/v1/backends/m/b1/logs")
            assert "Application startup complete" in logs.text
            os.kill(pid, signal.SIGKILL)
            await world.until(lambda: len(world.told(EventKind.STARTED)) == 2)
            assert (await world.chat(max_tokens=1)).status_code == 200
            (restart,) = world.told(EventKind.RESTART)
            assert restart.detail == "its process was killed by signal 9"
            starts = json.loads((world.path.parent / "state" / "starts.json").read_text())
            assert "config" in starts["m/b1"]["took_s"]  # its log was read
            pid = int(world.unit().observed.seen.incarnation.split("-")[0])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ENGINE = """
import subprocess, sys
title = "open('/proc/self/comm', 'w').write('VLLM::EngineCore'); print('named', flush=True)"
engine = subprocess.Popen([sys.executable, "-c", f"{title}; import signal; signal.pause()"],
                          stdout=subprocess.PIPE)
engine.stdout.readline()
"""


STORM = """
def say(words): print("(EngineCore_DP0 pid=7) ERROR 11-21 10:11:00 [core.py:843]", words)
print("INFO:     Application startup complete.")
say("EngineCore encountered a fatal error.")
say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total"
    " capacity of 23.64 GiB of which 1.02 GiB is free.")
for _ in range(150):
    print("(APIServer pid=1) ERROR 11-21 10:11:01 [async_llm.py:500] Traceback (most recent call last):")
    for number in range(25):
        frame = f'  File "/v1/engine/async_llm.py", line {number}, in generate'
        print("(APIServer pid=1) ERROR 11-21 10:11:01 [async_llm.py:500]" + frame)
    print("(APIServer pid=1) ERROR 11-21 10:11:01 [async_llm.py:500] vllm.v1.engine.exceptions."
          "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.")
raise SystemExit(1)
"""


@of_processes
async def test_an_engine_that_dies_under_load_is_diagnosed_by_its_first_error():
    async with machine() as on:
        command = [sys.executable, "-c", STORM]
        backend = {"name": "b1", "launch": {"command": command, "port": on["m/b1"].port}}
        async with fleet(on, backend, make_launcher=launcher_of, wait=False) as world:
            await world.until(lambda: world.told(EventKind.START_FAILED))
            assert world.told(EventKind.START_FAILED)[0].label == "cuda_oom_runtime"


def has_handle_of(pid):
    """Whether this process holds a pidfd of another."""
    for each in pathlib.Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if f"Pid:\t{pid}\n" in each.read_text():
                return True
    return False


@of_processes
async def test_one_whose_engine_process_ends_is_out_at_once_and_serves_on_if_it_lives():
    async with machine() as on:
        slot = on["m/b1"]
        command = [sys.executable, "-c", ENGINE + SERVER, str(slot.port)]
        backend = {"name": "b1", "launch": {"command": command, "port": slot.port}}
        patient = Timing(every_s=0.02, last_words_s=1.0)  # long enough to be seen out
        async with fleet(on, backend, make_launcher=launcher_of, timing=patient) as world:
            launcher = world.unit().launcher
            (engine,) = [each for each in await launcher.vital() if each.name.startswith("VLLM")]
            await world.until(lambda: has_handle_of(engine.pid))
            os.kill(engine.pid, signal.SIGKILL)
            await world.until(lambda: world.phase() is Phase.DOWN)
            assert world.backend().health.detail == f"its process {engine} was killed by signal 9"
            assert world.unit().state.sign.cause is Cause.ENGINE_DEAD
            (told,) = world.told(EventKind.SUSPECT)
            assert told.detail == world.backend().health.detail
            await world.serves()  # this one can do without it
            assert not world.told(EventKind.RESTART)
            assert world.unit().observed.seen.running


async def told_of(world):
    """What is told of m/b1, and why it has a problem."""
    told = (await world.admin("GET", "/admin/v1/overview")).json()
    (pool,) = told["pools"]
    (cause,) = [each["cause"] for each in told["problems"] if each["subject"] == "backend m/b1"]
    return pool["backends"][0]["supervision"], cause


@story
async def test_a_server_that_ended_without_a_word_is_not_told_to_serve():
    async with machine() as on:
        two = launched(on["m/b1"]), launched(on["m/b2"])
        async with fleet(on, *two, supervision={"max_restarts": 1}) as world:
            on["m/b1"].judge = lambda flags: Script(1, "INFO:     Application startup complete.\n")
            await world.slot().die(-9, "INFO:     Application startup complete.\n")
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            told, cause = await told_of(world)
            assert told["diagnosis"] is None
            assert "its log does not say why" in cause


@story
async def test_why_a_server_ended_is_forgotten_once_its_manager_has_started_it_again():
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        backends = managed(on["m/b1"]), managed(on["m/b2"])
        async with fleet(on, *backends, supervision={"automatic": False}) as world:
            await world.slot().die(1, DIED)
            await world.until(lambda: world.told(EventKind.EXITED))
            told, cause = await told_of(world)
            assert told["diagnosis"]["cause"] in cause
            await world.slot().begin()
            await world.serves()
            await world.order("drain", "m/b2")  # so that all requests come to b1
            world.slot().sim.inject("http_500@5")
            for _ in range(5):
                await world.chat(max_tokens=1)
            await world.until(lambda: world.phase() is Phase.DEGRADED)
            told, cause = await told_of(world)
            assert told["diagnosis"] is None
            assert "http_5xx" in cause


@story
async def test_why_a_restart_failed_is_forgotten_once_another_server_runs():
    async with machine() as on:
        await on["m/b1"].begin()
        async with fleet(on, managed(on["m/b1"]), supervision={"max_restarts": 1}) as world:
            slot = world.slot()
            slot.refuses, slot.obstacle = ["there is no unit b1"] * 2, Obstacle.CANNOT_HELP
            await slot.die(1, DIED)
            await world.until(lambda: world.told(EventKind.SUSPENDED))
            assert world.unit().observed.trouble == "there is no unit b1"
            await slot.begin()
            await world.serves()
            assert world.unit().observed.trouble == ""


@story
async def test_a_log_that_cannot_be_examined_ends_no_supervision():
    manual = {"supervision": {"automatic": False}}
    async with machine() as on, fleet(on, launched(on["m/b1"]), wait=False, **manual) as world:
        slot = world.slot()
        await world.order("restart")
        await world.serves()
        slot.unforeseen = ValueError("of nobody's making")
        await slot.die()
        await world.until(lambda: "could not be examined" in world.backend().health.detail)
        assert (await world.order("restart")).json()["changed"]
        await world.serves()


async def worst(world):
    """The backend, and its problem, as `status` tells them."""
    told = (await world.admin("GET", "/admin/v1/overview")).json()
    (backend,) = told["pools"][0]["backends"]
    return backend["state"], told["problems"][0]


@story
async def test_status_tells_a_first_start_from_a_restart():
    async with machine() as on:
        slot, up = on["m/b1"], asyncio.Event()
        slot.plan(Script(listens=up), Script(listens=up))
        async with fleet(on, launched(slot), wait=False) as world:
            await world.until(lambda: isinstance(world.unit().state, Starting))
            assert (await worst(world))[0] == "starting"
            up.set()
            await world.serves()
            up.clear()
            await slot.die(1, "ValueError: boom")
            await world.until(lambda: isinstance(world.unit().state, Starting))
            assert (await worst(world))[0] == "restarting"
            (told,) = world.told(EventKind.EXITED)
            assert "ValueError: boom. To fix it: " in told.detail
            up.set()
            await world.serves()


@pytest.mark.parametrize("how", ["on hold", "manual"])
@story
async def test_status_does_not_promise_a_start_that_only_an_operator_orders(how):
    manual = {"supervision": {"automatic": how != "manual"}}
    async with machine() as on, fleet(on, launched(on["m/b1"]), wait=False, **manual) as world:
        await world.order("restart")
        await world.serves()
        if how == "on hold":
            await world.admin("POST", "/admin/v1/restarts:hold", {})
        await world.slot().die(1, "ValueError: boom")
        await world.until(lambda: world.unit().decision is not None)
        state, problem = await worst(world)
        assert state == "failed"
        assert "It is not restarted" in problem["cause"]
        assert "`vllm-gateway restart m/b1`" in problem["next"]
        assert "by itself" not in problem["next"]
