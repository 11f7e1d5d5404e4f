"""Ordinary bodies: one typed decoding proves that nothing in them has to be measured.

An ordinary body has usual fields only, of their plain types and within their ranges, and all of its
content is text, in strings or in parts. Of all that the policy limits, it may have tools alone. What types
cannot say is checked beside: names that come twice, and how deep tools are nested. Most bodies are short
chats without tools, which are read in one go (`short_chat`).

This is a shortcut, never a judgement: a body that is not ordinary is measured field by field. A test
holds that both say the same of every ordinary body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.core.asked import NOTHING_ASKED, Asked, Fact
from gateway.core.types import Endpoint
from gateway.wire.content import CHECKED_BYTES
from gateway.wire.measures import RANGES
from gateway.wire.objects import MAX_DEPTH, begins
from gateway.wire.peek import Integer
from gateway.wire.prompts import TOOLS_GROWTH
from gateway.wire.schemas import may_be_strict
from gateway.wire.small import containers, most_containers

# A longer chat is read sooner by `ordinary`, which need not decode its text: of 4 KiB a whole request takes
# 63 us there and 60 here, of 16 KiB 67 and 71.
SHORT_CHAT_BYTES: Final = 8192

_encode: Final = msgspec.json.Encoder().encode


class Ordinary(msgspec.Struct, gc=False):
    """An ordinary body, read."""

    seen: Any  # its fields as attributes; what is absent is UNSET
    text_bytes: int  # of its prompt, at most
    asked: Asked
    likely_bytes: int | None = None  # see `Call`


def short_chat(body: bytes) -> Ordinary | None:
    """Read a short ordinary chat without tools; None for any other body.

    Written again, it must take all of its bytes: then no name in it came twice, for one was dropped.
    """
    try:
        seen = _SHORT_CHAT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    size, again = len(body), _encode(seen)
    if len(again) != size:  # else it is compact, as most are
        if not body.startswith(b" ", body.find(b":") + 1):
            return None
        again = msgspec.json.format(again, indent=0)  # with the spaces of Python's json
        if len(again) != size:
            return None
    return Ordinary(seen, size, NOTHING_ASKED)


def ordinary(endpoint: Endpoint, body: bytes, fields: Mapping[str, Raw]) -> Ordinary | None:
    """Read a body of one prompt that asks for nothing out of the ordinary; None for any other.

    `fields` are all that it has, each once.
    """
    decoder = _DECODERS.get(endpoint)
    if decoder is None:
        return None
    try:
        prompt = fields["messages" if endpoint is Endpoint.CHAT else "prompt"]
        long = len(prompt) > CHECKED_BYTES
        seen = decoder.decode(_without_text(endpoint, body, fields) if long else body)
    except (KeyError, msgspec.DecodeError, RecursionError):
        return None
    if endpoint is Endpoint.COMPLETIONS:
        return Ordinary(seen, len(prompt), NOTHING_ASKED)
    # No name in the messages was dropped if they have as many bytes once they are written again.
    accounted = not long and len(msgspec.json.encode(seen.messages)) == len(prompt)
    if not accounted and _may_repeat(prompt, seen.messages):
        return None
    if not isinstance(seen.tools, list):
        return Ordinary(seen, len(body), NOTHING_ASKED)
    if most_containers(seen.tools) > MAX_DEPTH - 2:  # the body and the list are levels too
        return None
    if may_be_strict(fields["tools"]):  # then the engine compiles their schemas
        return None
    tools_bytes = len(fields["tools"])
    size = Fact("tools_bytes", float(tools_bytes), "tools")
    asked = Asked((size, Fact("tools", float(len(seen.tools)), "tools")))
    return Ordinary(seen, len(body) + TOOLS_GROWTH * tools_bytes, asked, len(body))


def _may_repeat(raw: Raw, messages: list[_Message]) -> bool:
    """Whether a name may come twice where that is refused: in parts, and in a short list of messages."""
    long = len(raw) > CHECKED_BYTES
    if list in {type(each.content) for each in messages}:
        return not long or len(msgspec.json.encode(messages)) != len(raw)
    return not long and bytes(raw).count(b'"content"') > len(messages)


def _without_text(endpoint: Endpoint, body: bytes, fields: Mapping[str, Raw]) -> bytes:
    """Return a long body without its prompt where that is surely text, which need not be decoded."""
    if endpoint is Endpoint.COMPLETIONS:
        prompt = fields["prompt"]
        return msgspec.json.encode({**fields, "prompt": ""}) if begins(prompt) == _QUOTE else body
    messages = bytes(fields["messages"])
    # One list of objects, so no parts; and few objects, so not deep.
    flat = messages.startswith(b"[") and messages.find(b"[", 1) < 0 < messages.find(b"{")
    few = flat and containers(messages) < MAX_DEPTH
    return msgspec.json.encode({**fields, "messages": []}) if few else body


# --- what is ordinary -----------------------------------------------------------------------------


class _CacheControl(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    type: str
    ttl: str | UnsetType = UNSET


class _Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, gc=False):
    text: str
    cache_control: _CacheControl | UnsetType = UNSET


class _Function(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: str
    function: _Function
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class _Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message of text, in parts or not; the last fields are those of a reply that is sent back as it came."""

    role: str
    content: str | list[_Text] | None | UnsetType = UNSET
    name: str | None | UnsetType = UNSET
    tool_calls: list[_ToolCall] | None | UnsetType = UNSET
    tool_call_id: str | None | UnsetType = UNSET
    reasoning: str | None | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET
    refusal: str | None | UnsetType = UNSET
    annotations: list[None] | None | UnsetType = UNSET
    audio: None | UnsetType = UNSET
    function_call: None | UnsetType = UNSET


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    include_usage: bool | None | UnsetType = UNSET
    continuous_usage_stats: bool | None | UnsetType = UNSET


