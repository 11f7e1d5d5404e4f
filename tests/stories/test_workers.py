"""Several processes behind one listener: real processes, real sockets."""

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import httpx2
import pytest

from gateway.core.limits import KeyLimits
from gateway.sim.server import SimConfig
from gateway.workers import parent
from tests import keyfiles, loopback
from tests.ports import free_port
from tests.stories.served import PROGRAM, runs, served
from tests.stories.support import FAST
from tests.stories.support import story as story_within
from tests.stories.test_upgrade import launches, records

pytestmark = pytest.mark.timeout(180)
story = functools.partial(story_within, seconds=170.0)  # processes start, and a machine may be busy
TWO = "workers: 2\nshutdown: {grace: 3s}"
PATIENCE_S = 60  # whoever answers operators may have to start first


def client(world, **more):
    headers = {"authorization": f"Bearer {world.key}"}
    return loopback.client(timeout=30, base_url=world.url, headers=headers, **more)


async def ask(http, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}
    return await http.post("/v1/chat/completions", json=body)


def limited(**limits):
    """Return what starts a gateway whose key has limits."""

    def starts(world):
        made = keyfiles.create(world.folder / "keys.yaml", name="ci", limits=KeyLimits(**limits))
        world.key = made.key
        world.start()

    return starts


async def admin(world, path="/admin/v1/overview"):
    async with loopback.client(base_url=world.admin_url, timeout=PATIENCE_S) as http:
        return (await http.get(path)).json()


async def order(world, path, body):
    async with loopback.client(base_url=world.admin_url, timeout=PATIENCE_S) as http:
        return await http.post(f"/admin/v1/{path}", json=body)


async def workers(world, count=2):
    """Return the workers' processes by their numbers, once so many are heard of and no more."""
    async with asyncio.timeout(60):
        while True:
            told = [each for each in (await admin(world))["store"]["replicas"] if each["alive"]]
            found = {each["worker"]: each["pid"] for each in told}
            if len(told) == len(found) == count and all(map(runs, found.values())):
                return found
            await asyncio.sleep(0.05)


async def all_asked(world, *, until, seconds=60, **more):
    """Ask over new connections until `until` says of the replies that it is enough."""
    async with asyncio.timeout(seconds):
        replies = []
        while not until(replies):
            limits = httpx2.Limits(max_keepalive_connections=0)
            async with client(world, limits=limits) as http:
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(ask(http, **more)) for _ in range(8)]
            replies += [each.result() for each in asked]
        return replies


async def kill(world, pid):
    """Kill one process, and wait until it is gone: it may run on for a moment."""
    os.kill(pid, signal.SIGKILL)
    await world.until(lambda: not runs(pid))


def chats(sim):
    return [each for each in sim.requests if each.path == "/v1/chat/completions"]


def in_state(overview, name="b1"):
    return next(each for each in overview["pools"][0]["backends"] if each["name"] == name)


@story
async def test_workers_serve_one_address_and_end_together():
    async with served(FAST, extra=TWO) as world:
        found = await workers(world)
        assert set(found) == {1, 2}
        assert world.pids[0] not in found.values()
        async with client(world) as http:
            assert (await ask(http)).status_code == 200
        os.kill(world.pids[0], signal.SIGTERM)
        await world.until(lambda: not any(map(runs, found.values())))
        await world.until(lambda: world.started.poll() == 0)


@story
async def test_a_worker_that_dies_is_started_again_while_the_other_serves():
    async with served(FAST, extra=TWO) as world:
        before = await workers(world)
        for number in (2, 1):  # the leading one last
            killed = before[number]
            await kill(world, killed)
            async with client(world) as http:
                assert (await ask(http)).status_code == 200
            after = await workers(world)
            assert after[number] != killed
            other = 3 - number
            assert after[other] == before[other]
            before = after
        assert [each["worker"] for each in world.lines("worker_ended")] == [2, 1]


