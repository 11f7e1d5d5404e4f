"""Which streams can go on elsewhere so that nobody could tell: by what their request asks for. Pure.

What follows must be what the first backend would have said, or as likely as that. So the sampling
must depend on the tokens alone, and whatever an engine keeps beside them must follow from them. A
field that is not known to be harmless bars a request: its stream then ends in an error frame when its
backend fails.

    a grammar (response_format, structured_outputs)     it would begin anew in the middle
    a seed, unless the choice is greedy                 another engine draws other numbers
    presence and frequency penalties                    they count the tokens of the reply alone
    logprobs, n > 1, beam search, echo                  more than one text, or more than text
    stop strings                                        text is held back that no token tells
    images and audio                                    a prompt of token ids has none
    a large body                                        it is not kept once the reply has begun

Source: vLLM 0.32, `v1/sample` and `renderers/online_renderer.py`; each was seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gateway.core.types import Call, Dialect
from gateway.wire.large import fields_at_hand

_HARMLESS: Final = frozenset(
    {
        *("model", "stream", "stream_options", "n"),
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


_LARGE: Final = frozenset({"messages", "prompt", "tools"})  # harmless, and not worth reading
# Harmless with some values only; SDKs send these fields with their defaults.
_BY_VALUE: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
    "seed": _is_greedy,
    "presence_penalty": _is_unset,
    "frequency_penalty": _is_unset,
    "logprobs": lambda value, body: value is None or value is False,
    "top_logprobs": _is_unset,
    "echo": _is_unset,
    "suffix": _is_unset,
    "stop": _is_unset,
    "response_format": _is_text,
    "tool_choice": _is_free,
}


def may_trail(call: Call) -> bool:
    """Whether it is worth keeping a trail of the stream that a call asks for."""
    return (
        (call.dialect is Dialect.CHAT or call.dialect is Dialect.COMPLETIONS)
        and call.stream
        and call.choices == 1
        and call.places is None
        and call.model_at is None
        and b"return_token_ids" not in call.body  # the client wants them itself
    )


def may_go_on(call: Call) -> bool:
    """Whether the stream that a call asks for could go on elsewhere; asked once it is broken."""
    if call.text_bytes is None and call.prompt_token_ids is None:
        return False  # images, audio or embeddings
    body = {
        name: msgspec.json.decode(raw)
        for name, raw in fields_at_hand(call).items()
        if name not in _LARGE
    }
    doubtful = [name for name in body if name not in _HARMLESS]
    return all(name in _BY_VALUE and _BY_VALUE[name](body[name], body) for name in doubtful)
