"""Plays the ten incidents, and writes what operators were told of each.

    python -m tests.incidents.report [REPORT]         REPORT: loadtest/reports/incidents.md

Ends with 1 where a cause was not named within 15 s.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
import re
import sys

import uvloop

from gateway.observe.rules import ALERTS
from tests.incidents.scenes import INCIDENTS, WITHIN_S, Incident, Told, told_of

REPORT = pathlib.Path("loadtest/reports/incidents.md")
PATIENCE_S = 40.0

HEAD = f"""# Ten incidents, and what operators are told

Made by `make incident-report`: it plays each incident (`tests/incidents/scenes.py`) against simulated backends, with health
checks as shipped, and writes down what `/admin/v1/overview` says, from which `status` and the dashboard take their sentences.
The promise is that the cause is named within {WITHIN_S:.0f} s. Times depend on the machine.

"""
COLUMNS = ("incident", "planted", "named after", "verdict", "what is wrong, and since when", "cause", "next", "alert")  # fmt: skip


def row(incident: Incident, told: Told) -> list[str]:
    """Return the cells of one incident; what differs in each run is replaced."""
    known = {each.name for each in ALERTS}
    problem = told.problem
    late = "" if told.after_s <= WITHIN_S else " (LATE)"
    return [
        incident.name,
        incident.planted,
        f"{told.after_s:.1f} s{late}",
        told.state,
        _steady(problem["sentence"]),
        _steady(problem["cause"]) or "-",
        problem["next"],
        f"`{incident.alert}`" if incident.alert in known else "-",
    ]


def table(rows: list[list[str]]) -> str:
    """Return the report's text."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return HEAD + "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in each)} |\n" for each in lines
    )


def _steady(text: str) -> str:
    text = re.sub(r"/tmp/\w+", "/var/lib/vllm-gateway", text)
    return re.sub(r"127\.0\.0\.1:\d+", "10.0.0.11:8000", text)


async def _play(incident: Incident) -> Told:
    async with incident.play() as world:
        return await told_of(incident, world, PATIENCE_S)


def main(path: pathlib.Path = REPORT) -> int:
    """Play them all; return the exit code."""
    logging.disable(logging.CRITICAL)
    rows, late = [], 0
    for incident in INCIDENTS:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = runner.run(_play(incident))
        late += told.after_s > WITHIN_S
        rows.append(row(incident, told))
        sys.stderr.write(f"{incident.name}: {told.after_s:.1f} s\n")
    path.write_text(table(rows))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:])))
