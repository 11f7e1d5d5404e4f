"""The overload study plans what it says, judges what clients saw, and does not flatter a slow system."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.sim.server import SimConfig, SimServer
from gateway.sim.text import tokenize
from loadtest.arrivals import PROFILES, Phase, Shot, plan, poisson, prompt, shots
from loadtest.openloop import Door, fire, parse_refusal, request_bytes
from loadtest.outcomes import End, Outcome, Slo, figures, percentiles
from loadtest.overload import others
from loadtest.overload_report import asked, write
from loadtest.scenarios import LEAD_S, SHARERS, TIMES, Study
from loadtest.virtual import VirtualLoop

FULL = PROFILES["full"]
SLO = Slo(ttft_s=2.5, itl_s=0.08)
STUDY = Study(FULL, capacity_per_s=20.0, seconds=30.0, seed=7)
SHOT = Shot(5.0, "t1", "short", 100, 11, 1)


def complete(at=5.0, ttft=0.2, itl=0.02, **more):
    first = at + ttft
    last = first + itl * (SHOT.output_tokens - 1)
    shot = replace(SHOT, at_s=at)
    return Outcome(
        shot, at, sent_s=at, answered_s=first, first_s=first, last_s=last, ended_s=last, status=200,
        end=End.COMPLETE, **more,
    )  # fmt: skip


def refused(at=5.0, after=0.001, wait=1.0, reason="kv_full"):
    return Outcome(
        replace(SHOT, at_s=at), at, sent_s=at, answered_s=at + after, ended_s=at + after, status=503,
        end=End.REFUSED, reason=reason, retry_after_s=wait,
    )  # fmt: skip


def unfinished(at=5.0):
    return Outcome(replace(SHOT, at_s=at), at, sent_s=at)


def sums(*outcomes, cut=20.0, wait=0.0):
    return figures(outcomes, SLO, (0.0, 10.0), cut, wait)


# --- the plan ---


def test_the_same_seed_plans_the_same_requests():
    phases = [Phase(10.0, 20.0)]
    assert plan(phases, FULL, ("a", "b"), 3) == plan(phases, FULL, ("a", "b"), 3)
    assert plan(phases, FULL, ("a", "b"), 3) != plan(phases, FULL, ("a", "b"), 4)


def test_arrivals_keep_the_rate_of_each_phase_and_are_irregular():
    times = list(poisson([Phase(100, 10.0), Phase(50, 0.0), Phase(100, 40.0)], seed=1))
    assert times == sorted(times)
    assert sum(t < 100 for t in times) == pytest.approx(1000, abs=4 * 1000**0.5)
    assert not [t for t in times if 100 <= t < 150]
    assert sum(t >= 150 for t in times) == pytest.approx(4000, abs=4 * 4000**0.5)
    assert max(times) < 250
    gaps = [b - a for a, b in zip(times, times[1:], strict=False) if b < 100]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # as of exponential gaps


def test_one_request_in_five_is_long_in_every_stretch():
    source = shots(FULL, ("a",), 1)
    for _ in range(10):
        assert sum(next(source).kind == "long" for _ in range(20)) == 4


def test_a_prompt_has_as_many_tokens_as_planned_for_the_simulator():
    shot = next(shots(FULL, ("a",), 1))
    assert len(tokenize(prompt(shot) + " ")) == shot.prompt_tokens
    assert prompt(shot) == prompt(shot) != prompt(replace(shot, seed=shot.seed + 1))
    assert prompt(shot) != prompt(shot, salt=1)


def test_the_flood_leaves_the_plan_of_the_others_as_it_was():
    calm, flood = STUDY.cells("fairness", [])
    others = [[s for s in cell.shots if s.group == "quiet"] for cell in (calm, flood)]
    assert others[0] == others[1]
    assert len({s.tenant for s in others[0]}) == SHARERS - 1
    greedy = sum(s.tenant == "greedy" for s in flood.shots) / flood.until_s
    assert greedy == pytest.approx(TIMES * STUDY.capacity_per_s / SHARERS, rel=0.1)
    alone, under = STUDY.cells("classes", [])
    assert alone.shots == [s for s in under.shots if s.tenant == "interactive"]


def test_a_level_offers_its_multiple_of_the_capacity_before_and_after_the_window_too():
    (cell,) = STUDY.cells("levels", [2.0])
    assert len(cell.shots) / cell.until_s == pytest.approx(40, rel=0.1)
    assert cell.window == (LEAD_S, LEAD_S + STUDY.seconds)
    assert cell.shots[0].at_s < cell.window[0]
    assert cell.window[1] < cell.shots[-1].at_s < cell.until_s


# --- what a client saw ---


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"x-gateway-shed-reason": "queue_full", "retry-after": "3"}, b"", ("queue_full", 3.0)),
        ({"retry-after": "2", "retry-after-ms": "1250"}, b"", ("", 1.25)),
        ({}, b'{"error":{"code":"server_is_overloaded"}}', ("server_is_overloaded", None)),
        ({}, b'{"error":{"code":503}}', ("503", None)),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"", ("", None)),
        ({"retry-after": "nan"}, b"", ("", None)),
    ],
)
def test_a_refusal_says_why_and_when_to_come_again(headers, body, expected):
    assert parse_refusal(headers, body) == expected


def test_only_whole_replies_within_both_objectives_are_good():
    assert complete().is_good(SLO)
    assert not complete(ttft=2.6).is_good(SLO)
    assert not complete(itl=0.09).is_good(SLO)
    assert not refused().is_good(SLO)
    assert not unfinished().is_good(SLO)


def test_times_count_from_the_planned_arrival_not_from_a_late_start():
    late = complete(ttft=3.0)
    late.sent_s = late.planned_s + 2.9
    assert late.ttft_s == pytest.approx(3.0)
    assert not late.is_good(SLO)


def test_only_requests_planned_in_the_window_count():
    found = sums(complete(at=-1.0), complete(at=5.0), complete(at=9.99), complete(at=10.0))
    assert found["offered"] == 2
    assert found["goodput_per_s"] == pytest.approx(0.2)


def test_requests_still_waiting_at_the_end_raise_the_percentiles_as_lower_bounds():
    found = sums(*[complete(ttft=0.1)] * 8, unfinished(at=1.0), unfinished(at=2.0), cut=20.0)
    assert found["ttft_s"]["p50"] == pytest.approx(0.1)
    assert found["ttft_s"]["p99"] == pytest.approx(19.0)
    assert found["ttft_s"]["at_least"] == ["p99"] or found["ttft_s"]["at_least"] == ["p90", "p99"]


def test_a_bound_below_a_percentile_makes_it_a_bound():
    values = [(0.1, False), *[(1.0, True)] * 9]
    assert percentiles(values)["at_least"] == ["p50", "p90", "p99"]
    assert percentiles([]) is None


def test_refused_requests_are_not_in_the_first_token_times():
    found = sums(complete(ttft=0.3), refused(), refused())
    assert found["ttft_s"]["count"] == 1
    assert found["refusals"]["reasons"] == {"503 kv_full": 2}


def test_a_refusal_is_in_time_at_once_or_at_the_end_of_the_wait():
    found = sums(
        *(refused(after=0.01), refused(after=0.32), refused(after=1.0), refused(wait=None)),
        wait=0.3,
    )
    assert found["refusals"]["at_once_ratio"] == 0.5
    assert found["refusals"]["in_time_ratio"] == 0.75
    assert found["refusals"]["retry_after_ratio"] == 0.75


def test_retries_are_counted_apart_from_what_was_offered():
    found = sums(refused(), refused(), complete(at=6.0, retry=True), unfinished(at=2.0))
    assert found["offered"] == 3
    assert found["retries"]["count"] == 1
    assert found["retries"]["success_ratio"] == 1.0


# --- on the wire ---


def fire_at(config, shots, *faults, until, retry=False, awaited=lambda outcome, now: False):
    async def main():
        async with SimServer(config) as sim:
            for fault in faults:
                sim.inject(fault)
            door = Door([("127.0.0.1", sim.port)], config.model)
            outcomes, _ = await fire(door, shots, until_s=until, retry=retry, awaited=awaited)
            return outcomes, list(sim.requests)

    return asyncio.run(main())


def short_shots(*times):
    return [replace(SHOT, at_s=at, prompt_tokens=8, seed=i) for i, at in enumerate(times)]


def wait_for_all(outcome, now):
    return outcome.end is End.UNFINISHED


def test_a_request_is_well_formed_and_has_its_tenants_key():
    door = Door([("127.0.0.1", 1)], "m", {"t1": "secret"})
    head, _, body = request_bytes(door, SHOT).partition(b"\r\n\r\n")
    assert b"authorization: Bearer secret\r\n" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["max_tokens"] == SHOT.output_tokens


def test_streams_are_followed_to_their_end():
    config = SimConfig(decode_step_s=0.002)
    outcomes, seen = fire_at(config, short_shots(0.0, 0.01), until=0.05, awaited=wait_for_all)
    assert [each.end for each in outcomes] == [End.COMPLETE] * 2
    for each in outcomes:
        assert each.sent_s < each.first_s < each.last_s <= each.ended_s
    assert [each.tokens_emitted for each in seen] == [SHOT.output_tokens] * 2


def test_arrivals_do_not_wait_for_replies_that_never_come():
    outcomes, seen = fire_at(SimConfig(), short_shots(0.0, 0.05, 0.1), "frozen", until=1.0)
    assert [each.end for each in outcomes] == [End.UNFINISHED] * 3
    assert len(seen) == 3


def test_a_refusal_is_told_from_a_broken_stream():
    config = SimConfig(speed=0)
    outcomes, _ = fire_at(
        config, short_shots(0.0, 0.2), "admission_503@1", "reset_after:3@1", until=0.25,
        awaited=wait_for_all,
    )  # fmt: skip
    found = {each.end: each for each in outcomes}
    assert found.keys() == {End.REFUSED, End.FAILED}
    assert found[End.FAILED].reason == "cut"


def test_a_refusal_says_why_and_until_when_and_who_comes_again_says_so():
    async def main():
        heads = []

        async def answer(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            writer.write(
                b"HTTP/1.1 503 x\r\nretry-after-ms: 150\r\nx-gateway-shed-reason: kv\r\n"
                b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
            writer.close()

        outcomes = [Outcome(SHOT, 0.0), Outcome(SHOT, 0.0, retry=True)]
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            door = Door([server.sockets[0].getsockname()[:2]], "m")
            for each in outcomes:
                prepared = door.prepare(each.shot, retry=each.retry)
                await door.send(prepared, each, asyncio.get_running_loop().time)
        return outcomes, heads

    outcomes, heads = asyncio.run(main())
    told = [(each.end, each.reason, each.retry_after_s) for each in outcomes]
    assert told == [(End.REFUSED, "kv", 0.15)] * 2
    assert [b"x-stainless-retry-count: 1" in head for head in heads] == [False, True]


class Refuses:
    """Refuses everybody at once, until 0.15 s later."""

    def prepare(self, shot, *, retry=False):
        return None

    async def send(self, prepared, outcome, clock):
        outcome.ended_s, outcome.end, outcome.retry_after_s = clock(), End.REFUSED, 0.15


def test_clients_that_obey_come_again_once_after_the_time_told():
    async def main():
        outcomes, _ = await fire(
            Refuses(), short_shots(0.0, 0.3), until_s=0.4, retry=True,
            awaited=lambda outcome, now: now < 1.0,
        )  # fmt: skip
        return outcomes

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        outcomes = runner.run(main())
    assert [each.retry for each in outcomes] == [False, True, False]  # the last is due too late
    assert outcomes[1].planned_s == pytest.approx(outcomes[0].ended_s + 0.15)
    assert outcomes[1].ended_s == pytest.approx(outcomes[1].planned_s)


# --- the report ---


def cell(label, outcomes, scenario="levels", arm="gateway", preemptions=0):
    return {
        "arm": arm, "scenario": scenario, "label": label, "seconds": 10.0,
        **figures(outcomes, SLO, (0.0, 10.0), 20.0), "preemptions": preemptions, "tokens_per_s": 1,
        "peaks": {}, "cpu_ratio": {"machine": 0.3, "client": 0.1, "entrance": 0.1, "backends": 0.1},
    }  # fmt: skip


def verdicts(cells):
    return {text: kept for _, text, _, kept in asked(cells)}


def test_a_protected_system_keeps_what_is_asked():
    good = [complete() for _ in range(100)]
    kept = verdicts([cell("0.5", good[:50]), cell("1", good), cell("4", [*good, refused()])])
    assert len(kept) == 5
    assert set(kept.values()) == {"yes"}


def test_a_system_that_collapses_does_not():
    good = [complete() for _ in range(100)]
    late = [complete(ttft=9.0) for _ in range(90)] + [complete() for _ in range(10)]
    kept = verdicts([cell("0.5", good), cell("4", late, preemptions=40)])
    assert set(kept.values()) == {"no"}


def test_the_other_arms_are_compared_with():
    few, many = [complete() for _ in range(90)], [complete() for _ in range(100)]
    cells = [
        *(cell("1", few), cell("2", many)),
        *(cell("1", many, arm="gateway-off"), cell("2", few, arm="gateway-off")),
    ]
    kept = {(arm, text): kept for arm, text, _, kept in asked(cells)}
    assert kept["gateway", "goodput at 1 x >= 99% of that with admission off"] == "no"
    assert kept["gateway", "goodput at 2 x >= 95% of the best arm's"] == "yes"
    assert kept["gateway-off", "goodput at 2 x >= 95% of the best arm's"] == "no"


def test_nobody_judges_the_time_of_a_refusal_whose_wait_is_not_known():
    assert sums(refused(after=0.3), wait=None)["refusals"]["in_time_ratio"] is None
    late = refused(after=0.3)
    late.wait_s = 0.3
    assert sums(late, wait=None)["refusals"]["in_time_ratio"] == 1.0
    kept = verdicts([cell("4", [refused(after=0.3)]) | sums(refused(after=0.3), wait=None)])
    assert "every refusal has a Retry-After" in kept
    assert "every refusal within 50 ms or at its deadline" not in kept


def test_a_lower_bound_never_counts_as_kept():
    calm = [complete(ttft=10.0) for _ in range(10)]
    kept = verdicts([cell("0.5", calm), cell("2", [unfinished(at=5.0)])])
    assert kept["p99 TTFT of the admitted at 2 x <= 2 x that at 0.5 x"] == "no"


def test_the_report_shows_every_cell():
    settings = {"backends": [], "sim": "{}", "profile": "full", "seconds": 10.0, "seed": 1}
    meta = {"date": "d", "commit": "c", "python": "p", "kernel": "k", "cores": 2}
    result = {
        "meta": {**meta, "settings": settings | {"ttft": 2.5, "itl": 0.08}},
        "capacity": {"per_s": 20.0},
        "cells": [
            cell("0.5", [complete()]),
            cell("4", [complete(), unfinished(at=1.0), refused()], arm="vllm-router"),
            cell("quiet", [complete()], scenario="fairness"),
        ],
    }
    text = write(result, ["overload-goodput.svg"])
    assert "![overload-goodput](overload-goodput.svg)" in text
    assert "| 4 | vllm-router |" in text
    assert ">= 19.00" in text
    assert "1 x 503 kv_full" in text
    assert "One of eight tenants" in text


def test_a_cell_that_is_measured_again_takes_the_place_of_the_old_one_alone():
    cells = [
        cell("1", [complete()]),
        cell("2", [complete()]),
        cell("1", [complete()], arm="direct"),
    ]
    assert others(cells, cell("1", [refused()])) == cells[1:]
