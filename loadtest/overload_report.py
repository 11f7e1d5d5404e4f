"""The overload study as Markdown: what was run, tables, and what was asked against what was found. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from loadtest.arms import SIM, TITLES

Found = dict[str, Any]

KEPT_RATIO: Final = 0.95  # of its peak goodput, and of the best arm's, at 2 x and 4 x
OFF_RATIO: Final = 0.99  # of the goodput without admission, at 1 x
TTFT_TIMES: Final = 2.0  # p99 of the admitted, against half load
FAIR_TIMES: Final = 2.0
CLASS_TIMES: Final = 2.5
FAIR_SUCCESS: Final = 0.999
RETRY_SUCCESS: Final = 0.80
FEW_PREEMPTIONS: Final = 0.01  # for each admitted request: what "near 0" means here
SCENARIOS: Final = {
    "levels": "Constant load",
    "retry": "Constant load, clients obey Retry-After once",
    "surge": "Surge: half load, 10 s of {label} x, half load; clients obey Retry-After once",
    "fairness": "One of eight tenants sends 50 shares",
    "classes": "A key with priority under a batch flood of 4 x",
}


def write(result: Found, plots: Sequence[str]) -> str:
    """Return the report. `plots` are file names beside it."""
    cells = result["cells"]
    parts = ["# Overload", _about(result)]
    if plots:
        parts.append("\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in plots))
    parts.append("## Asked and found\n\n" + table(("arm", "asked", "found", "kept"), asked(cells)))
    for name, title in SCENARIOS.items():
        chosen = [each for each in cells if each["scenario"] == name]
        if chosen:
            shown = title.format(label=chosen[0]["label"])
            parts.append(f"## {shown}\n\n{_load(chosen)}\n\n{_refusals(chosen)}")
            if name in ("fairness", "classes"):
                parts[-1] += f"\n\n{_groups(chosen)}"
    parts.append("## Was the machine the limit?\n\n" + _machine(cells))
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def seconds(values: Found | None, name: str) -> str:
    """Return a percentile in seconds; `>=` where the cell ended before its requests did."""
    if values is None:
        return "-"
    sign = ">= " if name in values["at_least"] else ""
    return f"{sign}{values[name]:.2f}" if values[name] >= 0.095 else f"{sign}{values[name]:.3f}"


def percent(ratio: float | None) -> str:
    """Return a share as text."""
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def asked(cells: Sequence[Found]) -> list[tuple[str, str, str, str]]:
    """Hold every arm against what the study asks of the gateway: (arm, asked, found, kept)."""
    rows = []
    for arm in dict.fromkeys(each["arm"] for each in cells):
        of_arm = [each for each in cells if each["arm"] == arm]
        levels = {float(e["label"]): e for e in of_arm if e["scenario"] == "levels"}
        pairs = {(e["scenario"], e["label"]): e for e in of_arm}
        found = [
            *_of_levels(levels),
            *_of_others(levels, cells),
            *_of_refusals(of_arm),
            *_of_pairs(pairs),
        ]
        rows += [(arm, text, shown, "yes" if kept else "no") for text, shown, kept in found]
    return rows


def _of_levels(levels: dict[float, Found]) -> Iterable[tuple[str, str, bool]]:
    peak = max((each["goodput_per_s"] for each in levels.values()), default=0.0)
    calm = levels.get(0.5)
    for level, each in sorted(levels.items()):
        if level >= 2 and peak:
            kept = each["goodput_per_s"] / peak
            text = f"goodput at {level:g} x >= {KEPT_RATIO:.0%} of its peak"
            yield text, percent(kept), kept >= KEPT_RATIO
    for level, each in sorted(levels.items()):
        if level >= 2 and calm and calm["ttft_s"] and each["ttft_s"]:
            times = each["ttft_s"]["p99"] / calm["ttft_s"]["p99"]
            sign = ">= " if "p99" in each["ttft_s"]["at_least"] else ""
            text = f"p99 TTFT of the admitted at {level:g} x <= {TTFT_TIMES:g} x that at 0.5 x"
            yield text, f"{sign}{times:.1f} x", times <= TTFT_TIMES and not sign
    loud = [each for level, each in levels.items() if level >= 2]
    if loud:
        preempted = sum(each["preemptions"] for each in loud)
        admitted = sum(each["ttft_s"]["count"] for each in loud if each["ttft_s"])
        share = preempted / max(1, admitted)
        yield (
            "preemptions near 0 at 2 x and more",
            f"{preempted:.0f} ({share:.3f} for each admitted)",
            share <= FEW_PREEMPTIONS,
        )


def _of_others(
    levels: dict[float, Found], cells: Sequence[Found]
) -> Iterable[tuple[str, str, bool]]:
    """Compare with the other arms; there must be some."""
    rates: dict[float, dict[str, float]] = {}
    for each in cells:
        if each["scenario"] == "levels":
            rates.setdefault(float(each["label"]), {})[each["arm"]] = each["goodput_per_s"]
    for level, each in sorted(levels.items()):
        best, off = max(rates[level].values()), rates[level].get("gateway-off")
        if level >= 2 and len(rates[level]) > 1 and best:
            kept = each["goodput_per_s"] / best
            text = f"goodput at {level:g} x >= {KEPT_RATIO:.0%} of the best arm's"
            yield text, percent(kept), kept >= KEPT_RATIO
        if level == 1 and off and each["arm"] != "gateway-off":
            kept = each["goodput_per_s"] / off
            text = f"goodput at 1 x >= {OFF_RATIO:.0%} of that with admission off"
            yield text, percent(kept), kept >= OFF_RATIO


def _of_refusals(cells: Sequence[Found]) -> Iterable[tuple[str, str, bool]]:
    refusing = [each["refusals"] for each in cells if each["refusals"]["count"]]
    if refusing:
        for name, text in (
            ("in_time_ratio", "every refusal within 50 ms or at its deadline"),
            ("retry_after_ratio", "every refusal has a Retry-After"),
        ):
            known = [each[name] for each in refusing if each[name] is not None]
            if known:
                yield text, f"{percent(min(known))} in the worst cell", min(known) == 1
    for cell in cells:
        again = cell["retries"]
        if again["count"]:
            text = f"retries succeed ({cell['scenario']} {cell['label']}) >= {RETRY_SUCCESS:.0%}"
            shown = f"{percent(again['success_ratio'])} of {again['count']}"
            yield text, shown, again["success_ratio"] >= RETRY_SUCCESS


def _of_pairs(pairs: dict[tuple[str, str], Found]) -> Iterable[tuple[str, str, bool]]:
    for scenario, calm, group, most, who in (
        ("fairness", "quiet", "quiet", FAIR_TIMES, "the others'"),
        ("classes", "alone", "interactive", CLASS_TIMES, "the priority key's"),
    ):
        if not {(scenario, calm), (scenario, "flood")} <= pairs.keys():
            continue
        before = pairs[scenario, calm]["groups"][group]
        after = pairs[scenario, "flood"]["groups"][group]
        if before["ttft_s"] and after["ttft_s"]:
            times = after["ttft_s"]["p99"] / before["ttft_s"]["p99"]
            sign = ">= " if "p99" in after["ttft_s"]["at_least"] else ""
            text = f"{scenario}: {who} p99 TTFT <= {most:g} x that without the flood"
            yield text, f"{sign}{times:.1f} x", times <= most and not sign
        success = after["success_ratio"] or 0.0
        text = f"{scenario}: {who} success >= {FAIR_SUCCESS:.1%}"
        yield text, percent(success), success >= FAIR_SUCCESS


def _about(result: Found) -> str:
    meta, capacity = result["meta"], result["capacity"]
    said = meta["settings"]
    if said["backends"]:
        backends = meta["servers"]
    else:
        backends = f"2 simulated vLLM servers, each with {SIM} {said['sim']}"
    arms = [f"- `{a}`: {TITLES[a]}" for a in dict.fromkeys(e["arm"] for e in result["cells"])]
    ramp = ", ".join(f"{count}: {rate:g}" for count, rate in capacity.get("ramp", ()))
    return "\n".join(
        [
            f"Measured on {meta['date']} at commit {meta['commit']}: Python {meta['python']},"
            f" Linux {meta['kernel']}, {meta['cores']} cores. Backends: {backends}.",
            "",
            f"Open-loop Poisson arrivals, profile `{said['profile']}` (4 of 5 requests are short,"
            f" 1 is long), {said['seconds']:g} s counted in each cell, seed {said['seed']}; every"
            " arm gets requests of the same lengths at the same moments. Times count from the"
            " planned arrival.",
            f"A reply is good when its first token came within {said['ttft']:g} s and its mean gap"
            f" between tokens is at most {1000 * said['itl']:g} ms.",
            "`>=`: the cell was over and its requests were cut before that percentile was known.",
            "",
            f"Capacity: {capacity['per_s']:g} good requests/s"
            + (
                f", {capacity['in_flight']} in flight (in flight: good/s of the ramp: {ramp})"
                if ramp
                else ", given"
            )
            + ".",
            "",
            *arms,
            *(["", meta["note"]] if "note" in meta else []),
        ]
    )


def _load(cells: Sequence[Found]) -> str:
    head = (
        *("load", "arm", "offered/s", "good/s", "complete", "refused", "failed", "cut"),
        *("TTFT p50 s", "p90 s", "p99 s", "short p99 s", "ITL p50 s", "p99 s", "longest gap p99 s"),
        *("preemptions", "tokens/s", "KV peak"),
    )
    rows = []
    for each in _by_label(cells):
        ends, ttft = each["ends"], each["ttft_s"]
        short = each["kinds"].get("short", {}).get("ttft_s")
        rows.append(
            (
                *(each["label"], each["arm"], each["offered_per_s"], each["goodput_per_s"]),
                *(ends.get(name, 0) for name in ("complete", "refused", "failed", "unfinished")),
                *(seconds(ttft, name) for name in ("p50", "p90", "p99")),
                seconds(short, "p99"),
                *(seconds(each["itl_s"], name) for name in ("p50", "p99")),
                seconds(each["gap_s"], "p99"),
                *(f"{each['preemptions']:.0f}", each["tokens_per_s"]),
                percent(each["peaks"].get("kv_usage")),
            )
        )
    return table(head, rows)


def _refusals(cells: Sequence[Found]) -> str:
    head = (
        *("load", "arm", "refusals", "came after p50 s", "p99 s", "longest s", "within 50 ms"),
        *("in time", "with Retry-After", "it says p50 s", "retries", "succeeded", "good"),
    )
    rows = []
    for each in _by_label(cells):
        gone, again = each["refusals"], each["retries"]
        if not gone["count"] and not each["failures"]:
            continue
        reasons = {**gone["reasons"], **each["failures"]}
        rows.append(
            (
                *(each["label"], each["arm"]),
                ", ".join(f"{count} x {reason}" for reason, count in reasons.items()),
                *(seconds(gone["took_s"], name) for name in ("p50", "p99")),
                *(
                    gone["longest_s"],
                    percent(gone["at_once_ratio"]),
                    percent(gone["in_time_ratio"]),
                ),
                *(percent(gone["retry_after_ratio"]), seconds(gone["retry_after_s"], "p50")),
                *(again["count"], percent(again["success_ratio"]), percent(again["good_ratio"])),
            )
        )
    return table(head, rows) if rows else "Nothing was refused and nothing failed."


def _groups(cells: Sequence[Found]) -> str:
    head = ("load", "arm", "who", "offered", "good/s", "success", "good", "TTFT p50 s", "p99 s")
    return table(
        head,
        (
            (
                *(each["label"], each["arm"], name, part["offered"], part["goodput_per_s"]),
                *(percent(part["success_ratio"]), percent(part["good_ratio"])),
                *(seconds(part["ttft_s"], share) for share in ("p50", "p99")),
            )
            for each in _by_label(cells)
            for name, part in each["groups"].items()
        ),
    )


def _machine(cells: Sequence[Found]) -> str:
    head = ("arm", "whole machine", "client", "entrance", "backends", "sent late p99 s")
    rows = []
    for arm in dict.fromkeys(each["arm"] for each in cells):
        of_arm = [each for each in cells if each["arm"] == arm]
        late = max(each["late_s"]["p99"] for each in of_arm if each["late_s"])
        cpu = [
            max(each["cpu_ratio"][name] for each in of_arm)
            for name in ("machine", "client", "entrance", "backends")
        ]
        rows.append((arm, *(percent(value) for value in cpu), f"{late:.4f}"))
    return (
        "CPU in the busiest cell of each arm, in shares of one core (backends: those started here).\n\n"
        + table(head, rows)
    )


def _by_label(cells: Sequence[Found]) -> list[Found]:
    """Order by load, so that the arms stand below each other."""
    labels = list(dict.fromkeys(each["label"] for each in cells))
    return sorted(cells, key=lambda each: labels.index(each["label"]))
