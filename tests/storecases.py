"""What every shared store guarantees: a form joins with a fixture `desk`, and has to pass all of it."""

import asyncio
import math

from gateway.store.shared import (
    LEASE_S,
    LEFT_S,
    LIFTED,
    LIFTED_S,
    LOG_KEPT,
    LOG_READ,
    RENEW_S,
    Board,
)


class HeldClock:
    def __init__(self):
        self.at = 1000.0

    def now(self):
        return self.at

    def wall(self):
        return self.at


class Desk:
    """A store in a loop of its own, whose calls tests write without `await`; `passes` is how time goes on."""

    def __init__(self, make):
        self.clock = HeldClock()
        self.runner = asyncio.Runner()
        self.store = make(self.clock)

    def __getattr__(self, name):
        return lambda *args: self.run(getattr(self.store, name)(*args))

    def run(self, coro):
        return self.runner.run(coro)

    def passes(self, seconds):
        self.clock.at += seconds

    def close(self):
        self.run(self.store.close())
        self.runner.close()


class Reader:
    """One that reads a log, from where it was."""

    def __init__(self, desk, name, log="l", after=0):
        self.desk, self.name, self.log, self.place = desk, name, log, after

    def hears(self, told=""):
        heard = self.desk.tell(self.log, "word", self.name, told, self.place)
        assert heard.word == "word"
        self.place = heard.place
        return [*heard.told]


