"""The overview of a gateway as lines for people: `status`.

Imports nothing of the server, so that looking at it starts fast. What a gateway of another version does
not tell is shown as unknown, never as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gateway.cli.terminal import Terminal, clock

_EVENTS: Final = 5
POOLS_WORST_FIRST: Final = ("down", "saturated", "starting", "degraded", "ready")
BACKENDS_WORST_FIRST: Final = (
    *("suspended", "crash-looping", "failed", "unreachable", "frozen", "down", "failing", "asleep"),
    *("cordoned", "draining", "pending", "restarting", "starting", "degraded", "ready"),
)
# Left out where the terminal is narrow, the first first.
_LEAST_OF_POOLS: Final = (
    "oldest",
    "gap p95",
    "ttft p50",
    "in flight",
    "tok/s",
    "shed",
    "ttft p95",
    "ready",
)
_LEAST_OF_BACKENDS: Final = (
    "vllm",
    "gpu busy",
    "slower",
    "limit",
    "kv next",
    "gpu mem",
    "note",
    "for",
    "waiting",
    "in flight",
)
_OF_GPUS: Final = ("gpu mem", "gpu busy")  # columns

Row = dict[str, object]


def degraded(overview: dict[str, Any]) -> bool:
    """Whether anything needs a look: a problem that is more than a note, or a gateway that goes away."""
    return (overview.get("verdict") or {}).get("state") != "ok"


def overview_lines(overview: dict[str, Any], terminal: Terminal) -> list[str]:
    """Return the verdict, the problems, the pools, the backends and what changed last."""
    pools = sorted(overview.get("pools", []), key=worst_first(POOLS_WORST_FIRST))
    lines = [*_head(overview, terminal)]
    facts = list(_facts(overview))
    if facts and overview.get("problems"):
        lines.append("")  # they are no part of the last problem
    for text in facts:
        lines += terminal.wrapped(text, "  ")
    lines += ["", terminal.bold("Pools, in the last 5 minutes")]
    rows = [row for pool in pools for row in _pool_rows(pool, terminal)]
    lines += terminal.table(rows, least=_LEAST_OF_POOLS, state="state") if rows else ["no pools"]
    backends = [
        backend
        for pool in pools
        for backend in sorted(pool.get("backends", []), key=worst_first(BACKENDS_WORST_FIRST))
    ]
    lines += ["", terminal.bold("Backends, now")]
    rows = [backend_row(each) for each in backends]
    least: tuple[str, ...] = _LEAST_OF_BACKENDS
    if not any(each.get("gpus") for each in backends):
        rows = [{name: row[name] for name in row if name not in _OF_GPUS} for row in rows]
        least = tuple(name for name in least if name not in _OF_GPUS)
    lines += terminal.table(rows, least=least, state="state") if rows else ["no backends"]
    if events := overview.get("transitions", [])[:_EVENTS]:
        lines += ["", terminal.bold("Last changes of backends")]
        for event in events:
            change = f"{event.get('before')} -> {event.get('after')}"
            told = f"{event.get('backend')}  {change}  {event.get('detail') or ''}".rstrip()
            lines += terminal.wrapped(told, f"  {clock(event.get('at', ''))}  ")
    return lines


def fitting(lines: list[str], height: int | None) -> list[str]:
    """Return the first lines, the worst, and the last one, where a terminal has room for fewer; pure.

    The line below the last one is for the cursor.
    """
    if height is None or len(lines) < height:
        return lines
    kept = max(1, height - 3)
    return [
        *lines[:kept],
        f"({len(lines) - kept - 1} more lines: `vllm-gateway status`)",
        lines[-1],
    ]


def _head(overview: dict[str, Any], terminal: Terminal) -> Iterator[str]:
    told, problems = overview.get("verdict") or {}, overview.get("problems", [])
    state, sentence = str(told.get("state", "unknown")), str(told.get("sentence", ""))
    counts = [
        f"{number} {severity}"
        for severity in ("down", "degraded", "note")
        if (number := sum(each["severity"] == severity for each in problems))
    ]
    version = f"vllm-gateway {overview.get('version', '?')}, up {age(overview.get('uptime_s'))}"
    verdict = terminal.painted(f"{terminal.sign(state)} {state.upper()}", state)
    yield "  ".join((verdict, version, *([f"({', '.join(counts)})"] if counts else [])))
    if not problems:
        yield from terminal.wrapped(sentence, "  ")
    for each in problems:
        yield ""
        severity = each["severity"]
        first, *more = terminal.wrapped(each["sentence"], f"{severity}: ")
        yield terminal.painted(severity, severity) + first.removeprefix(severity)
        yield from more
        if each["cause"]:
            yield from terminal.wrapped(each["cause"], "  why   ")
        yield from terminal.wrapped(each["next"], "  next  ")


def _facts(overview: dict[str, Any]) -> Iterator[str]:
    """Yield what is to be known beside the problems."""
    yield from _shared(overview.get("store") or {})
    for pool in overview.get("pools", []):
        if canary := pool.get("canary"):
            yield f"{pool.get('name')}: {canary.get('sentence')}"
    totals = overview.get("totals", {})
    held, most = totals.get("body_bytes", 0), totals.get("body_bytes_limit", 0)
    if held:
        yield f"Request bodies hold {held / 2**20:.1f} of {most / 2**20:.0f} MiB (`limits.bodies`)."


def _shared(store: dict[str, Any]) -> Iterator[str]:
    """Yield what is to be known of what replicas or workers share, and of them."""
    if trouble := store.get("trouble"):
        yield f"What replicas share does not answer: {trouble}. No backend is restarted until it does."
    for each in store.get("replicas", []):
        leads = ", ".join(each.get("leads", []))
        differs = ", ".join(each.get("differs", []))
        notes = [
            "this one" if each.get("here") else "",
            f"restarts backends of {leads}" if leads else "",
            "" if each.get("alive") else f"silent for {age(each.get('heard_s'))}",
            "" if each.get("config_agrees") else "ITS CONFIGURATION DIFFERS",
            f"sees another state of {differs}" if differs else "",
        ]
        what = f"Worker {each['worker']}" if each.get("worker") else "Replica"
        who = f"{each.get('id')} on {each.get('host')}, process {each.get('pid')}"
        yield f"{what} {who}: {'; '.join(filter(None, notes)) or 'well'}"


def _pool_rows(pool: dict[str, Any], terminal: Terminal) -> Iterator[Row]:
    """Yield the row of a pool, and one for each of its models if it has several."""
    backends, queue = pool.get("backends", []), pool.get("queue", {})
    ready = sum(backend.get("phase") == "ready" for backend in backends)
    yield {
        "pool": pool.get("name"),
        "state": pool.get("state"),
        "ready": f"{ready}/{len(backends)}",
        **_recent(pool.get("last_5_min")),
        "queue": queue.get("requests"),
        "oldest": age(queue.get("oldest_s")),
        "in flight": _sum(backends, "in_flight"),
    }
    models = pool.get("models", [])
    if len(models) > 1:
        for each in models:
            yield {
                "pool": f"{terminal.branch}{each.get('name')}",
                "state": "",
                "ready": "",
                **_recent(each.get("last_5_min")),
                "queue": "",
                "oldest": "",
                "in flight": "",
            }


def _recent(told: dict[str, Any] | None) -> Row:
    told = told or {}
    errors, requests = told.get("errors"), told.get("requests")
    share = f"{errors / requests:.0%} ({errors})" if errors and requests else errors
    return {
        "req/s": short(told.get("requests_per_s")),
        "errors": share,
        "shed": told.get("shed"),
        "ttft p50": seconds(told.get("ttft_p50_s")),
        "ttft p95": seconds(told.get("ttft_p95_s")),
        "gap p95": seconds(told.get("gap_p95_s")),
        "tok/s": short(told.get("tokens_per_s")),
    }


def backend_row(backend: dict[str, Any]) -> Row:
    """Return a backend as a row; what is wrong with it is told elsewhere."""
    slowness = backend.get("slowness") or 1.0
    return {
        "backend": backend.get("id"),
        "state": backend.get("state", backend.get("phase")),
        "for": age(backend.get("phase_age_s")),
        "running": backend.get("running"),
        "waiting": backend.get("waiting"),
        "kv": _percent(backend.get("kv_usage_ratio")),
        "kv next": _percent(backend.get("kv_projected_ratio")),
        **_gpus(backend.get("gpus") or []),
        "in flight": backend.get("in_flight"),
        "limit": backend.get("limit"),
        "slower": f"{slowness:.1f}x" if slowness > 1.0 else None,
        "vllm": backend.get("version"),
        "note": _doubt(backend),
    }


def _gpus(gpus: list[dict[str, Any]]) -> Row:
    """Return the fullest and the busiest of a backend's GPUs."""
    used = [each["memory_used_bytes"] / each["memory_bytes"] for each in gpus]
    busy = [each["busy_ratio"] for each in gpus if each["busy_ratio"] is not None]
    return {
        "gpu mem": _percent(max(used, default=None)),
        "gpu busy": _percent(max(busy, default=None)),
    }


