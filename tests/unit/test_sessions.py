"""Sessions as hints: where their last prompt went, and how much that is believed."""

import dataclasses
import json
import random

import pytest

from gateway.core.prefix import BlockShape, Prefix, SentPrompt, Session
from gateway.core.types import (
    Ask,
    Caller,
    Demand,
    Endpoint,
    Need,
    RequestRecord,
    Route,
    Usage,
    UsageSource,
)
from gateway.prefix.approximate import ApproximateIndex
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.precise import PromptBlocks
from gateway.prefix.sessions import LIFETIME_S, MOST_SESSIONS, Sessions
from gateway.routing.choice import Chooser
from gateway.wire.calls import parse_at_once
from tests.properties.test_pick import CALL, NOW, pool_of
from tests.unit.test_prefix import ANYONE, PROSE, ROUTE, SEVERAL, SPECS, begin, body, call_of

SHORT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go on"}]}).encode()


def prefix(key=1, at=0.0, *, keys=(), tokens=1000, output=100):
    return Prefix(list(keys), (1,) * len(keys), 1, tokens, output, session=Session(key, at))


def send(sessions, asked, known_tokens=0):
    sent = SentPrompt(asked, 0, known_tokens, 0)
    sessions.sent(sent)
    return sent


def tokens(sessions, asked):
    return sessions.tokens(asked.session, asked.prompt_tokens)


def named(raw, session=b"", *, seed=1, route=ROUTE, caller=ANYONE, endpoint=Endpoint.CHAT):
    call = call_of(raw, endpoint)
    ask = Ask(route, call, Demand(9, False), caller, Need(9, 1), session=session, asked_at=NOW)
    return PrefixHasher(seed).of(ask, SEVERAL)


# --- which session a request belongs to -------------------------------------------------------------


def test_a_short_prompt_that_names_a_session_has_that_alone():
    assert named(SHORT) is None
    found = named(SHORT, b"mine")
    assert (found.keys, found.session.at) == ([], NOW)
    assert found.home != 0


@pytest.mark.parametrize("said", [{"user": "ann"}, {"metadata": {"session_id": "7"}}])
def test_a_short_chat_that_is_read_in_one_go_names_its_session_too(said):
    chat = {"model": "m", "messages": [{"role": "user", "content": PROSE[:600]}]}
    calls = [
        parse_at_once(SPECS[Endpoint.CHAT], json.dumps(each).encode(), b"application/json")
        for each in (chat, chat | said, said | chat | {"seed": 1})
    ]
    assert [each.fields for each in calls] == [None] * 3
    plain, first, again = (begin(each).session for each in calls)
    assert plain is None
    assert first == again is not None


def test_a_session_changes_nothing_of_what_its_prompt_tells():
    plain, with_one = named(body("x")), named(body("x"), b"mine")
    assert plain.session is None
    assert (plain.keys, plain.home) == (with_one.keys, with_one.home)


def test_sessions_of_other_tenants_models_adapters_and_salts_are_others():
    told = [
        named(SHORT, b"mine"),
        named(SHORT, b"yours"),
        named(SHORT, b"mine", caller=Caller("k", "n", "another")),
        named(SHORT, b"mine", route=Route("n", "n", "n")),
        named(SHORT, b"mine", route=dataclasses.replace(ROUTE, adapter="lora")),
        named(SHORT, b"mine", seed=2),
        named(json.dumps({**json.loads(SHORT), "cache_salt": "s"}).encode(), b"mine"),
    ]
    assert len({each.session.key for each in told}) == len(told)
    assert named(SHORT, b"mine").session == told[0].session


def test_the_home_of_a_session_is_the_same_in_every_process():
    assert len({named(SHORT, b"mine", seed=seed).home for seed in range(3)}) == 1


