"""The tools of a Messages or Responses request, in the fields of the chat that goes on with its stream.

Source: vLLM 0.32, `entrypoints/anthropic/serving.py` and `openai/responses/utils.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.types import Call, Endpoint
from gateway.counting.anthropic import chat_tools, told_to_template
from gateway.counting.messages import Json, Unmodelled, flat_tools
from gateway.counting.tokens import off_loop
from gateway.wire.large import fields_at_hand
from gateway.wire.objects import fields_of

_NAMES: Final[tuple[str, ...]] = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", "reasoning"),  # of a response; for a message, its prompt decides
)
# Of a response, the model is shown no others; two of these are not told as plain functions.
_SHOWN: Final = ("function", "custom", "namespace")


async def offers_of(call: Call) -> dict[str, Raw] | None:
    """Return the chat's fields with the same tools, and the same for its parser; None: they are not known.

    Cancel: nothing is held.
    """
    return await off_loop(call, partial(_read, call))


def _read(call: Call) -> dict[str, Raw] | None:
    fields = fields_at_hand(call) if call.places is None else fields_of(call.body)
    try:
        given = {name: msgspec.json.decode(fields[name]) for name in _NAMES if name in fields}
        offered = _chosen(given, call.endpoint) if given.get("tools") else {}
        if call.endpoint is Endpoint.RESPONSES:
            offered |= told_to_template(given, (given.get("reasoning") or {}).get("effort"))
    except (Unmodelled, msgspec.DecodeError, RecursionError, AttributeError):
        return None
    return {name: Raw(msgspec.json.encode(value)) for name, value in offered.items()}


def _chosen(given: dict[str, Any], endpoint: Endpoint) -> Json:
    choice = given.get("tool_choice")
    if endpoint is Endpoint.MESSAGES:
        one_by_one = choice is not None and choice.get("disable_parallel_tool_use")
        return chat_tools(given) | ({"parallel_tool_calls": False} if one_by_one else {})
    shown = [each for each in given["tools"] if each.get("type") in _SHOWN]
    several = given.get("parallel_tool_calls")
    more = {} if several is None else {"parallel_tool_calls": several}
    return {"tools": flat_tools(shown), "tool_choice": choice or "auto"} | more if shown else {}
