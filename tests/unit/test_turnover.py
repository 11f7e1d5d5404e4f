"""How long requests stay on a backend."""

from gateway.pools.turnover import Ends, Turnover


def test_ends_are_told_once_with_the_time_for_which_they_were_held():
    turnover = Turnover()
    turnover.give_back(100, 10.0)
    turnover.give_back(50, 40.0)
    assert turnover.ends(50.0) == Ends(150, 100 * 40.0 + 50 * 10.0)
    assert turnover.ends(60.0) == Ends(0, 0.0)
