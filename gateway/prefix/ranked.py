"""The prefix caches of several engines behind one server (vLLM's data parallelism), each by its rank.

The server itself spreads requests by load alone, and each turn of a conversation would find its prompt
at one engine of many. So the gateway names the engine: the one that has done the request first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.core.prefix import Held, Holder, KvEvents, Prefix, Sent
from gateway.prefix.precise import Precise

_OUTPUT: Final = (
    10  # an output token takes as long as ten of a prompt, until a pool has shown its pace
)
_FOREIGN_TOKENS: Final = 256 * _OUTPUT  # a request of others, of which nothing is known


class Ranked:
    """What the engines of one server hold, see `core.prefix.Held`; a prompt is asked of the best of them."""

    def __init__(self, engines: Sequence[Held]) -> None:
        self.engines = engines
        self._work_tokens = [0] * len(engines)  # of ours in flight, as prompt tokens
        self._ours = [0] * len(engines)  # requests
        self._foreign_tokens = [0] * len(engines)

    @property
    def kv_events(self) -> KvEvents | None:
        """How well its engines are followed; None: nobody asks them."""
        told = [each for engine in self.engines if (each := engine.kv_events) is not None]
        if not told:
            return None
        return KvEvents(
            known=all(each.known for each in told),
            engines=sum(each.engines for each in told),
            blocks=sum(each.blocks for each in told),
            losses=sum(each.losses for each in told),
            garbled=sum(each.garbled for each in told),
            strange=sum(each.strange for each in told),
        )

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt the engine holds that would take it."""
        if prefix.steers:
            return self._best(prefix)[1]
        return sum(engine.tokens(prefix) for engine in self.engines) // len(self.engines)

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there, to the engine of `Sent.rank`."""
        if not prefix.steers:  # nobody knows to which
            return Sent(prefix, self.tokens(prefix), 0, 0)
        rank, cached_tokens = self._best(prefix)
        sent = self.engines[rank].sent(prefix)
        sent.by, sent.rank, sent.work_tokens = self, rank, _work(prefix, cached_tokens)
        self._ours[rank] += 1
        self._work_tokens[rank] += sent.work_tokens
        return sent

    def read(self, sent: Sent) -> None:
        """Note that the engine has read a prompt: it has its output to write."""
        rank = self._rank(sent)
        if rank is not None:
            self._work_tokens[rank] -= sent.work_tokens
            self.engines[rank].read(sent)
            sent.work_tokens = _OUTPUT * sent.prefix.output_tokens
            self._work_tokens[rank] += sent.work_tokens

    def over(self, sent: Sent) -> None:
        """Note that a request is there no more, however it ended."""
        rank = self._rank(sent)
        if rank is not None:
            self._ours[rank] -= 1
            self._work_tokens[rank] -= sent.work_tokens

    def unsent(self, sent: Sent) -> None:
        """Take back that a prompt was sent: it ended before its engine was seen to read it."""
        rank = self._rank(sent)
        if rank is not None:
            self.engines[rank].unsent(sent)

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells."""
        rank = self._rank(sent)
        if rank is not None:
            self.engines[rank].ended(sent, cached_tokens)

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much each cache holds; the counter of tokens found is that of all, and parts none."""
        for engine in self.engines:
            engine.scraped(capacity_tokens, None)

    def loaded(self, requests: Sequence[int]) -> None:
        """Take in how many requests each engine has at a scrape, those of others too."""
        for rank, count in enumerate(requests):
            self._foreign_tokens[rank] = max(0, count - self._ours[rank]) * _FOREIGN_TOKENS

    def forget(self) -> None:
        """Note that all are empty."""
        for engine in self.engines:
            engine.forget()

    def _rank(self, sent: Sent) -> int | None:
        """Return the engine that was sent a prompt; None when none of these was."""
        return sent.rank if sent.by is self else None

    def _best(self, prefix: Prefix) -> tuple[int, int]:
        """Return the engine that has done a request first, and how many of its tokens it holds.

        Where all are alike, prompts that begin alike find the same engine.
        """
        count = len(self.engines)
        home = prefix.home % count
        found = [engine.tokens(prefix) for engine in self.engines]
        rank = min(
            range(count),
            key=lambda rank: (
                self._work_tokens[rank] + self._foreign_tokens[rank] - found[rank],
                (rank - home) % count,
            ),
        )
        return rank, found[rank]


def by_engine(
    held: Held | None, make: Callable[[], Held] | None, loads: Sequence[int]
) -> Held | None:
    """Return what knows the caches of a server with so many engines: `held`, if it does."""
    if make is None or len(loads) < 2:
        return make() if make is not None and isinstance(held, Ranked) else held
    if not isinstance(held, Ranked) or len(held.engines) != len(loads):
        held = Ranked([make() for _ in loads])
    held.loaded(loads)
    return held


def precise_engines(held: Held | None) -> list[Precise]:
    """Return what is known of each engine that may tell of its cache, by rank."""
    engines = held.engines if isinstance(held, Ranked) else [held]
    return [each for each in engines if isinstance(each, Precise)]


def block_sizes(backends: Iterable[Holder]) -> set[int]:
    """Return the sizes of blocks, in tokens, that the engines of a pool tell of; none if none does."""
    sizes = set()
    for backend in backends:
        for engine in precise_engines(backend.held):
            follower = engine.follower
            if follower is not None and follower.knows and follower.mirror.block_tokens is not None:
                sizes.add(follower.mirror.block_tokens)
    return sizes


def _work(prefix: Prefix, cached_tokens: int) -> int:
    return max(0, prefix.prompt_tokens - cached_tokens) + _OUTPUT * prefix.output_tokens
