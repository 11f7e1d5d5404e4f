"""A real gate before real pools, in a loop whose time is held; no sockets, nothing stands in."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import selectors

from gateway.admission.gate import Gate
from gateway.config.models import Config
from gateway.core.prefix import SentPrompt
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    LoadSample,
    ModelsSeen,
    Need,
    Phase,
    ProbeFailed,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
)
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser

BASE = ServedModel("m", None, None)
CAPACITY = 10_000
KV = {"stop_admitting": 0.9, "resume": 0.8}  # round numbers, whatever is shipped


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing but threads: the time that a loop would sleep has passed at once."""

    loop: HeldLoop

    def select(self, timeout=None):
        if self.loop.threads:
            return super().select(timeout if timeout == 0 else None)
        if timeout is None:
            raise AssertionError("everything waits, and no timer will ever end it")
        self.loop.at += max(0.0, timeout)
        return super().select(0)


class HeldLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, a thread too, then jumps to the next timer. It is a clock too.

    Let times be binary fractions: then sums are exact, and what is due at a time happens at it.
    """

    def __init__(self):
        self.at = 100.0
        self.threads = 0  # that run and are waited for
        selector = _Jumps()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.at

    now = wall = time

    def run_in_executor(self, executor, func, *args):
        ended = super().run_in_executor(executor, func, *args)
        self.threads += 1
        ended.add_done_callback(self._thread_ended)
        return ended

    def _thread_ended(self, _):
        self.threads -= 1

    async def shutdown_default_executor(self, *timeout):
        """Wait for its threads, however long: a deadline is over at once in held time."""
        self.threads += 1
        await super().shutdown_default_executor()
        self.threads -= 1


def held(test):
    """Run an async test in held time."""

    @functools.wraps(test)
    def run_it(*args, **kwargs):
        with asyncio.Runner(loop_factory=HeldLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run_it


async def turns(count=3):
    """Let everything run that can; time stands still."""
    for _ in range(count):
        await asyncio.sleep(0)


async def passes(seconds):
    """Let so much of the held time pass, and all happen that is due in it."""
    await asyncio.sleep(seconds)
    await turns()


class Holds:
    """A prefix cache that holds so many tokens of the prompts with a key, and learns nothing."""

    kv_events = None

    def __init__(self, **tokens):
        self.held = tokens

    def tokens(self, prefix):
        return min(self.held.get(prefix.keys[0], 0), prefix.prompt_tokens)

    def longest(self, prefix):
        return len(prefix.keys)

    def sent(self, prefix):
        tokens = self.tokens(prefix)
        return SentPrompt(prefix, tokens, tokens, 0, tokens)

    def _nothing(self, *told):
        pass

    ended = scraped = unsent = read = over = _nothing

    def forget(self):
        self.held = {}


class Guest:
    """One request before the gate, as the handler makes it: enter, else wait."""

    def __init__(self, house, ask, wait_s, patience_s, body_bytes, request_id="r"):
        self.house, self.ask, self.request_id = house, ask, request_id
        self.began = self.ended = house.loop.time()
        self.task = house.loop.create_task(self._go(wait_s, patience_s, body_bytes))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # is seen

    async def _go(self, wait_s, patience_s, body_bytes):
        gate = self.house.gate
        try:
            return gate.enter(self.ask) or await gate.wait(
                self.ask,
                deadline=self.began + wait_s,
                gives_up_at=self.began + patience_s,
                body_bytes=body_bytes,
                request_id=self.request_id,
            )
        finally:
            self.ended = self.house.loop.time()

    @property
    def waits(self):
        return not self.task.done()

    @property
    def slot(self):
        """The slot it was given, None when it was given none (yet)."""
        task = self.task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    @property
    def inside(self):
        return self.slot is not None and self.slot.credit.held

    @property
    def refusal(self):
        """The error it was refused with, None when it was not (yet)."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None

    def read(self):
        """Have its first token come, as the handler learns of it."""
        self.house.table.first_token(self.slot, self.house.loop.time())

    def end(self):
        """End its request: the slot is given back, as the handler does."""
        self.slot.release()

    def hang_up(self):
        """Have its client leave, as the handler learns of it."""
        self.task.cancel()


