"""The signing keys of an OpenID Connect issuer, as this gateway knows them (RFC 7517; OpenID Connect Discovery 1.0).

They are fetched before anybody is served, every ten minutes, and when a token names a key that is not
known: at most once in thirty seconds, whatever tokens come. What was fetched last stays while the issuer does
not answer. Whoever remembers a token hears when the keys change (`on_change`), for one may be withdrawn.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import jwt

from gateway.config.oidc import OidcConfig
from gateway.core.aio import Clock
from gateway.core.errors import AccessError, KeysUnknown

log = logging.getLogger("gateway.keys")

FRESH_S: Final = 600.0
ASK_AGAIN_S: Final = 30.0  # least time between two fetches for keys that are not known
FETCH_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20
_AGAIN_S: Final = 2.0  # when a client comes again
Page = Callable[[str], Awaitable[dict[str, Any]]]  # reads the JSON object at an address

_KINDS: Final = ("RSA", "EC", "OKP")  # asymmetric: who can check a token cannot make one


async def _page(url: str) -> dict[str, Any]:
    """Return the JSON object at an address.

    Raises:
        OSError, ValueError: there is none.
    """
    import httpx2

    try:
        async with (
            httpx2.AsyncClient(timeout=FETCH_S) as client,
            client.stream("GET", url, headers={"accept": "application/json"}) as reply,
        ):
            if reply.status_code != httpx2.codes.OK:
                raise ValueError(f"it answers {reply.status_code}")
            body = b""
            async for part in reply.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    raise ValueError("what it answers is larger than 1 MiB")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise OSError(f"it cannot be reached: {type(error).__name__}") from error
    told = json.loads(body)
    if not isinstance(told, dict):
        raise ValueError("what it answers is no JSON object")
    return told


SigningKey = Any  # as PyJWT takes it


def _read(row: dict[str, Any]) -> SigningKey | None:
    """Return a key; None for one that cannot be used here, beside which others may be good.

    An RSA key that does not say for which algorithm it is may be used with each (RFC 7517, 4.4).
    """
    try:
        found = jwt.PyJWK(row)
        return found.key if row.get("kty") == "RSA" and "alg" not in row else found
    except Exception:  # noqa: BLE001 - libraries raise what they like: `alg: none` is a NotImplementedError
        return None


class Issuer:
    """See the module. One owner, on the event loop."""

    def __init__(self, settings: OidcConfig, clock: Clock, page: Page = _page) -> None:
        self.settings = settings
        self._clock, self._page = clock, page
        self.on_change: list[Callable[[], None]] = []
        self._keys: Mapping[str, SigningKey] | None = None
        self._rows: list[dict[str, Any]] | None = None  # what the keys were read from
        self._asked_at: float | None = None  # when the last fetch ended
        self._wanted = asyncio.Event()
        self._told = ""  # what was last logged to be wrong

    def key(self, kid: str | None) -> SigningKey:
        """Return a signing key by its id; without an id the only one.

        Raises:
            KeysUnknown: it has to be fetched first (503).
            AccessError: the issuer has no such key (401).
        """
        keys = self._keys or {}
        if kid is None and len(keys) == 1:
            return next(iter(keys.values()))
        if kid is not None and (found := keys.get(kid)) is not None:
            return found
        asked_at = self._asked_at
        may_ask = asked_at is None or self._clock.now() - asked_at >= ASK_AGAIN_S
        if may_ask:
            self._wanted.set()
        if may_ask or self._keys is None:
            raise KeysUnknown(
                "The signing keys of the token's issuer are being fetched. Try again shortly.",
                retry_after_s=_AGAIN_S,
            )
        raise AccessError(
            "The token was signed with a key that its issuer does not list now. Get a new token."
        )

    async def run(self) -> None:
        """Keep the keys fresh, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(FRESH_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            await self.fetch()

    async def fetch(self) -> None:
        """Fetch the keys once; what goes wrong is logged, and the keys before stay.

        Cancel: nothing changes.
        """
        try:
            async with asyncio.timeout(FETCH_S):
                rows = await self._fetched()
            self._take(rows)
            self._tell("")
        except (OSError, ValueError, RecursionError) as error:
            self._tell(str(error) or f"no answer within {FETCH_S:g} s")
        self._asked_at = self._clock.now()
        self._wanted.clear()  # who asked meanwhile has what there is

    def _take(self, rows: list[dict[str, Any]]) -> None:
        """Have tokens checked with the keys of these rows from now on.

        Raises:
            ValueError: they have none.
        """
        if rows == self._rows:
            return
        keys = {str(each.get("kid", "")): key for each in rows if (key := _read(each)) is not None}
        if not keys:
            raise ValueError("it lists no key for signatures that anybody can check")
        self._rows, self._keys = rows, keys
        for heard in self.on_change:
            heard()

    async def _fetched(self) -> list[dict[str, Any]]:
        """Return what the issuer lists of keys that tokens may be signed with.

        Raises:
            OSError, ValueError: it cannot be had, and why.
        """
        found = self.settings.jwks or await self._discovered()
        told = await self._page(found)
        rows = told.get("keys")
        if not isinstance(rows, list):
            raise ValueError("what it answers is no set of keys")
        return [
            each
            for each in rows
            if isinstance(each, dict)
            and each.get("kty") in _KINDS
            and each.get("use", "sig") == "sig"
        ]

    async def _discovered(self) -> str:
        issuer = self.settings.issuer
        told = await self._page(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        if told.get("issuer") != issuer:
            raise ValueError(f"it calls itself another issuer than {issuer}")
        found = told.get("jwks_uri")
        if not isinstance(found, str):
            raise ValueError("its discovery document does not say where its keys are")
        if urlsplit(found).scheme != "https" and urlsplit(issuer).scheme == "https":
            raise ValueError("its keys are at an address without https")
        return found

    def _tell(self, trouble: str) -> None:
        """Log what is wrong, once."""
        if trouble and trouble != self._told:
            log.error(
                "the signing keys of %s cannot be fetched: %s; %s",
                self.settings.issuer,
                trouble,
                "no token is accepted" if self._keys is None else "those known before stay",
                extra={"event": "issuer_trouble"},
            )
        self._told = trouble
