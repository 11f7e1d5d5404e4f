"""What `top` shows, and what its keys do. Pure: no terminal, no gateway."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from gateway.cli.statusview import (
    BACKENDS_WORST_FIRST,
    age,
    backend_row,
    seconds,
    short,
    worst_first,
)
from gateway.cli.terminal import Terminal

KEYS: Final = (
    "q quit  tab next list  up/down select  d drain  u undrain  h hold restarts  e explain"
)
_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
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


_LEFT_OUT: Final = ("kv next", "gpu mem", "gpu busy", "vllm")  # of the columns of `status`
_TITLES: Final = {
    Focus.BACKENDS: "Backends",
    Focus.TENANTS: "Tenants, under way and just ended",
    Focus.STREAMS: "Longest streams",
}
_HEAD_LINES: Final = 3  # of a list: a free one, its title, the names of columns


class Verb(Enum):
    """What a key asks for."""

    QUIT = "quit"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    HOLD = "hold"
    EXPLAIN = "explain"
    CONFIRM = "confirm"


_VERBS: Final = {
    **dict.fromkeys(("q", "\x03"), Verb.QUIT),
    "d": Verb.DRAIN,
    "u": Verb.UNDRAIN,
    "h": Verb.HOLD,
    **dict.fromkeys(("e", "\r", "\n"), Verb.EXPLAIN),
    "y": Verb.CONFIRM,
}


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


def keys_in(typed: str) -> list[str]:
    """Return the keys that a terminal sent; an arrow is three characters."""
    return _KEY.findall(typed)


def pressed(view: View, key: str, found: Lists) -> View | Verb:
    """Return what a key leads to: another view, or something to do. An unknown key takes a question back."""
    rows = len(found.rows[view.focus])
    match key:
        case "\t":
            every = list(Focus)
            return replace(view, focus=every[(every.index(view.focus) + 1) % len(every)], below=())
        case "j" | "\x1b[B":
            return view.moved(1, rows)
        case "k" | "\x1b[A":
            return view.moved(-1, rows)
    return _VERBS.get(key) or replace(view, below=())


def frame(
    overview: dict[str, Any],
    found: Lists,
    view: View,
    terminal: Terminal,
    height: int | None = None,
) -> list[str]:
    """Return one screen of so many lines, with the selected row; None: of as many as it takes."""
    told = overview.get("verdict") or {}
    state = str(told.get("state", "unknown"))
    head = terminal.painted(f"{terminal.sign(state)} {state.upper()}", state)
    lines = [
        f"{head}  vllm-gateway {overview.get('version', '?')}, up {age(overview.get('uptime_s'))}"
    ]
    below = (
        ["", *(line for text in view.below for line in terminal.wrapped(text))]
        if view.below
        else []
    )
    below += ["", *terminal.wrapped(KEYS)]
    room = None if height is None else max(0, height - len(below) - len(lines))
    lines += _problems(overview.get("problems", []), terminal, room)
    if height is not None:
        room = max(0, height - len(below) - len(lines))
        below = below[-height:]
    return [*lines, *_shown(found, view, terminal, room), *below][-height if height else 0 :]


def _problems(
    problems: Sequence[dict[str, Any]], terminal: Terminal, room: int | None
) -> list[str]:
    """Return the worst problems, in at most a third of the room, which the lists need too."""
    lines: list[str] = []
    most = sys.maxsize if room is None else room // 3
    for number, each in enumerate(problems):
        told = terminal.wrapped(f"{each['sentence']} {each['next']}", f"{each['severity']}: ")
        rest = number + 1 < len(problems)  # which is told in one more line
        if number and (number == _PROBLEMS or len(lines) + len(told) + rest > most):
            return [*lines, f"{len(problems) - number} more: `vllm-gateway status`"]
        lines += told[: max(1, most - rest)]
    return lines


def _shown(found: Lists, view: View, terminal: Terminal, room: int | None) -> Iterator[str]:
    """Yield the lists; in so many lines, the one that keys act on has two thirds of them, or what others leave."""
    wanted = {focus: _HEAD_LINES + max(1, len(found.rows[focus])) for focus in _TITLES}
    given = dict(wanted)
    if room is not None:
        given = {view.focus: min(wanted[view.focus], room * 2 // 3)}
        left = room - given[view.focus]
        for focus in _TITLES:
            if focus is not view.focus:
                given[focus] = min(wanted[focus], left) if left > _HEAD_LINES else 0
                left -= given[focus]
        given[view.focus] = min(wanted[view.focus], given[view.focus] + left)
    for focus in _TITLES:
        if given[focus] > _HEAD_LINES:
            yield from _list(focus, found.rows[focus], view, terminal, given[focus] - _HEAD_LINES)


def _list(
    focus: Focus, rows: Sequence[Row], view: View, terminal: Terminal, most: int
) -> Iterator[str]:
    """Yield a list with at most so many rows, among them the selected one."""
    place = min(view.places.get(focus, 0), len(rows) - 1) if view.focus is focus else -1
    first = min(max(0, place - most // 2), max(0, len(rows) - most))
    marked = [{"": ">" if at == place else " ", **row} for at, row in enumerate(rows)]
    title, last = _TITLES[focus], min(first + most, len(rows))
    yield ""
    yield terminal.bold(
        title if len(rows) <= most else f"{title} ({first + 1} to {last} of {len(rows)})"
    )
    if not rows:
        yield "none"
        return
    head, *lines = terminal.table(marked, least=_LEAST[focus.value], state="state")
    yield from (head, *lines[first:last])


def _backend(backend: dict[str, Any]) -> Row:
    row = backend_row(backend)
    return {name: row[name] for name in row if name not in _LEFT_OUT}


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
