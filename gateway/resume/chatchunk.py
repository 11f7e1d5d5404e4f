"""What a chunk of a chat says, as far as the rest of a message or response is told by it. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec


class Function(msgspec.Struct):
    """The tool that is called, and more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call that begins, as it has an id and a name; or more arguments of the one of its index."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    """What is new."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """What one answer says."""

    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] | None = None


class Details(msgspec.Struct):
    """What is told of the tokens."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the reply took."""

    completion_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """One chunk."""

    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


CHUNK: Final = msgspec.json.Decoder(Chunk)
