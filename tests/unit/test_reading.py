"""How much of prompts may be unread: by what an engine reads together, not by how long one takes alone."""

import pytest

from gateway.pools.reading import Reading

PROMPT = 128
ANSWERS_S = 0.05  # an engine that answers so late, and reads as much as comes


def served(reading, count, at):
    """Have an engine with nothing else to do read `count` prompts in one step."""
    reading.comes(at, 0)
    now = at + ANSWERS_S
    for left in reversed(range(count)):
        reading.first_token(now, now - at, PROMPT, left * PROMPT)


def test_a_few_short_prompts_go_together_whatever_one_takes():
    reading = Reading()
    assert reading.ahead_tokens(0.0) == float("inf")
    served(reading, 1, 0.0)
    assert reading.ahead_tokens(1.0) == 512


def test_an_engine_that_answers_late_shows_how_much_it_reads_at_a_time():
    reading = Reading()
    served(reading, 1, 0.0)
    for turn in range(1, 8):
        served(reading, int(reading.ahead_tokens(float(turn)) // PROMPT), float(turn))
    assert 100 * PROMPT < reading.ahead_tokens(8.0) < 10_000 * PROMPT


@pytest.mark.parametrize("count", [1, 5, 50])
def test_what_a_saturated_engine_reads_is_not_taken_for_more(count):
    reading, per_s = Reading(), 10_000
    now = 0.0
    reading.comes(now, 0)
    for number in range(400):  # one after the other, `count` at a time before it
        now += PROMPT / per_s
        reading.first_token(now, count * PROMPT / per_s, PROMPT, min(count, 400 - number) * PROMPT)
    assert reading.rate.at(now) == pytest.approx(per_s, rel=0.01)
    assert reading.ahead_tokens(now) <= per_s * 0.05 + count * PROMPT


def test_less_is_ahead_beside_the_highest_class():
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)
    assert reading.ahead_tokens(0.0) == 5_000
    assert reading.ahead_tokens(0.0, beside_highest=True) == 1_500