@pytest.mark.parametrize(
    ("endpoint", "prompt", "says"),
    [
        (Endpoint.RESPONSES, {"input": "hi"}, {"prompt_cache_key": "k"}),
        (Endpoint.RESPONSES, {"input": "hi"}, {"metadata": {"chat": "7"}}),
        (
            Endpoint.MESSAGES,
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            {"metadata": {"user_id": "u"}},
        ),
        (Endpoint.COMPLETIONS, {"prompt": "hi"}, {"user": "u"}),
    ],
)
def test_a_body_names_one_too_and_a_header_wins(endpoint, prompt, says):
    def read(more, header=b""):
        raw = json.dumps({"model": "m", **prompt, **more}).encode()
        return named(raw, header, endpoint=endpoint)

    assert read({}) is None
    assert read(dict.fromkeys(says)) is None  # null
    assert read(says).session == read({**says, "temperature": 0}).session
    assert read(says, b"mine").session == read({}, b"mine").session != read(says).session


def test_what_is_read_anew_has_no_session():
    raw = json.dumps({**json.loads(SHORT), "prompt_logprobs": 1}).encode()
    assert named(raw, b"mine") is None


# --- what a backend is thought to hold of one -------------------------------------------------------


def test_at_most_the_last_prompt_with_its_output_and_at_most_this_prompt():
    sessions = Sessions()
    assert tokens(sessions, prefix()) == 0
    send(sessions, prefix(tokens=1000, output=100))
    assert tokens(sessions, prefix(tokens=5000)) == 1100
    assert tokens(sessions, prefix(tokens=300)) == 300
    send(sessions, prefix(tokens=300, output=10))
    assert tokens(sessions, prefix(tokens=5000)) == 310
    assert tokens(sessions, prefix(2)) == 0


def test_it_lasts_ten_minutes_since_its_last_request():
    sessions = Sessions()
    send(sessions, prefix(at=0.0))
    send(sessions, prefix(at=LIFETIME_S))
    assert tokens(sessions, prefix(at=2 * LIFETIME_S)) == 1000
    assert tokens(sessions, prefix(at=2 * LIFETIME_S + 1)) == 0


def test_what_was_never_read_is_taken_back():
    sessions = Sessions()
    sessions.unsent(send(sessions, prefix()))
    assert len(sessions) == 0
    send(sessions, prefix(tokens=400, output=0))
    sessions.unsent(send(sessions, prefix(tokens=9000)))
    assert tokens(sessions, prefix(tokens=9000)) == 400


def test_a_short_prompt_that_is_taken_back_leaves_a_long_one_known():
    sessions = Sessions()
    send(sessions, prefix(tokens=8000, output=0))
    sessions.unsent(send(sessions, prefix(tokens=100)))
    assert tokens(sessions, prefix(tokens=9000)) == 8000


def test_one_that_is_taken_back_takes_none_that_came_later_with_it():
    sessions = Sessions()
    first = send(sessions, prefix(at=1.0))
    send(sessions, prefix(at=2.0))
    sessions.unsent(first)
    assert tokens(sessions, prefix(at=3.0)) == 1000


def test_replies_correct_it_both_ways():
    sessions = Sessions()
    send(sessions, prefix())
    sessions.ended(send(sessions, prefix()), 250)
    assert tokens(sessions, prefix()) == 250
    sessions.ended(send(sessions, prefix()), 0)
    assert tokens(sessions, prefix()) == 0
    sessions.ended(send(sessions, prefix()), 1000)
    assert tokens(sessions, prefix()) == 1000


def test_where_replies_tell_nothing_the_prompt_itself_corrects_it():
    sessions = Sessions()
    send(sessions, prefix())
    sessions.ended(send(sessions, prefix()), None)  # short: nobody knows
    assert tokens(sessions, prefix()) == 1000
    sessions.ended(send(sessions, prefix(keys=[5]), known_tokens=0), None)
    assert tokens(sessions, prefix()) == 0


def test_the_first_reply_of_a_session_says_nothing_of_it():
    sessions = Sessions()
    sessions.ended(send(sessions, prefix()), 0)
    assert tokens(sessions, prefix()) == 1000


