"""Requests as rows and as a timeline for people: `requests`, `explain`.

What a gateway of another version does not tell is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.cli.console import print_table
from gateway.cli.report import decided_by, verdict_row, whose

Row = dict[str, object]


def request_row(each: dict[str, Any]) -> Row:
    """Return a request in one line."""
    why = each.get("shed_reason") or each.get("code")
    ended = f"{each.get('outcome')} {each.get('status')}" + (f" {why}" if why else "")
    return {
        "came": str(each.get("at", ""))[11:23],
        "id": each.get("id"),
        "state": each.get("state") if each.get("outcome") is None else ended,
        "model": each.get("model"),
        "backend": each.get("backend"),
        "key": each.get("key_id"),
        "waited": _seconds(each.get("waited_s") or None),
        "first": _seconds(each.get("first_token_s")),
        "took": _seconds(each.get("duration_s")),
        "prompt": each.get("prompt_tokens"),
        "output": each.get("output_tokens"),
    }


def print_request(told: dict[str, Any]) -> None:
    """Print all that is known of a request: a sentence, its timeline, and what is known of each step."""
    print(told.get("sentence", ""))
    early = told.get("refused") or {}
    message = told.get("message") or early.get("message")
    if message:
        print(f"  The client sees: {message}")
    for line in (*_asked(told), *_tokens(told.get("tokens") or {})):
        print(f"  {line}")
    print()
    print_table([_step(each) for each in told.get("timeline", [])])
    if len(tried := told.get("tried", [])) > 1:
        print()
        print_table([_attempt(each) for each in tried])
    _print_choice(told)
    for change in told.get("changed", []):
        print(f"Changed `{change.get('field')}`: {change.get('sentence')}")
    if told.get("setting"):
        print(f"Decided by {decided_by(told['setting'])}")


def _asked(told: dict[str, Any]) -> Iterator[str]:
    """Yield who asked for what."""
    parts = [f"model {told['model']}"] if told.get("model") else []
    if told.get("pool") not in (None, told.get("model")):
        parts.append(f"pool {told['pool']}")
    if told.get("endpoint"):
        parts.append(str(told["endpoint"]) + (" as a stream" if told.get("stream") else ""))
    parts.append(whose(told))
    parts += [f"from {told['client']}"] if told.get("client") else []
    yield " · ".join(parts)
    if fallback := told.get("fallback"):
        yield f"The pool {fallback.get('pool')} could not take it: {fallback.get('cause')}."
    if told.get("revision"):
        yield f"Answered by revision {told['revision']}."
    if told.get("canary"):
        yield str(told["canary"])
    if told.get("not_resumed"):
        yield f"No other backend went on with its stream: {told['not_resumed']}."


def _tokens(tokens: dict[str, Any]) -> Iterator[str]:
    """Yield what was expected and what was used."""
    if tokens.get("counted_by"):
        cached = tokens.get("cached")
        known = "" if cached is None else f", {cached} of the prompt from the prefix cache"
        by = {
            "upstream": "as the backend told",
            "counted": "counted by the gateway",
            "estimated": "the prompt estimated by its size",
        }.get(tokens["counted_by"], tokens["counted_by"])
        yield f"{tokens.get('prompt')} prompt + {tokens.get('output')} output tokens{known} ({by})"
    elif tokens.get("expected_prompt") is not None:
        about = "" if tokens.get("exact") else "about "
        output = (
            f" + about {tokens.get('expected_output')} output"
            if tokens.get("expected_output")
            else ""
        )
        yield f"{about}{tokens['expected_prompt']} prompt{output} tokens expected"


def _step(each: dict[str, Any]) -> Row:
    step = str(each.get("step", "")).replace("_", " ")
    return {"after": f"{each.get('after_s', 0.0):.3f} s", "": step, "what": each.get("sentence")}


def _attempt(each: dict[str, Any]) -> Row:
    return {
        "backend": each.get("backend"),
        "ended": str(each.get("outcome", "")).replace("_", " "),
        "sent after": f"{each.get('sent_s', 0.0):.3f} s",
        "took": f"{each.get('took_s', 0.0):.3f} s",
        "id at the engine": each.get("engine_request_id"),
    }


def _print_choice(told: dict[str, Any]) -> None:
    """Print what each backend was expected to cost, or why it could not take the request."""
    decision = told.get("decision") or {}
    rows: list[Row] = [verdict_row(each) for each in decision.get("backends", [])]
    if not rows:
        rows = [
            {
                "backend": each.get("backend"),
                "costs": f"{each.get('costs_s', 0.0):.3f} s",
                "": "chosen" if each.get("chosen") else "",
            }
            for each in told.get("weighed", [])
        ]
    if rows:
        print()
        print_table(rows)
    if rows or told.get("changed") or told.get("setting"):
        print()


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f} s"
