"""What is thought to be cached, over any prompts that are sent, read, cut short, forgotten."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.prefix import Prefix, SentPrompt, Session
from gateway.core.types import Ask, Caller, Demand, Endpoint, Need, Route
from gateway.prefix.approximate import MOST_KEYS, ApproximateIndex, tokens_of_each
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.sessions import LIFETIME_S, MOST_SESSIONS, Sessions
from gateway.routing.choice import Chooser
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.properties.test_pick import CALL, NOW, ROUTE, STATES, pool_of

SPEC = next(spec for spec in ENDPOINTS.values() if spec.endpoint is Endpoint.CHAT)


class Asked:
    prefix_index = object()


# Prompts that begin alike: a walk down a small tree.
WALKS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
STEPS = st.lists(
    st.tuples(st.sampled_from(["sent", "sent", "sent", "unsent", "ended", "forget"]), WALKS),
    max_size=60,
)


def prompt(walk, tokens=1000):
    keys = [hash(tuple(walk[:end])) for end in range(len(walk), 0, -1)]
    return Prefix(keys, tuple(range(len(walk), 0, -1)), len(walk), tokens, 10)


@given(steps=STEPS, capacity=st.sampled_from([None, 500, 5000, 10**6]), asked=WALKS)
def test_it_never_holds_more_than_was_sent_since_it_was_empty(steps, capacity, asked):
    held, sent = ApproximateIndex(), []
    held.scraped(capacity, None)
    for step, walk in steps:
        if step == "forget":
            held.forget()
            sent.clear()
            assert len(held) == 0
            continue
        note = held.sent(prompt(walk))
        if step == "unsent":
            held.unsent(note)
            assert held.tokens(prompt(walk)) <= note.known_tokens
            continue
        sent.append(walk)
        if step == "ended":
            held.ended(note, None)
    longest = max((_alike(asked, each) for each in sent), default=0)
    assert 0 <= held.tokens(prompt(asked)) <= 1000 * longest // len(asked)


@given(
    sent=st.lists(st.tuples(st.integers(0, 3), WALKS), max_size=60),
    capacity=st.sampled_from([500, 5000, None]),
    asked=st.lists(WALKS, min_size=1, max_size=4),
)
def test_all_are_asked_at_once_for_the_longest_beginning_that_each_holds(sent, capacity, asked):
    indexes = [ApproximateIndex() for _ in range(4)]
    for index in indexes:
        index.scraped(capacity, None)
    for place, walk in sent:
        indexes[place].sent(prompt(walk))
    for walk in asked:
        wanted = prompt(walk)
        found = tokens_of_each([*indexes, None], wanted)
        for index, tokens in zip(indexes, found, strict=False):
            held = index.young | index.old
            longest = [place for place, key in enumerate(wanted.keys) if key in held]
            assert tokens == (wanted.tokens_before(longest[0]) if longest else 0)
        assert found[-1] == 0


@given(steps=STEPS, asked=WALKS)
def test_a_prompt_that_was_taken_back_leaves_no_beginning_that_cannot_be_asked_for(steps, asked):
    indexes = [ApproximateIndex(), ApproximateIndex()]
    for turn, (step, walk) in enumerate(steps):
        index = indexes[turn % 2]
        index.scraped(3000, None)
        note = index.sent(prompt(walk))
        if step == "unsent":
            index.unsent(note)
    for tokens in tokens_of_each(indexes, prompt(asked)):
        assert 0 <= tokens <= 1000


def _alike(one, other):
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 2 * MOST_KEYS), min_size=8, max_size=16))
def test_its_memory_is_bounded_whatever_is_sent(sizes):
    held, count = ApproximateIndex(), 0
    held.scraped(1 << 40, None)
    for size in sizes:
        keys = range(count, count := count + size)  # none is like another
        held.sent(Prefix(keys, (1,) * size, size, size, 0))
        assert len(held) <= 2 * MOST_KEYS + max(sizes)


@given(
    expected=st.lists(
        st.tuples(st.integers(0, 9000), st.none() | st.integers(0, 9000)), max_size=50
    ),
    hits=st.lists(st.none() | st.floats(0, 1e6), max_size=10),
)
def test_trust_is_a_share_whatever_is_told(expected, hits):
    held = ApproximateIndex()
    for each in hits:
        held.scraped(None, each)
    for tokens, found in expected:
        held.ended(held.sent(prompt([1, 2], tokens)), found)
        assert 0.0 <= held.trust <= 1.0


@given(
    text=st.text(min_size=300, max_size=600),
    tenants=st.tuples(st.sampled_from("ab"), st.sampled_from("ab")),
    salts=st.tuples(st.sampled_from([None, "x", "yz"]), st.sampled_from([None, "x", "yz"])),
    apart=st.booleans(),
)
def test_caches_that_are_apart_by_tenant_or_salt_never_share_a_key(text, tenants, salts, apart):
    route, reads, keys = Route("m", "m", "m", tenants_apart=apart), PrefixHasher(), []
    for tenant, salt in zip(tenants, salts, strict=True):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "cache_salt": salt,
        }
        call = parse_call(SPEC, json.dumps(body).encode())
        ask = Ask(route, call, Demand(100, False), Caller("k", "n", tenant), Need(100, 10))
        keys.append(set(reads.of(ask, [Asked()]).keys))
    is_one = salts[0] == salts[1] and (tenants[0] == tenants[1] or not apart)
    assert keys[0] == keys[1] if is_one else not keys[0] & keys[1]


@given(
    states=st.lists(STATES, min_size=1, max_size=6),
    sent=st.lists(st.tuples(st.integers(1, 6), WALKS), max_size=20),
    walk=WALKS,
    seed=st.integers(0, 2**32),
)
def test_a_cached_prompt_makes_no_backend_eligible_that_is_not(states, sent, walk, seed):
    table = pool_of(states)
    for backend in table:
        backend.prefix_index = ApproximateIndex()
    for place, each in sent:
        backend = table.get(f"m/b{place}")
        if backend is not None:
            backend.prefix_index.sent(prompt(each))
    need, chooser = Need(1000, 10), Chooser(table, random.Random(seed))
    without = Ask(ROUTE, CALL, Demand(100, False), Caller("k", "n", "t"), need)
    asked = Ask(ROUTE, CALL, Demand(100, False), Caller("k", "n", "t"), need, prefix=prompt(walk))
    told, choice = chooser.explain(asked, NOW), chooser.find(asked, NOW)
    assert told.excluded == chooser.explain(without, NOW).excluded
    if asked.awaits is None:
        assert (choice is None) == (not told.expected_s)
    else:  # it waits for one that suits it, and is only busy
        assert choice is None
        assert told.excluded[asked.awaits].passes
    assert all(seconds > 0 for seconds in told.expected_s.values())
    if choice is not None:  # new prompts that begin alike meet at one of about equal backends
        assert told.expected_s[choice.id] == told.expected_s[told.backend_id]
        streams = max(each.weighed().streams for each in table)
        reading_s = need.prompt_tokens * choice.token_cost.prompt_s * 2 * streams
        least_s = min(told.expected_s.values())
        assert least_s <= told.expected_s[choice.id] <= least_s + 0.02 * reading_s


@given(
    session=st.binary(min_size=1, max_size=40),
    texts=st.tuples(st.text(max_size=600), st.text(max_size=600)),
    tenants=st.tuples(st.sampled_from("ab"), st.sampled_from("cd")),
    apart=st.booleans(),
)
def test_no_tenant_has_the_session_of_another_however_it_is_called(session, texts, tenants, apart):
    route, reads, keys = Route("m", "m", "m", tenants_apart=apart), PrefixHasher(), set()
    for tenant, text in zip(tenants, texts, strict=True):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        call = parse_call(SPEC, json.dumps(body).encode())
        caller, need = Caller("k", "n", tenant), Need(100, 10)
        ask = Ask(route, call, Demand(100, False), caller, need, session=session)
        keys.add(reads.of(ask, [Asked()]).session.key)
    assert len(keys) == 2


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["sent", "sent", "unsent", "ended", "forget"]),
            st.integers(0, 3),
            st.integers(0, 5000),
            st.floats(0, LIFETIME_S),
            st.none() | st.integers(0, 9000),
        ),
        max_size=60,
    ),
    prompt_tokens=st.integers(0, 9000),
)
def test_a_session_tells_no_more_than_its_last_prompt_that_was_sent(steps, prompt_tokens):
    sessions, most, at = Sessions(), {}, 0.0
    for step, key, size, later_s, found in steps:
        at += later_s
        if step == "forget":
            sessions.forget()
            most.clear()
            continue
        sent = SentPrompt(Prefix([], (), 1, size, 10, session=Session(key, at)), 0, 0, 0)
        sessions.sent(sent)
        if step == "unsent":
            sessions.unsent(sent)
            continue
        most[key] = size + 10
        if step == "ended":
            sessions.ended(sent, found)
    for key in range(4):
        told = sessions.tokens(Session(key, at), prompt_tokens)
        assert 0 <= told <= min(prompt_tokens, most.get(key, 0))
        assert sessions.tokens(Session(key, at + LIFETIME_S + 1), prompt_tokens) == 0


@given(keys=st.lists(st.integers(), max_size=200), times=st.integers(1, 60))
def test_the_sessions_that_are_kept_are_bounded(keys, times):
    sessions = Sessions()
    for each in range(times):
        for key in keys:
            prefix = Prefix([], (), 1, 9, 9, session=Session(key + each * 1000, 0.0))
            sessions.sent(SentPrompt(prefix, 0, 0, 0))
    assert len(sessions) <= MOST_SESSIONS


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=300)), max_size=12
)


@given(
    alike=MESSAGES,
    rests=st.tuples(MESSAGES, MESSAGES),
    repeat=st.integers(1, 30),
    compact=st.booleans(),
)
def test_chats_share_the_messages_that_are_alike_and_no_key_beyond(alike, rests, repeat, compact):
    separators, hasher, bodies = (",", ":") if compact else (", ", ": "), PrefixHasher(1), []
    for rest in rests:
        said = [*alike * repeat, ("user", "And?"), *rest]
        messages = [{"role": role, "content": text} for role, text in said]
        bodies.append(json.dumps({"model": "m", "messages": messages}, separators=separators))
    texts = [each[each.index("[") : each.rindex("]") + 1] for each in bodies]
    both = _alike(*texts)
    found = []
    for body in bodies:
        call = parse_call(SPEC, body.encode())
        ask = Ask(ROUTE, call, Demand(100, False), Caller("k", "n", "t"), Need(100, 10))
        prefix = hasher.of(ask, [Asked()])
        found.append({} if prefix is None else dict(zip(prefix.keys, prefix.ends, strict=True)))
    shared = max((end for key, end in found[0].items() if key in found[1]), default=0)
    assert shared <= both
    if both > 1000:  # the last message that both have ends within 400 bytes, and a 32nd is left out
        assert shared >= both * 31 / 32 - 400 * 6 - 64


@given(
    looks=st.lists(
        st.tuples(st.lists(st.tuples(WALKS, st.integers(0, 2000)), max_size=8), st.integers(0, 3)),
        max_size=8,
    )
)
def test_no_more_is_surely_read_than_could_be(looks):
    """Whatever an engine finds beside what was sent, no more is taken for read than it was never sent."""
    held, known = ApproximateIndex(), []
    held.scraped(None, 0.0)
    hits = 0.0
    for prompts, more in looks:
        for walk, tokens in prompts:
            sent = held.sent(prompt(walk, tokens))
            longest = max((_alike(walk, each) for each in known), default=0)
            assert 0 <= sent.surely_read_tokens <= tokens - tokens * longest // len(walk)
            assert sent.known_tokens + sent.surely_read_tokens <= tokens
            known.append(walk)
            held.read(sent)
            hits += sent.known_tokens
        hits += more * 1000
        held.scraped(None, hits)
        if more > 2:  # more than a thousand tokens beyond any doubt
            expected = sum(tokens for _, tokens in prompts)
            if more * 1000 > expected / 4 + 512:
                assert held.sent(prompt([9])).surely_read_tokens == 0
