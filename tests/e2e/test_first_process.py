"""The gateway as the first process of a container, which a signal ends only if it asked for the signal."""

import contextlib
import os
import pathlib
import signal
import subprocess

import pytest

from tests.e2e.support import GATEWAY, need, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def child_of(pid):
    """The one child of a process; None while there is none."""
    told = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(told[0]) if told else None


def opened(fifo):
    """The end to write to of what somebody reads; None while nobody does."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def test_one_that_still_starts_ends_when_it_is_told_to(tmp_path):
    """Else it would start, and run until its container is killed: 150 s in the shipped files."""
    there = [need("unshare", "util-linux"), "--pid", "--fork", "--kill-child"]
    tried = subprocess.run([*there, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"no process namespace may be made here: {tried.stderr.strip()}")
    settings = tmp_path / "gateway.yaml"
    os.mkfifo(settings)  # its start takes until somebody writes there
    writers = []
    with subprocess.Popen([*there, GATEWAY, "serve", "-c", settings]) as started:
        try:
            wait_until(lambda: writers.append(opened(settings)) or writers[-1], 60, "they are read")
            gateway = child_of(started.pid)

            def ended():
                # Python heeds one that came just before a call that blocks only once the next one interrupts that.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(gateway, signal.SIGTERM)
                return started.poll() is not None

            wait_until(ended, 10, "it ends")
            assert started.wait() == 128 + signal.SIGTERM
        finally:
            started.kill()
            os.close(writers[-1])
