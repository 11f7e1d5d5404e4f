"""Adapters are loaded where they are wanted and fit; requests wait for a load, and are never misled."""

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.adapters.keepers import OrderRefused
from gateway.adapters.memory import Memory, Order
from gateway.core.aio import start
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

SIM = SimConfig(model="m", speed=0)
SLOW = replace(SIM, adapter_load_s=0.4)


def pool(adapters, backends=1, most=None, **more):
    told = "" if most is None else f", max_cpu_loras: {most}"
    servers = ", ".join(f"{{url: '<{place}>'{told}}}" for place in range(backends))
    rest = "".join(f", {key}: {json.dumps(value)}" for key, value in more.items())
    return f"pools: {{m: {{backends: [{servers}], adapters: {json.dumps(adapters)}{rest}}}}}"


def lora(name, path=None, **more):
    return {"name": name, "path": path or f"/loras/{name}", **more}


def held(world, place=0):
    return dict(world.sims[place].state.loaded)


def told(world, kind):
    return [each for each in world.process.supervisor.events.newest() if each.kind is kind]


def loads(world, place=0):
    return len(world.sims[place].received("/v1/load_lora_adapter"))


@story
async def test_all_are_loaded_everywhere_once_where_nothing_is_known_to_be_short():
    async with gateway(SIM, SIM, pools=pool([lora("sql"), lora("fr")], 2)) as world:
        everything = {"sql": "/loras/sql", "fr": "/loras/fr"}
        await world.until(lambda: held(world) == held(world, 1) == everything)
        await asyncio.sleep(1.2)
        assert loads(world) == loads(world, 1) == 2
        assert {each.label for each in told(world, EventKind.ADAPTER)} == {"sql", "fr"}
        assert (await world.chat(model="sql", max_tokens=1)).status_code == 200


@story
async def test_a_request_for_an_adapter_that_nobody_has_waits_for_its_load_and_no_longer():
    adapters = [lora("a"), lora("b")]
    async with gateway(SLOW, pools=pool(adapters, most=1)) as world:
        await world.until(lambda: held(world) == {"a": "/loras/a"})
        reply = await world.chat(model="b", max_tokens=1)
        assert reply.status_code == 200, reply.text
        assert held(world) == {"b": "/loras/b"}
        asked = [
            json.loads(each.body)["model"]
            for each in world.sims[0].received("/v1/chat/completions")
        ]
        assert asked == ["b"]


@pytest.mark.parametrize("backends", [1, 2])
@story
async def test_requests_for_adapters_that_come_before_any_server_is_up_are_served(backends):
    listed = pool([lora("sql"), lora("fr")], backends)
    async with gateway(*[SLOW] * backends, pools=listed, wait=False) as world:
        names = ["sql", "fr", "m"] * 3
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(world.chat(model=each, max_tokens=1)) for each in names]
        assert [each.result().status_code for each in asked] == [200] * len(names)


def test_adapters_on_a_file_server_that_hangs_are_placed_all_the_same(tmp_path):
    os.mkfifo(tmp_path / "adapter_config.json")  # who reads it waits

    @story
    async def placed():
        async with gateway(SIM, pools=pool([lora("sql", str(tmp_path))])) as world:
            await world.until(lambda: held(world) == {"sql": str(tmp_path)}, 10)
            await reload(world.process)
            assert (await world.chat(model="sql", max_tokens=1)).status_code == 200

    placed()  # and ends, though somebody still reads


@story
async def test_no_backend_gets_more_than_it_keeps():
    adapters = [lora(f"a{each}") for each in range(6)]
    async with gateway(SIM, SIM, pools=pool(adapters, 2, most=2)) as world:
        await world.until(lambda: len(held(world)) == len(held(world, 1)) == 2)
        assert not held(world).keys() & held(world, 1).keys()  # a first copy comes before a second
        for name in ("a4", "a5", "a0", "a3", "a1", "a2"):
            assert (await world.chat(model=name, max_tokens=1)).status_code == 200
            assert max(len(held(world)), len(held(world, 1))) <= 2


