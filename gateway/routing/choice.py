"""The choice of a backend for one request: one pass over its pool, in the order of expected seconds.

    suited      who could serve it however busy they are; kept until a model list or a phase changes
    by cost     the seconds until a request that is sent there now would be done; where it is known how
                a prompt begins, the seconds that it takes of all who are there (decision 017)
    obstacle    the first backend without one is taken; those of another revision only when none of the
                request's own is free, DEGRADED ones only when no READY one is

The same pass writes down what it saw of each backend when it is given a place for it, so `explain`
and `route` tell what `find` does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest

from gateway.core.endpoints import NO_ENGINE
from gateway.core.types import Ask, Endpoint, Exclusion, Phase
from gateway.pools.table import Backend, PoolTable

_UNREAD_WEIGHT: Final = 10.0  # of what is unread, for the highest class, beside all other work
NOBODY: Final[frozenset[str]] = frozenset()

# Of the seconds in which all outputs at a backend are written, so much does not hold up who comes: they are
# written side by side. Simulated chats at 8 backends: 0.59 of the prompts were found cached with none of it,
# 0.77 with nine tenths, 0.87 with this and with 0.99 alike (0.88 where a seer chooses).
_BESIDE: Final = 0.97
# Times as long as reading anew takes. Simulated, 8 backends that together hold all prompts: 0.61 of them were
# found cached at 0 times, 0.86 at 3, 0.88 at 8; the first token's p99 came after 0.53, 0.25 and 0.23 s.
_HOLDS_OUT: Final = 4.0
_MIXES, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # Fibonacci hashing
_ABOUT_EQUAL: Final = 0.02  # of what it costs to read the whole prompt


@dataclass(frozen=True, slots=True)
class Suited:
    """What does not change between two requests for one model, adapter and endpoint."""

    ready: Sequence[Backend]  # of the request's own revision, where one is on trial
    later: Sequence[Sequence[Backend]]  # each only when none before it is free
    unfit: Mapping[str, Exclusion]  # why each other member of the pool cannot serve them


@dataclass(slots=True)
class Choice:
    """Why a request goes where it goes, for people.

    One that is neither in `expected_s` nor excluded is a later choice, while an earlier one is free.
    """

    backend_id: str | None = None
    expected_s: dict[str, float] = field(default_factory=dict)  # of those that may take it
    excluded: dict[str, Exclusion] = field(default_factory=dict)  # why each other may not


class Chooser:
    """Chooses among the backends of a table, with its own random numbers; asked for every request."""

    def __init__(self, table: PoolTable, rng: random.Random | None = None) -> None:
        self._table = table
        self._rng = rng or random.Random()
        self._known: dict[tuple[str, str | None, Endpoint, bool | None], Suited] = {}
        self._revision = -1  # of the table, when they were found

    def find(self, ask: Ask, now: float, barred: AbstractSet[str] = NOBODY) -> Backend | None:
        """Return the best of the backends that may take a request now and are not `barred`, if any."""
        suited = self._suited(ask)
        found = self._first(suited.ready, ask, now, barred, waits=not suited.later)
        if found is None:
            for backends in suited.later:
                found = found or self._first(backends, ask, now, barred)
        return found

    def explain(self, ask: Ask, now: float) -> Choice:
        """Choose as `find` does, and tell why. Nothing is taken."""
        suited, told = self._suited(ask), Choice()
        for backend in self._table.backends(ask.route.pool):
            if (unfit := suited.unfit.get(backend.id)) is not None:
                tried = was_tried(backend, ask)
                told.excluded[backend.id] = Exclusion.ALREADY_TRIED if tried else unfit
        for backends in (suited.ready, *suited.later):
            looked_at = Choice(excluded=told.excluded)
            found = self._first(backends, ask, now, NOBODY, looked_at)
            if found is not None and told.backend_id is None:
                told.backend_id, told.expected_s = found.id, looked_at.expected_s
        return told

    def _first(
        self,
        backends: Sequence[Backend],
        ask: Ask,
        now: float,
        barred: AbstractSet[str],
        told: Choice | None = None,
        *,
        waits: bool = False,
    ) -> Backend | None:
        """Return the cheapest without an obstacle; with `told`, note what each of them is worth.

        None too if it `waits` for a cheaper one, where more of its prompt is cached.
        """
        if told is None and len(backends) == 1:
            return backends[0] if obstacle(backends[0], ask, now, barred) is None else None
        costs = _costs(backends, ask)
        several = ask.top_priority is not None
        ranks, spared = _by_class(costs, backends, ask, now) if several else (costs, None)
        if told is None and backends:  # the common case in one look
            if backends[0].weighted:
                ranks = self._shared_out(ranks, backends, ask)
            best = backends[self._least(ranks, backends, ask)]
            if best is not spared and obstacle(best, ask, now, barred) is None:
                return best
        found = reads = None
        for place in self._in_order(ranks, backends, ask):
            backend = backends[place]
            reason = Exclusion.READING if backend is spared else obstacle(backend, ask, now, barred)
            if reason is None:
                if told is None:
                    holds_out = waits and reads is not None and _holds_out(ask, now, reads, backend)
                    return None if holds_out else backend
                found = found or backend
                told.expected_s[backend.id] = costs[place]
            elif told is not None:
                told.excluded[backend.id] = reason
            elif reason is Exclusion.READING and backend is not spared:
                reads = reads or backend
        return found

    def _shared_out(
        self, costs: Sequence[float], backends: Sequence[Backend], ask: Ask
    ) -> list[float]:
        """Add seconds by chance, so that among backends with equal work each is as likely as its share.

        Of exponentially distributed times the least is each one's as often as its rate is of all rates
        (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). About a request's
        own time, they decide where little is under way; where much is, the work there does (`ahead_s`).
        """
        need, wait_s = ask.need, self._rng.expovariate
        own_s = backends[0].token_cost.of(need.prompt_tokens, need.output_tokens)
        return [
            cost + own_s * wait_s(each.share) for cost, each in zip(costs, backends, strict=True)
        ]

    def _least(self, costs: Sequence[float], backends: Sequence[Backend], ask: Ask) -> int:
        """Return the place of the least; of about equal ones that of the prompt's beginning, or any."""
        least, prefix = min(costs), ask.prefix
        if prefix is not None:
            best, tokens = backends[costs.index(least)], ask.need.prompt_tokens
            most = least + _ABOUT_EQUAL * tokens * best.token_cost.prompt_s * best.streams
            near = [place for place, cost in enumerate(costs) if cost <= most]
            if len(near) == 1:
                return near[0]
            home = prefix.home
            return max((_lot(backends[place].id, home), place) for place in near)[1]
        if costs.count(least) == 1:
            return costs.index(least)
        places = [place for place, cost in enumerate(costs) if cost == least]
        return places[int(self._rng.random() * len(places))]

    def _in_order(self, costs: Sequence[float], backends: Sequence[Backend], ask: Ask) -> list[int]:
        """Return the places of the costs, that of `_least` first, equals by chance."""
        places = list(range(len(costs)))
        if places:
            best = self._least(costs, backends, ask)
            self._rng.shuffle(places)
            places.sort(key=lambda place: (place != best, costs[place]))
        return places

    def _suited(self, ask: Ask) -> Suited:
        """Return who suits a request; looked for once, until the table is another."""
        table, route = self._table, ask.route
        if self._revision != table.revision:
            self._known.clear()
            self._revision = table.revision
        key = route.pool, route.adapter, ask.call.endpoint, ask.on_trial
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _suited(table.backends(route.pool), ask)
        return known


