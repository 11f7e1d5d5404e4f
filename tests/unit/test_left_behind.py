"""Which launched servers nobody stops any more, by the records of them."""

import dataclasses
import os
import subprocess
import time

import pytest

from gateway.launch import proc
from gateway.launch.leftbehind import left_behind
from gateway.launch.members import MARK_BACKEND
from gateway.launch.record import Record, save


@pytest.fixture
def server():
    """A process with the mark of a backend whose name a file name cannot hold."""
    marked = {**os.environ, MARK_BACKEND: "/a#folder#org/model/b1"}
    with subprocess.Popen(["sleep", "60"], env=marked) as started:
        try:
            while not proc.variables(started.pid):
                time.sleep(0.01)  # it is there a moment before its environment is
            yield proc.find(started.pid)
        finally:
            started.kill()


@pytest.fixture
def record(server):
    """Its record; the gateway that was in charge of it is no more."""
    return Record("n", proc.boot_id(), server.pid, 1, pid=server.pid, started=server.started)


def found(folder, record, *cared_for):
    save(folder / "m--b1.json", record)
    return [*left_behind(folder, cared_for)]


def test_a_server_whose_gateway_ended_and_that_no_backend_is_configured_for_is_told(
    tmp_path, record, server
):
    ((backend_id, told),) = found(tmp_path, record)
    assert backend_id == "org/model/b1"
    assert f"`kill {server.pid}`" in told


def test_so_is_one_that_was_handed_over_to_this_gateway(tmp_path, record, server):
    ((_, told),) = found(tmp_path, record.taken_over())
    assert f"`kill {server.pid}`" in told


def test_one_whose_environment_cannot_be_read_has_the_name_of_its_record(
    tmp_path, record, monkeypatch
):
    monkeypatch.setattr(proc, "variables", lambda pid: {})
    assert [backend_id for backend_id, _ in found(tmp_path, record)] == ["m--b1"]


def test_that_of_a_configured_backend_is_not_told(tmp_path, record):
    assert found(tmp_path, record, "m--b1") == []


def test_that_of_another_gateway_that_lives_is_left_to_it(tmp_path, record):
    parent = proc.find(os.getppid())
    assert found(tmp_path, record.handed_to(parent)) == []


@pytest.mark.parametrize("other", [{"started": 1}, {"boot": "another"}, {"pid": 0}])
def test_a_process_that_may_be_another_one_is_not_told(tmp_path, record, other):
    assert found(tmp_path, dataclasses.replace(record, **other)) == []


def test_files_that_are_no_records_are_passed_over(tmp_path):
    (tmp_path / "other.json").write_text("{")
    (tmp_path / "folder.json").mkdir()
    assert [*left_behind(tmp_path, ())] == []
    assert [*left_behind(tmp_path / "missing", ())] == []
