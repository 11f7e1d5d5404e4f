"""Runs files of vLLM's API tests against one server: directly, and through a gateway in front of it.

Runs inside vLLM's own interpreter: python arm.py STATE FILE... (from the folder that holds `tests/`).
Each file is run twice in one process, so what vLLM imports is imported once. In place of vLLM's
`RemoteOpenAIServer`, which starts a server for each module, tests get one that attaches to a server
which lives on for the second arm, and for the next file that asks for the same flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from exchanges import Recorder

HERE = pathlib.Path(__file__).parent
DIRECT, GATEWAY = "direct", "gateway"
START_S = 600.0
MAX_MODEL_LEN = 4096  # with tens of thousands of tokens noise runs on for minutes
LONGER = {
    "anthropic/test_messages.py": 8192,  # its prompt is 4,397 of the tiny model's tokens
    "serve/instrumentator/test_basic.py": 12288,  # asks for 10,000 tokens, to cancel them
}
# Where it may load no adapter it leaves a task that asks a closed client again and again, for ever.
ENDLESS = "test_loading_invalid_adapters_does_not_break_others"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read()
    except OSError:
        return None


def start(command: list[str], log: pathlib.Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )  # fmt: skip


def end(group: int) -> None:
    """End a process group, and wait until it is gone (it is not always ours to wait for)."""
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                os.killpg(
                    group, number if time.monotonic() + 0.5 > deadline - patience_s + 0.5 else 0
                )
            except (ProcessLookupError, PermissionError):
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)
            time.sleep(0.2)


@dataclasses.dataclass
class Keeper:
    """The one server that runs now, and the gateway in front of it. Kept in a file between processes."""

    state: pathlib.Path
    gateway: str

    @property
    def _record(self) -> pathlib.Path:
        return self.state / "running.json"

    def running(self) -> dict[str, object]:
        try:
            return json.loads(self._record.read_text())
        except (OSError, ValueError):
            return {}

    def attach(self, arm: str, model: str, flags: list[str], env: dict[str, str]) -> int:
        """Return the port of a server with these flags, or of the gateway in front of it."""
        key = hashlib.sha256(json.dumps([model, flags, sorted(env.items())]).encode()).hexdigest()
        now = self.running()
        if now.get("key") != key or get(f"http://127.0.0.1:{now['port']}/health") is None:
            self.close()
            now = self._start(key, model, flags, env)
        if arm == GATEWAY and "gateway_port" not in now:
            now = self._front(now)
        return int(now["port"] if arm == DIRECT else now["gateway_port"])

    def close(self) -> None:
        now = self.running()
        for name in ("gateway_pid", "pid"):
            if name in now:
                end(int(now[name]))
        self._record.unlink(missing_ok=True)

    def _start(self, key: str, model: str, flags: list[str], env: dict[str, str]) -> dict:
        port = free_port()
        names = [] if "--served-model-name" in flags else ["--served-model-name", model]
        command = [
            sys.executable, str(HERE / "server.py"), "--model", model,
            *flags, *names, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        log = self.state / f"vllm-{port}.log"
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        child = start(command, log, {**inherited, **QUIET, **env})
        now = {"key": key, "port": port, "pid": child.pid, "log": str(log)}
        self._record.write_text(json.dumps(now))
        deadline = time.monotonic() + START_S
        while get(f"http://127.0.0.1:{port}/health") is None:
            if child.poll() is not None or time.monotonic() > deadline:
                self.close()
                pytest.fail(
                    f"no server: {' '.join(command)}\n{log.read_text()[-2000:]}", pytrace=False
                )
            time.sleep(0.3)
        return now

    def _front(self, now: dict) -> dict:
        listed = json.loads(get(f"http://127.0.0.1:{now['port']}/v1/models") or b"{}")
        first, *others = [each["id"] for each in listed["data"] if not each.get("parent")]
        port, admin = free_port(), free_port()
        pool = {"backends": [f"http://127.0.0.1:{now['port']}"], "aliases": others}
        config = self.state / f"gateway-{port}.json"
        config.write_text(
            json.dumps(
                {
                    "version": 1, "listen": f"127.0.0.1:{port}", "admin": {"listen": f"127.0.0.1:{admin}"},
                    "keys": "none", "health": {"models_interval": "1s"}, "pools": {first: pool},
                }
            )
        )  # fmt: skip
        log = self.state / f"gateway-{port}.log"
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        child = start([self.gateway, "serve", "-c", str(config)], log, inherited)
        now = {**now, "gateway_port": port, "gateway_pid": child.pid}
        self._record.write_text(json.dumps(now))
        deadline = time.monotonic() + 60
        while get(f"http://127.0.0.1:{port}/readyz") is None:
            if child.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no gateway: {log.read_text()[-2000:]}", pytrace=False)
            time.sleep(0.1)
        return now


def _capped(flags: list[str], place: int, longer: int | None) -> str:
    """Return a flag's value; the context is `longer`, or at most MAX_MODEL_LEN."""
    if place and flags[place - 1] == "--max-model-len":
        return str(longer or min(int(flags[place]), MAX_MODEL_LEN))
    return flags[place]


