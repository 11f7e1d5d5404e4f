"""The token ids of a prompt and of a text, as a backend tells them that is asked.

Source: vLLM 0.32, `serve/tokenize` and `entrypoints/openai/responses/context.py`. For a Responses request
the engine itself tells what its prompt was (`enable_response_messages`): it is asked for one token, and so
reads the prompt. Models in OpenAI's harmony format tell no ids there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, structs

from gateway.core.types import Call, Endpoint
from gateway.counting.tokens import Asker, countable, off_loop
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


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class _RawMessage(msgspec.Struct):
    tokens: list[int]


class _Response(msgspec.Struct):
    input_messages: list[_RawMessage]


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
    told = decode_or_none(_RESPONSE, reply) if status == 200 else None
    return told.input_messages[0].tokens if told and len(told.input_messages) == 1 else None


def _for_one_token(
    call: Call, served_model: str, salt: Callable[[str | None], str] | None
) -> bytes:
    fields = (fields_at_hand(call) if call.places is None else fields_of(call.body)) | _ONE_TOKEN
    body = msgspec.json.encode(fields)
    asked = structs.replace(call, stream=False, fields=fields, body=body, places=None)
    return upstream_body(asked, served_model=served_model, inject_usage=False, salt=salt)


async def prompt_ids(asker: Asker, served_model: str, *, call: Call) -> list[int] | None:
    """Return the ids of the prompt of a Messages call; None when the backend does not tell.

    It is asked about the chat that the request becomes. Nothing proves that it is the same one.
    Cancel: the request is dropped.
    """
    body = await off_loop(call, partial(_to_tokenize, call, served_model))
    told = None if body is None else await _tokenized(asker, body)
    return None if told is None else told.tokens


def _to_tokenize(call: Call, served_model: str) -> bytes | None:
    chat = countable(call)
    return None if chat is None else tokenize_request(chat, served_model)


async def tokens_of(asker: Asker, served_model: str, *, text: str) -> Tokens | None:
    """Return the tokens of a text; None when the backend does not tell.

    Cancel: the request is dropped.
    """
    if not text:
        return Tokens([], [])
    asked = {"model": served_model, "prompt": text, "add_special_tokens": False}
    body = msgspec.json.encode(asked | {"return_token_strs": True})
    told = await _tokenized(asker, body)
    return None if told is None or told.token_strs is None else Tokens(told.tokens, told.token_strs)


async def _tokenized(asker: Asker, body: bytes) -> _Tokenized | None:
    try:
        status, reply = await asker.post("/tokenize", body, timeout_s=_WITHIN_S)
    except OSError:
        return None
    return decode_or_none(_TOKENIZED, reply) if status == 200 else None
