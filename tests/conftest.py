"""Settings of all tests."""

import os

from hypothesis import settings

# How fast an example runs says something about the machine, not about the code. New examples are
# sought wherever people run the tests; a change is judged by the same ones each time.
settings.register_profile("gateway", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "gateway")

# Processes that run tests for xdist have the size of some terminal in their environment, and tables that
# are cut to fit it. Tests that are about narrow terminals say so themselves.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)  # readline, which pytest imports, sets it behind Python's back
