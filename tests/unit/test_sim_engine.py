"""The simulated engine keeps the rules of a real one, whatever happens to it."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sim.blocks import BlockPool
from gateway.sim.config import EngineConfig, SimConfig
from gateway.sim.engine import Engine
from gateway.sim.sequence import Sequence

CONFIG = EngineConfig(
    max_num_seqs=4,
    num_blocks=64,
    block_size=4,
    max_batched_tokens=32,
    max_loras=1,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.010,
    decode_step_per_seq_s=0.0,
)


def sequence(name: str, prompt: int | tuple[int, ...] = 5, output: int = 3, **more) -> Sequence:
    ids = (
        prompt
        if isinstance(prompt, tuple)
        else tuple(zlib.crc32(f"{name}/{i}".encode()) for i in range(prompt))
    )
    return Sequence(id=name, prompt=ids, output=tuple(range(900, 900 + output)), **more)


def run(engine: Engine, now: float = 0.0, until: float = 1e6):
    """Drive the engine by its own clock; return (time, token) pairs."""
    happened = []
    for _ in range(100_000):
        due = engine.next_event_time()
        if due is None or due > until:
            return happened
        now = max(now, due)
        happened += [(now, event) for event in engine.step(now)]
        check_invariants(engine)
    pytest.fail("the engine never comes to rest")


def check_invariants(engine: Engine) -> None:
    config, blocks = engine.config, engine.blocks
    held = [block for s in engine.running_queue for block in s.blocks]
    assert engine.running <= config.max_num_seqs
    assert len(engine.running_adapters) <= config.max_loras
    assert not any(s.blocks for s in engine.waiting_queue)
    assert sum(blocks.refs) == len(held)
    assert blocks.free + len(set(held)) == config.num_blocks
    assert all(len(s.blocks) * config.block_size >= s.computed for s in engine.running_queue)
    for one in engine.running_queue:
        reached = one.computed // config.block_size
        assert len(blocks.find(one.hashes[:reached])) == reached


def tokens_of(happened, name: str) -> list[int]:
    return [e.token for _, e in happened if e.id == name]


def finished_at(happened, name: str) -> float:
    return next(at for at, e in happened if e.id == name and e.finish)


def test_a_request_emits_its_tokens_in_order_and_frees_its_blocks():
    engine = Engine(CONFIG)
    engine.add(sequence("a", output=4, finish="length"), 0.0)
    happened = run(engine)
    assert tokens_of(happened, "a") == [900, 901, 902, 903]
    assert happened[-1][1].finish == "length"
    assert (engine.running, engine.waiting, engine.kv_usage_ratio) == (0, 0, 0.0)
    assert engine.next_event_time() is None
    assert (engine.totals.prompt_tokens, engine.totals.generation_tokens) == (5, 4)
    assert engine.totals.finished["length"] == 1


def test_time_is_prefill_plus_one_step_per_token():
    engine = Engine(CONFIG)
    engine.add(sequence("a", prompt=20, output=3), 0.0)
    happened = run(engine)
    assert [at for at, _ in happened] == pytest.approx([0.030, 0.040, 0.050])


def test_a_long_prompt_is_computed_in_chunks():
    engine = Engine(CONFIG)
    engine.add(sequence("a", prompt=80, output=1), 0.0)
    steps = 0
    while engine.next_event_time() is not None:  # 32 + 32 + 16 tokens
        before = engine.gauges.steps, engine.gauges.kv_usage_ratio, engine.totals.iterations
        engine.step(max(0.0, engine.next_event_time()))
        after = engine.gauges.steps, engine.gauges.kv_usage_ratio, engine.totals.iterations
        steps += after[0] > before[0] and after[1] > 0
        if after[1] > before[1]:  # a part of the prompt: no token came out, and no counter moved
            assert (after[2], engine.totals.prompt_tokens) == (0, 0)
    assert steps == 2  # and the third, which frees all
    assert engine.totals.iterations == 1
    assert engine.totals.iteration_tokens == 81


def test_slots_are_never_exceeded_and_the_queue_is_first_come_first_served():
    engine = Engine(CONFIG)
    names = [f"r{i}" for i in range(10)]
    for name in names:
        engine.add(sequence(name), 0.0)
    engine.step(0.0)
    assert (engine.running, engine.waiting) == (4, 6)
    happened = run(engine)
    order = [e.id for _, e in happened if e.position == 0]
    assert order == names


def test_preemption_happens_when_blocks_run_out_and_nothing_is_lost():
    engine = Engine(replace(CONFIG, num_blocks=10))
    engine.add(sequence("old", prompt=12, output=20), 0.0)
    engine.add(sequence("young", prompt=12, output=20), 0.0)
    happened = run(engine)
    assert engine.totals.preemptions >= 1
    for name in ("old", "young"):
        assert tokens_of(happened, name) == list(range(900, 920))
    assert finished_at(happened, "old") < finished_at(happened, "young")
    assert engine.totals.generation_tokens == 40
    assert engine.totals.prompt_tokens == 24


def _two_long_prompts() -> Engine:
    """The first holds 10 of 16 blocks; the second's chunk of 3 blocks fits beside it, its prompt of 9 not."""
    engine = Engine(replace(CONFIG, num_blocks=16, max_batched_tokens=12))
    engine.add(sequence("first", prompt=40, output=8), 0.0)
    run(engine, until=0.1)
    engine.add(sequence("second", prompt=36, output=4), 0.1)
    return engine


