"""Where keys are kept: one protocol, in a file (`access.filestore`) or on Redis for all replicas.

Settings and changes are mappings in the words of the keys file: `{"name": "ci", "models": ["qwen3-*"],
"limits": {"requests_per_minute": 60}, "expires": "2027-01-01T00:00:00Z"}`. What every form guarantees,
and `tests/keycases.py` holds it to:

* A change is whole: who reads meanwhile sees the record before it or after it.
* Two changes of one record that began from the same version: the second one is refused, if it says so
  (`if_match`), else it applies to what the first one left.
* An id stays for life, and nothing is deleted: what was revoked stays listed.
* A key is shown once, in `CreatedKey`. A record holds digests, which its `repr` hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.access.records import KeyRecord

# How far the clocks of two gateways may differ. A last use that lies further ahead was noted by a wrong clock.
CLOCKS_DIFFER_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new secret. `key` is shown this once: only its digest is kept."""

    record: KeyRecord
    key: str = field(repr=False)

    @property
    def id(self) -> str:
        """The key's id."""
        return self.record.id


class KeyStore(Protocol):
    """The keys. See the module for what every form guarantees.

    Every call may raise ConfigError (the file is wrong, or may not be read or written),
    StoreUnavailable (Redis does not answer; whether a change was made is unknown), WrongPepper or NotUnderstood.
    """

    async def list(self) -> Sequence[KeyRecord]:
        """Return every record, the oldest first."""

    async def get(self, key_id: str) -> KeyRecord:
        """Return one record.

        Raises:
            NoSuchKey: no record has this id.
        """

    async def create(self, settings: Mapping[str, object]) -> CreatedKey:
        """Make a key. `name` is needed; `kind` is for life.

        Raises:
            BadSettings: with every finding.
        """

    async def update(
        self, key_id: str, changes: Mapping[str, object], if_match: str | None = None
    ) -> KeyRecord:
        """Set what `changes` names; None takes a setting away, so that the tier or the default holds.

        Raises:
            NoSuchKey: no record has this id.
            BadSettings: with every finding; nothing is changed.
            VersionConflict: its version is not `if_match`.
        """

    async def rotate(self, key_id: str, grace_s: float, if_match: str | None = None) -> CreatedKey:
        """Make a second secret of the same key; the one before works `grace_s` more (0: no longer).

        Raises:
            NoSuchKey: no record has this id.
            WrongState: it has ended, or has two secrets that work, and a grace is asked for.
            VersionConflict: its version is not `if_match`.
        """

    async def revoke(self, key_id: str, if_match: str | None = None) -> KeyRecord:
        """End a key for good; one that was revoked before stays as it is.

        Raises:
            NoSuchKey: no record has this id.
            VersionConflict: its version is not `if_match`.
        """

    async def note_use(self, at: Mapping[str, float]) -> None:
        """Note when keys (by id) were last used, wall time; the latest time stays, unless it is still to come."""

    async def last_use(self, key_id: str) -> float | None:
        """Return when a key was last used; None: nothing was noted."""

    async def uses(self) -> Mapping[str, float]:
        """Return when each key was last used, as far as that was noted."""
