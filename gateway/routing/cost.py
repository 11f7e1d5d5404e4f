"""What a request costs at each backend, in expected seconds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.core.prefix import Prefix
from gateway.core.types import Ask
from gateway.pools.backend import HERE_S, Backend
from gateway.pools.work import BESIDE
from gateway.prefix.approximate import tokens_of_each

# Of the time to the first token of the highest priority, beside all other work.
_FIRST_TOKEN_WEIGHT: Final = 10.0
# So large a part of later requests gains by one copy more; the others find as good a place beside the copies that
# are there. Simulated with 8 backends, many prompts: .890 of the tokens found with 1, .902 with .5, .906 with .2, .905
# with .1, .898 where nothing is shared; few prompts: p99 first token .054, .054, .056, .057, .072 s.
_GAIN: Final = 0.2
# With fewer tokens it hardly matters who bears the reading, and to find that out costs more.
_WORTH_TOKENS: Final = 256


def costs_of(
    backends: Sequence[Backend],
    ask: Ask,
    held_tokens: Sequence[int] | None,
    before: Mapping[str, float] | None = None,
) -> list[float]:
    """Return what a request costs at each, in seconds; those `before` it in the line take theirs too.

    `held_tokens` are those of its prompt that each holds; see `held_of`.

    Where nothing is known of how its prompt begins, the cost is the time until it would be done there. Else it is
    the time that it takes of all requests: what is not cached is read while those at the backend wait, and drives
    as much out of the cache, which is read again while as many wait as usual; outputs are written side by side. A
    beginning that later requests share is read for them, too, and each of them bears its part.
    """
    if not backends:
        return []
    cost, need = backends[0].token_cost, ask.need
    if held_tokens is None:
        own_s = cost.of(need.prompt_tokens, need.output_tokens)
        costs = [
            (work := each.work or each.weighed()).ahead_s + own_s * work.slowness
            for each in backends
        ]
    else:
        costs = _costs_for_all(backends, ask, held_tokens)
    if before:
        return [cost + before.get(each.id, 0.0) for cost, each in zip(costs, backends, strict=True)]
    return costs


def _costs_for_all(
    backends: Sequence[Backend], ask: Ask, held_tokens: Sequence[int]
) -> list[float]:
    """Return the seconds that a request takes of all who are there, at each; see `costs_of`."""
    cost, need, most = backends[0].token_cost, ask.need, max(held_tokens)
    works = [each.work or each.weighed() for each in backends]
    streams = [work.streams for work in works]
    streams.sort()
    usual = streams[(len(streams) - 1) // 2]
    tokens, prompt_s = need.prompt_tokens, cost.prompt_s
    written_s, all_s = cost.of(0, need.output_tokens), tokens * prompt_s
    known: Sequence[float] = held_tokens
    prefix = ask.prefix
    if most >= _WORTH_TOKENS and prefix is not None and most >= _WORTH_TOKENS + min(held_tokens):
        known = _shared(backends, prefix, held_tokens, most)
    costs = []
    for place, work in enumerate(works):
        held = known[place]
        # Most hold nothing of it; and an integer times a float is slow in CPython.
        read_s = (tokens - held) * prompt_s if held else all_s
        costs.append(work.waits_s + work.slowness * (written_s + read_s * (work.streams + usual)))
    return costs


def _shared(
    backends: Sequence[Backend], prefix: Prefix, held_tokens: Sequence[int], most: int
) -> Sequence[float]:
    """Return how many tokens of a prompt each holds, plus the part of reading the rest that later prompts bear.

    One copy more serves its even share of those who are expected to come before it is driven out (decision 043).
    """
    best = backends[held_tokens.index(most)]
    index = best.prefix_index
    place = len(prefix.keys) if index is None else index.longest(prefix)
    if place >= len(prefix.keys):  # it is known by its session alone
        return held_tokens
    later = best.uses.expected(prefix.keys[place])
    if not later:
        return held_tokens
    copies = sum([2 * held > most for held in held_tokens])
    later *= _GAIN * best.gateways / (copies + 1)
    shared, part = min(most, prefix.tokens_before(place)), later / (1 + later)
    return [held + part * (shared - held) if held < shared else held for held in held_tokens]


def held_of(backends: Sequence[Backend], prefix: Prefix | None) -> list[int] | None:
    """Return how many tokens of a prompt each holds, by its beginnings or by its session; None: not known."""
    if prefix is None:
        return None
    found = tokens_of_each([each.prefix_index for each in backends], prefix)
    session = prefix.session
    if session is not None and prefix.blocks is None:  # token ids tell more
        for place, each in enumerate(backends):
            if session.key in each.sessions.last:
                found[place] = max(
                    found[place], each.sessions.tokens(session, prefix.prompt_tokens)
                )
    return found


def adds_s(backend: Backend, ask: Ask) -> float:
    """Return by how much a request that is sent there makes it dearer for those who come next."""
    cost, need = backend.token_cost, ask.need
    unread_tokens = need.prompt_tokens - backend.cached_tokens(ask.prefix)
    return unread_tokens * cost.prompt_s + (1 - BESIDE) * need.output_tokens * cost.output_s


def by_priority(
    costs: Sequence[float],
    backends: Sequence[Backend],
    ask: Ask,
    held_tokens: Sequence[int] | None,
    now: float,
) -> tuple[Sequence[float], Backend | None]:
    """Return the costs that hold for the priority of a request, and a backend that is kept free of it, if any.

    What an engine reads cannot be interrupted, and its next step waits for it. So the highest of several
    priorities goes where its first token comes first. And while it comes, long prompts of the others are read on
    all backends but one at a time.
    """
    if ask.top_priority is None:
        return costs, None
    if ask.caller.priority == ask.top_priority:
        known = held_tokens or [0] * len(backends)
        return [
            cost + _FIRST_TOKEN_WEIGHT * _first_token_s(each, ask.need.prompt_tokens - held, now)
            for cost, each, held in zip(costs, backends, known, strict=True)
        ], None
    if len(backends) < 2 or not backends[0].guarded or now >= backends[0].highest_came_at + HERE_S:
        return costs, None
    free = [
        each for each in backends if each.room.unread_tokens <= each.limit.reading.ahead_tokens(now)
    ]
    if len(free) > 1 or not free:
        return costs, None
    is_long = ask.need.prompt_tokens > free[0].limit.reading.ahead_tokens(now)
    return costs, free[0] if is_long else None


def _first_token_s(backend: Backend, own_tokens: int, now: float) -> float:
    """Return in how long the first token of a request is expected that is sent there now.

    The engine reads all that is unread, then the request's own tokens. How late the oldest prompt is tells how
    long a full batch holds it up.
    """
    read_s = (backend.room.unread_tokens + own_tokens) * backend.token_cost.prompt_s
    return read_s + backend.limit.reading.overdue_s(now)
