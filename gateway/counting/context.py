"""Does it fit: prompt plus output against the window, before anything is sent.

    bound    free: says yes when the bytes alone prove it, and nothing otherwise
    settle   with the counted prompt: yes, no, or yes with less output
    unsettled  when nobody could count: the backend decides, where the window is its own
    unjudged  while no backend serves that could count it: it is judged after it was admitted

Bytes can prove that a prompt fits, since no tokenizer makes more tokens than there are bytes. They
cannot prove that it does not: a body may hold what never reaches the prompt, and a chat template
may leave out what does (Qwen3 drops earlier reasoning, Llama 3 trims). So only a count refuses.

The window is the route's, or the caller's `max_context_tokens` where that is smaller. What is known to be
too long for the smallest window of a pool's backends is judged by the largest: the choice of a backend then
passes over those that it does not fit. One that is
smaller than the engine's own (a pool's `max_context`, a key's) is held by nobody else: then an
output that is not stated gets what the window leaves, a prompt that the engine would cut is checked
as any other, and one that nobody could count is refused unless its size shows that it fits: only for
now (503), if who can count was silent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NoReturn

from gateway.config.models import OverflowPolicy
from gateway.core.endpoints import GENERATES, READS, TEMPLATED
from gateway.core.errors import ContextLengthExceeded, RequestError
from gateway.core.types import Call, Caller, Demand, Endpoint, Route
from gateway.wire.vllm import cut_tokens, prompt_bytes

# What a chat template may add by itself: role marks, a default system prompt, the preamble of the
# tools. The longest default system prompts in use (Mistral's, Devstral's) are about that long; the
# JSON around each message is longer than the marks that replace it. Too low a number does no harm
# but that the backend refuses instead of us.
TEMPLATE_TOKENS: Final = 1024
SPECIAL_TOKENS: Final = 8  # a tokenizer's own begin and end marks, and SentencePiece's first space
# An output that is not stated is bounded without a count where it still gets this part of the
# window; with less, an answer could be cut short only because nobody counted.
FREE_OUTPUT_RATIO: Final = 0.5

_CHECKED: Final = GENERATES | READS
# An engine may make vectors of prompts that are longer than the window that it tells, in chunks
# (vLLM's `enable_chunked_processing`).
_IN_CHUNKS: Final = frozenset({Endpoint.EMBEDDINGS, Endpoint.EMBED})
_PROMPT_FIELD: Final = {
    Endpoint.CHAT: "messages",
    Endpoint.CHAT_BATCH: "messages",
    Endpoint.MESSAGES: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.RESPONSES: "input",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.EMBED: "texts",
    Endpoint.POOLING: "input",
    Endpoint.CLASSIFY: "input",
    Endpoint.RERANK: "documents",
    Endpoint.SCORE: "input",
    Endpoint.GENERATIVE_SCORING: "items",
    Endpoint.DECISIONS: "state",
}


def bound(
    call: Call, *, route: Route, caller: Caller, policy: OverflowPolicy = OverflowPolicy.REJECT
) -> Demand | None:
    """Return the demand when it surely fits, or when no count can say more; None when one can.

    Raises:
        RequestError: more output is asked for than the caller may have (400).
        ContextLengthExceeded: a prompt given as token ids is too long whatever the output (400).
    """
    try:
        return _bound(call, route, caller, policy)
    except ContextLengthExceeded:
        return _bound(call, _widest(route), caller, policy)


def _bound(call: Call, route: Route, caller: Caller, policy: OverflowPolicy) -> Demand | None:
    window = window_of(route, caller)
    if window is None or _is_engines(call, window, route, caller):
        return _unchecked(call, window, caller, policy)
    ids, generates = call.prompt_token_ids, call.endpoint in GENERATES
    if ids is None and call.text_bytes is None:
        return None
    most = ids if ids is not None else (call.text_bytes or 0) + _overhead(call)
    if call.truncates_prompt:
        most = _cut(call, most)
    if ids is not None and most + generates > window:
        _too_long(call, Demand(most, exact=True), route, caller)
    output, room = call.max_new_tokens, window - most
    if caller.max_output_tokens is not None:
        output = _output_tokens(call, caller, policy)
    if output is None and generates and _is_ours(window, route, caller):
        enough = 1 if ids is not None else FREE_OUTPUT_RATIO * window
        return Demand(most, ids is not None, room) if room >= enough else None
    # Nothing stated: whatever the window leaves is the output, but there must be some.
    if (output or 1) * generates <= room:
        return Demand(most, exact=ids is not None, max_new_tokens=output)
    return None


def settle(
    call: Call, prompt_tokens: int, *, route: Route, caller: Caller, policy: OverflowPolicy
) -> Demand:
    """Return the demand of a prompt of exactly `prompt_tokens` (of the longest, if there are more).

    Raises:
        RequestError: more output is asked for than the caller may have (400).
        ContextLengthExceeded: it does not fit, or the policy does not let its output shrink (400).
    """
    try:
        return _settle(call, prompt_tokens, route, caller, policy)
    except ContextLengthExceeded:
        return _settle(call, prompt_tokens, _widest(route), caller, policy)


def _settle(
    call: Call, prompt_tokens: int, route: Route, caller: Caller, policy: OverflowPolicy
) -> Demand:
    window = window_of(route, caller)
    output = _output_tokens(call, caller, policy)
    differs = call.truncates_prompt or call.endpoint in _IN_CHUNKS  # from what the engine will read
    if window is None or (differs and not _is_ours(window, route, caller)):
        return Demand(prompt_tokens, not differs, output)
    demand = Demand(_cut(call, prompt_tokens), exact=True, max_new_tokens=output)
    return _fitted(call, demand, route, caller, policy)


def unsettled(call: Call, *, route: Route, caller: Caller, policy: OverflowPolicy) -> Demand:
    """Return the demand of a prompt that nobody counted; the caller's output limit still holds.

    A window that nobody else holds is held by the size of the prompt's text. What the template adds
    is not in it, and no image: their tokens are known to the engine alone.

    Raises:
        RequestError: more output is asked for than the caller may have (400).
        ContextLengthExceeded: it may be too long for a window that is smaller than the engine's (400).
    """
    try:
        return _unsettled(call, route, caller, policy)
    except ContextLengthExceeded:
        return _unsettled(call, _widest(route), caller, policy)


def _unsettled(call: Call, route: Route, caller: Caller, policy: OverflowPolicy) -> Demand:
    window = window_of(route, caller)
    if window is None or not _is_ours(window, route, caller) or call.endpoint not in _CHECKED:
        return _unchecked(call, window, caller, policy)
    ids = call.prompt_token_ids
    most = _cut(call, ids if ids is not None else prompt_bytes(call))
    demand = Demand(most, ids is not None, _output_tokens(call, caller, policy))
    return _fitted(call, demand, route, caller, policy)


def unjudged(call: Call, *, caller: Caller, policy: OverflowPolicy) -> Demand:
    """Return the demand of a prompt that may wait for who can count it; the caller's output limit holds.

    Raises:
        RequestError: more output is asked for than the caller may have (400).
    """
    return Demand(len(call.body), False, _output_tokens(call, caller, policy), judged=False)


def _fitted(
    call: Call, demand: Demand, route: Route, caller: Caller, policy: OverflowPolicy
) -> Demand:
    """Return the demand as it fits, its output shrunk where that may be; raise where it does not."""
    window = window_of(route, caller) or 0
    room, output = window - demand.prompt_tokens, demand.max_new_tokens
    if call.endpoint not in GENERATES:
        if call.endpoint in READS and room < 0:
            _too_long(call, demand, route, caller)
        return demand
    if room < 1:
        _too_long(call, demand, route, caller)
    if output is None:
        output = room if _is_ours(window, route, caller) else None
    elif output > room:
        if _states_output(call) and policy is OverflowPolicy.REJECT:
            _too_long(call, demand, route, caller)
        output = room
    return Demand(demand.prompt_tokens, demand.exact, output)


def _unchecked(call: Call, window: int | None, caller: Caller, policy: OverflowPolicy) -> Demand:
    """Return the demand of what the engine will decide."""
    output = _output_tokens(call, caller, policy)
    if call.prompt_token_ids is not None:
        exact = not call.truncates_prompt and call.endpoint not in _IN_CHUNKS
        return Demand(call.prompt_token_ids, exact, output)
    size = len(call.body) if call.text_bytes is None else call.text_bytes + _overhead(call)
    return Demand(size if window is None else min(size, window), False, output)


def window_of(route: Route, caller: Caller) -> int | None:
    """Return the smaller of the route's window and the caller's, in tokens; None while none is known."""
    return _smaller(route.window_tokens, caller.max_context_tokens)


def widest_of(route: Route, caller: Caller) -> int | None:
    """Return the most tokens that any of the backends takes of a caller; None while none is known."""
    return _smaller(route.widest_tokens, caller.max_context_tokens)


def _smaller(window: int | None, own: int | None) -> int | None:
    if window is None or own is None:
        return own if window is None else window
    return min(window, own)


def _widest(route: Route) -> Route:
    """Return a route as it is without the backends of smaller windows."""
    window, engine = route.widest_tokens, route.widest_engine_tokens
    return replace(route, window_tokens=window, engine_tokens=engine)


def is_engines_own(route: Route, caller: Caller) -> bool:
    """Whether the engine holds the window too, so that it may decide what is not sure."""
    window = window_of(route, caller)
    return window is None or not _is_ours(window, route, caller)


def _is_ours(window: int, route: Route, caller: Caller) -> bool:
    """Whether a window is smaller than that of some engine, so that nobody but the gateway holds it there."""
    if route.engine_tokens is None or window < route.engine_tokens:
        return True
    widest, engine = widest_of(route, caller), route.widest_engine_tokens
    return widest is not None and engine is not None and widest < engine


def _is_engines(call: Call, window: int, route: Route, caller: Caller) -> bool:
    """Whether the check is the engine's alone: it cuts, it knows its images, it has no window."""
    if call.endpoint in _IN_CHUNKS and not _is_ours(window, route, caller):
        return True
    measured = call.prompt_token_ids is not None or call.text_bytes is not None
    checkable = measured and not call.truncates_prompt
    return call.endpoint not in _CHECKED or not (checkable or _is_ours(window, route, caller))


