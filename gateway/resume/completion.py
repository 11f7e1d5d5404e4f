"""The rest of a chat that comes as a completion, told as chunks of a chat. Pure.

A vLLM before 0.27 takes token ids as the prompt of a completion only. Its parsers do not look at that. So this is for
an answer that has begun, where no tools are offered. What some parsers hide even there, such as a call of a tool that
nobody offered, is shown.

    {"object":"text_completion",..,"choices":[{"index":0,"text":"abc",..,"prompt_token_ids":[2,88],"token_ids":[7]}]}
    {"prompt_token_ids":[2,88],"object":"chat.completion.chunk",..,"choices":[{"index":0,"delta":{"content":"abc"},..,"token_ids":[7]}]}

The ids of the prompt come first: what is ahead of the choices is the first backend's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.wire.objects import decode_or_none

_CHUNK: Final = msgspec.json.Decoder(dict[str, Any])
_MOVED: Final = ("index", "text", "prompt_token_ids")


def as_chat(frame: bytes) -> bytes:
    """Return a chunk of a completion as one of a chat; any other frame as it is."""
    chunk = decode_or_none(_CHUNK, frame.partition(b"data: ")[2])
    if chunk is None or not isinstance(chunk.get("choices"), list):
        return frame
    choices = [each for each in chunk["choices"] if isinstance(each, dict)]
    ids = [each["prompt_token_ids"] for each in choices if each.get("prompt_token_ids")]
    chat = {"prompt_token_ids": ids[0]} if ids else {}
    chat |= chunk | {
        "object": "chat.completion.chunk",
        "choices": [_choice(each) for each in choices],
    }
    return b"data: %b\n\n" % msgspec.json.encode(chat)


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in choice.items() if name not in _MOVED}
    if rest.get("finish_reason") is None:  # a chat tells it with its end only
        rest.pop("stop_reason", None)
    return {"index": choice.get("index", 0), "delta": {"content": choice.get("text") or ""}} | rest
