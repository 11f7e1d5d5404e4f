"""What would happen to a request now, told by the code that does it. Nothing is sent or taken.

The shape below is what `vllm-gateway route` reads. Keys are added, never renamed or removed, within
one `schema_version`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from typing_extensions import TypedDict

from gateway.access.keys import KeyRing, OpenRing
from gateway.admission.decisions import Decision, State
from gateway.admission.gate import Gate
from gateway.core.errors import GatewayError, RequestError, ShuttingDown
from gateway.core.types import Ask, Call, Caller, Demand, Endpoint, Route
from gateway.counting.context import settle
from gateway.ops.explain import (
    SCHEMA_VERSION,
    BackendTold,
    Book,
    FallbackTold,
    SettingTold,
    backend_told,
    queued,
    setting_told,
    shed_reason,
)
from gateway.ops.moment import Moment, rfc3339, rounded
from gateway.routing.catalog import Catalogs
from gateway.routing.fallback import cause_by, stand_ins
from gateway.routing.trial import side_of
from gateway.wire.calls import ENDPOINTS
from gateway.wire.measures import OUTPUT_LIMITS

_BYTES_PER_TOKEN: Final = 4  # of English text: how large the body is taken to be
_ANYBODY: Final = Caller(key_id="anonymous", name="anonymous", tenant="anonymous")
_UNMEASURED: Final = Demand(0, exact=False)
_SPECS: Final = {spec.endpoint: spec for spec in ENDPOINTS.values()}


class DryRun(TypedDict):
    """What would happen to a request now."""

    schema_version: int
    at: str
    verdict: Literal["now", "wait", "refused"]
    sentence: str
    model: str
    pool: str
    adapter: str | None
    tenant: str
    key_id: str
    priority: int
    prompt_tokens: int
    output_tokens: int | None  # expected; null: refused before that was asked
    window_tokens: int | None
    backend: str | None  # among equals any may be taken
    position: int | None
    eta_s: float | None
    may_wait_s: float | None
    status: int | None
    code: str | None
    shed_reason: str | None
    message: str | None
    retry_after_s: float | None
    setting: SettingTold | None
    fallback: FallbackTold | None  # its own pool would refuse it; `pool` would take it
    canary: str | None  # of its pool: both sides, their shares, and the verdict
    backends: list[BackendTold]


@dataclass(frozen=True, slots=True)
class Wish:
    """The request of a dry run."""

    model: str
    prompt_tokens: int
    output_tokens: int | None = None  # stated by the client
    key_id: str | None = None
    endpoint: Endpoint = Endpoint.CHAT
    stream: bool = False


class UnknownKey(LookupError):
    """No key that works now has the id."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """What decides about a request. `keys` is asked each time, because a reload makes a new ring."""

    gate: Gate
    catalogs: Catalogs
    keys: Callable[[], KeyRing | OpenRing]
    # How limits would refuse it; None: they would not.
    limits: Callable[[Ask], Awaitable[GatewayError | None]]


async def dry_run(
    wish: Wish, deciding: Deciding, book: Book, moment: Moment, *, draining: bool = False
) -> DryRun:
    """Return what the gateway would do with a request now, by the code that does it.

    Raises:
        UnknownKey: no key that works has the id.
        ModelNotFound: unknown, or not for this key.
        EndpointNotServed: the model's backends do not serve the endpoint.
    Cancel: nothing is held.
    """
    caller = _ANYBODY
    if wish.key_id is not None:
        caller = _holder(deciding, wish.key_id, moment.wall)
    call, config = _call(wish), book.loaded.config
    catalog = deciding.catalogs.current(config.pools)
    route = catalog.resolve(call, caller)
    asked = Ask(route, call, _UNMEASURED, caller)
    run = _blank(wish, asked, moment)
    if draining:
        return _refused(run, ShuttingDown("This gateway is shutting down."))
    run = await _at_pool(run, asked, wish, deciding, book)
    cause = cause_by(run["code"])
    if cause is None:
        return run
    for other in stand_ins(cause, asked, config.pools[route.pool], catalog):
        ask = Ask(other, call, _UNMEASURED, caller)
        second = await _at_pool(_blank(wish, ask, moment), ask, wish, deciding, book)
        if second["verdict"] != "refused":
            why = f"{route.pool} would refuse it: {run['status']} {run['code']}."
            second["sentence"] = f"{why} {second['sentence']}"
            second["model"] = route.requested
            second["fallback"] = FallbackTold(pool=route.pool, cause=cause.value)
            return second
    return run


async def _at_pool(run: DryRun, ask: Ask, wish: Wish, deciding: Deciding, book: Book) -> DryRun:
    """Return what would happen to a request at the pool of its route."""
    call, route, caller, tokens = ask.call, ask.route, ask.caller, wish.prompt_tokens
    ask.on_trial = side_of(ask)  # by conversation either side may be meant
    try:
        policy = book.loaded.config.pools[route.pool].on_overflow
        ask.demand = settle(call, tokens, route=route, caller=caller, policy=policy)
    except RequestError as error:
        run["setting"] = _fitting(error, route, caller, book)
        return _refused(run, error)
    gate = deciding.gate
    ask.need = gate.needs.of(call, ask.demand, caller, route.widest_tokens)
    over = await deciding.limits(ask)
    if over is not None:
        run["output_tokens"] = ask.need.output_tokens
        return _refused(run, over)
    ask.top_priority = gate.top_priority
    try:
        foreseen = gate.foresee(ask, body_bytes=tokens * _BYTES_PER_TOKEN)
    except GatewayError as error:
        return _refused(run, error)
    return _foreseen(run, foreseen, book)


def _holder(deciding: Deciding, key_id: str, wall: float) -> Caller:
    caller = deciding.keys().holder(key_id, wall)
    if caller is None:
        raise UnknownKey(f"There is no active key with the id {key_id}.")
    return caller


def _call(wish: Wish) -> Call:
    output, limits = wish.output_tokens, OUTPUT_LIMITS.get(wish.endpoint)
    return Call(
        wish.endpoint,
        _SPECS[wish.endpoint].dialect,
        wish.model,
        wish.stream,
        b"",
        max_new_tokens=output,
        max_new_field=limits[0] if limits and output is not None else None,
    )


def _blank(wish: Wish, ask: Ask, moment: Moment) -> DryRun:
    route, caller = ask.route, ask.caller
    return DryRun(
        schema_version=SCHEMA_VERSION,
        at=rfc3339(moment.wall),
        verdict="refused",
        sentence="",
        model=route.requested,
        pool=route.pool,
        adapter=route.adapter,
        tenant=caller.tenant,
        key_id=caller.key_id,
        priority=caller.priority,
        prompt_tokens=wish.prompt_tokens,
        output_tokens=None,
        window_tokens=route.widest_tokens,
        backend=None,
        position=None,
        eta_s=None,
        may_wait_s=None,
        status=None,
        code=None,
        shed_reason=None,
        message=None,
        retry_after_s=None,
        setting=None,
        fallback=None,
        canary=None,
        backends=[],
    )


def _refused(run: DryRun, error: GatewayError) -> DryRun:
    """Tell a refusal that comes before the gate."""
    run["status"], run["code"], run["message"] = error.status, error.code, error.message
    run["retry_after_s"] = rounded(error.retry_after_s)
    run["sentence"] = f"It would be refused: {error.status} {error.code}."
    return run


def _fitting(error: RequestError, route: Route, caller: Caller, book: Book) -> SettingTold | None:
    """Return the setting that bounds a request which does not fit: its key's, or the pool's."""
    own, window = caller.max_context_tokens, route.widest_tokens
    by_key = own is not None and (window is None or own < window)
    if by_key or error.code != "context_length_exceeded":
        return book.told(("keys", "file"))
    return book.told(("pools", route.pool, "max_context"))


def _foreseen(run: DryRun, decision: Decision, book: Book) -> DryRun:
    run["output_tokens"] = decision.need.output_tokens
    run["may_wait_s"] = decision.may_wait_s
    run["backends"] = [backend_told(each, book) for each in decision.said]
    if decision.state is State.ADMITTED:
        run["verdict"], run["backend"] = "now", decision.backend_id
        run["sentence"] = f"It would be sent to {decision.backend_id} at once."
        return run
    run["setting"], run["eta_s"] = setting_told(decision, book), rounded(decision.eta_s)
    if decision.state is State.WAITING:
        run["verdict"], run["position"] = "wait", decision.position
        run["sentence"] = queued(decision, "It would wait")
        if any(each.expected_s is not None for each in decision.said):
            run["sentence"] += " A backend has room, so it may overtake requests that do not fit."
        return run
    run["status"], run["code"] = decision.status, decision.code
    run["shed_reason"], run["message"] = shed_reason(decision), decision.message
    run["retry_after_s"] = rounded(decision.retry_after_s)
    why = run["shed_reason"] or decision.code
    run["sentence"] = f"It would be refused at once: {decision.status} {why}."
    return run
