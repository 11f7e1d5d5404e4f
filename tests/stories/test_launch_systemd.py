"""The launcher of units, with a systemctl that keeps state and speaks as the real one does."""

import asyncio
import json
import signal

import pytest
import uvloop

from gateway.launch.launcher import Changes, LaunchError, Runs, Seen, Superseded
from gateway.launch.systemd import SystemdLauncher
from tests.stories.fakes import install_systemd

UNIT = "vllm@1.service"
GRACE_S = 5.0
PLAIN = Changes()


class Machine:
    def __init__(self, folder):
        self.folder = folder
        self.programs = install_systemd(folder)

    def unit(self, **more):
        found = {
            "LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": "a" * 32,
            "MainPID": "7", "ExecMainCode": "0", "ExecMainStatus": "0", "Result": "success",
            "NRestarts": "0",
        } | more  # fmt: skip
        (self.folder / "units" / UNIT).write_text(json.dumps(found))

    def says(self, verb, text, code=1):
        (self.folder / f"says-{verb}").write_text(f"{code} {text}")

    def calls(self, verb):
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if f" {verb} " in line]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(made.programs))
    return made


def test_a_unit_is_seen_restarted_once_and_stopped(machine):
    machine.unit()

    async def story():
        launcher = SystemdLauncher(UNIT)
        assert await launcher.look() == Seen("a" * 32, Runs.RUNNING)
        second = await launcher.restart("a" * 32, grace_s=GRACE_S, changes=PLAIN)
        assert await launcher.look() == Seen(second, Runs.RUNNING)
        with pytest.raises(Superseded):
            await launcher.restart("a" * 32, grace_s=GRACE_S, changes=PLAIN)
        with pytest.raises(Superseded):
            await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        with pytest.raises(Superseded):
            await launcher.stop("a" * 32, grace_s=GRACE_S)
        assert len(machine.calls("restart")) == 1
        await launcher.stop(second, grace_s=GRACE_S)
        assert await launcher.look() == Seen(second, Runs.ABSENT, exit_code=-signal.SIGTERM)
        third = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert third not in (None, second)
        await launcher.close()

    uvloop.run(story())


@pytest.mark.parametrize(
    ("properties", "state", "code", "says"),
    [
        ({"ActiveState": "activating", "SubState": "start"}, Runs.PENDING, None, ""),
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm"}, Runs.PENDING, None, "stopping"),
        (
            {"ActiveState": "failed", "SubState": "failed", "ExecMainCode": "1", "ExecMainStatus": "2", "Result": "exit-code"},
            *(Runs.ENDED, 2, "failed: exit-code"),
        ),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "ExecMainCode": "3", "ExecMainStatus": "6"},
            *(Runs.PENDING, -6, "will restart it"),
        ),
        ({"ActiveState": "inactive", "SubState": "dead", "ExecMainCode": "1"}, Runs.ABSENT, 0, ""),
    ],
)  # fmt: skip
def test_states_are_told_as_they_are(machine, properties, state, code, says):
    machine.unit(**properties)
    seen = uvloop.run(SystemdLauncher(UNIT).look())
    assert (seen.incarnation, seen.state, seen.exit_code) == ("a" * 32, state, code)
    assert says in seen.detail


def test_restarts_by_systemd_itself_are_counted(machine):
    machine.unit(NRestarts="2")
    assert uvloop.run(SystemdLauncher(UNIT).look()) == Seen("a" * 32, Runs.RUNNING, own_restarts=2)


def test_a_unit_that_never_ran_has_no_incarnation(machine):
    machine.unit(ActiveState="inactive", SubState="dead", InvocationID="")

    async def story():
        launcher = SystemdLauncher(UNIT)
        assert await launcher.look() == Seen()
        assert await launcher.log(100) == ""
        assert await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)

    uvloop.run(story())


def test_a_failed_unit_is_reset_first_as_its_start_limit_would_refuse(machine):
    machine.unit(ActiveState="failed", SubState="failed", limited=True)

    async def story():
        launcher = SystemdLauncher(UNIT)
        assert await launcher.restart("a" * 32, grace_s=GRACE_S, changes=PLAIN) != "a" * 32

    uvloop.run(story())
    assert len(machine.calls("reset-failed")) == 1


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("Failed to restart vllm@1.service: Interactive authentication required.", 1, "polkit"),
        ("Failed to restart vllm@1.service: Access denied", 4, "polkit"),
        ("Failed to restart vllm@1.service: Unit vllm@1.service not found.", 5, "has no unit"),
        ("Failed to connect to bus: Host is down", 1, "is this a container"),
        ("something\nelse", 3, "with code 3: something else"),
    ],
)
def test_refusals_say_what_to_do(machine, text, code, says):
    machine.unit()
    machine.says("restart", text, code)

    async def story():
        with pytest.raises(LaunchError, match=says):
            await SystemdLauncher(UNIT).restart("a" * 32, grace_s=GRACE_S, changes=PLAIN)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("properties", "says"),
    [(None, "list-units"), ({"LoadState": "masked"}, "masked"), ({"LoadState": "error"}, "error")],
)
def test_a_unit_that_is_not_usable_is_told(machine, properties, says):
    if properties:
        machine.unit(**properties)
    with pytest.raises(LaunchError, match=says):
        uvloop.run(SystemdLauncher(UNIT).look())


def test_no_systemctl_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="this machine has no systemctl"):
        uvloop.run(SystemdLauncher(UNIT).look())


def test_its_journal_is_that_of_the_invocation(machine):
    machine.unit()
    lines = "".join(f"line {number}\n" for number in range(3000))
    (machine.folder / ("journal-" + "a" * 32)).write_text(lines)
    text = uvloop.run(SystemdLauncher(UNIT).log(10**6))
    assert text.startswith("line 1000\n")
    assert text.endswith("line 2999\n")
    assert uvloop.run(SystemdLauncher(UNIT).log(5)) == "2999\n"


def test_a_command_line_cannot_be_changed_from_here(machine):
    machine.unit()
    with pytest.raises(LaunchError, match="systemctl edit"):
        uvloop.run(SystemdLauncher(UNIT).restart(None, grace_s=0, changes=Changes({"seed": 1})))


@pytest.mark.parametrize("unit", ["--version", "a b", "a/b", "", "a\nb", "-u"])
def test_only_names_of_units_reach_the_command_line(unit):
    with pytest.raises(ValueError, match="not a valid unit"):
        SystemdLauncher(unit)


def test_a_cancelled_call_leaves_no_systemctl_behind(machine):
    machine.unit()
    (machine.folder / "hangs").touch()

    async def story():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(SystemdLauncher(UNIT).look())
            async with asyncio.timeout(10):
                while not (machine.folder / "calls").exists():
                    await asyncio.sleep(0.01)
            task.cancel()

    uvloop.run(story())
    from tests.stories.launched import left

    assert left(str(machine.programs / "systemctl")) == []
