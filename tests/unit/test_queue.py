import gc
import tracemalloc
import weakref

import pytest

from gateway.admission.bounds import Full, Held, Limits
from gateway.admission.queue import Blocked, FairQueue
from tests.waitingroom import offer, request, slot

WIDE = Limits(requests=10_000, tokens=10**9, bytes=10**9, tenant_ratio=1.0)


def queue(limits=WIDE, **options):
    return FairQueue(limits, **options)


def offered(queue, *names, **fields):
    """Offer a request by each name; all must be accepted."""
    requests = [request(name, **fields) for name in names]
    assert [offer(queue, each) for each in requests] == [None] * len(requests)
    return requests


def anywhere(waiting, claimed):
    return slot("x")


def nowhere(waiting, claimed):
    return Blocked(frozenset("x"))


def only(*placeable, on="x", others=("x",)):
    """Return a `place` for the requests of these names alone; the others could use the backends `others`."""

    def place(waiting, claimed):
        if waiting.name in placeable and on not in claimed:
            return slot(on)
        return Blocked(frozenset({on} if waiting.name in placeable else others))

    return place


def served(queue, place=anywhere):
    """Return the names in the order in which the requests are taken."""
    names = []
    while (taken := queue.take(place)) is not None:
        names.append(taken[0].name)
    return names


# --- order ----------------------------------------------------------------------------------------


def test_the_higher_priority_goes_first():
    waiting = queue()
    offered(waiting, "low", priority=-1)
    offered(waiting, "middle")
    offered(waiting, "high", priority=7, tenant="b")
    assert served(waiting) == ["high", "middle", "low"]


def test_a_tenant_goes_in_the_order_of_its_offers():
    waiting = queue()
    for number, cost in enumerate((9000, 10, 3000, 10, 1)):
        offered(waiting, number, cost=cost)
    assert served(waiting) == [0, 1, 2, 3, 4]


def test_nor_does_a_later_one_go_first_when_a_blocked_one_leaves():
    waiting = queue()
    first, _ = offered(waiting, 1, 2, cost=60)
    waiting.take(nowhere)
    waiting.remove(first)
    offered(waiting, 3, cost=1)
    assert served(waiting) == [2, 3]


def test_what_has_returned_goes_before_the_other_requests_of_its_tenant():
    waiting = queue()
    offered(waiting, 1, 2, 3)
    offered(waiting, "r1", "r2", returned=True)
    offered(waiting, 4)
    assert served(waiting) == [1, "r1", "r2", 2, 3, 4]  # 1 was next already


def test_what_is_next_stays_next_when_others_return():
    """However often: else a tenant's large request would begin its wait anew each time."""
    waiting = queue()
    offered(waiting, "large", cost=1000)
    offered(waiting, *["b"] * 20, tenant="b")
    order = []
    for _ in range(11):
        offered(waiting, "r", cost=10, returned=True)
        order.append(waiting.take(anywhere)[0].name)
    assert order.index("large") == 9


def test_to_say_that_one_has_returned_gains_nothing_before_other_tenants():
    orders = []
    for returned in (False, True):
        waiting = queue()
        offered(waiting, *["a"] * 5, tenant="a")
        offered(waiting, *["b"] * 5, tenant="b", returned=returned)
        orders.append(served(waiting))
    assert orders[0] == orders[1] == ["a", "b"] * 5


def test_tenants_are_served_evenly_by_tokens_and_not_by_requests():
    waiting = queue()
    offered(waiting, *["a"] * 40, tenant="a", cost=500)
    offered(waiting, *["b"] * 40, tenant="b", cost=2000)
    assert "".join(served(waiting)[:15]) == "aaaab" * 3


def test_a_flood_of_one_tenant_delays_another_by_one_request():
    waiting = queue()
    offered(waiting, *["a"] * 500, tenant="a", cost=500)
    assert [waiting.take(anywhere)[0].name for _ in range(6)] == ["a"] * 6
    offered(waiting, "b", tenant="b", cost=500)
    assert served(waiting).index("b") == 1


def test_a_large_request_goes_when_the_others_had_as_much():
    waiting = queue()
    offered(waiting, "large", tenant="a", cost=50_000)
    offered(waiting, *["small"] * 100, tenant="b", cost=1000)
    assert served(waiting).index("large") == 49


