"""`Mirror`: which blocks one engine holds in its prefix cache, as its events tell. Pure.

A block is known here by a digest of all tokens up to its end, its adapter and its salt. vLLM's own
hashes cannot be made outside of it; they are only the names by which later events speak of a block.
What is held is found by walking a prompt's digests until one is missing, as the engine does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import msgspec

from gateway.wire.kvevents import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

# With blocks of 16 tokens a cache of four million tokens; some 80 MB.
MOST_BLOCKS: Final = 1 << 18

_MOST_EXPECTED: Final = 1 << 16  # blocks that were sent and have not come

_DIGEST_BYTES: Final = 16
_ROOT: Final = bytes(_DIGEST_BYTES)
_TOKEN_BYTES: Final = 4
# A prefix is cached as a whole in layers with these kinds of attention; the others keep a window of
# it, and their blocks come in events of their own. Source: vLLM 0.32 `v1/kv_cache_interface.py`.
_WHOLE: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_HERE: Final = frozenset({None, "GPU"})  # not in a tier below: from there a block is loaded first
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def prefix_digests(
    tokens: Sequence[int], block_tokens: int, adapter: str | None = None, salt: str | None = None
) -> list[bytes]:
    """Return the digests of the blocks of a prompt that an engine could find in its cache.

    The last token is always computed, so a block that ends with it is not among them.
    """
    packed = array("I", tokens).tobytes()
    step = block_tokens * _TOKEN_BYTES
    own = [] if adapter is None else [adapter]
    first = _extra(adapter, own if salt is None else [*own, salt])
    later = _extra(adapter, own)
    digest, extra, found = _ROOT, first, []
    for begin in range(0, len(packed) - step, step):
        digest = _digest(digest, packed[begin : begin + step], extra)
        found.append(digest)
        extra = later
    return found


def _digest(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    return blake2b(parent + tokens + extra, digest_size=_DIGEST_BYTES).digest()


class _Block(msgspec.Struct, gc=False):
    digest: bytes
    copies: int = 1  # requests that read the same prompt at the same time store it twice


class Mirror:
    """The blocks of one engine.

    It never holds more than `most_blocks`: then the oldest go, so that a block can be held that is not
    known here. Blocks whose beginning was stored before anybody listened are not known either.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.most_blocks = most_blocks
        self.block_tokens: int | None = None
        self.tells_keys = True  # whether its events say which adapter and salt a block has
        self._group: int | None = None
        self._blocks: dict[BlockHash, _Block] = {}
        self._holders: dict[bytes, BlockHash] = {}  # by digest
        self._expected: dict[bytes, None] = {}  # digests, the oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks, self._holders, self._expected = {}, {}, {}

    def held(self, digests: Sequence[bytes], before: int = 0) -> int:
        """Return how many blocks the engine holds from the beginning of a prompt on, without a gap.

        `before` is what was found the last time: an engine throws a block away before the one that it
        follows, so while the last of them is there, all are, and only what came since is looked for.
        """
        holders, expected, count = self._holders, self._expected, before
        if before and digests[before - 1] not in holders and digests[before - 1] not in expected:
            count = 0
        for digest in islice(digests, count, None):
            if digest not in holders and digest not in expected:
                break
            count += 1
        return count

    # --- what it will hold soon ---

    def expect(self, digests: Iterable[bytes]) -> None:
        """Take blocks as held that the engine was sent, and has not told of yet."""
        self._expected.update(dict.fromkeys(each for each in digests if each not in self._holders))
        if len(self._expected) > _MOST_EXPECTED:
            for digest in list(islice(self._expected, len(self._expected) - _MOST_EXPECTED // 2)):
                del self._expected[digest]

    def expect_no_more(self, digests: Iterable[bytes]) -> None:
        """Take that back, of those that have not come."""
        for digest in digests:
            self._expected.pop(digest, None)

    def expect_nothing(self) -> None:
        """Take back all that has not come."""
        self._expected = {}

    # --- what it tells ---

    def apply(self, events: Iterable[Event]) -> None:
        """Follow what an engine did to its cache."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()

    def _store(self, event: BlockStored) -> None:
        if not self._concerns(event) or event.kv_cache_spec_kind not in _WHOLE:
            return
        hashes, size = event.block_hashes, event.block_size
        if len(event.token_ids) != len(hashes) * size or not hashes:
            return  # some are left out: a window's
        if self.block_tokens is None or size > self.block_tokens:
            self.clear()  # what is smaller was part of a block
            self.block_tokens, self._group = size, event.group_idx
        if size != self.block_tokens or event.group_idx != self._group:
            return
        self.tells_keys = event.tells_keys
        digest = _ROOT
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            if parent is None:
                return
            digest = parent.digest
        # Older engines tell no name, but a number that nobody else knows.
        adapter = event.lora_id if event.lora_name is None else event.lora_name
        packed, step = array("I", event.token_ids).tobytes(), size * _TOKEN_BYTES
        for place, name in enumerate(hashes):
            known = self._blocks.get(name)
            if known is not None:
                known.copies += 1
                digest = known.digest
                continue
            tokens = packed[place * step : (place + 1) * step]
            digest = _digest(digest, tokens, _extra(adapter, _keys(event, place)))
            self._blocks[name] = _Block(digest)
            self._holders[digest] = name
            self._expected.pop(digest, None)
        if len(self._blocks) > self.most_blocks:
            self._drop_oldest()

    def _remove(self, event: BlockRemoved) -> None:
        if not self._concerns(event) or event.group_idx != self._group:
            return
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.copies -= 1
            if not block.copies:
                self._forget(name)

    def _concerns(self, event: BlockStored | BlockRemoved) -> bool:
        return event.medium in _HERE and event.locality != "REMOTE"

    def _forget(self, name: BlockHash) -> None:
        block = self._blocks.pop(name)
        # An adapter that was loaded anew from another path has blocks of the same digest.
        if self._holders.get(block.digest) == name:
            del self._holders[block.digest]

    def _drop_oldest(self) -> None:
        """Make room for a while: looking for the oldest costs as much for one as for many."""
        for name in list(islice(self._blocks, len(self._blocks) - self.most_blocks * 15 // 16)):
            self._forget(name)


def _keys(event: BlockStored, place: int) -> list[Any]:
    """Return what vLLM hashes of a block beside its tokens: its adapter, its images, its salt."""
    told = event.extra_keys
    if told is not None:
        return (told[place] if place < len(told) else None) or []
    return [] if event.lora_name is None else [event.lora_name]


def _extra(adapter: str | int | None, keys: list[Any]) -> bytes:
    """Return what parts a block from others with the same tokens.

    The adapter stands for itself: nobody's salt may be taken for its name.
    """
    return _ENCODE([adapter, keys]) if keys or adapter is not None else b""
