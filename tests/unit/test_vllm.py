"""What is read of a backend's metrics, model list, routes, version and token counts."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.types import Call, Endpoint, LoadSample, ServedModel
from gateway.pools.progress import moved
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.metricspage import MAX_METRICS_BYTES, parse_metrics
from gateway.wire.vllm import (
    chats_take_ids,
    cut_tokens,
    parse_models,
    parse_openapi_endpoints,
    parse_tokenize,
    parse_version,
    prompt_bytes,
    tokenize_request,
)


def page(*lines: str) -> bytes:
    return "\n".join(["# TYPE vllm:num_requests_running gauge", *lines, ""]).encode()


def engine(number: int, running: float, waiting: float, kv: float) -> list[str]:
    labels = f'{{engine="{number}",model_name="m"}}'
    return [
        f"vllm:num_requests_running{labels} {running}",
        f"vllm:num_requests_waiting{labels} {waiting}",
        f"vllm:kv_cache_usage_perc{labels} {kv}",
        f"vllm:prompt_tokens_total{labels} 1e3",
        f"vllm:generation_tokens_total{labels} 10.0",
        f"vllm:iteration_tokens_total_count{labels} 1.0",
        f"vllm:num_preemptions_total{labels} 2.0",
    ]


def read(*lines: str) -> LoadSample:
    sample = parse_metrics(page(*lines), 7.0)
    assert sample is not None
    return sample


def test_engines_are_summed_and_the_fullest_cache_counts():
    sample = read(*engine(0, 3, 1, 0.25), *engine(1, 4, 2, 0.75))
    assert (sample.at, sample.running, sample.waiting) == (7.0, 7, 3)
    assert sample.kv_usage_ratio == 0.75
    assert sample.progress == 2 * 1011
    assert sample.preemptions == 4
    assert not sample.asleep


def test_what_steps_move_that_make_no_token_is_seen():
    lines = ("vllm:num_requests_running 1", "vllm:prefix_cache_queries_total 30")
    before = parse_metrics(page(*lines), 1.0)
    assert not moved(before, parse_metrics(page(*lines), 2.0))
    for more in (
        "vllm:num_preemptions_total 1",
        "vllm:kv_cache_usage_perc 0.25",
        "vllm:estimated_flops_per_gpu_total 1e15",
        'vllm:lora_requests_info{running_lora_adapters="a"} 1.7e9',
        "vllm:num_requests_waiting 1",
    ):
        assert moved(before, parse_metrics(page(*lines, more), 2.0)), more


def test_other_metrics_of_similar_names_are_not_taken():
    sample = read(
        *engine(0, 1, 2, 0.5),
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9',
        'vllm:prompt_tokens_by_source_total{source="x"} 9',
        "vllm:generation_tokens_created 9e9",
        "vllm:iteration_tokens_total_sum 9",
        "other:num_requests_running 9",
        "# vllm:num_requests_running 9",
        " vllm:num_requests_running 9",
    )
    assert (sample.running, sample.waiting, sample.progress) == (1, 2, 1011)


@pytest.mark.parametrize("odd", ["-4", "1e308", "NaN", "+Inf"])
def test_what_no_engine_can_mean_is_passed_over(odd):
    names = ("num_requests_running", "num_requests_waiting", "generation_tokens_total")
    lines = [f'vllm:{name}{{engine="{number}"}} {odd}' for name in names for number in (1, 2)]
    sample = read(*engine(0, 1, 2, 0.5), *lines)
    assert (sample.running, sample.waiting, sample.generation_tokens) == (1, 2, 10.0)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_nothing_fits_into_is_none(window):
    (model,) = parse_models(b'{"data": [{"id": "m", "max_model_len": %d}]}' % window)
    assert model.window_tokens is None


def test_the_old_name_of_the_cache_usage_is_known():
    assert (
        read("vllm:num_requests_running 1", "vllm:gpu_cache_usage_perc 0.4").kv_usage_ratio == 0.4
    )


def test_without_cache_metrics_the_usage_is_unknown_not_zero():
    sample = read("vllm:num_requests_running 1")
    assert sample.kv_usage_ratio is None
    assert sample.kv_capacity_tokens is None
    assert sample.waiting == 0


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ('block_size="16",num_gpu_blocks="100"', 1600),
        ('block_size="16",kv_cache_size_tokens="1500",num_gpu_blocks="100"', 1500),
        ('block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="100"', 1600),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('note="kv_cache_size_tokens=\\"5\\" }",kv_cache_size_tokens="1500"', 1500),
    ],
)
def test_the_capacity_is_the_engines_own_figure_where_it_gives_one(labels, capacity):
    sample = read("vllm:num_requests_running 1", f"vllm:cache_config_info{{{labels}}} 1.0")
    assert sample.kv_capacity_tokens == capacity


def test_the_capacity_of_several_engines_is_told_once():
    info = 'vllm:cache_config_info{{engine="{}",kv_cache_size_tokens="1500"}} 1.0'
    sample = read("vllm:num_requests_running 1", info.format(0), info.format(1))
    assert sample.kv_capacity_tokens == 1500


def test_blocks_of_several_engines_are_their_sum_and_the_capacity_is_of_one():
    info = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="300"}} 1.0'
    each = [info.format(number) for number in range(3)]  # the sum, in each
    assert read("vllm:num_requests_running 1", *each).kv_capacity_tokens == 1600


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("more", ['kv_cache_size_tokens="None",', ""])
def test_an_engine_with_only_the_block_that_is_never_used_has_no_kv_cache(engines, more):
    info = 'vllm:cache_config_info{{block_size="16",engine="{}",{}num_gpu_blocks="{}"}} 1.0'
    each = [info.format(number, more, engines) for number in range(engines)]  # the sum, in each
    assert read("vllm:num_requests_running 1", *each).kv_capacity_tokens == 0


def test_two_blocks_of_one_engine_are_a_cache():
    info = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2"} 1.0'
    assert read("vllm:num_requests_running 1", info).kv_capacity_tokens == 32


@pytest.mark.parametrize(
    ("awake", "offloaded", "asleep"), [(1.0, 0.0, False), (0.0, 1.0, True), (0.0, 0.0, False)]
)
def test_a_sleeping_engine_is_seen(awake, offloaded, asleep):
    sample = read(
        "vllm:num_requests_running 0",
        f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}',
        f'vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} {offloaded}',
    )
    assert sample.asleep is asleep


def test_adapters_are_those_of_the_newest_series():
    info = 'vllm:lora_requests_info{{running_lora_adapters="{}",waiting_lora_adapters="x"}} {}'
    series = [info.format(*each) for each in (("old", 10.5), ("b, a", 11.5), ("", 9))]
    sample = read("vllm:num_requests_running 0", *series)
    assert sample.running_adapters == ("a", "b")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "x", "1.0.0", "0x10", ""])
def test_a_line_that_cannot_be_read_is_passed_over(value):
    odd = f"vllm:num_requests_running {value}"
    sample = read("vllm:num_requests_running 2", odd, "vllm:num_requests_waiting 1")
    assert (sample.running, sample.waiting) == (2, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff" * 100,
        page("vllm:num_requests_waiting 1"),
        page("vllm:num_requests_running NaN"),
    ],
)
def test_a_page_without_load_is_none(body):
    assert parse_metrics(body, 0.0) is None


def test_an_endless_page_is_not_read():
    body = page("vllm:num_requests_running 1") + b"\n" * MAX_METRICS_BYTES
    assert parse_metrics(body, 0.0) is None


def test_a_page_made_to_be_slow_is_not():
    hostile = (
        b"vllm:num_requests_running{" + b'"' * 100_001 + b"\n" + b"vllm:cache_config_info{" * 20_000
    )
    before = time.process_time()
    parse_metrics(hostile, 0.0)
    assert time.process_time() - before < 2.0


@given(
    engines=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1)),
        min_size=1,
        max_size=4,
    ),
    name=st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=8
    ),
)
@settings(max_examples=100, deadline=None)
def test_it_agrees_with_the_general_parser(engines, name):
    safe = name.replace("\\", "\\\\").replace('"', '\\"')
    lines = []
    for number, (running, waiting, kv) in enumerate(engines):
        labels = f'{{engine="{number}",model_name="{safe}"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running}.0",
            f"vllm:num_requests_waiting{labels} {waiting}.0",
            f"vllm:kv_cache_usage_perc{labels} {kv}",
        ]
    body = page(*lines)
    sample = parse_metrics(body, 0.0)
    assert sample is not None
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(body.decode()):
        for each in family.samples:
            values.setdefault(each.name, []).append(each.value)
    assert sample.running == sum(values["vllm:num_requests_running"])
    assert sample.waiting == sum(values["vllm:num_requests_waiting"])
    assert sample.kv_usage_ratio == max(values["vllm:kv_cache_usage_perc"])


# --- models, routes, version --------------------------------------------------------------------


def test_models_and_adapters_are_read():
    model = {"id": "m", "max_model_len": 10, "x": 1}
    body = {"data": [model, {"id": "a", "parent": "m", "max_model_len": None}]}
    assert parse_models(json.dumps(body).encode()) == (
        ServedModel("m", None, 10),
        ServedModel("a", "m", None),
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data": 5}', b'{"data": [{}]}', b"{" * 9999]
)
def test_what_is_no_answer_is_no_knowledge(body):
    assert parse_models(body) == ()
    assert parse_openapi_endpoints(body) is None
    assert parse_version(body) is None
    assert parse_tokenize(body) is None


def test_only_endpoints_that_take_a_post_are_served():
    paths = {
        "/v1/chat/completions": {"post": {}},
        "/v1/embeddings": {"get": {}},
        "/x": {"post": {}},
    }
    body = json.dumps({"openapi": "3.1.0", "paths": paths}).encode()
    assert parse_openapi_endpoints(body) == {Endpoint.CHAT}


def test_a_version_is_read():
    assert parse_version(b'{"version": "0.32.0"}') == "0.32.0"


# --- exact counts -------------------------------------------------------------------------------


def call(path: bytes, **fields: object) -> Call:
    return parse_call(ENDPOINTS[path], json.dumps({"model": "alias", **fields}).encode())


def asked(path: bytes, **fields: object) -> object:
    body = tokenize_request(call(path, **fields), "served")
    return None if body is None else json.loads(body)


def test_a_chat_is_counted_with_its_reasoning_under_the_name_that_the_counter_knows():
    older, newer = {"role": "assistant", "reasoning_content": "hm"}, {"reasoning": "so"}
    messages = [older, {**older, **newer}, {**older, "reasoning_content": None}]
    told = asked(b"/v1/chat/completions", messages=messages)
    assert told["messages"] == [
        {"role": "assistant", "reasoning": "hm"},
        {"role": "assistant", "reasoning": "so"},
        {"role": "assistant"},
    ]
    said = {"role": "user", "content": '"reasoning_content" is a field'}
    assert asked(b"/v1/chat/completions", messages=[said])["messages"] == [said]


@pytest.mark.parametrize("field", ["chat_template", "mm_processor_kwargs", "media_io_kwargs"])
def test_a_chat_is_counted_with_what_a_pool_may_allow_clients_to_say_of_its_prompt(field):
    told = asked(b"/v1/chat/completions", messages=[], **{field: {"a": 1}})
    assert told[field] == {"a": 1}


def test_a_chat_is_counted_with_all_that_changes_its_prompt():
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]
    assert asked(
        b"/v1/chat/completions",
        messages=messages,
        tools=tools,
        temperature=0.5,
        stream=True,
        add_generation_prompt=False,
        continue_final_message=None,
        reasoning_effort="low",
        documents=[{"text": "a"}],
        chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "high"},
    ) == {
        "model": "served",
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": False,
        "chat_template_kwargs": {
            "enable_thinking": False,
            "reasoning_effort": "low",
            "documents": [{"text": "a"}],
        },
    }
    assert asked(b"/v1/chat/completions", messages=messages) == {
        "model": "served",
        "messages": messages,
    }


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
def test_of_a_chat_with_an_effort_the_thinking_that_it_switches_is_counted_too(effort, thinks):
    messages = [{"role": "user", "content": "hi"}]
    told = asked(b"/v1/chat/completions", messages=messages, reasoning_effort=effort)
    switched = {"enable_thinking": thinks, "reasoning_effort": effort}
    assert told["chat_template_kwargs"] == switched


def test_a_single_text_is_counted():
    assert asked(b"/v1/completions", prompt="hi", add_special_tokens=False) == {
        "model": "served",
        "prompt": "hi",
        "add_special_tokens": False,
    }
    assert asked(b"/v1/embeddings", input="hi") == {"model": "served", "prompt": "hi"}


def test_of_several_texts_the_longest_is_counted():
    assert asked(b"/v1/completions", prompt=["a"]) == {"model": "served", "prompt": "a"}
    assert asked(b"/v1/embeddings", input=["a", "bcd", "ef"])["prompt"] == "bcd"


def test_what_cannot_be_counted_is_not_asked():
    assert asked(b"/v1/chat/completions") is None
    assert asked(b"/v1/completions", prompt=[]) is None
    assert asked(b"/v1/completions") is None
    assert asked(b"/v1/responses", input="a") is None


def test_a_count_is_read_and_the_ids_are_skipped():
    assert parse_tokenize(b'{"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]}') == (3, 9)
    assert parse_tokenize(b'{"count": -1, "max_model_len": 9}') is None


# --- without a count ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "kept"),
    [
        (b"/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 7}, 7),
        (b"/v1/completions", {"prompt": [1, 2], "truncate_prompt_tokens": 1}, 1),
        (b"/v1/completions", {"prompt": "a", "truncate_prompt_tokens": -1}, None),
        (b"/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}, None),
        (b"/v1/completions", {"prompt": "a"}, None),
        (b"/v1/responses", {"input": "a", "truncate_prompt_tokens": 7}, None),
        (b"/v1/messages", {"messages": [], "truncate_prompt_tokens": 7}, None),
        (
            b"/v1/chat/completions",
            {"messages": [{"content": [{"type": "image_url"}]}], "truncate_prompt_tokens": 7},
            None,
        ),
    ],
)
def test_a_cut_is_what_the_engine_surely_keeps(path, fields, kept):
    assert cut_tokens(call(path, **fields)) == kept


def test_images_are_no_text():
    text, image = {"type": "text", "text": "abc"}, {"type": "image_url", "image_url": "x" * 9000}
    for content in ([text, image], [image], "plain", None, ["odd"]):
        asked = call(b"/v1/chat/completions", messages=[{"role": "user", "content": content}])
        plain = len(asked.body) - (len(json.dumps(image)) if isinstance(content, list) else 0)
        if content == ["odd"]:
            plain = len(asked.body)
        assert prompt_bytes(asked) == plain
    tools = [{"type": "function"}]
    more = call(b"/v1/chat/completions", messages=[{"content": [image]}], tools=tools)
    grown = 2 * len(json.dumps(tools))
    assert prompt_bytes(more) == len(more.body) - len(json.dumps(image)) + grown


def test_a_document_stands_beside_the_query_alone():
    pairs = call(b"/v1/rerank", query="q" * 10, documents=["a" * 20, "b" * 30, "c"])
    assert 40 <= prompt_bytes(pairs) <= 60
    pairs = call(b"/v1/score", text_1=["q"], text_2=[{"content": "a" * 20}, "b" * 300])
    assert 301 <= prompt_bytes(pairs) <= 320


@pytest.mark.parametrize(
    ("version", "take"),
    [
        ("0.26.0", False),
        ("0.26.0+cpu", False),
        ("0.9.2.post2", False),
        ("0.27.0rc1", True),
        ("0.32.0", True),
        ("1.0.0", True),
        ("0.1.dev12345+g0a1b2c3", True),  # built from source
        ("nightly", True),
        (None, True),
    ],
)
def test_chats_of_newer_versions_take_token_ids(version, take):
    assert chats_take_ids(version) is take
