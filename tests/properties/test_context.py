"""Bounds and counts agree: a sure fit is a fit, and what does not fit is never let through."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.models import OverflowPolicy
from gateway.core.errors import ContextLengthExceeded, RequestError
from gateway.core.types import Call, Caller, Dialect, Endpoint, Route
from gateway.counting.context import bound, settle, unsettled

GENERATES = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES)
READS = (Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE)

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
def routes(draw):
    engine, cap = draw(limits), draw(limits)
    window = min((each for each in (engine, cap) if each), default=None)
    return Route("m", "m", "m", None, window, engine, window, engine)


@st.composite
def calls(draw):
    output = draw(st.none() | st.integers(1, 5000))
    cut = draw(st.none() | st.integers(-1, 5000))
    return Call(
        draw(st.sampled_from(Endpoint)),
        Dialect.CHAT,
        "m",
        False,
        b'{"truncate_prompt_tokens": %d}' % cut if cut is not None else b"{}",
        max_new_tokens=output,
        max_new_field=draw(st.sampled_from(["max_tokens", None])) if output else None,
        text_bytes=draw(st.none() | tokens),
        prompt_token_ids=draw(st.none() | tokens),
        truncates_prompt=cut is not None,
    )


def limit(route, caller):
    both = (route.window_tokens, caller.max_context_tokens)
    return min((each for each in both if each), default=None)


def is_ours(route, caller):
    """Whether nobody but the gateway holds the limit."""
    most = limit(route, caller)
    return most is not None and (route.engine_tokens is None or most < route.engine_tokens)


@given(calls(), tokens, routes(), callers, policies)
def test_what_is_settled_fits(call, prompt, route, caller, policy):
    try:
        made = settle(call, prompt, route=route, caller=caller, policy=policy)
    except RequestError:
        return
    most = limit(route, caller)
    assert made.prompt_tokens <= prompt
    if call.endpoint in GENERATES:
        if made.exact and most is not None:
            assert made.prompt_tokens + (made.max_new_tokens or 1) <= most
        if caller.max_output_tokens is not None:
            assert made.max_new_tokens <= caller.max_output_tokens
        if call.max_new_tokens is not None:
            assert made.max_new_tokens <= call.max_new_tokens


@given(calls(), tokens, routes(), callers, policies)
def test_a_window_that_nobody_else_holds_is_held_with_a_count_and_without(
    call, prompt, route, caller, policy
):
    if not is_ours(route, caller) or call.endpoint not in GENERATES + READS:
        return
    most = limit(route, caller)
    for check in (
        lambda: bound(call, route=route, caller=caller),
        lambda: settle(call, prompt, route=route, caller=caller, policy=policy),
        lambda: unsettled(call, route=route, caller=caller, policy=policy),
    ):
        try:
            made = check()
        except RequestError:
            continue
        if made is not None:
            assert made.total_tokens <= most or call.endpoint in READS
            assert made.prompt_tokens <= most
            assert made.max_new_tokens or call.endpoint in READS


@given(calls(), routes(), callers, policies, st.floats(0, 1))
def test_what_bytes_prove_no_count_refuses(call, route, caller, policy, part):
    try:
        made = bound(call, route=route, caller=caller)
    except RequestError:
        return
    counted = call.prompt_token_ids if call.prompt_token_ids is not None else call.text_bytes
    if made is None or counted is None:
        return
    prompt = counted if made.exact else int(part * counted)
    settled = settle(call, prompt, route=route, caller=caller, policy=policy)
    if call.max_new_tokens is None and is_ours(route, caller):
        assert (settled.max_new_tokens or 0) >= (made.max_new_tokens or 0)
    else:
        assert settled.max_new_tokens == made.max_new_tokens


@given(calls(), routes(), callers, policies)
def test_without_a_count_the_engines_own_window_refuses_nothing(call, route, caller, policy):
    if is_ours(route, caller):
        return
    try:
        made = unsettled(call, route=route, caller=caller, policy=policy)
    except ContextLengthExceeded:
        raise
    except RequestError:
        assert call.max_new_tokens > caller.max_output_tokens
        return
    in_chunks = call.endpoint in (Endpoint.EMBEDDINGS, Endpoint.EMBED)
    told = call.prompt_token_ids is not None
    assert made.exact == (told and not call.truncates_prompt and not in_chunks)


@given(calls(), tokens, routes(), callers)
def test_clamping_refuses_no_more_than_rejecting(call, prompt, route, caller):
    outcomes = []
    for policy in (OverflowPolicy.REJECT, OverflowPolicy.CLAMP):
        try:
            outcomes.append(settle(call, prompt, route=route, caller=caller, policy=policy))
        except RequestError:
            outcomes.append(None)
    rejecting, clamping = outcomes
    if rejecting is not None:
        assert clamping == rejecting
