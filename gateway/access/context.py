"""Does it fit: prompt plus output against the window, before anything is sent.

    bound    free: says yes when the bytes alone prove it, and nothing otherwise
    settle   with the counted prompt: yes, no, or yes with less output
    unsettled  when nobody could count: the backend decides

Bytes can prove that a prompt fits, since no tokenizer makes more tokens than there are bytes. They
cannot prove that it does not: a body may hold what never reaches the prompt, and a chat template
may leave out what does (Qwen3 drops earlier reasoning, Llama 3 trims). So only a count refuses.

The window is the route's, or the caller's `max_context_tokens` where that is smaller.
"""

from __future__ import annotations

from typing import Final, NoReturn

from gateway.config.models import OverflowPolicy
from gateway.core.errors import ContextLengthExceeded, RequestError
from gateway.core.types import Call, Caller, Demand, Endpoint

# What a chat template may add by itself: role marks, a default system prompt, the preamble of the
# tools. The longest default system prompts in use (Mistral's, Devstral's) are about that long; the
# JSON around each message is longer than the marks that replace it. Too low a number does no harm
# but that the backend refuses instead of us.
TEMPLATE_TOKENS: Final = 1024
SPECIAL_TOKENS: Final = 8  # a tokenizer's own begin and end marks, and SentencePiece's first space

_GENERATES: Final = frozenset(
    {Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES}
)
_READS: Final = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE})
_CHECKED: Final = _GENERATES | _READS
_TEMPLATED: Final = frozenset({Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES})
_PROMPT_FIELD: Final = {
    Endpoint.CHAT: "messages",
    Endpoint.MESSAGES: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.RESPONSES: "input",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RERANK: "documents",
    Endpoint.SCORE: "input",
}


def bound(call: Call, *, window_tokens: int | None, caller: Caller) -> Demand | None:
    """Return the demand when it surely fits, or when no count can say more; None when one can.

    Raises:
        RequestError: more output is asked for than the caller may have (400).
        ContextLengthExceeded: a prompt given as token ids is too long whatever the output (400).
    """
    ids, endpoint = call.prompt_token_ids, call.endpoint
    window = _window(window_tokens, caller)
    unchecked = call.truncates_prompt or endpoint not in _CHECKED
    if window is None or unchecked or (ids is None and call.text_bytes is None):
        return unsettled(call, window_tokens=window_tokens, caller=caller)
    generates = endpoint in _GENERATES
    if ids is not None and ids + generates > window:
        _too_long(call, ids, window_tokens, caller)
    output = _output_tokens(call, caller)
    most = ids if ids is not None else (call.text_bytes or 0) + _overhead(call)
    # Nothing stated: whatever the window leaves is the output, but there must be some.
    if most + (output or 1) * generates <= window:
        return Demand(most, exact=ids is not None, max_new_tokens=output)
    return None


def settle(
    call: Call,
    prompt_tokens: int,
    *,
    window_tokens: int | None,
    caller: Caller,
    policy: OverflowPolicy,
) -> Demand:
    """Return the demand of a prompt of exactly `prompt_tokens` (of the longest, if there are more).

    Raises:
        RequestError: more output is asked for than the caller may have (400).
        ContextLengthExceeded: it does not fit, or the policy does not let its output shrink (400).
    """
    output = _output_tokens(call, caller)
    window = _window(window_tokens, caller)
    if window is None or call.truncates_prompt:
        return Demand(prompt_tokens, not call.truncates_prompt, output)
    if call.endpoint not in _GENERATES:
        if call.endpoint in _READS and prompt_tokens > window:
            _too_long(call, prompt_tokens, window_tokens, caller)
        return Demand(prompt_tokens, exact=True, max_new_tokens=output)
    room = window - prompt_tokens
    if room < 1:
        _too_long(call, prompt_tokens, window_tokens, caller)
    if output is not None and output > room:
        if _states_output(call) and policy is OverflowPolicy.REJECT:
            _too_long(call, prompt_tokens, window_tokens, caller)
        output = room
    return Demand(prompt_tokens, exact=True, max_new_tokens=output)


def unsettled(call: Call, *, window_tokens: int | None, caller: Caller) -> Demand:
    """Return the demand of a prompt that nobody counted; the caller's output limit still holds.

    Raises:
        RequestError: more output is asked for than the caller may have (400).
    """
    output = _output_tokens(call, caller)
    if call.prompt_token_ids is not None:
        return Demand(call.prompt_token_ids, not call.truncates_prompt, output)
    size = len(call.body) if call.text_bytes is None else call.text_bytes + _overhead(call)
    window = _window(window_tokens, caller)
    return Demand(size if window is None else min(size, window), False, output)


def _window(window_tokens: int | None, caller: Caller) -> int | None:
    """Return the smaller of the route's window and the caller's."""
    own = caller.max_context_tokens
    if window_tokens is None or own is None:
        return own if window_tokens is None else window_tokens
    return min(window_tokens, own)


def _overhead(call: Call) -> int:
    return TEMPLATE_TOKENS if call.endpoint in _TEMPLATED else SPECIAL_TOKENS


def _states_output(call: Call) -> bool:
    """Whether the client itself named the output; completions have 16 when it did not."""
    named = call.max_new_field is not None or call.endpoint is not Endpoint.COMPLETIONS
    return call.max_new_tokens is not None and named


def _output_tokens(call: Call, caller: Caller) -> int | None:
    """Return the most tokens to generate; None for all that the window leaves."""
    cap = caller.max_output_tokens
    if cap is None or call.endpoint not in _GENERATES:
        return call.max_new_tokens
    if call.max_new_tokens is None or call.max_new_tokens <= cap:
        return cap if call.max_new_tokens is None else call.max_new_tokens
    if not _states_output(call):
        return cap
    field = call.max_new_field or "max_tokens"
    raise RequestError(
        f"`{field}` is {call.max_new_tokens}; this key may ask for at most {cap} tokens.",
        param=field,
        code="integer_above_max_value",
    )


def _too_long(call: Call, prompt: int, window_tokens: int | None, caller: Caller) -> NoReturn:
    """Refuse with the numbers, in the words by which the endpoint's clients know this error."""
    window = _window(window_tokens, caller) or 0
    field = _PROMPT_FIELD[call.endpoint]
    output = call.max_new_tokens if _states_output(call) else None
    if prompt + (call.endpoint in _GENERATES) > window:
        output = None  # the prompt alone is too long: less output would not help
    message = _wording(call, prompt, output, window)
    if output is not None:
        message += f" At most {window - prompt} tokens of completion fit beside this prompt."
    if window != window_tokens:
        message += f" The limit of {window} tokens is that of your API key."
    raise ContextLengthExceeded(message, param=field)


def _wording(call: Call, prompt: int, output: int | None, window: int) -> str:
    field = _PROMPT_FIELD[call.endpoint]
    if call.endpoint is Endpoint.MESSAGES:
        if output is None:
            return f"prompt is too long: {prompt} tokens > {window} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {window}, "
            "decrease input length or `max_tokens` and try again."
        )
    numbers = f"{prompt} tokens"
    if output is not None:
        numbers = f"{prompt + output} tokens ({prompt} in the {field}, {output} in the completion)"
    advice = f"Please reduce the length of the {field}{' or completion' if output else ''}."
    if call.endpoint is Endpoint.RESPONSES:
        return (
            "Your input exceeds the context window of this model: it comes to "
            f"{numbers}, the maximum context length is {window} tokens. {advice}"
        )
    return (
        f"This model's maximum context length is {window} tokens. However, your {field} resulted "
        f"in {numbers}. {advice}"
    )
