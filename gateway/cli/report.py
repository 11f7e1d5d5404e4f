"""Why a gateway decides as it does, as rows for people: `route`, and parts of `explain`.

Imports nothing of the server, so that looking at it starts fast. What a gateway of another version
does not tell is shown as unknown, never as 0.
"""

from __future__ import annotations

from typing import Any

from gateway.cli.console import print_table

Row = dict[str, object]


def print_reason(told: dict[str, Any]) -> None:
    """Print an explained request or a dry run: a sentence, the backends, the setting that decided."""
    print(told.get("sentence", ""))
    if told.get("message"):
        print(f"  The client sees: {told['message']}")
    if told.get("model"):
        print(f"  {_needs(told)}")
    if told.get("canary"):
        print(f"  {told['canary']}")
    backends = told.get("backends", [])
    if backends:
        print()
        print_table([verdict_row(each) for each in backends])
    if told.get("setting"):
        print(f"\nDecided by {decided_by(told['setting'])}")


def _needs(told: dict[str, Any]) -> str:
    """Return who asked for what, in one line."""
    parts = [f"model {told.get('model')}"]
    if told.get("pool") != told.get("model"):
        parts.append(f"pool {told.get('pool')}")
    parts += [whose(told), f"priority {told.get('priority')}"]
    output = told.get("output_tokens")
    expected = "" if output is None else f" + {output} output"
    return " · ".join([*parts, f"{told.get('prompt_tokens')} prompt{expected} tokens"])


def whose(told: dict[str, Any]) -> str:
    """Return whose key a request has."""
    named = told.get("key_id") not in (None, "anonymous")
    return f"key {told['key_id']} ({told.get('tenant')})" if named else "any key"


def verdict_row(backend: dict[str, Any]) -> Row:
    """Return what one backend said to a request."""
    setting, expected_s = backend.get("setting"), backend.get("expected_s")
    cached = backend.get("cached_tokens")
    return {
        "backend": backend.get("id"),
        "verdict": str(backend.get("verdict", "")).replace("_", " "),
        "costs": "" if expected_s is None else f"{expected_s:.2f} s",
        "cached": "" if cached is None else f"{cached} tokens",
        "setting": "" if setting is None else decided_by(setting),
    }


def decided_by(setting: dict[str, Any]) -> str:
    """Return a setting with its value and where it is written."""
    return f"{setting.get('name')}: {setting.get('value')} ({setting.get('origin')})"
