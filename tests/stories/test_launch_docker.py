"""The launcher of containers, against a Docker Engine API on a UNIX socket."""

import contextlib
import os
import pathlib
from datetime import UTC, datetime

import pytest
import uvloop
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gateway.config.supervision import RestartConfig
from gateway.launch import proc
from gateway.launch.docker import DockerLauncher
from gateway.launch.launcher import Changes, LaunchError, Obstacle, Runs, Seen, Superseded
from tests.stories.fakes import DockerEngine, serving, stop_events

PLAIN = Changes()
GRACE_S = 7.2


@contextlib.asynccontextmanager
async def docker(folder, engine):
    path = folder / "docker.sock"
    async with serving(engine.app, uds=str(path)):
        launcher = DockerLauncher("vllm-1", path)
        try:
            yield launcher
        finally:
            await launcher.close()


def test_a_container_is_seen_restarted_once_and_stopped(tmp_path):
    async def story():
        engine = DockerEngine()
        made = engine.make("vllm-1")
        async with docker(tmp_path, engine) as launcher:
            first = await launcher.look()
            assert first == Seen(f"{made.id[:16]}@2026-01-01T00:00:01.123456789Z", Runs.RUNNING)
            began_at = max(1767225601.1, proc.booted_at())
            assert first.began_at == pytest.approx(began_at, abs=1.0)
            second = await launcher.restart(first.incarnation, grace_s=GRACE_S, changes=PLAIN)
            assert second == f"{made.id[:16]}@2026-01-01T00:00:02.123456789Z"
            with pytest.raises(Superseded):
                await launcher.restart(first.incarnation, grace_s=GRACE_S, changes=PLAIN)
            with pytest.raises(Superseded):
                await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
            assert engine.orders == [("restart", made.id, "8")]  # the id, and whole seconds
            await launcher.stop(second, grace_s=GRACE_S)
            assert await launcher.look() == Seen(
                second, Runs.ABSENT, -15, "it was stopped (`docker stop`)", oom_killed=False
            )
            await launcher.stop(second, grace_s=GRACE_S)  # 304
            assert await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN) != second

    uvloop.run(story())


@pytest.mark.parametrize(("told", "since_boot_s"), [("1970-01-01T00:00:09Z", 0.0), ("", 5.0)])
def test_a_container_is_no_older_than_its_machine_whatever_the_clock_was_then(
    tmp_path, told, since_boot_s
):
    async def story():
        engine, booted_at = DockerEngine(), proc.booted_at()
        started = datetime.fromtimestamp(booted_at + since_boot_s, UTC)
        engine.make("vllm-1", state={"StartedAt": told or started.isoformat()})
        async with docker(tmp_path, engine) as launcher:
            began_at = (await launcher.look()).began_at
        assert began_at == pytest.approx(booted_at + since_boot_s, abs=1.0)

    uvloop.run(story())


def test_a_container_made_anew_between_look_and_order_is_not_hit(tmp_path):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1")
        async with docker(tmp_path, engine) as launcher:
            seen = await launcher.look()
            engine.on_inspect = lambda: engine.make("vllm-1")
            with pytest.raises(Superseded, match="recreated"):
                await launcher.restart(seen.incarnation, grace_s=GRACE_S, changes=PLAIN)
            assert engine.orders == []

    uvloop.run(story())


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"Running": False, "ExitCode": 1}, (Runs.ENDED, 1, "")),
        ({"Running": False, "ExitCode": 137, "OOMKilled": True}, (Runs.ENDED, -9, "OOM")),
        ({"Running": True, "Paused": True}, (Runs.PENDING, None, "unpause")),
        (
            {"Running": True, "Restarting": True, "ExitCode": 2},
            (Runs.PENDING, 2, "is restarting it"),
        ),
        ({"Running": False, "ExitCode": 128, "Error": "no GPU"}, (Runs.ENDED, 128, "no GPU")),
    ],
)
def test_states_are_told_as_they_are(tmp_path, state, expected):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1", state=state)
        async with docker(tmp_path, engine) as launcher:
            seen = await launcher.look()
            assert (seen.state, seen.exit_code) == expected[:2]
            assert expected[2] in seen.detail
            ended = expected[1] is not None
            assert seen.oom_killed == (state.get("OOMKilled", False) if ended else None)

    uvloop.run(story())


def test_one_that_a_person_stopped_has_not_failed(tmp_path):
    async def story():
        engine = DockerEngine()
        made = engine.make("vllm-1", running=False, exit_code=137)  # it did not heed SIGTERM
        async with docker(tmp_path, engine) as launcher:
            killed = {
                "Type": "container",
                "Action": "kill",
                "Actor": {"Attributes": {"signal": "9"}},
            }
            for events, state in (
                ([], Runs.ENDED),
                ([killed], Runs.ENDED),
                (stop_events(), Runs.ABSENT),
            ):
                made.events = events
                assert (await launcher.look()).state is state

    uvloop.run(story())


def test_one_whose_start_failed_has_ended(tmp_path):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1", starts=0, running=False, state={"ExitCode": 127, "Error": "no GPU"})
        async with docker(tmp_path, engine) as launcher:
            assert await launcher.look() == Seen(None, Runs.ENDED, None, "no GPU", oom_killed=False)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("says", "obstacle"),
    [
        ("failed to create shim task: exec: stat /vllm: no such file or directory", Obstacle.CANNOT_HELP),
        ("write /var/lib/docker: no space left on device", Obstacle.DISK),
        ("Bind for 0.0.0.0:8000 failed: port is already allocated", Obstacle.PORT),
        ("context deadline exceeded", Obstacle.TRANSIENT),
    ],
)  # fmt: skip
def test_a_refusal_says_whether_another_try_may_help(tmp_path, says, obstacle):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1", running=False)
        engine.refusal = (500, says)
        async with docker(tmp_path, engine) as launcher:
            seen = await launcher.look()
            with pytest.raises(LaunchError, match="Docker refused") as caught:
                await launcher.restart(seen.incarnation, grace_s=1, changes=PLAIN)
            assert caught.value.obstacle is obstacle

    uvloop.run(story())


