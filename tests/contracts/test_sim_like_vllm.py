"""The simulator answers as the vLLM 0.32 that we ran: status, headers, keys and their order, types.

`tests/data/vllm-0.32/http/NAME.txt` holds the bytes that a vLLM server (a tiny random model named
`tiny`, window 2048, adapter `lora-a`) sent for the request NAME below. Where the reply does not
depend on what a model says, it must be equal byte for byte. `tests/data/vllm-0.33` holds what 0.33
sends in another form; all others of these replies have the same one.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import sys
from dataclasses import replace

import pytest

from gateway.sim.server import SimConfig, SimServer

DATA = pathlib.Path(__file__).parents[1] / "data" / "vllm-0.32"
NEWER = DATA.with_name("vllm-0.33")
CONFIG = SimConfig(model="tiny", adapters=("lora-a",), max_model_len=2048, speed=0)
NEWER_CONFIG = replace(CONFIG, version="0.33.0")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BATCH = "/v1/chat/completions/batch"
HELLO = [{"role": "user", "content": "hello there"}]
SAID = {"model": "tiny", "messages": HELLO}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

# Same keys in the same order, same types, the same kinds of frames.
SHAPES = {
    "version": ("GET", "/version", None),
    "health": ("GET", "/health", None),
    "models": ("GET", "/v1/models", None),
    "chat": ("POST", CHAT, SAID | {"max_tokens": 4, "temperature": 0}),
    "chat_stream": ("POST", CHAT, SAID | USAGE | {"max_tokens": 3}),
    "chat_stream_n2": (
        "POST",
        CHAT,
        SAID | {"model": "lora-a", "max_tokens": 2, "n": 2, "stream": True},
    ),
    "chat_continuous": ("POST", CHAT, SAID | ALWAYS | {"max_tokens": 2}),
    "chat_tokenids": (
        "POST",
        CHAT,
        SAID | {"max_tokens": 2, "stream": True, "return_token_ids": True},
    ),
    "completions": ("POST", COMPLETIONS, {"prompt": "hello there", "max_tokens": 3, "n": 2}),
    "completions_list": ("POST", COMPLETIONS, {"prompt": ["hello there", "x"], "max_tokens": 2}),
    "completions_stream": ("POST", COMPLETIONS, {"prompt": "hello", "max_tokens": 2} | USAGE),
    "continuous_completions": ("POST", COMPLETIONS, {"prompt": "hi", "max_tokens": 2} | ALWAYS),
    "completions_default": ("POST", COMPLETIONS, {"prompt": [500, 600, 700]}),
    "responses": ("POST", RESPONSES, {"model": "tiny", "input": "hello", "max_output_tokens": 3}),
    "responses_stream": (
        "POST",
        RESPONSES,
        # The engine's first token was half a character, so its two tokens gave one delta.
        {"model": "tiny", "input": "hello", "max_output_tokens": 1, "stream": True},
    ),
    "messages": ("POST", MESSAGES, SAID | {"max_tokens": 3}),
    "messages_stream": ("POST", MESSAGES, SAID | {"max_tokens": 2, "stream": True}),
    "count_tokens": ("POST", "/v1/messages/count_tokens", SAID),
    "tokenize": ("POST", "/tokenize", {"model": "tiny", "prompt": "hello there"}),
    "detokenize": ("POST", "/detokenize", {"model": "tiny", "tokens": [500, 600]}),
    "tokenizer_info": ("GET", "/tokenizer_info", None),
    "chat_batch": (
        "POST",
        BATCH,
        {"model": "tiny", "messages": [HELLO, [{"role": "user", "content": "x"}]], "max_tokens": 3},
    ),
    "embeddings": ("POST", "/v1/embeddings", {"model": "tiny", "input": "hello"}),
    "embed": (
        "POST",
        "/v2/embed",
        {"model": "tiny", "texts": ["hello"], "embedding_types": ["base64", "binary"]},
    ),
    "pooling": (
        "POST",
        "/pooling",
        {"model": "tiny", "input": "hello", "encoding_format": "base64"},
    ),
    "classify": ("POST", "/classify", {"model": "tiny", "input": ["hello", "x"]}),
    "score": ("POST", "/score", {"model": "tiny", "text_1": "a", "text_2": ["b", "c"]}),
    "rerank": ("POST", "/v2/rerank", {"model": "tiny", "query": "a", "documents": ["b", "c"]}),
    "generative_scoring": (
        "POST",
        "/generative_scoring",
        {"query": "is it", "items": ["a", "b"], "label_token_ids": [500, 600]},
    ),
    "decisions": (  # of another tiny model: "yes" and "no" must be one token each
        "POST",
        "/v1/systemone",
        {
            "state": {"text": "my card was charged twice"},
            "questions": {
                "team": {"type": "choice", "criteria": {"billing": None, "shipping": "parcels"}},
                "urgent": {"type": "noul", "instructions": "is money moving"},
                "tone": {"type": "score", "criteria": ["calm", "annoyed", "furious"]},
            },
        },
    ),
}
LORA_B = {"lora_name": "lora-b", "lora_path": "/models/lora-b"}
# Equal byte for byte.
EQUAL = {
    "e_model": ("POST", CHAT, SAID | {"model": "nope"}),
    "e_model_msg": ("POST", MESSAGES, SAID | {"model": "nope", "max_tokens": 3}),
    "e_model_resp": ("POST", RESPONSES, {"model": "nope", "input": "x"}),
    "e_model_tok": ("POST", "/tokenize", {"model": "nope", "prompt": "x"}),
    "e_json": ("POST", CHAT, b'{"a":'),
    "e_json_trail": ("POST", CHAT, b'{"a":1,}'),
    "e_json_array": ("POST", CHAT, b"[1]"),
    "e_field": ("POST", CHAT, {"model": "tiny"}),
    "e_field2": ("POST", CHAT, SAID | {"max_tokens": "x"}),
    "e_msg_field": ("POST", MESSAGES, SAID),
    "e_resp_field": ("POST", RESPONSES, {"model": "tiny", "other": 1}),
    "e_ctx_comp": ("POST", COMPLETIONS, {"model": "tiny", "prompt": [500] * 2049}),
    "e_ctx_comp3000": ("POST", COMPLETIONS, {"model": "tiny", "prompt": [500] * 3000}),
    "e_eq": ("POST", COMPLETIONS, {"model": "tiny", "prompt": [500] * 2048}),
    "e_maxtok": ("POST", CHAT, SAID | {"max_tokens": 5000}),
    "e_maxtok2": ("POST", CHAT, SAID | {"max_completion_tokens": 5000}),
    "e_maxtok0": ("POST", CHAT, SAID | {"max_tokens": 0}),
    "e_msg_maxtok": ("POST", MESSAGES, SAID | {"max_tokens": 5000}),
    "e_resp_maxtok": ("POST", RESPONSES, {"input": "x", "max_output_tokens": 5000}),
    "e_n0": ("POST", CHAT, SAID | {"n": 0}),
    "e_n_greedy": ("POST", CHAT, SAID | {"n": 2, "temperature": 0}),
    "e_stream_opts": ("POST", CHAT, SAID | {"stream_options": {"include_usage": True}}),
    "e_batch_n": ("POST", BATCH, {"model": "tiny", "messages": [HELLO], "n": 2}),
    "e_empty_prompt": ("POST", COMPLETIONS, {"model": "tiny", "prompt": ""}),
    "e_decisions": ("POST", "/v1/systemone", {"model": "tiny", "state": "x"}),
    "e_route": ("POST", "/v1/nope", {}),
    "e_method": ("GET", CHAT, None),
    "lora_nopath": ("POST", LOAD, {"lora_name": "x", "lora_path": ""}),
    "lora_base": ("POST", LOAD, {"lora_name": "tiny", "lora_path": "/x"}),
    "lora_ok": ("POST", LOAD, LORA_B),
    "lora_un2": ("POST", UNLOAD, LORA_B),
}
# vLLM repeats the wording of Python's json module. The recordings come from Python 3.11, and 3.13
# words this error differently.
if sys.version_info >= (3, 13):
    SHAPES["e_json_trail"] = EQUAL.pop("e_json_trail")


async def exchange(sim: SimServer, method: str, path: str, body, kind="application/json") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", sim.port)
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    if body is not None:
        head += f"content-type: {kind}\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"\r\n" + data)
    answer = await reader.read()
    writer.close()
    return answer


def ask_sim(*requests, config: SimConfig = CONFIG, fault: str | None = None) -> bytes:
    """Send the requests to a fresh simulator; return the last answer."""

    async def main() -> bytes:
        async with asyncio.timeout(10), SimServer(config, [fault] if fault else []) as sim:
            answers = [await exchange(sim, *request) for request in requests]
            return answers[-1]

    return asyncio.run(main())


def split(answer: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


def parts(answer: bytes) -> tuple[str, set[str], list[str]]:
    """Split an answer into status line, header names and body frames (chunks, if chunked)."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    frames = []
    if b"chunked" in head:
        while body:
            size, _, rest = body.partition(b"\r\n")
            frames.append(rest[: int(size, 16)].decode())
            body = rest[int(size, 16) + 2 :]
    else:
        frames.append(body.decode())
    return status, {line.split(":")[0] for line in lines}, frames


