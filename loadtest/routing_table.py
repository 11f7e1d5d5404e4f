"""Tables of the routing study: every arm on every trace, and how the gateway stands against the bars. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

OURS: Final = "gateway"  # what is shipped
ORACLES: Final = ("oracle, first token", "oracle, hits")
OWN: Final = (OURS, "by load", "sees caches")  # arms of the gateway: no rivals
SHARED: Final = (
    "few prompts",
    "many prompts",
    "short prompts",
    "chats",
    "agents",
    "hot spot",
    "restart",
)
HITS_BAR: Final = 0.95  # of the best hit rate of all arms, on traces that share prefixes
# A p99 that is less than so many times another one is no worse: an engine works in steps.
_SAME: Final = 1.02

Cell = dict[str, Any]


_ABOUT: Final = """\
# Routing for prefix caches

Written by `python -m loadtest.routing` (simulated time) and `python -m loadtest.routing_sockets`.

Engines: an 8B model on one GPU of 40 GB, about. They read 16,000 tokens/s in steps of at most 2,048, a step
takes 12 ms, 0.05 ms for each sequence and 0.05 us for each token of context; the cache holds 131,072 tokens
in blocks of 16, as vLLM's does. They tell no `cached_tokens`, as shipped.

Traces: `few prompts` (8 system prompts of 2,048 tokens, skewed), `many prompts` (40 of 1,024 to 3,072 for each
backend), `short prompts` (400 of 48 to 160 for each backend), `chats` (3 to 10 turns), `agents` (8 to 16 calls, to
some 10 thousand tokens), `rag` (4 of many documents, shuffled), `random` (nothing shared), `hot spot` (`many`, but six of ten begin with the same 3,072
tokens), `restart` (`many`; one backend loses its cache half way).

Arms: `gateway` is what is shipped, `by load` is `prefix: off`, `sees caches` is our choice with exact
knowledge of all caches. Names with (model) are models of what vllm-router and sglang-router publish of their
policies. `oracle, first token` sees all caches and queues and goes where the first token comes first; `oracle,
hits` goes where most is cached, however busy. "Of the best" is the hit rate as a share of the highest of
any arm, oracles included. "Lost" were refused or never ended; their first token counts as never.
"""


def over_sockets(cells: Sequence[Cell]) -> str:
    """Return the table of what was measured over sockets, as Markdown."""
    late_s = max(cell["late_p99_s"] for cell in cells)
    said = f"The client itself was at most {late_s:.3f} s late (p99 of the worst arm)."
    return f"\n## Over sockets, {cells[0]['backends']} backends\n\n{said}\n\n{_table(cells)}\n"


def report(cells: Sequence[Cell]) -> str:
    """Return the bars, then the table of each pool, as Markdown; cells of several seeds are medians."""
    merged = _medians(cells)
    parts = [_ABOUT.rstrip(), bars(merged)]
    for backends in sorted({cell["backends"] for cell in merged}):
        parts.append(f"## {backends} backends\n\n{_table(_of(merged, backends=backends))}")
    return "\n\n".join(part for part in parts if part) + "\n"


def best_hits(cells: Sequence[Cell]) -> float:
    """Return the best hit rate of all arms on one trace, the oracles among them."""
    return max(cell["hit_ratio"] for cell in cells)


def best_rival(cells: Sequence[Cell]) -> Cell | None:
    """Return the rival with the earliest p99 first token; neither an oracle nor the gateway itself."""
    rivals = [cell for cell in cells if cell["arm"] not in (*ORACLES, *OWN)]
    return min(rivals, key=lambda cell: float(cell["ttft_p99_s"]), default=None)


def bars(cells: Sequence[Cell], ours: str = OURS) -> str:
    """Return a row for each trace and pool: what is asked of the gateway, and what it does."""
    rows = []
    for mine in (cell for cell in cells if cell["arm"] == ours):
        same = _of(cells, trace=mine["trace"], backends=mine["backends"])
        rival, best = best_rival(same), best_hits(same)
        share = mine["hit_ratio"] / best if best else 1.0
        hits = f"{share:.1%}"
        if mine["trace"] in SHARED:
            hits += "" if share >= HITS_BAR else " (missed)"
        waits = "" if rival is None or no_worse(mine, rival) else " (missed)"
        named = "" if rival is None else f"{_seconds(rival['ttft_p99_s'])} {rival['arm']}"
        rows.append(
            [mine["trace"], str(mine["backends"]), hits, f"{_seconds(mine['ttft_p99_s'])}{waits}", named]
        )  # fmt: skip
    if not rows:
        return ""
    head = ["trace", "backends", "hits of the best", "p99 first token", "best rival's"]
    return "## Against the bars\n\n" + _markdown(head, rows)


def no_worse(mine: Cell, rival: Cell) -> bool:
    """Whether the p99 first token of one is no worse than that of another."""
    return float(mine["ttft_p99_s"]) <= _SAME * float(rival["ttft_p99_s"])


def _medians(cells: Sequence[Cell]) -> list[Cell]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["trace"], cell["backends"], cell["arm"]), []).append(cell)
    names = ("hit_ratio", "tokens_per_s", "ttft_p50_s", "ttft_p99_s", "spread")
    return [
        group[0]
        | {name: statistics.median(cell[name] for cell in group) for name in names}
        | {"ends": {end: sum(c["ends"].get(end, 0) for c in group) for c in group for end in c["ends"]}}
        for group in groups.values()
    ]  # fmt: skip


def _of(cells: Sequence[Cell], **wanted: Any) -> list[Cell]:
    return [cell for cell in cells if all(cell[name] == value for name, value in wanted.items())]


def _table(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        best = best_hits(_of(cells, trace=cell["trace"]))
        lost = cell["requests"] - cell["ends"].get("complete", 0)
        rows.append(
            [
                cell["trace"],
                cell["arm"],
                f"{cell['hit_ratio']:.1%}",
                f"{cell['hit_ratio'] / best:.0%}" if best else "",
                f"{cell['tokens_per_s']:,.0f}",
                _seconds(cell["ttft_p50_s"]),
                _seconds(cell["ttft_p99_s"]),
                f"{cell['spread']:.2f}",
                str(lost) if lost > 0 else "",
            ]
        )
    head = ["trace", "arm", "hit rate", "of the best", "tokens/s", "first token p50", "p99", "most/mean", "lost"]  # fmt: skip
    return _markdown(head, rows)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.3f} s"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
