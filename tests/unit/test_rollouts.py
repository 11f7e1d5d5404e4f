"""What becomes of requests tells which revision is better, and the verdict is carried out where that is wished."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config.models import Config
from gateway.core.events import Events
from gateway.core.types import (
    Endpoint,
    ModelsSeen,
    Outcome,
    ProbePassed,
    RequestRecord,
    ServedModel,
    Usage,
    UsageSource,
)
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollouts
from gateway.rollout.together import Together
from gateway.rollout.verdict import Finding
from gateway.store.memory import MemoryStore
from gateway.store.shared import StoreUnavailable
from tests.unit.test_table import HeldClock

OLD, NEW = "m/b1", "m/b2"


def pools(**canary):
    backends = [
        {"url": "http://127.0.0.1:8001", "revision": "v1"},
        {"url": "http://127.0.0.1:8002", "revision": "v2"},
    ]
    pool = {"backends": backends}
    if canary:
        pool["canary"] = {"revision": "v2"} | canary
    return Config.model_validate({"pools": {"m": pool}}).pools


class Site:
    """A table with two revisions, and the trials of it."""

    def __init__(self, folder, **canary):
        self.clock = HeldClock()
        self.table = PoolTable(self.clock)
        self.events = Events()
        self.rollouts = Rollouts(self.table, self.clock, self.events, folder)
        self.reload(**canary)
        for backend in self.table:
            self.table.observe(backend.id, ModelsSeen(0.0, (ServedModel("m", None, None),)))
            self.table.observe(backend.id, ProbePassed(0.0))

    def reload(self, **canary):
        settings = pools(**canary)
        self.table.apply(settings)
        self.rollouts.apply(settings)

    @property
    def trial(self):
        return self.rollouts.get("m")

    def reserve(self):
        return {backend.id for backend in self.table if backend.kept_back}


def record(
    backend,
    *,
    outcome=Outcome.OK,
    first_s=0.1,
    gap_s=0.01,
    resumed=0,
    stream=True,
    conversation=None,
):
    return RequestRecord(
        "r", Endpoint.CHAT, 0.0, pool="m", backend_id=backend, outcome=outcome, stream=stream,
        sent_at=1e6, first_byte_at=1e6 + first_s, ended_at=1e6 + first_s + 10 * gap_s,
        usage=Usage(5, 11, UsageSource.UPSTREAM), resumed=resumed, conversation=conversation,
    )  # fmt: skip


def serve(site, count, **new):
    """Have so many requests end on either side, those of the new revision as told."""
    for number in range(count):
        site.clock.at += 1
        noise = 1 + number % 7 / 10
        site.rollouts.settled([record(OLD, first_s=0.1 * noise)])
        site.rollouts.settled([record(NEW, **{"first_s": 0.1 * noise, **new})])


def test_the_verdict_on_each_canary_is_told_as_a_state(tmp_path):
    site = Site(tmp_path, weight=0.5)
    assert site.rollouts.verdicts() == {("m", "worse"): 0, ("m", "fine"): 0, ("m", "open"): 1}
    serve(site, 2600)
    assert site.rollouts.verdicts() == {("m", "worse"): 0, ("m", "fine"): 1, ("m", "open"): 0}
    assert site.rollouts.requests() == {("m", "canary"): 2600, ("m", "others"): 2600}
    site.reload()  # without a canary
    assert site.rollouts.requests() == {}
    assert site.rollouts.verdicts() == {}


@pytest.mark.parametrize("automatic", [False, True])
def test_a_revision_that_is_as_good_is_promoted_where_that_is_automatic(tmp_path, automatic):
    site = Site(tmp_path, weight=0.5, automatic=automatic)
    serve(site, 2600)
    assert (site.trial.finding, site.trial.carried_out) == (Finding.FINE, automatic)
    assert site.reserve() == ({OLD} if automatic else set())
    assert ("promoted" if automatic else "it may be promoted") in site.trial.told()
    # Once the file says so too, nobody is kept back any more.
    site.reload()
    assert (site.trial, site.reserve()) == (None, set())


def test_a_slow_revision_is_rolled_back_and_a_reload_changes_nothing(tmp_path):
    site = Site(tmp_path, weight=0.5, automatic=True)
    serve(site, 700, first_s=0.4)
    assert (site.trial.finding, site.reserve()) == (Finding.WORSE, {NEW})
    site.reload(weight=0.5, automatic=True)
    assert (site.trial.finding, site.reserve()) == (Finding.WORSE, {NEW})
    assert Site(tmp_path, weight=0.5, automatic=True).reserve() == {NEW}
    site.reload(weight=0.4, automatic=True)
    assert (site.trial.finding, site.reserve()) == (Finding.OPEN, set())


def test_what_a_process_finds_while_another_one_takes_its_place_holds_there_too(tmp_path):
    before, heir = (Site(tmp_path, weight=0.5, automatic=True) for _ in range(2))
    serve(before, 700, first_s=0.4)
    assert (before.reserve(), heir.reserve()) == ({NEW}, set())
    before.rollouts.hand_over()
    heir.rollouts.take_over()
    assert (heir.trial.finding, heir.reserve()) == (Finding.WORSE, {NEW})
    assert Site(tmp_path, weight=0.5, automatic=True).reserve() == {NEW}


def test_who_takes_over_goes_on_with_what_it_saw_where_nothing_was_found(tmp_path):
    before, heir = (Site(tmp_path, weight=0.5, automatic=True) for _ in range(2))
    serve(heir, 3)
    before.rollouts.hand_over()
    heir.rollouts.take_over()
    assert (heir.trial.finding, heir.trial.trial.requests) == (Finding.OPEN, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_canary_that_was_removed_from_the_settings_begins_anew_when_it_is_set_up_again(
    tmp_path, restarts
):
    site = Site(tmp_path, weight=0.5, automatic=True)
    serve(site, 700, first_s=0.4)
    assert site.reserve() == {NEW}
    site.reload()  # another build is put there under the same name
    site = Site(tmp_path) if restarts else site
    site.reload(weight=0.5, automatic=True)
    assert (site.trial.finding, site.reserve()) == (Finding.OPEN, set())
    assert Site(tmp_path, weight=0.5, automatic=True).trial.finding is Finding.OPEN


def test_one_client_that_sends_what_is_wrong_again_and_again_rolls_nothing_back(tmp_path):
    """All that one conversation sends goes to one side."""
    site = Site(tmp_path, weight=0.5, automatic=True)
    for _ in range(300):
        serve(site, 1)
        site.rollouts.settled(
            [record(NEW, outcome=Outcome.UPSTREAM_REJECTED, conversation=0.25)] * 5
        )
    assert (site.trial.finding, site.trial.trial.failed) == (Finding.OPEN, 1)
    for number in range(250):  # another conversation each
        wrong = record(NEW, outcome=Outcome.UPSTREAM_REJECTED, conversation=number / 256)
        site.rollouts.settled([wrong])
        serve(site, 2)
    assert site.reserve() == {NEW}


def crash(site, backend, carried=30):
    """End a server, and with it all that it carries."""
    for _ in range(carried):
        site.rollouts.failed(backend)
    site.rollouts.settled([])


def test_the_end_of_one_server_is_one_failure_however_much_it_carried(tmp_path):
    site = Site(tmp_path, keys=["a"], automatic=True)
    for _ in range(3):
        serve(site, 30)
        crash(site, NEW)
        serve(site, 90)
        assert site.reserve() == set()
    serve(site, 200)  # up to the next look
    assert site.reserve() == {NEW}


def test_a_revision_is_not_promoted_because_another_server_ended_once(tmp_path):
    how = {"keys": ["a"], "automatic": True}
    site = Site(tmp_path, **how)
    for number in range(400):
        serve(site, 1)
        if number % 45 == 44:
            site.rollouts.failed(NEW)  # one in 46 fails
        if number == 150:
            crash(site, OLD, 60)
    assert site.reserve() == set()


def test_the_order_in_which_keys_are_listed_begins_no_new_trial(tmp_path):
    site = Site(tmp_path, keys=["b", "a"], automatic=True)
    serve(site, 300, outcome=Outcome.UPSTREAM_REJECTED)
    assert site.reserve() == {NEW}
    site.reload(keys=["a", "b"], automatic=True)
    assert site.reserve() == {NEW}
    assert Site(tmp_path, keys=["b", "a"], automatic=True).reserve() == {NEW}
    site.reload(keys=["a", "c"], automatic=True)
    assert site.reserve() == set()


def test_what_clients_do_and_what_another_backend_began_say_nothing_of_a_revision(tmp_path):
    site = Site(tmp_path, weight=0.5)
    arm = site.trial.own.trial
    for outcome in (Outcome.CLIENT_GONE, Outcome.SHED, Outcome.TIME_LIMIT, Outcome.REJECTED):
        site.rollouts.settled([record(NEW, outcome=outcome)])
    assert arm.requests == 0
    # The first token of a resumed stream is another backend's, and the pause is in its gaps.
    site.rollouts.settled([record(NEW, first_s=-5.0, resumed=1)])
    assert (arm.requests, arm.first, arm.gap) == (1, {}, {})
    site.rollouts.settled([record(NEW), record(NEW, stream=False)])
    assert (arm.requests, arm.failed) == (3, 0)
    assert [sum(each.values()) for each in (arm.first, arm.gap)] == [1, 1]
    told = float(arm.told().partition("first token ")[2].partition(" ms")[0])
    assert told == pytest.approx(100, rel=0.05)
    site.rollouts.settled([record(NEW, outcome=Outcome.UPSTREAM_REJECTED)])
    site.rollouts.failed(NEW)
    assert (arm.requests, arm.failed) == (5, 2)


def test_without_samples_of_the_other_side_no_look_is_spent(tmp_path):
    site = Site(tmp_path, weight=0.5, automatic=True)
    for _ in range(200):
        site.clock.at += 1
        site.rollouts.failed(NEW)
        site.rollouts.settled([])
    assert (site.trial.finding, site.trial.look) == (Finding.OPEN, 1)
    for _ in range(20):
        site.rollouts.settled([record(OLD)])
    assert site.trial.finding is Finding.WORSE


class Lost(MemoryStore):
    """A store that does not answer."""

    def __init__(self):
        """There is nothing to keep."""

    async def renew(self, *_, **__):
        raise StoreUnavailable("lost")

    acquire = beat = renew


class Gateways:
    """Several gateways with one store; the clock of the first is everybody's."""

    def __init__(self, tmp_path, count, *, redis=True, **canary):
        self.how = canary
        self.sites = [Site(tmp_path / f"{number}", **canary) for number in range(count)]
        clock = self.sites[0].clock
        self.store = MemoryStore(clock)
        self.all = []
        for number, site in enumerate(self.sites):
            (tmp_path / f"{number}").mkdir(exist_ok=True)
            site.clock = site.rollouts._clock = clock
            site.rollouts.judges = number == 0 and not redis
            self.all.append(Together(site.rollouts, self.store, clock, f"g{number}", elects=redis))

    def beat(self, *only):
        for _ in range(3):  # what was seen, what is found of it, and so of all
            for number in only or range(len(self.all)):
                asyncio.run(self.all[number].turn())

    def events(self):
        return [
            (number, each.label)
            for number, site in enumerate(self.sites)
            for each in site.events.newest()
        ]

    def reserves(self):
        return [site.reserve() for site in self.sites]