def attached(base: type, keeper: Keeper, arm: str, longer: int | None = None) -> type:
    """Return what vLLM's tests get as `RemoteOpenAIServer`; `longer` is a context in tokens."""

    class Attached(base):
        def __init__(
            self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True,
            max_wait_seconds=None, override_hf_configs=None,
        ):  # fmt: skip
            flags = [*vllm_serve_args]
            if not auto_port:  # the keeper gives ports
                place = flags.index("--port")
                del flags[place : place + 2]
            if seed is not None:
                flags += ["--seed", str(seed)]
            if override_hf_configs is not None:
                flags += ["--hf-overrides", json.dumps(override_hf_configs)]
            flags = [_capped(flags, place, longer) for place in range(len(flags))]
            if "--enforce-eager" not in flags:
                flags.append("--enforce-eager")
            self.uds, self.host = None, "127.0.0.1"
            self.show_hidden_metrics = False
            self._attach = functools.partial(keeper.attach, arm, model, flags, env_dict or {})
            self._attach()

        @property
        def port(self):
            """Another server of the same file may have taken its place; then it is started again."""
            return self._attach()

        def _shutdown(self):
            """The server lives on for the other arm."""

    return Attached


class Outcomes:
    """Collects what became of each test, and why."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now = self.found.setdefault(report.nodeid, {"outcome": "passed", "why": "", "seconds": 0.0})
        now["seconds"] = round(float(now["seconds"]) + report.duration, 2)
        if report.skipped:
            now["outcome"] = "skipped"
        elif report.failed:
            now["outcome"] = "failed" if report.when == "call" else f"error in {report.when}"
            crash = getattr(report.longrepr, "reprcrash", None)
            now["why"] = (crash.message if crash else str(report.longrepr))[:1500]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found[report.nodeid] = {
                "outcome": "not collected", "why": str(report.longrepr)[-1500:], "seconds": 0.0
            }  # fmt: skip


def main(state: pathlib.Path, files: list[str]) -> None:
    keeper = Keeper(state, os.environ["SUITE_GATEWAY"])
    import tests.utils as theirs

    base = theirs.RemoteOpenAIServer
    results: dict[str, dict[str, object]] = {}
    longer = next((LONGER[name] for name in LONGER if files[0].endswith(name)), None)
    for arm in (DIRECT, GATEWAY):
        kind = attached(base, keeper, arm, longer)
        theirs.RemoteOpenAIServer = kind
        # Modules bind the name when they are imported, which is once for both arms.
        for name, module in list(sys.modules.items()):
            if name.startswith("tests.entrypoints") and hasattr(module, "RemoteOpenAIServer"):
                module.RemoteOpenAIServer = kind
        outcomes = Outcomes()
        with Recorder() as recorder:
            pytest.main(
                ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout=90",
                 # A server's start has a bound of its own: START_S.
                 "-o", "timeout_func_only=true", "-o", "asyncio_mode=strict",
                 "-k", f"not {ENDLESS}", *files],
                plugins=[outcomes, recorder],
            )  # fmt: skip
        results[arm] = outcomes.found
        results[f"{arm} exchanges"] = recorder.summaries()
    (state / "outcomes-part.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
