"""A trace in simulated time: sent through the gateway's own choice, or through a model, to engines with caches.

Each session asks one request after the other, so who answers late is asked less; all arms start the same
sessions at the same moments.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.core.prefix import Prefix, SentPrompt
from gateway.core.types import Ask, Call
from gateway.prefix.hashing import PrefixHasher
from gateway.sim.config import SimConfig
from gateway.sim.engine import Engine
from gateway.sim.sequence import Sequence as EngineSequence
from loadtest.arrivals import Shot
from loadtest.openloop import Target
from loadtest.outcomes import End, Outcome
from loadtest.routing_models import (
    CacheAware,
    ConsistentHash,
    LeastLoad,
    Model,
    Oracle,
    Random,
    Rendezvous,
    held_blocks,
)
from loadtest.routing_traces import Asked, Trace
from loadtest.virtual import Direct, Engines, VirtualLoop
from loadtest.virtual_gateway import Gateway, make_call

# About an 8B model on one GPU of 40 GB: a token of context is 128 KiB of cache, read at 2.6 TB/s; the
# cache holds 131,072 tokens.
ENGINE: Final = SimConfig(
    model="m",
    max_num_seqs=128,
    num_blocks=8192,
    max_batched_tokens=2048,
    max_model_len=16_384,
    prefill_tokens_per_s=16_000.0,
    decode_step_s=0.012,
    context_token_s=5e-8,
)
# The settings of the pool in each arm of the gateway.
GATEWAYS: Final[dict[str, dict[str, Any]]] = {
    "gateway": {},
    "by load": {"prefix": "off"},
    "sees caches": {},
}
MODELS: Final[dict[str, Callable[[random.Random, Sequence[Engine]], Model]]] = {
    "random": lambda rng, engines: Random(rng),
    "least load": lambda rng, engines: LeastLoad(rng),
    "rendezvous": lambda rng, engines: Rendezvous(rng),
    "cache_aware (model)": lambda rng, engines: CacheAware(rng, len(engines)),
    "consistent_hash (model)": lambda rng, engines: ConsistentHash(rng, len(engines)),
    "oracle, first token": lambda rng, engines: Oracle(rng, engines, ENGINE, by_hits=False),
    "oracle, hits": lambda rng, engines: Oracle(rng, engines, ENGINE, by_hits=True),
}
ARMS: Final = (*GATEWAYS, *MODELS)
_LONGEST_S: Final = 60.0  # after the last arrival; what still runs then is cut


class CachingEngines(Engines):
    """Engines that are asked for what the conversations really say."""

    def sequence(self, number: int, shot: Shot) -> EngineSequence:
        """Return what an engine is asked."""
        assert isinstance(shot, Asked)
        found = EngineSequence(str(number), shot.ids(), tuple(shot.reply.ids()))
        found.hash_to(shot.prompt_tokens - 1, self.config.block_size)
        return found

    @property
    def engines(self) -> list[Engine]:
        """The engines, one for each server."""
        return [state.engines[0] for state in self.states]


class RoutingGateway(Gateway):
    """The gateway, which gets the real body of each request. Its engines tell no cached tokens, as shipped."""

    def __init__(self, engines: CachingEngines, settings: dict[str, Any], seed: int) -> None:
        super().__init__(engines, settings, seed)
        self.hasher = PrefixHasher(seed)

    def call(self, shot: Shot) -> Call:
        """Return what is known of a request's body."""
        assert isinstance(shot, Asked)
        texts = shot.texts()
        body = shot.body(texts)
        return make_call(shot, body, sum(len(text) for _, text in texts))

    def prefix(self, shot: Shot, ask: Ask) -> Prefix | None:
        """Return what a request's beginning is to a prefix cache."""
        return self.hasher.of(ask, self.table.backends("m"))


