"""Look at supervised backends: what runs, what it says, how fast it works, whether its engine lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.aio import Clock
from gateway.core.errors import BackendDown
from gateway.core.types import Outcome, Phase, RequestRecord
from gateway.heal.autopsy import Autopsy
from gateway.heal.charge import Charge, Timing
from gateway.heal.healing import Cause, Sign
from gateway.heal.signs import Errors, Memory, Pace
from gateway.launch.launcher import Incarnation, LaunchError, Runs, Seen
from gateway.launch.process import ProcessLauncher
from gateway.pools.health import Tending
from gateway.pools.table import PoolTable
from gateway.watch.canary import canary
from gateway.watch.fetch import FetchError

_LOOK_S: Final = 30.0
_CANARIES: Final = 2
_WITH_WORK: Final = 0.5  # of the patience with an idle one
_MEMORY_EVERY_S: Final = 10.0  # it walks through /proc
_FAILED: Final = frozenset({Outcome.BACKEND_ERROR, Outcome.BACKEND_TIMEOUT, Outcome.STREAM_BROKEN})
_COUNTED: Final = _FAILED | {Outcome.OK}


@dataclass(slots=True)
class Lookout:
    """Looks at charges, and notes what it sees in them. Nothing here raises."""

    table: PoolTable
    clock: Clock
    autopsy: Autopsy
    timing: Timing = Timing()

    async def look(self, charge: Charge) -> None:
        """See what runs, hear what it says, and have examined what ended."""
        launcher, orders = charge.launcher, charge.orders
        lines: tuple[str, ...] = ()
        try:
            async with asyncio.timeout(_LOOK_S):
                seen = await launcher.look()
                if isinstance(launcher, ProcessLauncher):
                    lines = await launcher.new_lines()
                    await self._weigh(charge, launcher)
        except (LaunchError, TimeoutError) as error:
            charge.seen, charge.trouble = None, str(error) or "looking at it took too long"
            return
        if charge.orders != orders:
            return  # a server was started meanwhile
        now = self.clock.now()
        if charge.first_seen_at is None or seen.incarnation != charge.incarnation:
            self._new_incarnation(charge, seen, now)
        self._learn(charge, lines, now)
        charge.ran |= seen.running
        if not charge.ran:
            charge.examined = seen.incarnation  # it ended before our time
        ended = seen.state is Runs.ENDED and seen.incarnation is not None
        if ended and charge.examined != seen.incarnation and not charge.restarting:
            await self.autopsy.examine(charge, seen)
            if charge.orders != orders:
                return
        if charge.seen is None:
            charge.trouble = ""  # it can be looked at again
        charge.seen = seen  # last: what is done about an end has to find its remedy

    def _new_incarnation(self, charge: Charge, seen: Seen, now: float) -> None:
        charge.incarnation, charge.first_seen_at = seen.incarnation, now
        charge.pace, charge.errors, charge.memory = Pace(), Errors(), Memory()

    def _learn(self, charge: Charge, lines: Sequence[str], now: float) -> None:
        """Take in what its log says, and what the pool table knows by now."""
        if charge.watch is not None:
            for line in lines:
                charge.watch.heard(line, now)
        backend = charge.backend
        charge.progress_at = max(charge.progress_at, backend.moved_at)
        sample = backend.sample
        if sample is None or sample.at == charge.sampled_at:
            return
        charge.sampled_at = sample.at
        limit = backend.limit
        warm = limit.ready_at is None or now - limit.ready_at >= limit.slow_start_s
        charge.pace.observe(sample, warm=warm and backend.phase is Phase.READY)

    async def _weigh(self, charge: Charge, launcher: ProcessLauncher) -> None:
        now, most = self.clock.now(), charge.pool.supervision.max_memory
        if most is None or charge.starting or now - charge.weighed_at < _MEMORY_EVERY_S:
            return
        charge.weighed_at = now
        charge.memory.observe(now, await launcher.memory_bytes(), most)

    def ended(self, charges: Mapping[str, Charge], settled: Sequence[RequestRecord]) -> None:
        """Count requests that came to an end on a backend."""
        for record in settled:
            charge = charges.get(record.backend_id or "")
            known = record.error_code == BackendDown.default_code  # told of it already
            if charge is not None and record.outcome in _COUNTED and not known:
                at = record.ended_at or self.clock.now()
                charge.errors.observe(at, failed=record.outcome in _FAILED)

    def judge(self, charge: Charge, peers: Sequence[Charge], now: float) -> None:
        """Have the judges say whether it is slow, fails or grows, beside its pool's other charges."""
        ratio = charge.pool.supervision.slow_ratio
        paces = [each.pace for each in peers]
        found = {
            Cause.SLOW: charge.pace.judge(paces, ratio, now) if ratio else None,
            Cause.ERRORS: charge.errors.judge([each.errors for each in peers], now),
            Cause.MEMORY: charge.memory.judge(),
        }
        for cause, sign in found.items():
            if sign is None:
                charge.signs.pop(cause, None)
            else:
                charge.signs[cause] = sign

    def canary_due(self, charge: Charge, now: float) -> bool:
        """Whether nothing has moved for so long that only a canary tells whether its engine lives.

        Sooner when it carries requests: an engine that froze between two of them shows none running.
        """
        every_s, backend = charge.pool.supervision.canary, charge.backend
        patience_s = every_s * _WITH_WORK if backend.in_flight else every_s
        serves = backend.phase is Phase.READY or backend.phase is Phase.DEGRADED
        quiet = backend.reason == "silent" or patience_s <= now - charge.progress_at
        return serves and patience_s > 0 and quiet

    async def prove(self, charge: Charge, why: str = "") -> bool:
        """Ask an engine for one token, twice if need be; returns whether it gave one.

        One that did not is taken out at once. `why` it is asked: by default, because nothing moves.
        """
        of, failed = runs(charge), ""
        for _ in range(_CANARIES):
            try:
                await self._ask(charge)
            except FetchError as error:
                failed = error.reason
            else:
                charge.progress_at = self.clock.now()
                charge.signs.pop(Cause.FROZEN, None)
                return True
        if of is None or _left(charge, of):
            return False
        flat_s = self.clock.now() - charge.progress_at
        because = why or f"no progress for {flat_s:.0f} s"
        told = f"{because}, and {_CANARIES} test requests in a row failed ({failed})"
        self.table.tend(charge.id, Tending(Phase.DOWN, "frozen", told))
        if failed != "timeout":  # one that answers knows that its engine died, and ends by itself
            await asyncio.sleep(self.timing.last_words_s)
        if not _left(charge, of):
            charge.signs[Cause.FROZEN] = Sign(Cause.FROZEN, told)
        return False

    async def _ask(self, charge: Charge) -> None:
        """Ask for one token, with a deadline that fits its load; a sign of life meanwhile is as good."""
        backend, now = charge.backend, self.clock.now()
        timeout_s = backend.canary_s(self.timing.token_s, now)
        try:
            await canary(charge.pages, backend, timeout_s=timeout_s)
        except FetchError as error:
            if error.reason != "timeout" or backend.moved_at <= now:
                raise


def _left(charge: Charge, of: Incarnation) -> bool:
    """Whether this incarnation has ended, or is being restarted: then all of it is known."""
    return charge.gone or charge.busy or runs(charge) != of


def runs(charge: Charge) -> Incarnation | None:
    """Return the incarnation that runs, if one was seen to."""
    return charge.seen.incarnation if charge.seen is not None and charge.seen.running else None
