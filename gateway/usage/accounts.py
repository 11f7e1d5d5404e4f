"""`Accounts`: count what every request used, once; write it to the ledger and tell Redis, off the request's path.

    the observe ledger settles --> `posted`: entries are counted here, and wait
    `run`, once a second       --> a thread writes them --> Redis counts what it has not counted yet

Settled requests are written within a second or so; a gateway that is killed loses those that still wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final

from gateway.core.aio import Clock, periodic
from gateway.core.limits import Judged, Limit
from gateway.core.types import RequestRecord
from gateway.store.scripts import Scripted
from gateway.store.shared import StoreUnavailable
from gateway.usage.entries import DAY_S, Entry, Place, Sums, Used, day_told, entry_of, summed
from gateway.usage.journal import UsageJournal, every_entry
from gateway.usage.shared import SharedUsage
from gateway.usage.spent import Spent, folded
from gateway.usage.telling import Telling

log = logging.getLogger("gateway.usage")

_EVERY_S: Final = 1.0
_LEARN_TURNS: Final = 30  # after an upgrade, the process that leaves writes what it still uses
_MOST_WAITING: Final = 65_536  # entries, while the disk takes none
_MOST_TENANTS: Final = 1000  # that have metrics of their own
_MOST_PLACES: Final = 100_000  # in memory; about 300 bytes each
_OTHER: Final = "_other"


class Accounts:
    """One owner, one event loop. `folder` None: nothing is written, and Redis is told nothing."""

    def __init__(
        self,
        clock: Clock,
        link: Scripted | None,
        folder: Path | None,
        most_bytes: int,
    ) -> None:
        # Usage counted by this process, plus this month's usage from the ledgers. If there are ledgers, all earlier
        # days of the month are one entry.
        self.sums: dict[Place, Sums] = {}
        self._spent = Spent()  # index over `sums`
        self._day = day_told(clock.wall())
        self._tenants: dict[str, Sums] = {}  # of this process
        # Where the requests of a place are counted: by place and by tenant.
        self._cells: dict[Place, tuple[Sums, Sums]] = {}
        self._clock = clock
        self._shared = None if link is None or folder is None else SharedUsage(link)
        self.telling = None if self._shared is None else Telling(self._shared, self.today)
        self._folder = folder
        self._most_bytes = most_bytes
        self._waiting: deque[Entry] = deque()
        self._journal: UsageJournal | None = None
        self._writing = asyncio.Lock()
        self._appending: tuple[asyncio.Future[None], int] | None = None  # how many lines
        self._logged = False  # that the ledger cannot be written
        self._counted = True  # what all ledgers had when this process took its own
        # The limits that asked what was used before. `_wanted`: a new one has asked since the last `_learn`.
        self._asked: set[tuple[Limit, str]] = set()
        self._wanted = False
        self._turns = 0
        self.on_learnt: list[
            Callable[[], None]
        ] = []  # called when usage of other processes was counted

    def posted(self, records: Sequence[RequestRecord]) -> None:
        """Count requests that ended: each exactly once, as its record is settled once."""
        wall_ahead = self._clock.wall() - self._clock.now()
        entries: list[Entry] = []
        for record in records:
            if record.caller is None:
                continue
            at = wall_ahead + (record.ended_at or record.received_at)
            entry = entry_of(record, at)
            if entry is not None:
                entries.append(entry)
        for place, more in summed(entries).items():
            for sums in self._cells.get(place) or self._cell(place):
                sums.include(more)
        if self._folder is not None:
            self._waiting.extend(entries[: _MOST_WAITING - len(self._waiting)])

    def _cell(self, place: Place) -> tuple[Sums, Sums]:
        """Return where the requests of a place are counted from now on: by place and by tenant."""
        tenant = place[1]
        if tenant not in self._tenants and len(self._tenants) >= _MOST_TENANTS:
            tenant = _OTHER
        cell = self._sums_of(place, tenant), self._tenants.setdefault(tenant, Sums())
        self._cells[place] = cell
        return cell

    def _sums_of(self, place: Place, tenant: str) -> Sums:
        """Return the sums of a place; when there are too many, those of all other keys of its tenant."""
        if place not in self.sums and len(self.sums) >= _MOST_PLACES:
            place = place[0], tenant, _OTHER, *place[3:]
        if place not in self.sums:
            self.sums[place] = Sums()
            self._spent.note(place, self.sums[place])
        return self.sums[place]

    @property
    def by_tenant(self) -> dict[tuple[str, ...], float]:
        """Tokens that this process counted, by tenant and kind."""
        return {
            (tenant, kind): getattr(each, kind)
            for tenant, each in self._tenants.items()
            for kind in ("input", "cached", "output")
        }

    async def open(self) -> None:
        """Count what the ledgers of the state folder have, if there are any."""
        if self._folder is not None and self._folder.exists():
            await self._open(self._folder)

    async def _open(self, folder: Path) -> None:
        """Take a ledger, write what waits, and count what all ledgers have."""
        try:
            self._journal = await asyncio.to_thread(UsageJournal, folder, self._most_bytes)
        except OSError as error:
            self._cannot_write(error)
            return
        await self._count_anew(self._journal)

    async def run(self) -> None:
        """Write the ledger and tell Redis, until cancelled."""
        await periodic(self.turn, every_s=_EVERY_S, name="usage")

    async def turn(self) -> None:
        """Write what waits, and have Redis count what it has not counted yet."""
        today, yesterday = self.today(), day_told(self._clock.wall() - DAY_S)
        # What was dropped as of another month may count again.
        leapt = self._day not in (today, yesterday)
        again = not self._counted and self._turns % _LEARN_TURNS == 0
        if self._journal is not None and (leapt or again):
            await self._count_anew(self._journal)
        elif self._day != today:
            self._fold(today)
        if self._journal is None and self._waiting and self._folder is not None:
            await self._open(self._folder)
        if self._journal is None:
            if self.telling is not None:
                with contextlib.suppress(StoreUnavailable):
                    await self.telling.tell_owed()
            return
        async with self._writing:
            await self._write_all(self._journal)
        if self.telling is not None:
            await self.telling.turn(self._journal)
        elif self._counted and (self._wanted or (self._asked and self._turns % _LEARN_TURNS == 0)):
            await self._learn(self._journal)
        self._turns += 1

    async def _learn(self, journal: UsageJournal) -> None:
        """Count what other processes of this state folder used meanwhile: for new limits, and for all now and then."""
        try:
            found = await asyncio.to_thread(lambda: summed(journal.unread()))
        except OSError:
            return  # the next turn tries again
        if not found and not self._wanted:
            return
        self._wanted = False
        self._include(found)
        for listener in self.on_learnt:
            listener()

    async def _count_anew(self, journal: UsageJournal) -> None:
        """Count what all ledgers have: at the start, or when the clock has leapt.

        If some cannot be read, this process counts what it used itself, and tries again later.
        """
        async with self._writing:  # so that nothing counts twice
            await self._write_all(journal)
            try:
                found = await asyncio.to_thread(lambda: summed(journal.unread(anew=True)))
            except OSError as error:
                self._cannot_read(error)
            else:
                self.sums, self._counted = found, True
                self._include(summed(self._waiting))
            self._fold(self.today())
        if self.telling is not None:
            self.telling.relearn()
        for listener in self.on_learnt:
            listener()

    def _include(self, found: Mapping[Place, Sums]) -> None:
        for place, more in found.items():
            self._sums_of(place, place[1]).include(more)

    def _fold(self, today: str) -> None:
        """Keep what limits need. Without a ledger, keep the newest days instead, for `read`."""
        self.sums = _newest(self.sums) if self._folder is None else folded(self.sums, today)
        self._spent, self._day = Spent(self.sums), today
        self._cells.clear()

    async def close(self) -> None:
        """Write what still waits, tell Redis, and let go of the ledger."""
        await self.turn()
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    async def _write_all(self, journal: UsageJournal) -> None:
        """Write all that waits now. Cancel: a thread goes on; whoever writes next waits for it first."""
        # What comes meanwhile is for the next turn: under load some always does.
        left = len(self._waiting)
        while left:
            if self._appending is None:
                batch = [*islice(self._waiting, left)]
                for n, each in enumerate(batch, journal.last + 1):
                    each.n = n
                loop = asyncio.get_running_loop()
                self._appending = loop.run_in_executor(None, journal.append, batch), len(batch)
            appended, count = self._appending
            await asyncio.wait([appended])
            self._appending = None
            try:
                appended.result()
            except OSError as error:
                self._cannot_write(error)
                return
            for _ in range(count):
                self._waiting.popleft()
            left -= count
            self._logged = False

    async def read(self, days: Sequence[str]) -> Used:
        """Return what was used on some days: at all gateways, if they share a Redis that answers.

        Otherwise at all processes of this state folder.
        """
        if self._shared is not None:
            try:
                return Used(await self._shared.read(days))
            except StoreUnavailable:
                pass
        found: Mapping[Place, Sums] = self.sums
        complete = self._shared is None
        if self._folder is not None:
            try:
                found = await self._written(self._folder)
            except OSError:
                complete = False
        wanted = frozenset(days)
        used = {place: each for place, each in found.items() if place[0] in wanted}
        return Used(used, complete=complete)

    async def _written(self, folder: Path) -> Mapping[Place, Sums]:
        """Return what the ledgers have, and what still waits to be written there."""
        async with self._writing:  # so that nothing counts twice
            if self._journal is not None:
                await self._write_all(self._journal)
            waiting = [*self._waiting]
            return await asyncio.to_thread(lambda: summed(chain(every_entry(folder), waiting)))

    def spent(self, rule: Judged, key_id: str) -> float:
        """Return what is known to be used of a rule that counts over a day or a month."""
        today, telling = self.today(), self.telling
        asks = rule.limit, key_id
        if asks not in self._asked:
            if len(self._asked) >= _MOST_PLACES:  # most are not in force any more
                self._asked.clear()
            self._asked.add(asks)
            self._wanted = True
            if telling is not None:
                telling.count_for_another()
        own = self._spent.of(rule, key_id, today)
        if telling is None or telling.spent is None:
            return own
        return max(own, telling.spent.of(rule, key_id, today))

    def today(self) -> str:
        """Return the day, in UTC."""
        return day_told(self._clock.wall())

    def _cannot_write(self, error: OSError) -> None:
        if not self._logged:
            log.warning(
                "cannot write the ledger of usage in %s: %s; it waits in memory, up to %d requests",
                self._folder, error.strerror or error, _MOST_WAITING,
                extra={"event": "usage_unwritten"},
            )  # fmt: skip
        self._logged = True

    def _cannot_read(self, error: OSError) -> None:
        if self._counted:
            log.warning(
                "cannot read the ledgers of usage in %s: %s: %s; limits of days and months do not count what they have",
                self._folder, error.filename, error.strerror,
                extra={"event": "usage_uncounted"},
            )  # fmt: skip
        self._counted = False


def _newest(sums: Mapping[Place, Sums]) -> dict[Place, Sums]:
    """Return the sums of the newest days, at most half of what may be kept: the rest is for the next days."""
    newest = sorted(sums.items(), key=lambda each: each[0][0], reverse=True)
    return dict(newest[: _MOST_PLACES // 2])
