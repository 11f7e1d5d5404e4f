"""Have Redis count ledgers, and learn from it what all gateways used this month.

    ask what is counted --> send the lines that Redis lacks --> earlier ones, too: leave a mark --> all read the month

A Redis that lost its data, or came back with older data, gets again what the ledgers still have. A gateway that
sent such lines again, or that had lost its connection, leaves a mark there. Each gateway that finds a new mark reads
what all used. So limits of days and months go on from all ledgers together, whichever is sent last. A limit that is
new has it read, too: nobody counted for it before.
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
_SUMS_OF_A_TURN: Final = 1000  # for so many that it took, a limit that is new waits one turn more


class Telling:
    """One owner, one event loop. `spent` is what all gateways used this month; None: not known yet."""

    def __init__(self, shared: SharedUsage, today: Callable[[], str]) -> None:
        self.spent: Spent | None = None
        # Called in each turn after Redis answered and before lines are sent to it. May raise StoreUnavailable.
        self.on_telling: list[Callable[[], Awaitable[None]]] = []
        self.on_learnt: list[Callable[[], None]] = []  # after `spent` changed
        self._shared = shared
        self._today = today
        self._counted = 0  # lines of this process's ledger, when Redis was asked last
        self._began = False  # this process may have sent lines
        self._lacked = False  # Redis lacked earlier lines, and no mark says so yet
        self._wanted = False  # some limit counts over a day or a month
        self._is_new = False  # such a limit, since the month was read
        # The mark in Redis when this gateway last read the month's usage.
        self._mark: str | None = None
        self._turns = 0
        self._learns_from = 0  # the first turn that may read the month again
        self._new_from = 0  # the same, for a limit that is new

    async def turn(self, journal: UsageJournal) -> None:
        """Send the lines of this process's ledger that Redis lacks; read the month again if there is a new mark."""
        try:
            mark = await self._catch_up(journal)
        except StoreUnavailable:
            self._lacked = True  # the Redis that answers next may lack the last moments of this one
            return
        finally:
            self._turns += 1
        due = mark != self._mark and self._turns >= self._learns_from
        due |= self._is_new and self._turns >= self._new_from
        if self._wanted and mark is not None and due:
            self._mark, self._is_new = mark, False  # who wants it meanwhile has it read once more
            try:
                read = await self._learn()
            except StoreUnavailable:
                self._mark, read = None, 0
            self._learns_from = self._turns + _LEARN_TURNS
            self._new_from = self._learns_from + read // _SUMS_OF_A_TURN

    async def tell_owed(self) -> None:
        """Have limits tell Redis what they owe it, which needs no ledger.

        Raises:
            StoreUnavailable: something may be lost.
        """
        for listener in self.on_telling:
            await listener()

    def relearn(self) -> None:
        """Read the month again in one of the next turns: Redis lost a part of it."""
        self._mark = None

    def count_for_another(self) -> None:
        """Read the month before long: a limit is new, for which nobody has counted."""
        self._wanted = self._is_new = True

    async def _catch_up(self, journal: UsageJournal) -> str | None:
        """Send what Redis lacks; return its mark, or None if there is more to send."""
        counted, mark = await self._shared.counted(journal.id)
        if not self._began and counted > journal.found:
            # The disk lost lines of this ledger, whose numbers will be used again.
            await self._shared.go_back(journal.id, counted, journal.found)
            counted = journal.found
        self._began = True
        await self.tell_owed()
        self._lacked |= counted < max(self._counted, journal.found)
        self._counted, whole = await self._send(journal, counted)
        if whole and (self._lacked or self._turns % _LOOK_TURNS == 0):
            whole = await self._send_left_behind(journal)
        if not whole:
            return None
        if self._lacked:
            mark = await self._shared.leave_mark()
            self._lacked = False
        return mark

    async def _send(self, journal: UsageJournal, counted: int) -> tuple[int, bool]:
        """Send the lines behind the last counted one; return the last one counted by now, and whether that is all."""
        for _ in range(_CALLS):
            if counted >= journal.last:
                return counted, True
            lines = await asyncio.to_thread(journal.after, counted, _BATCH)
            if not lines:
                return counted, True
            before, counted = counted, await self._shared.count(journal.id, counted, lines)
            self._lacked |= counted < before
        return counted, counted >= journal.last

    async def _send_left_behind(self, journal: UsageJournal) -> bool:
        """Send the ledgers of processes that are gone; return whether that is all.

        A process that begins meanwhile takes another ledger.
        """
        found, whole = await asyncio.to_thread(journal.left_behind), True
        with contextlib.ExitStack() as taken:
            for left in found:
                taken.callback(left.close)
            for left in found:
                counted, _ = await self._shared.counted(left.id)
                self._lacked |= counted < left.last
                _, complete = await self._send(left, counted)
                whole &= complete
        return whole

    async def _learn(self) -> int:
        """Read what all gateways used this month; return how many sums that took."""
        today, found, read = self._today(), dict[Place, Sums](), 0
        for day in days_between(today[: len("2026-11-")] + "01", today):
            used = await self._shared.read([day])
            read += len(used)
            for place, each in folded(used, today).items():
                (found.get(place) or found.setdefault(place, Sums())).include(each)
        self.spent = Spent(found)
        for listener in self.on_learnt:
            listener()
        return read
