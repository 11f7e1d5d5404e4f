"""The log file, the record and the file names of launched servers; what /proc says."""

import dataclasses
import json
import os
import pathlib
import signal
import string
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.launch import proc
from gateway.launch.logfile import LogFile
from gateway.launch.members import MARK_BACKEND, Members
from gateway.launch.record import Record, digest, file_name, load, save
from gateway.launch.spawn import exit_code

RECORD = Record("n", "boot-id-of-this", 1, 2, "sha", 10, 40, 41)


def write(log, data):
    handle = log.open()
    os.write(handle, data)
    os.close(handle)


@pytest.fixture
def log(tmp_path):
    return LogFile(tmp_path / "log.txt", rotate_bytes=1000)


def test_lines_come_once_and_whole(log):
    write(log, b"one\ntw")
    log.poll()
    assert log.take() == ("one",)
    write(log, b"o\r\n\nthree\xff\n")
    log.poll()
    assert log.take() == ("two", "three�")
    assert log.take() == ()


def test_each_state_of_a_progress_bar_is_a_line(log):
    write(log, b"\rloading 10%\rloading 20%\r")
    log.poll()
    assert log.take() == ("loading 10%", "loading 20%")


def test_a_start_begins_at_its_own_place(log):
    write(log, b"of the start before\n")
    log.poll()
    begun = log.size
    log.begin(begun)
    assert log.tail(100, since=begun) == ""
    assert log.take() == ()
    write(log, b"of this one\n")
    log.poll()
    assert log.take() == ("of this one",)
    assert log.tail(100, since=begun) == "of this one\n"
    assert log.tail(4, since=begun) == "one\n"
    assert log.tail(0) == ""


def test_rotation_keeps_two_older_files_and_every_line(log):
    handle = log.open()
    seen = []
    for number in range(400):
        os.write(handle, f"line {number:04}\n".encode())  # the server's own handle, never reopened
        if number % 30 == 0:
            log.poll()
            seen += log.take()
    log.poll()
    seen += log.take()
    os.close(handle)
    assert seen == [f"line {number:04}" for number in range(400)]
    names = sorted(path.name for path in log.path.parent.iterdir())
    assert names == ["log.txt", "log.txt.1", "log.txt.2"]
    older = [log.path.with_name(name) for name in names[1:]]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in older)
    assert log.size <= 1000 + 300
    assert older[1].read_text() < older[0].read_text() < "line 0399"


def test_what_came_while_nobody_read_is_read_at_the_rotation(log):
    write(log, b"".join(b"line %d\n" % number for number in range(500)))
    assert log.poll()
    assert len(log.take()) == 500
    assert log.size == 0
    assert not log.poll()


def test_memory_is_bounded_whatever_is_written(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    write(log, b"x" * 3_000_000)  # one line without an end
    log.poll()
    write(log, b"\n" + b"".join(b"%d\n" % number for number in range(100_000)))
    log.poll()
    lines = log.take()
    assert len(lines) == 2000
    assert lines[-1] == "99999"
    assert len(log.tail(1000)) == 1000


def test_a_rotation_that_fails_loses_no_older_log_and_is_not_tried_at_each_look(log):
    write(log, b"first\n" + b"x" * 1000 + b"\n")
    assert log.poll()
    in_the_way = log.path.with_name("log.txt.new")  # as a full disk is
    in_the_way.mkdir()
    write(log, b"second\n" + b"x" * 1000 + b"\n")
    assert not log.poll()
    in_the_way.rmdir()
    assert not log.poll()  # only once it has grown as much again
    assert log.path.with_name("log.txt.1").read_text().startswith("first\n")
    write(log, b"x" * 1001)
    assert log.poll()
    assert log.path.with_name("log.txt.1").read_text().startswith("second\n")
    assert log.path.with_name("log.txt.2").read_text().startswith("first\n")


def test_of_a_log_that_grew_while_nobody_looked_the_end_is_read_and_kept(tmp_path):
    log = LogFile(tmp_path / "log.txt", rotate_bytes=1 << 20)
    with log.path.open("wb") as file:
        file.write(b"first\n")
        file.seek(1 << 30)  # a gigabyte
        file.write(b"\nlast\n")
    assert log.poll()
    assert log.size == 0
    assert log.take()[-1] == "last"
    kept = log.path.with_name("log.txt.1")
    assert kept.stat().st_size <= 4 << 20
    assert log.tail(5) == "last\n"


def test_the_end_of_a_start_goes_back_beyond_a_rotation(log):
    write(log, b"first\n" + b"x" * 1000 + b"\n")
    assert log.poll()
    write(log, b"last\n")
    assert log.tail(5000) == "first\n" + "x" * 1000 + "\nlast\n"
    assert log.tail(5000, since=900) == log.tail(5000)  # it was begun before the rotation
    assert log.tail(8) == "xx\nlast\n"
    assert log.tail(4) == "ast\n"


def test_a_file_that_somebody_emptied_is_read_from_its_begin(log):
    write(log, b"a long line before\n")
    log.poll()
    os.truncate(log.path, 0)
    write(log, b"new\n")
    log.poll()
    assert log.take() == ("a long line before", "new")


def test_a_file_that_is_not_there_is_empty(log):
    assert not log.poll()
    assert (log.size, log.identity, log.take(), log.tail(10)) == (0, None, (), "")


def test_a_link_in_its_place_is_not_followed(log, tmp_path):
    (tmp_path / "secret").write_text("")
    log.path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        log.open()


# --- records --------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "r.json"
    save(path, RECORD)
    assert load(path) == RECORD
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]
    assert RECORD.incarnation == "40-41-boot-id-"
    assert dataclasses.replace(RECORD, pid=0).incarnation is None


