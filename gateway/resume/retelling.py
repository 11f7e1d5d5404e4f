"""How a reply is told in the events of another dialect than the one that its rest comes in. Pure.

The first backend's events say what the reply is called and how far it has come. Another one writes the
rest as a chat, and its text is told in events that go on from there: in the order and with the fields of
vLLM 0.32.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from gateway.wire.frames import EVENT as JUDGED
from gateway.wire.objects import decode_or_none


class Event(msgspec.Struct):
    """What an event of Messages or Responses says."""

    type: str = ""
    sequence_number: int = -1
    index: int = 0
    message: Any = None
    content_block: Any = None
    delta: Any = None
    response: Any = None
    item: Any = None
    part: Any = None
    logprobs: Any = None


EVENT: Final = msgspec.json.Decoder(Event)
_LAST: Final = (b"event: message_delta\n", b"event: response.completed\n")


def tells_abort(frame: bytes) -> bool:
    """Whether a frame is the last word of a reply that its engine did not finish."""
    if not frame.startswith(_LAST):
        return False
    event = decode_or_none(EVENT, frame.partition(b"data: ")[2]) or Event()
    if event.type == "message_delta":  # vLLM always names the reason
        return isinstance(event.delta, dict) and event.delta.get("stop_reason", "") is None
    return _field(event.response, "status") in ("cancelled", "failed")


def tells_error(frame: bytes) -> bool:
    """Whether a frame is an error of its backend."""
    if b'"error"' not in frame:
        return False
    event = decode_or_none(JUDGED, frame.partition(b"data: ")[2])
    return event is not None and event.is_error


class _TextDelta(msgspec.Struct, gc=False):
    type: Literal["text_delta"]
    text: str


class _MessageText(msgspec.Struct, gc=False):
    type: Literal["content_block_delta"]
    index: Literal[0]
    delta: _TextDelta


class _ResponseText(msgspec.Struct, gc=False):
    type: Literal["response.output_text.delta"]
    delta: str
    sequence_number: int
    logprobs: Annotated[list[Any], msgspec.Meta(max_length=0)]


_MESSAGE_TEXTS: Final = msgspec.json.Decoder(list[_MessageText])
_RESPONSE_TEXTS: Final = msgspec.json.Decoder(list[_ResponseText])
_MESSAGE_TEXT: Final = b"event: content_block_delta\ndata: "
_RESPONSE_TEXT: Final = b"event: response.output_text.delta\ndata: "
SHOWS_TEXT: Final = (_MESSAGE_TEXT, _RESPONSE_TEXT)  # how frames begin that may show more text


def _all_at_once(frames: bytes, mark: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode frames that all begin with `mark`; None: they do not, or say something else."""
    if not frames.startswith(mark):
        return None
    listed = frames[len(mark) :].rstrip(b"\n").replace(b"\n\n" + mark, b",")
    return decode_or_none(decoder, b"[%b]" % listed)


class Strange(Exception):
    """The first backend sent an event after which no other backend can continue."""


class Teller(Protocol):
    """Knows how far one reply has come, and tells more of it."""

    prompt_tokens: int | None  # as the first backend told; None: it did not
    repeats_text: bool  # the last events have all of the text

    @property
    def begun(self) -> bool:
        """Whether the client knows what the reply is called."""

    def texts(self, frames: bytes) -> list[str] | None:
        """Take note of frames that show nothing but more text, and return it; None: `take` them one by one."""

    def take(self, event: Event) -> str:
        """Take note of an event of the first backend; return what text it shows.

        Raises:
            Strange: nobody can go on behind it.
        """

    def more(self, text: str) -> bytes:
        """Return the events that show more text."""

    def end(self, finish: str, text: str, prompt_tokens: int, said_tokens: int) -> bytes:
        """Return the events that end the reply; `text` is all of it."""


