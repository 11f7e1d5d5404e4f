"""What every store of keys guarantees: a form joins with a fixture `desk`, and has to pass all of it."""

import asyncio

import pytest

from gateway.access.keyerrors import BadSettings, NoSuchKey, VersionConflict, WrongState
from gateway.access.keys import KeyRing
from gateway.access.told import key_told
from gateway.config.keysettings import KeySettings
from gateway.core.errors import AccessError

NOW = 1_800_000_000.0
TIERS = {
    "gold": KeySettings.model_validate({"models": ["m*"], "limits": {"requests_per_minute": 60}}),
    "free": KeySettings.model_validate({"priority": -1}),
}


class Desk:
    """A store in a loop of its own, whose calls tests write without `await`."""

    def __init__(self, make):
        self.at = NOW
        self.tiers = dict(TIERS)
        self.runner = asyncio.Runner()
        self.store = self.runner.run(make(lambda: self.tiers, lambda: self.at))

    def __getattr__(self, name):
        return lambda *args: self.runner.run(getattr(self.store, name)(*args))

    def close(self):
        self.runner.close()

    @property
    def pepper(self):
        raise NotImplementedError

    def ring(self):
        return KeyRing(self.list(), self.pepper, self.tiers)

    def lets_in(self, key):
        """Return the caller that a key lets in now; None when it lets nobody in."""
        try:
            return self.ring().authenticate(b"Bearer " + key.encode(), None, None, self.at)
        except AccessError:
            return None


EVERY = {
    "name": "ci",
    "tenant": "acme",
    "owner": "ann@example.org",
    "tier": "gold",
    "models": ["qwen3-*", "lora-a"],
    "deny": ["qwen3-secret"],
    "addresses": ["10.0.0.0/8", "2001:db8::/32"],
    "max_context": "32k",
    "max_output": 1024,
    "priority": 3,
    "parameters": {"allow": ["priority"], "max": {"n": 4}},
    "fallback": False,
    "limits": {"requests_per_minute": 60, "output_tokens_per_minute": "20k"},
    "metadata": {"cost-center": "17"},
    "expires": "2028-01-01T00:00:00Z",
}