def test_a_tenant_that_comes_back_with_each_request_gets_no_more_than_one_that_stays():
    waiting = queue()
    offered(waiting, *["b"] * 50, tenant="b", cost=1000)
    order = []
    for _ in range(20):
        if "a" not in waiting.tenants:
            offered(waiting, "a", tenant="a", cost=1000)
        order.append(waiting.take(anywhere)[0].name)
    assert order.count("a") == 10


def test_a_waiting_lower_band_is_given_a_twentieth_of_the_tokens():
    waiting = queue()
    offered(waiting, *["high"] * 1000, priority=1, cost=100)
    offered(waiting, *["low"] * 100, priority=0, cost=700)
    order = [waiting.take(anywhere)[0] for _ in range(900)]
    low = sum(each.cost_tokens for each in order if each.name == "low")
    high = sum(each.cost_tokens for each in order if each.name == "high")
    assert low == 700 * (high // (20 * 700)) > 0
    assert order[140].name == "low"  # 20 * 700 tokens were given to the band above
    assert all(each.name == "high" for each in order[:140])


def test_a_band_that_was_idle_or_served_anyway_is_owed_nothing():
    waiting = queue()
    offered(waiting, *["high"] * 30, priority=1)
    (first,) = offered(waiting, "low")
    for _ in range(19):
        waiting.take(anywhere)
    assert waiting.take(only("low"))[0] is first
    offered(waiting, "low")
    assert served(waiting)[-1] == "low"


def test_a_blocked_request_does_not_keep_its_band_from_what_it_is_owed():
    waiting = queue()
    offered(waiting, *["high"] * 100, priority=1)
    offered(waiting, "low and blocked", "low")
    order = [waiting.take(only("high", "low"))[0].name for _ in range(30)]
    assert order.index("low") == 20


def test_what_a_blocked_band_is_owed_does_not_pile_up():
    waiting = queue()
    offered(waiting, *["high"] * 200, priority=1)
    offered(waiting, *["low"] * 10)
    for _ in range(100):
        waiting.take(only("high", others="y"))
    assert served(waiting)[:20] == ["low", *["high"] * 19]


def test_blocked_requests_of_a_band_that_is_due_leave_looks_for_the_others():
    waiting = queue(max_looks=8)
    offered(waiting, *["high"] * 100, priority=1)
    offered(waiting, *["low"] * 100)
    for _ in range(60):
        assert waiting.take(only("high", others="y"))[0].name == "high"


# --- passing, claiming ------------------------------------------------------------------------------


def test_a_blocked_request_is_passed_16_times_and_then_claims_what_it_could_use():
    waiting = queue()
    (large,) = offered(waiting, "large")
    offered(waiting, *["small"] * 100, tenant="b")
    assert served(waiting, only("small")) == ["small"] * 16
    assert large.passes == 16
    assert waiting.take(anywhere)[0] is large


def test_a_placement_that_the_blocked_request_could_not_use_is_no_pass():
    waiting = queue()
    (large,) = offered(waiting, "large")
    offered(waiting, *["small"] * 100, tenant="b")
    assert len(served(waiting, only("small", on="y"))) == 100
    assert large.passes == 0


def test_what_goes_first_in_its_own_turn_does_not_pass_a_later_one():
    waiting = queue()
    offered(waiting, *["first"] * 100, priority=1)
    (later,) = offered(waiting, "later")
    for _ in range(19):
        waiting.take(only("first"))
    assert later.passes == 0


def test_other_backends_go_on_while_one_is_claimed():
    waiting = queue(max_passes=0)
    offered(waiting, "large")
    offered(waiting, "same", "other", tenant="b")
    room = {"large": "", "same": "x", "other": "xy"}

    def roomy(waiting, claimed):
        free = [each for each in room[waiting.name] if each not in claimed]
        return slot(free[0]) if free else Blocked(frozenset("x"))

    assert [waiting.take(roomy)[1].backend_id, waiting.take(roomy)] == ["y", None]
    assert waiting.held.requests == 2


def test_a_request_with_a_best_backend_claims_no_other():
    waiting = queue(max_passes=0)
    large, _ = offered(waiting, "large", "small")
    seen = []

    def place(waiting, claimed):
        seen.append((waiting.name, {**claimed}))
        return Blocked(frozenset("xyz"), best="y")

    assert waiting.take(place) is None
    assert seen == [("large", {}), ("small", {"y": (large,)})]


def test_passes_beside_a_claim_do_not_hold_up_those_who_come():
    waiting = queue()
    (large,) = offered(waiting, "large", tenant="a")
    offered(waiting, *["b"] * 200, tenant="b")

    def place(waiting, claimed):
        if waiting.name == "large":
            return Blocked(frozenset("xy"), best="y")
        return slot("x")

    for _ in range(100):
        waiting.take(place)
    assert large.passes == 16
    offered(waiting, *["c"] * 50, tenant="c")
    assert "".join(served(waiting, place)).startswith("bcbcbcbc")


def test_blocked_requests_of_a_higher_band_do_not_hold_up_a_lower_one():
    waiting = queue()
    offered(waiting, *["b"] * 200, tenant="b")
    for _ in range(100):
        (high,) = offered(waiting, "high", priority=1)
        waiting.take(only("b"))
        assert high.passes == 1
        waiting.remove(high)
    offered(waiting, *["c"] * 50, tenant="c")
    assert "".join(served(waiting)).startswith("bcbcbcbc")


def test_claims_of_several_requests_add_up():
    waiting = queue(max_passes=0)
    offered(waiting, "x", "y", "z")
    seen = []

    def place(waiting, claimed):
        seen.append({*claimed})
        return Blocked(frozenset(waiting.name))

    assert waiting.take(place) is None
    assert seen == [set(), {"x"}, {"x", "y"}]


@pytest.mark.parametrize(("ratio", "most"), [(0.55, 55), (0.29, 29), (0.07, 7), (1.0, 100)])
def test_a_share_of_the_queue_is_the_decimal_that_the_settings_say(ratio, most):
    waiting = queue(Limits(requests=100, tokens=100, bytes=1000, tenant_ratio=ratio))
    offered(waiting, *range(most), cost=1)
    assert waiting.full(request("more", cost=1)) is not None


def test_a_tenants_own_requests_may_pass_its_blocked_one():
    waiting = queue()
    offered(waiting, "large", "small", "smaller")
    assert served(waiting, only("small", "smaller")) == ["small", "smaller"]


def test_one_take_looks_at_a_bounded_number_of_requests():
    waiting = queue(max_looks=32)
    offered(waiting, *range(100))
    seen = []

    def place(waiting, claimed):
        seen.append(waiting.name)
        return Blocked(frozenset())

    assert waiting.take(place) is None
    assert seen == [*range(16)]
    assert waiting.take(only(16)) is None
    assert waiting.take(only(15))[0].name == 15
    assert waiting.take(only(16))[0].name == 16


def test_looks_are_shared_out_between_tenants():
    """As service is: the one that comes last is looked at after two or three of the others."""
    waiting = queue()
    for tenant in "bc":
        offered(waiting, *[tenant] * 100, tenant=tenant)
    offered(waiting, "a", tenant="a", cost=250)
    looks = []

    def place(waiting, claimed):
        looks.append(waiting.name)
        return slot("x") if waiting.name == "a" else Blocked(frozenset("y"))

    assert waiting.take(place)[0].name == "a"
    assert looks == ["b", "c", "b", "c", "a"]


def test_what_was_tried_in_vain_does_not_go_before_a_newcomer():
    waiting = queue()
    offered(waiting, *["a"] * 50)
    assert waiting.take(nowhere) is None
    offered(waiting, "new", tenant="b")
    assert served(waiting).index("new") == 1


def test_nor_does_what_was_passed():
    waiting = queue()
    offered(waiting, *range(50))
    assert waiting.take(only(10))[0].name == 10
    offered(waiting, "new", tenant="b")
    assert served(waiting).index("new") == 1


def test_a_tenant_that_could_try_nothing_has_not_saved_up_its_turns():
    """Nor does it wait longer than what its blocked request would have kept it from going."""
    waiting = queue()
    offered(waiting, "blocked", cost=1000)
    offered(waiting, *["b"] * 200, tenant="b")
    for _ in range(100):
        waiting.take(only("b", others="y"))
    offered(waiting, *["a"] * 100)
    order = "".join(served(waiting, only("a", "b", others="y")))
    assert order.startswith("a" + "b" * 10 + "ab" * 50)


def test_a_tenant_whose_large_request_leaves_keeps_the_turns_that_it_waited():
    waiting = queue()
    (first, _) = offered(waiting, "left", "large", tenant="a", cost=10_000)
    offered(waiting, *["b"] * 50, tenant="b", cost=1000)
    for _ in range(9):
        waiting.take(anywhere)
    waiting.remove(first)
    assert served(waiting).index("large") <= 1


# --- kinds ------------------------------------------------------------------------------------------


def kinds(*free):
    """Return a `place` with room for these kinds alone; each is named for its kind."""

    def place(waiting, claimed):
        place.looks.append(waiting.name)
        if waiting.name in free:
            return slot(waiting.name)
        return Blocked(frozenset(waiting.name), shut=True)

    place.looks = []
    return place


@pytest.mark.parametrize("tenants", [1, 50])
def test_a_kind_that_finds_no_room_is_looked_at_once_however_many_of_it_wait(tenants):
    waiting = queue(max_looks=4)
    for number in range(500):
        offered(waiting, "s", kind="s", tenant=str(number % tenants))
    offered(waiting, "b", kind="b", tenant="0")
    place = kinds("b")
    for _ in range(3):
        assert waiting.take(place)[0].name == "b"
        offered(waiting, "b", kind="b", tenant="0")
    assert place.looks == ["s", "b"] * 3


def test_a_kind_that_finds_no_room_ends_the_walk_when_no_other_waits():
    waiting = queue()
    offered(waiting, *"s" * 100, kind="s")
    place = kinds()
    assert waiting.take(place) is None
    assert place.looks == ["s"]


def test_requests_too_large_for_now_leave_looks_for_the_other_kinds():
    waiting = queue(max_looks=64)
    for kind in "pqr":
        offered(waiting, *kind * 100, kind=kind)
    offered(waiting, "b", kind="b")
    looks = []

    def place(waiting, claimed):
        looks.append(waiting.name)
        return slot("x") if waiting.name == "b" else Blocked(frozenset("y"))

    assert waiting.take(place)[0].name == "b"
    assert "".join(looks) == "p" * 32 + "q" * 16 + "r" * 8 + "b"
    assert waiting.take(place) is None
    assert len(looks) == 57 + 56


def test_all_kinds_together_have_a_bounded_number_of_looks():
    waiting = queue(max_looks=64)
    for kind in "pqrstuvw":
        offered(waiting, *kind * 100, kind=kind)
    looks = []

    def place(waiting, claimed):
        looks.append(waiting.name)
        return Blocked(frozenset("y"))

    assert waiting.take(place) is None
    assert len(looks) == 64


def test_of_whatever_kind_a_tenants_requests_go_in_the_order_of_their_offers():
    waiting = queue()
    offered(waiting, "a1", "a2", kind="a")
    offered(waiting, "b1", kind="b")
    offered(waiting, "a3", kind="a")
    offered(waiting, "r1", kind="c", returned=True)
    offered(waiting, "r2", kind="b", returned=True)
    assert served(waiting) == ["a1", "r1", "r2", "a2", "b1", "a3"]


def test_with_several_kinds_a_tenant_has_no_more_than_with_one():
    waiting = queue()
    for kind in "pqr":
        offered(waiting, *["a"] * 20, kind=kind)
    offered(waiting, *["b"] * 20, tenant="b")
    assert "".join(served(waiting)[:40]) == "ab" * 20


def test_a_kind_that_was_blocked_for_long_has_not_saved_up_its_tenants_turns():
    waiting = queue()
    offered(waiting, *"s" * 50, kind="s")
    offered(waiting, *"b" * 200, kind="b", tenant="b")
    for _ in range(100):
        assert waiting.take(kinds("b"))[0].name == "b"
    order = "".join(served(waiting, kinds("b", "s")))
    assert "ss" not in order[2:40]
    assert "bb" not in order[2:40]


def test_nor_has_another_kind_of_it_that_comes_meanwhile():
    waiting = queue()
    offered(waiting, *"s" * 50, kind="s")
    offered(waiting, *"b" * 200, kind="b", tenant="b")
    for _ in range(100):
        waiting.take(kinds("b"))
    offered(waiting, *"a" * 50, kind="a")
    order = "".join(served(waiting, kinds("a", "b")))
    assert "aa" not in order[2:40]
    assert "bb" not in order[2:40]


def test_of_a_tenants_other_kinds_all_that_came_before_are_ahead():
    waiting = queue()
    offered(waiting, *"s" * 50, kind="s", cost=300)
    first, second = offered(waiting, *"bb", kind="b")
    assert waiting.ahead(first) == Held(50, 15_000)
    assert waiting.ahead(second) == Held(51, 15_100)
    assert waiting.ahead(request(kind="c")) == Held(52, 15_200)


# --- bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "tenant", "full"),
    [
        (Limits(4, 1000, 1000), "b", None),
        (Limits(2, 1000, 1000), "b", Full.REQUESTS),
        (Limits(4, 299, 1000), "b", Full.TOKENS),
        (Limits(4, 1000, 29), "b", Full.BYTES),
        (Limits(4, 1000, 1000), "a", Full.TENANT_REQUESTS),
        (Limits(6, 599, 1000), "a", Full.TENANT_TOKENS),
        (Limits(6, 1000, 59), "a", Full.TENANT_BYTES),
        (Limits(6, 600, 60), "a", None),
    ],
)
def test_an_offer_over_a_bound_is_refused_by_its_name_and_changes_nothing(limits, tenant, full):
    waiting = queue()
    offered(waiting, 1, 2)
    waiting.limits = limits
    refused = request(3, tenant=tenant)
    assert offer(waiting, refused) is full
    assert (refused in waiting) == (full is None)
    assert waiting.held == (Held(2, 200, 20) if full else Held(3, 300, 30))
    assert sorted(served(waiting)) == ([1, 2] if full else [1, 2, 3])


