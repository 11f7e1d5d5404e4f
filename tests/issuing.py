"""An identity provider: it signs tokens, and serves its signing keys over HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

AUDIENCE = "vllm-gateway"
_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)  # once: it takes a while


@dataclass
class Provider:
    """One issuer. `keys` are those that it lists, by id."""

    url: str = "http://127.0.0.1:1"
    keys: dict[str, PrivateKeyTypes] = field(default_factory=lambda: {"k1": _RSA})
    strange: list[dict[str, Any]] = field(default_factory=list)  # listed before and behind them
    asked: int = 0  # how often for its keys
    broken: bool = False

    def token(
        self, *, kid: str | None = "k1", key: Any = None, algorithm: str = "RS256", **claims: Any
    ) -> str:
        """Return a signed token; a claim that is None is left out."""
        told = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": 4_000_000_000, **claims}
        told = {name: value for name, value in told.items() if value is not None}
        headers = {} if kid is None else {"kid": kid}
        signing = self.keys[kid or "k1"] if key is None else key
        return jwt.encode(told, signing, algorithm=algorithm, headers=headers)

    def listed(self) -> list[dict[str, Any]]:
        """Return the public keys, as a set of keys lists them."""
        own = [{**public(key), "kid": kid, "use": "sig"} for kid, key in self.keys.items()]
        return [*self.strange, *own, *self.strange]

    def app(self) -> Starlette:
        routes = [
            Route("/.well-known/openid-configuration", self._discovery),
            Route("/keys", self._keys),
        ]
        return Starlette(routes=routes)

    async def page(self, url: str) -> dict[str, Any]:
        """Answer as over HTTP, without it."""
        if url.endswith("/.well-known/openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        self.asked += 1
        if self.broken:
            raise ValueError("it answers 500")
        return {"keys": self.listed()}

    async def _discovery(self, request: Request) -> Response:
        return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, request: Request) -> Response:
        self.asked += 1
        if self.broken:
            return Response(status_code=500)
        return JSONResponse({"keys": self.listed()})


def public(key: Any) -> dict[str, Any]:
    """Return the public half of a key as a JWK."""
    kinds = {ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm, rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm}  # fmt: skip
    for kind, algorithm in kinds.items():
        if isinstance(key, kind):
            return json.loads(algorithm.to_jwk(key.public_key()))
    raise TypeError(key)