@story
async def test_a_drain_holds_in_all_workers():
    async with served(FAST, FAST, extra=TWO) as world:
        await workers(world)
        drained, other = world.sims
        assert (await order(world, "backends/m/b1:drain", {"reason": "test"})).status_code < 300
        await agree(world, lambda told: in_state(told)["phase"] == "draining")
        replies = await all_asked(world, until=lambda replies: len(replies) >= 40)
        assert {each.status_code for each in replies} == {200}
        assert not chats(drained)
        assert len(chats(other)) == len(replies)


@story
async def test_a_planned_restart_waits_for_what_all_workers_carry(tmp_path):
    marker = tmp_path / "restarted"
    sim = SimConfig(model="m", port=free_port(), speed=1)
    backend = {
        "url": f"http://127.0.0.1:{sim.port}",
        "restart": {"command": ["touch", str(marker)]},
    }
    pools = "pools: " + json.dumps({"m": {"backends": [backend]}})
    async with served(sim, extra=TWO, pools=pools) as world:
        await workers(world)
        (server,), ends = world.sims, []

        def carries():
            return any(each.ended_at is None for each in chats(server))

        async def read(number):
            body = {"stream": True, "max_tokens": 600 + 20 * number, "ignore_eos": True}
            async with client(world) as http:
                reply = await ask(http, **body)
                ends.append(b'"finish_reason":"length"' in reply.content)

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(read(number))
            await world.until(lambda: len(chats(server)) == 8)
            ordered = await order(world, "backends/m/b1:restart", {"force": True})
            assert ordered.status_code < 300, ordered.text
            while carries():
                assert not (marker.exists() and carries())  # looked at in this order
                await asyncio.sleep(0.02)
        assert ends == [True] * 8
        await world.until(marker.exists, 60)


@story
async def test_an_upgrade_replaces_all_workers_and_refuses_nobody():
    async with served(FAST, extra=TWO) as world:
        before = await workers(world)
        done = asyncio.Event()
        statuses = []

        async def keep_asking():
            limits = httpx2.Limits(max_keepalive_connections=0)
            async with client(world, limits=limits) as http:
                while not done.is_set():
                    statuses.append((await ask(http)).status_code)
                    await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(keep_asking())
            try:
                ran = await world.upgrade()
                assert ran.returncode == 0, ran.stderr
                await world.until(lambda: not any(map(runs, before.values())))
            finally:
                done.set()
        assert set(statuses) == {200}
        after = await workers(world)
        assert not set(after.values()) & set(before.values())
        await kill(world, after[2])  # the parent knows the new ones as well
        assert (await workers(world))[2] not in {before[2], after[2]}


@story
async def test_why_a_request_was_refused_is_told_whichever_worker_refused_it():
    async with served(FAST, extra=TWO) as world:
        await workers(world)
        kept = {}
        for place in range(16):  # each over a connection of its own
            async with client(world) as http:
                refused = await ask(http, model="unknown")
                assert refused.status_code == 404
                kept[place] = refused.headers["x-request-id"]
        for request_id in kept.values():
            told = await admin(world, f"/admin/v1/decisions/{request_id}")
            assert told.get("id") == request_id, told
            told = await admin(world, f"/admin/v1/requests/{request_id}")
            assert (told.get("id"), told.get("code")) == (request_id, "model_not_found"), told
        newest_first = [*reversed(kept.values())]
        first = await admin(world, "/admin/v1/requests?limit=10")
        then = await admin(world, f"/admin/v1/requests?limit=10&after={first['last_id']}")
        assert [each["id"] for page in (first, then) for each in page["data"]] == newest_first
        assert (first["has_more"], then["has_more"]) == (True, False)


@story
async def test_decisions_are_listed_whichever_worker_made_them():
    async with served(FAST, extra=TWO) as world:
        await workers(world)
        drained = await order(world, "backends/m/b1:drain", {"reason": "test", "force": True})
        assert drained.status_code < 300, drained.text
        await agree(world, lambda told: in_state(told)["phase"] == "draining")
        kept = []
        for _ in range(16):  # each over a connection of its own
            async with client(world) as http:
                refused = await ask(http)
                assert refused.status_code == 503
                kept.append(refused.headers["x-request-id"])
        newest_first = [*reversed(kept)]
        whole = await admin(world, "/admin/v1/decisions")
        assert [each["id"] for each in whole["data"]] == newest_first
        assert {each["code"] for each in whole["data"]} == {"model_unavailable"}
        first = await admin(world, "/admin/v1/decisions?limit=10")
        then = await admin(world, f"/admin/v1/decisions?limit=10&after={first['last_id']}")
        assert [each["id"] for page in (first, then) for each in page["data"]] == newest_first
        assert (first["has_more"], then["has_more"]) == (True, False)


