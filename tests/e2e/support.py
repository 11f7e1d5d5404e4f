"""Programs outside Python that the e2e tests start: where they are, and how they are run and ended."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

CACHE = pathlib.Path(
    os.environ.get("VLLM_GATEWAY_TEST_CACHE", pathlib.Path.home() / ".cache/vllm-gateway-tests")
)
GATEWAY = str(pathlib.Path(sys.executable).parent / "vllm-gateway")


def need(path: pathlib.Path | str | None, what: str) -> str:
    """Return the path of a program, or skip the test with the reason."""
    found = shutil.which(str(path)) if isinstance(path, str) else path
    if found is None or not pathlib.Path(found).exists():
        pytest.skip(f"{what} is not installed (tests/e2e/install.sh {CACHE})")
    return str(found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url: str, timeout: float = 2.0) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.1)


@contextlib.contextmanager
def running(
    command: Sequence[str], *, log: pathlib.Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Run a program in a process group of its own; end the group at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            list(command), stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
    try:
        yield child
    finally:
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience)


@contextlib.contextmanager
def vllm(folder: pathlib.Path, port: int, *flags: str) -> Iterator[subprocess.Popen]:
    """Run a real vLLM on the CPU with the tiny model."""
    python = need(CACHE / "vllm/bin/python", "vLLM")
    model = need(CACHE / "models/tiny", "the tiny model")
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--enforce-eager", "--dtype", "float32",
        *flags,
    ]  # fmt: skip
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    log = folder / f"vllm-{port}.log"
    with running(command, log=log, env=env) as child:
        deadline = time.monotonic() + 240
        while get(f"http://127.0.0.1:{port}/health")[0] != 200:
            assert child.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, "vLLM did not start within 240 s"
            time.sleep(0.5)
        yield child


@dataclass(frozen=True)
class Gateway:
    """A running gateway process."""

    url: str
    admin_url: str
    key: str
    pid: int
    log: pathlib.Path
    config: pathlib.Path

    def post(
        self, path: str, body: dict[str, object], timeout: float = 60.0
    ) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self.key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metrics(self) -> str:
        return get(self.admin_url + "/metrics")[1].decode()


@contextlib.contextmanager
def gateway(folder: pathlib.Path, pools: str, extra: str = "") -> Iterator[Gateway]:
    """Run the gateway as its user does: a file, a key, `vllm-gateway serve`."""
    port, admin = free_port(), free_port()
    config = folder / "gateway.yaml"
    config.write_text(
        f"version: 1\nlisten: 127.0.0.1:{port}\nadmin: {{listen: 127.0.0.1:{admin}}}\n"
        f"keys: {{file: keys.yaml}}\n{extra}\n{pools}\n"
    )
    made = subprocess.run(
        [GATEWAY, "keys", "create", "e2e", "-c", str(config), "-o", "json"],
        check=True,
        capture_output=True,
    )
    log = folder / "gateway.log"
    with running([GATEWAY, "serve", "-c", str(config)], log=log) as child:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 30
        while get(url + "/readyz")[0] != 200:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Gateway(
            url, f"http://127.0.0.1:{admin}", json.loads(made.stdout)["key"], child.pid, log, config
        )
