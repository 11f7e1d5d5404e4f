"""Usage as rows, grouped as asked, for people and for spreadsheets. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, Final

from typing_extensions import TypedDict

from gateway.usage.entries import Place, Used

PLACES: Final = ("day", "tenant", "key", "model", "adapter")
MOST_DAYS: Final = 400


class UsageRow(TypedDict):
    """Sums of requests. A place that is not grouped by is null."""

    id: str  # of the row in its list
    day: str | None
    tenant: str | None
    key: str | None
    model: str | None  # the pool that answered
    adapter: str | None  # empty: the model itself
    requests: int
    input_tokens: int
    cached_tokens: int  # among the input
    output_tokens: int
    money: float
    complete: bool  # false: Redis, or a ledger, could not be read, so usage elsewhere is missing


def days_between(first: str, last: str) -> list[str]:
    """Return all days from one to another, both included.

    Raises:
        ValueError: one is no day, the last is before the first, or there are too many.
    """
    begin, end = _day(first), _day(last)
    count = (end - begin).days + 1
    if count < 1:
        raise ValueError(f"the last day, {last}, is before the first, {first}")
    if count > MOST_DAYS:
        raise ValueError(
            f"from {first} to {last} are {count} days; at most {MOST_DAYS} are read at a time"
        )
    return [(begin + timedelta(days=each)).isoformat() for each in range(count)]


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text} is not a day: write it like 2026-11-01") from None


def rows(used: Used, by: Sequence[str], only: Mapping[str, str]) -> list[UsageRow]:
    """Return usage grouped by some of `PLACES`, in order; `only` names the values of places that count."""
    found: dict[Place, list[float]] = {}
    for place, each in used.sums.items():
        named = dict(zip(PLACES, place, strict=True))
        if any(named[name] != value for name, value in only.items()):
            continue
        group = tuple(named[name] if name in by else None for name in PLACES)
        total = found.setdefault(group, [0.0] * 5)  # type: ignore[arg-type]
        amounts = (each.requests, each.input, each.cached, each.output, each.money)
        for at, amount in enumerate(amounts):
            total[at] += amount
    ordered = sorted(found.items(), key=lambda it: [each or "" for each in it[0]])
    return [_row(place, total, complete=used.complete) for place, total in ordered]


def _row(place: Place, total: Sequence[float], *, complete: bool) -> UsageRow:
    day, tenant, key, model, adapter = place
    requests, prompt, cached, output = map(round, total[:4])
    return UsageRow(
        id="/".join(_escaped(each or "") for each in place),
        day=day,
        tenant=tenant,
        key=key,
        model=model,
        adapter=adapter,
        requests=requests,
        input_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        money=round(total[4], 9),
        complete=complete,
    )


def _escaped(name: str) -> str:
    """Return a name with its slashes escaped, so that different names make different ids."""
    return name.replace("%", "%25").replace("/", "%2F")


def as_csv(listed: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a head: null is empty, true and false are as in JSON.

    A text that a spreadsheet would run as a formula gets a `'` in front.
    """
    names = [name for name in UsageRow.__annotations__ if name != "id"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in listed:
        writer.writerow([_safe(row[name]) for name in names])
    return out.getvalue()


def _safe(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
