"""The rest of a chat that comes as a completion, told as chunks of a chat. Pure.

A vLLM before 0.27 takes token ids as the prompt of a completion only. No parser looks at its text. So this is for
answers that none changes: any reasoning is over, and no tools are offered.

    "object":"text_completion","choices":[{"index":0,"text":"abc",...,"prompt_token_ids":[2,88],"token_ids":[7]}]
    "object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"abc"},...,"token_ids":[7]}],...,"prompt_token_ids":[2,88]
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.wire.objects import decode_or_none

_CHUNK: Final = msgspec.json.Decoder(dict[str, Any])


def as_chat(frame: bytes) -> bytes:
    """Return a chunk of a completion as one of a chat; any other frame as it is."""
    chunk = decode_or_none(_CHUNK, frame.partition(b"data: ")[2])
    if chunk is None or not isinstance(choices := chunk.get("choices"), list):
        return frame
    told = [_choice(chunk, each) for each in choices if isinstance(each, dict)]
    chat = chunk | {"object": "chat.completion.chunk", "choices": told}
    return b"data: %b\n\n" % msgspec.json.encode(chat)


def _choice(chunk: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a chat; the ids of the prompt are told beside it."""
    rest = {name: value for name, value in choice.items() if name not in ("index", "text")}
    if (ids := rest.pop("prompt_token_ids", None)) is not None:
        chunk["prompt_token_ids"] = ids
    if rest.get("finish_reason") is None:  # a chat tells it with its end only
        rest.pop("stop_reason", None)
    return {"index": choice.get("index", 0), "delta": {"content": choice.get("text") or ""}} | rest
