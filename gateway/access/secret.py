"""The text of a key: how it is made, and what its letters alone tell.

    gw_7k2m9qxd_<43 characters of secret>_<6 check characters>
       id, public                         CRC-32 of what is before, to tell a typing mistake

A key has one id for life. A rotation makes another text with the same id.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import zlib
from collections.abc import Container
from typing import Final

SHAPE: Final = re.compile(rb"gw_([a-z0-9]{8})_[A-Za-z0-9_-]{43}_([A-Za-z0-9]{6})")
ID_AT: Final = slice(3, 11)
CHECK_AT: Final = -6

_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz"  # none that reads as another: no l, o, 0, 1
_ID_CHARS: Final = _LETTERS + "23456789"
_BASE62: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_id(taken: Container[str]) -> str:
    """Return an id that nobody has."""
    key_id = ""
    while not key_id or key_id in taken:
        # A letter first, so that YAML never reads an id as a number.
        key_id = secrets.choice(_LETTERS) + "".join(secrets.choice(_ID_CHARS) for _ in range(7))
    return key_id


def new_key(key_id: str) -> str:
    """Return a new key with an id: 256 random bits."""
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    body = f"gw_{key_id}_{secret}"
    return f"{body}_{checksum(body.encode())}"


def digest_of(key: bytes, pepper: bytes) -> bytes:
    """Return what is kept of a key."""
    return hmac.digest(pepper, key, "sha256")


def checksum(text: bytes) -> str:
    """Return the six check characters of the part before them: CRC-32 in base 62."""
    rest, out = zlib.crc32(text), ""
    for _ in range(-CHECK_AT):
        rest, digit = divmod(rest, 62)
        out = _BASE62[digit] + out
    return out


def what_is_wrong(key: bytes) -> str:
    """Return why a key matches none, as far as its own letters tell; none of its secret is repeated."""
    shape = SHAPE.fullmatch(key)
    if shape is None:
        if SHAPE.search(key):
            return "there is more than the key, as quotes or a second `Bearer`. Send the key alone."
        return (
            "it does not look like a key of this gateway (gw_<id>_<secret>_<check>). Was it "
            "truncated when it was copied?"
        )
    masked = f"gw_{shape[1].decode()}_***{shape[2][-2:].decode()}"
    if checksum(key[: CHECK_AT - 1]) != shape[2].decode():
        return (
            f"{masked}. Its check characters do not match: the key was mistyped, or altered when "
            "it was copied."
        )
    return f"{masked}. This gateway has no such key."
