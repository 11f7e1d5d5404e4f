"""Start, reload, drain."""

import asyncio
import json
import os
import re
import signal
import time

import pytest

from gateway.app import build, handle_signals
from gateway.config.load import load_config
from gateway.core.aio import start
from gateway.launch.folderlock import FolderLock
from gateway.observe.outlet import Outlet
from gateway.process import reload
from gateway.sim.server import SimConfig, SimServer
from gateway.store.replicas import Replica, Told
from tests import keyfiles as keys
from tests import loopback
from tests.stories.support import FAST, frames, gateway, story
from tests.stories.test_explain import LONG, held

SLOW = SimConfig(model="m", decode_step_s=0.05)


@story
async def test_a_reload_adds_a_backend_and_leaves_streams_alone():
    async with gateway(SLOW, FAST, pools="pools: {m: {backends: [<0>]}}", wait=False) as world:
        await world.ready(1)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(world.chat(stream=True, max_tokens=20))
            await world.until(lambda: world.in_flight() == 1)
            text = world.path.read_text()
            second = f"http://127.0.0.1:{world.sims[1].port}"
            world.path.write_text(text.replace("]}}", f", {second}]}}}}"))
            assert (await reload(world.process)).done
            await world.ready(2)
        assert frames(running.result().text)[-1] == "[DONE]"
        assert len(world.process.table.backends("m")) == 2


async def config_info(world):
    """The labels of `gateway_config_info`."""
    (labels,) = re.findall(r"^gateway_config_info{(.*)} 1.0$", await world.metrics(), re.M)
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


@story
async def test_settings_of_a_gateways_own_do_not_make_it_differ_from_others():
    async with gateway(FAST) as world:
        before, text = await config_info(world), world.path.read_text()
        world.path.write_text(text.replace("access: false", "access: true"))
        assert (await reload(world.process)).done
        own = await config_info(world)
        world.path.write_text(text + "session_header: x-other\n")
        assert (await reload(world.process)).done
        other = await config_info(world)
    assert len({each["hash"] for each in (before, own, other)}) == 3
    assert own["shared"] == before["shared"] != other["shared"]


@story
async def test_an_invalid_file_keeps_the_old_configuration():
    async with gateway(FAST) as world:
        before = world.process.config
        world.path.write_text("pools: {m: {backnds: []}}")
        assert not (await reload(world.process)).done
        assert world.process.config is before
        assert (await world.chat(max_tokens=1)).status_code == 200
        assert 'gateway_config_reloads_total{result="failure"} 1.0' in await world.metrics()


ON_ALL = "listen: 0.0.0.0:8080\nadmin: {listen: 0.0.0.0:9090, token: of-the-tests-0123456}\n"
OF_THIS_MACHINE = {
    "has no token": "listen: 0.0.0.0:8080\nadmin: {listen: 127.0.0.1:9090}\n",
    "its token is shorter": "listen: 0.0.0.0:8080\nadmin: {listen: 127.0.0.1:9090, token: x}\n",
    "AUTHENTICATION IS OFF": ON_ALL.replace("0.0.0.0:8080", "127.0.0.1:8080") + "keys: none\n",
}


@pytest.mark.parametrize("why", OF_THIS_MACHINE)
def test_a_reload_opens_no_listener_that_will_be_for_this_machine_only_after_a_restart(
    why, tmp_path
):
    pools = f"state: {tmp_path}/state\npools: {{m: {{backends: [http://127.0.0.1:1]}}}}\n"
    file = tmp_path / "gateway.yaml"
    keys.create(tmp_path / "keys.yaml", name="test", wall_now=time.time())
    file.write_text(ON_ALL + pools)
    process = build(load_config(file), file, Outlet())
    before = process.config
    file.write_text(OF_THIS_MACHINE[why] + pools)
    done = asyncio.run(reload(process))
    assert not done.done
    assert why in done.findings[0]
    assert "vllm-gateway upgrade" in done.findings[0]
    assert process.config is before


def test_a_listener_that_is_open_already_holds_up_no_reload(tmp_path):
    file = tmp_path / "gateway.yaml"
    pools = (
        f"state: {tmp_path}/state\nkeys: none\npools: {{m: {{backends: [http://127.0.0.1:1]}}}}\n"
    )
    file.write_text(ON_ALL + pools)
    process = build(load_config(file), file, Outlet())
    file.write_text("listen: 127.0.0.1:8080\nadmin: {token: of-the-tests-0123456}\n" + pools)
    assert asyncio.run(reload(process)).done


@story
async def test_a_reload_that_removes_a_backend_lets_its_streams_finish():
    async with gateway(SLOW, SLOW) as world:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(world.chat(stream=True, max_tokens=20)) for _ in range(4)]
            await world.until(lambda: world.in_flight() == 4)
            config = world.path.read_text()
            gone = f'"http://127.0.0.1:{world.sims[0].port}", '
            assert gone in config
            world.path.write_text(config.replace(gone, ""))
            assert (await reload(world.process)).done
        for each in running:
            assert frames(each.result().text)[-1] == "[DONE]"
            assert "error" not in each.result().text
        assert len(world.process.table.backends("m")) == 1
        await world.settled()


