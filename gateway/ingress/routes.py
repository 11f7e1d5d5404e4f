"""The public routes that are not inference: the model list, liveness, readiness, and an honest 404.

Everything but `/tokenizer_info`, which a backend is asked for, is answered from memory. Paths are
compared raw: an escaped or doubled slash is no path of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Raw
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.access.keys import check_address
from gateway.access.told import own_told
from gateway.core.aio import Clock
from gateway.core.errors import EndpointNotServed, GatewayError, ModelNotFound, Unavailable
from gateway.core.types import SERVING, Caller, Phase
from gateway.counting.context import widest_of
from gateway.ingress.handler import Handler
from gateway.ingress.server import Ingress
from gateway.ingress.unserved import Unserved, client_of
from gateway.limiting.standing import Standing, standing
from gateway.pools.table import PoolTable
from gateway.routing.catalog import Entry, status
from gateway.wire.objects import fields_of
from gateway.wire.replies import model_entry

_RETRY_S: Final = 3.0
# How a server answers that has no such endpoint; see `watch.fetch.FetchError`.
_NOT_SERVED: Final = frozenset({"http_404", "http_405", "http_501"})


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether new work is welcome, with one line per check."""

    ready: bool
    checks: tuple[tuple[str, bool, str], ...]  # name, passed, detail

    def text(self) -> str:
        """Return one line per check, as kube-apiserver's `?verbose` does."""
        return "".join(
            f"[{'+' if ok else '-'}]{name} {detail}\n" for name, ok, detail in self.checks
        )


def public_app(
    handler: Handler,
    table: PoolTable,
    clock: Clock,
    ready: Callable[[], Readiness],
    ingress: Ingress,
) -> Starlette:
    """Make the Starlette app of the public listener; inference POSTs never reach it."""

    def caller(request: Request) -> Caller:
        found = handler.settings.keys.authenticate(*_presented(request), clock.wall())
        check_address(found, client_of(request, handler.settings.proxies))
        return found

    async def own_key(request: Request) -> Response:
        keys, now = handler.settings.keys, clock.wall()
        holder = keys.identify(*_presented(request), now)
        check_address(holder.caller, client_of(request, handler.settings.proxies))
        stands = await _standing(handler, holder.caller, request.query_params.get("model"))
        return JSONResponse({**own_told(holder, keys.tiers, now), "standing": stands})

    def described(name: str, entry: Entry, asking: Caller) -> dict[str, object]:
        return model_entry(
            name,
            parent=entry.parent,
            root=entry.route.served_model,
            window_tokens=widest_of(entry.route, asking),
            status=status(entry, table.backends(entry.route.pool)),
            created=handler.catalogs.first_seen(name),
        )

    async def models(request: Request) -> Response:
        asking = caller(request)
        visible = handler.catalog().visible(asking)
        data = [described(name, entry, asking) for name, entry in visible.items()]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if not name:  # `/v1/models/`
            raise HTTPException(HTTPStatus.NOT_FOUND)
        asking = caller(request)
        entry = handler.catalog().visible(asking).get(name)
        if entry is None:
            raise ModelNotFound("This model does not exist or you do not have access to it. "
                                "GET /v1/models lists what this key can use.", param="model")  # fmt: skip
        return JSONResponse(described(name, entry, asking))

    async def tokenizer_info(request: Request) -> Response:
        named = request.query_params.get("model", "")
        route = handler.catalog().admit(named, caller(request)).route
        fields = await _tokenizer_info(handler, table, route.pool, route.requested)
        return Response(msgspec.json.encode(fields), media_type="application/json")

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        state = ready()
        body = (
            state.text()
            if "verbose" in request.query_params
            else ("ok\n" if state.ready else "not ready\n")
        )
        return PlainTextResponse(body, status_code=200 if state.ready else 503)

    unserved = Unserved(handler, ingress)
    app = Starlette(
        routes=[
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/v1/key", own_key, methods=["GET"]),
            Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
            Route("/livez", livez, methods=["GET"]),
            Route("/readyz", readyz, methods=["GET"]),
            Route("/health", readyz, methods=["GET"]),  # vLLM's, for clients that wait for it
        ],
        exception_handlers={GatewayError: unserved.refuse, HTTPException: unserved.unknown},
    )
    app.router.redirect_slashes = False
    return app


async def _standing(handler: Handler, caller: Caller, named: str | None) -> list[Standing]:
    """Return how a key stands with its limits, and with those for a model that it may use.

    Raises:
        ModelNotFound: it may not. Else clients could have plans made for any number of names.
    """
    model = pool = ""
    if named:
        route = handler.catalog().admit(named, caller).route
        model, pool = route.requested, route.pool
    plan = handler.settings.plans.of(caller, model, pool)
    return [] if plan is None else await standing(handler.limiter, plan)


async def _tokenizer_info(
    handler: Handler, table: PoolTable, pool: str, model: str
) -> dict[str, Raw]:
    """Return what a backend tells of its tokenizer, without the path of its folder.

    Raises:
        Unavailable: no backend serves now, or the one that is asked does not answer (503).
        EndpointNotServed: it does not tell (404).
    """
    serving = [each for each in table.backends(pool) if each.phase in SERVING]
    if not serving:
        raise _unavailable(model, "none of its backends serves now")
    asked = next((each for each in serving if each.phase is Phase.READY), serving[0])
    try:
        fields = fields_of(await handler.settings.counters.tokenizer_info(asked))
    except (OSError, msgspec.DecodeError) as error:
        if isinstance(error, OSError) and str(error) not in _NOT_SERVED:
            raise _unavailable(model, "its backend failed to tell its tokenizer") from None
        raise EndpointNotServed(
            "No backend of this model tells its tokenizer: vLLM does with "
            "`--enable-tokenizer-info-endpoint`."
        ) from None
    if "name_or_path" in fields:  # a path on the backend's host
        fields["name_or_path"] = Raw(msgspec.json.encode(model))
    return fields


def _unavailable(model: str, why: str) -> Unavailable:
    words = f"Model `{model}` is temporarily unavailable: {why}. Retry later."
    return Unavailable(words, param="model", retry_after_s=_RETRY_S)


def _presented(request: Request) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return what the headers hold that may carry a key."""

    def sent(name: str) -> bytes | None:
        values = dict.fromkeys(request.headers.getlist(name))
        # Two that differ are refused: no key has a comma.
        return ",".join(values).encode("latin-1") if values else None

    return sent("authorization"), sent("x-api-key"), sent("api-key")
