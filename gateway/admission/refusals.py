"""What a request that is not admitted is told: what happened, the numbers, what to do.

Pure. No refusal names a backend or an address; the setting that decided is for operators
(`vllm-gateway explain`).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from gateway.admission.queue import FairQueue, Full, Held
from gateway.core.errors import (
    ContextLengthExceeded,
    EngineFull,
    GatewayError,
    Overloaded,
    TooManyWaiting,
    Unavailable,
)
from gateway.core.types import Ask, Exclusion, ShedReason

_ON_ITS_WAY_S: Final = 0.25  # at least, for a refusal to reach a client that still listens
_ON_ITS_WAY_RATIO: Final = 0.1  # of its patience, where that is longer
_TENANTS_OWN = frozenset({Full.TENANT_REQUESTS, Full.TENANT_TOKENS, Full.TENANT_BYTES})


def heard_within_s(patience_s: float) -> float:
    """Return how long after a client's request a refusal still reaches it: some time before it gives up.

    Half of its patience at least, however short that is; any time reaches one of endless patience.
    """
    early = min(patience_s - _ON_ITS_WAY_S, patience_s * (1 - _ON_ITS_WAY_RATIO))
    return max(early, patience_s / 2)


def no_backend(ask: Ask, why: Mapping[str, Exclusion], rng: random.Random) -> GatewayError:
    """Refuse a request that no backend can serve now, however long it waits."""
    name = ask.route.requested
    if Exclusion.TOO_LARGE in why.values():
        need = ask.need
        return ContextLengthExceeded(
            f"This request is expected to need {need.tokens} tokens of KV cache ({need.prompt_tokens} "
            f"for the prompt, {need.output_tokens} for the completion); no backend of `{name}` that "
            "serves now holds as many. Please reduce the length of the prompt, `max_tokens` or `n`."
        )
    return Unavailable(
        f"`{name}`: none of its {len(why)} backends can serve this now ({_tally(why)}).",
        param="model",
        retry_after_s=rng.uniform(2.0, 5.0),
    )


def too_late(
    ask: Ask, why: Mapping[str, Exclusion], eta_s: float, wait_s: float, retry_after_s: float
) -> Overloaded:
    """Refuse a request whose turn would come after its deadline."""
    return Overloaded(
        f"{_overloaded(ask, why)} It would wait about {eta_s:.0f} s and may wait {wait_s:.0f} s. "
        f"Retry in {math.ceil(retry_after_s)} s.",
        reason=ShedReason.TOO_LATE,
        retry_after_s=retry_after_s,
    )


def no_room(ask: Ask, why: Mapping[str, Exclusion], retry_after_s: float) -> Overloaded:
    """Refuse a request that may not wait at all."""
    return Overloaded(
        f"{_overloaded(ask, why)} Retry in {math.ceil(retry_after_s)} s.",
        reason=ShedReason.NO_ROOM,
        retry_after_s=retry_after_s,
    )


def queue_full(
    ask: Ask, full: Full, queue: FairQueue[Any], why: Mapping[str, Exclusion], body_bytes: int, retry_after_s: float
) -> GatewayError:  # fmt: skip
    """Refuse a request that may not even wait, by the bound that forbids it."""
    limits, own = queue.limits, full in _TENANTS_OWN
    if limits.requests == 0:
        return no_room(ask, why, retry_after_s)
    held = queue.tenants.get(ask.caller.tenant, Held()) if own else queue.held
    ratio = limits.tenant_ratio if own else 1
    match full:
        case Full.REQUESTS | Full.TENANT_REQUESTS:
            size, most, unit = 1, math.ceil(limits.requests * ratio), "requests"
        case Full.TOKENS | Full.TENANT_TOKENS:
            size, most, unit = ask.need.tokens, int(limits.tokens * ratio), "tokens"
        case Full.BYTES | Full.TENANT_BYTES:
            size, most, unit = body_bytes, int(limits.bytes * ratio), "bytes"
    whose = "your share of its queue" if own else "the queue"
    bound = f"{whose} holds {most} {unit} at most; this request counts {size}."
    if size > most:
        said = (
            f"It cannot wait: {bound} Please reduce the length of the prompt, `max_tokens` or `n`."
        )
    else:
        waiting = f"{held.requests} requests with {held.tokens} tokens and {held.bytes} bytes"
        said = f"{'Of your own, ' if own else ''}{waiting} wait already; {bound}"
    message = f"{_overloaded(ask, why)} {said} Retry in {math.ceil(retry_after_s)} s."
    if own:
        return TooManyWaiting(message, retry_after_s=retry_after_s)
    return Overloaded(message, reason=ShedReason.QUEUE_FULL, retry_after_s=retry_after_s)


def waited_too_long(
    ask: Ask, why: Mapping[str, Exclusion], waited_s: float, retry_after_s: float
) -> Overloaded:
    """Refuse a request whose deadline passed while it waited."""
    return Overloaded(
        f"{_overloaded(ask, why)} It waited {waited_s:.1f} s for room. "
        f"Retry in {math.ceil(retry_after_s)} s.",
        reason=ShedReason.QUEUE_TIMEOUT,
        retry_after_s=retry_after_s,
    )


def engine_refused(ask: Ask, error: EngineFull) -> Overloaded:
    """Refuse a request that the engines refused, the last of them in these words."""
    return Overloaded(
        f"`{ask.route.requested}` is overloaded: the engine of the last of {len(ask.tried)} backends "
        f"asked refused this request ({error.message}). Retry in {math.ceil(error.retry_after_s)} s.",
        reason=error.shed_reason,
        retry_after_s=error.retry_after_s,
    )


def _overloaded(ask: Ask, why: Mapping[str, Exclusion]) -> str:
    return f"`{ask.route.requested}` is overloaded: of its {len(why)} backends {_tally(why)}."


def _tally(why: Mapping[str, Exclusion]) -> str:
    counts = Counter(reason.value for reason in why.values())
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none configured"
