"""What is wrong with `prefix: precise`, and what the command line of a server says of its events."""

from __future__ import annotations

import sys

import pytest

from gateway.config.kvevents import flag_of
from gateway.config.supervision import LaunchConfig
from tests.unit.test_config_check import codes, findings, warnings

ON = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:7000"}'


def pool(backend="http://h:1", more="tokenizer: /m"):
    return f"pools: {{a: {{prefix: precise, backends: [{backend}], {more}}}}}\n"


def launched(**args):
    written = ", ".join(f"{name}: '{value}'" for name, value in args.items())
    return pool(f"{{launch: {{command: [vllm, serve, /m], port: 8000, args: {{{written}}}}}}}", "")


def test_precise_without_its_library_is_an_error_that_says_what_to_install(monkeypatch):
    assert codes(pool()) == []
    monkeypatch.setitem(sys.modules, "zmq", None)
    (found,) = findings(pool())
    assert found.path == ("pools", "a", "prefix")
    assert "vllm-gateway[kvevents]" in found.hint


def test_without_a_tokenizer_there_is_little_to_compare():
    assert warnings(pool(more="")) == ["no-tokenizer"]
    assert warnings(pool()) == []


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ({"kv-events-config": ON}, []),
        ({}, ["no-kv-events"]),
        ({"kv-events-config": "{}"}, ["no-kv-events"]),
        ({"kv-events-config": ON.replace("*", "127.0.0.1")}, ["kv-events-endpoint"]),
        ({"kv-events-config": ON.replace("tcp://*:7000", "ipc:///run/e")}, []),
    ],
)
def test_a_launched_server_must_publish_where_one_can_listen(args, found):
    assert warnings(launched(**args)) == found


@pytest.mark.parametrize("text", ["http://h:5557", "tcp://h", "tcp://h:0", "ipc://e", ""])
def test_an_endpoint_is_written_as_vllm_has_it(text):
    assert codes(pool(f"{{url: 'http://h:1', kv_events: '{text}'}}")) != []


def test_an_endpoint_alone_is_enough():
    assert codes(pool("{url: 'http://h:1', kv_events: 'tcp://*:5557'}")) == []
    more = "{endpoint: 'tcp://*:5557', replay_endpoint: 'tcp://*:6557', ranks: 2}"
    assert codes(pool(f"{{url: 'http://h:1', kv_events: {more}}}")) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kv-events-config", ON, "-dp", "4"], 4),
        (["--kv_events_config=" + ON], 1),
        (["--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.endpoint", "x"], 1),
    ],
)  # fmt: skip
def test_the_flag_is_read_as_vllm_reads_it(words, told):
    config, ranks = flag_of(LaunchConfig(command=("vllm", "serve", "m", *words), port=8000))
    assert ranks == told
    assert config["endpoint"] in ("tcp://*:7000", "x")
    assert config["enable_kv_cache_events"] is True


@pytest.mark.parametrize("words", [[], ["--kv-events-config", "{"], ["--kv-events-config", "1"]])
def test_what_is_no_flag_says_nothing(words):
    assert flag_of(LaunchConfig(command=("vllm", "serve", "m", *words), port=8000)) is None
