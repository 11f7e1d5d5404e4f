"""What the keys that replicas share guarantee beyond `tests/keycases.py`: how a reader follows them."""

import json

import pytest

from gateway.access import redisstore
from gateway.access.keyerrors import NoSuchKey, WrongPepper
from gateway.access.redisstore import RedisKeys
from gateway.access.sharedkeys import SharedKeys
from gateway.store.shared import StoreUnavailable
from tests.keycases import NOW, Desk, KeyCases

PEPPER = b"p" * 32


class SharedDesk(Desk):
    """`server` is a Redis, or what stands for one; `forget` and `lose_since` act on it."""

    pepper = PEPPER

    def __init__(self, link):
        async def make(tiers, wall):
            return RedisKeys(link, PEPPER, tiers, wall)

        super().__init__(make)

    def ids(self, part):
        return sorted(part.entries)


class Deaf:
    """A link that does not hear the answers to the next `deaf` changes, which arrive or do not."""

    def __init__(self, link):
        self._link = link
        self.deaf, self.arrives = 0, True

    async def ask(self, script, *args):
        heard = script is not redisstore.scripts.PUT or not self.deaf
        if heard:
            return await self._link.ask(script, *args)
        self.deaf -= 1
        if self.arrives:
            await self._link.ask(script, *args)
        raise StoreUnavailable("gone")


class Counting:
    """A link that counts the words of each reply to who asks for uses."""

    def __init__(self, link):
        self._link, self.words = link, []

    async def ask(self, *args):
        reply = await self._link.ask(*args)
        self.words.append(len(reply[1]))
        return reply


