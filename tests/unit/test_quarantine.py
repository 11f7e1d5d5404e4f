"""Which requests were present at two deaths, and for how long they are refused."""

import msgspec
import pytest

from gateway.core.endings import Ending
from gateway.core.types import Phase, ProbeFailed, ProbePassed
from gateway.pools.facts import Tending
from gateway.pools.quarantine import Quarantine, may_be_a_death
from tests.unit.test_ejection import Pool

POISON, OTHER = b'{"prompt": "poison"}', b'{"prompt": "others"}'


class House:
    """A pool, what is lost there, and what its probes find after that."""

    def __init__(self, size=4):
        self.pool = Pool(size)
        self.quarantine = Quarantine(self.pool.table, self.pool.clock)
        self.told = []
        self.quarantine.on_quarantined.append(self.told.append)

    def of(self, body, tenant="t"):
        return self.quarantine.fingerprint(body, tenant)

    def loses(self, name, *bodies, sent_at=None, tenant="t", said_tokens=0):
        sent_at = self.pool.clock.at if sent_at is None else sent_at
        for body in bodies:
            self.quarantine.lost(self.pool[name], self.of(body, tenant), sent_at, said_tokens)

    def probe(self, name, reason=None, asked_s=0.1):
        clock = self.pool.clock
        clock.at += asked_s
        at, asked_at = clock.at, clock.at - asked_s / 2
        seen = ProbePassed(at, asked_at) if reason is None else ProbeFailed(at, reason, asked_at)
        self.pool.table.observe(f"m/{name}", seen)
        self.quarantine.tick()

    def dies(self, name, *bodies, reason="refused", **sent):
        self.loses(name, *bodies, **sent)
        self.probe(name, reason)

    def is_out(self, body=POISON, tenant="t"):
        return self.quarantine.found(self.of(body, tenant)) is not None

    def is_undecided(self, body=POISON):
        return self.quarantine.undecided(self.of(body))


@pytest.mark.parametrize("reason", ["refused", "reset", "http_503"])
def test_a_request_that_was_at_two_deaths_is_refused_for_ten_minutes(reason):
    house = House()
    house.dies("b1", POISON, OTHER, reason=reason)
    assert not house.is_out()
    house.pool.later(300)
    house.dies("b2", POISON, reason=reason)
    assert house.is_out()
    assert not house.is_out(OTHER)
    assert [each.died for each in house.told] == [["m/b1", "m/b2"]]
    house.pool.later(599)
    assert house.is_out()
    house.pool.later(1)
    house.quarantine.tick()
    assert not house.is_out()
    assert house.quarantine.watched == {}


def test_one_backend_that_dies_twice_of_it_is_enough():
    house = House(1)
    house.dies("b1", POISON)
    house.pool.later(60)
    house.pool.passes("b1")
    house.dies("b1", POISON)
    assert house.is_out()


def test_a_backend_that_dies_of_it_starts_at_once_and_dies_again_died_twice():
    house = House()
    house.dies("b1", POISON)
    house.pool.passes("b1")
    house.dies("b1", POISON)
    assert house.is_out()


def test_what_was_sent_before_a_death_and_is_lost_after_the_next_start_was_at_that_death():
    house = House()
    sent_at = house.pool.clock.at
    house.dies("b1", POISON)
    house.pool.passes("b1")
    house.dies("b1", POISON, sent_at=sent_at)
    assert not house.is_out()


def test_a_backend_that_lives_is_no_evidence():
    house = House()
    for name in ("b1", "b2", "b3", "b4"):
        house.loses(name, POISON)
        house.probe(name)
    assert not house.is_out()
    assert house.quarantine.watched == {}


@pytest.mark.parametrize("reason", ["timeout", "http_500", "dns"])
def test_what_a_probe_does_not_prove_is_no_death(reason):
    house = House()
    for name in ("b1", "b2"):
        house.loses(name, POISON)
        for _ in range(60):
            house.probe(name, reason)
    assert not house.is_out()
    assert house.quarantine.watched == {}


def test_a_probe_that_was_sent_before_the_loss_tells_nothing():
    house = House()
    clock = house.pool.clock
    for name, seen in (
        ("b1", ProbePassed),
        ("b2", lambda *at: ProbeFailed(at[0], "refused", at[1])),
    ):
        asked_at = clock.at
        clock.at += 0.1
        house.loses(name, POISON)
        house.pool.table.observe(f"m/{name}", seen(clock.at, asked_at))
        house.quarantine.tick()
        assert house.quarantine.watched == {len(POISON): 1 if name == "b1" else 2}


def test_a_loss_long_before_a_death_is_not_of_it():
    house = House()
    house.dies("b1", POISON)
    house.loses("b2", POISON)
    house.pool.later(5.1)
    house.probe("b2", "refused")
    house.loses("b3", POISON)
    house.pool.later(5.1)
    house.quarantine.tick()
    assert not house.is_out()


