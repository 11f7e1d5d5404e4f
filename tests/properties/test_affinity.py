"""Who waits for where its prompt is cached waits only so long, and keeps nobody out."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prefix import Prefix
from gateway.core.types import Need
from gateway.routing.choice import obstacle
from tests.gatehouse import Holds, House, held, passes, turns

KEYS = "abc"
URLS = [f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)]
MOST_TOKENS = 8000

comes = st.fixed_dictionaries(
    {
        "key": st.sampled_from(KEYS),
        "tokens": st.sampled_from([10, 500, 3000, MOST_TOKENS]),
        "tenant": st.sampled_from("xyz"),
    }
)
acts = st.lists(
    st.one_of(
        st.tuples(st.just("come"), comes),
        st.tuples(st.just("come"), comes),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.25, 1.0])),
    ),
    max_size=40,
)
caches = st.lists(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([400, 2500, MOST_TOKENS])),
    min_size=3,
    max_size=3,
)


@given(acts=acts, caches=caches, limit=st.integers(1, 3))
def test_nobody_waits_for_a_cache_for_long_while_another_is_free(acts, caches, limit):
    @held
    async def happen():
        house = House(m={"backends": [{"url": url, "max_in_flight": limit} for url in URLS]})
        for backend, tokens in zip(house.table, caches, strict=True):
            backend.prefix_index = Holds(**tokens)
        guests = []
        for act, what in acts:
            inside = [each for each in guests if each.inside]
            if act == "come":
                need = Need(what["tokens"], 0)
                prefix = Prefix([what["key"]], (4,), 4, what["tokens"], 0)
                guests.append(house.guest(what["tenant"], need=need, prefix=prefix, wait_s=1e6))
            elif act == "pass":
                await passes(what)
            elif inside:
                inside[what % len(inside)].end()
            await turns()
        cost = house.table.get("m/b1").token_cost
        streams = 2 + limit  # of others, unknown, and its own
        await passes(MOST_TOKENS * cost.prompt_s * streams + 0.5)
        for guest in guests:
            if guest.waits:
                now = house.loop.time()
                assert all(obstacle(each, guest.ask, now) for each in house.table)
        for _ in range(len(guests)):
            for guest in guests:
                if guest.inside:
                    guest.end()
            await passes(0.5)
        assert not any(each.waits for each in guests)

    happen()
