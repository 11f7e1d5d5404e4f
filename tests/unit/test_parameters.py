"""The parameter policy: every row lets an ordinary request pass and refuses the one it is there for."""

import json
import sys

import pytest
from pydantic import ValidationError

from gateway.config.models import Config
from gateway.config.parameters import ParametersConfig, Policies
from gateway.core.asked import Media, Overrides, UnknownFields
from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.parameters import effective, judge
from gateway.wire.patterns import pattern_problem
from gateway.wire.table import TABLE, Rule
from tests.parametercases import (
    BASE,
    CASES,
    CHAT,
    CLIENTS,
    COMPLETIONS,
    EMBEDDINGS,
    HI,
    LARGE_TOOL,
    MESSAGES,
    ROWS,
    adding,
    image,
    parts,
)


def call(path, fields, spaced=False):
    separators = (", ", ": ") if spaced else (",", ":")
    body = json.dumps({"model": "m", **BASE[path], **fields}, separators=separators).encode()
    return parse_call(ENDPOINTS[path.encode()], body)


def check(path, fields, *layers):
    judge(call(path, fields), effective(layers))
    judge(call(path, fields, spaced=True), effective(layers))


def refused(path, fields, *layers):
    with pytest.raises(RequestError) as caught:
        check(path, fields, *layers)
    error = caught.value
    assert error.status == 400
    assert error.code
    return error


def test_every_row_has_an_example():
    assert ROWS.keys() | {"duplicate keys"} == TABLE.keys()


@pytest.mark.parametrize(("name", "path", "fine", "wrong", "param"), CASES)
def test_a_row_refuses_what_it_is_there_for_and_nothing_else(name, path, fine, wrong, param):
    check(path, fine)
    error = refused(path, wrong)
    assert error.param == param
    row = TABLE[name]
    if row.rule is Rule.DENY:
        assert "parameters.allow" in error.message
        check(path, wrong, ("parameters", Overrides(allow=frozenset({name}))))
    elif row.rule is Rule.MAX and error.code != "invalid_pattern":
        assert f"parameters.max.{name}" in error.message
        assert str(row.most) in error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[],"n":1,"n":2}',
        b'{"model": "m", "messages": [], "n": 1, "\\u006e": 2}',
        b'{"model":"m","messages":[],"n":1,"n":1}',
        b'{"model":"m","messages":[],\n"n":12,"n":1}',
        b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":["a",{"type":"x","type":"text"}]}]}',
        b'{"model":"m","messages":[],"response_format":{"type":"text","type":"json_object"}}',
        b'{"model":"m","messages":[],"chat_template_kwargs":{"a":1,"a":2}}',
        b'{"model":"m","messages":[],"logit_bias":{"1":1,"1":2}}',
    ],
)
def test_a_key_that_comes_twice_is_refused_wherever_it_is_read(body):
    with pytest.raises(RequestError) as caught:
        parse_call(ENDPOINTS[CHAT.encode()], body)
    assert caught.value.code == "duplicate_key"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"say \\"role\\": \\"content\\", twice"}]}',
        b' { "model" : "m" ,\t"messages" : [ { "role" : "user" , "content" : "n" } ] , "n" : 1 } ',
        b'{"m\\u006fdel":"m","messages":[]}',
        '{"model":"m","messages":[],"\u00fcber":1}'.encode(),
    ],
)
def test_a_key_that_comes_once_passes_however_it_is_written(body):
    assert parse_call(ENDPOINTS[CHAT.encode()], body).model == "m"


# --- settings --------------------------------------------------------------------------------------