def test_restarts_by_its_restart_policy_are_counted(tmp_path):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1").restarts = 3
        async with docker(tmp_path, engine) as launcher:
            assert (await launcher.look()).own_restarts == 3

    uvloop.run(story())


def test_one_that_never_started_has_no_incarnation(tmp_path):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1", starts=0, running=False)
        async with docker(tmp_path, engine) as launcher:
            assert await launcher.look() == Seen()
            assert await launcher.log(100) == ""
            assert await launcher.restart(None, grace_s=1, changes=PLAIN)

    uvloop.run(story())


@pytest.mark.parametrize(
    ("newest", "oldest"), [("1.41", "1.12"), ("1.60", "1.50"), ("1.44", "1.24")]
)
def test_the_daemons_version_is_spoken(tmp_path, newest, oldest):
    async def story():
        engine = DockerEngine(newest, oldest)
        engine.make("vllm-1")
        async with docker(tmp_path, engine) as launcher:
            assert (await launcher.look()).running

    uvloop.run(story())


@pytest.mark.parametrize("tty", [False, True])
def test_its_log_is_plain_text_whatever_the_frames(tmp_path, tty):
    lines = [(1 + n % 2, f"line {n} é\n".encode()) for n in range(5000)]

    async def story():
        engine = DockerEngine()
        engine.make("vllm-1", tty=tty, logs=[*lines, (2, b""), (1, b"x" * 200_000 + b"\nend\n")])
        async with docker(tmp_path, engine) as launcher:
            text = await launcher.log(300_000)
            assert text.endswith("x\nend\n")
            assert "line 4998 é\nline 4999 é\nxxx" in text
            assert len(text.encode()) <= 300_000
            assert await launcher.log(4) == "end\n"
            assert await launcher.log(0) == ""

    uvloop.run(story())


def test_a_refusal_is_told_in_dockers_words(tmp_path):
    async def story():
        engine = DockerEngine()
        engine.make("vllm-1")
        async with docker(tmp_path, engine) as launcher:
            seen = await launcher.look()
            for status in (409, 500):
                engine.refusal = (status, "could not select device driver with capabilities: gpu")
                with pytest.raises(LaunchError, match=rf"{status}.*vllm-1.*capabilities: gpu"):
                    await launcher.restart(seen.incarnation, grace_s=1, changes=PLAIN)
            with pytest.raises(LaunchError, match="recreate it"):
                await launcher.restart(seen.incarnation, grace_s=1, changes=Changes({"seed": 1}))
            engine.containers.clear()
            with pytest.raises(LaunchError, match="no container vllm-1"):
                await launcher.look()

    uvloop.run(story())


def test_no_socket_and_nobody_there_and_no_right_are_told(tmp_path):
    path = tmp_path / "docker.sock"

    async def look():
        launcher = DockerLauncher("vllm-1", path)
        try:
            await launcher.look()
        finally:
            await launcher.close()

    with pytest.raises(LaunchError, match="no Docker socket"):
        uvloop.run(look())
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(LaunchError, match="nothing listens"):
        uvloop.run(look())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user to be refused")
def test_a_socket_that_this_user_may_not_use_is_told(tmp_path):
    async def story():
        async with docker(tmp_path, DockerEngine()) as launcher:
            os.chmod(tmp_path / "docker.sock", 0o600)
            os.seteuid(65534)
            try:
                with pytest.raises(LaunchError, match="add the user to the file's group"):
                    await launcher.look()
            finally:
                os.seteuid(0)

    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(0o755)
    uvloop.run(story())


@pytest.mark.parametrize("answer", ["hello", "[]", "{}", '{"ApiVersion": "two"}'])
def test_what_is_not_docker_is_told(tmp_path, answer):
    async def version(request):
        return PlainTextResponse(answer)

    async def story():
        engine = DockerEngine()
        engine.app = Starlette(routes=[Route("/version", version)])
        async with docker(tmp_path, engine) as launcher:
            with pytest.raises(LaunchError, match="not"):
                await launcher.look()

    uvloop.run(story())


@pytest.mark.parametrize("name", ["../x", "a/b", "a?b", "", "-a", "a b"])
def test_only_names_of_containers_reach_a_path(name):
    with pytest.raises(ValidationError):
        RestartConfig(docker=name)


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("", "/var/run/docker.sock"),
        ("unix:///run/user/1000/podman/podman.sock", "/run/user/1000/podman/podman.sock"),
        ("tcp://10.0.0.1:2375", "/var/run/docker.sock"),
    ],
)
def test_docker_host_names_another_socket(monkeypatch, host, path):
    monkeypatch.setenv("DOCKER_HOST", host)

    async def story():
        launcher = DockerLauncher("vllm-1")
        assert launcher.socket == pathlib.Path(path)
        await launcher.close()

    uvloop.run(story())


def test_a_daemon_of_another_version_is_asked_anew_which_one_it_speaks(tmp_path):
    async def story():
        engine = DockerEngine("1.43", "1.24")
        engine.make("vllm-1")
        async with docker(tmp_path, engine) as launcher:
            seen = await launcher.look()
            engine.newest, engine.oldest = "1.52", "1.44"  # it was upgraded
            with pytest.raises(LaunchError):
                await launcher.look()
            assert await launcher.look() == seen

    uvloop.run(story())