def test_those_that_came_last_are_kept():
    sessions = Sessions()
    for key in range(5 * MOST_SESSIONS):
        send(sessions, prefix(key))
    assert MOST_SESSIONS // 2 <= len(sessions) <= MOST_SESSIONS
    assert tokens(sessions, prefix(5 * MOST_SESSIONS - MOST_SESSIONS // 2)) == 1000


def test_a_long_session_that_goes_on_is_kept_among_many_new_ones():
    sessions = Sessions()
    for key in range(MOST_SESSIONS):
        send(sessions, prefix(key))
    send(sessions, prefix(0))
    send(sessions, prefix(MOST_SESSIONS))  # one too many
    assert len(sessions) < MOST_SESSIONS
    assert tokens(sessions, prefix(0, 100.0)) == 1000


# --- what it changes of a choice --------------------------------------------------------------------

READY = {"sample": None, "taken": 0, "window": None, "fate": "ready", "limit": 1, "endpoints": None}
READY |= {"model": "m"}


def world(count=3):
    table = pool_of([READY] * count)
    for each in table:
        each.prefix_index = ApproximateIndex()
    return table, Chooser(table, random.Random(1))


def asks(found):
    return Ask(
        ROUTE, CALL, Demand(1000, False), ANYONE, Need(found.prompt_tokens, 10), prefix=found
    )


def taken(table, backend_id, found):
    need = Need(found.prompt_tokens, 10, streams=True)
    return table.take(backend_id, NOW, need, "t", found)


@pytest.mark.parametrize("name", ["m/b1", "m/b2", "m/b3"])
def test_a_session_goes_where_it_was(name):
    table, chooser = world()
    taken(table, name, prefix(at=NOW)).release()
    homes = {chooser.find(asks(prefix(at=NOW)), NOW).id for _ in range(9)}
    assert len(homes) == 1  # what was never read tells nothing
    slot = taken(table, name, prefix(at=NOW))
    table.first_token(slot, NOW)
    slot.release()
    assert chooser.find(asks(prefix(at=NOW)), NOW).id == name
    assert chooser.find(asks(prefix(at=NOW + LIFETIME_S + 1)), NOW).id in homes


def test_it_passes_no_obstacle():
    table, chooser = world()
    taken(table, "m/b1", prefix(at=NOW))  # its only place
    assert chooser.find(asks(prefix(at=NOW)), NOW).id != "m/b1"


def test_what_the_prompt_tells_wins_where_that_is_more():
    table, chooser = world()
    long = prefix(1, NOW, keys=[7], tokens=1000)
    for backend, each in (("m/b1", prefix(1, NOW, tokens=200)), ("m/b2", prefix(2, NOW, keys=[7]))):
        slot = taken(table, backend, each)
        table.first_token(slot, NOW)
        slot.release()
    assert chooser.find(asks(long), NOW).id == "m/b2"


def test_another_process_has_nothing_of_it():
    table, _ = world()
    backend = table.get("m/b1")
    taken(table, "m/b1", prefix(at=NOW))
    assert len(backend.sessions) == 1
    backend.forget_prefixes()
    assert len(backend.sessions) == 0


def test_where_engines_are_asked_about_token_ids_sessions_tell_nothing():
    table, chooser = world()
    asked = prefix(at=NOW)
    home = chooser.find(asks(asked), NOW).id
    other = next(each.id for each in table if each.id != home)
    slot = taken(table, other, asked)
    table.first_token(slot, NOW)
    slot.release()
    assert chooser.find(asks(asked), NOW).id == other
    asked.blocks = PromptBlocks([1, 2], None, None, [BlockShape(16)])
    plain, told = (chooser.explain(asks(each), NOW).expected_s for each in (prefix(2, NOW), asked))
    assert plain == told


def test_a_reply_corrects_it_once_it_is_settled():
    table, _ = world()
    for cached_tokens in (0, 250):
        slot = taken(table, "m/b1", prefix(at=NOW))
        table.first_token(slot, NOW)
        slot.release()
        usage = Usage(1000, 10, UsageSource.UPSTREAM, cached_tokens)
        record = RequestRecord("r", Endpoint.CHAT, NOW, backend_id="m/b1", sent_at=NOW)
        record.sent, record.usage = slot.sent, usage
        table.ended([record])
    assert tokens(table.get("m/b1").sessions, prefix(at=NOW)) == 250