def test_the_narrowest_setting_that_names_a_parameter_decides():
    everywhere = ("parameters", Overrides(max=(("n", 8),), allow=frozenset({"priority"})))
    pool = ("pools.m.parameters", Overrides(max=(("n", 2),), deny=frozenset({"priority"})))
    key = ("the key's parameters", Overrides(allow=frozenset({"n", "priority"})))
    check(CHAT, {"n": 8, "priority": 1}, everywhere)
    error = refused(CHAT, {"n": 3}, everywhere, pool)
    assert error.message == "`n` must be at most 2, got 3. `pools.m.parameters.max.n` decides."
    assert "pools.m.parameters.deny" in refused(CHAT, {"priority": 1}, everywhere, pool).message
    check(CHAT, {"n": 500, "priority": 1}, everywhere, pool, key)


@pytest.mark.parametrize(
    ("asked", "range_"),
    [({"top_k": 2**31}, "-1 and 2147483647"), ({"min_p": -1}, "0 and 1")],
)
def test_a_range_is_told_in_plain_numbers(asked, range_):
    assert refused(CHAT, asked).message == f"`{[*asked][0]}` must be between {range_}."


@pytest.mark.parametrize("more", [{}, {"tool_choice": "required"}])
def test_a_limit_of_tools_holds_however_small_they_are(more):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    few = ("parameters", Overrides(max=(("tools", 4),)))
    check(CHAT, {"tools": [tool] * 4, **more}, few)
    assert refused(CHAT, {"tools": [tool] * 5, **more}, few).param == "tools"
    short = ("parameters", Overrides(max=(("tools_bytes", 100),)))
    check(CHAT, {"tools": [tool], **more}, short)
    assert refused(CHAT, {"tools": [tool] * 2, **more}, short).param == "tools"
    check(CHAT, {"tools": None}, ("parameters", Overrides(max=(("tools_bytes", 0),))))


@pytest.mark.parametrize("ensure_ascii", [False, True])
@pytest.mark.parametrize(("name", "most"), [("bad_words", 256), ("stop", 1024)])
def test_characters_are_counted_as_such_however_they_are_written(name, most, ensure_ascii):
    def sent(word):
        fields = {"model": "m", "messages": HI, name: [word]}
        body = json.dumps(fields, ensure_ascii=ensure_ascii).encode()
        return parse_call(ENDPOINTS[CHAT.encode()], body)

    judge(sent("\u4e2d" * most), effective([]))
    with pytest.raises(RequestError, match=f"at most {most} characters, got {most + 1}"):
        judge(sent("\u4e2d" * (most + 1)), effective([]))


def test_any_field_can_be_denied():
    layer = ("pools.m.parameters", Overrides(deny=frozenset({"tools", "content.uuid", "mine"})))
    assert refused(CHAT, {"tools": []}, layer).param == "tools"
    assert refused(CHAT, {"mine": 1}, layer).param == "mine"
    check(CHAT, {"user": "me"}, layer)


@pytest.mark.parametrize("name", ["media", "prompts", "stop_chars", "guided_*", "stored responses"])
def test_what_is_no_field_cannot_be_denied_by_mistake(name):
    with pytest.raises(ValidationError, match="is no field of a body"):
        ParametersConfig(deny=(name,))


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"^[a-z0-9]+(?:-[a-z0-9]+)*$", None),
        (r"^(([\w.-]+)@([\w.-]+)\.([a-zA-Z]{2,5}))$", None),
        (r"^\d{4}-\d{2}-\d{2}T(?:[01]\d|2[0-3]):[0-5]\d$", None),
        (r"[)(]+[]a]*\((?P<year>\d{4})\)", None),
        (r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==)?", None),
        (r"(a+)+", "unbounded repetition"),
        (r"(\w+\s?)*", "unbounded repetition"),
        (r"(a|b*)*", "unbounded repetition"),
        (r"(^a*$)+", "unbounded repetition"),
        (r"((a+)?)*", "unbounded repetition"),
        (r"(x{100}){100}", "multiply"),
        (r"a{1001}", "multiply"),
        (r"(?=a)b", "lookahead"),
        (r"(?<!a)b", "lookbehind"),
        (r"(a)\1", "backreferences"),
        (r"(?P<x>a)(?P=x)", "kind of group"),
        (r"a++", "possessive"),
        (r"a{1000}{1000}", "doubled"),
        (r"a{1000}?{1000}", "doubled"),
        (r"a+{1000}", "doubled"),
        (r"a{2,}?b+{x}", None),
        (r"(?x:a{ 1000000 })", "kind of group"),
        (r"(?i-x)a{ 1000000 }", "kind of group"),
        (r"(?i)a(?P<x>b)(?<x>c)", None),
        ("(" * 100 + ")" * 100, "nested"),
    ],
)
def test_patterns_are_those_that_an_automaton_matches_cheaply(pattern, problem):
    found = pattern_problem(pattern)
    assert (found is None) == (problem is None), found
    assert problem is None or problem in found


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": "a" * 60_000}},
        {"structured_outputs": {"json": {"allOf": [{"pattern": "a" * 2000}] * 9}}},
    ],
)
def test_no_more_of_regular_expressions_is_examined_than_takes_a_moment(body):
    anything = ("parameters", Overrides(max=(("pattern_chars", 100_000),)))
    error = refused(CHAT, body, anything)
    assert error.code == "invalid_pattern"
    assert "more than 16,384 characters together" in error.message


