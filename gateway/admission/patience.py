"""How long a request may wait for a pool before its answer is of no more use. Pure.

A short queue that empties is good: it absorbs a burst. One that stands only adds its length to every
first token. Which of the two it is follows from two rates, both in tokens of expected need a second:

    demand   of all requests that come, refused ones too. One that returns as it was told is not counted again,
             and one that waits until its adapter is loaded is not counted at all
    drain    of all requests that end, while somebody waits, and at least in all (`forecast.Drain`). Until it is
             known: the most that it can be
    load     demand / drain

    load <= (1 + n) / 2   the queue empties or hardly grows: the pool's `queue.max_wait` alone bounds the wait
    load <= n             it may well grow: three quarters of what a reply takes on average (three then wait for each
                          four that run), or five targets if that is more. One that came again as told waits as above
    load > n              0.2 target / (load - n) ^ 1.5: a little too much is worth a wait, twice too much is not, for
                          the queue only grows. At least the target, and at most as before
    n                     1.1, and with few requests more: a load measured of 50 is by chance up to 1.3

The target follows from what the pool does when nobody waits: a request may be as late again as its own
prompt takes to be read, or three times as late as the quickest tenth of first tokens. So it is short for
chats on a fast engine and long for long prompts on a slow one. `slo.ttft`, if it is set, replaces it.

A tenant pays for its own demand alone. One that asks for less than four fifths of what a fair share of the
drain would give it is not what overloads the pool, and waits as if it were not; from there to the whole share
the load that counts for it rises to that of the pool.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from gateway.pools.rate import Fading

_DEMAND_S: Final = 8.0  # memory of the pool's demand at least, see `Drain.memory_s`
_ENOUGH: Final = 30  # requests: a memory that holds so many is long enough
_TENANT_S: Final = 15.0  # of one tenant's: two long requests in a few seconds are chance
_DECILE: Final = 0.1  # of first tokens: these were the quickest
_BASES: Final = 3.0  # times that decile a request may wait, however short its prompt
_CALM: Final = 0.8  # of a fair share: from here on a tenant pays; less is due to it
_FULL: Final = 1.0  # and here in full
_NOISE: Final = 0.1  # of the drain: a few long replies more or less. More where requests are few
# Without a bound where the queue may grow, a load of 1 to 1.1 that lasted had waits of 3 to 6 s (four simulated
# engines). With one from a load of 1 on, a pool with a scarce cache would refuse 0.4 % at 0.9 x.
_MOST: Final = 5.0  # targets
_REPLIES: Final = 0.75  # with 1, good replies of the slowest engine at 1 x are 92 %, not 96 %
_WEIGHT: Final = 0.05  # of the newest reply: after sixty of another length the average is known
# Of targets. Where n is 1.1, a load of 1.2 is worth a wait of 6.3, 1.3 of 2.2, 1.45 of one. Four simulated engines.
_SLACK: Final = 0.2
_STEEP: Final = 1.5
_RETURNED: Final = 10.0  # times the target, for requests that came again as they were told
_FORGOTTEN: Final = 1.0  # tokens; a tenant with less is forgotten


class Quiet:
    """The time to a first token while nobody waits: what the quickest tenth take, and what a prompt adds."""

    def __init__(self) -> None:
        self.base_s: float | None = None
        self._count = 0
        self._token_s: float | None = None  # that one of a prompt adds

    def learn(self, seconds: float, prompt_tokens: int) -> None:
        """Take in one first token."""
        self._count += 1
        if self.base_s is None:
            self.base_s = seconds
        self.base_s = self._stepped(self.base_s, seconds)
        if prompt_tokens and seconds > 2 * self.base_s:  # so long a prompt that its reading shows
            token_s = (seconds - self.base_s) / prompt_tokens
            self._token_s = self._stepped(self._token_s or token_s, token_s)

    def first_token_s(self, prompt_tokens: int) -> float:
        """Return how long a prompt takes to its first token; 0 while nothing is known."""
        return (self.base_s or 0.0) + prompt_tokens * (self._token_s or 0.0)

    def _stepped(self, decile: float, seen: float) -> float:
        """Approximate a quantile: steps up and down balance where it stands."""
        step = decile * (0.02 if self._count > 20 else 0.2)
        return decile + step * (_DECILE if seen > decile else _DECILE - 1)


class Allowed(NamedTuple):
    """How late a request may be, in seconds."""

    target_s: float  # if the queue grows
    least_s: float  # at least, if it may grow


UNKNOWN: Final = Allowed(math.inf, math.inf)


class Patience:
    """What one pool lets its requests wait. Its line feeds it, about twice a second but for `came`."""

    def __init__(self) -> None:
        self.first = Quiet()  # to the first token of a stream
        self.whole = Quiet()  # to the end of a reply that is no stream
        self.reply_s = math.inf  # that a reply takes on average; infinite while nobody knows
        self._came: dict[str, int] = {}  # tokens by tenant, since the last tick
        self._requests = 0  # since then
        self._arrivals = Fading(_DEMAND_S)  # of requests
        self._demand = Fading(_DEMAND_S)
        self._tenants: dict[str, float] = {}  # tokens of each, fading: its share is what counts
        self._per_token = 0.0  # tokens a second that each of these stands for now
        self._load = 0.0  # 0 while nobody knows
        self._noise = 1 + _NOISE  # up to here a load is no more than chance
        self._fair = math.inf  # tokens a second that the drain gives to each who wants more

    # --- fed ---

    def came(self, tenant: str, tokens: int) -> None:
        """Note a request, whatever becomes of it."""
        self._came[tenant] = self._came.get(tenant, 0) + tokens
        self._requests += 1

    def replied(self, seconds: float) -> None:
        """Take in how long a reply took, from when it was sent to an engine."""
        known = self.reply_s
        self.reply_s = seconds if known == math.inf else known + _WEIGHT * (seconds - known)

    def tick(
        self,
        seconds: float,
        drain: float | None,
        probable: float | None = None,
        memory_s: float = 0.0,
    ) -> None:
        """Let time pass; the drain is in tokens a second, None while nobody knows.

        The `probable` drain decides who asks for more than a fair share: a tenant is not to pay because the
        drain is not known well yet. The demand is remembered for `memory_s` at least, as the drain is: where a
        fixed number of clients send one after another, as many come as end only over so long a time. Where
        many come it is not: chance is small there, and a new load is to be seen at once.
        """
        if seconds <= 0:
            return
        came, self._came = self._came, {}
        if arrivals_per_s := self._arrivals.per_s:
            memory_s = min(memory_s, _ENOUGH / arrivals_per_s)
        for each in (self._arrivals, self._demand):
            each.forget(max(memory_s, _DEMAND_S))
        self._arrivals.passed(seconds, self._requests, memory_s)
        self._requests = 0
        self._noise = 1 + max(_NOISE, 2 / math.sqrt(max(1.0, self._arrivals.amount)))
        kept = math.exp(-seconds / _TENANT_S)
        tenants = {tenant: kept * tokens for tenant, tokens in self._tenants.items()}
        for tenant, tokens in came.items():
            tenants[tenant] = tenants.get(tenant, 0.0) + tokens
        self._tenants = {tenant: each for tenant, each in tenants.items() if each >= _FORGOTTEN}
        self._demand.passed(seconds, sum(came.values()), memory_s)
        demand, total = self._demand.per_s, sum(self._tenants.values())
        self._per_token = demand / total if total else 0.0
        self._load = demand / drain if drain else 0.0
        rates = [self._per_token * each for each in self._tenants.values()]
        self._fair = _fair(rates, probable or drain) if drain else math.inf

    # --- asked ---

    @property
    def overloaded(self) -> bool:
        """Whether more comes than ends, and that is no chance."""
        return self._load > self._noise

    @property
    def bounds_waits(self) -> bool:
        """Whether anybody may be held to a shorter wait than the setting."""
        return self._load > self._bounded_from

    @property
    def _bounded_from(self) -> float:
        """Up to this load a queue empties or hardly grows."""
        return (1 + self._noise) / 2

    def load(self, tenant: str) -> float:
        """Return demand over drain, as far as a tenant pays for it; 0 while nobody knows."""
        if self._load <= 1:
            return self._load
        own = self._per_token * self._tenants.get(tenant, 0.0)
        pays = (own / self._fair - _CALM) / (_FULL - _CALM)
        return 1 + (self._load - 1) * min(1.0, max(0.0, pays))

    def allowed(
        self, prompt_tokens: int, *, streams: bool, returned: bool = False, slo_s: float | None = None
    ) -> Allowed:  # fmt: skip
        """Return how late a request may be; infinite while nobody knows.

        One that `returned` was refused before, and came again when it was told to, or had a place before. The
        answer stays the same while anybody waits, for nothing of it is learned meanwhile.
        """
        quiet = self.first if streams else self.whole
        if quiet.base_s is None:
            return UNKNOWN
        quiet_s = quiet.first_token_s(prompt_tokens)
        if streams and slo_s is not None and slo_s > quiet_s:
            target_s = least_s = slo_s - quiet_s
        else:
            target_s = max(quiet_s, _BASES * quiet.base_s)
            least_s = _MOST * target_s
        return Allowed(_RETURNED * target_s, math.inf) if returned else Allowed(target_s, least_s)

    def wait_s(self, load: float, allowed: Allowed) -> float:
        """Return how long a request may wait, at its tenant's load; infinite where the setting alone bounds it."""
        if load <= self._bounded_from:
            return math.inf
        most_s, excess = max(allowed.least_s, _REPLIES * self.reply_s), load - self._noise
        if excess <= 0:
            return most_s
        wait_s = max(allowed.target_s, _SLACK * allowed.target_s * math.pow(excess, -_STEEP))
        return min(wait_s, most_s)


def _fair(rates: list[float], drain: float) -> float:
    """Return the max-min fair share: who wants less has it, and the rest is shared evenly."""
    left = drain
    for place, rate in enumerate(sorted(rates)):
        share = left / (len(rates) - place)
        if rate > share:
            return share
        left -= rate
    return math.inf
