"""Which streams can go on elsewhere so that nobody could tell: by what their request asks for. Pure.

What follows must be what the first backend would have said, or as likely as that. So the sampling
must depend on the tokens alone, and whatever an engine keeps beside them must follow from them. A
field that is not known to be harmless bars a request: its stream then ends in an error frame when its
backend fails.

    a grammar (response_format, structured_outputs)     it would begin anew in the middle
    a seed, unless the choice is greedy                 another engine draws other numbers
    presence and frequency penalties                    they count the tokens of the reply alone
    logprobs, n > 1, beam search, echo                  more than one text, or more than text
    stop strings with tools or min_tokens               nobody can tell how much text is held back
    images and audio                                    a prompt of token ids has none

In Messages and Responses, these bar a stream, too:

    output_config: format                a grammar
    include_reasoning: false             what is shown is not all of the text
    mcp_servers, container, compaction   a server that knew them would change the prompt

and these do not: thinking that is `disabled`, and an effort, change the prompt only, and what parsers of reasoning
are told (`counting.anthropic`); `adaptive` asks for nothing. A budget for thinking (`enabled`) is counted by engines
in the prompt, too. Of the others in `_HARMLESS_RECITED`, vLLM ignores what tells who asks, how it is billed and how
fast it is served. Tools do not bar a stream, until one is called (`resume.recited`).

Source: vLLM 0.32, `v1/sample`, `renderers/online_renderer.py` and `entrypoints/anthropic`; each was seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gateway.core.types import Call, Dialect
from gateway.wire.large import fields_at_hand
from gateway.wire.objects import decode_or_none, is_given

_HARMLESS: Final = frozenset(
    {
        *("model", "stream", "stream_options", "stream_interval", "n"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("parallel_tool_calls", "skip_special_tokens", "add_special_tokens"),
        *("user", "metadata", "store", "service_tier", "priority", "cache_salt", "request_id"),
        *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt"),
        *("safety_identifier", "prompt_cache_key"),
    }
)


def _is_unset(value: Any, body: Mapping[str, Any]) -> bool:
    return not value


def _is_greedy(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or body.get("temperature") == 0


def _is_text(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or value == {"type": "text"}


def _is_free(value: Any, body: Mapping[str, Any]) -> bool:
    return value is None or value == "auto" or value == "none"


def _is_plain_stop(value: Any, body: Mapping[str, Any]) -> bool:
    return not value or not (body.get("min_tokens") or "tools" in body)


_LONGEST: Final = frozenset({"messages", "prompt"})  # the token ids stand for them
_LARGE: Final = frozenset({"messages", "prompt", "tools"})  # harmless, and not worth reading
# Harmless with some values only; SDKs send these fields with their defaults.
_BY_VALUE: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
    "seed": _is_greedy,
    "presence_penalty": _is_unset,
    "frequency_penalty": _is_unset,
    "logprobs": lambda value, body: value is None or value is False,
    "top_logprobs": _is_unset,
    "include_reasoning": lambda value, body: value is None or value is True,
    "echo": _is_unset,
    "suffix": _is_unset,
    "stop": _is_plain_stop,
    "response_format": _is_text,
    "tool_choice": _is_free,
}


RECITED: Final = frozenset({Dialect.MESSAGES, Dialect.RESPONSES})  # engines tell no ids of these
_HARMLESS_RECITED: Final = frozenset(
    {
        *("model", "messages", "system", "input", "instructions", "stream", "stream_options"),
        *("max_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "logit_bias", "ignore_eos", "stop_token_ids"),
        *("metadata", "user", "store", "service_tier", "priority", "cache_salt", "request_id"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
        *("context_management", "client_metadata"),  # of agents; vLLM does not know them
        *("cache_control", "diagnostics", "speed", "inference_geo", "betas"),  # nor these
        *("fallbacks", "fallback_credit_token", "billing_policy", "user_profile_id"),
        *("workspace_id", "session_id"),
        *("tools", "chat_template_kwargs"),  # `counting.offers` reads them once a stream broke off
        # These have no effect unless the request also has a field that bars it, or none at all.
        *("max_tool_calls", "reasoning", "top_logprobs"),
    }
)
_LOGPROBS: Final = "message.output_text.logprobs"  # vLLM takes no notice of others
_UNREAD_RECITED: Final = frozenset({"messages", "system", "input", "instructions", "tools"})
_UNSET_RECITED: Final = frozenset(
    {
        *("background", "previous_response_id"),
        *("presence_penalty", "frequency_penalty", "conversation"),
    }
)


def _is_free_recited(value: Any, body: Mapping[str, Any]) -> bool:
    chosen = value.get("type") if isinstance(value, dict) else value
    return chosen is None or chosen == "auto" or chosen == "none"


_THINKING: Final = ("adaptive", "disabled", "enabled")


def _is_effort(value: Any, body: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict):
        return value is None
    return value.keys() <= {"effort", "format"} and value.get("format") is None


def _is_plain_stop_of(prompt: str) -> Callable[[Any, Mapping[str, Any]], bool]:
    """Return what judges the stop strings of the dialect that has its prompt in this field."""

    def judge(value: Any, body: Mapping[str, Any]) -> bool:
        listed = value if isinstance(value, list) else [value]
        known = all(isinstance(each, str) for each in listed)
        return not value or (known and prompt in body and "tools" not in body)

    return judge


_BY_VALUE_RECITED: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
    **dict.fromkeys(_UNSET_RECITED, _is_unset),
    "tool_choice": _is_free_recited,
    "thinking": lambda value, body: (
        not value or (isinstance(value, dict) and value.get("type") in _THINKING)
    ),
    "output_config": _is_effort,
    "include_reasoning": lambda value, body: value is None or value is True,
    "stop": _is_plain_stop_of("input"),
    "stop_sequences": _is_plain_stop_of("messages"),
    "include": lambda value, body: (
        not value or (isinstance(value, list) and _LOGPROBS not in value)
    ),
    "seed": _is_greedy,
    "skip_special_tokens": lambda value, body: value is None or value is True,
    "text": lambda value, body: (
        not value or (isinstance(value, dict) and _is_text(value.get("format"), body))
    ),
    "truncation": lambda value, body: value is None or value == "disabled",
}


def may_recite(call: Call) -> bool:
    """Whether to keep the text of the stream of a call: in its dialect, engines tell no token ids."""
    return call.dialect in RECITED and call.stream


_ANY: Final = msgspec.json.Decoder()
_IDS: Final = "return_token_ids"
_IDS_WRITTEN: Final = _IDS.encode()
_NOT_ECHOED: Final = (b"null", b"false")


def may_trail(call: Call) -> bool:
    """Whether to keep a trail of the stream of a call: that may be worth it, and its client does not notice.

    An engine that tells token ids leaves out the prompt that it was to echo. Source: vLLM 0.32,
    `entrypoints/openai/completion/serving.py`; seen there.
    """
    if not (
        (call.dialect is Dialect.CHAT or call.dialect is Dialect.COMPLETIONS)
        and call.stream
        and call.choices == 1
        and call.model_at is None
    ):
        return False
    if call.places is None and call.dialect is Dialect.CHAT:
        # A client that wants the ids itself would notice. `find` takes a third of the time of `in`.
        return call.body.find(_IDS_WRITTEN) < 0
    fields = fields_at_hand(call)
    if _IDS in fields or bytes(fields.get("echo", b"null")) not in _NOT_ECHOED:
        return False
    return _LONGEST.issuperset((call.places or {}).keys() - fields.keys())


def held_back_chars(call: Call) -> int:
    """Return how many characters an engine holds back to look for the stop strings of a call in them."""
    if call.places is None and call.body.find(b'"stop') < 0:
        return 0
    return max(map(len, stops_of(call)), default=1) - 1


def is_parsed(call: Call) -> bool:
    """Whether an engine may look for tool calls in the reply to a call, and hold back what could begin one."""
    return offers_tools(call) and bytes(fields_at_hand(call).get("tool_choice", b"")) != b'"none"'


def offers_tools(call: Call) -> bool:
    """Whether a call offers tools, which nobody may be allowed to call."""
    if call.places is None and call.body.find(b'"tools"') < 0:
        return False
    tools = fields_at_hand(call).get("tools", msgspec.Raw())
    return is_given(tools) and bytes(tools).strip(b"[] \n\r\t") != b""


def thinking_budget(call: Call) -> int | None:
    """Return how many tokens the thinking of a message may have at most; None: its request does not say."""
    if call.dialect is not Dialect.MESSAGES:
        return None
    thinking = decode_or_none(_ANY, fields_at_hand(call).get("thinking", b"null"))
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return None
    tokens = thinking.get("budget_tokens")
    return tokens if isinstance(tokens, int) else None


def stops_of(call: Call) -> list[str]:
    """Return the stop strings of a call."""
    name = "stop_sequences" if call.dialect is Dialect.MESSAGES else "stop"
    stop = decode_or_none(_ANY, fields_at_hand(call).get(name, b"null"))
    listed = stop if isinstance(stop, list) else [stop]
    return [each for each in listed if isinstance(each, str)]


def may_go_on(call: Call) -> bool:
    """Whether the stream that a call asks for could go on elsewhere; asked once it is broken."""
    if call.text_bytes is None and call.prompt_token_ids is None:
        return False  # images, audio or embeddings
    recited = call.dialect in RECITED
    harmless = _HARMLESS_RECITED if recited else _HARMLESS | _LARGE
    by_value = _BY_VALUE_RECITED if recited else _BY_VALUE
    unread = _UNREAD_RECITED if recited else _LONGEST
    fields = fields_at_hand(call)
    try:
        body = {name: None if name in unread else _ANY.decode(raw) for name, raw in fields.items()}
    except msgspec.DecodeError:  # 1e999: a number that is none here, and infinite to an engine
        return False
    doubtful = (fields.keys() | (call.places or {}).keys()) - harmless
    return all(
        name in by_value and name in body and by_value[name](body[name], body) for name in doubtful
    )


def joins(call: Call, tail: str, again: str) -> bool:
    """Whether what follows a seam fits what the client has already seen.

    `again` was shown beyond the seam: only greedy choices say the same again. `tail` ends there: a stop
    string may not begin in what is shown and end in what another backend writes.
    """
    fields = fields_at_hand(call)
    if msgspec.json.decode(fields.get("temperature", b"null")) == 0:
        return True
    begun = (stop[:chars] for stop in stops_of(call) for chars in range(1, len(stop)))
    return not again and not any(tail.endswith(each) for each in begun)
