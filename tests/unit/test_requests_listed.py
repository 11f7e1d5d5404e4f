"""The list of requests: in what order, and what goes on while it is made."""

import asyncio

from gateway.core.asked import Caller
from gateway.core.types import Outcome, RequestRecord
from gateway.observe.ended import KEPT, EndedRequests
from gateway.ops.requests import Filter, Requests, newest, place_of

CALLER = Caller("k1", "name", "acme")


def record(number):
    return RequestRecord(f"r{number}", None, float(number), caller=CALLER, outcome=Outcome.OK)


def listed(count, wanted=Filter(), before=None, meanwhile=lambda turn: None):  # noqa: B008 - frozen
    """List `count` requests; returns their ids, and how often something else ran meanwhile."""
    ended = EndedRequests()
    ended.posted([record(number) for number in range(count)])
    turns = 0

    def others():
        nonlocal turns
        turns += 1
        meanwhile(ended)
        asyncio.get_running_loop().call_soon(others)

    async def run():
        asyncio.get_running_loop().call_soon(others)
        found = await newest(Requests(ended, tuple), wanted, before)
        return [each.record.id for each in found], turns

    return asyncio.run(run())


def test_the_newest_come_first_and_a_page_begins_before_a_place():
    assert listed(3)[0] == ["r2", "r1", "r0"]
    assert listed(3, before=place_of(record(2)))[0] == ["r1", "r0"]
    assert listed(3, Filter(outcome=Outcome.SHED))[0] == []


def test_streams_go_on_while_thousands_of_requests_are_looked_at():
    found, turns = listed(KEPT)
    assert len(found) == KEPT
    assert turns >= KEPT // 256


def test_what_ends_meanwhile_is_not_in_a_list_that_was_begun():
    found, turns = listed(KEPT, meanwhile=lambda ended: ended.posted([record(KEPT + len(ended))]))
    assert turns > 1
    assert found == [f"r{number}" for number in reversed(range(KEPT))]
