"""deploy/ADMIN_API.md, made from the OpenAPI document: `python -m gateway.admin.reference > deploy/ADMIN_API.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.admin.openapi import document
from gateway.admin.table import TABLE

_HEAD: Final = """\
# The admin API

Made from the table of endpoints that the gateway serves: `python -m gateway.admin.reference > deploy/ADMIN_API.md`.
The same as OpenAPI 3.1, with the shapes of all answers: `GET /admin/openapi.json` of the admin listener.

    curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:9090/admin/v1/overview

- **Who may.** A token has a role (`admin.tokens`), and each role includes those before it: `metrics`, `viewer`,
  `operator`, `admin`. `admin.token` is an admin. Without any token, whoever can reach the listener is.
- **Names.** A backend is POOL/NAME; slashes may be written as they are.
- **Questions.** A query parameter that an endpoint does not know, or that has two values, is a 400. `/livez`, `/readyz`
  and `/metrics` ignore those that they do not know.
- **Lists** take `limit` and `after`, and answer `data`, `has_more`, `first_id`, `last_id`. Ask for the next page with
  `after` set to `last_id`.
- **Large answers** are packed for who sends `Accept-Encoding: gzip` (`curl --compressed`): the last hour of 500 quiet
  pools is then 150 KB, and not 15 MB.
- **Changes** are POST or PATCH of JSON, and say so (`content-type: application/json`); no body counts as `{}`.
  `reason` is kept. With `dry_run`, in the body or the query, nothing is changed.
- **What was seen.** A `GET` may answer an `ETag`; a change with that in `If-Match` is a 412 if it was changed since.
- **Once.** A change with an `Idempotency-Key` that is sent again within an hour is answered again, and not done again
  (`idempotency-replayed: true`). What is kept of it is in memory: 1,000 answers, 4 MiB. What was answered
  5xx is tried again; a new key or secret that the store may have kept all the same (503) is not made twice by that.
- **On the record.** Each change is in the audit log: `GET /admin/v1/audit`, and `audit.jsonl` in the state folder.
- **Errors** are `application/problem+json` (RFC 9457), with a `code` for programs and `errors` for single fields.
"""


def reference() -> str:
    """Return the page."""
    made = document(TABLE)
    lines = [_HEAD, "| endpoint | role | does | command |", "|---|---|---|---|"]
    for path, method, each in _operations(made):
        verb = f"`{each['x-verb']}`" if "x-verb" in each else ""
        role = each.get("x-role", "anybody")
        lines.append(f"| `{method} {path}` | {role} | {each['summary']} | {verb} |")
    lines += ["", "## What each takes, and may refuse", ""]
    for path, method, each in _operations(made):
        if details := [*_details(each, made["components"]["schemas"])]:
            lines += [f"### `{method} {path}`", "", *details, ""]
    return "\n".join(lines).rstrip() + "\n"


def _operations(made: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, each in methods.items():
            yield path, method.upper(), each


def _details(each: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    for parameter in each["parameters"]:
        if parameter["in"] == "query":
            needed = ", required" if parameter["required"] else ""
            yield f"- query `{parameter['name']}`{needed}: {parameter['description']}".rstrip(" :")
    body = each.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        schema = schemas[body["$ref"].rpartition("/")[2]]
        for name, described in schema.get("properties", {}).items():
            needed = ", required" if name in schema.get("required", ()) else ""
            yield f"- body `{name}`{needed}: {described.get('description', '')}".rstrip(" :")
    refusals = [f"{status} {told['description']}" for status, told in each["responses"].items()]
    common = {"200", "400", "401", "403", "408", "415", "421", "429"}
    own = [each for each in refusals if each[:3] not in common]
    if own:
        yield f"- refusals: {' '.join(own)}"


if __name__ == "__main__":
    sys.stdout.write(reference())
