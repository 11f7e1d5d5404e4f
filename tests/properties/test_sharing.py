"""What gateways know of a backend's cache, over any order in which prompts are sent, told, taken back, and lost."""

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prefix import Prefix
from gateway.core.types import Ask, Caller, Demand, Endpoint, Need, Route
from gateway.prefix.approximate import MOST_KEYS, ApproximateIndex
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.news import MOST_NEWS, News
from gateway.wire.calls import ENDPOINTS, parse_call

SPEC = next(spec for spec in ENDPOINTS.values() if spec.endpoint is Endpoint.CHAT)
WALKS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
GATEWAYS = st.integers(0, 2)


def prompt(walk, tokens=1000):
    keys = [hash((0, *walk[:end])) for end in range(len(walk), 0, -1)]
    return Prefix(keys, tuple(range(len(walk), 0, -1)), len(walk), tokens, 10)


class Fleet:
    """Three gateways' indexes of one backend, and what each has not heard yet."""

    def __init__(self, capacity=None):
        self.indexes = [ApproximateIndex() for _ in range(3)]
        self.unheard = [[], [], []]
        for each in self.indexes:
            each.scraped(capacity, None)
            each.news = News()

    def tell(self, who):
        index = self.indexes[who]
        news, index.news = index.news, News()
        for other, unheard in enumerate(self.unheard):
            if other != who:
                unheard.append(news)

    def hear(self, who):
        for news in self.unheard[who]:
            self.indexes[who].heard(news)
        self.unheard[who].clear()

    def all_told(self):
        for who in range(3):
            self.tell(who)
        for who in range(3):
            self.hear(who)


STEPS = st.lists(
    st.tuples(st.sampled_from(["sent", "sent", "sent", "tell", "hear"]), GATEWAYS, WALKS),
    max_size=80,
)


@given(steps=STEPS, walks=st.lists(WALKS, max_size=6))
def test_all_agree_once_all_is_told_however_it_came_about(steps, walks):
    fleet, alone = Fleet(), ApproximateIndex()
    for step, who, walk in steps:
        if step == "sent":
            fleet.indexes[who].sent(prompt(walk))
            alone.sent(prompt(walk))
        else:
            getattr(fleet, step)(who)
    fleet.all_told()
    known = [each.young | each.old for each in fleet.indexes]
    assert known == [alone.young | alone.old] * 3
    for walk in walks:
        assert {each.tokens(prompt(walk)) for each in fleet.indexes} == {alone.tokens(prompt(walk))}


@given(steps=STEPS, last=GATEWAYS, walk=WALKS)
def test_what_was_lost_is_known_to_nobody_once_that_is_told(steps, last, walk):
    fleet = Fleet()
    for step, who, each in steps:
        fleet.indexes[who].sent(prompt(each)) if step == "sent" else getattr(fleet, step)(who)
    fleet.all_told()
    fleet.indexes[last].forget()
    fleet.indexes[last].sent(prompt(walk))
    fleet.all_told()
    assert [each.young | each.old for each in fleet.indexes] == [{*prompt(walk).keys}] * 3


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["sent", "unsent", "forget", "retell", "tell", "hear"]), GATEWAYS, WALKS),
        max_size=80,
    ),
    capacity=st.sampled_from([None, 500, 5000]),
    asked=WALKS,
)  # fmt: skip
def test_whatever_is_told_an_index_answers_within_bounds(steps, capacity, asked):
    fleet = Fleet(capacity)
    for step, who, walk in steps:
        index = fleet.indexes[who]
        if step == "sent":
            index.sent(prompt(walk))
        elif step == "unsent":
            index.unsent(index.sent(prompt(walk)))
        elif step in ("forget", "retell"):
            getattr(index, step)()
        else:
            getattr(fleet, step)(who)
    for each in fleet.indexes:
        assert 0 <= each.tokens(prompt(asked)) <= 1000


@given(sizes=st.lists(st.integers(1, 2 * MOST_NEWS), min_size=8, max_size=32))
def test_memory_is_bounded_whatever_is_sent_and_told(sizes):
    fleet, count = Fleet(1 << 40), 0
    for size in sizes:
        for index in fleet.indexes:
            keys = range(count, count := count + size)  # none is like another
            index.sent(Prefix(keys, (1,) * size, size, size, 0))
            assert len(index.news.keys) <= MOST_NEWS
        fleet.all_told()
        for index in fleet.indexes:
            assert len(index) <= 2 * (MOST_KEYS + 2 * MOST_NEWS)


class Asked:
    prefix_index = object()


@given(
    text=st.text(min_size=300, max_size=900),
    tenants=st.tuples(st.sampled_from("ab"), st.sampled_from("ab")),
    salts=st.tuples(st.sampled_from([None, "x", "y"]), st.sampled_from([None, "x", "y"])),
    adapters=st.tuples(st.sampled_from([None, "l"]), st.sampled_from([None, "l"])),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_gateways_hash_a_prompt_alike_and_never_that_of_another_tenant_or_salt(
    text, tenants, salts, adapters, seed
):
    found = []
    for tenant, salt, adapter in zip(tenants, salts, adapters, strict=True):
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "cache_salt": salt}
        call = parse_call(SPEC, json.dumps(body).encode(), b"application/json")
        route = Route("m", "m", "m", adapter=adapter, tenants_apart=True)
        ask = Ask(route, call, Demand(9, exact=False), Caller("k", "n", tenant), Need(9, 9))
        found.append(PrefixHasher(seed).of(ask, [Asked()]).keys)
    alike = len(set(tenants)) == len(set(salts)) == len(set(adapters)) == 1
    assert (found[0] == found[1]) == alike
    assert alike or not {*found[0]} & {*found[1]}
