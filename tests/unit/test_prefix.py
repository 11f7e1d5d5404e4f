"""The beginnings of prompts, and what a backend's prefix cache is thought to hold of them."""

import dataclasses
import json

import pytest

from gateway.core.prefix import Prefix
from gateway.core.types import Ask, Caller, Demand, Endpoint, Need, Route
from gateway.prefix.approximate import MOST_KEYS, ApproximateIndex
from gateway.prefix.hashing import ENDS, PrefixHasher
from gateway.prefix.precise import PreciseIndex
from gateway.wire.calls import ENDPOINTS, parse_at_once, parse_call
from gateway.wire.large import completed
from gateway.wire.scan import BodyScan

SPECS = {spec.endpoint: spec for spec in ENDPOINTS.values()}
ROUTE = Route("m", "m", "m")
ANYONE = Caller("k", "n", "t")
SYSTEM = "You answer questions about trains. " * 40


class Asked:
    prefix_index = object()


SEVERAL = [Asked(), Asked()]


def body(text, **more):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def call_of(raw, endpoint=Endpoint.CHAT):
    return parse_call(SPECS[endpoint], raw)


def begin(call, *, seed=1, route=ROUTE, caller=ANYONE, backends=SEVERAL):
    tokens = (call.text_bytes or 4000) // 4
    ask = Ask(route, call, Demand(tokens, exact=False), caller, Need(tokens, 100))
    return PrefixHasher(seed).of(ask, backends)


def shared(one, other):
    """Return how many bytes of beginnings two prompts share."""
    both = [end for key, end in zip(one.keys, one.ends, strict=True) if key in other.keys]
    return max(both, default=0)


# --- pictures ---------------------------------------------------------------------------------------

PIXELS = "A" * 1_000_000
PICTURES = {
    Endpoint.CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PIXELS}},
    Endpoint.MESSAGES: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PIXELS},
    },
}


@pytest.mark.parametrize("endpoint", PICTURES)
@pytest.mark.parametrize("large", [False, True])
def test_a_picture_is_as_little_of_a_prompt_as_its_tokens_are(endpoint, large):
    """Else most of a long conversation seems to be new where a picture is added, or little where text is."""

    def turns(*contents):
        told = [{"role": "user", "content": each} for each in contents]
        raw = json.dumps({"model": "m", "messages": told}).encode()
        if not large:
            return begin(call_of(raw, endpoint))
        found = BodyScan()
        found.feed(raw)
        while found.step():
            pass
        found.end()
        while found.step():
            pass
        return begin(completed(call_of(found.skim(), endpoint), found))

    text, picture = SYSTEM * 20, [PICTURES[endpoint]]  # 28,000 bytes, and as good as 4,000
    before, with_picture, with_text = turns(text), turns(text, picture), turns(text, picture, text)
    index = ApproximateIndex()
    index.sent(before)
    assert index.tokens(with_picture) == pytest.approx(1000 * 28 / 32, rel=0.05)
    index.sent(with_picture)
    assert index.tokens(with_text) == pytest.approx(1000 * 32 / 60, rel=0.05)


@pytest.mark.parametrize("text", ["base64", 'base64"', '"base64"data"', "base64," + "A" * 9000])
def test_what_only_seems_to_be_a_picture_breaks_nothing(text):
    picture = {"type": "image_url", "image_url": {"url": "https://a.b/c"}}
    said = [{"type": "text", "text": text * 40}, picture]
    told = begin(call_of(json.dumps({"model": "m", "messages": [{"role": "user", "content": said}]}).encode()))  # fmt: skip
    assert sorted(told.ends, reverse=True) == [*told.ends]
    assert 0 < told.ends[0] <= told.size


def test_a_text_that_speaks_of_base64_is_text():
    said = [{"type": "text", "text": "base64 is used " * 200}, PICTURES[Endpoint.CHAT]]
    told = begin(call_of(json.dumps({"model": "m", "messages": [{"role": "user", "content": said}]}).encode()))  # fmt: skip
    assert told.size == pytest.approx(3_000 + 4096, rel=0.05)


