"""The chat that a request of Anthropic's Messages API becomes in vLLM (0.32, anthropic/serving.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from gateway.counting.messages import Json, Unmodelled

_BILLING_LINE: Final = "x-anthropic-billing-header"  # a block that begins so is left out
_UNREAD: Final = frozenset({"redacted_thinking", "tool_reference"})


def chat_of_message(request: Json) -> Json:
    """Return the chat whose prompt is that of a Messages request.

    Raises:
        Unmodelled: images, or what depends on the chat template: system messages among the others,
            changes of tools, an effort, thinking that is switched off.
    """
    thinking = request.get("thinking")
    if request.get("output_config") or (thinking and thinking.get("type") == "disabled"):
        raise Unmodelled("an effort")
    messages = _system(request.get("system"))
    given = request.get("messages")
    if not isinstance(given, list):
        raise Unmodelled("no messages")
    for message in given:
        messages += _messages(message)
    chat: Json = {"messages": messages}
    if request.get("tools") is not None:
        chat |= chat_tools(request)
    if request.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = request["chat_template_kwargs"]
    return chat


def _system(system: Any) -> list[Json]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    texts = [block.get("text") or "" for block in _objects(system) if block.get("type") == "text"]
    text = "".join(text for text in texts if not text.startswith(_BILLING_LINE))
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Any) -> list[Json]:
    """Return what one message becomes: results of tools come before the text beside them."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise Unmodelled("a message of another role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found: dict[str, list[Any]] = {kind: [] for kind in _BLOCKS}
    for block in _objects(content):
        kind = block.get("type")
        if kind in _UNREAD:
            continue
        if kind not in _BLOCKS or (kind == "tool_result" and role != "user"):
            raise Unmodelled("a block that is not text")
        found[kind] += _BLOCKS[kind](block)
    texts = found["text"]
    made: Json = {"role": role}
    if found["thinking"]:
        made["reasoning"] = "".join(found["thinking"])
    if found["tool_use"]:
        made["tool_calls"] = found["tool_use"]
    if texts:
        made["content"] = texts[0]["text"] if len(texts) == 1 else texts
    return found["tool_result"] + ([] if role == "user" and not texts else [made])


def _text(block: Json) -> list[Json]:
    return [{"type": "text", "text": block["text"]}] if block.get("text") else []


def _thought(block: Json) -> list[str]:
    return [block["thinking"]] if block.get("thinking") is not None else []


def _call(block: Json) -> list[Json]:
    if not block.get("id"):
        raise Unmodelled("a tool call without an id")
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return [{"id": block["id"], "type": "function", "function": function}]


def _result(block: Json) -> list[Json]:
    content = block.get("content")
    if isinstance(content, list):
        if any(not isinstance(each, dict) or each.get("type") != "text" for each in content):
            raise Unmodelled("a result that is not text")
        content = "\n".join(each.get("text", "") for each in content)
    call_id = block.get("tool_use_id") or ""
    return [{"role": "tool", "tool_call_id": call_id, "content": content or ""}]


_BLOCKS: Final[dict[str, Callable[[Json], list[Any]]]] = {
    "text": _text,
    "thinking": _thought,
    "tool_use": _call,
    "tool_result": _result,
}


def chat_tools(request: Json) -> Json:
    """Return the tools of a Messages request, and which of them may be called, as a chat has them.

    Raises:
        Unmodelled: they are no plain functions.
    """
    choice = request.get("tool_choice") or {}
    chosen = "none" if choice.get("type") == "none" else "auto"
    return {"tools": [_tool(tool) for tool in _objects(request["tools"])], "tool_choice": chosen}


def _tool(tool: Json) -> Json:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise Unmodelled("a tool without a schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    rest = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function | rest}


def _objects(value: Any) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Unmodelled("no list of objects")
    return value
