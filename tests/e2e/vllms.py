"""Real vLLM servers on the CPU with the tiny model, that start in three seconds: forks of what has imported vLLM."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tests.e2e.support import MODELS, VLLM, VLLM_ENV, end, get, need, process
from tests.ports import free_port

_HERE = pathlib.Path(__file__).parent
# On the Python path of a vLLM: its engine is a fork of its server.
FORKING = {"PYTHONPATH": str(_HERE / "forking")}
_NO_MORE = MappingProxyType({})
_SCRIPT_S = 600.0


class Fork:
    """A process of which others may ask what they ask of a `Popen`; nobody is told how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = process(pid)

    def poll(self) -> int | None:
        """Return None as long as it lives."""
        return None if self._process and process(self.pid) == self._process else 0

    def wait(self, timeout: float) -> None:
        """Return once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("vLLM", timeout)
            time.sleep(0.02)


class _Imported:
    """The process that has imported vLLM. It ends with this one."""

    def __init__(self) -> None:
        python = need(VLLM / "bin/python", "vLLM")
        self._process = subprocess.Popen(
            [python, str(_HERE / "vllm_forks.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **VLLM_ENV, **FORKING},
        )  # fmt: skip
        assert self._told() == "imported"
        atexit.register(self._process.communicate)

    def fork(
        self,
        files: Sequence[pathlib.Path | str],
        words: Sequence[str] = (),
        *,
        script: str | None = None,
        env: Mapping[str, str] = _NO_MORE,
    ) -> Fork:
        """Make a fork that runs a script, or else a server."""
        asked = {"script": script, "words": [*words], "env": {**env}, "files": [*map(str, files)]}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._told()))

    def _told(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line, "it has ended; what it said last is among the captured errors"
        return line


_imported = functools.cache(_Imported)


@contextlib.contextmanager
def vllm(
    port: int, *flags: str, log: pathlib.Path, env: Mapping[str, str] = _NO_MORE
) -> Iterator[Fork]:
    """Run a real vLLM at a port in a process group of its own; a flag of yours counts."""
    tiny = need(MODELS / "tiny", "the tiny model")
    usual = [
        "--model", tiny, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "2048", "--enforce-eager", "--dtype", "float32",
    ]  # fmt: skip
    log.write_bytes(b"")
    server = _imported().fork([os.devnull, log, log], [*usual, *flags], env=env)
    try:
        yield server
    finally:
        end(server)


@contextlib.contextmanager
def vllms(
    folder: pathlib.Path, *flags: Sequence[str], env: Mapping[str, str] = _NO_MORE
) -> Iterator[list[int]]:
    """Run a real vLLM with each of these flags; yield their ports. They start at the same time."""
    ports = [free_port() for _ in flags]
    with contextlib.ExitStack() as all_of_them:
        started = []
        for port, own in zip(ports, flags, strict=True):
            log = folder / f"vllm-{port}.log"
            child = all_of_them.enter_context(vllm(port, *own, log=log, env=env))
            started.append((port, log, child))
        deadline = time.monotonic() + 240 * len(ports)
        for port, log, child in started:
            while get(f"http://127.0.0.1:{port}/health")[0] != 200:
                assert child.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline, "vLLM did not start within 240 s"
                time.sleep(0.1)
        yield ports


def in_vllm(script: str, asked: object) -> object:
    """Run a script of this folder where vLLM is imported; return the JSON of its last line."""
    with tempfile.TemporaryDirectory() as folder:
        given, told, errors = files = [pathlib.Path(folder) / name for name in ("in", "out", "err")]
        given.write_text(json.dumps(asked))
        told.touch()
        errors.touch()
        running = _imported().fork(files, script=str(_HERE / script))
        try:
            running.wait(_SCRIPT_S)
        finally:
            end(running)
        lines = told.read_text().splitlines()
        assert lines, errors.read_text(errors="replace")[-3000:]
        return json.loads(lines[-1])
