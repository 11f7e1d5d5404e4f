"""A large body is bounded, cut short for the decoder, and its fields are found."""

import json

import pytest

from gateway.core.errors import RequestError
from gateway.wire import scan
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.peek import take_apart
from gateway.wire.scan import BodyScan
from gateway.wire.small import check_depth, is_small


def run(found):
    while found.step():
        pass


def scanned(body, part=256 * 1024):
    found = BodyScan()
    for start in range(0, len(body), part):
        found.feed(body[start : start + part])
        run(found)
    found.end()
    run(found)
    return found


def refused(body):
    with pytest.raises(RequestError) as caught:
        scanned(body)
    return caught.value


def within(inside, field=b"messages"):
    return b'{"model": "m", "' + field + b'": [' + inside + b"]}"


@pytest.mark.parametrize(
    ("unit", "named"),
    [
        (b"{},", "`messages` holds too many values: at most 100,000"),
        (b"[],", "`messages` holds too many values"),
        (b'"",', "`messages` holds too many values"),
        (b"1.5,", "`messages` holds too many values"),
        (b"null,", "`messages` holds too many values"),
        (b"[1],", "`messages` holds too many values"),
        (b'{"a":1},', "`messages` holds too many values"),
        (b",", "`messages` holds too many values"),
    ],
)
def test_what_holds_too_many_values_is_refused_before_it_is_read_to_its_end(unit, named):
    found = BodyScan()
    found.feed(within(unit * 110_000))
    with pytest.raises(RequestError, match=named) as caught:
        run(found)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("unit", [b"1,", b"-7 , "])
def test_more_token_ids_than_any_window_holds_are_refused(unit):
    found = BodyScan()
    found.feed(within(unit * 4_300_000, b"prompt"))
    with pytest.raises(RequestError, match="`prompt` holds too many integers: at most 4,194,304"):
        run(found)


def test_too_many_fields_are_no_fault_of_one_of_them():
    error = refused(b'{"model": "m", ' + b'"a": 1,' * 60_000 + b'"b": 1}')
    assert error.param is None
    assert error.message.startswith("The body holds too many values")


def test_one_step_is_little_work_whatever_comes():
    for unit in (b"{},", b'"",', b'{"a":[1]},'):
        found = BodyScan()
        found.feed(within(unit * 20_000))
        steps, before = 0, 0
        while found.step():
            assert found.tally.values - before <= 2000
            steps, before = steps + 1, found.tally.values
        assert steps > 0
    found = BodyScan()
    found.feed(within(b'"' + b"\\n" * (1 << 20) + b'"'))
    assert sum(iter(found.step, False)) >= (2 << 20) // (256 * 1024)


def told_by_its_fields(body):
    check_depth(body, take_apart(body))


@pytest.mark.parametrize("depth", [64, 65])
@pytest.mark.parametrize("brackets", [b"[]", b"{}"])
def test_depth_is_bounded_by_number_whoever_reads(depth, brackets):
    inside = brackets[:1] if brackets == b"[]" else b'{"a":'
    nested = inside * (depth - 1) + b"1" + brackets[1:] * (depth - 1)
    body = b'{"x": ' + nested + b', "y": "[[[{{{ \\" ]"}'
    for look in (scanned, told_by_its_fields):
        if depth == 64:
            look(body)
        else:
            with pytest.raises(RequestError, match="at most 64 levels"):
                look(body)


def test_brackets_in_strings_are_no_depth():
    body = json.dumps({"x": ["[" * 500, "{" * 500, '"[' * 500, "\\"], "y": [[]]}).encode()
    told_by_its_fields(body)
    scanned(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "x\xff"}',
        b'{"a": "\xc3',
        b'{"a": "\xed\xa0\x80"}',
        '{"a": "ü"}'.encode("utf-16"),
        b'{"a": "' + b"x" * 200_000 + b'\n"}',
        b'{"a": "' + b"x" * 200_000 + b'\\x"}',
        b'{"a": "' + b"x" * 200_000 + b'\\u00g0"}',
        b'{"a": "' + b"x" * 200_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": [}',
        b"]",
    ],
)
@pytest.mark.parametrize("part", [7, 256 * 1024])
def test_what_the_decoder_would_not_see_is_judged_by_the_scan(body, part):
    with pytest.raises(RequestError) as caught:
        scanned(body, part)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_long_string_is_cut_and_says_so():
    text = "data:image/png;base64," + "A" * (1 << 20)
    body = json.dumps({"model": "m", "messages": [{"content": text}], "stream": True}).encode()
    found = scanned(body)
    skim = json.loads(found.skim())
    assert (skim["model"], skim["stream"]) == ("m", True)
    cut = skim["messages"][0]["content"]
    assert cut.endswith("\0")
    assert text.startswith(cut[:-1])
    assert scan.KEPT_TEXT_BYTES - 8 <= len(cut) <= scan.KEPT_TEXT_BYTES + 1
    start, end = found.fields["messages"]
    assert json.loads(bytes(found.body[start:end]))[0]["content"] == text


