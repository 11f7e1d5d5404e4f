import pytest

from gateway.admission.forecast import Drain, Promises
from gateway.admission.needs import DEFAULT_OUTPUT_TOKENS, Outputs

# --- output length --------------------------------------------------------------------------------


def test_nothing_known_is_expected_to_be_the_default():
    assert Outputs().expect("m", "k") == DEFAULT_OUTPUT_TOKENS


def test_no_more_is_expected_than_may_be_written():
    assert Outputs().expect("m", "k", max_new_tokens=16) == 16


def test_the_mean_of_a_key_is_learnt_and_follows_a_change():
    outputs = Outputs()
    for length in (50, 1000):
        for _ in range(60):
            outputs.ended("m", "k", length)
        assert outputs.expect("m", "k") == pytest.approx(length, rel=0.05)


def test_a_new_key_is_expected_to_do_as_its_model_does():
    outputs = Outputs()
    for _ in range(60):
        outputs.ended("m", "old", 40)
    assert outputs.expect("m", "new") == pytest.approx(40, rel=0.1)
    assert outputs.expect("other", "new") == DEFAULT_OUTPUT_TOKENS


def test_one_odd_reply_of_a_new_key_says_little():
    outputs = Outputs()
    for _ in range(60):
        outputs.ended("m", "old", 100)
    outputs.ended("m", "new", 4000)
    assert outputs.expect("m", "new") < 2500


def test_a_cut_output_only_ever_raises_what_is_expected():
    outputs = Outputs()
    before = outputs.expect("m", "k")
    for _ in range(20):
        outputs.cut("m", "k", 3)
    assert outputs.expect("m", "k") == before
    for _ in range(20):
        outputs.cut("m", "k", 2000)
    assert before < outputs.expect("m", "k") <= 2000


def test_keys_are_bounded_and_the_least_recent_goes_first_but_not_its_model():
    outputs = Outputs(most=3)
    for key, length in (("first", 10), ("second", 5000), ("third", 50)):
        for _ in range(60):
            outputs.ended("m", key, length)
    assert outputs.expect("m", "second") > 4000
    assert outputs.expect("m", "first") == outputs.expect("m", "never seen") < 100


# --- drain ----------------------------------------------------------------------------------------


def drain_of(*backends):
    """Return the drain of a pool whose backends all serve."""
    drain = Drain()
    drain.follow(dict.fromkeys(backends or ("a",), True))
    return drain


def passed(drain, seconds, tokens, held_tokens=0, token_s=0.0):
    """Let so many tokens end at its first backend."""
    drain.passed(seconds, {"a": tokens}, held_tokens, token_s)


