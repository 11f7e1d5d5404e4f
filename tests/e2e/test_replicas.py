"""Two gateways, each a process, with a real Redis and simulated servers that they launch."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time

import httpx2
import pytest

from gateway.store.scripts import BUDGET_S
from tests.e2e.support import GATEWAY
from tests.ports import free_port
from tests.redisserver import redis_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@dataclasses.dataclass
class Gateway:
    """One gateway process."""

    process: subprocess.Popen
    public: str
    admin: str

    def get(self, path="/admin/v1/overview"):
        return httpx2.get(self.admin + path, timeout=5).json()

    def backend(self, name="b1"):
        every = self.get()["pools"][0]["backends"]
        return next(each for each in every if each["name"] == name)

    def post(self, path, body):
        return httpx2.post(f"{self.admin}/admin/v1/{path}", json=body, timeout=5)

    def chat(self, client=httpx2):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        return client.post(f"{self.public}/v1/chat/completions", json=body, timeout=10).status_code

    @property
    def leads(self):
        store = self.get()["store"]
        return any(each["here"] and each["leads"] for each in store["replicas"])


@dataclasses.dataclass
class Scene:
    """A machine: servers, a Redis, and gateways with one state folder."""

    folder: pathlib.Path
    redis: object
    ports: list
    gateways: list = dataclasses.field(default_factory=list)
    supervision: dict = dataclasses.field(default_factory=dict)

    def gateway(self):
        number = len(self.gateways)
        listen, admin = free_port(), free_port()
        backends = [
            {"name": f"b{place}", "launch": {"command": [GATEWAY, "sim", "--model", "m"], "port": port, "on_exit": "leave"}}
            for place, port in enumerate(self.ports, 1)
        ]  # fmt: skip
        quick = {"backoff": "100ms", "max_backoff": "1s", "canary": "0s"} | self.supervision
        config = {
            "redis": self.redis.url,
            "listen": f"127.0.0.1:{listen}",
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "keys": "none",
            "state": str(self.folder / "state"),
            "health": {"interval": "200ms", "scrape_interval": "200ms"},
            "shutdown": {"grace": "0s"},
            "pools": {"m": {"backends": backends, "supervision": quick}},
        }
        file = self.folder / f"gateway{number}.yaml"
        file.write_text(json.dumps(config))
        log = (self.folder / f"gateway{number}.log").open("wb")
        process = subprocess.Popen([GATEWAY, "serve", "-c", file], stdout=log, stderr=log)
        log.close()
        gateway = Gateway(process, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}")
        self.gateways.append(gateway)
        until(lambda: gateway.get() is not None)
        return gateway

    def starts(self, name="b1"):
        log = self.folder / "state" / "logs" / f"m--{name}.txt"
        return log.read_text().count("--- m/b1: start ") if log.exists() else 0

    def kill_server(self, name="b1"):
        record = json.loads((self.folder / "state" / "run" / f"m--{name}.json").read_text())
        os.kill(record["pid"], signal.SIGKILL)

    def end(self):
        for each in self.gateways:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(signal.SIGCONT)
            each.process.kill()
            each.process.wait()
        for record in (self.folder / "state" / "run").glob("*.json"):
            pid = json.loads(record.read_text())["pid"]
            with contextlib.suppress(ProcessLookupError):
                if pid:  # 0 as long as a start has no process: it would stand for our own group
                    os.killpg(pid, signal.SIGKILL)


def until(condition, seconds=40.0):
    """Wait; returns how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        with contextlib.suppress(httpx2.HTTPError):
            if condition():
                return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError("it did not come to pass")


@pytest.fixture
def scene(tmp_path):
    with redis_server() as redis:
        scene = Scene(tmp_path, redis, [free_port()])
        try:
            yield scene
        finally:
            scene.end()


@pytest.fixture
def pair(scene):
    """The gateway that leads, and the other one."""
    one, two = scene.gateway(), scene.gateway()
    for each in (one, two):
        until(lambda each=each: each.backend()["phase"] == "ready")
    until(lambda: one.leads != two.leads)
    return (one, two) if one.leads else (two, one)


def ready(gateway):
    return lambda: gateway.backend()["phase"] == "ready"


def knows_both(gateway):
    """Whether it hears of both; on a busy machine a call of Redis may be given up now and then."""

    def told():
        store = gateway.get()["store"]
        alive = [each["alive"] and each["config_agrees"] for each in store["replicas"]]
        return store["trouble"] == "" and alive == [True, True]

    return told


