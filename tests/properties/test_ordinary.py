"""Ordinary bodies are read by a shortcut. It never says anything else than a look at each field does."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.asked import Media, Overrides, UnknownFields
from gateway.core.errors import GatewayError
from gateway.wire.calls import ENDPOINTS, measured_call, parse_at_once, parse_call
from gateway.wire.ordinary import ordinary, short_chat
from gateway.wire.parameters import effective, judge
from gateway.wire.peek import take_apart
from gateway.wire.small import is_small
from tests.parametercases import BASE, CASES, CHAT, CLIENTS, COMPLETIONS, HI, TEXT, tool

JSON = b"application/json"
STYLES = [
    {"separators": (",", ":")},
    {"separators": (",", ":"), "ensure_ascii": False},
    {},
    {"indent": 2},
    {"separators": (", ", " : ")},
]
POLICIES = [
    effective(layers)
    for layers in (
        [],
        [("parameters", Overrides(unknown_fields=UnknownFields.REFUSE, media=Media.DATA))],
        [("parameters", Overrides(deny=frozenset({"tools", "user", "seed"})))],
        [("parameters", Overrides(max=(("tools", 1), ("tools_bytes", 9000), ("n", 0))))],
    )
]


def outcome(read):
    """What comes of a body: its call, and under each policy whether it passes; or the refusal."""
    try:
        call = read()
    except GatewayError as error:
        return told(error)
    # Whether it was taken apart, or need not be, is no matter.
    known = structs.replace(call, fields=None, messages_only=False)
    return known, [judged(call, each) for each in POLICIES]


def judged(call, policy):
    try:
        judge(call, policy)
    except GatewayError as error:
        return told(error)
    return None


def told(error):
    return type(error), error.status, error.message, error.param, error.code


def check(path, body):
    spec = ENDPOINTS[path.encode()]
    expected = outcome(lambda: measured_call(spec, body, JSON, take_apart(body)))
    assert outcome(lambda: parse_call(spec, body)) == expected
    if is_small(body):
        assert outcome(lambda: parse_at_once(spec, body, JSON)) == expected


def deep(levels, kind=dict):
    value = "x"
    for _ in range(levels):
        value = {"a": value} if kind is dict else [value]
    return value


TEXTS = st.sampled_from(
    ["", "hi", 'a: "content":', "[", "]}" * 40, "{" * 70, "é\u2028", '\\"', "x" * 2100, "text"]
)
ODDITIES = [
    *(None, True, False, 0, 1, -1, 0.5, 2.1, -2.1, 100.1, 2**31, 2**63, 2**70, 1e300, float("inf")),
    *(-0.0, 1e-9, "1", "true", "auto", "x" * 2100, [], {}, [1], {"a": 1}, {"a": "b"}),
    *(deep(levels, kind) for levels in range(61, 66) for kind in (dict, list)),
]
PARTS = [
    {"type": "text", "text": "a"},
    {"text": "a"},
    {"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}},
    {"type": "image_embeds", "image_embeds": "AA"},
    {"type": 5},
    "a",
]
ODD, PART = st.sampled_from(ODDITIES), st.sampled_from(PARTS)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": []}'}}
TEXT_PARTS = st.fixed_dictionaries(
    {"type": st.just("text"), "text": TEXTS},
    optional={
        "cache_control": st.sampled_from([{"type": "ephemeral"}, {"type": "x", "ttl": "1h"}])
    },
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": TEXTS | st.none() | st.lists(TEXT_PARTS, max_size=2),
    },
    optional={
        "name": TEXTS,
        "tool_calls": st.sampled_from([None, [], [CALL], [CALL, CALL]]),
        "tool_call_id": TEXTS,
        "refusal": st.none(),
        "annotations": st.sampled_from([[], None, [None]]),
    },
)
TOOLS = st.one_of(
    st.just(tool(description="d", properties={"a": {"type": "string", "enum": ["[", "}"]}})),
    st.just(tool(pattern="(a+)+")),
    st.just(tool(description="y" * 9000)),
    st.builds(deep, st.integers(60, 64), st.sampled_from([dict, list])),
)
RANGE = st.sampled_from([0, 0.0, 0.7, 1, 1.0, None])
LIMIT = st.sampled_from([0, 1, 100, 2**40, None])
SWITCH = st.sampled_from([True, False, None])
USUAL = {
    "model": st.sampled_from(["m", "é", "", None]),
    **dict.fromkeys(["service_tier", "user", "reasoning_effort"], TEXTS | st.none()),
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "seed"], LIMIT),
    **dict.fromkeys(["stream", "store", "parallel_tool_calls", "skip_special_tokens"], SWITCH),
    **dict.fromkeys(["temperature", "top_p", "min_p", "frequency_penalty"], RANGE),
    **dict.fromkeys(["presence_penalty", "repetition_penalty", "top_k"], RANGE),
    **dict.fromkeys(["logit_bias", "logprobs", "response_format", "stop"], st.none()),
    "n": st.just(1),
    "top_logprobs": st.none(),
    "tool_choice": st.sampled_from(["auto", "none", None]),
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
    "tools": st.lists(TOOLS, max_size=3),
    "stream_options": st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats"]), SWITCH
    ),
}
NAMES = sorted(USUAL)
UNUSUAL = ["priority", "ignore_eos", "echo", "suffix", "input", "truncate_prompt_tokens", "x", "é"]
PAIRS = [
    b'"n":1',
    b'"content":"b"',
    b'"model": "m"',
    b'"\\u006e":1',
    b'"type" : "text"',
    b'"type":"text"',
    b'"text":""',
    b'"x":[]',
]


@st.composite
def bodies(draw, prompt, value):
    """A body of usual fields: as it should be, or with one thing in it that is odd."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    fields = {prompt: draw(value), **{name: draw(USUAL[name]) for name in names}}
    odd = draw(st.integers(0, 11))
    if odd == 0:
        fields[draw(st.sampled_from([*fields, *NAMES, *UNUSUAL]))] = draw(ODD)
    elif odd == 1 and prompt == "messages" and fields[prompt]:
        name = draw(st.sampled_from(["content", "output", "role", "name", "tool_calls", "x"]))
        fields[prompt][-1][name] = draw(ODD | st.lists(PART, max_size=2) | PART)
    elif odd == 2:
        fields["tools"] = [draw(ODD)]
    fields = {name: fields[name] for name in draw(st.permutations(list(fields)))}
    body = json.dumps(fields, **draw(st.sampled_from(STYLES))).encode("utf-8", "replace")
    if odd == 3:  # a name comes twice, perhaps
        opens = [at for at in range(len(body)) if body[at : at + 1] == b"{"]
        at = draw(st.sampled_from(opens)) + 1
        comma = b"" if body[at : at + 1] == b"}" else b","
        body = body[:at] + draw(st.sampled_from(PAIRS)) + comma + body[at:]
    elif odd == 4:
        at = draw(st.integers(0, len(body) - 1))
        byte = draw(st.sampled_from([b'"', b"{", b"}", b",", b"\\", b"\x00", b"\xff", b"9"]))
        body = body[:at] + byte + body[at + 1 :]
    return body