def drained(drain, seconds, tokens_per_s=1000):
    """Let so many tokens end each second under steady work, told twice a second."""
    for _ in range(2 * seconds):
        passed(drain, 0.5, tokens_per_s // 2)


def test_a_pool_that_gave_nothing_back_has_no_rate():
    drain = drain_of()
    assert drain.eta_s(100) is None
    passed(drain, 60.0, 0)
    assert drain.eta_s(100) is None


def test_the_rate_is_what_ends_per_second():
    drain = drain_of()
    drained(drain, 30)
    assert drain.tokens_per_s == pytest.approx(1000, rel=0.05)
    assert drain.eta_s(5000) == pytest.approx(5, rel=0.05)


def test_the_first_second_tells_no_rate():
    drain = drain_of()
    passed(drain, 0.5, 10_000)
    assert drain.tokens_per_s is None
    passed(drain, 0.75, 0)
    assert drain.tokens_per_s is not None


def test_work_that_does_not_end_makes_the_rate_fall():
    drain = drain_of()
    drained(drain, 30)
    before_s = drain.eta_s(5000)
    drained(drain, 20, 0)
    assert drain.eta_s(5000) > 3 * before_s


def test_what_ends_in_all_is_the_least_that_a_pool_drains():
    drain = drain_of()
    for _ in range(20):  # short queues, while prompts are read, in which little ends
        passed(drain, 1.0, 200)
        for _ in range(8):
            drain.rested(0.5, {"a": 600})
    assert drain.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_what_ended_while_nobody_waited_tells_no_rate():
    drain = drain_of()
    drain.rested(60.0, {"a": 60_000})
    assert drain.tokens_per_s is None


def test_the_rate_follows_a_change_within_seconds():
    drain = drain_of()
    drained(drain, 60, 10_000)
    drained(drain, 20, 1000)
    assert 1000 < drain.tokens_per_s < 2500


@pytest.mark.parametrize(
    ("ahead", "u", "wait_s"),
    [
        (0, 0.0, 1.0),
        (0, 0.5, 1.15),
        (10_000, 0.0, 10.0),
        (10_000, 0.5, 11.5),
        (10**6, 0.0, 30 / 1.3),
        (10**6, 1.0, 30.0),
    ],
)
def test_retry_after_is_the_jittered_wait_within_bounds(ahead, u, wait_s):
    drain = drain_of()
    drained(drain, 60)
    assert drain.retry_after_s(ahead, u) == pytest.approx(wait_s, rel=0.05)


def test_retry_after_has_an_answer_when_no_rate_is_known():
    assert drain_of().retry_after_s(10**6, 0.0) == 5.0


# --- promises -------------------------------------------------------------------------------------


def test_a_promise_holds_until_it_is_kept():
    promises = Promises()
    promises.made("a", 300)
    promises.made("a", 200)
    promises.made("b", 50)
    assert (promises.of("a"), promises.of("b"), promises.tokens, len(promises)) == (500, 50, 550, 2)
    promises.kept("a", 300)
    promises.kept("b", 60)  # was estimated anew meanwhile
    promises.kept("c", 10)
    assert (promises.of("a"), promises.of("b"), promises.tokens, len(promises)) == (200, 0, 200, 1)


def test_who_comes_again_as_told_is_known_until_all_have_come():
    promises = Promises()
    assert not promises.kept("a", 100)
    for _ in range(3):
        promises.made("a", 100)
    promises.passed(30.0)  # what is expected of them fades, for some never come
    assert [promises.kept("a", 100) for _ in range(4)] == [True, True, True, False]


def test_a_promise_that_nobody_keeps_fades():
    promises = Promises()
    promises.made("a", 1000)
    promises.passed(30.0)
    assert promises.of("a") == promises.tokens == pytest.approx(368, abs=1)
    promises.passed(300.0)
    assert (promises.tokens, len(promises)) == (0, 0)


def test_promises_are_bounded_and_the_least_recent_goes_first():
    promises = Promises(most=2)
    for tenant in ("a", "b", "a", "c"):
        promises.made(tenant, 100)
    assert [promises.of(tenant) for tenant in "abc"] == [200, 0, 100]
    assert (promises.tokens, len(promises)) == (300, 2)


def test_what_a_pool_drained_is_forgotten_when_nobody_waited_for_minutes():
    drain = drain_of()
    for _ in range(60):
        passed(drain, 0.5, 500)
    for _ in range(120):
        drain.rested(0.5, {})
    assert drain.tokens_per_s == pytest.approx(1000)
    for _ in range(180):
        drain.rested(0.5, {})
    assert drain.tokens_per_s is None


def test_of_a_burst_the_first_end_is_no_slow_drain():
    drain = drain_of()
    for second in range(10):
        passed(drain, 1.0, 100 if second == 9 else 0, held_tokens=1000)
    assert drain.tokens_per_s is None
    passed(drain, 1.0, 400, held_tokens=900)
    assert drain.tokens_per_s is not None


def test_what_is_held_drains_in_the_time_for_which_requests_are_held():
    drain = drain_of()
    for _ in range(2):  # eight requests of 100 tokens begin and end together, each after 25 s
        for second in range(25):
            passed(drain, 1.0, 800 if second == 24 else 0, 800, 800 * 25.0)
    passed(drain, 20.0, 0, 800)
    assert drain.eta_s(700) == pytest.approx(700 * 25 / 800)
    passed(drain, 8.0, 0, 800)
    assert drain.eta_s(700) == pytest.approx(700 * 25 / 800)


def test_a_drain_is_remembered_for_as_long_as_requests_stay():
    drain = drain_of()
    rates = []
    for _ in range(6):  # eight requests of 100 tokens begin and end together, each after 40 s
        for second in range(40):
            passed(drain, 1.0, 800 if second == 39 else 0, 800, 800 * 40.0)
            rates.append(drain.tokens_per_s or 0.0)
    assert max(rates[80:]) < 3.5 * min(rates[80:])  # over 10 s it would vary by fifty times
    assert drain.memory_s == pytest.approx(40.0)
    for _ in range(3):
        passed(drain, 1.0, 800, 800, 800 * 600.0)
    assert drain.memory_s == 60.0


def test_a_drain_is_probably_more_until_what_runs_has_ended_once_and_a_half_times():
    drain = drain_of()
    assert drain.probable_per_s is None
    for _ in range(14):
        passed(drain, 0.5, 500, held_tokens=5000)
    assert drain.probable_per_s == pytest.approx(1.15 * drain.tokens_per_s)
    passed(drain, 0.5, 500, held_tokens=5000)
    assert drain.probable_per_s == drain.tokens_per_s == pytest.approx(1000)


def test_a_backend_that_is_lost_takes_its_part_of_the_rate_with_it_and_brings_it_back():
    drain = drain_of("a", "b")
    for _ in range(60):
        drain.passed(0.5, {"a": 500, "b": 1500})
    drain.follow({"a": True, "b": False})
    assert drain.tokens_per_s == pytest.approx(1000)
    drain.passed(10.0, {"a": 10_000})
    drain.follow({"a": True, "b": True})
    assert drain.tokens_per_s == pytest.approx(4000)
    drain.follow({"a": True})
    drain.follow({"a": True, "b": True})  # another by its name
    assert drain.tokens_per_s == pytest.approx(1000)


def rests(drain, seconds, stay_s, held_tokens=1000):
    """Let nobody wait while so many tokens are held, each for so long."""
    tokens = round(held_tokens / stay_s)
    for _ in range(seconds):
        drain.rested(1.0, {"a": tokens}, held_tokens, tokens * stay_s)


def test_before_the_rate_is_known_it_is_at_most_what_is_held_over_how_long_requests_stayed():
    drain = drain_of()
    rests(drain, 30, 5.0)
    assert drain.most_per_s is None  # nobody waits: what ends is what comes
    passed(drain, 0.5, 0, 1500)
    assert (drain.tokens_per_s, drain.eta_s(600)) == (None, None)
    assert drain.most_per_s == pytest.approx(300)
    assert drain.retry_after_s(3000, 0.0) == pytest.approx(10.0)
    rests(drain, 1, 5.0)
    assert drain.most_per_s is None
    for _ in range(10):
        passed(drain, 0.5, 125, 1500, 125 * 6.0)
    assert drain.most_per_s == drain.tokens_per_s == pytest.approx(250, rel=0.1)


def test_how_long_requests_stayed_while_there_was_room_tells_not_when_those_that_wait_have_their_turn():
    drain = drain_of()
    rests(drain, 30, 1.0, held_tokens=200)
    for _ in range(20):
        passed(drain, 0.5, 100, 3000, 100 * 15.0)
    assert drain.eta_s(1000) == pytest.approx(5.0)
    for _ in range(20):
        passed(drain, 0.5, 100, 3000, 100 * 15.0)
    assert drain.eta_s(1000) < 5.0


def test_how_long_requests_stayed_is_forgotten_when_none_came_for_minutes():
    drain = drain_of()
    rests(drain, 30, 5.0)
    for _ in range(300):
        drain.rested(1.0, {})
    passed(drain, 0.5, 0, 1000)
    assert drain.most_per_s is None
