"""The keys of a file as a store, and what holds for a key: its tier, its kind, its addresses."""

import pytest
from ruamel.yaml import YAML

from gateway.access.effective import caller_of, effective
from gateway.access.filestore import FileKeys
from gateway.access.keyfile import edit, read_pepper
from gateway.access.keys import KeyRing, check_address
from gateway.access.records import KeyKind
from gateway.access.told import values_told
from gateway.config.keysettings import KeySettings
from gateway.core.errors import ConfigError, WrongAddress, WrongKind
from gateway.core.roles import Role
from tests.keycases import NOW, Desk, KeyCases
from tests.keyfiles import create, keys_of, run


class FileDesk(Desk):
    def __init__(self, path):
        self.path = path

        async def make(tiers, wall):
            return FileKeys(path, tiers, wall)

        super().__init__(make)

    def list(self):
        return self.runner.run(self.store.list()) if self.path.exists() else []

    @property
    def pepper(self):
        return read_pepper(self.path)


@pytest.fixture
def desk(tmp_path):
    desk = FileDesk(tmp_path / "keys.yaml")
    yield desk
    desk.close()


class TestFile(KeyCases):
    def test_a_change_leaves_the_rest_of_the_file_as_somebody_wrote_it(self, desk):
        made = desk.create({"name": "ci"})
        text = desk.path.read_text().replace("name: ci", "name: ci  # the build")
        desk.path.write_text(text + "    max_context: 32k  # by hand\n")
        desk.update(made.id, {"priority": 2, "limits": {"requests_per_minute": 5}})
        after = desk.path.read_text()
        assert "name: ci  # the build" in after
        assert "max_context: 32k  # by hand" in after
        assert "limits: {requests_per_minute: 5}" in after
        desk.update(made.id, {"limits": None})
        assert "limits" not in desk.path.read_text()

    def test_a_new_name_leaves_the_tenant_that_was_the_old_one(self, desk):
        made = desk.create({"name": "ci-bot"})
        desk.path.write_text(desk.path.read_text().replace("    tenant: ci-bot\n", ""))
        told = desk.update(made.id, {"name": "ci-robot"})
        assert told.tenant == "ci-bot"
        (kept,) = desk.list()
        assert (kept.name, kept.tenant, kept.version) == ("ci-robot", "ci-bot", told.version)

    def test_a_file_of_comments_alone_keeps_them(self, desk):
        desk.path.write_text("# Keys of the lab.\n#  Ask Ann.\n\n# Changed by hand, too.\n")
        made = desk.create({"name": "ci"})
        text = desk.path.read_text()
        for line in ("# Keys of the lab.\n", "#  Ask Ann.\n", "# Changed by hand, too.\n"):
            assert line in text
        assert [each.id for each in desk.list()] == [made.id]

    def test_what_somebody_writes_by_hand_meanwhile_is_not_written_over(self, desk):
        made = desk.create({"name": "ci"})
        by_hand = desk.path.read_text() + "    revoked: 2027-01-01T00:00:00Z\n"

        def change():
            with edit(desk.path) as (nodes, _):
                nodes[0]["priority"] = 3
                desk.path.write_text(by_hand)

        with pytest.raises(ConfigError, match="somebody else wrote it"):
            change()
        assert desk.path.read_text() == by_hand
        assert desk.update(made.id, {"priority": 3}).revoked_s is not None

    def test_what_a_key_has_by_a_merge_key_can_be_taken_from_it(self, desk):
        one, other = (desk.create({"name": name}).id for name in ("one", "other"))
        text = desk.path.read_text()
        text = text.replace(f"- id: {one}", f"- &one\n    id: {one}\n    priority: 3", 1)
        desk.path.write_text(text.replace(f"- id: {other}", f"- <<: *one\n    id: {other}", 1))
        assert [each.own.priority for each in desk.list()] == [3, 3]
        assert desk.update(other, {"priority": None}).own.priority is None
        assert [each.own.priority for each in desk.list()] == [3, None]

    def test_a_file_of_an_older_version_stays_readable_line_by_line(self, desk):
        made = desk.create({"name": "ci"})
        (node,) = YAML().load(desk.path.read_text())["keys"]
        assert list(node) == ["id", "name", "tenant", "digest", "created", "changed"]
        assert node["id"] == made.id


# --- what holds -----------------------------------------------------------------------------------


