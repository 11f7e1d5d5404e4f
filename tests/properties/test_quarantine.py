"""A request that kills whoever works on it, sent again and again: two servers die, whatever the order of things."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_quarantine import OTHER, POISON, House

names = st.integers(1, 5).map(lambda number: f"b{number}")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("poison"), names),
        st.tuples(st.just("innocent"), names),  # whose connection breaks where the server lives
        st.tuples(st.just("later"), st.sampled_from([0.01, 0.1, 0.4])),
        st.tuples(st.just("probe"), names),
        st.tuples(st.just("revive"), names),
    ),
    max_size=60,
)


@given(steps)
def test_at_most_two_servers_die_of_one_request_and_no_other_is_refused(steps):
    house, dead, died, lost = House(5), set(), 0, []
    for what, which in steps:
        if what == "later":
            for name in lost:  # they were hurried
                house.probe(name, "refused" if name in dead else None, 0.01)
            lost.clear()
            house.pool.later(which)
            house.quarantine.tick()
        elif what == "probe":
            house.probe(which, "refused" if which in dead else None, 0.01)
        elif what == "revive" and which not in lost:  # a start takes longer than a probe
            dead.discard(which)
            house.pool.passes(which)
        elif what == "poison" and which not in dead:
            if not house.is_undecided() and not house.is_out():
                house.loses(which, POISON)
                dead.add(which)
                died += 1
                lost.append(which)
        elif what == "innocent" and which not in dead:
            assert not house.is_out(OTHER)
            house.loses(which, OTHER)
            house.probe(which, None, 0.01)
    assert died <= 2
    assert not house.is_out(OTHER)
