"""The warning before the disk of the state folder is full."""

import asyncio
import logging

from gateway.launch.disk import LOW_BYTES, DiskSpace, free_bytes


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


def test_the_disk_of_a_folder_that_is_yet_to_be_made_is_that_of_its_parent(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") == free_bytes(tmp_path)
    assert free_bytes(tmp_path) > 0
