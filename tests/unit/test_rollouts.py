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
from gateway.heal.following import Following, told_of
from gateway.heal.names import Names
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollouts
from gateway.rollout.verdict import Finding
from gateway.store.memory import MemoryStore
from gateway.store.replicas import Replicas, Told
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
        return {backend.id for backend in self.table if backend.in_reserve}


def record(backend, *, outcome=Outcome.OK, first_s=0.1, gap_s=0.01, resumed=0, stream=True):
    return RequestRecord(
        "r", Endpoint.CHAT, 0.0, pool="m", backend_id=backend, outcome=outcome, stream=stream,
        sent_at=1.0, first_byte_at=1.0 + first_s, ended_at=1.0 + first_s + 10 * gap_s,
        usage=Usage(5, 11, UsageSource.UPSTREAM), resumed=resumed,
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
    arm = site.trial.trial
    for outcome in (Outcome.CLIENT_GONE, Outcome.SHED, Outcome.TIME_LIMIT, Outcome.REJECTED):
        site.rollouts.settled([record(NEW, outcome=outcome)])
    assert arm.requests == 0
    # The first token of a resumed stream is another backend's, and the pause is in its gaps.
    site.rollouts.settled([record(NEW, first_s=-5.0, resumed=1)])
    assert (arm.requests, list(arm.first_s), list(arm.gap_s)) == (1, [], [])
    site.rollouts.settled([record(NEW), record(NEW, stream=False)])
    assert (arm.requests, arm.failed) == (3, 0)
    assert (list(arm.first_s), list(arm.gap_s)) == (pytest.approx([0.1]), pytest.approx([0.01]))
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


def test_a_worker_that_does_not_lead_keeps_the_leaders_verdict_over_reloads(tmp_path):
    how = {"weight": 0.5, "automatic": True}
    leads, follows = Site(tmp_path, **how), Site(tmp_path, **how)
    follows.rollouts.hand_over()
    store, names = MemoryStore(leads.clock), Names()

    def replicas(site, worker):
        told = Told("h", 1, "1.0", group="g", worker=worker)
        return Replicas(store, leads.clock, lambda: told_of(site.table, names, told, {}))

    both = replicas(leads, 1), replicas(follows, 2)
    following = Following(follows.table, store, names, both[1])

    def hears():
        for each in (*both, *both):
            asyncio.run(each.turn())
        asyncio.run(following.turn())

    serve(leads, 700, first_s=0.4)
    hears()
    assert follows.reserve() == leads.reserve() == {NEW}
    saved = (tmp_path / "rollouts.json").read_bytes()
    for site in (leads, follows):
        site.reload(**how)
    assert follows.reserve() == {NEW}
    serve(follows, 700, first_s=0.01)  # of what it alone sees it judges nothing
    assert follows.rollouts.requests() == {}
    assert (tmp_path / "rollouts.json").read_bytes() == saved
    for site in (leads, follows):
        site.reload(**how | {"revision": "v1"})
    serve(leads, 700, first_s=0.01)
    hears()
    assert follows.reserve() == leads.reserve() == {OLD}
    for site in (leads, follows):
        site.reload()
    hears()
    assert follows.reserve() == leads.reserve() == set()
