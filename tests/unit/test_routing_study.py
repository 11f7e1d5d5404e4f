"""The routing study: traces share what they say they share, models choose as published, figures add up."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from gateway.sim.sequence import Sequence as EngineSequence
from gateway.sim.server import SimServer
from loadtest.outcomes import End, Outcome
from loadtest.routing import Job, figures, quantile, run_job
from loadtest.routing_models import (
    CacheAware,
    ConsistentHash,
    LeastLoad,
    Oracle,
    Rendezvous,
    Tree,
)
from loadtest.routing_sockets import Client, reset
from loadtest.routing_table import bars, best_rival, no_worse, report
from loadtest.routing_traces import NAMES, Asked, Part, Trace, text_of, trace
from loadtest.routing_virtual import ARMS, ENGINE, CachingEngines, run

SYSTEM = Part(1_000, 160)


def asked(number: int, at_s: float = 0.0, *, head: Part = SYSTEM, own: int = 20, session=None) -> Asked:  # fmt: skip
    messages = (("system", (head,)), ("user", (Part(number, own),)))
    tokens = head.tokens + own + 8
    return Asked(at_s, "t0", "x", tokens, 4, number, messages, Part(number + 500_000, 4), session)


def singles(*requests: Asked, seconds: float = 10.0) -> Trace:
    return Trace("test", tuple((each,) for each in requests), seconds)


# --- traces ---


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_repeatable_and_says_its_lengths(name):
    first, again = (trace(name, 2, 5.0, seed=3) for _ in range(2))
    assert first == again
    assert first != trace(name, 2, 5.0, seed=4)
    for session in first.sessions:
        assert 0 <= session[0].at_s < 5.0
        for each in session:
            assert len(each.ids()) == each.prompt_tokens
            assert each.prompt_tokens + each.output_tokens < ENGINE.max_model_len
            texts = each.texts()
            # 3 tokens around each message and 2 to open the reply, 4 bytes for each other token
            assert 4 * (each.prompt_tokens - 3 * len(texts) - 2) == sum(len(t) for _, t in texts)


def test_each_request_of_a_session_repeats_all_before_it():
    for session in trace("agents", 2, 20.0, seed=1).sessions:
        for before, after in zip(session, session[1:], strict=False):
            said = (*before.ids(), *before.reply.ids())
            assert after.ids()[: len(said)] == said
            assert after.session == before.session


def test_equal_parts_have_equal_texts_and_no_others():
    texts = [text_of(Part(number, 50)) for number in range(1, 50)]
    assert len(set(texts)) == 49
    assert text_of(Part(1, 50)) == texts[0]
    assert len(texts[0]) == 200


def test_six_of_ten_requests_of_the_hot_spot_begin_alike():
    found = [session[0].messages[0][1][0].number for session in trace("hot spot", 8, 20, 1).sessions]  # fmt: skip
    most = max(set(found), key=found.count)
    assert found.count(most) / len(found) == pytest.approx(0.6, abs=0.03)


# --- models ---


def test_the_tree_finds_the_longest_text_and_who_was_sent_it_first():
    tree = Tree(3)
    tree.insert("abcdef", 0)
    tree.insert("abcxyz", 1)
    tree.insert("abcdef", 2)
    assert tree.match("abcdefgh") == (6, 0)
    assert tree.match("abcxy") == (5, 1)
    assert tree.match("abq") == (2, 0)
    assert tree.match("zzz") == (0, None)


def test_the_tree_says_when_the_model_ends():
    with pytest.raises(OverflowError):
        Tree(1).insert("x" * ((1 << 25) + 1), 0)


def test_cache_aware_follows_the_cache_until_one_has_64_requests_more_and_half_as_many_again():
    model = CacheAware(random.Random(1), 2)
    assert model.place(asked(1), [0, 0]) == 0
    assert model.place(asked(2), [64, 0]) == 0  # 64 more are not more than 64
    assert model.place(asked(3), [65, 0]) == 1
    assert model.place(asked(4), [200, 140]) == 0  # less than half as many again
    fresh = asked(5, head=Part(2_000, 160))
    assert model.place(fresh, [2, 1]) == 1  # nothing matches: the least loaded


def test_hashes_keep_a_session_where_it_was():
    rng = random.Random(1)
    for model in (Rendezvous(rng), ConsistentHash(rng, 8)):
        places = {
            s: {model.place(asked(n, session=f"s{s}"), [n] * 8) for n in range(1, 5)}
            for s in range(200)
        }
        assert all(len(found) == 1 for found in places.values())
        spread = [sum({place} == found for found in places.values()) for place in range(8)]
        assert min(spread) > 5


def test_least_load_takes_the_least():
    assert LeastLoad(random.Random(1)).place(asked(1), [3, 1, 2]) == 1


@pytest.mark.parametrize("by_hits", [True, False])
def test_an_oracle_sees_what_is_cached_and_what_waits(by_hits):
    engines = CachingEngines.__new__(CachingEngines)
    engines.config = ENGINE
    from gateway.sim.engine import Engine

    found = [Engine(ENGINE.engine) for _ in range(3)]
    found[1].add(engines.sequence(0, asked(1)), 0.0)
    oracle = Oracle(random.Random(1), found, ENGINE, by_hits=by_hits)
    assert oracle.place(asked(2), [0, 1, 0]) == 1  # it waits there
    while (due := found[1].next_event_time()) is not None:
        found[1].step(max(due, 0.0))
    assert oracle.place(asked(3), [0, 1, 0]) == 1  # it is cached there


# --- whole runs ---


def test_the_hit_rate_of_a_known_trace():
    """One backend, one after the other: of 188 tokens the 160 of the head, and 2 before it, are shared."""
    requests = [asked(number, at_s=number / 2) for number in range(1, 11)]
    outcomes, _ = run(singles(*requests), "least load", 1, seed=1)
    whole_blocks = 162 // ENGINE.block_size * ENGINE.block_size
    assert [each.cached_tokens for each in outcomes] == [0] + [whole_blocks] * 9
    found = figures(outcomes, (0.0, 10.0), 1)
    assert found["hit_ratio"] == pytest.approx(9 * whole_blocks / (10 * 188))
    assert found["ends"] == {"complete": 10}
    assert found["tokens_per_s"] == pytest.approx(10 * (188 + 4) / 10)
    assert found["spread"] == 1.0


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_serves_a_whole_trace(arm):
    outcomes, _ = run(trace("agents", 2, 6.0, seed=1), arm, 2, seed=1)
    assert outcomes
    assert {each.end for each in outcomes} == {End.COMPLETE}
    assert {each.place for each in outcomes} <= {0, 1}


@pytest.mark.parametrize("name", ["rag", "random"])
def test_the_gateway_refuses_nobody_of_a_load_that_its_backends_carry(name):
    """Long prompts come by chance in crowds, and while those are read nothing ends: that is no overload."""
    outcomes, _ = run(trace(name, 2, 60.0, seed=3), "gateway", 2, seed=3)
    assert len(outcomes) > 300
    assert {each.end for each in outcomes} == {End.COMPLETE}


def test_the_same_seed_gives_the_same_figures():
    job = Job("chats", 2, 1, "by load", 0.2)
    first, again = (run_job(job) for _ in range(2))
    assert first | {"took_s": 0} == again | {"took_s": 0}


def test_an_oracle_does_not_lose():
    """Ten heads, one backend's worth of requests at a time: who sees the caches has the most hits."""
    rng = random.Random(1)
    heads = [Part(9_000 + each, 1_000) for each in range(10)]
    requests = [asked(n, at_s=n / 4, head=rng.choice(heads)) for n in range(1, 60)]
    hits = {}
    for arm in ARMS:
        outcomes, _ = run(singles(*requests, seconds=20.0), arm, 4, seed=1)
        hits[arm] = figures(outcomes, (0.0, 20.0), 4)["hit_ratio"]
    assert (
        hits["oracle, hits"]
        == max(hits.values())
        == pytest.approx(49 * 992 / (59 * 1028), rel=0.01)
    )
    assert hits["random"] < 0.8 * hits["oracle, hits"]


