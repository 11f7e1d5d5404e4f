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
from gateway.core.exclusion import Chance
from gateway.upstream.attempts import MAX_ATTEMPTS, Budget, Next, adds_load, after, pause_s

TELL, ELSEWHERE, FRESH, AGAIN = Next.TELL, Next.ELSEWHERE, Next.FRESH_CONNECTION, Next.AGAIN
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


def follows(
    error,
    *,
    attempts=1,
    repeatable=True,
    over=False,
    chance=Chance.NOW,
    left_s=10.0,
    asked_s=None,
):
    asked = {"attempts": attempts, "repeatable": repeatable, "over": over, "left_s": left_s}
    failed = error("x", asked_s) if error is EngineFull else error("x")
    return after(failed, **asked, chance=chance)


def test_the_table_knows_every_failure_of_a_backend():
    ours = {
        each for each in UpstreamError.__subclasses__() if each.__module__ == "gateway.core.errors"
    }
    assert set(AFTER_THE_FIRST) == ours | {UpstreamError, EngineFull}


@pytest.mark.parametrize(("error", "expected"), AFTER_THE_FIRST.items())
def test_only_what_surely_was_not_executed_is_tried_again_where_there_is_room(error, expected):
    assert tuple(follows(error, chance=chance) for chance in CHANCES) == expected


@pytest.mark.parametrize("error", [BackendBroke, StreamBroke, UpstreamError, BackendTimeout])
def test_what_nobody_works_on_any_more_goes_elsewhere_wherever_it_may(error):
    assert [follows(error, over=True, chance=chance) for chance in CHANCES] == [
        TELL,
        ELSEWHERE,
        ELSEWHERE,
    ]
    assert follows(error, over=True, repeatable=False) is TELL
    assert follows(error, over=True, attempts=MAX_ATTEMPTS) is TELL


@pytest.mark.parametrize("error", AFTER_THE_FIRST)
@pytest.mark.parametrize(
    "over",
    [{"repeatable": False}, {"left_s": 0.0}, {"left_s": -1.0}]
    + [{"attempts": made} for made in (MAX_ATTEMPTS, MAX_ATTEMPTS + 1, 100)],
)
def test_nothing_is_tried_again_after_a_first_byte_too_late_or_for_ever(error, over):
    for attempts, chance in product(range(1, MAX_ATTEMPTS + 1), CHANCES):
        assert follows(error, **{"attempts": attempts, **over}, chance=chance) is TELL


@pytest.mark.parametrize("error", [ConnectFailed, EngineFull])
def test_backends_are_tried_until_the_last_attempt(error):
    steps = [follows(error, attempts=made) for made in range(1, MAX_ATTEMPTS + 1)]
    assert steps == [ELSEWHERE, ELSEWHERE, TELL]


@pytest.mark.parametrize(
    ("asked_s", "left_s", "expected"),
    [
        (1.0, 10.0, AGAIN),
        (2.0, 10.0, AGAIN),
        (3.0, 10.0, TELL),
        (1.0, 0.5, TELL),
        (None, 10.0, TELL),
    ],
)
def test_an_engine_that_asks_for_a_short_pause_gets_it_where_no_other_has_room(
    asked_s, left_s, expected
):
    for chance in (Chance.NEVER, Chance.LATER):
        assert follows(EngineFull, asked_s=asked_s, left_s=left_s, chance=chance) is expected
    assert follows(EngineFull, asked_s=asked_s, left_s=left_s, chance=Chance.NOW) is ELSEWHERE


def test_the_first_attempt_elsewhere_is_made_at_once_and_the_next_after_a_random_pause():
    full, refused = EngineFull("x", 1.5), ConnectFailed("x")
    assert pause_s(ELSEWHERE, refused, 1, 1.0) == 0.0
    assert pause_s(FRESH, StaleConnection("x"), 2, 1.0) == 0.0
    assert [pause_s(ELSEWHERE, refused, 2, each) for each in (0.0, 0.5, 1.0)] == [0.0, 0.025, 0.05]
    assert pause_s(ELSEWHERE, refused, 100, 1.0) == 0.25
    assert pause_s(AGAIN, full, 1, 0.0) == 1.5


def test_only_what_an_engine_may_have_read_counts_against_the_budget():
    assert [adds_load(each("x"), over=False) for each in AFTER_THE_FIRST] == [
        each not in (ConnectFailed, StaleConnection) for each in AFTER_THE_FIRST
    ]
    assert not any(adds_load(each("x"), over=True) for each in AFTER_THE_FIRST)


def test_a_pool_has_three_of_them_or_a_fifth_of_what_is_under_way():
    budget = Budget()
    assert [budget.begin(number, "m", 5) for number in range(5)] == [True] * 3 + [False] * 2
    assert budget.begin(9, "other", 0)
    assert [budget.begin(number, "m", 25) for number in range(10, 14)] == [True, True, False, False]
    budget.end(0)
    budget.end(0)
    assert budget.under_way("m") == 4
    assert budget.begin(10, "m", 25)  # one that has a place keeps it
    assert budget.under_way("m") == 4


class Compared(str):
    """A pool's name that counts how often it was looked at."""

    __slots__ = ()

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Compared.times += 1
        return str.__eq__(self, other)


def test_one_more_is_counted_without_a_look_at_all_the_others():
    budget = Budget()
    for request in range(1000):
        budget.begin(request, Compared("m"), 5000)
    assert budget.under_way("m") == 1000
    assert Compared.times < 10 * 1000
