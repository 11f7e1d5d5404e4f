"""Salts that keep the prefix caches of tenants apart, the same in every replica and after a restart."""

from __future__ import annotations

import base64
import hmac
from functools import lru_cache


def salting_secret(pepper: bytes) -> bytes:
    """Derive the secret of the salts from the pepper of the keys file, which replicas share."""
    return hmac.digest(pepper, b"vllm-gateway prefix cache salt", "sha256")


@lru_cache(maxsize=4096)
def salt_for(secret: bytes, tenant: str, own: str | None = None) -> str:
    """Return a tenant's salt: 43 characters, as vLLM advises.

    A client's `own` salt parts its tenant's cache further, and never joins another tenant's.
    """
    text = tenant if own is None else f"{tenant}\0{own}"  # no name of a tenant holds a NUL
    digest = hmac.digest(secret, text.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
