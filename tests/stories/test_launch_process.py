"""The launcher of processes, with real ones: start, end, adoption, and nothing left behind."""

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import uvloop

from gateway.config.supervision import LaunchConfig
from gateway.launch import proc
from gateway.launch.launcher import Changes, LaunchError, Obstacle, Runs, Seen, Superseded
from gateway.launch.logfile import ROTATE_BYTES
from gateway.launch.oom import Counter, OomKills
from gateway.launch.process import ProcessLauncher
from gateway.launch.record import load, save
from tests.ports import free_port
from tests.stories.launched import SCRIPT, left

GRACE_S = 20.0
PLAIN = Changes()


class Bench:
    """A state folder, a script, and a token by which all it ever started is found."""

    def __init__(self, folder):
        self.state = folder / "state"
        self.script = folder / "server.py"
        self.script.write_text(SCRIPT)
        self.token = f"token-{uuid.uuid4().hex}"
        self.port = free_port()

    def config(self, *words, **more):
        command = [sys.executable, str(self.script), "--token", self.token, *words]
        return LaunchConfig.model_validate({"command": command, "port": self.port, **more})

    def launcher(self, *words, gpu_holders=lambda: None, oom_counter=None, **more):
        return ProcessLauncher(
            self.config(*words, **more),
            pool="org/model:7b",
            backend="b1",
            state=self.state,
            gpu_holders=gpu_holders,
            oom_kills=OomKills(lambda pid: oom_counter),
        )

    @property
    def record(self):
        (path,) = (self.state / "run").glob("*.json")
        return path

    def left(self):
        return left(self.token)

    async def until(self, condition, what):
        async with asyncio.timeout(20):
            while not (found := await condition()):
                await asyncio.sleep(0.02)
            return found

    async def processes(self, count):
        """Wait until there are so many; one that was started has no words for the moment of its exec."""

        async def there():
            return len(self.left()) == count

        await self.until(there, f"{count} processes")

    async def serving(self, launcher):
        async def said():
            return any(line.startswith("serves") for line in await launcher.new_lines())

        await self.until(said, "serving")

    @contextlib.asynccontextmanager
    async def standing_still(self, server):
        """Have a server do nothing meanwhile; it may run on for a moment after it was told."""
        pid = int(server.partition("-")[0])

        async def stopped():
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

        os.kill(pid, signal.SIGSTOP)
        try:
            await self.until(stopped, "standing still")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    for pid in made.left():  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ended(bench, launcher):
    async def check():
        seen = await launcher.look()
        return None if seen.running else seen

    return bench.until(check, "the end")


def test_a_kill_for_lack_of_memory_is_told_for_this_end_only(bench, tmp_path):
    counts = tmp_path / "vmstat"
    counts.write_text("oom_kill 2\n")

    async def story():
        launcher = bench.launcher(oom_counter=Counter(counts, of_machine=True))
        for rises in (True, False):
            first = await launcher.restart(
                (await launcher.look()).incarnation, grace_s=GRACE_S, changes=PLAIN
            )
            await bench.serving(launcher)
            assert (await launcher.look()).oom_killed is None
            if rises:
                counts.write_text("oom_kill 3\n")
            os.kill(int(first.partition("-")[0]), signal.SIGKILL)
            seen = await ended(bench, launcher)
            assert seen == Seen(first, Runs.ENDED, -signal.SIGKILL, oom_killed=rises)
            assert await launcher.look() == seen

    uvloop.run(story())