# --- beginnings -------------------------------------------------------------------------------------


def test_prompts_share_the_beginnings_up_to_where_they_part():
    one, other = begin(call_of(body("When?"))), begin(call_of(body("Where to?" * 200)))
    assert shared(one, other) == len(json.dumps([{"role": "system", "content": SYSTEM}])) - 1


def test_prompts_share_the_beginnings_up_to_where_one_message_parts():
    one, other = (
        {"model": "m", "messages": [{"role": "user", "content": SYSTEM * 8 + end * 90}]}
        for end in ("When?", "Where to?")
    )
    parts_at = len(json.dumps([{"role": "user", "content": SYSTEM * 8}])) - 3
    found = shared(*(begin(call_of(json.dumps(each).encode())) for each in (one, other)))
    assert found == max(end for end in ENDS if end <= parts_at)


def compact(value):
    return json.dumps(value, separators=(",", ":"))


PROSE, CODE = "Trains run late. " * 40, "if (a) { b({}, {c: 1}) } " * 40
ANSWER = {"role": "assistant", "content": "It is late."}
ANSWERS = (ANSWER, {"content": "It is late.", "refusal": None, "role": "assistant"})


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("text", [PROSE, CODE, PROSE * 20, CODE * 20])
@pytest.mark.parametrize("dumps", [json.dumps, compact])
def test_the_next_turn_of_a_conversation_shares_all_of_the_last(dumps, text, answer):
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    then = [*first, answer, {"role": "user", "content": text}]
    one, other = (
        begin(call_of(dumps({"model": "m", "messages": each, "stream": True}).encode()))
        for each in (first, then)
    )
    assert shared(one, other) == len(dumps(first)) - 1


@pytest.mark.parametrize("dumps", [json.dumps, compact])
def test_what_follows_the_messages_is_no_part_of_a_short_chat(dumps):
    chat = {"model": "m", "messages": [{"role": "user", "content": PROSE[:600]}]}
    call = parse_at_once(SPECS[Endpoint.CHAT], dumps(chat).encode(), b"application/json")
    tuned = dumps({**chat, "seed": 7, "user": "a" * 900}).encode()
    longer = parse_at_once(SPECS[Endpoint.CHAT], tuned, b"application/json")
    assert call.fields is None is longer.fields  # they are read in one go
    assert begin(call).keys == begin(longer).keys
    assert begin(call).size == begin(longer).size == len(dumps(chat["messages"]))
    for tuned in ({**chat, "reasoning_effort": "low"}, {"reasoning_effort": "low", **chat}):
        other = parse_at_once(SPECS[Endpoint.CHAT], dumps(tuned).encode(), b"application/json")
        assert other.fields is None
        assert shared(begin(call), begin(other)) == 0  # templates may write it before them


def test_the_next_turn_of_a_response_shares_all_of_the_last():
    first = [{"role": "user", "content": PROSE}]
    told = {"type": "message", "id": "msg_1", "status": "completed", **ANSWER}
    then = [*first, told, {"role": "user", "content": PROSE}]
    one, other = (
        begin(
            call_of(compact({"model": "m", "input": each}).encode(), Endpoint.RESPONSES),
        )
        for each in (first, then)
    )
    assert shared(one, other) == len(compact(first)) - 1


def billed(request, text=SYSTEM, glue="\\n"):
    return f"x-anthropic-billing-header: cc_version=2.1.119.47e; cc_entrypoint=cli; cch={request:05x};{glue}{text}"


