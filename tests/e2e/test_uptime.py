"""A machine that has run for three years. Times are told by a clock that began when it did.

Linux gives a process such a clock in a time namespace, so stories are told in one.
"""

import pathlib
import subprocess
import sys

import pytest

from tests.e2e.support import need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

UPTIME_S = 3 * 365 * 86_400
STORIES = pathlib.Path(__file__).parents[1] / "stories"
# What counts from a moment on: first tokens, and what waits.
CHOSEN = ("chat", "admission", "patience")


def test_stories_are_told_alike_after_three_years():
    unshare = need("unshare", "util-linux")
    there = [unshare, "--time", "--monotonic", str(UPTIME_S), "--boottime", str(UPTIME_S)]
    tried = subprocess.run([*there, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"no time namespace may be made here: {tried.stderr.strip()}")
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    told = subprocess.run(
        [*there, *asked, *(STORIES / f"test_{each}.py" for each in CHOSEN)],
        capture_output=True, text=True, timeout=570, cwd=STORIES.parents[1],
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-3000:]
