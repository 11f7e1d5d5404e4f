"""The keys that replicas share, on a real Redis."""

import asyncio
import contextlib
import json
import logging
import pathlib
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import httpx2
import pytest

from gateway.access import keyscripts as scripts
from gateway.access.keyfile import make_pepper, read_pepper
from gateway.app import build
from gateway.config.load import load_config
from gateway.core.aio import SystemClock
from gateway.observe.outlet import Outlet
from gateway.running import run
from gateway.sim.config import SimConfig
from gateway.sim.server import SimServer
from gateway.store.scripts import BUDGET_S
from gateway.store.shared import StoreUnavailable
from tests.faults.toxic import Toxic, toxic
from tests.redisserver import PROGRAMS, patient_store, redis_server
from tests.sharedkeycases import PEPPER, SharedDesk, SharedKeyCases
from tests.stories.served import program
from tests.stories.support import story

pytestmark = pytest.mark.e2e

GATEWAY = pathlib.Path(sys.executable).with_name("vllm-gateway")


class RedisDesk(SharedDesk):
    def __init__(self, server):
        self.server = server
        self.link = patient_store(server.url, SystemClock()).link
        super().__init__(self.link)

    def close(self):
        self.runner.run(self.link.close())
        super().close()


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request):
    with redis_server(program=request.param) as server:
        yield server


@pytest.fixture
def desk(server):
    server.ask("FLUSHALL")
    desk = RedisDesk(server)
    yield desk
    desk.close()


class TestRedis(SharedKeyCases):
    def lose(self, desk):
        desk.server.ask("FLUSHALL")

    def lose_records(self, desk):
        desk.server.ask("DEL", scripts.RECORDS)

    def plant(self, desk, key_id, text):
        desk.server.ask("HSET", scripts.RECORDS, key_id, text)

    def test_a_dump_of_redis_holds_neither_keys_nor_the_pepper(self, desk):
        made = desk.create({"name": "ci"})
        again = desk.rotate(made.id, 60.0)
        with desk.server.client() as client:
            names = [*client.scan_iter("*")]
            assert all(name.startswith("gw1:{keys}:") for name in names)
            dump = repr(
                [
                    names,
                    client.hgetall(scripts.RECORDS),
                    client.lrange(scripts.HISTORY, 0, -1),
                    client.get(scripts.PEPPER),
                ]
            )
        for key in (made.key, again.key):
            assert key[12:55] not in dump
        assert PEPPER.decode() not in dump
        assert PEPPER.hex() not in dump
        assert made.record.secrets[0].digest.hex() in dump  # that alone proves nothing


# --- gateways -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def replica(server, folder, name, sim, ready=True):
    """Run a gateway with shared keys, whose pepper is in the folder; yields it, and a client of it."""
    path = folder / f"{name}.yaml"
    path.write_text(
        "version: 1\nlisten: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nkeys: {shared: true}\n"
        f"redis: {server.url}\nstate: {name}\nlog: {{access: false}}\nshutdown: {{grace: 0s}}\n"
        "tiers: {gold: {priority: 5, addresses: [127.0.0.0/8]}}\n"
        "limits: {failed_keys: 1000000}\n"  # tests ask with a key until it is known, or no more
        f"health: {{interval: 200ms, scrape_interval: 100ms}}\npools: {{m: {{backends: ['{sim.url}']}}}}\n"
    )
    process = build(load_config(path), path, Outlet())
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=10) as http,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(run(process), name=name)
        try:
            await process.listening.wait()
            http.base_url = f"http://127.0.0.1:{process.public_port}"
            async with asyncio.timeout(15):
                while ready and not process.readiness().ready:
                    await asyncio.sleep(0.02)
            yield process, http
        finally:
            process.stopping.set()


