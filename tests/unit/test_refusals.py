"""What a request that is not admitted is told: what happened, the numbers, when to come again."""

import math
import random
import re

import pytest

from gateway.admission.bounds import Full, Limits
from gateway.admission.queue import FairQueue
from gateway.admission.refusals import (
    heard_within_s,
    no_backend,
    no_room,
    queue_full,
    too_late,
    waited_too_long,
)
from gateway.core.errors import ContextLengthExceeded, Overloaded, TooManyWaiting, Unavailable
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    Exclusion,
    Need,
    Outcome,
    Route,
    ShedReason,
)
from gateway.wire.replies import error_headers
from tests.waitingroom import request

OWN = [Full.TENANT_REQUESTS, Full.TENANT_TOKENS, Full.TENANT_BYTES]
SHARED = [Full.REQUESTS, Full.TOKENS, Full.BYTES]
BUSY = {"m/b1": Exclusion.AT_LIMIT, "m/b2": Exclusion.AT_LIMIT, "m/b3": Exclusion.NOT_SERVING}
WAITING = [reason for reason in Exclusion if reason.passes]


def ask(name="m"):
    return Ask(
        Route(name, "m", "m"),
        Call(Endpoint.CHAT, Dialect.CHAT, name, stream=False, body=b"{}"),
        Demand(10, exact=True),
        Caller("k1", "anyone", "acme"),
        Need(700, 300),
    )


def queue(requests=4, **waiting):
    """Return a queue in which each tenant named has so many requests of 500 tokens."""
    made = FairQueue(Limits(requests, 4000, 10_000))
    for tenant, count in waiting.items():
        for _ in range(count):
            made.offer(request(tenant=tenant, cost=500, size=100))
    return made


def retry_after(error):
    return int(dict(error_headers(error))[b"retry-after"])


def all_refusals(why, retry_after_s=7.0):
    """Return each refusal that asks to come again."""
    return [
        no_backend(ask(), why, random.Random(0)),
        no_room(ask(), why, retry_after_s),
        too_late(ask(), why, 40.0, 30.0, retry_after_s),
        waited_too_long(ask(), why, 30.0, retry_after_s),
        *(queue_full(ask(), full, queue(acme=2), why, 90, retry_after_s) for full in Full),
    ]


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patience_s", "heard_s"),
    [(0, 0), (0.3, 0.15), (0.5, 0.25), (2, 1.75), (10, 9), (600, 540), (math.inf, math.inf)],
)
def test_a_refusal_comes_a_quarter_second_or_a_tenth_before_its_client_gives_up(
    patience_s, heard_s
):
    assert heard_within_s(patience_s) == heard_s


# --- which waiting cures --------------------------------------------------------------------------


def test_waiting_cures_a_want_of_room_and_nothing_else():
    assert set(WAITING) == {
        Exclusion.ADAPTER_LOADING,
        Exclusion.ADAPTER_DUE,
        Exclusion.PROBATION,
        Exclusion.AT_LIMIT,
        Exclusion.READING,
        Exclusion.ENGINE_QUEUED,
        Exclusion.KV_FULL,
        Exclusion.NO_KV_ROOM,
        Exclusion.CLAIMED,
    }


# --- no backend -----------------------------------------------------------------------------------


def test_the_only_backend_being_down_is_said_in_plain_words():
    error = no_backend(ask("dead"), {"m/b1": Exclusion.NOT_SERVING}, random.Random(0))
    assert error.message.startswith(
        "Model `dead` is temporarily unavailable: its only backend is down. Retry in "
    )


def test_backends_that_share_a_reason_are_counted_together():
    two = {"m/b1": Exclusion.NOT_SERVING, "m/b2": Exclusion.NOT_SERVING}
    assert "both backends are down" in no_backend(ask(), two, random.Random(0)).message
    three = two | {"m/b3": Exclusion.NOT_SERVING}
    assert "all 3 backends are down" in no_backend(ask(), three, random.Random(0)).message