@pytest.mark.parametrize("char", ["é", "😀", "\n", '"', "\\"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("before", range(6))
def test_a_cut_leaves_whole_characters(char, ascii_only, before):
    text = "x" * before + char * 40_000
    body = json.dumps({"prompt": text}, ensure_ascii=ascii_only).encode()
    cut = json.loads(scanned(body).skim())["prompt"]
    assert text.startswith(cut[:-1])
    cut.encode()  # no half of a pair
    assert len(cut) > 2000


def test_many_strings_of_some_length_make_no_long_skim():
    body = json.dumps({"input": ["x" * 30_000] * 1500}).encode()
    found = scanned(body)
    assert len(found.skim()) < scan.LATE_SKIM_BYTES + (1 << 20)


def test_lists_of_integers_are_counted_and_cut():
    ids = list(range(100_000))
    body = json.dumps({"model": "m", "prompt": ids}).encode()
    found = scanned(body)
    assert found.tally.ids["prompt"].own == 100_000
    assert len(found.skim()) < 2000
    assert all(type(each) is int for each in json.loads(found.skim())["prompt"])
    found = scanned(json.dumps({"prompt": [ids[:5], ids[:70_000], [], [7]]}).encode())
    assert found.tally.ids["prompt"].inner == [5, 70_000, 0, 1]
    assert found.tally.ids["prompt"].own == 0
    assert scanned(json.dumps({"prompt": [*ids[:9], 1.5, *ids]}).encode()).skim().count(b"1.5") == 1


def test_white_space_is_left_out():
    body = b'{"a"' + b" " * 100_000 + b":" + b"\n" * 300_000 + b"1 " + b"\t" * 1000 + b', "b": 2}'
    found = scanned(body)
    assert json.loads(found.skim()) == {"a": 1, "b": 2}
    assert len(found.skim()) < 5000


def test_fields_are_found_wherever_one_read_ends_and_the_next_begins():
    body = b'{"model" : "m" ,\n"cache_salt"\t\n: "s", "messages" :[1 , 2], "stream": true }'
    whole = scanned(body).fields
    assert list(whole) == ["model", "cache_salt", "messages", "stream"]
    for part in range(1, len(body)):
        assert scanned(body, part).fields == whole


def test_white_space_between_two_values_still_divides_them():
    skim = scanned(b'{"a": [1' + b" " * 1000 + b"2]}").skim()
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(skim)


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (b"{}", True),
        (b"{" * 3000, True),
        (b"{" * 1000 + b" " * 3000, True),
        (b"{" * 1001 + b" " * 3000, False),
        (b"[" * 1001 + b" " * 3000, False),
        (b" " * 65_536, True),
        (b" " * 65_537, False),
    ],
)
def test_a_small_body_has_few_bytes_and_few_containers(body, small):
    assert is_small(body) is small


@pytest.mark.parametrize("field", ["tools", "response_format", "structured_outputs", "stop"])
@pytest.mark.parametrize("gap", [b"", b" " * 70_000])
def test_what_the_policy_judges_by_its_size_is_not_cut(field, gap):
    text = b"x" * 100_000
    body = b'{"model": "m", "' + field.encode() + b'"' + gap + b': [{"a": "' + text + b'"}]}'
    assert json.loads(scanned(body).skim())[field] == [{"a": text.decode()}]


def test_what_is_not_cut_has_a_bound_of_its_own():
    error = refused(b'{"model": "m", "tools": ["' + b"x" * (5 << 20) + b'"]}')
    assert (error.status, error.param, error.code) == (400, "tools", "string_above_max_length")


def test_integers_that_are_no_token_ids_are_values_and_stay():
    ids = list(range(5000))
    found = scanned(json.dumps({"model": "m", "stop_token_ids": ids}).encode())
    assert json.loads(found.skim())["stop_token_ids"] == ids
    assert found.tally.values > 5000


@pytest.mark.parametrize("before", [65_530, 65_534, 65_535, 65_536])
@pytest.mark.parametrize("value", [b"1234", b"false", b'"text"'])
def test_white_space_before_a_value_does_not_cut_it(before, value):
    found = scanned(b'{"max_tokens":' + b" " * before + value + b', "n": 1}')
    start, end = found.fields["max_tokens"]
    assert bytes(found.body[start:end]) == value
    assert found.size("n") == 1


@pytest.mark.parametrize("part", [1 << 20, 40_000])
@pytest.mark.parametrize(
    "name",
    [
        b'"logit_bias"' + b" " * 70_000,
        b" " * 65_530 + b'"logit_bias"',
        b" " * (65_536 - 12) + b'"logit_bias"',
        b" " * 60_000 + b'"logit_bias"' + b" " * 6_000,
        b'"' + b"".join(b"\\u%04x" % ord(each) for each in "logit_bias" * 5) + b'"',
    ],
)
def test_no_way_to_write_a_name_hides_its_field(name, part):
    found = scanned(b'{"model": "m",' + name + b':{"7": 100}, "n": 1}', part)
    assert found.fields.keys() == json.loads(found.body).keys()


def test_a_schema_in_a_message_that_is_too_long_to_be_seen_is_refused():
    def parsed(length):
        tool = {"name": "f", "input_schema": {"const": "x" * length}, "strict": True}
        block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
        messages = [
            {"role": "system", "content": [block]},
            {"role": "user", "content": "x" * 70_000},
        ]
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
        return parse_call(ENDPOINTS[b"/v1/messages"], scanned(body).skim())

    assert parsed(30_000).asked.facts
    with pytest.raises(RequestError, match="a string that is too long"):
        parsed(200_000)
