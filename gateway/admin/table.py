"""Every endpoint of the admin listener. The router serves this table, and OpenAPI is made from it."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from http import HTTPStatus
from typing import Final

import msgspec

from gateway.adapters.status import AdapterStatus
from gateway.admin import (
    adapters,
    fleet,
    orders,
    quarantine,
    requests,
    settings,
    subjects,
    upgrades,
    usage,
)
from gateway.admin.audit import AuditTold
from gateway.admin.desk import Desk
from gateway.admin.endpoint import (
    Asked,
    Body,
    DryRunBody,
    DryRunQuery,
    Endpoint,
    Listing,
    ListQuery,
    Method,
    ProbeQuery,
    Query,
    Text,
)
from gateway.admin.guard import UPGRADE
from gateway.admin.keytable import KEYS
from gateway.admin.openapi import document
from gateway.core.roles import Role
from gateway.heal.orders import Verb
from gateway.ops.dryrun import DryRun
from gateway.ops.explain import Summary, Told
from gateway.ops.explained import RequestExplained
from gateway.ops.overview import BackendOverview, Overview, PoolOverview
from gateway.ops.past import VerdictThen
from gateway.ops.refused import RefusedTold
from gateway.ops.requests import RequestTold
from gateway.ops.series import SeriesTold
from gateway.ops.sharing import ReplicaOverview
from gateway.usage.report import UsageRow

_V1: Final = "/admin/v1"


async def get_audit(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer the newest changes."""
    return desk.audit.listing()


_NO_BACKEND: Final = {HTTPStatus.NOT_FOUND: "backend_not_found"}
_ORDER: Final = {**_NO_BACKEND, HTTPStatus.CONFLICT: "last_backend, not_supervised, upgrading"}
_NOT_HELD: Final = {
    HTTPStatus.NOT_FOUND: "pool_not_found",
    HTTPStatus.CONFLICT: "upgrading",
    HTTPStatus.SERVICE_UNAVAILABLE: "store_unavailable",
}

_SHOWN: Final = (
    Endpoint(
        method=Method.GET, path="/livez", name="livez", role=None,
        does="Tell that the process runs.", handler=fleet.livez, query=ProbeQuery,
    ),
    Endpoint(
        method=Method.GET, path="/readyz", name="readyz", role=None,
        does="Tell whether new requests can be served.", handler=fleet.readyz,
        query=fleet.ReadyQuery, refusals={HTTPStatus.SERVICE_UNAVAILABLE: ""},
    ),
    Endpoint(
        method=Method.GET, path="/metrics", name="metrics", role=Role.METRICS,
        does="Read every metric, for Prometheus.", handler=fleet.get_metrics, query=ProbeQuery,
        media=("text/plain", "application/openmetrics-text"),
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/me", name="me", role=Role.VIEWER,
        does="Read who you are here: your name and role.", handler=fleet.get_me,
        answer=fleet.MeTold,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/overview", name="overview", role=Role.VIEWER,
        does="Read the state of the gateway, its pools and backends.",
        handler=fleet.get_overview, answer=Overview, verb="status",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/verdict", name="verdict", role=Role.VIEWER,
        does="Read what was wrong at a moment of the last hour, as it was told then.",
        handler=fleet.get_verdict, answer=VerdictThen, query=fleet.VerdictQuery,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/series", name="series", role=Role.VIEWER,
        does="Read the last hour of every pool and backend, in steps of 10 s.",
        handler=fleet.get_series, answer=SeriesTold, query=fleet.SeriesQuery,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/pools", name="pools", role=Role.VIEWER,
        does="List the pools with their queues and backends.",
        handler=fleet.get_pools, answer=PoolOverview, rows=True, query=ListQuery,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/pools/{{pool}}", name="pool", role=Role.VIEWER,
        does="Read one pool.", handler=fleet.get_pool, answer=PoolOverview,
        refusals={HTTPStatus.NOT_FOUND: "pool_not_found"},
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/replicas", name="replicas", role=Role.VIEWER,
        does="List the workers of this gateway, and the gateways that share its Redis.",
        handler=fleet.get_replicas, answer=ReplicaOverview, rows=True, query=ListQuery,
        verb="replicas",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/usage", name="usage", role=Role.VIEWER,
        does="Add up what was used, by day, tenant, key, model and adapter.",
        handler=usage.get_usage, answer=UsageRow, rows=True, query=usage.UsageQuery, verb="usage",
        refusals={
            HTTPStatus.UNPROCESSABLE_ENTITY: "bad_usage_query",
            HTTPStatus.SERVICE_UNAVAILABLE: "store_unavailable",
        },
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/events", name="events", role=Role.VIEWER,
        does="List what was done to backends and why, the newest first.",
        handler=orders.get_events, answer=orders.EventTold, rows=True, most=50, query=ListQuery,
        verb="events",
    ),
)  # fmt: skip

