"""The runbooks as pages of the admin listener, where the `runbook_url` of each alert leads. Pure.

They are made from the tables that the alerts are made from, so they fit this gateway's version, and need no
other host.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Final

from gateway.observe.alerts import Alert
from gateway.observe.rules import ALERTS, GROUPS, RUNBOOKS

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title} · vllm-gateway</title>
  <link rel="icon" href="/dashboard/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/dashboard/style.css">
</head>
<body>
  <header class="top">
    <span class="brand">vllm-gateway</span>
    <nav aria-label="Pages"><a href="/">Dashboard</a> <a href="{runbooks}">Runbooks</a></nav>
  </header>
  <main class="view">
"""
_END: Final = "  </main>\n</body>\n</html>\n"


def runbook_pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the HTML of each runbook, and of their list."""
    yield RUNBOOKS, _page("Runbooks", _listed())
    for each in ALERTS:
        yield f"{RUNBOOKS}/{each.name}", _page(each.name, _told(each))


def _listed() -> Iterator[str]:
    yield "<p>One for each alert. <code>vllm-gateway status</code> comes first, whatever fires.</p>"
    for _, title, members in GROUPS:
        links = (f'<li><a href="{RUNBOOKS}/{each.name}">{each.name}</a></li>' for each in members)
        yield _card(title, f"<ul>{''.join(links)}</ul>")


def _told(alert: Alert) -> Iterator[str]:
    when = "at once" if alert.lasts == "0s" else f"after {alert.lasts}"
    yield f"<p>{alert.severity.capitalize()}, {when}: <code>{html.escape(alert.expr)}</code></p>"
    for title, text in (
        ("What it means", alert.means),
        ("See the cause", alert.look),
        ("What to do", alert.act),
    ):
        yield _card(title, f"<p>{_text(text)}</p>")


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{_text(title)}</h2>{content}</section>'


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    return f"{_HEAD.format(title=html.escape(title), runbooks=RUNBOOKS)}{body}\n{_END}"


def _text(text: str) -> str:
    """Return a text as HTML: what stands in backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))
