"""What may be told of a key: everything but its digests. For the command line, the admin API and its holder."""

from __future__ import annotations

from math import inf
from typing import Any

from gateway.access.effective import Tiers, Value, effective
from gateway.access.keys import Holder
from gateway.access.records import KeyRecord, identity_told, settings_told, times_told, timestamp


def key_told(record: KeyRecord, wall_now: float, used_s: float | None = None) -> dict[str, Any]:
    """Return a record without secrets; `settings` are those that it sets itself. `used_s`: its last use."""
    before = [each for each in record.live(wall_now)[1:] if each.not_after_s is not None]
    return {
        "id": record.id,
        "kind": record.kind.value,
        **identity_told(record),
        "state": record.state(wall_now),
        "settings": settings_told(record.own),
        **times_told(record),
        "previous_secret_until": timestamp(before[0].not_after_s or 0.0) if before else None,
        "last_used": None if used_s is None else timestamp(used_s),
        "version": record.version,
    }


def listed_told(
    record: KeyRecord, tiers: Tiers, wall_now: float, used_s: float | None
) -> dict[str, Any]:
    """Return a record as `key_told`, with when it ends and what holds for it now."""
    values = effective(record, tiers.get(record.tier or ""))
    ends_s = record.ends_s if record.revoked_s is None else record.revoked_s
    return {
        **key_told(record, wall_now, used_s),
        "ends": None if ends_s is None else timestamp(ends_s),
        "effective": {name: each.value for name, each in sorted(values.items())},
    }


def own_told(holder: Holder, tiers: Tiers, wall_now: float) -> dict[str, Any]:
    """Return what a key may know of itself: who it is, what it may do, and when it ends."""
    record = holder.record
    values = {
        name: it.value for name, it in effective(record, tiers.get(record.tier or "")).items()
    }
    limits = {name[7:]: values.pop(name) for name in [*values] if name.startswith("limits.")}
    parameters = {
        name[11:]: values.pop(name) for name in [*values] if name.startswith("parameters.")
    }
    return {
        "object": "key",
        "id": record.id,
        "name": record.name,
        "tenant": record.tenant,
        "kind": record.kind.value,
        "role": None if record.role is None else record.role.value,
        "tier": record.tier,
        "state": record.state(wall_now),
        "expires": None if holder.ends_s == inf else timestamp(holder.ends_s),
        **values,
        "parameters": parameters,
        "limits": limits,
    }


def values_told(record: KeyRecord, tiers: Tiers) -> dict[str, dict[str, Any]]:
    """Return what holds for a key, each value with its origin: key, tier or default."""
    values = effective(record, tiers.get(record.tier or ""))
    return {name: _told(value) for name, value in sorted(values.items())}


def _told(value: Value) -> dict[str, Any]:
    return {"value": value.value, "origin": value.origin.value}
