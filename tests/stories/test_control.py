"""The watchers against simulated servers, and stubs that misbehave, on real sockets."""

import asyncio
import contextlib
import functools
import json

import pytest

from gateway.config.models import Config
from gateway.core.aio import SystemClock
from gateway.core.types import Endpoint, Phase
from gateway.pools.table import PoolTable
from gateway.sim.server import SimConfig, SimServer
from gateway.watch.discovery import Watchers
from tests import loopback
from tests.stories.stubs import free_url, page, stub

FAST = {
    "interval": "50ms",
    "timeout": "400ms",
    "scrape_interval": "30ms",
    "scrape_stale": "300ms",
    "models_interval": "60ms",
    "progress": "200ms",
}


def config(urls, **health):
    pool = {"m": {"backends": urls}}
    return Config.model_validate({"pools": pool, "health": {**FAST, **health}})


class Watched:
    """A pool table with its watchers."""

    def __init__(self, urls, **health):
        settings = config(urls, **health)
        self.table = PoolTable(SystemClock())
        self.table.apply(settings.pools, settings.health)
        self.watchers = Watchers(self.table, settings.health, SystemClock())

    def reload(self, urls):
        self.table.apply(config(urls).pools)

    def phase(self, name="b1"):
        return self.table.get(f"m/{name}").phase

    def reason(self, name="b1"):
        return self.table.get(f"m/{name}").reason

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def ready(self, name="b1"):
        await self.until(lambda: self.phase(name) is Phase.READY)


@contextlib.asynccontextmanager
async def watching(urls, **health):
    watched = Watched(urls, **health)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watched.watchers.run())
        try:
            yield watched
        finally:
            task.cancel()


