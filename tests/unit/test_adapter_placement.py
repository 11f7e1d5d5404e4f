"""Where adapters go."""

import time
from dataclasses import replace

from gateway.adapters.placement import Move, Place, Wanted, lacks, plan
from gateway.core.exclusion import Exclusion


def place(name, room=2, held=(), **more):
    more.setdefault("ours", frozenset(held))
    return Place(f"m/{name}", room, frozenset(held), **more)


def test_while_all_fit_every_backend_gets_all_but_only_idle_ones_at_the_same_time():
    wanted = [Wanted("sql"), Wanted("fr")]
    assert plan(wanted, [place("b1"), place("b2")]) == [
        Move("m/b1", None, "sql"),
        Move("m/b2", None, "fr"),
    ]
    busy = [place("b1", load_s=2.0), place("b2", load_s=1.0)]
    assert plan(wanted, busy) == [Move("m/b2", None, "sql")]


def test_without_a_known_room_nothing_is_bounded():
    wanted = [Wanted(f"a{each}") for each in range(20)]
    held = [each.name for each in wanted[:-1]]
    assert plan(wanted, [place("b1", None, held)]) == [Move("m/b1", None, "a19")]


def test_one_that_requests_wait_for_pushes_out_the_coldest_without_requests():
    wanted = [Wanted("a", demand=5), Wanted("b", demand=0.1), Wanted("c", waits_since=1.0)]
    assert plan(wanted, [place("b1", 2, ["a", "b"])]) == [Move("m/b1", "b", "c")]
    busy = place("b1", 2, ["a", "b"], in_use=frozenset({"b"}))
    assert plan(wanted, [busy]) == [Move("m/b1", "a", "c")]
    full = place("b1", 2, ["a", "b"], in_use=frozenset({"a", "b"}))
    assert plan(wanted, [full]) == [Move("m/b1", "b", "c")]  # once it has none
    assert plan([*wanted[:2], Wanted("c", demand=99)], [full]) == []
    assert lacks(wanted, [full]) == {"m/b1": {"c": Exclusion.ADAPTER_DUE}}


def test_a_load_that_waits_for_streams_begins_where_there_is_room_and_lets_no_other_backend_drain():
    a, b, c = (frozenset({each}) for each in "abc")
    wanted = [Wanted("a"), Wanted("b", waits_since=1.0), Wanted("c")]
    first = place("b1", 1, a, in_use=a, changing=a | b, held_up=b)
    assert plan(wanted, [first, place("b2", 1, c, in_use=c)]) == []
    assert plan(wanted, [first, place("b2", 1, c)]) == [Move("m/b2", "c", "b")]
    assert plan(wanted, [first, place("b2", 2, c)]) == [Move("m/b2", None, "b")]


def test_where_nothing_may_be_loaded_beside_requests_only_what_is_waited_for_ends_them():
    a = frozenset({"a"})
    alone = place("b1", 4, ["a", "old"], in_use=a, alone=True)
    assert plan([Wanted("a"), Wanted("b")], [alone]) == []
    assert plan([Wanted("a"), Wanted("b", waits_since=1.0)], [alone]) == [Move("m/b1", None, "b")]
    idle = replace(alone, in_use=frozenset())
    assert plan([Wanted("a"), Wanted("b")], [idle]) == [Move("m/b1", "old")]


def test_a_backend_with_more_than_it_can_keep_unloads_the_coldest_and_loads_none():
    # Its limit was lowered, or somebody else loaded some.
    wanted = [Wanted("a", demand=5), Wanted("b", demand=0.1), Wanted("c", waits_since=1.0)]
    over = place("b1", 1, ["a", "b"])
    assert plan(wanted, [over]) == [Move("m/b1", "b")]
    busy = place("b1", 1, ["a", "b"], in_use=frozenset({"a", "b"}))
    assert plan(wanted, [busy]) == []
    foreign = place("b1", 1, ["a", "b"], ours=frozenset())
    assert plan(wanted, [foreign]) == []


def test_where_those_whom_a_load_held_up_have_not_caught_up_none_follows_but_for_a_pin():
    wanted = [Wanted("a"), Wanted("c", waits_since=1.0)]
    busy = place("b1", 1, ["a"], caught_up=False)
    assert plan(wanted, [busy]) == []
    assert lacks(wanted, [busy]) == {"m/b1": {"c": Exclusion.ADAPTER_DUE}}  # it will come
    other = place("b2", 2, ["a"], load_s=99.0)
    assert plan(wanted, [busy, other]) == [Move("m/b2", None, "c")]
    pinned = [Wanted("a"), Wanted("c", pins=frozenset({"m/b1"}))]
    assert plan(pinned, [busy]) == [Move("m/b1", "a", "c")]


