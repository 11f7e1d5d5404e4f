"""Of two gateways with one state folder the second one warns, for as long as the first one runs."""

import asyncio
import contextlib
import os
import socket

from gateway.core.aio import start
from gateway.launch.folderlock import FolderLock


@contextlib.asynccontextmanager
async def holds(lock):
    """Have a gateway with this lock run, and let it ask for it once."""
    task = start(lock.hold(), name="lock")
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_the_second_gateway_of_a_folder_says_who_uses_it_too(tmp_path, caplog):
    first, second = FolderLock(tmp_path / "state"), FolderLock(tmp_path / "state")

    async def story():
        async with holds(first), holds(second):
            assert (first.other, second.other[:8]) == ("", "process ")

    asyncio.run(story())
    (warned,) = caplog.records
    assert f"{tmp_path / 'state'} is used by another gateway, too: process " in warned.getMessage()
    assert "`state`" in warned.getMessage()


def test_who_warned_has_the_folder_alone_once_the_other_one_has_ended(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path, every_s=0.01)

    async def story():
        async with contextlib.AsyncExitStack() as until:
            await until.enter_async_context(holds(first))
            async with holds(second):
                assert second.other
                await until.aclose()
                async with asyncio.timeout(10):
                    while second.other:
                        await asyncio.sleep(0.01)
                async with holds(third := FolderLock(tmp_path)):
                    assert third.other == second_told

    second_told = f"process {os.getpid()} on {socket.gethostname()}"
    asyncio.run(story())


def test_the_next_gateway_of_a_folder_has_it_alone(tmp_path, caplog):
    async def story():
        for _ in range(2):
            lock = FolderLock(tmp_path)
            async with holds(lock):
                assert lock.other == ""

    asyncio.run(story())
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_told_elsewhere(tmp_path, caplog):
    (tmp_path / "state").write_text("a file in its place")
    lock = FolderLock(tmp_path / "state")

    async def story():
        async with holds(lock):
            assert lock.other == ""

    asyncio.run(story())
    assert not caplog.records


def test_a_try_that_fails_leaves_no_descriptor_open(tmp_path):
    os.mkfifo(tmp_path / "gateway.lock")  # can be locked, and not read from a place
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)

    async def story():
        async with holds(first):
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                async with holds(second):
                    pass
            assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(story())
