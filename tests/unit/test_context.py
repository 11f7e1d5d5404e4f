"""The context check: what surely fits, what needs a count, what is refused in which words."""

import json
import re
from functools import partial

import pytest
from msgspec import structs

from gateway.config.models import OverflowPolicy
from gateway.core.errors import ContextLengthExceeded, RequestError
from gateway.core.types import Call, Caller, Demand, Dialect, Endpoint, Route
from gateway.counting.context import SPECIAL_TOKENS, TEMPLATE_TOKENS, bound, settle, unsettled
from gateway.wire.calls import ENDPOINTS, parse_call

REJECT, CLAMP = OverflowPolicy.REJECT, OverflowPolicy.CLAMP
CALLER = Caller("id", "ci", "ci")
GENERATING = [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES]
UNCHECKED = [
    Endpoint.COUNT_TOKENS,
    Endpoint.TOKENIZE,
    Endpoint.DETOKENIZE,
    Endpoint.TRANSCRIPTIONS,
    Endpoint.TRANSLATIONS,
]


def call(endpoint=Endpoint.CHAT, text_bytes=100, **fields):
    made = {"max_new_field": "max_tokens" if "max_new_tokens" in fields else None, **fields}
    return Call(endpoint, Dialect.CHAT, "m", False, b"x" * 100, text_bytes=text_bytes, **made)


def limited(**limits):
    return Caller("id", "ci", "ci", **limits)


def within(window, engine=None):
    """Return a route to a window that is the engine's own, or to a smaller one."""
    engine = engine or window
    return windows(window, engine, window, engine)


def windows(window, engine, widest, widest_engine):
    """Return a route to backends of several windows."""
    return Route("m", "m", "m", None, window, engine, widest, widest_engine)


def parsed(path, **body):
    return parse_call(ENDPOINTS[path], json.dumps({"model": "m", **body}).encode())


# --- what bytes prove -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "overhead"),
    [
        (Endpoint.CHAT, TEMPLATE_TOKENS),
        (Endpoint.RESPONSES, TEMPLATE_TOKENS),
        (Endpoint.MESSAGES, TEMPLATE_TOKENS),
        (Endpoint.COMPLETIONS, SPECIAL_TOKENS),
    ],
)
def test_bytes_prove_a_fit_up_to_the_last_token(endpoint, overhead):
    asked = call(endpoint, 100, max_new_tokens=50)
    fits = bound(asked, route=within(150 + overhead), caller=CALLER)
    assert fits == Demand(100 + overhead, exact=False, max_new_tokens=50)
    assert bound(asked, route=within(149 + overhead), caller=CALLER) is None


def test_an_unstated_output_needs_one_token():
    fits = bound(call(text_bytes=100), route=within(101 + TEMPLATE_TOKENS), caller=CALLER)
    assert fits == Demand(100 + TEMPLATE_TOKENS, exact=False)
    assert bound(call(text_bytes=100), route=within(100 + TEMPLATE_TOKENS), caller=CALLER) is None


@pytest.mark.parametrize("endpoint", [Endpoint.CLASSIFY, Endpoint.RERANK, Endpoint.SCORE])
def test_what_only_reads_needs_no_output(endpoint):
    assert bound(call(endpoint, 100), route=within(100 + SPECIAL_TOKENS), caller=CALLER)
    assert bound(call(endpoint, 100), route=within(99 + SPECIAL_TOKENS), caller=CALLER) is None


@pytest.mark.parametrize("endpoint", UNCHECKED)
def test_what_has_no_window_is_not_checked(endpoint):
    assert bound(call(endpoint, 10**6), route=within(10), caller=CALLER) is not None
    made = settle(call(endpoint), 10**6, route=within(10), caller=CALLER, policy=REJECT)
    assert made == Demand(10**6, exact=True)


def test_an_unknown_window_fits_everything():
    huge = call(text_bytes=10**9, max_new_tokens=10**9)
    assert bound(huge, route=within(None), caller=CALLER).max_new_tokens == 10**9
    assert settle(huge, 10**9, route=within(None), caller=CALLER, policy=REJECT).exact


def test_images_are_left_to_the_engine():
    made = bound(call(text_bytes=None), route=within(50), caller=CALLER)
    assert made == Demand(50, exact=False)


def test_a_prompt_that_the_engine_cuts_is_left_to_it():
    cut = call(text_bytes=10**6, truncates_prompt=True)
    assert not bound(cut, route=within(50), caller=CALLER).exact
    assert not settle(cut, 10**6, route=within(50), caller=CALLER, policy=REJECT).exact


