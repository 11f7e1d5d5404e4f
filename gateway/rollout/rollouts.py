"""Canaries: collect the results of both revisions, ask for a verdict, and carry it out.

    requests here ------> samples of both sides --> a test, at twice the samples of the last one
    other gateways --^                               |-- open: go on
                                                     `-- worse, fine: reported once, as an event and in `status`
                                                          `-- automatic: the losing side is kept in reserve

Of several gateways one judges the samples of all, and the others adopt its verdict (`rollout.together`). A verdict
that was carried out is saved (`rollouts.json` in the state folder). So a revision that was rolled back gets no
requests after a restart either, until the settings of its canary change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.models import PoolConfig
from gateway.config.traffic import CanaryConfig
from gateway.core.aio import Clock
from gateway.core.events import EventKind, Events
from gateway.core.types import Outcome, RequestRecord
from gateway.heal.statefile import digest, read_state, write_state
from gateway.pools.table import PoolTable
from gateway.rollout.verdict import FEWEST, Arm, Finding, judge, look_at, together

_SAVED: Final = msgspec.json.Decoder(dict[str, tuple[str, Finding]])
FILE: Final = "rollouts.json"
_MOST_REFUSED: Final = 10_000  # conversations that are remembered


class Sides(msgspec.Struct):
    """What one gateway saw of a canary."""

    trial: Arm = msgspec.field(default_factory=Arm)
    stable: Arm = msgspec.field(default_factory=Arm)

    def later(self, seconds: float) -> Sides:
        """Return the same, by a clock that is ahead by so much."""
        return Sides(self.trial.later(seconds), self.stable.later(seconds))


class TrialTold(msgspec.Struct):
    """What a gateway tells the others of a canary. Moments of failures are ages below zero."""

    settings: str  # a digest
    finding: Finding
    look: int  # number of the next test: one that was made is not repeated
    seen: Sides
    ended_s: float | None = None  # it ended so long ago: no settings had it any more


@dataclass(slots=True)
class Rollout:
    """One canary. `carried_out`: its verdict is in force."""

    config: CanaryConfig
    own: Sides = field(default_factory=Sides)
    others: Sequence[Sides] = ()  # of other gateways
    look: int = 1  # number of the next test
    finding: Finding = Finding.OPEN
    carried_out: bool = False
    # Conversations of which a request was refused, the oldest first.
    refused: dict[float, None] = field(default_factory=dict)

    @property
    def trial(self) -> Arm:
        """What all gateways saw of the revision."""
        return together(each.trial for each in (self.own, *self.others))

    @property
    def stable(self) -> Arm:
        """What all gateways saw of the other backends."""
        return together(each.stable for each in (self.own, *self.others))

    def told(self) -> str:
        """Return its state in one to three sentences."""
        revision = self.config.revision
        match self.finding:
            case Finding.OPEN:
                needs = look_at(self.look)
                head = f"revision {revision} is on trial; looked at again with {needs} requests"
            case Finding.WORSE:
                done = "rolled back" if self.carried_out else "roll it back"
                head = f"revision {revision} is worse: {done}"
            case Finding.FINE:
                done = "promoted" if self.carried_out else "it may be promoted"
                head = f"revision {revision} is no worse: {done}"
        trial = self.trial
        if not trial.requests:
            return f"{head}."
        return f"{head}. {revision}: {trial.told()}. Others: {self.stable.told()}."


class Rollouts:
    """All canaries of the process, and the only writer of their state. Synchronous.

    `judges`: whether this gateway tests and decides, or adopts the verdicts of another one.
    """

    def __init__(
        self,
        table: PoolTable,
        clock: Clock,
        events: Events,
        folder: Path,
        *,
        saves: bool = True,
        judges: bool = True,
    ) -> None:
        """`saves`: whether this process writes the state folder."""
        self.judges = judges
        self._saves = saves
        self._table = table
        self._clock = clock
        self._events = events
        self._file = folder / FILE
        self._saved: dict[str, tuple[str, Finding]] = read_state(self._file, _SAVED) or {}
        self._running: dict[str, Rollout] = {}
        self._handed_over = False

    def get(self, pool: str) -> Rollout | None:
        """Return the canary of a pool; None if it has none."""
        return self._running.get(pool)

    def verdicts(self) -> dict[tuple[str, ...], bool]:
        """Return for each pool with a canary, and each verdict, whether it is the present one."""
        return {
            (name, each.value): rollout.finding is each
            for name, rollout in self._running.items()
            for each in Finding
        }

    def requests(self) -> dict[tuple[str, ...], int]:
        """Return how many requests of each pool with a canary were counted here, by side."""
        return {
            (name, side): arm.requests
            for name, rollout in self._running.items()
            for side, arm in (("canary", rollout.own.trial), ("others", rollout.own.stable))
        }

    def apply(self, pools: Mapping[str, PoolConfig]) -> None:
        """Apply settings. A canary whose settings are the same goes on; others begin or end.

        Call this after the pool table has applied the same settings.
        """
        if self._handed_over:
            return
        before, self._running = self._running, {}
        for name, pool in pools.items():
            if pool.canary is not None:
                known = before.get(name)
                if known is None or _trial(known.config) != _trial(pool.canary):
                    known = self._begun(name, pool.canary)
                self._running[name] = known
            self._carry_out(name)
        self._forget_others()

    def settled(self, records: Sequence[RequestRecord]) -> None:
        """Count requests that ended. What a client caused itself (it left, its request was bad) does not count."""
        if not self._running:
            return
        for record in records:
            arm = self._arm(record.backend_id, record.sent_at)
            if arm is None or record.outcome not in (Outcome.OK, Outcome.UPSTREAM_REJECTED):
                continue
            if record.outcome is Outcome.UPSTREAM_REJECTED:
                # Both sides get bad requests alike, but all of one conversation go to one side, so they count once.
                if self._is_first(record):
                    arm.refuse()
            elif record.stream and not record.resumed:  # a resumed one was begun by another backend
                first_s = None
                if record.first_byte_at is not None and record.sent_at is not None:
                    first_s = record.first_byte_at - record.sent_at
                arm.serve(first_s, record.token_gap_s)
            else:
                arm.serve()
        for name, rollout in self._running.items():
            self._look(name, rollout)

    def hand_over(self) -> None:
        """Count and save nothing from now on, not after a reload either: another process judges these trials."""
        self._running, self._handed_over = {}, True

    def take_over(self) -> None:
        """Go on from what the gateway before this one carried out until it handed over."""
        if (saved := read_state(self._file, _SAVED)) is None:
            return
        self._saved = saved
        for name, rollout in self._running.items():
            begun = self._begun(name, rollout.config)
            if begun.carried_out and not rollout.carried_out:
                self._running[name] = begun
                self._carry_out(name)

    @property
    def handed_over(self) -> bool:
        """Whether another process judges these trials."""
        return self._handed_over

    def tell(self) -> dict[str, TrialTold]:
        """Return what this gateway saw of each pool's canary, and its verdict."""
        now = self._clock.now()
        return {
            name: TrialTold(
                _trial(rollout.config), rollout.finding, rollout.look, rollout.own.later(-now)
            )
            for name, rollout in self._running.items()
        }

    def hear(self, messages: Sequence[tuple[Mapping[str, TrialTold], float]]) -> None:
        """Take in the messages of all other gateways, each with its age in seconds, and adopt a verdict of theirs."""
        now = self._clock.now()
        for name, rollout in self._running.items():
            settings = _trial(rollout.config)
            heard = [
                (each, age_s)
                for every, age_s in messages
                if (each := every.get(name)) is not None and each.settings == settings
            ]
            rollout.others = [each.seen.later(now - age_s) for each, age_s in heard]
            rollout.look = max(rollout.look, *(each.look for each, _ in heard), 1)
            found = next(
                (each.finding for each, _ in heard if each.finding is not Finding.OPEN), None
            )
            if found is not None and rollout.finding is Finding.OPEN:
                self._adopt(name, rollout, found)
            self._look(name, rollout)

    def failed(self, backend_id: str) -> None:
        """Count a failed attempt that was the backend's fault, whatever became of the request."""
        if self._running and (arm := self._arm(backend_id)) is not None:
            arm.fail(self._clock.now())

    def _arm(self, backend_id: str | None, sent_at: float | None = None) -> Arm | None:
        backend = self._table.get(backend_id or "")
        if backend is not None and sent_at is not None and sent_at < backend.member_since:
            return None  # it was another server, which had the name before
        rollout = self._running.get(backend.pool) if backend is not None else None
        if backend is None or rollout is None:
            return None
        return rollout.own.trial if backend.on_trial else rollout.own.stable

    def _is_first(self, record: RequestRecord) -> bool:
        """Whether this is the first refused request of its conversation, as far as is remembered."""
        conversation, backend = record.conversation, self._table.get(record.backend_id or "")
        if conversation is None or backend is None:
            return True
        known = self._running[backend.pool].refused
        is_first = conversation not in known
        known[conversation] = None
        if len(known) > _MOST_REFUSED:
            del known[next(iter(known))]
        return is_first

    def _look(self, name: str, rollout: Rollout) -> None:
        """Make the next test, if this gateway judges and there are enough samples."""
        if not self.judges or rollout.finding is not Finding.OPEN:
            return
        trial, stable = rollout.trial, rollout.stable
        if stable.requests < FEWEST or trial.requests < look_at(rollout.look):
            return
        found = judge(trial, stable, rollout.look, times=rollout.config.by_chance)
        rollout.look += 1
        if found is not Finding.OPEN:
            self._adopt(name, rollout, found)
            self._events.note(self._clock, EventKind.CANARY, name, found.value, rollout.told())

    def _adopt(self, name: str, rollout: Rollout, found: Finding) -> None:
        """Make this the verdict, and carry it out if the canary is automatic."""
        rollout.finding = found
        rollout.carried_out = rollout.config.automatic
        if rollout.carried_out:
            self._saved[name] = _trial(rollout.config), found
            self._save()
            self._carry_out(name)

    def _forget_others(self) -> None:
        """Forget verdicts on trials that the settings do not have any more: set up again, a trial begins anew."""
        in_force = {name: _trial(rollout.config) for name, rollout in self._running.items()}
        ended = [name for name, (trial, _) in self._saved.items() if in_force.get(name) != trial]
        for name in ended:
            del self._saved[name]
        if ended:
            self._save()

    def _save(self) -> None:
        if self._saves:
            write_state(self._file, self._saved, "what was found of a revision")

    def _begun(self, name: str, config: CanaryConfig) -> Rollout:
        """Return a new canary, with the verdict that an earlier gateway carried out, if any."""
        trial, found = self._saved.get(name, ("", Finding.OPEN))
        if trial != _trial(config):
            return Rollout(config)
        return Rollout(config, finding=found, carried_out=True)

    def _carry_out(self, name: str) -> None:
        """Keep the losing side of a pool in reserve, if a verdict is in force; otherwise neither."""
        rollout = self._running.get(name)
        in_force = rollout is not None and rollout.carried_out
        worse = rollout is not None and rollout.finding is Finding.WORSE
        self._table.keep_back(name, on_trial=worse if in_force else None)


def _trial(config: CanaryConfig) -> str:
    """Return a digest of a trial's settings; the order of keys makes no difference."""
    return digest(config.model_copy(update={"keys": tuple(sorted(config.keys))}))