class SharedKeyCases(KeyCases):
    def test_a_reader_gets_everything_and_then_what_changed_since(self, desk):
        a, b = (desk.create({"name": name}).id for name in "ab")
        first = desk.read()
        assert (first.whole, desk.ids(first)) == (True, sorted([a, b]))
        same = desk.read(first.generation, first.stamp)
        assert (same.whole, desk.ids(same)) == (False, [])
        assert (same.generation, same.stamp) == (first.generation, first.stamp)
        desk.revoke(b)
        c = desk.create({"name": "c"}).id
        since = desk.read(first.generation, first.stamp)
        assert (since.whole, desk.ids(since)) == (False, sorted([b, c]))
        assert since.entries[b].record.state(desk.at) == "revoked"
        assert since.generation == first.generation + 2

    def test_a_reader_of_another_history_gets_everything(self, desk):
        a = desk.create({"name": "a"}).id
        first = desk.read()
        for generation, stamp in ((first.generation, "other"), (99, first.stamp), (0, "lost")):
            part = desk.read(generation, stamp)
            assert (part.whole, desk.ids(part)) == (True, [a])
            assert (part.generation, part.stamp) == (first.generation, first.stamp)

    def test_a_reader_that_was_away_for_long_gets_everything(self, desk, monkeypatch):
        monkeypatch.setattr(redisstore.scripts, "KEPT_STAMPS", 4)
        made = desk.create({"name": "a"}).id
        first = desk.read()
        for number in range(6):
            desk.update(made, {"priority": number})
            whole = desk.read(first.generation, first.stamp).whole
            assert whole == (number >= 3)

    def test_many_records_come_in_pages_and_are_of_one_generation(self, desk, monkeypatch):
        monkeypatch.setattr(redisstore, "_PAGE", 3)
        made = sorted(desk.create({"name": f"n{number}"}).id for number in range(10))
        part = desk.read()
        assert desk.ids(part) == made
        assert part.generation == 10
        assert desk.ids(desk.read(0, "other")) == made

    def test_the_last_uses_of_many_keys_come_in_parts(self, desk):
        """One reply with all of them would keep limits waiting, who ask over the same connection."""
        used = {f"k{number:07d}": NOW + number for number in range(2000)}
        desk.note_use(used)
        counting = Counting(desk.store.link)
        desk.store = RedisKeys(counting, PEPPER, lambda: {}, lambda: desk.at)
        assert desk.uses() == used
        assert max(counting.words) < 2 * 1000

    def test_what_changes_nothing_is_no_change(self, desk):
        made = desk.create({"name": "a"}).id
        desk.revoke(made)
        first = desk.read()
        desk.revoke(made)
        assert desk.read().generation == first.generation

    def test_another_pepper_changes_nothing(self, desk):
        made = desk.create({"name": "a"}).id
        other = RedisKeys(desk.store.link, b"q" * 32, lambda: {}, lambda: desk.at)
        for call in (other.create({"name": "b"}), other.rotate(made, 0.0), other.revoke(made)):
            with pytest.raises(WrongPepper, match="pepper of this machine"):
                desk.runner.run(call)
        assert [each.state(desk.at) for each in desk.list()] == ["active"]

    @pytest.mark.parametrize("arrives", [True, False])
    def test_what_nobody_knows_to_be_made_is_made_once_when_it_is_asked_for_again(
        self, desk, arrives
    ):
        desk.store = RedisKeys(Deaf(desk.store.link), PEPPER, lambda: {}, lambda: desk.at)
        desk.store.link.deaf, desk.store.link.arrives = 1, arrives
        with pytest.raises(StoreUnavailable):
            desk.create({"name": "a"})
        made = desk.create({"name": "a"})
        assert [each.id for each in desk.list()] == [made.id]
        assert desk.lets_in(made.key)
        assert desk.create({"name": "a"}).id != made.id  # that is asked for anew
        for _ in range(2):  # the second time there are two secrets already
            desk.store.link.deaf = 1
            with pytest.raises(StoreUnavailable):
                desk.rotate(made.id, 60.0)
            other = desk.rotate(made.id, 60.0)
            assert desk.lets_in(other.key)
            assert len({other.key, made.key}) == 2
            desk.at += 61.0

    def test_a_rotation_of_which_nobody_heard_is_taken_up_though_the_key_was_changed_since(
        self, desk
    ):
        desk.store = RedisKeys(Deaf(desk.store.link), PEPPER, lambda: {}, lambda: desk.at)
        made = desk.create({"name": "a"})
        desk.store.link.deaf, desk.store.link.arrives = 1, True
        with pytest.raises(StoreUnavailable):
            desk.rotate(made.id, 60.0)
        desk.update(made.id, {"owner": "ann@example.org"})
        again = desk.rotate(made.id, 60.0)
        assert again.record.owner == "ann@example.org"
        assert len(again.record.secrets) == 2
        assert desk.lets_in(again.key)
        assert desk.lets_in(made.key)

    def test_what_nobody_knows_to_be_made_is_not_taken_up_for_ever(self, desk):
        desk.store = RedisKeys(Deaf(desk.store.link), PEPPER, lambda: {}, lambda: desk.at)
        desk.store.link.deaf, desk.store.link.arrives = 1, True
        with pytest.raises(StoreUnavailable):
            desk.create({"name": "a"})
        desk.at += 3601.0
        made = desk.create({"name": "a"})
        assert len(desk.list()) == 2
        assert made.record.created_s == desk.at

    def test_a_change_of_a_key_that_was_lost_meanwhile_is_told(self, desk):
        made = desk.create({"name": "a"})
        self.lose(desk)
        with pytest.raises(NoSuchKey):
            desk.put(made.record, made.record.version)

    def test_records_that_alone_are_lost_are_told_again_by_who_knows_them(self, desk, tmp_path):
        made = [desk.create({"name": name}).id for name in "ab"]
        follower, late = (SharedKeys(desk.store, tmp_path / name) for name in ("one", "late"))
        desk.runner.run(follower.look())
        self.lose_records(desk)
        desk.runner.run(late.look())
        assert late.snapshot.entries == {}
        desk.runner.run(follower.look())
        assert sorted(follower.snapshot.entries) == sorted(made)
        desk.runner.run(late.look())
        assert sorted(late.snapshot.entries) == sorted(made) == desk.ids(desk.read())

    def test_of_what_the_store_lost_and_does_not_take_again_the_log_tells_once(
        self, desk, tmp_path, caplog
    ):
        made = desk.create({"name": "a"})
        link = Deaf(desk.store.link)
        store = RedisKeys(link, PEPPER, lambda: {}, lambda: desk.at)
        follower = SharedKeys(store, tmp_path / "copy")
        desk.runner.run(follower.look())
        self.lose(desk)
        link.deaf, link.arrives = 3, False  # its memory is full
        for _ in range(5):
            desk.runner.run(follower.look())
        assert desk.ids(desk.read()) == [made.id]
        told = [each.event for each in caplog.records if each.name == "gateway.keys"]
        assert told == ["keys_told_again", "keys_trouble"]
        self.lose(desk)
        desk.runner.run(follower.look())
        assert caplog.records[-1].event == "keys_told_again"  # another loss

    def test_what_the_store_lost_is_told_though_another_trouble_was_told_before(
        self, desk, tmp_path, caplog
    ):
        desk.create({"name": "a"})
        follower = SharedKeys(desk.store, tmp_path / "copy")
        desk.runner.run(follower.look())
        self.lose(desk)
        other = RedisKeys(desk.store.link, b"x" * 32, lambda: {}, lambda: desk.at)
        desk.runner.run(other.create({"name": "of another pepper"}))
        desk.runner.run(follower.look())
        self.lose(desk)
        desk.runner.run(follower.look())
        told = [each.event for each in caplog.records if each.name == "gateway.keys"]
        assert told == ["keys_trouble", "keys_told_again"]

    def lose_records(self, desk):
        raise NotImplementedError

    def lose(self, desk):
        raise NotImplementedError

    def test_a_record_that_this_version_does_not_understand_is_left_out_and_named(self, desk):
        good, bad = (desk.create({"name": name}) for name in "ab")
        record = bad.record
        text = redisstore.Entry.of(record).text
        node = json.loads(text.partition(" ")[2]) | {"of_the_future": 1}
        self.plant(desk, record.id, f"v {json.dumps(node)}")
        part = desk.read()
        assert desk.ids(part) == [good.id]
        assert part.unreadable == {bad.id}

    def test_a_record_that_is_no_mapping_is_left_out_and_the_others_are_read(self, desk):
        good, bad = (desk.create({"name": name}) for name in "ab")
        self.plant(desk, bad.id, 'v ["of the future"]')
        part = desk.read()
        assert desk.ids(part) == [good.id]
        assert part.unreadable == {bad.id}

    @pytest.mark.parametrize("text", ["garbled", "v {}", None])
    def test_a_record_that_is_damaged_is_left_out_and_costs_no_more_than_one_read(
        self, desk, tmp_path, monkeypatch, text
    ):
        monkeypatch.setattr(redisstore.scripts, "KEPT_STAMPS", 2)
        bad, good = (desk.create({"name": name}) for name in "ab")
        follower = SharedKeys(desk.store, tmp_path / "copy")
        desk.runner.run(follower.look())
        self.plant(desk, bad.id, text or redisstore.Entry.of(good.record).text)
        for number in range(3):  # more than are kept: all is read, once
            desk.update(good.id, {"priority": number})
        desk.runner.run(follower.look())
        assert [*follower.snapshot.entries] == [good.id]
        assert follower.snapshot.left_out == {bad.id}
        read = follower.snapshot
        desk.runner.run(follower.look())
        assert follower.snapshot is read

    def plant(self, desk, key_id, text):
        raise NotImplementedError
