"""The chat that a Responses request is rendered as."""

import json

import pytest

from gateway.core.types import Endpoint
from gateway.counting.messages import Unmodelled, chat_of_response
from gateway.counting.tokens import countable
from gateway.wire.calls import ENDPOINTS, parse_call

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
ANSWER = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
THOUGHT = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}],
}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        (
            [{"type": "message", **USER, "content": [{"type": "input_text", "text": "hi"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:x"}}],
                }
            ],
        ),
        ([SAID], [{"role": "assistant", "content": "a"}]),
        ([{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "a"}]),
        (
            [THOUGHT, SAID, CALL, CALL],
            [
                {
                    "role": "assistant",
                    "reasoning": "hm",
                    "content": "a",
                    "tool_calls": [CALLED, CALLED],
                }
            ],
        ),
        (
            [SAID, SAID],
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}],
        ),
        (
            [CALL, ANSWER],
            [
                {"role": "assistant", "tool_calls": [CALLED]},
                {"role": "tool", "content": "noon", "tool_call_id": "c1"},
            ],
        ),
        ([{**THOUGHT, "content": None}], [{"role": "assistant", "reasoning": "short"}]),
    ],
)
def test_items_become_messages(items, messages):
    assert chat_of_response({"input": items})["messages"] == messages


def test_instructions_come_first():
    chat = chat_of_response({"input": "hi", "instructions": "be brief"})
    assert chat["messages"] == [{"role": "system", "content": "be brief"}, USER]


def test_a_partial_message_is_continued():
    chat = chat_of_response({"input": [USER, {**SAID, "status": "incomplete"}]})
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)


def test_tools_are_nested_as_a_chat_has_them():
    tool = {"type": "function", "name": "clock", "parameters": {}}
    chat = chat_of_response({"input": "hi", "tools": [tool], "tool_choice": "auto"})
    assert chat["tools"] == [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    assert chat["tool_choice"] == "auto"


def test_an_effort_switches_thinking_as_the_engine_does():
    asked = {"input": "hi", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"x": 1}}
    assert chat_of_response(asked)["chat_template_kwargs"] == {
        "enable_thinking": False,
        "x": 1,
        "reasoning_effort": "none",
    }


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"input": 5},
        {"input": ["hi"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x", "input": "y"}]},
        {"input": [{**THOUGHT, "encrypted_content": "x"}]},
        {"input": [{**CALL, "namespace": "n"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        {"input": [{"role": "assistant", "content": []}]},
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"input": [{"role": 5, "content": "x"}]},
        {"input": "hi", "tools": {"a": 1}},
        {"input": "hi", "tools": [{"type": "web_search_preview"}]},
        {"input": "hi", "reasoning": "high"},
        {"input": "hi", "chat_template_kwargs": [1]},
    ],
)
def test_what_only_the_engine_can_render_is_not_modelled(asked):
    with pytest.raises(Unmodelled):
        chat_of_response(asked)


def test_a_call_is_counted_as_its_chat():
    def call(**body):
        body = json.dumps({"model": "m", **body}).encode()
        return parse_call(ENDPOINTS[b"/v1/responses"], body)

    chat = countable(call(input="hi"))
    assert chat.endpoint is Endpoint.CHAT
    # As the engine does: the template's text gets the tokenizer's begin mark.
    assert json.loads(chat.body) == {"messages": [USER], "add_special_tokens": True}
    assert countable(call(input=[{"type": "computer_call", "id": "x"}])) is None
