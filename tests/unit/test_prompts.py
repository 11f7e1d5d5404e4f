"""How many prompts a body holds, how long the longest is, and what of it bytes cannot bound."""

import json

import pytest

from gateway.core.errors import RequestError
from gateway.core.types import Endpoint
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.parameters import effective, judge

CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def said(content):
    return [{"role": "user", "content": content}]


def call(path, **fields):
    body = json.dumps({"model": "m", **fields}, separators=(",", ":")).encode()
    return parse_call(ENDPOINTS[path.encode()], body)


def test_a_batch_is_charged_with_all_of_its_conversations():
    made = call(BATCH, messages=[said("a" * 300), said("b" * 100), said("c")], max_tokens=7)
    assert (made.endpoint, made.choices, made.max_new_tokens) == (Endpoint.CHAT_BATCH, 3, 7)
    longest = len(json.dumps(said("a" * 300), separators=(",", ":")))
    assert made.text_bytes is not None
    assert longest < made.text_bytes < longest + 60  # and what all share: the rest of the body
    assert made.longest_ratio == pytest.approx(longest / (3 * longest - 200 - 299))


def test_a_chat_is_one_prompt():
    made = call(CHAT, messages=said("hi") * 3)
    assert (made.choices, made.longest_ratio, made.text_bytes) == (1, 1.0, len(made.body))


@pytest.mark.parametrize(
    ("path", "fields", "count"),
    [
        (CHAT, {"messages": said("hi"), "n": 4}, 4),
        (BATCH, {"messages": [said("hi")] * 3, "n": 2}, 6),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/embeddings", {"input": [1, 2]}, 1),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 5}, 5),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 5}, 5),
    ],
)
def test_an_engine_runs_a_sequence_for_each_choice_prompt_and_document(path, fields, count):
    assert call(path, **fields).sequences == count


def test_an_image_in_one_conversation_leaves_the_batch_without_a_bound():
    made = call(BATCH, messages=[said("hi"), said([{"type": "text", "text": "a"}, IMAGE])])
    assert (made.choices, made.text_bytes) == (2, None)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
def test_input_of_any_shape_is_measured(path):
    assert call(path, input="abc").text_bytes == 5
    assert call(path, input=[1, 2, 3]).prompt_token_ids == 3
    texts = call(path, input=["abc", "a"])
    assert (texts.text_bytes, texts.longest_ratio) == (5, 5 / 8)
    chat = call(path, input=said("abc"))
    assert (chat.text_bytes, chat.longest_ratio) == (len(chat.body), 1.0)
    for field in ("input", "messages"):
        chats = call(path, **{field: [said("abc"), said("abc")]})
        assert chats.longest_ratio == 0.5
        assert chats.text_bytes < len(chats.body)
        assert call(path, **{field: [said("abc"), said([IMAGE])]}).text_bytes is None


def test_a_plugins_data_can_be_anything_so_nothing_bounds_it():
    made = call("/pooling", data={"image": "http://x/y.tiff"}, task="plugin")
    assert (made.text_bytes, made.prompt_token_ids) == (None, None)


def test_coheres_texts_inputs_and_images_are_measured():
    texts = call("/v2/embed", texts=["abc", "a"])
    assert (texts.text_bytes, texts.longest_ratio) == (5, 5 / 8)
    inputs = [{"content": [{"type": "text", "text": "abc"}]}] * 4
    several = call("/v2/embed", inputs=inputs)
    assert several.longest_ratio == 0.25
    assert several.text_bytes < len(several.body)
    assert call("/v2/embed", inputs=[{"content": [IMAGE]}]).text_bytes is None
    images = call("/v2/embed", images=["data:a", "data:b"])
    assert (images.text_bytes, images.longest_ratio) == (None, 0.5)


def test_cohere_cuts_a_text_unless_it_is_asked_not_to():
    assert call("/v2/embed", texts=["a"]).truncates_prompt
    assert call("/v2/embed", texts=["a"], truncate="START").truncates_prompt
    assert not call("/v2/embed", texts=["a"], truncate="NONE").truncates_prompt
    assert not call(CHAT, messages=said("hi"), truncate="END").truncates_prompt


@pytest.mark.parametrize(
    ("path", "field", "items", "most"),
    [
        (BATCH, "messages", [said("a")], 1024),
        ("/v1/embeddings", "input", [said("a")], 2048),
        ("/v2/embed", "texts", ["a"], 2048),
        ("/v2/embed", "images", ["data:a"], 2048),
        ("/classify", "input", ["a"], 2048),
    ],
)
def test_too_many_prompts_are_refused(path, field, items, most):
    judge(call(path, **{field: items * most}), effective([]))
    with pytest.raises(RequestError) as caught:
        judge(call(path, **{field: items * (most + 1)}), effective([]))
    assert caught.value.param == field
    assert str(most) in caught.value.message


def test_a_batch_generates_nothing_as_a_stream():
    assert not call(BATCH, messages=[said("a")], stream=True).stream


@pytest.mark.parametrize("gap", [b"", b"\n    ", b" " * 80, b"\r\n\t" * 40])
def test_white_space_hides_no_prompt(gap):
    def read(path, inside):
        body = b'{"model": "m", %b}' % inside.replace(b"@", gap)
        return parse_call(ENDPOINTS[path.encode()], body)

    chat = b'{"role":"user","content":"a"}'
    batch = read(BATCH, b'"messages":[@[@%b],[%b]]' % (chat, chat))
    assert batch.sequences == 2
    assert read("/v1/embeddings", b'"input":[@%b]' % chat).sequences == 1
    assert read("/v1/embeddings", b'"input":[@[@%b],[%b]]' % (chat, chat)).sequences == 2
