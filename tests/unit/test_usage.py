"""Usage: counted once, written to a ledger of bounded size, read back, and told to Redis exactly once."""

import asyncio
import csv
import io
import json
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.core.aio import start
from gateway.core.asked import Caller
from gateway.core.endings import Attempt, Ending
from gateway.core.errors import ReplyTooLarge
from gateway.core.limits import Amounts, KeyLimits, Period, Price, Rule, Taken
from gateway.core.traffic import Cause, Fallback
from gateway.core.types import Endpoint, Outcome, RequestRecord, Usage, UsageSource
from gateway.limiting.limiter import Limiter
from gateway.limiting.plans import Plans
from gateway.store.shared import StoreUnavailable
from gateway.usage.accounts import Accounts
from gateway.usage.entries import Entry, Sums, Used, entry_of, summed
from gateway.usage.journal import UsageJournal, every_entry
from gateway.usage.report import PLACES, as_csv, days_between, rows
from gateway.usage.shared import SharedUsage
from gateway.usage.spent import Spent
from tests.limitercases import DAY_S, plan_of, used_of
from tests.storecases import HeldClock
from tests.unit.test_limiter import Lossy

PRICE = Price(1.0, 0.5, 2.0)


def record(id="r", *, tokens=(100, 50), cached=None, caller=True, attempts=1, key="k", **more):
    made = RequestRecord(id, Endpoint.CHAT, 0.0, pool="m", model="m", attempts=attempts)
    made.caller = Caller(key, key, "acme") if caller else None
    made.outcome, made.price = Outcome.OK, PRICE
    if tokens is not None:
        made.usage = Usage(*tokens, UsageSource.UPSTREAM, cached)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def entry(n, id="r", at=0.0, tokens=10):
    return Entry(n, id, at, "acme", "k", "m", "", tokens, 0, 1, 0.0, "upstream")


def test_a_line_has_what_was_used_and_what_it_costs():
    made = entry_of(record(tokens=(1000, 500), cached=400, price=PRICE), 12.5)
    named = (made.id, made.at, made.tenant, made.key, made.model)
    assert named == ("r", 12.5, "acme", "k", "m")
    assert (made.input, made.cached, made.output, made.source) == (1000, 400, 500, "upstream")
    assert made.money == pytest.approx((600 + 200 + 1000) / 1e6)


def test_usage_that_nobody_told_is_what_was_reserved():
    plan = plan_of(KeyLimits(5))
    taken = Taken(plan, Amounts(1, 30, 70, 100, 0), (1,), "x", shared=False, day=0, wall=0.0)
    made = entry_of(record(tokens=None, taken=taken), 0.0)
    assert (made.input, made.output, made.source) == (30, 70, "reserved")
    assert entry_of(record(tokens=None), 0.0).source == "unknown"
    for outcome in (Outcome.UPSTREAM_REJECTED, Outcome.REJECTED):
        refused = record(tokens=None, taken=taken, outcome=outcome)
        made = entry_of(refused, 0.0)
        assert (made.input, made.output, made.source) == (0, 0, "refused")
    refused.error_code = ReplyTooLarge.default_code  # it was made, and is only not passed on
    made = entry_of(refused, 0.0)
    assert (made.input, made.output, made.source) == (30, 70, "reserved")


NOT_SENT = Attempt("m/b1", "e", 0.0, 0.1, Ending.CONNECT)


@pytest.mark.parametrize(
    "more",
    [
        {"caller": False},
        {"attempts": 0},
        {"outcome": Outcome.SHED},
        {"attempts": 2, "failed": (NOT_SENT, NOT_SENT)},
    ],
)
def test_what_no_engine_took_has_no_line(more):
    assert entry_of(record(**more), 0.0) is None


def test_a_ledger_is_read_back_from_any_line(tmp_path):
    journal = UsageJournal(tmp_path, 10_000_000)
    journal.append([entry(n, f"r{n}") for n in range(1, 8)])
    journal.append([entry(8, "r8")])
    assert journal.last == 8
    assert [each.n for each in journal.after(0, 3)] == [1, 2, 3]
    assert [each.n for each in journal.after(3, 3)] == [4, 5, 6]
    assert [each.n for each in journal.after(1, 100)] == [2, 3, 4, 5, 6, 7, 8]
    assert journal.after(8, 100) == []
    journal.append([entry(9)])
    assert [each.n for each in journal.after(8, 100)] == [9]
    journal.close()


