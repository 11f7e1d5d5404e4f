"""What was used this month, by key and tenant: limits of days and months go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from gateway.core.limits import RULES, Judged, Period, Rule, Scope
from gateway.usage.entries import Place, Sums

_MONEY: Final = RULES[Rule.BUDGET_DAY][1]
_MONTH: Final = len("2026-11")


class Spent:
    """Sums by key and tenant. They may grow later; a new one must be noted here."""

    def __init__(self, sums: Mapping[Place, Sums] | None = None) -> None:
        self._of: dict[tuple[bool, str], list[tuple[Place, Sums]]] = {}
        for place, each in (sums or {}).items():
            self.note(place, each)

    def note(self, place: Place, sums: Sums) -> None:
        """Add sums, to be found by their key and their tenant."""
        _, tenant, key, _, _ = place
        for owner in ((True, tenant), (False, key)):
            self._of.setdefault(owner, []).append((place, sums))

    def of(self, rule: Judged, key_id: str, today: str) -> float:
        """Return what was used of a rule that counts over a day or a month."""
        limit = rule.limit
        begins = today if rule.period is Period.DAY else today[:_MONTH]
        whole = limit.scope in (Scope.TENANT, Scope.TENANT_MODEL)
        return sum(
            each.money if rule.amount == _MONEY else each.input + each.output
            for place, sums in self._of.get((whole, limit.owner if whole else key_id), ())
            if place[0].startswith(begins)
            for each in _counted(limit.models, place, sums)
        )


def folded(sums: Mapping[Place, Sums], today: str) -> dict[Place, Sums]:
    """Return the sums that limits need: today's, and those of the month's other days under one `day`, the month."""
    month = today[:_MONTH]
    found: dict[Place, Sums] = {}
    for (day, *names), each in sums.items():
        if day.startswith(month):
            tenant, key, model, adapter = names
            place = day if day == today else month, tenant, key, model, adapter
            (found.get(place) or found.setdefault(place, Sums())).include(each)
    return found


def _counted(glob: str, place: Place, sums: Sums) -> list[Sums]:
    """Return what of these sums a limit counts: all, or what was asked for by an alias that its glob matches."""
    *_, model, adapter = place
    if not glob or any(fnmatchcase(name, glob) for name in (model, adapter) if name):
        return [sums]
    return [each for alias, each in (sums.asked or {}).items() if fnmatchcase(alias, glob)]