def test_token_ids_need_no_count():
    ids = call(Endpoint.COMPLETIONS, prompt_token_ids=90, max_new_tokens=10)
    fits = bound(ids, route=within(100), caller=CALLER)
    assert fits == Demand(90, exact=True, max_new_tokens=10)
    assert bound(ids, route=within(99), caller=CALLER) is None  # the policy decides
    with pytest.raises(ContextLengthExceeded, match="resulted in 90 tokens"):
        bound(ids, route=within(90), caller=CALLER)
    with pytest.raises(ContextLengthExceeded):
        bound(call(Endpoint.CLASSIFY, prompt_token_ids=91), route=within(90), caller=CALLER)
    assert bound(call(Endpoint.CLASSIFY, prompt_token_ids=90), route=within(90), caller=CALLER)


def test_token_ids_that_are_cut_are_not_exact():
    ids = call(Endpoint.COMPLETIONS, prompt_token_ids=90, truncates_prompt=True)
    assert bound(ids, route=within(10), caller=CALLER) == Demand(90, exact=False)


# --- what a count settles -------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("policy", [REJECT, CLAMP])
def test_a_fit_to_the_last_token_is_settled(endpoint, policy):
    asked = call(endpoint, max_new_tokens=10)
    made = settle(asked, 90, route=within(100), caller=CALLER, policy=policy)
    assert made == Demand(90, exact=True, max_new_tokens=10)


@pytest.mark.parametrize("endpoint", GENERATING)
def test_one_token_too_many_is_rejected_or_clamped(endpoint):
    asked = call(endpoint, max_new_tokens=11)
    with pytest.raises(ContextLengthExceeded) as caught:
        settle(asked, 90, route=within(100), caller=CALLER, policy=REJECT)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    clamped = settle(asked, 90, route=within(100), caller=CALLER, policy=CLAMP)
    assert clamped == Demand(90, exact=True, max_new_tokens=10)


@pytest.mark.parametrize("endpoint", GENERATING)
@pytest.mark.parametrize("policy", [REJECT, CLAMP])
@pytest.mark.parametrize("prompt", [100, 101])
def test_a_prompt_that_leaves_no_token_is_rejected_whatever_the_policy(endpoint, policy, prompt):
    for asked in (call(endpoint), call(endpoint, max_new_tokens=1)):
        with pytest.raises(ContextLengthExceeded):
            settle(asked, prompt, route=within(100), caller=CALLER, policy=policy)


def test_an_unstated_output_is_the_rest_of_the_window():
    made = settle(call(), 99, route=within(100), caller=CALLER, policy=REJECT)
    assert made == Demand(99, exact=True, max_new_tokens=None)


def test_the_sixteen_tokens_of_an_unstated_completion_shrink_without_asking():
    asked = parsed(b"/v1/completions", prompt="x")
    assert asked.max_new_tokens == 16
    made = settle(asked, 90, route=within(100), caller=CALLER, policy=REJECT)
    assert made.max_new_tokens == 10
    stated = parsed(b"/v1/completions", prompt="x", max_tokens=16)
    with pytest.raises(ContextLengthExceeded):
        settle(stated, 90, route=within(100), caller=CALLER, policy=REJECT)


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.EMBED])
def test_an_engine_may_embed_more_than_its_window_in_chunks(endpoint):
    for asked in (call(endpoint, text_bytes=10**4), call(endpoint, prompt_token_ids=101)):
        assert bound(asked, route=within(100), caller=CALLER)
        assert settle(asked, 101, route=within(100), caller=CALLER, policy=REJECT)
        with pytest.raises(ContextLengthExceeded):  # no engine holds a smaller limit
            settle(asked, 101, route=within(100, engine=512), caller=CALLER, policy=REJECT)


def test_what_is_classified_may_fill_the_window():
    asked = call(Endpoint.CLASSIFY)
    assert settle(asked, 100, route=within(100), caller=CALLER, policy=REJECT).exact
    with pytest.raises(ContextLengthExceeded, match="Please reduce the length of the input"):
        settle(asked, 101, route=within(100), caller=CALLER, policy=CLAMP)


def test_without_a_count_nothing_is_refused():
    asked = call(text_bytes=10**6, max_new_tokens=10**6)
    made = unsettled(asked, route=within(100), caller=CALLER, policy=REJECT)
    assert made == Demand(100, exact=False, max_new_tokens=10**6)


