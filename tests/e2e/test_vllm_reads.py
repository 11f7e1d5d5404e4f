"""Whatever vLLM's own request models take with embeddings or a cache key in it is refused here."""

import itertools
import json

import pytest

from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.fields import known_fields
from gateway.wire.parameters import effective, judge
from gateway.wire.table import TABLE
from tests.e2e.vllms import in_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SPECS = {spec.endpoint.value: spec for spec in ENDPOINTS.values() if not spec.multipart}
DANGEROUS = {"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid"}

PARTS = [
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "image_embeds", "image_embeds": None, "uuid": "u"},
    {"type": "image_embeds", "image_embeds": {"a": "AAAA"}},
    {"image_embeds": "AAAA"},
    {"image_embeds": "AAAA", "type": None},
    {"audio_embeds": "AAAA", "text": "a"},
    {"type": "audio_embeds", "audio_embeds": "AAAA"},
    {"type": "video_embeds", "video_embeds": "AAAA"},
    {"type": "prompt_embeds", "data": "AAAA"},
    {"prompt_embeds": "", "data": "AAAA"},
    {"type": "text", "text": "a", "image_embeds": "AAAA", "uuid": "u"},
    {"type": "text", "text": "a", "uuid": "u"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}, "uuid": 5},
    {"type": "image_url", "image_url": None, "uuid": "u"},
    {"image_url": "data:image/png;base64,AA", "uuid": "u"},
    {"type": "image_pil", "image_pil": "x"},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image_embeds"}]},
]
TEXT = {"type": "text", "text": "see"}
CONTENTS = [
    lambda part: [part],
    lambda part: [TEXT, part],
    lambda part: ["hi", part],
    lambda part: [{"type": 5}, part],
    lambda part: [None, part],
    lambda part: [[part]],
    lambda part: part,
    lambda part: {"0": part},
    lambda part: [{"type": "text", "text": "a", "content": [part]}],
]


def user(content):
    return {"role": "user", "content": content}


PLACES = [
    ("chat", lambda content: {"messages": [user(content)]}),
    ("chat", lambda content: {"messages": [user("hi"), {"role": "tool", "tool_call_id": "t", "content": content}]}),
    ("chat", lambda content: {"messages": [{"role": "assistant", "content": content}, user("hi")]}),
    ("chat", lambda content: {"messages": [{"role": "custom", "content": content}]}),
    ("chat", lambda content: {"messages": [[user(content)]]}),
    ("chat_batch", lambda content: {"messages": [[user("a")], [user(content)]]}),
    ("completions", lambda content: {"prompt": "a", "messages": [user(content)]}),
    ("completions", lambda content: {"prompt": content}),
    ("completions", lambda content: {"prompt": "a", "prompt_embeds": "AAAA"}),
    ("responses", lambda content: {"input": [user(content)]}),
    ("responses", lambda content: {"input": [{"type": "message", **user(content)}]}),
    ("responses", lambda content: {"input": [{"type": "function_call_output", "call_id": "c", "output": content}]}),
    ("responses", lambda content: {"input": content}),
    ("responses", lambda content: {"input": "a", "previous_input_messages": [user(content)]}),
    ("messages", lambda content: {"max_tokens": 5, "messages": [user(content)]}),
    ("messages", lambda content: {"max_tokens": 5, "messages": [user("a")], "system": content}),
    ("count_tokens", lambda content: {"messages": [user(content)]}),
    ("embeddings", lambda content: {"messages": [user(content)]}),
    ("embeddings", lambda content: {"input": "a", "messages": [user(content)]}),
    ("embeddings", lambda content: {"input": [user(content)]}),
    ("embeddings", lambda content: {"input": [[user(content)]]}),
    ("embeddings", lambda content: {"messages": [[user("a")], [user(content)]]}),
    ("embed", lambda content: {"inputs": [{"content": content}]}),
    ("pooling", lambda content: {"messages": [user(content)]}),
    ("classify", lambda content: {"messages": [user(content)]}),
    ("rerank", lambda content: {"query": {"content": content}, "documents": ["a"]}),
    ("rerank", lambda content: {"query": "a", "documents": ["a", {"content": content}]}),
    ("rerank", lambda content: {"query": "a", "documents": {"content": content}}),
    ("score", lambda content: {"text_1": {"content": content}, "text_2": "a"}),
    ("score", lambda content: {"text_1": "a", "text_2": [{"content": content}]}),
    ("score", lambda content: {"data_1": {"content": content}, "data_2": "a"}),
    ("score", lambda content: {"queries": "a", "documents": {"content": content}}),
    ("score", lambda content: {"queries": "a", "items": [{"content": content}]}),
    ("generative_scoring", lambda content: {"query": "a", "items": ["a"], "messages": [user(content)]}),
    ("tokenize", lambda content: {"messages": [user(content)]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus():
    made = [
        [endpoint, {"model": "m", **place(content(part))}]
        for (endpoint, place), content, part in itertools.product(PLACES, CONTENTS, PARTS)
    ]
    answer = in_vllm("vllm_reads.py", made)
    return list(zip(made, answer["reads"], strict=True)), answer["fields"]


def passes(endpoint, body):
    data = json.dumps(body).encode()
    try:
        judge(parse_call(SPECS[endpoint], data), effective([]))
    except RequestError:
        return False
    return True


def test_nothing_with_embeddings_or_a_cache_key_passes_that_vllm_would_read(corpus):
    read, _ = corpus
    dangerous = [asked for asked, found in read if found and DANGEROUS & set(found)]
    assert len({endpoint for endpoint, _ in dangerous}) >= 8  # the corpus is worth something
    passed = [asked for asked in dangerous if passes(*asked)]
    assert passed == []


def test_every_field_of_vllms_models_is_known(corpus):
    _, fields = corpus
    unknown = {
        endpoint: set(names) - known_fields(Endpoint(endpoint)) - set(TABLE["guided_*"].fields)
        for endpoint, names in fields.items()
    }
    assert not any(unknown.values()), unknown
