"""The keys that replicas share, as one gateway knows them: whole, as of one change, and soon the next one's.

    Redis --each second, or after a hint--> a snapshot, which never changes --> a ring for requests
                                                `--> a copy on disk, to start from without Redis

A record is never deleted. So what a Redis lacks, and this gateway knows, was lost there, as in a fail-over or
a restart without a disk: it is told to Redis again. Of two states of one key, revoked goes before not
revoked, and then the later change.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.access.effective import Tiers, lost_tiers
from gateway.access.keyerrors import BadSettings, KeyStoreError, WrongPepper
from gateway.access.keyfile import put_in_place
from gateway.access.keys import KeyRing
from gateway.access.records import KeyRecord
from gateway.access.redisstore import Entry, Part, RedisKeys, fingerprint, id_of
from gateway.core.aio import periodic
from gateway.store.shared import StoreUnavailable

if TYPE_CHECKING:  # it needs a library that is optional
    from gateway.access.tokens import Tokens

log = logging.getLogger("gateway.keys")

_UNSURE: Final = "unsure"  # no stamp of a change: the next look reads everything
LOOK_S: Final = 0.8  # between two looks, with what `periodic` adds: changes hold within a second
COPY_AGAIN_S: Final = 2.0  # after the copy could not be written
FIRST_LOOK_S: Final = 2.0  # for the first one, before anybody is served


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every key as of one change."""

    generation: int
    stamp: str
    entries: Mapping[str, Entry]
    left_out: Set[str] = frozenset()  # ids of records that this version does not understand