@story
async def test_one_listener_answers_for_what_all_workers_counted():
    async with served(FAST, extra=TWO) as world:
        found = await workers(world)
        await all_asked(world, until=lambda replies: len(replies) >= 48)
        served_by = {each["worker"]: each for each in (await admin(world))["store"]["replicas"]}
        assert set(served_by) == {1, 2}
        async with asyncio.timeout(30):
            while (told := (await admin(world))["totals"]["requests"]) != {"ok": 48}:
                await asyncio.sleep(0.05)
        assert told == {"ok": 48}
        assert await counted(world) == 48
        await kill(world, found[2])
        after = await workers(world)
        assert after[2] != found[2]
        assert await counted(world) == 48  # nothing falls


@story
async def test_the_overview_tells_what_all_workers_carry():
    slow = SimConfig(model="m", reply_tokens=4000)
    async with served(slow, extra=TWO) as world, contextlib.AsyncExitStack() as held:
        await workers(world)
        carry, opened = set(), 0
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with asyncio.timeout(60):
            while len(carry) < 2:  # until each worker has some: the kernel gives out connections
                http = await held.enter_async_context(client(world))
                chat = http.stream("POST", "/v1/chat/completions", json=body)
                await held.enter_async_context(chat)
                opened += 1
                while (told := await admin(world))["totals"]["in_flight"] != opened:
                    await asyncio.sleep(0.05)
                carry = {each["worker"] for each in told["store"]["replicas"] if each["in_flight"]}
        assert in_state(told)["in_flight"] == opened == len(chats(world.sims[0]))
        told = (await order(world, "backends/m/b1:drain", {"dry_run": True})).json()
        assert told["requests"] == opened  # that a drain would wait for
        assert f"; {opened} requests in flight" in told["sentence"]


async def connections(world):
    replicas = (await admin(world, "/admin/v1/replicas"))["data"]
    return {each["worker"]: each["connections"] for each in replicas}


class Kept:
    """A client that keeps its connection for as long as it is kept."""

    def __init__(self, port):
        self.port, self.streams = port, None

    async def ask(self):
        self.streams = self.streams or await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        if b"connection: close" in head:
            await self.close()
        return int(head[9:12])

    async def close(self):
        (_, writer), self.streams = self.streams, None
        writer.close()
        await writer.wait_closed()


@story
async def test_a_worker_with_most_connections_gives_some_to_the_others():
    async with served(FAST, extra=TWO) as world, asyncio.timeout(60):
        pids = await workers(world)
        clients = [Kept(httpx2.URL(world.url).port) for _ in range(60)]
        os.kill(pids[2], signal.SIGSTOP)
        try:
            assert {await each.ask() for each in clients} == {200}
        finally:
            os.kill(pids[2], signal.SIGCONT)
        told = await connections(world)
        while told[1] < 50:  # it has not told yet
            await asyncio.sleep(0.05)
            told = await connections(world)
        while max(told.values()) > 40:
            assert {await each.ask() for each in clients} == {200}
            told = await connections(world)
        for each in clients:
            if each.streams is not None:
                await each.close()


@story
async def test_a_key_over_its_limit_is_told_of_whichever_workers_refused_it():
    async with served(FAST, extra=TWO, starts=limited(requests_per_minute=1)) as world:
        await workers(world)
        replies = await all_asked(world, until=lambda replies: len(replies) >= 48)
        refused = sum(each.status_code == 429 for each in replies)
        # One passes, and one more at each of the two workers that waited for the parent in vain.
        assert refused >= len(replies) - 3
        said = f"is over its limit: {refused} requests refused with 429 in 5 min"
        async with asyncio.timeout(30):  # records are posted a moment after their requests ended
            while True:
                problems = (await admin(world))["problems"]
                if any(said in each["sentence"] for each in problems):
                    break
                await asyncio.sleep(0.1)


