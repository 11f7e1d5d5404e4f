"""What holds for tenants and priorities at one gateway holds over several before the same engines, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.engines import BENCHES
from loadtest.replicas import Job, measure
from loadtest.routing_replicas import Job as RoutingJob
from loadtest.routing_replicas import run_job, table_of
from loadtest.scenarios import Study
from loadtest.simulated import COUNT
from loadtest.virtual import VirtualLoop

BENCH = BENCHES["study"]
STUDY = Study(BENCH.profile, BENCH.capacity_per_s, 12.0, seed=1)


def groups(cell, gateways):
    """Return the figures of each group of tenants."""
    job = Job("study", COUNT, gateways, gateways > 1, 0.0, seed=1)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure(BENCH, job, cell))["groups"]


def all_good(group):
    return group["goodput_per_s"] == pytest.approx(group["offered"] / 12.0, abs=0.01)


@pytest.mark.parametrize("gateways", [2, 3])
def test_who_stays_within_its_share_is_served_while_another_floods_all_gateways(gateways):
    found = groups(STUDY.fairness(flood=True), gateways)
    assert all_good(found["quiet"])
    assert found["quiet"]["ttft_s"]["p99"] < 1.0
    assert found["greedy"]["goodput_per_s"] > 10  # what is left is not wasted


@pytest.mark.parametrize("gateways", [2, 3])
def test_a_priority_goes_first_at_all_gateways(gateways):
    found = groups(STUDY.classes(flood=True), gateways)
    assert all_good(found["interactive"])
    assert found["interactive"]["ttft_s"]["p99"] < 0.5


def test_the_study_of_prefixes_shows_each_cell():
    found = run_job(RoutingJob("few prompts", "approximate", 2, 2, 1))
    assert found["ends"].keys() == {"complete"}
    assert "| few prompts | approximate | 2 | 92" in table_of([found])
