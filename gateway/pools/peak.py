"""The most that the KV cache of one backend will ever hold of what runs there. Pure.

All streams of a backend write at about one pace, and how much each will write is expected. So the order in
which they end is known, and how full the cache is whenever one of them ends:

    n streams are left, each has written L more tokens  ->  sum (prompt + written) of these + n x L

Between two ends it only grows. So one more stream fits where it takes none of these sums over the cache, up
to its own end: a short one may fit beside many long ones that have just begun.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from gateway.core.types import Credit, LoadSample
from gateway.pools.trust import learnt

# Of its expected output: so much more is expected of a stream that wrote all of it and goes on.
_OVERRUN: Final = 0.1
_MOST_STREAMS: Final = 256  # a look at them costs 0.2 ms; of more, each is a small part
# Tokens that each stream takes on top: half a block is empty. vLLM's have 16 tokens on a GPU, 32 and more on a CPU.
_BLOCK: Final = 16
_SEEMS: Final = 1.1  # times our requests that an engine may seem to have, as gauges and ends cross
_KEPT_S: Final = 0.25  # so long an outlook is used while nobody comes or goes


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What is to come, in the order in which streams end."""

    at: float
    left: list[int]  # tokens that each has yet to write
    held: list[int]  # by how many have ended: what the others hold now
    worst: list[int]  # by the last to end: the most until then, with one more stream


@dataclass(slots=True)
class Peak:
    """The streams of one backend. `Room` feeds it."""

    calm: bool = True  # the pool is not overloaded, as its line says
    _foreseen: bool = False  # the last scrape shows no requests but ours, and their pace is known
    _share: float = 1.0  # that it shows of what they are thought to hold: prompts may share blocks
    beyond_tokens: float = 0.0  # that it shows on top of what was foreseen
    _gap_s: float = 1.0  # from one token of a stream to the next
    _streams: dict[int, Credit] = field(default_factory=dict)
    _outlook: _Outlook | None = None  # until something changes

    def knows(self, requests: int) -> bool:
        """Whether it can be asked: these requests are all of the backend's, and streams whose pace is known."""
        few = requests <= _MOST_STREAMS
        return self.calm and self._foreseen and few and len(self._streams) == requests

    def take(self, credit: Credit) -> None:
        """Note a stream."""
        self._streams[id(credit)] = credit
        self._outlook = None

    def changed(self) -> None:
        """Note that one of them got its first token."""
        self._outlook = None

    def give_back(self, credit: Credit) -> None:
        """Note an end; one of what was not taken changes nothing."""
        if self._streams.pop(id(credit), None) is not None:
            self._outlook = None

    def joined(self) -> None:
        """Note that another gateway has requests there."""
        self._foreseen = False

    def scraped(
        self, sample: LoadSample, requests: int | None, capacity: int, gap_s: float
    ) -> None:
        """Compare a scrape with what our `requests` are thought to hold; None: other gateways have some, too."""
        few = requests is not None and sample.running + sample.waiting <= _SEEMS * requests + 1
        usage, self._outlook = sample.kv_usage_ratio, None
        one = len(sample.engines) <= 1 and capacity > 0
        self._foreseen = few and one and usage is not None and gap_s > 0
        if self._foreseen and usage is not None:
            self._gap_s = gap_s
            begun = [each for each in self._streams.values() if each.began_at is not None]
            held = sum(
                each.prompt_tokens + _BLOCK + self._written(each, sample.at) for each in begun
            )
            shown = usage * capacity
            self._share = learnt(self._share, shown, held, capacity)
            self.beyond_tokens = max(0.0, shown - self._share * held)

    @property
    def blocks_tokens(self) -> int:
        """What half-empty blocks take at most, with one more stream."""
        return _BLOCK * (len(self._streams) + 1)

    def with_one_more(self, prompt_tokens: int, output_tokens: int, now: float) -> float:
        """Return the most that the cache will hold until a stream ends that comes now."""
        seen = self._outlook
        if seen is None or now >= seen.at + _KEPT_S:
            self._outlook = seen = self._look(now)
        before = bisect_right(seen.left, output_tokens)  # so many end no later
        others = len(seen.left) - before
        own_end = seen.held[before] + (others + 1) * output_tokens
        worst = max(own_end, seen.worst[before - 1]) if before else own_end
        return self._share * (worst + prompt_tokens + _BLOCK) + self.beyond_tokens

    def most(self, now: float) -> float:
        """Return the most that the cache will hold of what runs now."""
        seen = self._look(now)
        left = seen.left
        ends = (seen.held[place] + (len(left) - place) * each for place, each in enumerate(left))
        return self._share * max(ends, default=0) + self.beyond_tokens

    def _look(self, now: float) -> _Outlook:
        rows = []
        for each in self._streams.values():
            written, output = int(self._written(each, now)), each.output_tokens
            left = output - written
            held = each.prompt_tokens + _BLOCK + written
            rows.append((left if left > 0 else int(_OVERRUN * output) + 1, held))
        rows.sort()
        held_then = [*accumulate((held for _, held in reversed(rows)), initial=0)][::-1]
        count = len(rows)
        ends = (
            held_then[place] + (count - place + 1) * left for place, (left, _) in enumerate(rows)
        )
        return _Outlook(now, [left for left, _ in rows], held_then, [*accumulate(ends, max)])

    def _written(self, credit: Credit, now: float) -> float:
        """Return how much a stream has written; what is beyond its expected output shows in a scrape."""
        began = credit.began_at
        return 0.0 if began is None else min((now - began) / self._gap_s, credit.output_tokens)
