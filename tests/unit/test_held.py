"""When requests of a backend that is out of service end, and what those of a working one wait for."""

import math

import pytest
from msgspec import structs

from gateway.core.types import Need, Phase
from gateway.pools.pulse import Waits
from gateway.pools.table import Backend
from gateway.upstream.held import ended
from gateway.upstream.silence import ENDLESS, Silence, waits_of

NOW = 100.0
STREAM, WHOLE = Need(300, 10, streams=True), Need(70, 10)


def silent(since, need=STREAM, heard_at=None):
    silence = Silence(ENDLESS, since, need=need)
    if heard_at is not None:
        silence.broken(heard_at)
    return silence


@pytest.mark.parametrize(
    ("phase", "reason", "silent_s", "told"),
    [
        (Phase.READY, "healthy", 99.0, None),
        (Phase.DEGRADED, "silent", 99.0, None),
        (Phase.DRAINING, "restart", 99.0, None),
        (Phase.CORDONED, "cordoned", 99.0, None),
        (Phase.DOWN, "asleep", 99.0, None),
        (Phase.DOWN, "timeout", 29.0, None),  # it may be too busy to answer its probes
        (Phase.DOWN, "timeout", 30.0, "taken out of service"),
        (Phase.DOWN, "no_progress", 0.0, "taken out of service"),
        (Phase.DOWN, "frozen", 0.0, "taken out of service"),
        (Phase.STARTING, "restart", 0.0, "is being restarted"),
        (Phase.STARTING, "pending", 29.0, None),  # its service manager may let it finish
        (Phase.STARTING, "pending", 30.0, "taken out of service"),
    ],
)
def test_what_lives_is_not_cut_and_what_stands_still_holds_nobody(phase, reason, silent_s, told):
    backend = Backend("m", "b1", "http://127.0.0.1:8001")
    backend.phase, backend.reason = phase, reason
    error = ended(backend, silent(NOW - silent_s), NOW)
    assert (error is None) is (told is None)
    if error is not None:
        assert told in error.message
        assert error.code == "backend_down"


def test_before_its_first_byte_a_reply_counts_as_silent_only_since_its_backend_is_out_of_service():
    """A whole reply has its first byte at its end, which may be minutes away."""
    backend = Backend("m", "b1", "http://127.0.0.1:8001")
    backend.phase, backend.reason = Phase.DOWN, "timeout"
    backend.health = structs.replace(backend.health, since=NOW)
    assert ended(backend, silent(NOW - 60.0, WHOLE), NOW + 29.0) is None
    assert ended(backend, silent(NOW - 60.0, WHOLE), NOW + 30.0) is not None
    assert ended(backend, silent(NOW - 60.0, heard_at=NOW - 30.0), NOW) is not None


def test_a_backend_is_waited_for_by_who_has_no_byte_yet_or_waits_for_the_next():
    paused = silent(10.0)
    paused.suspend()  # its client does not read
    every = [silent(95.0), silent(90.0, WHOLE), silent(80.0, heard_at=97.0), paused]
    assert waits_of([*every, silent(1.0, need=None)], -math.inf) == Waits(
        heard_at=97.0, oldest_at=90.0, oldest_stream_at=95.0, unread=((95.0, 300), (90.0, 70))
    )
    assert waits_of([], 50.0) == Waits(heard_at=50.0)
    assert waits_of([paused], 50.0) == Waits(heard_at=50.0)
