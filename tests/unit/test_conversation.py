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


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SHORT, LONG, WIDE, QUOTED = "hi", "x" * 100_000, "ü" * 20_000, '\\"type": "\\\\"' * 9_000


def part(text, kind="text", **more):
    return {"type": kind, "text": text, **more}


def form(*content, role="user", **more):
    return {**more, "role": role, "content": [*content]}


@pytest.mark.parametrize("said", [SHORT, LONG, WIDE, QUOTED])
def test_a_mark_of_the_cache_and_how_a_text_is_written_tell_no_conversations_apart(said):
    begun = of(form(part(said, **MARK)), path=b"/v1/messages")
    for turn in (form(part(said)), user(said), {"content": said, "role": "user"}):
        again = of(turn, form(part("more", **MARK)), path=b"/v1/messages")
        assert again == begun
    marked_first = {"role": "user", "content": [MARK | part(said)]}
    assert of(marked_first, path=b"/v1/messages") == begun
    assert of(form(part("ho"), part(said)), path=b"/v1/messages") != begun


@pytest.mark.parametrize("said", [SHORT, LONG, WIDE, QUOTED])
def test_an_input_that_is_a_string_begins_as_a_list_with_it(said):
    responses = ENDPOINTS[b"/v1/responses"]
    alone = beginning(parse_call(responses, json.dumps({"model": "m", "input": said}).encode()))
    turns = form(part(said, "input_text"), type="message"), user(said)
    more = form(part("and", "output_text"), role="assistant"), user("more")
    assert [of(turn, *more, path=b"/v1/responses") for turn in turns] == [alone] * 2


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_line_for_billing_with_another_hash_in_each_turn_tells_no_conversations_apart(in_parts):
    """What translates Claude Code's requests to chats keeps it."""

    def system(cch, text="You are terse."):
        said = f"x-anthropic-billing-header: cc_version=2.1; cch={cch};\n{text}"
        return {"role": "system", "content": [part(said)] if in_parts else said}

    begun = of(system("eb6c6"), user("hi"))
    assert of(system("0aaa9"), user("hi"), form("yes?", role="assistant"), user("more")) == begun
    assert of(system("eb6c6"), user("ho")) != begun
    assert of(system("eb6c6", "You are wordy."), user("hi")) != begun


def test_of_the_same_text_with_other_images_each_is_a_conversation():
    images = [{"type": "image_url", "image_url": {"url": f"http://a/{n}.png"}} for n in range(2)]
    assert len({of(form(part("Describe it."), image)) for image in images}) == 2


@pytest.mark.parametrize("messages", [[], "text", [1, 2], [[]], None, {"role": "user"}])
def test_what_is_no_list_of_turns_does_no_harm(messages):
    call = parse_call(CHAT, json.dumps({"model": "m", "messages": [user("a")]}).encode())

    body = json.dumps({"messages": messages}).encode()
    assert isinstance(beginning(msgspec.structs.replace(call, body=body, fields=None)), str)


def test_a_number_of_more_digits_than_python_reads_does_no_harm():
    turn = b'{"role":"user","content":"hi","x":' + b"1" * 5000 + b"}"
    bodies = [b'{"model":"m","messages":[' + turn + more + b"]}" for more in (b"", b"," + turn)]
    first, second = [beginning(parse_call(CHAT, body)) for body in bodies]
    assert first == second != ""


def test_of_a_form_nothing_is_read():
    asked = parse_call(CHAT, json.dumps({"model": "m", "messages": [user("hi")]}).encode())
    form = msgspec.structs.replace(asked, body=b"--x", fields=None, model_at=(0, 3))
    assert beginning(form) == ""
