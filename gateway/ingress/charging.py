"""What a request costs of its limits, before it runs and once it has ended.

Reserved are its prompt, as exactly as it is known, and its output: the limit that it states, else what outputs
of its model and key usually take, at most `_CAP_TOKENS` a reply. Nothing is reserved beyond a whole limit, unless it
is known to cost that: such a request runs when nothing else does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.core.endings import reached
from gateway.core.limits import FREE, Amounts, Plan, Price, Taken
from gateway.core.ratelimited import LimitsUnknown, RateLimited
from gateway.core.types import Ask, Outcome, RequestRecord
from gateway.limiting.limiter import Closed, Limiter, Refused
from gateway.limiting.plans import Plans
from gateway.limiting.prices import Prices
from gateway.limiting.rules import NOTHING, header_lines, told, whose
from gateway.usage.entries import FAILED, REFUSED, source_of

_CAP_TOKENS: Final = 4096
_AGAIN_S: Final = 2.0  # Redis may be back by then


async def charge(
    limiter: Limiter, plan: Plan, prices: Prices, record: RequestRecord, ask: Ask
) -> None:
    """Take what a request costs, and note it in its record.

    Raises:
        RateLimited: it does not fit (429); nothing was taken.
        LimitsUnknown: a limit lets nothing through while Redis does not answer (503).
    Cancel: nothing is held.
    """
    found = await limiter.take(plan, costs_of(plan, record.price or FREE, ask))
    if isinstance(found, Taken):
        record.taken = found
        for place in found.shadowed:
            limiter.count(plan.rules[place].limit)
        return
    if isinstance(found, Closed):
        limiter.count(found.limit)
        raise _closed(found)
    limiter.count(found.why.limit)
    raise _refused(found, prices.currency)


async def foreseen(
    limiter: Limiter, plans: Plans, prices: Prices, ask: Ask
) -> RateLimited | LimitsUnknown | None:
    """Return how limits would refuse a request now; None: they would not. Nothing is taken.

    Cancel: nothing is held.
    """
    plan = plans.of(ask.caller, ask.route.requested, ask.route.pool)
    if plan is None:
        return None
    price = prices.of(ask.route.requested, ask.route.pool) or FREE
    found = await limiter.foresee(plan, costs_of(plan, price, ask))
    if isinstance(found, Closed):
        return _closed(found)
    return None if found is None else _refused(found, prices.currency)


def give_back(limiter: Limiter, record: RequestRecord) -> Taken | None:
    """Give back all that a request has taken, so that it can be charged for another model.

    Returns by what it is settled if it is not charged again: from now on it has taken nothing.
    """
    taken = record.taken
    if taken is None:
        return None
    record.taken = None
    limiter.settle(taken, NOTHING)
    return replace(taken, costs=NOTHING)


def settle(limiter: Limiter, record: RequestRecord) -> None:
    """Give back what a request that ended did not use, and charge what it used more."""
    taken = record.taken
    if taken is not None:
        limiter.settle(taken, actual_of(record, taken.costs))


def costs_of(plan: Plan, price: Price, ask: Ask) -> Amounts:
    """Return what is reserved for a request."""
    need, demand, choices = ask.need, ask.demand, ask.call.choices
    prompt = float(need.prompt_tokens)
    if not demand.exact:
        prompt = min(prompt, plan.input_most, plan.tokens_most)
    limit, expected = demand.max_new_tokens, need.output_tokens  # 0: the endpoint generates nothing
    if limit is not None and expected:
        expected = limit * choices
    room = max(0.0, plan.tokens_most - prompt)
    output = float(min(expected, _CAP_TOKENS * choices, plan.output_most, room))
    money = 0.0
    if plan.priced:
        money = price.of(prompt, 0) if demand.exact else 0.0
        money = max(money, min(price.of(prompt, output), plan.money_most))
    return Amounts(1.0, prompt, output, prompt + output, money)


def actual_of(record: RequestRecord, costs: Amounts) -> Amounts:
    """Return what a request used: nothing if no engine took it; what it reserved if its use is not known.

    One that was refused as wrong (4xx), or failed before its client had anything, was a request, and took
    no tokens.
    """
    if record.outcome is Outcome.SHED or not reached(record.attempts, record.failed):
        return NOTHING
    usage = record.usage
    if usage is None:
        return Amounts(1.0) if source_of(record) in (REFUSED, FAILED) else costs
    prompt, output = float(usage.prompt_tokens), float(usage.completion_tokens)
    price = record.price
    money = 0.0 if price is None else price.of(prompt, output, usage.cached_tokens or 0)
    return Amounts(1.0, prompt, output, prompt + output, money)


def _refused(found: Refused, currency: str) -> RateLimited:
    why = found.why
    message = told(why, share_of=found.share_of, currency=currency)
    error = RateLimited(message, retry_after_s=why.fits_in_s)
    error.lines = header_lines(found.plan, found.used, found.wall, found.share_of)
    error.limit = why.limit
    return error


def _closed(found: Closed) -> LimitsUnknown:
    error = LimitsUnknown(
        f"{whose(found.limit)} has the limit {found.limit.rule.value}, which lets nothing through while the"
        " gateway cannot tell what is used (`on_outage: closed`). Retry later.",
        retry_after_s=_AGAIN_S,
    )
    error.limit = found.limit
    return error
