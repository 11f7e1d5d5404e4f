"""What vLLM makes of a chat request before its template sees it (0.32, renderers/chat_utils.py).

Contents become one text or a list of text parts, arguments of tool calls become mappings, tools are
written with all their fields. What is not modelled, such as images or a final message to continue,
raises `Unmodelled`: the engine may do something with it that only the engine knows.
"""

from __future__ import annotations

import json
from typing import Any, Final

from gateway.wire.unread import BILLING_LINE

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_SKIPPED_WHEN_EMPTY: Final = frozenset({"text", "refusal"})

Json = dict[str, Any]


class Unmodelled(Exception):
    """The engine may do something here that this module does not know how to do."""


def messages_of(request: Json, *, parts: bool) -> list[Json]:
    """Return the conversation; contents are lists of text parts with `parts`, else one text each.

    Raises:
        Unmodelled: it holds more than text.
    """
    if request.get("continue_final_message") or request.get("chat_template"):
        raise Unmodelled("a message to go on with, or a template of the client")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unmodelled("no messages")
    return [_message(each, parts=parts) for each in messages]


def _message(message: Any, *, parts: bool) -> Json:
    """Reduce a message to the fields a template gets, its content to one text or to parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Unmodelled("a message without a role")
    role = message["role"]
    texts = _texts(message.get("content"))
    if role == "system":
        texts = [kept for text in texts if (kept := _without_billing_line(text)) is not None]
    content: object = "\n".join(texts)
    if parts and role != "tool":
        content = [{"type": "text", "text": text} for text in texts]
    reduced: Json = {"role": role, "content": content}
    if role == "assistant":
        reduced |= _of_assistant(message)
    elif role == "tool" and "tool_call_id" in message:
        reduced["tool_call_id"] = message["tool_call_id"]
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            reduced[field] = message[field]
    if role == "developer":
        reduced["tools"] = message.get("tools")
    return reduced


def _of_assistant(message: Json) -> Json:
    reduced: Json = {}
    if message.get("tool_calls"):
        reduced["tool_calls"] = _tool_calls(message["tool_calls"])
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")  # the older name
    if reasoning is not None:
        reduced["reasoning"] = reduced["reasoning_content"] = reasoning
    return reduced


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Unmodelled("a content that is neither text nor parts")
    return [text for part in content if (text := _text(part)) is not None]


def _text(part: Any) -> str | None:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or "uuid" in part:
        raise Unmodelled("a part that is not text")
    kind = part["type"]
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None and kind in _SKIPPED_WHEN_EMPTY:
        return None
    if not isinstance(text, str):
        raise Unmodelled("a text part without text")
    return text


def _without_billing_line(text: str) -> str | None:
    return text if not text.startswith(BILLING_LINE) else text.partition("\n")[2] or None


def _tool_calls(calls: Any) -> list[Json]:
    """Turn each call's arguments from JSON text into the mapping that templates expect."""
    if not isinstance(calls, list):
        raise Unmodelled("tool_calls that are no list")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> Json:
    """Write a call as vLLM does: its own fields in its order, then the client's others."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        raise Unmodelled("a tool call that is no function call")
    known = (call.get("id"), function.get("arguments"), function.get("name"))
    if not all(isinstance(each, str) for each in known):
        raise Unmodelled("a tool call without id, name or arguments")
    dumped = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    function = {**dumped, **_others(function, dumped)}
    whole = {"id": call["id"], "function": function, "type": "function"}
    return {**whole, **_others(call, whole)}


def _others(given: Json, known: Json) -> Json:
    return {name: value for name, value in given.items() if name not in known}


def _arguments(text: str) -> Json:
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def tools_of(request: Json) -> list[Json] | None:
    """Return the tools as the template gets them.

    Raises:
        Unmodelled: the server's flags decide, or it refuses them.
    """
    tools = request.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools or request.get("tool_choice") == "none":
        raise Unmodelled("tools that a server may show or not")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Json:
    """Write a tool as vLLM dumps it: known fields in its order, unset ones as null."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise Unmodelled("a tool that is no function")
    name, about = function.get("name"), function.get("description")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not isinstance(about, str | None):
        raise Unmodelled("a function without a name")
    if not isinstance(parameters, dict | None):
        raise Unmodelled("parameters that are no schema")
    dumped: Json = {"name": name, "description": about, "parameters": parameters}
    deferred = tool.get("defer_loading")
    for field, value in (
        ("strict", function.get("strict")),
        ("defer_loading", function.get("defer_loading", deferred)),
    ):
        if not isinstance(value, bool | None):
            raise Unmodelled(f"{field} is no boolean")
        if value is not None:
            dumped[field] = value
    whole: Json = {"type": "function", "function": dumped}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def documents_of(request: Json) -> list[Json] | None:
    """Return the documents to answer from.

    Raises:
        Unmodelled: they have no shape that the server takes.
    """
    documents = request.get("documents")
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(each, dict) for each in documents)
    ):
        raise Unmodelled("documents that are no list of objects")
    return documents


