"""What every shared store guarantees. A new form joins `STORES` and has to pass all of it."""

import asyncio
import math

import pytest

from gateway.pools.store import LEASE_S, LEFT_S, RENEW_S, MemoryStore


class HeldClock:
    def __init__(self):
        self.at = 1000.0

    def now(self):
        return self.at

    def wall(self):
        return self.at


STORES = {"memory": MemoryStore}


@pytest.fixture
def clock():
    return HeldClock()


@pytest.fixture(params=STORES)
def store(request, clock):
    return STORES[request.param](clock)


def run(coro):
    return asyncio.run(coro)


def test_a_lease_is_held_by_one_until_it_expires(store, clock):
    lease = run(store.acquire("chat", "a"))
    assert (lease.name, lease.holder, lease.until) == ("chat", "a", 1000.0 + LEASE_S)
    assert run(store.acquire("chat", "b")) is None
    assert run(store.acquire("other", "b")) is not None
    clock.at += LEASE_S - 0.1
    assert run(store.acquire("chat", "b")) is None
    clock.at += 0.1
    assert run(store.acquire("chat", "b")).holder == "b"


def test_its_tokens_only_grow_over_release_expiry_and_holders(store, clock):
    tokens = []
    for holder in "abaab":
        lease = run(store.acquire("chat", holder))
        tokens.append(lease.token)
        if holder == "a":
            run(store.release(lease))
        else:
            clock.at += LEASE_S
    assert tokens == sorted(set(tokens))


def test_its_holder_gets_it_anew_and_what_it_had_before_is_void(store):
    old = run(store.acquire("chat", "a"))
    new = run(store.acquire("chat", "a"))
    assert new.token > old.token
    assert run(store.renew(old)) is None
    run(store.release(old))
    assert run(store.acquire("chat", "b")) is None


def test_a_renewed_lease_lasts_longer_with_the_same_token(store, clock):
    lease = run(store.acquire("chat", "a"))
    clock.at += 10
    renewed = run(store.renew(lease))
    assert (renewed.token, renewed.until) == (lease.token, 1010.0 + LEASE_S)
    clock.at += 10
    assert run(store.acquire("chat", "b")) is None


def test_an_expired_lease_is_neither_renewed_nor_given_back_over_its_successor(store, clock):
    lease = run(store.acquire("chat", "a"))
    clock.at += LEASE_S
    assert run(store.renew(lease)) is None
    run(store.acquire("chat", "b"))
    assert run(store.renew(lease)) is None
    run(store.release(lease))
    assert run(store.acquire("chat", "c")) is None


def test_a_released_lease_is_free_at_once_and_gone_for_its_holder(store):
    lease = run(store.acquire("chat", "a"))
    run(store.release(lease))
    assert run(store.renew(lease)) is None
    assert run(store.acquire("chat", "b")) is not None


def test_a_holder_begins_nothing_with_too_little_time_left(store, clock):
    lease = run(store.acquire("chat", "a"))
    assert lease.may_act(lease.until - LEFT_S)
    assert not lease.may_act(lease.until - LEFT_S + 0.1)
    assert lease.may_act(clock.at + RENEW_S)


def test_a_restart_is_claimed_once_for_an_incarnation(store):
    assert run(store.claim_restart("p/a", "one"))
    assert not run(store.claim_restart("p/a", "one"))
    assert run(store.claim_restart("p/a", "two"))
    assert run(store.claim_restart("p/b", "one"))
    assert not run(store.claim_restart("p/a", "one"))


def test_each_attempt_to_start_what_is_gone_is_claimed_once(store):
    assert run(store.claim_restart("p/a", "one", 1))
    assert run(store.claim_restart("p/a", "one", 2))
    assert not run(store.claim_restart("p/a", "one", 2))


def test_of_many_claims_at_once_one_wins(store):
    async def race():
        won = []

        async def claim():
            won.append(await store.claim_restart("p/a", "one"))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(claim())
        return won

    assert run(race()).count(True) == 1


def test_a_claim_is_kept_for_a_day(store, clock):
    run(store.claim_restart("p/a", "one"))
    clock.at += 86_400 - 1
    assert not run(store.claim_restart("p/a", "one"))


def test_a_claim_where_nothing_ever_ran_is_kept_for_ten_minutes(store, clock):
    assert run(store.claim_restart("p/a", None))
    clock.at += 599
    assert not run(store.claim_restart("p/a", None))
    clock.at += 1
    assert run(store.claim_restart("p/a", None))


def test_a_hold_lasts_its_time_or_for_good(store, clock):
    run(store.hold("chat", 60))
    run(store.hold(None))
    assert run(store.holds()) == {"chat": 1060.0, None: math.inf}
    clock.at += 60
    assert run(store.holds()) == {None: math.inf}


def test_a_new_hold_replaces_the_old_one_and_lifting_ends_it(store):
    run(store.hold("chat"))
    run(store.hold("chat", 5))
    assert run(store.holds()) == {"chat": 1005.0}
    run(store.hold(None, 7))
    run(store.lift(None))
    run(store.lift(None))
    assert run(store.holds()) == {"chat": 1005.0}


def test_the_memory_form_forgets_the_oldest_claims_first(clock):
    async def claims():
        store = MemoryStore(clock)
        for number in range(4097):
            assert await store.claim_restart("p/a", str(number))
        assert not await store.claim_restart("p/a", "1")
        assert await store.claim_restart("p/a", "0")

    run(claims())
