"""What is read of a body: JSON, in the form that vLLM's models want of its endpoint.

Only fields that the simulator reads are checked, and the first wrong one is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from gateway.sim.adapters import PATHS as ADAPTER_PATHS
from gateway.sim.ask import CHAT, CHAT_BATCH, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from gateway.sim.errors import SimError, invalid, missing, shown
from gateway.sim.http import Received

Check = Callable[[Any, str], None]  # a value, and where it is; raises SimError


def read_json(request: Received) -> dict[str, Any]:
    """Decode the body of a request that says it is JSON."""
    kind = (request.header("content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise SimError(400, text, kind="Bad Request")
    body = parse_body(request.body)
    for name, check in _FORMS.get(request.path, {}).items():
        if name in body:
            check(body[name], f"body.{name}")
    return body


def parse_body(body: bytes) -> dict[str, Any]:
    """Decode a JSON body, with the errors of vLLM's front end."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        loc = f"body.{error.pos}"
        empty = "'<dict of 0 items>'"
        raise invalid("json_invalid", loc, "JSON decode error", empty, error.msg) from None
    except (ValueError, RecursionError):
        raise SimError(400, "There was an error parsing the body", kind="Bad Request") from None
    if not isinstance(value, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", text, shown(value))
    return value


def _text(value: Any, loc: str) -> None:
    if not isinstance(value, str):
        raise invalid("string_type", loc, "Input should be a valid string", shown(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        says = "Input should be a valid string, unable to parse raw data as a unicode string"
        raise invalid("string_unicode", loc, says, ascii(value)) from None


def _number(value: Any, loc: str) -> None:
    if not isinstance(value, int):  # true is 1, as in pydantic
        raise invalid("int_type", loc, "Input should be a valid integer", shown(value))


def _list(each: Check, *, least: int = 0) -> Check:
    def check(value: Any, loc: str) -> None:
        if not isinstance(value, list):
            raise invalid("list_type", loc, "Input should be a valid list", shown(value))
        if len(value) < least:
            says = f"List should have at least {least} item after validation, not {len(value)}"
            raise invalid("too_short", loc, says, shown(value))
        for place, one in enumerate(value):
            each(one, f"{loc}.{place}")

    return check


def _object(**fields: Check) -> Check:
    """Want an object, and its fields, where they are given, in these forms."""

    def check(value: Any, loc: str) -> None:
        if not isinstance(value, dict):
            raise invalid("dict_type", loc, "Input should be a valid dictionary", shown(value))
        for name, each in fields.items():
            if name in value:
                each(value[name], f"{loc}.{name}")

    return check


def _encodable(check: Check) -> Check:
    """Want what can be said again: a lone surrogate cannot."""

    def checked(value: Any, loc: str) -> None:
        _text(json.dumps(value, ensure_ascii=False), loc)
        check(value, loc)

    return checked


def _text_or(other: Check) -> Check:
    return lambda value, loc: (_text if isinstance(value, str) else other)(value, loc)


def _maybe(check: Check) -> Check:
    return lambda value, loc: None if value is None else check(value, loc)


def _prompts(value: Any, loc: str) -> None:
    """Want a text, its token ids, or several of either."""
    alone = isinstance(value, list) and value and isinstance(value[0], int)
    _text_or(_list(_number) if alone else _list(_PROMPT))(value, loc)


def _conversations(value: Any, loc: str) -> None:
    """Want a chat, or several."""
    several = isinstance(value, list) and value and isinstance(value[0], list)
    (_list(_list(_MESSAGE, least=1)) if several else _list(_MESSAGE))(value, loc)


def _inputs(value: Any, loc: str) -> None:
    """Want prompts or conversations."""
    first = value[0] if isinstance(value, list) and value else None
    chats = isinstance(first, dict) or (
        isinstance(first, list) and first and isinstance(first[0], dict)
    )
    (_conversations if chats else _prompts)(value, loc)


def _criteria(value: Any, loc: str) -> None:
    """Want names, or an object with a description for each."""
    _list(_text, least=1)(list(value) if isinstance(value, dict) else value, loc)


def _questions(value: Any, loc: str) -> None:
    _object()(value, loc)
    for name, asked in value.items():
        _object(type=_text, criteria=_maybe(_criteria))(asked, f"{loc}.{name}")
        wanted = ("type",) if asked.get("type") == "noul" else ("type", "criteria")
        for each in wanted:
            if asked.get(each) is None:
                raise missing(f"questions.{name}.{each}", len(asked))


_CONTENT: Final = _maybe(_text_or(_list(_text_or(_object(text=_maybe(_text))))))
_MESSAGE: Final = _object(role=_text, content=_CONTENT)
_MESSAGES: Final = _list(_MESSAGE)
_PROMPT: Final = _text_or(_list(_number, least=1))
_NAMED: Final = _object(name=_text)
_TOOL: Final = _object(name=_text, function=_NAMED, input_schema=_maybe(_object()))
_MODEL: Final = {"model": _maybe(_text)}
_GENERATES: Final = _MODEL | {
    "tools": _encodable(_maybe(_list(_TOOL))),
    "tool_choice": _maybe(_text_or(_object(name=_text, function=_NAMED))),
    "stop": _maybe(_text_or(_list(_text))),
    "stream_options": _maybe(_object()),
    "reasoning": _maybe(_object()),
    "chat_template_kwargs": _maybe(_object()),
    "kv_transfer_params": _maybe(_object(prompt_token_ids=_maybe(_list(_number, least=1)))),
    "request_id": _text,
}
_OF_MESSAGES: Final = _GENERATES | {
    "messages": _MESSAGES,
    "system": _CONTENT,
    "stop_sequences": _maybe(_list(_text)),
    "thinking": _maybe(_object()),
    "output_config": _maybe(_object()),
}
_OF_RESPONSES: Final = _GENERATES | {
    "input": _text_or(_MESSAGES),
    **dict.fromkeys(("instructions", "user"), _maybe(_text)),
    # The reply says these again.
    **dict.fromkeys(("text", "metadata", "reasoning"), _encodable(_maybe(_object()))),
}
_POOLS: Final = _MODEL | {
    "input": _inputs,
    "messages": _conversations,
    "encoding_format": _text,
}
_RANKS: Final = _MODEL | {"query": _text, "documents": _list(_text), "top_n": _maybe(_number)}
_SCORED: Final = _text_or(_list(_text))
_SCORES: Final = _MODEL | dict.fromkeys(("text_1", "text_2", "queries", "documents"), _SCORED)
_FORMS: Final[dict[str, dict[str, Check]]] = {
    CHAT: _GENERATES | {"messages": _MESSAGES},
    CHAT_BATCH: _GENERATES | {"messages": _list(_MESSAGES, least=1)},
    COMPLETIONS: _GENERATES | {"prompt": _maybe(_prompts)},
    RESPONSES: _OF_RESPONSES,
    MESSAGES: _OF_MESSAGES,
    COUNT_TOKENS: _OF_MESSAGES,
    "/v1/embeddings": _POOLS,
    "/pooling": _POOLS,
    "/classify": _POOLS,
    "/v2/embed": _MODEL
    | {
        "texts": _maybe(_list(_text)),
        "embedding_types": _maybe(_list(_text)),
        "max_tokens": _maybe(_number),
    },
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKS),
    **dict.fromkeys(("/score", "/v1/score"), _SCORES),
    "/generative_scoring": _MODEL
    | {"query": _PROMPT, "items": _list(_PROMPT), "label_token_ids": _list(_number)},
    "/v1/systemone": _MODEL | {"questions": _questions},
    "/tokenize": _MODEL | {"messages": _MESSAGES, "tools": _maybe(_list(_TOOL))},
    "/detokenize": _MODEL | {"tokens": _list(_number)},
    **dict.fromkeys(ADAPTER_PATHS, {"lora_name": _maybe(_text), "lora_path": _maybe(_text)}),
}
