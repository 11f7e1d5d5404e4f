"""Whether the state folder can be written, and the warning before its disk is full."""

import asyncio
import errno
import logging
import shutil
from pathlib import Path

import pytest

from gateway.heal.decisions import Setback, setback_of
from gateway.launch.disk import LOW_BYTES, DiskSpace, free_bytes, why_unwritable
from gateway.launch.launcher import LaunchError, obstacle_of
from tests.admindesk import Desk


def test_a_disk_that_runs_low_is_told_once_with_path_and_bytes(tmp_path, caplog):
    left = [LOW_BYTES, LOW_BYTES - 1, 7, None, LOW_BYTES, 7]
    space = DiskSpace(tmp_path / "state", lambda folder: left.pop(0))

    async def story():
        while left:
            await space.look()

    with caplog.at_level(logging.INFO, "gateway.launch"):
        asyncio.run(story())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert f"{tmp_path / 'state'} is nearly full" in told[0]
    assert f"({LOW_BYTES - 1} bytes)" in told[0]
    assert "free again" in told[1]
    assert "(7 bytes)" in told[2]


@pytest.mark.parametrize(
    ("number", "setback"),
    [
        (errno.ENOSPC, Setback.NOT_NOW),
        (errno.EROFS, Setback.NOT_NOW),  # as a disk becomes that had an error, until it is mended
        (errno.EACCES, Setback.FAILED),
    ],
)
def test_a_disk_that_takes_nothing_now_is_no_failure_of_a_server(number, setback):
    error = LaunchError("", obstacle_of(OSError(number, "")))
    assert setback_of(error) is setback


def test_the_disk_of_a_folder_that_is_yet_to_be_made_is_that_of_its_parent(tmp_path):
    here = free_bytes(tmp_path)
    assert here > 0
    # Others write to the same disk meanwhile.
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(here, rel=0.1)


def test_a_folder_is_tried_and_nothing_is_left_there(tmp_path):
    assert why_unwritable(tmp_path / "a" / "b") == ""
    assert why_unwritable(tmp_path) == ""
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("folder", ["/proc/nope", "/proc/nope/state", "/dev/null/state"])
def test_a_folder_that_cannot_be_made_is_told_with_what_stands_in_its_way(folder):
    assert why_unwritable(Path(folder)).startswith(("/proc: ", "/dev/null"))


def test_a_state_folder_that_can_no_longer_be_written_is_a_problem_of_the_gateway(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    desk = Desk(state)
    shutil.rmtree(state)
    state.write_text("a file in its place")
    asyncio.run(desk.objects.disk.look())
    problems = desk.get("/admin/v1/overview").json()["problems"]
    (told,) = [each for each in problems if each["kind"] == "state_unwritable"]
    assert str(state) in told["sentence"]
    assert "Not a directory" in told["cause"]