def test_a_prompt_is_not_begun_before_all_of_it_fits():
    engine = _two_long_prompts()
    happened = run(engine, now=0.1)
    assert engine.totals.preemptions == 0
    first_token = next(at for at, e in happened if e.id == "second")
    assert first_token > finished_at(happened, "first")


def test_of_a_prompt_that_is_to_fit_the_cached_part_counts_as_there():
    engine = _two_long_prompts()
    engine.abort("second")
    engine.add(sequence("twin", prompt=engine.running_queue[0].prompt, output=4), 0.1)
    run(engine, now=0.1, until=0.13)
    assert engine.running == 2


def test_what_was_preempted_waits_for_room_for_what_it_wrote_too():
    engine = Engine(replace(CONFIG, num_blocks=10, max_batched_tokens=8))
    engine.blocks.remember = lambda block, content: None  # so it is read anew, in chunks
    engine.add(sequence("old", prompt=12, output=20), 0.0)
    engine.add(sequence("young", prompt=12, output=20), 0.0)
    now = 0.0
    while (due := engine.next_event_time()) is not None:
        now = max(now, due)
        engine.step(now)
    assert engine.totals.preemptions == 1


def test_a_cached_prefix_shortens_the_prefill():
    prompt = tuple(range(24))
    engine = Engine(CONFIG)
    engine.add(sequence("first", prompt, output=1), 0.0)
    cold = finished_at(run(engine), "first")
    engine.add(sequence("again", (*prompt, 777), output=1), 10.0)
    warm = finished_at(run(engine, 10.0), "again") - 10.0
    assert cold == pytest.approx(0.010 + 24 / 1000)
    assert warm == pytest.approx(0.010)
    assert engine.totals.prefix_hits == 24
    assert engine.totals.cached_tokens == 24


def test_the_reply_of_one_turn_is_cached_for_the_next():
    engine = Engine(CONFIG)
    first = sequence("first", 7, output=10)
    engine.add(first, 0.0)
    run(engine)
    engine.add(sequence("next", (*first.prompt, *first.output, 1, 2, 3), output=1), 1.0)
    run(engine, 1.0)
    assert engine.totals.prefix_hits == 16


