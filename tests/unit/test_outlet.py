import json
import os
import select
import subprocess
import sys
import threading
from socket import socketpair

import pytest

from gateway.observe.outlet import Outlet


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    ends = {"reader": reader, "writer": writer}
    yield ends
    for fd in ends.values():
        if fd is not None:
            os.close(fd)


@pytest.fixture
def outlet(pipe):
    outlet = Outlet(pipe["writer"])
    yield outlet
    if pipe["reader"] is not None:
        os.set_blocking(pipe["reader"], False)
    assert outlet.close()


def test_lines_come_out_whole_and_in_order(pipe, outlet):
    lines = [b"%d\n" % number for number in range(5000)]
    for line in lines:
        outlet.put(line)
    outlet.wake()
    read = b""
    while not read.endswith(lines[-1]):
        read += os.read(pipe["reader"], 65536)
    assert read == b"".join(lines)
    assert outlet.dropped == 0


def test_flush_returns_when_everything_before_it_is_written(pipe, outlet):
    outlet.put(b"a\n")
    assert outlet.flush()
    assert os.read(pipe["reader"], 100) == b"a\n"


def test_what_comes_while_it_writes_waits_for_the_next_wake(pipe, outlet):
    """Under load something always comes, and a thread that never rests costs the event loop its turns."""
    long = b"x" * 200_000 + b"\n"  # more than a pipe holds: the thread is stuck now
    outlet.put(long)
    outlet.wake()
    while outlet.waiting:
        pass  # until the thread has taken it
    outlet.put(b"later\n")
    left = len(long)
    while left:
        left -= len(os.read(pipe["reader"], left))
    assert select.select([pipe["reader"]], [], [], 0.2) == ([], [], [])
    outlet.wake()
    assert os.read(pipe["reader"], 100) == b"later\n"


def test_a_reader_that_stopped_costs_lines_and_never_a_wait(pipe):
    outlet = Outlet(pipe["writer"], max_lines=10)
    outlet.put(b"x" * 200_000 + b"\n")  # more than a pipe holds: the thread is stuck now
    outlet.wake()
    while outlet.waiting:
        pass  # until the thread has taken it
    for number in range(25):
        outlet.put(b"%d\n" % number)
    assert outlet.dropped == 15
    assert not outlet.flush(0.01)
    read = b""
    while b"\n9\n" not in read:  # the reader is back; the oldest ten were kept
        read += os.read(pipe["reader"], 65536)
    assert read == b"x" * 200_000 + b"\n" + b"".join(b"%d\n" % number for number in range(10))
    assert outlet.close()


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(pipe, outlet):
    os.close(pipe["reader"])
    pipe["reader"] = None
    for _ in range(3):
        outlet.put(b"a\n")
    assert outlet.flush()
    assert outlet.dropped == 3


FULL_DISK = """
import os, resource, sys
from gateway.observe.outlet import Outlet
lines = [b'{"line": %d}\\n' % number for number in range(5)]
room = len(lines[0]) * 2 + 4
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
outlet = Outlet(fd)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))  # two lines and the beginning of a third
for line in lines[:4]:
    outlet.put(line)
assert outlet.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
outlet.put(lines[4])
assert outlet.close()
print(outlet.dropped)
"""


def test_a_disk_that_was_full_costs_the_lines_that_did_not_fit_and_spoils_no_other(tmp_path):
    log = tmp_path / "log"
    ran = subprocess.run([sys.executable, "-c", FULL_DISK, log], capture_output=True, timeout=30)
    assert ran.stderr == b""
    lines = log.read_bytes().splitlines()
    assert lines == [b'{"line": 0}', b'{"line": 1}', b'{"li', b'{"line": 4}']
    assert ran.stdout == b"2\n"


WORKER = """
import sys
from gateway.observe.outlet import Outlet
outlet = Outlet()
line = b'{"worker": %b, "pad": "%b"}\\n' % (sys.argv[1].encode(), b"x" * 400)
for _ in range(8):
    outlet.put(line * 500, 500)
    outlet.wake()
assert outlet.close(60)
"""


@pytest.mark.parametrize("connected", [os.pipe, lambda: [each.detach() for each in socketpair()]])
def test_lines_of_several_processes_that_share_an_output_stay_whole(connected):
    """Workers do, and for a while the gateway before and after an upgrade."""
    reader, writer = connected()
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(number)], stdout=writer)
        for number in range(3)
    ]
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        lines = [json.loads(line)["worker"] for line in told]
    assert [each.wait() for each in workers] == [0, 0, 0]
    assert sorted(lines) == [0] * 4000 + [1] * 4000 + [2] * 4000


def test_an_output_that_is_closed_costs_lines_and_nothing_else():
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    outlet = Outlet(writer)
    outlet.put(b"a\n")
    assert outlet.close()
    assert outlet.dropped == 1


def test_an_output_that_others_made_non_blocking_works(pipe, outlet):
    os.set_blocking(pipe["writer"], False)
    data = b"x" * 300_000 + b"\n"
    outlet.put(data)
    outlet.wake()
    read = b""
    while len(read) < len(data):
        read += os.read(pipe["reader"], 65536)
    assert read == data


def test_of_lines_that_come_together_those_without_room_are_dropped(pipe):
    outlet = Outlet(pipe["writer"], max_lines=3)
    outlet.put(b"1\n2\n", 2)
    outlet.put(b"3\n4\n5\n", 3)
    outlet.put(b"6\n")
    assert (outlet.waiting, outlet.dropped) == (3, 3)
    assert outlet.close()
    assert os.read(pipe["reader"], 100) == b"1\n2\n3\n"
    assert outlet.waiting == 0


def test_close_writes_the_rest_and_ends_the_thread(pipe):
    before = threading.enumerate()
    outlet = Outlet(pipe["writer"])
    outlet.put(b"last\n")
    assert outlet.close()
    assert os.read(pipe["reader"], 100) == b"last\n"
    assert {*threading.enumerate()} <= {*before}
    outlet.put(b"late\n")
    assert not outlet.flush()