@story
async def test_a_request_that_killed_two_servers_is_refused_and_lifted_by_all_workers():
    async with served(FAST, FAST, FAST, FAST, extra="workers: 3\nshutdown: {grace: 3s}") as world:
        await workers(world, 3)
        for sim in world.sims:
            sim.inject("die_on_prompt:poison")

        async def ask_anew():
            """Over a connection of its own: whichever worker takes it."""
            async with client(world) as http:
                return await ask(http, messages=[{"role": "user", "content": "poison"}])

        replies = [await ask_anew()]
        while replies[-1].status_code != 400:
            replies.append(await ask_anew())
        await admin(world, "/admin/v1/quarantine")  # all have answered, so all have heard of it
        replies += [await ask_anew() for _ in range(24)]
        assert sum(sim.state.dead for sim in world.sims) == 2
        refused = [each for each in replies if each.status_code == 400]
        assert replies[-len(refused) :] == refused
        (listed,) = (await admin(world, "/admin/v1/quarantine"))["data"]
        assert {listed["id"]} == {
            re.search(r"quarantine ([0-9a-f]+)", each.text)[1] for each in refused
        }
        assert listed["refused"] == {"test": len(refused)}

        for sim in world.sims:
            sim.clear()
        assert (await order(world, f"quarantine/{listed['id']}:lift", {})).status_code == 200
        assert (await admin(world, "/admin/v1/quarantine"))["data"] == []
        assert {(await ask_anew()).status_code for _ in range(12)} == {200}


@story
async def test_the_gateway_is_ready_when_all_workers_were():
    async with served(FAST, extra=TWO) as world:
        await workers(world)
        text = await page(world, "/readyz?verbose")
        assert "[+]workers 2 of 2 ready" in text
        assert text.endswith("ok\n")


async def page(world, path):
    async with loopback.client(base_url=world.admin_url, timeout=PATIENCE_S) as http:
        return (await http.get(path)).text


async def counted(world):
    """Return how many requests the metrics tell of."""
    lines = (await page(world, "/metrics")).splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("gateway_requests_total{")
    )


@story
async def test_a_parent_that_is_killed_leaves_no_worker_behind():
    async with served(FAST, extra=TWO) as world:
        found = await workers(world)
        os.kill(world.pids[0], signal.SIGKILL)
        await world.until(lambda: not any(map(runs, found.values())))


@story
async def test_the_servers_of_worker_1_run_on_where_it_alone_is_told_to_stop():
    pool = launches(free_port())
    async with served(extra="workers: 2\nshutdown: {grace: 1s, announce: 0s}", pools=pool) as world:
        before, server = await workers(world), records(world)[0]["pid"]
        os.kill(before[1], signal.SIGTERM)
        await world.until(lambda: not runs(before[1]))
        assert (await workers(world))[1] != before[1]
        assert runs(server)
        await world.until(lambda: records(world)[0]["pid"] == server)
        async with client(world) as http:
            assert (await ask(http)).status_code == 200
    assert not runs(server)


@pytest.mark.parametrize("by_signal", [True, False])
@story
async def test_a_reload_reaches_all_workers(by_signal):
    async with served(FAST, extra=TWO) as world:
        await workers(world)
        text = world.path.read_text()
        world.path.write_text(text + "\nsession_header: x-other\n")
        before = (await admin(world))["config"]["hash"]
        if by_signal:
            os.kill(world.pids[0], signal.SIGHUP)
        else:
            assert (await order(world, "config:reload", {})).status_code == 200
        await agree(world, lambda told: told["config"]["hash"] != before)
        await world.until(lambda: len(world.lines("reloaded")) == 2)  # a thread writes them


def reloads_while_worker_1_starts(world):
    """Start a gateway, and have it reload other settings as soon as it has a worker."""
    world.start()
    pid = world.pids[0]
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    while not children.read_text():
        time.sleep(0.005)
    time.sleep(0.2)  # the worker is importing its modules
    os.kill(pid, signal.SIGHUP)


