"""The study in simulated time is repeatable, costs no time, and judges the default by what is asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from loadtest.arrivals import Shot
from loadtest.engines import BENCHES
from loadtest.openloop import fire
from loadtest.outcomes import End
from loadtest.scenarios import Cell
from loadtest.simulated import ARMS, WARM_S, cells_of, measure
from loadtest.simulated_table import table_of
from loadtest.virtual import Direct, Engines, VirtualLoop, fewest_open
from loadtest.virtual_gateway import Gateway

STUDY = BENCHES["study"]
SHORT = Shot(0.0, "t1", "short", 100, 20, 1)


def in_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def burst(count, scenario="levels", label="1", **more):
    """A cell of requests that come ten a second."""
    shots = [replace(SHORT, at_s=i / 10, seed=i, **more) for i in range(count)]
    return Cell(scenario, label, shots, (0.0, count / 10), count / 10)


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_serves_a_calm_load_at_the_engines_own_pace(arm):
    found = in_virtual_time(measure(STUDY, arm, burst(30), seed=1))
    assert found["ends"] == {"complete": 30}
    assert found["goodput_per_s"] == pytest.approx(10.0)
    # One pass reads a prompt and makes its first token; it may have to wait for the one under way.
    config = STUDY.config
    reads_s = SHORT.prompt_tokens / config.prefill_tokens_per_s
    assert config.decode_step_s < found["ttft_s"]["p99"] < 2.2 * (config.decode_step_s + reads_s)
    assert found["itl_s"]["p50"] == pytest.approx(config.decode_step_s, rel=0.1)


def test_the_same_seed_gives_the_same_figures():
    cell = replace(burst(300), shots=[replace(s, at_s=s.at_s / 40) for s in burst(300).shots])
    first, second = (in_virtual_time(measure(STUDY, "default", cell, seed=1)) for _ in range(2))
    assert first == second


def test_a_refusal_has_its_reason_its_time_and_its_advice():
    async def main():
        engines = Engines(STUDY.config, 1)
        gateway = Gateway(engines, {"queue": {"max_requests": 0}}, seed=1)
        async with asyncio.TaskGroup() as group:
            background = group.create_task(gateway.run())
            shots = [replace(SHORT, seed=i) for i in range(900)]
            outcomes, _ = await fire(
                gateway, shots, until_s=5.0, retry=False,
                awaited=lambda outcome, now: outcome.end is End.UNFINISHED,
            )  # fmt: skip
            background.cancel()
        return outcomes

    outcomes = in_virtual_time(main())
    refused = [each for each in outcomes if each.end is End.REFUSED]
    assert {each.end for each in outcomes} == {End.REFUSED, End.COMPLETE}
    assert {each.reason for each in refused} == {"no_room"}
    assert all(each.answered_s == each.sent_s and each.retry_after_s >= 1 for each in refused)


def test_who_is_cut_leaves_the_engine_and_the_gateway():
    async def main():
        engines = Engines(STUDY.config, 1)
        gateway = Gateway(engines, {}, seed=1)
        async with asyncio.TaskGroup() as group:
            background = group.create_task(gateway.run())
            await fire(
                gateway, [SHORT], until_s=0.1, retry=False, awaited=lambda outcome, now: False
            )
            background.cancel()
        (backend,) = gateway.table
        return engines.states[0].in_flight, backend.in_flight

    assert in_virtual_time(main()) == (0, 0)


def test_no_gateway_sends_to_the_server_with_the_fewest():
    async def main():
        engines = Engines(STUDY.config, 2)
        shots = [replace(SHORT, seed=i) for i in range(40)]
        await fire(
            Direct(engines, fewest_open(seed=1)), shots, until_s=0.02, retry=False,
            awaited=lambda outcome, now: outcome.end is End.UNFINISHED,
        )  # fmt: skip
        return [state.engines[0].totals.first_tokens for state in engines.states]

    assert in_virtual_time(main()) == [20, 20]


def test_a_cell_begins_with_half_load_that_does_not_count():
    calm = next(each for each in cells_of(STUDY, "levels", 1) if each.label == "4")
    before = [shot for shot in calm.shots if shot.at_s < WARM_S]
    assert len(before) / WARM_S == pytest.approx(STUDY.capacity_per_s / 2, rel=0.2)
    assert calm.window[0] == WARM_S + STUDY.lead_s
    (cold,) = cells_of(STUDY, "cold", 1)
    assert cold.window[0] == STUDY.lead_s


def test_a_load_that_lasts_counts_in_its_second_half():
    once, *_ = cells_of(STUDY, "lasting", 1)
    assert (once.scenario, once.label) == ("lasting", "1")
    half_s = 2 * STUDY.seconds
    assert once.window == (WARM_S + STUDY.lead_s + half_s, WARM_S + STUDY.lead_s + 2 * half_s)


def test_after_a_batch_of_long_replies_each_of_the_usual_requests_counts():
    (cell,) = cells_of(STUDY, "changed", 1)
    before, after = ([s for s in cell.shots if (s.tenant == "batch") is x] for x in (True, False))
    assert before[-1].at_s < cell.window[0] <= after[0].at_s
    assert min(shot.output_tokens for shot in before) > 300
    tokens = [sum(shot.output_tokens for shot in part) for part in (before, after)]
    per_s = tokens[0] / cell.window[0], tokens[1] / (cell.until_s - cell.window[0])
    assert per_s[0] == pytest.approx(per_s[1] / 2.8, rel=0.15)  # half load, then 1.4 x


def test_little_more_than_the_capacity_holds_nobody_for_long_however_long_it_lasts():
    cell = next(each for each in cells_of(STUDY, "lasting", 2) if each.label == "1.05")
    found = in_virtual_time(measure(STUDY, "default", cell, seed=2))
    assert found["goodput_per_s"] > STUDY.capacity_per_s
    assert found["ttft_s"]["p99"] < 3.0  # with `queue.max_wait` alone 4.6


def test_of_a_load_that_follows_a_batch_of_long_replies_the_default_serves_what_it_can():
    (cell,) = cells_of(STUDY, "changed", 1)
    found = in_virtual_time(measure(STUDY, "default", cell, seed=1))
    # With memories that shrink slowly it was 25.6.
    assert found["goodput_per_s"] > 1.1 * STUDY.capacity_per_s


def test_the_table_marks_what_misses_the_median_and_what_misses_the_worst_seed():
    def cell(arm, seed, good, label="2"):
        found = in_virtual_time(measure(STUDY, "direct", burst(5), seed=1))
        return found | {
            "engine": "study", "arm": arm, "seed": seed, "scenario": "levels", "label": label,
            "goodput_per_s": good,
        }  # fmt: skip

    def line(text):
        return next(each for each in text.splitlines() if each.startswith("good/s at 2 x"))

    best = [cell("direct", seed, 10.0) for seed in (1, 2, 3)]
    assert "0.960 (0.900)?" in line(
        table_of([*best, cell("default", 1, 9.0), cell("default", 2, 9.6), cell("default", 3, 9.7)])
    )
    assert "0.900 (0.900)!" in line(table_of([*best, cell("default", 1, 9.0)]))


def test_below_its_capacity_an_engine_with_a_small_cache_refuses_nobody_and_keeps_its_pace():
    """Its replies are over before a scrape shows them: they must not count as if they had just begun."""
    bench = BENCHES["tight"]
    (cell,) = (each for each in cells_of(bench, "levels", 3) if each.label == "0.9")
    found = in_virtual_time(measure(bench, "default", cell, seed=3))
    assert "refused" not in found["ends"]
    assert found["goodput_per_s"] > 0.97 * found["offered_per_s"]


def test_the_table_tells_the_worst_share_that_was_refused_below_the_capacity():
    def cell(label, refused):
        ends = {"complete": 100 - refused, "refused": refused}
        found = in_virtual_time(measure(STUDY, "direct", burst(5), seed=1))
        about = {"engine": "study", "arm": "default", "seed": 1, "scenario": "levels"}
        return found | about | {"label": label, "ends": ends, "offered": 100}

    text = table_of([cell("0.6", 0), cell("0.8", 3), cell("0.9", 1)])
    (line,) = (each for each in text.splitlines() if each.startswith("refused below 1 x"))
    assert "0.030 (0.030)!" in line


def test_while_one_of_two_servers_is_lost_the_other_protects_itself_at_once():
    """Half of the load is refused, and who is served does not wait for seconds as before a queue is known."""
    (cell,) = cells_of(STUDY, "lost", 1)
    assert cell.lost_at_s == cell.window[0]
    found = in_virtual_time(measure(STUDY, "default", cell, seed=1))
    assert found["goodput_per_s"] > 0.6 * STUDY.capacity_per_s
    assert found["ttft_s"]["p99"] < 1.0
