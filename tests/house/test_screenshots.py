"""The pictures of the dashboard are shown, are those that `make screenshots` takes, and are small."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "deploy/screenshots").iterdir())
MOST_BYTES = 150_000


def test_each_picture_is_shown_and_each_that_is_shown_is_there():
    pages = (ROOT / "README.md").read_text() + (ROOT / "deploy/DASHBOARD.md").read_text()
    shown = set(re.findall(r"screenshots/([\w-]+\.png)", pages))
    assert shown == {each.name for each in PICTURES}


def test_each_picture_is_one_that_is_taken():
    taken = (ROOT / "tests/e2e/screenshots.py").read_text()
    assert all(f'"{each.stem}' in taken for each in PICTURES)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda each: each.name)
def test_a_picture_is_small(picture):
    assert picture.stat().st_size < MOST_BYTES