BILLED = {
    "messages": (
        Endpoint.MESSAGES,
        lambda n: {
            "system": [
                {"type": "text", "text": billed(n, "", "")},
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": PROSE}],
        },
    ),
    "a system text": (
        Endpoint.MESSAGES,
        lambda n: {"system": billed(n), "messages": [{"role": "user", "content": PROSE}]},
    ),
    "chat": (
        Endpoint.CHAT,
        lambda n: {
            "messages": [
                {"role": "system", "content": billed(n)},
                {"role": "user", "content": PROSE},
            ]
        },
    ),
    "chat in parts": (
        Endpoint.CHAT,
        lambda n: {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": billed(n)}]},
                {"role": "user", "content": PROSE},
            ],
            "user": "u",
        },
    ),
    "response": (
        Endpoint.RESPONSES,
        lambda n: {"instructions": billed(n, glue="\n\n"), "input": PROSE},
    ),
}


@pytest.mark.parametrize("dumps", [json.dumps, compact])
@pytest.mark.parametrize(("endpoint", "written"), BILLED.values(), ids=BILLED)
def test_a_line_for_billing_that_no_engine_reads_parts_no_prompts(endpoint, written, dumps):
    """Claude Code writes another hash into it with each request."""
    tools = [{"name": "look", "input_schema": {}}] if endpoint is Endpoint.MESSAGES else None
    one, other = (
        begin(call_of(dumps({"model": "m", **written(n), "tools": tools}).encode(), endpoint))
        for n in (7, 70_000)
    )
    assert one == other
    assert one.size > len(SYSTEM) + len(PROSE)


def test_what_is_written_behind_the_line_for_billing_parts_prompts_as_ever():
    one, other = (
        begin(
            call_of(
                compact(
                    {"model": "m", "messages": [{"role": "system", "content": billed(1, text)}]}
                ).encode()
            )
        )
        for text in (PROSE, CODE)
    )
    assert shared(one, other) == 0