class Lives:
    """One gateway that is restarted, each time without the state folder of the last; the store stays."""

    def __init__(self, folder):
        self.folder, self.clock, self.count = folder, HeldClock(), 0
        self.store = MemoryStore(self.clock)

    def begin(self, **canary):
        """Return the site of the next life; the one before it has ended."""
        self.count += 1
        (folder := self.folder / f"life {self.count}").mkdir()
        site = Site(folder, **canary)
        site.clock = site.rollouts._clock = self.clock
        site.rollouts.judges = False
        self.now = Together(site.rollouts, self.store, self.clock, f"life {self.count}", True)
        self.beat()
        return site

    def beat(self):
        self.pass_by(3)

    def pass_by(self, seconds):
        for _ in range(seconds):
            asyncio.run(self.now.turn())
            self.clock.at += 1


@pytest.mark.parametrize("redis", [True, False])
def test_of_several_gateways_one_judges_what_all_saw_and_all_take_its_verdict(tmp_path, redis):
    gateways = Gateways(tmp_path, 3, redis=redis, weight=0.5, automatic=True)
    gateways.beat()
    for site in gateways.sites:
        serve(site, 15, outcome=Outcome.UPSTREAM_REJECTED)  # too few for one alone
    assert gateways.reserves() == [set(), set(), set()]
    gateways.beat()
    assert gateways.reserves() == [{NEW}, {NEW}, {NEW}]
    assert gateways.events() == [(0, "worse")]
    first, second, _ = (site.trial for site in gateways.sites)
    assert (second.trial.requests, second.told()) == (45, first.told())
    # Over a reload, a restart, and one that was not there.
    for site in gateways.sites:
        site.reload(**gateways.how)
    again = Site(tmp_path / "2", **gateways.how)
    assert [*gateways.reserves(), again.reserve()] == [{NEW}] * 4
    late = Site(tmp_path / "late", **gateways.how)
    late.rollouts.judges = False
    asyncio.run(Together(late.rollouts, gateways.store, gateways.all[0].clock, "late", True).turn())
    assert late.reserve() == {NEW}
    # New settings are another trial, whose verdict the old one does not decide.
    for site in gateways.sites:
        site.reload(**gateways.how | {"revision": "v1"})
    gateways.beat()
    assert gateways.reserves() == [set(), set(), set()]


