"""Choices between backends to compare with: simple ones, two rivals' published ones, and two oracles.

`CacheAware` and `ConsistentHash` are models, written from what vllm-router and sglang-router publish of
their policies of these names (thresholds as shipped); the routers themselves are measured over sockets.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections.abc import Sequence
from typing import Final, Protocol

from gateway.sim.config import SimConfig
from gateway.sim.engine import Engine
from gateway.sim.sequence import Sequence as EngineSequence
from loadtest.routing_traces import Asked

_VIRTUAL_NODES: Final = 160  # of a worker on the ring
_CACHE_THRESHOLD: Final = 0.3  # of a prompt that is to match
_BALANCE_ABS: Final = 64
_BALANCE_REL: Final = 1.5
_TREE_CHARS: Final = 1 << 25  # of a worker, above which the least used is forgotten every 120 s


class Model(Protocol):
    """A choice between backends; `loads` are the requests that it has at each."""

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """Return where a request goes. It is sent there at once."""

    def first_token(self, asked: Asked, place: int) -> None:
        """Note that its prompt was read."""


class _Stateless:
    """One that learns nothing from replies."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def first_token(self, asked: Asked, place: int) -> None:
        """Learn nothing."""

    def _least(self, loads: Sequence[int]) -> int:
        """Return the place with the fewest requests, equals by chance."""
        least = min(loads)
        return self._rng.choice([place for place, load in enumerate(loads) if load == least])


class Random(_Stateless):
    """By chance."""

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        return self._rng.randrange(len(loads))


class LeastLoad(_Stateless):
    """The one with the fewest requests."""

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        return self._least(loads)


class Rendezvous(_Stateless):
    """By hash of the session, or of how the prompt begins: always the same place, however busy."""

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        key = asked.session or str(asked.messages[0][1][0].number)
        return max(range(len(loads)), key=lambda place: _hash(f"{key}/{place}"))


class ConsistentHash(_Stateless):
    """vllm-router's `consistent_hash`: a ring of hashes, by the session; without one, by the whole body."""

    def __init__(self, rng: random.Random, count: int) -> None:
        super().__init__(rng)
        points = ((_hash(f"w{place}:{node}"), place) for place in range(count) for node in range(_VIRTUAL_NODES))  # fmt: skip
        self._ring = sorted(points)

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        key = asked.session or str(asked.seed)  # no two bodies are equal
        found = bisect(self._ring, (_hash(key), -1))
        return self._ring[found % len(self._ring)][1]


class CacheAware(_Stateless):
    """`cache_aware` of vllm-router and sglang-router: an approximate tree of what was sent, and thresholds.

    It follows the tree where more than three tenths of the text match, and else takes the least loaded,
    as it does while one has 64 requests more than another and half as many again.
    """

    def __init__(self, rng: random.Random, count: int) -> None:
        super().__init__(rng)
        self.tree = Tree(count)

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        text = "\n".join(text for _, text in asked.texts())
        least, most = min(loads), max(loads)
        found = loads.index(least)
        if most - least <= _BALANCE_ABS or most <= least * _BALANCE_REL:
            matched, owner = self.tree.match(text)
            if owner is not None and matched > _CACHE_THRESHOLD * len(text):
                found = owner
        self.tree.insert(text, found)
        return found


class _Node:
    __slots__ = ("children", "owner", "places", "text")

    def __init__(self, text: str, owner: int | None, places: set[int]) -> None:
        self.text, self.owner, self.places = text, owner, places
        self.children: dict[str, _Node] = {}


class Tree:
    """A radix tree of texts; a node belongs to who was sent it first, and knows who else was.

    Nothing is ever evicted here. Raises OverflowError when the routers' next sweep would.
    """

    def __init__(self, count: int) -> None:
        self._root = _Node("", None, set())
        self._chars = [0] * count

    def insert(self, text: str, place: int) -> None:
        """Note that a text was sent to a place."""
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                node.children[text[at]] = _Node(text[at:], place, {place})
                self._count(place, len(text) - at)
                return
            same = _shared(text, at, child.text)
            if same < len(child.text):
                upper = _Node(child.text[:same], child.owner, set(child.places))
                child.text = child.text[same:]
                upper.children[child.text[0]] = child
                node.children[text[at]] = child = upper
            if place not in child.places:
                child.places.add(place)
                self._count(place, same)
            node, at = child, at + same

    def match(self, text: str) -> tuple[int, int | None]:
        """Return how many characters match, and whose the last node is that does."""
        node, at = self._root, 0
        while at < len(text) and (child := node.children.get(text[at])) is not None:
            same = _shared(text, at, child.text)
            node, at = child, at + same
            if same < len(child.text):
                break
        return at, node.owner

    def _count(self, place: int, chars: int) -> None:
        self._chars[place] += chars
        if self._chars[place] > _TREE_CHARS:
            raise OverflowError("the tree would be swept now; this model does not know how")


class Oracle:
    """Sees the caches of all engines. `by_hits`: it goes where most is cached, however busy that is.

    Otherwise it goes where the first token comes first: by what is still to be read there, by what this
    prompt would add, and by how full the batch is.
    """

    def __init__(
        self, rng: random.Random, engines: Sequence[Engine], config: SimConfig, *, by_hits: bool
    ) -> None:
        self._rng, self._engines, self._config, self._by_hits = rng, engines, config, by_hits
        self._unread = [0 for _ in engines]
        self._adds: dict[int, int] = {}  # of a request by its seed

    def place(self, asked: Asked, loads: Sequence[int]) -> int:
        """See `Model`."""
        sequence = EngineSequence("", asked.ids(), ())
        size = self._config.block_size
        sequence.hash_to(len(sequence.prompt) - 1, size)
        found = [size * held_blocks(engine, sequence.hashes) for engine in self._engines]
        if self._by_hits:
            costs: list[tuple[float, float]] = [
                (-hit, load) for hit, load in zip(found, loads, strict=True)
            ]
        else:
            config = self._config
            per_load_s = 2 * config.engine.decode_step_per_seq_s
            costs = [
                ((unread + asked.prompt_tokens - hit) / config.prefill_tokens_per_s + per_load_s * load, load)
                for unread, hit, load in zip(self._unread, found, loads, strict=True)
            ]  # fmt: skip
        least = min(costs)
        place = self._rng.choice([place for place, cost in enumerate(costs) if cost == least])
        self._adds[asked.seed] = adds = asked.prompt_tokens - found[place]
        self._unread[place] += adds
        return place

    def first_token(self, asked: Asked, place: int) -> None:
        """Note that its prompt was read."""
        self._unread[place] -= self._adds.pop(asked.seed, 0)


def held_blocks(engine: Engine, hashes: Sequence[int]) -> int:
    """Return how many blocks of a prompt an engine has, or will have when it reads what waits there."""
    count = 0
    for content in hashes:
        if content not in engine.blocks:
            break
        count += 1
    for waiting in engine.waiting_queue:
        same = 0
        for mine, its in zip(hashes, waiting.hashes, strict=False):
            if mine != its:
                break
            same += 1
        count = max(count, same)
    return count


def _shared(text: str, at: int, other: str) -> int:
    """Return how many characters of `text` from `at` on are those of `other`."""
    if text.startswith(other, at):
        return len(other)
    low, high = 0, min(len(other), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle], at):
            low = middle
        else:
            high = middle - 1
    return low


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
