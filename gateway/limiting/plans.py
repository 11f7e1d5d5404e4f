"""Compile the limits that a request has to fit, once for each key, model and pool, in the order of their scopes.

A request has the limits of its key, those of its key for its model, and those of its tenant. Each scope has two
stores of its own: one for amounts, one for running requests. The names of stores have the tenant as hash tag,
so that one script may use all of them on one node of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from gateway.core.asked import Caller
from gateway.core.limits import (
    RULES,
    Judged,
    KeyLimits,
    Limit,
    OnOutage,
    Period,
    Plan,
    Rule,
    Scope,
    Taken,
    limits_within,
    manner_of,
)
from gateway.limiting.levels import CALENDAR
from gateway.limiting.rules import MONEY, passed_by
from gateway.store.scripts import PREFIX

_MOST_CACHED: Final = 4096
_LABELS: Final[tuple[tuple[bytes, frozenset[Rule]], ...]] = (
    (b"requests", frozenset({Rule.REQUESTS})),
    (
        b"tokens",
        frozenset({Rule.INPUT, Rule.OUTPUT, Rule.TOKENS_DAY, Rule.TOKENS_MONTH}),
    ),
    (b"input-tokens", frozenset({Rule.INPUT})),
    (b"output-tokens", frozenset({Rule.OUTPUT})),
)


class Plans:
    """The plans of the keys in force. A key whose settings changed is another `Caller`, with a new plan."""

    def __init__(self, tenants: Mapping[str, KeyLimits]) -> None:
        self._tenants = tenants
        self._made: dict[tuple[str, str, str], tuple[Caller, Plan | None]] = {}

    def of(self, caller: Caller, model: str, pool: str) -> Plan | None:
        """Return the plan of a request; None: it has no limits."""
        if caller.limits is None and caller.tenant not in self._tenants:
            return None
        made = self._made.get((caller.key_id, model, pool))
        if made is not None and made[0] is caller:
            return made[1]
        if len(self._made) >= _MOST_CACHED:
            self._made.clear()
        plan = compiled(caller, self._tenants.get(caller.tenant), model, pool)
        self._made[caller.key_id, model, pool] = caller, plan
        return plan


def compiled(
    caller: Caller, of_tenant: KeyLimits | None, model: str = "", pool: str = ""
) -> Plan | None:
    """Return the plan of a key for a model, None where nothing is limited."""
    scopes = _scopes(caller, of_tenant, (model, pool))
    rules: list[Judged] = []
    stores: list[str] = []
    for scope, owner, glob, store, limits in scopes:
        places: dict[bool, int] = {}
        for limit in limits_of(limits, scope, owner, glob):
            period, amount = RULES[limit.rule]
            runs = period is Period.RUNNING
            if runs not in places:
                places[runs] = len(stores)
                # The tenant comes first, as a glob of models may be any text.
                stores.append(f"{PREFIX}{{t:{caller.tenant}}}:{'runs:' if runs else ''}{store}")
            rules.append(Judged(places[runs], period, amount, limit.most, limit.shadow, limit))
    if not rules:
        return None
    return Plan(
        key_id=caller.key_id,
        rules=tuple(rules),
        stores=tuple(stores),
        words=_words(rules),
        calendar=_words([each for each in rules if each.period in CALENDAR]),
        months=_words([each for each in rules if each.period is Period.MONTH]),
        running=tuple(each.store for each in rules if each.period is Period.RUNNING),
        shown=tuple(_shown(rules)),
        input_most=_least(rules, Rule.INPUT),
        output_most=_least(rules, Rule.OUTPUT),
        tokens_most=_least(rules, Rule.TOKENS_DAY, Rule.TOKENS_MONTH),
        money_most=_least(rules, Rule.BUDGET_DAY, Rule.BUDGET_MONTH),
        closed=next((r.limit for r in rules if r.limit.on_outage is OnOutage.CLOSED), None),
        priced=any(each.amount == MONEY for each in rules),
    )


def charged(taken: Taken) -> Plan:
    """Return the rules of a plan from which a request took something: they count what it used in the end."""
    plan = taken.plan
    passed = passed_by(plan, taken.shadowed) if taken.shadowed else None
    if not passed:
        return plan
    rules = [rule for place, rule in enumerate(plan.rules) if place not in passed]
    return replace(plan, rules=tuple(rules), words=_words(rules))


def limits_of(limits: KeyLimits, scope: Scope, owner: str, models: str = "") -> Iterator[Limit]:
    """Yield the limits that a mapping states."""
    for rule in Rule:
        most = getattr(limits, rule.value)
        if most is not None:
            on_outage, shadow = manner_of(limits, rule)
            # What is in shadow refuses nothing, whatever happens.
            on_outage = OnOutage.OPEN if shadow else on_outage or OnOutage.LOCAL
            yield Limit(scope, owner, models, rule, most, on_outage, bool(shadow))


def _scopes(
    caller: Caller, of_tenant: KeyLimits | None, names: tuple[str, str]
) -> Iterator[tuple[Scope, str, str, str, KeyLimits]]:
    """Yield each scope of a request: its owner, its glob of models, the name of its store, and its limits."""
    if caller.limits is not None:
        store = f"key:{caller.key_id}"
        yield Scope.KEY, caller.name, "", store, caller.limits
        for glob, limits in _matching(caller.limits, names):
            yield Scope.KEY_MODEL, caller.name, glob, f"{store}:{glob}", limits
    if of_tenant is not None:
        yield Scope.TENANT, caller.tenant, "", "all", of_tenant
        for glob, limits in _matching(of_tenant, names):
            yield Scope.TENANT_MODEL, caller.tenant, glob, f"all:{glob}", limits


def _matching(limits: KeyLimits, names: tuple[str, str]) -> Iterator[tuple[str, KeyLimits]]:
    for glob, each in limits.models:
        if any(fnmatchcase(name, glob) for name in names):
            yield glob, limits_within(each, limits)


def _words(rules: list[Judged]) -> str:
    """Return rules as scripts read them: store, field, limit, and whether it refuses."""
    return " ".join(
        f"{each.store + 1} {each.amount}{each.period.value} {each.most:.6f} {int(not each.shadow)}"
        for each in rules
    )


def _shown(rules: list[Judged]) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    for label, counted in _LABELS:
        places = [
            place
            for place, each in enumerate(rules)
            if each.limit.rule in counted and not each.shadow
        ]
        if places:
            yield label, tuple(places)


def _least(rules: list[Judged], *counted: Rule) -> float:
    return min(
        (each.most for each in rules if each.limit.rule in counted and not each.shadow),
        default=math.inf,
    )