@pytest.fixture
def slow_file(tmp_path):
    """A file whose reader waits until a test writes it."""
    path = tmp_path / "slow.yaml"
    os.mkfifo(path)
    yield path
    path.unlink()


async def is_read(path, text):
    """Wait until somebody reads the slow file, and give this to read."""
    await asyncio.to_thread(path.write_text, text)


@story
async def test_a_reload_holds_nobody_up_and_one_asked_for_meanwhile_follows(slow_file):
    async with gateway(FAST) as world:
        process, text = world.process, world.path.read_text()
        handle_signals(asyncio.get_running_loop(), process)
        process.path = slow_file
        keys_file = f"keys: {{file: {world.path.parent / 'keys.yaml'}}}"
        text = text.replace("keys: {file: keys.yaml}", keys_file)
        os.kill(os.getpid(), signal.SIGHUP)
        await world.until(process.changing.locked)
        assert (await world.chat(max_tokens=1)).status_code == 200
        os.kill(os.getpid(), signal.SIGHUP)
        await world.until(process.hangup.is_set)
        for stall_s in (40.0, 50.0):
            await is_read(slow_file, f"{text}\ntimeouts: {{stall: {stall_s:.0f}s}}")
            await world.until(lambda s=stall_s: process.config.timeouts.stall == s)
        assert (await world.chat(max_tokens=1)).status_code == 200


@story
async def test_a_reload_reads_the_keys_again_only_where_they_changed():
    async with gateway(FAST) as world:
        handler, folder = world.process.handler, world.path.parent
        ring = handler.settings.keys
        assert (await reload(world.process)).done
        assert handler.settings.keys is ring
        made = keys.create(folder / "keys.yaml", name="later")
        assert (await reload(world.process)).done
        bearer = {"authorization": f"Bearer {made.key}"}
        assert (await world.chat(max_tokens=1, headers=bearer)).status_code == 200
        (folder / "other.yaml").write_bytes((folder / "keys.yaml").read_bytes())
        pepper = folder / "keys.yaml.pepper"
        (folder / "other.yaml.pepper").write_bytes(pepper.read_bytes())
        (folder / "other.yaml.pepper").chmod(0o600)
        keys.revoke(folder / "other.yaml", made.id)
        world.path.write_text(world.path.read_text().replace("keys.yaml", "other.yaml"))
        assert (await reload(world.process)).done
        assert (await world.chat(max_tokens=1, headers=bearer)).status_code == 401


@story
async def test_a_reload_back_to_the_address_it_listens_on_asks_for_no_restart(caplog):
    caplog.set_level("INFO", "gateway.app")
    async with gateway(FAST) as world:
        text = world.path.read_text()
        moved = text.replace("listen: 127.0.0.1:0\n", "listen: 127.0.0.1:28081\n", 1)
        for each in (moved, moved, text):
            world.path.write_text(each)
            assert (await reload(world.process)).done
    told = [each.effect for each in caplog.records if each.getMessage() == "configuration reloaded"]
    restart = "needs a restart: listen 127.0.0.1:0 -> 127.0.0.1:28081"
    assert told == [(restart,), (restart,), ()]


@story
async def test_draining_refuses_new_work_and_lets_streams_finish():
    async with gateway(SLOW, extra="", pools=None) as world:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(world.chat(stream=True, max_tokens=10))
            await world.until(lambda: world.in_flight() == 1)
            world.process.handler.draining = True
            for probe in ("/readyz", "/health"):
                assert (await world.http.get(probe)).status_code == 503
            assert (await world.http.get("/livez")).status_code == 200
            refused = await world.chat(max_tokens=1)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
        assert frames(running.result().text)[-1] == "[DONE]"
        assert "error" not in running.result().text


