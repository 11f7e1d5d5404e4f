"""What a line takes for demand, and when it lets nobody's wait be shortened."""

import random

import pytest

from gateway.admission.bounds import Limits
from gateway.admission.line import Line
from gateway.routing.choice import Chooser
from tests.gatehouse import House, held

DRAIN = 100.0  # tokens a second


def line_of(world):
    """Return another line before the same pool."""
    limits, rng = Limits(10, 10_000, 10_000), random.Random(0)
    return Line("m", limits, world.table, Chooser(world.table), world.loop, rng)


@held
async def test_a_second_attempt_of_a_request_is_no_new_demand():
    world = House(m=["http://127.0.0.1:8001"])
    line = line_of(world)
    line.came(world.ask("flood", tokens=500))
    line.came(world.ask("flood", tokens=500, tried=["m/b1"]))
    line.patience.tick(10.0, DRAIN)
    assert line.patience.load("flood") == 0.5  # 500 in ten seconds, of which 1,000 could end


@held
async def test_while_the_only_backend_starts_slowly_nobodys_wait_is_shortened():
    world = House(m=["http://127.0.0.1:8001"])
    line, ask = line_of(world), world.ask("flood", tokens=500, stream=True)
    for _ in range(100):
        line.patience.first.learn(0.1, 10)
        for _ in range(20):
            line.came(ask)
        line.patience.tick(0.5, DRAIN)

    def may_wait_s():
        now = world.loop.time()
        return line.waiting(ask, now + 1000.0, 0).deadline - now

    assert may_wait_s() < 60
    world.table.get("m/b1").limit.restarted(world.loop.time())
    assert may_wait_s() == 1000.0


@held
async def test_early_in_a_burst_a_fair_share_is_of_the_drain_that_will_probably_be_found():
    world = House(m=["http://127.0.0.1:8001"])
    line = line_of(world)
    drained = {"m/b1": 10 * int(DRAIN)}
    line.forecast.drain.follow({"m/b1": True})
    line.forecast.drain.passed(10.0, drained, held_tokens=10 * int(DRAIN))
    assert line.forecast.drain.probable_per_s > 1.14 * DRAIN
    line.came(world.ask("small", tokens=500))
    line.came(world.ask("larger", tokens=640))
    line.tick(world.loop.time(), 10.0)
    # Of 100 tokens a second 50 would be its share, and it would pay for its 64. Of the probable 115 it has 65.
    assert line.patience.load("larger") == 1.0
    line.forecast.drain.passed(10.0, drained, held_tokens=10)
    line.came(world.ask("small", tokens=500))
    line.came(world.ask("larger", tokens=640))
    line.tick(world.loop.time(), 10.0)
    assert line.patience.load("larger") > 1.0


@held
async def test_a_backend_that_is_down_no_longer_counts_in_the_drain_until_it_is_back():
    world = House(m=["http://127.0.0.1:8001", "http://127.0.0.1:8002"])
    line = line_of(world)
    drain = line.forecast.drain
    line.tick(world.loop.time(), 0.5)
    drain.passed(10.0, {"m/b1": 400, "m/b2": 600}, held_tokens=100)
    assert drain.tokens_per_s == 100.0
    world.down("m/b2")
    line.tick(world.loop.time(), 0.5)
    assert drain.tokens_per_s == pytest.approx(40.0)
    world.up("m/b2")
    line.tick(world.loop.time(), 0.5)
    assert drain.tokens_per_s == pytest.approx(100.0)
