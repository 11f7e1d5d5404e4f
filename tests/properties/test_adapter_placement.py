"""Whatever is wanted of whichever backends: placement keeps to their room, and comes to rest."""

from collections import Counter
from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from gateway.adapters.placement import Place, Wanted, fit_everywhere, plan

NAMES = [f"a{number}" for number in range(8)]
IDS = [f"m/b{number}" for number in range(4)]

names = st.frozensets(st.sampled_from(NAMES), max_size=5)


@st.composite
def wants(draw):
    return [
        Wanted(
            name,
            copies=draw(st.none() | st.integers(1, 3)),
            pins=draw(st.frozensets(st.sampled_from(IDS), max_size=1)),
            demand=draw(st.sampled_from([0.0, 0.02, 0.5, 1.0, 4.0, 20.0])),
            waits_since=draw(st.none() | st.sampled_from([1.0, 2.0])),
            fresh=draw(st.booleans()),
            weight=draw(st.sampled_from([8.0, 64.0])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]


@st.composite
def fleets(draw):
    found = []
    for each in draw(st.lists(st.sampled_from(IDS), unique=True)):
        room, held = draw(st.none() | st.integers(0, 6)), sorted(draw(names))
        kept = frozenset(held if room is None else held[:room])
        ours = frozenset(draw(st.sets(st.sampled_from(sorted(kept))))) if kept else frozenset()
        stale = frozenset(draw(st.sets(st.sampled_from(sorted(ours))))) if ours else frozenset()
        in_use = frozenset(draw(st.sets(st.sampled_from(sorted(kept))))) if kept else frozenset()
        barred = dict.fromkeys(draw(st.sets(st.sampled_from(NAMES), max_size=2)), "its rank")
        found.append(
            Place(each, room, kept, stale=stale, ours=ours, failed=draw(names), in_use=in_use, barred=barred, closed=draw(st.booleans()),
                  reserve=draw(st.booleans()), rested=draw(st.booleans()), load_s=draw(st.sampled_from([0.0, 0.1, 3.0])))
        )  # fmt: skip
    return found


def spare(wanted, place, places):
    """Whether a copy there is none of those that are wanted, as requests go elsewhere."""
    alone = all(each.reserve for each in places)
    return place.reserve and not alone and place.id not in wanted.pins


def done(move, place):
    """Return the place after its move."""
    gone, come = {move.unload} - {None}, {move.load} - {None}
    return replace(
        place,
        held=place.held - gone | come,
        ours=place.ours - gone | come,
        stale=place.stale - gone,
    )


def all_done(moves, places):
    by_place = {each.place: each for each in moves}
    return [done(by_place[each.id], each) if each.id in by_place else each for each in places]


def at_rest(wanted, places):
    """Carry out plans until there is nothing to do, and return where that ends.

    What was loaded is waited for no more, and fresh.
    """
    for _ in range(200):
        moves = plan(wanted, places)
        if not moves:
            return wanted, places
        loaded = {move.load for move in moves}
        wanted = [
            replace(each, waits_since=None, fresh=True) if each.name in loaded else each
            for each in wanted
        ]
        places = all_done(moves, places)
    raise AssertionError("it never comes to rest")


@given(wants(), fleets())
def test_what_a_plan_does_is_allowed(wanted, places):
    by_id, known = {each.id: each for each in places}, {each.name: each for each in wanted}
    moves = plan(wanted, places)
    assert max(Counter(each.place for each in moves).values(), default=0) <= 1
    for move in moves:
        place = by_id[move.place]
        after = done(move, place)
        event("replaces" if move.unload and move.load else "one way")
        assert not place.closed
        reloads = move.load is not None and move.load == move.unload
        if reloads:
            assert move.load in place.stale
            assert sum(each.unload == move.unload for each in moves) == 1  # one copy at a time
        if move.load is not None:
            assert move.load in known
            assert reloads or move.load not in place.held
            assert move.load not in place.barred
            assert reloads or place.room is None or len(after.held) <= place.room
        if move.unload is not None:
            assert move.unload in place.ours
            waited = move.load is not None and known[move.load].waits_since is not None
            assert waited or reloads or move.unload not in place.in_use
            each = known.get(move.unload)
            assert reloads or each is None or place.id not in each.pins


@given(wants(), fleets())
def test_it_comes_to_rest_and_stays_there(wanted, places):
    assert plan(*at_rest(wanted, places)) == []


@given(wants(), fleets())
def test_at_rest_everything_is_where_it_was_asked_for_or_cannot_be(wanted, places):
    calm = [replace(each, closed=False, rested=True, in_use=frozenset()) for each in places]
    wanted, rested = at_rest(wanted, calm)
    firm = {each.name for each in wanted if each.copies is not None or each.pins}
    for each in wanted:
        counted = [place for place in rested if not spare(each, place, rested)]
        holders = [place for place in counted if each.name in place.held]
        lacking = [
            place
            for place in counted
            if each.name not in place.held and each.name not in place.barred
        ]
        for place in lacking:
            pinned = place.id in each.pins
            if not pinned and (each.copies is None or len(holders) >= each.copies):
                continue
            # Only what nobody may move is in its way.
            in_the_way = place.held & place.ours - firm - {w.name for w in wanted if w.fresh}
            assert not place.free
            assert not in_the_way
        if each.copies is not None:
            most = max(each.copies, len(each.pins))
            anywhere = [place for place in rested if each.name in place.held]
            ours = [place for place in anywhere if each.name in place.ours]
            movable = [place for place in ours if place.id not in each.pins]
            assert len(holders) <= most or not any(place in holders for place in movable)
            assert len(anywhere) <= most or all(place in holders for place in movable)


@given(wants(), fleets())
def test_where_all_fit_everything_is_everywhere(wanted, places):
    auto = [replace(each, copies=None) for each in wanted]
    calm = [replace(each, closed=False, rested=True, barred={}) for each in places]
    if fit_everywhere(auto, calm):
        event("all fit")
        for place in at_rest(auto, calm)[1]:
            assert {each.name for each in auto} <= place.held


@given(wants(), fleets(), st.sampled_from([0.1, 0.5, 0.9]))
def test_demand_that_fades_for_all_alike_moves_nothing(wanted, places, ratio):
    calm = [replace(each, waits_since=None) for each in wanted]
    calm, rested = at_rest(calm, places)
    assert plan([replace(each, demand=each.demand * ratio) for each in calm], rested) == []