def test_every_reason_has_words_for_one_backend_and_for_several():
    for reason in Exclusion:
        if reason is not Exclusion.TOO_LARGE:
            for count in (1, 2):
                why = {f"m/b{n}": reason for n in range(count)} | {"m/x": Exclusion.TOO_LARGE}
                assert "_" not in no_room(ask(), why, 1.0).message


def test_absence_is_told_as_unavailable_with_the_tally():
    why = {
        "m/b1": Exclusion.NOT_SERVING,
        "m/b2": Exclusion.ALREADY_TRIED,
        "m/b3": Exclusion.ALREADY_TRIED,
    }
    error = no_backend(ask(), why, random.Random(0))
    assert isinstance(error, Unavailable)
    assert "of its 3 backends, 1 is down and 2 were already tried" in error.message
    assert (error.status, error.code, error.param) == (503, "model_unavailable", "model")
    assert error.shed_reason is ShedReason.NO_BACKEND
    assert 1 <= retry_after(error) <= 30


def test_a_pool_without_backends_says_so():
    error = no_backend(ask(), {}, random.Random(0))
    assert isinstance(error, Unavailable)
    assert "it has no backend" in error.message


@pytest.mark.parametrize("reason", [each for each in Exclusion if each is not Exclusion.TOO_LARGE])
def test_absence_asks_to_come_back_soon_and_not_all_at_once(reason):
    told = [no_backend(ask(), {"m/b1": reason}, random.Random(seed)) for seed in range(100)]
    assert all(1 <= each.retry_after_s <= 30 for each in told)
    assert all(1 <= retry_after(each) <= 30 for each in told)
    assert len({each.retry_after_s for each in told}) > 50
    assert len({each.message.partition("Retry")[0] for each in told}) == 1


def test_what_no_cache_can_hold_is_the_requests_fault_and_not_to_be_repeated():
    why = {"m/b1": Exclusion.TOO_LARGE, "m/b2": Exclusion.ENDPOINT_MISSING}
    error = no_backend(ask(), why, random.Random(0))
    assert isinstance(error, ContextLengthExceeded)
    assert (error.status, error.outcome) == (400, Outcome.REJECTED)
    assert "1000 tokens" in error.message
    assert "700 for the prompt, 300 for the completion" in error.message
    assert b"retry-after" not in dict(error_headers(error))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (Exclusion.NOT_SERVING, "is down"),
        (Exclusion.EJECTED, "is left out"),
        (Exclusion.ALREADY_TRIED, "was already tried"),
    ],
)
def test_what_a_backend_that_is_away_may_hold_is_to_be_sent_again(reason, words):
    why = {"m/b1": Exclusion.TOO_LARGE, "m/b2": reason}
    error = no_backend(ask(), why, random.Random(0))
    assert isinstance(error, Unavailable)
    assert f"1 is too small for this request and 1 {words}" in error.message


# --- no room --------------------------------------------------------------------------------------


def test_overload_is_told_with_the_tally():
    for error in all_refusals(BUSY)[1:]:
        assert error.message.startswith("Model `m` is overloaded: of its 3 backends, ")
        assert "2 are at their concurrency limit and 1 is down." in error.message


def test_each_reason_for_overload_has_its_own_words():
    assert len({no_room(ask(), {"m/b1": reason}, 1.0).message for reason in WAITING}) == len(
        WAITING
    )


def test_a_turn_that_would_come_too_late_is_told_with_both_times():
    error = too_late(ask(), BUSY, 41.6, 30.0, 12.0)
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.shed_reason is ShedReason.TOO_LATE
    assert "42 s" in error.message
    assert "at most 30 s" in error.message


def test_a_wait_in_vain_is_told_with_its_length():
    error = waited_too_long(ask(), BUSY, 4.96, 12.0)
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.shed_reason is ShedReason.QUEUE_TIMEOUT
    assert "waited 5.0 s" in error.message