def test_media_may_be_inline_only_or_from_anywhere():
    strict = ("parameters", Overrides(media=Media.DATA))
    check(CHAT, image("data:image/png;base64,AA"), strict)
    assert "parameters.media" in refused(CHAT, image("https://example.com/a.png"), strict).message
    check(CHAT, image("http://minio:9000/a.png"), ("parameters", Overrides(media=Media.ANY)))
    one_bad = parts(*(image(url)["messages"][0]["content"][1] for url in ("data:x", "http://a/")))
    assert refused(CHAT, one_bad, strict).param == "messages[0].content[2].image_url.url"


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        (CHAT, {"return_weight_versions": True}),
        (COMPLETIONS, {"return_weight_versions": True}),
        (EMBEDDINGS, {"late_chunking_params": {"chunk_size": 8}}),
    ],
)
def test_fields_that_came_with_vllm_0_33_are_known(endpoint, field):
    assert call(endpoint, field).asked.unknown == 0


def test_unknown_fields_pass_and_are_counted_or_are_refused():
    assert call(CHAT, {"mine": 1, "yours": 2}).asked.unknown == 2
    assert call(CHAT, {"metadata": {}, "store": True, "service_tier": "auto"}).asked.unknown == 0
    strict = ("parameters", Overrides(unknown_fields=UnknownFields.REFUSE))
    error = refused(CHAT, {"mi\u0000ne": 1}, strict)
    assert (error.param, error.code) == ("mi?ne", "unknown_parameter")
    check(CHAT, {"user": "me"}, strict)


def test_a_pool_and_a_key_have_their_own_policy():
    config = Config.model_validate(
        {
            "parameters": {"max": {"n": 4}},
            "pools": {
                "a": {"backends": ["http://h:1"], "parameters": {"max": {"n": 2}}},
                "b": {"backends": ["http://h:1"], "parameters": {"allow": ["content.uuid"]}},
            },
        }
    )
    policies = Policies(config)
    request = call(CHAT, {"n": 3})
    policies.judge(request, "b", None)
    with pytest.raises(RequestError, match=r"pools\.a\.parameters\.max\.n"):
        policies.judge(request, "a", None)
    key = Overrides(max=(("n", 1),))
    with pytest.raises(RequestError, match="the key's parameters"):
        policies.judge(request, "b", key)
    assert policies.of("b", key) is policies.of("b", key)


def test_a_field_that_a_key_may_not_send_is_refused_without_any_fact():
    policies = Policies(Config.model_validate({"pools": {"a": {"backends": ["http://h:1"]}}}))
    request = call(CHAT, {"user": "me"})
    policies.judge(request, "a", None)
    with pytest.raises(RequestError, match="`user` is not accepted"):
        policies.judge(request, "a", Overrides(deny=frozenset({"user"})))