def story(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            async with asyncio.timeout(20):
                await test(*args, **kwargs)

        asyncio.run(main())

    return run


# --- coming up ------------------------------------------------------------------------------------


@story
async def test_a_backend_that_answers_is_ready_with_all_it_tells():
    paths = ("/v1/chat/completions", "/v1/embeddings")
    settings = SimConfig(model="m", adapters=("lora-a",), max_model_len=2048, paths=paths)
    async with SimServer(settings) as sim, watching([sim.url]) as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert backend.window_tokens == 2048
        assert backend.adapters == ("lora-a",)
        assert backend.base_model == "m"
        assert backend.endpoints == {Endpoint.CHAT, Endpoint.EMBEDDINGS}
        assert backend.version == "0.32.0"
        await watched.until(lambda: backend.sample is not None)
        assert backend.sample.running == 0


@pytest.mark.parametrize("settings", [{"dp": 2}, {"old_metrics": True}])
@story
async def test_data_parallel_and_old_servers_show_their_load(settings):
    async with SimServer(SimConfig(model="m", **settings)) as sim, watching([sim.url]) as watched:
        await watched.until(lambda: watched.table.get("m/b1").sample is not None)
        assert watched.table.get("m/b1").sample.kv_usage_ratio == 0


@story
async def test_the_key_of_the_backend_is_sent():
    sim = SimServer(SimConfig(model="m", api_key="sesame"))
    async with sim, watching([{"url": sim.url, "api_key": "sesame"}]) as watched:
        await watched.ready()


@story
async def test_a_wrong_key_is_named_as_the_reason_for_not_starting():
    async with (
        SimServer(SimConfig(model="m", api_key="sesame")) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.until(lambda: watched.reason() == "models_http_401")
        assert watched.phase() is Phase.STARTING


@story
async def test_a_backend_that_is_not_there_yet_is_waited_for():
    async with SimServer(SimConfig(model="m")) as sim:
        sim.inject("refuse")
        async with watching([sim.url]) as watched:
            await watched.until(lambda: watched.reason() == "refused")
            assert watched.phase() is Phase.STARTING
            sim.clear()
            await watched.ready()


@story
async def test_a_server_that_lists_no_model_is_not_ready():
    async with stub(lambda path: page(b"ok")) as (url, _), watching([url]) as watched:
        await watched.until(lambda: watched.reason() == "models_garbage")
        assert watched.phase() is Phase.STARTING


@story
async def test_a_server_without_description_or_metrics_serves_all_the_same():
    models = json.dumps({"data": [{"id": "m", "parent": None, "max_model_len": 64}]}).encode()
    pages = {"/health": page(), "/v1/models": page(models)}
    missing = page(b"{}", "404 Not Found")
    async with (
        stub(lambda path: pages.get(path, missing)) as (url, heads),
        watching([url]) as watched,
    ):
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert (backend.endpoints, backend.version, backend.sample) == (None, None, None)
        asked = sum(head.startswith(b"GET /v1/models ") for head in heads)
        await watched.until(
            lambda: sum(head.startswith(b"GET /v1/models ") for head in heads) > asked + 1
        )
        # What a server says it has not is not asked for again and again.
        assert sum(head.startswith(b"GET /openapi.json ") for head in heads) == 1


@story
async def test_a_description_that_came_too_late_is_read_with_the_next_model_list():
    models = json.dumps({"data": [{"id": "m", "parent": None, "max_model_len": 64}]}).encode()
    openapi = json.dumps({"paths": {"/v1/chat/completions": {"post": {}}}}).encode()
    pages = {
        "/health": page(),
        "/v1/models": page(models),
        "/version": page(b'{"version":"1"}'),
    }
    slow = True

    def answer(path):
        if path == "/openapi.json":
            return None if slow else page(openapi)
        return pages.get(path, page(b"", "404 Not Found"))

    async with stub(answer) as (url, _), watching([url], timeout="100ms") as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        assert backend.endpoints is None
        slow = False
        await watched.until(lambda: backend.endpoints == {Endpoint.CHAT})
        assert backend.version == "1"


# --- going down and coming back -------------------------------------------------------------------


@story
async def test_a_backend_that_refuses_goes_down_and_comes_back_with_its_new_models():
    async with (
        SimServer(SimConfig(model="m", adapters=("lora-a",))) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.ready()
        sim.inject("refuse")
        await watched.until(lambda: watched.phase() is Phase.DOWN)
        assert watched.reason() == "refused"
        sim.clear()
        sim.inject("lost_adapter")
        await watched.ready()
        assert watched.table.get("m/b1").adapters == ()


@story
async def test_an_unhealthy_backend_is_down_with_its_status():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        sim.inject("health_500")
        await watched.until(lambda: watched.phase() is Phase.DOWN)
        assert watched.reason() == "http_500"


@story
async def test_a_lost_adapter_is_not_routed_any_more_and_the_backend_stays():
    async with (
        SimServer(SimConfig(model="m", adapters=("lora-a",))) as sim,
        watching([sim.url]) as watched,
    ):
        await watched.ready()
        epoch = watched.table.epoch
        sim.inject("lost_adapter")
        await watched.until(lambda: not watched.table.get("m/b1").adapters)
        assert watched.phase() is Phase.READY
        assert watched.table.epoch > epoch


@story
async def test_a_frozen_engine_is_down_though_health_is_200_and_ready_when_it_moves():
    async with (
        SimServer(SimConfig(model="m", decode_step_s=0.02)) as sim,
        watching([sim.url]) as watched,
        loopback.client() as http,
    ):
        await watched.ready()
        body = {"model": "m", "prompt": "hello", "max_tokens": 2000}
        async with asyncio.TaskGroup() as group:
            request = http.post(f"{sim.url}/v1/completions", json=body, timeout=30)
            task = group.create_task(request)
            backend = watched.table.get("m/b1")
            await watched.until(lambda: backend.sample is not None and backend.sample.running)
            await asyncio.sleep(0.3)
            assert watched.phase() is Phase.READY
            sim.inject("frozen")
            await watched.until(lambda: watched.phase() is Phase.DOWN)
            assert watched.reason() == "no_progress"
            sim.clear()
            await watched.ready()
            task.cancel()


@story
async def test_a_lone_prompt_that_takes_longer_to_read_than_the_patience_is_progress():
    slow = SimConfig(model="m", prefill_tokens_per_s=2000.0, max_batched_tokens=64)
    async with (
        SimServer(slow) as sim,
        watching([sim.url]) as watched,
        loopback.client() as http,
    ):
        await watched.ready()
        body = {"model": "m", "prompt": [7] * 3000, "max_tokens": 2}
        reply = await http.post(f"{sim.url}/v1/completions", json=body, timeout=30)
        assert reply.json()["usage"]["prompt_tokens"] == 3000
        assert all(each.after is not Phase.DOWN for each in watched.table.transitions)
        shown = watched.table.get("m/b1").sample
        assert shown is not None
        assert sim.engine.totals.iterations == 2  # none for the other 46 chunks


@story
async def test_garbage_metrics_leave_the_load_unknown_and_the_backend_in_service():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        await watched.until(lambda: backend.sample is not None)
        sim.inject("garbage_metrics")
        await watched.until(lambda: backend.stale(SystemClock.now()))
        assert watched.phase() is Phase.READY
        sim.clear()
        await watched.until(lambda: not backend.stale(SystemClock.now()))


@story
async def test_one_silent_backend_delays_no_other():
    async with (
        stub(lambda path: None) as (silent, _),
        SimServer(SimConfig(model="m")) as sim,
        watching([silent, sim.url], timeout="60s") as watched,
    ):
        await watched.ready("b2")
        backend = watched.table.get("m/b2")
        await watched.until(lambda: backend.scrape_count > 5)
        assert watched.phase("b1") is Phase.STARTING


# --- membership -----------------------------------------------------------------------------------


@story
async def test_watchers_follow_the_configuration():
    one, two = SimServer(SimConfig(model="m")), SimServer(SimConfig(model="m"))
    async with one, two, watching([one.url]) as watched:
        await watched.ready()
        watched.reload([one.url, two.url])
        await watched.ready("b2")
        watched.reload([{"name": "b2", "url": two.url}])
        for _ in range(2):  # what was on its way to the first one has come by the second time
            seen, other = len(one.requests), len(two.requests)
            await watched.until(lambda n=other: len(two.requests) > n + 10)
        assert len(one.requests) == seen


@story
async def test_what_the_old_server_says_is_not_taken_for_the_new_one_of_that_name():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        watched.reload([free_url()])
        await watched.until(lambda: watched.reason() == "refused")
        assert watched.phase() is Phase.STARTING
        assert watched.table.get("m/b1").sample is None


@story
async def test_other_intervals_take_effect_without_a_restart():
    async with SimServer(SimConfig(model="m")) as sim, watching([sim.url]) as watched:
        await watched.ready()
        backend = watched.table.get("m/b1")
        watched.watchers.health = config([sim.url], scrape_interval="30s").health
        count = backend.scrape_count
        await watched.until(lambda: backend.scrape_count > count)  # the one that was due
        await asyncio.sleep(0.2)
        assert backend.scrape_count == count + 1
