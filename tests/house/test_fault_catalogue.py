"""The catalogue of faults names tests that are there, and each test of a fault is named in it."""

import ast
import pathlib

from tests.faults.catalogue import CATALOGUE, node

ROOT = pathlib.Path(__file__).parents[2]
# What the suite is made of is tested beside it.
OF_THE_SUITE = {"test_toxic.py", "test_reconcile.py", "test_report.py", "test_chaos.py"}
# A test may prove what no number of the catalogue asks for.
BESIDES = {
    "faults/test_streams_cut::test_vectors_and_whole_replies_that_break_off_are_refused",
    "faults/test_bad_clients::test_clients_that_leave_at_random_cost_the_others_nothing",
}


def functions(path):
    tree = ast.parse(path.read_text())
    return {
        each.name
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name.startswith("test_")
    }


def test_all_numbers_are_there_once():
    assert [each.number for each in CATALOGUE] == list(range(1, 73))


def test_each_fault_has_tests_or_a_reason():
    assert all(each.tests or each.missing for each in CATALOGUE)


def test_the_tests_that_are_named_exist():
    named = {node(test) for each in CATALOGUE for test in each.tests}
    missing = []
    for each in sorted(named):
        file, _, function = each.partition("::")
        if not (ROOT / file).exists() or function not in functions(ROOT / file):
            missing.append(each)
    assert not missing


def test_each_test_of_a_fault_is_named():
    named = {test for each in CATALOGUE for test in each.tests} | BESIDES
    there = {
        f"faults/{path.stem}::{name}"
        for path in (ROOT / "tests" / "faults").glob("test_*.py")
        if path.name not in OF_THE_SUITE
        for name in functions(path)
    }
    assert there <= named, sorted(there - named)
