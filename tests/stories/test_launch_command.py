"""The launcher that runs a command, and how programs are run."""

import asyncio
import os
import sys

import pytest
import uvloop

from gateway.launch.command import CommandLauncher
from gateway.launch.launcher import Changes, LaunchError, Superseded
from gateway.launch.run import run
from tests.stories.launched import left

PLAIN = Changes()


@pytest.fixture
def made(tmp_path):
    def make(code, *words, **more):
        command = (sys.executable, "-c", code, *words)
        return CommandLauncher(command, tmp_path / "logs" / "log.txt", **more)

    return make


def test_an_order_runs_the_command_once(made, tmp_path):
    launcher = made(f"print('restarting'); open({str(tmp_path / 'ran')!r}, 'a').write('x')")

    async def story():
        first = (await launcher.look()).incarnation
        second = await launcher.restart(first, grace_s=1, changes=PLAIN)
        assert second != first
        with pytest.raises(Superseded):
            await launcher.restart(first, grace_s=1, changes=PLAIN)
        assert (tmp_path / "ran").read_text() == "x"
        assert await launcher.log(100) == "restarting\n"
        assert (await launcher.look()).incarnation == second
        await launcher.restart(None, grace_s=1, changes=PLAIN)
        with pytest.raises(LaunchError, match="not stopped"):
            await launcher.stop(second, grace_s=1)
        with pytest.raises(LaunchError, match="cannot change it"):
            await launcher.restart(None, grace_s=1, changes=Changes(env={"A": "1"}))
        await launcher.close()

    uvloop.run(story())


def test_a_failure_shows_the_error_even_when_standard_output_is_flushed_after_it(made):
    launcher = made("import os; os.write(2, b'no such host\\n'); os.write(1, b'a\\n'); os._exit(4)")
    with pytest.raises(LaunchError, match="with exit code 4: no such host; a$"):
        uvloop.run(launcher.restart(None, grace_s=1, changes=PLAIN))
    assert uvloop.run(launcher.look()).incarnation.endswith("-order-0")


def test_a_program_that_is_not_there_is_told(tmp_path):
    launcher = CommandLauncher(("/no/such",), tmp_path / "log.txt")
    with pytest.raises(LaunchError, match="cannot run /no/such"):
        uvloop.run(launcher.restart(None, grace_s=1, changes=PLAIN))


def test_a_server_that_the_command_leaves_running_keeps_its_output(made, tmp_path):
    token = str(tmp_path / "token")
    server = "import time,sys\nprint('served', flush=True)\ntime.sleep(60)"
    launcher = made(
        f"import subprocess,sys; subprocess.Popen([sys.executable,'-c',{server!r},{token!r}])"
    )

    async def story():
        await launcher.restart(None, grace_s=1, changes=PLAIN)
        async with asyncio.timeout(20):
            while "served" not in await launcher.log(100):
                await asyncio.sleep(0.02)

    uvloop.run(story())
    (pid,) = left(token)
    os.kill(pid, 9)


def test_the_log_of_what_it_leaves_running_is_told_after_a_rotation_too(made, tmp_path):
    file, page = tmp_path / "logs" / "log.txt", "x" * 999_999 + "\n"
    file.parent.mkdir()
    file.write_text(page)  # of runs before
    launcher = made("print('served')")

    def write(text):
        with file.open("a") as log:
            log.write(text)

    async def story():
        await launcher.restart(None, grace_s=1, changes=PLAIN)
        write(page * 34)
        await launcher.look()
        assert file.stat().st_size == 0
        write("the cause\n" + page)
        assert "the cause" in await launcher.log(2_000_000)

    uvloop.run(story())


@pytest.mark.parametrize("ends", ["deadline", "cancel"])
def test_a_command_that_hangs_is_killed_with_its_children(made, tmp_path, ends):
    token = str(tmp_path / "token")
    launcher = made(
        "import subprocess,sys,time; code='import time; time.sleep(60)'\n"
        "subprocess.Popen([sys.executable, '-c', code, sys.argv[1]]); time.sleep(60)",
        token,
        call_s=1.0,
    )

    async def cancelled():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(launcher.restart(None, grace_s=60, changes=PLAIN))
            async with asyncio.timeout(20):
                while len(left(token)) < 2:
                    await asyncio.sleep(0.02)
            task.cancel()

    async def too_late():
        with pytest.raises(LaunchError, match="was killed") as caught:
            await launcher.restart(None, grace_s=0, changes=PLAIN)
        assert token not in str(caught.value)  # its arguments may hold a secret

    async def story():
        await (cancelled() if ends == "cancel" else too_late())
        async with asyncio.timeout(20):
            while left(token):  # SIGKILL was sent to all of them, and takes a moment
                await asyncio.sleep(0.02)

    uvloop.run(story())


def test_the_end_of_a_flood_is_kept_and_streams_apart():
    code = "import sys; print('x' * 3_000_000 + 'end'); print('fault', file=sys.stderr)"

    async def story():
        return await run([sys.executable, "-c", code], timeout_s=30, kept_bytes=512 * 1024)

    out = uvloop.run(story())
    assert (out[-4:], len(out)) == ("end\n", 512 * 1024)


def test_a_program_that_does_not_end_is_killed_at_the_deadline(tmp_path):
    token = str(tmp_path / "token")
    words = [sys.executable, "-c", "import time; time.sleep(60)", token]
    with pytest.raises(LaunchError, match="did not end within"):
        uvloop.run(run(words, timeout_s=0.2, kept_bytes=1024))
    assert left(token) == []
