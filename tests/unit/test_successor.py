"""The process that is to take over: whether it may, what it is told, and how it fails."""

import asyncio
import resource
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.core.aio import start
from gateway.ingress.listener import Listen, bind
from gateway.launch import proc
from gateway.ops.upgrading import UpgradeFailed
from gateway.upgrade import messages
from gateway.upgrade.messages import Failed, Go, Inherits, Left, Loaded, Ready
from gateway.upgrade.predecessor import Predecessor
from gateway.upgrade.successor import Successor, why_not

SHELL = (500, "bash")


@pytest.mark.parametrize(
    ("pid", "parent", "environ", "told"),
    [
        (1, (0, ""), {}, "main process of a container"),
        (7, (1, "tini"), {}, "main process of a container"),
        (7, (1, "docker-init"), {}, "main process of a container"),
        (7, (1, "systemd"), {"SYSTEMD_EXEC_PID": "7"}, "Type=notify"),
    ],
)
def test_where_nothing_could_take_over_the_reason_is_told(pid, parent, environ, told):
    assert told in why_not(pid, parent, environ)


@pytest.mark.parametrize(
    ("pid", "parent", "environ"),
    [
        (7, SHELL, {}),
        (7, (1, "systemd"), {"SYSTEMD_EXEC_PID": "7", "NOTIFY_SOCKET": "/run/systemd/notify"}),
        (8, (1, "systemd"), {"SYSTEMD_EXEC_PID": "7", "NOTIFY_SOCKET": "/run/systemd/notify"}),
        (7, SHELL, {"SYSTEMD_EXEC_PID": "6"}),  # from a shell that is a service's
    ],
)
def test_elsewhere_it_may_be_tried(pid, parent, environ):
    assert why_not(pid, parent, environ) is None


def test_messages_come_back_as_they_were_sent():
    left = Left({"m": frozenset({"sql"})})
    every = [Loaded(7, "1.0"), Go(["m/a"], []), Ready(["m/b"]), left, Failed("no")]
    assert [messages.decode(messages.encode(each)) for each in every] == every


def test_it_is_told_of_a_thousand_backends():
    names = [f"{'a-pool-of-some-model':-<30}/vllm-{number:-<30}:8000" for number in range(1000)]
    told = Go(names, names, {names[0]: "ordered by an operator"})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listeners = [socket.socket(), socket.socket()]
    with ours:
        ours.setblocking(False)
        Successor(SimpleNamespace(pid=7), ours).go(told)
        given = Inherits(theirs.detach(), *(each.detach() for each in listeners))
        before = Predecessor(given)
        before.loaded(Path("state"))
        assert before.expects == told
        for each in (before._channel, *before.listeners.values()):
            each.close()


async def handed_over(theirs, loaded, left):
    """Hand over to a process that says it is loaded; returns the old process's side."""
    ours, new = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.append(new)
    for each in (ours, new):
        each.setblocking(False)
    successor = Successor(SimpleNamespace(pid=7, poll=lambda: None), ours)
    new.send(messages.encode(loaded))
    await successor.loaded(5.0)
    successor.let_go(left)
    return successor


def test_the_new_process_hears_what_is_awaited_until_the_old_one_ends():
    async def story():
        lefts, theirs = [Left({"m": frozenset({"sql"})}), Left({"m": frozenset({"fr"})})], []
        old = await handed_over(theirs, Loaded(7, "1.0", hears_left=True), lefts[0])
        telling = start(old.tell(lambda: lefts[-1]), name="telling")
        with theirs[0] as new:
            hear = asyncio.get_running_loop().sock_recv
            heard = [messages.decode(await hear(new, messages.MOST_BYTES)) for _ in lefts]
            telling.cancel()
            return heard == lefts, await hear(new, messages.MOST_BYTES)

    assert asyncio.run(story()) == (True, b"")


def test_an_earlier_version_hears_of_the_hand_over_by_the_end_of_the_channel():
    async def story():
        left, theirs = Left({"m": frozenset({"sql"})}), []
        old = await handed_over(theirs, Loaded(7, "1.0"), left)
        await old.tell(lambda: left)
        with theirs[0] as new:
            return new.recv(messages.MOST_BYTES)

    assert asyncio.run(story()) == b""


def run_as_successor(script, then):
    """Start a script in the place of the gateway, do something with it, and end it."""
    words = [sys.executable, "-c", script]

    async def story():
        with bind(Listen("127.0.0.1", 0)) as public, bind(Listen("127.0.0.1", 0)) as admin:
            started = Successor.start(public, admin, kept=False, words=words)
            try:
                await then(started)
            finally:
                started.end()
            return started

    return asyncio.run(story())


SAYS = (
    "import os, socket; from gateway.upgrade import messages as m\n"
    "told = m.inherits(os.environ[m.VARIABLE])\n"
    "channel = socket.socket(fileno=told.channel)\n"
    "for number in (told.public, told.admin): socket.socket(fileno=number).getsockname()\n"
)


def test_one_that_hangs_is_ended_with_all_that_it_started():
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"

    async def then(started):
        with pytest.raises(UpgradeFailed, match=r"did not read its settings within 1 s"):
            await started.loaded(1.0)

    started = run_as_successor(hangs, then)
    deadline = time.monotonic() + 5
    while left := [each for each in proc.every() if each.group == started.pid]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_one_that_ends_without_a_word_is_told_by_its_exit_code():
    async def then(started):
        with pytest.raises(UpgradeFailed, match="it ended with exit code 3 before it could serve"):
            await started.loaded(20.0)

    run_as_successor("raise SystemExit(3)", then)


def test_one_that_says_why_is_quoted():
    async def then(started):
        with pytest.raises(UpgradeFailed, match="gateway.yaml:3: no such setting"):
            await started.loaded(20.0)

    says = SAYS + "channel.send(m.encode(m.Failed('gateway.yaml:3: no such setting')))"
    run_as_successor(says, then)


def test_one_that_serves_says_so_in_turn():
    async def then(started):
        await started.loaded(20.0)
        assert started.version == "9.9"
        started.go(Go(["m/a"], []))
        assert await started.ready(20.0) == ["m/a"]

    says = SAYS + (
        "channel.send(m.encode(m.Loaded(os.getpid(), '9.9')))\n"
        "go = m.decode(channel.recv(m.MOST_BYTES))\n"
        "channel.send(m.encode(m.Ready(go.serving)))\n"
    )
    run_as_successor(says, then)


def test_what_another_version_says_is_no_reason_to_fall():
    async def then(started):
        with pytest.raises(UpgradeFailed, match="nothing that can be understood"):
            await started.loaded(20.0)

    run_as_successor(SAYS + 'channel.send(b\'{"type": "News"}\')', then)


def test_a_program_that_is_not_there_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(UpgradeFailed, match="cannot run /nowhere/vllm-gateway: No such file"):
            Successor.start(listener, listener, kept=False, words=["/nowhere/vllm-gateway"])


def test_that_no_descriptor_is_left_for_it_is_told():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(UpgradeFailed, match="channel to it: Too many open files"):
                Successor.start(listener, listener, kept=False, words=["/nowhere/vllm-gateway"])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
