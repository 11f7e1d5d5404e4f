"""Sizes that keep the project readable, and a README that names only what exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gateway"
MODULE_LINES = 350
DECISION_LINES = 40

# Longer than the budget, each with the reason it is not two modules.
LONGER = {
    "core/errors.py": "the error tree: all that a client can be told, with its statuses, in one file",
    "core/types.py": "the vocabulary: every value that flows, in the one file that is read first",
    "ingress/downstream.py": "one request of one client: what is read and what is written share its state",
    "wire/sse.py": "one stream's judge: splitting and judging share the held-back bytes",
}

COMMAND = re.compile(r"(?:^ {4}|`)(?:\S*/)?vllm-gateway ([a-z]+)(?: ([a-z]+)(?=[\s`]))?", re.M)


def lines(path):
    return len(path.read_text().splitlines())


def long_modules():
    return {
        path.relative_to(PACKAGE).as_posix(): lines(path)
        for path in PACKAGE.rglob("*.py")
        if lines(path) > MODULE_LINES
    }


def verbs(*group):
    """Return the commands that the help of the program, or of a group of it, lists."""
    program = Path(sys.executable).with_name("vllm-gateway")
    ran = subprocess.run(
        [program, *group, "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    _, _, listed = ran.stdout.partition("Commands:\n")
    return set(re.findall(r"^  ([a-z]+)  ", listed, re.M))


def test_modules_keep_to_the_budget_or_have_a_reason():
    assert long_modules().keys() <= LONGER.keys(), f"over {MODULE_LINES} lines: {long_modules()}"


@pytest.mark.parametrize("name", LONGER)
def test_exceptions_are_needed_and_stay_small(name):
    assert LONGER[name]
    assert MODULE_LINES < lines(PACKAGE / name) <= MODULE_LINES * 5 // 4


def test_decision_records_are_short():
    records = sorted((PACKAGE / "decisions").glob("*.md"))
    assert records
    assert {each.name for each in records if lines(each) > DECISION_LINES} == set()


def test_decision_records_are_numbered_without_gaps():
    numbers = [each.name[:3] for each in sorted((PACKAGE / "decisions").glob("*.md"))]
    assert numbers == [f"{place:03}" for place in range(1, len(numbers) + 1)]


def test_packages_have_no_code_of_their_own():
    filled = [
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("__init__.py")
        if path.read_bytes()
    ]
    assert filled == ["gateway/__init__.py"]


def test_every_command_of_the_readme_exists():
    named = set(COMMAND.findall((ROOT / "README.md").read_text()))
    assert len(named) > 3, "the README shows no commands: is the pattern still right?"
    assert {verb for verb, _ in named} <= verbs()
    for group in ("keys", "config"):
        assert {sub for verb, sub in named if verb == group and sub} <= verbs(group)