BOUNDS = {
    Full.REQUESTS: "The queue is limited to 4 requests",
    Full.TOKENS: "The queue is limited to 4000 tokens, and this request needs 1000 tokens",
    Full.BYTES: "The queue is limited to 10000 bytes, and this request needs 90 bytes",
    Full.TENANT_REQUESTS: "Your share of the queue is limited to 2 requests",
    Full.TENANT_TOKENS: "Your share of the queue is limited to 2000 tokens, and this request needs 1000 tokens",
    Full.TENANT_BYTES: "Your share of the queue is limited to 5000 bytes, and this request needs 90 bytes",
}


@pytest.mark.parametrize("full", SHARED)
def test_a_full_queue_is_told_with_what_it_holds_and_may_hold(full):
    error = queue_full(ask(), full, queue(acme=1, other=2), BUSY, 90, 12.0)
    assert isinstance(error, Overloaded)
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.shed_reason is ShedReason.QUEUE_FULL
    assert "Already waiting: 3 requests (1500 tokens, 300 bytes)." in error.message
    assert f" {BOUNDS[full]}. " in error.message


@pytest.mark.parametrize("full", OWN)
def test_a_tenant_whose_share_is_full_is_told_of_its_own_alone(full):
    error = queue_full(ask(), full, queue(acme=1, other=2), BUSY, 90, 12.0)
    assert isinstance(error, TooManyWaiting)
    assert (error.status, error.code) == (429, "too_many_waiting")
    assert error.shed_reason is ShedReason.TENANT_QUEUE_FULL
    assert "Already waiting: 1 request of yours (500 tokens, 100 bytes)." in error.message
    assert f" {BOUNDS[full]}. " in error.message
    others = error.message.replace("this request needs 1000 tokens", "")
    assert not re.search(r"\b(1000|1500) tokens|\b(200|300) bytes|\bother\b", others)


@pytest.mark.parametrize(
    ("full", "bound"),
    [
        (Full.TOKENS, "the queue is limited to 900 tokens, and this request needs 1000 tokens"),
        (Full.BYTES, "the queue is limited to 80 bytes, and this request needs 90 bytes"),
        (Full.TENANT_TOKENS, "your share of the queue is limited to 450 tokens, and this request needs 1000 tokens"),
        (Full.TENANT_BYTES, "your share of the queue is limited to 40 bytes, and this request needs 90 bytes"),
    ],
)  # fmt: skip
def test_what_is_larger_than_the_queue_is_told_that_it_cannot_wait(full, bound):
    error = queue_full(ask(), full, FairQueue(Limits(4, 900, 80)), BUSY, 90, 12.0)
    assert f"It cannot wait: {bound}. " in error.message
    assert "Please reduce" in error.message
    assert "Already waiting" not in error.message


def test_where_nothing_may_wait_no_queue_is_spoken_of():
    error = queue_full(ask(), Full.REQUESTS, queue(0), BUSY, 90, 12.0)
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.shed_reason is ShedReason.NO_ROOM
    assert "queue" not in error.message


# --- all ------------------------------------------------------------------------------------------


def test_a_refusal_names_the_model_as_it_was_asked_for_and_no_backend():
    for why in (BUSY, {"m/b1": Exclusion.TOO_LARGE}):
        for refusal in (
            no_backend(ask("nick"), why, random.Random(0)),
            too_late(ask("nick"), why, 1.0, 1.0, 1.0),
            waited_too_long(ask("nick"), why, 1.0, 1.0),
            *(queue_full(ask("nick"), full, queue(), why, 90, 1.0) for full in Full),
        ):
            assert "`nick`" in refusal.message
            assert "m/b1" not in refusal.message


@pytest.mark.parametrize("seconds", [1.0, 6.2, 30.0])
def test_the_time_to_come_again_is_the_same_in_words_and_in_the_header(seconds):
    for error in all_refusals(BUSY, seconds):
        assert error.message.endswith(f"Retry in {retry_after(error)} s.")
    for error in all_refusals(BUSY, seconds)[1:]:
        assert seconds <= retry_after(error) < seconds + 1