def test_with_no_requests_allowed_nothing_waits():
    assert offer(queue(Limits(0, 1000, 1000)), request()) is Full.REQUESTS


def test_every_tenant_may_hold_one_request():
    waiting = queue(Limits(1, 1000, 1000, tenant_ratio=0.01))
    waiting.limits = Limits(1, 100_000, 1000, tenant_ratio=0.01)
    assert offer(waiting, request(size=1)) is None


def test_bounds_count_what_waits_with_the_same_or_a_higher_priority():
    waiting = queue(Limits(4, 1000, 1000))
    offered(waiting, 1, priority=0)
    offered(waiting, 2, priority=5)
    assert offer(waiting, request(priority=0)) is Full.TENANT_REQUESTS
    offered(waiting, 3, priority=5)
    assert offer(waiting, request(priority=5)) is Full.TENANT_REQUESTS
    offered(waiting, 4, tenant="b", priority=0)
    assert offer(waiting, request(tenant="c", priority=0)) is Full.REQUESTS
    offered(waiting, 5, 6, tenant="b", priority=5)
    assert offer(waiting, request(tenant="c", priority=5)) is Full.REQUESTS
    assert waiting.counted("b", 5) == (Held(4, 400, 40), Held(2, 200, 20))
    assert waiting.counted("b", 0) == (Held(6, 600, 60), Held(3, 300, 30))
    assert waiting.counted("b", 9) == (Held(), Held())


