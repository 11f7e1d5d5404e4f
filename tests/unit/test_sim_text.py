"""The simulator's tokens can be counted by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.sim.steering import Control, parse_control
from gateway.sim.text import detokenize, render_chat, reply_seed, reply_words, tokenize


@given(st.text())
def test_text_is_one_token_per_four_bytes_and_comes_back(text):
    ids = tokenize(text)
    assert len(ids) == -(-len(text.encode()) // 4)
    assert detokenize(ids) == text


def test_a_chat_costs_three_per_message_and_two_for_the_reply():
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "12345678"}]
    assert len(render_chat(chat)) == 3 + (3 + 2) + 2
    assert len(render_chat(chat, open_reply=False)) == 3 + (3 + 2)


def test_text_parts_count_as_text_and_pictures_as_64():
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert len(render_chat([{"role": "user", "content": parts}])) == 3 + 1 + 64 + 2


@given(st.integers(0, 2**32 - 1))
def test_every_reply_word_is_one_token(seed):
    for word in reply_words(seed, 50):
        assert len(word) == 4
        assert len(tokenize(word)) == 1


@given(st.lists(st.integers(0, 2**32)), st.integers(0, 20), st.sampled_from([None, "a"]))
def test_a_prompt_that_ends_with_the_beginning_of_a_reply_gets_the_rest(prompt, begun, adapter):
    whole = reply_words(reply_seed(prompt, adapter, 0), 20)
    beginning = tokenize("".join(whole[:begun]))
    assert reply_words(reply_seed(prompt + beginning, adapter, 0), 20 - begun) == whole[begun:]


def test_a_prompt_steers_its_reply():
    text = "say [[sim:tokens=5;itl=20ms;ttft=1.5s]] please"
    assert parse_control(text) == Control(tokens=5, itl_s=0.02, ttft_s=1.5)
    assert parse_control("nothing") == Control()
