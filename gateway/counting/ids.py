"""The token ids of a prompt and of a text, as a backend tells them that is asked.

Source: vLLM 0.32, `serve/tokenize` and `entrypoints/openai/responses/context.py`. For a Responses request
the engine itself tells what its prompt was (`enable_response_messages`): it is asked for one token, and so
reads the prompt. Models in OpenAI's harmony format tell no ids there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, structs

from gateway.core.types import Call, Endpoint
from gateway.counting.anthropic import chats_of_message
from gateway.counting.messages import Unmodelled, with_effort
from gateway.counting.tokens import Asker, off_loop
from gateway.wire.calls import ENDPOINTS, upstream_body
from gateway.wire.large import fields_at_hand
from gateway.wire.objects import decode_or_none, fields_of
from gateway.wire.vllm import tokenize_request

_WITHIN_S: Final = 10.0  # where nobody tells, a stream ends; an engine may have to read a prompt
_RESPONSES: Final = next(
    path.decode() for path, spec in ENDPOINTS.items() if spec.endpoint is Endpoint.RESPONSES
)
_ONE_TOKEN: Final = {
    "stream": Raw(b"false"),
    "store": Raw(b"false"),
    "max_output_tokens": Raw(b"1"),
    "enable_response_messages": Raw(b"true"),
}


class Tokens(NamedTuple):
    """Token ids, and each as its tokenizer writes it."""

    ids: list[int]
    texts: list[str]


class Prompt(NamedTuple):
    """The token ids of a prompt, and the fields of its chat that tell the template how much to reason."""

    ids: list[int]
    effort: dict[str, Raw]


_UNKNOWN: Final = Prompt([], {})


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class _RawMessage(msgspec.Struct):
    tokens: list[int]


class _Response(msgspec.Struct):
    input_messages: list[_RawMessage]


_EFFORT: Final = ("chat_template_kwargs", "reasoning_effort")
_TOKENIZED: Final = msgspec.json.Decoder(_Tokenized)
_RESPONSE: Final = msgspec.json.Decoder(_Response)


async def read_ids(
    asker: Asker, call: Call, served_model: str, salt: Callable[[str | None], str] | None
) -> list[int] | None:
    """Return the ids of the prompt of a Responses call, which an engine reads for it; None: it does not tell.

    Raises:
        OSError: the backend failed meanwhile, or was silent.
    Cancel: the request is dropped.
    """
    body = await off_loop(call, partial(_for_one_token, call, served_model, salt))
    status, reply = await asker.post(_RESPONSES, body, timeout_s=_WITHIN_S)
    if status >= 500:
        raise OSError(f"http_{status}")
    response: _Response | None = decode_or_none(_RESPONSE, reply) if status == 200 else None
    if response is None or len(response.input_messages) != 1:
        return None
    return response.input_messages[0].tokens


def _for_one_token(
    call: Call, served_model: str, salt: Callable[[str | None], str] | None
) -> bytes:
    fields = (fields_at_hand(call) if call.places is None else fields_of(call.body)) | _ONE_TOKEN
    body = msgspec.json.encode(fields)
    asked = structs.replace(call, stream=False, fields=fields, body=body, places=None)
    return upstream_body(asked, served_model=served_model, inject_usage=False, salt=salt)


async def prompt_ids(
    asker: Asker, served_model: str, *, call: Call, prompt_tokens: int | None
) -> Prompt | None:
    """Return the ids of the prompt of a Messages call; None when the backend does not tell.

    It is asked about each chat that the request may become. Those whose prompts have `prompt_tokens` tokens must
    all have the same ids; if they do not, there are none. It is not proven that no other chat has as many.
    Cancel: the request is dropped.
    """
    found, place, chats = _UNKNOWN, 0, 1
    while place < chats:
        chats, fields, question = await off_loop(
            call, partial(_to_tokenize, call, served_model, place)
        )
        try:
            tokenized = await _tokenized(asker, question, may_refuse=True) if chats else None
        except OSError:
            return None
        if tokenized is not None and prompt_tokens in (None, len(tokenized.tokens)):
            if found.ids not in ([], tokenized.tokens):
                return _UNKNOWN
            found = found if found.ids else Prompt(tokenized.tokens, fields)
        place += 1
    return found


def _to_tokenize(call: Call, served_model: str, place: int) -> tuple[int, dict[str, Raw], bytes]:
    """Return how many chats a call may become; of the one at a place, its `Prompt.effort` and the question."""
    try:
        chats = chats_of_message(msgspec.json.decode(call.body, type=dict[str, Any]))
        chat = chats[place]
        effort: dict[str, Any] = {name: chat.pop(name) for name in _EFFORT if name in chat}
        kwargs = effort.get("chat_template_kwargs") or {}
        # `/tokenize` takes nothing else of both.
        chat["chat_template_kwargs"] = with_effort(kwargs, effort.get("reasoning_effort"))
    except (Unmodelled, msgspec.DecodeError, RecursionError, AttributeError, TypeError):
        return 0, {}, b""
    body = msgspec.json.encode(chat)
    asked = structs.replace(call, endpoint=Endpoint.CHAT, body=body, fields=None, places=None)
    question = tokenize_request(asked, served_model)
    assert question is not None  # it is a chat
    fields = {name: Raw(msgspec.json.encode(value)) for name, value in effort.items()}
    return len(chats), fields, question


async def tokens_of(asker: Asker, served_model: str, *, text: str) -> Tokens | None:
    """Return the tokens of a text; None when the backend does not tell.

    Cancel: the request is dropped.
    """
    if not text:
        return Tokens([], [])
    asked = {"model": served_model, "prompt": text, "add_special_tokens": False}
    body = msgspec.json.encode(asked | {"return_token_strs": True})
    try:
        tokenized = await _tokenized(asker, body)
    except OSError:
        return None
    if tokenized is None or tokenized.token_strs is None:
        return None
    return Tokens(tokenized.tokens, tokenized.token_strs)


async def _tokenized(asker: Asker, body: bytes, *, may_refuse: bool = False) -> _Tokenized | None:
    """Return what `POST /tokenize` tells; None: its template refuses the chat, which it may.

    Raises:
        OSError: it does not tell.
    """
    status, reply = await asker.post("/tokenize", body, timeout_s=_WITHIN_S)
    if status == 400 and may_refuse:
        return None
    tokenized: _Tokenized | None = decode_or_none(_TOKENIZED, reply) if status == 200 else None
    if tokenized is None:
        raise OSError(f"http_{status}")
    return tokenized
