"""The parent of workers, with processes that only say who they are."""

import asyncio
import contextlib
import errno
import os
import signal
import sys

import pytest

from gateway.core.aio import start
from gateway.ingress.listener import Listen, Listeners, bind
from gateway.workers.parent import Parent

# The first process is replaced by another one at once, which ends soon; it has requests to finish meanwhile.
WORKER = """
import asyncio, os, pathlib, signal
from gateway.store.group import VARIABLE, Group, Place
import msgspec

place = msgspec.json.decode(os.environ[VARIABLE], type=Place)
folder = pathlib.Path(os.environ["STARTED"])
is_first = not (folder / "1").exists()
is_heir = is_first and not os.fork()
(folder / ("2" if is_heir else "1" if is_first else str(os.getpid()))).touch()

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    if is_heir:
        await asyncio.sleep(0.5)
    group = Group.join(place)
    running = asyncio.get_running_loop().create_task(group.run())
    await group.meet()
    await group.serving()
    if is_heir:
        await asyncio.sleep(0.3)
        os._exit(1)
    await told.wait()
    if is_first:
        (folder / "told").touch()
        await asyncio.sleep(0.5)
        (folder / "finished").touch()
    os._exit(0)

asyncio.run(main())
"""


async def until(condition, seconds):
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.05)
    return condition()


def test_a_successor_that_dies_is_started_again_while_the_one_before_still_finishes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("STARTED", str(tmp_path))

    async def check():
        with bind(Listen("127.0.0.1", 0)) as public, bind(Listen("127.0.0.1", 0)) as admin:
            parent = Parent(Listeners(public, admin), 1, [sys.executable, "-c", WORKER])
            running = start(parent.run(), name="parent")
            began = await until(lambda: len([*tmp_path.iterdir()]) == 3, 30)
            told_by_then = (tmp_path / "told").exists()
            os.kill(os.getpid(), signal.SIGTERM)
            await running
            assert began
            assert not told_by_then
            assert (tmp_path / "finished").exists()

    asyncio.run(check())


CALM = """
import asyncio, os, signal
from gateway.store.group import VARIABLE, Group, Place
import msgspec

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    group = Group.join(msgspec.json.decode(os.environ[VARIABLE], type=Place))
    running = asyncio.get_running_loop().create_task(group.run())
    await group.meet()
    await group.serving()
    await told.wait()
    os._exit(0)

asyncio.run(main())
"""


def test_a_worker_that_cannot_be_started_now_is_tried_again_and_ends_no_other(tmp_path):
    program = tmp_path / "worker"
    program.write_text(f"#!{sys.executable}\n{CALM}")
    program.chmod(0o755)

    async def check():
        with bind(Listen("127.0.0.1", 0)) as public, bind(Listen("127.0.0.1", 0)) as admin:
            parent = Parent(Listeners(public, admin), 2, [str(program)])
            running = start(parent.run(), name="parent")
            assert await until(lambda: all(map(parent._in_charge, (1, 2))), 30)
            one, two = (parent._in_charge(number).pid for number in (1, 2))
            program.rename(tmp_path / "away")  # it is being replaced by a new version
            os.kill(two, signal.SIGKILL)
            await asyncio.sleep(2.0)
            assert not running.done()
            assert parent._in_charge(1).pid == one
            (tmp_path / "away").rename(program)
            assert await until(lambda: (again := parent._in_charge(2)) and again.pid != two, 30)
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    asyncio.run(check())


def test_a_worker_whose_end_nobody_could_hear_of_is_ended_and_another_one_started(
    monkeypatch,
):
    """Else it would serve beside the one that is started in its place."""
    opens, watched = os.pidfd_open, []

    def pidfd_open(pid):
        watched.append(pid)
        if len(watched) == 3:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return opens(pid)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)

    async def check():
        with bind(Listen("127.0.0.1", 0)) as public, bind(Listen("127.0.0.1", 0)) as admin:
            parent = Parent(Listeners(public, admin), 2, [sys.executable, "-c", CALM])
            running = start(parent.run(), name="parent")
            assert await until(lambda: all(map(parent._in_charge, (1, 2))), 30)
            os.kill(parent._in_charge(2).pid, signal.SIGKILL)
            assert await until(lambda: len(watched) > 3 and parent._in_charge(2), 30)
            assert parent._in_charge(2).pid == watched[3]
            with pytest.raises(ProcessLookupError):
                os.kill(watched[2], 0)
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    asyncio.run(check())


# Worker 1 has the others reload as soon as worker 2 has read its settings, and before it serves.
RELOADED = """
import asyncio, os, pathlib, signal
from gateway.store.group import VARIABLE, Group, Place
import msgspec

place = msgspec.json.decode(os.environ[VARIABLE], type=Place)
folder = pathlib.Path(os.environ["STARTED"])

async def exists(name):
    while not (folder / name).exists():
        await asyncio.sleep(0.02)

async def main():
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    group = Group.join(place)
    running = loop.create_task(group.run())
    await group.meet()
    if not place.leads:
        (folder / "read").touch()
        await exists("ordered")
    loop.add_signal_handler(signal.SIGHUP, (folder / f"reloaded {place.number}").touch)
    loop.add_signal_handler(signal.SIGTERM, told.set)
    await group.serving()
    if place.leads:
        await exists("read")
        group.reload_others()
        await group.all_stop()  # by then the parent has heard it
        (folder / "ordered").touch()
    await told.wait()
    os._exit(0)

asyncio.run(main())
"""


def test_a_reload_that_one_worker_is_told_of_reaches_another_that_starts_once_it_serves(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("STARTED", str(tmp_path))

    async def check():
        with bind(Listen("127.0.0.1", 0)) as public, bind(Listen("127.0.0.1", 0)) as admin:
            parent = Parent(Listeners(public, admin), 2, [sys.executable, "-c", RELOADED])
            running = start(parent.run(), name="parent")
            assert await until((tmp_path / "reloaded 2").exists, 30)
            assert not (tmp_path / "reloaded 1").exists()
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    asyncio.run(check())