def _costs(backends: Sequence[Backend], ask: Ask) -> list[float]:
    """Return what a request costs at each, in seconds.

    Where nothing is known of its beginning, that is when it would be done there. Else it is what it takes
    of all who are there: what is not cached is read while they wait, and their outputs are written beside
    its own.
    """
    if not backends:
        return []
    cost, need, prefix = backends[0].token_cost, ask.need, ask.prefix
    if prefix is None:
        own_s = cost.of(need.prompt_tokens, need.output_tokens)
        return [each.ahead_s + own_s * each.own_ratio for each in backends]
    written_s, prompt_s, tokens = cost.of(0, need.output_tokens), cost.prompt_s, need.prompt_tokens
    costs = [
        each.ahead_s
        - _BESIDE * each.writing_s
        + each.own_ratio
        * (written_s + (tokens - each.cached_tokens(prefix)) * prompt_s * each.streams)
        for each in backends
    ]
    session = None if prefix.blocks is not None else prefix.session  # by token ids is known better
    if session is not None:
        for place, each in enumerate(backends):
            if session.key in each.sessions.last:
                more = each.sessions.tokens(session, tokens) - each.cached_tokens(prefix)
                costs[place] -= each.own_ratio * max(0, more) * prompt_s * each.streams
    return costs


def _holds_out(ask: Ask, now: float, reads: Backend, free: Backend) -> bool:
    """Whether a request waits until a cheaper backend has read what is before it, though one is free.

    It does so a few times as long as it takes to read anew what is cached there (decision 017).
    """
    saved = reads.cached_tokens(ask.prefix) - free.cached_tokens(ask.prefix)
    return now - ask.asked_at < _HOLDS_OUT * saved * free.token_cost.prompt_s


