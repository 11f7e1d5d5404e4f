"""A backend without a name of its own keeps the one it was given, wherever its address stands."""

import json

import pytest

from gateway.config.identity import keep_names, names_of
from gateway.config.load import load_config
from gateway.heal.givennames import read_names, save_names

A, B, C, D = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3, 4))


@pytest.fixture
def load(tmp_path):
    def load(*backends, known=None, **more):
        path = tmp_path / "gateway.yaml"
        path.write_text(json.dumps({"pools": {"m": {"backends": backends}}, **more}))
        return keep_names(load_config(path), {} if known is None else known)

    return load


def names(loaded):
    return {each.url: each.name for each in loaded.config.pools["m"].backends}


def test_the_first_time_position_counts(load):
    loaded = load(A, {"url": B, "name": "big"}, C)
    assert names(loaded) == {A: "b1", B: "big", C: "b3"}
    assert names_of(loaded) == {"m": {A: "b1", C: "b3"}}


def test_an_address_keeps_its_name_when_others_come_before_it_or_go(load):
    known = names_of(load(A, B))
    assert names(load(C, B, A, known=known)) == {C: "b3", B: "b2", A: "b1"}
    assert names(load(B, known=known)) == {B: "b2"}
    later = names_of(load(B, known=known))
    assert names(load(D, B, known=later)) == {D: "b1", B: "b2"}  # a name that nobody has is free


def test_a_name_in_the_file_goes_first(load):
    known = names_of(load(A, B))
    assert names(load({"url": C, "name": "b1"}, A, B, known=known)) == {C: "b1", A: "b3", B: "b2"}
    assert names(load({"url": A, "name": "x"}, B, known=known)) == {A: "x", B: "b2"}


def test_names_are_unique_whatever_was_known(load):
    known = {"m": {A: "b1", B: "b1", C: "b2"}}
    found = names(load(A, B, C, D, known=known))
    assert len(set(found.values())) == 4
    assert found[A] == "b1"


def test_with_a_shared_store_position_counts_as_replicas_have_no_common_past(load):
    known = names_of(load(A, B))
    assert names(load(C, A, known=known, redis="redis://10.0.0.9")) == {C: "b1", A: "b2"}


def test_names_are_kept_on_disk_for_the_next_gateway(load, tmp_path):
    known = names_of(load(A, B))
    save_names(tmp_path, known)
    assert names(load(C, A, B, known=read_names(tmp_path))) == {C: "b3", A: "b1", B: "b2"}
    assert read_names(tmp_path / "none") == {}


def test_names_that_the_file_gives_by_position_may_collide_with_known_ones(load):
    known = names_of(load(A, B, C))
    assert names(load(D, A, C, known=known)) == {D: "b2", A: "b1", C: "b3"}
