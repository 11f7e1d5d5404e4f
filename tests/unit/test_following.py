"""Gateways that follow the keys they share: what each knows, and what it starts with."""

import asyncio
import logging
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access import redisstore, sharedkeys
from gateway.access.keyerrors import KeyStoreError
from gateway.access.lastused import LastUsed
from gateway.access.redisstore import RedisKeys
from gateway.access.sharedkeys import SharedKeys
from gateway.config.keysettings import KeySettings
from gateway.core.aio import start
from gateway.core.errors import AccessError, KeysUnknown
from gateway.core.types import Caller, Endpoint, RequestRecord
from tests.fakekeyserver import FakeKeyServer

NOW, PEPPER = 1_800_000_000.0, b"p" * 32


def finished(call):
    """Return what a call does that never waits: the server is played."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class Replica:
    """One gateway's keys, over a server that several may share; its calls need no `await`."""

    def __init__(self, server, folder=None, pepper=PEPPER):
        self.at, self.tiers = NOW, {}
        store = RedisKeys(server, pepper, lambda: self.tiers, lambda: self.at)
        self.keys = SharedKeys(store, folder / "keys.json" if folder else None)

    def do(self, name, *args):
        return finished(getattr(self.keys.store, name)(*args))

    def look(self):
        finished(self.keys.look())

    def copies(self):
        self.keys._write(self.keys.snapshot)

    def lets_in(self, key):
        try:
            return self.keys.ring(self.tiers).authenticate(
                b"Bearer " + key.encode(), None, None, NOW
            )
        except AccessError:
            return None


@pytest.fixture
def server():
    return FakeKeyServer()


def test_what_changes_is_known_after_the_next_look(server):
    one, other = Replica(server), Replica(server)
    heard = []
    other.keys.on_change.append(lambda: heard.append(other.keys.snapshot.generation))
    made = one.do("create", {"name": "a"})
    other.look()
    assert other.lets_in(made.key).name == "a"
    again = one.do("rotate", made.id, 60.0)
    assert other.lets_in(again.key) is None
    other.look()
    assert other.lets_in(again.key).key_id == other.lets_in(made.key).key_id == made.id
    one.do("revoke", made.id)
    other.look()
    assert other.lets_in(again.key) is other.lets_in(made.key) is None
    other.look()
    assert heard == [1, 2, 3]


def test_who_holds_a_key_whose_tier_is_gone_is_nobody(server):
    one = Replica(server)
    one.tiers = {"gold": KeySettings()}
    made = one.do("create", {"name": "a", "tier": "gold"})
    one.look()
    assert one.keys.ring(one.tiers).holder(made.id, NOW) == one.lets_in(made.key) is not None
    one.tiers = {}
    assert one.keys.ring(one.tiers).holder(made.id, NOW) is one.lets_in(made.key) is None


def test_a_snapshot_stays_whole_as_it_is(server):
    one = Replica(server)
    keys = [one.do("create", {"name": name}).id for name in "abc"]
    one.look()
    before, ring = one.keys.snapshot, one.keys.ring({})
    held = dict(before.entries)
    one.do("revoke", keys[0])
    one.look()
    assert before.entries == held
    assert one.keys.snapshot is not before
    assert one.keys.ring({}) is not ring
    assert ring.holder(keys[0], 0.0) is not None
    assert one.keys.ring({}).holder(keys[0], 0.0) is None


def test_until_the_store_answered_once_no_key_is_called_wrong(server):
    server.down = True
    one = Replica(server)
    one.look()
    with pytest.raises(KeysUnknown) as caught:
        one.lets_in("gw_abcdefgh_" + "s" * 43 + "_000000")
    assert caught.value.status == 503
    assert caught.value.retry_after_s
    server.down = False
    one.look()
    assert one.lets_in("gw_abcdefgh_" + "s" * 43 + "_000000") is None


def test_without_the_store_the_keys_stay_as_they_were_known(server, caplog):
    one = Replica(server)
    made = one.do("create", {"name": "a"})
    one.look()
    server.down = True
    one.look()
    assert one.lets_in(made.key) is not None


def test_the_copy_is_for_this_user_only_and_enough_to_start_with(server, tmp_path):
    one = Replica(server, tmp_path)
    made, gone = (one.do("create", {"name": name}) for name in "ab")
    one.do("revoke", gone.id)
    one.look()
    one.copies()
    copy = tmp_path / "keys.json"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    text = copy.read_text()
    for secret in (made.key[12:55], gone.key[12:55], PEPPER.decode(), PEPPER.hex()):
        assert secret not in text
    server.down = True
    fresh = Replica(server, tmp_path)
    fresh.keys.read_copy()
    fresh.look()
    assert fresh.lets_in(made.key).key_id == made.id
    assert fresh.lets_in(gone.key) is None
    server.down, server.asked = False, []
    third = one.do("create", {"name": "c"})
    fresh.look()
    assert fresh.lets_in(third.key) is not None