@story
async def test_what_has_requests_in_flight_stays_until_they_have_ended():
    slow = SimConfig(model="m", decode_step_s=0.05)
    async with gateway(slow, pools=pool([lora("a"), lora("b")], most=1)) as world:
        await world.until(lambda: "a" in held(world))
        await asyncio.sleep(1.1)  # what was just loaded stays for a while
        first = start(world.chat(model="a", max_tokens=20), name="first")
        await world.until(lambda: world.process.table.get("m/b1").adapter_requests == {"a": 1})
        world.sims[0].inject("frozen")  # the first one lasts as long as it has to
        second = start(world.chat(model="b", max_tokens=1), name="second")
        await world.until(lambda: "a" in world.process.table.get("m/b1").lacking)
        assert "a" in held(world)
        details = {each.detail for each in world.process.adapters.statuses()}
        assert details == {"waits until 1 in flight of a have ended"}
        world.sims[0].clear()
        assert (await first).json()["usage"]["completion_tokens"] == 20
        assert (await second).status_code == 200
        assert list(held(world)) == ["b"]


@story
async def test_a_load_that_fails_says_why_blocks_no_other_and_is_tried_again_later():
    adapters = [lora("bad", "/loras/missing"), lora("big", "/loras/rank-64"), lora("good")]
    async with gateway(SIM, pools=pool(adapters)) as world:
        await world.until(lambda: "good" in held(world))
        await world.until(lambda: len(told(world, EventKind.ADAPTER_FAILED)) == 2)
        said = {each.label: each.detail for each in told(world, EventKind.ADAPTER_FAILED)}
        assert "No adapter found for /loras/missing" in said["bad"]
        assert "LoRA rank 64 is greater than max_lora_rank 16" in said["big"]
        reply = await world.chat(model="bad", max_tokens=1)
        assert reply.status_code == 503
        assert "its only backend could not load it" in reply.json()["error"]["message"]
        assert (await world.chat(model="good", max_tokens=1)).status_code == 200
        assert loads(world) == 3  # a pause before the next try


@story
async def test_a_request_waits_for_a_load_no_longer_than_loads_take():
    async with gateway(SIM, pools=pool([lora("a")], most=1)) as world:
        await world.until(lambda: "a" in world.process.table.get("m/b1").adapters)
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        keeper = world.process.adapters.pools["m"]
        keeper.loads_s.append(0.05)
        world.sims[0].state.config = replace(SIM, adapter_load_s=6.0)
        world.sims[0].state.loaded.clear()
        await world.until(lambda: not world.process.table.get("m/b1").adapters)
        async with asyncio.timeout(5):
            reply = await world.chat(model="a", max_tokens=1)
        assert reply.status_code == 503
        assert "could not load it" in reply.json()["error"]["message"]