def developer_as_system(messages: list[Json]) -> list[Json]:
    """Rename the role for a template that does not know it; then all system text comes first."""
    renamed = [
        {name: value for name, value in each.items() if name != "tools"} | {"role": "system"}
        if each["role"] == "developer"
        else each
        for each in messages
    ]
    system = [each for each in renamed if each["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [_joined(each["content"]) for each in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(each for each in renamed if each["role"] != "system")]


def _joined(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# --- Responses: the chat that one is rendered as (0.32, openai/responses/utils.py) ----------------


def chat_of_response(request: Json) -> Json:
    """Return the chat request that has the prompt of a Responses request.

    A template that writes out whole tool calls sees their fields in another order: a token or so
    for each call may be the difference.

    Raises:
        Unmodelled: it holds items or tools whose rendering is the engine's own.
    """
    instructions, items = request.get("instructions"), request.get("input")
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        items = []
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise Unmodelled("an input that is neither text nor items")
    for item in items:
        _add_item(messages, item)
    # Unlike in a chat, the tokenizer adds its own begin mark to what the template wrote.
    chat: Json = {"messages": messages, "add_special_tokens": True}
    if items and _is_partial(items[-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = request.get("tools")
    if tools:
        chat |= {"tools": flat_tools(tools), "tool_choice": request.get("tool_choice")}
    return chat | _template_arguments(request)


def _add_item(messages: list[Json], item: Json) -> None:
    """Add an item's message; an assistant's reasoning, text and calls in a row are one message."""
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if item.get("namespace"):
            raise Unmodelled("a tool with a namespace")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output, call_id = item.get("output"), item.get("call_id")
        messages.append({"role": "tool", "content": _plain_parts(output), "tool_call_id": call_id})
    elif kind == "reasoning":
        _add_to_assistant(messages, "reasoning", _reasoning(item))
    elif kind == "message" and role == "assistant":
        _add_to_assistant(messages, "content", _first_text(item.get("content")))
    elif kind == "message" and isinstance(role, str):
        messages.append({"role": role, "content": _plain_parts(item.get("content"))})
    else:
        raise Unmodelled("an item that is no message")


def _add_to_assistant(messages: list[Json], field: str, text: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _reasoning(item: Json) -> str:
    if item.get("encrypted_content"):
        raise Unmodelled("encrypted reasoning")
    content = item.get("content") or item.get("summary")
    return _first_text(content) if content else ""


def _first_text(content: Any) -> str:
    """Return the text of an assistant's item: of its parts the engine reads the first alone."""
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, dict) else first
    if not isinstance(text, str):
        raise Unmodelled("an item without text")
    return text


def _plain_parts(content: Any) -> Any:
    """Return a content in a chat's words: its texts and images have other names in items."""
    if not isinstance(content, list):
        return content
    return [plain for part in content if (plain := _plain_part(part)) is not None]


def _plain_part(part: Any) -> Json | None:
    if isinstance(part, dict) and part.get("type") == "input_image" and "uuid" not in part:
        if not isinstance(part.get("image_url"), str):
            raise Unmodelled("an image without its address")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    text = _text(part)
    return None if text is None else {"type": "text", "text": text}


def _is_partial(item: Json) -> bool:
    """Whether the engine is to go on with the last item."""
    kind = item.get("type") or "message"
    return kind in ("message", "reasoning") and item.get("status") in ("in_progress", "incomplete")


def flat_tools(tools: Any) -> list[Json]:
    """Return the tools of a Responses request as a chat has them, where a function is one level deeper.

    Raises:
        Unmodelled: they are no plain functions.
    """
    if not isinstance(tools, list):
        raise Unmodelled("tools that are no list")
    if any(not isinstance(each, dict) or each.get("type") != "function" for each in tools):
        raise Unmodelled("a tool that is no function")
    return [
        {"type": "function", "function": {k: v for k, v in each.items() if k != "type"}}
        for each in tools
    ]


def _template_arguments(request: Json) -> Json:
    given, reasoning = request.get("chat_template_kwargs") or {}, request.get("reasoning") or {}
    if not isinstance(given, dict) or not isinstance(reasoning, dict):
        raise Unmodelled("template arguments that are no object")
    given = with_effort(given, reasoning.get("effort"))
    return {"chat_template_kwargs": given} if given else {}


def with_effort(variables: Json, effort: Any) -> Json:
    """Return template variables with an effort of reasoning, which switches thinking on or off too."""
    if effort is None:
        return variables
    return {"enable_thinking": effort != "none", **variables, "reasoning_effort": effort}
