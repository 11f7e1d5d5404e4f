"""How many client connections there may be, and which goes when there are too many."""

import pytest

from gateway.core.addresses import Proxies
from gateway.ingress.connections import ClientTimes, Connections, Shed, Waits, surplus
from gateway.ingress.descriptors import most_connections
from gateway.ingress.early import too_many_connections

TIMES = ClientTimes(head_s=10, idle_s=75, linger_s=2, closing_s=60)


class One:
    def __init__(self, book, host="1.2.3.4"):
        self.book, self.host = book, host
        self.line = None
        self.gone = False
        self.unsent = self.closes = False
        self.expired = None

    def enter(self, now=0.0):
        return self.book.enter(self, self.host, now)

    def wait(self, waits, now=0.0):
        if self.line is not None:
            del self.line[self]
        book = self.book
        lines = (book.heads, book.idle, book.lingering, book.closing)
        self.line = next(line for line in lines if line.waits is waits)
        self.line[self] = now + self.line.seconds
        return self

    def expire(self, waits):
        self.line, self.expired = None, waits

    def has_unsent(self):
        return self.unsent

    def shed(self):
        self.line, self.gone, self.closes = None, not self.unsent, self.unsent


def full(book, *waits):
    """Fill a book with one connection for each of `waits`; None has a request in progress."""
    ones = []
    for number, each in enumerate(waits):
        one = One(book, f"1.0.0.{number}")
        assert one.enter() is None
        if each is not None:
            one.wait(each)
        ones.append(one)
    return ones


@pytest.mark.parametrize(
    ("waits", "goes", "why"),
    [
        ((None, Waits.HEAD, Waits.IDLE, Waits.LINGER), 3, Shed.LINGERING),
        ((None, Waits.IDLE, Waits.HEAD), 2, Shed.SLOW_HEAD),
        ((None, Waits.IDLE, Waits.IDLE), 1, Shed.IDLE),
        ((None, Waits.HEAD, Waits.HEAD), 1, Shed.SLOW_HEAD),
    ],
)
def test_the_connection_that_is_easiest_to_miss_makes_room(waits, goes, why):
    book = Connections(TIMES, len(waits))
    ones = full(book, *waits)
    assert One(book, "9.9.9.9").enter(now=5.0) is None
    assert [one.gone for one in ones] == [place == goes for place in range(len(ones))]
    assert len(book) == len(waits)
    assert book.shed == {why: 1}


def test_a_fresh_head_is_no_slow_one_and_outlives_an_idle_connection():
    book = Connections(TIMES, 2)
    idle, fresh = full(book, Waits.IDLE, None)
    fresh.wait(Waits.HEAD, now=4.5)
    assert One(book, "9.9.9.9").enter(now=5.0) is None
    assert (idle.gone, fresh.gone) == (True, False)


def test_changed_times_hold_from_when_a_connection_joined_its_line():
    book = Connections(TIMES, 8)
    old, slow = full(book, Waits.IDLE, Waits.HEAD)
    book.apply(ClientTimes(head_s=3, idle_s=5, linger_s=2, closing_s=1))
    new = One(book, "9.9.9.9")
    new.enter()
    new.wait(Waits.IDLE, now=4.0)
    book.tick(5.0)
    assert (old.expired, slow.expired, new.expired) == (Waits.IDLE, Waits.HEAD, None)
    book.tick(9.0)
    assert new.expired is Waits.IDLE
    assert book.closing.seconds == 1


@pytest.mark.parametrize("waits", [None, Waits.CLOSING])
def test_a_request_in_progress_is_never_closed_for_another(waits):
    book = Connections(TIMES, 2)
    ones = full(book, waits, waits)
    assert One(book, "9.9.9.9").enter() is Shed.REFUSED
    assert not any(one.gone for one in ones)
    assert book.counts["refused",] == 1
    book.leave(ones[0])
    assert One(book, "9.9.9.9").enter() is None


def test_a_newcomer_closes_one_connection_at_most_where_all_have_unsent_bytes():
    book = Connections(TIMES, 4)
    ones = full(book, None, Waits.IDLE, Waits.IDLE, Waits.IDLE)
    for each in ones[1:]:
        each.unsent = True
    assert One(book, "9.9.9.9").enter() is Shed.REFUSED
    assert [each.closes for each in ones] == [False, True, False, False]
    ones[3].unsent = False
    assert One(book, "9.9.9.9").enter() is None  # one without any goes first
    assert [each.gone for each in ones] == [False, False, False, True]