class StoreCases:
    def test_a_lease_is_held_by_one_until_it_expires(self, desk):
        lease = desk.acquire("chat", "a")
        assert (lease.name, lease.holder, lease.until) == ("chat", "a", 1000.0 + LEASE_S)
        assert desk.acquire("chat", "b") is None
        assert desk.acquire("other", "b") is not None
        desk.passes(LEASE_S - 2)
        assert desk.acquire("chat", "b") is None
        desk.passes(2)
        assert desk.acquire("chat", "b").holder == "b"

    def test_its_tokens_only_grow_over_release_expiry_and_holders(self, desk):
        tokens = []
        for holder in "abaab":
            lease = desk.acquire("chat", holder)
            tokens.append(lease.token)
            if holder == "a":
                desk.release(lease)
            else:
                desk.passes(LEASE_S)
        assert tokens == sorted(set(tokens))

    def test_its_holder_gets_it_anew_and_what_it_had_before_is_void(self, desk):
        old = desk.acquire("chat", "a")
        new = desk.acquire("chat", "a")
        assert new.token > old.token
        assert desk.renew(old) is None
        desk.release(old)
        assert desk.acquire("chat", "b") is None

    def test_a_holder_whose_name_begins_like_anothers_is_another(self, desk):
        desk.acquire("chat", "ab")
        assert desk.acquire("chat", "a") is None
        desk.acquire("other", "a")
        assert desk.acquire("other", "ab") is None

    def test_a_renewed_lease_lasts_longer_with_the_same_token(self, desk):
        lease = desk.acquire("chat", "a")
        desk.passes(LEASE_S - 2)
        renewed = desk.renew(lease)
        assert (renewed.token, renewed.until) == (lease.token, desk.clock.at + LEASE_S)
        desk.passes(LEASE_S - 2)
        assert desk.acquire("chat", "b") is None

    def test_an_expired_lease_is_neither_renewed_nor_given_back_over_its_successor(self, desk):
        lease = desk.acquire("chat", "a")
        desk.passes(LEASE_S)
        assert desk.renew(lease) is None
        desk.acquire("chat", "b")
        assert desk.renew(lease) is None
        desk.release(lease)
        assert desk.acquire("chat", "c") is None

    def test_a_released_lease_is_free_at_once_and_gone_for_its_holder(self, desk):
        lease = desk.acquire("chat", "a")
        desk.release(lease)
        assert desk.renew(lease) is None
        assert desk.acquire("chat", "b") is not None

    def test_a_holder_begins_nothing_with_too_little_time_left(self, desk):
        lease = desk.acquire("chat", "a")
        assert lease.may_act(lease.until - LEFT_S)
        assert not lease.may_act(lease.until - LEFT_S + 0.1)
        assert lease.may_act(desk.clock.at + 2 * RENEW_S)

    def test_a_restart_is_claimed_once_for_an_incarnation(self, desk):
        assert desk.claim_restart("p/a", "one")
        assert not desk.claim_restart("p/a", "one")
        assert desk.claim_restart("p/a", "two")
        assert desk.claim_restart("p/b", "one")
        assert not desk.claim_restart("p/a", "one")

    def test_each_attempt_to_start_what_is_gone_is_claimed_once(self, desk):
        assert desk.claim_restart("p/a", "one", 1)
        assert desk.claim_restart("p/a", "one", 2)
        assert not desk.claim_restart("p/a", "one", 2)

    def test_of_many_claims_at_once_one_wins(self, desk):
        async def race():
            async with asyncio.TaskGroup() as tasks:
                claims = [
                    tasks.create_task(desk.store.claim_restart("p/a", "one")) for _ in range(20)
                ]
            return [claim.result() for claim in claims]

        assert desk.run(race()).count(True) == 1

    def test_a_claim_is_kept_for_a_day(self, desk):
        desk.claim_restart("p/a", "one")
        desk.passes(86_400 - 60)
        assert not desk.claim_restart("p/a", "one")

    def test_a_claim_where_nothing_ever_ran_is_kept_for_ten_minutes(self, desk):
        assert desk.claim_restart("p/a", None)
        desk.passes(570)
        assert not desk.claim_restart("p/a", None)
        desk.passes(30)
        assert desk.claim_restart("p/a", None)

    def test_a_hold_lasts_its_time_or_for_good(self, desk):
        desk.hold("chat", 60)
        desk.hold(None)
        holds = desk.holds()
        assert set(holds) == {"chat", None}
        assert 1055 < holds["chat"] <= 1060
        assert holds[None] == math.inf
        desk.passes(60)
        assert desk.holds() == {None: math.inf}

    def test_a_new_hold_replaces_the_old_one(self, desk):
        desk.hold("chat")
        desk.hold("chat", 50)
        assert 1045 < desk.holds()["chat"] <= 1050
        desk.hold("chat")
        assert desk.holds()["chat"] == math.inf

    def test_that_a_hold_was_lifted_is_told_for_long_and_a_new_one_counts_again(self, desk):
        desk.hold(None, 70)
        desk.hold("m/a#drained")
        desk.lift(None)
        desk.lift(None)
        assert desk.holds() == {None: LIFTED, "m/a#drained": math.inf}
        desk.passes(LIFTED_S - 3600)
        assert desk.holds()[None] == LIFTED
        desk.hold(None)
        assert desk.holds()[None] == math.inf

    def test_replicas_hear_of_each_other_until_one_goes_or_falls_silent(self, desk):
        assert set(desk.beat("a", "one {}", 60)) == {"a"}
        desk.passes(10)
        told = desk.beat("b", "two", 60)
        assert {each: text for each, (text, _) in told.items()} == {"a": "one {}", "b": "two"}
        assert 9 <= told["a"][1] <= 12
        assert told["b"][1] <= 1
        desk.passes(51)
        assert set(desk.beat("c", "", 60)) == {"b"}
        desk.beat("b", "two", 60)
        assert set(desk.beat("b", "", 60)) == set()

    def test_what_is_told_to_a_log_is_heard_once_by_each_other_in_order(self, desk):
        one, two = Reader(desk, "one"), Reader(desk, "two")
        assert one.hears() == []
        assert one.hears("one more") == []
        assert two.hears("two") == ["one more"]
        assert one.hears("three") == ["two"]
        assert one.hears() == []
        assert two.hears() == ["three"]
        assert Reader(desk, "late").hears() == ["one more", "two", "three"]
        assert Reader(desk, "late", log="other").hears() == []

    def test_a_log_has_the_first_word_and_takes_nothing_under_another(self, desk):
        Reader(desk, "one").hears("one more")
        heard = desk.tell("l", "another", "two", "lost", 0)
        assert (heard.word, [*heard.told]) == ("word", [])
        assert Reader(desk, "two").hears() == ["one more"]

    def test_a_log_keeps_a_bounded_number_and_is_read_in_parts(self, desk):
        one, two, heard = Reader(desk, "one"), Reader(desk, "two"), []
        two.hears()
        for number in range(LOG_KEPT + 10):
            one.hears(str(number))
        while told := two.hears():
            assert len(told) <= LOG_READ
            heard += told
        assert heard == [str(number) for number in range(10, LOG_KEPT + 10)]

    def test_a_place_that_a_log_does_not_have_yet_is_of_one_that_was_lost(self, desk):
        Reader(desk, "one").hears("anew")
        late = Reader(desk, "late", after=1 << 52)
        assert late.hears() == ["anew"]
        assert late.hears() == []

    def test_what_is_told_on_one_board_is_not_on_another(self, desk):
        desk.beat("a", "here", 60)
        assert set(desk.beat("b", "4 requests", 2, Board.UNDER_WAY)) == {"b"}
        assert set(desk.beat("c", "here", 60)) == {"a", "c"}
