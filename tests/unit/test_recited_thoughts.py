"""Messages and responses that show thinking: a thought goes on as a thought, where its prompt begins one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.endings import Barrier
from gateway.resume.pieces import fits
from gateway.resume.reasoning import closing_mark
from gateway.resume.retelling import frame_of
from gateway.wire.chunks import framed
from tests.unit.test_find_ids import TOOLS, Tokenizer, asked_by
from tests.unit.test_recited import (
    FAULT,
    MESSAGES,
    OFFERED,
    RESPONSES,
    byte_level,
    calls,
    rest_of_chat,
    watch_of,
    written,
)
from tests.unit.test_resume import frame, role

WORDS = st.lists(st.sampled_from([" so", " la", " ma", " wi"]), min_size=2, max_size=9)
ENABLED = {"type": "enabled", "budget_tokens": 1024}


def event(kind, **fields):
    return frame_of(kind, {"type": kind} | fields)


def delta(index, kind, **fields):
    return event("content_block_delta", delta={"type": kind} | fields, index=index)


def started(index, kind):
    name = "thinking" if kind == "thinking" else "text"
    return event("content_block_start", content_block={"type": kind, name: ""}, index=index)


def stopped(index):
    return event("content_block_stop", index=index)


def begun_message():
    """Return the first event of a message, and its prompt."""
    opening, frames, _, prompt = written(MESSAGES, ["x"])
    return (opening + frames[0]).partition(b"\n\n")[0] + b"\n\n", prompt


def thought(words):
    """Return what vLLM writes of a thought that has not ended, and its prompt."""
    begun, prompt = begun_message()
    parts = [delta(0, "thinking_delta", thinking=each) for each in words]
    return [begun + started(0, "thinking"), *parts], prompt


def signed(out):
    """Return the name of the signature in what was told."""
    at = out.index(b'"signature":"') + len(b'"signature":"')
    return out[at : out.index(b'"', at)].decode()


def ended(out, words, answer):
    """Return what vLLM writes behind the thinking."""
    usage = json.loads(out.partition(b"data: ")[2].partition(b"\n")[0])["message"]["usage"]
    signature = delta(0, "signature_delta", signature=signed(out))
    told = [signature, stopped(0), started(1, "text")]
    told += [delta(1, "text_delta", text=each) for each in answer]
    reason = {"stop_reason": "end_turn", "stop_sequence": None}
    spent = usage | {"output_tokens": len(words) + len(answer) + 1}
    told += [stopped(1), event("message_delta", delta=reason, usage=spent), event("message_stop")]
    return b"".join(told)


def cut(words=(" so", " la"), **more):
    """Return a watch whose stream broke off in a thought, its prompt, and what its client got."""
    frames, prompt = thought(words)
    watch = watch_of(MESSAGES, **more)
    out = b"".join(map(watch.feed, frames))
    assert watch.broken(FAULT) == b""
    return watch, prompt, out


def known(watch, prompt, words=(" so", " la")):
    """Tell the ids, and return whether somebody may go on."""
    if watch.trail.thinks:
        watch.trail.closes = 8
    ids = list(range(70, 70 + len(words)))
    return watch.ids_are(prompt, ids, list(map(byte_level, words)))


def thinks(text, token):
    return frame(None, [token], reasoning=text)


@given(WORDS, st.lists(st.sampled_from([" a", " b"]), min_size=1, max_size=5), st.data())
def test_a_thought_that_another_goes_on_with_is_as_if_nothing_had_happened(words, answer, data):
    frames, prompt = thought(words)
    at = data.draw(st.integers(1, len(words)))
    watch, out = watch_of(MESSAGES), b""
    for each in frames[: at + 1]:
        out += watch.by_sight(framed(each)) and each or watch.feed(each)
    assert watch.broken(FAULT) == b""
    assert watch.wants_ids
    assert known(watch, prompt, words[:at])
    rest, _ = watch.rest()
    ids = [*prompt, *range(70, 70 + at)]
    assert json.loads(rest.body)["kv_transfer_params"] == {"prompt_token_ids": ids}
    more = [thinks(text, 7) for text in words[at:]]
    more.append(frame(None, [8]))  # the mark shows nothing
    told = rest_of_chat(ids, answer, 9)
    more = [told[0], *more, *told[1:]]
    if data.draw(st.booleans()):
        more = [b"".join(more)]
    out += b"".join(map(watch.feed, more)) + watch.close()
    assert out == b"".join(frames) + ended(out, words, answer)
    assert watch.complete
    assert watch.usage.completion_tokens == len(words) + len(answer) + 1


@pytest.mark.parametrize("words", [[" ma"], []])
def test_the_end_of_a_thought_and_the_answer_may_come_in_one_frame(words):
    """A busy engine puts several tokens into one."""
    watch, prompt, out = cut()
    known(watch, prompt)
    watch.rest()
    out += watch.feed(role([*prompt, 70, 71]))
    more = {"reasoning": words[0]} if words else {}
    out += watch.feed(frame(" a", [*(72 for _ in words), 8, 9], **more))
    out += watch.feed(frame(" b", [10], finish="stop")) + watch.close()
    words = [" so", " la", *words]
    assert out == b"".join(thought(words)[0]) + ended(out, words, [" a", " b"])


def test_a_thought_may_go_on_twice():
    watch, prompt, _ = cut()
    known(watch, prompt)
    watch.rest()
    watch.feed(role([*prompt, 70, 71]))
    watch.feed(thinks(" ma", 72))
    assert watch.broken(FAULT) == b""
    assert watch.wants_ids
    assert known(watch, prompt, [" so", " la", " ma"])
    assert watch.rest() is not None


def test_a_tool_may_be_called_behind_a_thought():
    watch, prompt, _ = cut(tools=TOOLS[MESSAGES])
    watch.offer(OFFERED)
    known(watch, prompt)
    watch.rest()
    watch.feed(role([*prompt, 70, 71]))
    watch.feed(frame(None, [8]))
    told = watch.feed(frame(None, [9], **calls((0, "{}", "look"))))
    kinds = [json.loads(each.partition(b"data: ")[2]) for each in told.split(b"\n\n") if each]
    assert [(each["type"], each["index"]) for each in kinds] == [
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
    ]


def test_whoever_begins_a_reply_may_think():
    """Its first backend was lost before it had said anything."""
    begun, prompt = begun_message()
    watch = watch_of(MESSAGES)
    out = watch.feed(begun)
    assert watch.broken(FAULT) == b""
    assert watch.ids_are(prompt, [], [])
    watch.rest()
    out += b"".join(map(watch.feed, [role(prompt), thinks(" so", 70), thinks(" la", 71)]))
    assert out == b"".join(thought([" so", " la"])[0])


@pytest.mark.parametrize("more", [[], [started(1, "text")], [started(1, "text"), delta(1, "text_delta", text="a")]])  # fmt: skip
def test_behind_a_thought_of_the_first_backends_nobody_goes_on(more):
    """White space that the model wrote before the mark is shown nowhere."""
    frames, _ = thought([" so", " la"])
    watch = watch_of(MESSAGES)
    end = [delta(0, "signature_delta", signature="f"), stopped(0), *more]
    assert b"".join(map(watch.feed, [*frames, *end])) == b"".join(frames + (end if more else []))
    if more:
        assert b"it is gone" in watch.broken(FAULT)
        assert watch.barrier is Barrier.REPLY


def test_nor_behind_one_of_those_who_went_on():
    watch, prompt, _ = cut()
    known(watch, prompt)
    watch.rest()
    watch.feed(role([*prompt, 70, 71]))
    watch.feed(frame(None, [8]))
    watch.feed(frame(" a", [9]))
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


def test_the_signature_of_an_aborted_thought_is_not_shown():
    """An engine that is told to stop ends the thought in order, and tells the abort last."""
    frames, _ = thought([" so", " la"])
    watch = watch_of(MESSAGES)
    aborted = {"stop_reason": None, "stop_sequence": None}
    end = [
        delta(0, "signature_delta", signature="f"),
        stopped(0),
        event("message_delta", delta=aborted, usage={"input_tokens": 1, "output_tokens": 2}),
    ]
    assert b"".join(map(watch.feed, [*frames, *end])) == b"".join(frames)
    assert watch.wants_ids


@pytest.mark.parametrize("read_as", ["answer", "call", "thought"])
def test_a_parser_that_takes_the_rest_for_something_else_ends_the_stream(read_as):
    if read_as != "thought":
        watch, prompt, _ = cut(tools=TOOLS[MESSAGES])
        watch.offer(OFFERED)
        known(watch, prompt)
        called = calls((0, "{}", "look"))
        told = frame(" a", [9]) if read_as == "answer" else frame(None, [9], **called)
    else:
        begun, frames, _, prompt = written(MESSAGES, [" so", " la", "x"])
        watch = watch_of(MESSAGES)
        watch.feed(begun + b"".join(frames[:-1]))
        watch.broken(FAULT)
        known(watch, prompt)
        told = thinks(" ma", 9)
    watch.rest()
    watch.feed(role([*prompt, 70, 71]))
    assert b"could not be resumed" in watch.feed(told)


def test_with_stop_strings_nobody_knows_what_of_a_thought_is_held_back():
    frames, _ = thought([" so", " la"])
    watch = watch_of(MESSAGES, stop_sequences=["long"])
    watch.feed(b"".join(frames))
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


# --- of a response ------------------------------------------------------------------------------------


class Response:
    """What vLLM writes of a response that thinks."""

    def __init__(self):
        opening, _, closing, self.prompt = written(RESPONSES, ["x"])
        self.begun = b"".join(each + b"\n\n" for each in opening.split(b"\n\n")[:2])
        last = json.loads(closing.rpartition(b"data: ")[2])["response"]
        self._last = last | {"usage": last["usage"] | {"input_tokens": len(self.prompt)}}
        self._number = 1
        self._place = {"item_id": "rs_1", "output_index": 0}

    def event(self, kind, **fields):
        self._number += 1
        told = dict(sorted((fields | {"sequence_number": self._number}).items()))
        kind = f"response.{kind}"
        return frame_of(kind, told | {"type": kind})

    def _of_part(self, kind, **fields):
        return self.event(kind, content_index=0, **self._place, **fields)

    def _item(self, kind, item):
        return self.event(
            f"output_item.{kind}", item=item, output_index=self._place["output_index"]
        )

    def _shown(self, item, part, kind, texts, unshown):
        told = [self._item("added", item)]
        begun = part | {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
        told.append(self._of_part("content_part.added", part=begun))
        told += [self._of_part(f"{kind}.delta", delta=text, **unshown) for text in texts]
        return told

    def _closed(self, item, part, kind, unshown):
        told = [self._of_part(f"{kind}.done", text=part["text"], **unshown)]
        told.append(self._of_part("content_part.done", part=part))
        done = item | {"content": [part], "status": "completed"}
        return [*told, self._item("done", done)], done

    def thought(self, words):
        """Return the events of a thought, and what ends it with the item that it was."""
        item = {"id": "rs_1", "summary": [], "type": "reasoning", "content": None}
        item |= {"encrypted_content": None, "status": "in_progress"}
        part = {"text": "".join(words), "type": "reasoning_text"}
        told = self._shown(item, part, "reasoning_text", words, {})
        return told, lambda: self._closed(item, part, "reasoning_text", {})

    def answered(self, answer):
        name = "msg_" + self._last["id"].removeprefix("resp_") + "_1"
        self._place = {"item_id": name, "output_index": 1}
        item = {"id": name, "content": [], "role": "assistant", "status": "in_progress"}
        item |= {"type": "message", "phase": None}
        part = {"annotations": [], "text": "".join(answer), "type": "output_text", "logprobs": None}
        unshown = {"logprobs": []}
        told = self._shown(item, part, "output_text", answer, unshown)
        more, done = self._closed(item, part, "output_text", unshown)
        return [*told, *more], done

    def ended(self, output, said, thought, **more):
        usage = self._last["usage"]
        details = usage["output_tokens_details"] | {"reasoning_tokens": thought}
        usage |= {"output_tokens": said, "output_tokens_details": details}
        usage["total_tokens"] = len(self.prompt) + said
        last = self._last | {"output": output, "usage": usage} | more
        return self.event("completed", response=last)


def counted(thought):
    details = {"reasoning_tokens": thought}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "completion_tokens_details": details}
    return b"data: " + json.dumps({"id": "a", "choices": [], "usage": usage}).encode() + b"\n\n"


@given(WORDS, st.lists(st.sampled_from([" a", " b"]), min_size=1, max_size=5), st.data())
def test_a_response_goes_on_with_its_thought_as_if_nothing_had_happened(words, answer, data):
    wanted = Response()
    frames, end = wanted.thought(words)
    at = data.draw(st.integers(1, len(words)))
    watch, out = watch_of(RESPONSES), b""
    for each in [wanted.begun, *frames[: at + 2]]:
        out += watch.by_sight(framed(each)) and each or watch.feed(each)
    assert watch.broken(FAULT) == b""
    assert known(watch, wanted.prompt, words[:at])
    watch.rest()
    first, *texts, _, done = rest_of_chat([*wanted.prompt, *range(70, 70 + at)], answer, 9)
    more = [first, *(thinks(text, 7) for text in words[at:]), frame(None, [8]), *texts]
    out += b"".join(map(watch.feed, [*more, counted(len(words) - at), done])) + watch.close()
    closed, thought = end()
    told, said = wanted.answered(answer)
    last = wanted.ended([thought, said], len(words) + len(answer) + 1, len(words))
    assert out == wanted.begun + b"".join([*frames, *closed, *told]) + last
    assert watch.complete


def test_a_thought_that_has_all_tokens_that_it_may_have_is_ended():
    wanted = Response()
    frames, end = wanted.thought([" so", " la"])
    watch = watch_of(RESPONSES, limit=2)
    out = watch.feed(wanted.begun + b"".join(frames))
    watch.broken(FAULT)
    assert known(watch, wanted.prompt)
    assert watch.lacks_its_end
    closed, thought = end()
    cut_short = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    last = wanted.ended([thought], 2, 2, **cut_short)
    assert out + watch.told_end() == wanted.begun + b"".join([*frames, *closed]) + last


@pytest.mark.parametrize("events", [0, 1, 4])
def test_behind_a_thought_of_a_response_nobody_goes_on(events):
    wanted = Response()
    frames, end = wanted.thought([" so", " la"])
    more = [*end()[0], *wanted.answered([" a"])[0]][: events + 3]
    watch = watch_of(RESPONSES)
    watch.feed(wanted.begun + b"".join([*frames, *more]))
    ending = watch.broken(FAULT)
    assert (b"it is gone" in ending) is (events > 0)


# --- its ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_end", "closes"),
    [
        ("<|im_start|>assistant\n<think>\n", "</think>"),
        ("<\uff5cAssistant\uff5c><think>", "</think>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<think>\n\n</think>\n\n", None),
        ("<|im_start|>assistant\n", None),
        ("say <think> and", None),
        ("", None),
    ],
)
def test_a_prompt_opens_reasoning_by_the_mark_at_its_end(prompt_end, closes):
    assert closing_mark(prompt_end) == closes


@pytest.mark.parametrize("prompt_end", ["<think>\n", "assistant\n", None])
def test_a_thought_goes_on_only_if_its_prompt_begins_one(prompt_end):
    """Else the model has written the mark itself, and who knows what beside it."""
    watch, prompt, _ = cut()
    asked_by(watch, prompt, Tokenizer(" so", " la", "</think>"), prompt_end=prompt_end)
    goes_on = prompt_end == "<think>\n"
    assert (watch.rest() is not None) is goes_on
    assert watch.barrier is (None if goes_on else Barrier.IDS)


@pytest.mark.parametrize("merged", [" la\n", " la\n\n", " la "])
def test_nobody_goes_on_where_the_last_token_may_have_ended_with_white_space(merged):
    watch, prompt, _ = cut()
    asked_by(watch, prompt, Tokenizer(" so", " la", "</think>", merged), prompt_end="<think>")
    assert watch.rest() is None
    assert watch.barrier is Barrier.IDS


@pytest.mark.parametrize(
    ("pieces", "tokens", "goes_on"),
    [
        ([" so.", "\n\nBut"], [" so", ".\n\n", "But"], True),
        ([" so.", "\n\nBut"], [" so", ".\n", "\n", "But"], True),
        ([" so.", "\n\nBut"], [" so", ".", "\n\n", "But"], True),
        ([" so.", "\n\nBut"], [" so", ".\n\nBut"], False),
        ([" s\u00f6.", "\n", " la"], [" s\u00f6", ".\n", " la"], True),
        ([" so", " la"], [" so la"], False),
    ],
)
def test_white_space_that_a_parser_held_back_may_have_ended_a_token(pieces, tokens, goes_on):
    tokens = list(map(byte_level, tokens))
    assert fits(pieces, tokens, trimmed=True) == (len(tokens) if goes_on else None)


def test_an_answer_is_not_held_back_so():
    assert fits([" so.", "\n\nBut"], list(map(byte_level, [" so", ".\n\n", "But"]))) is None


# --- its budget ---------------------------------------------------------------------------------------


def test_whoever_goes_on_is_told_the_whole_budget():
    """Engines count what the prompt has of the thought, too."""
    watch, prompt, _ = cut(thinking=ENABLED)
    known(watch, prompt)
    assert json.loads(watch.rest()[0].body)["thinking_token_budget"] == 1024


@pytest.mark.parametrize(("said", "goes_on"), [(1016, True), (1017, False)])
def test_nobody_goes_on_where_an_engine_may_write_the_end_of_the_thinking(said, goes_on):
    """It writes several tokens, and who goes on would begin with the first of them."""
    words = [" so"] * said
    watch, prompt, _ = cut(words, limit=2000, thinking=ENABLED)
    assert known(watch, prompt, words) is goes_on
    assert (watch.rest() is not None) is goes_on
    assert watch.barrier is (None if goes_on else Barrier.IDS)


def test_an_answer_behind_the_budget_goes_on():
    pieces = [" so"] * 1024
    begun, frames, _, prompt = written(MESSAGES, [*pieces, "x"])
    watch = watch_of(MESSAGES, limit=2000, thinking=ENABLED)
    watch.feed(begun + b"".join(frames[:-1]))
    watch.broken(FAULT)
    assert known(watch, prompt, pieces)
