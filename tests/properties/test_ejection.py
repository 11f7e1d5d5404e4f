"""Whatever backends answer and however they come and go: who is left out, and who is tried."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.endings import Ending
from gateway.core.types import Phase
from tests.unit.test_ejection import Pool

SERVING = {Phase.READY, Phase.DEGRADED}
names = st.integers(1, 5).map(lambda number: f"b{number}")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("fails"), names, st.integers(1, 12)),
        st.tuples(st.just("works"), names, st.integers(1, 12)),
        st.tuples(st.just("down"), names, st.just(0)),
        st.tuples(st.just("passes"), names, st.just(0)),
        st.tuples(st.just("later"), names, st.sampled_from([1, 5, 30, 60, 300])),
        st.tuples(st.just("send"), names, st.just(0)),
        st.tuples(st.just("end"), st.sampled_from([None, *Ending]), st.integers(0, 20)),
        st.tuples(st.just("leave"), names, st.integers(0, 20)),
    ),
    max_size=40,
)


def walk(pool, steps):
    """Do what the steps say, and yield after each the slots that are out."""
    slots = []
    for what, which, number in steps:
        if what == "later":
            pool.later(number)
        elif what == "end" and slots:
            pool.ends(slots.pop(number % len(slots)), which)
        elif what == "leave" and slots:
            slots.pop(number % len(slots)).release()
        elif isinstance(which, str) and pool[which] is not None:
            if what == "fails":
                pool.fails(which, number)
            elif what == "works":
                for _ in range(number):
                    pool.attempt(which)
            elif what == "down":
                pool.down(which)
            elif what == "passes":
                pool.passes(which)
            elif what == "send" and (backend := pool.chooser.find(pool.asks(), pool.clock.at)):
                slots.append(pool.table.take(backend.id, pool.clock.at))
        yield slots


@given(st.integers(1, 5), steps)
def test_never_more_than_half_of_a_pool_is_left_out_on_soft_evidence(size, steps):
    pool = Pool(size)
    for _ in walk(pool, steps):
        members = pool.table.backends("m")
        out = [each for each in members if each.kept_out]
        left = [each for each in members if each.phase in SERVING and not each.health.ejection]
        assert 2 * len(out) <= size
        assert not out or 2 * len(left) >= size
        if 2 * len(left) < size:  # panic: all that serve may be chosen
            assert not any(each.kept_out for each in members)
        if size == 1:
            assert members[0].health.ejection is None


@given(st.integers(2, 5), steps)
def test_a_backend_on_probation_gets_one_request_at_a_time_or_in_half_a_minute(size, steps):
    """Of those that were chosen since it is on probation, and are still under way."""
    pool, since = Pool(size), {}
    for slots in walk(pool, steps):
        for backend in pool.table:
            if backend.probation is None or not backend.kept_out:
                since.pop(backend.id, None)
            else:
                began = since.setdefault(backend.id, list(map(id, slots)))
                new = [
                    each
                    for each in slots
                    if each.backend_id == backend.id and id(each) not in began
                ]
                began_at = sorted(each.taken_at for each in new)
                assert all(after - at >= 30 for at, after in itertools.pairwise(began_at))
                assert all(map(backend.tries, backend.probation.slots.values()))


@given(st.integers(2, 5), steps)
def test_whoever_is_left_out_is_tried_again_in_time_and_comes_back_when_it_works(size, steps):
    pool = Pool(size)
    for left in [*walk(pool, steps)][-1:]:
        for slot in left:
            slot.release()
    for _ in range(40):
        pool.later(10)
        for backend in pool.table:
            pool.passes(backend.name)
            if backend.probation is not None or backend.health.ejection is None:
                pool.attempt(backend.name)
    assert {each.phase for each in pool.table} == {Phase.READY}
    assert not any(each.kept_out for each in pool.table)
