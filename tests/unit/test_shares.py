"""Weights share a pool's work out; what is near goes first until its queue is longer."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from gateway.core.types import Exclusion, Need
from gateway.routing.choice import Chooser
from tests.unit.test_routing import (
    NOW,
    URLS,
    ask,
    make_degraded,
    make_down,
    make_ready,
    pools,
    scrape,
    table_of,
    why,
)

NEED = Need(100, 100)


def weighted(*weights, **settings):
    backends = [{"url": url, "weight": weight} for url, weight in zip(URLS, weights, strict=False)]
    return ready(pools(m={"backends": backends, "admission": "off", **settings}))


def ready(config):
    table = table_of(config)
    for backend in tuple(table):
        make_ready(table, backend.id)
        scrape(table, backend.id, kv=0.0)
    return table


def choose(table, rng):
    return Chooser(table, rng).find(ask(need=NEED), NOW)


def shares(table, *, at_a_time, requests=6000):
    """Return who got which part of requests that come by chance; so many are under way on average."""
    rng, came, under_way, counts = random.Random(5), 0.0, [], Counter()
    chooser = Chooser(table, rng)
    for number in range(requests):
        came += rng.expovariate(at_a_time)  # each takes 1
        while under_way and under_way[0][0] <= came:
            heapq.heappop(under_way)[2].release()
        backend = chooser.find(ask(need=NEED), NOW)
        counts[backend.name] += 1
        slot = table.take(backend.id, NOW, NEED)
        heapq.heappush(under_way, (came + rng.uniform(0.5, 1.5), number, slot))
    return {name: count / requests for name, count in counts.items()}


@pytest.mark.parametrize("at_a_time", [0.05, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("weight", [2, 3])
def test_twice_the_weight_gets_twice_the_work_whatever_is_under_way(weight, at_a_time):
    got = shares(weighted(weight, 1), at_a_time=at_a_time)
    assert got["b1"] == pytest.approx(weight / (weight + 1), abs=0.04)


def test_what_is_idle_is_not_left_idle_for_one_whose_work_is_over_its_share():
    table = weighted(3, 1)
    for _ in range(20):
        table.take("m/b1", NOW, NEED)
    assert {choose(table, random.Random(seed)).name for seed in range(50)} == {"b2"}


def test_equal_weights_are_as_none():
    assert shares(weighted(5, 5), at_a_time=0.05)["b1"] == pytest.approx(0.5, abs=0.03)
    assert not any(backend.weighted for backend in weighted(5, 5))
    assert not any(backend.weighted for backend in weighted(5, 5, 0))  # it is kept in reserve
    assert all(backend.weighted for backend in weighted(5, 4, 0))


def test_weight_0_serves_only_when_no_other_does():
    table = weighted(1, 1, 0)
    assert why(table) == {"m/b3": Exclusion.IN_RESERVE}
    make_down(table, "m/b1")
    make_degraded(table, "m/b2")
    assert {choose(table, random.Random(seed)).name for seed in range(20)} == {"b2"}
    make_down(table, "m/b2")
    assert choose(table, random.Random(1)).name == "b3"


@pytest.mark.parametrize("side", [None, False, True])
def test_who_was_not_promoted_serves_what_the_promoted_have_no_room_for(side):
    """A canary is a small part of its pool: alone it cannot carry what all carried."""
    backends = [
        {"url": url, "revision": revision, "max_in_flight": 1}
        for url, revision in zip(URLS, ("v2", "v1", "v1"), strict=True)
    ]
    canary = {"revision": "v2", "weight": 0.1, "automatic": True}
    table = ready(pools(m={"backends": backends, "canary": canary}))
    table.keep_back("m", on_trial=False)
    chooser = Chooser(table, random.Random(1))
    order = []
    while (found := chooser.find(ask(need=NEED, on_trial=side), NOW)) is not None:
        table.take(found.id, NOW, NEED)
        order.append(found.revision)
    assert order == ["v2", "v1", "v1"]
    # Where it was rolled back, it serves while nobody else does.
    table = ready(pools(m={"backends": backends, "canary": canary}))
    table.keep_back("m", on_trial=True)
    chooser, order = Chooser(table, random.Random(1)), []
    while (found := chooser.find(ask(need=NEED, on_trial=side), NOW)) is not None:
        table.take(found.id, NOW, NEED)
        order.append(found.revision)
    assert order == ["v1", "v1"]


def near(**prefer):
    backends = [
        {"url": url, "labels": {"zone": zone}}
        for url, zone in zip(URLS, ("eu", "us", "us"), strict=True)
    ]
    return ready(pools(m={"backends": backends, "prefer": {"labels": {"zone": "eu"}, **prefer}}))


def test_what_is_near_takes_all_until_its_queue_is_longer_than_the_setting():
    table, rng = near(spill_over="1s"), random.Random(3)
    here = table.get("m/b1")
    taken = 0
    while (backend := choose(table, rng)) is here:
        table.take("m/b1", NOW, NEED)
        taken += 1
    assert taken > 3
    assert backend.name in ("b2", "b3")
    least_s = here.weighed().ahead_s - 1.0  # the others are idle
    assert 0 <= least_s < here.token_cost.of(NEED.prompt_tokens, NEED.output_tokens)


def test_what_is_near_and_has_no_room_is_passed_over_at_once():
    config = pools(
        m={
            "backends": [
                {"url": URLS[0], "labels": {"zone": "eu"}, "max_in_flight": 1},
                {"url": URLS[1], "labels": {"zone": "us"}},
            ],
            "prefer": {"labels": {"zone": "eu"}, "spill_over": "1h"},
        }
    )
    table, rng = ready(config), random.Random(3)
    table.take("m/b1", NOW, NEED)
    assert choose(table, rng).name == "b2"
    make_down(table, "m/b1")
    assert choose(table, rng).name == "b2"


def test_without_labels_nothing_is_preferred():
    table = near(labels={})
    assert [backend.away_s for backend in table] == [0, 0, 0]
