"""Has Redis count ledgers, and learns from it what all gateways used this month.

    counted? --> tell the lines that it lacks --> it lacked lines of before: leave a mark --> all read the month

A Redis that lost its data, or came back with older data, is told again what the ledgers still have. Whoever told
it again, or had lost it, leaves a mark there, and each gateway that finds a new mark reads what all used. So limits
of days and months go on from what all ledgers together know, whoever is the last to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.store.shared import StoreUnavailable
from gateway.usage.entries import Place, Sums
from gateway.usage.journal import UsageJournal
from gateway.usage.report import days_between
from gateway.usage.shared import SharedUsage
from gateway.usage.spent import Spent, folded

_BATCH: Final = 512  # lines that Redis counts with one call
_CALLS: Final = 16  # for one ledger in one turn
_LOOK_TURNS: Final = 60  # between looks for ledgers that nobody writes any more
_LEARN_TURNS: Final = 5  # between two readings of the month


class Telling:
    """One owner, one event loop. `spent` is what all gateways used this month; None: not known yet."""

    def __init__(self, shared: SharedUsage, today: Callable[[], str]) -> None:
        self.spent: Spent | None = None
        self.wanted = False  # some limit counts over a day or a month
        # Called in each turn after Redis answered and before lines are sent to it. May raise StoreUnavailable.
        self.on_telling: list[Callable[[], Awaitable[None]]] = []
        self.on_learnt: list[Callable[[], None]] = []  # after `spent` changed
        self._shared = shared
        self._today = today
        self._counted = 0  # lines of this process's ledger, when Redis was asked last
        self._began = False  # this process may have told lines
        self._lacked = False  # Redis lacked something of before, and no mark says so yet
        # The mark in Redis when this gateway last read the month's usage.
        self._mark: str | None = None
        self._turns = 0
        self._learns_from = 0  # that turn

    async def turn(self, journal: UsageJournal) -> None:
        """Tell the lines of this process's ledger that Redis lacks, and learn what that changes."""
        try:
            mark = await self._catch_up(journal)
        except StoreUnavailable:
            self._lacked = True  # the one that answers next may lack the last moments of this one
            return
        finally:
            self._turns += 1
        if self.wanted and mark not in (None, self._mark) and self._turns >= self._learns_from:
            self._learns_from = self._turns + _LEARN_TURNS
            with contextlib.suppress(StoreUnavailable):
                await self._learn()
                self._mark = mark

    async def tell_owed(self) -> None:
        """Have limits tell what they owe, which needs no ledger.

        Raises:
            StoreUnavailable: something may be lost.
        """
        for told in self.on_telling:
            await told()

    def relearn(self) -> None:
        """Read the month again, in one of the next turns: limits have lost something of it."""
        self._mark = None

    async def _catch_up(self, journal: UsageJournal) -> str | None:
        """Tell what Redis lacks; returns its mark once that is all."""
        counted, mark = await self._shared.counted(journal.id)
        if not self._began and counted > journal.found:
            # Its disk lost lines, whose numbers are used again.
            await self._shared.go_back(journal.id, counted, journal.found)
            counted = journal.found
        self._began = True
        await self.tell_owed()
        self._lacked |= counted < max(self._counted, journal.found)
        self._counted, whole = await self._tell(journal, counted)
        if whole and (self._lacked or self._turns % _LOOK_TURNS == 0):
            whole = await self._tell_left_behind(journal)
        if not whole:
            return None
        if self._lacked:
            mark = await self._shared.leave_mark()
            self._lacked = False
        return mark

    async def _tell(self, journal: UsageJournal, counted: int) -> tuple[int, bool]:
        """Tell lines that follow on what is counted; returns what is counted by now, and whether that is all."""
        for _ in range(_CALLS):
            if counted >= journal.last:
                return counted, True
            lines = await asyncio.to_thread(journal.after, counted, _BATCH)
            if not lines:
                return counted, True
            counted = await self._shared.count(journal.id, lines)
        return counted, counted >= journal.last

    async def _tell_left_behind(self, journal: UsageJournal) -> bool:
        """Tell what processes wrote that are gone; one that begins meanwhile takes another ledger.

        Returns whether that is all.
        """
        found, whole = await asyncio.to_thread(journal.left_behind), True
        with contextlib.ExitStack() as taken:
            for left in found:
                taken.callback(left.close)
            for left in found:
                counted, _ = await self._shared.counted(left.id)
                self._lacked |= counted < left.last
                _, told = await self._tell(left, counted)
                whole &= told
        return whole

    async def _learn(self) -> None:
        today, found = self._today(), dict[Place, Sums]()
        for day in days_between(today[: len("2026-11-")] + "01", today):
            for place, each in folded(await self._shared.read([day]), today).items():
                (found.get(place) or found.setdefault(place, Sums())).include(each)
        self.spent = Spent(found)
        for told in self.on_learnt:
            told()
