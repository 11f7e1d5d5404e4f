"""The fields that the gateway reads are read as vLLM's own request models read them, value by value."""

import json

import pytest

from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.e2e.vllms import in_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SPECS = {spec.endpoint: spec for spec in ENDPOINTS.values()}
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    Endpoint.CHAT: {"messages": HI},
    Endpoint.CHAT_BATCH: {"messages": [HI]},
    Endpoint.COMPLETIONS: {"prompt": "hi"},
    Endpoint.RESPONSES: {"input": "hi", "store": False},
    Endpoint.MESSAGES: {"messages": HI, "max_tokens": 5, "model": "m"},
    Endpoint.EMBEDDINGS: {"input": "hi"},
    Endpoint.EMBED: {"texts": ["hi"]},
    Endpoint.POOLING: {"input": "hi"},
    Endpoint.CLASSIFY: {"input": "hi"},
    Endpoint.RERANK: {"query": "a", "documents": ["b"]},
    Endpoint.SCORE: {"text_1": "a", "text_2": "b"},
    Endpoint.GENERATIVE_SCORING: {"query": "a", "items": ["b"], "label_token_ids": [1]},
    Endpoint.DECISIONS: {"state": "a", "questions": {}},
    Endpoint.TOKENIZE: {"prompt": "hi"},
}
SCALARS = [
    "7",
    "7.0",
    "7.5",
    "-0",
    "0",
    "1",
    "1.0",
    "2",
    "1e2",
    "1e300",
    "true",
    "false",
    "null",
    '"7"',
    '"7.0"',
    '"',
    "7",
    '"',
    '"+7"',
    '"-7"',
    '"1_000"',
    '"0x1"',
    '"1e3"',
    '""',
    '"x"',
    '"true"',
    '"True"',
    '"on"',
    '"OFF"',
    '"y"',
    '"n"',
    '"t"',
    '"F"',
    '"yes"',
    '"1"',
    '"0"',
    '"1.0"',
    '"null"',
    '"７"',
    "[]",
    "[1]",
    "{}",
    '{"a":1}',
    "9007199254740993.0",
]
SCALARS = [each for each in SCALARS if each not in ('"', "7")] + ["7", '" 7 "', '"7\\n"']
LISTS = [
    "[1,2]",
    "[1.0,2.0]",
    '["7",8]',
    '[8,"7",true]',
    "[true,2]",
    '[[1.0],[2,"3"]]',
    "[[1],[2]]",
    '["7","8"]',
    '[1,"x"]',
    '["x",1]',
    "[1.5]",
    '[[1],["x"]]',
    "[[1],2]",
    "[null]",
    "5",
    '{"a":1}',
    "true",
    '"hi"',
    '["hi","there"]',
]
FIELDS = {
    "model": list(BODIES),
    "stream": [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES],
    "n": [Endpoint.CHAT, Endpoint.COMPLETIONS],
    "max_tokens": [Endpoint.CHAT, Endpoint.CHAT_BATCH, Endpoint.COMPLETIONS, Endpoint.MESSAGES],
    "max_completion_tokens": [Endpoint.CHAT, Endpoint.CHAT_BATCH],
    "max_output_tokens": [Endpoint.RESPONSES],
    "truncate_prompt_tokens": [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS]
    + [Endpoint.POOLING, Endpoint.CLASSIFY, Endpoint.RERANK, Endpoint.SCORE],
    "include_usage": [Endpoint.CHAT, Endpoint.COMPLETIONS],
    "prompt": [Endpoint.COMPLETIONS],
    "input": [Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY],
}
# What vLLM takes and no client means: not read here.
UNSAFE = {("max_tokens", "1e300")}


def written(endpoint, field, value):
    """Return a body whose field has exactly this text."""
    body = dict(BODIES[endpoint])
    if field == "include_usage":
        body |= {"stream": True, "stream_options": {"include_usage": "@"}}
    else:
        body[field] = "@"
    return json.dumps(body).replace('"@"', value)


CASES = [
    (endpoint, field, value)
    for field, endpoints in FIELDS.items()
    for endpoint in endpoints
    for value in (LISTS if field in ("prompt", "input") else SCALARS)
]


@pytest.fixture(scope="module")
def read_by_vllm():
    asked = [[each.value, written(each, field, value)] for each, field, value in CASES]
    answers = in_vllm("vllm_lax.py", asked)
    return dict(zip(CASES, answers, strict=True))


def read_here(endpoint, body):
    """Return the call, None for a wrong type, or the code of another refusal."""
    try:
        return parse_call(SPECS[endpoint], body.encode())
    except RequestError as error:
        return None if error.code in ("invalid_type", "missing_required_parameter") else error.code


def seen(call, field):
    """Return what a call says of a field, in vLLM's words."""
    return {
        "model": call.model,
        "stream": call.stream,
        "n": call.choices,
        "truncate_prompt_tokens": call.truncates_prompt,
        "include_usage": call.wants_usage,
        "prompt": call.prompt_token_ids,
        "input": call.prompt_token_ids,
    }.get(field, call.max_new_tokens)


def meant(values, field, endpoint):
    """Return the same of what vLLM has read."""
    if field in ("prompt", "input"):
        return max(values["ids"]) if values["ids"] else None
    value = values[field]
    if field == "model":
        return value or ""
    if field == "n":
        return 1 if value is None else value
    if field == "max_tokens" and value is None and endpoint is Endpoint.COMPLETIONS:
        return 16
    if field == "truncate_prompt_tokens":
        return value is not None
    return bool(value) if field in ("stream", "include_usage") else value


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_has_the_value_that_vllm_reads(field, read_by_vllm):
    wrong = []
    for (endpoint, name, value), told in read_by_vllm.items():
        if name != field:
            continue
        ours = read_here(endpoint, written(endpoint, name, value))
        if isinstance(ours, str):
            continue  # refused here for its value, not for its type
        if "refused" in told:
            ok = ours is None or value == "null" or not is_a_type(told["refused"], field)
        else:
            ok = ours is not None and seen(ours, field) == meant(told, field, endpoint)
        if not ok and (name, value) not in UNSAFE:
            wrong.append((endpoint.value, value, told, ours and seen(ours, field)))
    assert wrong == []


def is_a_type(errors, field):
    """Whether vLLM refused the type of the field, not its size or something else."""
    return any(
        kind.endswith(("_type", "_parsing", "_from_float")) and field in place
        for kind, *place in errors
    )
