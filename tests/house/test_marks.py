"""Tests that need other programs are where the targets of the Makefile look for them."""

import pathlib

TESTS = pathlib.Path(__file__).parents[1]
MARK = "pytest.mark." + "e2e"


def files_with_the_mark(folder):
    return {path for path in folder.rglob("test_*.py") if MARK in path.read_text()}


def test_what_needs_other_programs_is_in_one_folder():
    assert files_with_the_mark(TESTS) == files_with_the_mark(TESTS / "e2e")
    assert files_with_the_mark(TESTS)
