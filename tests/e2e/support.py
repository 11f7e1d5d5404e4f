"""Programs outside Python that the e2e tests start: where they are, and how they are run and ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import pytest

from tests.ports import free_port

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


def get(url: str, timeout: float = 2.0) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def page(url: str) -> str:
    """Return a page, however long a busy machine takes: no page is not a page without metrics."""
    status, body = get(url, timeout=60.0)
    assert status == 200, (url, status)
    return body.decode()


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.1)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    log: pathlib.Path,
    env: dict[str, str] | None = None,
    cwd: pathlib.Path | None = None,
) -> Iterator[subprocess.Popen]:
    """Run a program in a process group of its own; end the group at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            list(command), stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **(env or {})}, cwd=cwd,
        )  # fmt: skip
    try:
        yield child
    finally:
        end(child)


def end(leader) -> None:
    """End a process and all of its group."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(patience)


# As on one GPU, the engine's process does the work itself. On the CPU vLLM would start a third process
# for that, and each imports torch and vLLM, which is what a start takes.
VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
VLLM = pathlib.Path(os.environ.get("VLLM_GATEWAY_TEST_VLLM", CACHE / "vllm"))
MODELS = pathlib.Path(os.environ.get("VLLM_GATEWAY_TEST_MODELS", CACHE / "models"))


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
        return page(self.admin_url + "/metrics")


@contextlib.contextmanager
def gateway(folder: pathlib.Path, pools: str, extra: str = "") -> Iterator[Gateway]:
    """Run the gateway as its user does: a file, a key, `vllm-gateway serve`."""
    port, admin = free_port(), free_port()
    config = folder / "gateway.yaml"
    config.write_text(
        f"version: 1\nlisten: 127.0.0.1:{port}\nadmin: {{listen: 127.0.0.1:{admin}}}\n"
        f"keys: {{file: keys.yaml}}\nshutdown: {{announce: 0s}}\n{extra}\n{pools}\n"
    )
    made = subprocess.run(
        [GATEWAY, "keys", "create", "e2e", "-c", str(config), "-o", "json"],
        check=True,
        capture_output=True,
    )
    log = folder / "gateway.log"
    with running([GATEWAY, "serve", "-c", str(config)], log=log) as child:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while get(url + "/readyz")[0] != 200:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Gateway(
            url, f"http://127.0.0.1:{admin}", json.loads(made.stdout)["key"], child.pid, log, config
        )


class Stalls:
    """How long a thread had to wait for a processor of this machine, while a `with` lasts.

    A virtual machine may lose a processor for seconds, or others may hold it: that delays whatever is
    tried there. A thread on each processor looks at the clock ten times a second, and counts by how
    much it came too late.
    """

    _BEAT_S = 0.1
    _COUNTS_S = 0.5  # less is how it is beside others that want to run

    def __init__(self) -> None:
        self._over = threading.Event()
        self._late: dict[int, float] = dict.fromkeys(os.sched_getaffinity(0), 0.0)
        self._threads = [threading.Thread(target=self._watch, args=[core]) for core in self._late]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    @property
    def seconds(self) -> float:
        """At the processor where it was longest."""
        return max(self._late.values())

    def _watch(self, core: int) -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        seen = time.monotonic()
        while not self._over.wait(self._BEAT_S):
            now = time.monotonic()
            late = now - seen - self._BEAT_S
            self._late[core] += late if late > self._COUNTS_S else 0.0
            seen = now


# --- servers that the gateway starts --------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process that lives; the start tells it from a later one with the same number."""

    pid: int
    started: int
    name: str


def process(pid: int) -> Process | None:
    with contextlib.suppress(OSError, ValueError):
        name, _, rest = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        fields = rest.split()
        if fields[0] not in "ZX":
            return Process(pid, int(fields[19]), name.partition("(")[2])
    return None


def processes_of(state: pathlib.Path, backend: str = "") -> set[Process]:
    """Return the processes of the backends (of one: `pool--name`) whose gateway keeps its state there.

    By what cannot be lost: the marker in their environment, or their output into our log. A process
    that overwrites the first (vLLM's engine, by its title) keeps the second.
    """
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            each = process(int(entry.name))
            if each is not None and _is_of(entry, state, backend):
                found.add(each)
    return found


