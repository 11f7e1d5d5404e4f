"""The judges: what shows over time that a backend is ill though it serves."""

import pytest

from gateway.core.types import LoadSample
from gateway.heal.decisions import Cause
from gateway.heal.judges import Errors, Judges, Memory, Pace
from gateway.pools.facts import Accused, Ejection

GIB = 1 << 30

# --- throughput -----------------------------------------------------------------------------------


class Bench:
    """Backends scraped each second; `run` lets them work and returns when each was found slow."""

    def __init__(self, count):
        self.paces = [Pace() for _ in range(count)]
        self.progress = [0.0] * count
        self.now = 0.0

    def run(self, minutes, *works, warm=True, ratio=0.3):
        """Each of `works` is (running, tokens per second) of one backend."""
        found = [None] * len(works)
        for second in range(int(minutes * 60)):
            self.now += 1.0
            for place, (running, rate) in enumerate(works):
                self.progress[place] += rate
                sample = LoadSample(self.now, running, 0, None, progress=self.progress[place])
                self.paces[place].observe(sample, warm=warm)
            for place, pace in enumerate(self.paces):
                peers = [each for each in self.paces if each is not pace]
                sign = pace.judge(peers, ratio, self.now)
                if sign is not None and found[place] is None:
                    found[place] = second / 60
        return found

    def signs(self):
        peers = [[each for each in self.paces if each is not pace] for pace in self.paces]
        judged = zip(self.paces, peers, strict=True)
        return [pace.judge(others, 0.3, self.now) for pace, others in judged]


WELL, SLOW = (16, 200.0), (16, 40.0)


def test_a_collapse_after_half_an_hour_without_errors_is_found_within_minutes():
    bench = Bench(3)
    assert bench.run(30, WELL, WELL, WELL) == [None] * 3
    found = bench.run(10, SLOW, WELL, WELL)
    assert found[1:] == [None, None]
    assert 4 <= found[0] <= 6.1
    evidence = bench.signs()[0].evidence
    assert "40 tokens/s with 16 running" in evidence
    assert "and its peers' 200" in evidence


def test_its_queue_grows_while_it_collapses_and_its_peers_have_less_to_do():
    bench = Bench(3)
    bench.run(30, WELL, WELL, WELL)
    assert bench.run(10, (90, 40.0), (10, 180.0), (10, 180.0))[0] is not None


def test_its_limit_was_cut_and_its_peers_have_more_to_do():
    bench = Bench(3)
    bench.run(30, WELL, WELL, WELL)
    assert bench.run(10, (8, 20.0), (20, 220.0), (20, 220.0))[0] is not None


def test_little_load_is_no_collapse():
    bench = Bench(2)
    bench.run(30, (64, 800.0), (64, 800.0))
    assert bench.run(30, (3, 2.0), (64, 800.0)) == [None, None]
    assert bench.run(30, (5, 60.0), (64, 800.0)) == [None, None], "few run, each as fast as ever"
    assert bench.run(30, (0, 0.0), (64, 800.0)) == [None, None]


def test_when_all_slow_down_together_it_is_the_workload():
    bench = Bench(3)
    bench.run(60, WELL, WELL, WELL)
    assert bench.run(60, SLOW, SLOW, SLOW) == [None] * 3


def test_one_that_was_always_slower_than_its_peers_is_not_collapsed():
    bench = Bench(3)
    assert bench.run(60, SLOW, WELL, WELL) == [None] * 3


def test_peers_without_work_leave_it_open():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    bench.run(4, (0, 0.0), (0, 0.0))
    assert bench.run(30, SLOW, (0, 0.0)) == [None, None]


def test_a_pool_of_one_is_judged_by_its_past_alone_and_more_strictly():
    bench = Bench(1)
    bench.run(30, WELL)
    assert bench.run(30, (16, 40.0)) == [None]
    found = bench.run(30, (16, 20.0))
    assert 9 <= found[0] <= 11.1


def test_it_has_to_stay_slow():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    for _ in range(10):
        assert bench.run(4, SLOW, WELL) == [None, None]
        assert bench.run(2, WELL, WELL) == [None, None]


def test_one_that_recovers_is_forgiven():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    bench.run(10, SLOW, WELL)
    assert bench.signs()[0] is not None
    bench.run(3, WELL, WELL)
    assert bench.signs() == [None, None]


def test_what_was_seen_long_ago_is_not_held_against_it():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    bench.run(10, SLOW, WELL)
    bench.now += 200
    assert bench.signs() == [None, None]
    assert bench.run(4, SLOW, WELL) == [None, None], "the minutes from before the gap are gone"


def test_a_slow_decline_does_not_become_the_usual():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    found = None
    for minute in range(60):
        rate = max(40.0, 200.0 - 5 * minute)
        found = found or bench.run(1, (16, rate), WELL)[0]
    assert found is not None


