"""Requests go where the engines tell that they hold the prompt; where they tell nothing, by what was sent."""

import asyncio
import contextlib
import dataclasses
import json

from tokenizers import Tokenizer

from gateway.access.salt import salt_for
from gateway.core.aio import SystemClock
from gateway.prefix.ranked import precise_engines
from gateway.process import reload
from gateway.watch.engine_events import EngineEvents
from tests import loopback
from tests.kvengine import Engine
from tests.stories.fakeevents import Publisher
from tests.stories.stubs import page, stub
from tests.stories.support import FAST, gateway, story
from tests.unit.test_tokens import folder  # noqa: F401 - the fixture

PROMPT = "Be kind to trains. " * 20


@contextlib.asynccontextmanager
async def publishers(count=2):
    made = [Publisher(Engine()) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def pools(publishers, folder, **more):  # noqa: F811
    backends = [
        {
            "url": f"<{place}>",
            "kv_events": {
                "endpoint": f"tcp://*:{each.port}",
                "replay_endpoint": f"tcp://*:{each.replay_port}",
            },
        }
        for place, each in enumerate(publishers)
    ]
    pool = {"backends": backends, "prefix": "precise", "tokenizer": str(folder), **more}
    return "pools: " + json.dumps({"m": pool})


def ids(folder, text):  # noqa: F811
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(text).ids


async def follows(world):
    # A busy machine may not read a prompt within the usual time; then it would go by what was sent.
    world.process.handler.measuring = dataclasses.replace(
        world.process.handler.measuring, read_s=10.0
    )
    backends = list(world.process.table)
    await world.until(lambda: all(each.prefix_index.knows for each in backends))


async def ask(world, text, **more):
    body = {"model": "m", "prompt": text, "max_tokens": 1, **more}
    reply = await world.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text


def asked(world):
    return [len(sim.received("/v1/completions")) for sim in world.sims]


async def kv_events(world):
    async with loopback.client() as http:
        told = (await http.get(world.admin_url + "/admin/v1/overview")).json()
    return [each["kv_events"] for each in told["pools"][0]["backends"]]


async def tell(world, publisher, place, *prompt):
    """Have an engine read a prompt that nobody sent through the gateway, and tell of it."""
    await publisher.send(publisher.engine.read((*prompt, None, None)[:3]))
    mirror = [*world.process.table][place].prefix_index.follower.mirror
    await world.until(lambda: len(mirror) == len(set(publisher.engine.cached)))


@story
async def test_a_prompt_goes_where_an_engine_tells_that_it_is(folder):  # noqa: F811
    async with publishers() as told, gateway(FAST, FAST, pools=pools(told, folder)) as world:
        await follows(world)
        await tell(world, told[1], 1, ids(folder, PROMPT))
        for question in range(8):
            await ask(world, PROMPT + str(question))
        assert asked(world) == [0, 8]
        other = "Something else. " * 20
        await tell(world, told[0], 0, ids(folder, other))
        for question in range(4):
            await ask(world, other + str(question))
        assert asked(world) == [4, 8]
        await world.settled()


@story
async def test_a_prompt_that_an_engine_has_thrown_away_is_not_sought_there(folder):  # noqa: F811
    async with publishers() as told, gateway(FAST, FAST, pools=pools(told, folder)) as world:
        await follows(world)
        await tell(world, told[0], 0, ids(folder, PROMPT))
        await ask(world, PROMPT + "?")
        await told[0].send(told[0].engine.clear())
        mirror = [*world.process.table][0].prefix_index.follower.mirror
        await world.until(lambda: len(mirror) == 0)
        await tell(world, told[1], 1, ids(folder, PROMPT))
        for question in range(4):
            await ask(world, PROMPT + str(question))
        assert asked(world) == [1, 4]


@story
async def test_tenants_apart_find_only_blocks_with_their_own_salt(folder):  # noqa: F811
    async with publishers() as told:
        async with gateway(FAST, FAST, pools=pools(told, folder, prefix_cache="per_tenant")) as world:  # fmt: skip
            await follows(world)
            tokens = ids(folder, PROMPT)
            secret = world.process.handler.settings.keys.salting
            await tell(world, told[0], 0, tokens)
            await tell(world, told[1], 1, tokens, None, salt_for(secret, "test"))
            for question in range(6):
                await ask(world, PROMPT + str(question))
            assert asked(world) == [0, 6]


@story
async def test_without_events_what_was_sent_decides(folder):  # noqa: F811
    async with publishers() as told, gateway(FAST, FAST, pools=pools(told, folder)) as world:
        await follows(world)
        assert [each["known"] for each in await kv_events(world)] == [True, True]
        await ask(world, PROMPT)
        first = asked(world).index(1)
        await told[0].close()
        await told[1].close()
        await world.until(lambda: not any(each.prefix_index.knows for each in world.process.table))
        assert [each["known"] for each in await kv_events(world)] == [False, False]
        for question in range(4):
            await ask(world, PROMPT + str(question))
        assert asked(world)[first] == 5


@story
async def test_of_several_engines_all_are_followed_or_none(folder):  # noqa: F811
    two = dataclasses.replace(FAST, dp=2)
    async with publishers(1) as told, gateway(two, pools=pools(told, folder)) as world:
        (backend,) = world.process.table
        await world.until(lambda: len(precise_engines(backend.prefix_index)) == 2)
        await asyncio.sleep(1.5)  # longer than between two looks
        assert [each["engines"] for each in await kv_events(world)] == [0]
        await ask(world, PROMPT)


@story
async def test_a_reload_begins_and_ends_it(folder):  # noqa: F811
    async with publishers() as told, gateway(FAST, FAST, pools=pools(told, folder)) as world:
        await follows(world)
        text = world.path.read_text()
        world.path.write_text(text.replace('"precise"', '"approximate"'))
        assert (await reload(world.process)).done
        assert not any(hasattr(each.prefix_index, "follower") for each in world.process.table)
        world.path.write_text(text)
        assert (await reload(world.process)).done
        await follows(world)


class OddOnce(dict):
    """Settings of pools that fail when they are read for the first time."""

    reads = 0

    def get(self, name, default=None):
        self.reads += 1
        if self.reads == 1:
            raise RuntimeError("a bug")
        return super().get(name, default)


@story
async def test_a_look_that_fails_does_not_end_the_following_nor_the_gateway():
    async with publishers(1) as made, gateway(FAST, pools=pools(made, "")) as world:
        odd = OddOnce(world.process.config.pools)
        follows_too = EngineEvents(world.process.table, odd, SystemClock())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(follows_too.run(), name="follows")
            await world.until(lambda: odd.reads > 1)
            task.cancel()


@story
async def test_a_page_of_sources_that_fails_ends_nothing(folder):  # noqa: F811
    """What was told before counts until the server says otherwise."""
    pages = {"/v1/models": page(json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode())}  # fmt: skip
    asked = []

    def answer(path):
        asked.append(path)
        return pages.get(path, page())

    async def answers_next(world, with_page):
        pages["/kv_event_sources"] = with_page
        looks = asked.count("/kv_event_sources")
        # The second look from now on begins once the first has taken its page in.
        await world.until(lambda: asked.count("/kv_event_sources") > looks + 1, seconds=20)

    async with publishers(1) as (told,), stub(answer) as (url, _):
        ends = {"endpoint": f"tcp://*:{told.port}", "replay_endpoint": f"tcp://*:{told.replay_port}"}  # fmt: skip
        sources = {"0": {"enable_kv_cache_events": True, "publisher": "zmq", **ends}}
        pages["/kv_event_sources"] = page(json.dumps(sources).encode())
        pool = {"backends": [url], "prefix": "precise", "tokenizer": str(folder)}
        async with gateway(pools="pools: " + json.dumps({"m": pool}), wait=False) as world:
            await world.ready(1)
            await follows(world)
            follower = next(iter(world.process.table)).prefix_index.follower
            await answers_next(world, page(status="500 Broken"))
            assert next(iter(world.process.table)).prefix_index.follower is follower
            await answers_next(world, page(status="404 Not Found"))
            assert next(iter(world.process.table)).prefix_index.follower is None
