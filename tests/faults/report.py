"""Runs every test that the catalogue names, and writes the table of faults.

    python -m tests.faults.report [--e2e] [REPORT]         REPORT: loadtest/reports/faults.md

The tests of the store and others that need programs beside Python run with `--e2e`; else they are
told as not run. A fault passes where all of its tests do. Ends with 1 where one does not.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.faults.catalogue import CATALOGUE, Fault, node

REPORT = pathlib.Path("loadtest/reports/faults.md")
PASSED, FAILED, NOT_RUN, NONE = "passed", "FAILED", "not run", "none"

HEAD = """# The catalogue of faults

Made by `make fault-report`: it runs the tests that the catalogue (`tests/faults/catalogue.py`) names and writes this table.
What is measured depends on the machine, what is promised does not. A dash: the test measures nothing but its promise.

"""


def outcomes(report: pathlib.Path) -> dict[str, str]:
    """Read pytest's JUnit file: the outcome of each test function, over all of its parameters."""
    found: dict[str, set[str]] = defaultdict(set)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        name = f"{file}::{case.attrib['name'].partition('[')[0]}"
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        found[name].add(FAILED if failed else NOT_RUN if "skipped" in kinds else PASSED)
    return {
        name: FAILED if FAILED in kinds else PASSED if PASSED in kinds else NOT_RUN
        for name, kinds in found.items()
    }


def verdict(fault: Fault, results: Mapping[str, str]) -> str:
    """Return what became of a fault's tests."""
    each = {results.get(node(test), NOT_RUN) for test in fault.tests}
    if not each:
        return NONE
    return FAILED if FAILED in each else NOT_RUN if NOT_RUN in each else PASSED


def table(
    faults: Sequence[Fault], results: Mapping[str, str], notes: Mapping[str, Sequence[str]]
) -> str:
    """Return the report's text."""
    verdicts = {fault.number: verdict(fault, results) for fault in faults}
    counts = {kind: list(verdicts.values()).count(kind) for kind in (PASSED, FAILED, NOT_RUN, NONE)}
    lines = [
        HEAD
        + f"{counts[PASSED]} of {len(faults)} pass, {counts[FAILED]} fail, {counts[NOT_RUN]} were not run,"
        + f" {counts[NONE]} have no test.\n",
        "| | fault | injection | promise | result | measured | tests |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in faults:
        measured = "; ".join(note for test in fault.tests for note in notes.get(node(test), ()))
        told = verdicts[fault.number] + (f": {fault.missing}" if fault.missing else "")
        tests = ", ".join(f"`{test}`" for test in fault.tests)
        cells = (
            str(fault.number),
            fault.name,
            fault.injection,
            fault.promise,
            told,
            measured or "-",
            tests,
        )
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run as a program."""
    e2e = "--e2e" in arguments
    (where,) = [pathlib.Path(each) for each in arguments if each != "--e2e"] or [REPORT]
    tests = list(dict.fromkeys(node(test) for fault in CATALOGUE for test in fault.tests))
    with tempfile.TemporaryDirectory() as folder:
        junit, notes = pathlib.Path(folder, "junit.xml"), pathlib.Path(folder, "notes.json")
        run = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", *tests]
        run += [] if e2e else ["-m", "not e2e"]
        subprocess.run(run, env=os.environ | {"FAULT_NOTES": str(notes)}, check=False)
        results, measured = outcomes(junit), json.loads(notes.read_text())
    where.write_text(table(CATALOGUE, results, measured))
    print(where)
    return int(FAILED in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
