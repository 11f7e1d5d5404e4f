"""What `doctor` asks of things that run: a gateway whose limits are not those of the shell, and a real Redis."""

import json
import resource
import subprocess

import pytest

from tests.e2e.support import GATEWAY, gateway
from tests.e2e.support import running as child
from tests.ports import free_port
from tests.redisserver import redis_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def told(config, about):
    command = [GATEWAY, "doctor", "-c", config, "--nginx", "/dev/null", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return [each for each in json.loads(ran.stdout) if each["about"] == about]


@pytest.fixture
def running(tmp_path):
    command = [GATEWAY, "sim", "--port", str(port := free_port()), "--model", "m"]
    pools = f"pools: {{m: {{backends: [http://127.0.0.1:{port}]}}}}"
    with (
        redis_server() as redis,
        child(command, log=tmp_path / "sim.log"),
        gateway(tmp_path, pools, f"redis: {redis.url}") as behind,
    ):
        yield behind, redis


def test_the_limit_is_that_of_the_gateway_that_runs(running):
    behind, _ = running
    resource.prlimit(behind.pid, resource.RLIMIT_NOFILE, (600, 600))
    (finding,) = told(behind.config, "file_limit")
    assert finding["verdict"] == "note"
    assert finding["told"].startswith("The running gateway may open 600 files, enough for 242 of ")


def test_the_clock_of_redis_is_asked_for(running):
    behind, redis = running
    clocks = {each["told"]: each["verdict"] for each in told(behind.config, "clock")}
    assert clocks["The clocks of this machine and of Redis go together"] == "ok"
    redis.kill()
    clocks = {each["told"]: each["verdict"] for each in told(behind.config, "clock")}
    assert clocks["The clock of Redis is not known: the connection was refused"] == "skipped"
