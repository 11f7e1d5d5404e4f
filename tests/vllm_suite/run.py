"""Runs vLLM's own API tests directly and through the gateway, and compares test by test.

    run.py CACHE [--only WORD]...     CACHE as tests/e2e/install.sh and install.sh here left it

Exit status 0: the outcomes are equal, but for decisions.py; 1: they are not. What became of each test
is in CACHE/suite/outcomes.json.
"""

import argparse
import collections
import fnmatch
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from decisions import CHANCE, DECISIONS, Decision
from exchanges import table

HERE = pathlib.Path(__file__).parent
FILES = [each for each in (HERE / "files.txt").read_text().split("\n") if each[:1] not in ("", "#")]
FILE_S = 1500  # for a file in both arms, its server's start included
ROOT = "tests/entrypoints"
WORDS_CHARS = 800
EXCHANGES = ("direct exchanges", "gateway exchanges")
CHANGING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}(-[0-9a-f]+)*|\d+(\.\d+)?|req_\w+")


def run_file(cache: pathlib.Path, state: pathlib.Path, file: str) -> dict[str, dict[str, dict]]:
    """Run one file in both arms: arm -> test -> outcome."""
    out = state / "outcomes-part.json"
    out.unlink(missing_ok=True)
    env = {
        **os.environ, "HF_HOME": str(cache / "suite/hf"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(cache / "suite/packages"),
        "SUITE_GATEWAY": str(pathlib.Path(sys.executable).parent / "vllm-gateway"),
    }  # fmt: skip
    command = [str(cache / "vllm/bin/python"), str(HERE / "arm.py"), str(state), file]
    log = state / f"{file.replace('/', '.')}.log"
    with log.open("wb") as told:
        try:
            subprocess.run(
                command, cwd=cache / "suite/src", env=env, stdout=told, stderr=told, timeout=FILE_S, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"direct": {file: _lost("the file ran past its time")}, "gateway": {}}
    if not out.exists():
        return {"direct": {file: _lost(log.read_text(errors="replace")[-1500:])}, "gateway": {}}
    return json.loads(out.read_text())


def _lost(why: str) -> dict[str, object]:
    return {"outcome": "lost", "why": why, "seconds": 0.0}


def compare(arms: dict[str, dict[str, dict]]) -> tuple[list[str], list[str]]:
    """Return the tests whose outcomes differ, and those that fail in both arms with unlike words."""
    direct, through = arms["direct"], arms["gateway"]
    differ, unlike = [], []
    for test in direct | through:
        one, two = direct.get(test, {}), through.get(test, {})
        if one.get("outcome") != two.get("outcome"):
            differ.append(test)
        elif _words(one) != _words(two):
            unlike.append(test)
    return differ, unlike


def _words(outcome: dict) -> str:
    """Return why a test failed without ids and numbers; the end may be cut at another place."""
    return CHANGING.sub("", outcome["why"])[:WORDS_CHARS]


def decides(decision: Decision, test: str) -> bool:
    return fnmatch.fnmatchcase(test, f"{ROOT}/{decision.file}::{decision.tests}")


def decided(test: str) -> bool:
    return any(decides(each, test) for each in [*DECISIONS, *CHANCE])


def describe(file: str, found: dict[str, dict], seconds: float) -> None:
    """Print what became of a file's tests, and where both arms differ."""
    differ, unlike = compare(found)
    counts = collections.Counter(each["outcome"] for each in found["direct"].values())
    told = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(
        f"{file}: {told}; {len(differ)} differ, {len(unlike)} fail in other words ({seconds:.0f} s)"
    )
    for mark, tests in (("differs", differ), ("unlike", unlike)):
        for test in tests:
            one, two = (found[arm].get(test, {}) for arm in ("direct", "gateway"))
            print(
                f"  {'decided' if decided(test) else mark} {test}: {one.get('outcome')} -> {two.get('outcome')}"
            )
            print(f"    direct:  {_line(one)}\n    gateway: {_line(two)}")
    wire = table(*(found.get(each, {}) for each in EXCHANGES))
    for line, tests in sorted(wire.items()):
        print(f"  wire {len(tests)} x {line} (first: {tests[0].partition('::')[2]})")
    sys.stdout.flush()


def faults(results: dict[str, dict], *, all_ran: bool) -> Iterator[str]:
    """Say what makes the run fail. When only some files ran, a decision may lack its tests."""
    differ, unlike = compare(results)
    yield from (f"differs, undecided: {test}" for test in differ if not decided(test))
    passed: dict[str, bool] = {}
    for test, outcome in results["direct"].items():
        file = test.partition("::")[0]
        passed[file] = passed.get(file, False) or outcome["outcome"] == "passed"
    yield from (
        f"nothing passes against vLLM itself: {file}" for file in passed if not passed[file]
    )
    for each in DECISIONS:
        ran = all_ran or any(decides(each, test) for test in results["direct"])
        if ran and not any(decides(each, test) for test in [*differ, *unlike]):
            yield f"a decision that makes no difference: {each.file}::{each.tests}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=pathlib.Path)
    parser.add_argument(
        "--only", action="append", default=[], help="files whose path has this word"
    )
    asked = parser.parse_args()
    state = asked.cache / "suite/state"
    state.mkdir(parents=True, exist_ok=True)
    files = [
        f"{ROOT}/{each}" for each in FILES
        if not asked.only or any(word in each for word in asked.only)
    ]  # fmt: skip
    results: dict[str, dict] = {each: {} for each in ("direct", "gateway", *EXCHANGES)}
    try:
        for file in files:
            began = time.monotonic()
            found = run_file(asked.cache, state, file)
            for part, tests in found.items():
                results[part] |= tests
            describe(file, found, time.monotonic() - began)
    finally:
        _end_server(asked.cache, state)
        (asked.cache / "suite/outcomes.json").write_text(json.dumps(results, indent=1))
    found_faults = list(faults(results, all_ran=not asked.only))
    differ, unlike = compare(results)
    print(
        f"{len(results['direct'])} tests in {len(files)} files: {len(differ)} differ, "
        f"{sum(map(decided, differ))} of them by decision; {len(unlike)} fail in other words"
    )
    print("\n".join(found_faults))
    return 1 if found_faults else 0


def _line(found: dict) -> str:
    return " ".join(str(found.get("why", "")).split())[:400]


def _end_server(cache: pathlib.Path, state: pathlib.Path) -> None:
    code = "import arm, pathlib, sys; arm.Keeper(pathlib.Path(sys.argv[1]), '').close()"
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{cache / 'suite/packages'}"}
    subprocess.run(
        [str(cache / "vllm/bin/python"), "-c", code, str(state)], env=env, check=False, timeout=60
    )


if __name__ == "__main__":
    sys.exit(main())
