"""Another process of the gateway takes over: real processes, real sockets; nothing is refused, cut or reset."""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import sys

import httpx2
import pytest

from gateway.launch import proc
from gateway.sim.server import SimConfig
from tests import keyfiles, loopback
from tests.ports import free_port
from tests.stories.served import PROGRAM, Served, runs, served
from tests.stories.support import FAST, frames
from tests.stories.support import story as story_within

story = functools.partial(story_within, seconds=55.0)  # processes start, and a machine may be busy
SLOW = SimConfig(model="m", decode_step_s=0.05)


def chat(text="hello", **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def client(world, **more):
    headers = {"authorization": f"Bearer {world.key}"}
    return loopback.client(timeout=30, base_url=world.url, headers=headers, **more)


async def ask(http, **more):
    return await http.post("/v1/chat/completions", json=chat(**more))


async def admin(world, path):
    async with loopback.client(base_url=world.admin_url, timeout=20) as http:
        return (await http.get(path)).json()


def records(world):
    return [
        json.loads(each.read_text()) for each in (world.folder / "state" / "run").glob("*.json")
    ]


@story
async def test_streams_end_with_the_old_process_while_new_requests_go_to_the_new_one():
    async with served(SLOW, SLOW) as world, client(world) as http:
        body = chat(stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.aiter_text()
            text = await anext(pieces)
            (busy,) = (each for each in world.sims if each.engine.running)
            busy.inject("frozen")  # the stream lasts as long as the upgrade does
            ran = await world.upgrade()
            assert ran.returncode == 0, ran.stderr
            async with client(world) as other:
                assert (await ask(other, max_tokens=1)).status_code == 200
            assert all(map(runs, world.pids))
            busy.clear()
            text += "".join([each async for each in pieces])
        assert frames(text)[-1] == "[DONE]"
        assert "error" not in text
        assert (await ask(http, max_tokens=1)).headers["connection"] == "close"
        await world.until(lambda: world.started.poll() == 0)  # nothing is left to it
        assert (await ask(http, max_tokens=1)).status_code == 200
        told = await admin(world, "/admin/v1/events")
        assert [each["kind"] for each in told["data"]] == ["upgrade"]


@story
async def test_upgrades_in_a_row_lose_no_request_on_new_and_on_kept_connections():
    """A connection that is kept gets its next reply from the old process, and hears that it is the last."""
    async with served(FAST, extra="shutdown: {grace: 3s}") as world:
        done = asyncio.Event()
        statuses = []

        async def keep_asking(*, kept):
            limits = httpx2.Limits(max_keepalive_connections=None if kept else 0)
            async with client(world, limits=limits) as http:
                while not done.is_set():
                    statuses.append((await ask(http, max_tokens=2)).status_code)
                    await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(keep_asking(kept=number % 2 == 0))
            for _ in range(3):
                before = len(statuses)
                ran = await world.upgrade()
                assert ran.returncode == 0, ran.stderr
                await world.until(lambda at=before: len(statuses) > at + 50)
            done.set()
        assert set(statuses) == {200}
        await world.until(lambda: not any(map(runs, world.pids[:-1])))


@story
async def test_a_signal_upgrades_too():
    async with served(FAST) as world, client(world) as http:
        os.kill(world.started.pid, signal.SIGUSR2)
        await world.until(lambda: world.lines("upgraded"))
        world.pids.append(int(str(world.lines("upgraded")[0]["message"]).split()[1]))
        assert (await ask(http, max_tokens=1)).status_code == 200
        await world.until(lambda: world.started.poll() == 0)


@story
async def test_settings_that_cannot_be_used_leave_the_old_process_serving():
    async with served(FAST) as world, client(world) as http:
        usable = world.path.read_text()
        world.path.write_text(usable + "\nlimits: {conections: 5}\n")
        ran = await world.upgrade()
        assert ran.returncode == 1
        assert "conections" in ran.stderr
        assert "goes on serving" in ran.stderr
        assert (await ask(http, max_tokens=1)).status_code == 200
        event = (await admin(world, "/admin/v1/events"))["data"][0]
        assert event["kind"] == "upgrade_failed"
        assert "conections" in event["detail"]
        world.path.write_text(usable)
        assert (await world.upgrade()).returncode == 0
        assert (await ask(http, max_tokens=1)).status_code == 200


def from_a_copy(world: Served):
    """Start the program by a name of its own, so that another one can be put there."""
    world.program = world.folder / "vllm-gateway"
    shutil.copy(PROGRAM, world.program)
    world.start()


def installed(world, text):
    """Have another program behind the name that the gateway was started by."""
    world.program.unlink()
    world.program.write_text(text)
    world.program.chmod(0o755)


@story
async def test_a_program_that_does_not_start_leaves_the_old_process_serving():
    async with served(FAST, starts=from_a_copy) as world, client(world) as http:
        installed(world, "#!/bin/sh\nexit 7\n")
        ran = await world.upgrade()
        assert ran.returncode == 1
        assert "exit code 7" in ran.stderr
        assert (await ask(http, max_tokens=1)).status_code == 200
        assert world.started.poll() is None


ENDS_LATE = f"""#!{sys.executable}
import os, socket
from gateway.upgrade import messages
channel = socket.socket(fileno=messages.inherits(os.environ[messages.VARIABLE]).channel)
channel.send(messages.encode(messages.Loaded(os.getpid(), "9.9")))
channel.recv(messages.MOST_BYTES)  # healing has paused
"""


def launches(port, **more):
    """Return a pool of one server that the gateway launches."""
    words = [str(PROGRAM), "sim", "--port", str(port), "--model", "m"]
    backend = {"name": "b1", "launch": {"command": words, "port": port, **more}}
    return "pools: " + json.dumps({"m": {"backends": [backend], "supervision": {"backoff": "1s"}}})


async def is_restarted(world, before):
    """Kill the launched server, and wait until another one serves; returns its record."""
    os.kill(before["pid"], signal.SIGKILL)
    await world.until(lambda: records(world)[0]["pid"] not in (0, before["pid"]))
    await world.serves()
    return records(world)[0]


@story
async def test_healing_goes_on_after_an_upgrade_that_failed_late():
    pools = launches(free_port(), on_exit="stop")
    async with served(pools=pools, starts=from_a_copy) as world:
        installed(world, ENDS_LATE)
        ran = await world.upgrade()
        assert ran.returncode == 1
        assert "before it could serve" in ran.stderr
        after = await is_restarted(world, records(world)[0])
        assert after["gateway_pid"] == world.started.pid


@story
async def test_a_launched_server_passes_to_the_new_process_and_is_restarted_by_it_alone():
    pools = launches(free_port(), on_exit="stop", orphan="stop")
    async with served(pools=pools) as world, client(world) as http:
        (before,) = records(world)
        assert before["gateway_pid"] == world.started.pid
        assert (await world.upgrade()).returncode == 0
        assert (await ask(http, max_tokens=1)).status_code == 200
        await world.until(lambda: world.started.poll() == 0)
        (after,) = records(world)
        assert (after["pid"], after["gateway_pid"]) == (before["pid"], world.pids[-1])
        assert runs(before["pid"])
        last = (await is_restarted(world, before))["pid"]
        assert (await ask(http, max_tokens=1)).status_code == 200
        events = (await admin(world, "/admin/v1/events"))["data"]
        assert [each["kind"] for each in events].count("restart") == 1
        os.kill(world.pids[-1], signal.SIGTERM)
        await world.until(lambda: not runs(world.pids[-1]))
        assert not runs(last)  # `on_exit: stop` holds for who is in charge


@story
async def test_another_state_folder_is_refused_while_servers_run_that_it_does_not_know():
    """The new process would find their ports taken, and have no server at all."""
    async with served(pools=launches(free_port(), on_exit="stop")) as world, client(world) as http:
        before = world.path.read_text()
        world.path.write_text(before.replace("/state\n", "/another\n"))
        ran = await world.upgrade()
        assert ran.returncode == 1
        assert "with `state: " in ran.stderr
        assert (await ask(http, max_tokens=1)).status_code == 200
        world.path.write_text(before)
        assert (await world.upgrade()).returncode == 0
        assert (await ask(http, max_tokens=1)).status_code == 200


STAYS_SILENT = f"#!{sys.executable}\nimport time\ntime.sleep(60)\n"


@story
async def test_a_gateway_that_is_told_to_stop_ends_the_process_that_was_to_take_over():
    async with served(FAST, starts=from_a_copy, extra="shutdown: {grace: 1s}") as world:
        installed(world, STAYS_SILENT)
        os.kill(world.started.pid, signal.SIGUSR2)
        await world.until(lambda: world.lines("upgrading"))
        await world.until(lambda: children(world.started.pid))
        (new,) = children(world.started.pid)
        os.kill(world.started.pid, signal.SIGTERM)
        await world.until(lambda: world.started.poll() == 0)
        assert not runs(new)


@story
async def test_a_key_that_is_revoked_ends_while_an_upgrade_takes_long():
    async with served(FAST, starts=from_a_copy) as world, client(world) as http:
        installed(world, STAYS_SILENT)
        os.kill(world.started.pid, signal.SIGUSR2)
        await world.until(lambda: children(world.started.pid))
        assert (await ask(http, max_tokens=1)).status_code == 200
        keyfiles.revoke(world.folder / "keys.yaml", world.key.split("_")[1])
        async with asyncio.timeout(15):
            while (await ask(http, max_tokens=1)).status_code != 401:
                await asyncio.sleep(0.05)
        assert not world.lines("upgrade_failed")


def children(pid):
    return [each.pid for each in proc.every() if each.parent == pid]


@story
async def test_unix_sockets_pass_to_the_new_process_too():
    def on_a_socket(world: Served):
        text = world.path.read_text()
        path = world.folder / "gw.sock"
        world.path.write_text(
            text.replace(f"listen: 127.0.0.1:{world.port}\n", f"listen: unix:{path}\n")
        )
        world.start()

    async with served(FAST, starts=on_a_socket, extra="shutdown: {grace: 1s}") as world:
        transport = httpx2.AsyncHTTPTransport(uds=str(world.folder / "gw.sock"))
        async with client(world, transport=transport) as http:
            assert (await ask(http, max_tokens=1)).status_code == 200
            assert (await world.upgrade()).returncode == 0
            await world.until(lambda: world.started.poll() == 0)
            assert (await ask(http, max_tokens=1)).status_code == 200


# --- listeners of systemd -------------------------------------------------------------------------


def activated(listener, name="public"):
    """Start a gateway as systemd does, with a listener as file descriptor 3."""

    def start(world: Served):
        number = listener.fileno()
        told = f"export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES={name}; exec {PROGRAM}"
        world.start("bash", "-c", f"{told} serve -c {world.path} 3<&{number}", pass_fds=(number,))

    return start


@contextlib.asynccontextmanager
async def with_listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def start(world: Served):
            text = world.path.read_text()
            world.path.write_text(text.replace(f":{world.port}\n", f":{port}\n", 1))
            world.port = port
            activated(listener)(world)

        async with served(SLOW, extra="shutdown: {grace: 20s}", starts=start) as world:
            yield world, start


@story
async def test_a_restart_refuses_nobody_where_systemd_has_the_listener():
    async with with_listener() as (world, start), client(world) as http:
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(ask(http, stream=True, max_tokens=30))
            await world.until(lambda: world.sims[0].engine.running)
            os.kill(world.started.pid, signal.SIGTERM)
            await world.until(lambda: world.lines("draining"))
            async with client(world) as other:
                waits = group.create_task(ask(other, max_tokens=1))
                await asyncio.to_thread(world.started.wait, 20)
                assert frames((await stream).text)[-1] == "[DONE]"
                assert not waits.done()  # in the listener's queue, where no process takes it
                start(world)
                assert (await waits).status_code == 200


@story
async def test_an_upgrade_keeps_the_listener_of_systemd():
    async with with_listener() as (world, start), client(world) as http:
        assert (await world.upgrade()).returncode == 0
        assert (await ask(http, max_tokens=1)).status_code == 200
        os.kill(world.pids[-1], signal.SIGTERM)
        await world.until(lambda: not runs(world.pids[-1]))
        async with client(world) as other, asyncio.TaskGroup() as group:
            waits = group.create_task(ask(other, max_tokens=1))
            start(world)
            assert (await waits).status_code == 200


@story
async def test_a_listener_of_systemd_elsewhere_than_the_settings_say_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(
            AssertionError, match=r"ListenStream=.* of the socket unit and the setting"
        ):
            async with served(FAST, starts=activated(listener)):
                pass


@story
async def test_a_restart_that_is_ordered_is_carried_out_after_the_upgrade_and_cuts_nothing():
    pools = launches(free_port())
    async with served(pools=pools) as world, client(world) as http:
        (before,) = records(world)
        body = chat(stream=True, max_tokens=1000)
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.aiter_text()
            text = await anext(pieces)
            async with loopback.client(base_url=world.admin_url, timeout=20) as other:
                path = "/admin/v1/backends/m/b1:restart"
                ordered = await other.post(path, json={"force": True, "reason": "a leak"})
                assert ordered.json()["changed"], ordered.text
            ran = await world.upgrade()
            assert ran.returncode == 0, ran.stderr
            text += "".join([each async for each in pieces])
        assert frames(text)[-1] == "[DONE]"
        assert "error" not in text
        await world.until(lambda: records(world)[0]["pid"] not in (0, before["pid"]))
        await world.serves()
        events = (await admin(world, "/admin/v1/events"))["data"]
        last = [each for each in events if each["kind"] == "restart"]
        assert {each["label"] for each in last} == {"operator"}
        assert all("a leak" in each["detail"] for each in last)


@story
async def test_a_reload_that_is_asked_for_during_an_upgrade_is_done_by_the_new_process():
    async with served(SLOW) as world, client(world) as http:
        before, last, body = world.path.read_text(), 1000, chat(stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.aiter_text()
            await anext(pieces)
            world.sims[0].inject("frozen")  # the old process has a stream, and so hears each signal
            os.kill(world.started.pid, signal.SIGUSR2)
            await world.until(lambda: world.lines("upgrading"))
            while not world.lines("upgraded"):
                assert not world.lines("supervision_upgrade_failed")
                last += 1
                # The new process may read the file at any moment: it must never be half written.
                whole = world.path.with_suffix(".next")
                whole.write_text(f"{before}\nlimits: {{connections: {last}}}\n")
                whole.replace(world.path)
                os.kill(world.started.pid, signal.SIGHUP)
                await asyncio.sleep(0.05)
            world.pids.append(int(str(world.lines("upgraded")[0]["message"]).split()[1]))
            async with asyncio.timeout(20):
                while (await in_force(world, "limits.connections")) != last:
                    await asyncio.sleep(0.1)
            world.sims[0].clear()
            async for _ in pieces:
                pass


async def in_force(world, setting):
    every = (await admin(world, "/admin/v1/config"))["settings"]
    return next(each["value"] for each in every if each["setting"] == setting)


@story
async def test_a_restart_after_two_upgrades_waits_for_what_the_first_process_still_carries():
    port = free_port()
    faults = f"http://127.0.0.1:{port}/sim/faults"
    untested = launches(port).replace('"backoff"', '"canary": "0s", "backoff"')
    async with (
        served(pools=untested) as world,
        client(world) as http,
        loopback.client() as sim,
    ):
        (before,) = records(world)
        body = chat(stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            pieces = reply.aiter_text()
            text = await anext(pieces)
            # It lasts as long as the upgrades do.
            await sim.post(faults, json={"fault": "frozen"})
            for _ in range(2):
                ran = await world.upgrade()
                assert ran.returncode == 0, ran.stderr
            await world.until(lambda: not runs(world.pids[1]))
            assert runs(world.pids[0])
            await order(world, "backends/m/b1:restart", {"force": True})
            assert records(world)[0]["pid"] == before["pid"]
            await sim.delete(faults)
            text += "".join([each async for each in pieces])
        assert frames(text)[-1] == "[DONE]"
        assert "error" not in text
        await world.until(lambda: records(world)[0]["pid"] not in (0, before["pid"]))


def launches_two(ports, **more):
    """Return a pool of two servers; `more` are settings of the first one."""
    one, two = (json.loads(launches(port).removeprefix("pools: "))["m"] for port in ports)
    one["backends"][0]["launch"].update(more)
    one["backends"] += [{**two["backends"][0], "name": "b2"}]
    return "pools: " + json.dumps({"m": one})


def record(world, name):
    return json.loads((world.folder / f"state/run/m--{name}.json").read_text())


@story
async def test_a_restart_that_a_reload_made_due_is_carried_out_once_after_the_upgrade():
    ports = free_port(), free_port()
    async with served(pools=launches_two(ports)) as world:
        await are_told(world, "started", 2)
        before = {name: record(world, name)["pid"] for name in ("b1", "b2")}
        await order(world, "restarts:hold", {"pool": "m"})
        old, new = launches_two(ports), launches_two(ports, env={"A": "1"})
        world.path.write_text(world.path.read_text().replace(old, new))
        await order(world, "config:reload", {})
        ran = await world.upgrade()
        assert ran.returncode == 0, ran.stderr
        await world.until(lambda: world.started.poll() == 0)
        assert record(world, "b1")["pid"] == before["b1"]
        await order(world, "restarts:lift", {"pool": "m"})
        last, *_ = await are_told(world, "started", 3)
        assert last["backend"] == "m/b1"
        (restart,) = await are_told(world, "operator", 1)
        assert "its `launch` settings changed" in restart["detail"]
        assert record(world, "b1")["pid"] != before["b1"]
        assert record(world, "b2")["pid"] == before["b2"]


@story
async def test_a_server_that_a_reload_takes_away_after_an_upgrade_finishes_what_the_old_process_has_there():
    ports = free_port(), free_port()
    both = launches_two(ports).replace('"supervision"', '"resume": "off", "supervision"')
    async with served(pools=both) as world:
        await are_told(world, "started", 2)
        body = chat(stream=True, max_tokens=1000)
        async with (
            client(world) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            pieces = reply.aiter_text()
            text = await anext(pieces)
            ran = await world.upgrade()
            assert ran.returncode == 0, ran.stderr
            left = json.loads(both.removeprefix("pools: "))
            busy = reply.headers["x-gateway-backend"].removeprefix("m/")
            kept = [each for each in left["m"]["backends"] if each["name"] != busy]
            left["m"]["backends"] = kept
            before = world.path.read_text()
            world.path.write_text(before.replace(both, "pools: " + json.dumps(left)))
            await order(world, "config:reload", {})
            text += "".join([each async for each in pieces])
        assert frames(text)[-1] == "[DONE]"
        assert "error" not in text
        await world.until(lambda: not runs(record(world, busy)["pid"]))


async def order(world, what, body):
    async with loopback.client(base_url=world.admin_url, timeout=20) as http:
        reply = await http.post(f"/admin/v1/{what}", json=body)
        assert reply.is_success, reply.text


async def are_told(world, label, count):
    """Wait for so many events with a label, and return them, the newest first."""
    async with asyncio.timeout(30):
        while True:
            every = (await admin(world, "/admin/v1/events"))["data"]
            found = [each for each in every if each["label"] == label]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


@story
async def test_a_server_that_was_not_proven_yet_is_proven_by_the_new_process():
    def launch(name, *words):
        port = str(free_port())
        command = [str(PROGRAM), "sim", "--model", "m", "--port", port, *words]
        return {"name": name, "launch": {"command": command, "port": int(port)}}

    backends = [launch("b1"), launch("frozen", "--fault", "frozen")]
    pools = "pools: " + json.dumps({"m": {"backends": backends}})

    async def seen(world):
        (pool,) = (await admin(world, "/admin/v1/overview"))["pools"]
        (told,) = (each for each in pool["backends"] if each["name"] == "frozen")
        return told["supervision"]["state"], told["phase"]

    async with served(pools=pools) as world:
        async with asyncio.timeout(30):
            while await seen(world) != ("proving", "starting"):  # it answers, and gives no token
                await asyncio.sleep(0.05)
            assert (await world.upgrade()).returncode == 0
            while (await seen(world))[0] != "proving":
                assert (await seen(world))[1] == "starting"
                await asyncio.sleep(0.05)
        events = (await admin(world, "/admin/v1/events"))["data"]
        assert "m/frozen" not in [each["backend"] for each in events if each["label"] == "found"]


@story
async def test_the_audit_log_has_the_upgrade_and_gives_each_number_once():
    async with served(FAST) as world, loopback.client(base_url=world.admin_url, timeout=20) as http:

        async def actions():
            return [each["action"] for each in (await admin(world, "/admin/v1/audit"))["data"]]

        assert (await http.post("/admin/v1/restarts:hold", json={})).is_success
        await world.upgrade()
        async with asyncio.timeout(10):
            while await actions() != ["upgrade", "hold"]:
                await asyncio.sleep(0.05)
        assert (await http.post("/admin/v1/restarts:lift", json={})).is_success
        assert await actions() == ["lift", "upgrade", "hold"]
        written = (world.folder / "state" / "audit.jsonl").read_text().splitlines()
        assert [json.loads(each)["number"] for each in written if each] == [1, 2, 3]
