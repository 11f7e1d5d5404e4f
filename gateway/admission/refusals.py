"""The refusals of requests that are not admitted: what happened, the numbers, what to do.

Pure. No refusal names a backend or an address; operators see the setting that decided with
`vllm-gateway explain`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.admission.bounds import Full
from gateway.admission.queue import FairQueue
from gateway.core.errors import (
    ContextLengthExceeded,
    EngineFull,
    GatewayError,
    Overloaded,
    TooManyWaiting,
    Unavailable,
)
from gateway.core.printable import count
from gateway.core.types import Ask, Exclusion, ShedReason

_ON_ITS_WAY_S: Final = 0.25  # at least, for a refusal to reach a client that still listens
_ON_ITS_WAY_RATIO: Final = 0.1  # of its patience, where that is longer
_RETRY_MOST_S: Final = 45.0  # jittered, still under the minute over which SDKs ignore it
_JITTER: Final = 0.3  # spreads those who were refused together
# What each reason says of one backend, and of several.
_WORDS: Final[Mapping[Exclusion, tuple[str, str]]] = {
    Exclusion.NOT_SERVING: ("is down", "are down"),
    Exclusion.MODEL_MISSING: ("has not loaded it", "have not loaded it"),
    Exclusion.ADAPTER_LOADING: ("is loading it", "are loading it"),
    Exclusion.ADAPTER_DUE: (
        "cannot load it before others are unused",
        "cannot load it before others are unused",
    ),
    Exclusion.ADAPTER_FAILED: ("could not load it", "could not load it"),
    Exclusion.ENDPOINT_MISSING: ("does not serve this endpoint", "do not serve this endpoint"),
    Exclusion.EJECTED: (
        "is left out because its requests failed",
        "are left out because their requests failed",
    ),
    Exclusion.PROBATION: ("is being tried after failures", "are being tried after failures"),
    Exclusion.IN_RESERVE: ("is kept in reserve", "are kept in reserve"),
    Exclusion.WINDOW_TOO_SMALL: (
        "has a context window too small for this request",
        "have a context window too small for this request",
    ),
    Exclusion.AT_LIMIT: ("is at its concurrency limit", "are at their concurrency limit"),
    Exclusion.READING: ("is still reading prompts", "are still reading prompts"),
    Exclusion.ENGINE_QUEUED: ("has a long queue", "have a long queue"),
    Exclusion.KV_FULL: ("has a full KV cache", "have a full KV cache"),
    Exclusion.NO_KV_ROOM: ("has too little free KV cache", "have too little free KV cache"),
    Exclusion.CLAIMED: ("is reserved for an earlier request", "are reserved for earlier requests"),
    Exclusion.TOO_LARGE: ("is too small for this request", "are too small for this request"),
    Exclusion.ALREADY_TRIED: ("was already tried", "were already tried"),
}
# One of these may have room for a request that is too large for all others.
_MAY_SERVE_AGAIN = frozenset({Exclusion.NOT_SERVING, Exclusion.EJECTED, Exclusion.ALREADY_TRIED})
_TENANTS_OWN = frozenset({Full.TENANT_REQUESTS, Full.TENANT_TOKENS, Full.TENANT_BYTES})


def heard_within_s(patience_s: float) -> float:
    """Return how long after a client's request a refusal still reaches it: some time before it gives up.

    That is half of its patience at least, and no bound for a client of endless patience.
    """
    early = min(patience_s - _ON_ITS_WAY_S, patience_s * (1 - _ON_ITS_WAY_RATIO))
    return max(early, patience_s / 2)


def kept_for_others(
    backend_ids: Iterable[str], why: Mapping[str, Exclusion]
) -> dict[str, Exclusion]:
    """Return why no backend takes a request now: what has room for it is kept for those before it."""
    return {each: why.get(each, Exclusion.CLAIMED) for each in backend_ids}


def no_backend(ask: Ask, why: Mapping[str, Exclusion], rng: random.Random) -> GatewayError:
    """Refuse a request that no backend can serve now, however long it waits."""
    name, reasons = ask.route.requested, {*why.values()}
    if Exclusion.TOO_LARGE in reasons and _MAY_SERVE_AGAIN.isdisjoint(reasons):
        need = ask.need
        return ContextLengthExceeded(
            f"This request needs about {need.tokens} tokens of KV cache ({need.prompt_tokens} for the "
            f"prompt, {need.output_tokens} for the completion), more than any running backend of "
            f"`{name}` has. Please reduce the length of the prompt, `max_tokens` or `n`."
        )
    retry_after_s = rng.uniform(2.0, 5.0)
    return Unavailable(
        f"Model `{name}` is temporarily unavailable: {_tally(why)}. {_retry(retry_after_s)}",
        param="model",
        retry_after_s=retry_after_s,
    )


def starting(ask: Ask, starts_in_s: float, wait_s: float, rng: random.Random) -> Unavailable:
    """Refuse a request that cannot wait until a backend of its model has started."""
    return _starting(ask, starts_in_s, f", but this request can wait at most {wait_s:.0f} s.", rng)


def starts_late(ask: Ask, starts_in_s: float, waited_s: float, rng: random.Random) -> Unavailable:
    """Refuse a request whose deadline passed while it waited until a backend of its model has started."""
    return _starting(ask, starts_in_s, f". This request waited {waited_s:.1f} s.", rng)


def too_late(
    ask: Ask, why: Mapping[str, Exclusion], eta_s: float, wait_s: float, retry_after_s: float
) -> Overloaded:
    """Refuse a request whose turn would come after its deadline."""
    return Overloaded(
        f"{_overloaded(ask, why)} The estimated wait is {eta_s:.0f} s, but this request can wait at "
        f"most {wait_s:.0f} s. {_retry(retry_after_s)}",
        reason=ShedReason.TOO_LATE,
        retry_after_s=retry_after_s,
    )


def no_room(ask: Ask, why: Mapping[str, Exclusion], retry_after_s: float) -> Overloaded:
    """Refuse a request that may not wait at all."""
    return Overloaded(
        f"{_overloaded(ask, why)} {_retry(retry_after_s)}",
        reason=ShedReason.NO_ROOM,
        retry_after_s=retry_after_s,
    )


def queue_full(
    ask: Ask, full: Full, queue: FairQueue, why: Mapping[str, Exclusion], body_bytes: int, retry_after_s: float
) -> GatewayError:  # fmt: skip
    """Refuse a request that may not even wait, by the bound that forbids it."""
    limits, own = queue.limits, full in _TENANTS_OWN
    if limits.requests == 0:
        return no_room(ask, why, retry_after_s)
    of_all, of_tenant = queue.counted(ask.caller.tenant, ask.caller.priority)
    held = of_tenant if own else of_all
    bounds = limits.of_tenant if own else limits
    match full:
        case Full.REQUESTS | Full.TENANT_REQUESTS:
            size, most, unit = 1, bounds.requests, "request"
        case Full.TOKENS | Full.TENANT_TOKENS:
            size, most, unit = ask.need.tokens, bounds.tokens, "token"
        case Full.BYTES | Full.TENANT_BYTES:
            size, most, unit = body_bytes, bounds.bytes, "byte"
    whose = "your share of the queue" if own else "the queue"
    bound = f"{whose} is limited to {count(most, unit)}"
    if unit != "request":
        bound += f", and this request needs {count(size, unit)}"
    if size > most:
        said = (
            f"It cannot wait: {bound}. Please reduce the length of the prompt, `max_tokens` or `n`."
        )
    else:
        waiting = count(held.requests, "request") + (" of yours" if own else "")
        sizes = f"{count(held.tokens, 'token')}, {count(held.bytes, 'byte')}"
        said = f"Already waiting: {waiting} ({sizes}). {bound[0].upper()}{bound[1:]}."
    message = f"{_overloaded(ask, why)} {said} {_retry(retry_after_s)}"
    if own:
        return TooManyWaiting(message, retry_after_s=retry_after_s)
    return Overloaded(message, reason=ShedReason.QUEUE_FULL, retry_after_s=retry_after_s)


def waited_too_long(
    ask: Ask, why: Mapping[str, Exclusion], waited_s: float, retry_after_s: float
) -> Overloaded:
    """Refuse a request whose deadline passed while it waited."""
    return Overloaded(
        f"{_overloaded(ask, why)} This request waited {waited_s:.1f} s. {_retry(retry_after_s)}",
        reason=ShedReason.QUEUE_TIMEOUT,
        retry_after_s=retry_after_s,
    )


def engine_refused(ask: Ask, error: EngineFull) -> Overloaded:
    """Refuse a request that the engines refused, the last of them in these words."""
    tried = len(ask.tried)
    who = "the engine" if tried == 1 else f"{tried} backends were tried, and the last one's engine"
    return Overloaded(
        f"Model `{ask.route.requested}` is overloaded: {who} refused this request ({error.message}). "
        f"{_retry(error.retry_after_s)}",
        reason=error.shed_reason,
        retry_after_s=error.retry_after_s,
    )


def _starting(ask: Ask, starts_in_s: float, said: str, rng: random.Random) -> Unavailable:
    retry_after_s = min(starts_in_s, _RETRY_MOST_S) * rng.uniform(1.0, 1 + _JITTER)
    return Unavailable(
        f"Model `{ask.route.requested}` is temporarily unavailable: no server of it is up. The first is "
        f"expected to serve in about {starts_in_s:.0f} s{said} {_retry(retry_after_s)}",
        param="model",
        retry_after_s=retry_after_s,
    )


def _overloaded(ask: Ask, why: Mapping[str, Exclusion]) -> str:
    return f"Model `{ask.route.requested}` is overloaded: {_tally(why)}."


def _tally(why: Mapping[str, Exclusion]) -> str:
    """Return what is the matter with the backends, such as `both backends are down`."""
    counts = Counter(why.values())
    if not counts:
        return "it has no backend"
    if len(why) == 1:
        return f"its only backend {_WORDS[next(iter(counts))][0]}"
    if len(counts) == 1:
        every = "both" if len(why) == 2 else f"all {len(why)}"
        return f"{every} backends {_WORDS[next(iter(counts))][1]}"
    parts = [f"{number} {_WORDS[reason][number > 1]}" for reason, number in counts.items()]
    return f"of its {len(why)} backends, {', '.join(parts[:-1])} and {parts[-1]}"


def _retry(after_s: float) -> str:
    return f"Retry in {math.ceil(after_s)} s."
