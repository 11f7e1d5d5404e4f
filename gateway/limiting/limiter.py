"""`Limiter`: take what a request costs from its limits, and give back what it did not use.

    take -> (wait for room, send, relay) -> settle, synchronously, on every way out

A process that runs alone keeps all levels itself. Replicas keep them in Redis, where each call is one script over
all scopes that takes all or nothing. Workers without Redis keep them in their parent, which does what the scripts
do (`limiting.inparent`); below, "Redis" is either. When Redis does not answer, each rule follows its `on_outage`:
`local` gives out this replica's share, limit / replicas, and goes on from what was used when Redis last answered.
No request waits for a Redis that is known to be away, and none longer than 50 ms. Of a slow Redis, one request a
second finds out whether it is still slow.

A running request is a lease of 30 s, renewed while it runs: what a killed replica held frees itself.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from gateway.core.aio import Clock, periodic
from gateway.core.limits import Amounts, Judged, Limit, Period, Plan, Taken
from gateway.limiting import scripts
from gateway.limiting.levels import CALENDAR, Levels, Moment
from gateway.limiting.plans import charged
from gateway.limiting.rules import NOTHING, Refusal, over, refusal, still_counted, used_with
from gateway.store.scripts import BUDGET_S, Scripted
from gateway.store.shared import StoreUnavailable

RUNS_S: Final = 30.0
_RENEW_S: Final = 10.0
_LOOK_S: Final = 1.0
_WITHIN_S: Final = 0.05
_AGAIN_S: Final = 1.0
_MOST_RENEWED: Final = 256  # with one call
_MOST_LEVELS: Final = 16_384  # that are kept of Redis
_MOST_UNTOLD: Final = 16_384  # requests that ended in an outage; Redis never learns of later ones


@dataclass(frozen=True, slots=True)
class Refused:
    """The limit that a request does not fit; `share_of` replicas each have their part of it."""

    why: Refusal
    plan: Plan
    used: tuple[float, ...]
    wall: float
    share_of: int = 1
    shared: bool = False  # as in `Taken`


@dataclass(frozen=True, slots=True)
class Closed:
    """A limit that lets nothing through while replicas cannot agree on what is used."""

    limit: Limit


@dataclass(frozen=True, slots=True)
class _Settled:
    """What a request used in the end, beyond what was taken for it; `head` has its lease and day."""

    plan: Plan
    head: str
    more: Amounts


class Limiter:
    """One owner, one event loop. `link` None: this process runs alone."""

    def __init__(
        self,
        clock: Clock,
        link: Scripted | None,
        replicas: Callable[[], int],
        spent: Callable[[Judged, str], float] | None = None,
    ) -> None:
        """`spent` returns what is known to be used of a day or month; Redis may have lost it."""
        self._spent = spent
        self.tells_owed = True  # False: `usage.telling` does, before it sends ledger lines
        self.on_lost: list[Callable[[], None]] = []  # Redis lost days and months
        self.levels = Levels()
        self._clock = clock
        self._link = link
        self._replicas = replicas
        self._again_at = -math.inf  # when a Redis that was slow is asked again
        self._last: dict[Plan, tuple[tuple[float, ...], float]] = {}  # levels in Redis, and when
        # `_begun`: plans whose levels in Redis were already raised to the known usage, with the levels of days and
        # months that Redis told last. `_before`: that usage, by store, amount, period and day.
        self._begun: dict[tuple[tuple[str, ...], str], tuple[float, ...]] = {}
        self._before: dict[tuple[str, int, Period, int], float] = {}
        # What was used of days and months and Redis was not told, by plan and day.
        self._owed: dict[tuple[Plan, int], Amounts] = {}
        self._untold: list[_Settled] = []  # requests that ended, of which Redis was not told
        self._unknown = False  # Redis may not know all that runs here
        self._renewed_at = -math.inf
        self.refusals: dict[tuple[str, ...], float] = {}  # by scope, rule, and whether in shadow
        self._life = secrets.token_hex(4)
        self._number = 0

    async def take(self, plan: Plan, costs: Amounts) -> Taken | Refused | Closed:
        """Take what a request costs, all or nothing. Costs without a request do not count as running.

        Cancel: nothing counts as running; what was taken all the same is given back once Redis answers.
        """
        self._number += 1
        lease = f"{self._life}-{self._number}"
        if self._link is not None:
            if self._asks_redis(plan):
                try:
                    return await self._take_shared(self._link, plan, costs, lease)
                except StoreUnavailable:
                    self._again_at = self._clock.now() + _AGAIN_S
            if plan.closed is not None:
                return Closed(plan.closed)
        return self._take_here(plan, costs, lease)

    async def foresee(self, plan: Plan, costs: Amounts) -> Refused | Closed | None:
        """Return how `take` would refuse a request now, None: it would not; nothing is used up.

        Cancel: as in `take`.
        """
        found = await self.take(plan, NOTHING)
        if isinstance(found, Closed):
            return found
        if isinstance(found, Taken):
            self.settle(found, NOTHING)
        replicas, away = found.share_of, self._link is not None and not found.shared
        places = over(plan, costs, found.used, replicas)
        why = refusal(plan, costs, found.used, places, found.wall, replicas, away=away)
        if why is None:
            return None
        return Refused(why, plan, found.used, found.wall, replicas, found.shared)

    def count(self, limit: Limit) -> None:
        """Count a request that did not fit a limit."""
        labels = limit.scope.value, limit.rule.value, str(limit.shadow).lower()
        self.refusals[labels] = self.refusals.get(labels, 0) + 1

    def settle(self, taken: Taken, actual: Amounts) -> None:
        """End a request: give back what it took too much, or charge what it took too little."""
        plan, more = charged(taken), actual.less(taken.costs)
        if plan.running:
            self.levels.end(plan, taken.lease)
        if not taken.shared:
            self.levels.charge(plan, more, self._moment(), taken.day, max(1, self._replicas()))
            if self._link is None:
                return
            self._owe(taken.plan, actual)
            more = NOTHING
        if self._link is not None and (plan.running or more != NOTHING):
            self._tell(_Settled(plan, f"{taken.lease} {taken.day}", more), self._link)

    def _tell(self, settled: _Settled, link: Scripted) -> None:
        """Tell Redis what a request used in the end; later again, if the call fails."""

        def lost(may_have_run: bool) -> None:
            if len(self._untold) < _MOST_UNTOLD:
                # To end a lease twice does no harm; to charge twice does.
                again = replace(settled, more=NOTHING) if may_have_run else settled
                self._untold.append(again)

        plan, words = settled.plan, scripts.words(settled.head, settled.more, settled.plan.words)
        link.post(scripts.SETTLE, plan.stores, words, lost)

    async def run(self) -> None:
        """Renew the leases of what runs, and tell Redis what it missed, until cancelled."""
        await periodic(self._turn, every_s=_LOOK_S, name="leases of requests")

    async def renew(self) -> None:
        """Tell Redis what runs here."""
        link = self._link
        if link is None:
            return
        for store, running in self.levels.running.items():
            leases = [*running]
            for start in range(0, len(leases), _MOST_RENEWED):
                batch = leases[start : start + _MOST_RENEWED]
                link.post(scripts.RENEW, (store,), (round(RUNS_S * 1000), *batch))
        self._unknown = bool(link.trouble)
        self._renewed_at = self._clock.now()

    def recall(self) -> None:
        """Raise days and months again, as more is known of what was spent."""
        self._begun.clear()
        self._before.clear()
        self.levels.raised.clear()

    async def tell_owed(self) -> None:
        """Tell Redis what was used of days and months in an outage. One that is over does not count any more.

        Raises:
            StoreUnavailable: it does not answer; a part may be lost.
        """
        while self._link is not None and self._owed:
            (plan, day), more = self._owed.popitem()
            today = self._moment().day
            if rules := still_counted(plan, day, today):
                words = scripts.words(f"- {today}", more, rules)
                await self._link.ask(scripts.SETTLE, plan.stores, words)

    async def _turn(self) -> None:
        if self._link is None or self._link.trouble:
            return
        if self._unknown or self._clock.now() - self._renewed_at >= _RENEW_S:
            await self.renew()
        if len(self._last) > _MOST_LEVELS:  # many are of plans that are not in force any more
            self._last.clear()
        if len(self._before) > _MOST_LEVELS:
            self.recall()
        untold, self._untold = self._untold, []
        for settled in untold:
            self._tell(settled, self._link)
        if self.tells_owed:
            with contextlib.suppress(StoreUnavailable):
                await self.tell_owed()

    def _owe(self, plan: Plan, used: Amounts) -> None:
        if plan.calendar and used != NOTHING:
            owed = plan, self._moment().day
            before = self._owed.get(owed, NOTHING)
            self._owed[owed] = Amounts(*(a + b for a, b in zip(before, used, strict=True)))

    def _asks_redis(self, plan: Plan) -> bool:
        """Whether this request asks Redis. While that is slow, one request a second does."""
        now = self._clock.now()
        if self._link is None or self._link.trouble:
            return False
        if plan.closed is not None:
            return True
        if now < self._again_at:
            return False
        if self._again_at > -math.inf:
            self._again_at = now + _AGAIN_S  # the others do not wait for the answer to this one
        return True

    async def _take_shared(
        self, link: Scripted, plan: Plan, costs: Amounts, lease: str
    ) -> Taken | Refused:
        if self._unknown:
            await self.renew()
        counted = plan.stores, plan.calendar
        # What is spent includes what is owed: that is told first, or it would count twice.
        begins = bool(plan.calendar) and counted not in self._begun and not self._owed
        if begins and self._spent is not None:
            link.post(scripts.RECALL, plan.stores, self._recalled(self._spent, plan))
        words = scripts.words(f"{lease} {RUNS_S * 1000:.0f}", costs, plan.words)
        try:
            reply: str = await link.ask(
                scripts.TAKE, plan.stores, words, _WITHIN_S if plan.closed is None else BUDGET_S,
                partial(self._give_back, link, plan, costs),
            )  # fmt: skip
        except BaseException:
            # It may have been taken, but it does not run. Its tokens stay taken until Redis says that it took them,
            # lest a client that leaves gets back what it never took.
            if plan.running:
                self._tell(_Settled(plan, f"{lease} 0", NOTHING), link)
            raise
        self._again_at = -math.inf
        fits, day, used, marked = scripts.answer(reply)
        if begins or (plan.calendar and counted in self._begun):
            self._see(plan, used, costs if fits else NOTHING)
        if not self._owed:  # else Redis does not know all that was used here
            self._last[plan] = used, self._clock.now()
        wall = self._clock.wall()
        if fits:
            self._begin(plan, costs, lease)
            return Taken(plan, costs, used, lease, shared=True, day=day, wall=wall, shadowed=marked)
        why = refusal(plan, costs, used, marked, wall)
        assert why is not None, "the script names the rules that refuse"
        return Refused(why, plan, used, wall, shared=True)

    def _give_back(self, link: Scripted, plan: Plan, costs: Amounts, reply: str) -> None:
        """Give back what Redis took for a request that had given up waiting: it was refused, or counts here."""
        if not reply:  # the parent process is of another version
            return
        fits, day, used, marked = scripts.answer(reply)
        if fits:
            taken = Taken(plan, costs, used, "-", shared=True, day=day, wall=0.0, shadowed=marked)
            self._tell(_Settled(charged(taken), f"- {day}", NOTHING.less(costs)), link)

    def _see(self, plan: Plan, used: tuple[float, ...], taken: Amounts) -> None:
        """Note the days and months that Redis told, and whether it lost some.

        It lost one that is less than half of its last level, and less than is known to be spent: one node of a
        cluster may lose its data, or a level may be evicted, while the usage is still there.
        """
        counted, levels = (plan.stores, plan.calendar), []
        before, lost = iter(self._begun.get(counted, ())), False
        for rule, now in zip(plan.rules, used, strict=True):
            if rule.period in CALENDAR:
                levels.append(level := now - taken[rule.amount])
                if 2 * level < next(before, 0.0) and self._spent is not None and not self._owed:
                    lost = lost or level + 1e-6 < self._spent(rule, plan.key_id)
        self._begun[counted] = tuple(levels)
        if lost:
            self.recall()
            for listener in self.on_lost:
                listener()

    def _take_here(self, plan: Plan, costs: Amounts, lease: str) -> Taken | Refused:
        wall, replicas, away = self._clock.wall(), max(1, self._replicas()), self._link is not None
        at = Moment.of(self._clock.now(), wall)
        if away:
            self._unknown = True
            self._go_on(replicas)
        if plan.calendar and (spent := self._spent) is not None:
            of, key_id = plan.rules, plan.key_id
            self.levels.recall(plan, at, lambda place: spent(of[place], key_id) / replicas)
        used = self.levels.used(plan, at, replicas)
        places = over(plan, costs, used, replicas)
        if places:
            why = refusal(plan, costs, used, places, wall, replicas, away=away)
            if why is not None:
                return Refused(why, plan, used, wall, replicas)
        used = used_with(plan, costs, used, places)
        self.levels.put(plan, used, at)
        self._begin(plan, costs, lease)
        return Taken(
            plan, costs, used, lease, shared=False, day=at.day, wall=wall, share_of=replicas,
            shadowed=tuple(places),
        )  # fmt: skip

    def _begin(self, plan: Plan, costs: Amounts, lease: str) -> None:
        if plan.running and costs.requests:
            self.levels.begin(plan, lease)

    def _recalled(self, spent: Callable[[Judged, str], float], plan: Plan) -> tuple[str, str]:
        used, day = [], self._moment().day
        for each in plan.rules:
            if each.period in CALENDAR:
                place = plan.stores[each.store], each.amount, each.period, day
                if place not in self._before:
                    self._before[place] = spent(each, plan.key_id)
                used.append(f"{self._before[place]:.9f}")
        return plan.calendar, " ".join([str(day), *used])

    def _go_on(self, replicas: int) -> None:
        """Go on from this replica's part of the levels that Redis told last."""
        last, self._last = sorted(self._last.items(), key=lambda each: each[1][1]), {}
        began = self._clock.wall() - self._clock.now()
        told = [(plan, used, Moment.of(now, began + now)) for plan, (used, now) in last]
        self.levels.go_on(told, self._moment(), replicas)

    def _moment(self) -> Moment:
        return Moment.of(self._clock.now(), self._clock.wall())
