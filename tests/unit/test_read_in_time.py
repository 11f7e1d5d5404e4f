"""An engine that reads in time all that comes is sent all that comes, whatever little it has shown before."""

import heapq
from collections import deque

import pytest

from gateway.config.models import Config
from gateway.core.types import LoadSample, Need, ProbePassed, Scraped
from gateway.pools.table import PoolTable

ID = "m/b1"
OUTPUT = 64


class HeldClock:
    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return self.at


class World:
    """One backend, its engine and who waits for it: streams of 64 tokens, a scrape every second.

    The engine reads `per_s` tokens a second, one prompt after the other, and answers `answers_s` later.
    It finds `cached` tokens of each prompt.
    """

    def __init__(self, *, per_s, prompt=171, cached=0, answers_s=0.05, token_s=0.02):
        self.clock = HeldClock()
        self.table = PoolTable(self.clock)
        config = Config.model_validate({"pools": {"m": {"backends": ["http://h:1"]}}})
        self.table.apply(config.pools, config.health)
        self.table.observe(ID, ProbePassed(self.clock.at))
        self.backend = self.table.get(ID)
        self.per_s, self.prompt, self.cached = per_s, prompt, cached
        self.answers_s, self.token_s = answers_s, token_s
        self.hits, self.idle_at, self.running = 0.0, 0.0, 0
        self.waiting, self.events, self.number = deque(), [], 0
        self.waits, self.ttfts, self.ended = [], [], 0
        self.clients_stay = True  # those who come again
        self.at(100.0, self.scrape)

    def at(self, when, call, *values):
        self.number += 1
        heapq.heappush(self.events, (when, self.number, call, values))

    def until(self, end):
        while self.events[0][0] < end:
            self.clock.at, _, call, values = heapq.heappop(self.events)
            call(*values)

    def scrape(self):
        now = self.clock.at
        usage = self.running * (self.prompt + OUTPUT) / 1_000_000
        sample = LoadSample(now, self.running, 0, usage, 1_000_000, prefix_hits=self.hits)
        self.table.observe(ID, Scraped(sample))
        self.at(now + 1.0, self.scrape)

    def come(self, *, again=False):
        self.waiting.append((self.clock.at, again))
        self.send()

    def send(self):
        while self.waiting and self.obstacle() is None:
            came_at, again = self.waiting.popleft()
            now = self.clock.at
            slot = self.table.take(ID, now, Need(self.prompt, OUTPUT, streams=True))
            self.running += 1
            begins_at = max(self.idle_at, now)
            self.at(begins_at, self.look_up)
            self.idle_at = begins_at + (self.prompt - self.cached) / self.per_s
            self.waits.append(now - came_at)
            self.at(self.idle_at + self.answers_s, self.first_token, slot, came_at)
            begun_at = self.idle_at + self.answers_s
            self.at(begun_at + OUTPUT * self.token_s, self.end, slot, again, self.token_s)

    def look_up(self):
        self.hits += self.cached

    def obstacle(self):
        return self.backend.obstacle(Need(self.prompt, OUTPUT), self.clock.at, to_read=self.prompt)

    def first_token(self, slot, came_at):
        self.ttfts.append(self.clock.at - came_at)
        self.table.first_token(slot, self.clock.at)
        self.send()

    def end(self, slot, again, token_s):
        slot.release()
        self.backend.limit.token_gap(self.clock.at, slot.taken_at, token_s)
        self.running -= 1
        self.ended += 1
        self.send()
        if again and self.clients_stay:
            self.come(again=True)


@pytest.mark.parametrize("cached", [0, 40, 160])
def test_clients_that_come_one_after_the_other_do_not_wait_for_each_other(cached):
    """What an engine was sent per second shows what was asked of it, not what it can do."""
    world = World(per_s=1_000_000, cached=cached)
    for client in range(200):
        world.at(101.0 + client / 200, lambda: world.come(again=True))
    world.until(112.0)
    assert max(world.waits) < 0.1
    assert world.ended > 0.97 * 200 * 10 / (0.05 + OUTPUT * 0.02)


@pytest.mark.parametrize(("clients", "cached"), [(1, 0), (1, 160), (64, 0), (64, 160)])
def test_an_engine_whose_steps_have_become_longer_is_sent_all_that_comes(clients, cached):
    """A prompt waits for a step or two however little is unread: that shows no queue."""
    world = World(per_s=1_000_000, cached=cached, answers_s=0.005, token_s=0.0002)
    for client in range(clients):
        world.at(101.0 + client / 200, lambda: world.come(again=True))
    world.until(104.0)
    world.clients_stay = False
    world.until(105.0)
    assert not world.running
    world.answers_s, world.token_s, world.clients_stay = 0.05, 0.02, True
    for client in range(200):
        world.at(105.0 + client / 200, lambda: world.come(again=True))
    world.until(110.0)
    world.waits.clear()
    world.until(114.0)
    assert max(world.waits) < 0.1


@pytest.mark.parametrize(
    ("prompt", "cached"), [(171, 0), (171, 40), (171, 160), (400, 0), (1000, 0)]
)
@pytest.mark.parametrize("answers_s", [0.02, 0.05, 0.15])
def test_a_burst_after_a_calm_is_read_as_fast_as_the_engine_reads(prompt, cached, answers_s):
    world = World(per_s=1_000_000, prompt=prompt, cached=cached, answers_s=answers_s)
    for second in range(10):
        world.at(101.0 + second, world.come)
    for _ in range(200):
        world.at(111.5, world.come)
    world.until(115.0)
    assert len(world.ttfts) == 210
    assert max(world.ttfts) < 0.2 + 10 * answers_s  # it doubles what is unread, from one prompt on


@pytest.mark.parametrize("cached", [0, 100])
def test_an_engine_that_does_not_keep_up_is_sent_no_more_than_it_reads_in_time(cached):
    """Twice what it reads: what is too much waits here, where the order can change."""
    per_s = 10_000
    world = World(per_s=per_s, cached=cached)
    gap_s = (171 - cached) / per_s / 2
    for number in range(int(9.0 / gap_s)):
        world.at(101.0 + number * gap_s, world.come)
    world.until(105.0)  # what came before anything was known has been read
    before, behind_s = len(world.ttfts), []
    while world.clock.at < 110.0:
        world.until(world.events[0][0] + 1e-9)
        behind_s.append(world.idle_at - world.clock.at)
        assert world.waiting
    assert max(behind_s) < 0.1
    assert (len(world.ttfts) - before) * (171 - cached) > 0.85 * 5.0 * per_s
    assert world.backend.limit.reading.rate.at(world.clock.at) == pytest.approx(per_s, rel=0.05)
