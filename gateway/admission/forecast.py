"""What is expected of a pool: how fast it drains, who will come again, and so how long a wait takes."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.admission.queue import FairQueue
from gateway.admission.waiting import (
    Waiting,
    awaits,
    awaits_load,
    held_tokens,
    starts_in_s,
)
from gateway.core.errors import GatewayError, Overloaded, TooManyWaiting
from gateway.core.types import SERVING, Ask
from gateway.pools.backend import Backend
from gateway.pools.rate import Fading

_DRAIN_S: Final = 10.0  # memory of the drain rate at least, see `Drain.memory_s`
# With a longer one a new load is seen later; with 20 or 30 s few long replies seem an overload again.
_MEMORY_MOST_S: Final = 60.0
# While nobody waits. What was measured for long is known for two to four minutes.
_DRAIN_KEPT_S: Final = 60.0
_BELIEVED_RATIO: Final = 0.5
# Until so many times what is held has ended, a drain is measured some 15 to 25 % too low. Three simulated engines.
_EARLY_TURNS, _EARLY_RATIO = 1.5, 1.15
_DRAIN_LEAST_S: Final = 1.0  # work seen for less than this tells no rate
_LEAST_PER_S: Final = 1e-6  # tokens, where nothing has ended for minutes or hours: never none
_RETRY_LEAST_S: Final = 1.0  # Retry-After has whole seconds
_RETRY_MOST_S: Final = 30.0  # SDKs ignore waits over a minute; halved, because the rate changes
_RETRY_UNKNOWN_S: Final = 5.0  # nothing drained yet: about the length of one reply
_JITTER: Final = 0.3  # spreads those who were refused together
_FADES_S: Final = _RETRY_MOST_S  # whoever did not come back by then is hardly going to
_TOLD_S: Final = 4 * _FADES_S  # and whoever did not by then will not
# With 1, the study engine serves 21.4 good replies/s in a surge, not 24.1 (simulated, seed 1).
_COMES_NEW: Final = 0.5  # of what drains: it goes to those who come for the first time
_PROMISED_LEAST: Final = 1.0  # tokens; less is forgotten


class Drain:
    """How fast a pool gives back cost tokens, over the last 10 to 60 s in which it had more work than room.

    Only such time counts: a pool with little to do did not drain slowly, it had little to drain. But what ended
    over all seconds is the least that it can: while a burst is read nothing ends, and the queue may be gone before
    it does. What was measured long ago is forgotten.

    Each backend has a rate of its own. It counts while the backend serves, and is remembered while it does not. So
    where one of two is lost, half of the rate is lost at once, and where it comes back, that comes back.
    """

    def __init__(self) -> None:
        self._rates: dict[str, Fading] = {}  # by backend, while somebody waited
        self._always: dict[str, Fading] = {}  # and over all seconds
        self._serving: Sequence[str] = ()
        self._seen = 0.0  # given back since nothing was known
        self._ended_tokens = self._ended_token_s = 0.0  # of as many ends as run
        self._held_tokens = 0  # at the last measurement
        self._believed = False
        self._stands = False  # somebody waited at the last measurement

    def follow(self, serves: Mapping[str, bool]) -> None:
        """Take over which backends the pool has, and whether each serves."""
        self._rates = {each: self._rates.get(each) or Fading(_DRAIN_S) for each in serves}
        self._always = {each: self._always.get(each) or Fading(_DRAIN_S) for each in serves}
        self._serving = [each for each, does in serves.items() if does]

    def passed(
        self, seconds: float, ended: Mapping[str, int], held_tokens: int = 0, token_s: float = 0.0
    ) -> None:
        """Note that in so many seconds with more work than room each that serves gave back so many tokens.

        They hold `held_tokens`. `token_s` is for how long what ended was held, summed over its tokens.

        At the beginning of a burst nothing ends, and that is no slow drain: the rate is believed once half as
        much has ended as is held.
        """
        tokens = sum(ended.values())
        self._stands = True
        self._seen += tokens
        self._held_tokens = held_tokens
        self._believed = self._believed or self._seen >= _BELIEVED_RATIO * held_tokens
        self._ended(seconds, ended, held_tokens, token_s)
        for each in self._serving:
            self._rates[each].passed(seconds, ended.get(each, 0), self.memory_s)

    def rested(
        self, seconds: float, ended: Mapping[str, int], held_tokens: int = 0, token_s: float = 0.0
    ) -> None:
        """Note that for so many seconds nobody waited; the rest as above."""
        kept = math.exp(-seconds / _DRAIN_KEPT_S)
        self._ended_tokens *= kept
        self._ended_token_s *= kept
        self._ended(seconds, ended, held_tokens, token_s)
        self._stands = False
        for rate in self._rates.values():
            rate.fade(seconds, _DRAIN_KEPT_S)
        if self._seconds < _DRAIN_LEAST_S:
            self._seen, self._believed = 0.0, False

    def _ended(
        self, seconds: float, ended: Mapping[str, int], held_tokens: int, token_s: float
    ) -> None:
        """Learn how much ended, and how long that was held; what is held now weighs as much as all before."""
        if tokens := sum(ended.values()):
            kept = math.exp(-tokens / max(held_tokens, tokens))
            self._ended_tokens = kept * self._ended_tokens + tokens
            self._ended_token_s = kept * self._ended_token_s + token_s
        for each in self._serving:
            self._always[each].passed(seconds, ended.get(each, 0), self.memory_s)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while too little work, or no end of any, was seen."""
        waited, always = (
            sum(rates[each].per_s for each in self._serving)
            for rates in (self._rates, self._always)
        )
        known = self._believed and waited > 0 and self._seconds >= _DRAIN_LEAST_S
        return max(waited, always, _LEAST_PER_S) if known else None

    @property
    def most_per_s(self) -> float | None:
        """The rate, or before it is known what it can be at most; None while nobody knows, or nobody waits.

        What is held drains within the time for which requests were held (Little's law). Those that had room were
        held for less, so this is no less than the rate. It is known a second after the first had to wait.
        """
        stay_s = self._stay_s if self._stands else None
        return self.tokens_per_s or (self._held_tokens / stay_s if stay_s else None)

    @property
    def _seconds(self) -> float:
        """How much time was measured, as far as it is remembered."""
        return max((rate.seconds for rate in self._rates.values()), default=0.0)

    @property
    def memory_s(self) -> float:
        """How long the pool's rates are to be remembered at least: as long as a token is held; 0 while nobody knows.

        Of eight replies of 40 s none may end for half a minute, and then all do. Over 10 s that is no load, and
        then twice too much.
        """
        if not self._ended_tokens:
            return 0.0
        return min(self._ended_token_s / self._ended_tokens, _MEMORY_MOST_S)

    @property
    def _stay_s(self) -> float | None:
        """For how long a token is held on average; None while nobody knows."""
        if not self._ended_token_s or self._ended_tokens < _BELIEVED_RATIO * self._held_tokens:
            return None
        return self._ended_token_s / self._ended_tokens

    @property
    def probable_per_s(self) -> float | None:
        """The rate that will be measured later: early in a burst it is measured too low. None as above."""
        rate = self.tokens_per_s
        early = self._seen < _EARLY_TURNS * self._held_tokens
        return rate * _EARLY_RATIO if rate is not None and early else rate

    def eta_s(self, tokens_ahead: int) -> float | None:
        """Return in how many seconds `tokens_ahead` will have drained; None when nobody knows.

        Where few long replies run, nothing ends for a while, and the measured rate falls. So the estimate is bounded
        by the average stay of requests: what is held now drains within that time (Little's law). Those that ended
        before anybody waited tell nothing of that, so as much has to have ended since as is held.
        """
        rate, stay_s, held_tokens = self.tokens_per_s, self._stay_s, self._held_tokens
        if rate is None:
            return None
        eta_s = tokens_ahead / rate
        if stay_s is None or not held_tokens or self._seen < held_tokens:
            return eta_s
        return min(eta_s, tokens_ahead * stay_s / held_tokens)

    def retry_after_s(self, tokens_ahead: int, u: float) -> float:
        """Return when to come again, 1 to 30 s; `u` in [0, 1) is the caller's random number."""
        wait, most_per_s = self.eta_s(tokens_ahead), self.most_per_s
        if wait is None:
            wait = tokens_ahead / most_per_s if most_per_s else _RETRY_UNKNOWN_S
        longest = _RETRY_MOST_S / (1 + _JITTER)  # so that the bounds are jittered too
        return min(max(wait, _RETRY_LEAST_S), longest) * (1 + _JITTER * u)


