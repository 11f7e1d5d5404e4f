"""What `top` shows, and what its keys do. Pure: no terminal, no gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from gateway.cli.statusview import BACKENDS_WORST_FIRST, age, doubt, seconds, short, worst_first
from gateway.cli.terminal import Terminal

KEYS: Final = (
    "q quit  tab next list  up/down select  d drain  u undrain  h hold restarts  e explain"
)
_PROBLEMS: Final = 3
_LINES_OF_OTHERS: Final = 8  # of tenants, and of streams
_LEAST: Final = {
    "backends": ("note", "limit", "slower", "waiting", "for"),
    "tenants": ("tok/s each", "shed", "ttft p95"),
    "streams": ("tenant", "key", "model", "first token"),
}

Row = dict[str, object]


class Focus(Enum):
    """The list that the keys act on."""

    BACKENDS = "backends"
    TENANTS = "tenants"
    STREAMS = "streams"


class Verb(Enum):
    """What a key asks for."""

    QUIT = "quit"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    HOLD = "hold"
    EXPLAIN = "explain"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: the list, the place in it, and what stands below."""

    focus: Focus = Focus.BACKENDS
    places: Mapping[Focus, int] = field(default_factory=dict)
    below: tuple[str, ...] = ()  # an answer, or a question

    def moved(self, steps: int, rows: int) -> View:
        """Return the view with another row selected."""
        place = min(max(self.places.get(self.focus, 0) + steps, 0), max(rows - 1, 0))
        return replace(self, places={**self.places, self.focus: place}, below=())


@dataclass(frozen=True, slots=True)
class Lists:
    """The rows of each list, and the id of each row."""

    rows: Mapping[Focus, Sequence[Row]]
    ids: Mapping[Focus, Sequence[str]]

    def selected(self, view: View) -> str | None:
        """Return the id of the selected row; None of an empty list."""
        ids = self.ids[view.focus]
        return ids[min(view.places.get(view.focus, 0), len(ids) - 1)] if ids else None


def lists(overview: dict[str, Any], requests: Sequence[dict[str, Any]]) -> Lists:
    """Return the backends, tenants and streams, the worst of each first."""
    backends = [each for pool in overview.get("pools", []) for each in pool.get("backends", [])]
    backends.sort(key=worst_first(BACKENDS_WORST_FIRST))
    tenants: dict[str, list[dict[str, Any]]] = {}
    for each in requests:
        tenants.setdefault(each.get("tenant") or "-", []).append(each)
    busiest = sorted(
        tenants, key=lambda name: (-_under_way(tenants[name]), -len(tenants[name]), name)
    )
    streams = [each for each in requests if each.get("stream") and each.get("state") == "running"]
    streams.sort(key=lambda each: -(each.get("duration_s") or 0.0))
    return Lists(
        rows={
            Focus.BACKENDS: [_backend(each) for each in backends],
            Focus.TENANTS: [_tenant(name, tenants[name]) for name in busiest[:_LINES_OF_OTHERS]],
            Focus.STREAMS: [_stream(each) for each in streams[:_LINES_OF_OTHERS]],
        },
        ids={
            Focus.BACKENDS: [str(each.get("id")) for each in backends],
            Focus.TENANTS: busiest[:_LINES_OF_OTHERS],
            Focus.STREAMS: [str(each.get("id")) for each in streams[:_LINES_OF_OTHERS]],
        },
    )


def pressed(view: View, key: str, found: Lists) -> View | Verb:
    """Return what a key leads to: another view, or something to do. An unknown key takes a question back."""
    rows = len(found.rows[view.focus])
    match key:
        case "q" | "\x03":
            return Verb.QUIT
        case "\t":
            every = list(Focus)
            return replace(view, focus=every[(every.index(view.focus) + 1) % len(every)], below=())
        case "j" | "\x1b[B":
            return view.moved(1, rows)
        case "k" | "\x1b[A":
            return view.moved(-1, rows)
        case "d":
            return Verb.DRAIN
        case "u":
            return Verb.UNDRAIN
        case "h":
            return Verb.HOLD
        case "e" | "\r" | "\n":
            return Verb.EXPLAIN
        case "y":
            return Verb.CONFIRM
    return replace(view, below=())


