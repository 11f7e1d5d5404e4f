"""What several workers saw of callers, put together."""

from gateway.ops.callers import Callers, together


def test_what_workers_saw_adds_up_and_the_longest_silence_counts():
    one = Callers({"a": 2}, {"a": "first"}, {"a": 1}, {"a": 7.0, "b": 9.0}, 1, "no model x")
    two = Callers({"a": 3, "b": 1}, {"a": "second", "b": "third"}, {}, {"a": 8.0}, 2, "no model y")
    assert together([one, two]) == Callers(
        over_limit={"a": 5, "b": 1},
        why_over={"a": "first", "b": "third"},
        stalled={"a": 1},
        slow={"a": 8.0, "b": 9.0},
        unknown_models=3,
        unknown_model="no model x",
    )


def test_one_worker_alone_is_what_it_saw():
    one = Callers({"a": 2}, {"a": "first"}, {"a": 1}, {"a": 7.0}, 1, "no model x")
    assert together([one]) == one
    assert together([]) == Callers()
