"""The events of a response of OpenAI's, as vLLM 0.32 and 0.33 write them (`responses/streaming_events.py`). Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from gateway.resume.retelling import (
    RESPONSE_TEXT,
    RESPONSE_THOUGHT,
    Event,
    Spent,
    Strange,
    all_at_once,
    field_of,
    frame_of,
)


class _ResponseText(msgspec.Struct, gc=False):
    type: Literal["response.output_text.delta"]
    delta: str
    sequence_number: int
    logprobs: Annotated[list[Any], msgspec.Meta(max_length=0)]


class _ResponseThought(msgspec.Struct, gc=False):
    type: Literal["response.reasoning_text.delta"]
    delta: str
    sequence_number: int


# By the type of an item: the event with more of its text, how its frame begins, and the type of its part.
_TEXTS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    "message": msgspec.json.Decoder(list[_ResponseText]),
    "reasoning": msgspec.json.Decoder(list[_ResponseThought]),
}
_MARKS: Final = {"message": RESPONSE_TEXT, "reasoning": RESPONSE_THOUGHT}
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseTeller:
    """Tells a response that has a thought or not, a message with one text, and then tool calls and more of these.

    Nobody can go on behind a thought of the first backend's that has ended: see `resume.reasoning`.
    """

    prompt_tokens: int | None = None  # told at its end only
    repeats_text = True

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._item: dict[str, Any] = {}  # the one that is open
        self._parted = False  # it is a message, and its text has begun
        self._arguments: list[str] = []  # it is a tool call
        self._output: list[dict[str, Any]] = []  # the items before it
        self._ends_as = "completed"  # what an item is that ends
        self._sequence = -1

    @property
    def begun(self) -> bool:
        """See `MessageTeller`."""
        return bool(self._response)

    def texts(self, frames: bytes) -> list[str] | None:
        """See `MessageTeller`."""
        kind = self._item.get("type", "")
        events = all_at_once(frames, _MARKS[kind], _TEXTS[kind]) if self._parted else None
        if not events:
            return None
        self._sequence = events[-1].sequence_number
        return [each.delta for each in events]

    def take(self, event: Event) -> str:
        """See `MessageTeller`."""
        self._sequence = event.sequence_number
        match event.type:
            case "response.created" if isinstance(event.response, dict):
                self._response = event.response
            case "response.in_progress":
                pass
            case "response.output_item.added" if not self._item:
                kind = field_of(event.item, "type")
                if kind not in ("message", "reasoning") or field_of(event.item, "content"):
                    raise Strange
                self._item = event.item
            case "response.content_part.added" if self._item and not self._parted:
                if field_of(event.part, "type") != self._part_type:
                    raise Strange
                self._parted = True
            case "response.output_text.delta" | "response.reasoning_text.delta" if self._parted:
                known = event.type == f"response.{self._part_type}.delta" and not event.logprobs
                if not known or not isinstance(event.delta, str):
                    raise Strange
                return event.delta
            case _:
                raise Strange
        return ""

    def more(self, text: str) -> bytes:
        """See `MessageTeller`."""
        closed = self.closed("") if self._is_call else b""
        begun = b"" if self._item else self._announced()
        part = (
            b"" if self._parted else self._told("content_part.added", part=_part("", logprobs=[]))
        )
        self._parted = True
        delta = self._told("output_text.delta", delta=text, logprobs=[])
        return closed + begun + part + delta

    @property
    def _part_type(self) -> str:
        return _PARTS[self._item["type"]]

    @property
    def thinks(self) -> bool:
        """See `MessageTeller`."""
        return self._item.get("type") == "reasoning"

    @property
    def may_think(self) -> bool:
        """See `MessageTeller`."""
        return self.thinks or not (self._item or self._output)

    @property
    def counts_thoughts(self) -> bool:
        """See `MessageTeller`."""
        return self.thinks or any(each["type"] == "reasoning" for each in self._output)

    def thought(self, text: str) -> bytes:
        """See `MessageTeller`."""
        begun = b""
        if not self._item:
            self._item = {"id": self._new_id("rs"), "summary": [], "type": "reasoning"}
            self._item |= {"content": None, "encrypted_content": None, "status": "in_progress"}
            begun = self._event(
                "output_item.added", item=self._item, output_index=len(self._output)
            )
        if not self._parted:
            begun += self._told("content_part.added", part=_thought(""))
        self._parted = True
        return begun + self._told("reasoning_text.delta", delta=text)

    def _announced(self) -> bytes:
        item = {
            "id": self._new_id("msg"),
            "content": [],
            "role": "assistant",
            "status": "in_progress",
        }
        self._item = item | {"type": "message", "phase": None}
        return self._event("output_item.added", item=self._item, output_index=len(self._output))

    def _new_id(self, kind: str) -> str:
        """Return an id for the next item: the response's own, and its place where it is not the first."""
        own, place = str(self._response.get("id", "")).removeprefix("resp_"), len(self._output)
        return f"{kind}_{own}{f'_{place}' if place else ''}"

    @property
    def _is_call(self) -> bool:
        return self._item.get("type") == "function_call"

    def call(self, call_id: str, name: str, text: str) -> bytes:
        """See `MessageTeller`."""
        closed, self._arguments = self.closed(text), []
        about = {"arguments": "", "call_id": call_id, "name": name, "type": "function_call"}
        unused = {"async": None, "caller": None, "namespace": None}
        self._item = about | {"id": self._new_id("fc")} | unused | {"status": "in_progress"}
        added = self._event("output_item.added", item=self._item, output_index=len(self._output))
        return closed + added

    def arguments(self, part: str) -> bytes:
        """See `MessageTeller`."""
        if not self._is_call:
            raise Strange  # text came behind the call, and closed it
        self._arguments.append(part)
        return self._event("function_call_arguments.delta", delta=part, **self._place())

    def closed(self, text: str) -> bytes:
        """Return the events that end the open item; all of its text is told again."""
        if self._is_call:
            item = self._item | {"arguments": "".join(self._arguments), "status": self._ends_as}
            events = self._event(
                "function_call_arguments.done", arguments=item["arguments"], **self._place()
            )
            name = b',"name":%b}\n\n' % msgspec.json.encode(item["name"])  # behind the type
            events = events.removesuffix(b"}\n\n") + name
        elif self.thinks:
            part = _thought(text)
            events = self._told("reasoning_text.done", text=text)
            events += self._told("content_part.done", part=part)
            item = self._item | {"content": [part], "status": self._ends_as}
        elif self._parted:
            part = _part(text, logprobs=None)
            events = self._told("output_text.done", logprobs=[], text=text)
            events += self._told("content_part.done", part=part)
            item = self._item | {"content": [part], "status": self._ends_as}
        else:
            return b""
        events += self._event("output_item.done", item=item, output_index=len(self._output))
        self._output.append(item)
        self._item, self._parted = {}, False
        return events

    def end(self, finish: str, stop: str | None, text: str, spent: Spent) -> bytes:
        """See `MessageTeller`."""
        cut = finish == "length"
        tells_cut = cut and self._newer
        if tells_cut:
            self._ends_as = "incomplete"
        ended = self.closed(text)
        unknown: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        made: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        response = self._response | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "status": "incomplete" if cut else "completed",
            "usage": {
                "input_tokens": spent.prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0} | unknown,
                "output_tokens": spent.said,
                "output_tokens_details": {
                    "reasoning_tokens": spent.thought,
                    "tool_output_tokens": 0,
                }
                | made,
                "total_tokens": spent.prompt + spent.said,
            },
        }
        return ended + self._event("incomplete" if tells_cut else "completed", response=response)

    @property
    def _newer(self) -> bool:
        """Whether it is of a vLLM since 0.33, which tells of a cut response in its last event and item, too."""
        return "safety_identifier" in self._response

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item.get("id"), "output_index": len(self._output)}

    def _told(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, **fields, content_index=0, **self._place())

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        numbered = fields | {"sequence_number": self._sequence}
        return frame_of(
            f"response.{kind}", dict(sorted(numbered.items())) | {"type": f"response.{kind}"}
        )


def _thought(text: str) -> dict[str, Any]:
    return {"text": text, "type": "reasoning_text"}


def _part(text: str, *, logprobs: Any) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}