def frame(
    overview: dict[str, Any],
    found: Lists,
    view: View,
    terminal: Terminal,
    height: int | None = None,
) -> list[str]:
    """Return one screen; `height` cuts it, None does not."""
    told = overview.get("verdict") or {}
    state = str(told.get("state", "unknown"))
    head = terminal.painted(f"{terminal.sign(state)} {state.upper()}", state)
    lines = [
        f"{head}  vllm-gateway {overview.get('version', '?')}, up {age(overview.get('uptime_s'))}"
    ]
    problems = overview.get("problems", [])
    for each in problems[:_PROBLEMS]:
        lines += terminal.wrapped(f"{each['sentence']} {each['next']}", f"{each['severity']}: ")
    if len(problems) > _PROBLEMS:
        lines.append(f"{len(problems) - _PROBLEMS} more: `vllm-gateway status`")
    for focus, title in (
        (Focus.BACKENDS, "Backends"),
        (Focus.TENANTS, "Tenants, of the requests under way and the last that ended"),
        (Focus.STREAMS, "Streams that run for the longest"),
    ):
        rows = found.rows[focus]
        lines += ["", terminal.bold(title)]
        place = min(view.places.get(focus, 0), len(rows) - 1) if view.focus is focus else -1
        marked = [{"": ">" if at == place else " ", **row} for at, row in enumerate(rows)]
        lines += (
            terminal.table(marked, least=_LEAST[focus.value], state="state") if rows else ["none"]
        )
    below = (
        ["", *(line for text in view.below for line in terminal.wrapped(text))]
        if view.below
        else []
    )
    below += ["", *terminal.wrapped(KEYS)]
    if height is None:
        return lines + below
    return lines[: max(0, height - len(below))] + below[-height:]


def _backend(backend: dict[str, Any]) -> Row:
    slowness = backend.get("slowness") or 1.0
    kv = backend.get("kv_usage_ratio")
    return {
        "backend": backend.get("id"),
        "state": backend.get("state"),
        "for": age(backend.get("phase_age_s")),
        "running": backend.get("running"),
        "waiting": backend.get("waiting"),
        "kv": None if kv is None else f"{kv:.0%}",
        "in flight": backend.get("in_flight"),
        "limit": backend.get("limit"),
        "slower": f"{slowness:.1f}x" if slowness > 1.0 else None,
        "note": doubt(backend),
    }


def _tenant(name: str, requests: Sequence[dict[str, Any]]) -> Row:
    ended = [each for each in requests if each.get("state") == "ended"]
    firsts = sorted(
        each["first_token_s"] for each in requests if each.get("first_token_s") is not None
    )
    tokens = sum(each.get("output_tokens") or 0 for each in requests)
    spent_s = sum(each.get("duration_s") or 0.0 for each in requests)
    return {
        "tenant": name,
        "under way": _under_way(requests),
        "ended": len(ended),
        "errors": sum((each.get("status") or 0) >= 500 for each in ended),
        "shed": sum(each.get("shed_reason") is not None for each in ended),
        "ttft p95": seconds(firsts[int(0.95 * (len(firsts) - 1))] if firsts else None),
        "tok/s each": short(tokens / spent_s if spent_s else None),
    }


def _stream(request: dict[str, Any]) -> Row:
    lasted, first = request.get("duration_s") or 0.0, request.get("first_token_s")
    tokens = request.get("output_tokens")
    writing_s = lasted - (first or 0.0)
    return {
        "request": request.get("id"),
        "tenant": request.get("tenant"),
        "key": request.get("key_id"),
        "model": request.get("model"),
        "backend": request.get("backend"),
        "for": age(lasted),
        "first token": seconds(first),
        "tokens": tokens,
        "tok/s": short(tokens / writing_s if tokens and writing_s > 0 else None),
    }


def _under_way(requests: Sequence[dict[str, Any]]) -> int:
    return sum(each.get("state") != "ended" for each in requests)
