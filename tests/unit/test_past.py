"""What operators were told in the last hour: each moment has what was found at the time."""

from gateway.core.types import LoadSample, Scraped
from gateway.ops.past import Past
from tests.unit.test_overview import Fleet

POOL = {"backends": ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]}


class Watched:
    """A fleet whose overview is handed in each 5 s."""

    def __init__(self):
        self.fleet, self.past = Fleet(m=POOL), Past()
        self.away = set()
        self.fleet.ready("m/b1", "m/b2")

    @property
    def wall(self):
        return self.fleet.clock.wall()

    def passes(self, seconds):
        for _ in range(int(seconds / 5)):
            self.fleet.clock.at += 5
            for each in {"m/b1", "m/b2"} - self.away:
                self.fleet.ready(each)
                idle = LoadSample(self.fleet.clock.at, 0, 0, 0.0)
                self.fleet.table.observe(each, Scraped(idle))
            for each in self.away:
                self.fleet.down(each)
            self.past.note(self.fleet.overview(), self.wall)

    def entries(self, since):
        return len({self.past.at(since + each)["at"] for each in range(0, 3600, 5)})


def test_a_moment_is_told_as_it_was_and_not_as_it_is():
    watched = Watched()
    watched.passes(10)
    well = watched.wall
    watched.away = {"m/b1"}
    watched.passes(20)
    bad = watched.wall
    watched.away = set()
    watched.passes(10)
    then = watched.past.at(bad)
    assert then["verdict"]["state"] == "degraded"
    assert [(each["kind"], each["subject"]) for each in then["problems"]] == [("unreachable", "backend m/b1")]  # fmt: skip
    assert then["pools"] == {"m": "degraded"}
    for moment in (well, watched.wall):
        assert watched.past.at(moment)["verdict"]["state"] == "ok"
        assert watched.past.at(moment)["problems"] == []


def test_what_is_not_known_is_null():
    watched = Watched()
    unknown = {"at": None, "verdict": None, "problems": [], "pools": {}}
    assert watched.past.at(watched.wall) == unknown
    began = watched.wall
    watched.passes(10)
    assert watched.past.at(began) == unknown


def test_a_quiet_hour_is_one_entry_and_a_problem_has_its_numbers_each_half_minute():
    watched = Watched()
    began = watched.wall
    watched.passes(3600)
    assert watched.entries(began + 5) == 1
    watched.away = {"m/b1"}
    began = watched.wall + 5
    watched.passes(600)
    assert watched.entries(began) == 600 / 30


def test_an_hour_is_kept_and_no_more():
    watched = Watched()
    watched.passes(10)
    watched.away = {"m/b1"}
    watched.passes(30)
    bad = watched.wall
    watched.away = set()
    watched.passes(3300)
    assert watched.past.at(bad)["verdict"]["state"] == "degraded"
    for _ in range(20):  # an entry goes as others come
        watched.away = {"m/b1"}
        watched.passes(5)
        watched.away = set()
        watched.passes(25)
    assert watched.past.at(bad)["verdict"] is None