def test_one_of_two_launches_and_restarts_and_each_knows_of_the_other(scene, pair):
    leader, other = pair
    assert scene.starts() == 1
    scene.kill_server()
    until(lambda: scene.starts() == 2)
    for each in pair:
        until(ready(each))
        until(knows_both(each))
    assert scene.starts() == 2
    out = subprocess.run(
        [GATEWAY, "status", "--server", other.admin], capture_output=True, text=True
    )
    assert "restarts backends of m" in out.stdout
    assert "this one" in out.stdout


def test_another_leads_within_ten_seconds_of_a_leaders_death(scene, pair):
    leader, other = pair
    leader.process.kill()
    leader.process.wait()
    scene.kill_server()
    took_s = until(lambda: scene.starts() == 2)
    assert took_s < 11.0  # with the look that finds the server gone
    until(ready(other))
    assert scene.starts() == 2


def test_a_leader_that_stood_still_beyond_its_lease_restarts_nothing_twice(scene, pair):
    leader, other = pair
    leader.process.send_signal(signal.SIGSTOP)
    scene.kill_server()
    until(lambda: scene.starts() == 2)
    until(ready(other))
    leader.process.send_signal(signal.SIGCONT)
    until(ready(leader))
    time.sleep(3)  # what it would do it would do in its next turns
    assert scene.starts() == 2
    assert other.leads
    assert not leader.leads


def test_a_drain_holds_at_all_over_a_redis_that_comes_back_empty(scene, pair):
    leader, other = pair
    assert other.post("backends/m/b1:drain", {"force": True}).json()["changed"]
    assert other.post("restarts:hold", {"pool": "m"}).status_code == 200
    for each in pair:
        until(lambda each=each: each.backend()["phase"] in ("draining", "cordoned"))
        until(lambda each=each: each.get()["holds"])
    scene.redis.kill()
    for each in pair:
        until(lambda each=each: each.get()["store"]["trouble"])
    scene.redis.start()
    for each in pair:
        until(lambda each=each: not each.get()["store"]["trouble"])
    time.sleep(3)
    for each in pair:
        assert each.backend()["phase"] in ("draining", "cordoned")
        assert each.get()["holds"]
    assert leader.post("backends/m/b1:undrain", {}).json()["changed"]
    leader.post("restarts:lift", {"pool": "m"})
    for each in pair:
        until(ready(each))
        until(lambda each=each: not each.get()["holds"])


def test_a_suspension_holds_at_all_until_it_is_cleared_at_any(scene):
    scene.supervision = {"max_restarts": 2}
    pair = scene.gateway(), scene.gateway()
    for each in pair:
        until(ready(each))
    until(lambda: pair[0].leads != pair[1].leads)
    for start in (1, 2, 3):  # the launch, and two restarts
        until(lambda start=start: scene.starts() >= start, 90)  # beside engines that take all cores
        assert scene.starts() == start
        for each in pair:
            until(ready(each))
        scene.kill_server()
    for each in pair:
        until(lambda each=each: each.backend()["reason"] == "suspended")
    assert scene.starts() == 3
    other = pair[1] if pair[0].leads else pair[0]
    assert other.post("backends/m/b1:restart", {}).json()["changed"]
    for each in pair:
        until(ready(each))
    assert scene.starts() == 4


def test_no_request_notices_what_befalls_the_redis(scene, pair):
    redis = scene.redis

    def served(count=60):
        with httpx2.Client() as client:
            times, codes = [], []
            for _ in range(count):
                began = time.monotonic()
                codes.append(pair[0].chat(client))
                times.append(time.monotonic() - began)
        return set(codes), min(times)

    codes, _ = served()
    assert codes == {200}
    redis.ask("CLIENT", "PAUSE", 1500, "ALL")
    faults = [
        lambda: None,
        lambda: redis.signal(signal.SIGSTOP),
        lambda: redis.signal(signal.SIGCONT),
        redis.kill,
        redis.start,
    ]
    for befall in faults:
        befall()
        codes, fastest_s = served()
        assert codes == {200}
        assert fastest_s < BUDGET_S  # else each of them waited until a call was given up
    for each in pair:
        until(lambda each=each: not each.get()["store"]["trouble"])
    scene.kill_server()
    until(lambda: scene.starts() == 2)
    until(ready(pair[0]))
