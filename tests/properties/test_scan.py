"""The scan agrees with a JSON parser, however a body is cut into parts."""

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.calls import ENDPOINTS, parse_call, upstream_body
from gateway.wire.large import completed, spliced
from gateway.wire.objects import fields_of
from gateway.wire.scan import BodyScan
from gateway.wire.small import check_depth

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["x" * 300, "é" * 200, '\n"\\' * 120, "😀" * 90, "\u2028/\b" * 100]),
)
_VALUES = st.recursive(
    st.one_of(_SCALARS, st.lists(st.integers(-9, 10**6), max_size=60)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=20,
)
_OBJECTS = st.dictionaries(
    st.sampled_from(["model", "prompt", "input", "messages", "é", "x"]), _VALUES
)


def scanned(body, sizes):
    """Scan a body in parts of these sizes."""
    found = BodyScan()
    start = 0
    while start < len(body):
        size = sizes[start % len(sizes)]
        found.feed(body[start : start + size])
        start += size
        while found.step():
            pass
    found.end()
    while found.step():
        pass
    return found


def written(value, indent, ascii_only):
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")


def uncut(skim, whole):
    """Compare a value with its skim: the same but for what was cut from strings and integers."""
    if isinstance(skim, str):
        return skim == whole or (skim.endswith("\0") and whole.startswith(skim[:-1]))
    if isinstance(skim, list):
        some, others = ([x for x in each if type(x) is not int] for each in (skim, whole))
        return len(some) == len(others) and all(map(uncut, some, others))
    if isinstance(skim, dict):
        return len(skim) == len(whole) and all(map(uncut, skim.values(), whole.values()))
    return skim == whole


_SIZES = st.one_of(
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
    st.lists(st.integers(60_000, 90_000), min_size=1),
)


@given(
    value=_OBJECTS, indent=st.sampled_from([None, 1, 70]), ascii_only=st.booleans(), sizes=_SIZES
)
@settings(max_examples=300, deadline=None)
def test_the_skim_is_the_body_cut_short_and_fields_are_where_they_are_said_to_be(
    value, indent, ascii_only, sizes
):
    body = written(value, indent, ascii_only)
    found = scanned(body, sizes)
    assert bytes(found.body) == body
    value = json.loads(body)
    assert uncut(json.loads(found.skim()), value)
    assert found.fields.keys() == value.keys()
    for name, (start, end) in found.fields.items():
        assert json.loads(body[start:end]) == value[name]
    for name, ids in found.tally.ids.items():
        assert ids.own == sum(type(each) is int for each in value[name])
        lists = [each for each in value[name] if isinstance(each, list)]
        assert ids.inner == [sum(type(each) is int for each in one) for one in lists]


@given(value=_OBJECTS, indent=st.sampled_from([None, 1]), sizes=_SIZES)
@settings(max_examples=200, deadline=None)
def test_it_makes_no_difference_how_a_body_comes(value, indent, sizes):
    body = written(value, indent, ascii_only=False)
    whole, parts = scanned(body, [len(body)]), scanned(body, sizes)
    assert (parts.fields, parts.tally.values, parts.tally.ids) == (
        whole.fields,
        whole.tally.values,
        whole.tally.ids,
    )
    assert uncut(json.loads(parts.skim()), json.loads(body))


@given(data=st.data(), value=_OBJECTS, sizes=_SIZES)
@settings(max_examples=500, deadline=None)
def test_a_broken_body_is_refused_by_the_scan_or_by_its_skim_as_by_a_parser(data, value, sizes):
    body = bytearray(written(value, None, ascii_only=False))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.sampled_from(b'{}[]",:\\ 019-.eEtnfux\n\x00\xff\xc3'))
    body = bytes(body)
    try:
        msgspec.json.decode(body.decode())
        valid = True
    except (msgspec.DecodeError, UnicodeDecodeError):
        valid = False
    try:
        skim = scanned(body, sizes).skim()
        skim.decode()
        msgspec.json.decode(skim)
        accepted = True
    except (RequestError, msgspec.DecodeError):
        accepted = False
    assert accepted is valid