def test_a_canary_that_ended_everywhere_begins_anew_when_it_is_set_up_again(tmp_path):
    gateways = Gateways(tmp_path, 2, weight=0.5, automatic=False)
    gateways.beat()
    serve(gateways.sites[1], 40, outcome=Outcome.UPSTREAM_REJECTED)
    gateways.beat()
    assert [site.trial.finding for site in gateways.sites] == [Finding.WORSE] * 2
    for site in gateways.sites:
        site.rollouts.apply({})
    gateways.beat()
    for site in gateways.sites:
        site.reload(**gateways.how)
    gateways.beat()
    assert [site.trial.finding for site in gateways.sites] == [Finding.OPEN] * 2
    assert [site.trial.trial.requests for site in gateways.sites] == [0, 0]


def test_when_the_one_that_judges_dies_another_does_and_knows_what_it_saw(tmp_path):
    gateways = Gateways(tmp_path, 2, weight=0.5, automatic=True)
    gateways.beat()
    assert [each.rollouts.judges for each in gateways.all] == [True, False]
    serve(gateways.sites[0], 20)
    gateways.beat()
    assert [site.trial.look for site in gateways.sites] == [2, 2]
    gateways.sites[0].clock.at += 10  # beyond its lease
    serve(gateways.sites[1], 19, outcome=Outcome.UPSTREAM_REJECTED)
    gateways.beat(1)
    assert gateways.events() == []  # the second look is at 40 of both
    serve(gateways.sites[1], 1, outcome=Outcome.UPSTREAM_REJECTED)
    assert gateways.events() == [(1, "worse")]