# --- a window that is smaller than the engine's own -----------------------------------------------


CAPPED = within(1000, engine=4000)


@pytest.mark.parametrize("field", ["truncates_prompt", "text_bytes"])
def test_a_cap_leaves_nothing_to_the_engine(field):
    asked = call(**{"text_bytes": 500, field: {"truncates_prompt": True}.get(field)})
    asked = structs.replace(asked, body=b'{"truncate_prompt_tokens": -1, "messages": []}')
    assert bound(asked, route=within(1000), caller=CALLER) is not None
    assert bound(asked, route=CAPPED, caller=CALLER) is None
    with pytest.raises(ContextLengthExceeded):
        settle(asked, 1000, route=CAPPED, caller=CALLER, policy=CLAMP)
    assert settle(asked, 999, route=CAPPED, caller=CALLER, policy=REJECT).exact


def test_a_cut_counts_as_the_most_that_is_left():
    asked = parsed(
        b"/v1/completions", prompt="x" * 5000, truncate_prompt_tokens=900, max_tokens=100
    )
    assert bound(asked, route=CAPPED, caller=CALLER) == Demand(900, False, 100)
    assert settle(asked, 4000, route=CAPPED, caller=CALLER, policy=REJECT).prompt_tokens == 900
    more = parsed(b"/v1/completions", prompt="x" * 5000, truncate_prompt_tokens=901, max_tokens=100)
    assert bound(more, route=CAPPED, caller=CALLER) is None
    with pytest.raises(ContextLengthExceeded):
        settle(more, 4000, route=CAPPED, caller=CALLER, policy=REJECT)


@pytest.mark.parametrize("policy", [REJECT, CLAMP])
def test_uncounted_a_cap_is_held_by_the_size(policy):
    with pytest.raises(ContextLengthExceeded, match=r"up to 1000 tokens.*its size in bytes counts"):
        unsettled(call(text_bytes=1000), route=CAPPED, caller=CALLER, policy=policy)
    fits = call(text_bytes=990, max_new_tokens=10)
    made = unsettled(fits, route=CAPPED, caller=CALLER, policy=policy)
    assert made == Demand(990, exact=False, max_new_tokens=10)


def test_uncounted_an_output_shrinks_where_the_policy_lets_it():
    asked = call(text_bytes=990, max_new_tokens=11)
    made = unsettled(asked, route=CAPPED, caller=CALLER, policy=CLAMP)
    assert made == Demand(990, exact=False, max_new_tokens=10)
    with pytest.raises(ContextLengthExceeded, match=r"up to 1001 tokens \(up to 990 in the m"):
        unsettled(asked, route=CAPPED, caller=CALLER, policy=REJECT)


def test_an_uncounted_prompt_reads_so_in_anthropics_words_too():
    asked = call(Endpoint.MESSAGES, 1000, max_new_tokens=1)
    with pytest.raises(ContextLengthExceeded, match="prompt is too long: up to 1000 tokens > 1000"):
        unsettled(asked, route=CAPPED, caller=CALLER, policy=REJECT)


def test_of_an_uncounted_prompt_claude_code_reads_how_much_output_fits():
    """It asks for less where the message has the three numbers in just this form."""
    numbers = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
    asked = call(Endpoint.MESSAGES, 900, max_new_tokens=200)
    with pytest.raises(ContextLengthExceeded, match="could not be counted") as refused:
        unsettled(asked, route=CAPPED, caller=CALLER, policy=REJECT)
    found = re.search(numbers, refused.value.message)
    assert found is not None
    assert found.groups() == ("900", "200", "1000")


def test_an_unstated_output_under_a_cap_is_what_the_cap_leaves():
    made = settle(call(), 900, route=CAPPED, caller=CALLER, policy=REJECT)
    assert made == Demand(900, exact=True, max_new_tokens=100)
    ids = call(Endpoint.CHAT, None, prompt_token_ids=900)
    assert bound(ids, route=CAPPED, caller=CALLER) == Demand(900, True, 100)
    made = unsettled(call(text_bytes=900), route=CAPPED, caller=CALLER, policy=REJECT)
    assert made == Demand(900, False, 100)
    by_key = limited(max_context_tokens=1000)
    made = settle(call(), 900, route=within(4000), caller=by_key, policy=REJECT)
    assert made.max_new_tokens == 100