def test_one_with_unsent_bytes_still_counts_until_it_is_gone():
    book = Connections(TIMES, 2)
    slow, idle = full(book, Waits.IDLE, Waits.IDLE)
    slow.unsent = True
    assert One(book, "9.9.9.9").enter() is None
    assert (slow.gone, idle.gone, len(book)) == (False, True, 2)
    assert One(book, "8.8.8.8").enter() is Shed.REFUSED


@pytest.mark.parametrize(
    ("hosts", "most", "refused"),
    [
        (["1.1.1.1"] * 3, 2, True),
        (["1.1.1.1", "1.1.1.1", "1.1.1.2"], 2, False),
        (["2001:db8::1", "2001:db8::2", "2001:db8::3"], 2, True),
        (["2001:db8::1", "2001:db8::2", "2001:db8:0:1::3"], 2, False),
        (["::ffff:1.1.1.1", "::ffff:1.1.1.1", "::ffff:1.1.1.2"], 2, False),
        (["127.0.0.1"] * 3, 2, True),
        ([None] * 3, 2, False),
        (["1.1.1.1"] * 6, None, True),
        (["127.0.0.1"] * 6, None, False),
        (["::1"] * 6, None, False),
        (["10.0.0.7"] * 6, None, False),
        (["10.0.0.7"] * 3, 2, True),
    ],
)
def test_one_address_has_its_share(hosts, most, refused):
    book = Connections(TIMES, 10, most_per_address=most)
    book.proxies = Proxies(["10.0.0.0/8"])
    *first, last = [One(book, host) for host in hosts]
    assert [one.enter() for one in first] == [None] * len(first)
    assert last.enter() is (Shed.ADDRESS if refused else None)
    if refused:
        assert len(book) == len(first)
        book.leave(last)  # never was in
        book.leave(first[0])
        book.leave(first[0])
        assert last.enter() is None


def test_what_waits_too_long_expires_in_its_turn():
    book = Connections(TIMES, 10)
    early, late = full(book, Waits.HEAD, None)
    late.wait(Waits.HEAD, now=1.0)
    idle = full(book, Waits.IDLE)[0]
    book.tick(10.5)
    assert (early.expired, late.expired, idle.expired) == (Waits.HEAD, None, None)
    late.wait(Waits.IDLE, now=10.5)  # its head came
    book.tick(80.0)
    assert (late.expired, idle.expired) == (None, Waits.IDLE)


@pytest.mark.parametrize("descriptors", [64, 200, 256, 1024, 4096, 65_536, 1 << 30])
@pytest.mark.parametrize("backends", [1, 8])
def test_clients_leave_descriptors_for_everything_else(descriptors, backends):
    most = most_connections(descriptors, backends)
    assert most >= 8
    if descriptors >= 200:
        assert 2 * most + 112 + 4 * backends <= descriptors  # each with its backend's connection
    assert most_connections(descriptors, backends, 5) == 5
    assert most_connections(descriptors, backends, 10**9) <= max(8, descriptors // 2)


@pytest.mark.parametrize(
    ("own", "others", "given_away"),
    [
        (64, [], 0),  # it is alone
        (64, [0], 8),
        (0, [64], 0),
        (40, [24], 0),  # as chance has it
        (41, [23], 3),
        (12, [0], 0),  # few
        (600, [400], 0),
        (660, [340], 40),
        (64, [64, 0], 6),
    ],
)
def test_a_worker_with_far_more_than_its_share_gives_a_part_of_that_away(own, others, given_away):
    assert surplus(own, others) == given_away


def test_workers_that_give_away_come_to_even_shares_and_stop():
    many, told = [200, 0, 10], [[0, 0, 0], [0, 0, 0]]
    for _ in range(40):
        for own in range(3):
            given = surplus(many[own], [told[0][other] for other in range(3) if other != own])
            many[own] -= given
            least = min(range(3), key=many.__getitem__)
            many[least] += given
        told = [told[1], list(many)]  # what is heard is two beats old
    assert max(many) <= 70 + 70 / 4
    assert all(not surplus(each, [other for other in many if other != each]) for each in many)


@pytest.mark.parametrize("why", [Shed.ADDRESS, Shed.REFUSED])
@pytest.mark.parametrize("by_setting", [True, False])
def test_a_setting_is_named_only_where_it_changes_the_number(why, by_setting):
    book = Connections(TIMES, 24, by_setting=by_setting)
    assert ("`limits." in too_many_connections(why, book).message) is by_setting