def test_a_backend_that_forgets_reads_again():
    requests = [asked(number, at_s=float(number)) for number in range(1, 9)]
    planned = replace(singles(*requests), forgets_s=4.5)
    outcomes, _ = run(planned, "least load", 1, seed=1)
    missed = [each.shot.seed for each in outcomes if each.cached_tokens == 0]
    assert missed == [1, 5]


# --- figures and tables ---


def test_a_first_token_that_never_came_is_later_than_all_others():
    outcomes = [Outcome(asked(n), 1.0, first_s=1.5, end=End.COMPLETE, ended_s=2.0) for n in range(98)]  # fmt: skip
    lost = [Outcome(asked(n), 1.0, end=End.REFUSED) for n in (98, 99)]
    found = figures([*outcomes, *lost], (0.0, 10.0), 2)
    assert found["ttft_p50_s"] == 0.5
    assert found["ttft_p99_s"] == math.inf
    assert found["ends"] == {"complete": 98, "refused": 2}
    assert quantile([], 0.5) == math.inf


def test_what_is_due_before_the_window_does_not_count():
    early = Outcome(asked(1), 1.0, first_s=1.1, cached_tokens=0, end=End.COMPLETE, ended_s=1.2)
    late = Outcome(asked(2), 5.0, first_s=5.1, cached_tokens=94, end=End.COMPLETE, ended_s=5.2)
    found = figures([early, late], (4.0, 10.0), 2)
    assert (found["requests"], found["hit_ratio"]) == (1, 0.5)