@pytest.mark.parametrize(
    "limits", [Limits(9, 1000, 100_000), Limits(99, 800, 100_000), Limits(99, 100_000, 80)]
)
def test_each_priority_adds_no_more_than_the_bounds_however_many_come(limits):
    waiting = queue(limits)
    for priority in (0, 5, 9):
        for number in range(200):
            offer(waiting, request(tenant=str(number), priority=priority))
    most = min(limits.requests, limits.tokens // 100, limits.bytes // 10)
    assert waiting.held.requests == 3 * most


def test_smaller_limits_evict_nothing_and_refuse_until_there_is_room():
    waiting = queue()
    offered(waiting, *range(10))
    waiting.limits = Limits(2, 1000, 1000, tenant_ratio=1.0)
    assert len(waiting) == 10
    for _ in range(9):
        assert offer(waiting, request()) is Full.REQUESTS
        waiting.take(anywhere)
    assert offer(waiting, request()) is None


# --- leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [nowhere, lambda waiting, claimed: Blocked(frozenset())])
@pytest.mark.parametrize("leaves", range(4))
def test_a_client_that_leaves_frees_its_place_once(place, leaves):
    waiting = queue()
    requests = offered(waiting, *range(4), deadline=9.0)
    waiting.take(place)
    assert waiting.remove(requests[leaves])
    assert not waiting.remove(requests[leaves])
    assert waiting.held == Held(3, 300, 30)
    assert served(waiting) == [each for each in range(4) if each != leaves]
    assert waiting.expired(10.0) == []


def test_a_request_of_another_queue_is_not_ones_own():
    (mine,), (other,) = offered(one := queue(), "mine"), offered(queue(), "other")
    assert not one.remove(other)
    assert mine in one
    assert other not in one


def test_requests_expire_at_their_deadline_and_not_before():
    waiting = queue()
    late, soon = offered(waiting, "late", deadline=9.0) + offered(waiting, "soon", deadline=5.0)
    assert waiting.next_deadline() == 5.0
    assert waiting.expired(4.99) == []
    assert waiting.expired(5.0) == [soon]
    assert waiting.next_deadline() == 9.0
    waiting.remove(late)
    assert waiting.next_deadline() is None


def test_a_drained_queue_is_empty_and_works_on():
    waiting = queue()
    offered(waiting, 1)
    offered(waiting, 2, tenant="b", priority=3)
    waiting.take(nowhere)
    assert [each.name for each in waiting.drain()] == [1, 2]
    assert (len(waiting), waiting.held, waiting.tenants) == (0, Held(), {})
    offered(waiting, 3)
    assert served(waiting) == [3]


def test_a_place_that_raises_takes_nothing():
    waiting = queue()
    offered(waiting, 1, 2)

    def broken(waiting, claimed):
        if waiting.name == 2:
            raise RuntimeError("bug")
        return Blocked(frozenset())

    with pytest.raises(RuntimeError):
        waiting.take(broken)
    assert served(waiting) == [1, 2]


def test_a_request_without_tokens_counts_as_one():
    waiting = queue()
    offered(waiting, *["free"] * 5000, tenant="a", cost=0)
    offered(waiting, "b", tenant="b", cost=100)
    assert waiting.tenants["a"].tokens == 5000
    assert served(waiting).index("b") == 100


class Name(str):
    """A name that can tell when nobody knows it any more."""

    __slots__ = ("__weakref__",)


def test_who_has_left_is_forgotten():
    waiting = queue()
    names = [Name(f"tenant {number}") for number in range(6)]
    items = [Name(f"item {number}") for number in range(6)]
    known = [weakref.ref(each) for each in (*names, *items)]
    requests = [
        request(item, tenant=name, priority=name is names[2], deadline=9.0 + (name is names[3]))
        for name, item in zip(names, items, strict=True)
    ]
    for each in requests:
        waiting.offer(each)
    waiting.take(nowhere)
    waiting.take(anywhere)
    waiting.remove(requests[4])
    waiting.expired(9.0)
    waiting.drain()
    del names[:], items[:], requests[:], each
    gc.collect()
    assert [ref() for ref in known] == [None] * len(known)


def test_deadlines_of_those_who_left_do_not_pile_up():
    waiting = queue()
    offered(waiting, *range(10))
    tracemalloc.start()
    try:
        for _ in range(5000):
            (each,) = offered(waiting, "x", deadline=1e9)
            waiting.remove(each)
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


# --- what is ahead ----------------------------------------------------------------------------------


def test_a_tenants_own_earlier_requests_are_ahead():
    waiting = queue()
    requests = offered(waiting, *range(5), cost=300)
    assert [waiting.ahead(each) for each in requests] == [Held(n, 300 * n) for n in range(5)]
    assert waiting.ahead(request()) == Held(5, 1500)
    waiting.take(anywhere)
    assert waiting.ahead(requests[4]) == Held(3, 900)


def test_of_ones_own_only_what_is_next_and_what_has_returned_is_ahead_of_what_returns():
    waiting = queue()
    offered(waiting, *range(5), cost=300)
    (first,) = offered(waiting, "r", cost=200, returned=True)
    assert waiting.ahead(first) == Held(1, 300)
    assert waiting.ahead(request(returned=True)) == Held(2, 500)
    assert waiting.ahead(request()) == Held(6, 1700)


def test_higher_bands_are_ahead_and_lower_ones_are_not():
    waiting = queue()
    offered(waiting, *range(3), priority=2, tenant="b")
    offered(waiting, *range(5), priority=0, tenant="c")
    assert waiting.ahead(request(priority=1)) == Held(3, 300)
    assert waiting.ahead(request(priority=3)) == Held(0, 0)


def test_of_another_tenants_flood_only_a_fair_share_is_ahead():
    waiting = queue()
    offered(waiting, *range(1000), tenant="b", cost=64)
    assert waiting.ahead(request(cost=4096)) == Held(64, 4096)


def test_of_two_tenants_with_equal_tags_the_one_that_came_first_is_ahead():
    waiting = queue()
    (first,), (second,) = offered(waiting, 1, tenant="a"), offered(waiting, 2, tenant="b")
    assert [waiting.ahead(first), waiting.ahead(second)] == [Held(0, 0), Held(1, 100)]


def test_a_blocked_request_whose_turn_it_was_has_nobody_ahead():
    waiting = queue()
    (large,) = offered(waiting, "large")
    offered(waiting, *["b"] * 50, tenant="b")
    for _ in range(10):
        waiting.take(only("b"))
    assert waiting.ahead(large) == Held(0, 0)