_JSON = [spec for spec in ENDPOINTS.values() if not spec.multipart]


@given(
    spec=st.sampled_from(_JSON),
    more=st.dictionaries(
        st.sampled_from(["stream", "max_tokens", "n", "store", "x"]), _SCALARS, max_size=3
    ),
    indent=st.sampled_from([None, 1]),
    renamed=st.booleans(),
    limit=st.sampled_from([None, 3]),
)
@settings(max_examples=300, deadline=None)
def test_a_large_body_is_understood_and_rewritten_as_a_small_one_is(
    spec, more, indent, renamed, limit
):
    asked = {
        "model": "m",
        **more,
        "messages": [{"role": "user", "content": "hi"}],
        "input": "hi",
        "prompt": "hi",
    }
    body = written(asked, indent, ascii_only=True)
    try:
        small = parse_call(spec, body)
    except RequestError:
        return
    found = scanned(body, [100])
    large = completed(parse_call(spec, found.skim()), found)
    for field in small.__struct_fields__:
        if field not in ("body", "fields", "places"):
            assert getattr(large, field) == getattr(small, field), field
    model = "other" if renamed else "m"
    changed = [
        upstream_body(call, served_model=model, inject_usage=True, max_new_tokens=limit)
        for call in (small, large)
    ]
    assert json.loads(changed[0]) == json.loads(changed[1])
    if changed[0] == body:
        assert changed[1] is large.body


@given(
    prompt=st.one_of(
        st.text(max_size=20).map(lambda text: text * 9000),
        st.lists(st.integers(0, 10**6), min_size=1, max_size=3000),
        st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=900), min_size=1, max_size=9),
        st.lists(st.text(max_size=9).map(lambda text: text * 5000), min_size=1, max_size=9),
    )
)
@settings(max_examples=60, deadline=None)
def test_the_prompts_of_a_large_body_are_measured_as_those_of_a_small_one(prompt):
    spec = next(each for each in _JSON if each.endpoint is Endpoint.COMPLETIONS)
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    small, found = parse_call(spec, body), scanned(body, [100_000])
    large = completed(parse_call(spec, found.skim()), found)
    assert (large.choices, large.prompt_token_ids) == (small.choices, small.prompt_token_ids)
    if small.prompt_token_ids is not None:
        assert large.longest_ratio == small.longest_ratio
    assert large.text_bytes >= small.text_bytes
    if not isinstance(prompt, list):
        assert large.text_bytes == small.text_bytes


@given(
    fields=st.dictionaries(st.sampled_from(["model", "x", "y"]), _SCALARS),
    changes=st.dictionaries(st.sampled_from(["model", "x", "z"]), st.integers(0, 9)),
    indent=st.sampled_from([None, 1]),
)
@settings(max_examples=200, deadline=None)
def test_a_splice_changes_the_fields_it_is_told_and_keeps_the_others(fields, changes, indent):
    body = written(fields, indent, ascii_only=True) + b"\n "
    found = scanned(body, [50])
    raw = {name: msgspec.Raw(b"%d" % value) for name, value in changes.items()}
    assert json.loads(spliced(body, found.fields, raw)) == json.loads(body) | changes


_BRACKETS = st.recursive(
    st.one_of(st.integers(0, 9), st.text('[]{}"\\ab', max_size=6)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(value=_BRACKETS, deep=st.integers(55, 70))
@settings(max_examples=300, deadline=None)
def test_depth_is_told_whatever_strings_hold(value, deep):
    def depth(each):
        inner = each.values() if isinstance(each, dict) else each
        return 1 + max(map(depth, inner), default=0) if isinstance(each, list | dict) else 0

    for _ in range(deep):
        value = [value, "]"] if deep % 2 else {'"[': value}
    body = json.dumps({"x": value}).encode()
    for look in (
        lambda body: check_depth(body, fields_of(body)),
        lambda body: scanned(body, [len(body)]),
    ):
        try:
            look(body)
            accepted = True
        except RequestError:
            accepted = False
        assert accepted is (depth(value) < 64)