def test_while_it_starts_slowly_nothing_is_judged_or_learnt():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    assert bench.run(30, SLOW, WELL, warm=False) == [None, None]
    bench.run(3, SLOW, WELL)
    bench.run(1, SLOW, WELL, warm=False)
    assert bench.run(4, SLOW, WELL) == [None, None]


def test_nothing_is_said_before_its_usual_pace_is_known():
    bench = Bench(2)
    bench.run(3, WELL, WELL)
    assert bench.run(30, SLOW, WELL) == [None, None]


def test_counters_of_a_new_process_begin_a_new_past():
    bench = Bench(2)
    bench.run(30, WELL, WELL)
    bench.run(10, SLOW, WELL)
    bench.progress[0] = 0.0
    assert bench.run(30, SLOW, WELL) == [None, None]


def test_scrapes_that_are_missing_or_late_are_left_out():
    pace, other = Pace(), Pace()
    now = progress = 0.0
    for turn in range(3000):
        step = 25.0 if turn % 40 == 0 else 1.0  # in a gap it may have stood still, and so may we
        now += step
        progress += 200.0 if step == 1.0 else 0.0
        for each in (pace, other):
            each.observe(LoadSample(now, 16, 0, None, progress=progress), warm=True)
            each.observe(LoadSample(now, 16, 0, None, progress=progress), warm=True)
        assert pace.judge([other], 0.3, now) is None
    assert pace.recent.tokens_per_s == pytest.approx(200.0)


def test_the_state_of_a_pace_is_bounded():
    pace = Pace()
    for second in range(20_000):
        running = second * 7919 % 100_000
        pace.observe(LoadSample(float(second), running, 0, None, progress=second), warm=True)
    assert len(pace._usual) <= 17


# --- errors ---------------------------------------------------------------------------------------


def served(failures, oks, at=1000.0):
    errors = Errors()
    for _ in range(oks):
        errors.observe(at, failed=False)
    for _ in range(failures):
        errors.observe(at, failed=True)
    return errors


def test_most_requests_that_fail_are_a_sign():
    sign = served(8, 8).judge([], 1000.0)
    assert (sign.cause, "8 of 16" in sign.evidence) == (Cause.ERRORS, True)
    assert served(7, 9).judge([], 1000.0) is None


def test_a_few_requests_prove_nothing():
    assert served(9, 0).judge([], 1000.0) is None
    assert served(10, 0).judge([], 1000.0) is not None


def test_when_its_peers_fail_too_it_is_not_this_one():
    assert served(16, 0).judge([served(9, 7)], 1000.0) is None
    assert served(16, 0).judge([served(1, 15)], 1000.0) is not None
    assert served(16, 0).judge([served(9, 0)], 1000.0) is not None, "too few to say so"


def test_failures_are_forgotten_when_no_more_come():
    errors = served(16, 0)
    assert errors.judge([], 1060.0) is not None
    assert errors.judge([], 1061.0) is None
    for second in range(2000, 2020):
        errors.observe(float(second), failed=False)
    assert errors.counts(2020.0) == (20, 0)


@pytest.mark.parametrize(("times", "found"), [(0, False), (2, False), (3, True), (4, True)])
def test_one_whose_trials_fail_is_found_though_it_gets_few_requests(times, found):
    ejection = Ejection(Accused.IN_A_ROW, "5 requests failed", times, 0.0) if times else None
    signs = Judges().found([], 0.0, 1000.0, ejection)
    assert (Cause.ERRORS in signs) is found
    if found:
        told = f"5 requests failed; {times - 1} trials after it failed too"
        assert signs[Cause.ERRORS].evidence == told


def test_the_state_of_errors_is_bounded_and_its_window_moves():
    errors = Errors()
    for second in range(10_000):
        errors.observe(float(second), failed=second < 9800)
    assert errors.counts(9999.0) == (300, 100)
    assert len(errors._slots) == 30


# --- memory ---------------------------------------------------------------------------------------


def test_memory_over_its_limit_for_half_a_minute_is_a_sign():
    memory = Memory()
    for at in range(0, 30, 10):
        memory.observe(float(at), 9 * GIB, 8 * GIB)
        assert memory.judge() is None
    memory.observe(30.0, 9 * GIB, 8 * GIB)
    assert memory.judge().cause is Cause.MEMORY
    assert "9.0 GiB" in memory.judge().evidence


def test_a_peak_of_memory_or_a_gap_is_none():
    memory = Memory()
    for at in range(0, 300, 10):
        memory.observe(float(at), (9 if at % 30 else 7) * GIB, 8 * GIB)
        assert memory.judge() is None
    memory = Memory()
    memory.observe(0.0, 9 * GIB, 8 * GIB)
    memory.observe(100.0, 9 * GIB, 8 * GIB)
    assert memory.judge() is None
    memory.observe(100.0, 9 * GIB, None)
    assert memory.judge() is None