class Promises:
    """What was told to come again and has not yet: tokens by tenant, of at most `most` tenants.

    It is a queue outside of the queue. Without it all who are refused in one surge would be told the
    same few seconds, and meet each other again: 56 to 60 % of those who come again then succeed, not 97
    to 100 (three simulated engines, seed 1).
    """

    def __init__(self, most: int = 1000) -> None:
        self.tokens = 0.0
        self._most = most
        self._tokens: OrderedDict[str, float] = OrderedDict()  # by tenant; fades with age
        self._told: dict[str, float] = {}  # of those tenants: the same, but hardly faded

    def __len__(self) -> int:
        """Return how many tenants hold a promise."""
        return len(self._tokens)

    def of(self, tenant: str) -> float:
        """Return the tokens that were promised to a tenant."""
        return self._tokens.get(tenant, 0.0)

    def made(self, tenant: str, tokens: int) -> None:
        """Note that a request of so many tokens was told to come again."""
        self._set(tenant, self.of(tenant) + tokens, self._told.get(tenant, 0.0) + tokens)
        if len(self._tokens) > self._most:
            self._set(next(iter(self._tokens)), 0.0, 0.0)

    def kept(self, tenant: str, tokens: int) -> bool:
        """Note that a request of so many tokens came again; returns whether its tenant held a promise."""
        told = self._told.get(tenant, 0.0)
        if told:  # its part of what has not faded goes
            self._set(tenant, self.of(tenant) * max(0.0, 1 - tokens / told), told - tokens)
        return told > 0

    def passed(self, seconds: float) -> None:
        """Let time pass: some never come again."""
        kept, remembered = math.exp(-seconds / _FADES_S), math.exp(-seconds / _TOLD_S)
        for tenant, tokens in [*self._tokens.items()]:
            self._set(tenant, tokens * kept, self._told[tenant] * remembered)

    def _set(self, tenant: str, tokens: float, told: float) -> None:
        self.tokens -= self._tokens.pop(tenant, 0.0)
        self._told.pop(tenant, None)
        if tokens >= _PROMISED_LEAST:
            self._tokens[tenant], self._told[tenant] = tokens, told
            self.tokens += tokens
        if not self._tokens:
            self.tokens = 0.0  # no rounding stays