def _lot(backend_id: str, home: int) -> int:
    """Return the lot that a backend draws for prompts of one beginning, the same in every process."""
    return (_number(backend_id) ^ home) * _MIXES & _BITS


@lru_cache(maxsize=4096)
def _number(backend_id: str) -> int:
    return xxh3_64_intdigest(backend_id.encode())


def _by_class(
    costs: Sequence[float], backends: Sequence[Backend], ask: Ask, now: float
) -> tuple[Sequence[float], Backend | None]:
    """Return the costs by which the class of a request has it go, and a backend that is kept free of it.

    What an engine reads cannot be interrupted, and its next step waits for it. So the highest of several
    classes goes where least is unread. And while it comes, long prompts of the others are read on
    all backends but one at a time.
    """
    if ask.caller.priority == ask.top_priority:
        return [
            cost + _UNREAD_WEIGHT * each.room.unread_tokens * each.token_cost.prompt_s
            for cost, each in zip(costs, backends, strict=True)
        ], None
    if len(backends) < 2 or not backends[0].guarded or now >= backends[0].highest_until:
        return costs, None
    free = [
        each for each in backends if each.room.unread_tokens <= each.limit.reading.ahead_tokens(now)
    ]
    if len(free) > 1 or not free:
        return costs, None
    is_long = ask.need.prompt_tokens > free[0].limit.reading.ahead_tokens(now)
    return costs, free[0] if is_long else None


def obstacle(
    backend: Backend, ask: Ask, now: float, barred: AbstractSet[str] = NOBODY
) -> Exclusion | None:
    """Return why a backend that suits a request cannot take it now; None when it can."""
    if ask.tried and was_tried(backend, ask):
        return Exclusion.ALREADY_TRIED
    window, demand = backend.window_tokens, ask.demand
    if window is not None and demand.exact and demand.total_tokens > window:
        return Exclusion.WINDOW_TOO_SMALL
    if ask.call.endpoint in NO_ENGINE:
        return None
    need, caller = ask.need, ask.caller
    tokens = need.prompt_tokens + need.output_tokens
    if need.sequences > 1:
        tokens = backend.room.enough(tokens)
    to_read, unread = need.prompt_tokens, backend.room.unread_tokens
    if unread and ask.prefix is not None:  # else it is not asked for
        cached_tokens = backend.cached_tokens(ask.prefix)
        to_read = 0 if cached_tokens >= unread else to_read - cached_tokens
    found = backend.obstacle(tokens, now, caller.priority, ask.top_priority, caller.tenant, to_read)
    if found is None and barred and backend.id in barred:
        return Exclusion.CLAIMED
    return found


def was_tried(backend: Backend, ask: Ask) -> bool:
    """Whether an attempt failed there, and it has not come back since."""
    at = ask.tried.get(backend.id)
    return at is not None and not (backend.phase is Phase.READY and backend.since > at)


def _suited(members: Sequence[Backend], ask: Ask) -> Suited:
    ready, degraded, unfit = [], [], {}
    for backend in members:
        reason = _unfit(backend, ask)
        if reason is not None:
            unfit[backend.id] = reason
        elif backend.phase is Phase.READY:
            ready.append(backend)
        else:
            degraded.append(backend)
    if not all(each.in_reserve for each in (*ready, *degraded)):
        for each in (*ready, *degraded):
            if each.in_reserve:
                unfit[each.id] = Exclusion.IN_RESERVE
        ready = [each for each in ready if not each.in_reserve]
        degraded = [each for each in degraded if not each.in_reserve]
    later = [degraded]
    if ask.on_trial is not None:
        later.insert(0, [each for each in ready if each.on_trial is not ask.on_trial])
        ready = [each for each in ready if each.on_trial is ask.on_trial]
    return Suited(ready, [backends for backends in later if backends], unfit)


def _unfit(backend: Backend, ask: Ask) -> Exclusion | None:
    """Return why a backend does not suit any request like this one."""
    if backend.phase not in (Phase.READY, Phase.DEGRADED):
        return Exclusion.NOT_SERVING
    adapter = ask.route.adapter
    if adapter is None:
        missing = backend.base_model is None
    elif (lacking := backend.lacking.get(adapter)) is not None:
        return lacking
    else:
        held = backend.models.get(adapter)
        missing = held is None or held.parent is None
    if missing:
        return Exclusion.MODEL_MISSING
    if backend.endpoints is not None and ask.call.endpoint not in backend.endpoints:
        return Exclusion.ENDPOINT_MISSING
    return None
