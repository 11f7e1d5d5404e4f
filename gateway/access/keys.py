"""Who asks: the format of a key, the ring that knows them all, and the changes to it.

    gw_7k2m9qxd_<43 characters of secret>_<6 check characters>
       id, public                         CRC-32 of what is before, to tell a typing mistake

The ring holds HMAC-SHA-256 digests of whole keys: a leaked keys file lets nobody in, and since a
secret has 256 random bits, a slow hash would only cost time. An id that nobody has costs the same
work as one with a wrong secret. That a key was revoked or has expired is told only to who holds it.
No message repeats more of a key than its id and its last two characters.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from gateway.access.keyfile import edit, read_pepper, read_records, stamp_of
from gateway.access.records import KeyInfo, KeyRecord, as_node, timestamp
from gateway.access.salt import salting_secret
from gateway.core.errors import AccessError, ConfigError, MissingKey
from gateway.core.types import Caller

_SHAPE: Final = re.compile(rb"gw_([a-z0-9]{8})_[A-Za-z0-9_-]{43}_([A-Za-z0-9]{6})")
_ID_AT: Final = slice(3, 11)
_CHECK_AT: Final = -6
_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz"  # none that reads as another: no l, o, 0, 1
_ID_CHARS: Final = _LETTERS + "23456789"
_BASE62: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NEVER: Final = float("inf")
_SEEN_MOST: Final = 4096  # headers remembered; more keys than that are checked anew each time
_CHALLENGE: Final = "Send `Authorization: Bearer <key>`."


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A new key. `key` is shown this once: only its digest is kept."""

    id: str
    key: str


class KeyRing:
    """Every key of one keys file. Its keys never change: a changed file is a new ring."""

    def __init__(
        self, records: list[KeyRecord], pepper: bytes, *, path: Path, stamp: object = None
    ) -> None:
        self.path = path
        self._pepper = pepper
        self._stamp = stamp
        self._nobody = secrets.token_bytes(32)
        self.salting = salting_secret(pepper)
        # Whole Authorization headers that were right before: most requests bring one of few.
        self._seen: dict[bytes, tuple[Caller, float]] = {}
        self._known = {
            record.info.id.encode(): (
                record.digest,
                _NEVER if record.info.ends_s is None else record.info.ends_s,
                record.info,
                _caller(record.info),
            )
            for record in records
        }

    def __len__(self) -> int:
        return len(self._known)

    @property
    def priorities(self) -> frozenset[int]:
        """The priorities that its keys have."""
        return frozenset(info.priority for _, _, info, _ in self._known.values())

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read a keys file and its pepper. Blocks: about 0.6 ms a key.

        Raises:
            ConfigError: one of them is missing or wrong.
        """
        stamp = stamp_of(path)
        records = read_records(path)
        # A file without keys lets nobody in, and needs no pepper for that.
        pepper = read_pepper(path) if records else secrets.token_bytes(32)
        return cls(records, pepper, path=path, stamp=stamp)

    def changed(self) -> bool:
        """Whether the file, or its pepper, is another than the one this ring was read from."""
        return stamp_of(self.path) != self._stamp

    def authenticate(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Caller:
        """Return who holds the presented key.

        Raises:
            MissingKey: there is none (401).
            AccessError: it is not a key of this ring, it ended, or there are two different ones
                (401).
        """
        alone = x_api_key is None and api_key is None and authorization is not None
        if alone and (seen := self._seen.get(authorization or b"")) is not None:
            caller, ends_s = seen
            if wall_now < ends_s:
                return caller
        key = _presented(authorization, x_api_key, api_key)
        found = self._known.get(key[_ID_AT])
        digest = hmac.digest(self._pepper, key, "sha256")
        if found is None:
            hmac.compare_digest(digest, self._nobody)
            _refuse(key)
        expected, ends_s, info, holder = found
        if not hmac.compare_digest(digest, expected):
            _refuse(key)
        if holder is None or wall_now >= ends_s:
            _ended(info)
        if alone and len(self._seen) < _SEEN_MOST:
            self._seen[authorization or b""] = (holder, ends_s)
        return holder

    def holder(self, key_id: str, wall_now: float) -> Caller | None:
        """Return who holds the key of a public id; None when there is none that works now."""
        _, ends_s, _, caller = self._known.get(key_id.encode(), (b"", _NEVER, None, None))
        return caller if wall_now < ends_s else None


class OpenRing:
    """Lets everybody in as one caller: the setting `keys: none`."""

    priorities: Final[frozenset[int]] = frozenset()  # those of keys, and there are none
    salting: Final = b""  # nobody to keep apart, and no secret to do it with

    def __init__(self) -> None:
        self._anonymous = Caller(key_id="anonymous", name="anonymous", tenant="anonymous")

    def authenticate(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        api_key: bytes | None,
        wall_now: float,
    ) -> Caller:
        """Return the one caller, whatever was presented."""
        return self._anonymous

    def holder(self, key_id: str, wall_now: float) -> Caller | None:
        """Return nobody: there are no keys."""
        return None


def _caller(info: KeyInfo) -> Caller | None:
    """Return the caller of a key; None when it was revoked."""
    if info.revoked_s is not None:
        return None
    return Caller(
        key_id=info.id,
        name=info.name,
        tenant=info.tenant,
        priority=info.priority,
        models=info.models,
        parameters=info.parameters,
        max_context_tokens=info.max_context_tokens,
        max_output_tokens=info.max_output_tokens,
        falls_back=info.fallback,
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
    """Say why a key that does not match was refused, as far as its own letters tell."""
    shape = _SHAPE.fullmatch(key)
    if shape is None:
        raise AccessError(
            "Incorrect API key provided: it does not look like a key of this gateway "
            "(gw_<id>_<secret>_<check>). Was it truncated when it was copied?"
        )
    masked = f"gw_{shape[1].decode()}_***{shape[2][-2:].decode()}"
    if checksum(key[: _CHECK_AT - 1]) != shape[2].decode():
        raise AccessError(
            f"Incorrect API key provided: {masked}. Its check characters do not match: the "
            "key was mistyped, or altered when it was copied."
        )
    raise AccessError(f"Incorrect API key provided: {masked}. This gateway has no such key.")


def _ended(info: KeyInfo) -> NoReturn:
    """Say since when a key has not worked, to who has just proved to hold it."""
    ask = "Ask the operator of this gateway for a new one."
    if info.revoked_s is not None:
        raise AccessError(
            f"The API key `{info.name}` was revoked {timestamp(info.revoked_s)}. {ask}"
        )
    how = "expired" if info.ends_s == info.expires_s else "was replaced by a newer one and ended"
    raise AccessError(f"The API key `{info.name}` {how} {timestamp(info.ends_s or 0.0)}. {ask}")


def checksum(text: bytes) -> str:
    """Return the six check characters of the part before them: CRC-32 in base 62."""
    rest, out = zlib.crc32(text), ""
    for _ in range(-_CHECK_AT):
        rest, digit = divmod(rest, 62)
        out = _BASE62[digit] + out
    return out


# --- changes --------------------------------------------------------------------------------------


def create(  # noqa: PLR0913 - a key's settings, by keyword
    path: Path,
    *,
    name: str,
    models: tuple[str, ...] = ("*",),
    tenant: str | None = None,
    max_context_tokens: int | None = None,
    max_output_tokens: int | None = None,
    priority: int = 0,
    fallback: bool = True,
    expires_in_s: float | None = None,
    wall_now: float | None = None,
) -> CreatedKey:
    """Add a key to the file; the file and its pepper are made when missing.

    Raises:
        ConfigError: the file is wrong or may not be written, or a setting is.
    """
    now = time.time() if wall_now is None else wall_now
    info = KeyInfo(
        id="",
        name=name,
        tenant=tenant or name,
        models=models,
        max_context_tokens=max_context_tokens,
        max_output_tokens=max_output_tokens,
        priority=priority,
        fallback=fallback,
        created_s=now,
        expires_s=None if expires_in_s is None else now + expires_in_s,
    )
    with edit(path) as (nodes, records):
        record, created = _mint(info, path, records)
        nodes.append(as_node(record))
    return created


def list_keys(path: Path) -> list[KeyInfo]:
    """Return what may be told of every key, in the order of the file.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    return [record.info for record in read_records(path)]


