"""Who asks: the ring that knows every key.

The ring holds HMAC-SHA-256 digests of whole keys: a leaked keys file lets nobody in, and since a
secret has 256 random bits, a slow hash would only cost time. An id that nobody has costs the same
work as one with a wrong secret. That a key was revoked or has expired is told only to who holds it.
No message repeats more of a key than its id and its last two characters.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from gateway.access.effective import Tiers, caller_of, lost_tiers
from gateway.access.keyfile import (
    locked,
    make_pepper,
    pepper_path,
    read_pepper,
    read_records,
    stamp_of,
)
from gateway.access.records import KeyKind, KeyRecord, timestamp
from gateway.access.salt import salting_secret
from gateway.access.secret import ID_AT, digest_of, what_is_wrong
from gateway.core.addresses import within
from gateway.core.errors import (
    AccessError,
    ConfigError,
    KeysUnknown,
    MissingKey,
    WrongAddress,
    WrongKind,
)
from gateway.core.types import Caller

if TYPE_CHECKING:  # it needs a library that is optional
    from gateway.access.tokens import Tokens

_NEVER: Final = float("inf")
_SEEN_MOST: Final = 4096  # headers remembered; more keys than that are checked anew each time
_AGAIN_S: Final = 2.0  # the store is asked once a second
_TOKEN_BEGINS: Final = b"eyJ"  # `{"` in base64, as every JWT; no key does
_CHALLENGE: Final = "Send `Authorization: Bearer <key>`."


@dataclass(frozen=True, slots=True)
class Holder:
    """A key of the ring, and who holds it."""

    record: KeyRecord
    caller: Caller
    ends_s: float  # when it, or the secret that was presented, ends by itself; `inf`: never


class KeyRing:
    """Every key, as of one moment. It never changes: when a key does, there is a new ring."""

    def __init__(  # noqa: PLR0913 - what a ring is made of
        self,
        records: Iterable[KeyRecord],
        pepper: bytes,
        tiers: Tiers | None = None,
        *,
        path: Path | None = None,
        stamp: object = None,
        known: bool = True,
        tokens: Tokens | None = None,
    ) -> None:
        """`path` and `stamp`: the file it was read from. Not `known`: nobody knows the keys yet.

        `tokens`: who holds one of an identity provider is let in, too.
        """
        self.tokens = tokens
        self.path = path
        self.known = known
        self.tiers: Tiers = tiers or {}
        self._pepper = pepper
        self._stamp = stamp
        self._nobody = secrets.token_bytes(32)
        self.salting = salting_secret(pepper)
        # Whole Authorization headers that were right before: most requests bring one of few.
        self._seen: dict[bytes, tuple[Caller, float]] = {}
        self._known = {
            record.id.encode(): Holder(
                record,
                caller_of(record, self.tiers.get(record.tier or "")),
                _NEVER if record.ends_s is None else record.ends_s,
            )
            for record in records
        }

    def with_changes(self, records: Iterable[KeyRecord], gone: Set[str]) -> KeyRing:
        """Return the ring with other records in place of its own, and without some. It costs as they do."""
        ring = KeyRing(
            records, self._pepper, self.tiers,
            path=self.path, stamp=self._stamp, tokens=self.tokens,
        )  # fmt: skip
        kept = dict(self._known)
        for key_id in gone:
            kept.pop(key_id.encode(), None)
        ring._known = kept | ring._known
        return ring

    def __len__(self) -> int:
        return len(self._known)

    def counts_as(self, before: KeyRing) -> bool:
        """Whether each key of a ring before that is here, too, has the limits and the tenant it had."""
        own = self._known
        both = ((was.caller, own[key].caller) for key, was in before._known.items() if key in own)
        return all(a is b or (a.limits, a.tenant) == (b.limits, b.tenant) for a, b in both)

    def check_anew(self) -> None:
        """Remember no header that was right: the keys that tokens are signed with have changed."""
        self._seen.clear()

    def priorities(self, wall_now: float) -> frozenset[int]:
        """Return the priorities of its keys that can send requests now, and those that tokens can have."""
        found = {
            each.caller.priority
            for each in self._known.values()
            if each.record.kind is KeyKind.INFERENCE and self._works(each, wall_now)
        }
        if self.tokens is not None:
            found |= {0, *(each.priority or 0 for each in self.tiers.values())}
        return frozenset(found)

    @classmethod
    def load(cls, path: Path, tiers: Tiers | None = None, tokens: Tokens | None = None) -> KeyRing:
        """Read a keys file and its pepper. Blocks: about 0.6 ms a key. With `tokens` it may be missing.

        Raises:
            ConfigError: one of them is missing or wrong, or a key's tier is not there.
        """
        if tokens is not None and not pepper_path(path).exists():
            # The salts of who holds a token have to be the same in each worker, and after a restart.
            with contextlib.suppress(OSError), locked(path):
                make_pepper(path)
        stamp = stamp_of(path)
        records = [] if tokens is not None and not path.exists() else read_records(path)
        if lost := lost_tiers(records, tiers or {}):
            raise ConfigError([f"{path}: error: {each}" for each in lost])
        # A file without keys lets nobody in, and needs no pepper for that. Who holds a token has a salt by it.
        needed = bool(records) or (tokens is not None and pepper_path(path).exists())
        pepper = read_pepper(path) if needed else secrets.token_bytes(32)
        return cls(records, pepper, tiers, path=path, stamp=stamp, tokens=tokens)

    def changed(self) -> bool:
        """Whether the file, or its pepper, is another than the one this ring was read from."""
        return self.path is not None and stamp_of(self.path) != self._stamp

    def authenticate(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Caller:
        """Return who holds the presented key, for requests to models.

        Raises:
            MissingKey: there is none (401).
            AccessError: it is no key of this ring, it ended, or there are two different ones (401).
            WrongKind: it is a key for the admin API or for metrics (403).
            KeysUnknown: the store of the keys did not answer yet (503).
        """
        if x_api_key is None and api_key is None and authorization is not None:
            seen = self._seen.get(authorization)
            if seen is not None and wall_now < seen[1]:
                return seen[0]
            holder = self.identify(authorization, None, None, wall_now)
            _check_kind(holder.record)
            if len(self._seen) >= _SEEN_MOST:  # tokens come and go
                self._seen.clear()
            if authorization.count(b" ") == 1:  # with more of them a key has any number of headers
                self._seen[authorization] = holder.caller, holder.ends_s
            return holder.caller
        holder = self.identify(authorization, x_api_key, api_key, wall_now)
        _check_kind(holder.record)
        return holder.caller

    def identify(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Holder:
        """Return the presented key, of whatever kind.

        Raises:
            AccessError: see `authenticate`.
        """
        key = _presented(authorization, x_api_key, api_key)
        if self.tokens is not None and key.startswith(_TOKEN_BEGINS):
            record = self.tokens.record_of(key, self.tiers, wall_now)
            caller = caller_of(record, self.tiers.get(record.tier or ""))
            return Holder(record, caller, record.expires_s or wall_now)
        holder = self._known.get(key[ID_AT])
        digest = digest_of(key, self._pepper)
        if holder is None:
            hmac.compare_digest(digest, self._nobody)
            if not self.known:
                raise KeysUnknown(
                    "This gateway has just started and cannot check API keys yet: the store that it shares"
                    " with other gateways does not answer. Your key may be right. Try again shortly.",
                    retry_after_s=_AGAIN_S,
                )
            _refuse(key)
        record = holder.record
        for secret in record.secrets:
            if hmac.compare_digest(digest, secret.digest):
                break
        else:
            _refuse(key)
        ends_s = holder.ends_s
        if secret.not_after_s is not None:
            ends_s = min(ends_s, secret.not_after_s)
        if record.revoked_s is not None or wall_now >= ends_s:
            _ended(record, ends_s)
        if self._lacks_tier(record):
            raise AccessError(
                f"The API key `{record.name}` has the tier `{record.tier}`, which this gateway's"
                " configuration lacks. Ask its operator.",
                code="unknown_tier",
            )
        return holder if ends_s == holder.ends_s else replace(holder, ends_s=ends_s)

    def holder(self, key_id: str, wall_now: float) -> Caller | None:
        """Return who holds the key of a public id; None when there is none that works now."""
        found = self._known.get(key_id.encode())
        return found.caller if found is not None and self._works(found, wall_now) else None

    def _works(self, holder: Holder, wall_now: float) -> bool:
        record = holder.record
        ended = record.revoked_s is not None or wall_now >= holder.ends_s
        return not ended and not self._lacks_tier(record)

    def _lacks_tier(self, record: KeyRecord) -> bool:
        return record.tier is not None and record.tier not in self.tiers


class OpenRing:
    """Lets everybody in as one caller: the setting `keys: none`."""

    known: Final = True
    tiers: Final[Tiers] = {}
    salting: Final = b""  # nobody to keep apart, and no secret to do it with

    def __init__(self) -> None:
        self._anonymous = Caller(key_id="anonymous", name="anonymous", tenant="anonymous")

    def priorities(self, wall_now: float) -> frozenset[int]:
        """Return those of keys, and there are none."""
        return frozenset()

    def authenticate(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Caller:
        """Return the one caller, whatever was presented."""
        return self._anonymous

    def identify(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Holder:
        """Return who everybody is."""
        who = self._anonymous
        record = KeyRecord(id=who.key_id, name=who.name, tenant=who.tenant, secrets=())
        return Holder(record, who, _NEVER)

    def holder(self, key_id: str, wall_now: float) -> Caller | None:
        """Return nobody: there are no keys."""
        return None

    def check_anew(self) -> None:
        """Nothing is remembered."""


def check_address(caller: Caller, host: str | None) -> None:
    """Go on when a caller's key may be used from an address; None is a UNIX socket.

    Raises:
        WrongAddress: it may not (403).
    """
    if caller.addresses is not None and not within(host, caller.addresses):
        raise WrongAddress(
            f"The API key `{caller.name}` may not be used from your address"
            f"{'' if host is None else f', {host}'}: it is bound to certain networks (`addresses`)."
            " Ask the operator of this gateway."
        )


def _check_kind(record: KeyRecord) -> None:
    if record.kind is not KeyKind.INFERENCE:
        what = "the admin API" if record.kind is KeyKind.ADMIN else "metrics"
        raise WrongKind(
            f"The API key `{record.name}` is for {what} of this gateway, and may not use models. Use a"
            " key of kind `inference`."
        )


def _presented(
    authorization: bytes | None, x_api_key: bytes | None, api_key: bytes | None
) -> bytes:
    """Return the one key of the three headers that may carry it."""
    key = x_api_key or api_key
    if key is not None and x_api_key and api_key and x_api_key != api_key:
        raise AccessError("Two different API keys were sent. Send one.")
    if not authorization:
        if not key:
            raise MissingKey(f"You didn't provide an API key. {_CHALLENGE}")
        return key
    scheme, _, bearer = authorization.partition(b" ")
    if scheme != b"Bearer" and scheme.lower() != b"bearer":
        raise AccessError(f"The Authorization header is not a bearer token. {_CHALLENGE}")
    bearer = bearer.strip(b" ")
    if not bearer:
        raise MissingKey(f"You didn't provide an API key: the token is empty. {_CHALLENGE}")
    if key and key != bearer:
        raise AccessError("Two different API keys were sent. Send one.")
    return bearer


def _refuse(key: bytes) -> NoReturn:
    raise AccessError(f"Incorrect API key provided: {what_is_wrong(key)}")


def _ended(record: KeyRecord, ends_s: float) -> NoReturn:
    """Say since when a key has not worked, to who has just proved to hold it."""
    ask = "Ask the operator of this gateway for a new one."
    if record.revoked_s is not None:
        raise AccessError(
            f"The API key `{record.name}` was revoked {timestamp(record.revoked_s)}. {ask}"
        )
    how = "expired" if ends_s == record.expires_s else "was replaced by a newer one and ended"
    raise AccessError(f"The API key `{record.name}` {how} {timestamp(ends_s)}. {ask}")
