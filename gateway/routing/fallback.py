"""Which pools may answer in place of the one that a request asks for. Pure.

Only what surely was not executed goes to another pool, and only requests whose answer is text: vectors
and token ids of two models have nothing in common. Each of these pools must be open to the key by its
name. The settings of the asked pool alone count, so a request never goes round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.config.models import PoolConfig
from gateway.core.endpoints import GENERATES
from gateway.core.errors import (
    ConnectFailed,
    ContextLengthExceeded,
    GatewayError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from gateway.core.traffic import Cause
from gateway.core.types import Ask, Endpoint, Route
from gateway.routing.catalog import Catalog

_AS_TEXT: Final = GENERATES | {Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS}
_CAUSES: Final[Mapping[str | None, Cause]] = {
    Unavailable.default_code: Cause.NO_BACKEND,
    Overloaded.default_code: Cause.OVERLOAD,
    ContextLengthExceeded.default_code: Cause.CONTEXT,
}


def cause_of(error: GatewayError) -> Cause | None:
    """Return the cause that an error is for a fallback; None when nobody else may answer."""
    return Cause.NO_BACKEND if isinstance(error, ConnectFailed) else cause_by(error.code)


def cause_by(code: str | None) -> Cause | None:
    """Return the cause that an error with a code is for a fallback; None when it is none."""
    return _CAUSES.get(code)


def stand_ins(cause: Cause, ask: Ask, pool: PoolConfig, catalog: Catalog) -> list[Route]:
    """Return where a request that its own `pool` cannot take may go, the first choice first."""
    caller, endpoint, adapter = ask.caller, ask.call.endpoint, ask.route.adapter
    if not caller.falls_back or endpoint not in _AS_TEXT:
        return []
    if adapter is not None and adapter not in pool.fallback.adapters:
        return []
    found = []
    for name in pool.fallback.of(cause):
        try:
            entry = catalog.admit(name, caller)
        except ModelNotFound:
            continue
        if entry.endpoints is None or endpoint in entry.endpoints:
            found.append(entry.route)
    return found
