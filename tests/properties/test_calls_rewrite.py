"""Whatever a client sends: read without surprises, and changed only where that is asked."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import RequestError
from gateway.wire.calls import ENDPOINTS, parse_call, upstream_body

CHAT = ENDPOINTS[b"/v1/chat/completions"]

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
_NAMES = [
    *("messages", "prompt", "input", "tools", "stream", "n", "stream_options", "max_tokens"),
    *("max_output_tokens", "truncation", "chat_template_kwargs", "store", "background"),
    "previous_response_id",
]
_EXTRA = st.dictionaries(
    st.text(min_size=1, max_size=6).map(lambda s: "x-" + s), _VALUES, max_size=4
)


@given(
    extra=_EXTRA,
    stream=st.sampled_from([True, False, None]),
    limit=st.sampled_from([{}, {"max_tokens": 9}, {"max_completion_tokens": 9}]),
    options=st.sampled_from([{}, {"stream_options": {"include_usage": False, "other": [1]}}]),
    served=st.sampled_from(["m", "other"]),
    inject=st.booleans(),
    ids=st.booleans(),
    clamp=st.sampled_from([None, 3, 9]),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
@settings(max_examples=300, deadline=None)
def test_a_rewrite_changes_what_it_must_and_nothing_else(
    extra, stream, limit, options, served, inject, ids, clamp, ascii_only, indent
):
    messages = [{"role": "user", "content": "é\n"}]
    fields = {"model": "m", "messages": messages, "stream": stream, **limit, **options, **extra}
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    call = msgspec.structs.replace(parse_call(CHAT, body), tells_ids=ids)
    out = upstream_body(call, served_model=served, inject_usage=inject, max_new_tokens=clamp)

    expected = json.loads(body)
    expected["model"] = served
    if inject and stream:
        expected["stream_options"] = {**options.get("stream_options", {}), "include_usage": True}
    if ids:
        expected["return_token_ids"] = True
    if clamp is not None and clamp != call.max_new_tokens:
        expected[call.max_new_field or "max_completion_tokens"] = clamp
    assert json.loads(out) == expected
    if expected == json.loads(body):
        assert out is body
    before = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    after = msgspec.json.decode(out, type=dict[str, msgspec.Raw])
    for name in before:
        if name not in ("model", "stream_options", "max_tokens", "max_completion_tokens"):
            assert bytes(after[name]) == bytes(before[name])


@pytest.mark.parametrize(
    "more",
    [
        b"",
        b" ",
        b',"stream_options":null',
        b',"stream_options":{"continuous_usage_stats":true}',
        b',"user":"\\"stream_options\\""',
    ],
)
@pytest.mark.parametrize("ids", [True, False])
def test_what_is_put_behind_a_body_is_what_writing_it_anew_gives(more, ids):
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"stream":true' + more + b"}"
    )
    call = msgspec.structs.replace(parse_call(CHAT, body), tells_ids=ids)
    out = upstream_body(call, served_model="m", inject_usage=True)
    anew = upstream_body(call, served_model="m", inject_usage=True, max_new_tokens=7)
    assert json.loads(anew) == json.loads(out) | {"max_completion_tokens": 7}
    assert json.loads(out)["stream_options"] == {"include_usage": True}
    assert out.count(b'"stream_options":') == 1
    assert (b"return_token_ids" in out) is ids


_JSON = [spec for spec in ENDPOINTS.values() if not spec.multipart]


@given(spec=st.sampled_from(_JSON), body=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(spec, body):
    with suppress(RequestError):
        assert parse_call(spec, body).body is body


@given(spec=st.sampled_from(_JSON), data=st.data())
@settings(max_examples=500, deadline=None)
def test_any_json_is_read_or_refused(spec, data):
    fields = data.draw(st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5))
    body = json.dumps({"model": "m", **fields}).encode()
    try:
        call = parse_call(spec, body)
    except RequestError:
        return
    assert call.body is body
    assert call.choices >= 1
    out = json.loads(upstream_body(call, served_model="s", inject_usage=True, max_new_tokens=1))
    assert out["model"] == "s"
