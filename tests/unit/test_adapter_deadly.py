"""An adapter whose load ended servers: what is proof, how long it holds, and what ends it."""

import pytest

from gateway.adapters.deadly import Deadly, barred
from gateway.adapters.memory import Memory
from gateway.core.types import ModelsSeen, ProbeFailed, ProbePassed, ServedModel
from tests.gatehouse import House, held

DAY_S = 86400.0


class Scene:
    """A server that serves, and what is known of loads there."""

    def __init__(self, folder):
        self.house = House(m={"backends": [{"url": "http://127.0.0.1:8001"}]})
        self.table, self.loop = self.house.table, self.house.loop
        self.sees(ModelsSeen(self.now(), (ServedModel("m", None, None),), None, "0.32.0"))
        self.sees(ProbePassed(self.now(), self.now()))
        self.folder = folder
        self.deadly = self.known()

    def known(self):
        return Deadly("m", Memory(self.folder), self.loop)

    def now(self):
        return self.loop.now()

    def sees(self, observation):
        self.table.observe("m/b1", observation)

    def fails(self, then):
        self.deadly.failed("m/b1", "sql", "/sql")
        self.sees(then)
        self.deadly.look(self.table.backends("m"))


@pytest.mark.parametrize(
    ("reason", "deaths"),
    [("refused", 1), ("http_503", 1), ("timeout", 0), ("http_500", 0), ("", 0)],
)
@held
async def test_only_a_server_that_has_surely_ended_is_held_against_a_load(tmp_path, reason, deaths):
    scene = Scene(tmp_path)
    at = scene.now()
    scene.fails(ProbeFailed(at, reason, at) if reason else ProbePassed(at, at))
    assert len(scene.deadly.deaths("sql", "/sql")) == deaths
    assert scene.deadly.undecided("sql") is (reason in ("timeout", "http_500"))
    assert scene.deadly.suspects({"sql": "/sql"}) == ["sql"] * (reason != "")


@held
async def test_a_probe_that_was_sent_before_the_load_failed_tells_nothing(tmp_path):
    scene = Scene(tmp_path)
    early = scene.now() - 1
    scene.fails(ProbeFailed(scene.now(), "refused", early))
    assert scene.deadly.undecided("sql")


@held
async def test_the_second_death_is_proof_that_another_gateway_reads_and_a_day_ends(tmp_path):
    scene = Scene(tmp_path)
    for deaths in (1, 2):
        scene.fails(ProbeFailed(scene.now(), "refused", scene.now()))
        assert bool(barred(scene.deadly.deaths("sql", "/sql"))) is (deaths == 2)
    after = scene.known()
    assert "(2 times, on m/b1)" in barred(after.deaths("sql", "/sql"))
    assert not after.deaths("sql", "/another")
    scene.loop.at += DAY_S
    assert not after.deaths("sql", "/sql")


@held
async def test_what_is_loaded_after_all_or_ordered_is_trusted(tmp_path):
    scene = Scene(tmp_path)
    scene.fails(ProbeFailed(scene.now(), "refused", scene.now()))
    scene.deadly.clear("sql")
    assert not scene.deadly
    assert not scene.known()


@pytest.mark.parametrize(("apart_s", "deaths"), [(0.5, 1), (8.0, 0)])
@pytest.mark.parametrize("end_first", [True, False])
@held
async def test_the_end_of_a_server_is_held_against_a_load_that_failed_about_then(
    tmp_path, apart_s, deaths, end_first
):
    deadly = (scene := Scene(tmp_path)).deadly
    if end_first:
        deadly.ended("m/b1")
    else:
        deadly.failed("m/b1", "sql", "/sql")
    scene.loop.at += apart_s
    if end_first:
        deadly.failed("m/b1", "sql", "/sql")
    else:
        deadly.ended("m/b1")
    assert len(deadly.deaths("sql", "/sql")) == deaths


@held
async def test_a_load_that_fails_on_a_server_that_is_back_has_not_ended_the_one_before(tmp_path):
    scene = Scene(tmp_path)
    scene.deadly.ended("m/b1")
    scene.sees(ProbePassed(scene.now(), scene.now()))
    scene.deadly.look(scene.table.backends("m"))
    scene.deadly.failed("m/b1", "sql", "/sql")
    assert not scene.deadly.deaths("sql", "/sql")


@held
async def test_a_server_that_a_reload_removed_does_not_keep_others_from_loading_the_adapter(
    tmp_path,
):
    scene = Scene(tmp_path)
    scene.deadly.failed("m/b1", "sql", "/sql")
    scene.house.reload(m=[{"url": "http://127.0.0.1:8002", "name": "b2"}])
    scene.loop.at += 5.5
    scene.deadly.look(scene.table.backends("m"))
    assert not scene.deadly.undecided("sql")
    assert not scene.deadly