def test_a_newer_version_that_begins_with_the_copy_of_an_older_one_knows_what_that_did_not(
    server, tmp_path
):
    one = Replica(server)
    other, made = (one.do("create", {"name": name}) for name in "ab")
    text = server.records[made.id]
    server.records[made.id] = text.replace('{"', '{"of_the_future": 1, "', 1)
    older = Replica(server, tmp_path)
    older.look()
    one.do("update", other.id, {"priority": 1})
    older.look()
    assert older.lets_in(made.key) is None
    older.copies()
    server.records[made.id] = text  # so the newer version reads it
    newer = Replica(server, tmp_path)
    newer.keys.read_copy()
    newer.look()
    assert newer.lets_in(made.key).key_id == made.id
    newer.copies()
    after = Replica(server, tmp_path)
    after.keys.read_copy()
    assert after.keys.snapshot == newer.keys.snapshot  # no need to read all


def test_an_older_version_that_begins_with_the_copy_of_a_newer_one_knows_what_it_understands(
    server, tmp_path
):
    one = Replica(server, tmp_path)
    other, made = (one.do("create", {"name": name}) for name in "ab")
    one.look()
    one.copies()
    copy = tmp_path / "keys.json"
    head, *lines = copy.read_text().splitlines(keepends=True)
    lines = [
        each.replace('{"', '{"of_the_future": 1, "', 1) if made.id in each else each
        for each in lines
    ]
    copy.write_text(head + "".join(lines))
    server.down = True  # so an upgrade that is taken back must do with the copy
    older = Replica(server, tmp_path)
    older.keys.read_copy()
    older.look()
    assert older.lets_in(other.key).key_id == other.id
    assert older.lets_in(made.key) is None
    server.down = False
    older.look()
    assert older.lets_in(made.key).key_id == made.id