GOLD = KeySettings.model_validate(
    {
        "models": ["big", "small"],
        "max_output": "4k",
        "limits": {"requests_per_minute": 60, "concurrent_requests": 4},
        "parameters": {"allow": ["priority"], "deny": ["tools"], "max": {"n": 8}},
        "addresses": ["10.0.0.0/8"],
    }
)


def record_of(tmp_path, **settings):
    return create(tmp_path / "keys.yaml", name="ci", tiers={"gold": GOLD}, **settings).record


def test_a_value_is_the_keys_else_the_tiers_else_the_default_and_says_so(tmp_path):
    own = {"limits": {"requests_per_minute": 5}, "parameters": {"allow": ["tools"]}}
    made = run(
        keys_of(tmp_path / "k", tiers={"gold": GOLD}).create({"name": "a", "tier": "gold", **own})
    )
    holds = {
        name: (each["value"], each["origin"])
        for name, each in values_told(made.record, {"gold": GOLD}).items()
    }
    assert holds == {
        "addresses": (["10.0.0.0/8"], "tier"),
        "deny": ([], "default"),
        "fallback": (True, "default"),
        "limits.concurrent_requests": (4, "tier"),
        "limits.requests_per_minute": (5, "key"),
        "max_context": (None, "default"),
        "max_output": (4096, "tier"),
        "models": (["big", "small"], "tier"),
        "parameters.allow": (["tools"], "key"),
        "parameters.deny": ([], "tier"),
        "parameters.max": ({"n": 8}, "tier"),
        "priority": (0, "default"),
    }
    caller = caller_of(made.record, GOLD)
    assert (caller.limits.requests_per_minute, caller.limits.concurrent_requests) == (5, 4)
    assert (caller.models, caller.max_output_tokens) == (("big", "small"), 4096)
    assert (caller.parameters.allow, caller.parameters.deny) == ({"tools"}, frozenset())


def test_a_key_without_a_tier_has_its_own_values_and_the_defaults(tmp_path):
    record = record_of(tmp_path, models=["a"])
    assert effective(record, None)["models"].value == ["a"]
    caller = caller_of(record, None)
    assert (caller.denied, caller.addresses, caller.limits) == ((), None, None)


def test_a_changed_tier_holds_for_its_keys(tmp_path):
    record = record_of(tmp_path, tier="gold")
    other = GOLD.model_copy(update={"max_output": 7})
    assert caller_of(record, other).max_output_tokens == 7


def test_a_file_with_a_tier_that_the_configuration_lacks_is_refused(tmp_path):
    record_of(tmp_path, tier="gold")
    with pytest.raises(ConfigError, match=r"has the tier `gold`, which `tiers` lacks; it has free"):
        KeyRing.load(tmp_path / "keys.yaml", {"free": KeySettings()})
    assert len(KeyRing.load(tmp_path / "keys.yaml", {"gold": GOLD})) == 1


@pytest.mark.parametrize("kind", ["admin", "metrics"])
def test_a_key_of_another_kind_uses_no_model_and_is_known_for_what_it_is(tmp_path, kind):
    made = create(tmp_path / "keys.yaml", name="ops", kind=kind)
    ring = KeyRing.load(tmp_path / "keys.yaml")
    bearer = b"Bearer " + made.key.encode()
    for _ in range(2):
        with pytest.raises(WrongKind) as caught:
            ring.authenticate(bearer, None, None, NOW)
        assert caught.value.status == 403
    with pytest.raises(WrongKind):
        ring.authenticate(None, made.key.encode(), None, NOW)
    found = ring.identify(bearer, None, None, NOW)
    assert found.record.kind is KeyKind(kind)
    assert found.record.role is (Role.VIEWER if kind == "admin" else None)


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("2001:db8::5", True),
        ("11.0.0.1", False),
        ("2001:db9::5", False),
        (None, False),
        ("not an address", False),
    ],
)
def test_a_key_that_is_bound_to_networks_is_for_their_addresses_only(tmp_path, host, may):
    record = record_of(tmp_path, addresses=["10.0.0.0/8", "2001:db8::/32"])
    caller = caller_of(record, None)
    if may:
        check_address(caller, host)
    else:
        with pytest.raises(WrongAddress) as caught:
            check_address(caller, host)
        assert caught.value.status == 403
    check_address(caller_of(record_of(tmp_path), None), host)