def _cut(call: Call, prompt_tokens: int) -> int:
    """Return what the engine leaves of a prompt of so many tokens."""
    kept = cut_tokens(call) if call.truncates_prompt else None
    return prompt_tokens if kept is None else min(prompt_tokens, kept)


def _overhead(call: Call) -> int:
    return TEMPLATE_TOKENS if call.endpoint in TEMPLATED else SPECIAL_TOKENS


def _states_output(call: Call) -> bool:
    """Whether the client itself named the output; completions have 16 when it did not."""
    named = call.max_new_field is not None or call.endpoint is not Endpoint.COMPLETIONS
    return call.max_new_tokens is not None and named


def _output_tokens(call: Call, caller: Caller, policy: OverflowPolicy) -> int | None:
    """Return the most tokens to generate; None for all that the window leaves.

    Raises:
        RequestError: more than the caller may have, and the policy does not lower it (400).
    """
    cap = caller.max_output_tokens
    if cap is None or call.endpoint not in GENERATES:
        return call.max_new_tokens
    if call.max_new_tokens is None or call.max_new_tokens <= cap:
        return cap if call.max_new_tokens is None else call.max_new_tokens
    if not _states_output(call) or policy is OverflowPolicy.CLAMP:
        return cap
    field = call.max_new_field or "max_tokens"
    raise RequestError(
        f"`{field}` is {call.max_new_tokens}; this API key allows at most {cap} tokens. "
        "`on_overflow: clamp` of the pool would lower it.",
        param=field,
        code="integer_above_max_value",
    )


