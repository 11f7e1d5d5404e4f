"""What follows a failed attempt."""

from itertools import product

import pytest

from gateway.core.errors import (
    BackendBroke,
    BackendDown,
    BackendTimeout,
    ConnectFailed,
    EngineFull,
    StaleConnection,
    StreamBroke,
    UpstreamError,
)
from gateway.core.types import Chance
from gateway.upstream.attempts import MAX_ATTEMPTS, Next, after

TELL, ELSEWHERE, FRESH = Next.TELL, Next.ELSEWHERE, Next.FRESH_CONNECTION
# What follows the first attempt: other backends have no room, room after a wait, room now.
AFTER_THE_FIRST = {
    StaleConnection: (FRESH, FRESH, FRESH),
    ConnectFailed: (TELL, ELSEWHERE, ELSEWHERE),
    EngineFull: (TELL, TELL, ELSEWHERE),
    BackendBroke: (TELL, TELL, TELL),
    BackendDown: (TELL, TELL, TELL),
    StreamBroke: (TELL, TELL, TELL),
    BackendTimeout: (TELL, TELL, TELL),
    UpstreamError: (TELL, TELL, TELL),
}
CHANCES = (Chance.NEVER, Chance.LATER, Chance.NOW)


def follows(error, *, attempts=1, answering=False, body_at_hand=True, chance=Chance.NOW):
    asked = {"attempts": attempts, "answering": answering, "body_at_hand": body_at_hand}
    return after(error("x"), **asked, chance=chance)


def test_the_table_knows_every_failure_of_a_backend():
    ours = {
        each for each in UpstreamError.__subclasses__() if each.__module__ == "gateway.core.errors"
    }
    assert set(AFTER_THE_FIRST) == ours | {UpstreamError, EngineFull}


@pytest.mark.parametrize(("error", "expected"), AFTER_THE_FIRST.items())
def test_only_what_surely_was_not_executed_is_tried_again_where_there_is_room(error, expected):
    assert tuple(follows(error, chance=chance) for chance in CHANCES) == expected


@pytest.mark.parametrize("error", AFTER_THE_FIRST)
@pytest.mark.parametrize(
    "over",
    [{"answering": True}, {"body_at_hand": False}]
    + [{"attempts": made} for made in (MAX_ATTEMPTS, MAX_ATTEMPTS + 1, 100)],
)
def test_nothing_is_tried_again_after_a_first_byte_without_a_body_or_for_ever(error, over):
    for attempts, chance in product(range(1, MAX_ATTEMPTS + 1), CHANCES):
        assert follows(error, **{"attempts": attempts, **over}, chance=chance) is TELL


@pytest.mark.parametrize("error", [ConnectFailed, EngineFull])
def test_backends_are_tried_until_the_last_attempt(error):
    steps = [follows(error, attempts=made) for made in range(1, MAX_ATTEMPTS + 1)]
    assert steps == [ELSEWHERE, ELSEWHERE, TELL]
