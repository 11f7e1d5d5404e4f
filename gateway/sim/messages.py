"""What chat a request becomes before its template sees it: inline system messages, and efforts (vLLM 0.32)."""

from __future__ import annotations

from typing import Any, Final

from gateway.sim.errors import SimError

_BILLING_LINE: Final = "x-anthropic-billing-header"
_NOT_FIRST: Final = "System message must be at the beginning."


def chat_of_message(body: dict[str, Any], *, system_first: bool) -> list[Any]:
    """Return the messages of the chat that a Messages request becomes.

    A template that wants its system message first gets all of them as that one.
    """
    messages, parts = body["messages"], [_system_text(body.get("system"))]
    if system_first:
        parts += [_system_text(each.get("content")) for each in messages if _is_system(each)]
        messages = [each for each in messages if not _is_system(each)]
    texts = [
        each | {"content": _system_text(each.get("content"))} if _is_system(each) else each
        for each in messages
    ]
    system = "".join(parts)
    return ([{"role": "system", "content": system}] if system else []) + texts


def check_order(messages: list[Any]) -> None:
    """Refuse a chat as a template does that wants its system message first."""
    if any(_is_system(each) for each in messages[1:]):
        raise SimError(400, _NOT_FIRST)


def effort_of(body: dict[str, Any]) -> str | None:
    """Return the effort that the template is told."""
    if (body.get("thinking") or {}).get("type") == "disabled":
        return "none"
    asked = (body.get("output_config") or {}, body.get("reasoning") or {})
    efforts = [each.get("effort") for each in asked] + [body.get("reasoning_effort")]
    efforts.append((body.get("chat_template_kwargs") or {}).get("reasoning_effort"))
    return next((each for each in efforts if each is not None), None)


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _system_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [each.get("text") or "" for each in content or () if isinstance(each, dict)]
    return "".join(each for each in texts if not each.startswith(_BILLING_LINE))