def test_what_somebody_else_loaded_stays():
    wanted = [Wanted("a"), Wanted("b", waits_since=1.0)]
    foreign = place("b1", 1, ["a"], ours=frozenset())
    assert plan(wanted, [foreign]) == []
    assert lacks(wanted, [foreign]) == {"m/b1": {}}  # waiting is of no use


def test_a_hot_adapter_gets_a_second_copy_and_a_little_more_demand_moves_nothing():
    def site(hot):
        wanted = [Wanted("hot", demand=hot), Wanted("warm", demand=2.0), Wanted("cold", demand=1.0)]
        return plan(wanted, [place("b1", 1, ["hot"]), place("b2", 1, ["warm"])])

    assert site(20.0) == [Move("m/b2", "warm", "hot")]
    assert site(3.5) == []


def test_a_pinned_adapter_is_never_pushed_out_and_comes_first():
    wanted = [
        Wanted("a", pins=frozenset({"m/b1"})),
        Wanted("b", fresh=True, demand=9),
    ]
    assert plan(wanted, [place("b1", 1, ["b"])]) == []
    calm = [wanted[0], Wanted("b", demand=9)]
    assert plan(calm, [place("b1", 1, ["b"])]) == [Move("m/b1", "b", "a")]
    assert plan(calm, [place("b1", 1, ["a"])]) == []


def test_a_copy_that_comes_where_it_is_pinned_is_not_made_elsewhere():
    pins = frozenset({"m/b2"})
    fr, de = Wanted("fr", copies=1, pins=pins), Wanted("de", copies=1, pins=pins)
    other = place("b1")
    assert plan([fr, de], [other, place("b2")]) == [Move("m/b2", None, "fr")]
    assert plan([fr, de], [other, place("b2", changing=frozenset({"fr"}))]) == []
    failed = place("b2", changing=frozenset({"fr"}), barred={"de": "it has failed"})
    for never in (place("b2", 0), failed):
        assert plan([de], [other, never]) == [Move("m/b1", None, "de")]
    two = Wanted("de", copies=2, pins=pins)
    assert plan([two], [other, place("b2")]) == [Move("m/b2", None, "de")]
    assert plan([two], [other, place("b2", 2, ["de"])]) == [Move("m/b1", None, "de")]
    assert plan([two], [other, place("b2", changing=frozenset({"fr"}))]) == [
        Move("m/b1", None, "de")
    ]


def test_what_no_backend_has_yet_is_tried_on_one_and_what_may_have_killed_one_on_none():
    x, three = Wanted("x"), [place(f"b{each}") for each in range(3)]
    assert plan([x], three) == [Move("m/b0", None, "x")]
    tried = place("b0", changing=frozenset({"x"}))
    assert plan([x], [tried, *three[1:]]) == []
    assert len(plan([x], [place("b0", None, ["x"]), *three[1:]])) == 1
    unknown = Wanted("x", waits=True, waits_since=0.0)
    assert plan([unknown], three) == []
    assert lacks([unknown], three)["m/b0"] == {"x": Exclusion.ADAPTER_DUE}


def test_replicas_go_up_and_down_as_the_number_says():
    places = [place(f"b{each}", 1, ["x"]) for each in range(3)]
    (gone,) = plan([Wanted("x", copies=2)], places)
    assert (gone.unload, gone.load) == ("x", None)
    empty = [place(f"b{each}", 1) for each in range(3)]
    assert len(plan([Wanted("x", copies=2)], empty)) == 2 - 1  # one more at the next look


def test_copies_in_reserve_do_not_count_and_go_once_others_have_enough():
    x = [Wanted("x", copies=1)]
    reserve, other = place("b1", 2, ["x"], reserve=True), place("b2", 2)
    assert plan(x, [reserve, other]) == [Move("m/b2", None, "x")]
    assert plan(x, [reserve, place("b2", 2, ["x"])]) == [Move("m/b1", "x")]
    assert plan(x, [place("b1", 2, reserve=True), other]) == [Move("m/b2", None, "x")]
    assert plan([Wanted("x", copies=2)], [reserve, place("b2", 2, ["x"])]) == []  # no other can


def test_a_backend_in_reserve_gets_what_no_other_can_take_or_all_if_that_fits_everywhere():
    x = [Wanted("x", copies=1)]
    reserve = place("b1", 2, reserve=True)
    assert plan(x, [reserve]) == [Move("m/b1", None, "x")]
    assert plan(x, [reserve, place("b2", 0)]) == [Move("m/b1", None, "x")]
    assert plan([Wanted("x")], [reserve, place("b2", 2, ["x"])]) == [Move("m/b1", None, "x")]