_REASONS: Final = (
    Endpoint(
        method=Method.GET, path=f"{_V1}/requests", name="requests", role=Role.VIEWER,
        does="List the requests that are under way or ended lately, the newest first.",
        handler=requests.get_requests, answer=RequestTold, rows=True,
        most=requests.MOST_REQUESTS, query=requests.RequestsQuery, verb="requests",
        refusals={HTTPStatus.NOT_FOUND: "unknown_cursor"},
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/requests/{{request_id}}", name="request", role=Role.VIEWER,
        does="Read what became of a request: its timeline, attempts, backends, tokens.",
        handler=requests.get_request, answer=RequestExplained,
        refusals={HTTPStatus.NOT_FOUND: "request_not_found"}, verb="explain",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/decisions", name="decisions", role=Role.VIEWER,
        does="List the requests that waited or were refused, the newest first.",
        handler=requests.get_decisions, answer=Summary, rows=True, most=requests.MOST_DECISIONS,
        query=ListQuery,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/decisions/{{request_id}}", name="decision", role=Role.VIEWER,
        does="Read why a request waited or was refused, and which setting decided.",
        handler=requests.get_decision, answer=Told | RefusedTold,
        refusals={HTTPStatus.NOT_FOUND: "decision_not_found"},
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/route", name="route", role=Role.VIEWER,
        does="Read what would happen to a request now. Nothing is sent.",
        handler=requests.get_route, answer=DryRun, query=requests.RouteQuery,
        refusals={
            HTTPStatus.NOT_FOUND: "model_not_found, endpoint_not_supported, key_not_found"
        },
        verb="route",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/quarantine", name="quarantine", role=Role.VIEWER,
        does="List the requests that are refused because two backends died as they ran.",
        handler=quarantine.get_all, answer=quarantine.SuspectTold, rows=True, query=ListQuery,
        verb="quarantine list",
    ),
    Endpoint(
        method=Method.POST, path=f"{_V1}/quarantine/{{id}}:lift", name="lift_quarantine",
        role=Role.OPERATOR, does="Let a request be sent again.", handler=quarantine.lift,
        answer=quarantine.LiftedTold, query=DryRunQuery, body=DryRunBody,
        subject=subjects.suspect,
        refusals={
            HTTPStatus.NOT_FOUND: "not_in_quarantine", HTTPStatus.CONFLICT: "upgrading",
        },
        verb="quarantine lift",
    ),
)  # fmt: skip

_BACKENDS: Final = (
    Endpoint(
        method=Method.GET, path=f"{_V1}/backends", name="backends", role=Role.VIEWER,
        does="List the backends of all pools.",
        handler=fleet.get_backends, answer=BackendOverview, rows=True, query=ListQuery,
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/backends/{{backend}}/logs", name="logs", role=Role.OPERATOR,
        does="Read the end of a backend's log since it started, as text.",
        handler=orders.get_logs, query=orders.LogsQuery,
        refusals={
            **_NO_BACKEND,
            HTTPStatus.CONFLICT: "not_supervised",
            HTTPStatus.BAD_GATEWAY: "log_unreadable",
        },
        verb="logs",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/backends/{{backend}}", name="backend", role=Role.VIEWER,
        does="Read one backend; its name is POOL/NAME.", handler=fleet.get_backend,
        answer=BackendOverview, refusals=_NO_BACKEND, subject=subjects.backend,
    ),
    *(
        Endpoint(
            method=Method.POST, path=f"{_V1}/backends/{{backend}}:{verb.value}", name=verb.value,
            role=Role.OPERATOR, does=does, handler=partial(orders.give, verb=verb),
            answer=orders.OrderTold, query=DryRunQuery, body=orders.OrderBody, refusals=_ORDER,
            verb=verb.value, subject=subjects.backend,
        )
        for verb, does in (
            (Verb.DRAIN, "Send a backend no new requests and let running ones finish."),
            (Verb.UNDRAIN, "Put a drained or suspended backend back into service."),
            (Verb.RESTART, "Drain a backend, restart it and verify that it works."),
        )
    ),
    *(
        Endpoint(
            method=Method.POST, path=f"{_V1}/restarts:{name}", name=name, role=Role.OPERATOR,
            does=does, handler=partial(orders.hold, lifts=name == "lift"),
            answer=orders.HoldTold, query=DryRunQuery, body=orders.PoolBody, refusals=_NOT_HELD,
            subject=subjects.holds, verb="hold",
        )
        for name, does in (
            ("hold", "Hold automatic restarts of a pool, or of all."),
            ("lift", "End a hold of automatic restarts."),
        )
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/remedies", name="remedies", role=Role.VIEWER,
        does="List what remedies changed of the command lines of launched servers.",
        handler=orders.get_remedies, answer=orders.RemedyTold, rows=True, query=ListQuery,
        verb="remedies list",
    ),
    Endpoint(
        method=Method.POST, path=f"{_V1}/backends/{{backend}}/remedies:drop", name="drop_remedies",
        role=Role.OPERATOR, does="Start a backend as configured again, from its next start on.",
        handler=orders.drop_remedies, answer=orders.DroppedTold, query=DryRunQuery,
        body=DryRunBody, refusals={**_NO_BACKEND, HTTPStatus.CONFLICT: "upgrading"},
        subject=subjects.backend,
        verb="remedies drop",
    ),
)  # fmt: skip