def test_a_copy_that_could_not_be_written_is_written_once_it_can_be(
    server, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(sharedkeys, "COPY_AGAIN_S", 0.01)
    blocked = tmp_path / "state"
    blocked.write_text("this is no folder")
    one = Replica(server, blocked)
    made = one.do("create", {"name": "a"})
    one.do("revoke", made.id)

    async def story():
        running = start(one.keys.run(), name="keys")
        async with asyncio.timeout(5):
            while not caplog.records:
                await asyncio.sleep(0.01)
            blocked.unlink()
            while not (blocked / "keys.json").exists():
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    assert [each.event for each in caplog.records] == ["keys_copy_failed"]
    fresh = Replica(server, blocked)
    fresh.keys.read_copy()
    assert fresh.keys.snapshot.entries[made.id].record.revoked_s is not None


@pytest.mark.parametrize("damage", ["", "{}", "\n", "[1]\nx", '{"version": 2}', "\ud800"])
def test_a_copy_that_is_damaged_or_of_another_pepper_is_not_used(server, tmp_path, damage):
    one = Replica(server, tmp_path)
    one.do("create", {"name": "a"})
    one.look()
    one.copies()
    other = Replica(server, tmp_path, b"q" * 32)
    other.keys.read_copy()
    assert other.keys.snapshot is None
    (tmp_path / "keys.json").write_text(damage, errors="surrogatepass")
    one = Replica(server, tmp_path)
    one.keys.read_copy()
    assert one.keys.snapshot is None


def test_a_gateway_with_another_pepper_says_so_once(server, caplog):
    Replica(server).do("create", {"name": "a"})
    other = Replica(server, None, b"q" * 32)
    with caplog.at_level(logging.ERROR, "gateway.keys"):
        other.look()
        other.look()
    (record,) = caplog.records
    assert "pepper of this machine is not the one" in record.getMessage()
    assert other.keys.snapshot is None


def test_a_store_that_comes_back_empty_is_told_the_keys_again(server):
    one, other = Replica(server), Replica(server)
    made, gone = (one.do("create", {"name": name}) for name in "ab")
    one.do("revoke", gone.id)
    one.look()
    other.look()
    server.forget()
    for each in (one, other, one, other):
        each.look()
        assert each.lets_in(made.key) is not None
        assert each.lets_in(gone.key) is None
    fresh = Replica(server)
    fresh.look()
    assert fresh.lets_in(made.key) is not None
    assert fresh.lets_in(gone.key) is None


def test_a_revocation_that_a_fail_over_lost_holds_nevertheless(server):
    one, other = Replica(server), Replica(server)
    made = one.do("create", {"name": "a"})
    other.look()
    before = server.snapshot()
    one.do("revoke", made.id)
    one.look()
    server.restore(before)
    one.at += 60
    # As many changes as were lost: the generation alone would not tell.
    one.do("update", made.id, {"priority": 3})
    for each in (one, other, one, other):
        each.look()
    assert one.lets_in(made.key) is other.lets_in(made.key) is None


def test_a_change_that_a_fail_over_lost_holds_nevertheless(server):
    one = Replica(server)
    made = one.do("create", {"name": "a"})
    before = server.snapshot()
    one.at += 1
    one.do("update", made.id, {"priority": 3})
    one.look()
    server.restore(before)
    one.look()
    fresh = Replica(server)
    fresh.look()
    assert one.lets_in(made.key).priority == fresh.lets_in(made.key).priority == 3


def test_a_store_that_is_lost_again_at_once_is_told_again_once_more(server):
    one = Replica(server)
    made = one.do("create", {"name": "a"})
    one.look()
    for _ in range(2):
        server.forget()
        one.look()
        assert list(server.records) == [made.id]


def test_a_store_that_is_lost_between_two_pages_is_read_anew(monkeypatch):
    class Lost(FakeKeyServer):
        async def ask(self, script, *args, **more):
            reply = await super().ask(script, *args, **more)
            if script is redisstore.scripts.READ and self.generation == 5:
                self.restore(before)
            return reply

    monkeypatch.setattr(redisstore, "_PAGE", 3)
    server = Lost()
    one = Replica(server)
    first = one.do("create", {"name": "n"}).id
    before = server.snapshot()
    for name in "abcd":
        one.do("create", {"name": name})
    assert [*one.do("read").entries] == [first]


def test_a_use_that_could_not_be_written_is_written_the_next_time(server, caplog):
    one, request = Replica(server), RequestRecord("r", Endpoint.CHAT, 0.0)
    request.caller = Caller(key_id="abcdefgh", name="a", tenant="a")
    used = LastUsed(lambda: one.keys.store, lambda: NOW)
    used.posted([request, RequestRecord("s", Endpoint.CHAT, 0.0)])
    server.down = True
    for _ in range(2):
        finished(used.write())
    assert len(caplog.records) == 1
    server.down = False
    finished(used.write())
    assert one.do("uses") == {"abcdefgh": NOW}


def test_a_tier_that_changes_or_is_missing_counts_for_its_keys(server):
    one = Replica(server)
    one.tiers = {"gold": KeySettings.model_validate({"priority": 5})}
    made = one.do("create", {"name": "a", "tier": "gold"})
    one.look()
    assert one.lets_in(made.key).priority == 5
    one.tiers = {"gold": KeySettings.model_validate({"priority": 6})}
    assert one.lets_in(made.key).priority == 6
    one.tiers = {}
    assert one.lets_in(made.key) is None


def test_the_copy_follows_the_keys_while_they_are_followed(server, tmp_path):
    one = Replica(server, tmp_path)
    made = one.do("create", {"name": "a"})

    async def follow():
        async with asyncio.timeout(10):
            task = start(one.keys.run(), name="followed")
            while not (tmp_path / "keys.json").exists():
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(follow())
    fresh = Replica(server, tmp_path)
    fresh.keys.read_copy()
    assert fresh.keys.snapshot.entries[made.id].record == made.record


steps = st.lists(
    st.tuples(
        st.sampled_from(["create", "update", "rotate", "revoke", "look", "lose", "forget", "mark"]),
        st.integers(0, 1),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(steps)
def test_whatever_happens_to_the_store_replicas_agree_and_revoked_stays_revoked(script):
    server, at = FakeKeyServer(), NOW
    replicas, made, known_revoked = [Replica(server), Replica(server)], [], set()
    mark = server.snapshot()
    for what, who, which in script:
        at += 1
        one = replicas[who]
        for each in replicas:
            each.at = at
        key = made[which % len(made)] if made else None
        if what == "create":
            made.append(one.do("create", {"name": f"n{len(made)}"}))
        elif what == "mark":
            mark = server.snapshot()
        elif what == "lose":
            server.restore(mark)
        elif what == "forget":
            server.forget()
            mark = server.snapshot()
        elif what == "look":
            one.look()
            for each in one.keys.snapshot.entries.values():
                if each.record.revoked_s is not None:
                    known_revoked.add(each.record.id)
        elif key is not None:
            args = {"update": [{"priority": which}], "rotate": [0.0], "revoke": []}[what]
            try:
                one.do(what, key.id, *args)
            except KeyStoreError:
                continue  # it is lost, or revoked
        for each in replicas:
            if each.keys.snapshot is not None:
                for key_id, entry in each.keys.snapshot.entries.items():
                    held = each.keys.ring({}).holder(key_id, at)
                    assert (held is None) == (entry.record.revoked_s is not None)
    for _ in range(3):
        for each in replicas:
            each.look()
    one, other = ({k: e.record for k, e in each.keys.snapshot.entries.items()} for each in replicas)
    assert one == other
    assert all(one[key_id].revoked_s is not None for key_id in known_revoked)