# --- what clients really send ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIENTS)
def test_what_clients_really_send_passes(name):
    path, fields = CLIENTS[name]
    check(path, fields)
    strict = ("parameters", Overrides(unknown_fields=UnknownFields.REFUSE))
    if name not in ("qwen-code",):  # sends a field of its own provider
        check(path, {k: v for k, v in fields.items() if k != "guided"}, strict)


def test_known_fields_are_those_of_each_endpoint():
    assert call(EMBEDDINGS, {"n": 3}).asked.unknown == 1
    assert call(COMPLETIONS, {"messages": HI}).asked.unknown == 1
    assert {row.rule for row in TABLE.values()} == set(Rule)
    assert all(isinstance(each, Endpoint) for row in TABLE.values() for each in row.endpoints)


# --- the cost of long lists -----------------------------------------------------------------------


def python_calls(path, fields):
    """Return how often parsing calls a Python function: a count of its work that no load changes."""
    body = json.dumps({"model": "m", **BASE[path], **fields}).encode()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        parse_call(ENDPOINTS[path.encode()], body)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("address", ["", "data:", "http://a.example", "http://10.0.0.1"])
def test_a_list_of_equal_addresses_costs_what_one_costs(address):
    long = "u" * 2048  # both bodies are read in the way of long ones
    fields = ({"images": [address] * count, "user": long} for count in (1, 20_000))
    one, many = (python_calls("/v2/embed", each) for each in fields)
    assert many <= one


def test_distinct_addresses_cost_no_more_than_telling_their_kind():
    addresses = [f"http://a.example/{number}" for number in range(4000)]
    assert python_calls("/v2/embed", {"images": addresses}) < 5 * 4000


def test_after_an_address_of_the_worst_kind_the_others_are_not_looked_at():
    addresses = [f"ftp://{number}" for number in range(4000)]
    assert python_calls("/v2/embed", {"images": addresses}) < 400


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_worst_of_several_addresses_is_found_wherever_it_stands(place):
    images = ["data:a", "https://a.example/b"]
    images.insert(place, "http://10.0.0.1/")
    error = refused("/v2/embed", {"images": images})
    assert (error.param, error.code) == (f"images[{place}]", "unsupported_media_address")


@pytest.mark.parametrize("field", ["images", "audio", "videos"])
def test_the_addresses_of_a_decisions_media_are_judged(field):
    asked = {"state": "a", "questions": {}, field: ["data:a", "http://10.0.0.1/"]}
    error = refused("/v1/systemone", asked)
    assert (error.param, error.code) == (f"{field}[1]", "unsupported_media_address")


@pytest.mark.parametrize("images", [[5], [None], [{"url": "http://10.0.0.1/"}], [["data:a"]]])
def test_images_that_are_no_addresses_are_refused_as_they_cannot_be_checked(images):
    assert refused("/v2/embed", {"images": ["data:a", *images]}).param == "images"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "`messages` has the wrong type: expected a list of messages."),
        (["hello", {"role": "user", "content": []}], "`messages[0]` has the wrong type: expected a message, an object with `role` and `content`."),
        ([{"role": "user", "content": 5}, {"role": "user", "content": []}], "`messages[0].content` has the wrong type: expected text or a list of parts."),
        ([{"role": "user", "content": [{"type": 5}]}, {}], "`messages[0].content[0].type` has the wrong type: expected text."),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, {}],
         "`messages[0].content[0].image_url` has the wrong type: expected an address as text."),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_told_as_what_it_should_be(messages, told):
    assert str(refused("/v1/chat/completions", {"messages": messages})) == told