def revoke(path: Path, key_id: str, *, wall_now: float | None = None) -> KeyInfo:
    """End a key for good; a key that was revoked before stays as it is.

    Raises:
        ConfigError: there is no such key, or the file may not be written.
    """
    now = time.time() if wall_now is None else wall_now
    with edit(path) as (nodes, records):
        index = _find(path, records, key_id)
        info = records[index].info
        if info.revoked_s is None:
            nodes[index]["revoked"] = timestamp(now)
            info = replace(info, revoked_s=now)
    return info


def rotate(
    path: Path, key_id: str, grace_s: float = 0.0, *, wall_now: float | None = None
) -> CreatedKey:
    """Add a key with the same settings; the old one works `grace_s` more, if it would have anyhow.

    Raises:
        ConfigError: there is no such key, it has ended, or the file may not be written.
    """
    now = time.time() if wall_now is None else wall_now
    with edit(path) as (nodes, records):
        index = _find(path, records, key_id)
        old = records[index].info
        if (state := old.state(now)) in ("revoked", "expired"):
            raise ConfigError([f"{path}: error: the key {key_id} is {state}; create a new one"])
        info = replace(old, created_s=now, not_after_s=None)
        record, created = _mint(info, path, records)
        ends_s = min(now + grace_s, old.ends_s if old.ends_s is not None else _NEVER)
        nodes[index]["not_after"] = timestamp(ends_s)
        nodes.append(as_node(record))
    return created


def _mint(info: KeyInfo, path: Path, records: list[KeyRecord]) -> tuple[KeyRecord, CreatedKey]:
    """Make a key that no record has yet."""
    taken = {record.info.id for record in records}
    key_id = ""
    while not key_id or key_id in taken:
        # A letter first, so that YAML never reads an id as a number.
        rest = "".join(secrets.choice(_ID_CHARS) for _ in range(7))
        key_id = secrets.choice(_LETTERS) + rest
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    body = f"gw_{key_id}_{secret}"
    key = f"{body}_{checksum(body.encode())}"
    digest = hmac.digest(read_pepper(path), key.encode(), "sha256")
    return KeyRecord(replace(info, id=key_id), digest), CreatedKey(key_id, key)


def _find(path: Path, records: list[KeyRecord], key_id: str) -> int:
    for index, record in enumerate(records):
        if record.info.id == key_id:
            return index
    raise ConfigError([f"{path}: error: there is no key with the id {key_id}"])
