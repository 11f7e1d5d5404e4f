"""Settings of all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# How fast an example runs says something about the machine, not about the code. New examples are
# sought wherever people run the tests; a change is judged by the same ones each time.
settings.register_profile("gateway", deadline=None)
# CI tests some Pythons with what others leave of two processors: how long examples take to draw is no finding there.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "gateway")

# Processes that run tests for xdist have the size of some terminal in their environment, and tables that
# are cut to fit it. Tests that are about narrow terminals say so themselves.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)  # readline, which pytest imports, sets it behind Python's back

# The files that take longest. Each is run by one process: one that began last would keep all others waiting.
LONGEST = (
    "stories/test_workers",
    "stories/test_upgrade",
    "stories/test_recited_leaves",
    "stories/test_resume_recited",
    "unit/test_cli",
    "stories/test_supervision_orders",
    "stories/test_resume",
    "stories/test_readme",
    "abuse/test_bodies",
    "stories/test_supervision",
    "stories/test_launch_process",
    "unit/test_scan",
)


@pytest.hookimpl(trylast=True)  # after the order was left to chance
def pytest_collection_modifyitems(items):
    """Begin with the files that take longest."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(f"{item.path.parent.name}/{item.path.stem}", len(place)))
