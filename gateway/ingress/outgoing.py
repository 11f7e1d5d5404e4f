"""A request as its backend gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.types import Ask, Endpoint, RequestRecord
from gateway.ingress.downstream import Downstream
from gateway.ingress.heads import trace_lines
from gateway.pools.table import Backend
from gateway.upstream.client import Outgoing
from gateway.wire.calls import ENDPOINTS, upstream_body

# The rest of a stream may be asked of one of these, whatever its client asked for (`resume.rest`).
_REST_PATHS: Final[dict[Endpoint, bytes]] = {
    spec.endpoint: path
    for path, spec in ENDPOINTS.items()
    if spec.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS)
}


def outgoing(
    down: Downstream,
    record: RequestRecord,
    ask: Ask,
    backend: Backend,
    salt: Callable[[str | None], str] | None,
    rank: int | None = None,
) -> Outgoing:
    """Return a request with the name that `backend` knows its model by, and its id for the engine.

    With a rank it is for one of several engines of the server. Source: vLLM 0.32
    `entrypoints/generate/base/serving.py`; chats, completions and messages are led by it.
    """
    call, route, served_model = ask.call, ask.route, None
    if down.trailed is not None:
        room_tokens = (backend.window_tokens or 0) - ask.demand.prompt_tokens
        call = down.trailed.sent(call, takes_ids=backend.chats_take_ids, room_tokens=room_tokens)
    if not call.unnamed or route.adapter is not None or backend.plain:
        served_model = backend.served_name(route)  # without a name, a vLLM takes its base model
    record.weighed, record.costs_s = ask.weighed, ask.costs_s
    record.sent_model, record.adds_salt = served_model, salt is not None
    record.adds_usage, record.adds_ids = call.hides_usage, call.tells_ids
    body = upstream_body(
        call,
        served_model=served_model,
        inject_usage=True,
        max_new_tokens=ask.demand.max_new_tokens,
        salt=salt,
        plain=backend.plain,
    )
    if record.trace is not None:
        trace = record.trace.begin_attempt()
    else:
        trace = trace_lines(down.headers) if b"traceparent" in down.fields else b""
    if rank is not None:
        trace += b"x-data-parallel-rank: %d\r\n" % rank
    spec = down.spec
    path = spec.path if call.endpoint is spec.endpoint else _REST_PATHS[call.endpoint]
    return Outgoing(path, call.content_type, record.engine_id, body, down.upload, trace)