def test_equal_requests_on_backends_that_die_at_once_were_at_one_death_each():
    house = House()
    sent_at = house.pool.clock.at - 1
    for name in ("b1", "b2"):
        house.loses(name, POISON, POISON, sent_at=sent_at)
    assert not house.is_undecided()
    house.probe("b1", "refused")
    house.probe("b2", "refused")
    house.dies("b3", POISON, sent_at=sent_at)  # a little later, and was sent before
    assert not house.is_out()
    assert house.told == []
    house.dies("b4", POISON)  # one of them was sent again
    assert house.is_out()


def test_which_of_two_deaths_is_proven_first_does_not_matter():
    house = House()
    house.loses("b1", POISON)
    house.pool.later(1)
    house.loses("b2", POISON)
    house.probe("b2", "refused")
    assert not house.is_out()
    house.probe("b1", "refused")
    assert house.is_out()


def test_one_tenant_s_request_is_not_another_s():
    house = House()
    house.dies("b1", POISON, tenant="one")
    house.dies("b2", POISON, tenant="other")
    assert not house.is_out(tenant="other")
    house.dies("b3", POISON, tenant="one")
    assert house.is_out(tenant="one")
    assert not house.is_out(tenant="other")


@pytest.mark.parametrize(
    ("others", "said_tokens", "out"),
    [
        ([OTHER], 500, False),  # it got past the place where it would have killed
        ([OTHER], 120, True),
        ([OTHER], 80, True),  # it went back to the last place from where it could go on
        ([OTHER], 0, False),  # it was sent anew, and did not come there
        ([], 500, True),  # nobody else may be to blame
    ],
)
def test_who_was_not_alone_at_two_deaths_is_refused_if_it_stood_at_the_same_place(
    others, said_tokens, out
):
    house = House()
    house.dies("b1", POISON, *others, said_tokens=100)
    house.dies("b2", POISON, *others, said_tokens=said_tokens)
    assert house.is_out() is out
    assert len(house.told) == out * (1 + len(others))


def test_other_company_at_each_death_speaks_for_nobody():
    house = House()
    house.dies("b1", POISON, OTHER, said_tokens=100)
    house.dies("b2", POISON, b"more", said_tokens=500)
    assert house.is_out()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_lost_where_a_reply_is_ended_in_order_was_at_no_death(before):
    house = House()
    for name in ("b1", "b2"):
        if before:
            house.quarantine.ended_in_order(f"m/{name}")
        house.loses(name, POISON)
        if not before:
            house.quarantine.ended_in_order(f"m/{name}")
        house.probe(name, "refused")
    assert not house.is_out()
    assert house.quarantine.watched == {}
    house.pool.later(60)
    house.pool.passes("b1")
    house.dies("b1", POISON)  # now it crashes
    house.dies("b3", POISON)
    assert house.is_out()


@pytest.mark.parametrize("before", [False, True])
def test_nobody_works_on_what_was_lost_with_a_server_that_was_stopped(before):
    house = House()
    sent_at = house.pool.clock.at
    if before:
        house.quarantine.ended_in_order("m/b1")
    house.loses("b1", POISON)
    house.quarantine.ended_in_order("m/b1")
    assert house.quarantine.died(house.of(POISON), "m/b1", sent_at) is None
    assert not house.is_undecided()
    house.probe("b1", "refused")
    assert house.quarantine.died(house.of(POISON), "m/b1", sent_at) is True
    assert house.quarantine.died(house.of(OTHER), "m/b1", sent_at) is False
    assert house.quarantine.died(house.of(POISON), "m/b2", sent_at) is False
    assert house.quarantine.died(house.of(POISON), "m/b1", sent_at + 1) is False
    house.pool.later(5)
    assert house.quarantine.died(house.of(POISON), "m/b1", sent_at) is False


def test_several_attempts_lost_at_one_death_are_one():
    house = House()
    house.dies("b1", POISON, POISON, POISON)
    house.dies("b1", POISON)
    assert not house.is_out()


def test_who_may_have_been_at_two_waits_until_it_is_known():
    house = House()
    house.loses("b1", POISON)
    assert not house.is_undecided()  # it may be sent to one other
    house.loses("b2", POISON)
    assert house.is_undecided()
    assert not house.is_undecided(OTHER)
    house.probe("b1", "refused")
    assert house.is_undecided()
    house.probe("b2")
    assert not house.is_undecided()
    house.loses("b3", POISON)
    assert house.is_undecided()
    house.pool.later(5)
    assert not house.is_undecided()
    assert not house.is_out()


def test_another_backend_s_death_with_an_equal_request_says_nothing_of_this_one():
    house = House()
    began = house.pool.clock.at
    house.loses("b1", POISON)
    house.dies("b2", POISON)
    died = [house.quarantine.died(house.of(POISON), f"m/{name}", began) for name in ("b1", "b2")]
    assert died == [None, True]
    house.probe("b1")
    assert house.quarantine.died(house.of(POISON), "m/b1", began) is False
    later = house.pool.clock.at + 1  # sent after that death
    assert house.quarantine.died(house.of(POISON), "m/b2", later) is False


