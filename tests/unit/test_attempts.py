"""When a failed attempt may be made again."""

import pytest

from gateway.core.errors import (
    BackendBroke,
    BackendDown,
    BackendTimeout,
    ConnectFailed,
    StaleConnection,
    StreamBroke,
    UpstreamError,
)
from gateway.upstream.attempts import MAX_ATTEMPTS, Retry, after

FIRST_FAILURE = {
    ConnectFailed: Retry.ELSEWHERE,
    StaleConnection: Retry.FRESH_CONNECTION,
    BackendBroke: Retry.NO,
    BackendDown: Retry.NO,
    StreamBroke: Retry.NO,
    BackendTimeout: Retry.NO,
    UpstreamError: Retry.NO,
}


def test_the_table_knows_every_failure_of_a_backend():
    ours = {
        each for each in UpstreamError.__subclasses__() if each.__module__ == "gateway.core.errors"
    }
    assert set(FIRST_FAILURE) == ours | {UpstreamError}


@pytest.mark.parametrize(("error", "retry"), FIRST_FAILURE.items())
def test_only_what_surely_was_not_executed_is_made_again(error, retry):
    assert after(error("x"), attempts=1, response_started=False) is retry


@pytest.mark.parametrize("error", FIRST_FAILURE)
def test_nothing_is_made_again_after_the_clients_first_byte(error):
    for attempts in range(1, MAX_ATTEMPTS + 1):
        assert after(error("x"), attempts=attempts, response_started=True) is Retry.NO


@pytest.mark.parametrize("error", FIRST_FAILURE)
@pytest.mark.parametrize("attempts", [MAX_ATTEMPTS, MAX_ATTEMPTS + 1, 100])
def test_attempts_are_bounded(error, attempts):
    assert after(error("x"), attempts=attempts, response_started=False) is Retry.NO


def test_backends_are_tried_until_the_last_attempt():
    steps = [
        after(ConnectFailed("x"), attempts=made, response_started=False)
        for made in range(1, MAX_ATTEMPTS + 1)
    ]
    assert steps == [Retry.ELSEWHERE, Retry.ELSEWHERE, Retry.NO]
