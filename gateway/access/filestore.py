"""The keys of one file, as a store: each change under the file's lock, comments stay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from gateway.access.changes import check_version, created, revoked, rotated, updated
from gateway.access.effective import Tiers
from gateway.access.keyerrors import NoSuchKey
from gateway.access.keyfile import edit, locked, put_in_place, read_pepper, read_records
from gateway.access.keystore import CLOCKS_DIFFER_S, CreatedKey
from gateway.access.records import KeyRecord, as_node, timestamp
from gateway.core.errors import ConfigError

_ON_ONE_LINE = ("models", "deny", "addresses", "previous", "limits", "metadata", "parameters")


@dataclass(frozen=True, slots=True)
class FileKeys:
    """See `KeyStore`. `tiers` tells those of the configuration in force, `wall` the time.

    A running gateway looks at the file each second, so a change holds within that.
    """

    path: Path
    tiers: Callable[[], Tiers]
    wall: Callable[[], float]

    async def list(self) -> Sequence[KeyRecord]:
        """See `KeyStore`."""
        return await asyncio.to_thread(read_records, self.path)

    async def get(self, key_id: str) -> KeyRecord:
        """See `KeyStore`."""
        return _of(await self.list(), key_id)

    async def create(self, settings: Mapping[str, object]) -> CreatedKey:
        """See `KeyStore`. The file and its pepper are made when missing."""

        def add() -> CreatedKey:
            with edit(self.path) as (nodes, records):
                taken = {record.id for record in records}
                pepper = read_pepper(self.path)
                made = created(settings, taken, pepper, self.tiers(), self.wall())
                nodes.append(_written(as_node(made.record)))
            return made

        return await asyncio.to_thread(add)

    async def update(
        self, key_id: str, changes: Mapping[str, object], if_match: str | None = None
    ) -> KeyRecord:
        """See `KeyStore`."""
        return await self._change(
            key_id, if_match, lambda it: updated(it, changes, self.tiers(), self.wall())
        )

    async def rotate(self, key_id: str, grace_s: float, if_match: str | None = None) -> CreatedKey:
        """See `KeyStore`."""
        made: list[CreatedKey] = []

        def with_another(record: KeyRecord) -> KeyRecord:
            made.append(rotated(record, grace_s, read_pepper(self.path), self.wall()))
            return made[0].record

        await self._change(key_id, if_match, with_another)
        return made[0]

    async def revoke(self, key_id: str, if_match: str | None = None) -> KeyRecord:
        """See `KeyStore`."""
        return await self._change(key_id, if_match, lambda it: revoked(it, self.wall()))

    async def note_use(self, at: Mapping[str, float]) -> None:
        """See `KeyStore`. It is kept beside the file, so that nobody takes it for a change of the keys."""

        def note() -> None:
            with locked(self.path):  # each worker notes its own
                latest = dict(_uses(self._used))
                for key_id, used_s in at.items():
                    before = latest.get(key_id, 0.0)
                    wrong = before > self.wall() + CLOCKS_DIFFER_S
                    latest[key_id] = used_s if wrong else max(used_s, before)
                told = {key_id: timestamp(used_s) for key_id, used_s in latest.items()}
                put_in_place(self._used, json.dumps(told, indent=1).encode() + b"\n")

        try:
            await asyncio.to_thread(note)
        except OSError as error:
            raise ConfigError([f"{self._used}: error: {error.strerror}"]) from error

    async def last_use(self, key_id: str) -> float | None:
        """See `KeyStore`."""
        return (await self.uses()).get(key_id)

    async def uses(self) -> Mapping[str, float]:
        """See `KeyStore`."""
        return await asyncio.to_thread(_uses, self._used)

    @property
    def _used(self) -> Path:
        return self.path.with_name(self.path.name + ".used")

    async def _change(
        self, key_id: str, if_match: str | None, change: Callable[[KeyRecord], KeyRecord]
    ) -> KeyRecord:
        def under_lock() -> KeyRecord:
            with edit(self.path) as (nodes, records):
                record = _of(records, key_id)
                check_version(record, if_match)
                after = change(record)
                _rewrite(nodes[records.index(record)], record, after)
            return after

        return await asyncio.to_thread(under_lock)


def _of(records: Sequence[KeyRecord], key_id: str) -> KeyRecord:
    for record in records:
        if record.id == key_id:
            return record
    raise NoSuchKey(f"there is no key with the id {key_id}")


def _uses(path: Path) -> dict[str, float]:
    """Return what was noted; nothing for a file that is missing or damaged."""
    try:
        told = json.loads(path.read_bytes())
        return {str(key_id): datetime.fromisoformat(at).timestamp() for key_id, at in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _rewrite(node: CommentedMap, before: KeyRecord, after: KeyRecord) -> None:
    """Change what differs in the file, and leave the rest as somebody wrote it."""
    old, new = _written(as_node(before)), _written(as_node(after))
    for name in old:
        if name not in new:
            node.pop(name, None)
            if node.merge:  # another mapping (`<<`) may have it
                node[name] = None
    for name, value in new.items():
        # A tenant that is not written is the name, also another one.
        if old.get(name) != value or (name == "tenant" and name not in node):
            node[name] = value


def _written(node: Mapping[str, Any]) -> CommentedMap:
    written = CommentedMap(node)
    for name in _ON_ONE_LINE:
        if name in written:
            value = written[name]
            short = CommentedMap(value) if isinstance(value, Mapping) else CommentedSeq(value)
            short.fa.set_flow_style()
            written[name] = short
    return written
