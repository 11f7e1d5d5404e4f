"""One upgrade, on the side of the gateway that serves: another process takes its place, or nothing happens.

    allowed? -> start the new process -> it has its settings -> pause healing -> it serves
             -> accept no more, hand over what we launched -> finish our requests behind it, and end

A failure before the new process serves ends that process, and this one goes on. The order of messages is in
`messages`.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from gateway import __version__
from gateway.core.aio import periodic
from gateway.core.channel import Unanswered
from gateway.core.events import EventKind
from gateway.core.types import SERVING
from gateway.heal.handover import begun, unfinished, unproven
from gateway.ingress.listener import Listeners, Server
from gateway.launch import proc
from gateway.ops.upgrading import UpgradeFailed, UpgradeRefused
from gateway.process import Process
from gateway.store.group import Group
from gateway.upgrade.healing import Healing
from gateway.upgrade.messages import Go, Left
from gateway.upgrade.notify import notify
from gateway.upgrade.successor import Successor, parent_of_this, why_not

log = logging.getLogger("gateway.app")

_LOADED_S: Final = 60.0  # importing and reading settings takes 1 to 3 s, on a busy machine more
_READY_S: Final = 60.0  # at most 15 s of it are spent on waiting for backends: `found_serving`


class Replacement:
    """Carries out the upgrades that are asked for, until one succeeds. One task."""

    def __init__(
        self,
        process: Process,
        healing: Healing,
        listeners: Listeners,
        servers: tuple[Server, Server],
    ) -> None:
        self._process, self._healing = process, healing
        self._listeners, self._servers = listeners, servers
        self._handed_over = False

    async def run(self) -> None:
        """Wait for orders. Cancel: a new process that does not serve yet is ended."""
        await periodic(self._turn, every_s=0.0, name="upgrades")

    async def _turn(self) -> None:
        upgrades = self._process.upgrades
        await upgrades.wanted.wait()
        upgrades.wanted.clear()
        outcome: str | UpgradeFailed = UpgradeFailed("the gateway is stopping")
        upgrades.under_way = True
        try:
            outcome = await self._replace()
            log.info(outcome, extra={"event": "upgraded"})
        except UpgradeFailed as error:
            outcome = error
            process = self._process
            detail = (
                f"no upgrade, this process ({os.getpid()}, version {__version__}) goes on: {error}"
            )
            events = process.supervisor.events
            events.note(process.clock, EventKind.UPGRADE_FAILED, "", "failed", detail)
        finally:
            upgrades.under_way = self._handed_over  # an order that still comes here would be lost
            upgrades.came_to(outcome)
            if self._handed_over:
                self._process.succeeded.set()

    async def _replace(self) -> str:
        """Have another process take over; return the outcome, for people.

        Raises:
            UpgradeFailed: no process took over.
        """
        refused = self._process.upgrades.refusal or why_not(
            os.getpid(), parent_of_this(), os.environ
        )
        if refused is not None:
            raise UpgradeRefused(refused)
        log.info("upgrading", extra={"event": "upgrading"})
        group = self._process.group
        if group is not None and self._process.leads:
            await _others_first(group)
        listeners = self._listeners
        async with self._process.succession:
            successor = Successor.start(listeners.public, listeners.admin, kept=listeners.kept)
            try:
                missing = await self._until_ready(successor)
            except BaseException:
                successor.end()
                raise
            await self._hand_over(successor)
        outcome = (
            f"process {successor.pid} with version {successor.version} serves now; this one"
            f" ({os.getpid()}, version {__version__}) finishes what it has begun"
        )
        if missing:
            outcome += f". Not reached by the new process yet: {', '.join(missing)}"
        return outcome

    async def _until_ready(self, successor: Successor) -> list[str]:
        """Wait until the new process accepts connections; what follows cannot fail."""
        await successor.loaded(_LOADED_S)
        await self._healing.pause()
        try:
            serving = [each for each in self._process.table if each.phase in SERVING]
            measured = [each.id for each in serving if each.sample is not None]
            supervisor = self._process.supervisor
            units, tried = supervisor.units.values(), begun(supervisor)
            finishing = [each for each in self._process.finishing if proc.runs(*each)]
            launches = any(each.launcher.launches for each in units)
            records = str(self._process.started.state) if launches else ""
            more = unfinished(units), tried, unproven(units), finishing, records
            successor.go(Go([each.id for each in serving], measured, *more))
            missing = await successor.ready(_READY_S)
        except BaseException:
            self._healing.begin()
            raise
        return missing

    async def _hand_over(self, successor: Successor) -> None:
        """Hand over what only one process may have. The new one serves, so there is no way back."""
        process = self._process
        try:
            for server in self._servers:
                server.stop_accepting()
            process.ingress.leave()
            process.rollouts.hand_over()
            process.heir = proc.find(successor.pid)
            if process.heir is not None:
                await process.supervisor.hand_over(process.heir)
            notify(MAINPID=successor.pid)
        finally:
            successor.let_go(self._left())
            self._handed_over = True
            self._healing.follow(successor.tell(self._left))

    def _left(self) -> Left:
        adapters = self._process.adapters
        awaited = {name: frozenset(adapters.awaited(name)) for name in adapters.pools}
        return Left({name: found for name, found in awaited.items() if found})


async def _others_first(group: Group) -> None:
    """Have the other workers replaced before this one.

    Raises:
        UpgradeFailed: one was not replaced; those before it were.
    """
    try:
        why = await group.upgrade_others()
    except Unanswered as error:
        raise UpgradeFailed(f"the parent process: {error}") from None
    if why:
        raise UpgradeFailed(f"{why}; workers before it run the new version already")