def shape(value):
    """Replace values by their types; keep keys, and their order."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def frame_shape(frame: str) -> str:
    return re.sub(
        r"^(data: )?([\[{].*)$",
        lambda m: m[0] if m[2] == "[DONE]" else (m[1] or "") + str(shape(json.loads(m[2]))),
        frame,
        flags=re.MULTILINE,
    )


def recorded(name: str, folder: pathlib.Path = DATA) -> bytes:
    return (folder / "http" / f"{name}.txt").read_bytes()


def assert_same_shape(name: str, answer: bytes, folder: pathlib.Path = DATA) -> None:
    status, headers, frames = parts(recorded(name, folder))
    sim_status, sim_headers, sim_frames = parts(answer)
    assert sim_status == status
    assert sim_headers == headers
    assert list(map(frame_shape, sim_frames)) == list(map(frame_shape, frames))


def assert_equal(name: str, answer: bytes, folder: pathlib.Path = DATA) -> None:
    assert_same_shape(name, answer, folder)
    assert parts(answer)[2] == parts(recorded(name, folder))[2]


@pytest.mark.parametrize("name", SHAPES)
def test_replies_have_the_shape_of_the_real_ones(name):
    assert_same_shape(name, ask_sim(SHAPES[name]))


NEWER_NAMES = {each.stem for each in (NEWER / "http").iterdir()}


@pytest.mark.parametrize("name", sorted(NEWER_NAMES & SHAPES.keys()))
def test_replies_of_a_newer_release_have_its_shape(name):
    assert_same_shape(name, ask_sim(SHAPES[name], config=NEWER_CONFIG), NEWER)


def test_raw_vectors_are_described_by_a_header():
    asked = {"input": ["hello", "x"], "encoding_format": "bytes"}
    status, headers, _ = split(ask_sim(("POST", "/v1/embeddings", asked)))
    real_status, real_headers, _ = split(recorded("embeddings_bytes"))
    assert (status, headers.keys()) == (real_status, real_headers.keys())
    assert shape(json.loads(headers["metadata"])) == shape(json.loads(real_headers["metadata"]))


@pytest.mark.parametrize("name", EQUAL)
def test_refusals_are_equal_to_the_real_ones(name):
    assert_equal(name, ask_sim(EQUAL[name]))


@pytest.mark.parametrize("name", sorted(NEWER_NAMES & EQUAL.keys()))
def test_refusals_of_a_newer_release_are_equal_to_its_own(name):
    assert_equal(name, ask_sim(EQUAL[name], config=NEWER_CONFIG), NEWER)


def test_the_content_type_is_checked():
    assert_equal("e_ct", ask_sim(("POST", CHAT, b"{}", "text/plain")))


def test_a_missing_key_is_refused_in_vllms_way():
    locked = SimConfig(model="tiny", api_key="secret")
    status, _, frames = parts(ask_sim(("GET", "/v1/models", None), config=locked))
    real_status, _, real_frames = parts(recorded("e_auth"))
    assert (status, frames) == (real_status, real_frames)


def test_an_adapter_loaded_twice_and_unloaded():
    load, unload = ("POST", LOAD, LORA_B), ("POST", UNLOAD, LORA_B)
    assert_equal("lora_again", ask_sim(load, load))
    assert_equal("lora_un", ask_sim(load, unload))


def test_an_adapter_that_is_not_there():
    missing = {"lora_name": "x", "lora_path": "/missing"}
    status, _, frames = parts(ask_sim(("POST", LOAD, missing)))
    real_status, _, real_frames = parts(recorded("lora_missing"))
    assert status == real_status
    assert frames == [real_frames[0].replace("/nope", "/missing")]


@pytest.mark.parametrize(
    ("name", "config", "folder"),
    [
        ("dead_chat", CONFIG, DATA),
        ("dead_messages", CONFIG, DATA),
        ("dead_health", CONFIG, DATA),
        ("dead_chat", NEWER_CONFIG, NEWER),
        ("dead_messages", NEWER_CONFIG, NEWER),
    ],
)
def test_a_dead_engine_answers_as_the_real_one(name, config, folder):
    path = {"dead_chat": CHAT, "dead_messages": MESSAGES, "dead_health": "/health"}[name]
    then = (
        ("GET", path, None) if name == "dead_health" else ("POST", path, SAID | {"max_tokens": 3})
    )
    answer = ask_sim(("POST", CHAT, SAID), then, config=config, fault="die_on_prompt:hello")
    assert_equal(name, answer, folder)


def error_in(stream: bytes) -> bytes:
    (found,) = [each for each in stream.split(b"\n\n") if b'"error"' in each]
    return found


@pytest.mark.parametrize(
    ("name", "path"), [("chat", CHAT), ("completions", COMPLETIONS), ("messages", MESSAGES)]
)
def test_an_engine_of_a_newer_release_that_dies_in_a_stream_says_what_the_real_one_says(name, path):
    asked = {"stream": True, "max_tokens": 9} | (
        {"prompt": "hello"} if name == "completions" else SAID
    )
    answer = ask_sim(("POST", path, asked), config=NEWER_CONFIG, fault="die_on_prompt:hello")
    told = "".join(parts(answer)[2]).encode()
    assert error_in(told) == error_in((NEWER / f"{name}_engine_died.sse").read_bytes())


def test_an_engine_that_dies_in_a_stream_ends_it_as_the_real_one():
    answer = ask_sim(("POST", CHAT, SAID | {"stream": True}), fault="die_on_prompt:hello")
    assert_equal("dead_chat_stream", answer)


FUNCTION = {"name": "get_weather", "parameters": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLS = {
    "tools_forced_stream": (
        CHAT,
        SAID | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": NAMED},
    ),
    "responses_tools_stream": (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"},
    ),
    "messages_tools_stream": (
        MESSAGES,
        SAID
        | {
            "max_tokens": 60,
            "tools": [{"name": "get_weather", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_streamed_in_the_real_shapes(name):
    path, body = CALLS[name]
    real = parts(recorded(name))[2]
    simulated = parts(ask_sim(("POST", path, body | {"stream": True})))[2]
    # How a call ends depends on the model's words, and `tools` are told back; all else is fixed.
    ending = re.compile(r'"(finish_reason":"|type":"response\.(created|in_progress|completed))')
    kept = [
        [frame_shape(f) for f in frames if not ending.search(f)] for frames in (real, simulated)
    ]
    assert len(set(kept[1])) >= 4
    assert set(kept[1]) <= set(kept[0])


def families(page: str) -> dict[str, tuple[str, set[frozenset[str]]]]:
    """Read a metrics page: name -> type and the sets of label names of its samples."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    found: dict[str, tuple[str, set[frozenset[str]]]] = {n: (k, set()) for n, k in kinds.items()}
    for name, labels in re.findall(r"^(\w[\w:]*)(?:\{(.*)\})? ", page, re.MULTILINE):
        base = name if name in kinds else re.sub(r"_(bucket|count|sum)$", "", name)
        found[base][1].add(frozenset(re.findall(r'(\w+)="', labels)) - {"le"})
    return found


def test_every_metric_of_the_simulator_is_one_of_the_real_ones():
    async def main() -> str:
        async with SimServer(CONFIG) as sim:
            await exchange(sim, "POST", CHAT, SAID)
            return parts(await exchange(sim, "GET", "/metrics", None))[2][0]

    real, simulated = families((DATA / "metrics.txt").read_text()), families(asyncio.run(main()))
    engine = {name for name in simulated if name.startswith("vllm:")}
    assert len(engine) >= 16
    assert engine <= set(real)
    for name in engine - {"vllm:cache_config_info"}:
        assert simulated[name] == real[name], name
    (few,), (many,) = simulated["vllm:cache_config_info"][1], real["vllm:cache_config_info"][1]
    assert few <= many