def _is_of(entry: pathlib.Path, state: pathlib.Path, backend: str) -> bool:
    with contextlib.suppress(OSError):
        marker = f"\0GATEWAY_BACKEND={state}#{backend.replace('--', '/')}".encode()
        told = b"\0" + (entry / "environ").read_bytes()
        if (marker + b"\0" if backend else marker) in told:
            return True
    for number in (1, 2):
        with contextlib.suppress(OSError):
            target = os.readlink(entry / "fd" / str(number))
            if target.startswith(str(state / "logs" / (backend and f"{backend}.txt"))):
                return True
    return False


class Supervised:
    """A gateway that starts its backends, with its configuration and state in a folder of its own."""

    def __init__(self, folder: pathlib.Path, pools: str, more: str = "") -> None:
        self.folder = folder
        self.state = folder / "state"
        self.netloc = f"127.0.0.1:{free_port()}"
        self.admin_url = f"http://127.0.0.1:{free_port()}"
        self.config = folder / "gateway.yaml"
        self.config.write_text(
            f"version: 1\nlisten: {self.netloc}\nadmin: {{listen: {self.admin_url.partition('//')[2]}}}\n"
            f"keys: none\n{more}pools:\n{pools}"
        )
        self.log = folder / "gateway.log"
        self.gateway: subprocess.Popen | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            command = [GATEWAY, "serve", "-c", str(self.config)]
            self.gateway = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        self.until(lambda: get(self.admin_url + "/livez")[0] == 200, 60, "the gateway answers")

    def kill(self) -> None:
        self.gateway.kill()
        self.gateway.wait()

    def end(self) -> set[Process]:
        """End the gateway as its user does; return what is left of its backends, and end that."""
        self.gateway.terminate()
        try:
            self.gateway.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        left = processes_of(self.state)
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        return left

    def verb(self, *words: str) -> str:
        command = [GATEWAY, *words, "--server", self.admin_url]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ran.returncode == 0, f"{words}: {ran.stdout}{ran.stderr}{self.story()}"
        return ran.stdout

    def order(self, backend: str, verb: str, **body: object) -> dict:
        """Order something of a backend as `verb` does, without the time that a program's start takes."""
        url = f"{self.admin_url}/admin/v1/backends/{backend}:{verb}"
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def ask(self, path: str) -> dict:
        status, body = get(self.admin_url + path, timeout=60)
        return json.loads(body) if status == 200 else {}

    def events(self, backend: str = "", kind: str = "") -> list[dict]:
        """Return what supervision told, the oldest first, `at` as seconds since the epoch."""
        rows = self.ask("/admin/v1/events?limit=1000").get("data", [])
        return [
            {**each, "at": datetime.datetime.fromisoformat(each["at"]).timestamp()}
            for each in reversed(rows)
            if backend in ("", each["backend"]) and kind in ("", each["kind"])
        ]

    def backend(self, name: str) -> dict:
        pools = self.ask("/admin/v1/overview").get("pools", [])
        return next((each for pool in pools for each in pool["backends"] if each["id"] == name), {})

    def serves(self, name: str) -> bool:
        return self.backend(name).get("phase") == "ready"

    def launched(self, backend: str) -> dict:
        """Return the record of what was started for a backend, `pool--name`."""
        return json.loads((self.state / "run" / f"{backend}.json").read_text())

    def log_of(self, backend: str) -> str:
        path = self.state / "logs" / f"{backend}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def engine(self, backend: str) -> Process:
        (found,) = [
            each
            for each in processes_of(self.state, backend)
            if each.name.startswith("VLLM::Engine")
        ]
        return found

    def until(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.gateway.poll() is None, f"the gateway ended{self.story()}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}{self.story()}"
            time.sleep(0.1)

    def story(self) -> str:
        """Return what happened, for the message of a failure: events, and the ends of all logs."""
        events = [
            f"{datetime.datetime.fromtimestamp(each['at'], datetime.UTC):%H:%M:%S.%f} {each['backend']}"
            f" {each['kind']} ({each['label']}): {each['detail']}"
            for each in self.events()
        ]
        pools = self.ask("/admin/v1/overview").get("pools", [])
        now = [f"{each}" for pool in pools for each in pool["backends"]]
        logs = [self.log, *sorted((self.state / "logs").glob("*.txt"))]
        ends = [f"--- {path.name}\n{_end(path)}" for path in logs]
        return "\n".join(["", "--- events", *events, "--- now", *now, *ends])


def _end(path: pathlib.Path) -> str:
    """Return the last lines of a log, without those that tell of each request."""
    lines = path.read_text(errors="replace").splitlines()
    told = [each for each in lines if '"tenant"' not in each and 'HTTP/1.1" 200' not in each]
    return "\n".join(each[:300] for each in told[-25:])
