"""The glossary has every state and every reason that operators meet."""

import re
from pathlib import Path
from typing import get_args

import pytest

from gateway.core.types import ShedReason
from gateway.ops.states import BackendState, PoolState
from gateway.wire.replies import HEADER_PREFIX

TEXT = (Path(__file__).parents[2] / "deploy" / "GLOSSARY.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        get_args(BackendState),
        get_args(PoolState),
        [each.value for each in ShedReason],
        [f"{HEADER_PREFIX.decode()}shed-reason"],
    ],
)
def test_every_word_is_explained(words):
    assert [word for word in words if f"`{word}`" not in TEXT] == []


def test_no_word_is_explained_that_nobody_meets():
    tables = TEXT.split("## States of a backend")[1]
    told = set(re.findall(r"^\| `([a-z_-]+)` \|", tables, re.M))
    assert told == {*get_args(BackendState), *(each.value for each in ShedReason)}


def test_words_are_in_the_order_of_the_alphabet():
    words = re.findall(r"^\| ([a-zA-Z][^|]*) \|", TEXT.split("## ")[0], re.M)[1:]
    assert words == sorted(words, key=str.lower)