async def ordered(order, *args):
    """Give an order until the store takes it: a busy machine may keep it from that, or a Sentinel name no master."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await order(*args)
            await asyncio.sleep(0.1)


async def status(http, key):
    """Return the status of a request that costs no tokens."""
    reply = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return reply.status_code


async def until(wanted, http, key):
    async with asyncio.timeout(15):
        while await status(http, key) != wanted:
            await asyncio.sleep(0.02)


@story
async def test_a_key_that_one_gateway_makes_or_revokes_is_known_to_all():
    with tempfile.TemporaryDirectory() as made_folder, redis_server() as server:
        folder = pathlib.Path(made_folder)
        make_pepper(folder / "keys.yaml")
        async with (
            SimServer(SimConfig(model="m")) as sim,
            replica(server, folder, "a", sim) as (a, to_a),
            replica(server, folder, "b", sim) as (_, to_b),
        ):
            made = await ordered(a.key_store.create, {"name": "ci", "tier": "gold"})
            for http in (to_a, to_b):
                await until(200, http, made.key)
            again = await ordered(a.key_store.rotate, made.id, 0.0)
            for http in (to_a, to_b):
                await until(200, http, again.key)
                assert await status(http, made.key) == 401
            chat = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
            bearer = {"authorization": f"Bearer {again.key}"}
            assert (
                await to_b.post("/v1/chat/completions", json=chat, headers=bearer)
            ).status_code == 200
            await ordered(a.key_store.update, made.id, {"addresses": ["10.0.0.0/8"]})
            for http in (to_a, to_b):
                await until(403, http, again.key)
            await ordered(a.key_store.revoke, made.id)
            for http in (to_a, to_b):
                await until(401, http, again.key)


def is_revoked_in(copy, key_id):
    """Whether a copy tells of a key that it is revoked; a gateway writes its first one some time after its start."""
    told = copy.read_text().splitlines()[1:] if copy.exists() else []
    return any(key_id in each and '"revoked"' in each for each in told)


@story
async def test_a_gateway_starts_with_its_copy_without_redis_and_without_a_copy_waits_for_it():
    with tempfile.TemporaryDirectory() as made_folder, redis_server() as server:
        folder = pathlib.Path(made_folder)
        make_pepper(folder / "keys.yaml")
        async with SimServer(SimConfig(model="m")) as sim:
            async with replica(server, folder, "a", sim) as (a, http):
                made = await ordered(a.key_store.create, {"name": "ci"})
                gone = await ordered(a.key_store.create, {"name": "gone"})
                await ordered(a.key_store.revoke, gone.id)
                await until(200, http, made.key)
                async with asyncio.timeout(10):
                    while not is_revoked_in(folder / "a/keys.json", gone.id):
                        await asyncio.sleep(0.02)
            server.kill()
            async with replica(server, folder, "a", sim) as (_, http):
                assert await status(http, made.key) == 200
                assert await status(http, gone.key) == 401
            async with replica(server, folder, "b", sim, ready=False) as (b, http):
                assert await status(http, made.key) == 503
                assert not b.readiness().ready
                async with replica(server, folder, "a", sim) as (_, to_a):
                    server.start()  # empty, as it has no disk: the first gateway tells it the keys
                    await until(200, http, made.key)
                    assert await status(http, gone.key) == 401
                    assert b.readiness().ready


def test_revocations_hold_in_every_gateway_within_a_second():
    """200 of them, each measured from its confirmation to the last request that still passed."""

    async def measured():
        with tempfile.TemporaryDirectory() as made_folder, redis_server() as server:
            folder = pathlib.Path(made_folder)
            make_pepper(folder / "keys.yaml")
            async with (
                SimServer(SimConfig(model="m")) as sim,
                replica(server, folder, "a", sim) as (a, to_a),
                replica(server, folder, "b", sim) as (b, to_b),
            ):
                made = [
                    await ordered(a.key_store.create, {"name": f"n{number}"})
                    for number in range(200)
                ]
                for http in (to_a, to_b):
                    await until(200, http, made[-1].key)
                loop, took = asyncio.get_running_loop(), []
                for number, each in enumerate(made):
                    store = (a, b)[number % 2].key_store
                    await ordered(store.revoke, each.id)
                    at = loop.time()
                    for http in (to_a, to_b):
                        while await status(http, each.key) != 401:
                            await asyncio.sleep(0.005)
                    took.append(loop.time() - at)
                return sorted(took)

    async def main():
        async with asyncio.timeout(50):
            return await measured()

    took = asyncio.run(main())
    print(
        f"revocation: p50 {took[100] * 1000:.0f} ms, p99 {took[197] * 1000:.0f} ms, most {took[-1] * 1000:.0f} ms"
    )
    assert took[197] <= 1.0


# --- the command line -----------------------------------------------------------------------------


def test_the_verbs_work_on_shared_keys_and_a_file_can_be_imported(tmp_path):
    with redis_server() as server:
        file = tmp_path / "gateway.yaml"
        head = f"redis: {server.url}\npools: {{m: {{backends: ['http://127.0.0.1:1']}}}}\n"

        def verb(*words, code=0):
            done = subprocess.run(
                [GATEWAY, "keys", *words, "-c", file], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == code, done.stderr
            return done.stdout, done.stderr

        file.write_text(head + "keys: {file: keys.yaml}\n")
        old = verb("create", "old")[0].strip()
        verb("import", code=1)
        file.write_text(head + "keys: {shared: true}\n")
        assert "1 keys are taken over, 0 were there" in verb("import")[1]
        assert "0 keys are taken over, 1 were there" in verb("import")[1]
        new = json.loads(verb("create", "new", "--limit", "requests_per_minute=5", "-o", "json")[0])
        verb("update", new["id"], "--owner", "ann")
        listed = json.loads(verb("list", "-o", "json")[0])
        assert sorted(each["name"] for each in listed) == ["new", "old"]
        shown = json.loads(verb("show", new["id"], "-o", "json")[0])
        assert (shown["owner"], shown["settings"]["limits"]) == ("ann", {"requests_per_minute": 5})
        assert "requests_per_minute" in verb("effective", new["id"])[0]
        again = verb("rotate", old[3:11], "--grace", "1h")[0].strip()
        assert again[3:11] == old[3:11]
        verb("revoke", new["id"])
        assert verb("revoke", "nobody12", code=4)[1]
        pepper = tmp_path / "keys.yaml.pepper"
        pepper.rename(tmp_path / "kept")
        file.write_text(head + "keys: {shared: true, file: other.yaml}\n")
        assert "No such file" in verb("create", "x", code=3)[1]
        (tmp_path / "kept").rename(pepper)
        file.write_text(head + "keys: {shared: true}\n")
        server.kill()
        assert "does not answer: " in verb("list", code=1)[1]


@story
async def test_the_verbs_wait_for_a_redis_that_is_far_away(tmp_path):
    """Requests would not wait so long for it, and people do."""
    with redis_server() as server:
        async with toxic(f"http://127.0.0.1:{server.port}") as proxy:
            proxy.down = Toxic(latency_s=2 * BUDGET_S)
            url = f"redis://{proxy.url.removeprefix('http://')}/0"
            file = tmp_path / "gateway.yaml"
            pools = "pools: {m: {backends: ['http://127.0.0.1:1']}}"
            file.write_text(f"redis: {url}\nkeys: {{shared: true}}\n{pools}\n")
            told = await program("keys", "create", "ci", "-c", str(file))
            # Beside a word on the other stream.
            made = re.search(r"^gw_(\w{8})_", told, re.MULTILINE)
            assert made, told
            assert made[1] in await program("keys", "list", "-c", str(file))


@story
async def test_a_gateway_that_is_far_from_redis_hears_of_changes_and_makes_them(tmp_path):
    make_pepper(tmp_path / "keys.yaml")
    with redis_server() as server:
        async with (
            toxic(f"http://127.0.0.1:{server.port}") as proxy,
            SimServer(SimConfig(model="m")) as sim,
        ):
            proxy.down = Toxic(latency_s=2 * BUDGET_S)
            behind = SimpleNamespace(url=proxy.url.replace("http:", "redis:"))
            async with (
                replica(behind, tmp_path, "far", sim) as (far, http),
                replica(server, tmp_path, "near", sim) as (near, _),
            ):
                made = await ordered(near.key_store.create, {"name": "ci"})
                await until(200, http, made.key)
                await ordered(near.key_store.revoke, made.id)
                await until(401, http, made.key)
                own = await ordered(far.key_store.create, {"name": "own"})
                await until(200, http, own.key)


@story
async def test_a_user_who_may_neither_publish_nor_subscribe_will_do():
    user = (
        "--user gateway on >s3cret ~gw1:* +ping +eval +evalsha +@string +@hash +@sortedset +@list +del"
        " +pttl +pexpire +time"
    )
    with tempfile.TemporaryDirectory() as made_folder, redis_server(*user.split()) as server:
        server.url = server.url.replace("//", "//gateway:s3cret@")
        folder = pathlib.Path(made_folder)
        make_pepper(folder / "keys.yaml")
        async with (
            SimServer(SimConfig(model="m")) as sim,
            replica(server, folder, "a", sim) as (a, _),
            replica(server, folder, "b", sim) as (_, http),
        ):
            made = await ordered(a.key_store.create, {"name": "ci"})
            await until(200, http, made.key)
            await ordered(a.key_store.revoke, made.id)
            await until(401, http, made.key)


@story
async def test_no_log_metric_reply_file_or_key_of_redis_holds_a_secret_or_the_pepper(caplog):
    caplog.set_level(logging.DEBUG)
    with tempfile.TemporaryDirectory() as made_folder, redis_server() as server:
        folder = pathlib.Path(made_folder)
        make_pepper(folder / "keys.yaml")
        async with (
            SimServer(SimConfig(model="m")) as sim,
            replica(server, folder, "a", sim) as (a, http),
        ):
            limits = {"requests_per_minute": 60, "concurrent_requests": 4}
            made = await ordered(a.key_store.create, {"name": "ci", "limits": limits})
            again = await ordered(a.key_store.rotate, made.id, 60.0)
            await until(200, http, again.key)
            shown = []
            chat = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
            for key in (made.key, again.key, again.key[:-1] + "x", again.key[:-7]):
                bearer = {"authorization": f"Bearer {key}"}
                for reply in (
                    await http.post("/v1/chat/completions", json=chat, headers=bearer),
                    await http.get("/v1/key", headers=bearer),
                    await http.get("/nowhere", headers=bearer),
                ):
                    shown.append(f"{reply.headers} {reply.text}")
            a.ledger.post()
            await a.last_used.write()
            admin = f"http://127.0.0.1:{a.admin_port}"
            for path in ("/metrics", "/admin/v1/overview", "/admin/v1/config"):
                shown.append((await http.get(admin + path)).text)
            with server.client() as client:
                for name in client.scan_iter("*"):
                    shown.append(f"{name} {_value(client, name)}")
            async with asyncio.timeout(10):
                while not (folder / "a/keys.json").exists():
                    await asyncio.sleep(0.02)
        pepper = (folder / "keys.yaml.pepper").read_text().strip()
        digests = [each.digest.hex() for each in again.record.secrets]
        shown += [f"{each.getMessage()} {each.__dict__}" for each in caplog.records]
        files = [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".pepper"]
        written = [each.read_text(errors="replace") for each in files]
        for secret in (
            made.key[12:55],
            again.key[12:55],
            pepper,
            read_pepper(folder / "keys.yaml").hex(),
        ):
            assert not [each for each in shown + written if secret in each]
        of_redis = [each for each in shown if each.startswith("gw1:{keys}:records ")]
        assert any(digests[0] in each for each in of_redis)
        for digest in digests:
            assert not [each for each in shown if digest in each and each not in of_redis]


def _value(client, name):
    kind = client.type(name)
    read = {
        "string": client.get,
        "hash": client.hgetall,
        "list": lambda key: client.lrange(key, 0, -1),
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
    }[kind]
    return read(name)
