"""Usage as a list with pages: further pages show what was read and added up for the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.bounds import MOST_ROWS
from gateway.usage.accounts import Accounts
from gateway.usage.report import UsageRow, rows

_KEPT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class UsageList:
    """All rows of a question; `complete` as in `Used`."""

    asked: Hashable
    rows: Sequence[UsageRow]
    complete: bool


@dataclass(slots=True)
class UsageLists:
    """Keeps the last list for a minute, if it has more than one page."""

    accounts: Accounts
    _kept: UsageList | None = None

    async def of(
        self, days: Sequence[str], by: Sequence[str], only: Mapping[str, str], *, first_page: bool
    ) -> UsageList:
        """Return what was used on some days; see `report.rows`."""
        asked = days[0], days[-1], frozenset(by), frozenset(only.items())
        kept = self._kept
        if kept is not None and kept.asked == asked and not first_page:
            return kept
        used = await self.accounts.read(days)
        found = await asyncio.to_thread(rows, used, by, only)  # of a large month that takes seconds
        made = UsageList(asked, found, used.complete)
        if len(found) > MOST_ROWS:
            self._kept = made
            asyncio.get_running_loop().call_later(_KEPT_S, self._forget, made)
        return made

    def _forget(self, made: UsageList) -> None:
        if self._kept is made:
            self._kept = None
