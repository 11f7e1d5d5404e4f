"""Find launched servers that nobody will stop: their gateway was killed, and no backend is configured for them.

Their records name them. Only a process that certainly is the one of its record is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from gateway.launch import proc
from gateway.launch.launcher import LaunchError
from gateway.launch.members import MARK_BACKEND
from gateway.launch.record import load


def left_behind(folder: Path, cared_for: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the backend and a sentence of each server that nobody will stop, from the records in a folder.

    `cared_for` has the file names, without `.json`, of the records of configured backends. A server that another
    living gateway is in charge of is left to that gateway.
    """
    for path in sorted(folder.glob("*.json")):
        if path.stem in cared_for:
            continue
        try:
            record = load(path)
        except LaunchError:
            continue
        if record is not None and record.runs and (record.is_ours or not record.gateway_lives):
            told = (
                f"no `launch` is configured for it any more, but its server still runs as process {record.pid}, with"
                " its port and GPU memory: the gateway that was to stop it did not live to do so. Run"
                f" `kill {record.pid}`, or put its `launch` back into the settings file"
            )
            yield _backend_id(record.pid) or path.stem, told


def _backend_id(pid: int) -> str:
    """Return the backend that a server was started for, by its environment; empty: that was overwritten."""
    return proc.variables(pid).get(MARK_BACKEND, "").rpartition("#")[2]
