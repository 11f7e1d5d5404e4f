"""The kernel's counts of its kills for lack of memory, as the proof of one."""

import os
import signal

import pytest

from gateway.launch.oom import Counter, OomKills, counter_of


@pytest.fixture
def counts(tmp_path):
    return tmp_path / "memory.events"


def write(path, count):
    path.write_text(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {count}\noom_group_kill 0\n")


def test_a_kill_in_the_group_before_the_end_is_a_proof_whatever_the_exit_code(counts):
    write(counts, 4)
    kills = OomKills(lambda pid: Counter(counts))
    kills.watch(7)
    write(counts, 5)  # an engine is killed; its API server ends with 1 a while later
    kills.watch(7)
    kills.watch(7)
    assert kills.killed(7, 1) is True


def test_an_old_count_proves_nothing(counts):
    write(counts, 4)
    kills = OomKills(lambda pid: Counter(counts))
    kills.watch(7)
    assert kills.killed(7, -signal.SIGKILL) is False


def test_a_kill_in_the_group_proves_nothing_of_a_process_that_is_killed_well_after_it(counts):
    write(counts, 4)
    now = [0.0]
    kills = OomKills(lambda pid: Counter(counts), lambda: now[0])
    kills.watch(7)
    write(counts, 5)  # of another server that the gateway launched
    kills.watch(7)
    now[0] = 20.0
    kills.watch(7)
    assert kills.killed(7, -signal.SIGKILL) is None
    assert kills.killed(7, 0) is True  # its engine may have been: it takes a while to notice


def test_the_machines_count_is_a_proof_for_a_killed_process_only(counts):
    write(counts, 0)
    kills = OomKills(lambda pid: Counter(counts, of_machine=True))
    kills.watch(7)
    write(counts, 1)
    assert kills.killed(7, -signal.SIGKILL) is True
    assert kills.killed(7, 1) is None


def test_what_was_not_watched_while_it_ran_is_unknown(counts):
    write(counts, 4)
    kills = OomKills(lambda pid: Counter(counts))
    assert kills.killed(7, -signal.SIGKILL) is None
    kills.watch(7)
    assert kills.killed(8, -signal.SIGKILL) is None
    assert OomKills(lambda pid: None).killed(7, -signal.SIGKILL) is None


def test_a_counter_that_is_gone_with_its_group_says_nothing_of_the_end(counts):
    write(counts, 4)
    kills = OomKills(lambda pid: Counter(counts))
    kills.watch(7)
    counts.unlink()  # a scope ends with its last process
    assert kills.killed(7, -signal.SIGKILL) is None
    write(counts, 4)
    kills.watch(8)
    write(counts, 5)  # an engine is killed, and its API server ends a moment later
    kills.watch(8)
    counts.unlink()
    assert kills.killed(8, 1) is True


def test_a_counter_that_cannot_be_read_is_none(tmp_path):
    assert Counter(tmp_path / "none").read() is None
    (tmp_path / "odd").write_text("oom_kill many\n")
    assert Counter(tmp_path / "odd").read() is None


def test_this_process_has_a_counter_where_the_kernel_has_one():
    found = counter_of(os.getpid())
    assert found is None or found.read() is not None