class Looks(Chooser):
    """The real one, which counts how often it is asked."""

    count = 0

    def find(self, *asked):
        self.count += 1
        return super().find(*asked)


class House:
    """A gate, its table, and guests. Pools are settings; a list stands for the backends alone."""

    def __init__(self, priorities=frozenset({0}), seed=0, **pools):
        self.loop = asyncio.get_running_loop()
        self.table = PoolTable(self.loop)
        rng = random.Random(seed)
        self.chooser = Looks(self.table, rng)
        self.gate = Gate(self.table, self.chooser, self.loop, rng)
        self.reload(priorities, **pools)
        self._tick()
        for backend_id in sorted(self.table.ids()):
            self.up(backend_id)

    def _tick(self):
        """Tick as the process does, twice a second."""
        self.gate.tick(self.loop.time())
        self.loop.call_later(0.5, self._tick)

    def reload(self, priorities=frozenset({0}), **pools):
        """Take over a configuration, in the order in which the process does."""
        settings = {
            name: {"backends": value} if isinstance(value, list) else value
            for name, value in pools.items()
        }
        for each in settings.values():
            each.setdefault("kv", KV)
        config = Config.model_validate({"pools": settings})
        self.table.apply(config.pools, config.health)
        self.gate.configure(config.pools, priorities)

    def up(self, backend_id, *adapters):
        models = (BASE, *(ServedModel(name, "m", None) for name in adapters))
        self.table.observe(backend_id, ModelsSeen(self.loop.time(), models))
        self.table.observe(backend_id, ProbePassed(self.loop.time()))
        self.table.observe(backend_id, ProbePassed(self.loop.time()))
        assert self.table.get(backend_id).phase is Phase.READY

    def down(self, backend_id):
        for _ in range(3):
            self.table.observe(backend_id, ProbeFailed(self.loop.time(), "refused"))
        assert self.table.get(backend_id).phase is Phase.DOWN

    def scrape(self, backend_id, *, running=0, waiting=0, kv=0.0, capacity=CAPACITY):
        sample = LoadSample(self.loop.time(), running, waiting, kv, capacity)
        self.table.observe(backend_id, Scraped(sample))

    def ask(
        self, tenant="t", *, pool="m", priority=0, tokens=100, adapter=None, tried=(), stream=False,
        returned=False, need=None, endpoint=Endpoint.CHAT, prefix=None,
    ):  # fmt: skip
        name = adapter or pool
        return Ask(
            Route(name, pool, name, adapter),
            Call(endpoint, Dialect.CHAT, name, stream=stream, body=b"{}"),
            Demand(tokens, exact=True),
            Caller(f"key-{tenant}", tenant, tenant, priority),
            need or Need(tokens, 0, stream),
            self.gate.top_priority,
            dict.fromkeys(tried, math.inf),
            returned,
            prefix,
            let_in=bool(tried),
        )

    def guest(
        self, tenant="t", *, wait_s=30.0, patience_s=math.inf, body_bytes=0, request_id="r", **asked
    ):
        """Have a request come; it is at the gate after the next turn of the loop."""
        return Guest(self, self.ask(tenant, **asked), wait_s, patience_s, body_bytes, request_id)

    async def guests(self, count, tenant="t", **asked):
        """Have several come, one after the other."""
        found = [self.guest(tenant, **asked) for _ in range(count)]
        await turns()
        return found

    def waiting(self, pool="m"):
        return self.gate.queues()[pool][0]

    def in_flight(self):
        return {each.id: each.in_flight for each in (*self.table, *self.table.leaving())}
