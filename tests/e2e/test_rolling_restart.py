"""Two gateways behind real nginx with the shipped file: each is restarted under load, and no client notices."""

import collections
import contextlib
import dataclasses
import http.client
import json
import pathlib
import subprocess
import threading

import pytest

from tests.e2e.support import GATEWAY, get, need, running, wait_until
from tests.e2e.test_nginx import answers, as_shipped, connect, serving
from tests.ports import free_port
from tests.redisserver import redis_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SHORT = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
LONG = {
    **SHORT,
    "stream": True,
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "[[sim:itl=50ms]] slowly"}],
}


@dataclasses.dataclass
class Replica:
    """One of the gateways: it starts again at the same address."""

    config: pathlib.Path
    url: str
    process: subprocess.Popen | None = None

    def start(self):
        with self.config.with_suffix(".log").open("ab") as log:
            command = [GATEWAY, "serve", "-c", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: get(self.url + "/readyz")[0] == 200, 120, "the gateway is ready")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0

    def served(self):
        lines = self.config.with_suffix(".log").read_text().splitlines()
        return sum('"endpoint"' in each for each in lines)


def replica(folder, number, sim_port, redis, more):
    listen = f"127.0.0.1:{free_port()}"
    config = folder / f"gateway{number}.yaml"
    settings = {
        "version": 1,
        "listen": listen,
        "admin": {"listen": f"127.0.0.1:{free_port()}"},
        "keys": "none",
        "redis": redis.url,
        "state": str(folder / f"state{number}"),
        "trusted_proxies": ["127.0.0.1"],
        "pools": {"m": {"backends": [f"http://127.0.0.1:{sim_port}"]}},
        **more,
    }
    config.write_text(json.dumps(settings))
    return Replica(config, f"http://{listen}")


class Load:
    """Clients that ask without a pause. `told` counts what came of each request: (kind, status or error)."""

    def __init__(self, port):
        self.port = port
        self.told = collections.Counter()
        self._over = threading.Event()
        kinds = [*["short"] * 6, *["anew"] * 3, *["stream"] * 8]
        self._threads = [threading.Thread(target=self._client, args=[each]) for each in kinds]

    def __enter__(self):
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for each in self._threads:
            each.join()

    def _client(self, kind):
        connection = connect(self.port, 60)
        while not self._over.is_set():
            try:
                outcome = self._ask(connection, LONG if kind == "stream" else SHORT)
            except (OSError, http.client.HTTPException) as error:
                outcome = repr(error)
            self.told[kind, outcome] += 1
            if kind == "anew" or outcome != 200:
                connection.close()
                connection = connect(self.port, 60)
        connection.close()

    def _ask(self, connection, body):
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            return f"{reply.status} {text[:200]!r}"
        whole = b"[DONE]" in text and b'"error"' not in text if "stream" in body else True
        return 200 if whole else f"cut short: {text[-300:]!r}"


@pytest.mark.parametrize("more", [{}, {"workers": 2}], ids=["one process", "two workers"])
def test_a_rolling_restart_under_load_is_noticed_by_no_client(tmp_path, more):
    nginx, sim_port, port = need("nginx", "nginx"), free_port(), free_port()
    sim = [GATEWAY, "sim", "--port", str(sim_port), "--model", "m"]
    with redis_server() as redis, running(sim, log=tmp_path / "sim.log"):
        replicas = [replica(tmp_path, number, sim_port, redis, more) for number in (1, 2)]
        with contextlib.ExitStack() as ends:
            for each in replicas:
                each.start()
                ends.callback(lambda each=each: each.process.kill())
            conf = as_shipped(tmp_path, port, *[each.url[7:] for each in replicas])
            ends.enter_context(serving(nginx, tmp_path, conf))
            wait_until(lambda: answers(port), 120, "nginx answers")
            with Load(port) as load:
                for each in replicas * 2:
                    before = each.served()
                    wait_until(lambda e=each, b=before: e.served() > b + 20, 60, "it has its part")
                    each.stop()
                    each.start()
        assert {outcome for _, outcome in load.told} == {200}, load.told
        assert load.told["stream", 200] >= 16