def test_adapters_do_not_share_the_cache():
    prompt = tuple(range(24))
    engine = Engine(CONFIG)
    engine.add(sequence("base", prompt, output=1), 0.0)
    run(engine)
    engine.add(sequence("tuned", prompt, output=1, adapter="a"), 1.0)
    run(engine, 1.0)
    assert engine.totals.prefix_hits == 0


def test_requests_of_the_same_step_share_a_prefix():
    prompt = tuple(range(12))
    engine = Engine(CONFIG)
    engine.add(sequence("first", (*prompt, 1, 2), output=2), 0.0)
    engine.add(sequence("second", (*prompt, 3, 4), output=2), 0.0)
    happened = run(engine)
    assert engine.totals.prefix_hits == 12
    assert finished_at(happened, "first") == finished_at(happened, "second")
    assert [e.cache.found for _, e in happened if e.position == 0] == [0, 12]
    assert happened[0][0] == pytest.approx(0.010 + (14 + 2) / 1000)


def test_a_step_takes_longer_the_more_context_it_reads():
    engine = Engine(replace(CONFIG, context_token_s=0.001))
    engine.add(sequence("a", prompt=20, output=3), 0.0)
    at = [moment for moment, _ in run(engine)]
    assert at == pytest.approx(
        [0.030 + 0.020, 0.030 + 0.020 + 0.010 + 0.021, 0.081 + 0.010 + 0.022]
    )


def test_a_preempted_request_is_looked_up_once_more_but_counted_once():
    engine = Engine(replace(CONFIG, num_blocks=10))
    for name in ("old", "young"):
        engine.add(sequence(name, prompt=12, output=20), 0.0)
    happened = run(engine)
    assert engine.totals.preemptions
    assert engine.totals.prefix_queries == engine.totals.prompt_tokens == 24
    assert all(e.cache.found == 0 for _, e in happened)


def test_what_was_used_last_is_forgotten_last_and_shared_beginnings_live_longest():
    engine = Engine(replace(CONFIG, num_blocks=12))
    old, new = (sequence(name, prompt=16, output=1) for name in ("old", "new"))
    for each in (old, new, sequence("big", prompt=24, output=1)):  # takes the 4 free, and 2 of old
        engine.add(each, 0.0)
        run(engine)
    assert len(engine.blocks.find(old.hashes)) == 2
    assert len(engine.blocks.find(new.hashes)) == 4


def test_a_block_without_content_is_taken_before_those_that_can_be_found():
    pool = BlockPool(2)
    full, partial = pool.take(), pool.take()
    pool.remember(full, 1)
    pool.give_back([full])
    pool.give_back([partial])
    assert pool.take() == partial
    assert pool.find([1]) == [full]


def test_the_cache_is_emptied_only_while_nothing_uses_it_or_by_force():
    engine = Engine(CONFIG)
    prompt = tuple(range(12))
    engine.add(sequence("a", prompt, output=5), 0.0)
    run(engine, until=0.025)
    assert not engine.forget_prefixes()
    assert engine.forget_prefixes(preempt=True)
    check_invariants(engine)
    assert len(tokens_of(run(engine, 0.03), "a")) == 4  # of 5, the first came before
    assert engine.forget_prefixes()
    engine.add(sequence("b", prompt, output=1), 1.0)
    run(engine, 1.0)
    assert engine.totals.prefix_hits == 0


def test_a_request_whose_adapter_does_not_fit_is_stepped_over():
    engine = Engine(CONFIG)
    engine.add(sequence("a1", adapter="a"), 0.0)
    engine.add(sequence("b1", adapter="b"), 0.0)
    engine.add(sequence("a2", adapter="a"), 0.0)
    engine.add(sequence("base"), 0.0)
    engine.step(0.0)
    assert {s.id for s in engine.running_queue} == {"a1", "a2", "base"}
    assert engine.waiting_adapters == ["b"]
    assert tokens_of(run(engine), "b1") == [900, 901, 902]


