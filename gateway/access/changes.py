"""Changes of a key's record, as values: the record before, the record after. No I/O.

Both forms of the store carry them out, so that a key is the same wherever it is kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.access.effective import Tiers
from gateway.access.keyerrors import BadSettings, VersionConflict, WrongState
from gateway.access.keystore import CreatedKey
from gateway.access.records import (
    CHANGEABLE,
    OF_A_NEW_KEY,
    KeyKind,
    KeyRecord,
    Secret,
    read_fields,
    settings_told,
    timestamp,
)
from gateway.access.secret import digest_of, new_id, new_key
from gateway.config.keysettings import KeySettings
from gateway.core.roles import Role

_TICK_S: Final = 0.001  # of the times that are kept
_DEFAULTS: Final[Mapping[str, object]] = {"metadata": {}}


def created(
    settings: Mapping[str, object], taken: Container[str], pepper: bytes, tiers: Tiers, now: float
) -> CreatedKey:
    """Return a new key; `taken` are the ids that there are.

    Raises:
        BadSettings: with every finding.
    """
    values, findings = read_fields(settings, OF_A_NEW_KEY)
    if "name" not in values and not any(name == "name" for name, _ in findings):
        findings.append(("name", "name: a key needs one"))
    kind = values.get("kind", KeyKind.INFERENCE)
    if kind is KeyKind.ADMIN:
        values.setdefault("role", Role.VIEWER)
    findings += _doubts(values, kind, tiers)
    if findings:
        raise BadSettings(findings)
    key_id = new_id(taken)
    key = new_key(key_id)
    record = KeyRecord(
        **{"tenant": values["name"], **values},
        id=key_id,
        secrets=(Secret(digest_of(key.encode(), pepper)),),
        created_s=now,
        changed_s=now,
    )
    return CreatedKey(record, key)


def updated(
    record: KeyRecord, changes: Mapping[str, object], tiers: Tiers, now: float
) -> KeyRecord:
    """Return a record with changes; None takes a setting away. One that is so already stays as it is.

    Raises:
        BadSettings: with every finding.
    """
    values, findings = read_fields(changes, CHANGEABLE)
    if "kind" in changes:
        findings = [each for each in findings if each[0] != "kind"]
        findings.append(("kind", "kind: a key is of one kind for life; create another one"))
    removed = [name for name, value in changes.items() if value is None]
    if "name" in removed:
        findings.append(("name", "name: a key needs one"))
    values |= {CHANGEABLE[name][0]: _DEFAULTS.get(name) for name in removed if name in CHANGEABLE}
    if "tenant" in removed:
        values["tenant"] = values.get("name", record.name)
    findings += _doubts(values, record.kind, tiers)
    if findings:
        raise BadSettings(findings)
    own = settings_told(record.own) | settings_told(values.pop("own"))
    for name in removed:
        own.pop(name, None)
    after = replace(record, **values, own=KeySettings.model_validate(own))
    if after.version == record.version:
        return record
    return replace(after, changed_s=_after(record, now))


def rotated(record: KeyRecord, grace_s: float, pepper: bytes, now: float) -> CreatedKey:
    """Return the key with a second secret; the one before works `grace_s` more (0: no longer).

    Raises:
        WrongState: it has ended, or has two secrets that work, and a grace is asked for.
    """
    if (state := record.state(now)) in ("revoked", "expired"):
        raise WrongState(f"The key {record.id} is {state}; create a new one.")
    before: tuple[Secret, ...] = ()
    if grace_s > 0:
        current, *others = record.live(now)
        for other in others:
            until = timestamp(other.not_after_s or now)
            raise WrongState(
                f"The key {record.id} has two secrets: the one before the last rotation works until"
                f" {until}. Rotate it after that, or with a grace of 0, which ends both at once."
            )
        before = (replace(current, not_after_s=now + grace_s),)
    key = new_key(record.id)
    secrets = (Secret(digest_of(key.encode(), pepper)), *before)
    return CreatedKey(replace(record, secrets=secrets, changed_s=_after(record, now)), key)


def revoked(record: KeyRecord, now: float) -> KeyRecord:
    """Return the key ended for good; one that was revoked before stays as it is."""
    if record.revoked_s is not None:
        return record
    return replace(record, revoked_s=now, changed_s=_after(record, now))


def _after(record: KeyRecord, now: float) -> float:
    """Return when a record changes now: later than it changed before, however the clocks of two writers differ."""
    return max(now, round((record.changed_s or 0.0) + _TICK_S, 3))


def check_version(record: KeyRecord, if_match: str | None) -> None:
    """Go on when a record is of the version that a change began from.

    Raises:
        VersionConflict: it is not.
    """
    if if_match is not None and if_match != record.version:
        raise VersionConflict(record.version)


def _doubts(values: Mapping[str, Any], kind: KeyKind, tiers: Tiers) -> Iterable[tuple[str, str]]:
    tier, role = values.get("tier"), values.get("role")
    if tier is not None and tier not in tiers:
        known = f"there are {', '.join(tiers)}" if tiers else "the configuration has no `tiers`"
        yield "tier", f"tier: there is no tier `{tier}`; {known}"
    if role is not None and kind is not KeyKind.ADMIN:
        yield "role", "role: only a key of kind `admin` has a role"
    if "role" in values and role is None and kind is KeyKind.ADMIN:
        yield "role", "role: a key of kind `admin` needs a role"
