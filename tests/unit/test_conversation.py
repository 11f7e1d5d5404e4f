"""A conversation is known by how it begins, whatever follows and however large it grows."""

from __future__ import annotations

import json

import msgspec
import pytest

from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.conversation import beginning

CHAT = ENDPOINTS[b"/v1/chat/completions"]
SYSTEM = {"role": "system", "content": "You are terse."}


def user(text):
    return {"role": "user", "content": text}


def of(*turns, path=b"/v1/chat/completions", **more):
    field = "input" if path == b"/v1/responses" else "messages"
    body = json.dumps({"model": "m", field: turns, **more}).encode()
    return beginning(parse_call(ENDPOINTS[path], body))


def test_all_turns_of_a_conversation_begin_alike_and_others_do_not():
    first = of(SYSTEM, user("hi"))
    assert of(SYSTEM, user("hi"), {"role": "assistant", "content": "yes?"}, user("more")) == first
    assert of(SYSTEM, user("ho")) != first
    assert of(user("hi")) != first
    assert of(SYSTEM, user("hi"), stream=True, temperature=0) == first


def test_responses_and_prompts_have_a_beginning_too():
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert of(turns[0], path=b"/v1/responses") == of(*turns, path=b"/v1/responses") != ""
    completions = ENDPOINTS[b"/v1/completions"]
    asked = [
        parse_call(completions, json.dumps({"model": "m", "prompt": p}).encode()) for p in "ab"
    ]
    assert beginning(asked[0]) != beginning(asked[1])


@pytest.mark.parametrize("first", ["hi", "x" * 100_000, "ü" * 20_000])
def test_a_conversation_that_grew_large_begins_as_it_did_when_it_was_small(first):
    turns = [SYSTEM, user(first), {"role": "assistant", "content": "y" * 100_000}, user("more")]
    small = of(*turns[:2])
    body = json.dumps({"model": "m", "messages": turns}).encode()
    cut = parse_call(CHAT, body)
    assert beginning(cut) == small
    start = body.index(b'"messages": ') + len(b'"messages": ')

    large = msgspec.structs.replace(cut, fields=None, places={"messages": (start, len(body) - 1)})
    assert beginning(large) == small


@pytest.mark.parametrize("messages", [[], "text", [1, 2], [[]], None, {"role": "user"}])
def test_what_is_no_list_of_turns_does_no_harm(messages):
    call = parse_call(CHAT, json.dumps({"model": "m", "messages": [user("a")]}).encode())

    body = json.dumps({"messages": messages}).encode()
    assert isinstance(beginning(msgspec.structs.replace(call, body=body, fields=None)), str)


def test_a_number_of_more_digits_than_python_reads_does_no_harm():
    turn = b'{"role":"user","content":"hi","x":' + b"1" * 5000 + b"}"
    body = b'{"model":"m","messages":[' + turn + b"]}"
    assert beginning(parse_call(CHAT, body))


def test_of_a_form_nothing_is_read():
    asked = parse_call(CHAT, json.dumps({"model": "m", "messages": [user("hi")]}).encode())
    form = msgspec.structs.replace(asked, body=b"--x", fields=None, model_at=(0, 3))
    assert beginning(form) == ""
