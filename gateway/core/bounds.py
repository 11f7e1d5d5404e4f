"""Bounds of what operators ask for: the command line checks them before it asks, the admin API as it answers."""

from __future__ import annotations

from typing import Final

LONGEST_HOLD_S: Final = 30 * 86_400
LOG_BYTES: Final = 64 * 1024  # of a backend's log, unless more is asked for
MOST_LOG_BYTES: Final = 1024 * 1024
MOST_ROWS: Final = 1000  # of a page of a list
