"""Two gateways on a real Redis know which prompts the other one sent where."""

import asyncio
import contextlib
import pathlib
import tempfile
import time

import httpx2
import pytest

from gateway.app import build
from gateway.config.load import load_config
from gateway.observe.outlet import Outlet
from gateway.pools.health import Order
from gateway.running import run
from gateway.sim.server import SimServer
from tests import keyfiles as keys
from tests.redisserver import PROGRAMS, redis_server
from tests.stories.support import FAST, story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
GROUPS = 8


class Scene:
    """One folder with one keys file, a Redis, and two simulated backends."""

    def __init__(self, folder, redis, sims):
        self.folder, self.redis, self.sims = folder, redis, sims
        self.gateways = []
        self.key = keys.create(folder / "keys.yaml", name="test", wall_now=time.time()).key

    @contextlib.asynccontextmanager
    async def gateway(self, name, pool=""):
        path = self.folder / f"{name}.yaml"
        path.write_text(
            "version: 1\nlisten: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nkeys: {file: keys.yaml}\n"
            f"redis: {self.redis.url}\nstate: {name}\nlog: {{access: false}}\nshutdown: {{grace: 0s}}\n"
            "health: {interval: 200ms, scrape_interval: 100ms}\n"
            f"pools: {{m: {{backends: {[sim.url for sim in self.sims]}, {pool}}}}}\n"
        )
        process = build(load_config(path), path, Outlet())
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx2.AsyncClient(trust_env=False, timeout=10, headers=headers) as http:
            async with asyncio.TaskGroup() as group:
                group.create_task(run(process), name=name)
                try:
                    await process.listening.wait()
                    http.base_url = f"http://127.0.0.1:{process.public_port}"
                    one = Gateway(process, http)
                    self.gateways.append(one)
                    await until(lambda: process.table.serving()[0] == len(self.sims))
                    await until(lambda: len({each.seed for each in self.gateways}) == 1)
                    yield one
                finally:
                    process.stopping.set()


class Gateway:
    def __init__(self, process, http):
        self.process, self.http = process, http

    async def ask(self, group, question):
        system = f"You are helper number {group}. " + f"Rule {group}: be kind to trains. " * 60
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {question}"},
        ]
        body = {"model": "m", "messages": messages, "max_tokens": 2}
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    @property
    def seed(self):
        return self.process.handler.measuring.hasher.seed

    def knows(self, place):
        """Return the hashes of a backend that it knows."""
        index = self.process.table.get(f"m/b{place}").prefix_index
        return index.young | index.old

    @property
    def young(self):
        """Return the hashes that it does not tell again when they are used."""
        return set().union(*(each.prefix_index.young for each in self.process.table))

    def order(self, place, order):
        self.process.table.order(f"m/b{place}", order)


async def until(condition, seconds=15):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def asked(sim):
    return [each for each in sim.requests if b"be kind" in each.body]


@contextlib.asynccontextmanager
async def scene(**server):
    with redis_server(**server) as redis, tempfile.TemporaryDirectory() as folder:
        async with SimServer(FAST) as first, SimServer(FAST) as second:
            yield Scene(pathlib.Path(folder), redis, [first, second])


def agree(one, other):
    return all(one.knows(place) == other.knows(place) for place in (1, 2))


@pytest.mark.parametrize("program", PROGRAMS)
@story
async def test_a_prompt_that_one_gateway_sent_is_sent_to_the_same_backend_by_the_other(program):
    async with (
        scene(program=program) as found,
        found.gateway("one") as one,
        found.gateway("other") as other,
    ):
        one.order(1, Order.DRAIN)
        for group in range(GROUPS):
            await one.ask(group, "first")
        one.order(1, Order.RESUME)
        await until(lambda: len(other.knows(2)) >= 2 * GROUPS and agree(one, other))
        for group in range(GROUPS):
            await other.ask(group, "second")
        b1, b2 = found.sims
        assert (len(asked(b1)), len(asked(b2))) == (0, 2 * GROUPS)


@story
async def test_a_backend_that_one_finds_gone_is_forgotten_by_both():
    async with scene() as found, found.gateway("one") as one, found.gateway("other") as other:
        await one.ask(1, "first")
        place = 1 if one.knows(1) else 2
        await until(lambda: other.knows(place) and agree(one, other))
        one.process.table.get(f"m/b{place}").forget_prefixes()
        await until(lambda: not other.knows(place))


@story
async def test_one_that_comes_later_and_a_redis_that_comes_back_empty_are_told_of_what_is_used():
    async with scene() as found, found.gateway("one") as one:
        for group in range(GROUPS):
            await one.ask(group, "first")
        async with found.gateway("late") as late:
            # Only who has heard of it tells again what it told before.
            await until(lambda: not one.young)
            found.redis.ask("FLUSHALL")
            await until(lambda: found.redis.ask("KEYS", "gw1:{prefixes*:word"))
            for group in range(GROUPS):
                await one.ask(group, "second")
            known = one.knows(1) | one.knows(2)
            await until(lambda: len((late.knows(1) | late.knows(2)) & known) >= len(known) // 2)


@story
async def test_nothing_of_a_prompt_or_of_what_hashes_are_made_with_is_in_redis():
    async with scene() as found, found.gateway("one") as one:
        await one.ask(1, "first")
        await until(lambda: found.redis.ask("KEYS", "gw1:{prefixes*:log"))
        with found.redis.client() as client:
            names = [*client.scan_iter("gw1:{prefixes*")]
            dump = repr([names, [client.hgetall(each) for each in names]])
        seed = one.seed
        assert len(names) == 2
        for secret in ("helper", "trains", "m/b1", "127.0.0.1", str(seed), f"{seed:x}"):
            assert secret not in dump
        assert all(client.ttl(each) > 0 for each in names)
