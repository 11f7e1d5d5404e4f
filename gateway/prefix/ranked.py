"""The prefix caches of several engines behind one server (vLLM's data parallelism), by rank.

The server spreads requests by load alone, so the next turn of a conversation rarely meets the engine that
has it cached. The gateway therefore names the engine in the request: the one that would finish it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gateway.core.prefix import (
    BlockShape,
    HasPrefixIndex,
    KvEvents,
    Prefix,
    PrefixIndex,
    SentPrompt,
)
from gateway.prefix.approximate import ApproximateIndex
from gateway.prefix.precise import PreciseIndex

# An output token takes as long as ten of a prompt, until a pool has shown its pace.
_OUTPUT: Final = 10
_FOREIGN_TOKENS: Final = 256 * _OUTPUT  # for one request of another client of the server


class RankedIndex:
    """One index for each engine of a server. See `core.prefix.PrefixIndex`."""

    def __init__(self, engines: Sequence[PrefixIndex]) -> None:
        self.engines = engines
        self._work_tokens = [0] * len(engines)  # of our requests in flight, as prompt tokens
        self._ours = [0] * len(engines)  # our requests in flight
        self._foreign_tokens = [0] * len(engines)
        self._listed = True  # the server has shown them since it began

    @property
    def kv_events(self) -> KvEvents | None:
        """How well all engines are followed together; None: their indexes use no KV events."""
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

    def __len__(self) -> int:
        """Return how many hashes the indexes of all engines keep."""
        return sum(map(len, self.engines))

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt are cached by the engine that would get it.

        If the request cannot name its engine, that is the mean of all.
        """
        if prefix.takes_rank and self._listed:
            return self._best(prefix)[1]
        return sum(engine.tokens(prefix) for engine in self.engines) // len(self.engines)

    def longest(self, prefix: Prefix) -> int:
        """Return the place of the longest hash of a prompt that any engine was sent; the number of them if none was."""
        return min(engine.longest(prefix) for engine in self.engines)

    def sent(self, prefix: Prefix) -> SentPrompt:
        """Note that a prompt was sent, to the engine of `SentPrompt.rank`."""
        if not (prefix.takes_rank and self._listed):  # the server chooses, and does not say which
            return SentPrompt(prefix, self.tokens(prefix), 0, 0)
        rank, cached_tokens = self._best(prefix)
        sent = self.engines[rank].sent(prefix)
        sent.by, sent.rank, sent.work_tokens = self, rank, _work(prefix, cached_tokens)
        self._ours[rank] += 1
        self._work_tokens[rank] += sent.work_tokens
        return sent

    def read(self, sent: SentPrompt) -> None:
        """Note the first token: what remains is to write the output."""
        rank = self._rank(sent)
        if rank is not None:
            self._work_tokens[rank] -= sent.work_tokens
            self.engines[rank].read(sent)
            sent.work_tokens = _OUTPUT * sent.prefix.output_tokens
            self._work_tokens[rank] += sent.work_tokens

    def over(self, sent: SentPrompt) -> None:
        """Note that a request has left the server, however it ended."""
        rank = self._rank(sent)
        if rank is not None:
            self._ours[rank] -= 1
            self._work_tokens[rank] -= sent.work_tokens
            self.engines[rank].over(sent)

    def unsent(self, sent: SentPrompt) -> None:
        """Undo `sent`: the request ended before its first token."""
        rank = self._rank(sent)
        if rank is not None:
            self.engines[rank].unsent(sent)

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Note that a prompt was read. `cached_tokens` is what the reply reports; None: nothing."""
        rank = self._rank(sent)
        if rank is not None:
            self.engines[rank].ended(sent, cached_tokens, prompt_tokens)

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much each cache holds. The hit counter is of all engines together, so it is not used."""
        for engine in self.engines:
            engine.scraped(capacity_tokens, None)

    def loaded(self, requests: Sequence[int]) -> None:
        """Take in how many requests each engine has at a scrape, those of other clients included."""
        self._listed = True
        for rank, count in enumerate(requests):
            self._foreign_tokens[rank] = max(0, count - self._ours[rank]) * _FOREIGN_TOKENS

    def forget(self) -> None:
        """Note that all caches are empty. Another process may have fewer engines, and refuses ranks beyond them."""
        self._listed = False
        for engine in self.engines:
            engine.forget()

    def _rank(self, sent: SentPrompt) -> int | None:
        """Return the engine that got a prompt; None if it was none of these."""
        return sent.rank if sent.by is self else None

    def _best(self, prefix: Prefix) -> tuple[int, int]:
        """Return the engine that would finish a request first, and how many of its tokens are cached there.

        If several are equal, prompts that begin alike go to the same one.
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
    held: PrefixIndex | None, make: Callable[[], PrefixIndex] | None, loads: Sequence[int]
) -> PrefixIndex | None:
    """Return an index for a server whose engines have these loads: `held` itself if it fits."""
    if make is None or len(loads) < 2:
        return make() if make is not None and isinstance(held, RankedIndex) else held
    if not isinstance(held, RankedIndex) or len(held.engines) != len(loads):
        held = RankedIndex([make() for _ in loads])
    held.loaded(loads)
    return held


def precise_engines(held: PrefixIndex | None) -> list[PreciseIndex]:
    """Return the index of each engine that may publish KV events, by rank."""
    engines = held.engines if isinstance(held, RankedIndex) else [held]
    return [each for each in engines if isinstance(each, PreciseIndex)]


def approximate_engines(held: PrefixIndex | None) -> list[ApproximateIndex]:
    """Return the index of each engine that is known by what was sent there, by rank."""
    engines = held.engines if isinstance(held, RankedIndex) else [held]
    return [each for each in engines if isinstance(each, ApproximateIndex)]


def block_shapes(backends: Iterable[HasPrefixIndex]) -> set[BlockShape]:
    """Return the shapes of blocks that the KV events of a pool's engines report."""
    shapes = set()
    for backend in backends:
        for engine in precise_engines(backend.prefix_index):
            follower = engine.follower
            if follower is not None and follower.knows and follower.mirror.shape is not None:
                shapes.add(follower.mirror.shape)
    return shapes


def _work(prefix: Prefix, cached_tokens: int) -> int:
    return max(0, prefix.prompt_tokens - cached_tokens) + _OUTPUT * prefix.output_tokens
