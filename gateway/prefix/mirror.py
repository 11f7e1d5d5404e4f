"""`Mirror`: a copy of one engine's prefix cache block table, built from its KV events. Pure.

A block is identified by a digest of all tokens up to its end, its adapter and its salt. vLLM's own block
hashes cannot be computed outside of vLLM. They serve only as names, by which later events refer to a block.
A look-up walks a prompt's digests until one is missing, as the engine does. Where an engine hashes the
tokens behind a block with it, as one that drafts tokens does since vLLM 0.33, they are in its digest, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import msgspec

from gateway.core.prefix import BlockShape
from gateway.wire.kvevents import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

# With blocks of 16 tokens a cache of four million tokens; some 80 MB.
MOST_BLOCKS: Final = 1 << 18

_MOST_EXPECTED: Final = 1 << 15  # blocks that were sent and not confirmed by an event yet

_DIGEST_BYTES: Final = 16
_ROOT: Final = bytes(_DIGEST_BYTES)
_TOKEN_BYTES: Final = 4
# Layers with these kinds of attention cache a whole prefix. The others cache a window of it, and their
# blocks come in separate events. Source: vLLM 0.32 `v1/kv_cache_interface.py`.
_WHOLE: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# Not in CPU memory or on disk: from there it must be loaded first.
_HERE: Final = frozenset({None, "GPU"})
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def prefix_digests(
    tokens: Sequence[int], shape: BlockShape, adapter: str | None = None, salt: str | None = None
) -> list[bytes]:
    """Return the digests of a prompt's blocks that an engine could find in its cache.

    An engine always computes the last token, so the block that ends with it is left out.
    """
    packed = array("I", tokens).tobytes()
    step, ahead = shape.tokens * _TOKEN_BYTES, shape.ahead * _TOKEN_BYTES
    own = [] if adapter is None else [adapter]
    first = _extra(adapter, own if salt is None else [*own, salt])
    later = _extra(adapter, own)
    digest, extra, found = _ROOT, first, []
    for begin in range(0, len(packed) - step - max(0, ahead - _TOKEN_BYTES), step):
        digest = _digest(digest, packed[begin : begin + step + ahead], extra)
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

    The mirror keeps at most `most_blocks` and drops the oldest beyond that. So the engine may have blocks
    that are missing here, as it may have those whose parents were stored before the mirror began.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.most_blocks = most_blocks
        self.shape: BlockShape | None = None
        self.tells_keys = True  # its events name the adapter and salt of a block
        self._group: int | None = None
        self._blocks: dict[BlockHash, _Block] = {}
        self._holders: dict[bytes, BlockHash] = {}  # by digest
        self._expected: dict[bytes, None] = {}  # digests, those sent last at the end

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks, self._holders, self._expected = {}, {}, {}

    def held(self, digests: Sequence[bytes], before: int = 0) -> int:
        """Return how many leading blocks of a prompt the engine has.

        `before` is the result of the last look-up. An engine evicts a block before its parent. So if the
        last block found then is still there, all before it are, and only the following ones are checked.
        """
        holders, expected, count = self._holders, self._expected, before
        if before > len(digests):  # of blocks of another size
            before = count = 0
        if before and digests[before - 1] not in holders and digests[before - 1] not in expected:
            count = 0
        for digest in islice(digests, count, None):
            if digest not in holders and digest not in expected:
                break
            count += 1
        return count

    # --- blocks that it will have soon ---

    def expect(self, digests: Iterable[bytes]) -> list[bytes]:
        """Count blocks that were sent to the engine as cached, before its events confirm them; return the new ones.

        An event tells nothing of a block whose parent is not known. So some are never confirmed, and those that
        were sent last are kept: as many as the cache may hold, or up to twice as many.
        """
        holders, expected = self._holders, self._expected
        unseen = [each for each in digests if each not in holders]
        new = [each for each in unseen if each not in expected]
        for digest in unseen:
            expected.pop(digest, None)
            expected[digest] = None
        most = min(self.most_blocks, _MOST_EXPECTED)
        if len(expected) > 2 * most:
            for digest in list(islice(expected, len(expected) - most)):
                del expected[digest]
        return new

    def expect_no_more(self, digests: Iterable[bytes]) -> None:
        """Undo `expect` for blocks that no event has confirmed."""
        for digest in digests:
            self._expected.pop(digest, None)

    def expect_nothing(self) -> None:
        """Undo `expect` for all blocks that no event has confirmed."""
        self._expected = {}

    # --- events ---

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events to the mirror."""
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
            return  # some tokens are left out: blocks of a sliding window
        ahead = event.lookahead_token_ids or [[]] * len(hashes)
        shape = BlockShape(size, len(ahead[0]))
        if self.shape is None or size > self.shape.tokens or self.shape.ahead != shape.ahead:
            self.clear()  # the smaller ones were parts of blocks
            self.shape, self._group = shape, event.group_idx
        if shape != self.shape or event.group_idx != self._group or len(ahead) != len(hashes):
            return
        self.tells_keys = event.tells_keys
        digest = _ROOT
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            if parent is None:
                return
            digest = parent.digest
        # Older engines give no name, only their internal number.
        adapter = event.lora_id if event.lora_name is None else event.lora_name
        packed, step = array("I", event.token_ids).tobytes(), size * _TOKEN_BYTES
        for place, name in enumerate(hashes):
            known = self._blocks.get(name)
            if known is not None:
                known.copies += 1
                digest = known.digest
                continue
            tokens = packed[place * step : (place + 1) * step] + array("I", ahead[place]).tobytes()
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
        # An adapter that was reloaded from another path has other blocks with the same digest.
        if self._holders.get(block.digest) == name:
            del self._holders[block.digest]

    def _drop_oldest(self) -> None:
        """Drop a sixteenth at once: finding the oldest costs as much for one as for many."""
        for name in list(islice(self._blocks, len(self._blocks) - self.most_blocks * 15 // 16)):
            self._forget(name)


def _keys(event: BlockStored, place: int) -> list[Any]:
    """Return what vLLM hashes into a block besides its tokens: adapter, images, salt."""
    told = event.extra_keys
    if told is not None:
        return (told[place] if place < len(told) else None) or []
    return [] if event.lora_name is None else [event.lora_name]


def _extra(adapter: str | int | None, keys: list[Any]) -> bytes:
    """Return what distinguishes a block from others with the same tokens.

    The adapter is encoded separately, so that no salt can pass for an adapter's name.
    """
    return _ENCODE([adapter, keys]) if keys or adapter is not None else b""
