"""Real vLLM servers that tests share: the same flags make the same server."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

from tests.e2e.support import get, wait_until
from tests.e2e.vllms import vllm
from tests.ports import free_port

_START_S = 480.0
# A valve holds what its server has long said: the server is not to end the idle connection meanwhile.
_ENV = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}


class Engine:
    """A real vLLM at a port of its own, that may be frozen or killed."""

    def __init__(self, folder: pathlib.Path, flags: tuple[str, ...]) -> None:
        self.port = free_port()
        self._log = folder / f"vllm-{self.port}.log"
        self._flags = flags
        self._stack = contextlib.ExitStack()
        self._child = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def lives(self) -> bool:
        """Whether its process has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.lives:
            self.signal(signal.SIGCONT)
            return
        self._stack.close()
        server = vllm(self.port, *self._flags, log=self._log, env=_ENV)
        self._child = self._stack.enter_context(server)

    def wait(self) -> None:
        """Return once it serves."""

        def serves() -> bool:
            assert self.lives, self._log.read_text(errors="replace")[-3000:]
            return get(self.url + "/health")[0] == 200

        wait_until(serves, _START_S, "vLLM serves")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._child.pid, number)

    def stop(self) -> None:
        """End it."""
        if self.lives:
            self.signal(signal.SIGCONT)
        self._stack.close()


class Engines:
    """All real servers that tests share, by their flags."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._by_flags: dict[tuple[str, ...], list[Engine]] = {}

    def serving(self, count: int, *flags: str) -> list[Engine]:
        """Return so many servers with these flags; those that are missing or were killed start together."""
        found = self._by_flags.setdefault(flags, [])
        found += [Engine(self._folder, flags) for _ in range(count - len(found))]
        for each in found[:count]:
            each.start()
        for each in found[:count]:
            each.wait()
        return found[:count]

    def stop(self, *flags: str) -> None:
        """End those with these flags."""
        for each in self._by_flags.pop(flags, ()):
            each.stop()

    def stop_all(self) -> None:
        """End all."""
        for flags in list(self._by_flags):
            self.stop(*flags)


@contextlib.contextmanager
def engines_in(folder: pathlib.Path) -> Iterator[Engines]:
    """Run what is asked for until the end."""
    made = Engines(folder)
    try:
        yield made
    finally:
        made.stop_all()
