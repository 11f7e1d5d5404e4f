"""The curves of the overload study as SVG, one line per arm."""

from __future__ import annotations

import pathlib
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

_LOOKS: Final = {  # equal in every plot; from Okabe and Ito's palette, with a marker each
    "direct": ("#999999", "o"),
    "gateway-off": ("#E69F00", "s"),
    "gateway": ("#0072B2", "D"),
    "tuned": ("#56B4E9", "P"),
    "vllm-router": ("#009E73", "v"),
}
_CURVES: Final = {
    "goodput": ("good replies per second", False),
    "ttft": ("p99 time to first token of the admitted, s", True),
    "preemptions": ("preemptions in the cell", False),
}


def draw(result: dict[str, Any], report: pathlib.Path) -> list[str]:
    """Write goodput, p99 TTFT and preemptions over load beside the report; return the file names."""
    cells = [each for each in result["cells"] if each["scenario"] == "levels"]
    if not cells:
        return []
    mpl.rcParams["svg.hashsalt"] = "overload"  # the same data gives the same file
    names = []
    for curve, (title, logarithmic) in _CURVES.items():
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        for arm in dict.fromkeys(each["arm"] for each in cells):
            points = sorted(_point(each, curve) for each in cells if each["arm"] == arm)
            colour, marker = _LOOKS[arm]
            loads, values = [p[0] for p in points], [p[1] for p in points]
            axes.plot(loads, values, color=colour, marker=marker, label=arm, linewidth=1.8)
            bounds = [p for p in points if p[2]]
            axes.plot(
                [p[0] for p in bounds], [p[1] for p in bounds],
                color=colour, marker="^", markersize=11, fillstyle="none", linestyle="none",
            )  # fmt: skip
        if curve == "goodput" and result["capacity"]["per_s"]:
            axes.axhline(result["capacity"]["per_s"], color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="offered load, x capacity", ylabel=title)
        if logarithmic:
            axes.set_yscale("log")
            axes.set_title("triangles: at least this; the cell ended first", fontsize=8)
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        name = f"{report.stem}-{curve}.svg"
        figure.savefig(report.with_name(name), metadata={"Date": None})
        names.append(name)
    return names


def _point(cell: dict[str, Any], curve: str) -> tuple[float, float, bool]:
    """Return load, value, and whether the value is only a lower bound."""
    load = float(cell["label"])
    if curve == "goodput":
        return load, cell["goodput_per_s"], False
    if curve == "preemptions":
        return load, cell["preemptions"], False
    ttft = cell["ttft_s"] or {"p99": float("nan"), "at_least": []}
    return load, ttft["p99"], "p99" in ttft["at_least"]
