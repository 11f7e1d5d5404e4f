"""Settings of keys that an identity provider gives: tokens of an OpenID Connect issuer."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from gateway.config.keysettings import TierName
from gateway.config.units import Section, setting

# How the id of who holds a token begins; it has 16 characters, that of a key has 8.
HOLDER_ID: Final = "oidc"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def _check_https(value: str) -> str:
    """Refuse a URL whose replies others could change on their way: with other signing keys, they could make tokens."""
    try:
        parts = urlsplit(value)
        safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
    except ValueError:
        safe = False
    if not safe or not parts.hostname or parts.username is not None:
        raise PydanticCustomError(
            "bad_url", "write it like https://login.example.com; http is for loopback only"
        )
    return value


HttpsUrl = Annotated[str, AfterValidator(_check_https)]
Claim = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ClaimsConfig(Section):
    """Which claims of a token say what. A name with dots may lead into objects: `realm_access.roles`."""

    name: Claim = setting("sub", "Who it is, as the access log and `usage` name it.")
    tenant: Claim | None = setting(None, "The tenant. Default: the name.")
    tier: Claim | None = setting(
        None,
        "The tier: a name of `tiers`, or a list whose first name of `tiers` counts. Default: `tier` of `oidc`.",
    )
    models: Claim | None = setting(
        None, "Models that it may use: a list, or words with spaces. Default: as the tier says."
    )


class OidcConfig(Section):
    """Tokens of an identity provider (JWTs of OpenID Connect) in place of keys."""

    issuer: HttpsUrl = Field(description="The issuer, exactly as its tokens name it (`iss`).")
    audience: str = Field(
        min_length=1,
        description="Whom tokens must be for (`aud`): the id of this gateway at the issuer.",
    )
    jwks: HttpsUrl | None = setting(
        None, "Where its signing keys are. Default: as its discovery document says."
    )
    tier: TierName | None = setting(
        None,
        "The tier of all tokens, or with `claims.tier` of those whose claim names no tier. Default: with `claims.tier`"
        " such tokens are refused, otherwise tokens have no tier.",
    )
    claims: ClaimsConfig = setting({}, "Which claims say what.")
