import pytest

from gateway.pools.writing import Writing


def writing(gap_s=0.01):
    found = Writing()
    found.wrote(gap_s)
    return found


def test_a_stream_has_less_to_write_the_longer_it_writes_and_nothing_in_the_end():
    streams = writing()
    streams.begins(5.0, 100)
    left = [streams.left_tokens(at) for at in (5.0, 5.25, 5.5, 6.0, 7.0)]
    assert left == pytest.approx([100, 75, 50, 0, 0])


def test_while_no_stream_has_ended_nobody_knows_what_is_left():
    streams = Writing()
    streams.begins(5.0, 100)
    assert streams.left_tokens(5.0) == 0


def test_what_ended_or_was_seen_by_a_scrape_has_nothing_left():
    streams = writing()
    streams.begins(5.0, 100)
    streams.begins(5.5, 200)
    streams.ends(5.0, 100)
    assert streams.left_tokens(6.0) == pytest.approx(150)
    streams.scraped()
    assert streams.left_tokens(6.0) == 0


def test_the_pace_follows_the_latest_streams():
    streams = writing(0.01)
    for _ in range(50):
        streams.wrote(0.02)
    streams.begins(5.0, 100)
    assert streams.left_tokens(6.0) == pytest.approx(50, abs=1)


def test_a_stream_that_came_in_one_piece_tells_no_pace():
    streams = writing(0.0)
    streams.begins(5.0, 100)
    assert streams.left_tokens(5.0) == 0
