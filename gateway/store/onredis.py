"""The shared store of several gateways: on Redis, or Valkey, by the scripts of `store.scripts`."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from gateway.core.aio import Clock
from gateway.store import scripts
from gateway.store.address import client_of
from gateway.store.link import CONNECT_S, LISTENS_S, Link
from gateway.store.scripts import BUDGET_S
from gateway.store.shared import (
    CLAIM_S,
    LEASE_S,
    LIFTED,
    LIFTED_S,
    LOG_KEPT,
    LOG_READ,
    LOG_TOLD_S,
    START_CLAIM_S,
    Board,
    Heard,
    Lease,
    StoreUnavailable,
)

_LONGEST_LEASE_S: Final = 60.0  # of any version; see `scripts.ACQUIRE`
_UNCONFIRMED_KEPT: Final = 4096
_WORD_S: Final = 86_400.0
_HOLDS: Final = f"{scripts.PREFIX}{{holds}}"
_BOARDS: Final = {
    Board.REPLICAS: f"{scripts.PREFIX}{{replicas}}",
    Board.UNDER_WAY: f"{scripts.PREFIX}{{under way}}",
    Board.CANARIES: f"{scripts.PREFIX}{{canaries}}",
    Board.ADAPTERS: f"{scripts.PREFIX}{{adapters}}",
}
_ALL: Final = ""  # the scope that stands for all


@dataclass(slots=True)
class RedisStore:
    """See `SharedStore`."""

    link: Link
    clock: Clock
    # Names of claims whose confirmation was lost: asked again with the same one, they are ours.
    _unconfirmed: dict[str, str] = field(default_factory=dict)

    @property
    def trouble(self) -> str:
        """See `SharedStore`."""
        return self.link.trouble

    async def acquire(self, name: str, holder: str) -> Lease | None:
        """See `SharedStore`."""
        began = self.clock.now()
        keys = [_key(name, "lease"), _key(name, "fence")]
        times = _ms(LEASE_S), _ms(_LONGEST_LEASE_S)
        token = await self.link.ask(scripts.ACQUIRE, keys, (holder, *times))
        return Lease(name, holder, token, began + LEASE_S) if token else None

    async def renew(self, lease: Lease) -> Lease | None:
        """See `SharedStore`."""
        began = self.clock.now()
        keys = [_key(lease.name, "lease")]
        lives = await self.link.ask(scripts.RENEW, keys, (_held(lease), _ms(LEASE_S)))
        return replace(lease, until=began + LEASE_S) if lives else None

    async def release(self, lease: Lease) -> None:
        """See `SharedStore`."""
        await self.link.ask(scripts.RELEASE, [_key(lease.name, "lease")], [_held(lease)])

    async def claim_restart(
        self, backend_id: str, incarnation: str | None, attempt: int = 1
    ) -> bool:
        """See `SharedStore`."""
        key = _key(backend_id, f"claim:{attempt}:{incarnation or ''}")
        lasts_s = START_CLAIM_S if incarnation is None else CLAIM_S
        word = self._unconfirmed.pop(key, None) or secrets.token_hex(8)
        try:
            return bool(await self.link.ask(scripts.CLAIM, [key], [word, _ms(lasts_s)]))
        except (StoreUnavailable, asyncio.CancelledError):
            self._unconfirmed[key] = word
            if len(self._unconfirmed) > _UNCONFIRMED_KEPT:
                del self._unconfirmed[next(iter(self._unconfirmed))]
            raise

    async def hold(self, scope: str | None, for_s: float | None = None) -> None:
        """See `SharedStore`."""
        lasts = "inf" if for_s is None else _ms(for_s)
        await self.link.ask(scripts.HOLD, [_HOLDS], [scope or _ALL, lasts])

    async def lift(self, scope: str | None) -> None:
        """See `SharedStore`."""
        await self.link.ask(scripts.LIFT, [_HOLDS], [scope or _ALL, _ms(LIFTED_S)])

    async def holds(self) -> Mapping[str | None, float]:
        """See `SharedStore`."""
        found: Sequence[Any] = await self.link.ask(scripts.HOLDS, [_HOLDS], [])
        now = self.clock.now()
        pairs = zip(found[::2], found[1::2], strict=True)
        return {scope or None: _end(left, now) for scope, left in pairs}

    async def beat(
        self, replica_id: str, told: str, keep_s: float, board: Board = Board.REPLICAS
    ) -> Mapping[str, tuple[str, float]]:
        """See `SharedStore`."""
        found = await self.link.ask(scripts.BEAT, [_BOARDS[board]], [replica_id, told, _ms(keep_s)])
        triples = zip(found[::3], found[1::3], found[2::3], strict=True)
        return {each: (text, int(age_ms) / 1000) for each, text, age_ms in triples}

    async def tell(self, log: str, word: str, by: str, told: str, after: int) -> Heard:
        """See `SharedStore`."""
        bounds = LOG_KEPT, LOG_READ, _ms(LOG_TOLD_S), _ms(_WORD_S)
        keys = [_key(log, "log"), _key(log, "word")]
        found = await self.link.ask(scripts.TELL, keys, (word, by, told, after, *bounds))
        return Heard(found[0], found[1], found[2:])

    async def try_rights(self, *, lists: bool) -> None:
        """Try each command that a gateway uses; those of lists are for keys that gateways share.

        Raises:
            StoreUnavailable: Redis does not answer, or its user may not do that.
        """
        name = secrets.token_hex(8)
        keys = [_key(name, kind) for kind in ("text", "hash", "set", "list")]
        for _ in range(2):  # as text, then by its name
            await self.link.ask(scripts.TRY, keys, [int(lists)])

    async def close(self) -> None:
        """See `SharedStore`."""
        await self.link.close()


def redis_store(url: str, clock: Clock, reply_s: float = BUDGET_S) -> RedisStore:
    """Return the store at a URL; nothing is opened yet. A call that takes longer than `reply_s` is late.

    Raises:
        ValueError: it is not the URL of a Redis.
    """
    listens_s = max(reply_s, LISTENS_S)
    client = client_of(url, connect_s=CONNECT_S, reply_s=None)  # the link gives up in time
    return RedisStore(Link(client, clock, budget_s=reply_s, listens_s=listens_s), clock)


def _key(name: str, what: str) -> str:
    """Return the key of something; what has one name is on one node of a cluster."""
    return f"{scripts.PREFIX}{{{name}}}:{what}"


def _held(lease: Lease) -> str:
    return f"{lease.holder}:{lease.token}"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _end(left: str, now: float) -> float:
    match left:
        case "inf":
            return math.inf
        case "lifted":
            return LIFTED
        case _:
            return now + int(left) / 1000