class SeeingGateway(RoutingGateway):
    """The gateway's choice, if it saw the caches: what is left to its formula when no index errs."""

    def __init__(self, engines: CachingEngines, settings: dict[str, Any], seed: int) -> None:
        super().__init__(engines, settings, seed)
        size = engines.config.block_size
        for backend, engine in zip(self.table.backends("m"), engines.engines, strict=True):
            backend.prefix_index = _Seen(engine, size)

    def prefix(self, shot: Shot, ask: Ask) -> Prefix:
        """Return the hashes of the prompt's blocks."""
        assert isinstance(shot, Asked)
        found = EngineSequence("", shot.ids(), ())
        found.hash_to(shot.prompt_tokens - 1, self._engines.config.block_size)
        tokens = shot.prompt_tokens
        size, count = self._engines.config.block_size, len(found.hashes)
        ends = tuple(range(size * count, 0, -size))
        keys = found.hashes[::-1]
        return Prefix(keys, ends, tokens, tokens, shot.output_tokens, keys[-1])


class _Seen:
    """A `core.prefix.PrefixIndex` that looks into the engine, and at what is on its way there."""

    def __init__(self, engine: Engine, block_size: int) -> None:
        self._engine, self._size = engine, block_size

    def __len__(self) -> int:
        return 0  # it keeps none

    @property
    def kv_events(self) -> None:
        return None

    def tokens(self, prefix: Prefix) -> int:
        return self._size * self._held(prefix)

    def longest(self, prefix: Prefix) -> int:
        return len(prefix.keys) - self._held(prefix)

    def sent(self, prefix: Prefix) -> SentPrompt:
        place = self.longest(prefix)
        tokens = prefix.tokens_before(place)
        return SentPrompt(prefix, tokens, tokens, place, tokens)

    def _held(self, prefix: Prefix) -> int:
        return held_blocks(self._engine, prefix.keys[::-1])

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        pass

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        pass

    def read(self, sent: SentPrompt) -> None:
        pass

    def over(self, sent: SentPrompt) -> None:
        pass

    def unsent(self, sent: SentPrompt) -> None:
        pass

    def forget(self) -> None:
        pass


async def play(
    trace: Trace, target: Target, forget: Callable[[], None]
) -> tuple[list[Outcome], float]:
    """Send a trace; return what became of its requests, and when what still ran was cut."""
    loop = asyncio.get_running_loop()
    start, outcomes = loop.time(), list[Outcome]()

    def clock() -> float:
        return loop.time() - start

    async def session(requests: Sequence[Asked]) -> None:
        due_s = requests[0].at_s
        for asked in requests:
            due_s += asked.after_s
            await asyncio.sleep(due_s - clock())
            outcome = Outcome(asked, due_s)
            outcomes.append(outcome)
            await target.send(target.prepare(asked), outcome, clock)
            if outcome.end is not End.COMPLETE or outcome.ended_s is None:
                return
            due_s = outcome.ended_s

    async with asyncio.TaskGroup() as group:
        if trace.forgets_s is not None:
            loop.call_at(start + trace.forgets_s, forget)
        tasks = []
        for requests in trace.sessions:
            if (ahead_s := requests[0].at_s - clock()) > 0:
                await asyncio.sleep(ahead_s)
            tasks.append(group.create_task(session(requests)))
        await asyncio.sleep(trace.seconds - clock())
        _, running = await asyncio.wait(tasks, timeout=_LONGEST_S)
        cut_s = clock()
        for task in running:
            task.cancel()
    return outcomes, cut_s


def run(trace: Trace, arm: str, backends: int, seed: int) -> tuple[list[Outcome], float]:
    """Play a trace to one arm, in simulated time."""

    async def main() -> tuple[list[Outcome], float]:
        engines = CachingEngines(ENGINE, backends)

        def forget() -> None:
            engines.states[0].drivers[0].forget_prefixes(preempt=True)

        if arm in MODELS:
            model = MODELS[arm](random.Random(seed), engines.engines)
            return await play(trace, Direct(engines, model.place, model.first_token), forget)
        kind = SeeingGateway if arm == "sees caches" else RoutingGateway
        gateway = kind(engines, GATEWAYS[arm], seed)
        async with asyncio.TaskGroup() as group:
            background = group.create_task(gateway.run())
            found = await play(trace, gateway, forget)
            background.cancel()
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
