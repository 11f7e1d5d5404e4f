"""Bounds and counts agree: a sure fit is a fit, and what does not fit is never let through."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.access.context import bound, settle, unsettled
from gateway.config.models import OverflowPolicy
from gateway.core.errors import ContextLengthExceeded, RequestError
from gateway.core.types import Call, Caller, Dialect, Endpoint

GENERATES = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES)

tokens = st.integers(0, 5000)
limits = st.none() | st.integers(1, 5000)
callers = st.builds(
    lambda context, output: Caller(
        "id", "ci", "ci", max_context_tokens=context, max_output_tokens=output
    ),
    limits,
    limits,
)
policies = st.sampled_from(OverflowPolicy)


@st.composite
def calls(draw):
    output = draw(st.none() | st.integers(1, 5000))
    return Call(
        draw(st.sampled_from(Endpoint)),
        Dialect.CHAT,
        "m",
        False,
        b"",
        max_new_tokens=output,
        max_new_field=draw(st.sampled_from(["max_tokens", None])) if output else None,
        text_bytes=draw(st.none() | tokens),
        prompt_token_ids=draw(st.none() | tokens),
        truncates_prompt=draw(st.booleans()),
    )


def limit(window, caller):
    return min((each for each in (window, caller.max_context_tokens) if each), default=None)


@given(calls(), tokens, limits, callers, policies)
def test_what_is_settled_fits(call, prompt, window, caller, policy):
    try:
        made = settle(call, prompt, window_tokens=window, caller=caller, policy=policy)
    except RequestError:
        return
    most = limit(window, caller)
    if call.endpoint in GENERATES:
        if made.exact and most is not None:
            assert prompt + (made.max_new_tokens or 1) <= most
        if caller.max_output_tokens is not None:
            assert made.max_new_tokens <= caller.max_output_tokens
        if call.max_new_tokens is not None:
            assert made.max_new_tokens <= call.max_new_tokens


@given(calls(), limits, callers, policies, st.floats(0, 1))
def test_what_bytes_prove_no_count_refuses(call, window, caller, policy, part):
    try:
        made = bound(call, window_tokens=window, caller=caller)
    except RequestError:
        return
    counted = call.prompt_token_ids if call.prompt_token_ids is not None else call.text_bytes
    if made is None or counted is None:
        return
    prompt = counted if made.exact else int(part * counted)
    settled = settle(call, prompt, window_tokens=window, caller=caller, policy=policy)
    assert settled.max_new_tokens == made.max_new_tokens


@given(calls(), limits, callers)
def test_without_a_count_only_the_keys_output_limit_refuses(call, window, caller):
    try:
        made = unsettled(call, window_tokens=window, caller=caller)
    except ContextLengthExceeded:
        raise
    except RequestError:
        assert call.max_new_tokens > caller.max_output_tokens
        return
    assert made.exact == (call.prompt_token_ids is not None and not call.truncates_prompt)


@given(calls(), tokens, limits, callers)
def test_clamping_refuses_no_more_than_rejecting(call, prompt, window, caller):
    outcomes = []
    for policy in (OverflowPolicy.REJECT, OverflowPolicy.CLAMP):
        try:
            outcomes.append(
                settle(call, prompt, window_tokens=window, caller=caller, policy=policy)
            )
        except RequestError:
            outcomes.append(None)
    rejecting, clamping = outcomes
    if rejecting is not None:
        assert clamping == rejecting
