"""Every change that was asked for over the admin API: who, when, from where, before and after, and why.

    <state>/audit.jsonl, audit.1.jsonl    one JSON object a line, the newest last

What was refused for its role, or because something stood in its way, is here too. What was only tried
(`dry_run`) is not, nor what was no valid request. No entry has a secret: none is in what is shown of a
resource, and fields of a body that may have one are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from typing_extensions import TypedDict

from gateway.admin.endpoint import Actor, Listing
from gateway.observe.journal import Journal
from gateway.ops.moment import rfc3339
from gateway.ops.reloads import Reload

log = logging.getLogger("gateway.audit")

_KEPT: Final = 1000
_MOST_BYTES: Final = 4 * 1024 * 1024  # of each of the two files


class Entry(msgspec.Struct, frozen=True):
    """One change. `at` is seconds since the epoch; `before` and `after` are the resource's subject."""

    number: int
    at: float
    who: str
    role: str
    address: str
    action: str
    target: str
    order: dict[str, Any]
    reason: str
    status: int
    code: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditTold(TypedDict):
    """One change. `before` and `after` show what was changed; null where nothing can be shown."""

    id: str
    at: str
    who: str
    role: str
    address: str
    action: str
    target: str
    order: dict[str, Any]
    reason: str
    status: int
    code: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


_ENTRY: Final = msgspec.json.Decoder(Entry)


class Audit:
    """The newest entries, and all of them on disk, in a state folder. One owner."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder, "audit", _MOST_BYTES)
        self._kept: deque[Entry] = deque(maxlen=_KEPT)
        self._last, self._size = 0, -1
        self._catch_up()
        self._writing = asyncio.Lock()

    def _catch_up(self) -> None:
        """Read what the process before this one wrote since: its upgrade is its last entry."""
        if (size := self._journal.size) == self._size:
            return
        self._size = size
        known = {(each.number, each.at) for each in self._kept}
        more = [each for each in self._journal.read(_ENTRY) if (each.number, each.at) not in known]
        every = sorted([*self._kept, *more], key=lambda each: each.number)
        self._kept = deque(every, maxlen=_KEPT)
        self._last = every[-1].number if every else 0

    async def note(self, at: float, actor: Actor, told: Mapping[str, Any]) -> None:
        """Keep an entry; it is on disk when this returns, unless that cannot be written.

        `told` has the fields of an entry that are not about who and when.
        Cancel: it is kept, and may not be on disk.
        """
        self._catch_up()
        self._last += 1
        entry = Entry(
            number=self._last, at=at, who=actor.name, role=actor.role.value, address=actor.address,
            **told,
        )  # fmt: skip
        self._kept.append(entry)
        log.info(
            "%s asked for %s: %s", entry.who, f"{entry.action} {entry.target}".strip(),
            f"{entry.status} {entry.code}".strip(),
            extra={"event": "audit"},
        )  # fmt: skip
        async with self._writing:
            if await asyncio.to_thread(self._journal.append, msgspec.json.encode(entry)):
                self._size = self._journal.size

    def listing(self) -> Listing:
        """Return what is kept, the newest first."""
        self._catch_up()
        return Listing([*reversed(self._kept)], lambda each: str(each.number), line_told)


def line_told(line: Entry | Reload) -> dict[str, Any]:
    """Return a line of a journal as people read it (`AuditTold`, `settings.HistoryTold`): its number is its id."""
    told = msgspec.structs.asdict(line)
    return {"id": str(told.pop("number")), **told, "at": rfc3339(line.at)}