_ADAPTERS: Final = (
    Endpoint(
        method=Method.GET, path=f"{_V1}/adapters", name="adapters", role=Role.VIEWER,
        does="List on which backends each LoRA adapter is, and why not on others.",
        handler=adapters.get_adapters, answer=AdapterStatus, rows=True, query=adapters.AdaptersQuery,
        verb="adapters list",
    ),
    *(
        Endpoint(
            method=Method.POST, path=f"{_V1}/backends/{{backend}}/adapters:{verb}",
            name=f"{verb}_adapter", role=Role.OPERATOR, does=does,
            handler=partial(adapters.give, verb=verb),
            answer=adapters.AdapterOrderTold, query=DryRunQuery, body=adapters.AdapterBody,
            refusals={
                **_NO_BACKEND,
                HTTPStatus.CONFLICT: "not_vllm, not_an_adapter, not_listed, other_path, no_path, upgrading",
            },
            subject=subjects.backend, verb=f"adapters {verb}",
        )
        for verb, does in adapters.VERBS.items()
    ),
)  # fmt: skip

_CONFIG: Final = (
    Endpoint(
        method=Method.GET, path=f"{_V1}/config", name="config", role=Role.VIEWER,
        does="Read every setting in force, with where it is written. Secrets are hidden.",
        handler=settings.get_config, answer=settings.ConfigTold, subject=settings.subject,
        verb="config effective",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/config/history", name="config_history", role=Role.VIEWER,
        does="List what was put in force, by whom, and what it changed, the newest first.",
        handler=settings.get_history, answer=settings.HistoryTold, rows=True, most=50,
        query=ListQuery, verb="config history",
    ),
    Endpoint(
        method=Method.POST, path=f"{_V1}/config:validate", name="validate_config",
        role=Role.OPERATOR, does="Check the file, or a text that is sent.", computes=True,
        handler=settings.validate, answer=settings.ValidatedTold,
        body=settings.TextBody, body_bytes=settings.TEXT_BYTES,
        refusals={HTTPStatus.CONFLICT: "no_file, upgrading"}, verb="config validate",
    ),
    Endpoint(
        method=Method.POST, path=f"{_V1}/config:diff", name="diff_config", role=Role.OPERATOR,
        does="Read what the file, or a text that is sent, would change.", computes=True,
        handler=settings.get_diff, answer=settings.DiffTold,
        body=settings.TextBody, body_bytes=settings.TEXT_BYTES,
        refusals={HTTPStatus.CONFLICT: "no_file, new_reference, upgrading"}, verb="config diff",
    ),
    Endpoint(
        method=Method.POST, path=f"{_V1}/config:reload", name="reload_config", role=Role.OPERATOR,
        does="Put the file in force. If it is not valid, nothing changes.",
        handler=settings.reload, answer=settings.ReloadTold, query=DryRunQuery, body=DryRunBody,
        subject=settings.subject, refusals={HTTPStatus.CONFLICT: "config_invalid, no_file"},
        verb="reload",
    ),
)  # fmt: skip

_PROCESS: Final = (
    Endpoint(
        method=Method.POST, path=UPGRADE, name="upgrade", role=Role.ADMIN,
        does="Have a new process of the gateway take over. Takes up to two minutes.",
        handler=upgrades.upgrade, answer=upgrades.UpgradedTold, body=Body,
        refusals={
            HTTPStatus.CONFLICT: "upgrade_refused", HTTPStatus.BAD_GATEWAY: "upgrade_failed",
        },
        alone=True, verb="upgrade",
    ),
    Endpoint(
        method=Method.GET, path=f"{_V1}/audit", name="audit", role=Role.VIEWER,
        does="List the changes that were asked for here, the newest first: who, from where, what, why.",
        handler=get_audit, answer=AuditTold, rows=True, most=50, query=ListQuery, verb="audit",
    ),
)  # fmt: skip


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(TABLE))


async def get_document(desk: Desk, asked: Asked[Query, Body]) -> Text:
    """Answer the OpenAPI document; it is made when it is first asked for, beside the loop."""
    return Text(await asyncio.to_thread(_document), "application/json")


_SELF: Final = Endpoint(
    method=Method.GET, path="/admin/openapi.json", name="openapi", role=Role.VIEWER,
    does="Read the description of all this, as OpenAPI 3.1.", handler=get_document,
    media=("application/json",),
)  # fmt: skip

TABLE: Final = (*_SHOWN, *_REASONS, *_BACKENDS, *_ADAPTERS, *KEYS, *_CONFIG, *_PROCESS, _SELF)