@pytest.mark.parametrize("ids", [[1] * 20_000, [1, *["2"] * 20_000]])
def test_a_list_of_token_ids_costs_what_one_costs_and_is_refused_for_its_length(ids):
    one, many = (python_calls("/v1/completions", {"stop_token_ids": each}) for each in ([1], ids))
    assert many < one + 10
    assert refused("/v1/completions", {"stop_token_ids": ids}).param == "stop_token_ids"
    assert refused("/v1/completions", {"stop_token_ids": [*ids, -1]}).code == "invalid_token_id"
    assert refused("/v1/completions", {"stop_token_ids": [*ids, "-1"]}).code == "invalid_token_id"


def test_a_strict_tool_is_found_however_its_name_is_written():
    tool = b'{"type":"function","function":{"name":"f","parameters":{"pattern":"(a+)+"},%b:true}}'
    for name in (
        b'"strict"',
        rb'"\u0073trict"',
        rb'"str\u0069\u0063\u0074"',
        rb'"s\u0074\u0072ict"',
    ):
        body = b'{"model":"m","messages":[],"tools":[%b]}' % (tool % name)
        with pytest.raises(RequestError, match="repetition"):
            parse_call(ENDPOINTS[CHAT.encode()], body)


def test_tools_that_messages_add_count_with_the_others():
    tool = {"name": "f", "input_schema": {}}
    check(MESSAGES, adding(tool) | {"tools": [tool] * 511})
    assert (
        refused(MESSAGES, adding(tool) | {"tools": [tool] * 512}).code == "array_above_max_length"
    )
    assert "tools_bytes" in refused(MESSAGES, adding(LARGE_TOOL)).message


def test_a_structural_tag_is_found_however_its_type_is_written():
    for kind in (b"structural_tag", rb"structural\u005ftag", rb"\u0073tructural_tag"):
        tag = b'{"type":"%b","format":{"type":"regex","pattern":"(a+)+"}}' % kind
        body = b'{"model":"m","messages":[],"response_format":%b}' % tag
        with pytest.raises(RequestError, match="repetition"):
            parse_call(ENDPOINTS[CHAT.encode()], body)


@pytest.mark.parametrize("more", ["", ',"x":NaN', ',"x":-Infinity', ',"x":"\\ud800"'])
def test_a_structural_tag_that_only_python_can_read_is_refused(more):
    tag = '{"structures":[{"begin":"<a>","schema":{"pattern":"%s"},"end":"</a>"}],"triggers":[]%s}'
    assert json.loads(tag % ("(a+)+", more))  # the engine reads it
    path = "structured_outputs.structural_tag"
    wrong = {"structured_outputs": {"structural_tag": tag % ("(a+)+", more)}}
    assert refused(CHAT, wrong).param.startswith(path)
    check(CHAT, {"structured_outputs": {"structural_tag": tag % ("a+", "")}})


def test_what_a_key_names_decides_also_over_what_a_pool_denies():
    call = parse_call(ENDPOINTS[b"/v1/chat/completions"], CHAT_OF_TWO)
    by_pool, by_key = Overrides(deny=("n",)), Overrides(max=(("n", 4),))
    judge(call, effective([("parameters", by_pool), ("key k", by_key)]))
    with pytest.raises(RequestError, match="deny"):
        judge(call, effective([("parameters", by_pool)]))
    with pytest.raises(RequestError, match="deny"):
        judge(call, effective([("key k", by_key), ("parameters", by_pool)]))


@pytest.mark.parametrize(
    "field",
    [
        b'"response_format":{"type":"structural_tag","x":1e999}',
        b'"structured_outputs":{"grammar":1e999}',
        b'"structured_outputs":{"structural_tag":{"a":1e999}}',
    ],
)
def test_a_number_beyond_all_numbers_in_a_grammar_is_the_clients_error(field):
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}' % field
    with pytest.raises(RequestError) as refused:
        parse_call(ENDPOINTS[b"/v1/chat/completions"], body)
    assert refused.value.status == 400


CHAT_OF_TWO = b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":2}'