_QUOTE: Final = b'"'[0]
_Null = type(None)
_Name = str | None
_Switch = bool | None
_Limit = Integer | None
# An integer stays one, so that it is written again as it was.
_RANGES: Final = {
    name: Annotated[float, Meta(ge=least, le=most)]
    | Annotated[int, Meta(ge=int(least), le=int(most))]
    | None
    for name, (least, most) in RANGES.items()
}
# Those that are in most bodies first, in the order of the OpenAI SDK: so the decoder finds them soonest.
_FIELDS: Final[Mapping[str, Any]] = {
    "model": _Name,
    "frequency_penalty": _RANGES["frequency_penalty"],
    "logit_bias": _Null,
    "logprobs": _Null,
    "max_tokens": _Limit,
    "metadata": dict[str, str] | None,
    "n": Literal[1] | None,
    "parallel_tool_calls": _Switch,
    "presence_penalty": _RANGES["presence_penalty"],
    "response_format": _Null,
    "seed": int | None,
    "service_tier": _Name,
    "stop": _Null,
    "store": _Switch,
    "stream": _Switch,
    "stream_options": _StreamOptions | None,
    "temperature": _RANGES["temperature"],
    "tool_choice": Literal["auto", "none"] | None,
    "top_logprobs": _Null,
    "top_p": _RANGES["top_p"],
    "user": _Name,
    "top_k": _RANGES["top_k"],
    "min_p": _RANGES["min_p"],
    "repetition_penalty": _RANGES["repetition_penalty"],
    "skip_special_tokens": _Switch,
}


def _decoder(required: str, kind: Any, **more: Any) -> msgspec.json.Decoder[Any]:
    fields: list[Any] = [(required, kind)]
    fields += [(name, each | UnsetType, UNSET) for name, each in {**_FIELDS, **more}.items()]
    return msgspec.json.Decoder(
        msgspec.defstruct("_Body", fields, forbid_unknown_fields=True, gc=False)
    )


_SHORT_CHAT: Final = _decoder(
    *("messages", list[_Message]), max_completion_tokens=_Limit, reasoning_effort=_Name
)
_DECODERS: Final = {
    Endpoint.CHAT: _decoder(
        *("messages", list[_Message]),
        max_completion_tokens=_Limit,
        reasoning_effort=_Name,
        tools=list[Raw],
    ),
    Endpoint.COMPLETIONS: _decoder("prompt", str, echo=_Switch, suffix=_Null),
}
