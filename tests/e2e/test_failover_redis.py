"""A Redis whose master dies: Sentinels, or a cluster, put a replica in its place, and gateways find it."""

import asyncio
import contextlib
import functools
import re
import signal
from types import SimpleNamespace

import pytest

from gateway.access.keyfile import make_pepper
from gateway.core.limits import KeyLimits
from gateway.sim.config import SimConfig
from gateway.sim.server import SimServer
from gateway.usage.shared import _JOURNALS as LEDGERS
from tests.e2e.test_keys_redis import ordered, replica, until
from tests.limitedgateway import LimitedGateway
from tests.limitercases import plan_of
from tests.ports import free_port
from tests.redisserver import PROGRAMS, redis_server
from tests.stories.support import story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

patient = functools.partial(story, seconds=90)
programs = pytest.mark.parametrize("program", PROGRAMS)
QUICKLY = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]


async def eventually(condition, seconds=30):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def watched(program):
    """Run a master, its replica, and a Sentinel that watches both; yields the two and the URL."""
    with (
        redis_server(*QUICKLY, program=program) as master,
        redis_server("--replicaof", f"127.0.0.1 {master.port}", program=program) as second,
    ):
        conf = second.folder / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor mymaster 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\n"
            "sentinel failover-timeout mymaster 3000\n"
        )
        with redis_server(str(conf), "--sentinel", program=program) as sentinel:
            await eventually(lambda: second.ask("ROLE")[3] == "connected")
            await eventually(lambda: sentinel.ask("SENTINEL", "REPLICAS", "mymaster"))
            yield master, second, f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster"


async def chat(http, key):
    """Send a request that must be answered; returns what it used."""
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    bearer = {"authorization": f"Bearer {key}"}
    reply = await http.post("/v1/chat/completions", json=body, headers=bearer)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["total_tokens"]


async def until_used(https, key, tokens):
    """Wait until all gateways tell that a key has used so much of its month."""
    told = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while told != [tokens] * len(https):
                bearer = {"authorization": f"Bearer {key}"}
                replies = [await http.get("/v1/key", headers=bearer) for http in https]
                told = [each.json()["standing"][0]["used"] for each in replies]
    assert told == [tokens] * len(https)


def lines_told(server):
    """Return how many lines of ledgers a server has counted."""
    with server.client() as client:
        return sum(int(n) for name, n in client.hgetall(LEDGERS).items() if name != "mark")


@programs
@patient
async def test_limits_keys_and_months_go_on_at_the_replica_that_lacked_the_last_of_them(
    tmp_path, program
):
    async with watched(program) as (master, second, url):
        make_pepper(tmp_path / "keys.yaml")
        where = SimpleNamespace(url=url)
        async with (
            SimServer(SimConfig(model="m", speed=0)) as sim,
            replica(where, tmp_path, "a", sim) as (a, to_a),
            replica(where, tmp_path, "b", sim) as (b, to_b),
        ):
            limits = {"tokens_per_month": 1_000_000}
            few = await ordered(a.key_store.create, {"name": "few", "limits": limits})
            many = await ordered(a.key_store.create, {"name": "many", "limits": limits})
            for http in (to_a, to_b):
                await until(200, http, few.key)
                await until(200, http, many.key)
            spent = sum([await chat(http, few.key) for http in (to_a, to_b)])
            await until_used((to_a, to_b), few.key, spent)
            assert await ordered(a.store.claim_restart, "p/x", "one")
            await eventually(lambda: second.ask("KEYS", "*claim*"))
            second.signal(signal.SIGSTOP)  # what follows is lost with the master
            spent += sum([await chat(http, few.key) for http in (to_a, to_b, to_b)])
            await until_used((to_a, to_b), few.key, spent)
            await eventually(lambda: lines_told(master) == 5)
            master.kill()
            second.signal(signal.SIGCONT)
            for http in (to_a, to_b):
                await chat(http, many.key)
            while not is_master(second):
                for http in (to_a, to_b):
                    await chat(http, many.key)
            await until_used((to_a, to_b), few.key, spent)
            assert not await ordered(b.store.claim_restart, "p/x", "one")
            await ordered(a.key_store.revoke, few.id)
            await until(401, to_b, few.key)
            new = await ordered(b.key_store.create, {"name": "new"})
            await until(200, to_a, new.key)
            assert lines_told(second) >= 5


