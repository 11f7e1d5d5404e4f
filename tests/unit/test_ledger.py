import asyncio
import json
import logging
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.endings import Ending
from gateway.core.types import Endpoint, Outcome, Phase, RequestRecord, Transition
from gateway.observe.ledger import Ledger
from gateway.observe.log import AccessLog
from gateway.observe.metrics import Metrics
from gateway.observe.outlet import Outlet
from gateway.observe.readings import Readings


class HeldClock:
    def now(self):
        return 100.0

    def wall(self):
        return 1_700_000_000.0


class Desk:
    """A ledger, and what it wrote."""

    def __init__(self, fd, outlet):
        self.fd = fd
        self.outlet = outlet
        self.metrics = Metrics(Readings(), HeldClock())
        self.ledger = Ledger(self.metrics, AccessLog(outlet, HeldClock()), HeldClock())

    def count(self, name):
        text = b"".join(self.metrics.pieces()[0]).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def lines(self):
        self.ledger.post()
        assert self.outlet.flush()
        return [json.loads(line) for line in os.read(self.fd, 100_000).splitlines()]


@pytest.fixture
def desk():
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    yield Desk(reader, outlet)
    assert outlet.close()
    os.close(reader)
    os.close(writer)


def record(**more):
    return RequestRecord("req_1", Endpoint.CHAT, 90.0, **({"outcome": Outcome.OK} | more))


def test_a_request_becomes_one_count_and_one_line(desk):
    desk.ledger.settle(record(status=200))
    assert desk.count("gateway_requests_total") == 1
    assert [line["id"] for line in desk.lines()] == ["req_1"]


def test_many_requests_are_each_counted_and_written_once(desk):
    for _ in range(100):
        desk.ledger.settle(record())
    assert desk.count("gateway_requests_total") == 100
    assert len(desk.lines()) == 100


def test_what_is_settled_is_posted_without_anybody_reading(desk):
    async def main():
        desk.ledger.settle(record())
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            owner = group.create_task(desk.ledger.run())
            line = await asyncio.to_thread(os.read, desk.fd, 10_000)
            owner.cancel()
        return json.loads(line)

    assert asyncio.run(main())["id"] == "req_1"


def test_settling_twice_is_a_bug_that_counts_nothing(desk, caplog):
    settled = record()
    desk.ledger.settle(settled)
    desk.ledger.settle(settled)
    assert desk.count("gateway_requests_total") == 1
    assert len(desk.lines()) == 1
    assert [each.event for each in caplog.records] == ["bug"]


def test_a_request_without_outcome_is_a_bug_that_is_counted(desk, caplog):
    desk.ledger.settle(record(outcome=None))
    assert desk.lines()[0]["outcome"] == "bug"
    assert [each.event for each in caplog.records] == ["bug"]


def test_a_request_that_nobody_ended_ends_now(desk):
    desk.ledger.settle(record())
    assert desk.lines()[0]["duration_s"] == 10.0


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_can_be_settled(desk, outcome):
    desk.ledger.settle(record(outcome=outcome))
    assert desk.lines()[0]["outcome"] == outcome.value
    assert desk.metrics.total_requests() == {outcome.value: 1}


@pytest.mark.parametrize(
    ("after", "level"),
    [
        (Phase.DOWN, logging.WARNING),
        (Phase.DEGRADED, logging.WARNING),
        (Phase.READY, logging.INFO),
        (Phase.CORDONED, logging.INFO),
    ],
)
def test_a_transition_is_counted_and_told_with_its_evidence(desk, caplog, after, level):
    caplog.set_level(logging.INFO)
    seen = Transition("m/b1", Phase.STARTING, after, "refused", "3 probes were refused", 1.0)
    desk.ledger.transition(seen)
    assert desk.count("gateway_backend_transitions_total") == 1
    (line,) = caplog.records
    assert line.event == f"backend_{after.value}"
    assert line.levelno == level
    assert line.reason == "refused"
    assert "3 probes were refused" in line.getMessage()


def test_a_failed_attempt_is_counted(desk):
    desk.ledger.upstream_failed("m/b1", Ending.CONNECT, hard=True)
    assert desk.count("gateway_upstream_failures_total") == 1