CHATS = bodies("messages", st.lists(MESSAGES, max_size=3))
PROMPTS = bodies("prompt", TEXTS)


def same(path, body):
    try:
        take_apart(body)
    except GatewayError as refusal:
        expected = told(refusal)
        spec = ENDPOINTS[path.encode()]
    else:
        return check(path, body)
    assert outcome(lambda: parse_call(spec, body)) == expected
    assert outcome(lambda: parse_at_once(spec, body, JSON)) == expected


@given(body=CHATS)
@settings(max_examples=600, deadline=None)
@example(body=b'{"\xffessages":[],"logit_bias":null}')
def test_a_chat_is_read_alike_both_ways(body):
    same(CHAT, body)


@given(body=PROMPTS)
@settings(max_examples=300, deadline=None)
@example(body=b'{"prompt": "a", "max_completion_tokens": 5}')
def test_a_completion_is_read_alike_both_ways(body):
    same(COMPLETIONS, body)


@pytest.mark.parametrize("style", STYLES)
def test_what_the_policy_is_there_for_is_read_alike_both_ways(style):
    for _, path, fine, wrong, _ in CASES:
        for fields in (fine, wrong):
            body = {"model": "m", **BASE[path], **fields}
            same(path, json.dumps(body, **style).encode())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_read_alike_both_ways(client, style):
    path, fields = CLIENTS[client]
    same(path, json.dumps({"model": "m", **BASE[path], **fields}, **style).encode())


@pytest.mark.parametrize("name", [*NAMES, *UNUSUAL])
def test_an_odd_value_is_told_alike_both_ways(name):
    for value in ODDITIES:
        same(CHAT, json.dumps({"messages": HI, name: value}).encode())
        same(COMPLETIONS, json.dumps({"prompt": "hi", name: value}).encode())


@pytest.mark.parametrize("part", [*PARTS, *ODDITIES])
@pytest.mark.parametrize("text", ["hi", "x" * 3000])
def test_odd_content_is_told_alike_both_ways(part, text):
    message = {"role": "user", "content": text}
    for odd in (part, [part]):
        for name in ("content", "output", "tool_calls", "annotations", "refusal", "x"):
            same(CHAT, json.dumps({"messages": [message, {**message, name: odd}]}).encode())
        same(CHAT, json.dumps({"messages": [message, odd]}).encode())
        same(COMPLETIONS, json.dumps({"prompt": [text, odd]}).encode())
    same(CHAT, json.dumps({"messages": {"a": text, "b": part}}).encode())