def test_a_pin_in_reserve_counts():
    pinned = [Wanted("x", copies=1, pins=frozenset({"m/b1"}))]
    assert plan(pinned, [place("b1", 2, ["x"], reserve=True), place("b2", 2)]) == []


def test_what_requests_wait_for_goes_in_reserve_only_if_no_other_can_take_it():
    wanted = [Wanted("a"), Wanted("c", waits_since=1.0)]
    reserve, a = place("b1", 2, reserve=True), frozenset({"a"})
    assert plan(wanted, [reserve, place("b2", 1, a)]) == [Move("m/b2", "a", "c")]
    busy = place("b2", 1, a, in_use=a)
    assert plan(wanted, [reserve, busy]) == [Move("m/b2", "a", "c")]  # once it has no requests
    assert plan(wanted, [reserve, place("b2", 1, a, ours=frozenset())])[0].place == "m/b1"


def test_with_too_little_room_an_adapter_leaves_the_reserve_by_demand():
    def site(demand):
        wanted = [Wanted("a", demand=1.0), Wanted("x", demand=demand)]
        return plan(wanted, [place("b1", 1, ["x"], reserve=True), place("b2", 1, ["a"])])

    assert site(1.5) == []
    assert site(3.0) == [Move("m/b2", "a", "x")]


def test_a_new_path_comes_one_backend_after_the_other():
    stale = [place(f"b{each}", 2, ["x"], stale=frozenset({"x"})) for each in range(2)]
    assert plan([Wanted("x")], stale) == [Move("m/b0", "x", "x")]
    under_way = [place("b0", 2, changing=frozenset({"x"})), stale[1]]
    assert plan([Wanted("x")], under_way) == []


def test_a_new_path_comes_also_where_the_adapter_is_in_use_but_not_where_it_cannot_be_loaded():
    x = frozenset({"x"})
    busy = [place(f"b{each}", 2, ["x"], stale=x, in_use=x) for each in range(2)]
    assert plan([Wanted("x")], busy) == [Move("m/b0", "x", "x")]
    barred = [place("b0", 2, ["x"], stale=x, in_use=x, barred={"x": "its rank is 64"})]
    assert plan([Wanted("x")], barred) == []
    foreign = [place("b0", 2, ["x"], stale=x, in_use=x, ours=frozenset())]
    assert plan([Wanted("x")], foreign) == []


def test_a_new_path_that_failed_elsewhere_is_tried_there_until_some_backend_has_it():
    x = frozenset({"x"})
    failed, stale = place("b1", 2, failed=x), place("b2", 2, ["x"], stale=x)
    assert plan([Wanted("x")], [failed, stale]) == [Move("m/b1", None, "x")]
    waits = replace(failed, barred={"x": "no such file"})
    assert plan([Wanted("x")], [waits, stale]) == []
    assert plan([Wanted("x")], [waits, stale, place("b3", 2, ["x"])]) == [Move("m/b2", "x", "x")]


def test_big_ones_are_spread():
    wanted = [Wanted("big", weight=64), Wanted("big2", weight=64, copies=1), Wanted("s", weight=8)]
    places = [place("b1", 3, ["big"]), place("b2", 3, ["s"])]
    assert Move("m/b2", None, "big2") in plan(wanted, places)


def test_what_cannot_be_loaded_there_is_loaded_elsewhere_and_told():
    wanted = [Wanted("x", copies=1)]
    places = [place("b1", 2, barred={"x": "its rank is 64"}), place("b2", 2, load_s=9.0)]
    assert plan(wanted, places) == [Move("m/b2", None, "x")]
    assert lacks(wanted, places)["m/b1"] == {"x": Exclusion.ADAPTER_FAILED}


def test_thousands_of_adapters_are_planned_in_a_moment():
    # It is done twice a second, in the loop that serves requests. Nothing is to move here, so all are looked at.
    room, backends, names = 64, 16, [f"a{each}" for each in range(6000)]
    wanted = [
        Wanted(name, demand=0.1 if rank < room * backends else 0.0)
        for rank, name in enumerate(names)
    ]
    shares = [names[room * each : room * (each + 1)] for each in range(backends)]
    places = [place(f"b{each}", room, held) for each, held in enumerate(shares)]
    before = time.process_time()
    assert plan(wanted, places) == []
    # 0.1 s; to look for the least used for each of them takes 3 s.
    assert time.process_time() - before < 1.0
