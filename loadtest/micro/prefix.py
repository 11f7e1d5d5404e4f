"""What it costs to choose by what is cached, against `prefix: off`: by prompt size and backends.

    python -m loadtest.micro.prefix

Both are measured in turns: hashing a prompt, entry, first token, release and settlement. A third of the prompts begin as
one that was sent before, to one of the backends. What other gateways are to be told is noted, and dropped each round. To be
at most 4 us at 512 bytes, and 12 us at 16 KiB.
"""

from __future__ import annotations

import json
import random
import time

from gateway.admission.gate import Gate
from gateway.config.models import Config
from gateway.core.aio import SystemClock
from gateway.core.types import (
    Ask,
    Caller,
    Demand,
    LoadSample,
    ModelsSeen,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
)
from gateway.pools.table import PoolTable
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.news import News
from gateway.prefix.ranked import approximate_engines
from gateway.routing.choice import Chooser
from gateway.wire.calls import ENDPOINTS, parse_at_once

ROUTE, CALLER = Route("m", "m", "m"), Caller("k", "somebody", "t")
SPEC = ENDPOINTS[b"/v1/chat/completions"]
PROMPTS = 300
FIRST_TOKEN_S = 0.05


class World:
    """A pool, and the requests that are sent to it again and again."""

    def __init__(self, backends: int, size: int, prefix: str) -> None:
        clock = SystemClock()
        self.table = PoolTable(clock)
        urls = [f"http://127.0.0.1:{8000 + place}" for place in range(backends)]
        config = Config.model_validate({"pools": {"m": {"backends": urls, "prefix": prefix}}})
        self.gate = Gate(self.table, Chooser(self.table), clock)
        self.table.apply(config.pools, config.health)
        self.gate.configure(config.pools, {0})
        at = clock.now() + 1e6  # fresh for as long as this runs
        for backend in self.table:
            self.table.observe(backend.id, ModelsSeen(at, (ServedModel("m", None, 131_072),)))
            self.table.observe(backend.id, ProbePassed(at))
            self.table.observe(backend.id, Scraped(LoadSample(at, 3, 0, 0.2, 10_000_000)))
        self.backends = {backend.id: backend for backend in self.table}
        self.hasher = PrefixHasher(1)
        rng = random.Random(1)
        system = rng.randbytes(size // 4).hex()
        self.asks = []
        for number in range(PROMPTS):
            begins = system if number % 3 == 0 else rng.randbytes(size // 4).hex()
            text = f"{begins} {rng.randbytes(size).hex()}"[: size - 100]
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            call = parse_at_once(SPEC, json.dumps(body).encode(), b"application/json")
            assert call is not None
            demand = Demand(size, exact=False)
            self.asks.append(
                Ask(ROUTE, call, demand, CALLER, self.gate.needs.of(call, demand, CALLER))
            )

    def round(self) -> float:
        """Return the microseconds of a request."""
        table, of, enter = self.table, self.hasher.of, self.gate.enter
        backends = table.backends("m")
        for each in backends:
            for index in approximate_engines(each.prefix_index):
                index.news = News()
        began = time.perf_counter()
        for ask in self.asks:
            ask.prefix = of(ask, backends)
            slot = enter(ask)
            assert slot is not None
            table.first_token(slot, slot.taken_at + FIRST_TOKEN_S)
            slot.release()
            known = self.backends[slot.backend_id].prefix_index
            if known is not None and slot.sent is not None:
                known.ended(slot.sent, None)
        return (time.perf_counter() - began) / len(self.asks) * 1e6


def main() -> None:
    """Print the table."""
    print(
        "hashing, entry, first token and release, us: off, approximate, difference (least of 200 rounds)"
    )
    for size in (512, 16_384):
        for backends in (2, 8, 32):
            off, on = (World(backends, size, prefix) for prefix in ("off", "approximate"))
            rounds = [(off.round(), on.round()) for _ in range(200)]
            least_off, least_on = (min(each) for each in zip(*rounds, strict=True))
            took = f"{least_off:6.1f} {least_on:6.1f} {least_on - least_off:6.1f}"
            print(f"  {size:6d} bytes, {backends:2d} backends: {took}")


if __name__ == "__main__":
    main()