def test_an_unstated_output_gets_half_of_a_cap_without_a_count():
    cap = within(2 * (100 + TEMPLATE_TOKENS), engine=10**6)
    made = bound(call(text_bytes=100), route=cap, caller=CALLER)
    assert made == Demand(100 + TEMPLATE_TOKENS, False, 100 + TEMPLATE_TOKENS)
    assert bound(call(text_bytes=101), route=cap, caller=CALLER) is None


def test_a_window_that_no_backend_told_is_held_here():
    route = Route("m", "m", "m", window_tokens=1000, widest_tokens=1000)
    with pytest.raises(ContextLengthExceeded):
        unsettled(call(text_bytes=1000), route=route, caller=CALLER, policy=REJECT)


# --- backends of several windows ------------------------------------------------------------------


def test_what_is_too_long_for_the_smallest_window_is_judged_by_the_largest():
    route = windows(1000, 1000, 4000, 4000)
    asked = call(text_bytes=100_000, max_new_tokens=500)
    assert bound(asked, route=route, caller=CALLER) is None
    fits = partial(settle, asked, route=route, policy=REJECT)
    assert fits(400, caller=CALLER) == Demand(400, True, 500)
    assert fits(3500, caller=CALLER) == Demand(3500, True, 500)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 4000 tokens"):
        fits(3501, caller=CALLER)
    with pytest.raises(ContextLengthExceeded, match="The limit of 2000 tokens is set for your"):
        fits(1501, caller=limited(max_context_tokens=2000))
    assert fits(1500, caller=limited(max_context_tokens=2000)) == Demand(1500, True, 500)


def test_ids_that_are_too_many_for_the_smallest_window_are_judged_by_the_largest():
    route = windows(1000, 1000, 4000, 4000)
    asked = call(Endpoint.COMPLETIONS, prompt_token_ids=3000, max_new_tokens=10)
    assert bound(asked, route=route, caller=CALLER) == Demand(3000, True, 10)
    with pytest.raises(ContextLengthExceeded, match="4000"):
        bound(structs.replace(asked, prompt_token_ids=4000), route=route, caller=CALLER)


def test_the_largest_window_is_held_here_where_the_pool_caps_it():
    route = windows(1000, 1000, 3000, 4000)
    answer = settle(call(text_bytes=9000), 2000, route=route, caller=CALLER, policy=REJECT)
    # An output that is not stated has what the cap leaves.
    assert answer == Demand(2000, True, 1000)


# --- the caller's own limits ----------------------------------------------------------------------


def test_a_callers_window_counts_where_it_is_smaller():
    small = limited(max_context_tokens=100)
    for window in (1000, None):
        with pytest.raises(ContextLengthExceeded, match="set for your API key"):
            settle(call(), 100, route=within(window), caller=small, policy=REJECT)
    with pytest.raises(ContextLengthExceeded) as caught:
        settle(call(), 100, route=within(50), caller=small, policy=REJECT)
    assert "API key" not in caught.value.message


@pytest.mark.parametrize("window", [10**6, None])
def test_more_output_than_the_key_may_have_is_refused_before_counting(window):
    capped = limited(max_output_tokens=10)
    asked = call(max_new_tokens=11)
    for check in (
        lambda: bound(asked, route=within(window), caller=capped),
        lambda: settle(asked, 1, route=within(window), caller=capped, policy=REJECT),
        lambda: unsettled(asked, route=within(window), caller=capped, policy=REJECT),
    ):
        with pytest.raises(RequestError, match=r"`max_tokens` is 11.*at most 10") as caught:
            check()
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
        assert caught.value.code != "context_length_exceeded"


@pytest.mark.parametrize("window", [10**6, None])
def test_more_output_than_the_key_may_have_is_lowered_where_the_pool_clamps(window):
    capped = limited(max_output_tokens=10)
    asked = call(max_new_tokens=32_000)
    for made in (
        bound(asked, route=within(window), caller=capped, policy=CLAMP),
        settle(asked, 1, route=within(window), caller=capped, policy=CLAMP),
        unsettled(asked, route=within(window), caller=capped, policy=CLAMP),
    ):
        assert made.max_new_tokens == 10
    tight = settle(asked, 95, route=within(100), caller=capped, policy=CLAMP)
    assert tight.max_new_tokens == 5


def test_the_field_that_the_client_used_is_named():
    asked = parsed(
        b"/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=11,
    )
    with pytest.raises(RequestError) as caught:
        bound(asked, route=within(None), caller=limited(max_output_tokens=10))
    assert caught.value.param == "max_completion_tokens"


