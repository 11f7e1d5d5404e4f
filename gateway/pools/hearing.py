"""What requests hear of backends, how backends compare, and how long a test request may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.core.endpoints import NO_ENGINE
from gateway.core.types import Endpoint, Outcome, RequestRecord, UsageSource
from gateway.pools.backend import Backend
from gateway.pools.limit import SLOWER, Limit
from gateway.pools.progress import Listened
from gateway.pools.pulse import Waits
from gateway.pools.speed import slownesses
from gateway.pools.work import token_cost
from gateway.prefix.approximate import UNKNOWN_CAPACITY_TOKENS

_UPSTREAM: Final = UsageSource.UPSTREAM  # looked up once: 0.15 us before Python 3.12


def take_in(backend: Backend, waits: Waits, now: float) -> Listened:
    """Have a backend take in what its requests have heard, and return what that tells of its life."""
    pulse, rate = backend.pulse, backend.limit.reading.rate.at(now)
    pulse.sees_steps, pulse.starts = not backend.stale(now), backend.limit.starts(now)
    pulse.listen(waits, now)
    patience_s, reading_s = pulse.patience_s(rate), pulse.reading_s(rate)
    return Listened(pulse.heard_at, pulse.quiet_s(now), patience_s, reading_s)


def compare(members: Sequence[Backend], now: float) -> None:
    """Compare the backends of one pool: how slow each is, and what its tokens cost; they share one `uses`."""
    found = slownesses([each.speed for each in members], now)
    cost = token_cost(
        (each.limit.reading.rate for each in members), (each.writes for each in members), now
    )
    if members:
        caches = (each.room.capacity_tokens or UNKNOWN_CAPACITY_TOKENS for each in members)
        members[0].uses.tick(sum(caches))
    for backend, slowness in zip(members, found, strict=True):
        backend.tally.tick(now)
        backend.slowness, backend.token_cost, backend.uses = slowness, cost, members[0].uses
        backend.weigh(now)


def learn(backend: Backend, record: RequestRecord) -> None:
    """Learn from a request that ended there how fast it writes, and what it had cached."""
    sent, usage, index = record.sent, record.usage, backend.prefix_index
    if sent and usage and index is not None and usage.source is _UPSTREAM:
        if tells_cached(backend, record.endpoint, usage.cached_tokens):
            index.ended(sent, usage.cached_tokens, usage.prompt_tokens)
        backend.sessions.ended(sent, usage.cached_tokens, usage.prompt_tokens)
    sent_at, ended_at = record.sent_at or 0.0, record.ended_at or 0.0
    undisturbed = not (record.resumed or record.failed)
    if record.stream and undisturbed and (gap_s := record.token_gap_s) is not None:
        backend.limit.token_gap(ended_at, sent_at, gap_s)
        backend.room.writing.wrote(gap_s)
    elif record.outcome is not Outcome.OK or record.endpoint in NO_ENGINE:
        return
    elif not record.stream and backend.sample is None:
        tokens = usage.completion_tokens if usage is not None else 0
        _judge_whole(backend.limit, tokens, sent_at, ended_at)


def _judge_whole(limit: Limit, tokens: int, sent_at: float, ended_at: float) -> None:
    """Take a whole reply that came soon enough for a first token in time: nobody saw when that came.

    That is one whose tokens keep the objectives in sum, or which took, for each token, hardly longer than the best
    lately: where nothing tells the tokens, or a server is slower than the objectives. Any other tells nothing.
    """
    seconds, counted = max(0.0, ended_at - sent_at), max(1, tokens)
    best = limit.whole.learn(ended_at, seconds / counted, 1)
    in_sum = seconds <= limit.objective_s + tokens * limit.gap_objective_s
    if sent_at >= limit.cut_at and (in_sum or (best and seconds <= SLOWER / best * counted)):
        limit.first_token(ended_at, min(seconds, limit.objective_s), 0)


def tells_cached(backend: Backend, endpoint: Endpoint | None, cached_tokens: int | None) -> bool:
    """Whether to believe what a reply tells of its cached tokens, also if that is nothing.

    vLLM tells them in all replies of `/v1/responses`, in others only with a flag. Some versions tell nothing where
    none were cached: that is believed of an endpoint that told them once. Where no endpoint ever told any, the
    engine's counter takes their place.
    """
    telling = backend.telling
    if cached_tokens is not None and endpoint not in telling:
        telling.add(endpoint)
    return endpoint in telling or not telling


def canary_s(backend: Backend, token_s: float, now: float) -> float:
    """Return the deadline of a test request that fits the load, see `Pulse.canary_s`."""
    sample = backend.sample
    admits = sample is not None and not backend.stale(now) and sample.waiting == 0
    queues = backend.in_flight > 0 and not admits
    return backend.pulse.canary_s(token_s, backend.limit.reading.rate.at(now), queues=queues)