@story
async def test_what_is_left_after_the_grace_period_gets_an_error_frame():
    async with gateway(SLOW) as world:
        async with world.http.stream(
            "POST",
            "/v1/chat/completions",
            json={
                "model": "m",
                "stream": True,
                "max_tokens": 500,
                "messages": [{"role": "user", "content": "x"}],
            },
        ) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            world.process.stopping.set()
            rest = [line async for line in lines]
        data = [line[6:] for line in rest if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        error = json.loads(data[-2])["error"]
        assert "shutting down" in error["message"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "shutting_down")
        assert world.process.table.backends("m")[0].health.traffic_failures == 0
        told = b"".join(world.process.metrics.pieces()[0]).decode()
        assert 'outcome="shutdown"' in told
        assert "gateway_upstream_failures_total{" not in told


@story
async def test_a_key_made_or_revoked_while_the_gateway_runs_counts_within_seconds():
    async with gateway(FAST) as world:
        made = keys.create(world.path.parent / "keys.yaml", name="later", priority=5)
        bearer = {"authorization": f"Bearer {made.key}"}

        async def status():
            return (await world.chat(max_tokens=1, headers=bearer)).status_code

        async with asyncio.timeout(10):
            while await status() != 200:
                await asyncio.sleep(0.1)
        assert world.process.handler.gate.top_priority == 5
        keys.revoke(world.path.parent / "keys.yaml", made.id)
        async with asyncio.timeout(10):
            while await status() != 401:
                await asyncio.sleep(0.1)
        assert world.process.handler.gate.top_priority is None
        assert (await world.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("text", ["keys: [oops", "keys: [{expires: 2026-11-31}]"])
@story
async def test_a_broken_keys_file_keeps_the_keys_before_it(text, caplog):
    async with gateway(FAST) as world:
        before = (world.path.parent / "keys.yaml").read_text()
        (world.path.parent / "keys.yaml").write_text(text)
        ring = world.process.handler.settings.keys
        await world.until(ring.changed)
        await world.until(lambda: world.process.keys_trouble)  # it looks every two seconds
        assert world.process.handler.settings.keys is ring
        assert (await world.chat(max_tokens=1)).status_code == 200
        told = await world.http.get(world.admin_url + "/admin/v1/keys")
        assert (told.status_code, told.json()["code"]) == (409, "keys_unusable")
        overview = world.admin_url + "/admin/v1/overview"
        (problem,) = (await world.http.get(overview)).json()["problems"]
        assert (problem["kind"], "keys.yaml:1:" in problem["cause"]) == ("keys_invalid", True)
        (world.path.parent / "keys.yaml").write_text(before)
        await world.until(lambda: not world.process.keys_trouble)
        assert (await world.http.get(overview)).json()["problems"] == []
    assert [each.event for each in caplog.records if each.levelname == "ERROR"] == ["keys_invalid"]


@story
async def test_a_state_folder_that_another_gateway_uses_is_a_problem(tmp_path):
    other = start(FolderLock(tmp_path).hold(), name="the other gateway")
    try:
        async with gateway(FAST, extra=f"state: '{tmp_path}'") as world:
            await world.until(lambda: world.process.disk.lock.other)
            told = await world.http.get(world.admin_url + "/admin/v1/overview")
            (problem,) = told.json()["problems"]
            assert problem["kind"] == "state_shared"
            assert f"{tmp_path} is used by another gateway" in problem["sentence"]
    finally:
        other.cancel()
        await asyncio.wait([other])


@story
async def test_a_reload_changes_which_proxies_may_have_any_number_of_connections():
    async with gateway(FAST) as world:
        book = world.process.ingress.connections
        assert not book.proxies.trusts("10.1.2.3")
        world.path.write_text(world.path.read_text() + "\ntrusted_proxies: [10.0.0.0/8]\n")
        assert (await reload(world.process)).done
        assert book.proxies.trusts("10.1.2.3")


@story
async def test_servers_that_stay_keep_serving_when_another_is_put_before_them():
    async with gateway(FAST, FAST) as world:
        table = world.process.table
        before = {each.url: each for each in table}
        async with SimServer(FAST) as third:
            text = world.path.read_text()
            first = world.sims[0].url
            world.path.write_text(text.replace(f'"{first}"', f'"{third.url}", "{first}"'))
            told = await reload(world.process)
            assert told.done
            assert any("+1 backend (b3)" in each for each in told.effect), told.effect
            assert not any("drain" in each for each in told.effect)
            after = {each.url: each for each in table}
            assert [after[url] is each for url, each in before.items()] == [True, True]
            assert after[third.url].id == "m/b3"
            kept = json.loads((world.process.config.state / "names.json").read_text())
            assert sorted(kept["m"].values()) == ["b1", "b2", "b3"]


@story
async def test_the_supervisor_hears_what_other_replicas_drain():
    async with gateway(FAST) as world:
        replicas, supervisor = world.process.replicas, world.process.supervisor
        assert supervisor.drained_elsewhere() == frozenset()
        replicas.answered_at = world.process.clock.now()
        other = Replica("other", Told(drains=("m/b1",)), replicas.answered_at)
        replicas.every = [*replicas.every, other]
        assert supervisor.drained_elsewhere() == {"m/b1"}


@story
async def test_it_lives_while_all_connections_are_at_work():
    """The admin listener says so; whoever asked the other one would end the gateway for its being busy."""
    async with gateway(LONG, extra="limits: {connections: 2}") as world:
        async with held(world), held(world), loopback.client() as http:
            assert (await http.get(world.url + "/livez")).status_code == 503
            assert (await http.get(world.admin_url + "/livez")).status_code == 200