def test_what_was_read_of_a_ledger_is_not_read_again(tmp_path):
    journal = UsageJournal(tmp_path, 10_000_000)
    journal.append([entry(n) for n in range(1, 1001)])
    assert [each.n for each in journal.after(990, 512)] == list(range(991, 1001))
    (file,) = tmp_path.glob("*/*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    lines[-1] = lines[-1].replace(b"1000", b"9000", 1)  # who reads it again finds another line
    file.write_bytes(b"".join(lines))
    journal.append([entry(1001)])
    assert [each.n for each in journal.after(1000, 512)] == [1001]
    journal.close()


def test_limits_of_a_new_process_know_what_the_old_one_uses_after_its_start(tmp_path):
    async def story():
        clock = HeldClock()
        old, new = (Accounts(clock, None, tmp_path, 10**6) for _ in range(2))
        await old.open()
        await new.open()
        limiter = Limiter(clock, None, lambda: 1, new.spent)
        new.on_learnt.append(limiter.recall)
        plan = plan_of(KeyLimits(tokens_per_day=10_000), tenant="acme")

        async def used():
            for _ in range(31):
                await new.turn()
            return (await limiter.take(plan, Amounts())).used

        old.posted([record(tokens=(400, 100))])
        await old.turn()
        first = (await limiter.take(plan, Amounts())).used
        second = await used()
        old.posted([record("z", tokens=(4000, 1000))])
        await old.turn()
        return first, second, await used()

    assert asyncio.run(story()) == ((0,), (500,), (5500,))


def test_what_is_learnt_of_others_takes_nothing_from_what_was_taken_here(tmp_path):
    async def story():
        clock, spent = HeldClock(), 0.0
        limiter = Limiter(clock, None, lambda: 1, lambda rule, key_id: spent)
        plan = plan_of(KeyLimits(tokens_per_day=10_000), tenant="acme")
        await limiter.take(plan, Amounts(requests=1, tokens=1000))  # it runs still
        spent = 400.0
        limiter.recall()
        return (await limiter.take(plan, Amounts())).used

    assert asyncio.run(story()) == (1000,)


def test_a_ledger_goes_on_where_it_ended_even_within_a_line(tmp_path):
    journal = UsageJournal(tmp_path, 10_000_000)
    journal.append([entry(1), entry(2)])
    journal.close()
    file = next(tmp_path.glob("0/ledger-*"))
    file.write_bytes(file.read_bytes()[:-9])  # killed meanwhile
    again = UsageJournal(tmp_path, 10_000_000)
    assert (again.id, again.last) == (journal.id, 1)
    again.append([entry(2, "b")])
    assert [(each.n, each.id) for each in again.after(0, 9)] == [(1, "r"), (2, "b")]
    assert [each.id for each in every_entry(tmp_path)] == ["r", "b"]
    again.close()


@pytest.mark.parametrize("name", ["ledger-000000000001.old.jsonl", "ledger-copy-1.jsonl"])
def test_a_copy_of_a_ledger_beside_it_counts_for_nothing(tmp_path, name):
    journal = UsageJournal(tmp_path, 10_000_000)
    journal.append([entry(1), entry(2)])
    journal.close()
    file = next(tmp_path.glob("0/ledger-*"))
    file.with_name(name).write_bytes(file.read_bytes())
    again = UsageJournal(tmp_path, 10_000_000)
    again.append([entry(3)])
    assert [each.n for each in again.after(0, 9)] == [1, 2, 3]
    assert [each.n for each in every_entry(tmp_path)] == [1, 2, 3]
    again.close()


def test_its_size_is_bounded_and_the_oldest_lines_go_first(tmp_path):
    journal = UsageJournal(tmp_path, 16_000)
    for n in range(1, 400):
        journal.append([entry(n)])
    kept = [each.n for each in journal.after(0, 1000)]
    assert kept == list(range(kept[0], 400))
    assert 50 < len(kept) < 200
    assert sum(file.stat().st_size for file in tmp_path.glob("0/ledger-*")) < 20_000
    journal.close()


@pytest.mark.parametrize("left", [0, 5])
def test_a_ledger_has_a_name_of_its_own_although_the_disk_was_full_when_it_began(tmp_path, left):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))  # as on a full disk
    try:
        for folder in ("one", "other"):
            with pytest.raises(OSError, match="too large"):
                UsageJournal(tmp_path / folder, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journals = [UsageJournal(tmp_path / folder, 1000) for folder in ("one", "other")]
    one, other = (each.id for each in journals)
    assert len(one) == len(other) == 16
    assert one != other  # or Redis would take the lines of one for those of the other
    for each in journals:
        each.close()


@pytest.mark.parametrize("left", [b"\0" * 16, b"\xff" * 16, b"0123"])
def test_a_name_that_a_power_failure_damaged_is_replaced(tmp_path, left):
    UsageJournal(tmp_path, 1000).close()
    (tmp_path / "0/id").write_bytes(left)
    journal = UsageJournal(tmp_path, 1000)
    assert len(journal.id) == 16
    assert journal.id.isalnum()
    journal.close()
    again = UsageJournal(tmp_path, 1000)
    assert again.id == journal.id
    again.close()


def test_each_process_has_a_ledger_of_its_own(tmp_path):
    one, two = UsageJournal(tmp_path, 1000), UsageJournal(tmp_path, 1000)
    assert one.id != two.id
    one.append([entry(1, "a")])
    two.append([entry(1, "b")])
    assert sorted(each.id for each in every_entry(tmp_path)) == ["a", "b"]
    one.close()
    again = UsageJournal(tmp_path, 1000)
    assert (again.id, again.last) == (one.id, 1)
    again.close()
    two.close()


def test_a_ledger_with_a_file_that_this_user_may_not_write_is_left_and_another_is_written(tmp_path):
    """A gateway that ran as root for once left it there."""
    before = UsageJournal(tmp_path, 10**6)
    before.append([entry(1, "a")])
    before.close()
    foreign = tmp_path / "0/ledger-000000000002.jsonl"
    foreign.mkdir()  # no user may write that, root neither
    mine = UsageJournal(tmp_path, 10**6)
    mine.append([entry(1, "b")])
    assert mine.id != before.id
    assert [each.parent.name for each in tmp_path.glob("*/ledger-*1.jsonl")].count("1") == 1
    assert mine.left_behind() == []
    mine.close()
    foreign.rmdir()
    again = UsageJournal(tmp_path, 10**6)
    assert (again.id, again.last) == (before.id, 1)
    again.close()


def test_a_ledger_that_is_deleted_under_way_is_made_again_and_goes_on(tmp_path):
    folder = tmp_path / "state" / "usage"
    ledger = UsageJournal(folder, 1000)
    ledger.append([entry(1, "a")])
    shutil.rmtree(tmp_path / "state")
    ledger.append([entry(2, "b")])
    ledger.append([entry(3, "c")])
    assert [each.id for each in every_entry(folder)] == ["b", "c"]
    other = UsageJournal(folder, 1000)
    assert other.id != ledger.id  # it is still taken
    ledger.close()
    again = UsageJournal(folder, 1000)
    assert (again.id, again.last) == (ledger.id, 3)
    again.close()
    other.close()


class FakeRedis:
    """What the scripts of usage do, and a network that loses replies."""

    def __init__(self):
        self.trouble, self.counted, self.tokens, self.calls = "", {}, 0, 0
        self.days = {}
        self.back_to = None  # what it has again once it is told lines: another server has its place
        self.lose_reply = self.away = False

    async def ask(self, script, keys, args, within_s=1.0):
        self.calls += 1
        if self.away:
            raise StoreUnavailable
        if "HMGET" in script.text:
            return [self.counted.get(args[0]), self.counted.get("mark")]
        if "ARGV[3])\nend" in script.text:
            if self.counted.get(args[0]) == args[1]:
                self.counted[args[0]] = args[2]
            return 1
        if "HSCAN" in script.text:
            return "0", [each for pair in self.days.get(keys[0], {}).items() for each in pair]
        if len(args) == 1:
            self.counted["mark"] = args[0]
            return args[0]
        if self.back_to is not None:
            (self.counted, self.tokens), self.back_to = self.back_to, None
        journal, before, last = args[:3]
        if self.counted.get(journal, 0) == before:
            for place, name, n in zip(args[4::3], args[5::3], args[6::3], strict=True):
                day = self.days.setdefault(keys[place - 1], {})
                day[name] = str(float(day.get(name, 0)) + float(n))
                self.tokens += float(n) if '"input"' in name else 0
            self.counted[journal] = last
        if self.lose_reply:
            raise StoreUnavailable
        return self.counted[journal]

    def post(self, *args):
        raise AssertionError


def run(story):
    return asyncio.run(story)


def test_redis_counts_each_line_once_whatever_is_lost_and_whatever_it_forgets(tmp_path):
    async def story():
        redis = FakeRedis()
        accounts = Accounts(HeldClock(), redis, tmp_path / "usage", 10**6)
        for n in range(1000):
            accounts.posted([record(f"r{n}", tokens=(3, 1))])
        await accounts.turn()
        assert redis.tokens == 3000
        await accounts.turn()
        assert redis.tokens == 3000
        redis.lose_reply = True
        accounts.posted([record("a", tokens=(5, 0))])
        await accounts.turn()
        redis.lose_reply, redis.away = False, True
        accounts.posted([record("b", tokens=(7, 0))])
        await accounts.turn()
        assert not (await accounts.read([accounts.today()])).complete
        redis.away = False
        await accounts.turn()
        assert redis.tokens == 3012
        redis.counted, redis.tokens = {}, 0  # it came back empty
        await accounts.turn()
        assert redis.tokens == 3012
        await accounts.close()

    run(story())


def test_what_a_redis_lost_just_before_it_is_told_more_is_told_again(tmp_path):
    async def story():
        redis = FakeRedis()
        accounts = Accounts(HeldClock(), redis, tmp_path / "usage", 10**6)
        states = []
        for n in range(4):
            accounts.posted([record(f"r{n}", tokens=(3, 0))])
            redis.back_to = states[0] if n == 3 else None
            await accounts.turn()
            states.append((dict(redis.counted), redis.tokens))
        assert redis.tokens == 12
        assert redis.counted["mark"]  # it is read again how much all used
        await accounts.close()

    run(story())


def test_a_gateway_that_begins_again_knows_what_was_used_and_counts_on(tmp_path):
    async def story():
        clock = HeldClock()
        before = Accounts(clock, None, tmp_path / "usage", 10**6)
        await before.open()
        before.posted([record("a", tokens=(100, 50)), record("b", tokens=(10, 5), key="other")])
        await before.close()
        after = Accounts(clock, None, tmp_path / "usage", 10**6)
        await after.open()
        after.posted([record("c", tokens=(1, 1))])
        day = after.today()
        told = rows(await after.read([day]), ["key"], {})
        assert [(each["key"], each["requests"], each["input_tokens"]) for each in told] == [
            ("k", 2, 101),
            ("other", 1, 10),
        ]
        assert [each.n for each in every_entry(tmp_path / "usage")] == [1, 2, 3]
        plan = plan_of(
            KeyLimits(tokens_per_day=200), of_tenant=KeyLimits(budget_per_month=1.0), tenant="acme"
        )
        spent = {rule.period: after.spent(rule, "k") for rule in plan.rules}
        assert spent[Period.DAY] == 152
        assert spent[Period.MONTH] == pytest.approx((111 + 2 * 56) / 1e6)
        limiter = Limiter(clock, None, lambda: 1, after.spent)
        assert isinstance(await limiter.take(plan, Amounts(1, 40, 0, 40, 0)), Taken)
        assert not isinstance(await limiter.take(plan, Amounts(1, 40, 0, 40, 0)), Taken)
        await after.close()

    run(story())


def test_a_limit_that_workers_are_given_later_goes_on_from_what_all_of_them_used(tmp_path):
    """Before it was there, nobody counted for it: each worker knows its own ledger, and reads those of the others."""

    async def story():
        clock = HeldClock()
        link, workers = Lossy(clock), []
        for _ in range(2):
            used = Accounts(clock, None, tmp_path / "usage", 10**6)
            limiter = Limiter(clock, link, lambda: 2, used.spent)
            used.on_learnt.append(limiter.recall)
            workers.append((used, limiter))

        async def turns():
            for used, _ in workers:
                await used.turn()

        async def level(limits):
            levels = set()
            for _, limiter in workers:
                plan = plan_of(KeyLimits(**limits), tenant="acme")
                levels.add(used_of(await limiter.take(plan, Amounts()))[Rule(*limits)])
            return levels

        for used, _ in workers:
            used.posted([record(tokens=(400, 100))])
        await turns()
        for limits in ({"tokens_per_day": 10_000}, {"tokens_per_month": 10_000}):
            await level(limits)
            await turns()
            assert await level(limits) == {1000}
        assert workers[0][0].by_tenant["acme", "input"] == 400  # its own
        for used, _ in workers:
            used.posted([record(tokens=(40, 10))])
        await turns()
        await level({"tokens_per_day": 20_000})
        await turns()
        assert await level({"tokens_per_day": 20_000}) == {1100}
        for used, _ in workers:
            await used.close()

    run(story())


def test_a_limit_that_gateways_are_given_later_goes_on_from_what_all_of_them_used(tmp_path):
    """Each knows by itself what it used. What the others used it reads from Redis, also after it did so before."""

    async def story():
        redis, clock, gateways = FakeRedis(), HeldClock(), []
        for name in ("here", "there"):
            gateways.append(Accounts(clock, redis, tmp_path / name, 10**6))

        async def spent(limits):
            (rule,) = plan_of(limits, tenant="acme").rules
            for _ in range(20):
                found = [each.spent(rule, "k") for each in gateways]
                for each in gateways:
                    await each.turn()
            return found

        for used in (100, 200):
            for each in gateways:
                each.posted([record(tokens=(used, 0))])
                await each.turn()
            assert await spent(KeyLimits(tokens_per_day=used)) == [redis.tokens] * 2
        for each in gateways:
            await each.close()

    run(story())


def test_for_many_limits_that_are_new_the_month_is_read_only_now_and_then(tmp_path):
    async def story(keys):
        redis, reads = FakeRedis(), []
        used = Accounts(HeldClock(), redis, tmp_path / str(keys), 10**6)
        used.posted([record(key=f"k{n}") for n in range(keys)])
        used.telling.on_learnt.append(lambda: reads.append(keys))
        (rule,) = plan_of(KeyLimits(tokens_per_day=10)).rules
        for turn in range(30):
            used.spent(rule, f"new {turn}")
            await used.turn()
        await used.close()
        return len(reads)

    assert run(story(1)) == 7
    assert run(story(5_000)) == 4  # it takes longer


def test_lines_of_others_are_read_once_and_whole(tmp_path):
    mine, other = (UsageJournal(tmp_path, 100_000) for _ in range(2))
    mine.append([entry(1, "a")])
    other.append([entry(1, "b")])
    assert sorted(each.id for each in mine.unread()) == ["a", "b"]
    mine.append([entry(2, "c")])
    (file,) = (tmp_path / "1").glob("*.jsonl")
    whole = file.read_bytes()
    other.append([entry(2, "d"), entry(3, "e")])
    written = file.read_bytes()
    file.write_bytes(written[: len(whole) + 20])  # it is being written
    assert list(mine.unread()) == []
    file.write_bytes(written)
    next(mine.unread())  # whoever reads it fails
    assert [each.id for each in mine.unread()] == ["d", "e"]
    assert list(mine.unread()) == []
    mine.close()
    other.close()


def test_a_limit_for_an_alias_knows_after_a_start_what_was_asked_for_by_that_name(tmp_path):
    """A pool may have several aliases, each with limits of its own."""

    def spent(accounts, name, **limits):
        of = KeyLimits(models=((name, KeyLimits(**limits)),))
        plan = Plans({}).of(Caller("k", "k", "acme", limits=of), name, "m")
        return [accounts.spent(rule, "k") for rule in plan.rules]

    async def story():
        clock = HeldClock()
        before = Accounts(clock, None, tmp_path / "usage", 10**6)
        await before.open()
        before.posted([record("a"), record("b", model="gpt-4o", tokens=(10, 5))])
        before.posted([record("c", model="gpt-mini", tokens=(3, 1), pool="m")])
        told = Fallback("other", Cause.OVERLOAD)
        before.posted([record("d", model="gpt-4o", fallback=told, tokens=(1000, 1))])
        await before.close()
        after = Accounts(clock, None, tmp_path / "usage", 10**6)
        await after.open()
        after.posted([record("e", model="gpt-4o", tokens=(2, 1))])
        for _ in range(2):
            assert spent(after, "gpt-4o", tokens_per_day=9, tokens_per_month=9) == [18, 18]
            assert spent(after, "gpt-*", tokens_per_day=9) == [22]
            assert spent(after, "gpt-4o", budget_per_day=9) == [pytest.approx(24 / 1e6)]
            assert spent(after, "m", tokens_per_day=9) == [150 + 15 + 4 + 1001 + 3]
            await after.turn()
            after._fold(after.today())
        await after.close()

    run(story())


def test_a_limit_for_an_alias_knows_by_redis_what_all_gateways_were_asked_for_by_that_name():
    """A gateway goes on from that when a Redis that lost its data was told all again."""

    class Hashes:
        def __init__(self):
            self.days = {}

        async def ask(self, script, keys, args, within_s=1.0):
            if "HSCAN" in script.text:
                return ["0", [each for pair in self.days[keys[0]].items() for each in pair]]
            for place, name, amount in zip(args[4::3], args[5::3], args[6::3], strict=True):
                day = self.days.setdefault(keys[place - 1], {})
                day[name] = float(day.get(name, 0)) + float(amount)
            return args[2]

    names = ["org/gpt-4o", "org/gpt-4o", "other", ""]
    entries = [
        Entry(n, "r", 0.0, "acme", "k", "m", "", 10, 4, 5, 0.5, "upstream", name)
        for n, name in enumerate(names, 1)
    ]
    shared = SharedUsage(Hashes())
    run(shared.count("ledger", 0, entries))
    read = run(shared.read(["1970-01-01"]))
    assert read == summed(entries)
    of = KeyLimits(models=(("org/gpt-4o", KeyLimits(tokens_per_day=100)),))
    (rule,) = Plans({}).of(Caller("k", "k", "acme", limits=of), "org/gpt-4o", "m").rules
    assert Spent(read).of(rule, "k", "1970-01-01") == 30


def test_a_day_is_read_in_parts_and_one_that_is_missing_makes_it_unknown():
    class Pages:
        missing = False

        async def ask(self, script, keys, args, within_s=1.0):
            if args[0] == "0":
                return "7", ['["a","k","m","","input"]', "3", '["b","k","m","","input"]', "4"]
            if self.missing:
                raise StoreUnavailable
            return "0", ['["b","k","m","","input"]', "4", '["b","k","m","","money"]', "0.5"]

    pages, day = Pages(), "2026-11-23"
    shared = SharedUsage(pages)
    read = run(shared.read([day]))
    assert read == {
        (day, "a", "k", "m", ""): Sums(input=3),
        (day, "b", "k", "m", ""): Sums(input=4, money=0.5),
    }
    pages.missing = True
    with pytest.raises(StoreUnavailable):
        run(shared.read([day]))


def test_a_file_that_another_process_removes_meanwhile_is_passed_over(tmp_path):
    journals = [UsageJournal(tmp_path, 10_000) for _ in range(2)]
    for journal in journals:
        journal.append([entry(1, journal.id)])
    every = every_entry(tmp_path)
    assert next(every).id == journals[0].id
    next(tmp_path.glob("1/ledger-*")).unlink()
    assert [*every] == []
    for journal in journals:
        journal.close()


def test_a_ledger_is_written_while_others_cannot_be_read_and_they_count_once_they_can(
    tmp_path, caplog
):
    async def story():
        other = UsageJournal(tmp_path / "usage", 10**6, place=9)
        other.append([entry(1, "other", tokens=100)])
        unreadable = tmp_path / "usage/9/ledger-2.jsonl"
        unreadable.mkdir(parents=True)
        accounts = Accounts(HeldClock(), None, tmp_path / "usage", 10**6)
        accounts.posted([record("a", tokens=(7, 0))])
        (rule,) = plan_of(KeyLimits(tokens_per_day=1000), tenant="acme").rules
        for _ in range(3):
            assert accounts.spent(rule, "k") == 7
            await accounts.turn()
        assert (tmp_path / "usage/0/ledger-000000000001.jsonl").exists()
        told = [each.message for each in caplog.records if each.event == "usage_uncounted"]
        assert len(told) == 1
        assert str(unreadable) in told[0]
        unreadable.rmdir()
        accounts.posted([record("b", tokens=(1, 0))])
        for _ in range(31):
            await accounts.turn()
        assert accounts.spent(rule, "k") == 7 + 1 + 101
        assert [each.id for each in every_entry(tmp_path / "usage")] == ["a", "b", "other"]
        await accounts.close()
        other.close()

    run(story())


def test_what_no_disk_took_yet_is_told_of_its_day(tmp_path):
    async def story():
        clock, folder = HeldClock(), tmp_path / "state" / "usage"
        folder.parent.write_text("this is no folder")
        accounts = Accounts(clock, None, folder, 10**6)
        await accounts.open()
        first = accounts.today()
        accounts.posted([record("a", tokens=(3, 0))])
        await accounts.turn()
        clock.at += DAY_S
        second = accounts.today()
        accounts.posted([record("b", tokens=(5, 0), ended_at=clock.at)])
        await accounts.turn()

        async def told():
            used = await accounts.read([first, second])
            assert used.complete
            return {place[0]: each.input for place, each in used.sums.items()}

        assert await told() == {first: 3, second: 5}
        folder.parent.unlink()
        assert await told() == {first: 3, second: 5}
        await accounts.turn()
        assert [each.id for each in every_entry(folder)] == ["a", "b"]
        assert await told() == {first: 3, second: 5}
        await accounts.close()

    run(story())


def test_usage_is_told_to_be_incomplete_where_a_ledger_cannot_be_read(tmp_path):
    async def story():
        accounts = Accounts(HeldClock(), None, tmp_path, 10**6)
        accounts.posted([record("a", tokens=(3, 0))])
        await accounts.turn()
        (tmp_path / "9/ledger-1.jsonl").mkdir(parents=True)
        used = await accounts.read([accounts.today()])
        assert (used.complete, [each.input for each in used.sums.values()]) == (False, [3])
        await accounts.close()

    run(story())


def test_what_limits_owe_is_told_before_the_lines_of_it_and_once_redis_answers(tmp_path):
    async def story():
        redis, lost, told = FakeRedis(), False, []
        accounts = Accounts(HeldClock(), redis, tmp_path / "usage", 10**6)

        async def tell():
            told.append(redis.tokens)
            if lost:
                raise StoreUnavailable

        accounts.telling.on_telling.append(tell)
        accounts.posted([record(tokens=(3, 0))])
        redis.away = True
        await accounts.turn()
        assert told == []
        redis.away, lost = False, True
        await accounts.turn()
        assert (told, redis.tokens) == ([0], 0)
        lost = False
        await accounts.turn()
        assert (told, redis.tokens) == ([0, 0], 3)
        assert redis.counted["mark"]  # all read again what was used, as something may be lost
        await accounts.close()

    run(story())


@pytest.mark.parametrize("away", [True, False])
def test_what_comes_after_lines_that_a_disk_lost_is_counted(tmp_path, away):
    """After a power failure, or with a state folder of before, Redis has counted more than the ledger has."""

    async def story():
        redis, clock = FakeRedis(), HeldClock()
        before = Accounts(clock, redis, tmp_path / "usage", 10**6)
        for n in range(2):
            before.posted([record(f"r{n}{m}", tokens=(3, 0)) for m in range(10)])
            await before.turn()
            if n == 0:
                (file,) = tmp_path.glob("usage/0/ledger-*")
                early = file.read_bytes()
        await before.close()
        file.write_bytes(early)
        after = Accounts(clock, redis, tmp_path / "usage", 10**6)
        await after.open()
        redis.away = away
        for n in range(30):
            after.posted([record(f"s{n}", tokens=(3, 0))])
            await after.turn()
            redis.away = False
        assert redis.tokens == 150
        await after.close()

    run(story())


def test_redis_is_told_what_the_ledgers_of_processes_that_are_gone_still_have(tmp_path):
    async def story():
        redis, clock = FakeRedis(), HeldClock()
        here, gone = (Accounts(clock, redis, tmp_path / "usage", 10**6) for _ in range(2))
        redis.away = True
        for each, tokens in ((here, 3), (gone, 50)):
            each.posted([record(tokens=(tokens, 0))])
            await each.turn()
        await gone.close()  # it told nobody
        redis.away = False
        await here.turn()
        assert redis.tokens == 53
        redis.counted, redis.tokens = {}, 0  # it came back empty
        await here.turn()
        assert redis.tokens == 53
        running = Accounts(clock, redis, tmp_path / "usage", 10**6)
        await running.open()  # nobody holds the ledger that was told
        assert [each.name for each in sorted(tmp_path.glob("usage/*"))] == ["0", "1"]
        for each in (here, running):
            await each.close()

    run(story())


def test_memory_holds_what_limits_need_of_the_month_and_no_more_than_its_bound(tmp_path):
    async def story():
        clock = HeldClock()
        clock.at = 20_000.0 * DAY_S  # the fourth of a month
        accounts = Accounts(clock, None, tmp_path / "usage", 10**7)
        await accounts.open()
        rules = plan_of(KeyLimits(tokens_per_day=9, tokens_per_month=9), tenant="acme").rules
        for _ in range(40):
            accounts.posted([record(received_at=clock.now(), tokens=(10, 5))])
            await accounts.turn()
            spent = [accounts.spent(rule, "k") for rule in rules]
            assert len(accounts.sums) <= 2
            clock.at += DAY_S
        assert spent == [15, 15 * 12]  # the twelfth of the month after
        every = (await accounts.read(days_between("2024-10-04", "2024-11-12"))).sums
        assert sum(each.requests for each in every.values()) == 40
        await accounts.close()

    run(story())


@pytest.mark.parametrize(
    "wrong_s", [-3650 * DAY_S, 40 * DAY_S, DAY_S], ids=["behind", "ahead", "a day"]
)
@pytest.mark.parametrize("leaps", ["before it starts", "while it runs"])
def test_limits_know_what_was_used_once_a_wrong_clock_is_right(tmp_path, wrong_s, leaps):
    async def story():
        clock = HeldClock()
        clock.at = 20_030.0 * DAY_S + 9.0

        async def opened():
            made = Accounts(clock, None, tmp_path / "usage", 10**6)
            await made.open()
            return made

        accounts = await opened()
        accounts.posted([record(received_at=clock.now(), tokens=(400, 100))])
        if leaps == "before it starts":
            await accounts.close()
        clock.at += wrong_s
        accounts = await opened() if leaps == "before it starts" else accounts
        limiter = Limiter(clock, None, lambda: 1, accounts.spent)
        accounts.on_learnt.append(limiter.recall)
        plan = plan_of(KeyLimits(tokens_per_day=9999, tokens_per_month=9999), tenant="acme")
        await accounts.turn()
        await limiter.take(plan, Amounts())
        clock.at -= wrong_s
        accounts.posted([record(received_at=clock.now(), tokens=(40, 10))])
        for _ in range(31):
            await accounts.turn()
        used = (await limiter.take(plan, Amounts())).used
        await accounts.close()
        return used

    assert run(story()) == (550, 550)


def test_keys_beyond_the_bound_of_the_memory_are_counted_together():
    async def story():
        clock = HeldClock()
        accounts = Accounts(clock, None, None, 0)
        for n in range(100_100):
            accounts.posted([record(key=f"k{n}")])
        assert len(accounts.sums) == 100_001
        assert accounts.sums[accounts.today(), "acme", "_other", "m", ""].requests == 100
        of_tenant = plan_of(of_tenant=KeyLimits(tokens_per_day=9), tenant="acme")
        assert accounts.spent(of_tenant.rules[0], "k0") == 100_100 * 150
        clock.at += DAY_S
        await accounts.turn()
        assert len(accounts.sums) == 50_000

    run(story())


def test_a_disk_that_is_full_loses_nothing_that_fits_the_memory(tmp_path):
    async def story():
        blocked = tmp_path / "usage"
        blocked.write_text("in the way")
        accounts = Accounts(HeldClock(), None, blocked, 10**6)
        accounts.posted([record("a")])
        await accounts.turn()
        blocked.unlink()
        await accounts.turn()
        assert [each.id for each in every_entry(blocked)] == ["a"]
        await accounts.close()

    run(story())


class SlowDisk(ThreadPoolExecutor):
    """Takes its time over whatever it is given."""

    def submit(self, work, *args):
        return super().submit(lambda: (time.sleep(0.05), work(*args))[1])


def test_writing_the_ledger_ends_while_requests_keep_ending(tmp_path):
    """What comes during a turn is for the next one: Redis and other limits would never be told under load."""

    async def main():
        accounts = Accounts(HeldClock(), None, tmp_path / "usage", 10**9)
        await accounts.open()
        accounts.posted([record("first")])

        async def requests_end():
            while True:
                accounts.posted([record("more")])
                await asyncio.sleep(0)

        busy = start(requests_end(), name="load")
        async with asyncio.timeout(20):
            await accounts.turn()
        busy.cancel()
        await accounts.close()

    asyncio.run(main())


def test_who_is_cancelled_while_lines_are_written_has_none_written_twice(tmp_path):
    async def story():
        accounts = Accounts(HeldClock(), None, tmp_path / "usage", 10**6)
        accounts.posted([record("first")])
        await accounts.turn()
        asyncio.get_running_loop().set_default_executor(SlowDisk())
        accounts.posted([record("a"), record("b")])
        turn = start(accounts.turn(), name="turn")
        await asyncio.sleep(0.01)  # it is being written
        turn.cancel()
        await asyncio.wait([turn])
        accounts.posted([record("c")])
        await accounts.close()
        assert [(each.n, each.id) for each in every_entry(tmp_path / "usage")] == [
            (1, "first"),
            (2, "a"),
            (3, "b"),
            (4, "c"),
        ]

    run(story())


def test_tenants_beyond_the_first_thousand_share_a_series():
    accounts = Accounts(HeldClock(), None, None, 0)
    for n in range(1100):
        made = record()
        made.caller = Caller("k", "k", f"t{n}")
        accounts.posted([made])
    assert accounts.by_tenant["t0", "input"] == 100
    assert accounts.by_tenant["_other", "output"] == 100 * 50
    assert len(accounts.by_tenant) == 3 * 1001


def test_rows_are_grouped_and_filtered_as_asked():
    sums = summed([entry(1, at=0), entry(2, at=DAY_S), entry(3, at=DAY_S, tokens=5)])
    assert sums["1970-01-02", "acme", "k", "m", ""] == Sums(2, 15, 0, 2, 0.0)
    assert [(each["day"], each["input_tokens"]) for each in rows(Used(sums), ["day"], {})] == [
        ("1970-01-01", 10),
        ("1970-01-02", 15),
    ]
    assert [(each["tenant"], each["requests"]) for each in rows(Used(sums), ["tenant"], {})] == [
        ("acme", 3)
    ]
    assert rows(Used(sums), ["day"], {"key": "x"}) == []


def test_csv_has_a_head_and_no_formulas():
    sums = {("1970-01-01", "=cmd()", "k", "m", ""): Sums(1, 2, 0, 3, 0.5)}
    assert as_csv(rows(Used(sums), ["day", "tenant", "key"], {})) == (
        "day,tenant,key,model,adapter,requests,input_tokens,cached_tokens,output_tokens,money,complete\n"
        "1970-01-01,'=cmd(),k,,,1,2,0,3,0.5,true\n"
    )


def test_csv_writes_each_value_as_json_does():
    sums = {("1970-01-01", "acme", "k", "m", "a"): Sums(1, 2, 0, 3, 0.25)}
    found = [*rows(Used(sums), PLACES, {}), *rows(Used(sums, complete=False), ["key"], {})]
    for row, told in zip(csv.DictReader(io.StringIO(as_csv(found))), found, strict=True):
        for name, text in row.items():
            value = told[name]
            assert text == (
                "" if value is None else value if isinstance(value, str) else json.dumps(value)
            )


def test_days_are_named_and_not_too_many():
    assert days_between("2026-02-27", "2026-03-01") == ["2026-02-27", "2026-02-28", "2026-03-01"]
    for first, last in [
        ("2026-02-30", "2026-03-01"),
        ("2026-03-02", "2026-03-01"),
        ("2020-01-01", "2026-01-01"),
    ]:
        with pytest.raises(ValueError, match="day|400"):
            days_between(first, last)
    with pytest.raises(
        ValueError, match=r"the last day, 2026-03-01, is before the first, 2026-03-02$"
    ):
        days_between("2026-03-02", "2026-03-01")
    with pytest.raises(ValueError, match=r"are 2193 days; at most 400 are read at a time$"):
        days_between("2020-01-01", "2026-01-01")
    with pytest.raises(ValueError, match=r"yesterday is not a day: write it like 2026-11-01$"):
        days_between("yesterday", "2026-03-01")


def test_each_day_is_counted_by_itself_also_once_the_next_has_begun():
    clock = HeldClock()
    accounts = Accounts(clock, None, None, 0)
    for step_s in (0.0, DAY_S, 0.0):
        clock.at += step_s
        made = record(tokens=(10, 5))
        made.ended_at = clock.now()
        accounts.posted([made])
    late = record(tokens=(1, 1))  # it ended before midnight, and is posted after it
    late.ended_at = clock.now() - DAY_S
    accounts.posted([late])
    days = sorted((place[0], sums.requests, sums.input) for place, sums in accounts.sums.items())
    assert [(requests, tokens) for _, requests, tokens in days] == [(2, 11), (2, 20)]
