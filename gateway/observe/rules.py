"""The alerts as files: Prometheus' rules and the runbooks. Pure.

python -m gateway.observe.rules > deploy/prometheus/alerts.yaml
python -m gateway.observe.rules runbooks > deploy/RUNBOOKS.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from gateway.observe import alerts, problemalerts
from gateway.observe.alerts import Alert

# The groups of the file, in its order: name, title, alerts.
GROUPS: Final[tuple[tuple[str, str, tuple[Alert, ...]], ...]] = (
    ("service", "The service", alerts.SERVICE),
    ("capacity", "Capacity", alerts.CAPACITY),
    ("backends", "States of backends", problemalerts.STATES),
    ("problems", "Problems that `status` lists", problemalerts.PROBLEMS),
    ("operators", "What operators decide", alerts.OPERATORS),
    ("process", "The gateway's own process", alerts.PROCESS),
    ("clients", "Clients", alerts.CLIENTS),
)
ALERTS: Final = tuple(each for _, _, members in GROUPS for each in members)

RUNBOOKS: Final = "/runbooks"  # where the admin listener serves them
# The scrape's own address: it reaches the admin listener of the gateway that the alert is about.
_ADMIN: Final = "http://{{ $labels.instance }}"


def alerts_yaml() -> str:
    """Return the rules as Prometheus reads them (the text of deploy/prometheus/alerts.yaml)."""
    lines = [
        "# Alerts on vllm-gateway, made from gateway/observe/alerts.py and problemalerts.py by `make references`.",
        "# The scrape's job is `vllm-gateway`, as in prometheus.yaml beside this file.",
        "# Each runbook is a page of the admin listener that was scraped. Where people reach that by another address,",
        f"# replace `{_ADMIN}` in the whole file.",
        "groups:",
    ]
    for group, _, members in GROUPS:
        lines += [f"  - name: vllm-gateway-{group}", "    rules:"]
        for each in members:
            lines += _rule(each)
    return "\n".join(lines) + "\n"


def _rule(alert: Alert) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield f"        expr: {_quoted(alert.expr)}"
    yield f"        for: {alert.lasts}"
    yield f"        labels: {{severity: {alert.severity}}}"
    yield "        annotations:"
    yield f"          summary: {_quoted(alert.summary)}"
    yield f"          description: {_quoted(alert.means)}"
    yield f"          runbook_url: {_quoted(f'{_ADMIN}{RUNBOOKS}/{alert.name}')}"


def runbooks() -> str:
    """Return the runbooks as Markdown (the text of deploy/RUNBOOKS.md)."""
    lines = [
        "# Runbooks",
        "",
        "One section for each alert of [prometheus/alerts.yaml](prometheus/alerts.yaml): what it means, where to",
        "look, and what to do. The admin listener serves each at `/runbooks/NAME`: the alert's `runbook_url`.",
        "Made from the tables of `gateway/observe/` by `make references`.",
        "`vllm-gateway status` comes first, whatever fires: it names the worst problem with its cause.",
        "By symptom: [TROUBLESHOOTING.md](TROUBLESHOOTING.md).",
    ]
    for _, title, members in GROUPS:
        lines += ["", f"## {title}"]
        for each in members:
            lines += [
                "",
                f"### {each.name}",
                "",
                f"{each.severity.capitalize()}, after {each.lasts}: `{each.expr}`"
                if each.lasts != "0s"
                else f"{each.severity.capitalize()}, at once: `{each.expr}`",
                "",
                f"- **What it means.** {each.means}",
                f"- **See the cause.** {each.look}",
                f"- **What to do.** {each.act}",
            ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text as a YAML scalar in single quotes."""
    return "'" + text.replace("'", "''") + "'"


if __name__ == "__main__":
    sys.stdout.write(runbooks() if "runbooks" in sys.argv[1:] else alerts_yaml())
