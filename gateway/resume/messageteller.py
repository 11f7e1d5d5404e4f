"""The events of a message of Anthropic's, as vLLM 0.32 writes them (`entrypoints/anthropic/serving.py`). Pure."""

from __future__ import annotations

import uuid
from typing import Any, Final, Literal

import msgspec

from gateway.resume.retelling import (
    MESSAGE_TEXT,
    Event,
    Spent,
    Strange,
    all_at_once,
    field_of,
    frame_of,
)


class _TextDelta(msgspec.Struct, gc=False):
    type: Literal["text_delta"]
    text: str


class _MessageText(msgspec.Struct, gc=False):
    type: Literal["content_block_delta"]
    index: Literal[0]
    delta: _TextDelta


class _ThinkingDelta(msgspec.Struct, gc=False):
    type: Literal["thinking_delta"]
    text: str = msgspec.field(name="thinking")


class _MessageThought(msgspec.Struct, gc=False):
    type: Literal["content_block_delta"]
    index: Literal[0]
    delta: _ThinkingDelta


_TEXTS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "text": msgspec.json.Decoder(list[_MessageText]),
    "thinking": msgspec.json.Decoder(list[_MessageThought]),
}


class MessageTeller:
    """Knows how far a message has come that has one text, or a thought and then a text, and then tool calls.

    It tells more of it. `text` is always all of the text that was shown since the last tool call began, or the
    thought ended. Nobody can go on behind a thought of the first backend's that has ended: see `resume.reasoning`.
    """

    counts_thoughts = False  # its end tells how many tokens were thought: there was a thought

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None  # as the first backend told; None: it did not
        self._usage: dict[str, Any] = {}
        self._id = ""  # of the message
        self._block = ""  # the type of the block that is open
        self._index = 0  # its place, or that of the next one
        self._calls = False

    @property
    def begun(self) -> bool:
        """Whether the client knows the id of the reply."""
        return self.prompt_tokens is not None

    @property
    def thinks(self) -> bool:
        """Whether what is shown is a thought, no answer."""
        return self._block == "thinking"

    @property
    def may_think(self) -> bool:
        """Whether what follows may be a thought."""
        return self.thinks or (not self._block and self._index == 0)

    @property
    def repeats_text(self) -> bool:
        """Whether events still to come have all of the text: behind a tool call it waits for the end of its block."""
        return self._block == "tool_use"

    def texts(self, frames: bytes) -> list[str] | None:
        """Take note of frames that show nothing but more text, and return it; None: `take` them one by one."""
        decoder = _TEXTS.get(self._block)
        events = None if decoder is None else all_at_once(frames, MESSAGE_TEXT, decoder)
        return None if events is None else [each.delta.text for each in events]

    def take(self, event: Event) -> str:
        """Take note of an event of the first backend; return what text it shows.

        Raises:
            Strange: nobody can go on behind it.
        """
        match event.type:
            case "message_start":
                self._begin(event.message)
            case "content_block_start" if not self._block and event.index == 0:
                self._block = field_of(event.content_block, "type")
                if not isinstance(self._block, str) or self._block not in _TEXTS:
                    raise Strange
            case "content_block_delta" if self._block:
                text = field_of(event.delta, self._block)
                kind = field_of(event.delta, "type")
                if kind != f"{self._block}_delta" or not isinstance(text, str):
                    raise Strange
                return text
            case "ping":
                pass
            case _:
                raise Strange
        return ""

    def _begin(self, message: Any) -> None:
        usage, self._id = field_of(message, "usage"), str(field_of(message, "id"))
        self._usage = usage if isinstance(usage, dict) else {}
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts = [self._usage.get(name) or 0 for name in parts]
        if self.prompt_tokens is not None or not all(isinstance(each, int) for each in counts):
            raise Strange
        self.prompt_tokens = sum(counts)

    def more(self, text: str) -> bytes:
        """Return the events that show more text."""
        return b"" if self._block == "tool_use" else self._shown(text)

    def thought(self, text: str) -> bytes:
        """Return the events that show more of a thought."""
        start = b"" if self._block else self._start({"type": "thinking", "thinking": ""})
        return start + self._delta({"type": "thinking_delta", "thinking": text})

    def _shown(self, text: str) -> bytes:
        start = b"" if self._block else self._start({"type": "text", "text": ""})
        return start + self._delta({"type": "text_delta", "text": text})

    def call(self, call_id: str, name: str, text: str) -> bytes:
        """Return the events with which the call of a tool begins."""
        closed, self._calls = self.closed(text), True
        return closed + self._start({"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def arguments(self, part: str) -> bytes:
        """Return the events that tell more of the arguments of the call that began last."""
        return self._delta({"type": "input_json_delta", "partial_json": part})

    def end(self, finish: str, stop: str | None, text: str, spent: Spent) -> bytes:
        """Return the events that end the reply; `stop` is the stop string that ended it."""
        reason = "tool_use" if self._calls else "end_turn" if stop is None else "stop_sequence"
        delta = {
            "stop_reason": "max_tokens" if finish == "length" else reason,
            "stop_sequence": stop,
        }
        usage = {"input_tokens": spent.prompt} | self._usage | {"output_tokens": spent.said}
        closed = self.closed(text)
        ended = _event("message_delta", delta=delta, usage=usage)
        return closed + ended + _event("message_stop")

    def _start(self, block: dict[str, Any]) -> bytes:
        self._block = block["type"]
        return _event("content_block_start", content_block=block, index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", delta=delta, index=self._index)

    def closed(self, text: str) -> bytes:
        """Return the end of the open block; the text behind a tool call follows as a block of its own."""
        signed = self._signed() if self.thinks else b""
        block, self._block = self._block, ""
        if not block:
            return b""
        closed = signed + _event("content_block_stop", index=self._index)
        self._index += 1
        if block == "tool_use" and text:
            return closed + self._shown(text) + self.closed("")
        return closed

    def _signed(self) -> bytes:
        """Return the signature of the open thought: as vLLM's, it means nothing and is told nowhere else."""
        signature = uuid.uuid5(uuid.NAMESPACE_OID, self._id).hex
        return self._delta({"type": "signature_delta", "signature": signature})


def _event(kind: str, **fields: Any) -> bytes:
    return frame_of(kind, {"type": kind} | fields)