def _doubt(backend: dict[str, Any]) -> str:
    """Return what is to be known of a backend that serves; empty: nothing."""
    if backend.get("saturated"):
        return f"takes no more: {str(backend.get('obstacle') or 'saturated').replace('_', ' ')}"
    if backend.get("engine") == "openai":
        return "no vLLM: its own load is unknown"
    if backend.get("stale"):
        return "metrics are out of date"
    if told := _adapter_news(backend.get("adapters_kept_back") or {}):
        return told
    if waits := (backend.get("supervision") or {}).get("waits_for"):
        return f"waiting to start {waits}"
    events = backend.get("kv_events")
    if events is None or events.get("known"):
        return ""
    if not events.get("engines"):
        return "it publishes no KV events: its prefix cache is guessed"
    return "its KV events are missing: its prefix cache is guessed"


def _adapter_news(kept_back: dict[str, str]) -> str:
    """Return which adapters a backend loads now, or could not load."""
    told = []
    for why, words in (("adapter_loading", "loading"), ("adapter_failed", "could not load")):
        names = [name for name, each in kept_back.items() if each == why]
        if names:
            told.append(f"{words} {', '.join(sorted(names))}")
    return "; ".join(told)


def worst_first(states: tuple[str, ...]) -> Any:
    """Return what sorts pools or backends by their state; one of another version comes first."""

    def place(each: dict[str, Any]) -> int:
        state = each.get("state", each.get("phase"))
        return states.index(state) if state in states else 0

    return place


def _sum(backends: list[dict[str, Any]], key: str) -> int | None:
    known = [backend[key] for backend in backends if backend.get(key) is not None]
    return sum(known) if known else None


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.0%}"


def age(passed_s: float | None) -> str | None:
    """Return `8s`, `6m`, `3h` or `12d`."""
    if passed_s is None:
        return None
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed_s >= size:
            return f"{passed_s // size:.0f}{unit}"
    return f"{passed_s:.0f}s"


def seconds(value: float | None) -> str | None:
    """Return `85ms`, `1.24s` or `31s`."""
    if value is None:
        return None
    if value < 1.0:
        return f"{value * 1000:.0f}ms"
    return f"{value:.2f}s" if value < 10.0 else f"{value:.0f}s"


def short(value: float | None) -> str | None:
    """Return `0.3`, `42` or `9.8k`."""
    if value is None:
        return None
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:.1f}" if value < 10.0 else f"{value:.0f}"
