"""What operators order: take a backend out, put it back, restart it, hold restarts.

Every order is idempotent, and can be asked about first (`dry_run`): how many requests it touches,
and whether it would take out the last backend that serves its pool, which is refused without `force`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from gateway.config.units import format_duration
from gateway.core.aio import Clock
from gateway.core.events import EventKind
from gateway.core.types import SERVING
from gateway.heal.elsewhere import left_alone
from gateway.heal.intent import Mark
from gateway.heal.overrides import Override
from gateway.heal.states import Suspect
from gateway.heal.supervisor import Supervisor
from gateway.pools.health import Order
from gateway.pools.table import Backend, PoolTable


class Verb(Enum):
    """What can be ordered of one backend."""

    DRAIN = "drain"  # no new work; what it carries finishes
    UNDRAIN = "undrain"  # back into service; clears a suspension too
    RESTART = "restart"  # drain, stop, start, verify


class OrderRefused(Exception):
    """An order that is not carried out; the message is for people. `code` is the machine's word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Touched:
    """What an order does, or would do."""

    backend_id: str
    verb: Verb
    changes: bool  # False: it is so already
    requests: int  # in flight on the backend, of all workers and gateways
    # Age of the oldest of them; None: there is none, or another worker or gateway has some.
    oldest_s: float | None
    last: bool  # no other backend of the pool serves, but for those that are about to be restarted
    sentence: str


