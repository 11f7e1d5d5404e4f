"""How long a backend may be quiet, and how long a test request may take there."""

import math

import pytest

from gateway.core.types import LoadSample
from gateway.pools.pulse import Pulse, Waits


def pulse(**more):
    return Pulse(**({"sees_steps": True} | more))


def waiting(since, *, heard_at=-math.inf, streams=True, tokens=None):
    unread = () if tokens is None else ((since, tokens),)
    return Waits(heard_at, since, since if streams else math.inf, unread)


def test_it_is_quiet_from_the_last_sign_of_life_or_since_somebody_waits():
    it = pulse()
    assert it.quiet_s(100.0) == 0  # nobody waits
    it.listen(waiting(90.0), 100.0)
    assert it.quiet_s(100.0) == 10
    it.stepped(97.0)
    assert it.quiet_s(100.0) == 3
    it.listen(waiting(90.0, heard_at=98.0), 100.0)
    assert it.quiet_s(100.0) == 2
    assert it.moved_at == 98.0
    it.forgive(100.0)
    assert it.quiet_s(100.0) == 0


def test_usual_silences_make_it_patient_and_are_forgotten_in_time():
    it = pulse()
    assert it.patience_s(None) == 4
    it.listen(waiting(90.0), 96.0)
    it.stepped(96.0)  # six seconds without a sign, and then one
    assert it.patience_s(None) == 12
    it.listen(waiting(96.0), 400.0)
    it.stepped(400.0)  # a freeze that ended does not become the usual
    assert it.patience_s(None) == 20
    it.listen(Waits(), 4000.0)
    it.stepped(4000.0)
    assert it.patience_s(None) == 4


def test_without_metrics_only_streams_are_expected_to_say_something_and_have_longer():
    it = pulse(sees_steps=False)
    it.listen(waiting(90.0, streams=False), 190.0)
    assert it.quiet_s(190.0) == 0
    it.listen(waiting(90.0), 190.0)
    assert it.quiet_s(190.0) == 100
    assert it.patience_s(None) == 15


def test_one_that_starts_slowly_compiles_its_kernels_and_may_be_quiet_for_longer():
    assert pulse(starts=True).patience_s(None) == 15


def test_a_prompt_that_may_be_read_now_has_the_time_that_its_size_needs():
    it = pulse()
    it.stepped(100.0)
    unread = ((99.0, 8_000), (100.5, 20_000), (102.0, 90_000))
    it.listen(Waits(oldest_at=99.0, oldest_stream_at=99.0, unread=unread), 110.0)
    assert it.reading_s(10_000.0) == 4 * 20_000 / 10_000  # the last was sent into the silence
    assert it.reading_s(None) == 20_000 / 100
    assert it.patience_s(10_000.0) == 4 + 8
    it.listen(Waits(heard_at=111.0), 111.0)
    assert it.reading_s(None) == 0


def test_a_test_request_waits_behind_all_that_is_there():
    it = pulse()
    assert it.canary_s(10.0, None, queues=True) == 10
    it.listen(waiting(90.0, tokens=3_000), 93.0)
    it.stepped(100.0)
    it.listen(waiting(90.0, tokens=3_000), 102.0)
    assert it.canary_s(10.0, 1_000.0, queues=False) == 10 + 4 * 3
    assert it.canary_s(10.0, 1_000.0, queues=True) == 10 + 4 * 3 + 2 * 12
    it.listen(waiting(90.0, tokens=3_000), 900.0)  # of a wait without any sign nothing is learnt
    assert it.canary_s(10.0, 1_000.0, queues=True) == 10 + 4 * 3 + 2 * 12


@pytest.mark.parametrize(
    ("after_s", "seen", "held_up"),
    [
        (1.0, {}, False),
        (1.0, {"waiting": 1}, True),
        (1.0, {"preemptions": 8.0}, True),
        (3.5, {}, True),  # nobody looked meanwhile
    ],
)
def test_whether_an_engine_kept_requests_waiting(after_s, seen, held_up):
    def sample(at, waiting=0, preemptions=7.0):
        return LoadSample(at, 4, waiting, 0.1, preemptions=preemptions)

    it, before = pulse(), sample(100.0)
    it.scraped(None, before, 3.0, 4)
    assert it.held_up_at == 100.0  # what was before, nobody knows
    it.scraped(before, sample(100.0 + after_s, **seen), 3.0, 4)
    assert it.held_up_at == 100.0 + (after_s if held_up else 0)
