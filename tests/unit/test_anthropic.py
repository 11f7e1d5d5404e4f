"""What vLLM makes of Anthropic's Messages before it counts them."""

import json

import pytest

from gateway.core.types import Endpoint
from gateway.counting.anthropic import chat_of_message
from gateway.counting.messages import Unmodelled
from gateway.counting.tokens import countable
from gateway.wire.calls import ENDPOINTS, parse_call

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
NUMBER = {"type": "text", "text": 5}


def chat(*messages, **fields):
    return chat_of_message({"model": "m", "max_tokens": 5, "messages": list(messages), **fields})


def test_a_system_prompt_comes_first_without_the_line_that_changes_each_time():
    assert chat(USER, system="be kind") == {
        "messages": [{"role": "system", "content": "be kind"}, USER]
    }
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "be "},
        {"type": "text", "text": "kind"},
    ]
    assert chat(USER, system=blocks) == chat(USER, system="be kind")
    assert chat(USER, system="") == {"messages": [USER]}


def test_tools_their_use_and_their_results():
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "7"}],
    }
    made = chat(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        {"role": "user", "content": [result]},
        tools=[{"name": "look", "input_schema": {"properties": {}}}],
    )
    call = {"name": "look", "arguments": json.dumps({"at": "x"})}
    told = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert made["messages"] == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        told,
        {"role": "user", "content": "so?"},
        told,
    ]
    function = {
        "name": "look",
        "description": None,
        "parameters": {"properties": {}, "type": "object"},
    }
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == "auto"


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [USER, {"role": "system", "content": "now"}]},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "high"}},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [NUMBER]}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]},
        {"messages": "hi"},
        {"tools": [{"name": "x"}]},
    ],
)
def test_what_depends_on_more_than_the_request_is_left_to_the_backend(odd):
    with pytest.raises(Unmodelled):
        chat_of_message({"messages": [USER], **odd})


def test_what_is_left_to_the_backend_is_counted_by_it():
    asked = {"model": "m", "messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 5}
    call = parse_call(ENDPOINTS[b"/v1/messages"], json.dumps(asked).encode())
    assert countable(call) is call


def test_a_messages_call_is_counted_as_its_chat():
    body = {"model": "m", "max_tokens": 5, "messages": [USER], "system": "be kind"}
    call = countable(parse_call(ENDPOINTS[b"/v1/messages"], json.dumps(body).encode()))
    assert call.endpoint is Endpoint.CHAT
    assert [each["role"] for each in json.loads(call.body)["messages"]] == ["system", "user"]
