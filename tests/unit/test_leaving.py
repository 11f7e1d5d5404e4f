"""What is asked for when a stream leaves a backend that is drained."""

from types import SimpleNamespace

import pytest

from gateway.core.types import Ask, Caller, Demand, Phase, Route
from gateway.ingress.leaving import Leaving
from tests.unit.test_resume import FAULT, call, frame, role, stream

DRAINED = SimpleNamespace(id="b1", phase=Phase.DRAINING, health=SimpleNamespace(since=0.0))
CLOCK = SimpleNamespace(now=lambda: 100.0)


class Gate:
    """One that has no place, and keeps what it was asked for."""

    def __init__(self):
        self.needs = SimpleNamespace(of=lambda *_: None)
        self.asked = []

    def enter(self, ask):
        self.asked.append(ask.demand)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_what_was_said_counts_once_however_often_a_stream_moved(moves):
    gate = Gate()
    asked, demand = call(max_tokens=20), Demand(3, exact=True, max_new_tokens=20)
    ask = Ask(Route("m", "m", "m"), asked, demand, Caller("k", "n", "t", 0))
    watch = stream(asked, demand)
    watch.feed(role([1, 2, 3]))
    ids = [1, 2, 3]
    for move in range(moves + 1):
        if move:
            assert watch.broken(FAULT) == b""
            ask.call, ask.demand = watch.rest(moved=True)
            watch.feed(role(ids))
        for token in (4, 5):
            watch.feed(frame("a", [token]))
            ids.append(token)
    assert Leaving(gate, CLOCK).leaves(ask, watch, DRAINED, 0) is None
    said = 2 * (moves + 1) + (
        moves == 0
    )  # the first backend's frame with the role is an event, too
    assert gate.asked == [Demand(3 + said, exact=True, max_new_tokens=20 - said)]
