"""How the rest of a message or response, which comes as a chat, is told in events of its own dialect. Pure.

The first backend's events tell the id of the reply and how far it has come. Another one writes the rest
as a chat. Its text and its tool calls are told in events that go on from there: in the order and with
the fields of vLLM 0.32 (`MessageTeller`, `ResponseTeller`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

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
    return field_of(event.response, "status") in ("cancelled", "failed")


def tells_error(frame: bytes) -> bool:
    """Whether a frame is an error of its backend."""
    if b'"error"' not in frame:
        return False
    event = decode_or_none(JUDGED, frame.partition(b"data: ")[2])
    return event is not None and event.is_error


MESSAGE_TEXT: Final = b"event: content_block_delta\ndata: "
RESPONSE_TEXT: Final = b"event: response.output_text.delta\ndata: "
RESPONSE_THOUGHT: Final = b"event: response.reasoning_text.delta\ndata: "
SIGNS: Final = b'"type":"signature_delta"'  # in the frame that comes before the end of a thought
# How frames begin that may show more text.
SHOWS_TEXT: Final = (MESSAGE_TEXT, RESPONSE_TEXT, RESPONSE_THOUGHT)


def all_at_once(frames: bytes, mark: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode frames that all begin with `mark`; None: they do not, or say something else."""
    if not frames.startswith(mark):
        return None
    listed = frames[len(mark) :].rstrip(b"\n").replace(b"\n\n" + mark, b",")
    return decode_or_none(decoder, b"[%b]" % listed)


class Strange(Exception):
    """A backend sent something after which no other backend can continue, or which cannot be told."""


class Spent(NamedTuple):
    """How many tokens a reply took."""

    prompt: int
    said: int
    thought: int = 0  # of those that were said


def frame_of(kind: str, event: dict[str, Any]) -> bytes:
    """Return an event as it is written."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(event))


def field_of(value: Any, name: str) -> Any:
    """Return what an object has under a name; None where it is no object."""
    return value.get(name) if isinstance(value, dict) else None
