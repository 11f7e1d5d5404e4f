"""What a gateway answers, and the keys, as rows for people: `status`, `explain`, `route`, `keys list`.

Imports nothing of the server, so that looking at it starts fast. What a gateway of another version
does not tell is shown as unknown, never as 0.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gateway.cli.console import print_table

if TYPE_CHECKING:
    from gateway.access.records import KeyInfo

_SIGNS: Final = {"ready": "●", "degraded": "◐", "starting": "◌", "saturated": "◐", "down": "○"}
_EVENTS: Final = 5
# What `supervision.waits.why` says to people; another word is shown as it is.
_WHY_NOT: Final = {
    "unseen": "its process cannot be inspected",
    "held": "an operator drained it",
    "busy": "it is busy and making progress",
    "suspended": "restarts are suspended after too many failures",
    "manual": "`automatic` is off",
    "on_hold": "restarts are on hold",
    "follower": "another replica is in charge",
    "ordered": "it was already ordered to restart",
    "suspected": "several backends failed at once, which may be the gateway's own fault",
    "window": "outside the restart window",
    "backoff": "pausing between restarts",
    "turn": "another backend is restarting",
    "budget": "too many backends of the pool are out already",
    "last": "it is the only backend that serves",
    "gpu": "another start uses its GPUs",
}
Row = dict[str, object]


def degraded(overview: dict[str, Any]) -> bool:
    """Whether anything needs a look: a pool that is not ready, or a gateway that goes away."""
    return overview.get("state") != "ready" or bool(overview.get("draining"))


def print_overview(overview: dict[str, Any]) -> None:
    """Print the verdict, the pools, the backends and what changed last."""
    state = str(overview.get("state", "unknown"))
    up = _age(overview.get("uptime_s"))
    head = f"{_SIGNS.get(state, '?')} {state.upper()}  vllm-gateway {overview.get('version', '?')}"
    _line(f"{head}  up {up}\n  {overview.get('verdict', '')}")
    for hold in overview.get("holds", []):
        _line(f"  {_hold(hold)}")
    for pool in overview.get("pools", []):
        if canary := pool.get("canary"):
            _line(f"  {pool.get('name')}: {canary.get('sentence')}")
    if told := _bodies(overview.get("totals", {})):
        _line(f"  {told}")
    _line()
    pools = overview.get("pools", [])
    print_table([_pool_row(pool) for pool in pools], empty="no pools")
    _line()
    print_table(
        [_backend_row(backend) for pool in pools for backend in pool.get("backends", [])],
        empty="no backends",
    )
    events = overview.get("transitions", [])[:_EVENTS]
    if events:
        _line("\nLast events")
        for event in events:
            clock = _clock(event.get("at", ""))
            change = f"{event.get('before')} -> {event.get('after')}"
            _line(f"  {clock}  {event.get('backend')}  {change}  {event.get('detail')}")


def _hold(hold: dict[str, Any]) -> str:
    of = "all pools" if hold.get("pool") is None else hold["pool"]
    until = f"until {_clock(hold['until'])} UTC" if hold.get("until") else "until lifted"
    return f"Automatic restarts of {of} are on hold {until}."


def _bodies(totals: dict[str, Any]) -> str:
    """Return what large request bodies hold; nothing when there are none."""
    held, most = totals.get("body_bytes", 0), totals.get("body_bytes_limit", 0)
    if not held:
        return ""
    return f"Request bodies hold {held / 2**20:.1f} of {most / 2**20:.0f} MiB (`limits.bodies`)."


def _pool_row(pool: dict[str, Any]) -> Row:
    backends = pool.get("backends", [])
    ready = sum(backend.get("phase") == "ready" for backend in backends)
    return {
        "pool": pool.get("name"),
        "state": pool.get("state"),
        "ready": f"{ready}/{len(backends)}",
        "run": _sum(backends, "running"),
        "wait": _sum(backends, "waiting"),
        "kv max": _percent(_most(backends, "kv_usage_ratio")),
        "ours": _sum(backends, "in_flight"),
        "queue": pool.get("queue", {}).get("requests"),
        "oldest": _age(pool.get("queue", {}).get("oldest_s")),
        "window": pool.get("window_tokens"),
        "adapters": len(pool.get("adapters", [])),
    }


def _backend_row(backend: dict[str, Any]) -> Row:
    ready = backend.get("phase") == "ready"
    return {
        "backend": backend.get("id"),
        "state": backend.get("state", backend.get("phase")),
        "since": _age(backend.get("phase_age_s")),
        "run": backend.get("running"),
        "wait": backend.get("waiting"),
        "kv": _percent(backend.get("kv_usage_ratio")),
        "kv next": _percent(backend.get("kv_projected_ratio")),
        "ours": backend.get("in_flight"),
        "limit": backend.get("limit"),
        "vllm": backend.get("version"),
        "": "; ".join(
            filter(None, (_doubt(backend) if ready else _detail(backend), _waits(backend)))
        ),
    }


def _detail(backend: dict[str, Any]) -> str:
    return str(backend.get("detail", ""))


def _waits(backend: dict[str, Any]) -> str:
    """Return why it is not restarted, or not yet, although something is wrong with it."""
    told = backend.get("supervision") or {}
    if told.get("waits_for"):
        return f"waiting to start {told['waits_for']}"
    waits = told.get("waits")
    if not waits:
        return ""
    until = f" until {str(waits['until'])[11:19]}" if waits.get("until") else ""
    why = _WHY_NOT.get(waits.get("why"), waits.get("why"))
    return f"{waits.get('cause')}: not restarted{until}, {why}"


def _adapter_news(kept_back: dict[str, str]) -> str:
    """Return which adapters a backend loads now, or could not load."""
    told = []
    for why, words in (("adapter_loading", "loading"), ("adapter_failed", "could not load")):
        names = [name for name, each in kept_back.items() if each == why]
        if names:
            told.append(f"{words} {', '.join(sorted(names))}")
    return "; ".join(told)


def _doubt(backend: dict[str, Any]) -> str:
    if backend.get("saturated"):
        return "saturated"
    if backend.get("engine") == "openai":
        return "no vLLM: its own load is unknown"
    if backend.get("stale"):
        return "metrics are out of date"
    if told := _adapter_news(backend.get("adapters_kept_back") or {}):
        return told
    events = backend.get("kv_events")
    if events is None or events.get("known"):
        return ""
    if not events.get("engines"):
        return "it publishes no KV events: its prefix cache is guessed"
    return "its KV events are missing: its prefix cache is guessed"


def print_reason(told: dict[str, Any]) -> None:
    """Print an explained request or a dry run: a sentence, the backends, the setting that decided."""
    _line(told.get("sentence", ""))
    if told.get("message"):
        _line(f"  The client sees: {told['message']}")
    if told.get("model"):
        _line(f"  {_needs(told)}")
    backends = told.get("backends", [])
    if backends:
        _line()
        print_table([_verdict_row(each) for each in backends])
    if told.get("setting"):
        _line(f"\nDecided by {_setting(told['setting'])}")


def _needs(told: dict[str, Any]) -> str:
    """Return who asked for what, in one line."""
    parts = [f"model {told.get('model')}"]
    if told.get("pool") != told.get("model"):
        parts.append(f"pool {told.get('pool')}")
    named = told.get("key_id") not in (None, "anonymous")
    parts.append(f"key {told['key_id']} ({told.get('tenant')})" if named else "any key")
    parts.append(f"priority {told.get('priority')}")
    output = told.get("output_tokens")
    expected = "" if output is None else f" + {output} output"
    return " · ".join([*parts, f"{told.get('prompt_tokens')} prompt{expected} tokens"])


def _verdict_row(backend: dict[str, Any]) -> Row:
    setting, expected_s = backend.get("setting"), backend.get("expected_s")
    cached = backend.get("cached_tokens")
    return {
        "backend": backend.get("id"),
        "verdict": str(backend.get("verdict", "")).replace("_", " "),
        "costs": "" if expected_s is None else f"{expected_s:.2f} s",
        "cached": "" if cached is None else f"{cached} tokens",
        "setting": "" if setting is None else _setting(setting),
    }


def _setting(setting: dict[str, Any]) -> str:
    return f"{setting.get('name')}: {setting.get('value')} ({setting.get('origin')})"


def key_rows(keys: Sequence[KeyInfo]) -> list[Row]:
    """Return the keys as rows for a table or for JSON; times are RFC 3339 in UTC."""
    now = time.time()
    return [
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "priority": key.priority,
            "state": key.state(now),
            "models": list(key.models),
            "max_context": key.max_context_tokens,
            "max_output": key.max_output_tokens,
            "fallback": key.fallback,
            "created": _time(key.created_s),
            "ends": _time(key.revoked_s if key.revoked_s is not None else key.ends_s),
        }
        for key in keys
    ]


def _time(wall: float | None) -> str | None:
    from gateway.access.records import timestamp

    return None if wall is None else timestamp(wall)


def _sum(backends: list[dict[str, Any]], key: str) -> int | None:
    known = [backend[key] for backend in backends if backend.get(key) is not None]
    return sum(known) if known else None


def _most(backends: list[dict[str, Any]], key: str) -> float | None:
    return max((b[key] for b in backends if b.get(key) is not None), default=None)


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.0%}"


def _age(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _clock(at: object) -> str:
    return str(at)[:19].replace("T", " ")


def _line(text: str = "") -> None:
    sys.stdout.write(text + "\n")
