"""The parent of a gateway with several workers: it opens the listeners, starts the workers, and keeps them running.

    listeners -> worker 1 -> (it serves) -> workers 2 to N -> ... -> SIGTERM -> all have ended

Each worker is a gateway that accepts connections from the same listener. The parent serves no clients: it keeps what
the workers share (`store.group`), and passes calls on between them. A worker that dies is started again: at once if
it ran for a while, else after a pause that grows. A worker that is upgraded starts its own successor
(`gateway.upgrade`), which takes its place here once it serves; the old process finishes its requests.

SIGTERM and SIGINT end all workers, each as it would end alone. SIGHUP reloads them, each once it serves.
SIGUSR2 upgrades worker 1, which has the others upgraded before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from gateway.core.aio import SystemClock, start
from gateway.core.channel import Answers, Channel, Unanswered
from gateway.ingress.listener import Listeners
from gateway.limiting.inparent import SharedLevels
from gateway.store.group import LEADER, VARIABLE, Place, store_answers
from gateway.store.memory import MemoryStore
from gateway.upgrade.notify import SOCKET, notify
from gateway.upgrade.successor import command
from gateway.workers.worker import Worker

log = logging.getLogger("gateway.workers")

_LONG_S: Final = 10.0  # a worker that ran for so long is started again at once
_FIRST_PAUSE_S: Final = 0.5
_MOST_PAUSE_S: Final = 30.0
_FELLOW_S: Final = 1.5  # for a worker to answer another one
_UPGRADED_S: Final = 150.0  # the deadlines of `upgrade.replace`, and time to end a failed process
_PEER: Final = struct.Struct("3i")  # pid, uid, gid


class NotStarted(Exception):
    """A worker ended before it served for the first time; it has written why."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(f"worker {worker.number} {worker.how()} before it served")
        self.exit_code = None if worker.child is None else worker.child.returncode


