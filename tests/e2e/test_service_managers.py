"""The whole gateway over servers that a real Docker Engine and a real systemd run.

They make a container and units of their own, so each is asked for by name:

    VLLM_GATEWAY_TEST_DOCKER_IMAGE=IMAGE    an image with python3; the engine is the one of DOCKER_HOST
    VLLM_GATEWAY_TEST_SYSTEMD_ROOT=FOLDER   the root folder of the machine whose systemd answers at
                                            DBUS_SYSTEM_BUS_ADDRESS; `/` for this one, as root
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import subprocess
import time
import urllib.request
import uuid

import pytest

from tests.e2e.support import Supervised, get, need
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = (pathlib.Path(__file__).parent / "small_server.py").read_text()
SUPERVISION = {"backoff": "100ms", "max_backoff": "1s", "stop_grace": "2s", "drain": "1s"}
PATIENCE_S = 60.0
QUIET_S = 5.0  # in which a gateway that wanted to restart would have done so


class Docker:
    """One container."""

    def __init__(self, port, *, restart="no", stubborn=False):
        self.program = need("docker", "docker")
        self.image = os.environ["VLLM_GATEWAY_TEST_DOCKER_IMAGE"]
        self.name = f"gateway-test-{uuid.uuid4().hex[:8]}"
        self.reference = {"docker": self.name}
        self.port = port
        words = ["python3", "-c", SCRIPT, str(port), *(["stubborn"] if stubborn else [])]
        options = [
            "--network",
            "host",
            "--restart",
            restart,
            "--memory",
            "200m",
            "--memory-swap",
            "200m",
        ]
        self.run("create", "--name", self.name, *options, self.image, *words)

    def run(self, *words):
        ran = subprocess.run([self.program, *words], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def start(self):
        self.run("start", self.name)

    def stop(self):
        self.run("stop", "--time", "2", self.name)

    def remove(self):
        self.run("rm", "--force", self.name)


class Unit:
    """One unit, in the run-time folder of a systemd."""

    def __init__(self, port, *, restart="no", stubborn=False):
        root = pathlib.Path(os.environ["VLLM_GATEWAY_TEST_SYSTEMD_ROOT"])
        self.port, self.name = port, f"gateway-test-{uuid.uuid4().hex[:8]}.service"
        self.reference = {"systemd": self.name}
        folder = root / "run/systemd/system"
        self.files = [folder / self.name, folder / f"{self.name}.py"]
        self.files[1].write_text(SCRIPT)
        program = f"/run/systemd/system/{self.name}.py"
        words = f"/usr/bin/python3 {program} {port} {'stubborn' if stubborn else ''}"
        self.files[0].write_text(
            f"[Service]\nType=exec\nExecStart={words}\nRestart={restart}\nRestartSec=500ms\n"
            "TimeoutStopSec=2\nMemoryMax=200M\nMemorySwapMax=0\n"
        )
        self.call("Reload")

    def call(self, member, signature="", *body):
        from dbus_fast import BusType, Message, MessageType
        from dbus_fast.aio import MessageBus

        async def asked():
            bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
            systemd, path = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
            told = Message(destination=systemd, path=path, interface=f"{systemd}.Manager",
                           member=member, signature=signature, body=list(body))  # fmt: skip
            reply = await bus.call(told)
            bus.disconnect()
            assert reply.message_type is not MessageType.ERROR, reply.body
            return reply.body

        return asyncio.run(asked())

    def start(self):
        self.call("StartUnit", "ss", self.name, "replace")

    def stop(self):
        self.call("StopUnit", "ss", self.name, "replace")

    def remove(self):
        self.stop()
        for file in self.files:
            file.unlink()
        self.call("Reload")


MANAGERS = [
    pytest.param(
        Docker,
        id="docker",
        marks=pytest.mark.skipif(
            "VLLM_GATEWAY_TEST_DOCKER_IMAGE" not in os.environ,
            reason="VLLM_GATEWAY_TEST_DOCKER_IMAGE names no image with python3",
        ),
    ),
    pytest.param(
        Unit,
        id="systemd",
        marks=pytest.mark.skipif(
            "VLLM_GATEWAY_TEST_SYSTEMD_ROOT" not in os.environ,
            reason="VLLM_GATEWAY_TEST_SYSTEMD_ROOT names no root folder",
        ),
    ),
]


@contextlib.contextmanager
def site(folder, manager, **settings):
    """A gateway over one server of a service manager's, which serves."""
    server = manager(free_port(), **settings)
    try:
        backend = {
            "name": "b1",
            "url": f"http://127.0.0.1:{server.port}",
            "restart": server.reference,
        }
        pool = {"backends": [backend], "supervision": SUPERVISION}
        server.start()
        gateway = Supervised(folder, f"  m: {json.dumps(pool)}\n")
        try:
            gateway.start()
            gateway.until(lambda: gateway.serves("m/b1"), PATIENCE_S, "the server serves")
            yield gateway, server
        finally:
            gateway.end()
    finally:
        server.remove()


