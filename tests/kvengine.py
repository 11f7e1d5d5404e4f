"""A model of vLLM's prefix cache and of the messages that it publishes: what any mirror is held to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

import msgspec

SIZE = 4  # tokens of a block
_processes = count(1)


@dataclass
class Engine:
    """One engine process: its cached blocks, and the messages it keeps for a replay."""

    arrays: bool = False  # as vLLM wrote events before 0.24
    keeps: int = 10_000  # `buffer_steps`
    clock: float = 1_000.0
    sent: int = 0
    cached: list[int] = field(default_factory=list)  # one for each copy of a block, by its hash
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    names: dict[object, int] = field(default_factory=dict)

    def __post_init__(self):
        self.first = next(_processes) << 32
        self.kept = deque(self.kept, self.keeps)

    def chain(self, tokens, adapter=None, salt=None):
        """Return the hash and the extra keys of each whole block of a prompt."""
        parent, found = None, []
        for begin in range(0, len(tokens) - SIZE + 1, SIZE):
            extra = [] if adapter is None else [adapter]
            if begin == 0 and salt is not None:
                extra.append(salt)
            what = (parent, tuple(tokens[begin : begin + SIZE]), adapter, tuple(extra))
            parent = self.names.setdefault(what, self.first + len(self.names))
            found.append((parent, extra or None))
        return found

    def held(self, tokens, adapter=None, salt=None):
        """Return how many blocks of a prompt it finds in its cache."""
        hits = 0
        for name, _ in self.chain(tokens, adapter, salt)[: (len(tokens) - 1) // SIZE]:
            if name not in self.cached:
                break
            hits += 1
        return hits

    def read(self, *prompts):
        """Compute prompts side by side; each stores what was not in the cache before."""
        events = []
        for tokens, adapter, salt, hits in [(*each, self.held(*each)) for each in prompts]:
            new = self.chain(tokens, adapter, salt)[hits:]
            if new:
                before = self.chain(tokens, adapter, salt)[:hits]
                self.cached += [name for name, _ in new]
                whole = tokens[hits * SIZE : (hits + len(new)) * SIZE]
                events.append(stored(new, before[-1][0] if before else None, whole, adapter))
        return self.publish(*events)

    def evict(self, place):
        """Throw away one copy of a block."""
        if not self.cached:
            return self.publish()
        name = self.cached.pop(place % len(self.cached))
        return self.publish({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def clear(self):
        self.cached.clear()
        return self.publish({"type": "AllBlocksCleared"})

    def publish(self, *events):
        """Return the message of a step, if anything happened in it."""
        if not events:
            return []
        self.clock += 0.01
        written = [[*each.values()] for each in events] if self.arrays else events
        message = (self.sent, msgspec.msgpack.encode([self.clock, written, 0]))
        self.sent += 1
        self.kept.append(message)
        return [message]

    def replay(self, number):
        return [each for each in self.kept if each[0] >= number]

    def restarted(self):
        """Return the process that comes after it."""
        return Engine(self.arrays, self.keeps, self.clock + 5)


def stored(blocks, parent, tokens, adapter):
    """Return an event as a map, its fields in the order of the older arrays."""
    return {
        "type": "BlockStored",
        "block_hashes": [name for name, _ in blocks],
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": SIZE,
        "lora_id": None if adapter is None else 1,
        "medium": "GPU",
        "lora_name": adapter,
        "extra_keys": [extra for _, extra in blocks],
        "group_idx": None,
    }


def catch_up(follower, engine, dropped=()):
    """Replay what a follower misses, as a subscriber does; `dropped` are lost on the way, once each."""
    dropped = set(dropped)
    for _ in range(100):
        asked = engine.replay(follower.replay_begins())
        for message in asked:
            if message[0] in dropped:
                dropped.discard(message[0])
            elif not follower.replayed(*message):
                break
        else:
            if follower.replay_ended():
                return
    raise AssertionError("a replay came to no end")


def deliver(follower, engine, messages, *, replays=True):
    """Hand over published messages, as a subscriber does."""
    for message in messages:
        if follower.published(*message):
            continue
        if replays:
            catch_up(follower, engine)
        if not replays or not follower.published(*message):
            follower.begin_with(*message)