@pytest.mark.parametrize("text", ["hi", "x" * 3000])
@pytest.mark.parametrize("more", [{}, {"tools": []}, {"stream_options": {"include_usage": True}}])
def test_messages_of_another_shape_are_told_alike_both_ways(text, more):
    message = {"role": "user", "content": text}
    for odd in (
        text,
        text + "{",
        [text],
        [[message]],
        [text, message],
        message,
        [[text]],
        {"a": message},
    ):
        same(CHAT, json.dumps({"messages": odd, **more}).encode())
        same(CHAT, json.dumps({**more, "messages": odd}).encode())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("length", [2, 1900, 2100])
def test_a_name_that_comes_twice_is_told_alike_both_ways(pair, length):
    text, space = b'"%b"' % (b"x" * length), b" "
    for gap in (b"", space):
        message = b'{"role":%b"user",%b"content":%b%b,%b%b}' % (gap, gap, gap, text, gap, pair)
        same(CHAT, b'{"n":%b1,%b"messages":%b[%b]}' % (gap, gap, gap, message))
        same(CHAT, b'{"n":%b1,%b"messages":%b[{"role":"user"},%b]}' % (gap, gap, gap, message))
        same(
            CHAT,
            b'{"n":%b1,%b"messages":%b[{"role":"","content":%b}],%b}' % (gap, gap, gap, text, pair),
        )
        same(COMPLETIONS, b'{"n":%b1,%b"prompt":%b%b,%b}' % (gap, gap, gap, text, pair))
        part = b'{"type":%b"text",%b"text":%b%b,%b}' % (gap, gap, gap, text, pair)
        same(
            CHAT,
            b'{"n":%b1,%b"messages":%b[{"role":"user","content":[%b]}]}' % (gap, gap, gap, part),
        )


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("levels", range(58, 67))
@pytest.mark.parametrize("text", ["hi", "x" * 3000])
def test_what_is_just_too_deep_is_refused_both_ways(levels, kind, text):
    message = {"role": "user", "content": text}
    value = deep(levels, kind)
    same(CHAT, json.dumps({"messages": [message], "tools": [{}, value]}).encode())
    same(CHAT, json.dumps({"messages": [{**message, "x": value}]}).encode())
    same(CHAT, json.dumps({"messages": [message], "user": value}).encode())


def is_ordinary(path, fields):
    body = json.dumps(fields, separators=(",", ":")).encode()
    return ordinary(ENDPOINTS[path.encode()].endpoint, body, take_apart(body)) is not None


def test_the_shortcut_is_taken_by_what_most_clients_send():
    chat = {"model": "m", "messages": HI, "temperature": 0, "max_tokens": 5, "stream": True}
    assert is_ordinary(CHAT, chat)
    assert is_ordinary(CHAT, {**chat, "messages": [{"role": "user", "content": "x" * 20_000}]})
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    agent = {**chat, "messages": [*HI, reply], "tools": [tool()] * 500, "tool_choice": "auto"}
    assert is_ordinary(CHAT, agent)
    assert is_ordinary(COMPLETIONS, {"prompt": "x" * 20_000, "max_tokens": 5, "top_k": -1})
    parts = [{"role": "user", "content": [TEXT, {**TEXT, "cache_control": {"type": "ephemeral"}}]}]
    assert is_ordinary(CHAT, {**chat, "messages": parts})
    assert is_ordinary(CHAT, {**chat, "messages": parts * 50})
    assert not is_ordinary(CHAT, {**chat, "messages": [{"role": "user", "content": [TEXT, {}]}]})
    assert not is_ordinary(CHAT, {**chat, "logit_bias": {"1": 1}})


@pytest.mark.parametrize("style", STYLES[:3])
def test_a_short_chat_is_read_in_one_go(style):
    chat = {"model": "m", "messages": HI, "temperature": 0, "top_p": 0.9, "stop": None}

    def is_read(**more):
        return short_chat(json.dumps({**chat, **more}, **style).encode()) is not None

    assert is_read()
    assert is_read(stream=True, stream_options={"include_usage": True}, max_tokens=5)
    assert not is_read(tools=[tool()])
    assert not is_read(n=2)
    assert short_chat(b'{"n":1,"messages":[],"n":1}') is None
    assert short_chat(b'{"messages":[{"role":"user","role":"user"}]}') is None
