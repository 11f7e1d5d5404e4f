"""Decode vLLM's KV events: which blocks an engine stored in its prefix cache and removed. No I/O.

A published message has three frames: topic, sequence number (8 bytes, big-endian), and a batch in
msgpack, `[time, [event, ...], data-parallel rank]`. Events are maps since vLLM 0.24, and arrays by
position before. Releases append fields; unknown ones are ignored.
Source: vLLM 0.33 `distributed/kv_events.py`; the arrays of 0.9 to 0.23 are its fields in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

# The end of a replay has this instead of a number.
_END: Final = b"\xff" * 8
_NUMBER_BYTES: Final = 8

BlockHash = int | bytes
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 16)]


class Garbled(ValueError):
    """A message is no batch of events."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", gc=False):
    """Blocks that follow each other are in the cache now: `token_ids` has the tokens of all."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the first; None: it begins a prompt
    token_ids: list[TokenId]
    block_size: BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # adapter, images and salt, by block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    # By block: the tokens behind it that its hash covers, too. Since 0.33, of engines that draft tokens.
    lookahead_token_ids: list[list[TokenId]] | None = None
    tells_keys: bool = True  # set here: False if the engine is too old to tell `extra_keys`


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", gc=False):
    """One copy of each of these blocks is no longer in the cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type", gc=False):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, gc=False):
    """The events of one step of an engine, in order."""

    at: float  # seconds since the epoch, by the engine's clock
    events: list[Event]
    strange: int = 0  # events of kinds that are not known here


class _Envelope(msgspec.Struct, array_like=True, gc=False):
    at: float
    events: list[Raw]


class _Time(msgspec.Struct, array_like=True, gc=False):
    at: float


class _Kind(msgspec.Struct, gc=False):
    type: str = ""


_ENVELOPE: Final = msgspec.msgpack.Decoder(_Envelope)
_TIME: Final = msgspec.msgpack.Decoder(_Time)
_EVENT: Final = msgspec.msgpack.Decoder(Event)
_KIND: Final = msgspec.msgpack.Decoder(_Kind)
_ITEMS: Final = msgspec.msgpack.Decoder(list[Any])
_MAPS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))  # first bytes of a map in msgpack
# What stands at which place of an array, after the name of the event.
_PLACES: Final = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_KEYS_AT: Final = 8  # place of `extra_keys` in a whole array


def published(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the number and the payload of a published message.

    Raises:
        Garbled: it is none.
    """
    if len(frames) != 3:
        raise Garbled("a message does not have three frames")
    return _number(frames[1]), frames[2]


def replayed(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return the number and the payload of a replayed message; None for the mark at the end.

    An empty frame comes first; older vLLM repeats no topic.

    Raises:
        Garbled: it is neither.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise Garbled("a replayed message does not have three or four frames")
    number, payload = frames[-2:]
    return None if number == _END else (_number(number), payload)


def replay_from(number: int) -> tuple[bytes, bytes]:
    """Return the frames that ask for all messages from a number on."""
    return b"", number.to_bytes(_NUMBER_BYTES, "big")


def parse_batch(payload: bytes) -> Batch:
    """Read one batch. An event of a kind that is not known is counted, and left out.

    Raises:
        Garbled: it is no batch, or an event of a known kind is not written as one.
    """
    try:
        envelope = _ENVELOPE.decode(payload)
        found = [_event(raw) for raw in envelope.events]
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise Garbled(str(error)) from error
    events = [each for each in found if each is not None]
    return Batch(envelope.at, events, len(found) - len(events))


def time_of(payload: bytes) -> float | None:
    """Return the time of a batch; None when it has none."""
    try:
        return _TIME.decode(payload).at
    except (msgspec.MsgspecError, RecursionError):
        return None


def _event(raw: Raw) -> Event | None:
    """Return an event; None for one of a kind that is not known."""
    first = memoryview(raw)[:1]
    if not first or first[0] not in _MAPS:
        return _from_array(raw)
    try:
        event: Event = _EVENT.decode(raw)
        return event
    except msgspec.ValidationError:
        if _KIND.decode(raw).type in _PLACES:
            raise
        return None


def _from_array(raw: Raw) -> Event | None:
    items = _ITEMS.decode(raw)
    kind = items[0] if items else None
    places = _PLACES.get(kind) if isinstance(kind, str) else None
    if places is None:
        return None
    named: dict[str, Any] = dict(zip(("type", *places), items, strict=False))
    named["tells_keys"] = len(items) > _KEYS_AT
    event: Event = msgspec.convert(named, Event)
    return event


def _number(frame: bytes) -> int:
    if len(frame) != _NUMBER_BYTES:
        raise Garbled("a message has no number")
    return int.from_bytes(frame, "big")
