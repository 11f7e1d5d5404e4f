"""Who can have another process take this one's place, and why it may not work."""

from __future__ import annotations

import asyncio


class UpgradeFailed(Exception):
    """No other process took this gateway's place; it goes on serving. The message says why, for people."""


class UpgradeRefused(UpgradeFailed):
    """Nothing was tried, because it cannot work here."""


class Upgrades:
    """Who asks for another process to take over; all that ask while one is tried get its outcome."""

    def __init__(self) -> None:
        self.refusal = ""  # why it cannot work, for people, where that is known from the start
        self.wanted = asyncio.Event()
        self.under_way = False
        self._asking: list[asyncio.Future[str]] = []

    async def ask(self) -> str:
        """Have another process take over; return what came of it, for people.

        Raises:
            UpgradeRefused: it cannot work here.
            UpgradeFailed: no other process took over; this one goes on.
        """
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asking.append(outcome)
        self.wanted.set()
        return await outcome

    def came_to(self, outcome: str | UpgradeFailed) -> None:
        """Tell all that asked."""
        self.wanted.clear()  # who asked meanwhile gets this outcome
        asking, self._asking = self._asking, []
        for each in asking:
            if each.done():
                continue
            if isinstance(outcome, UpgradeFailed):
                each.set_exception(outcome)
            else:
                each.set_result(outcome)