class Forecast:
    """What is to be expected of one pool, by what drains, waits and was told to come again."""

    def __init__(
        self, queue: FairQueue, backends: Callable[[], Sequence[Backend]], rng: random.Random
    ) -> None:
        self.drain = Drain()
        self._promises = Promises()
        self._rng = rng
        self._queue = queue
        self._backends = backends
        self._stood = False  # somebody waited at the last tick
        self._refused = False  # and somebody was refused since

    # --- fed ---

    def tick(self, seconds: float, now: float) -> Drain:
        """Measure how fast the pool drains, and return that; about twice a second.

        Only if somebody waits for room, now as at the last call. Otherwise what ends tells how much was asked
        for, and a pool with little to do would seem slow to the first burst. In no time nothing is measured, and
        what ended is left out.
        """
        backends = self._backends()
        ends = {each.id: each.turnover.ends(now - seconds / 2) for each in backends}
        serving = [each for each in backends if each.phase in SERVING]  # an outage drains nothing
        ended = {each.id: ends[each.id].tokens for each in serving}
        token_s = sum(ends[each.id].token_s for each in serving)
        works = any(ended.values()) or any(each.in_flight for each in serving)
        self.drain.follow({each.id: each.phase in SERVING for each in backends})
        by_adapter = {each.ask.route.adapter: each.ask for each in self._queue}
        queued = any(not awaits_load(backends, ask) for ask in by_adapter.values())
        stands = works and (queued or self._refused)
        stood, self._stood, self._refused = self._stood, stands, False
        if not seconds:
            return self.drain
        if stands and stood:
            self.drain.passed(seconds, ended, held_tokens(serving), token_s)
        elif not stands:
            self.drain.rested(seconds, ended, held_tokens(serving), token_s)
        self._promises.passed(seconds)
        return self.drain

    def refused(self, ask: Ask, error: GatewayError) -> None:
        """Note that a request was refused: if for want of room, it was told when its turn comes."""
        if isinstance(error, Overloaded | TooManyWaiting):
            self._refused = True
            self._promises.made(ask.caller.tenant, ask.need.tokens)

    def returned(self, ask: Ask) -> bool:
        """Note that a request came again; returns whether its tenant was told to, and so was counted before."""
        return self._promises.kept(ask.caller.tenant, ask.need.tokens)

    # --- asked ---

    def ahead_s(self, waiting: Waiting) -> float | None:
        """Estimate how long what goes before a request takes; None when nobody knows."""
        eta_s = self.drain.eta_s(self._queue.held.tokens)  # a bound, and quick
        if eta_s is None or waiting.came_at + eta_s <= waiting.deadline:
            return eta_s
        return self.drain.eta_s(self._queue.ahead(waiting).tokens)

    def room_s(self, ask: Ask, now: float) -> float | None:
        """Estimate how long a request that is first waits for room; None when nobody knows.

        What it needs has to drain, and at least what a usual request holds: nothing drains before one has ended.
        """
        backends = self._backends()
        if awaits(backends, ask):
            return starts_in_s(backends, ask, now)
        in_flight = sum(each.in_flight for each in backends)
        usual_tokens = held_tokens(backends) // max(1, in_flight)
        return self.drain.eta_s(max(ask.need.tokens, usual_tokens))

    def retry_after_s(self, ask: Ask) -> float:
        """Return when a refused request is to come again: in 1 to 30 s, spread by chance.

        That is when its tenant has had its turns for all it has here and was told to come again with,
        this request included: each other tenant is served as much meanwhile, if it has as much.
        """
        tenant, cost = ask.caller.tenant, ask.need.tokens
        queue, promises = self._queue, self._promises
        held = queue.tenants.get(tenant)
        own = (held.tokens if held is not None else 0) + (promises.of(tenant) + cost) / _COMES_NEW
        tenants = max(len(queue.tenants), len(promises), 1)
        ahead = min(own * tenants, queue.held.tokens + (promises.tokens + cost) / _COMES_NEW)
        return self.drain.retry_after_s(round(ahead), self._rng.random())