@story
async def test_a_reload_waits_for_a_worker_that_is_starting():
    async with served(FAST, extra=TWO, starts=reloads_while_worker_1_starts) as world:
        await workers(world)
        await world.until(lambda: world.lines("reloaded"))
        assert not world.lines("worker_ended")


@story
async def test_the_exit_code_says_that_no_worker_can_use_the_settings(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"version: 1\nlisten: 127.0.0.1:{free_port()}\nadmin: {{listen: 127.0.0.1:{free_port()}}}\n"
        "keys: {file: nowhere.yaml}\nworkers: 2\npools: {m: {backends: [http://127.0.0.1:1]}}\n"
    )
    words = [PROGRAM, "serve", "-c", file]
    ran = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 3, ran.stderr
    assert "nowhere.yaml" in ran.stderr


def test_a_worker_that_never_lives_long_is_started_again_each_half_minute():
    assert [parent.pause_s(short) for short in (0, 1, 2, 3, 4)] == [0, 0, 0.5, 1, 2]
    assert parent.pause_s(1_000_000) == 30


async def agree(world, condition):
    """Wait until the leading worker says so, and the other sees its backends and settings alike."""
    async with asyncio.timeout(60):
        while True:
            told = await admin(world)
            others = [each for each in told["store"]["replicas"] if not each["here"]]
            alike = [each["config_agrees"] and not each["differs"] for each in others]
            if condition(told) and alike == [True]:
                return
            await asyncio.sleep(0.05)


@story
async def test_workers_share_a_limit_and_one_that_starts_again_knows_what_is_used():
    async def left(http):
        """Return what the parent says; where that is late, a worker has a part of the limit for itself."""
        while True:
            told = (await http.get("/v1/key")).json()["standing"]
            (day,) = (each for each in told if each["rule"] == "tokens_per_day")
            if day["used"] + day["remaining"] == day["limit"]:
                return day["remaining"]
            await asyncio.sleep(0.1)

    async with served(FAST, extra=TWO, starts=limited(tokens_per_day=600)) as world:
        before = await workers(world)
        async with client(world) as http:  # one connection, and so one worker
            assert await left(http) == 600
            # More than half: no part of two holds it, so it is refused where the parent is late.
            while (large := await ask(http, max_tokens=400)).status_code == 429:
                await asyncio.sleep(0.1)
            assert large.status_code == 200
            used = 600 - await left(http)
        for number in (2, 1):
            await kill(world, before[number])
            after = await workers(world)
            assert after[number] != before[number]
            async with client(world) as http:
                assert await left(http) == 600 - used
                before = after
        assert used > 0


@story
async def test_a_canary_is_judged_over_what_all_workers_saw():
    backends = "[{url: <0>, revision: v1}, {url: <1>, revision: v2}]"
    canary = "{revision: v2, weight: 0.5, automatic: true}"
    pools = f"pools: {{m: {{canary: {canary}, backends: {backends}}}}}"
    async with served(FAST, FAST, extra=TWO, pools=pools) as world:
        await workers(world)
        world.sims[1].inject("http_500:422")

        async def told():
            return (await admin(world))["pools"][0]["canary"]

        sent = 0
        async with asyncio.timeout(60):
            while (await told())["finding"] == "open":
                texts = [f"conversation {sent + each}" for each in range(8)]
                for text in texts:
                    async with client(world) as http:
                        await ask(http, messages=[{"role": "user", "content": text}])
                sent += len(texts)
        found = await told()
        assert (found["finding"], found["carried_out"]) == ("worse", True)
        # Both workers' requests count, those of the other one a second later.
        async with asyncio.timeout(20):
            while (await told())["requests"] + (await told())["requests_of_others"] < sent:
                await asyncio.sleep(0.1)

        def served_by_new(replies):
            return {each.headers["x-gateway-revision"] for each in replies[-16:]}

        await all_asked(world, until=lambda replies: replies and served_by_new(replies) == {"v1"})
