"""The simulated study as text: what is asked of the default on each engine, and what every arm did. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, Final

Found = dict[str, Any]
Cells = dict[tuple[str, str], Found]  # of one engine, arm and seed: by scenario and label

KEPT_RATIO: Final = 0.95
CAPACITY_RATIO: Final = 0.99
TTFT_TIMES: Final = 2.0
CLASS_TIMES: Final = 2.5
FAIR_SUCCESS: Final = 0.999
RETRY_SUCCESS: Final = 0.80
REFUSED_RATIO: Final = 0.002
BELOW: Final = ("0.6", "0.8", "0.9")  # the capacity


def table_of(cells: Sequence[Found], *, details: bool = False) -> str:
    """Return what was asked and found, and the figures of each level; with `details` of every cell."""
    parts = []
    for engine in dict.fromkeys(each["engine"] for each in cells):
        mine = [each for each in cells if each["engine"] == engine]
        parts += [_asked(engine, mine), _levels(engine, mine)]
        if details:
            parts.append(_details(mine))
    return "\n\n".join(parts)


def _asked(engine: str, cells: Sequence[Found]) -> str:
    arms = list(dict.fromkeys(each["arm"] for each in cells))
    seeds = sorted({each["seed"] for each in cells})
    by_seed = {
        (arm, seed): {
            (e["scenario"], e["label"]): e for e in cells if (e["arm"], e["seed"]) == (arm, seed)
        }
        for arm in arms
        for seed in seeds
    }
    head = ["", "asked", *arms]
    rows = []
    for name, least, most, value in _LINES:
        row = [name, f">= {least:g}" if least is not None else f"<= {most:g}"]
        for arm in arms:
            values = []
            for seed in seeds:
                others = [by_seed[other, seed] for other in arms]
                try:
                    found = value(by_seed[arm, seed], others, by_seed.get(("gateway-off", seed)))
                except (KeyError, TypeError, ValueError, ZeroDivisionError):
                    continue  # not measured, or there was nothing to measure
                if found is not None:
                    values.append(found)
            row.append(_shown(values, least, most))
        rows.append(row)
    title = f"{engine}: median of the seeds {seeds} (worst); ! misses what is asked in the median, ? in the worst"
    return f"{title}\n{_columns([head, *rows])}"


def _shown(values: Sequence[float], least: float | None, most: float | None) -> str:
    if not values:
        return "-"
    middle, worst = median(values), min(values) if least is not None else max(values)

    def misses(value: float) -> bool:
        return value < least if least is not None else value > (most or 0.0)

    mark = "!" if misses(middle) else "?" if misses(worst) else " "
    return f"{_number(middle)} ({_number(worst)}){mark}"


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _good(cells: Cells, level: str) -> float:
    return float(cells["levels", level]["goodput_per_s"])


def _refused(cell: Found) -> float:
    return float(cell["ends"].get("refused", 0) / cell["offered"])


def _against_best(level: str) -> Callable[[Cells, list[Cells], Cells | None], float]:
    return lambda own, others, _: (
        _good(own, level) / max(_good(each, level) for each in others if ("levels", level) in each)
    )


def _first_token(level: str) -> Callable[[Cells, list[Cells], Cells | None], float]:
    return lambda own, *_: (
        own["levels", level]["ttft_s"]["p99"] / own["levels", "0.5"]["ttft_s"]["p99"]
    )


def _groups(scenario: str, calm: str, group: str) -> Callable[..., float]:
    return lambda own, *_: (
        own[scenario, "flood"]["groups"][group]["ttft_s"]["p99"]
        / own[scenario, calm]["groups"][group]["ttft_s"]["p99"]
    )


def _least_of_refusals(name: str) -> Callable[[Cells, list[Cells], Cells | None], float]:
    def value(own: Cells, *_: object) -> float:
        return min(e["refusals"][name] for e in own.values() if e["refusals"]["count"])

    return value


def _lasting(level: str) -> Callable[[Cells, list[Cells], Cells | None], float]:
    return lambda own, *_: (
        own["lasting", level]["goodput_per_s"] / own["lasting", "1"]["offered_per_s"]
    )


_Line = tuple[str, float | None, float | None, Callable[..., float]]
_LINES: Final[tuple[_Line, ...]] = (
    ("good/s at 2 x / best arm's", KEPT_RATIO, None, _against_best("2")),
    ("good/s at 4 x / best arm's", KEPT_RATIO, None, _against_best("4")),
    (
        "good/s at 1 x / admission off",
        CAPACITY_RATIO,
        None,
        lambda own, _, off: _good(own, "1") / _good(off, "1"),
    ),
    (
        "refused below 1 x, worst level",
        None,
        REFUSED_RATIO,
        lambda own, *_: max(_refused(own["levels", level]) for level in BELOW),
    ),
    ("p99 first token 2 x / 0.5 x", None, TTFT_TIMES, _first_token("2")),
    ("p99 first token 4 x / 0.5 x", None, TTFT_TIMES, _first_token("4")),
    (
        "surge: retries succeed",
        RETRY_SUCCESS,
        None,
        lambda own, *_: own["surge", "3"]["retries"]["success_ratio"],
    ),
    (
        "flood: others succeed",
        FAIR_SUCCESS,
        None,
        lambda own, *_: own["fairness", "flood"]["groups"]["quiet"]["success_ratio"],
    ),
    (
        "flood: others' p99 first token / quiet",
        None,
        TTFT_TIMES,
        _groups("fairness", "quiet", "quiet"),
    ),
    (
        "priority: p99 first token / alone",
        None,
        CLASS_TIMES,
        _groups("classes", "alone", "interactive"),
    ),
    (
        "priority: succeeds",
        FAIR_SUCCESS,
        None,
        lambda own, *_: own["classes", "flood"]["groups"]["interactive"]["success_ratio"],
    ),
    (
        "preemptions, all cells",
        None,
        0.0,
        lambda own, *_: sum(each["preemptions"] for each in own.values()),
    ),
    ("refusals in time, worst cell", 1.0, None, _least_of_refusals("in_time_ratio")),
    ("refusals with Retry-After", 1.0, None, _least_of_refusals("retry_after_ratio")),
    (
        "cold start at 4 x: good/s / warm",
        KEPT_RATIO,
        None,
        lambda own, *_: own["cold", "4"]["goodput_per_s"] / _good(own, "4"),
    ),
    *(
        (f"lasts at {x} x: good/s / capacity", KEPT_RATIO, None, _lasting(x))
        for x in ("1", "1.05", "1.1")
    ),
    (
        "after long replies at 1.4 x: good/s / capacity",
        KEPT_RATIO,
        None,
        lambda own, *_: (
            1.4 * own["changed", "1.4"]["goodput_per_s"] / own["changed", "1.4"]["offered_per_s"]
        ),
    ),
    (
        "half lost at 1 x: good/s / half of 2 x",
        KEPT_RATIO,
        None,
        lambda own, *_: own["lost", "1"]["goodput_per_s"] / (0.5 * _good(own, "2")),
    ),
    (
        "half lost: p99 first token / 0.5 x",
        None,
        TTFT_TIMES,
        lambda own, *_: own["lost", "1"]["ttft_s"]["p99"] / own["levels", "0.5"]["ttft_s"]["p99"],
    ),
)


def _levels(engine: str, cells: Sequence[Found]) -> str:
    """Show the figures of each level: medians over the seeds."""
    head = ["load", "arm", "offered/s", "good/s", "good tokens/s", "long good", "p50 s", "p99 s"]
    head += ["gap p99 s", "refused", "at once", "preempted"]
    rows = []
    chosen = [e for e in cells if e["scenario"] not in ("surge", "fairness", "classes")]
    for scenario, label in dict.fromkeys((e["scenario"], e["label"]) for e in chosen):
        for arm in dict.fromkeys(each["arm"] for each in cells):
            mine = [
                e for e in chosen if (e["scenario"], e["label"], e["arm"]) == (scenario, label, arm)
            ]
            if mine:
                load = label if scenario == "levels" else f"{scenario} {label}"
                rows.append([f"{engine} {load}", arm, *_row(mine)])
    return _columns([head, *rows])


def _row(cells: Sequence[Found]) -> Iterable[str]:
    def middle(value: Callable[[Found], float | None], form: str) -> str:
        found = [each for each in map(value, cells) if each is not None]
        return form.format(median(found)) if found else "-"

    yield middle(lambda each: each["offered_per_s"], "{:.1f}")
    yield middle(lambda each: each["goodput_per_s"], "{:.2f}")
    yield middle(lambda each: each["good_tokens_per_s"], "{:.0f}")
    yield middle(lambda each: each["kinds"].get("long", {}).get("good_ratio"), "{:.2f}")
    yield middle(lambda each: each["ttft_s"] and each["ttft_s"]["p50"], "{:.3f}")
    yield middle(lambda each: each["ttft_s"] and each["ttft_s"]["p99"], "{:.3f}")
    yield middle(lambda each: each["itl_s"] and each["itl_s"]["p99"], "{:.3f}")
    yield middle(_refused, "{:.3f}")
    yield middle(lambda each: each["refusals"]["at_once_ratio"], "{:.2f}")
    yield middle(lambda each: each["preemptions"], "{:.0f}")


def _details(cells: Sequence[Found]) -> str:
    lines = []
    for each in cells:
        ttft, again = each["ttft_s"] or {}, each["retries"]
        groups = {
            name: (part["success_ratio"], part["ttft_s"] and part["ttft_s"]["p99"])
            for name, part in each["groups"].items()
        }
        lines.append(
            f"{each['engine']:5} {each['arm']:12} {each['seed']} {each['scenario']:8} {each['label']:5}"
            f" offered {each['offered_per_s']:6.1f} good {each['goodput_per_s']:6.2f}"
            f" p50 {ttft.get('p50', 0):.3f} p99 {ttft.get('p99', 0):.3f} {each['ends']}"
            f" preempted {each['preemptions']:.0f} retries {again['count']} {again['success_ratio']}"
            f" took {each['refusals']['took_s']} {groups if len(groups) > 1 else ''} {each['took_s']} s"
        )
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
