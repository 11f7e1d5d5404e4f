"""A whole reply that is made of a stream, so that another backend can go on with it. Pure.

The reply is as vLLM would have written it without a stream. None is made where tools are offered: vLLM's
parsers may find other calls in a whole text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import structs

from gateway.core.types import Call, Dialect, Endpoint
from gateway.resume.rules import may_go_on, may_trail
from gateway.wire.large import fields_at_hand
from gateway.wire.objects import decode_or_none, is_given

_TRUE: Final = msgspec.Raw(b"true")
_WITH_USAGE: Final = msgspec.Raw(b'{"include_usage":true}')
_SHOWN: Final = ("content", "reasoning", "reasoning_content", "text")


def as_stream(call: Call) -> Call | None:
    """Return the stream that is asked for in place of a whole reply; None where they could differ.

    Batches of chats have no streams, also those of one chat.
    """
    if call.stream or call.places is not None or call.endpoint is Endpoint.CHAT_BATCH:
        return None
    if not may_trail(structs.replace(call, stream=True)):
        return None
    fields = fields_at_hand(call)
    if is_given(fields.get("tools", msgspec.Raw())) or not may_go_on(call):
        return None
    fields["stream"], fields["stream_options"] = _TRUE, _WITH_USAGE
    body = msgspec.json.encode(fields)
    return structs.replace(call, stream=True, wants_usage=True, body=body, fields=fields)


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    text: str | None = None


class _Choice(_Said):
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _Chunk(msgspec.Struct):
    id: Any = None
    created: Any = None
    model: Any = None
    choices: list[_Choice] | None = None
    usage: Any = None
    system_fingerprint: Any = None


_CHUNK: Final = msgspec.json.Decoder(_Chunk)


class Whole:
    """Takes a stream's frames, and makes a whole reply of them."""

    __slots__ = (
        "_carry",
        "_dialect",
        "_fingerprint",
        "_first",
        "_last",
        "_parts",
        "_usage",
        "garbled",
    )

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._carry = b""
        self._parts: dict[str, list[str]] = {name: [] for name in _SHOWN}
        self._first = _Chunk()
        self._last = _Choice()  # tells why it ended
        self._usage: Any = None
        self._fingerprint: Any = None
        self.garbled = False  # something could not be read

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, as its client would get them."""
        *frames, self._carry = (self._carry + data).split(b"\n\n")
        for frame in frames:
            lines = frame.splitlines()
            payload = b"".join(line[5:] for line in lines if line.startswith(b"data:")).strip()
            if not payload or payload == b"[DONE]":
                continue
            chunk = decode_or_none(_CHUNK, payload)
            if chunk is None:
                self.garbled = True
            else:
                self._take(chunk)

    def _take(self, chunk: _Chunk) -> None:
        self._first = self._first if self._first.id else chunk
        self._usage = chunk.usage or self._usage
        self._fingerprint = chunk.system_fingerprint or self._fingerprint
        for choice in chunk.choices or ():
            shown = choice.delta or choice
            for name in _SHOWN:
                if text := getattr(shown, name):
                    self._parts[name].append(text)
            if choice.finish_reason is not None:
                self._last = choice

    def body(self) -> bytes:
        """Return the whole reply, once the stream has come to a good end."""
        texts = {name: "".join(parts) for name, parts in self._parts.items()}
        ended = {name: getattr(self._last, name) for name in ("finish_reason", "stop_reason")}
        choice: dict[str, Any] = {"index": 0}
        if self._dialect is Dialect.CHAT:
            older = texts["reasoning_content"]
            content = texts["content"] or (None if texts["reasoning"] or older else "")
            message = {"role": "assistant", "content": content}
            unused = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
            choice["message"] = message | unused | {"reasoning": texts["reasoning"] or None}
            if older:
                choice["message"]["reasoning_content"] = older
        else:
            choice["text"] = texts["text"]
        kind = "chat.completion" if self._dialect is Dialect.CHAT else "text_completion"
        return msgspec.json.encode(
            {
                "id": self._first.id,
                "object": kind,
                "created": self._first.created,
                "model": self._first.model,
                "choices": [choice | {"logprobs": None} | ended],
                "system_fingerprint": self._fingerprint,
                "usage": self._usage,
            }
        )
