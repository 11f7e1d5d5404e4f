"""Where the verbs of keys find them: through a settings file, or at a running gateway. Both tell the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from gateway.cli.console import ask, ask_all
from gateway.cli.keydesk import KeyDesk

if TYPE_CHECKING:
    from gateway.access.keystore import CreatedKey, KeyStore
    from gateway.access.records import KeyRecord

_PATH: Final = "/admin/v1/keys"

Told = Mapping[str, Any]


def keys_of(file: Path, server: str | None, token: str) -> KeysOfFile | KeysOfGateway:
    """Return the keys of a running gateway where one is named, else those of a settings file."""
    return KeysOfGateway(server, token) if server else KeysOfFile(file)


class KeysOfFile:
    """The keys of a settings file: in the file that it names, or on the Redis that it names.

    Every call raises VerbError with what is wrong; keys are told as the admin API tells them.
    """

    def __init__(self, file: Path) -> None:
        self._desk = KeyDesk(file)

    def create(self, settings: Mapping[str, object]) -> Told:
        """Make a key; return its `id` and `key`."""
        return _secret(self._desk.ask(lambda store: store.create(settings)))

    def update(self, key_id: str, changes: Mapping[str, object], version: str | None) -> Told:
        """Change a key, if it still has this version; return what is kept of it."""
        from gateway.access.told import key_told

        record = self._desk.ask(lambda store: store.update(key_id, changes, version))
        return key_told(record, time.time())

    def rotate(self, key_id: str, grace_s: float) -> Told:
        """Give a key another secret; return its `id` and `key`."""
        return _secret(self._desk.ask(lambda store: store.rotate(key_id, grace_s)))

    def revoke(self, key_id: str) -> None:
        """End a key."""
        self._desk.ask(lambda store: store.revoke(key_id))

    def list(self) -> list[Told]:
        """Return every key, with what holds for it (`effective`), the oldest first."""
        from gateway.access.told import listed_told

        records, used_s = self._desk.ask(_all)
        tiers, now = self._desk.config.tiers, time.time()
        return [listed_told(each, tiers, now, used_s.get(each.id)) for each in records]

    def get(self, key_id: str) -> Told:
        """Return what is kept of a key."""
        from gateway.access.told import key_told

        record, used_s = self._desk.ask(lambda store: _with_use(store, key_id))
        return key_told(record, time.time(), used_s)

    def effective(self, key_id: str) -> Told:
        """Return each setting of a key with its `value` and `origin`."""
        from gateway.access.told import values_told

        return values_told(self._desk.ask(lambda store: store.get(key_id)), self._desk.config.tiers)


class KeysOfGateway:
    """The keys that a running gateway uses, over its admin listener."""

    def __init__(self, server: str, token: str) -> None:
        self._server = server
        self._token = token

    def create(self, settings: Mapping[str, object]) -> Told:
        """See KeysOfFile."""
        return self._ask("", order=settings)

    def update(self, key_id: str, changes: Mapping[str, object], version: str | None) -> Told:
        """See KeysOfFile."""
        return self._ask(f"/{quote(key_id, safe='')}", order=changes, method="PATCH", seen=version)

    def rotate(self, key_id: str, grace_s: float) -> Told:
        """See KeysOfFile."""
        return self._ask(f"/{quote(key_id, safe='')}:rotate", order={"grace_s": grace_s})

    def revoke(self, key_id: str) -> None:
        """See KeysOfFile."""
        self._ask(f"/{quote(key_id, safe='')}:revoke", order={})

    def list(self) -> list[Told]:
        """See KeysOfFile."""
        rows: list[Told] = ask_all(self._server, _PATH, self._token)["data"]
        return rows

    def get(self, key_id: str) -> Told:
        """See KeysOfFile."""
        return self._ask(f"/{quote(key_id, safe='')}")

    def effective(self, key_id: str) -> Told:
        """See KeysOfFile."""
        settings: Told = self._ask(f"/{quote(key_id, safe='')}/effective")["settings"]
        return settings

    def _ask(
        self,
        path: str,
        order: Mapping[str, object] | None = None,
        method: str = "",
        seen: str | None = None,
    ) -> dict[str, Any]:
        return ask(
            self._server, _PATH + path, self._token, order=order, method=method, if_match=seen
        )


def key_row(told: Told) -> dict[str, Any]:
    """Return a key as a row for a table or for JSON, with what holds; times are RFC 3339 in UTC."""
    holds = told["effective"]
    limits = {
        name.removeprefix("limits."): value
        for name, value in holds.items()
        if name.startswith("limits.")
    }
    return {
        "id": told["id"],
        "name": told["name"],
        "tenant": told["tenant"],
        "priority": holds["priority"],
        "state": told["state"],
        "models": holds["models"],
        "max_context": holds["max_context"],
        "max_output": holds["max_output"],
        "fallback": holds["fallback"],
        "limits": limits or None,
        "created": told.get("created"),
        "ends": told["ends"],
        "kind": told["kind"],
        "role": told.get("role"),
        "owner": told.get("owner"),
        "tier": told.get("tier"),
        "last_used": told["last_used"],
    }


def _secret(made: CreatedKey) -> Told:
    return {"id": made.id, "key": made.key}


async def _all(store: KeyStore) -> tuple[list[KeyRecord], Mapping[str, float]]:
    return [*await store.list()], await store.uses()


async def _with_use(store: KeyStore, key_id: str) -> tuple[KeyRecord, float | None]:
    return await store.get(key_id), await store.last_use(key_id)
