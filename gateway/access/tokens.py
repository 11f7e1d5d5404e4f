"""Tokens in place of keys: JWTs (RFC 7519) that an OpenID Connect issuer signed for this gateway.

A token is a key whose record is written anew for each request: who it is, its tenant and its tier are
claims. It cannot be revoked here; it ends when it says (`exp`). Nothing of a token is repeated in a message.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import jwt
from pydantic import ValidationError

from gateway.access.effective import Tiers
from gateway.access.issuer import Issuer
from gateway.access.records import KeyRecord, read_name, timestamp
from gateway.config.keysettings import KeySettings
from gateway.config.oidc import HOLDER_ID
from gateway.core.errors import AccessError

if TYPE_CHECKING:
    from jwt.types import Options

_MOST_BYTES: Final = 8192
# Asymmetric ones only. Source: RFC 7518, 3.1; RFC 8037.
_ALGORITHMS: Final = [
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
]
_OPTIONS: Final[Options] = {
    "require": ["exp", "iss", "aud", "sub"],
    **{"verify_exp": False, "verify_nbf": False, "verify_iat": False},  # by our own clock, below
}
_CLOCKS_S: Final = 60.0  # how far the issuer's clock may be ahead
_MOST_MODELS: Final = 256
_WRONG: Final = "The token is not valid"


class Tokens:
    """Reads the tokens of one issuer."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self._settings = issuer.settings

    def record_of(self, token: bytes, tiers: Tiers, wall_now: float) -> KeyRecord:
        """Return the record of a token that its issuer signed and that has not ended.

        Raises:
            AccessError: it is no such token (401).
            KeysUnknown: the issuer's keys have to be fetched first (503).
        """
        claims = self._claims(token)
        ends_s = _seconds(claims, "exp")
        begins_s = _seconds(claims, "nbf") if "nbf" in claims else 0.0
        if wall_now >= ends_s:
            raise AccessError(f"The token ended {timestamp(ends_s)}. Get a new one.")
        if begins_s > wall_now + _CLOCKS_S:
            raise AccessError(f"The token does not hold before {timestamp(begins_s)}.")
        name = self._text(claims, self._settings.claims.name)
        tenant = self._settings.claims.tenant
        return KeyRecord(
            id=_id_of(claims),
            name=name,
            tenant=name if tenant is None else self._text(claims, tenant),
            secrets=(),
            tier=self._tier(claims, tiers),
            own=self._own(claims),
            expires_s=ends_s,
        )

    def _claims(self, token: bytes) -> dict[str, Any]:
        if len(token) > _MOST_BYTES:
            raise AccessError(f"{_WRONG}: it has more than {_MOST_BYTES} bytes.")
        try:
            key = self.issuer.key(jwt.get_unverified_header(token).get("kid"))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                options=_OPTIONS,
            )
        except jwt.InvalidAudienceError:
            raise AccessError(f"{_WRONG}: it is not for this gateway (`aud`).") from None
        except jwt.InvalidIssuerError:
            raise AccessError(f"{_WRONG}: it is of another issuer (`iss`).") from None
        except jwt.MissingRequiredClaimError as error:
            raise AccessError(f"{_WRONG}: it lacks the claim `{error.claim}`.") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            # TypeError: of another kind than its key. RecursionError: by PyJWT before 2.14, for a deep header.
            raise AccessError(
                f"{_WRONG}: it is damaged, or its signature is not the issuer's."
            ) from None
        return claims

    def _tier(self, claims: Mapping[str, Any], tiers: Tiers) -> str | None:
        """Return the tier that the claim names; its first name that is a tier, else the default one."""
        where, default = self._settings.claims.tier, self._settings.tier
        told = None if where is None else _found(claims, where)
        names = told if isinstance(told, list) else [told]
        known = [each for each in (*names, default) if isinstance(each, str) and each in tiers]
        if known or (where is None and default is None):
            return known[0] if known else None
        why = f"The claim `{where}` of the token names no tier of this gateway."
        if default is not None:  # a reload took it away; without it there would be no limits
            why = f"The token has the tier `{default}`, which this gateway's configuration lacks."
        raise AccessError(f"{why} Ask its operator.", code="unknown_tier")

    def _own(self, claims: Mapping[str, Any]) -> KeySettings:
        where = self._settings.claims.models
        if where is None:
            return KeySettings()
        told = _found(claims, where)
        models = told.split() if isinstance(told, str) else told
        if not isinstance(models, list) or not 0 < len(models) <= _MOST_MODELS:
            raise AccessError(f"{_WRONG}: its claim `{where}` lists no models.")
        try:
            return KeySettings.model_validate({"models": models})
        except ValidationError:
            raise AccessError(f"{_WRONG}: its claim `{where}` lists no models.") from None

    def _text(self, claims: Mapping[str, Any], where: str) -> str:
        try:
            return read_name(_found(claims, where))
        except ValueError:
            raise AccessError(
                f"{_WRONG}: it lacks the claim `{where}`, or that is no text."
            ) from None


def _found(claims: Mapping[str, Any], where: str) -> object:
    """Return a claim by its name, or by names with dots that lead into objects."""
    if where in claims:
        return claims[where]
    inner: object = claims
    for part in where.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def _seconds(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise AccessError(f"{_WRONG}: its claim `{name}` is no time.")
    return float(value)


def _id_of(claims: Mapping[str, Any]) -> str:
    """Return an id for who the token is of: the same with each token, and as long as no key's id."""
    whose = f"{claims['iss']}\0{claims['sub']}".encode()
    return HOLDER_ID + base64.b32encode(hashlib.sha256(whose).digest())[:12].decode().lower()