# --- a cluster ------------------------------------------------------------------------------------

THIRD = 16384 // 3  # of the slots


@contextlib.asynccontextmanager
async def cluster(program):
    """Run three masters, which share the slots, and a replica of the first; yields the four."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *QUICKLY]
    with contextlib.ExitStack() as stack:
        buses = [free_port() for _ in range(4)]  # by itself a port on which others may listen
        starts = [
            redis_server(*options, "--cluster-port", f"{bus}", program=program) for bus in buses
        ]
        nodes = [*map(stack.enter_context, starts)]
        first, *_, spare = nodes
        for number, node in enumerate(nodes[:3]):
            last = 16383 if number == 2 else THIRD * (number + 1) - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", THIRD * number, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node, bus in zip(nodes[1:], buses[1:], strict=True):
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in nodes:
            await eventually(lambda node=node: is_well(node))
        spare.ask("CLUSTER", "REPLICATE", first.ask("CLUSTER", "MYID"))
        await eventually(lambda: "connected" in spare.ask("ROLE"))
        yield nodes


def is_well(node):
    told = node.ask("CLUSTER", "INFO")
    return "cluster_state:ok" in told and "cluster_known_nodes:4" in told


def tenant_at(node, slots):
    """Return a tenant whose keys have one of some slots."""
    names = (f"t{number}" for number in range(1000))
    return next(each for each in names if node.ask("CLUSTER", "KEYSLOT", f"{{t:{each}}}") in slots)


def tenants_of(node):
    with node.client() as client:
        return {re.search(r"\{t:(.*?)\}", key)[1] for key in client.scan_iter("gw1:{t:*")}


@programs
@patient
async def test_in_a_cluster_each_tenant_has_a_node_and_goes_on_where_its_slots_go(
    tmp_path, program
):
    async with cluster(program) as (first, second, third, spare):
        moving = tenant_at(first, range(THIRD))
        staying = tenant_at(first, range(THIRD, 2 * THIRD))
        limits = KeyLimits(tokens_per_day=10**7, requests_per_minute=10**7)
        plans = [plan_of(limits, f"of {each}", each, limits) for each in (moving, staying)]
        url = f"redis+cluster://127.0.0.1:{third.port},127.0.0.1:{first.port}"
        gateways = [LimitedGateway(url, tmp_path / str(number), replicas=2) for number in range(2)]
        every = [(each, plan) for each in gateways for plan in plans]

        async def answer(tokens):
            """Have each gateway answer a request of each tenant."""
            assert [await each.answers(plan, tokens) for each, plan in every] == [1] * 4

        async def until_used(tokens):
            """Wait until all gateways hear from Redis that each tenant's day has this, and no more than is in doubt."""
            told, doubtful = [None], sum(each.doubtful for each in gateways)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    while None in told or min(told) < tokens:
                        for each in gateways:
                            await each.accounts.turn()
                        found = [await each.used(plan) for each, plan in every]
                        told = [used and used[1] for used in found]
            assert None not in told
            assert tokens <= min(told) <= max(told) <= tokens + doubtful

        for each in gateways:
            await each.finds()
        await answer(10)
        await until_used(20)
        assert [tenants_of(each) for each in (first, second)] == [{moving}, {staying}]
        # The slots move while all nodes live: the old one answers MOVED.
        while not is_master(spare):  # a vote may fail
            spare.ask("CLUSTER", "FAILOVER")
            with contextlib.suppress(TimeoutError):
                await eventually(lambda: is_master(spare), 3)
        await answer(10)
        await until_used(40)
        await eventually(lambda: "connected" in first.ask("ROLE"))
        # Their master dies.
        spare.kill()
        await answer(1)
        answered = 2
        while not is_master(first):
            await answer(1)
            answered += 2
        await answer(10)
        await until_used(60 + answered)
        for each in gateways:
            await each.ends()


def is_master(node):
    return node.ask("ROLE")[0] == "master"