@story
async def test_an_adapter_that_ends_servers_as_they_load_it_ends_two_and_no_third():
    sims = [SIM] * 3
    async with gateway(*sims, pools=pool([lora("deadly"), lora("sql")], 3)) as world:
        dead = lambda: [sim.state.dead for sim in world.sims]  # noqa: E731
        await world.until(lambda: sum(dead()) == 2, 10)
        left = dead().index(False)
        await world.until(lambda: held(world, left) == {"sql": "/loras/sql"})
        await world.until(
            lambda: any(
                "servers died as they loaded it" in each.detail
                for each in world.process.adapters.statuses()
            )
        )
        for place in range(3):
            if place != left:
                world.sims[place].clear()
        everywhere = {"sql": "/loras/sql"}
        await world.until(lambda: all(held(world, place) == everywhere for place in range(3)), 15)
        reply = await world.chat(model="deadly", max_tokens=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
        assert sum(dead()) == 0
        # An operator says that it is well now.
        world.process.adapters.order("m/b1", "deadly", Order(keep=True, at=time.time()))
        await world.until(lambda: world.sims[0].state.dead)


@story
async def test_what_a_dying_server_does_not_load_either_is_not_blamed_for_its_end():
    async with gateway(SIM, pools=pool([lora("deadly"), lora("sql")], 1)) as world:
        known, (sim,) = world.process.adapters.pools["m"].known, world.sims
        died = partial(known.deadly.deaths, "deadly", "/loras/deadly")
        for times in (1, 2):
            await world.until(lambda n=times: len(died()) == n, 15)
            await world.until(lambda: world.process.table.get("m/b1").phase is Phase.DOWN)
            asked = sim.received("/v1/load_lora_adapter")
            names = [json.loads(each.body)["lora_name"] for each in asked]
            assert (names[-1], names.count("deadly")) == ("deadly", times)
            sim.clear()
        await world.until(lambda: held(world) == {"sql": "/loras/sql"}, 10)
        assert not known.deadly.deaths("sql", "/loras/sql")


@story
async def test_where_the_only_copy_is_on_a_server_that_drains_another_one_loads_it():
    async with gateway(
        SIM, SIM, pools=pool([lora("sql", replicas=1)], 2), as_shipped=True
    ) as world:
        await world.until(lambda: held(world) or held(world, 1))
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        drains = 0 if held(world) else 1
        world.sims[drains].inject("stopping")
        for number in range(3):
            reply = await world.chat(f"{number}", model="sql", max_tokens=1)
            assert reply.status_code == 200, reply.text
        assert held(world, 1 - drains) == {"sql": "/loras/sql"}


@story
async def test_a_server_that_refuses_a_load_and_is_stopped_then_did_not_die_of_it():
    async with gateway(SIM, SIM, pools=pool([lora("sql", "/loras/missing")], 2)) as world:
        deadly = world.process.adapters.pools["m"].known.deadly
        await world.until(lambda: len(told(world, EventKind.ADAPTER_FAILED)) == 2)
        for sim in world.sims:
            sim.inject("refuse")
        await world.until(
            lambda: all(each.phase is Phase.DOWN for each in world.process.table.backends("m"))
        )
        assert not deadly


@story
async def test_a_single_copy_leaves_a_backend_that_becomes_a_reserve():
    listed = json.dumps([lora("sql", replicas=1)])
    backends = "[{url: '<0>', name: b0, weight: 1}, {url: '<1>', name: b1, weight: 1}]"
    pools = f"pools: {{m: {{adapters: {listed}, backends: {backends}}}}}"
    async with gateway(SIM, SIM, pools=pools) as world:
        await world.until(lambda: held(world) or held(world, 1))  # the first that serves has it
        left, taken = (0, 1) if held(world) else (1, 0)
        text = world.path.read_text()
        world.path.write_text(
            text.replace(f"name: b{left}, weight: 1", f"name: b{left}, weight: 0")
        )
        assert (await reload(world.process)).done
        await world.until(lambda: [*held(world, taken)] == ["sql"] and not held(world, left))
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        reply = await world.chat(model="sql", max_tokens=1)
        assert (reply.status_code, reply.headers["x-gateway-backend"]) == (200, f"m/b{taken}")
        assert loads(world) == loads(world, 1) == 1


@story
async def test_a_single_copy_leaves_a_revision_that_was_rolled_back():
    listed = json.dumps([lora("sql", replicas=1)])
    backends = "[{url: '<0>', name: b0, revision: v0}, {url: '<1>', name: b1, revision: v1}]"
    pools = f"pools: {{m: {{adapters: {listed}, backends: {backends}}}}}"
    async with gateway(SIM, SIM, pools=pools, extra="state: state") as world:
        await world.until(lambda: held(world) or held(world, 1))  # the first that serves has it
        left, taken = (0, 1) if held(world) else (1, 0)
        canary = f"m: {{canary: {{revision: v{left}, weight: 0.5, automatic: true}}, "
        world.path.write_text(world.path.read_text().replace("m: {", canary, 1))
        assert (await reload(world.process)).done
        world.sims[left].inject("http_500:422")
        for number in range(120):
            await world.chat(f"talk {number}", max_tokens=1)
            if world.process.table.get(f"m/b{left}").in_reserve:
                break
        await world.until(lambda: [*held(world, taken)] == ["sql"] and not held(world, left))
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        reply = await world.chat(model="sql", max_tokens=1)
        assert (reply.status_code, reply.headers["x-gateway-revision"]) == (200, f"v{taken}")


@story
async def test_what_the_server_loaded_by_itself_is_left_alone():
    own = replace(SIM, adapters=("0-theirs",))
    listed = [lora("0-theirs", "/adapters/0-theirs"), lora("a"), lora("b")]
    async with gateway(own, pools=pool(listed, most=2)) as world:
        await world.until(lambda: "a" in held(world))
        assert (await world.chat(model="b", max_tokens=1)).status_code == 200
        assert held(world).keys() == {"0-theirs", "b"}


@story
async def test_a_new_path_comes_with_a_reload_and_what_is_listed_no_more_goes():
    async with gateway(SIM, SIM, pools=pool([lora("a"), lora("b")], 2)) as world:
        await world.until(lambda: len(held(world)) == len(held(world, 1)) == 2)
        text = (
            world.path.read_text()
            .replace("/loras/a", "/loras/a2")
            .replace('{"name": "b"', '{"name": "c"')
        )
        world.path.write_text(text)
        assert (await reload(world.process)).done
        new = {"a": "/loras/a2", "c": "/loras/b"}
        await world.until(lambda: held(world) == held(world, 1) == new, 15)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_new_path_of_an_adapter_that_always_has_requests_comes_one_copy_at_a_time(copies):
    async def asks(world, until):
        while not until.is_set():
            reply = await world.chat(model="sql", max_tokens=10)
            assert reply.status_code == 200, reply.text

    @story
    async def comes():
        sims = [SimConfig(model="m", decode_step_s=0.02)] * copies
        async with gateway(*sims, pools=pool([lora("sql", "/loras/1")], copies)) as world:
            backends, over = world.process.table.backends("m"), asyncio.Event()

            def all_have(path):
                return all(held(world, each) == {"sql": path} for each in range(copies))

            def requests_wait():
                return all("sql" in each.lacking for each in backends)

            await world.until(lambda: all_have("/loras/1"))
            waited = 0
            async with asyncio.TaskGroup() as group:
                for _ in range(3 * copies):
                    group.create_task(asks(world, over))
                await world.until(lambda: all(backend.adapter_requests for backend in backends))
                world.path.write_text(world.path.read_text().replace("/loras/1", "/loras/2"))
                assert (await reload(world.process)).done
                async with asyncio.timeout(10):
                    while not all_have("/loras/2"):
                        waited += requests_wait()
                        await asyncio.sleep(0.01)
                over.set()
            assert copies == 1 or not waited

    comes()


@story
async def test_a_new_path_that_cannot_be_loaded_costs_one_copy_and_the_others_serve_on():
    async with gateway(SIM, SIM, pools=pool([lora("sql", "/loras/1")], 2)) as world:

        async def change(old, new):
            world.path.write_text(world.path.read_text().replace(old, new))
            assert (await reload(world.process)).done

        keeper = world.process.adapters.pools["m"]
        await world.until(lambda: held(world) == held(world, 1) == {"sql": "/loras/1"})
        await world.until(lambda: not keeper.changes)
        await change("/loras/1", "/loras/missing")
        await world.until(lambda: told(world, EventKind.ADAPTER_FAILED))
        keeper.look()
        assert not keeper.changes
        assert sorted((*held(world).values(), *held(world, 1).values())) == ["/loras/1"]
        assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
        await change("/loras/missing", "/loras/2")
        await world.until(lambda: held(world) == held(world, 1) == {"sql": "/loras/2"})


@story
async def test_an_operators_order_beats_placement_and_outlives_the_gateway():
    async with gateway(SIM, SIM, pools=pool([lora("a", replicas=1)], 2)) as world:
        adapters = world.process.adapters
        await world.until(lambda: len(held(world)) + len(held(world, 1)) == 1)
        for place in (1, 2):
            adapters.order(f"m/b{place}", "a", Order(keep=True))
        await world.until(lambda: "a" in held(world) and "a" in held(world, 1))
        said = adapters.order("m/b1", "a", Order(keep=False, why="it answers nonsense"))
        assert said.startswith("m/b1 unloads a")
        await world.until(lambda: not held(world))

        def detail():
            return next(each.detail for each in adapters.statuses() if each.backend_id == "m/b1")

        told = "an operator unloaded it there: it answers nonsense"
        # The unloading is not over as soon as it is seen.
        await world.until(lambda: detail() == told)
        again = Memory(world.process.config.state)
        assert not again.orders("m/b1")["a"].keep
        assert again.orders("m/b2")["a"].keep
        adapters.order("m/b1", "a", None)
        assert "settings decide" not in adapters.order("m/b1", "a", None)


@story
async def test_orders_that_can_never_be_carried_out_are_refused():
    async with gateway(SIM, pools=pool(["a", lora("b")])) as world:
        adapters = world.process.adapters
        for name, order, code in (
            ("zz", Order(keep=True, path="/x"), "not_listed"),
            ("a", Order(keep=True), "no_path"),
            ("b", Order(keep=True, path="/other"), "other_path"),
            ("m", Order(keep=True, path="/x"), "not_an_adapter"),
        ):
            with pytest.raises(OrderRefused) as refused:
                adapters.order("m/b1", name, order)
            assert refused.value.code == code


@story
async def test_one_that_only_an_operator_names_is_loaded_where_he_said():
    async with gateway(SIM, SIM, pools=pool("auto", 2)) as world:
        world.process.adapters.order("m/b2", "x", Order(keep=True, path="/loras/x"))
        await world.until(lambda: held(world, 1) == {"x": "/loras/x"})
        assert held(world) == {}
        await world.until(lambda: "x" in world.process.table.get("m/b2").adapters)
        assert (await world.chat(model="x", max_tokens=1)).status_code == 200


@story
async def test_a_version_that_mixes_adapters_up_loads_none_while_adapters_run():
    old = SimConfig(model="m", version="0.24.0", decode_step_s=0.05)
    async with gateway(old, pools=pool([lora("a"), lora("b")], most=2)) as world:
        await world.until(lambda: len(held(world)) == 2)
        running = start(world.chat(model="a", max_tokens=30), name="running")
        await world.until(lambda: world.process.table.get("m/b1").adapter_requests == {"a": 1})
        world.sims[0].inject("frozen")  # it runs as long as it has to
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        before = loads(world)
        del world.sims[0].state.loaded["b"]
        await world.until(lambda: world.process.table.get("m/b1").adapters == ("a",))
        assert not running.done()
        (row,) = [each for each in world.process.adapters.statuses() if each.adapter == "b"]
        assert "may mix adapters up" in row.detail
        assert loads(world) == before
        world.sims[0].clear()
        assert (await running).status_code == 200
        await world.until(lambda: loads(world) == before + 1)


@story
async def test_a_server_that_comes_back_empty_has_its_adapters_again():
    async with gateway(SIM, pools=pool([lora("a"), lora("b")])) as world:
        await world.until(lambda: len(world.process.table.get("m/b1").adapters) == 2)
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        world.sims[0].state.loaded.clear()  # no load is under way that this could spoil
        await world.until(lambda: len(held(world)) == 2)
        assert (await world.chat(model="b", max_tokens=1)).status_code == 200


@story
async def test_a_load_is_held_against_nobody_and_the_next_that_is_not_urgent_comes_later():
    async with gateway(SLOW, pools=pool([lora("a")])) as world:
        keeper, backend = world.process.adapters.pools["m"], world.process.table.get("m/b1")
        await world.until(lambda: "a" in keeper.known.fresh_until)
        # It stood still for the load: what is slow of that time is not its fault.
        assert backend.limit.cut_at > 0
        assert keeper.usual_s > 0.3  # as measured: timers round
        assert keeper.known.rest_until["m/b1"] >= backend.limit.cut_at + 4 * keeper.usual_s


@story
async def test_what_left_a_server_is_not_the_gateways_any_more():
    async with gateway(SIM, pools=pool("auto")) as world:
        adapters = world.process.adapters
        adapters.order("m/b1", "x", Order(keep=True, path="/loras/x"))
        await world.until(lambda: "x" in adapters.memory.loaded("m/b1"))
        adapters.order("m/b1", "x", Order(keep=False))
        await world.until(lambda: held(world) == {})
        adapters.order("m/b1", "x", None)
        await world.until(lambda: adapters.memory.loaded("m/b1") == frozenset())
        world.sims[0].state.loaded["x"] = "/loras/x"  # by somebody else
        await world.until(lambda: "x" in world.process.table.get("m/b1").adapters)
        (row,) = adapters.statuses()
        assert (row.loaded_by, row.wanted_by) == ("other", None)


@story
async def test_what_somebody_loaded_and_an_operator_keeps_comes_back_when_its_server_lost_it():
    async with gateway(replace(SLOW, adapters=("x",)), pools=pool("auto")) as world:
        backend, adapters = world.process.table.get("m/b1"), world.process.adapters
        root = backend.models["x"].root
        assert "keeps x, until another" in adapters.order("m/b1", "x", Order(keep=True))
        world.sims[0].state.loaded.clear()
        await world.until(lambda: "x" not in backend.models)
        (row,) = adapters.statuses()
        assert (row.order, row.wanted_by, row.path) == ("load", "operator", root)
        await world.until(lambda: held(world) == {"x": root})
        assert Memory(world.process.config.state).orders("m/b1")["x"].path == root


@story
async def test_a_request_for_what_an_operator_ordered_waits_while_a_server_that_lost_it_loads_it():
    async with gateway(SLOW, pools=pool("auto")) as world:
        world.process.adapters.order("m/b1", "x", Order(keep=True, path="/loras/x"))
        assert (await world.chat(model="x", max_tokens=1)).status_code == 200
        world.sims[0].state.loaded.clear()
        await world.until(lambda: "x" not in world.process.table.get("m/b1").adapters)
        reply = await world.chat(model="x", max_tokens=1)
        assert reply.status_code == 200, reply.text
        world.process.adapters.order("m/b1", "x", Order(keep=False))
        await world.until(lambda: not held(world))
        await world.until(lambda: "x" not in world.process.table.get("m/b1").adapters)
        assert (await world.chat(model="x", max_tokens=1)).status_code == 404


@story
async def test_what_a_server_has_lost_is_had_from_another_or_loaded_again_before_a_list_tells():
    async with gateway(SIM, SIM, pools=pool([lora("sql")], 2), as_shipped=True) as world:
        everywhere = {"sql": "/loras/sql"}
        await world.until(lambda: held(world) == held(world, 1) == everywhere)
        await world.until(lambda: not world.process.adapters.pools["m"].changes)
        for lost in ([0], [0, 1]):
            for place in lost:
                world.sims[place].state.loaded.clear()
            for number in range(8):  # with a list every 10 s
                reply = await world.chat(f"{number}", model="sql", max_tokens=1)
                assert reply.status_code == 200, reply.text
            await world.until(lambda: held(world) == held(world, 1) == everywhere)
            await world.until(lambda: not world.process.adapters.pools["m"].changes)


@story
async def test_what_a_server_lost_before_it_went_down_tells_nothing_of_what_it_has_when_it_is_back():
    both = replace(SIM, adapters=("sql", "fr"))
    async with gateway(both, as_shipped=True) as world:
        sim, backend = world.sims[0], world.process.table.get("m/b1")
        sim.inject("hang_before_headers:300ms@1")
        asked = start(world.chat("hello", model="sql", max_tokens=1), name="asked")
        await world.until(lambda: backend.in_flight)
        sim.state.loaded.clear()
        sim.inject("unhealthy_then_ok:1000")
        world.process.watchers.hurry("m/b1")
        await world.until(lambda: backend.phase is Phase.DOWN)
        await world.until(lambda: not backend.in_flight)
        sim.clear()
        await world.ready(1)
        assert not backend.adapters
        await asked


@story
async def test_orders_for_two_servers_that_have_an_adapter_in_different_places_hold_for_each():
    async with gateway(SIM, SIM, pools=pool("auto", 2)) as world:
        adapters, both = world.process.adapters, [{"x": "/disk/x"}, {"x": "/nfs/x"}]
        adapters.order("m/b1", "x", Order(keep=True, path="/disk/x"))
        adapters.order("m/b2", "x", Order(keep=True, path="/nfs/x"))
        await world.until(lambda: [held(world), held(world, 1)] == both)
        await world.until(lambda: all(each.state == "loaded" for each in adapters.statuses()))
        assert [each.detail for each in adapters.statuses()] == ["", ""]
        before = loads(world)
        world.sims[0].state.loaded.clear()
        await world.until(lambda: loads(world) > before and held(world))  # within milliseconds
        assert [held(world), held(world, 1)] == both


@story
async def test_what_is_not_vllm_is_asked_for_no_adapter():
    backends = "[{url: '<0>'}, {url: '<1>', engine: openai}]"
    pools = f"pools: {{m: {{adapters: [x], backends: {backends}}}}}"
    async with gateway(SIM, SIM, pools=pools) as world:
        adapters = world.process.adapters
        for order in (Order(keep=True, path="/loras/x"), Order(keep=False)):
            with pytest.raises(OrderRefused, match="it is not vLLM") as refused:
                adapters.order("m/b2", "x", order)
            assert refused.value.code == "not_vllm"
        adapters.order("m/b1", "x", Order(keep=True, path="/loras/missing"))
        await world.until(lambda: told(world, EventKind.ADAPTER_FAILED))
        assert (await world.chat(model="x", max_tokens=1)).status_code == 503
        assert "is not vLLM" in next(
            each.detail for each in adapters.statuses() if each.backend_id == "m/b2"
        )
        assert (loads(world), loads(world, 1)) == (1, 0)


# --- what operators see and say -------------------------------------------------------------------


@story
async def test_who_unloads_what_the_gateway_did_not_load_is_told_how_to_bring_it_back():
    sim = replace(SIM, adapters=("x",))
    async with gateway(sim, sim, pools=pool("auto", 2)) as world:
        adapters = world.process.adapters
        root = world.process.table.get("m/b1").models["x"].root

        def status(place):
            rows = adapters.statuses()
            return next(each for each in rows if each.backend_id == f"m/b{place}")

        assert (status(1).loaded_by, status(1).wanted_by) == ("other", None)
        said = adapters.order("m/b1", "x", Order(keep=False))
        assert f"vllm-gateway adapters load m/b1 x --path {root}" in said
        await world.until(lambda: "x" not in world.process.table.get("m/b1").adapters)
        assert (status(1).state, status(1).wanted_by) == ("not_loaded", None)
        assert status(1).detail == "an operator unloaded it there"
        assert "stays unloaded" in adapters.order("m/b1", "x", None)
        assert status(1).detail == "the gateway has no path for it"
        with pytest.raises(OrderRefused, match=f"m/b2 has it from {root}"):
            adapters.order("m/b1", "x", Order(keep=True))
        adapters.order("m/b1", "x", Order(keep=True, path=root))
        await world.until(lambda: "x" in world.process.table.get("m/b1").adapters)
        assert (status(1).loaded_by, status(1).wanted_by) == ("gateway", "operator")
        assert (status(2).loaded_by, status(2).wanted_by) == ("other", None)


async def vllm_gateway(world, *words):
    """Run a verb of the command line against the gateway; returns its exit code and what it printed."""
    program = Path(sys.executable).with_name("vllm-gateway")
    ran = await asyncio.create_subprocess_exec(
        program, *words, "--server", world.admin_url, stdout=PIPE, stderr=STDOUT
    )
    out, _ = await ran.communicate()
    return ran.returncode, " ".join(out.decode().split())


@pytest.mark.timeout(180)  # each verb is a process of its own
@partial(story, seconds=170.0)
async def test_the_command_line_lists_loads_unloads_and_leaves_it_to_the_settings():
    adapters = [lora("a", replicas=1, pin=["b1"]), lora("bad", "/loras/missing", pin=["b1"])]
    async with gateway(SIM, SIM, pools=pool(adapters, 2, most=2)) as world:
        await world.until(
            lambda: "a" in held(world) and len(told(world, EventKind.ADAPTER_FAILED)) == 2
        )
        code, said = await vllm_gateway(world, "adapters", "list")
        assert code == 0
        assert "a m/b1 loaded gateway settings 0 /loras/a" in said
        assert "a m/b2 not loaded - settings 0 /loras/a not asked for there" in said
        assert "No adapter found for /loras/missing" in said
        assert "could not load bad" in (await vllm_gateway(world, "status"))[1]
        route = await world.http.get(f"{world.admin_url}/admin/v1/route", params={"model": "bad"})
        assert {each["verdict"] for each in route.json()["backends"]} == {"adapter_failed"}

        code, said = await vllm_gateway(world, "adapters", "load", "m/b2", "a")
        assert (code, said) == (0, "m/b2 loads a, until another order comes.")
        await world.until(lambda: "a" in held(world, 1))
        code, said = await vllm_gateway(
            world, "adapters", "unload", "m/b1", "a", "--reason", "bad words"
        )
        assert (code, said) == (0, "m/b1 unloads a, until another order comes.")
        await world.until(lambda: held(world) == {})
        _, said = await vllm_gateway(world, "adapters", "list", "--adapter", "a")
        assert "an operator unloaded it there: bad words" in said
        code, said = await vllm_gateway(world, "adapters", "release", "m/b1", "a")
        assert (code, said) == (0, "No order holds for a on m/b1 any more: the settings decide.")
        await world.until(lambda: "a" in held(world))

        assert (await vllm_gateway(world, "adapters", "load", "m/b2", "zz"))[0] == 5
        assert (await vllm_gateway(world, "adapters", "load", "m/b9", "a"))[0] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["before", "under_way", "engine"])
def test_where_the_only_copy_dies_requests_go_on_once_another_server_has_the_adapter(how, stream):
    @story
    async def goes_on():
        sim, listed = SimConfig(model="m", decode_step_s=0.05), pool([lora("sql", replicas=1)], 2)
        async with gateway(sim, sim, pools=listed, as_shipped=True) as world:
            await world.until(lambda: held(world) or held(world, 1))
            await world.until(lambda: not world.process.adapters.pools["m"].changes)
            dead = 0 if held(world) else 1
            if how == "before":
                await world.sims[dead].stop()
            elif how == "engine":
                world.sims[dead].inject("die_on_prompt:first")
            asked = world.chat("first", model="sql", max_tokens=9, stream=stream, temperature=0)
            running = start(asked, name="first")
            if how == "under_way":
                await world.until(lambda: world.sims[dead].engine.running)
                await asyncio.sleep(0.2 if stream else 0)
                await world.sims[dead].stop()
            reply = await running
            assert reply.status_code == 200, reply.text
            assert '"error"' not in reply.text
            assert held(world, 1 - dead) == {"sql": "/loras/sql"}
            assert (await world.chat("next", model="sql", max_tokens=1)).status_code == 200

    goes_on()
