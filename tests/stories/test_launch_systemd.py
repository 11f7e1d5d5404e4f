"""The launcher of units, with a systemd on a bus that keeps state and speaks as the real one does."""

import asyncio
import contextlib
import signal
import tempfile
import time

import pytest
import uvloop
from pydantic import ValidationError

from gateway.config.supervision import RestartConfig
from gateway.launch.launcher import Changes, LaunchError, Obstacle, Runs, Seen, Superseded
from gateway.launch.systemd import SystemdLauncher
from gateway.vllmlog.diagnosis import Kind, diagnose
from tests.stories.fakebus import Systemd
from tests.stories.fakes import install_journalctl

UNIT = "vllm@1.service"
FIRST = "aa" * 16
GRACE_S = 5.0
PLAIN = Changes()


@contextlib.asynccontextmanager
async def machine(folder, monkeypatch, **properties):
    """A systemd with the unit, and the unit's launcher."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={folder}/bus")
    systemd = Systemd(folder)
    systemd.unit(UNIT, **properties)
    async with systemd.running():
        launcher = SystemdLauncher(UNIT)
        try:
            yield systemd, launcher
        finally:
            await launcher.close()


async def gone(launcher):
    """Wait until the launcher has heard of the end."""
    async with asyncio.timeout(5):
        while not (seen := await launcher.look()).gone:
            await asyncio.sleep(0.01)
        return seen


def test_a_unit_is_restarted_once_and_stopped(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            assert await launcher.look() == Seen(FIRST, Runs.RUNNING)
            second = await launcher.restart(FIRST, grace_s=GRACE_S, changes=PLAIN)
            assert await launcher.look() == Seen(second, Runs.RUNNING)
            for stale in (FIRST, None):
                with pytest.raises(Superseded):
                    await launcher.restart(stale, grace_s=GRACE_S, changes=PLAIN)
            with pytest.raises(Superseded):
                await launcher.stop(FIRST, grace_s=GRACE_S)
            assert len(systemd.asked("RestartUnit")) == 1
            await launcher.stop(second, grace_s=GRACE_S)
            assert await launcher.look() == Seen(second, Runs.ABSENT, exit_code=-signal.SIGTERM)
            third = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
            assert third not in (None, second)

    uvloop.run(story())


def test_what_did_not_change_is_not_asked_for_again(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            for _ in range(20):
                assert (await launcher.look()).running
            assert len(systemd.asked("GetAll")) == 2  # of the unit, and of its service
            systemd.ends(UNIT, how=2, status=9)
            said = "systemd reports it as failed: signal"
            assert await gone(launcher) == Seen(FIRST, Runs.ENDED, -9, said)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("properties", "state", "code", "says"),
    [
        ({"ActiveState": "activating", "SubState": "start"}, Runs.PENDING, None, ""),
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm"}, Runs.PENDING, None, "stopping"),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "ExecMainCode": 3, "ExecMainStatus": 6},
            *(Runs.PENDING, -6, "will restart it"),
        ),
        ({"ActiveState": "reloading", "SubState": "reload"}, Runs.RUNNING, None, ""),
    ],
)  # fmt: skip
def test_states_are_told_as_they_are(tmp_path, monkeypatch, properties, state, code, says):
    async def story():
        async with machine(tmp_path, monkeypatch, **properties) as (_, launcher):
            seen = await launcher.look()
            assert (seen.incarnation, seen.state, seen.exit_code) == (FIRST, state, code)
            assert says in seen.detail

    uvloop.run(story())


@pytest.mark.parametrize(
    ("ends", "state", "code", "says"),
    [
        ({"status": 0}, Runs.ENDED, 0, ""),  # as vLLM does when its engine dies
        ({"status": 0, "by_job": True}, Runs.ABSENT, 0, ""),  # `systemctl stop`
        ({"how": 2, "status": 15}, Runs.ENDED, -15, ""),  # `kill PID`
        ({"how": 2, "status": 15, "by_job": True}, Runs.ABSENT, -15, ""),
        ({"status": 2}, Runs.ENDED, 2, "failed: exit-code"),
        ({"status": 1, "by_job": True}, Runs.ABSENT, 1, ""),  # its engine did not end well
        ({"how": 2, "status": 9, "by_job": True}, Runs.ABSENT, -9, ""),
        ({"status": 203}, Runs.ENDED, 203, "cannot run its program"),
        ({"status": 200}, Runs.ENDED, 200, "cannot enter its folder"),
    ],
)
def test_a_unit_that_a_person_stopped_has_not_failed(
    tmp_path, monkeypatch, ends, state, code, says
):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.ends(UNIT, **ends)
            seen = await launcher.look()
            assert (seen.incarnation, seen.state, seen.exit_code) == (FIRST, state, code)
            assert says in seen.detail

    uvloop.run(story())


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"Result": "timeout", "RuntimeMaxUSec": 2**64 - 1}, Runs.ABSENT),  # TimeoutStopSec
        ({"Result": "timeout", "RuntimeMaxUSec": 10**12}, Runs.ENDED),
        ({"Result": "watchdog", "RuntimeMaxUSec": 2**64 - 1}, Runs.ENDED),
    ],
)
def test_what_systemd_ends_of_its_own_accord_no_person_stopped(tmp_path, monkeypatch, more, state):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.ends(UNIT, how=2, status=9, by_job=True)
            systemd.unit(UNIT, **more)
            assert (await launcher.look()).state is state

    uvloop.run(story())


def test_the_exit_code_of_an_earlier_process_is_not_told(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.ends(UNIT, how=2, status=9)
            # The next start fails in its ExecStartPre: its main process never ran.
            systemd.unit(UNIT, InvocationID=b"\xbb" * 16, InactiveExitTimestampMonotonic=10**9)
            seen = await launcher.look()
            assert (seen.incarnation, seen.state, seen.exit_code) == ("bb" * 16, Runs.ENDED, None)

    uvloop.run(story())


def test_a_kill_for_lack_of_memory_and_its_own_restarts_are_told(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch, NRestarts=2) as (systemd, launcher):
            assert await launcher.look() == Seen(FIRST, Runs.RUNNING, own_restarts=2)
            systemd.ends(UNIT, how=2, status=9)
            systemd.unit(UNIT, Result="oom-kill")
            assert (await gone(launcher)).oom_killed is True

    uvloop.run(story())


def test_when_its_process_began_is_told(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.unit(UNIT, ExecMainStartTimestampMonotonic=0)
            assert (await launcher.look()).began_at is None
            began_us = round((time.monotonic() - 3.0) * 1e6)
            told = {"ExecMainStartTimestampMonotonic": began_us}
            told["ExecMainStartTimestamp"] = 1_000_000  # the machine's clock stood at 1970 then
            systemd.unit(UNIT, **told)
            async with asyncio.timeout(5):
                while (began_at := (await launcher.look()).began_at) is None:
                    await asyncio.sleep(0.01)
            assert began_at == pytest.approx(time.time() - 3.0, abs=2.0)

    uvloop.run(story())


def test_a_unit_that_never_ran_has_no_incarnation(tmp_path, monkeypatch):
    never = {"ActiveState": "inactive", "SubState": "dead", "InvocationID": b""}

    async def story():
        async with machine(tmp_path, monkeypatch, **never) as (_, launcher):
            assert await launcher.look() == Seen()
            assert await launcher.log(100) == ""
            assert await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)

    uvloop.run(story())


def test_a_failed_unit_is_reset_first_as_its_start_limit_would_refuse(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.ends(UNIT, status=1)
            assert await launcher.restart(FIRST, grace_s=GRACE_S, changes=PLAIN) != FIRST
            members = [call[0] for call in systemd.calls]
            assert members.index("ResetFailedUnit") < members.index("RestartUnit")

    uvloop.run(story())


def test_an_order_for_another_start_leaves_the_failure_of_this_one(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.ends(UNIT, status=1)
            with pytest.raises(Superseded):
                await launcher.restart("ff" * 16, grace_s=GRACE_S, changes=PLAIN)
            assert "ResetFailedUnit" not in [call[0] for call in systemd.calls]
            assert (await launcher.look()).state is Runs.ENDED

    uvloop.run(story())


@pytest.mark.parametrize(
    ("result", "says", "obstacle"),
    [
        ("canceled", "another job took its place", Obstacle.TRANSIENT),
        ("dependency", "depends on", Obstacle.CANNOT_HELP),
        ("skipped", "Condition", Obstacle.CANNOT_HELP),
    ],
)
def test_a_job_that_did_not_start_it_is_told(tmp_path, monkeypatch, result, says, obstacle):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.results["RestartUnit"] = result
            with pytest.raises(LaunchError, match=says) as caught:
                await launcher.restart(FIRST, grace_s=GRACE_S, changes=PLAIN)
            assert caught.value.obstacle is obstacle

    uvloop.run(story())


@pytest.mark.parametrize(
    ("error", "says", "obstacle"),
    [
        ("org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", "polkit", Obstacle.CANNOT_HELP),
        ("org.freedesktop.DBus.Error.AccessDenied", "polkit", Obstacle.CANNOT_HELP),
        ("org.freedesktop.systemd1.NoSuchUnit", "has no unit", Obstacle.CANNOT_HELP),
        ("org.freedesktop.systemd1.UnitMasked", "said so", Obstacle.CANNOT_HELP),
        ("org.freedesktop.DBus.Error.NoReply", "said so", Obstacle.TRANSIENT),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(tmp_path, monkeypatch, error, says, obstacle):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.refusals["RestartUnit"] = (error, "said so")
            with pytest.raises(LaunchError, match=says) as caught:
                await launcher.restart(FIRST, grace_s=GRACE_S, changes=PLAIN)
            assert caught.value.obstacle is obstacle

    uvloop.run(story())


@pytest.mark.parametrize(
    ("load", "says"), [("not-found", "list-units"), ("masked", "masked"), ("error", "error")]
)
def test_a_unit_that_is_not_usable_is_told(tmp_path, monkeypatch, load, says):
    async def story():
        async with machine(tmp_path, monkeypatch, LoadState=load) as (_, launcher):
            with pytest.raises(LaunchError, match=says) as caught:
                await launcher.look()
            assert caught.value.obstacle is Obstacle.CANNOT_HELP

    uvloop.run(story())


def test_a_permission_to_hold_the_unit_is_not_needed(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.refusals["RefUnit"] = ("org.freedesktop.DBus.Error.AccessDenied", "no")
            assert (await launcher.look()).running

    uvloop.run(story())


def test_a_bus_that_went_away_is_told_and_found_again(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            assert (await launcher.look()).running
            systemd.ends(UNIT, status=1)
            systemd.cut()
            async with asyncio.timeout(5):
                while True:
                    with contextlib.suppress(LaunchError):
                        if (await launcher.look()).state is Runs.ENDED:
                            break
                    await asyncio.sleep(0.01)

    uvloop.run(story())


def test_no_system_bus_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    with pytest.raises(LaunchError, match="cannot reach systemd") as caught:
        uvloop.run(SystemdLauncher(UNIT).look())
    assert caught.value.obstacle is Obstacle.TRANSIENT


def test_a_cancelled_call_leaves_the_launcher_usable(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            await launcher.look()
            systemd.hangs = True
            systemd.unit(UNIT)  # something changed: once that is heard, a look asks

            async def looks():
                while True:
                    async with asyncio.timeout(0.1):
                        await launcher.look()
                    await asyncio.sleep(0.01)

            with pytest.raises(TimeoutError):
                await looks()
            systemd.hangs = False
            assert (await launcher.look()).running

    uvloop.run(story())


@pytest.mark.parametrize("member", ["Subscribe", "LoadUnit", "AddMatch"])
def test_a_connection_that_broke_off_half_made_is_made_anew(tmp_path, monkeypatch, member):
    async def story():
        async with machine(tmp_path, monkeypatch) as (systemd, launcher):
            systemd.refusals[member] = ("org.freedesktop.DBus.Error.NoReply", "it starts")
            with pytest.raises(LaunchError, match="it starts"):
                await launcher.look()
            systemd.refusals.clear()
            assert (await launcher.look()).running
            assert len({*systemd.matches}) == 4  # it hears of all that changes

    uvloop.run(story())


def test_its_journal_is_that_of_the_invocation(tmp_path, monkeypatch):
    async def story():
        monkeypatch.setenv("PATH", str(install_journalctl(tmp_path)))
        lines = "".join(f"line {number}\n" for number in range(12_000))
        (tmp_path / f"journal-{FIRST}").write_text(lines)
        async with machine(tmp_path, monkeypatch) as (_, launcher):
            text = await launcher.log(10**6)
            assert text.startswith("line 2000\n")
            assert text.endswith("line 11999\n")
            assert await launcher.log(6) == "11999\n"

    uvloop.run(story())


def test_a_machine_without_space_for_the_journal_is_told(tmp_path, monkeypatch):
    async def story():
        monkeypatch.setenv("PATH", str(install_journalctl(tmp_path)))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
        async with machine(tmp_path, monkeypatch) as (_, launcher):
            with pytest.raises(LaunchError, match="full"):
                await launcher.log(10**6)

    uvloop.run(story())


def test_the_cause_of_a_death_is_found_above_what_each_request_says_of_it(tmp_path, monkeypatch):
    core = "(EngineCore_DP0 pid=9) ERROR 01-01 10:00:00 [core.py:1]"
    server = "(APIServer pid=1) ERROR 01-01 10:00:01 [serving_chat.py:1]"
    frame = '  File "/v/vllm/v1/engine/async_llm.py", line 1, in generate'
    cause = [
        "(APIServer pid=1) INFO 01-01 09:00:00 [launcher.py:1] Application startup complete.",
        f"{core} EngineCore encountered a fatal error.",
        f"{core} Traceback (most recent call last):",
        f'{core}   File "/v/vllm/v1/engine/core.py", line 1, in run_busy_loop',
        f"{core} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    for_each = [
        f"{server} Traceback (most recent call last):",
        *[f"{server} {frame}"] * 36,
        f"{server} vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ]

    async def story():
        monkeypatch.setenv("PATH", str(install_journalctl(tmp_path)))
        (tmp_path / f"journal-{FIRST}").write_text("\n".join([*cause, *for_each * 200]))
        async with machine(tmp_path, monkeypatch) as (_, launcher):
            assert diagnose(await launcher.log(4 * 1024 * 1024)).kind is Kind.OOM_RUNTIME

    uvloop.run(story())


def test_a_command_line_cannot_be_changed_from_here(tmp_path, monkeypatch):
    async def story():
        async with machine(tmp_path, monkeypatch) as (_, launcher):
            with pytest.raises(LaunchError, match="systemctl edit"):
                await launcher.restart(None, grace_s=0, changes=Changes({"seed": 1}))

    uvloop.run(story())


@pytest.mark.parametrize("unit", ["--version", "a b", "a/b", "", "a\nb", "-u"])
def test_only_names_of_units_reach_a_command_line_or_a_bus(unit):
    with pytest.raises(ValidationError):
        RestartConfig(systemd=unit)