@dataclass(slots=True)
class Orders:
    """Carries operators' orders out.

    Of a backend, `carried` tells when the oldest request of this worker came, and how many other workers and gateways
    have there.
    """

    table: PoolTable
    supervisor: Supervisor
    clock: Clock
    carried: Callable[[str], tuple[float | None, int]]

    async def give(
        self,
        backend_id: str,
        verb: Verb,
        *,
        dry_run: bool = False,
        force: bool = False,
        why: str = "",
    ) -> Touched:
        """Carry out an order, or with `dry_run` say what it would do.

        Raises:
            KeyError: no such backend (404).
            OrderRefused: it takes out the last one, or nobody can restart it (409).
        """
        backend = self.table.get(backend_id)
        if backend is None:
            raise KeyError(backend_id)
        touched = self._touched(backend, verb, force=force)
        if touched.last and touched.changes and not (force or dry_run):
            raise OrderRefused(
                "last_backend",
                f"{backend_id} is the last backend that serves {backend.pool}; without it, requests wait"
                " or are refused. Use `--force` to proceed.",
            )
        if dry_run or not touched.changes:
            return touched
        self._carry_out(backend_id, verb, why)
        if not self.supervisor.intent.saved:
            warning = "This is not saved, and ends with this gateway: see its log."
            touched = replace(touched, sentence=f"{touched.sentence} {warning}")
        return touched

    def _carry_out(self, backend_id: str, verb: Verb, why: str) -> None:
        match verb:
            case Verb.DRAIN:
                self.table.order(backend_id, Order.DRAIN)
                self.supervisor.intent.say(Mark.DRAINED, backend_id, on=True, why=why)
            case Verb.UNDRAIN:
                self.table.order(backend_id, Order.RESUME)
                self.supervisor.intent.say(Mark.DRAINED, backend_id, on=False)
                self.supervisor.put_back(backend_id)
            case Verb.RESTART:
                self.supervisor.restart(backend_id, why)
        self._tell(backend_id, verb.value, why)

    async def hold(self, pool: str | None, for_s: float | None, why: str = "") -> None:
        """Stop automatic restarts of a pool, or (None) of all, for a time or (None) until lifted."""
        await self.supervisor.intent.hold(pool, for_s, why)
        how_long = "until lifted" if for_s is None else f"for {format_duration(for_s)}"
        self._tell(pool or "", "hold", f"automatic restarts are on hold {how_long}. {why}".strip())

    async def lift(self, pool: str | None) -> None:
        """End a hold."""
        await self.supervisor.intent.lift(pool)
        self._tell(pool or "", "lift", "automatic restarts are allowed again")

    async def log(self, backend_id: str, max_bytes: int) -> str:
        """Return the end of a backend's log.

        Raises:
            KeyError: no such backend.
            OrderRefused: nobody here can read it.
        """
        if self.table.get(backend_id) is None:
            raise KeyError(backend_id)
        unit = self.supervisor.units.get(backend_id)
        if unit is None:
            raise OrderRefused(
                "not_supervised", _not_supervised(backend_id, "its log is not available here")
            )
        return await unit.launcher.log(max_bytes)

    def drop_remedies(self, backend_id: str, *, dry_run: bool) -> Override | None:
        """Take back what remedies changed of a backend's command line, from its next start on.

        Returns what was dropped, or with `dry_run` would be; None: nothing was changed.

        Raises:
            KeyError: no such backend.
        """
        if self.table.get(backend_id) is None:
            raise KeyError(backend_id)
        if dry_run:
            return self.supervisor.overrides.kept.get(backend_id)
        gone = self.supervisor.overrides.drop(backend_id)
        if gone is not None:
            detail = f"{gone.told()} was dropped by an operator; its next start is as configured"
            events = self.supervisor.events
            events.note(self.clock, EventKind.REMEDY, backend_id, "dropped", detail)
        return gone

    def _touched(self, backend: Backend, verb: Verb, *, force: bool) -> Touched:
        """Return what an order touches; with `force` a restart that is under way begins anew."""
        now = self.clock.now()
        if verb is Verb.RESTART and backend.id not in self.supervisor.units:
            raise OrderRefused(
                "not_supervised", _not_supervised(backend.id, "this gateway cannot restart it")
            )
        serves = backend.phase in SERVING
        units = self.supervisor.units.values()
        going = {backend.id, *(unit.id for unit in units if unit.ordered is not None)}
        pool = self.table.backends(backend.pool)
        others = any(each.phase in SERVING for each in pool if each.id not in going)
        changes, state = self._state(backend, verb, serves=serves, force=force)
        last = verb is not Verb.UNDRAIN and serves and not others
        if last and changes and not force:
            state += f"; it is the last backend that serves {backend.pool}, so this needs `--force`"
        oldest_at, elsewhere = self.carried(backend.id)
        requests = backend.in_flight + elsewhere
        oldest_s = None if oldest_at is None or elsewhere else now - oldest_at
        carries = f"{requests} request{'' if requests == 1 else 's'} in flight"
        age = "" if oldest_s is None else f", the oldest for {oldest_s:.0f} s"
        sentence = f"{backend.id} {state}; {carries}{age}."
        return Touched(backend.id, verb, changes, requests, oldest_s, last, sentence)

    def _state(
        self, backend: Backend, verb: Verb, *, serves: bool, force: bool
    ) -> tuple[bool, str]:
        """Return whether an order changes anything, and what it does or why it does not."""
        unit = self.supervisor.units.get(backend.id)
        held = backend.health.held is not None
        suspended = unit is not None and unit.suspended
        doubted = unit is not None and isinstance(unit.state, Suspect)
        under_way = unit is not None and (unit.under_way or left_alone(backend) is not None)
        match verb:
            case Verb.DRAIN:
                changes, does, already = not held, "takes no new work", "already takes no new work"
            case Verb.RESTART:
                changes = force or not under_way
                does = "is drained and restarted"
                already = "is already restarting, and `--force` begins that anew"
            case Verb.UNDRAIN:
                changes, does = held or suspended or doubted, "goes back into service"
                already = "is already in service; nothing changes"
                if under_way:
                    already = "is restarting, and undrain does not stop that; nothing changes"
                    does += " when its restart is done"
                elif doubted:
                    does += f", though {backend.health.detail}; it goes on being tested"
                elif suspended:
                    does += " once it answers; automatic restarts of it are allowed again"
                elif not serves:
                    already = (
                        f"is not drained, but {backend.phase.value}: {backend.health.detail};"
                        " undrain does not start it, `vllm-gateway restart` does"
                    )
                return changes, does if changes else already
        return changes, does if changes else f"{already}; nothing changes"

    def _tell(self, backend_id: str, label: str, detail: str) -> None:
        kind = EventKind.HOLD if label in ("hold", "lift") else EventKind.OPERATOR
        told = detail or f"{label} ordered by an operator"
        self.supervisor.events.note(self.clock, kind, backend_id, label, told)


def _not_supervised(backend_id: str, consequence: str) -> str:
    return (
        f"{backend_id} has neither `launch` nor `restart` in its settings, so {consequence}."
        " Add one of them and reload."
    )