class KeyCases:
    def test_a_created_key_is_kept_with_all_its_settings_and_lets_its_holder_in(self, desk):
        made = desk.create(EVERY)
        kept = desk.get(made.id)
        assert kept == made.record
        told = key_told(kept, NOW)
        assert {name: told.get(name, told["settings"].get(name)) for name in EVERY} == EVERY | {
            "max_context": 32768,
            "limits": {"requests_per_minute": 60, "output_tokens_per_minute": 20480},
        }
        caller = desk.lets_in(made.key)
        assert (caller.key_id, caller.tenant, caller.priority) == (made.id, "acme", 3)
        assert caller.may_use("qwen3-8b")
        assert not caller.may_use("qwen3-secret")
        assert not caller.may_use("llama")

    def test_nothing_that_is_told_or_printed_holds_a_secret_or_a_digest(self, desk):
        made = desk.create({"name": "ci"})
        again = desk.rotate(made.id, 60.0)
        (record,) = desk.list()
        shown = repr([made, again, record, key_told(record, NOW)])
        for key in (made.key, again.key):
            assert key[12:55] not in shown
        for secret in record.secrets:
            assert secret.digest.hex() not in shown
            assert repr(secret.digest) not in shown

    def test_keys_are_listed_in_the_order_in_which_they_were_made(self, desk):
        made = []
        for number in range(5):
            desk.at += 1.0
            made.append(desk.create({"name": f"n{number}"}).id)
        assert [each.id for each in desk.list()] == made

    def test_every_finding_about_settings_is_told_and_nothing_is_kept(self, desk):
        with pytest.raises(BadSettings) as caught:
            desk.create(
                {"models": 3, "tier": "golden", "limits": {"requests": 1}, "modles": [], "id": "x"}
            )
        assert {name for name, _ in caught.value.wrong} == {
            "name", "models", "tier", "limits", "modles", "id",
        }  # fmt: skip
        assert "did you mean models?" in str(caught.value)
        assert "there are gold, free" in str(caught.value)
        assert desk.list() == []

    def test_a_change_sets_what_it_names_and_none_takes_a_setting_away(self, desk):
        made = desk.create(EVERY)
        desk.at += 1
        desk.update(made.id, {"models": None, "priority": 7, "limits": {"concurrent_requests": 2}})
        caller = desk.lets_in(made.key)
        assert caller.may_use("m-of-the-tier")
        assert not caller.may_use("qwen3-8b")
        assert caller.priority == 7
        assert caller.limits.concurrent_requests == 2  # the key's
        assert caller.limits.requests_per_minute == 60  # the tier's
        assert caller.limits.output_tokens_per_minute is None  # the key's own before
        assert caller.max_output_tokens == 1024

    def test_a_key_without_a_tenant_of_its_own_is_billed_by_its_name(self, desk):
        made = desk.create({"name": "ci", "tenant": "acme"})
        assert desk.update(made.id, {"tenant": None}).tenant == "ci"
        assert desk.update(made.id, {"tenant": None, "name": "other"}).tenant == "other"

    @pytest.mark.parametrize(
        ("changes", "of"),
        [
            ({"kind": "admin"}, "kind"),
            ({"name": None}, "name"),
            ({"role": "viewer"}, "role"),
            ({"digest": "0" * 64}, "digest"),
            ({"revoked": None}, "revoked"),
            ({"tier": "silver"}, "tier"),
            ({"priority": "high"}, "priority"),
        ],
    )
    def test_a_change_that_cannot_be_changes_nothing(self, desk, changes, of):
        made = desk.create({"name": "ci"})
        with pytest.raises(BadSettings) as caught:
            desk.update(made.id, {"tenant": "other", **changes})
        assert [name for name, _ in caught.value.wrong] == [of]
        assert desk.get(made.id) == made.record

    def test_of_two_changes_from_one_version_the_second_is_refused(self, desk):
        made = desk.create({"name": "ci"})
        seen = desk.get(made.id).version
        desk.at += 1
        after = desk.update(made.id, {"priority": 1}, seen)
        for call in (
            lambda: desk.update(made.id, {"priority": 2}, seen),
            lambda: desk.rotate(made.id, 0.0, seen),
            lambda: desk.revoke(made.id, seen),
        ):
            with pytest.raises(VersionConflict) as caught:
                call()
            assert caught.value.version == after.version
        assert desk.get(made.id) == after
        assert desk.update(made.id, {"priority": 2}, after.version).own.priority == 2

    def test_a_rotated_key_has_its_id_and_two_secrets_until_the_grace_ends(self, desk):
        made = desk.create({"name": "ci"})
        again = desk.rotate(made.id, 60.0)
        assert again.id == made.id
        assert desk.lets_in(made.key).key_id == desk.lets_in(again.key).key_id == made.id
        with pytest.raises(WrongState, match="has two secrets"):
            desk.rotate(made.id, 60.0)
        desk.at += 60
        assert desk.lets_in(made.key) is None
        assert desk.lets_in(again.key) is not None
        third = desk.rotate(made.id, 60.0)
        assert desk.lets_in(again.key) is not None
        assert desk.lets_in(third.key) is not None

    def test_a_rotation_without_a_grace_ends_every_other_secret_at_once(self, desk):
        first = desk.create({"name": "ci"})
        second = desk.rotate(first.id, 60.0)
        third = desk.rotate(first.id, 0.0)
        assert [desk.lets_in(each.key) is not None for each in (first, second, third)] == [
            False,
            False,
            True,
        ]

    def test_each_change_of_a_key_is_later_than_the_one_before_whatever_the_clocks_say(self, desk):
        made = desk.create({"name": "ci"})
        desk.at -= 30  # of another writer
        rotated = desk.rotate(made.id, 0.0).record
        updated = desk.update(made.id, {"priority": 1}, None)
        revoked = desk.revoke(made.id)
        times = [each.changed_s for each in (made.record, rotated, updated, revoked)]
        assert times == sorted(set(times))
        assert desk.get(made.id).changed_s == pytest.approx(revoked.changed_s, abs=1e-6)

    def test_what_is_later_than_the_calendar_is_refused(self, desk):
        with pytest.raises(BadSettings):
            desk.create({"name": "ci", "expires": "9999-12-31T23:59:59-12:00"})

    def test_a_revoked_key_lets_nobody_in_stays_listed_and_cannot_be_rotated(self, desk):
        made = desk.create({"name": "ci"})
        again = desk.rotate(made.id, 60.0)
        first = desk.revoke(made.id)
        desk.at += 5
        assert desk.revoke(made.id) == first
        assert desk.lets_in(made.key) is desk.lets_in(again.key) is None
        assert [each.state(desk.at) for each in desk.list()] == ["revoked"]
        with pytest.raises(WrongState, match="is revoked"):
            desk.rotate(made.id, 0.0)

    def test_an_id_that_is_not_there_is_told_as_such(self, desk):
        desk.create({"name": "ci"})
        for call in (
            lambda: desk.get("nobody12"),
            lambda: desk.update("nobody12", {"priority": 1}),
            lambda: desk.rotate("nobody12", 0.0),
            lambda: desk.revoke("nobody12"),
        ):
            with pytest.raises(NoSuchKey, match="nobody12"):
                call()

    def test_changes_at_once_lose_nothing(self, desk):
        made = desk.create({"name": "ci"})

        async def all_at_once():
            calls = [desk.store.create({"name": f"n{number}"}) for number in range(5)]
            calls += [
                desk.store.update(made.id, {"priority": 4}),
                desk.store.update(made.id, {"max_output": 5}),
                desk.store.update(made.id, {"owner": "ann"}),
            ]
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    group.create_task(call)

        desk.runner.run(all_at_once())
        assert len(desk.list()) == 6
        kept = desk.get(made.id)
        assert (kept.own.priority, kept.own.max_output, kept.owner) == (4, 5, "ann")

    def test_the_latest_use_of_a_key_stays_noted(self, desk):
        made = [desk.create({"name": name}).id for name in "ab"]
        assert desk.uses() == {}
        desk.note_use({made[0]: NOW + 5, made[1]: NOW})
        desk.note_use({made[0]: NOW + 2, made[1]: NOW + 9})
        assert desk.uses() == {made[0]: NOW + 5, made[1]: NOW + 9}
        assert [desk.last_use(each) for each in (*made, "nobody12")] == [NOW + 5, NOW + 9, None]
        versions = {each.id: each.version for each in desk.list()}
        assert desk.get(made[0]).version == versions[made[0]]

    def test_a_use_that_a_wrong_clock_noted_does_not_stay_once_the_clock_is_right(self, desk):
        made = desk.create({"name": "a"}).id
        desk.at = NOW + 366 * 86400
        desk.note_use({made: desk.at})
        desk.at = NOW
        desk.note_use({made: NOW + 5})
        assert desk.last_use(made) == NOW + 5

    def test_uses_that_are_noted_at_once_are_all_noted(self, desk):
        ids = [desk.create({"name": f"n{number}"}).id for number in range(12)]

        async def note():
            async with asyncio.TaskGroup() as group:
                for each in ids:
                    group.create_task(desk.store.note_use({each: NOW}))

        desk.runner.run(note())
        assert desk.uses() == dict.fromkeys(ids, NOW)
