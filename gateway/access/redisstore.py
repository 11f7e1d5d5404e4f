"""The keys that replicas share, on Redis: the store, and how a reader follows it.

Redis holds records with digests. The pepper, without which they prove nothing, stays with the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.access import keyscripts as scripts
from gateway.access.changes import check_version, created, revoked, rotated, updated
from gateway.access.effective import Tiers
from gateway.access.keyerrors import (
    BadSettings,
    NoSuchKey,
    NotUnderstood,
    VersionConflict,
    WrongPepper,
)
from gateway.access.keystore import CLOCKS_DIFFER_S, CreatedKey
from gateway.access.records import KeyRecord, as_node, read_record
from gateway.store.scripts import Scripted, fields_of
from gateway.store.shared import StoreUnavailable

WITHIN_S: Final = 3.0  # that an operator waits: the first call has to connect
_PAGE: Final = 500  # records of a read
_TRIES: Final = 20  # of a change that others come before
_RESUMED_S: Final = 3600.0  # how long what may have been made is taken up again
_MOST_UNKNOWN: Final = 64
_WRITTEN: Final = [
    scripts.RECORDS, scripts.CHANGED, scripts.GENERATION, scripts.HISTORY, scripts.PEPPER,
]  # fmt: skip


def fingerprint(pepper: bytes) -> str:
    """Return what tells one pepper from another, and says nothing of it."""
    return hmac.digest(pepper, b"vllm-gateway which pepper", "sha256")[:8].hex()


@dataclass(frozen=True, slots=True)
class Entry:
    """A record, and the text that Redis has of it: its version, a space, JSON."""

    text: str = field(repr=False)
    record: KeyRecord

    @classmethod
    def of(cls, record: KeyRecord) -> Entry:
        """Return the entry of a record."""
        return cls(f"{record.version} {json.dumps(as_node(record), sort_keys=True)}", record)

    @classmethod
    def read(cls, text: str) -> Entry:
        """Return the entry of a text.

        Raises:
            ValueError: it is none.
            BadSettings: its record is none that this version knows.
        """
        node = json.loads(text.partition(" ")[2])
        if not isinstance(node, dict):
            raise ValueError("its record is no mapping")
        return cls(text, read_record(node))

    def of_key(self, key_id: str) -> Entry:
        """Return it.

        Raises:
            ValueError: it is that of another key.
        """
        if self.record.id != key_id:
            raise ValueError("it is the record of another key")
        return self


@dataclass(frozen=True, slots=True)
class Part:
    """What a read brought: everything, or what changed since what the reader knew."""

    whole: bool
    generation: int
    stamp: str
    pepper: str  # what tells it; empty: there are no keys yet
    entries: Mapping[str, Entry]
    unreadable: Set[str] = frozenset()  # ids of records that this version does not understand


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """See `KeyStore`. `tiers` tells those of the configuration in force, `wall` the time.

    Where Redis did not answer, nobody knows whether a secret was kept, and nobody has seen it: who asks for
    the same again gets that one. So a request that is sent again makes no second key.
    """

    link: Scripted
    pepper: bytes = field(repr=False)
    tiers: Callable[[], Tiers]
    wall: Callable[[], float]
    _unknown: dict[str, CreatedKey] = field(default_factory=dict, init=False, repr=False)

    async def list(self) -> Sequence[KeyRecord]:
        """See `KeyStore`."""
        records = [each.record for each in (await self.read()).entries.values()]
        return sorted(records, key=lambda it: (it.created_s or 0.0, it.id))

    async def get(self, key_id: str) -> KeyRecord:
        """See `KeyStore`."""
        text = await self.link.ask(scripts.GET, [scripts.RECORDS], [key_id], WITHIN_S)
        if not text:
            raise NoSuchKey(f"there is no key with the id {key_id}")
        return _record_of(text, key_id)

    async def create(self, settings: Mapping[str, object]) -> CreatedKey:
        """See `KeyStore`.

        Raises:
            WrongPepper: the keys that there are were made with another pepper.
        """
        what = json.dumps(["create", settings], sort_keys=True, default=str)
        while True:
            made = created(settings, (), self.pepper, self.tiers(), self.wall())
            made = self._made_before(what) or made
            with self._noting(what, [made]):
                other = await self.put(made.record, "")
            if other is None or other.version == made.record.version:
                return made

    async def update(
        self, key_id: str, changes: Mapping[str, object], if_match: str | None = None
    ) -> KeyRecord:
        """See `KeyStore`."""
        return await self._change(
            key_id, if_match, lambda it: updated(it, changes, self.tiers(), self.wall())
        )

    async def rotate(self, key_id: str, grace_s: float, if_match: str | None = None) -> CreatedKey:
        """See `KeyStore`."""
        what = json.dumps(["rotate", key_id, grace_s])
        before = self._made_before(what)
        made = [] if before is None else [before]

        def with_another(record: KeyRecord) -> KeyRecord:
            is_kept = before is not None and before.record.secrets[0] == record.secrets[0]
            if before is not None and is_kept and record.revoked_s is None:
                made.append(CreatedKey(record, before.key))  # whatever else was changed since
                return record
            made.append(rotated(record, grace_s, self.pepper, self.wall()))
            return made[-1].record

        with self._noting(what, made):
            await self._change(key_id, if_match, with_another)
        return made[-1]

    async def revoke(self, key_id: str, if_match: str | None = None) -> KeyRecord:
        """See `KeyStore`."""
        return await self._change(key_id, if_match, lambda it: revoked(it, self.wall()))

    async def note_use(self, at: Mapping[str, float]) -> None:
        """See `KeyStore`."""
        latest_ms = round((self.wall() + CLOCKS_DIFFER_S) * 1000)
        used = [word for key_id, s in at.items() for word in (key_id, round(s * 1000))]
        if used:
            await self.link.ask(scripts.NOTE_USE, [scripts.USED], [latest_ms, *used], WITHIN_S)

    async def last_use(self, key_id: str) -> float | None:
        """See `KeyStore`."""
        at_ms = await self.link.ask(scripts.GET, [scripts.USED], [key_id], WITHIN_S)
        return None if at_ms is None else int(at_ms) / 1000

    async def uses(self) -> Mapping[str, float]:
        """See `KeyStore`."""
        fields = fields_of(self.link, scripts.USED, WITHIN_S)
        return {key_id: int(at_ms) / 1000 async for key_id, at_ms in fields}

    async def put(self, record: KeyRecord, version: str) -> KeyRecord | None:
        """Keep a record in place of its version (empty: of none); return what is there if it is another.

        Raises:
            WrongPepper: the keys that there are were made with another pepper.
            NotUnderstood: what is there is of a newer version.
            StoreUnavailable: Redis does not answer; whether the record is kept is unknown.
        """
        text, stamp, pepper = Entry.of(record).text, secrets.token_hex(6), fingerprint(self.pepper)
        args = (record.id, version, text, stamp, pepper, scripts.HINTS, scripts.KEPT_STAMPS)
        reply = await self.link.ask(scripts.PUT, _WRITTEN, args, WITHIN_S)
        if reply[0] == "kept":
            return None
        if reply[0] == "pepper":
            raise WrongPepper
        if not reply[1]:
            raise NoSuchKey(f"there is no key with the id {record.id}")
        return _record_of(reply[1], record.id)

    async def read(self, generation: int = 0, stamp: str = "") -> Part:
        """Return what changed since a generation with this stamp, or everything if that is not known.

        However many reads it takes, the records are those of one generation.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        entries: dict[str, Entry] = {}
        unreadable: set[str] = set()
        whole, known = not stamp, generation
        while True:
            args = (known, stamp, _PAGE)
            reply: Sequence[Any] = await self.link.ask(scripts.READ, _WRITTEN, args, WITHIN_S)
            what, now, mark, pepper, upto, *found = reply
            if what == "all":
                whole = True
                entries.clear()
            # A key that changes between two reads comes again, later: the last one counts.
            for key_id, text in zip(found[::2], found[1::2], strict=True):
                try:
                    entries[key_id] = Entry.read(text).of_key(key_id)
                except (ValueError, BadSettings):
                    unreadable.add(key_id)
            if upto == now:
                return Part(whole, now, mark, pepper, entries, frozenset(unreadable))
            known, stamp = upto, ""

    @contextlib.contextmanager
    def _noting(self, what: str, made: Sequence[CreatedKey]) -> Iterator[None]:
        """Note what was made last when nobody hears whether it is kept."""
        try:
            yield
        except (StoreUnavailable, asyncio.CancelledError):
            if made:
                self._unknown[what] = made[-1]
                if len(self._unknown) > _MOST_UNKNOWN:
                    del self._unknown[next(iter(self._unknown))]
            raise

    def _made_before(self, what: str) -> CreatedKey | None:
        """Take what was made of the same request, of which nobody knows whether it is kept."""
        made = self._unknown.pop(what, None)
        if made is None or self.wall() - (made.record.changed_s or 0.0) > _RESUMED_S:
            return None
        return made

    async def _change(
        self, key_id: str, if_match: str | None, change: Callable[[KeyRecord], KeyRecord]
    ) -> KeyRecord:
        record = await self.get(key_id)
        for _ in range(_TRIES):
            check_version(record, if_match)
            after = change(record)
            if after is record:
                return record
            other = await self.put(after, record.version)
            if other is None:
                return after
            record = other
        raise VersionConflict(record.version)


def _record_of(text: str, key_id: str) -> KeyRecord:
    try:
        return Entry.read(text).record
    except (ValueError, BadSettings):
        raise NotUnderstood(key_id) from None


def id_of(text: str) -> str:
    """Return the id of a record that is otherwise not understood; `?` where even that is missing."""
    try:
        return str(json.loads(text.partition(" ")[2])["id"])
    except (ValueError, KeyError, TypeError):
        return "?"
