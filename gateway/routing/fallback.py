"""Which pools may answer in place of the one that a request asks for. Pure.

A request goes to another pool only if it was certainly not executed, and only if it asks in text for text:
vectors and token ids of two models are not comparable. The key must be allowed to use the other pool by
name. Only the settings of the requested pool count, so a request never goes in circles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.config.models import PoolConfig
from gateway.core.endpoints import GENERATES
from gateway.core.errors import (
    AdapterLost,
    BackendStopping,
    ConnectFailed,
    ContextLengthExceeded,
    GatewayError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from gateway.core.traffic import Cause
from gateway.core.types import Ask, Call, Endpoint, RequestRecord, Route
from gateway.routing.catalog import Catalog
from gateway.wire.large import fields_at_hand

# By these errors a backend surely did nothing: it was not reached, takes nothing more, or lacks the adapter.
NOTHING_DONE: Final = (ConnectFailed, BackendStopping, AdapterLost)

_AS_TEXT: Final = GENERATES | {Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS}
_OF_A_POOL: Final = (  # fields of a record
    *("pool", "adapter", "demand", "need", "conversation", "price"),
    *("backend_id", "revision", "engine_id"),  # of the last attempt there
)
# Fields that speak of token ids, or have vectors of a model in place of text.
_OF_ONE_MODEL: Final = (
    *("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"),
    *("return_token_ids", "prompt_embeds"),
)
_NOTHING: Final = frozenset((b"", b"null", b"false", b"{}", b"[]"))
_CAUSES: Final[Mapping[str | None, Cause]] = {
    Unavailable.default_code: Cause.NO_BACKEND,
    Overloaded.default_code: Cause.OVERLOAD,
    ContextLengthExceeded.default_code: Cause.CONTEXT,
}


def cause_of(error: GatewayError) -> Cause | None:
    """Return the fallback cause that an error stands for; None if no other pool may answer."""
    return Cause.NO_BACKEND if isinstance(error, NOTHING_DONE) else cause_by(error.code)


def cause_by(code: str | None) -> Cause | None:
    """Return the fallback cause that an error code stands for; None if it is none."""
    return _CAUSES.get(code)


def is_of_one_model(call: Call) -> bool:
    """Whether a request has tokens of its own model in it, which another one would read or write otherwise."""
    if call.model_at is not None or not call.body:  # a form, or a dry run
        return False
    if call.prompt_token_ids is not None:
        return True
    fields = fields_at_hand(call)
    return any(bytes(fields.get(name, b"")) not in _NOTHING for name in _OF_ONE_MODEL)


def as_of_own_pool(record: RequestRecord) -> Callable[[], None]:
    """Return a function that has a record tell of its own pool again, once others were asked in vain."""
    before = {name: getattr(record, name) for name in _OF_A_POOL}

    def put_back() -> None:
        for name, value in before.items():
            setattr(record, name, value)

    return put_back


def stand_ins(cause: Cause, ask: Ask, pool: PoolConfig, catalog: Catalog) -> list[Route]:
    """Return the routes of the pools that may answer instead of `pool`, the first choice first."""
    caller, endpoint, adapter = ask.caller, ask.call.endpoint, ask.route.adapter
    if not caller.falls_back or endpoint not in _AS_TEXT or is_of_one_model(ask.call):
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
