"""The hint of a name that was not found."""

import pytest

from gateway.routing.near import NearNames

MANY = [f"customer-{number:05d}-support" for number in range(20_000)]
NAMES = ["qwen3-8b", "qwen3-32b", "Llama-3.1-8B-Instruct", "mistral-small", *MANY]


@pytest.fixture(scope="module")
def near():
    return NearNames(NAMES)


def anything(name):
    return True


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("qwen3-8B", "qwen3-8b"),
        ("qwen3_8b", "qwen3-8b"),
        ("llama-3.1-8b-instruct", "Llama-3.1-8B-Instruct"),
        ("lama-3.1-8b-instruct", "Llama-3.1-8B-Instruct"),
        ("Llama-3.1-8B-Instruc", "Llama-3.1-8B-Instruct"),
        ("xistral-small", "mistral-small"),
        ("customer-00017-suport", "customer-00017-support"),
        ("zzz", None),
        ("", None),
        ("x" * 100_000, None),
    ],
)
def test_a_name_with_one_mistake_leads_to_the_right_one(near, asked, meant):
    assert near.find(asked, anything) == meant


def test_only_names_that_the_caller_may_use_are_named(near):
    assert near.find("qwen3-8", lambda name: name != "qwen3-8b") == "qwen3-32b"
    assert near.find("qwen3-8", lambda name: False) is None


def test_what_a_caller_may_use_by_name_is_found_among_thousands_that_it_may_not(near):
    mine = "customer-05000-support"
    assert near.find("customer-10000-suport", {mine}.__contains__) is None
    assert near.find("customer-10000-suport", {mine}.__contains__, [mine]) == mine


def test_few_names_are_looked_at_however_many_there_are():
    looked_at = []
    NearNames(MANY).find("customer-1-support", lambda name: not looked_at.append(name))
    assert len(looked_at) <= 128