def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known(tmp_path):
    text = json.dumps(dataclasses.asdict(RECORD) | {"of_a_later_version": 1})
    (tmp_path / "r").write_text(text)
    assert load(tmp_path / "r") == RECORD


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": 1}', '{"more": 1}', "\0"])
def test_what_is_not_a_record_is_none(tmp_path, text):
    (tmp_path / "r").write_text(text)
    assert load(tmp_path / "r") is None
    assert load(tmp_path / "none") is None


def test_command_lines_are_told_apart_without_being_told():
    assert digest(["a", "b"]) != digest(["a b"])
    assert "secret" not in digest(["--api-key", "secret"])


@pytest.mark.parametrize(
    ("pool", "backend", "name"),
    [("qwen3-8b", "b1", "qwen3-8b--b1"), ("Qwen2.5", "b-1", "Qwen2.5--b-1")],
)
def test_plain_names_stay_readable(pool, backend, name):
    assert file_name(pool, backend) == name


POOL = st.text(string.ascii_letters + string.digits + "._:/-", min_size=1, max_size=128)
NAME = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=63)


@given(POOL, NAME, POOL, NAME)
def test_file_names_are_safe_and_no_two_backends_share_one(pool, backend, other_pool, other):
    name = file_name(pool, backend)
    assert len(name) <= 200
    assert "/" not in name
    assert name not in (".", "..")
    same = (pool, backend) == (other_pool, other)
    assert (name == file_name(other_pool, other)) == same


@pytest.mark.parametrize(
    ("one", "other"), [(("a/b", "c"), ("a_b", "c")), (("a--b", "c"), ("a", "b--c"))]
)
def test_names_that_look_alike_differ(one, other):
    assert file_name(*one) != file_name(*other)


# --- /proc ----------------------------------------------------------------------------------------


def test_a_name_with_spaces_and_parentheses_does_not_mislead():
    fields = ["S", "7", "8", "9", *["0"] * 13, "1", "0", "12345", "0"]
    found = proc.parse_stat(f"42 (a) S (b) {' '.join(fields)}")
    assert found == proc.Process(42, 12345, 7, 8, 9, "a) S (b", dead=False)
    assert str(found) == "42 (a) S (b)"
    assert proc.parse_stat(f"42 (z) {' '.join(['Z', *fields[1:]])}").dead


def test_a_process_runs_until_its_last_thread_has_ended():
    # Its first thread ends alone, as that of any process may do a moment before the others.
    code = (
        "import ctypes, platform, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)"  # exit(2)
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    stat = pathlib.Path(f"/proc/{child.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    started = proc.find(child.pid).started
    assert proc.runs(child.pid, started)
    assert exit_code(child.pid, reap=False) is None
    child.kill()
    while proc.runs(child.pid, started):
        time.sleep(0.01)
    assert exit_code(child.pid, reap=False) == -signal.SIGKILL
    child.communicate()


def test_a_number_that_another_process_has_by_now_is_not_it():
    me = proc.find(os.getpid())
    assert proc.runs(me.pid, me.started)
    assert not proc.runs(me.pid, me.started + 1)
    assert proc.find(2**22 + 1) is None
    assert not proc.runs(2**22 + 1, 0)


def test_we_see_ourselves():
    assert proc.private_bytes(os.getpid()) > 1_000_000
    assert proc.variables(os.getpid())["PATH"]
    assert os.getpid() in {each.pid for each in proc.every()}
    assert proc.variables(2**22 + 1) == {}
    assert proc.private_bytes(2**22 + 1) == 0


def test_a_process_of_a_backend_is_found_in_the_moment_of_its_exec_too():
    again = 'exec sh -c "$0" "$0"'  # it does nothing else, so many a look falls into an exec
    words, env = ["sh", "-c", again, again], {"PATH": os.defpath, MARK_BACKEND: "its"}
    members = Members("its", None)
    with subprocess.Popen(words, env=env) as child:
        seen = [[each.pid for each in members.find(None)] for _ in range(100)]
        child.kill()
    assert seen == [[child.pid]] * 100