class Parent:
    """The parent process; see the module. `run` is its whole life."""

    def __init__(self, listeners: Listeners, count: int, words: list[str] | None = None) -> None:
        """`words`: the command line of a worker; by default that of this process."""
        self._listeners = listeners
        self._count = count
        self._words = words or command()
        self._clock = SystemClock()
        self._store = MemoryStore(self._clock)
        self._limits = SharedLevels(self._clock)
        self._address = f"vllm-gateway-{secrets.token_hex(16)}"
        self._key = secrets.token_hex(32)
        self._workers: list[Worker] = []  # running processes, the oldest first
        self._stopping = asyncio.Event()
        self._failed: NotStarted | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keep the workers running until a signal ends them, and wait until all have ended.

        Raises:
            NotStarted: one cannot start; the others were ended.
        Cancel: ends the workers.
        """
        loop = asyncio.get_running_loop()
        for which, act in self._acts().items():
            loop.add_signal_handler(which, act)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self._address)
        listener.listen(64)
        listener.setblocking(False)
        meeting = start(self._meet_all(listener), name="workers that come")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep(LEADER), name="worker 1")
                others = range(LEADER + 1, self._count + 1)
                if await self._served(LEADER):
                    for number in others:
                        group.create_task(self._keep(number), name=f"worker {number}")
                if all([await self._served(number) for number in others]):
                    notify(READY=1)
                    extra = {"event": "workers_serve", "workers": self._count}
                    log.info("%d workers serve", self._count, extra=extra)
            if self._failed is not None:
                raise self._failed
        finally:
            for each in self._workers:
                each.send(signal.SIGTERM)
            for each in tuple(self._workers):
                await each.ended.wait()
            meeting.cancel()
            for task in self._tasks:
                task.cancel()
            listener.close()

    def _acts(self) -> dict[signal.Signals, Callable[[], None]]:
        return {
            signal.SIGTERM: self._stop,
            signal.SIGINT: partial(self._stop, signal.SIGINT),
            signal.SIGHUP: self._reload,
            signal.SIGUSR2: self._upgrade,
        }

    def _stop(self, which: signal.Signals = signal.SIGTERM) -> None:
        """Send all workers a signal to end, and close our copy of the public listener. Twice: they end at once."""
        notify(STOPPING=1)
        self._stopping.set()
        self._listeners.public.close()
        for each in self._workers:
            each.send(which)

    def _reload(self, but: int | None = None) -> None:
        """Have all workers reload, or all others."""
        for each in self._workers:
            if each.number != but:
                each.reload()

    def _upgrade(self) -> None:
        leader = self._in_charge(LEADER)
        if leader is None:
            log.warning(
                "no upgrade: worker 1 does not serve now", extra={"event": "upgrade_failed"}
            )
        else:
            leader.send(signal.SIGUSR2)

    # --- the processes ------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Keep one worker running. If its first process never serves, end all workers."""
        short = 0  # processes in a row that ended soon
        worker = self._spawn(number)
        began = False
        while True:
            await worker.left.wait()
            self._see_off(worker)
            every = [each for each in self._workers if each.number == number]
            heir = next((each for each in every if not each.left.is_set()), None)
            began = began or worker.serving.is_set()
            if heir is not None:
                worker = heir
                continue
            if self._stopping.is_set():
                break
            if not began:
                self._failed = NotStarted(worker)
                self._stop(signal.SIGINT)
                return
            lived_s = self._clock.now() - worker.began_at
            short = 0 if lived_s >= _LONG_S else short + 1
            wait_s = pause_s(short)
            log.warning(
                "worker %d (process %d) %s; another one is started%s",
                *(number, worker.pid, worker.how(), f" in {wait_s:g} s" if wait_s else ""),
                extra={"event": "worker_ended", "worker": number},
            )
            another = await self._another(number, short)
            if another is None:
                break
            worker = another
        for each in [each for each in self._workers if each.number == number]:
            await each.ended.wait()  # replaced processes may still finish requests

    async def _another(self, number: int, short: int) -> Worker | None:
        """Start another process of a worker, as soon as the system lets it; None: the gateway stops."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s(short)):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return None
            try:
                return self._spawn(number)
            except OSError as error:  # no memory, no process, or its program is being replaced
                short = max(short, 1) + 1
                log.error(
                    "worker %d cannot be started now: %s; tried again in %g s",
                    *(number, error, pause_s(short)),
                    extra={"event": "worker_not_started", "worker": number},
                )

    def _spawn(self, number: int) -> Worker:
        public, admin, kept = self._listeners
        place = Place(number, self._count, self._address, public.fileno(), admin.fileno(), kept, self._key)  # fmt: skip
        environ = {name: value for name, value in os.environ.items() if name != SOCKET}
        child = subprocess.Popen(
            self._words,
            env={**environ, VARIABLE: msgspec.json.encode(place).decode()},
            stdin=subprocess.DEVNULL,
            pass_fds=(place.public, place.admin),
            start_new_session=True,  # a terminal sends its signals to the parent alone
        )
        try:
            return self._add(Worker(number, child.pid, self._clock.now(), child))
        except OSError:  # nobody would hear of its end
            child.kill()
            child.wait()
            raise

    def _add(self, worker: Worker) -> Worker:
        worker.watch()
        self._workers.append(worker)
        return worker

    def _see_off(self, worker: Worker) -> None:
        """Forget a process once it has ended; a replaced one finishes its requests first."""

        async def ended() -> None:
            await worker.ended.wait()
            await self._gone(worker)

        self._beside(ended(), f"the end of process {worker.pid}")

    def _beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = start(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gone(self, worker: Worker) -> None:
        """Forget a process, and release its leases: it certainly holds them no more."""
        if worker in self._workers:
            self._workers.remove(worker)
        for lease in worker.leases.values():
            await self._store.release(lease)

    def _in_charge(self, number: int) -> Worker | None:
        """Return the newest process of a worker that serves."""
        every = [each for each in self._workers if each.number == number and not each.left.is_set()]
        serving = [each for each in every if each.serving.is_set()]
        return serving[-1] if serving else None

    async def _served(self, number: int) -> bool:
        """Wait until a worker serves; False: the gateway stops."""
        while self._in_charge(number) is None and not self._stopping.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return not self._stopping.is_set()

    # --- calls of workers ---------------------------------------------------------------------------

    async def _meet_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connected, _ = await loop.sock_accept(listener)
            pid, uid, _ = _PEER.unpack(
                connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if uid != os.getuid():
                connected.close()
                continue
            self._beside(self._meet(connected, pid), f"process {pid}")

    async def _meet(self, connected: socket.socket, pid: int) -> None:
        """Serve one process until it closes its end."""
        worker = next((each for each in self._workers if each.pid == pid), None)
        met: list[Worker] = [] if worker is None else [worker]
        answers: dict[str, Callable[..., Any]] = {}
        channel = Channel(connected, answers)
        channel.at_once = {"limits": self._limits.run}

        async def hello(number: int) -> None:
            if not met:
                met.append(self._add(Worker(number, pid, self._clock.now())))
            met[0].channel = channel
            answers.update(self._answers(met[0]))

        answers["hello"] = hello
        await channel.run()
        if met and met[0].child is None:
            await met[0].ended.wait()
            await self._gone(met[0])

    def _answers(self, worker: Worker) -> Answers:
        async def serving() -> None:
            worker.serves()
            for each in self._workers:
                if each.number == worker.number and each is not worker:
                    each.left.set()  # this is an upgrade: the old process finishes its requests

        async def others_ended() -> None:
            for each in [each for each in self._workers if each is not worker]:
                await each.ended.wait()

        async def all_stop() -> bool:
            return self._stopping.is_set()

        async def fellows(what: str, args: list[Any]) -> list[Any]:
            others = [
                found
                for number in range(LEADER, self._count + 1)
                if number != worker.number and (found := self._in_charge(number)) is not None
            ]
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(each.ask(what, args, _FELLOW_S)) for each in others]
            return [each.result() for each in asked if each.result() is not None]

        async def reload_others() -> None:
            self._reload(but=worker.number)

        async def upgrade_others() -> str:
            return await self._upgrade_others(worker.number)

        return {
            "serving": serving,
            "others_ended": others_ended,
            "all_stop": all_stop,
            "fellows": fellows,
            "reload_others": reload_others,
            "upgrade_others": upgrade_others,
            **store_answers(self._store, worker.leases),
        }

    async def _upgrade_others(self, but: int) -> str:
        """Have each worker except `but` replaced, one after another; return what went wrong, or an empty text."""
        for number in range(LEADER, self._count + 1):
            before = self._in_charge(number)
            if number == but or before is None:
                continue
            assert before.channel is not None
            try:
                why = await before.channel.ask("upgrade", within_s=_UPGRADED_S)
            except Unanswered as error:
                why = str(error)
            if why and self._in_charge(number) is before:
                return f"worker {number} was not replaced: {why}"
        return ""


def pause_s(short: int) -> float:
    """Return the pause before the next process of a worker, after so many in a row that ended soon."""
    return min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(short - 2, 16)) if short > 1 else 0.0