def test_one_crash_that_all_gateways_see_is_one_moment(tmp_path):
    gateways = Gateways(tmp_path, 3, keys=["a"], automatic=True)
    gateways.beat()
    for site in gateways.sites:
        serve(site, 60)
    for site in gateways.sites:
        crash(site, NEW)
    gateways.beat()
    assert [site.trial.finding for site in gateways.sites] == [Finding.OPEN] * 3
    assert gateways.sites[0].trial.trial.spread == 1
    for _ in range(2):
        gateways.sites[0].clock.at += 30
        crash(gateways.sites[1], NEW)
        gateways.beat()
    assert gateways.sites[0].trial.trial.spread == 3
    serve(gateways.sites[2], 200)
    gateways.beat()
    assert gateways.reserves() == [{NEW}] * 3


def test_without_the_store_there_is_no_verdict_and_nothing_is_forgotten(tmp_path):
    gateways = Gateways(tmp_path, 2, weight=0.5, automatic=True)
    gateways.beat()
    serve(gateways.sites[1], 15, outcome=Outcome.UPSTREAM_REJECTED)
    gateways.beat()
    for each in gateways.all:
        each.store = each._seat.store = Lost()
    gateways.sites[0].clock.at += 10
    gateways.beat()
    serve(gateways.sites[0], 100, outcome=Outcome.UPSTREAM_REJECTED)
    assert gateways.events() == []
    assert gateways.sites[0].trial.trial.requests == 115


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_REJECTED, Outcome.OK])
def test_a_canary_that_ended_begins_anew_where_gateways_are_restarted_with_their_settings(
    tmp_path, outcome
):
    """As in Kubernetes: each change of settings is another process, and the store outlives them all."""
    lives = Lives(tmp_path)
    before = lives.begin(weight=0.5, automatic=True)
    serve(before, 40 if outcome is not Outcome.OK else 2600, outcome=outcome)
    lives.beat()
    assert before.trial.finding is not Finding.OPEN
    lives.begin()
    lives.pass_by(30)
    again = lives.begin(weight=0.5, automatic=True)
    lives.beat()
    assert (again.trial.finding, again.trial.trial.requests, again.reserve()) == (
        Finding.OPEN,
        0,
        set(),
    )
    later = lives.begin(weight=0.5, automatic=True)
    lives.beat()
    assert (later.trial.finding, later.trial.trial.requests) == (Finding.OPEN, 0)


def test_a_gateway_that_is_restarted_amid_a_trial_goes_on_with_what_the_one_before_saw(tmp_path):
    lives = Lives(tmp_path)
    before = lives.begin(weight=0.5)
    serve(before, 15, outcome=Outcome.UPSTREAM_REJECTED)
    lives.beat()
    lives.clock.at += 60  # it takes a while to start
    again = lives.begin(weight=0.5)
    lives.pass_by(10)
    assert (again.trial.finding, again.trial.trial.requests) == (Finding.OPEN, 15)


def test_who_has_no_canary_in_the_settings_neither_ends_nor_judges_that_of_another(tmp_path):
    gateways = Gateways(tmp_path, 2, weight=0.5)
    gateways.sites[0].reload()
    gateways.beat()
    serve(gateways.sites[1], 40, outcome=Outcome.UPSTREAM_REJECTED)
    for _ in range(10):
        gateways.sites[0].clock.at += 1
        gateways.beat()
    assert gateways.events() == [(1, "worse")]
    assert gateways.sites[1].trial.trial.requests == 40