@dataclass(slots=True)
class SharedKeys:
    """See the module. `on_change` is called after each change of the keys, on the loop."""

    store: RedisKeys
    copy: Path
    tokens: Tokens | None = None  # of an identity provider, which are let in too
    snapshot: Snapshot | None = None  # None: nothing is known of the keys yet
    woken: asyncio.Event = field(default_factory=asyncio.Event)  # a hint came: look at once
    on_change: list[Callable[[], None]] = field(default_factory=list)
    _ring: KeyRing | None = None
    _told: str = ""  # what was last logged to be wrong
    _loss_told: bool = False  # that the store lost keys, which it has not taken again yet
    _uncopied: asyncio.Event = field(default_factory=asyncio.Event)
    _copy_failed: bool = False

    def ring(self, tiers: Tiers) -> KeyRing:
        """Return the keys as requests need them, under these tiers."""
        if self._ring is None or self._ring.tiers != tiers:
            known = None if self.snapshot is None else self.snapshot.entries.values()
            records = [each.record for each in known or ()]
            for each in lost_tiers(records, tiers):
                log.error("%s; nobody gets in with it", each, extra={"event": "unknown_tier"})
            self._ring = KeyRing(
                records, self.store.pepper, tiers, known=known is not None, tokens=self.tokens
            )
        return self._ring

    # --- following ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow what Redis has, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                periodic(self.look, every_s=LOOK_S, name="shared keys", woken=self.woken)
            )
            group.create_task(
                periodic(
                    self._copy,
                    every_s=lambda: COPY_AGAIN_S if self._copy_failed else 0.0,
                    name="copy of the keys",
                )
            )

    async def first_look(self) -> None:
        """Look for the first time, before anybody is served; without Redis the copy has to do."""
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                await self.look()
        except TimeoutError:
            log.warning(
                "Redis does not answer: %s", self._without(), extra={"event": "keys_from_copy"}
            )

    async def look(self) -> None:
        """Take over what changed."""
        known = self.snapshot or Snapshot(0, "", {})
        try:
            part = await self.store.read(known.generation, known.stamp)
            if part.pepper not in ("", fingerprint(self.store.pepper)):
                raise WrongPepper
        except StoreUnavailable as error:
            if self.snapshot is None:
                self._tell(f"the keys are not known: {error}; {self._without()}")
            return
        except KeyStoreError as error:
            self._tell(str(error))
            return
        ours = _lost(known.entries, part) if part.whole else {}
        if not ours:
            self._all_is_well()
        same = (part.generation, part.stamp) == (known.generation, known.stamp)
        if self.snapshot is not None and same and not ours:
            return
        self._take(part, ours)
        if ours:
            await self._tell_again(ours.values(), part)

    def _take(self, part: Part, ours: Mapping[str, Entry]) -> None:
        """Put what was read in the place of what was known, all at once."""
        before: Mapping[str, Entry] = {} if self.snapshot is None else self.snapshot.entries
        entries = dict(part.entries) if part.whole else {**before, **part.entries}
        entries |= ours
        left_out = part.unreadable
        if not part.whole and self.snapshot is not None:
            left_out |= self.snapshot.left_out - part.entries.keys()
        _tell_of(part.unreadable)
        for key_id in part.unreadable:
            entries.pop(key_id, None)
        if self._ring is not None and self.snapshot is not None:
            after = [
                entry.record for key_id, entry in entries.items() if before.get(key_id) != entry
            ]
            self._ring = self._ring.with_changes(after, before.keys() - entries.keys())
        else:
            self._ring = None
        stamp = _UNSURE if ours else part.stamp
        self.snapshot = Snapshot(part.generation, stamp, entries, left_out)
        self._uncopied.set()
        for heard in self.on_change:
            heard()

    async def _tell_again(self, ours: Iterable[Entry], part: Part) -> None:
        """Keep in Redis what it lost; another replica may be first."""
        if not self._loss_told:
            log.warning(
                "the shared store lost changes of keys; those that this gateway knows are kept there again",
                extra={"event": "keys_told_again"},
            )
        self._loss_told = True
        for each in ours:
            theirs = part.entries.get(each.record.id)
            try:
                await self.store.put(each.record, "" if theirs is None else theirs.record.version)
            except (StoreUnavailable, KeyStoreError) as error:
                self._tell(f"a key could not be kept there again: {error}")
                return  # the next look finds what is missing
        self._all_is_well()

    def _without(self) -> str:
        if self.snapshot is None:
            return (
                f"there is no copy of them in {self.copy} either, so every request is answered 503"
            )
        return f"keys are those of the copy in {self.copy}, as of change {self.snapshot.generation}"

    def _tell(self, trouble: str) -> None:
        """Log what is wrong, once."""
        if trouble != self._told:
            log.error(trouble, extra={"event": "keys_trouble"})
        self._told = trouble

    def _all_is_well(self) -> None:
        """Have the next trouble told, whichever it is."""
        self._told, self._loss_told = "", False

    # --- the copy -----------------------------------------------------------------------------------

    async def _copy(self) -> None:
        """Write the copy whenever there is something new, and again where that failed."""
        await self._uncopied.wait()
        self._uncopied.clear()
        snapshot = self.snapshot
        if snapshot is None:
            return
        try:
            await asyncio.to_thread(self._write, snapshot)
            self._copy_failed = False
        except OSError as error:
            self._uncopied.set()
            if not self._copy_failed:
                log.warning(
                    "the copy of the keys, %s, cannot be written: %s; until it can, a restart without"
                    " Redis would know the keys of the copy before it",
                    *(self.copy, error.strerror),
                    extra={"event": "keys_copy_failed"},
                )
            self._copy_failed = True

    def _write(self, snapshot: Snapshot) -> None:
        head = {
            "version": 1,
            "generation": snapshot.generation,
            # Who begins with this copy may be of a version that understands what is left out here.
            "stamp": _UNSURE if snapshot.left_out else snapshot.stamp,
            "pepper": fingerprint(self.store.pepper),
        }
        lines = [json.dumps(head), *(each.text for each in snapshot.entries.values()), ""]
        self.copy.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(self.copy, "\n".join(lines).encode())

    def read_copy(self) -> None:
        """Begin with the copy; without one, or with that of another pepper, nothing is known. Blocks."""
        try:
            head, *lines = self.copy.read_text().splitlines()
            told = json.loads(head)
            if told["version"] != 1 or told["pepper"] != fingerprint(self.store.pepper):
                return
            entries, left_out = dict[str, Entry](), set[str]()
            for each in lines:
                try:
                    entry = Entry.read(each)
                    entries[entry.record.id] = entry
                except BadSettings:  # a newer version wrote it
                    left_out.add(id_of(each))
            _tell_of(left_out)
            stamp = _UNSURE if left_out else str(told["stamp"])
            self.snapshot = Snapshot(int(told["generation"]), stamp, entries, left_out)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is damaged"
            log.warning(
                "the copy of the keys, %s, cannot be used: %s",
                *(self.copy, why),
                extra={"event": "keys_copy_unusable"},
            )


def _tell_of(unreadable: Iterable[str]) -> None:
    for key_id in unreadable:
        log.error(
            "the record of the key %s is damaged, or has settings that this version does not know:"
            " nobody gets in with it here",
            key_id,
            extra={"event": "unreadable_key", "key": key_id},
        )


def _lost(ours: Mapping[str, Entry], part: Part) -> dict[str, Entry]:
    """Return what is known here, and missing or older in all that Redis has."""
    return {
        key_id: entry
        for key_id, entry in ours.items()
        if key_id not in part.unreadable
        and (key_id not in part.entries or _later(entry.record, part.entries[key_id].record))
    }


def _later(one: KeyRecord, other: KeyRecord) -> bool:
    """Whether the first is the state that holds, of two of one key."""
    if (one.revoked_s is None) != (other.revoked_s is None):
        return one.revoked_s is not None
    return (one.changed_s or 0.0) > (other.changed_s or 0.0)
