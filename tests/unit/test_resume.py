"""What is kept of a stream, what its client sees of that, and what another backend is asked for."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.endings import Barrier
from gateway.core.errors import BackendBroke
from gateway.core.types import Call, Demand, Dialect, Endpoint
from gateway.ingress.gathering import Gathering
from gateway.resume.completion import as_chat
from gateway.resume.rest import rest_of
from gateway.resume.rules import may_go_on, may_trail
from gateway.resume.seam import Reached
from gateway.resume.stream import TrailedStream
from gateway.resume.usage import add_up
from gateway.resume.whole import Whole
from gateway.wire.replies import Fault
from gateway.wire.sse import DONE

FAULT = Fault(502, "server_error", "backend_error", "it is gone")
ENDPOINTS = {Dialect.CHAT: Endpoint.CHAT, Dialect.COMPLETIONS: Endpoint.COMPLETIONS}


def call(dialect=Dialect.CHAT, **body):
    body = {"model": "m", "stream": True, **body}
    body.setdefault(*(("messages", []) if dialect is Dialect.CHAT else ("prompt", "x")))
    data = json.dumps(body).encode()
    limit = body.get("max_tokens")
    return Call(ENDPOINTS[dialect], dialect, "m", True, data, max_new_tokens=limit, text_bytes=9)


def frame(text, ids, *, dialect=Dialect.CHAT, finish=None, prompt=None, **delta):
    inside = {"index": 0}
    if dialect is Dialect.CHAT:
        inside["delta"] = delta if text is None else {"content": text, **delta}
    else:
        inside["text"] = text
    inside |= {"logprobs": None, "finish_reason": finish}
    if dialect is Dialect.COMPLETIONS:
        inside |= {"stop_reason": None, "prompt_token_ids": prompt}
    whole = {"id": "a-1", "object": "o", "created": 1, "model": "m", "choices": [inside]}
    if ids is not False:
        inside["token_ids"] = ids
    if dialect is Dialect.CHAT and prompt is not None:
        whole["prompt_token_ids"] = prompt
    return (
        b"data: " + json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def role(prompt):
    return frame(None, False, role="assistant", content="", prompt=prompt)


def stream(asked=None, demand=None):
    return TrailedStream(asked or call(), demand or Demand(3, exact=True), request_id="r")


def begun(*frames, asked=None, prompt=(1, 2, 3)):
    watch = stream(asked)
    watch.feed(role(list(prompt)))
    for each in frames:
        watch.feed(each)
    return watch


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


USED = {"choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}}
PIECES = st.lists(
    st.tuples(st.text(max_size=6), st.lists(st.integers(0, 200_000), min_size=1, max_size=3)),
    max_size=12,
)


@given(PIECES, st.data(), st.sampled_from(list(ENDPOINTS)))
def test_the_client_gets_what_it_had_got_without_however_the_bytes_come(pieces, data, dialect):
    plain, told = [], []
    last = data.draw(st.integers(0, 12))  # more may come behind a finish reason
    for place, (text, ids) in enumerate(pieces):
        finish = "stop" if place == last else None
        for out, kept in ((told, ids), (plain, None)):
            prompt = [5, 6] if place == 0 and kept and dialect is Dialect.COMPLETIONS else None
            out.append(frame(text, kept, dialect=dialect, prompt=prompt, finish=finish))
    if dialect is Dialect.CHAT:
        told.insert(0, role([5, 6]))
        plain.insert(0, role([5, 6]).replace(b"[5,6]", b"null"))
    if last < len(pieces):
        told.append(DONE)
        plain.append(DONE)
    whole = b"".join(told)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    watch, out = stream(call(dialect)), b""
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        out += watch.feed(whole[begin:end])
    assert out == b"".join(plain)


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
def test_a_frame_that_is_sent_for_its_ids_alone_is_kept_from_the_client_and_counted(usage):
    """vLLM sends it to who asks for ids while a parser of tool calls swallows text, and to nobody else."""
    named = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]
    watch = begun(frame("so", [7]), asked=call(tools=TOOLS, **usage))
    came = watch.events
    assert watch.feed(frame(None, [8])) == b""
    assert watch.feed(frame(None, [9]) + frame(None, [10, 11], tool_calls=named)) == frame(
        None, None, tool_calls=named
    )
    assert watch.feed(frame(None, [12], finish="tool_calls")) + watch.feed(DONE) == (
        frame(None, None, finish="tool_calls") + DONE
    )
    assert watch.complete
    assert watch.events == came + 4
    assert watch.trail.said_tokens == 6


def test_an_empty_frame_that_nobody_asked_ids_for_is_passed_on():
    watch = begun(frame("so", [7]))
    for each in (frame(None, None), frame(None, False)):
        assert watch.feed(each) == each


TOOLS = [{"type": "function", "function": {"name": "f"}}]
WAYS = st.sampled_from([{}, {"stop": ["##"]}, {"stop": ["###", "x"]}, {"tools": TOOLS}])


@given(PIECES, WAYS)
@example([('"', [0]), ('"', [0])], {"stop": ["##"]})
def test_a_token_told_by_sight_is_what_a_frame_by_frame_reading_gives(pieces, asked):
    seen, read = begun(asked=call(**asked)), begun(asked=call(**asked))
    for text, ids in pieces:
        one = frame(text, ids)
        told = seen.by_sight(chunk(one))
        stripped = read.feed(one)
        if told is None:
            told = chunk(seen.feed(one))
        assert told == chunk(stripped) == chunk(frame(text, None))
    assert seen.trail.reached() == read.trail.reached()
    assert (seen.unsure, seen.trail.tail) == (read.unsure, read.trail.tail)


@given(PIECES, WAYS, st.data())
@example([("a", [1]), ("b", [2])], {}, None)
def test_several_tokens_in_one_read_are_what_they_are_one_by_one(pieces, asked, data):
    seen, read = begun(asked=call(**asked)), begun(asked=call(**asked))
    while pieces:
        several = data.draw(st.integers(1, len(pieces))) if data else len(pieces)
        now, pieces = [frame(*each) for each in pieces[:several]], pieces[several:]
        told = seen.by_sight(b"".join(map(chunk, now)))
        stripped = [read.feed(each) for each in now]
        if told is None:
            assert seen.feed(b"".join(now)) == b"".join(stripped)
        else:
            assert told == b"".join(map(chunk, stripped))
    assert seen.events == read.events
    assert seen.trail.reached() == read.trail.reached()
    assert (seen.unsure, seen.trail.tail) == (read.unsure, read.trail.tail)


@pytest.mark.parametrize("asked", [{}, {"stop": ["##"]}, {"tools": TOOLS}])
def test_several_tokens_in_one_read_need_not_be_parsed(asked):
    watch = begun(frame("a", [4]), frame("b", [5]), asked=call(**asked))
    now = [frame("c", [6]), frame('say "d"', [7]), frame("e f", [8, 9])]
    assert watch.by_sight(b"".join(map(chunk, now))) == b"".join(
        chunk(each.replace(ids, b"null"))
        for each, ids in zip(now, [b"[6]", b"[7]", b"[8,9]"], strict=True)
    )
    assert watch.events == 6


@pytest.mark.parametrize("last", [
    frame("", [7], finish="length"),
    frame("c", False),
    frame("c", []),
    frame(None, [7], tool_calls=[{"index": 0}]),
    frame("c", [7]).replace(b'"c"', b'"c","x":"d"'),
    b"data: [DONE]\n\n",
])  # fmt: skip
def test_of_several_of_which_one_is_no_token_none_is_kept_by_sight(last):
    watch = begun(frame("a", [4]), frame("b", [5]))
    before = watch.trail.reached(), watch.events
    assert watch.by_sight(chunk(frame("c", [6])) + chunk(last)) is None
    assert (watch.trail.reached(), watch.events) == before


def test_ids_of_a_frame_that_becomes_longer_than_it_came_are_kept_once():
    """Of a chunk just below the largest, whose `[6]` becomes `null`."""
    watch = begun(frame("a", [4]), frame("b", [5]))
    text = "x" * (4088 - len(frame("", [6])))
    now = frame(text, [6])
    assert len(now) == 4088
    assert watch.feed(now) == frame(text, None)
    assert watch.trail.reached().reply == [4, 5, 6]


def test_text_without_ids_amid_tokens_told_by_sight_is_not_said_again_behind_a_later_one():
    watch = begun(frame("a", [5]))
    assert watch.by_sight(chunk(frame("b", [6]))) == chunk(frame("b", None))
    assert watch.feed(frame("c", False)) == frame("c", False)
    assert watch.by_sight(chunk(frame("d", [7]))) == chunk(frame("d", None))
    assert watch.by_sight(chunk(frame("e", [8]))) == chunk(frame("e", None))
    reached = watch.trail.reached()
    assert reached is not None
    assert (reached.reply, reached.again) == ([5, 6, 7, 8], "")


@pytest.mark.parametrize("by_sight", [False, True])
def test_what_an_empty_frame_begins_is_known_by_the_text_that_follows(by_sight):
    """The first half of a character ends the reasoning: what it is, only the next frame tells."""
    watch = begun(thought("a", [4]), thought("b", [5]), frame("", [6]))
    for text, ids in (("\N{GRINNING FACE}", [7]), (" c", [8]), (" d", [9])):
        one = frame(text, ids)
        if not by_sight or watch.by_sight(chunk(one)) is None:
            watch.feed(one)
    assert watch.trail.reached() is not None
    assert (watch.trail.kind, watch.trail.reasoned) == ("content", True)


def test_reasoning_that_begins_with_an_empty_frame_is_reasoning():
    watch = begun(thought("", [4]))
    for text, ids in (("a", [5]), ("b", [6]), ("c", [7])):
        watch.by_sight(chunk(thought(text, ids))) or watch.feed(thought(text, ids))
    assert watch.trail.leads_on
    assert watch.trail.reasoned


def test_of_frames_that_tell_a_usage_each_is_read():
    usage = b',"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    frames = [frame(text, [7]).removesuffix(b"}\n\n") + usage for text in "abc"]
    watch = TrailedStream(call(), Demand(3, exact=True), request_id="r", veil=True)
    out = watch.feed(role([1, 2, 3]))
    for each in frames:
        told = watch.by_sight(chunk(each))
        out += watch.feed(each) if told is None else told
    assert b'"cached_tokens":2' not in out


def test_nothing_passes_behind_an_error_that_another_backend_may_repair():
    watch = begun(frame("a", [4]), frame("b", [5]))
    error = b'data: {"error":{"message":"no","type":"InternalServerError","code":500}}\n\n'
    assert watch.feed(error) == b""
    assert watch.cut is not None
    assert watch.by_sight(chunk(frame("c", [6]))) is None
    assert watch.trail.reached().reply == [4, 5]


def test_nothing_passes_a_last_frame_that_waits_for_the_usage():
    watch = begun(frame("a", [4]), frame("b", [5]))
    last = frame("", [6], finish="length")
    assert watch.feed(last) == b""
    for finish in (None, "length"):
        assert watch.by_sight(chunk(frame("c", [7], finish=finish))) is None


def test_nothing_passes_a_usage_that_waits_for_the_next_frame():
    watch = begun(frame("a", [4]), frame("b", [5]), asked=structs.replace(call(), wants_usage=True))
    counts = (
        b'data: {"id":"a-1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    )
    assert watch.feed(counts) == b""
    assert watch.by_sight(chunk(frame("c", [6]))) is None
    assert watch.feed(frame("c", [6])) == counts + frame("c", None)


def test_frames_whose_client_gets_a_much_longer_head_are_not_told_by_sight():
    name = b"n" * 400
    watch = stream()
    watch.feed((role([1, 2, 3]) + frame("a", [4])).replace(b"a-1", name))
    watch.broken(FAULT)
    watch.rest()
    watch.feed(role([1, 2, 3, 4]))
    assert name in watch.feed(frame("b", [5]))
    assert watch.by_sight(chunk(frame("c", [6]))) is None
    assert name in watch.feed(frame("c", [6]))


@pytest.mark.parametrize("asked", [{}, {"stop": ["##"]}, {"tools": TOOLS}])
def test_frames_like_the_last_one_are_told_by_sight_however_many_tokens_they_have(asked):
    watch = begun(frame("a", [4]), frame("b", [5]), asked=call(**asked))
    for text, ids in (("c", [6]), ("de", [7, 8]), ("f g", [9, 10, 11]), ('"\n', [12, 13])):
        told = watch.by_sight(chunk(frame(text, ids)))
        assert told == chunk(frame(text, None))
    assert watch.by_sight(chunk(frame("i", []))) is None


def test_text_that_cannot_be_read_is_passed_on_and_only_not_gone_on_with():
    watch = begun(frame("a", [4]), frame("b", [5]))
    garbled = chunk(frame("c", [6, 7]).replace(b'"c"', b'"\\x"'))
    assert watch.by_sight(garbled) is not None
    assert not watch.may_leave


def test_it_goes_on_after_the_last_token_that_showed_text():
    watch = begun(frame("a", [7]), frame("b", [8]), frame("", [9]), frame("", [10]))
    assert watch.trail.reached() == Reached([1, 2, 3], [7, 8])


def test_before_any_text_it_goes_on_at_the_beginning():
    assert begun(frame("", [9])).trail.reached() == Reached([1, 2, 3], [])


def test_a_tool_call_cannot_be_gone_on_with_even_when_text_follows():
    call = frame(None, [7], tool_calls=[{"index": 0}])
    watch = begun(call, frame("b", [8]), frame("c", [9]))
    assert watch.trail.reached() is None
    assert b"it is gone" in watch.broken(FAULT)


def thought(text, ids, name="reasoning"):
    return frame(None, ids, **{name: text})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_on_as_reasoning(name):
    watch = begun(thought("a", [7], name), thought("b", [8], name))
    assert watch.broken(FAULT) == b""
    assert watch.rest()[1].prompt_tokens == 5
    watch.feed(role([1, 2, 3, 7, 8]))
    first = thought("c", [9], name)
    assert watch.by_sight(chunk(first)) is None
    assert watch.feed(first) == thought("c", None, name)
    assert watch.by_sight(chunk(thought("d", [10], name))) == chunk(thought("d", None, name))


@pytest.mark.parametrize(
    ("last", "following", "goes_on"),
    [
        (thought("b", [8]), [frame(None, [9]), frame("c", [10])], True),  # a mark came between
        (thought("b", [8]), [frame("c", [9])], False),  # its parser takes the rest for the answer
        (thought("b", [8]), [frame(None, [9]), frame("é", [10])], False),  # no mark, but half of é
        (thought("b", [8]), [frame("d", [9, 10, 11], reasoning="c")], True),
        (frame("b", [8]), [thought("c", [9])], False),
        (frame("b", [8]), [frame("c", [9])], True),
        (thought("b", [8]), [frame(None, [9]), frame(None, [10], tool_calls=[{}])], True),
    ],
)
def test_the_first_text_behind_a_seam_is_of_the_kind_that_it_has_to_be(last, following, goes_on):
    watch = begun(thought("a", [7]), last)
    assert watch.broken(FAULT) == b""
    watch.rest()
    watch.feed(role([1, 2, 3, 7, 8]))
    out = b"".join(map(watch.feed, following))
    assert (b"could not be resumed" in out) is not goes_on


def test_of_reasoning_with_stop_strings_nobody_knows_what_is_held_back():
    watch = begun(thought("a" * 9, [7]), thought("b" * 9, [8]), asked=call(stop="xyz"))
    assert b"it is gone" in watch.broken(FAULT)


@pytest.mark.parametrize("stop", [5, True, {"x": 1}])
def test_a_stop_that_is_no_string_is_the_engines_to_judge(stop):
    watch = begun(frame("a", [7]), asked=call(stop=stop))
    assert watch.broken(FAULT) == b""


def test_a_backend_that_tells_no_ids_ends_with_an_error():
    watch = stream()
    watch.feed(frame("a", None))
    assert watch.cut is None
    assert b"it is gone" in watch.broken(FAULT)


def test_tokens_of_a_backend_that_tells_no_ids_are_told_by_sight():
    watch = stream()
    watch.feed(frame(None, False, role="assistant", content=""))
    watch.feed(frame("a", False))
    watch.feed(frame("b", False))
    following = chunk(frame("c", False))
    assert watch.by_sight(following) == following
    assert watch.by_sight(chunk(frame(None, False, tool_calls=[]))) is None
    assert watch.by_sight(chunk(frame("", False, finish="stop"))) is None
    last = frame("", False, finish="stop") + DONE
    assert watch.feed(last) == last
    assert watch.complete


def test_a_fault_of_the_client_is_told():
    watch = begun(frame("a", [7]))
    refused = Fault(400, "invalid_request_error", "bad", "no")
    assert b'"no ' in watch.broken(refused)


def test_what_was_said_before_the_seam_counts_by_its_tokens():
    watch = begun(frame("ab", [7, 8]), frame("c", [9]))
    assert watch.broken(FAULT) == b""
    watch.rest()
    assert watch.events == 3


def test_a_stream_that_has_come_to_its_end_does_not_leave():
    watch = begun(frame("a", [4]))
    assert watch.may_leave
    watch.feed(frame("b", [5], finish="stop"))
    assert (watch.may_leave, watch.barrier) == (False, Barrier.REPLY)


def test_a_stream_goes_on_three_times_at_most():
    watch = begun(frame("a", [7]))
    for _ in range(3):
        assert watch.broken(FAULT) == b""
        assert watch.rest() is not None
    assert b"it is gone" in watch.broken(FAULT)


def test_one_that_had_said_everything_only_lacks_its_end():
    watch = begun(frame("a", [7], finish="stop"))
    ending = watch.broken(FAULT)
    assert ending.endswith(b"data: [DONE]\n\n")
    assert b"it is gone" not in ending
    assert watch.complete


def lists_what_is_looked_at(watch):
    looked_at, shows = [], watch.trail.shows

    def look(one):
        looked_at.append(one)
        return shows(one)

    watch.trail.shows = look
    return looked_at


def test_few_frames_are_left_unread():
    watch = begun()
    looked_at = lists_what_is_looked_at(watch)
    for place in range(100):
        watch.feed(frame("", [place]))
    assert len(looked_at) > 80


def test_of_one_that_ends_in_order_nobody_looks_for_the_text():
    watch = begun()
    looked_at = lists_what_is_looked_at(watch)
    for each in (frame("a", [4]), frame("b", [5]), frame("c", [6])):
        assert watch.by_sight(chunk(each)) or watch.feed(each)
    watch.feed(frame("", [7], finish="stop"))
    watch.feed(b"data: " + json.dumps(USED).encode() + b"\n\n" + DONE)
    assert watch.close() == b""
    assert watch.complete
    assert looked_at == []


def test_one_that_lacks_its_usage_alone_gets_it_from_its_ids():
    watch = begun(frame("a", [7]), asked=structs.replace(call(), wants_usage=True))
    shown = watch.feed(frame("bc", [8, 9], finish="length"))
    *_, usage, done = (shown + watch.broken(FAULT)).split(b"\n\n")[:-1]
    assert json.loads(usage[6:]) == {
        "id": "a-1", "object": "o", "created": 1, "model": "m", "choices": [],
        "usage": {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3},
    }  # fmt: skip
    assert done == b"data: [DONE]"
    assert (watch.complete, watch.usage.completion_tokens) == (True, 3)


def test_the_rest_is_asked_for_with_what_is_left_of_its_limits():
    reached = Reached([1, 2], [7, 8, 9])
    asked, demand = rest_of(call(max_tokens=10, min_tokens=4), Demand(2, exact=False), reached, {})
    body = json.loads(asked.body)
    assert body["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 7, 8, 9]}
    assert (body["min_tokens"], demand.max_new_tokens, demand.prompt_tokens) == (1, 7, 5)
    asked, _ = rest_of(call(min_tokens="4"), Demand(2, exact=False), reached, {})
    assert json.loads(asked.body)["min_tokens"] == 1, "it is read as vLLM reads it"
    asked, _ = rest_of(call(Dialect.COMPLETIONS), Demand(2, exact=False), reached, {})
    assert json.loads(asked.body)["prompt"] == [1, 2, 7, 8, 9]


def test_there_is_no_rest_of_what_reached_its_limit():
    assert rest_of(call(max_tokens=3), Demand(2, exact=False), Reached([1], [7, 8, 9]), {}) is None


def test_what_was_said_before_counts_as_output_and_no_more_as_prompt():
    usage = {
        "prompt_tokens": 30, "total_tokens": 40, "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 28},
    }  # fmt: skip
    add_up(usage, 12)
    assert usage == {
        "prompt_tokens": 18, "total_tokens": 40, "completion_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 18},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "goes_on"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "user": "u", "max_tokens": 9}, True),
        ({"seed": 1}, False),
        ({"seed": 1, "temperature": 0}, True),
        ({"presence_penalty": 0}, True),
        ({"presence_penalty": 1}, False),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"tools": [{}], "tool_choice": "auto"}, True),
        ({"tools": [{}], "tool_choice": "required"}, False),
        ({"logprobs": False, "stop": [], "echo": False}, True),
        ({"stop": "x"}, True),
        ({"stop": ["xyz"], "tools": [{}]}, False),
        ({"stop": ["xyz"], "min_tokens": 3}, False),
        ({"something_new": 1}, False),
    ],
)
def test_only_what_is_known_to_be_exact_goes_on(body, goes_on):
    assert may_go_on(call(**body)) is goes_on


STOPS = ["\n\n", "###", "End."]


def engine(texts, stops, *, at=0):
    """Return what vLLM writes: frames of text, the last one without what it holds back, and its finish reason."""
    held_back, said, shown = max(map(len, stops), default=1) - 1, "", 0
    for number, text in enumerate(texts):
        said += text
        ends = [place for each in stops if (place := said.find(each)) >= 0]
        last = number == len(texts) - 1
        to = min(ends) if ends else len(said) if last else max(shown, len(said) - held_back)
        reason = "stop" if ends else "length" if last else None
        yield frame(said[shown:to], [at + number], finish=reason)
        if ends:
            return
        shown = to


def shown_by(raw):
    chunks = [json.loads(each[6:]) for each in raw.split(b"\n\n") if each.startswith(b"data: {")]
    assert not any("error" in each for each in chunks)
    choices = [choice for each in chunks for choice in each["choices"]]
    return "".join(each["delta"].get("content") or "" for each in choices), [
        each["finish_reason"] for each in choices if each["finish_reason"]
    ]


TEXTS = st.lists(st.text(alphabet="ab#\n.Ed n", min_size=1, max_size=4), min_size=1, max_size=20)


@given(TEXTS, st.data(), st.sampled_from([[], ["x"], STOPS, ["abcdefghijkl"]]))
def test_greedy_text_that_is_held_back_for_stop_strings_is_neither_lost_nor_doubled(
    texts, data, stops
):
    """Cut anywhere, twice: the client gets what it had got undisturbed."""
    expected = shown_by(b"".join(engine(texts, stops)))
    watch = stream(call(temperature=0, stop=stops))
    out, at = watch.feed(role([1, 2, 3])), 0
    for _ in range(2):
        frames = list(engine(texts[at:], stops, at=at))
        whole = frames[: data.draw(st.integers(0, len(frames) - 1))]
        out += b"".join(map(watch.feed, whole))
        if not watch.may_leave:
            break  # it is still saying what was shown before
        assert watch.broken(FAULT) == b""
        rest = json.loads(watch.rest()[0].body)["kv_transfer_params"]["prompt_token_ids"]
        assert rest[:3] == [1, 2, 3]
        at = len(rest) - 3
        out += watch.feed(role(rest))
    else:
        out += b"".join(map(watch.feed, engine(texts[at:], stops, at=at))) + watch.close()
        assert shown_by(out) == expected


@pytest.mark.parametrize(
    ("stop", "shown", "goes_on"),
    [
        ("\n", ["a", "b"], True),  # nothing is held back
        (["##"], ["a", "b"], True),
        (["##"], ["a", "#"], False),  # its second half may follow
        (["##"], ["a", "bc"], False),  # the token that showed `b` has shown a part only
    ],
)
def test_what_is_drawn_by_chance_goes_on_where_no_stop_string_is_astride(stop, shown, goes_on):
    asked = call(temperature=1, stop=stop)
    watch = stream(asked)
    watch.feed(role([1, 2, 3]))
    for number, text in enumerate(shown):
        watch.feed(frame(text, [7 + number]))
    assert (watch.broken(FAULT) == b"") is goes_on


def test_a_frame_of_several_tokens_may_end_within_a_character():
    """Its last token may be the first part of one, whatever the text is: the seam lies before it."""
    for text in ("ab", "aé", "a"):
        for temperature, barrier in ((0, None), (1, Barrier.SEAM)):
            watch = stream(call(temperature=temperature))
            for each in (role([1, 2, 3]), frame("x", [6]), frame(text, [7, 8])):
                watch.feed(each)
            assert watch.trail.reached() == Reached([1, 2, 3], [6], text)
            assert (watch.may_leave, watch.barrier) == (barrier is None, barrier)
            watch.feed(frame("b", [9]))
            assert watch.trail.reached() == Reached([1, 2, 3], [6, 7, 8, 9])


def unsure_stream(**asked):
    watch = stream(call(temperature=1, **asked))
    for each in (role([1, 2, 3]), frame("x", [6]), frame("ab", [70, 8, 9])):
        watch.feed(each)
    return watch


@pytest.mark.parametrize("shown", [1, 2, 3])
def test_what_is_drawn_by_chance_goes_on_once_it_is_known_how_many_tokens_were_shown(shown):
    watch = unsure_stream()
    assert watch.broken(FAULT) == b""
    assert (watch.unsure, watch.trail.again) == ([70, 8, 9], "ab")
    watch.put_seam(shown, "")
    assert watch.unsure == []
    assert watch.trail.reached() == Reached([1, 2, 3], [6, 70, 8, 9][: 1 + shown])
    assert watch.rest()[1].prompt_tokens == 4 + shown


def test_what_is_drawn_by_chance_does_not_go_on_while_that_is_not_known():
    watch = unsure_stream()
    assert watch.may_leave is False  # it is no reason to end one that is still written
    assert watch.broken(FAULT) == b""
    assert watch.rest() is None
    assert (watch.awaits, watch.barrier) == (True, Barrier.SEAM)


@pytest.mark.parametrize("stop", ["b!", "never"])
def test_nobody_is_asked_about_a_stream_that_could_not_go_on_anyhow(stop):
    watch = unsure_stream(stop=stop)
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.unsure == []


def test_one_that_does_not_say_the_same_again_ends_with_an_error():
    watch = stream(call(temperature=0, stop="###"))
    for each in (role([1, 2, 3]), frame("", [7]), frame("ab", [8]), frame("cde", [9])):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    _, demand = watch.rest()
    given = [1, 2, 3, 7, 8, 9][: demand.prompt_tokens]
    out = watch.feed(role(given)) + watch.feed(frame("zz", [1]))
    assert b"could not be resumed" in out


def test_of_one_that_went_on_the_usage_behind_its_end_counts_what_was_said_before():
    watch = begun(frame("a", [4]), frame("b", [5]))
    assert watch.broken(FAULT) == b""
    watch.rest()
    watch.feed(role([1, 2, 3, 4, 5]))
    usage = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1}
    out = watch.feed(frame("c", [6], finish="stop"))
    counts = b'],"usage":%b}\n\n' % json.dumps(usage, separators=(",", ":")).encode()
    out += watch.feed(frame(None, False).replace(b"]}\n\n", counts))
    out += watch.feed(DONE)
    told = json.loads(out.split(b"\n\n")[-3][6:])
    assert told["id"] == "a-1"
    assert told["usage"] == usage | {"prompt_tokens": 3, "completion_tokens": 3}


def test_a_token_of_another_backend_is_told_by_sight_too():
    watch = begun(frame("a", [7]), frame("b", [8]))
    assert watch.broken(FAULT) == b""
    watch.rest()
    watch.feed(role([1, 2, 3, 7, 8]))
    other = [frame("c", [9]), frame("d", [10])]
    for each in other:
        each = each.replace(b'"id":"a-1"', b'"id":"other-22"').replace(
            b'"created":1', b'"created":99'
        )
        told = watch.by_sight(chunk(each))
        told = told or chunk(watch.feed(each))
    assert told == chunk(frame("d", None))
    assert watch.trail.reached() == Reached([1, 2, 3], [7, 8, 9, 10])


def test_of_a_large_body_only_its_small_fields_are_kept():
    small = {"model": b'"m"', "stream": b"true", "temperature": b"0"}
    body, places = bytearray(b"{"), {}
    for name, value in (small | {"messages": b'["%b"]' % (b"x" * 70_000)}).items():
        body += b'"%b":' % name.encode()
        places[name] = (len(body), len(body) + len(value))
        body += value + b","
    large = call()
    large = structs.replace(large, body=body, places=places)
    assert may_trail(large)
    watch = stream(large)
    body.clear()
    for each in (role([1, 2]), frame("a", [7])):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    rest = json.loads(watch.rest()[0].body)
    assert rest["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 7]}
    assert (rest["model"], rest["temperature"], len(rest["messages"])) == ("m", 0, 1)


def test_a_client_of_a_large_body_that_wants_the_ids_itself_gets_them():
    body = b'{"messages":["%b"],"return_token_ids":true}' % (b"x" * 70_000)
    places = {"messages": (12, 70_016), "return_token_ids": (len(body) - 5, len(body) - 1)}
    assert not may_trail(structs.replace(call(), body=body, places=places))


@pytest.mark.parametrize(("echo", "trails"), [(True, False), (False, True), (None, True)])
def test_a_prompt_that_is_to_be_echoed_leaves_no_trail(echo, trails):
    """The engine that tells ids leaves it out."""
    asked = call(Dialect.COMPLETIONS, echo=echo)
    assert may_trail(asked) is trails
    body = asked.body[:-1] + b',"prompt":"%b"}' % (b"x" * 70_000)
    at = body.index(b'"echo": ') + 8
    places = {
        "echo": (at, at + len(json.dumps(echo))),
        "prompt": (len(body) - 70_003, len(body) - 1),
    }
    assert may_trail(structs.replace(asked, body=body, places=places)) is trails


def test_a_large_field_that_the_ids_do_not_stand_for_leaves_no_trail():
    body = b'"%b"' % (b"x" * 70_000)
    for name, trails in (("messages", True), ("tools", False), ("response_format", False)):
        assert may_trail(structs.replace(call(), body=body, places={name: (0, 70_002)})) is trails


@pytest.mark.parametrize(
    ("asked", "goes_on"),
    [
        (call(), True),
        (call(add_generation_prompt=True), False),
        (call(Dialect.COMPLETIONS), True),
        (call(Dialect.COMPLETIONS, prompt=[1, 2, 3]), False),
    ],
)
def test_what_has_no_place_behind_its_prompt_neither_leaves_nor_goes_on_by_its_text(asked, goes_on):
    watch = TrailedStream(asked, Demand(3, exact=True), request_id="r", by_text=True)
    watch.feed(frame("a", False, dialect=asked.dialect))
    assert watch.may_leave is goes_on
    told = watch.broken(FAULT)
    assert (b"it is gone" in told) is not goes_on
    assert watch.barrier is (None if goes_on else Barrier.REQUEST)
    assert (watch.rest() is not None) is goes_on


@pytest.mark.parametrize("by_text", [False, True])
def test_what_has_said_all_that_it_may_say_does_not_leave(by_text):
    asked, demand = call(max_tokens=2), Demand(3, exact=True, max_new_tokens=2)
    watch = TrailedStream(asked, demand, request_id="r", by_text=by_text)
    for each in (role([1, 2, 3]), frame("a", [7])):
        watch.feed(each)
    assert watch.may_leave
    watch.feed(frame("b", [8]))
    assert not watch.may_leave


def test_of_one_that_goes_on_by_its_text_several_tokens_in_one_read_are_kept():
    watch = TrailedStream(call(), Demand(3, exact=True), request_id="r", by_text=True)
    for each in (role([1, 2, 3]), frame("a", False), frame("b", False)):
        watch.feed(each)
    now = chunk(frame("c", False)) + chunk(frame("d", False))
    assert watch.by_sight(now) == now
    assert watch.by_sight(now + chunk(frame("", False, finish="stop"))) is None
    assert watch.trail.reached() == Reached([], [], text="abcd", text_tokens=4)


def test_a_client_that_wants_the_ids_itself_gets_them():
    assert may_trail(call())
    assert not may_trail(call(return_token_ids=True))


# --- what servers write that is odd, and all the same no reason to lose or to double a text ------------


def crlf(data):
    return data.replace(b"\n", b"\r\n")


@given(st.data())
def test_lines_that_end_as_in_http_are_passed_on_as_they_come(data):
    """Some servers end lines so: their streams must not wait for an end that never comes."""
    frames = [role([1, 2, 3]), frame("a", [7]), frame("b", [8])]
    whole = crlf(b"".join(frames))
    cut = data.draw(st.integers(0, len(whole)))
    watch = stream()
    out = watch.feed(whole[:cut]) + watch.feed(whole[cut:])
    assert out == role(None).replace(b"}]}", b'}],"prompt_token_ids":null}') + b"".join(
        frame(text, None) for text in "ab"
    )
    assert watch.trail.reached() == Reached([1, 2, 3], [7, 8])


def test_a_prompt_of_too_many_ids_is_passed_on_and_only_not_gone_on_with():
    begins = role(list(range(100_000, 260_000)))
    assert len(begins) > 1024 * 1024
    watch, out = stream(), b""
    for at in range(0, len(begins), 65_536):
        out += watch.feed(begins[at : at + 65_536])
    assert out == role([]).replace(b"[]", b"null")
    assert watch.feed(frame("a", [7])) == frame("a", None)
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


def test_what_an_aborted_request_says_last_is_not_told_and_said_again():
    """vLLM lets out what it held back for stop strings with `abort`: that frame the client does not get."""
    watch = stream(call(temperature=0, stop="xyz"))
    shown = b"".join(
        map(watch.feed, [role([1, 2, 3]), frame("", [7]), frame("ab", [8]), frame("cd", [9])])
    )
    assert watch.feed(frame("ef", [], finish="abort")) == b""
    _, demand = watch.rest()
    given = [1, 2, 3, 7, 8, 9][: demand.prompt_tokens]
    assert given == [1, 2, 3, 7, 8]  # `ef` is the text of token 9
    out = watch.feed(role(given)) + watch.feed(frame("", [9])) + watch.feed(frame("ef", [10]))
    assert shown_by(shown + out)[0] == "abcdef"


def test_text_without_ids_is_said_again_and_not_doubled():
    watch = stream(call(temperature=0))
    for each in (role([1, 2, 3]), frame("a", [7]), frame("b", False)):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    watch.rest()
    out = [role([1, 2, 3, 7]), frame("bc", [8]), frame("d", [9])]
    assert shown_by(b"".join(map(watch.feed, out)))[0] == "cd"


def test_one_that_ends_before_it_has_said_all_again_is_not_complete():
    watch = stream(call(temperature=0))
    for each in (role([1, 2, 3]), frame("x", [6]), frame("ab", [7, 8])):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    watch.rest()
    out = watch.feed(role([1, 2, 3, 6])) + watch.feed(frame("a", [7], finish="stop"))
    assert b"could not be resumed" in out
    assert not watch.complete


def test_a_frame_that_is_cut_by_an_orderly_end_is_written_again():
    """Half of an id is another id."""
    watch = begun(frame("a", [7]))
    watch.feed(frame("b", [713]).partition(b"13]")[0])
    assert watch.close() == b""
    assert watch.rest() is not None
    assert watch.trail.reached() == Reached([1, 2, 3], [7])


def test_who_does_not_tell_its_prompt_is_not_listened_to_and_another_one_may_go_on():
    watch = begun(frame("a", [7]))
    assert watch.broken(FAULT) == b""
    watch.rest()
    assert watch.feed(frame("a", [70])) == b""
    assert watch.cut is not None
    assert json.loads(watch.rest()[0].body)["kv_transfer_params"] == {
        "prompt_token_ids": [1, 2, 3, 7]
    }


GARBLED = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers()))


@given(
    st.dictionaries(
        st.sampled_from(["prompt_tokens", "completion_tokens", "prompt_tokens_details"]),
        st.one_of(GARBLED, st.dictionaries(st.just("cached_tokens"), GARBLED)),
    )
    | GARBLED,
    st.sampled_from([None, [], [{}], [{"delta": None}], [{"delta": {"content": "b"}}]]),
)
def test_garbled_counts_and_choices_break_nothing(usage, choices):
    watch = stream(call(temperature=0))
    for each in (role([1, 2, 3]), frame("x", [6]), frame("bc", [7, 8])):
        watch.feed(each)
    watch.broken(FAULT)
    watch.rest()
    watch.feed(role([1, 2, 3, 6]))
    odd = {"id": "b", "choices": choices, "usage": usage}
    told = watch.feed(b"data: " + json.dumps(odd, separators=(",", ":")).encode() + b"\n\n")
    assert told == b"" or told.endswith(b"\n\n")


def test_what_is_put_together_has_reasoning_under_its_older_name_too():
    whole = Whole(Dialect.CHAT)
    whole.feed(thought("a", None, "reasoning_content") + frame("b", None, finish="stop"))
    message = json.loads(whole.body())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a", "b")


@pytest.mark.parametrize(
    "choices",
    [[None], {"a": 1}, [{"delta": "x"}], [{"delta": {"content": ["a"]}}], [{"text": 5}]],
)
def test_what_cannot_be_read_is_no_part_of_a_whole_reply(choices):
    whole = Gathering(Dialect.CHAT, 10_000)
    whole.write(frame("a", None) + b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n")
    whole.end(frame("b", None, finish="stop") + b"data: [DONE]\n\n")
    with pytest.raises(BackendBroke, match="could not be read"):
        whole.reply()


def test_frames_are_put_together_however_they_are_spaced():
    whole = Whole(Dialect.CHAT)
    for each in (frame("a", None), b": keep-alive\n\n", frame("b", None, finish="stop"), DONE):
        whole.feed(b"event: x\n" + each.replace(b"data: ", b"data:"))
    assert json.loads(whole.body())["choices"][0]["message"]["content"] == "ab"
    assert not whole.garbled


def test_a_chunk_of_a_completion_is_told_as_one_of_a_chat():
    frame = (
        b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"ab",'
        b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[2,88],"token_ids":[7]}],'
        b'"usage":null}\n\n'
    )
    assert as_chat(frame) == (
        b'data: {"prompt_token_ids":[2,88],"id":"cmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"ab"},"logprobs":null,"finish_reason":null,"token_ids":[7]}],'
        b'"usage":null}\n\n'
    )


@pytest.mark.parametrize(
    "frame", [DONE, b": waiting\n\n", b'data: {"error":{"message":"no"}}\n\n', b"data: [1\n\n"]
)
def test_what_is_no_chunk_is_left_as_it_is(frame):
    assert as_chat(frame) == frame


def test_what_the_backend_before_counted_is_not_the_usage_of_the_whole():
    watch = begun(frame("a", [4]), frame("b", [5]), asked=structs.replace(call(), wants_usage=True))
    usage = b'"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}'
    watch.feed(b'data: {"id":"a-1","choices":[],%b}\n\ndata: [DONE]\n\n' % usage)
    assert watch.rest() is not None
    watch.feed(role([1, 2, 3, 4, 5]))
    for number in range(50):
        watch.feed(frame("x", [6 + number]))
    watch.broken(FAULT)
    assert watch.usage is None or watch.usage.completion_tokens > 50