def test_an_operator_lifts_one():
    house = House()
    house.dies("b1", POISON)
    house.dies("b2", POISON)
    (known,) = house.quarantine
    assert not house.quarantine.lift("other")
    assert house.quarantine.lift(known.of.id)
    assert not house.is_out()
    assert house.quarantine.watched == {}
    house.dies("b3", POISON)
    assert not house.is_out()


def test_what_is_known_is_bounded():
    house = House()
    house.loses("b1", *(b"%d" % number for number in range(12_000)))
    assert house.quarantine.watched.total() == 10_000
    house.probe("b1", "refused")
    house.dies("b2", *(b"x%d" % number for number in range(5_000)))
    assert house.quarantine.watched.total() == 10_000
    house.dies("b3", *(b"x%d" % number for number in range(5_000)))
    assert len([*house.quarantine]) == 5_000


class Counts:
    """A table that counts how often it is asked for a backend."""

    def __init__(self, table):
        self.table, self.asked = table, 0

    def get(self, backend_id):
        self.asked += 1
        return self.table.get(backend_id)


def test_what_a_look_costs_does_not_grow_with_what_was_lost():
    """Each of a thousand requests that a crash ends asks again and again what became of it."""
    house = House()
    table = Counts(house.pool.table)
    house.quarantine = Quarantine(table, house.pool.clock)
    bodies = [b"%d" % number for number in range(1000)]
    began = house.pool.clock.at
    house.loses("b1", *bodies)
    house.loses("b2", POISON)
    for body in bodies:
        assert not house.is_undecided(body)
        assert house.quarantine.died(house.of(body), "m/b1", began) is None
    house.probe("b1", "refused")
    for body in bodies:
        assert house.quarantine.died(house.of(body), "m/b1", began) is True
    assert table.asked < 10 * len(bodies)
    house.probe("b2")
    house.pool.later(600)
    house.quarantine.tick()
    assert house.quarantine.watched == {}


def test_the_key_is_the_process_s_own():
    assert House().of(POISON) != House().of(POISON)


# --- workers of one gateway -----------------------------------------------------------------------


def workers(count=2):
    """Return workers that see the same backends, and tell each other as over their channel."""
    houses = [House() for _ in range(count)]
    for each in houses:
        each.pool = houses[0].pool
        each.quarantine = Quarantine(each.pool.table, each.pool.clock)
        each.quarantine.on_quarantined.append(each.told.append)

        def tell(proven, each=each):
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(proven))
            for other in houses:
                if other is not each:
                    other.quarantine.heard(sent)

        each.quarantine.share(b"key", tell)
    return houses


def test_deaths_that_two_workers_saw_are_two_to_all():
    first, second, third = workers(3)
    first.dies("b1", POISON)
    assert not second.is_out()
    second.dies("b2", POISON)
    for each in (first, second, third):
        assert each.is_out()
        assert [suspect.died for suspect in each.told] == [["m/b1", "m/b2"]]
    assert not third.is_out(OTHER)


def test_a_death_that_two_workers_saw_is_one():
    first, second = workers()
    for each in (first, second):
        each.loses("b1", POISON)
    first.probe("b1", "refused")
    second.quarantine.tick()
    first.pool.later(1)
    assert not first.is_undecided()
    assert not any(each.is_out() for each in (first, second))
    first.dies("b2", POISON)
    assert first.is_out()
    assert second.is_out()


def test_company_that_another_worker_had_at_both_deaths_counts():
    """Which of the two is to blame is told by the place of their answers, whoever sent them."""
    first, second = workers()
    for name, said in (("b1", 100), ("b2", 300)):
        first.loses(name, POISON, said_tokens=50)
        second.loses(name, OTHER, said_tokens=said)
        first.probe(name, "refused")
        second.quarantine.tick()
    for each in (first, second):
        assert each.is_out()
        assert not each.is_out(OTHER)


def test_what_another_worker_saw_end_in_order_has_not_died():
    first, second = workers()
    for name in ("b1", "b2"):
        second.quarantine.ended_in_order(f"m/{name}")
        first.dies(name, POISON)
    assert first.is_out()
    assert not second.is_out()


def test_what_is_stopped_by_order_dies_of_nothing():
    pool = Pool(2)
    backend = pool["b1"]
    assert may_be_a_death(backend, Ending.BROKE)
    for ending in (Ending.TIMEOUT, Ending.CONNECT, Ending.FULL, Ending.DOWN, Ending.MOVED):
        assert not may_be_a_death(backend, ending)
    for tending in (
        Tending(Phase.DRAINING, "restart", "drains"),
        Tending(Phase.STARTING, "restart", "restarts"),
        Tending(Phase.STARTING, "pending", "its service manager restarts it"),
    ):
        pool.table.tend(backend.id, tending)
        assert not may_be_a_death(backend, Ending.BROKE)
    pool.table.tend(backend.id, Tending(Phase.DOWN, "exited", "its process has ended"))
    assert may_be_a_death(backend, Ending.BROKE)
