"""What a request body is understood to ask for, and what of it is changed on its way upstream."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from gateway.core.errors import RequestError, UnsupportedMediaType
from gateway.core.types import Call, Dialect, Endpoint, Route
from gateway.wire.calls import ENDPOINTS, named, parse_call, upstream_body
from gateway.wire.parameters import effective, judge
from gateway.wire.table import REFUSED_IN_FORMS

CHAT = ENDPOINTS[b"/v1/chat/completions"]
COMPLETIONS = ENDPOINTS[b"/v1/completions"]
EMBEDDINGS = ENDPOINTS[b"/v1/embeddings"]
RESPONSES = ENDPOINTS[b"/v1/responses"]
MESSAGES = ENDPOINTS[b"/v1/messages"]
COUNT = ENDPOINTS[b"/v1/messages/count_tokens"]
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> Call:
    return parse_call(CHAT, json.dumps({"model": "m", "messages": HI, **fields}).encode())


def completions(**fields: object) -> Call:
    return parse_call(COMPLETIONS, json.dumps({"model": "m", "prompt": "a", **fields}).encode())


def responses(**fields: object) -> Call:
    return parse_call(RESPONSES, json.dumps({"model": "m", "input": "hi", **fields}).encode())


def refused(spec, body, content_type=b"application/json") -> RequestError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        judge(parse_call(spec, data, content_type), effective([]))
    assert caught.value.code
    return caught.value


def test_every_endpoint_has_its_exact_path_and_its_own_entry():
    assert {spec.endpoint for spec in ENDPOINTS.values()} == set(Endpoint)
    assert all(path == spec.path for path, spec in ENDPOINTS.items())
    assert b"/v1/models" not in ENDPOINTS
    assert [s.endpoint for s in ENDPOINTS.values() if s.multipart] == [
        Endpoint.TRANSCRIPTIONS,
        Endpoint.TRANSLATIONS,
    ]


def test_an_ordinary_chat_is_read():
    call = chat(stream=True, max_tokens=7, n=2, stream_options={"include_usage": True})
    assert (call.endpoint, call.dialect, call.model) == (Endpoint.CHAT, Dialect.CHAT, "m")
    assert call.stream
    assert call.wants_usage
    assert (call.max_new_tokens, call.max_new_field, call.choices) == (7, "max_tokens", 2)
    assert call.text_bytes == len(call.body)
    assert not call.truncates_prompt


def test_max_completion_tokens_wins_over_max_tokens():
    call = chat(max_tokens=7, max_completion_tokens=5)
    assert (call.max_new_tokens, call.max_new_field) == (5, "max_completion_tokens")


def test_null_counts_as_absent():
    call = chat(max_tokens=None, max_completion_tokens=None, n=None, stream=None,
                stream_options=None, chat_template=None, kv_transfer_params=None)  # fmt: skip
    assert call.max_new_tokens is None
    assert call.max_new_field is None
    assert call.choices == 1
    assert not call.stream


def test_stream_options_without_stream_are_left_to_the_backend():
    assert not chat(stream_options={"include_usage": True}).stream


def test_completions_default_to_sixteen_tokens_of_output():
    assert completions().max_new_tokens == 16
    assert completions().max_new_field is None
    assert completions(max_tokens=0).max_new_tokens == 0
    assert completions(max_tokens=None).max_new_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "choices", "ids"),
    [
        ("a", 2, None),
        (["a", "b", "c"], 6, None),
        ([1, 2, 3], 2, 3),
        ([[1, 2], [3, 4, 5, 6]], 4, 4),
        ([" padded"], 2, None),
    ],
)
def test_a_complete_answer_has_n_choices_for_every_prompt(prompt, choices, ids):
    call = completions(prompt=prompt, n=2)
    assert call.choices == choices
    assert call.prompt_token_ids == ids


def test_the_window_is_per_prompt_so_the_longest_counts():
    call = completions(prompt=["a" * 100, "b" * 1000])
    assert call.text_bytes is not None
    assert 1000 <= call.text_bytes < 1100


@pytest.mark.parametrize(
    ("prompt", "ratio"),
    [
        ("a", 1.0),
        ([1, 2, 3], 1.0),
        (["abc", "def"], 0.5),
        (["abcdef", "", "abcd"], 0.5),  # the quotes count as text
        ([[1, 2, 3], [4]], 0.75),
        ([], 1.0),
        ([[]], 1.0),
    ],
)
def test_of_several_prompts_the_share_of_the_longest_is_told(prompt, ratio):
    assert completions(prompt=prompt).longest_ratio == ratio
    body = json.dumps({"model": "m", "input": prompt}).encode()
    assert parse_call(EMBEDDINGS, body).longest_ratio == ratio


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [1, "x"], ["x", 1], [[1], ["x"]], True])
def test_a_prompt_of_another_shape_is_refused(prompt):
    error = refused(COMPLETIONS, {"model": "m", "prompt": prompt})
    assert error.param is not None
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1.0, 2.0], 2),
        (["7", 8], 2),
        ([8, "7", True], 3),
        ([True, 2], 2),
        ([[1.0], [2, "3"]], 2),
        (["7", "8"], None),  # a list of texts
    ],
)
def test_token_ids_are_read_as_laxly_as_vllm_reads_them(prompt, ids):
    assert completions(prompt=prompt).prompt_token_ids == ids
    data = json.dumps({"model": "m", "input": prompt}).encode()
    assert parse_call(EMBEDDINGS, data).prompt_token_ids == ids


def test_the_largest_integer_is_read_beside_a_lax_field_and_without():
    assert chat(max_tokens=2**63 - 1, stream=0).max_new_tokens == 2**63 - 1
    assert chat(max_tokens=2**63 - 1).max_new_tokens == 2**63 - 1


def test_a_long_list_of_what_is_no_plain_number_is_not_looked_through():
    assert completions(prompt=[1.0] * 65_536).prompt_token_ids == 65_536
    assert refused(COMPLETIONS, {"model": "m", "prompt": [1.0] * 65_537}).param == "prompt[0]"
    assert refused(COMPLETIONS, {"model": "m", "prompt": [[1.0]] * 65_537}).param == "prompt[0][0]"
    assert completions(prompt=[1] * 100_000).prompt_token_ids == 100_000


def test_fields_are_read_as_laxly_as_vllm_reads_them():
    call = chat(max_tokens=7.0, n="2", stream=1, stream_options={"include_usage": "on"}, tools=[])
    assert (call.max_new_tokens, call.choices, call.stream, call.wants_usage) == (7, 2, True, True)
    assert chat(max_completion_tokens=" 5 ", max_tokens=True).max_new_tokens == 5
    assert not chat(stream="false").stream
    assert not chat(stream=True, stream_options={"include_usage": None}).wants_usage
    assert completions(truncate_prompt_tokens="9").truncates_prompt
    assert responses(max_output_tokens="9").max_new_tokens == 9
    sent = upstream_body(chat(max_tokens="9"), served_model="m", inject_usage=False, max_new_tokens=5)  # fmt: skip
    assert json.loads(sent)["max_tokens"] == 5


@pytest.mark.parametrize("more", [b"", b',"stream":1', b',"x":"%b"' % (b"y" * 3000)])
@pytest.mark.parametrize(
    "number", [b"1" * 400, b"-%d" % 2**63, b"%d" % 2**63, b"1e999", b'"1e999"']
)
@pytest.mark.parametrize("field", ["n", "max_tokens", "truncate_prompt_tokens"])
def test_a_number_that_no_engine_can_mean_is_refused_whatever_else_the_body_holds(
    field, number, more
):
    body = b'{"model":"m","messages":[],"%b":%b%b}' % (field.encode(), number, more)
    with pytest.raises(RequestError) as caught:
        parse_call(CHAT, body)
    assert caught.value.param == field


def test_a_missing_prompt_is_left_to_the_backend():
    assert parse_call(COMPLETIONS, b'{"model": "m"}').choices == 1
    assert completions(prompt=[]).choices == 1


def test_too_many_prompts_or_choices_are_refused():
    assert refused(COMPLETIONS, {"model": "m", "prompt": ["a"] * 1025}).param == "prompt"
    assert completions(prompt=["a"] * 1024).choices == 1024
    assert refused(COMPLETIONS, {"model": "m", "prompt": [[1]] * 1025}).param == "prompt"
    assert refused(EMBEDDINGS, {"model": "m", "input": ["a"] * 2049}).param == "input"
    assert refused(CHAT, {"model": "m", "messages": HI, "n": 129}).param == "n"
    assert refused(CHAT, {"model": "m", "messages": HI, "n": 0}).param == "n"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_negative_output_limits_are_refused(field):
    error = refused(CHAT, {"model": "m", "messages": HI, field: -1})
    assert error.param == field
    assert "-1" in error.message


@pytest.mark.parametrize("fields", [{"model": None}, {"model": ""}, {}])
def test_a_model_may_be_left_out_where_vllm_has_a_default(fields):
    for spec, body in ((CHAT, {"messages": HI}), (EMBEDDINGS, {"input": "a"})):
        data = json.dumps(body | fields).encode()
        call = parse_call(spec, data)
        assert call.model == ""
        meant = named(call, Route("m", "m", "served"))
        assert (meant.model, meant.unnamed) == ("m", True)
        assert upstream_body(meant, served_model=None, inject_usage=False) is data
        sent = upstream_body(meant, served_model="m", inject_usage=False)
        assert json.loads(sent) == body | {"model": "m"}
    for spec in (MESSAGES, COUNT):
        error = refused(spec, {"messages": HI, "max_tokens": 5, **fields})
        assert (error.status, error.param) == (400, "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": [1]}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream": 2}, "stream"),
        ({"n": "two"}, "n"),
        ({"n": "2", "max_tokens": "x"}, "max_tokens"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
        ({"messages": "secret prompt"}, "messages"),
        ({"messages": ["secret prompt"]}, "messages[0]"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_type_names_the_field_and_no_value(fields, param):
    error = refused(CHAT, {"model": "m", "messages": HI, **fields})
    assert error.param == param
    assert f"`{param}`" in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b"[1]",
        b'"model"',
        b"null",
        b'{"model": "m"} {}',
        b'{"model": "m", "secret": NaN}',
        b'{"model": "m", "messages": [{"content": "secret \xff"}]}',
        b'{"secret\xff": 1, "model": "m"}',
        b'\xef\xbb\xbf{"model": "m"}',
        '{"model": "m"}'.encode("utf-16"),
        '{"model": "m"}'.encode("utf-16-be"),
        '{"model": "m"}'.encode("utf-32"),
        b'{"model": "m", "x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"model": "m", "messages": ' + b"[" * 100_000,
        b'{"model": "\\ud800"}',
        b'{"model": "m", "x": "a\nb"}',
    ],
)
def test_what_is_no_json_object_in_utf_8_is_refused(body):
    error = refused(CHAT, body)
    assert error.status == 400
    assert "secret" not in error.message


@pytest.mark.parametrize("depth", [63, 64, 65, 300, 5000, 20_000])
def test_a_body_is_refused_from_the_same_depth_on_every_interpreter(depth):
    body = b'{"model": "m", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth <= 64:
        assert parse_call(CHAT, body).model == "m"
    else:
        assert "nested too deeply: at most 64 levels" in refused(CHAT, body).message


@pytest.mark.parametrize("name", [b"chat_template_kwargs", b"input", b"messages"])
def test_at_any_depth_a_body_is_read_or_refused(name):
    for depth in range(1, 1100):
        nested = b'{"x":' * depth + b"1" + b"}" * depth
        value = nested if name == b"chat_template_kwargs" else b'[{"content":[' + nested + b"]}]"
        spec = RESPONSES if name == b"input" else CHAT
        with suppress(RequestError):
            assert parse_call(spec, b'{"model": "m", "' + name + b'": ' + value + b"}").model == "m"


def test_names_written_with_escapes_are_the_same_names():
    call = parse_call(CHAT, b'{"mod\\u0065l": "m", "messages": [], "str\\u0065am": true}')
    assert call.model == "m"
    assert call.stream
    assert refused(CHAT, b'{"model": "m", "chat_templat\\u0065": "x"}').param == "chat_template"


def test_a_field_given_twice_is_refused():
    error = refused(CHAT, b'{"model": "a", "model": "b", "messages": []}')
    assert (error.param, error.code) == ("model", "duplicate_key")


@pytest.mark.parametrize("spec", [s for s in ENDPOINTS.values() if not s.multipart])
@pytest.mark.parametrize("field", sorted(REFUSED_IN_FORMS))
def test_fields_that_reach_into_the_engine_are_refused_everywhere(spec, field):
    error = refused(spec, {"model": "m", field: {"secret": 1}})
    assert error.param == field
    assert "secret" not in error.message


def test_a_template_hidden_in_the_templates_arguments_is_refused():
    error = refused(CHAT, {"model": "m", "chat_template_kwargs": {"chat_template": "x"}})
    assert error.param == "chat_template_kwargs.chat_template"
    assert chat(chat_template_kwargs={"enable_thinking": False}).model == "m"


def test_fields_of_vllm_that_are_not_ours_to_judge_pass():
    call = chat(cache_salt="s", user="u", top_k=5, structured_outputs={"json": {}}, min_p=0.1,
                unknown={"x": [1]})  # fmt: skip
    judge(call, effective([]))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": {}},
        {"type": "image", "source": {}},
        {"image_url": "data:"},
        {"type": "something new"},
        {"type": "tool_result", "content": [{"type": "image", "source": {}}]},
    ],
)
def test_parts_that_are_no_text_have_no_size_that_bounds_their_tokens(part):
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    assert chat(messages=messages).text_bytes is None
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages}).encode()
    assert parse_call(MESSAGES, body).text_bytes is None


def test_an_escaped_type_is_no_way_around():
    body = b'{"model":"m","messages":[{"content":[{"type":"image\\u005furl"}]}]}'
    assert parse_call(CHAT, body).text_bytes is None
    body = b'{"model":"m","messages":[{"content":[{"type":"image\\u005fembeds"}]}]}'
    assert refused(CHAT, body).param == "messages[0].content[0].image_embeds"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "x"},
        {"prompt_embeds": "x"},
        {"type": "audio_embeds"},
    ],
)
def test_tensors_as_message_parts_are_refused(part):
    error = refused(CHAT, {"model": "m", "messages": [{"role": "user", "content": [part]}]})
    assert error.code == "unsupported_parameter"


def test_text_that_speaks_of_images_is_text():
    call = chat(messages=[{"role": "user", "content": 'what is "image_url" and "prompt_embeds"?'}])
    assert call.text_bytes == len(call.body)
    parts = [{"type": "text", "text": "image"}, {"type": "tool_result", "content": "image"}]
    call = chat(
        messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    )
    assert call.text_bytes == len(call.body)


def test_tools_are_given_room_to_grow_in_the_template():
    call = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert call.text_bytes is not None
    assert call.text_bytes > len(call.body)


def test_deep_nests_of_parts_are_not_followed_for_ever():
    part: dict[str, object] = {"type": "text"}
    for _ in range(20):
        part = {"type": "tool_result", "content": [part]}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    assert "nested" in refused(CHAT, body).message


@pytest.mark.parametrize("value", [-1, 100])
def test_a_prompt_that_the_engine_cuts_is_marked(value):
    assert chat(truncate_prompt_tokens=value).truncates_prompt
    assert responses(truncation="auto").truncates_prompt
    assert not responses(truncation="disabled").truncates_prompt


def test_responses_are_read_and_stateless():
    call = responses(stream=True, max_output_tokens=9, instructions="be brief")
    assert (call.max_new_tokens, call.max_new_field) == (9, "max_output_tokens")
    assert call.stream
    assert call.wants_usage  # always told: nothing to add, nothing to hide
    assert call.text_bytes == len(call.body)
    assert (
        refused(RESPONSES, {"model": "m", "input": "a", "background": True}).param == "background"
    )
    error = refused(RESPONSES, {"model": "m", "input": "a", "previous_response_id": "resp_1"})
    assert error.param == "previous_response_id"
    assert responses(background=False, previous_response_id=None).model == "m"


def test_responses_with_items_are_text_only_when_their_parts_are():
    text = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    result = {"type": "function_call_output", "output": [{"type": "input_image"}]}
    assert responses(input=[text]).text_bytes is not None
    assert responses(input=[text, image]).text_bytes is None
    assert responses(input=[text, result]).text_bytes is None
    assert responses(input=[{"type": "function_call_output", "output": "5"}]).text_bytes is not None


def test_messages_are_read():
    body = json.dumps({"model": "m", "max_tokens": 4, "messages": HI, "stream": True}).encode()
    call = parse_call(MESSAGES, body)
    assert (call.dialect, call.max_new_tokens, call.stream) == (Dialect.MESSAGES, 4, True)
    counted = parse_call(COUNT, body)
    assert (counted.dialect, counted.max_new_tokens, counted.stream) == (
        Dialect.MESSAGES,
        None,
        False,
    )


def test_embeddings_and_other_plain_calls_are_read():
    call = parse_call(EMBEDDINGS, b'{"model": "m", "input": [[1, 2, 3], [4]], "stream": true}')
    assert (call.prompt_token_ids, call.stream, call.choices) == (3, False, 1)
    call = parse_call(EMBEDDINGS, json.dumps({"model": "m", "messages": HI}).encode())
    assert call.text_bytes == len(call.body)
    score = ENDPOINTS[b"/v1/score"]
    call = parse_call(score, b'{"model": "m", "text_1": "a", "text_2": ["b"]}')
    assert call.text_bytes == len(call.body)
    call = parse_call(score, b'{"model": "m", "text_1": {"content": [{"type": "image_url"}]}}')
    assert call.text_bytes is None
    assert parse_call(ENDPOINTS[b"/detokenize"], b'{"model": "m", "tokens": [1]}').model == "m"


@pytest.mark.parametrize("kind", [b"application/json; charset=utf-8", b"Application/JSON"])
def test_json_may_be_declared_in_any_spelling(kind):
    assert parse_call(CHAT, b'{"model": "m", "messages": []}', kind).content_type == kind


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/x-www-form-urlencoded"])
def test_another_media_type_is_told_so(kind):
    with pytest.raises(UnsupportedMediaType):
        parse_call(CHAT, b'{"model": "m"}', kind)


# --- the rewrite ---------------------------------------------------------------------------------


def test_a_body_that_needs_no_change_is_the_same_object():
    call = chat(stream=True, stream_options={"include_usage": True}, max_tokens=5)
    assert upstream_body(call, served_model="m", inject_usage=True, max_new_tokens=5) is call.body
    call = chat()
    assert upstream_body(call, served_model="m", inject_usage=True) is call.body
    call = responses(store=False)
    assert upstream_body(call, served_model="m", inject_usage=False) is call.body


def test_a_renamed_model_is_the_only_change():
    body = b'{ "model" :"alias", "temperature": 1.50e0, "x": "\\u00e9 \xc3\xa9", "messages": [ ] }'
    call = parse_call(CHAT, body)
    out = upstream_body(call, served_model='served "x"', inject_usage=False)
    assert json.loads(out) == {**json.loads(body), "model": 'served "x"'}
    assert b"1.50e0" in out
    assert b'"\\u00e9 \xc3\xa9"' in out


def test_usage_is_asked_for_without_asking_for_more():
    call = chat(stream=True, stream_options={"continuous_usage_stats": True, "other": 1})
    out = json.loads(upstream_body(call, served_model="m", inject_usage=True))
    assert out["stream_options"] == {"other": 1, "include_usage": True}
    out = json.loads(upstream_body(chat(stream=True), served_model="m", inject_usage=True))
    assert out["stream_options"] == {"include_usage": True}


def test_usage_is_asked_for_only_where_it_can_be():
    for call in (responses(stream=True), parse_call(EMBEDDINGS, b'{"model":"m","input":"a"}')):
        assert upstream_body(call, served_model="m", inject_usage=True) is call.body


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "max_completion_tokens"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"max_tokens": 9, "max_completion_tokens": 8}, "max_completion_tokens"),
    ],
)
def test_a_clamp_is_written_where_the_engine_looks(fields, field):
    out = upstream_body(chat(**fields), served_model="m", inject_usage=False, max_new_tokens=3)
    assert json.loads(out)[field] == 3


def test_a_clamp_means_nothing_to_an_endpoint_without_output():
    call = parse_call(EMBEDDINGS, b'{"model":"m","input":"a"}')
    assert upstream_body(call, served_model="m", inject_usage=False, max_new_tokens=3) is call.body


@pytest.mark.parametrize("store", [True, 1, "true", "1", "on"])
def test_responses_are_not_stored_and_who_asks_for_it_hears_so(store):
    assert refused(RESPONSES, {"model": "m", "input": "hi", "store": store}).param == "store"


@pytest.mark.parametrize("store", [False, 0, "false", None])
def test_who_wants_nothing_stored_is_served(store):
    assert responses(store=store).model == "m"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (rb'"a \ud83d"}', "half of a character at byte 14: text was cut inside an emoji"),
        (rb'"\ud83d b"}', "half of a character at byte 12: text was cut inside an emoji"),
        (rb'"\\\\\uD83D\n"}', "half of a character at byte 16: text was cut inside an emoji"),
        (rb'"\ud83d\ude00 \\ud83d', "it ends too early"),
        (b'"x', "it ends too early"),
        (rb'"\ud83d\u0041"}', "half of a character at byte 12: text was cut inside an emoji"),
        (rb', "a": "\ud83d"}', "invalid character (byte 11)"),
    ],
)
def test_a_body_that_was_cut_is_told_in_plain_words(content, told):
    error = refused(COMPLETIONS, b'{"prompt": ' + content)
    assert str(error) == f"The body is not valid JSON: {told}."
    assert error.code == "invalid_json"