def cell(arm, hit, p99, name="chats", **more):
    base = {"trace": name, "backends": 2, "seed": 1, "arm": arm, "requests": 10, "ends": {"complete": 10}}  # fmt: skip
    waits = {"ttft_p50_s": p99 / 2, "ttft_p99_s": p99}
    return base | waits | {"hit_ratio": hit, "tokens_per_s": 1000.0, "spread": 1.0} | more


def test_bars_compare_with_the_best_hits_and_the_best_rival():
    cells = [
        cell("gateway", 0.80, 0.30),
        cell("by load", 0.1, 0.1),
        cell("oracle, hits", 0.85, 0.01),
        cell("random", 0.3, 0.5),
        cell("cache_aware (model)", 0.7, 0.2),
    ]
    rival = best_rival(cells)
    assert rival["arm"] == "cache_aware (model)"  # no oracle, and none of our own
    assert not no_worse(cells[0], rival)
    assert no_worse(cell("gateway", 0, 0.2), rival)
    text = bars(cells)
    assert "94.1% (missed)" in text
    assert "0.300 s (missed) | 0.200 s cache_aware (model)" in text
    random_too = [replace_trace(each, "random") for each in cells]
    assert "94.1% |" in bars(random_too)  # no hits are asked of what shares nothing


def replace_trace(one, name):
    return one | {"trace": name}


def test_the_report_takes_the_median_of_seeds_and_names_what_was_lost():
    seeds = [cell("gateway", hit, 0.1, seed=seed) for seed, hit in enumerate((0.1, 0.5, 0.6))]
    lost = cell("random", 0.2, math.inf, ends={"complete": 7, "refused": 3})
    text = report([*seeds, lost])
    assert "| chats | gateway | 50.0% | 100% |" in text
    assert "| never | 1.00 | 3 |" in text


# --- over sockets ---


def test_a_session_over_sockets_says_again_what_was_replied():
    async def main():
        config = replace(ENGINE, speed=1.0, dev_mode=True)
        async with asyncio.timeout(10), SimServer(config) as sim:
            address = ("127.0.0.1", sim.port)
            client = Client([address], "key", speed=1.0)
            session = trace("agents", 1, 20.0, seed=1).sessions[0][:2]
            await client.session([replace(session[0], at_s=0.0), replace(session[1], after_s=0.0)])
            totals = sim.engine.totals
            await asyncio.to_thread(reset, address)
            again = EngineSequence("", session[0].ids(), ())
            again.hash_to(100, ENGINE.block_size)
            return client.outcomes, totals, sim.engine.blocks.find(again.hashes)

    (first, second), totals, left = asyncio.run(main())
    assert [first.end, second.end] == [End.COMPLETE, End.COMPLETE]
    assert first.first_s < first.ended_s <= second.sent_s
    said = first.shot.prompt_tokens + first.shot.output_tokens
    assert totals.prefix_queries == first.shot.prompt_tokens + second.shot.prompt_tokens
    assert totals.prefix_hits == pytest.approx(said, abs=2 * ENGINE.block_size)
    assert left == []


def test_a_refusal_over_sockets_ends_the_session():
    async def main():
        async with asyncio.timeout(10), SimServer(ENGINE, ["admission_503"]) as sim:
            client = Client([("127.0.0.1", sim.port)], "key", speed=1.0)
            await client.session([asked(1), asked(2)])
            return client.outcomes

    (outcome,) = asyncio.run(main())
    assert (outcome.end, outcome.status, outcome.first_s) == (End.REFUSED, 503, None)