def test_an_aborted_request_frees_its_blocks_at_once_and_says_nothing_more():
    engine = Engine(CONFIG)
    engine.add(sequence("a", output=50), 0.0)
    run(engine, until=0.1)
    assert engine.kv_usage_ratio > 0
    assert engine.abort("a")
    assert engine.kv_usage_ratio == 0.0
    assert engine.running == 0
    assert not tokens_of(run(engine, 0.2), "a")
    assert not engine.abort("a")
    assert engine.totals.finished["abort"] == 1


def test_a_paced_request_holds_its_blocks_and_comes_at_its_own_pace():
    engine = Engine(CONFIG)
    engine.add(sequence("slow", prompt=8, output=3, ttft_s=0.5, itl_s=0.2), 0.0)
    engine.add(sequence("fast", prompt=8, output=3), 0.0)
    happened = run(engine)
    assert [at for at, e in happened if e.id == "slow"] == pytest.approx([0.5, 0.7, 0.9])
    assert finished_at(happened, "fast") < 0.1


def test_a_request_that_can_never_fit_is_refused():
    engine = Engine(CONFIG)
    with pytest.raises(ValueError, match="larger than the whole KV cache"):
        engine.add(sequence("big", prompt=250, output=7), 0.0)


def test_steps_are_not_made_up_for_after_a_pause():
    engine = Engine(CONFIG)
    engine.add(sequence("a", output=5), 0.0)
    engine.step(0.0)
    assert len(engine.step(100.0)) == 1
    assert engine.next_event_time() == pytest.approx(100.010)


requests = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 30),  # output
        st.sampled_from([None, "a", "b", "c"]),
        st.floats(0, 0.3),  # arrives
        st.sampled_from([None, 0.0, 0.05, 0.3]),  # pace
        st.one_of(st.none(), st.floats(0, 0.6)),  # the client leaves after
        st.integers(0, 2),  # which prompt family, so that prefixes are shared
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests, blocks=st.integers(15, 40), slots=st.integers(1, 5), loras=st.integers(1, 2)
)
def test_whatever_happens_blocks_and_tokens_are_conserved(requests, blocks, slots, loras):
    engine = Engine(replace(CONFIG, num_blocks=blocks, max_num_seqs=slots, max_loras=loras))
    plan = []
    for index, (prompt, output, adapter, at, pace, leaves, family) in enumerate(requests):
        ids = tuple(family * 1000 + i for i in range(prompt))
        one = sequence(f"r{index}", ids, output, adapter=adapter, ttft_s=pace, itl_s=pace)
        plan.append((at, 0, one))
        if leaves is not None:
            plan.append((at + leaves, 1, one))
    aborted, happened, now = set(), [], 0.0
    for at, kind, one in sorted(plan, key=lambda p: (p[0], p[1], p[2].id)):
        happened += run(engine, now, until=at)
        now = max(now, at)
        if kind == 0:
            engine.add(one, now)
        elif engine.abort(one.id):
            aborted.add(one.id)
        check_invariants(engine)
    happened += run(engine, now)
    for _, _, one in plan:
        emitted = tokens_of(happened, one.id)
        assert emitted == list(one.output)[: len(emitted)]
        if one.id not in aborted:
            assert len(emitted) == len(one.output)
    assert engine.blocks.free == blocks
    assert engine.totals.generation_tokens == len(happened)
    assert sum(engine.totals.finished.values()) == len(requests)
    assert engine.next_event_time() is None


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.32.1", False), ("0.33rc1", True), ("0.33.0", True), ("1.0.0.dev7", True)],
)
def test_a_version_may_be_a_release_candidate(version, newer):
    assert SimConfig(model="m", version=version).newer is newer


def test_a_version_that_is_none_is_an_error_at_once():
    with pytest.raises(
        ValueError, match=r"version 'latest' is none of vLLM's: write it as 0\.33\.0"
    ):
        SimConfig(model="m", version="latest")
