"""The choice of a backend for one request: one pass over its pool, in the order of expected seconds.

    suited      who could serve it however busy they are; kept until a model list or a phase changes
    by cost     the seconds until a request that is sent there now would be done; where it is known how
                a prompt begins, the seconds that it takes of all who are there (decision 017)
    obstacle    the first backend without one is taken; those of another revision only when none of the
                request's own is free (once one was promoted, that is everybody's), DEGRADED ones only
                when no READY one is
    wait        a request waits a little for a cheaper backend that has more of its prompt (decision 028)

`explain` goes through all of them by the same costs and obstacles, and tells why. What `find` adds is left out
there: the chance by which a weighted pool shares out, and the wait for a cheaper backend.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import floor
from typing import Final

from gateway.core.endpoints import NO_ENGINE
from gateway.core.exclusion import Choice
from gateway.core.types import SERVING, Ask, Endpoint, Exclusion, Phase
from gateway.pools.table import Backend, PoolTable
from gateway.routing.cost import adds_s, by_priority, costs_of, held_of

NOBODY: Final[frozenset[str]] = frozenset()

_MIXES, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1  # Fibonacci hashing
_ABOUT_EQUAL: Final = 0.02  # of what it costs to read the whole prompt
# Used instead of `_ABOUT_EQUAL` when there are other gateways. A prompt that is new here may be on its way to the
# backend that another gateway chose, which tells it a moment later (041). So all pick the same one by hash, unless
# it is busier. Measured in loadtest/reports/routing-replicas.md.
_MEETS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Suited:
    """What does not change between two requests for one model, adapter and endpoint."""

    ready: Sequence[Backend]  # of the request's own revision, where one is on trial
    later: Sequence[Sequence[Backend]]  # each only when none before it is free
    reserve: Sequence[Backend]  # only when all of those are tried, or on probation
    ejected: Sequence[Backend]  # only when nobody else suits, or an attempt elsewhere has failed
    unfit: Mapping[str, Exclusion]  # why each other member of the pool cannot serve them
    ready_ids: tuple[str, ...]  # of `ready`


class Chooser:
    """Chooses among the backends of a table, with its own random numbers; asked for every request."""

    def __init__(self, table: PoolTable, rng: random.Random | None = None) -> None:
        self._table = table
        self._rng = rng or random.Random()
        self._known: dict[tuple[str, str | None, Endpoint, bool | None], Suited] = {}
        self._revision = -1  # of the table, when they were found

    def find(
        self,
        ask: Ask,
        now: float,
        barred: AbstractSet[str] = NOBODY,
        before: dict[str, float] | None = None,
    ) -> Backend | None:
        """Return the best of the backends that may take a request now and are not `barred`, if any.

        None too while it waits for a cheaper one; then `ask.awaits` names that. `before` has the seconds
        that those before it in the line will take of the backends that they wait for; its own are added.
        """
        suited = self._suited(ask)
        if ask.awaits is not None:
            ask.awaits = None
        ask.weighed = suited.ready_ids
        free, cheaper = self._first(suited.ready, ask, now, barred, before)
        if free is None:
            for backends in (*suited.later, *_last(suited, ask)):
                ask.weighed = tuple([each.id for each in backends])
                free, full = self._first(backends, ask, now, barred, before)
                cheaper = cheaper or full
                if free is not None:
                    break
        return None if cheaper is not None and _waits(ask, now, cheaper, free, before) else free

    def explain(self, ask: Ask, now: float) -> Choice:
        """Choose as `find` does with nobody in line, and tell why. Nothing is taken."""
        suited, told = self._suited(ask), Choice()
        for backend in self._table.backends(ask.route.pool):
            if (unfit := suited.unfit.get(backend.id)) is not None:
                told.excluded[backend.id] = _of_this(ask, backend, unfit)
        last = _last(suited, ask)
        if suited.reserve not in last:
            told.excluded |= {each.id: Exclusion.IN_RESERVE for each in suited.reserve}
        if suited.ejected not in last:
            told.excluded |= {each.id: Exclusion.EJECTED for each in suited.ejected}
        for backends in (suited.ready, *suited.later, *last):
            held_tokens, expected_s = held_of(backends, ask.prefix), dict[str, float]()
            costs = costs_of(backends, ask, held_tokens)
            ranks, spared = by_priority(costs, backends, ask, held_tokens, now)
            for place in self._in_order(ranks, backends, ask, held_tokens):
                backend = backends[place]
                reason = Exclusion.READING if backend is spared else obstacle(backend, ask, now)
                if reason is None:
                    expected_s[backend.id] = costs[place]
                else:
                    told.excluded[backend.id] = reason
            if expected_s and told.backend_id is None:
                told.backend_id, told.expected_s = next(iter(expected_s)), expected_s
        return told

    def _first(
        self,
        backends: Sequence[Backend],
        ask: Ask,
        now: float,
        barred: AbstractSet[str],
        before: dict[str, float] | None,
    ) -> tuple[Backend | None, Backend | None]:
        """Return the cheapest without an obstacle, and the cheapest before it for which one might wait."""
        if len(backends) == 1:
            only = backends[0] if obstacle(backends[0], ask, now, barred) is None else None
            return only, None
        held_tokens = None if ask.prefix is None else held_of(backends, ask.prefix)
        costs = ask.costs_s = costs_of(backends, ask, held_tokens, before)
        ranks: Sequence[float] = costs
        spared = None
        if ask.top_priority is not None:
            ranks, spared = by_priority(costs, backends, ask, held_tokens, now)
        if backends:  # the common case in one look
            if backends[0].weighted:
                ranks = self._shared_out(ranks, backends, ask)
            best = backends[self._least(ranks, backends, ask, held_tokens)]
            if best is not spared and obstacle(best, ask, now, barred) is None:
                return best, None
        cheaper = free = None
        for place in self._in_order(ranks, backends, ask, held_tokens):
            backend = backends[place]
            if backend is not spared:
                reason = obstacle(backend, ask, now, barred)
                if reason is None:
                    free = backend
                    break
                if reason.passes:
                    cheaper = cheaper or backend
        return free, cheaper

    def _shared_out(
        self, costs: Sequence[float], backends: Sequence[Backend], ask: Ask
    ) -> list[float]:
        """Add seconds by chance, so that among backends with equal work each is as likely as its share.

        Of exponentially distributed times each is the least as often as its rate is part of all rates
        (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). About a request's
        own time, they decide where little is under way; where much is, the work there does (`Work`).
        """
        need, wait_s = ask.need, self._rng.expovariate
        own_s = backends[0].token_cost.of(need.prompt_tokens, need.output_tokens)
        return [
            cost + own_s * wait_s(each.share) for cost, each in zip(costs, backends, strict=True)
        ]

    def _least(
        self,
        costs: Sequence[float],
        backends: Sequence[Backend],
        ask: Ask,
        held_tokens: Sequence[int] | None,
    ) -> int:
        """Return the place of the least cost. Of about equal ones it is any, or the one that a hash picks.

        The hash has prompts that begin alike meet, while the best has nothing of them cached. Once it has, it
        costs less than the others.
        """
        least = min(costs)
        place = costs.index(least)
        if held_tokens is not None and not held_tokens[place] and ask.prefix is not None:
            best, tokens = backends[place], ask.need.prompt_tokens
            streams = (best.work or best.weighed()).streams
            equal = _ABOUT_EQUAL if best.gateways == 1 else _MEETS
            most = least + equal * tokens * best.token_cost.prompt_s * 2 * streams
            near = [place for place, cost in enumerate(costs) if cost <= most]
            if len(near) == 1:
                return near[0]
            home = ask.prefix.home
            # Each draws a lot for prompts of one beginning, the same in every process.
            lots = [((backends[place].number ^ home) * _MIXES & _BITS, place) for place in near]
            return max(lots)[1]
        equals = costs.count(least)
        if equals > 1:
            for _ in range(floor(self._rng.random() * equals)):
                place = costs.index(least, place + 1)
        return place

    def _in_order(
        self,
        costs: Sequence[float],
        backends: Sequence[Backend],
        ask: Ask,
        held_tokens: Sequence[int] | None,
    ) -> list[int]:
        """Return the places of the costs, that of `_least` first, equals by chance."""
        places = list(range(len(costs)))
        if places:
            best = self._least(costs, backends, ask, held_tokens)
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


def _waits(
    ask: Ask, now: float, cheaper: Backend, free: Backend | None, before: dict[str, float] | None
) -> bool:
    """Whether a request waits for a cheaper backend, where more of its prompt is cached; noted if so.

    Where another one is free, it waits at most twice as long as that one would read the tokens that only the
    cheaper one has cached: they would be read again, and so would the prompt that they drive out.
    """
    if ask.prefix is None or not (cached_tokens := cheaper.cached_tokens(ask.prefix)):
        return False
    if free is not None:
        ask.free_at = min(ask.free_at, now)
        saved_tokens = cached_tokens - free.cached_tokens(ask.prefix)
        again_s = 2 * saved_tokens * free.token_cost.prompt_s
        if now - ask.free_at >= again_s:
            return False
    ask.awaits = cheaper.id
    if before is not None:
        before[cheaper.id] = before.get(cheaper.id, 0.0) + adds_s(cheaper, ask)
    return True


def obstacle(
    backend: Backend, ask: Ask, now: float, barred: AbstractSet[str] = NOBODY
) -> Exclusion | None:
    """Return why a backend that suits a request cannot take it now; None when it can."""
    if ask.tried and was_tried(backend, ask):
        return Exclusion.ALREADY_TRIED
    if backend.probation is not None and backend.kept_out and backend.probation.is_taken(now):
        return Exclusion.PROBATION
    window, demand = backend.window_tokens, ask.demand
    if window is not None and demand.exact and demand.total_tokens > window:
        return Exclusion.WINDOW_TOO_SMALL
    if ask.call.endpoint in NO_ENGINE:
        return None
    need, caller = ask.need, ask.caller
    to_read, unread = need.prompt_tokens, backend.room.unread_tokens
    if unread and ask.prefix is not None:  # `to_read` counts only beside what is unread
        cached_tokens = backend.cached_tokens(ask.prefix)
        to_read = 0 if cached_tokens >= unread else to_read - cached_tokens
    found = backend.obstacle(need, now, caller.priority, ask.top_priority, caller.tenant, to_read)
    if found is None and barred and backend.id in barred:
        return Exclusion.CLAIMED
    return found


def failed_at(ask: Ask, backend: Backend) -> None:
    """Note that an attempt failed there, by when its phase began: who failed in one phase is of one kind."""
    ask.tried[backend.id] = backend.health.since


def was_tried(backend: Backend, ask: Ask) -> bool:
    """Whether an attempt failed there, and it has not come back since."""
    since = ask.tried.get(backend.id)
    return since is not None and not (backend.phase is Phase.READY and backend.health.since > since)


def _suited(members: Sequence[Backend], ask: Ask) -> Suited:
    ready, degraded, ejected, unfit = [], [], [], {}
    for backend in members:
        reason = _unfit(backend, ask)
        if reason is not None:
            unfit[backend.id] = reason
        elif backend.phase is Phase.READY or _on_probation(backend):
            ready.append(backend)
        elif backend.kept_out:
            ejected.append(backend)
        else:
            degraded.append(backend)
    reserve = [each for each in (*ready, *degraded) if each.in_reserve]
    if len(reserve) == len(ready) + len(degraded):
        reserve = []  # nobody else serves
    else:
        ready = [each for each in ready if not each.in_reserve]
        degraded = [each for each in degraded if not each.in_reserve]
    later = [degraded]
    side = ask.on_trial
    if any(each.kept_back and not each.on_trial for each in members):
        side = True  # the revision was promoted
    if side is not None:
        later.insert(0, [each for each in ready if each.on_trial is not side])
        ready = [each for each in ready if each.on_trial is side]
    later = [backends for backends in later if backends]
    return Suited(ready, later, reserve, ejected, unfit, tuple([each.id for each in ready]))


def _last(suited: Suited, ask: Ask) -> list[Sequence[Backend]]:
    """Return who is asked when nobody else can be: the alternative is to refuse the request, or that it waits long."""
    others = [each for backends in (suited.ready, *suited.later) for each in backends]
    found = []
    if suited.reserve and all(was_tried(each, ask) or _on_probation(each) for each in others):
        found.append(suited.reserve)
    if suited.ejected and (ask.tried or not others):
        found.append(suited.ejected)
    return found


def _on_probation(backend: Backend) -> bool:
    """Whether it is left out but for one request at a time, which shows whether it works again."""
    return backend.kept_out and backend.probation is not None


def _of_this(ask: Ask, backend: Backend, unfit: Exclusion) -> Exclusion:
    """Return why a backend that suits no request like this one will not take this one, for people."""
    if was_tried(backend, ask):
        return Exclusion.ALREADY_TRIED
    never = unfit is Exclusion.NOT_SERVING and backend.too_small(ask.need)
    return Exclusion.TOO_LARGE if never else unfit


def _unfit(backend: Backend, ask: Ask) -> Exclusion | None:
    """Return why a backend does not suit any request like this one."""
    if backend.phase not in SERVING:
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
