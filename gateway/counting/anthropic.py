"""The chat that a request of Anthropic's Messages API becomes in vLLM (0.32, anthropic/serving.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from gateway.counting.messages import Json, Unmodelled
from gateway.wire.unread import BILLING_LINE

_UNREAD: Final = frozenset({"redacted_thinking", "tool_reference"})


def chat_of_message(request: Json) -> Json:
    """Return the chat whose prompt is that of a Messages request.

    Raises:
        Unmodelled: images, or what depends on the chat template: system messages among the others,
            changes of tools, an effort, thinking that is switched off.
    """
    if request.get("output_config"):
        raise Unmodelled("an effort")
    chats = chats_of_message(request)
    if len(chats) > 1:
        raise Unmodelled("the server decides")
    return chats[0]


def chats_of_message(request: Json) -> list[Json]:
    """Return the chats that a Messages request may become; its server decides, by its template and flags.

    Where the template wants the system message first, the others are put into that one. Thinking that is
    switched off is the effort `none`, or `low` where the model always thinks.

    Raises:
        Unmodelled: images, or changes of tools.
    """
    given = request.get("messages")
    if not isinstance(given, list):
        raise Unmodelled("no messages")
    inline = [_system_text(each.get("content")) for each in given if _is_system(each)]
    system = _system_text(request.get("system"), top=True)
    among: list[Json] = []
    for message in given:
        among += _messages(message)
    apart = _as_system(system) + among
    ways = [apart]
    if inline:
        beside = [each for each in among if not _is_system(each)]
        ways.append(_as_system(system + "".join(inline)) + beside)
    tools = {} if request.get("tools") is None else chat_tools(request)
    return [
        {"messages": messages} | tools | told_to_template(request, effort)
        for messages in ways
        for effort in _efforts(request)
    ]


def _efforts(request: Json) -> tuple[str | None, ...]:
    if (request.get("thinking") or {}).get("type") == "disabled":
        return "low", "none"
    return ((request.get("output_config") or {}).get("effort"),)


def told_to_template(request: Json, effort: str | None) -> Json:
    """Return the fields of a chat by which vLLM tells its template, and its parser of reasoning, of an effort."""
    kwargs = request.get("chat_template_kwargs")
    fields = {"chat_template_kwargs": kwargs, "reasoning_effort": effort}
    return {name: value for name, value in fields.items() if value is not None}


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _as_system(text: str) -> list[Json]:
    return [{"role": "system", "content": text}] if text else []


def _system_text(content: Any, *, top: bool = False) -> str:
    """Return a system message's text. At the `top`, a text that is not in blocks has all of its lines."""
    if content is None and top:
        return ""
    if isinstance(content, str):
        return content if top or not content.startswith(BILLING_LINE) else ""
    blocks = _objects(content)
    if not top and any(block.get("type") != "text" for block in blocks):
        raise Unmodelled("changes of tools")
    texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(BILLING_LINE))


def _messages(message: Any) -> list[Json]:
    """Return what one message becomes: results of tools come before the text beside them."""
    role = message.get("role") if isinstance(message, dict) else None
    if role == "system":
        return _as_system(_system_text(message.get("content")))
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
    thought = block.get("thinking")
    if not isinstance(thought, str | None):
        raise Unmodelled("a thought that is not text")
    return [] if thought is None else [thought]


def _call(block: Json) -> list[Json]:
    if not block.get("id"):
        raise Unmodelled("a tool call without an id")
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return [{"id": block["id"], "type": "function", "function": function}]


def _result(block: Json) -> list[Json]:
    content = block.get("content")
    if isinstance(content, list):
        texts = [
            each.get("text", "")
            for each in content
            if isinstance(each, dict) and each.get("type") == "text"
        ]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise Unmodelled("a result that is not text")
        content = "\n".join(texts)
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