def _too_long(call: Call, demand: Demand, route: Route, caller: Caller) -> NoReturn:
    """Refuse with the numbers, in the words by which the endpoint's clients know this error."""
    window = window_of(route, caller) or 0
    prompt = demand.prompt_tokens
    output = call.max_new_tokens if _states_output(call) else None
    if prompt + (call.endpoint in GENERATES) > window:
        output = None  # the prompt alone is too long: less output would not help
    message = _wording(call, demand, output, window)
    if not demand.exact:
        message += " The prompt could not be counted exactly, so its size in bytes counts."
    if output is not None:
        message += f" With this prompt, the completion can have at most {window - prompt} tokens."
    if window != route.window_tokens:
        message += f" The limit of {window} tokens is set for your API key."
    raise ContextLengthExceeded(message, param=_PROMPT_FIELD[call.endpoint])


def _wording(call: Call, demand: Demand, output: int | None, window: int) -> str:
    field, prompt = _PROMPT_FIELD[call.endpoint], demand.prompt_tokens
    most = "" if demand.exact else "up to "
    if call.endpoint is Endpoint.MESSAGES:
        if output is None:
            return f"prompt is too long: {most}{prompt} tokens > {window} maximum"
        # Claude Code reads the numbers, and asks for less: in just this form.
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {output} > "
            f"{window}, decrease input length or `max_tokens` and try again."
        )
    numbers = f"{most}{prompt} tokens"
    if output is not None:
        numbers = (
            f"{most}{prompt + output} tokens "
            f"({most}{prompt} in the {field}, {output} in the completion)"
        )
    advice = f"Please reduce the length of the {field}{' or completion' if output else ''}."
    as_chats_have_it = (
        f"This model's maximum context length is {window} tokens. However, your {field} resulted "
        f"in {numbers}. {advice}"
    )
    if call.endpoint is Endpoint.RESPONSES:
        return f"Your input exceeds the context window of this model. {as_chats_have_it}"
    return as_chats_have_it
