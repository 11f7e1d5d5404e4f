"""The OpenAPI 3.1 document, made from the table of endpoints and the models that serve them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from gateway import __version__
from gateway.admin.endpoint import Endpoint, Page
from gateway.admin.replays import KEY
from gateway.admin.replies import PROBLEM, ProblemDetails, phrase
from gateway.core.roles import Role

_REF: Final = "#/components/schemas/{model}"
_ABOUT: Final = (
    "What operators ask of vllm-gateway, on its admin listener. A token has a role (`admin.tokens`), and each"
    " operation names the one that it needs. Lists: `limit` and `after`. Names of backends are POOL/NAME."
    " Errors are RFC 9457 problem details, with a `code` for programs."
)
_NAMES: Final = {
    "backend": "A backend, as POOL/NAME; a slash may be written as it is.",
    "pool": "A pool: the name of its model.",
    "request_id": "The x-request-id of a reply.",
    "key": "The id of a key: the part between gw_ and the second underscore.",
    "id": "As the list names it.",
}
_ANY: Final = {
    HTTPStatus.BAD_REQUEST: "bad_parameter",
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.FORBIDDEN: "role_needed",
    HTTPStatus.MISDIRECTED_REQUEST: "unknown_host",
    HTTPStatus.TOO_MANY_REQUESTS: "too_many_failed_tokens",
}
_CHANGE: Final = {
    HTTPStatus.CONFLICT: "idempotency_key_in_use, upgrading",
    HTTPStatus.PRECONDITION_FAILED: "changed_since",
    HTTPStatus.UNPROCESSABLE_ENTITY: "idempotency_key_reused",
    HTTPStatus.SERVICE_UNAVAILABLE: "busy",
}
_BODY: Final = {
    HTTPStatus.FORBIDDEN: "role_needed, foreign_origin",
    HTTPStatus.REQUEST_TIMEOUT: "request_timeout",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "not_json",
}
_HEADERS: Final = (
    (
        "If-Match", "The ETag of what was read; if it was changed since, the answer is 412.",
        {"type": "string"},
    ),
    (
        "Idempotency-Key",
        "The same request sent again within an hour is answered again, not done again.",
        {"type": "string", "pattern": KEY},
    ),
)  # fmt: skip


def document(table: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document of a table."""
    models = _Models(table)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        operation = _operation(endpoint, models)
        paths.setdefault(endpoint.path, {})[endpoint.method.value.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-gateway admin API", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": models.definitions,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


class _Models:
    """The JSON Schemas of every model of a table; what several use is defined once."""

    def __init__(self, table: Sequence[Endpoint]) -> None:
        wanted: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
            ("problem", "serialization", TypeAdapter(ProblemDetails))
        ]
        for each in table:
            if each.answer is not None:
                answer = Page[each.answer] if each.rows else each.answer  # type: ignore[name-defined]
                wanted.append((f"{each.name} answer", "serialization", TypeAdapter(answer)))
            if each.body is not None:
                wanted.append((f"{each.name} body", "validation", TypeAdapter(each.body)))
        made, shared = TypeAdapter.json_schemas(wanted, ref_template=_REF)
        self.definitions: dict[str, Any] = shared.get("$defs", {})
        self._made = {name: schema for (name, _), schema in made.items()}

    def of(self, name: str) -> Any:
        """Return the schema of `NAME answer`, `NAME body` or `problem`."""
        return self._made[name]

    def query(self, endpoint: Endpoint) -> Mapping[str, Any]:
        """Return the schema of an endpoint's query, which becomes parameters."""
        schema = endpoint.query.model_json_schema(ref_template=_REF)
        self.definitions |= schema.pop("$defs", {})
        return schema


def _operation(endpoint: Endpoint, models: _Models) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.does,
        "parameters": [*_in_path(endpoint), *_in_query(endpoint, models), *_in_headers(endpoint)],
        "responses": {"200": _success(endpoint, models), **_failures(endpoint, models)},
    }
    if endpoint.role is None:
        made["security"] = []
    else:
        made["x-role"] = endpoint.role.value
    if endpoint.verb:
        made["x-verb"] = endpoint.verb
    if endpoint.body is not None:
        schema = models.of(f"{endpoint.name} body")
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def _in_path(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _NAMES[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in endpoint.parameters
    ]


def _in_query(endpoint: Endpoint, models: _Models) -> list[dict[str, Any]]:
    schema = models.query(endpoint)
    required = schema.get("required", ())
    found = []
    for name, described in schema.get("properties", {}).items():
        kept = {
            key: value for key, value in described.items() if key not in ("title", "description")
        }
        one_of = [each for each in kept.pop("anyOf", ()) if each != {"type": "null"}]
        if one_of:  # what is null when it is not there
            kept.pop("default", None)
            kept |= one_of[0]
        found.append(
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "description": described.get("description", ""),
                "schema": kept,
            }
        )
    return found


def _in_headers(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": told, "schema": schema}
        for name, told, schema in _HEADERS
        if endpoint.changes
    ]


def _success(endpoint: Endpoint, models: _Models) -> dict[str, Any]:
    if endpoint.answer is None:
        content: dict[str, Any] = {each: {} for each in endpoint.media}
    else:
        content = {"application/json": {"schema": models.of(f"{endpoint.name} answer")}}
    return {"description": "What was asked for.", "content": content}


def _failures(endpoint: Endpoint, models: _Models) -> dict[str, Any]:
    told = dict(_ANY)
    if endpoint.body is not None:
        told |= _BODY
    if endpoint.changes:
        told |= _CHANGE
    if endpoint.rows:
        told[HTTPStatus.NOT_FOUND] = "unknown_cursor"
    if endpoint.role in (None, Role.METRICS):
        del told[HTTPStatus.FORBIDDEN]
    if endpoint.role is None:
        for status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS):
            del told[status]
    for status, codes in endpoint.refusals.items():
        told[status] = ", ".join(filter(None, (told.get(status), codes)))
    content = {PROBLEM: {"schema": models.of("problem")}}
    plain: dict[str, Any] = {each: {} for each in endpoint.media} if endpoint.role is None else {}
    return {
        str(status.value): {
            "description": f"{phrase(status)}: {codes}." if codes else f"{phrase(status)}.",
            "content": content if codes else plain,
        }
        for status, codes in sorted(told.items())
    }
