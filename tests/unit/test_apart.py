"""Work that may never end holds up neither the loop nor the end of the process."""

import asyncio
import os
import subprocess
import sys

from gateway.core.aio import apart

STUCK = """
import asyncio, pathlib, sys
from gateway.core.aio import apart

async def main():
    reading = asyncio.ensure_future(apart(pathlib.Path(sys.argv[1]).read_bytes))
    await asyncio.sleep(0.2)
    reading.cancel()

asyncio.run(main())
"""


def test_what_the_work_returns_is_returned():
    assert asyncio.run(apart(lambda: 7)) == 7


def test_a_process_ends_beside_a_read_that_does_not(tmp_path):
    os.mkfifo(tmp_path / "hangs")  # nobody writes to it
    command = [sys.executable, "-c", STUCK, str(tmp_path / "hangs")]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0
