"""What a prompt says about its own reply.

A prompt may steer its own reply: `[[sim:tokens=5;itl=20ms;ttft=50ms]]` sets how many tokens the
reply has (as if the model had stopped there) and how fast it comes. With `call=5` it calls its first tool
behind five tokens of text. Where token ids stand in for messages, the text in them steers the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from gateway.sim.errors import SimError

_CONTROL: Final = re.compile(r"\[\[sim:([^\]]*)\]\]")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Control:
    """What a prompt says about its own reply."""

    tokens: int | None = None
    itl_s: float | None = None
    ttft_s: float | None = None
    call_at: int | None = None  # tokens of text before it calls a tool


def parse_control(text: str) -> Control:
    """Read the last `[[sim:...]]` of a text."""
    found = _CONTROL.findall(text)
    pairs = dict(p.split("=", 1) for p in found[-1].split(";") if "=" in p) if found else {}
    return Control(
        tokens=_count(pairs["tokens"]) if "tokens" in pairs else None,
        itl_s=parse_duration(pairs["itl"]) if "itl" in pairs else None,
        ttft_s=parse_duration(pairs["ttft"]) if "ttft" in pairs else None,
        call_at=_count(pairs["call"]) if "call" in pairs else None,
    )


def tool_of(body: dict[str, Any], text: str, control: Control) -> tuple[str | None, bool]:
    """Return the function to call (the first, or the one that is named), and whether it is forced.

    With `auto` the model calls it when the prompt has the word "tool", or steers so. It answers in words
    once it has what a tool returned: an agent's loop ends. Where it has to call one, it calls one after
    the other, and then the last again: with that, agents end their loops.
    """
    tools = body.get("tools") or ()
    choice = body.get("tool_choice", "auto")
    found = [(tool.get("function") or tool).get("name") for tool in tools]
    names = [str(name) for name in found if name]  # tools of the server's own have none
    if not names or choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none"):
        return None, False
    if isinstance(choice, dict) and choice.get("type") in ("function", "tool"):
        return str((choice.get("function") or choice).get("name")), True
    required = choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any")
    if required:
        return _first_not_called(names, body), False
    wanted = ("tool" in text or control.call_at is not None) and not _ends_with_result(body)
    return (names[0], False) if wanted else (None, False)


def _first_not_called(names: list[str], body: dict[str, Any]) -> str:
    """Return the first tool that the model has not mentioned so far; the last where it has mentioned all.

    Some clients write its calls back as text.
    """
    told = [
        str(each)
        for each in _said(body)
        if each.get("role") == "assistant" or each.get("type") == "function_call"
    ]
    return next((name for name in names if not any(name in one for one in told)), names[-1])


def _said(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation, of a chat, of Responses or of Messages."""
    said = body.get("messages", body.get("input"))
    return [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []


def _ends_with_result(body: dict[str, Any]) -> bool:
    """Whether the conversation ends with what a tool returned."""
    said = _said(body)
    if not said:
        return False
    last = said[-1]
    if last.get("role") == "tool" or last.get("type") == "function_call_output":
        return True
    parts = last.get("content")
    return isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("type") == "tool_result" for part in parts
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise SimError(400, f"not a number of tokens: {text}")
    return int(text)


def parse_duration(text: str) -> float:
    """Read `20ms` or `1.5s` as seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SimError(400, f"not a duration: {text}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)