def ordered(gateway):
    return [each for each in gateway.events("m/b1") if each["kind"] in ("restart", "launch")]


def answers(server):
    return get(f"http://127.0.0.1:{server.port}/health")[0] == 200


def tell(server, path):
    """Tell a server what it does not survive."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", b"{}", timeout=30)


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_server_that_crashed_is_restarted_once(tmp_path, manager):
    with site(tmp_path, manager) as (gateway, server):
        for restarts in (1, 2):
            tell(server, "/crash")
            gateway.until(
                lambda n=restarts: len(ordered(gateway)) == n, PATIENCE_S, "it is restarted"
            )
            gateway.until(lambda: gateway.serves("m/b1"), PATIENCE_S, "it serves again")
        time.sleep(QUIET_S)
        assert len(ordered(gateway)) == 2


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_server_that_its_manager_restarts_is_left_to_it(tmp_path, manager):
    with site(tmp_path, manager, restart="always") as (gateway, server):
        tell(server, "/crash")
        gateway.until(lambda: answers(server), PATIENCE_S, "its manager restarts it")
        gateway.until(lambda: gateway.serves("m/b1"), PATIENCE_S, "it serves again")
        assert ordered(gateway) == []


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_server_that_a_person_stopped_stays_so_until_it_is_started_or_ordered(tmp_path, manager):
    with site(tmp_path, manager) as (gateway, server):
        server.stop()
        gateway.until(lambda: not answers(server), PATIENCE_S, "it has stopped")
        time.sleep(QUIET_S)
        assert not answers(server)
        assert ordered(gateway) == []
        gateway.order("m/b1", "restart", force=True)
        gateway.until(lambda: gateway.serves("m/b1"), PATIENCE_S, "it serves after the order")
        server.stop()
        gateway.until(lambda: not answers(server), PATIENCE_S, "it has stopped again")
        server.start()
        gateway.until(lambda: gateway.serves("m/b1"), PATIENCE_S, "it serves after a start by hand")


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_server_that_does_not_heed_its_stop_is_restarted_all_the_same(tmp_path, manager):
    with site(tmp_path, manager, stubborn=True) as (gateway, server):
        gateway.order("m/b1", "restart", force=True)
        gateway.until(
            lambda: len(gateway.events("m/b1", "started")) == 2, PATIENCE_S, "it starts anew"
        )
        assert answers(server)


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_kill_for_lack_of_memory_is_told_as_one(tmp_path, manager):
    with site(tmp_path, manager) as (gateway, server):
        tell(server, "/eat")
        if answers(server):
            pytest.skip("this machine does not keep the server to its memory limit")
        gateway.until(lambda: gateway.events("m/b1", "exited"), PATIENCE_S, "its end is told")
        (exited,) = gateway.events("m/b1", "exited")
        assert "out of host memory" in exited["detail"]