def marked(turns, at, *, last=True):
    """Return turns with a mark of the prefix cache at one of them, as agents have it move on."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return [
        {
            "role": turn["role"],
            "content": [
                (part | mark if last else mark | part) if number == at else part
                for part in turn["content"]
            ],
        }
        for number, turn in enumerate(turns)
    ]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dumps", [json.dumps, compact])
def test_a_mark_of_the_cache_that_moves_on_parts_no_turns(dumps, last):
    turns = [
        {"role": role, "content": [{"type": "text", "text": PROSE}]}
        for role in ("user", "assistant", "user")
    ]
    one, other = (
        begin(
            call_of(
                dumps(
                    {"model": "m", "system": SYSTEM, "messages": marked(each, at, last=last)}
                ).encode(),
                Endpoint.MESSAGES,
            )
        )
        for each, at in ((turns[:1], 0), (turns, 2))
    )
    assert shared(one, other) == one.size - 1
    bare = begin(
        call_of(
            dumps({"model": "m", "system": SYSTEM, "messages": turns}).encode(), Endpoint.MESSAGES
        )
    )
    assert other.keys == bare.keys


@pytest.mark.parametrize(
    "odd",
    [
        {"cache_control": {"type": {"deep": 1}}},
        {"cache_control": None},
        {"text": PROSE + '"cache_control": {}, '},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_marks_of_any_form_and_number_do_no_harm(odd):
    part = {"type": "text", "text": PROSE}
    raw = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [part | odd] * 40}]}
    ).encode()
    assert begin(call_of(raw, Endpoint.MESSAGES)).size > 40 * len(PROSE)


def test_a_prompt_of_many_short_messages_has_few_beginnings():
    turns = [{"role": "user", "content": "x"}] * 20_000
    many = begin(call_of(compact({"model": "m", "messages": turns}).encode()))
    assert many.size > 500_000
    assert len(many.keys) < 450
    assert many.keys[0] not in many.keys[1:]


def test_a_conversation_that_goes_on_keeps_its_beginnings():
    turns = [{"role": "user", "content": "word " * 300}]
    first = begin(call_of(json.dumps({"model": "m", "messages": turns}).encode()))
    turns += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "x" * 2000}]
    then = begin(call_of(json.dumps({"model": "m", "messages": turns}).encode()))
    assert set(first.keys) < set(then.keys)


def test_a_large_body_has_the_same_beginnings_as_a_small_one():
    raw = body("Where to? " * 400, tools=[{"type": "function", "function": {"name": "f" * 400}}])
    scan = BodyScan()
    scan.feed(raw)
    scan.end()
    while scan.step():
        pass
    large = completed(call_of(scan.skim()), scan)
    assert large.places is not None
    assert begin(large) == begin(call_of(raw))


def test_tools_come_before_messages():
    tools = [{"type": "function", "function": {"name": "look", "description": "d" * 900}}]
    one, other = (begin(call_of(body(text * 50, tools=tools))) for text in ("When?", "Where?"))
    less = begin(call_of(body("When?" * 50)))
    assert shared(one, other) > shared(one, less) == 0


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.COMPLETIONS, {"prompt": SYSTEM}),
        (Endpoint.COMPLETIONS, {"prompt": list(range(1000))}),
        (Endpoint.RESPONSES, {"instructions": SYSTEM, "input": "hi"}),
        (Endpoint.MESSAGES, {"system": SYSTEM, "messages": [], "max_tokens": 1}),
    ],
)
def test_every_generating_endpoint_has_beginnings(endpoint, fields):
    raw = json.dumps({"model": "m", **fields}).encode()
    assert len(begin(call_of(raw, endpoint)).keys) > 3


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "short"}]}).encode(),
        body("x", prompt_logprobs=1),
        body("x", truncate_prompt_tokens=10),
    ],
)
def test_short_prompts_and_such_as_are_read_anew_have_none(raw):
    assert begin(call_of(raw)) is None


def test_nothing_is_looked_for_where_nobody_asks():
    class Alone:
        prefix_index = None

    assert begin(call_of(body("x")), backends=[Alone()]) is None
    assert begin(call_of(body("x")), backends=[]) is None


def test_several_prompts_have_none():
    raw = json.dumps({"model": "m", "prompt": [SYSTEM, SYSTEM]}).encode()
    assert begin(call_of(raw, Endpoint.COMPLETIONS)) is None


def test_what_has_a_cache_of_its_own_has_keys_of_its_own():
    plain = call_of(body("x"))
    apart = dataclasses.replace(ROUTE, tenants_apart=True)
    others = [
        begin(plain, route=dataclasses.replace(ROUTE, adapter="lora")),
        begin(plain, route=apart),
        begin(plain, route=apart, caller=Caller("k", "n", "another")),
        begin(call_of(body("x", cache_salt="mine"))),
        begin(call_of(body("x", cache_salt="yours"))),
        begin(call_of(body("x", max_tokens=1), Endpoint.MESSAGES)),
        begin(plain, seed=2),
    ]
    found = [frozenset(each.keys) for each in (begin(plain), *others)]
    assert len(frozenset.union(*found)) == sum(map(len, found))


def test_tenants_share_keys_where_they_share_the_cache():
    plain = call_of(body("x"))
    assert begin(plain) == begin(plain, caller=Caller("k2", "n2", "another"))


def test_the_home_of_a_prompt_is_the_same_in_every_process():
    homes = {begin(call_of(body("x")), seed=seed).home for seed in range(3)}
    assert len(homes) == 1


# --- what a backend holds ---------------------------------------------------------------------------


def prompt(*keys, tokens=1000, output=0):
    """Return a prompt whose beginnings have these keys, the shortest first."""
    count = len(keys)
    ends = tuple(range(count, 0, -1))
    return Prefix([*reversed(keys)], ends, count, tokens, output)


def test_it_holds_what_was_sent_there_and_all_that_begins_like_it():
    held = ApproximateIndex()
    assert held.tokens(prompt(1, 2, 3, 4)) == 0
    held.sent(prompt(1, 2, 3, 4))
    assert held.tokens(prompt(1, 2, 3, 4)) == 1000
    assert held.tokens(prompt(1, 2, 8, 9)) == 500
    assert held.tokens(prompt(7, 2, 3, 4)) == 0


def test_it_tells_what_it_held_before_and_what_is_new():
    held = ApproximateIndex()
    held.sent(prompt(1, 2, 8, 9))
    sent = held.sent(prompt(1, 2, 3, 4))
    assert (sent.cached_tokens, sent.known_tokens, sent.new_keys) == (500, 500, 2)


def test_it_tells_how_much_of_a_prompt_was_surely_read():
    held = ApproximateIndex()
    held.sent(prompt(1, 2, 8, 9))
    sent = held.sent(prompt(1, 2, 3, 4))
    assert (sent.known_tokens, sent.most_tokens, sent.surely_read_tokens) == (500, 750, 250)
    assert held.sent(prompt(1, 2, 3, 4)).surely_read_tokens == 0
    assert held.sent(prompt(11, 12, 13, 14)).surely_read_tokens == 1000


def test_nothing_is_surely_read_while_an_engine_finds_what_nobody_sent():
    held = ApproximateIndex()
    held.scraped(None, 5e6)  # it ran before
    assert held.sent(prompt(1, 2)).surely_read_tokens == 0
    held.read(held.sent(prompt(3, 4)))
    held.scraped(None, 5e6 + 900)
    assert held.sent(prompt(5, 6)).surely_read_tokens == 0
    held.scraped(None, 5e6 + 900)  # nothing was read, so nothing is told
    assert held.sent(prompt(7, 8)).surely_read_tokens == 0
    held.read(held.sent(prompt(9, 10)))
    held.scraped(None, 5e6 + 1000)
    assert held.sent(prompt(11, 12)).surely_read_tokens == 1000


def test_a_reply_that_found_more_than_expected_leaves_nothing_sure():
    held = ApproximateIndex()
    held.ended(held.sent(prompt(1, 2)), 900)
    assert held.sent(prompt(3, 4)).surely_read_tokens == 0
    held.ended(held.sent(prompt(5, 6)), 0)
    assert held.sent(prompt(7, 8)).surely_read_tokens == 1000


def test_a_server_that_tells_nothing_any_more_since_its_restart_is_measured_by_its_counter():
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    held.ended(held.sent(prompt(1, 2)), 0)
    held.forget()  # its flag is gone
    held.scraped(None, 0.0)
    for number in range(40):
        sent = held.sent(prompt(1, 2))
        held.read(sent)
        held.ended(sent, None)
        held.scraped(None, 1000.0 * number)
    assert (held.trust, held.tokens(prompt(1, 2))) == (1.0, 1000)


def test_what_was_never_read_is_not_held_and_the_rest_stays():
    held = ApproximateIndex()
    held.sent(prompt(1, 2, 8, 9))
    held.unsent(held.sent(prompt(1, 2, 3, 4)))
    assert held.tokens(prompt(1, 2, 3, 4)) == 500
    assert held.tokens(prompt(1, 2, 8, 9)) == 1000


def test_nobody_drives_out_what_others_sent_with_requests_that_are_never_read():
    held = ApproximateIndex()
    held.capacity_tokens = 10_000
    held.sent(prompt(1, 2, 3, 4))
    for number in range(100):
        held.unsent(held.sent(prompt(100 + number, tokens=5000)))
    assert held.tokens(prompt(1, 2, 3, 4)) == 1000


def test_nor_with_such_that_begin_as_one_that_was():
    held = ApproximateIndex()
    held.capacity_tokens = 10_000
    held.sent(prompt(1, 2, 3, 4))
    held.sent(prompt(5, 6))
    for _ in range(100):
        held.unsent(held.sent(prompt(5, 6, output=5000)))
    assert held.tokens(prompt(1, 2, 3, 4)) == 1000


@pytest.mark.parametrize("before", [[], [1], [1, 2]])
def test_what_goes_on_from_a_prompt_that_was_never_read_is_held_again_once_it_is_sent_again(before):
    held = ApproximateIndex()
    if before:
        held.sent(prompt(*before))
    lost = held.sent(prompt(1, 2, 3, 4, 5))
    held.sent(prompt(1, 2, 3, 4, 6))
    held.unsent(lost)
    held.sent(prompt(1, 2, 3, 4, 6))
    assert held.tokens(prompt(1, 2, 3, 4, 6)) == 1000
    assert held.tokens(prompt(1, 2, 3, 4, 7)) == 800


def test_what_was_used_least_lately_is_gone_after_two_caches():
    held = ApproximateIndex()
    held.capacity_tokens = 10_000
    held.sent(prompt(1, 2))
    held.sent(prompt(3, 4))
    for number in range(30):
        held.sent(prompt(3, 4))
        assert number >= 10 or held.tokens(prompt(1, 2)) == 1000
        held.sent(prompt(100 + number))
    assert held.tokens(prompt(1, 2)) == 0
    assert held.tokens(prompt(3, 4)) == 1000


def test_outputs_take_their_room_too():
    held = ApproximateIndex()
    held.capacity_tokens = 10_000
    held.sent(prompt(1, tokens=100))
    for number in range(25):
        held.sent(prompt(100 + number, tokens=100, output=900))
    assert held.tokens(prompt(1, tokens=100)) == 0


def test_it_keeps_a_bounded_number_of_keys():
    held = ApproximateIndex()
    for number in range(3000):
        held.sent(prompt(*range(number * 50, number * 50 + 50), tokens=50))
    assert len(held) <= 2 * (MOST_KEYS + 50)


def test_a_restart_forgets_all():
    held = ApproximateIndex()
    held.sent(prompt(1, 2))
    held.forget()
    assert (len(held), held.tokens(prompt(1, 2))) == (0, 0)


# --- how much that is believed ----------------------------------------------------------------------


def use(held, times, found, *, tell=True, tokens=1000):
    """Send prompts that it is thought to hold, of which so much is found."""
    hits = held._hits or 0.0
    for _ in range(times):
        sent = held.sent(prompt(1, 2, tokens=tokens))
        if not tell:
            hits += found
            held.scraped(None, hits)
        held.ended(sent, found if tell else None)


def test_an_engine_that_finds_what_is_expected_is_believed():
    held = ApproximateIndex()
    use(held, 30, found=1000)
    assert held.trust == 1.0


def test_an_engine_that_finds_what_is_expected_is_believed_between_scrapes_too():
    held, hits = ApproximateIndex(), 0.0
    held.scraped(None, hits)
    for number in range(300):
        held.read(held.sent(prompt(1, 2, tokens=2000)))
        hits += 2000 if number else 0
        if number % 40 == 39:
            held.scraped(None, hits)
        assert held.trust == 1.0


def test_a_cache_that_is_lost_is_forgotten_with_the_next_scrape():
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    held.read(held.sent(prompt(1, 2, tokens=2000)))
    for hits in range(10_000, 100_001, 10_000):
        for _ in range(5):
            held.read(held.sent(prompt(1, 2, tokens=2000)))
        held.scraped(None, hits)
    for _ in range(4):
        held.read(held.sent(prompt(1, 2, tokens=2000)))
    held.scraped(None, 100_000)
    assert len(held) == 2  # four may have been driven out
    held.read(held.sent(prompt(1, 2, tokens=2000)))
    held.scraped(None, 100_000)
    assert len(held) == 0
    assert held.trust > 0.8  # it is believed again as it fills


@pytest.mark.parametrize("tell", [True, False])
def test_an_engine_that_finds_half_of_it_saves_half(tell):
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    use(held, 300, found=500, tell=tell)
    assert held.trust == pytest.approx(0.5, abs=0.05)
    assert held.tokens(prompt(1, 2)) == pytest.approx(500, abs=50)
    assert held.sent(prompt(1, 2)).known_tokens == 1000


@pytest.mark.parametrize("tell", [True, False])
def test_an_engine_without_a_cache_attracts_nothing(tell):
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    use(held, 20, found=0, tell=tell)
    assert held.tokens(prompt(1, 2)) == 0
    held.sent(prompt(1, 2))
    assert held.tokens(prompt(1, 2)) == 0


def test_a_cache_that_was_reset_is_believed_again_once_it_finds_what_is_sent():
    held = ApproximateIndex()
    use(held, 300, found=1000)
    use(held, 300, found=0)
    assert held.trust < 0.1
    use(held, 300, found=1000)
    assert held.trust > 0.9


def test_a_reply_that_tells_nothing_where_others_tell_found_nothing():
    held = ApproximateIndex()
    use(held, 1, found=1000)
    for _ in range(300):
        held.ended(held.sent(prompt(1, 2)), None)
    assert held.trust < 0.1


def test_what_the_counter_was_to_show_says_nothing_once_replies_tell():
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    for _ in range(8):  # chats, which tell nothing; the next scrape would show what they found
        sent = held.sent(prompt(1, 2))
        held.read(sent)
        held.ended(sent, None)
    use(held, 5, found=1000)
    assert held.trust == 1.0
    assert held.tokens(prompt(1, 2)) == 1000


def test_an_engine_that_tells_nothing_is_believed():
    held = ApproximateIndex()
    for _ in range(300):
        held.ended(held.sent(prompt(1, 2)), None)
        held.scraped(None, None)
    assert held.trust == 1.0


def test_what_others_find_there_gives_no_credit_for_long():
    held = ApproximateIndex()
    held.scraped(None, 0.0)
    held.scraped(None, 1e9)
    use(held, 300, found=0, tell=False)
    assert held.trust < 0.1


@pytest.mark.parametrize("index", [ApproximateIndex, PreciseIndex])
@pytest.mark.parametrize("first_token_s", [1, 4, None])  # None: a reply that is no stream
def test_hits_count_until_the_prompts_are_compared_however_long_after(index, first_token_s):
    held, hits = index(), 0.0
    guess = held if index is ApproximateIndex else held.guess
    held.scraped(None, hits)
    for _ in range(6):
        sent = [held.sent(prompt(key, tokens=20_000)) for key in range(5)]
        hits += sum(each.known_tokens for each in sent)  # counted as their reading begins
        for second in range(12):
            if second == first_token_s:
                for each in sent:
                    held.read(each)
            held.scraped(None, hits)
        for each in sent:
            held.over(each)
        held.scraped(None, hits)
        for each in sent:
            held.ended(each, None, 20_000)
        held.scraped(None, hits)
        assert guess.trust == 1.0
        assert len(guess) == 5
        assert guess._under_way_tokens == 0
    for _ in range(3):
        held.scraped(None, hits)
    assert guess._left_tokens == [0, 0, 0]


def test_a_lost_cache_is_noticed_with_plain_replies_too():
    held, hits = ApproximateIndex(), 0.0
    held.scraped(None, hits)
    for wave in range(8):
        sent = [held.sent(prompt(key, tokens=20_000)) for key in range(5)]
        hits += sum(each.known_tokens for each in sent) if wave < 5 else 0
        held.scraped(None, hits)
        for each in sent:
            held.over(each)
            held.ended(each, None, 20_000)
        held.scraped(None, hits)
        if wave == 4:
            assert held.trust == 1.0
    assert held.trust < 0.8


def test_a_short_chat_and_what_it_grows_into_begin_alike():
    turns = [{"role": "user", "content": "word " * 150}]
    first = {"model": "m", "messages": turns, "user": "messages", "stream": True}
    more = {**first, "messages": [*turns, {"role": "assistant", "content": "x" * 3000}]}
    for dumps in (json.dumps, lambda each: json.dumps(each, separators=(",", ":"))):
        short, long = (dumps(each).encode() for each in (first, more))
        call = parse_at_once(SPECS[Endpoint.CHAT], short, b"application/json")
        assert call.fields is None
        one, other = begin(call), begin(call_of(long))
        assert shared(one, other) >= one.ends[1] > 300
        tuned = call_of(dumps({**first, "reasoning_effort": "low"}).encode())
        assert shared(begin(tuned), other) == 0