@pytest.fixture
def full_disk(tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    with contextlib.suppress(OSError):
        (folder / "filler").write_bytes(b"x" * 65536)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_with_its_path_and_starts_nothing(bench, full_disk):
    async def story():
        (bench.state / "logs").mkdir(parents=True)
        (bench.state / "run").symlink_to(full_disk)
        launcher = bench.launcher()
        with pytest.raises(LaunchError, match=r"No space left on device \(.*run/") as caught:
            await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert caught.value.obstacle is Obstacle.DISK
        assert bench.left() == []
        assert await launcher.look() == Seen()
        (full_disk / "filler").unlink()
        await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await launcher.stop((await launcher.look()).incarnation, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_full_disk_ends_no_server_that_could_not_be_started_anew(bench, full_disk):
    """A planned restart waits until there is space: its server serves meanwhile."""

    async def story():
        (full_disk / "filler").unlink()
        bench.state.mkdir()
        (bench.state / "run").symlink_to(full_disk)
        launcher = bench.launcher()
        started = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        with contextlib.suppress(OSError), (full_disk / "filler").open("wb") as filler:
            while True:
                filler.write(b"x")
                filler.flush()
        with pytest.raises(LaunchError, match="No space left on device") as caught:
            await launcher.restart(started, grace_s=GRACE_S, changes=PLAIN)
        assert caught.value.obstacle is Obstacle.DISK
        assert await launcher.look() == Seen(started, Runs.RUNNING)
        (full_disk / "filler").unlink()
        again = await launcher.restart(started, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await launcher.stop(again, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_full_disk_keeps_nobody_from_looking_when_the_log_is_rotated(bench, full_disk):
    async def story():
        (full_disk / "filler").unlink()
        bench.state.mkdir()
        (bench.state / "run").symlink_to(full_disk)
        launcher = bench.launcher()
        started = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        with contextlib.suppress(OSError), (full_disk / "filler").open("wb") as filler:
            while True:
                filler.write(b"x")
                filler.flush()
        os.truncate(launcher.log_file.path, ROTATE_BYTES + 1)
        assert await launcher.look() == Seen(started, Runs.RUNNING)
        assert launcher.log_file.size == 0  # it was rotated
        (full_disk / "filler").unlink()
        await launcher.stop(started, grace_s=GRACE_S)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("command", "obstacle"),
    [
        (["no-such-program"], Obstacle.CANNOT_HELP),
        (["/etc"], Obstacle.CANNOT_HELP),
        (["/nowhere/vllm"], Obstacle.CANNOT_HELP),
    ],
)
def test_what_no_further_try_can_cure_is_told_as_such(bench, command, obstacle):
    async def story():
        launch = LaunchConfig.model_validate({"command": command, "port": bench.port})
        launcher = ProcessLauncher(launch, pool="p", backend="b", state=bench.state)
        with pytest.raises(LaunchError) as caught:
            await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert caught.value.obstacle is obstacle

    uvloop.run(story())


def test_a_server_is_started_seen_restarted_and_stopped(bench):
    async def story():
        launcher = bench.launcher()
        assert await launcher.look() == Seen()
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        assert await launcher.look() == Seen(first, Runs.RUNNING)
        with pytest.raises(Superseded):
            await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)

        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert second != first
        await bench.serving(launcher)
        assert len(bench.left()) == 1
        with pytest.raises(Superseded):
            await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        with pytest.raises(Superseded):
            await launcher.stop(first, grace_s=GRACE_S)
        assert (await launcher.look()).running

        await launcher.stop(second, grace_s=GRACE_S)
        assert bench.left() == []
        assert await launcher.look() == Seen(second, Runs.ENDED, exit_code=-signal.SIGTERM)
        await launcher.stop(second, grace_s=GRACE_S)  # again: nothing to do, nothing wrong
        await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await launcher.stop((await launcher.look()).incarnation, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


def test_all_it_left_behind_is_ended_however_it_hid(bench):
    async def story():
        launcher = bench.launcher("--child", "worker", "titled", "away", "blank")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await bench.processes(5)
        # The server dies, its children live on: they are ended before the next one starts.
        os.kill(int(first.partition("-")[0]), signal.SIGKILL)
        seen = await ended(bench, launcher)
        assert (seen.incarnation, seen.exit_code) == (first, -signal.SIGKILL)
        assert len(bench.left()) == 4
        before = set(bench.left())
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await bench.processes(5)
        assert not before & set(bench.left())
        await launcher.stop(second, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_ignores_sigterm_or_stands_still_is_killed(bench, stopped):
    async def story():
        launcher = bench.launcher(*([] if stopped else ["--ignore-term"]), "--child", "worker")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        if stopped:
            for pid in bench.left():
                os.kill(pid, signal.SIGSTOP)
        await launcher.stop(first, grace_s=0.3)
        assert bench.left() == []
        expected = {-signal.SIGKILL, -signal.SIGTERM} if stopped else {-signal.SIGKILL}
        assert (await launcher.look()).exit_code in expected

    uvloop.run(story())


def test_how_it_ended_and_what_it_said_last_are_told(bench):
    async def story():
        launcher = bench.launcher("--exit", "3", "--lines", "2")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert await ended(bench, launcher) == Seen(first, Runs.ENDED, exit_code=3)
        assert (await launcher.log(1000)).splitlines() == ["line 0", "line 1", "gives up"]
        assert await launcher.new_lines() == ("line 0", "line 1", "gives up")
        assert await launcher.new_lines() == ()
        assert await launcher.log(9) == "gives up\n"

    uvloop.run(story())


def test_the_log_of_a_start_has_none_of_those_before_even_where_it_was_rotated(bench):
    async def story():
        launcher = bench.launcher("--lines", "2")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        with launcher.log_file.path.open("ab") as log:
            log.write(b"x" * ROTATE_BYTES + b"\nof the start before\n")
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        async with bench.standing_still(second):  # what is written as a file is rotated may be lost
            await launcher.new_lines()
        await bench.serving(launcher)
        path = launcher.log_file.path
        assert "start before" in path.with_name(f"{path.name}.1").read_text()  # it was rotated
        lines = (await launcher.log(1000)).splitlines()
        assert [line.partition(" ")[0] for line in lines] == [
            "line",
            "line",
            "holds",
            "sees",
            "serves",
        ]
        assert await launcher.log(20) == (await launcher.log(1000))[-20:]
        await launcher.stop(second, grace_s=GRACE_S)

    uvloop.run(story())


def test_it_holds_nothing_of_ours_and_sees_its_gpus_and_not_our_secrets(bench, monkeypatch):
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "secret")

    async def story():
        launcher = bench.launcher(gpus=[3])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.set_inheritable(True)
            first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        assert "holds []\nsees 3 None\n" in await launcher.log(1000)
        log = launcher.log_file.path
        assert log.stat().st_mode & 0o777 == 0o600
        assert log.parent.stat().st_mode & 0o777 == 0o700
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


def test_when_its_process_began_is_told(bench):
    async def story():
        launcher = bench.launcher()
        before = time.time()
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        after = time.time()
        await bench.serving(launcher)
        assert before - 0.1 <= (await launcher.look()).began_at <= after + 0.1
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


def test_changes_of_a_start_are_in_its_command_line(bench):
    async def story():
        launcher = bench.launcher(args={"lines": 1})
        first = await launcher.restart(None, grace_s=GRACE_S, changes=Changes({"lines": 3}))
        await bench.serving(launcher)
        assert "line 2" in await launcher.log(1000)
        assert (await launcher.look()).detail == ""  # the configuration is the same
        other = bench.launcher(args={"lines": 2})
        assert "old command line" in (await other.look()).detail
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_server_is_outdated_where_its_settings_changed_not_what_becomes_of_it(bench):
    async def story():
        launcher = bench.launcher(env={"A": "1", "B": "2"})
        changes = Changes({"lines": 3}, {"A": "3"})  # of a remedy: the settings are the same
        first = await launcher.restart(None, grace_s=GRACE_S, changes=changes)
        await bench.serving(launcher)
        for more, outdated in (
            ({"env": {"B": "2", "A": "1"}, "on_exit": "leave", "orphan": "stop"}, False),
            ({"env": {"A": "1", "B": "3"}}, True),
            ({"env": {"A": "1", "B": "2"}, "gpus": [1]}, True),
        ):
            assert (await bench.launcher(**more).look()).outdated is outdated, more
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_server_whose_settings_are_not_recorded_is_not_outdated(bench):
    async def story():
        launcher = bench.launcher()
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        (path,) = bench.state.glob("run/*.json")
        record = json.loads(path.read_text())
        assert record.pop("settings_sha256")
        path.write_text(json.dumps(record))
        assert not (await bench.launcher(env={"A": "1"}).look()).outdated
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


# --- what cannot start ----------------------------------------------------------------------------


def test_a_taken_port_names_the_port_and_who_has_it_and_ends_what_ran(bench):
    async def story():
        launcher = bench.launcher()
        with socket.create_server(("127.0.0.1", bench.port)):
            with pytest.raises(LaunchError) as raised:
                await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert f"port {bench.port} is already in use by {os.getpid()}" in str(raised.value)
        assert str(raised.value).startswith("org/model:7b/b1: ")
        assert bench.left() == []

    uvloop.run(story())


@pytest.mark.parametrize(
    "more",
    [{"env": {"A": "a\0b"}}, {"args": {"a": "a\0b"}}, {"env": {"A=B": "c"}}, {"env": {"": "c"}}],
)
def test_what_no_program_can_be_given_is_told_and_what_runs_stays(bench, more):
    async def story():
        good = bench.launcher()
        first = await good.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(good)
        with pytest.raises(LaunchError, match="null byte|holds a `=`") as caught:
            await bench.launcher(**more).restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert caught.value.obstacle is Obstacle.CANNOT_HELP
        assert (await good.look()).running
        await good.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("no-such-program-here", "not on the PATH"),
        ("/no/such/program", "the program /no/such/program does not exist"),
        ("{folder}/text", "is not executable"),
        ("{folder}", "is a folder"),
        ("vllm serve m --api-key k", r"a whole command line, `vllm \.\.\.`; write each"),
        ("{folder}/garbage", "Exec format error"),
    ],
)
def test_a_program_that_cannot_run_is_told_and_what_runs_stays(bench, tmp_path, program, says):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "garbage").write_text("hello")
    (tmp_path / "garbage").chmod(0o755)
    command = [program.format(folder=tmp_path)]
    surely = says != "Exec format error"  # known only by trying

    async def story():
        good = bench.launcher()
        first = await good.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(good)
        config = LaunchConfig(command=command, port=bench.port)
        bad = ProcessLauncher(config, pool="org/model:7b", backend="b1", state=bench.state)
        with pytest.raises(LaunchError, match=says):
            await bad.restart(first, grace_s=GRACE_S, changes=PLAIN)
        seen = await good.look()
        assert (seen.incarnation, seen.running) == (first, surely)
        await good.stop(first, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


def test_a_state_folder_that_cannot_be_written_is_told(bench):
    bench.state.write_text("a file")

    async def story():
        with pytest.raises(LaunchError, match="`state` must be a folder"):
            await bench.launcher().look()

    uvloop.run(story())


# --- what outlives a gateway ----------------------------------------------------------------------

GATEWAY = """
import asyncio, pathlib, sys
from gateway.config.supervision import LaunchConfig
from gateway.launch.launcher import Changes
from gateway.launch.process import ProcessLauncher
async def main():
    config = LaunchConfig.model_validate_json(sys.argv[1])
    launcher = ProcessLauncher(config, pool="org/model:7b", backend="b1", state=pathlib.Path(sys.argv[2]))
    seen = await launcher.look()
    if not seen.running:
        await launcher.restart(None, grace_s=5, changes=Changes())
    print((await launcher.look()).incarnation, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


@contextlib.contextmanager
def another_gateway(bench, *words):
    """Run a process that starts the server; kill -9 at the end."""
    text = bench.config(*words).model_dump_json()
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, text, str(bench.state)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_outlived_a_killed_gateway_is_adopted(bench):
    async def story():
        with another_gateway(bench, "--child", "titled") as (_, started):
            await bench.processes(2)
        launcher = bench.launcher("--child", "titled")
        assert await launcher.look() == Seen(started, Runs.RUNNING)
        await bench.serving(launcher)  # its log is read from its first line
        # Not our child, so how it ends cannot be known.
        os.kill(int(started.partition("-")[0]), signal.SIGKILL)
        assert await ended(bench, launcher) == Seen(started, Runs.ENDED, exit_code=None)
        second = await launcher.restart(started, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await bench.processes(2)
        await launcher.stop(second, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


def test_a_server_that_outlived_a_killed_gateway_is_stopped_where_that_is_asked_for(bench):
    async def story():
        with another_gateway(bench, "--child", "titled", "away", "blank"):
            await bench.processes(4)
        launcher = bench.launcher(orphan="stop")
        assert await launcher.look() == Seen()  # we ended it: it is no death to be examined
        assert bench.left() == []

    uvloop.run(story())


@pytest.mark.parametrize("orphan", ["adopt", "stop"])
def test_a_gateway_killed_between_start_and_record_leaves_no_unknown_server(bench, orphan):
    async def story():
        with another_gateway(bench, "--child", "blank") as (_, started):
            await bench.processes(2)
        # What the record says when the gateway dies in that moment.
        save(bench.record, dataclasses.replace(load(bench.record), pid=0, started=0))
        launcher = bench.launcher("--child", "blank", orphan=orphan)
        seen = await launcher.look()
        if orphan == "adopt":
            assert seen == Seen(started, Runs.RUNNING)
            await launcher.stop(started, grace_s=GRACE_S)
        else:
            assert not seen.running
        assert bench.left() == []

    uvloop.run(story())


def damaged(bench, damage):
    if damage is None:
        bench.record.unlink()
    else:
        bench.record.write_text(damage)


@pytest.mark.parametrize("damage", ["", "{", '{"pid": 1}', None])
@pytest.mark.parametrize("orphan", ["adopt", "stop"])
def test_a_server_whose_record_is_lost_is_known_by_its_marks(bench, damage, orphan):
    async def story():
        with another_gateway(bench, "--child", "away") as (_, started):
            await bench.processes(2)
        damaged(bench, damage)
        launcher = bench.launcher("--child", "away", orphan=orphan)
        if orphan == "stop":
            assert await launcher.look() == Seen()
        else:
            assert await launcher.look() == Seen(started, Runs.RUNNING)
            assert len(bench.left()) == 2
            later = bench.launcher("--child", "away")
            assert await later.look() == Seen(started, Runs.RUNNING)
            await launcher.stop(started, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


def test_what_is_left_of_two_starts_whose_record_is_lost_is_ended(bench):
    with another_gateway(bench) as (_, started):
        asyncio.run(bench.processes(1))
    words = ["-c", "import signal; signal.pause()", bench.token]
    marked = proc.variables(int(started.partition("-")[0])) | {"GATEWAY_START": "before"}
    with subprocess.Popen([sys.executable, *words], env=marked, start_new_session=True):
        asyncio.run(bench.processes(2))  # it has its marks once it is the program
        bench.record.unlink()
        assert asyncio.run(bench.launcher().look()) == Seen()
    assert bench.left() == []


@pytest.mark.parametrize("damage", ["{", None])
def test_a_record_that_is_lost_while_its_gateway_runs_ends_nothing(bench, damage):
    async def story():
        launcher = bench.launcher("--lines", "3")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert await launcher.look() == Seen(first, Runs.RUNNING)
        damaged(bench, damage)
        assert await launcher.look() == Seen(first, Runs.RUNNING)
        await bench.serving(launcher)
        with pytest.raises(Superseded):
            await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert len(bench.left()) == 1
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert await launcher.look() == Seen(second, Runs.RUNNING)
        await launcher.stop(second, grace_s=GRACE_S)
        assert bench.left() == []

    uvloop.run(story())


@pytest.mark.parametrize("damage", ["{", None])
def test_a_server_that_ended_is_started_anew_where_its_record_is_lost(bench, damage):
    async def story():
        launcher = bench.launcher("--exit", "3")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await ended(bench, launcher)
        damaged(bench, damage)
        await launcher.stop(first, grace_s=GRACE_S)  # nothing to do, nothing wrong
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert (await ended(bench, launcher)).incarnation == second

    uvloop.run(story())


def test_a_record_that_cannot_be_read_just_now_tells_nothing_and_ends_nothing(bench):
    async def story():
        launcher = bench.launcher()
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        record, aside = bench.record, bench.state / "aside"
        record.rename(aside)
        record.mkdir()  # as unreadable as on a disk with errors
        for each in (launcher, bench.launcher(orphan="stop")):
            with pytest.raises(LaunchError, match=r"cannot read .*\.json"):
                await each.look()
            with pytest.raises(LaunchError, match=r"cannot read .*\.json"):
                await each.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert len(bench.left()) == 1
        record.rmdir()
        aside.rename(record)
        assert await launcher.look() == Seen(first, Runs.RUNNING)
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_record_of_another_boot_is_nobodys(bench):
    async def story():
        launcher = bench.launcher()
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await launcher.stop(first, grace_s=GRACE_S)
        me = dataclasses.replace(load(bench.record), boot="another", pid=os.getpid())
        save(bench.record, me)
        later = bench.launcher()
        assert not (await later.look()).running
        second = await later.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await later.stop(second, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_living_gateways_server_is_left_to_it_and_taken_over_after_it(bench):
    async def story():
        with another_gateway(bench) as (gateway, started):
            launcher = bench.launcher(orphan="stop")
            assert await launcher.look() == Seen(started, Runs.RUNNING, others=True)
            await bench.processes(1)
            with pytest.raises(Superseded):
                await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
            gateway.kill()
            gateway.wait()
            assert not (await launcher.look()).running  # by now it outlived its gateway
            assert bench.left() == []

    uvloop.run(story())


def test_a_server_of_a_living_gateway_of_a_later_version_is_left_to_it(bench):
    async def story():
        with another_gateway(bench) as (_, started):
            await bench.processes(1)
            later = json.loads(bench.record.read_text()) | {"of_a_later_version": 1}
            bench.record.write_text(json.dumps(later))
            assert await bench.launcher(orphan="stop").look() == Seen(
                started, Runs.RUNNING, others=True
            )
            assert len(bench.left()) == 1
            assert json.loads(bench.record.read_text()) == later

    uvloop.run(story())


def test_the_log_of_another_living_gateways_server_is_read_too(bench):
    """Else its start would be silent here, and pass for one that hangs."""

    async def story():
        with another_gateway(bench) as (_, started):
            launcher = bench.launcher()
            assert await launcher.look() == Seen(started, Runs.RUNNING, others=True)
            await bench.serving(launcher)
            with launcher.log_file.path.open("ab") as file:
                file.write(b"x" * (ROTATE_BYTES + 1) + b"\nlast\n")
            assert "last" in await launcher.new_lines()
            assert launcher.log_file.size > ROTATE_BYTES  # who is in charge rotates it
            await launcher.stop(started, grace_s=GRACE_S)

    uvloop.run(story())


def test_two_gateways_do_not_act_on_one_backend_at_a_time(bench):
    async def story():
        one, other = bench.launcher("--ignore-term"), bench.launcher("--ignore-term")
        first = await one.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(one)
        await other.look()
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(one.stop(first, grace_s=1.0))
            await asyncio.sleep(0)
            with pytest.raises(LaunchError, match="another gateway"):
                await other.restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert stopping.done()
        assert bench.left() == []

    uvloop.run(story())


def test_a_reload_makes_a_launcher_that_keeps_our_own_server(bench):
    async def story():
        first = bench.launcher(orphan="stop")
        started = await first.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(first)
        second = bench.launcher(orphan="stop")
        assert await second.look() == Seen(started, Runs.RUNNING)
        await bench.serving(second)
        os.kill(int(started.partition("-")[0]), signal.SIGKILL)
        assert (await ended(bench, second)).exit_code == -signal.SIGKILL
        assert (await first.look()).exit_code == -signal.SIGKILL
        await second.stop(started, grace_s=GRACE_S)

    uvloop.run(story())


def test_a_wrapper_that_ends_at_once_does_not_take_the_servers_grace(bench, tmp_path):
    """A shell dies of SIGTERM while its child lives on: the child is told, too, and may end well."""
    (tmp_path / "run.sh").write_text(f'{sys.executable} "$@" &\nwait\n')
    code = (
        "import signal,sys,time\n"
        "def end(*_): open(sys.argv[2], 'w').write('well'); sys.exit(0)\n"
        "signal.signal(15, end)\nprint('serves', flush=True)\nsignal.pause()"
    )
    words = ["bash", tmp_path / "run.sh", "-c", code, bench.token, tmp_path / "ended"]

    async def story():
        config = LaunchConfig(command=tuple(map(str, words)), port=bench.port, args={"host": None})
        launcher = ProcessLauncher(config, pool="m", backend="b1", state=bench.state)
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        await launcher.stop(first, grace_s=GRACE_S)
        assert (tmp_path / "ended").read_text() == "well"
        assert bench.left() == []

    uvloop.run(story())


def test_the_log_may_be_asked_for_by_several_at_a_time(bench):
    async def story():
        launcher = bench.launcher("--lines", "1500")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        lines = []

        async def read():
            while not any(line.startswith("serves") for line in lines):
                lines.extend(await launcher.new_lines())
                await launcher.log(100_000)

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(read())
        numbered = [line for line in lines if line.startswith("line ")]
        assert sorted(numbered) == sorted(f"line {number}" for number in range(1500))
        await launcher.stop(first, grace_s=GRACE_S)

    uvloop.run(story())


# --- cancellation, memory -------------------------------------------------------------------------


def test_a_cancelled_stop_leaves_a_state_that_look_tells(bench):
    async def story():
        launcher = bench.launcher("--ignore-term")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await launcher.stop(first, grace_s=60)
        assert await launcher.look() == Seen(first, Runs.RUNNING)
        await launcher.stop(first, grace_s=0)
        assert bench.left() == []

    uvloop.run(story())


def test_a_restart_waits_until_the_driver_has_freed_what_ended_processes_held(bench):
    held = []

    def holders():
        held.append(set(bench.left()))
        return frozenset(first_pid) if len(held) < 3 else frozenset()

    first_pid = set()

    async def story():
        launcher = bench.launcher(gpu_holders=holders)
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        first_pid.add(int(first.partition("-")[0]))
        assert held == []
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        assert held == [set(), set(), set()]  # asked until free, and nothing had started by then
        await launcher.stop(second, grace_s=GRACE_S)

    uvloop.run(story())


def test_the_end_of_any_part_that_it_needs_is_told_at_once(bench):
    async def story():
        launcher = bench.launcher("--child", "worker", "engine", "engine")
        server = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        first, *engines = sorted(await launcher.vital(), key=lambda each: each.started)
        assert first.pid == int(server.partition("-")[0])
        assert [each.name for each in engines] == ["VLLM::EngineCor"] * 2  # the worker has no title
        async with asyncio.TaskGroup() as group:
            end = group.create_task(proc.first_end([first, *engines]))
            os.kill(engines[1].pid, signal.SIGKILL)
            assert (await end) == proc.End(engines[1], -signal.SIGKILL)
        gone = await proc.first_end([first, engines[1]])  # one that is gone already
        assert gone.process == engines[1]
        assert await proc.first_end([]) is None
        await launcher.stop(server, grace_s=GRACE_S)
        assert await launcher.vital() == []

    uvloop.run(story())


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("exit 3", "exited with code 3"),
        ("kill -KILL $$", "was killed by signal 9"),
        ("exit 0", "has ended"),  # which the kernel also says of what it does not tell
    ],
)
def test_how_a_process_ended_is_told_where_that_is_known(end, told):
    child = subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE)
    process = proc.find(child.pid)

    async def story():
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(proc.first_end([process]))
            child.stdin.close()
        return ended.result()

    found = uvloop.run(story())
    child.wait()
    assert str(found) == f"{process} {told}"


def test_host_memory_counts_children_too(bench):
    async def story():
        alone = bench.launcher()
        first = await alone.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(alone)
        one = await alone.memory_bytes()
        family = bench.launcher("--child", "titled", "away")
        second = await family.restart(first, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(family)
        assert 0 < one < await family.memory_bytes()
        await family.stop(second, grace_s=GRACE_S)
        assert await family.memory_bytes() == 0

    uvloop.run(story())


def test_what_it_leaves_to_the_first_process_of_a_container_is_waited_for(bench):
    adopts = partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER: orphans become ours

    def dead_children():
        every = [proc.find(int(pid)) for pid in os.listdir("/proc") if pid.isdecimal()]
        return {each.pid for each in every if each and each.dead and each.parent == os.getpid()}

    async def story():
        before = dead_children()
        launcher = bench.launcher("--child", "worker", "titled", "away")
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        await bench.serving(launcher)
        os.kill(int(first.partition("-")[0]), signal.SIGKILL)
        await ended(bench, launcher)
        os.kill(min(bench.left()), signal.SIGKILL)  # one ends by itself, too
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        await launcher.stop(second, grace_s=GRACE_S)
        assert dead_children() == before

    adopts(1)
    try:
        uvloop.run(story())
    finally:
        adopts(0)