def test_a_keys_output_limit_is_what_an_unstated_output_gets():
    capped = limited(max_output_tokens=10)
    assert bound(call(), route=within(10**6), caller=capped).max_new_tokens == 10
    assert unsettled(call(), route=within(None), caller=capped, policy=REJECT).max_new_tokens == 10
    tight = settle(call(), 95, route=within(100), caller=capped, policy=REJECT)
    assert tight.max_new_tokens == 5
    assert call(max_new_tokens=10).max_new_tokens == 10
    allowed = bound(call(max_new_tokens=10), route=within(10**6), caller=capped)
    assert allowed.max_new_tokens == 10


def test_a_keys_output_limit_below_sixteen_shrinks_an_unstated_completion():
    asked = parsed(b"/v1/completions", prompt="x")
    made = bound(asked, route=within(10**6), caller=limited(max_output_tokens=4))
    assert made.max_new_tokens == 4


def test_an_output_limit_says_nothing_to_what_only_reads():
    asked = call(Endpoint.EMBEDDINGS)
    assert bound(asked, route=within(10**6), caller=limited(max_output_tokens=1)) is not None


# --- the words ------------------------------------------------------------------------------------


def words(endpoint, prompt, output):
    fields = {} if output is None else {"max_new_tokens": output}
    with pytest.raises(ContextLengthExceeded) as caught:
        settle(call(endpoint, **fields), prompt, route=within(32768), caller=CALLER, policy=REJECT)
    return caught.value


@pytest.mark.parametrize(
    ("endpoint", "param"),
    [
        (Endpoint.CHAT, "messages"),
        (Endpoint.COMPLETIONS, "prompt"),
        (Endpoint.RESPONSES, "input"),
        (Endpoint.MESSAGES, "messages"),
    ],
)
def test_the_parameter_at_fault_is_the_endpoints_own(endpoint, param):
    assert words(endpoint, 40000, None).param == param
    assert words(endpoint, 32000, 2000).param == param


def test_a_chat_is_refused_with_the_numbers_and_the_words_that_clients_look_for():
    message = words(Endpoint.CHAT, 32000, 2048).message
    assert message.startswith("This model's maximum context length is 32768 tokens. ")
    assert "34048 tokens (32000 in the messages, 2048 in the completion)" in message
    assert "reduce the length of the messages or completion" in message
    assert "at most 768 tokens" in message


def test_a_prompt_that_is_too_long_alone_is_not_blamed_on_the_output():
    message = words(Endpoint.CHAT, 40123, 2048).message
    assert "your messages resulted in 40123 tokens. " in message
    assert "completion" not in message


def test_a_completion_is_refused_with_the_word_prompt():
    message = words(Endpoint.COMPLETIONS, 40123, None).message
    assert "your prompt resulted in 40123 tokens" in message
    assert "reduce the length of the prompt" in message


def test_responses_clients_find_the_context_window():
    """Those of OpenAI's API by its words, those of vLLM's (LiteLLM) by those of chats."""
    message = words(Endpoint.RESPONSES, 40123, None).message
    assert message == (
        "Your input exceeds the context window of this model. This model's maximum context length is "
        "32768 tokens. However, your input resulted in 40123 tokens. Please reduce the length of the input."
    )


def test_anthropic_clients_find_their_own_words():
    assert words(Endpoint.MESSAGES, 40123, 10).message == (
        "prompt is too long: 40123 tokens > 32768 maximum"
    )
    message = words(Endpoint.MESSAGES, 32000, 2048).message
    assert "input length and `max_tokens` exceed context limit: 32000 + 2048 > 32768" in message


# --- backends of several windows, and a smaller one of a key or a pool ------------------------------


@pytest.mark.parametrize(
    ("route", "caller"),
    [
        (windows(8192, 8192, 32_768, 32_768), limited(max_context_tokens=16_384)),
        (windows(8192, 8192, 16_384, 32_768), CALLER),
    ],
    ids=["key", "pool"],
)
def test_a_window_between_those_of_the_engines_holds_at_the_larger_one(route, caller):
    short = parsed(b"/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    found = settle(short, 2000, route=route, caller=caller, policy=REJECT)
    assert found.max_new_tokens == 8192 - 2000  # fits wherever it goes
    long = parsed(b"/v1/chat/completions", messages=[{"role": "user", "content": "word " * 40_000}])
    with pytest.raises(ContextLengthExceeded):
        unsettled(long, route=route, caller=caller, policy=REJECT)
    assert bound(long, route=route, caller=caller) is None  # it is counted