class MessageTeller:
    """Tells a message of Anthropic's that has one text."""

    repeats_text = False

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self._usage: dict[str, Any] = {}
        self._open = False

    @property
    def begun(self) -> bool:
        """See `Teller`."""
        return self.prompt_tokens is not None

    def texts(self, frames: bytes) -> list[str] | None:
        """See `Teller`."""
        told = _all_at_once(frames, _MESSAGE_TEXT, _MESSAGE_TEXTS) if self._open else None
        return None if told is None else [each.delta.text for each in told]

    def take(self, event: Event) -> str:
        """See `Teller`."""
        match event.type:
            case "message_start":
                self._begin(event.message)
            case "content_block_start" if not self._open and event.index == 0:
                if _field(event.content_block, "type") != "text":
                    raise Strange
                self._open = True
            case "content_block_delta" if self._open:
                text = _field(event.delta, "text")
                if _field(event.delta, "type") != "text_delta" or not isinstance(text, str):
                    raise Strange
                return text
            case "ping":
                pass
            case _:
                raise Strange
        return ""

    def _begin(self, message: Any) -> None:
        usage = _field(message, "usage")
        self._usage = usage if isinstance(usage, dict) else {}
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts = [self._usage.get(name) or 0 for name in parts]
        if self.prompt_tokens is not None or not all(isinstance(each, int) for each in counts):
            raise Strange
        self.prompt_tokens = sum(counts)

    def more(self, text: str) -> bytes:
        """See `Teller`."""
        opened, self._open = self._open, True
        block = {"type": "text", "text": ""}
        start = b"" if opened else _message("content_block_start", content_block=block, index=0)
        delta = {"type": "text_delta", "text": text}
        return start + _message("content_block_delta", delta=delta, index=0)

    def end(self, finish: str, text: str, prompt_tokens: int, said_tokens: int) -> bytes:
        """See `Teller`."""
        reason = "max_tokens" if finish == "length" else "end_turn"
        delta = {"stop_reason": reason, "stop_sequence": None}
        usage = {"input_tokens": prompt_tokens} | self._usage | {"output_tokens": said_tokens}
        closed = _message("content_block_stop", index=0) if self._open else b""
        ended = _message("message_delta", delta=delta, usage=usage)
        return closed + ended + _message("message_stop")


class ResponseTeller:
    """Tells a response of OpenAI's that has one message with one text."""

    prompt_tokens: int | None = None  # told at its end only
    repeats_text = True

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._item: dict[str, Any] = {}
        self._parted = False
        self._sequence = -1

    @property
    def begun(self) -> bool:
        """See `Teller`."""
        return bool(self._response)

    def texts(self, frames: bytes) -> list[str] | None:
        """See `Teller`."""
        told = _all_at_once(frames, _RESPONSE_TEXT, _RESPONSE_TEXTS) if self._parted else None
        if not told:
            return None
        self._sequence = told[-1].sequence_number
        return [each.delta for each in told]

    def take(self, event: Event) -> str:
        """See `Teller`."""
        self._sequence = event.sequence_number
        match event.type:
            case "response.created" if isinstance(event.response, dict):
                self._response = event.response
            case "response.in_progress":
                pass
            case "response.output_item.added" if not self._item:
                if _field(event.item, "type") != "message" or _field(event.item, "content"):
                    raise Strange
                self._item = event.item
            case "response.content_part.added" if self._item and not self._parted:
                if _field(event.part, "type") != "output_text":
                    raise Strange
                self._parted = True
            case "response.output_text.delta" if self._parted and not event.logprobs:
                if not isinstance(event.delta, str):
                    raise Strange
                return event.delta
            case _:
                raise Strange
        return ""

    def more(self, text: str) -> bytes:
        """See `Teller`."""
        begun = b"" if self._item else self._announced()
        part = (
            b"" if self._parted else self._told("content_part.added", part=_part("", logprobs=[]))
        )
        self._parted = True
        return begun + part + self._told("output_text.delta", delta=text, logprobs=[])

    def _announced(self) -> bytes:
        name = str(self._response.get("id", "")).removeprefix("resp_")
        item = {"id": f"msg_{name}", "content": [], "role": "assistant", "status": "in_progress"}
        self._item = item | {"type": "message", "phase": None}
        return self._event("output_item.added", item=self._item, output_index=0)

    def end(self, finish: str, text: str, prompt_tokens: int, said_tokens: int) -> bytes:
        """See `Teller`."""
        part, ended, output = _part(text, logprobs=None), b"", []
        if self._parted:
            ended = self._told("output_text.done", logprobs=[], text=text)
            ended += self._told("content_part.done", part=part)
            output = [self._item | {"content": [part], "status": "completed"}]
            ended += self._event("output_item.done", item=output[0], output_index=0)
        cut = finish == "length"
        unknown: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        made: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        response = self._response | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "status": "incomplete" if cut else "completed",
            "usage": {
                "input_tokens": prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0} | unknown,
                "output_tokens": said_tokens,
                "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0} | made,
                "total_tokens": prompt_tokens + said_tokens,
            },
        }
        return ended + self._event("completed", response=response)  # vLLM says so of cut ones, too

    def _told(self, kind: str, **fields: Any) -> bytes:
        at = {"content_index": 0, "item_id": self._item.get("id"), "output_index": 0}
        return self._event(kind, **fields, **at)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        numbered = fields | {"sequence_number": self._sequence}
        return _frame(
            f"response.{kind}", dict(sorted(numbered.items())) | {"type": f"response.{kind}"}
        )


def _part(text: str, *, logprobs: Any) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _message(kind: str, **fields: Any) -> bytes:
    return _frame(kind, {"type": kind} | fields)


def _frame(kind: str, event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
