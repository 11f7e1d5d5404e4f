"""Plays the ten incidents, and writes what operators were told of each.

    python -m tests.incidents.report [REPORT]         REPORT: loadtest/reports/incidents.md

Needs prometheus, chromium, playwright and redis-server. Ends with 1 where a cause was not named within 15 s.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
import re
import sys

import uvloop

from tests.incidents.lookouts import Told, lookouts, waits
from tests.incidents.scenes import INCIDENTS, WITHIN_S, Incident

REPORT = pathlib.Path(__file__).parents[2] / "loadtest/reports/incidents.md"
PATIENCE_S = 40.0

HEAD = f"""# Ten incidents, and what operators are told

Made by `make incident-report`: it plays each incident (`tests/incidents/scenes.py`) against simulated backends, with health
checks as shipped. It writes down what `vllm-gateway status` prints, what the dashboard's verdict says in a real Chromium, and
which alert fires in a real Prometheus with the files of [deploy/prometheus](../../deploy/prometheus). `make e2e` plays them
again, and holds each against these sentences.

The promise is that all three name the cause within {WITHIN_S:.0f} s of the fault. The columns of seconds are one run's; they
depend on the machine, and an alert's on when Prometheus scrapes: each 3 s. All ten alerts fire at once (`for: 0s`), because the
gateway judges before it tells. Others wait, so that what passes wakes nobody: `PoolSaturated` 10 s, `PoolDown` 15 s,
`GatewayUnreachable` 30 s, `RequestsFail` 1 min. What each waits is in the [runbooks](../../deploy/RUNBOOKS.md).

"""
COLUMNS = ("incident", "planted", "`status`", "after", "the dashboard's verdict", "after", "alert", "after")  # fmt: skip


def row(incident: Incident, told: Told) -> list[str]:
    """Return the cells of one incident; what differs in each run for no reason of interest is replaced."""
    return [
        incident.name,
        incident.planted,
        _steady(told.status.text),
        _seconds(told.status.after_s),
        _steady(told.dashboard.text),
        _seconds(told.dashboard.after_s),
        f"`{incident.alert}`, {waits(incident)}: {_steady(told.alert.text)}",
        _seconds(told.alert.after_s),
    ]


def table(rows: list[list[str]]) -> str:
    """Return the report's text."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return HEAD + "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in each)} |\n" for each in lines
    )


def rows_of(report: pathlib.Path) -> dict[str, list[str]]:
    """Return the rows of a report by their incident's name."""
    lines = [line for line in report.read_text().splitlines() if line.startswith("| ")]
    cut = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines]
    return {name: [name, *cells] for name, *cells in cut}


def essence(cells: list[str]) -> list[tuple[str, str]]:
    """Return what the cells of a row have in common in all runs: what is wrong, and what to do, without numbers."""
    return [_core(each.replace("\\|", "|")) for each in cells]


def _core(text: str) -> tuple[str, str]:
    text = re.sub(r"^All is well: .*? in flight\. |^(down|degraded|note): | \(LATE\)$", "", text)
    text = re.sub(r"\d+([.:]\d+)*", "#", text)
    said, _, todo = text.partition(" Next: ")
    said, _, todo = said.partition(" next ") if not todo else (said, "", todo)
    return re.split(r"[:;,.] ", said)[0], todo


def _seconds(after_s: float) -> str:
    return f"{after_s:.1f} s{'' if after_s <= WITHIN_S else ' (LATE)'}"


def _steady(text: str) -> str:
    text = re.sub(r"/tmp/\w+", "/var/lib/vllm-gateway", text)
    text = re.sub(
        r"((?<!unknown )\b(?i:key)|effective|update|client) [a-z0-9]{8}\b", r"\1 k3yid234", text
    )
    # The lines of `status` about Redis, which follow the problem, name the machine.
    text = re.sub(r" What replicas share does not answer: .*", "", text)
    return re.sub(r"127\.0\.0\.1:\d+", "10.0.0.11:8000", text)


async def _play(incident: Incident) -> Told:
    async with incident.scene() as scene, lookouts(scene.world.admin_url) as looking:
        await scene.plant()
        return await looking.hear(incident, PATIENCE_S)


def main(path: pathlib.Path = REPORT) -> int:
    """Play them all; return the exit code."""
    logging.disable(logging.CRITICAL)
    rows, late = [], 0
    for incident in INCIDENTS:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = runner.run(_play(incident))
        last_s = max(each.after_s for each in (told.status, told.dashboard, told.alert))
        late += last_s > WITHIN_S
        rows.append(row(incident, told))
        sys.stderr.write(f"{incident.name}: {last_s:.1f} s\n")
    path.write_text(table(rows))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:])))
