"""Keys: what a caller is told, what the file holds, and that changes lose nothing."""

import asyncio
import hmac
import itertools
import multiprocessing
import os
import re
import stat
import tracemalloc

import pytest

from gateway.access.keyerrors import BadSettings, NoSuchKey, WrongState
from gateway.access.keyfile import pepper_path, read_pepper
from gateway.access.keys import KeyRing, OpenRing
from gateway.access.rereading import Rereading
from gateway.access.salt import salt_for
from gateway.access.secret import checksum
from gateway.config.keysettings import KeySettings
from gateway.core.errors import AccessError, ConfigError, MissingKey
from gateway.core.limits import KeyLimits
from tests.keyfiles import create, list_keys, revoke, rotate

NOW = 1_800_000_000.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def bearer(key):
    return b"Bearer " + key.encode()


def refusal(ring, authorization=None, x_api_key=None, api_key=None, now=NOW):
    with pytest.raises(AccessError) as caught:
        ring.authenticate(authorization, x_api_key, api_key, now)
    return caught.value


def other_letter(text, at):
    return text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]


def with_check(body):
    """Complete a key's check characters, as one made elsewhere would have them."""
    return f"{body}_{checksum(body.encode())}"


# --- who is let in --------------------------------------------------------------------------------


def test_a_created_key_lets_its_holder_in_with_its_limits(path):
    made = create(
        path,
        name="ci-bot",
        tenant="build",
        models=("qwen3-*", "lora-a"),
        max_context_tokens=32768,
        max_output_tokens=1024,
        priority=3,
        expires_in_s=60,
        wall_now=NOW,
    )
    caller = KeyRing.load(path).authenticate(bearer(made.key), None, None, NOW)
    assert (caller.key_id, caller.name, caller.tenant, caller.priority) == (
        made.id,
        "ci-bot",
        "build",
        3,
    )
    assert (caller.max_context_tokens, caller.max_output_tokens) == (32768, 1024)
    assert list_keys(path)[0].ends_s == NOW + 60
    assert caller.may_use("qwen3-8b")
    assert caller.may_use("lora-a")
    assert not caller.may_use("llama")


def test_a_keys_file_that_is_missing_is_told_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(ConfigError, match="`vllm-gateway keys create NAME -c FILE` creates it"):
        KeyRing.load(tmp_path / "keys.yaml")


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER ", b"Bearer   "])
def test_the_scheme_may_be_written_in_any_case(path, scheme):
    made = create(path, name="a", wall_now=NOW)
    ring = KeyRing.load(path)
    assert ring.authenticate(scheme + made.key.encode(), None, None, NOW).key_id == made.id


def test_headers_that_a_client_fills_with_spaces_are_not_remembered(path):
    """Else who has one key could have 128 MiB kept: a head may have 32 KiB."""
    made = create(path, name="a", wall_now=NOW)
    ring = KeyRing.load(path)
    tracemalloc.start()
    for spaces in range(20_000, 20_500):
        sent = b"Bearer%b%b" % (b" " * spaces, made.key.encode())
        assert ring.authenticate(sent, None, None, NOW).key_id == made.id
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


def test_each_of_the_three_headers_carries_a_key(path):
    made = create(path, name="a", wall_now=NOW)
    key, ring = made.key.encode(), KeyRing.load(path)
    assert ring.authenticate(None, key, None, NOW).key_id == made.id
    assert ring.authenticate(None, None, key, NOW).key_id == made.id
    assert ring.authenticate(b"Bearer " + key, key, key, NOW).key_id == made.id


def test_two_different_keys_are_refused_even_if_both_are_good(path):
    first, second = create(path, name="a"), create(path, name="b")
    ring = KeyRing.load(path)
    for sent in (
        (bearer(first.key), second.key.encode(), None),
        (bearer(first.key), None, second.key.encode()),
        (None, first.key.encode(), second.key.encode()),
        (bearer(first.key), first.key.encode(), second.key.encode()),
    ):
        assert "Two different API keys" in refusal(ring, *sent).message


@pytest.mark.parametrize("sent", [(None, None, None), (b"Bearer ", None, None), (b"", b"", b"")])
def test_a_missing_key_is_told_as_such_with_a_null_code(path, sent):
    create(path, name="a")
    error = refusal(KeyRing.load(path), *sent)
    assert isinstance(error, MissingKey)
    assert (error.status, error.code, error.type) == (
        401,
        "missing_api_key",
        "invalid_request_error",
    )
    assert "Authorization: Bearer" in error.message


def test_another_scheme_is_refused_with_the_right_one_named(path):
    create(path, name="a")
    error = refusal(KeyRing.load(path), b"Basic dXNlcjpwYXNz")
    assert (error.code, "Bearer" in error.message) == ("invalid_api_key", True)


# --- why somebody is not --------------------------------------------------------------------------


def test_a_mistyped_key_is_told_apart_from_a_wrong_one(path):
    made = create(path, name="a")
    ring = KeyRing.load(path)
    mistyped = refusal(ring, bearer(other_letter(made.key, 20)))
    wrong = refusal(ring, bearer(with_check(other_letter(made.key[:-7], 20))))
    assert "mistyped" in mistyped.message
    assert "mistyped" not in wrong.message
    assert mistyped.code == wrong.code == "invalid_api_key"


def test_an_unknown_id_and_a_wrong_secret_get_the_same_words(path):
    made = create(path, name="a")
    ring = KeyRing.load(path)
    wrong_secret = with_check(other_letter(made.key[:-7], 20))
    unknown_id = with_check(wrong_secret[:-7].replace(made.id, "zzzzzzzz"))
    texts = {
        refusal(ring, bearer(key))
        .message.replace(key[3:11], "ID")
        .replace(f"***{key[-2:]}", "***XY")
        for key in (wrong_secret, unknown_id)
    }
    assert len(texts) == 1


def test_no_message_repeats_the_secret(path):
    made = create(path, name="a", expires_in_s=1, wall_now=NOW)
    ring = KeyRing.load(path)
    secret = made.key[12:55]
    for key in (
        made.key,
        made.key[:-3],
        other_letter(made.key, -1),
        with_check(made.key[:11] + "_" + "B" * 43),
        made.key + "\u00fc",
    ):
        message = refusal(ring, bearer(key), now=NOW + 5).message
        assert secret[:4] not in message
        assert secret[-4:] not in message
        assert "BBB" not in message


@pytest.mark.parametrize(
    "key", [b"sk-proj-123", b"x", b"gw_", b"\xff\xfe", b"gw_" + b"a" * 8192, b"Bearer"]
)
def test_what_is_no_key_of_ours_is_refused_without_being_repeated(path, key):
    create(path, name="a")
    error = refusal(KeyRing.load(path), b"Bearer " + key)
    assert "does not look like a key" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("around", ['"%s"', "Bearer %s", "'%s'", "%s,", "KEY=%s"])
def test_a_key_with_something_around_it_is_not_called_truncated(path, around):
    """As `docker --env-file` leaves the quotes, and people write `Bearer` where the client does so too."""
    key = create(path, name="a").key
    message = refusal(KeyRing.load(path), bearer(around % key)).message
    assert "Send the key alone" in message
    assert key[3:] not in message


def test_expiry_is_told_only_to_who_holds_the_key(path):
    made = create(path, name="ci", expires_in_s=60, wall_now=NOW)
    ring = KeyRing.load(path)
    assert ring.authenticate(bearer(made.key), None, None, NOW + 59.9).key_id == made.id
    assert "expired 2027-01-15T08:01:00Z" in refusal(ring, bearer(made.key), now=NOW + 60).message
    guessed = with_check(other_letter(made.key[:-7], 20))
    assert "expired" not in refusal(ring, bearer(guessed), now=NOW + 60).message


def test_revocation_is_told_only_to_who_holds_the_key(path):
    made = create(path, name="ci", wall_now=NOW)
    revoke(path, made.id, wall_now=NOW)
    ring = KeyRing.load(path)
    assert "was revoked 2027-01-15T08:00:00Z" in refusal(ring, bearer(made.key)).message
    guessed = with_check(other_letter(made.key[:-7], 20))
    assert "revoked" not in refusal(ring, bearer(guessed)).message


def test_the_priorities_are_those_of_keys_that_can_send_requests(path):
    create(path, name="ci", priority=1, wall_now=NOW)
    create(path, name="brief", priority=5, expires_in_s=60, wall_now=NOW)
    create(path, name="gone", priority=7, tier="gold", tiers={"gold": KeySettings()}, wall_now=NOW)
    create(path, name="scraper", priority=8, kind="metrics", wall_now=NOW)
    create(path, name="operator", priority=8, kind="admin", wall_now=NOW)
    old = create(path, name="old", priority=9, wall_now=NOW)
    revoke(path, old.record.id, wall_now=NOW)
    ring = KeyRing(list_keys(path), b"p" * 32)
    assert ring.priorities(NOW) == {1, 5}
    assert ring.priorities(NOW + 60) == {1}


def test_without_keys_everybody_is_anonymous():
    ring = OpenRing()
    caller = ring.authenticate(None, None, None, NOW)
    assert caller.key_id == "anonymous"
    assert caller.may_use("anything")
    assert ring.authenticate(b"Bearer whatever", None, None, NOW) is caller


# --- rotation and revocation ----------------------------------------------------------------------


def test_both_keys_work_in_the_grace_and_only_the_new_one_after_it(path):
    old = create(path, name="ci", models=("a", "b"), wall_now=NOW)
    new = rotate(path, old.id, 3600, wall_now=NOW)
    ring = KeyRing.load(path)
    assert new.id == old.id
    for key in (new.key, old.key, new.key):
        caller = ring.authenticate(bearer(key), None, None, NOW + 3599)
        assert (caller.key_id, caller.models) == (old.id, ("a", "b"))
    assert "replaced" in refusal(ring, bearer(old.key), now=NOW + 3600).message
    assert ring.authenticate(bearer(new.key), None, None, NOW + 9999).key_id == old.id
    (record,) = list_keys(path)
    assert [record.state(at) for at in (NOW, NOW + 3599, NOW + 3600)] == [
        "rotating",
        "rotating",
        "active",
    ]


def test_a_file_of_an_older_version_with_a_rotated_key_works_as_it_did(path):
    old, new = create(path, name="ci", wall_now=NOW), create(path, name="ci", wall_now=NOW)
    text = path.read_text()
    at = text.index("  - id: " + new.id)
    path.write_text(text[:at] + '    not_after: "2027-01-15T09:00:00Z"\n' + text[at:])
    ring = KeyRing.load(path)
    assert ring.authenticate(bearer(old.key), None, None, NOW + 3599).key_id == old.id
    assert "replaced" in refusal(ring, bearer(old.key), now=NOW + 3600).message
    assert ring.authenticate(bearer(new.key), None, None, NOW + 3600).key_id == new.id
    assert [each.state(NOW) for each in list_keys(path)] == ["replaced", "active"]


def test_rotating_never_lets_a_key_live_longer(path):
    old = create(path, name="ci", expires_in_s=60, wall_now=NOW)
    rotate(path, old.id, 3600, wall_now=NOW)
    assert "expired" in refusal(KeyRing.load(path), bearer(old.key), now=NOW + 61).message


def test_an_ended_key_cannot_be_rotated(path):
    made = create(path, name="ci", wall_now=NOW)
    revoke(path, made.id, wall_now=NOW)
    with pytest.raises(WrongState, match="is revoked"):
        rotate(path, made.id, 0, wall_now=NOW)


def test_revoking_twice_keeps_the_first_time(path):
    made = create(path, name="ci", wall_now=NOW)
    revoke(path, made.id, wall_now=NOW)
    assert revoke(path, made.id, wall_now=NOW + 99).revoked_s == NOW


@pytest.mark.parametrize("change", [revoke, lambda path, key_id: rotate(path, key_id, 0)])
def test_an_id_that_is_not_there_is_named(path, change):
    create(path, name="ci")
    with pytest.raises(NoSuchKey, match="no key with the id nobody12"):
        change(path, "nobody12")


# --- the file -------------------------------------------------------------------------------------


def test_the_file_holds_digests_only_and_nobody_else_may_read_it(path):
    made = create(path, name="ci")
    text = path.read_text()
    assert made.id in text
    assert made.key[12:55] not in text
    digest = hmac.digest(read_pepper(path), made.key.encode(), "sha256").hex()
    assert digest in text
    for file in (path, pepper_path(path)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_pepper_that_everybody_can_read_is_refused(path):
    create(path, name="ci")
    pepper_path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing.load(path)
    with pytest.raises(ConfigError, match="chmod 600"):
        create(path, name="other")


@pytest.mark.parametrize("content", ["", "not base64!", "AAAA"])
def test_a_damaged_pepper_is_refused(path, content):
    create(path, name="ci")
    pepper_path(path).write_text(content)
    with pytest.raises(ConfigError, match="does not hold 32 bytes"):
        KeyRing.load(path)


def test_a_lost_pepper_is_never_replaced_silently(path):
    create(path, name="ci")
    pepper_path(path).unlink()
    with pytest.raises(ConfigError, match="pepper"):
        create(path, name="other")
    with pytest.raises(ConfigError, match="pepper"):
        KeyRing.load(path)


def test_a_missing_file_is_refused_with_what_to_do(path):
    with pytest.raises(ConfigError, match="keys create"):
        KeyRing.load(path)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "version: 1\n", "keys: []\n"])
def test_a_file_without_keys_lets_nobody_in(path, text):
    path.write_text(text)
    ring = KeyRing.load(path)
    assert len(ring) == 0
    refusal(ring, b"Bearer gw_x")
    made = create(path, name="first")
    assert len(KeyRing.load(path)) == 1
    assert KeyRing.load(path).authenticate(bearer(made.key), None, None, NOW).name == "first"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_files_that_root_makes_belong_to_the_owner_of_their_folder(path):
    os.chown(path.parent, 1234, 4321)
    create(path, name="ci", wall_now=NOW)
    made = [*path.parent.iterdir()]
    assert len(made) == 3
    assert {(each.stat().st_uid, each.stat().st_gid) for each in made} == {(1234, 4321)}


def test_comments_order_mode_and_what_a_person_wrote_survive_a_change(path):
    made = create(path, name="ci", wall_now=NOW)
    text = "# ours\n" + path.read_text().replace("name: ci", "name: ci  # the build")
    path.write_text(text)
    path.chmod(0o640)
    create(path, name="other", wall_now=NOW)
    after = path.read_text()
    assert after.startswith(text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.id for each in list_keys(path)][0] == made.id


def test_json_is_yaml_too(path):
    made = create(path, name="ci", wall_now=NOW)
    digest = next(line for line in path.read_text().splitlines() if "digest" in line).split()[1]
    path.write_text(f'{{"keys": [{{"id": "{made.id}", "name": "ci", "digest": "{digest}"}}]}}')
    assert KeyRing.load(path).authenticate(bearer(made.key), None, None, NOW).tenant == "ci"
    create(path, name="second")
    assert len(list_keys(path)) == 2


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real.yaml", tmp_path / "keys.yaml"
    real.write_text("keys: []\n")
    link.symlink_to(real)
    create(link, name="ci")
    assert link.is_symlink()
    assert len(list_keys(real)) == 1


def test_times_and_limits_may_be_written_by_hand(path):
    made = create(path, name="ci", wall_now=NOW)
    path.write_text(
        path.read_text()
        + "    max_context: 32k\n    expires: 2027-01-16\n"
        + "    not_after: 2027-01-16T10:00:00+02:00\n"
    )
    (info,) = list_keys(path)
    assert (info.id, info.own.max_context) == (made.id, 32768)
    assert info.expires_s == 1800057600.0
    assert info.not_after_s == 1800057600.0 + 8 * 3600


WRONG = {
    "keys: 5\n": "1:1: error: expected a list of keys",
    "- a\n": "1:1: error: expected a mapping",
    "version: 2\n": "1:1: error: this gateway reads version 1",
    "kees: []\n": "1:1: error: unknown setting 'kees'; did you mean keys?",
    "keys:\n  - text\n": "2:5: error: expected a mapping with id",
    "keys:\n  - id: abcdefgh\n    name: a\n": "2:5: error: the key has no digest",
    "keys:\n  - {id: abcdefgh, name: a, digest: 'zz'}\n": ":2:29: error: digest: expected 64 hex",
    "keys:\n  - {id: 'ABC', name: a}\n": ":2:6: error: id: expected 8 lower-case letters",
    "keys:\n  - {id: abcdefgh, name: 12}\n": "name: expected a text of 1 to 128 characters on one line, in quotes",
    "keys:\n  - {models: 3}\n": "models: expected a list of names",
    "keys:\n  - {max_output: 0}\n": "max_output: must be at least 1",
    "keys:\n  - {max_output: many}\n": "max_output:",
    "keys:\n  - {priority: true}\n": "priority: expected a whole number",
    "keys:\n  - {expires: soon}\n": "expires: ",
    "keys:\n  - {expires: 12}\n": "expires: expected a time",
    # Python 3.14 says it in other words than those before it.
    "keys:\n  - {expires: 2026-11-31}\n": ":2:6: error: expires: day ",
    "keys:\n  - {revoked: 2026-11-30T25:00:00Z}\n": ":2:6: error: revoked: hour must be in 0..23",
    "keys:\n  - {name: a, created: 2026-11-30T10:00:00+99:00}\n": ":2:15: error: created: ",
    "keys:\n  - {priority: !!int x}\n": "error: not YAML: invalid literal for int()",
    "keys:\n  - {fallback: !!bool x}\n": "error: not YAML",
    f"keys: {'[' * 1000}\n": "error: lists and mappings are nested too deeply",
    "keys:\n  - {modles: ['*']}\n": "unknown setting 'modles'; did you mean models?",
    "keys: [\n": ":2:1: error: the file ends within a list or a mapping; add the missing ] or }",
    "\tkeys: 1\n": ":1:1: error: a tab indents this line",
    "a: *b\n": ":1:4: error: a value that begins with * is an alias",
    "keys:\n  - {name: a}\n  name: b\n": ":3:3: error: the indentation fits none of the lines above",
    "keys: \0\n": ":1:7: error: the character U+0000 is not allowed in YAML",
}


@pytest.mark.parametrize(("text", "finding"), WRONG.items(), ids=list(WRONG.values()))
def test_a_wrong_file_is_refused_with_the_place_and_stays_as_it_is(path, text, finding):
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.load(path)
    assert any(finding in each for each in caught.value.findings)
    assert all(each.startswith(str(path)) for each in caught.value.findings)
    with pytest.raises(ConfigError):
        create(path, name="ci")
    assert path.read_text() == text


def test_an_id_that_is_there_twice_is_an_error(path):
    create(path, name="ci")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines + lines[3:]))
    with pytest.raises(ConfigError, match="appears twice"):
        KeyRing.load(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 200},
        {"name": "a", "max_context_tokens": 0},
        {"name": "a", "tier": "gold"},
        {"name": "a", "role": "admin"},
        {"name": "a", "addresses": ["10.0.0.1/8"]},
        {"name": "a", "metadata": {"a b": "c"}},
        {},
    ],
)
def test_nothing_is_written_that_could_not_be_read_again(path, settings):
    create(path, name="first")
    before = path.read_text()
    with pytest.raises(BadSettings):
        create(path, **settings)
    assert path.read_text() == before
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "keys.yaml",
        "keys.yaml.lock",
        "keys.yaml.pepper",
    ]


def test_a_file_that_is_no_text_is_refused(path):
    path.write_bytes(b"keys: \xff\xfe\n")
    with pytest.raises(ConfigError, match="the character U.00FF is not allowed in YAML"):
        KeyRing.load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="directory"):
        KeyRing.load(path)


def test_a_write_that_fails_leaves_everything_as_it_was(path, monkeypatch):
    create(path, name="first")
    before = path.read_text()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        create(path, name="second")
    assert path.read_text() == before
    assert not [file for file in path.parent.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    ("at", "state"), [(NOW, "active"), (NOW + 61, "expired")], ids=["before", "after"]
)
def test_a_listed_key_tells_its_state(path, at, state):
    create(path, name="a", expires_in_s=60, wall_now=NOW)
    revoke(path, create(path, name="b", wall_now=NOW).id, wall_now=NOW)
    assert [each.state(at) for each in list_keys(path)] == [state, "revoked"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        create(tmp_path / "nowhere" / "keys.yaml", name="ci")


def test_a_ring_knows_when_its_file_has_changed(path):
    create(path, name="ci")
    ring = KeyRing.load(path)
    assert not ring.changed()
    create(path, name="other")
    assert ring.changed()
    path.unlink()
    assert ring.changed()


def _create_some(path, start):
    for number in range(5):
        create(path, name=f"{start}-{number}")


def test_a_wrong_file_is_read_again_when_it_changes_and_else_seldom(path, caplog):
    create(path, name="ci")
    ring, good = KeyRing.load(path), path.read_text()
    moments = (
        itertools.count()
    )  # whoever asks for the time finds it a second later: reading takes one

    async def story():
        rereading = Rereading(lambda: next(moments))
        path.write_text(good + "  - {id: x}\n")
        for _ in range(100):
            assert await rereading.look(ring) is None
        assert next(moments) - 100 <= 6  # so often it was read: then the time is asked for twice
        assert "keys.yaml:" in rereading.trouble
        path.write_text(good + "  - {id: y}\n")
        assert await rereading.look(ring) is None
        path.write_text(good + "# mended\n")
        pepper_path(path).chmod(0o644)
        assert await rereading.look(ring) is None
        assert "can read it" in rereading.trouble
        pepper_path(path).chmod(0o600)
        keys = await rereading.look(ring)
        assert (len(keys), rereading.trouble) == (1, "")
        assert await rereading.look(keys) is None

    asyncio.run(story())
    assert [each.levelname for each in caplog.records] == ["ERROR"] * 2


def test_two_processes_that_create_keys_lose_none(path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_create_some, args=(path, start)) for start in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(50)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len({each.name for each in list_keys(path)}) == 10


def test_a_reader_never_sees_half_a_file(path, monkeypatch):
    create(path, name="first")
    seen = []
    replace = os.replace

    def looking(source, target):
        seen.append([each.name for each in list_keys(path)])
        replace(source, target)
        seen.append([each.name for each in list_keys(path)])

    monkeypatch.setattr(os, "replace", looking)
    create(path, name="second")
    assert seen == [["first"], ["first", "second"]]


def test_a_key_says_what_its_requests_may_ask_for_and_keeps_it_when_rotated(path):
    made = create(path, name="a", wall_now=NOW)
    text = path.read_text().replace(
        "name: a\n", "name: a\n    parameters: {allow: [priority], max: {n: 4}, media: data}\n"
    )
    path.write_text(text)
    rotated = rotate(path, made.id, 60, wall_now=NOW)
    for key in (made.key, rotated.key):
        caller = KeyRing.load(path).authenticate(bearer(key), None, None, NOW + 1)
        assert caller.parameters.allow == {"priority"}
        assert caller.parameters.max == (("n", 4),)
        assert caller.parameters.media.value == "data"
    path.write_text(text.replace("priority", "priorty"))
    with pytest.raises(ConfigError, match="did you mean priority"):
        KeyRing.load(path)


def test_salts_of_a_tenant_are_the_same_in_every_ring_of_a_pepper(path):
    create(path, name="a", wall_now=NOW)
    secret = KeyRing.load(path).salting
    assert KeyRing.load(path).salting == secret != read_pepper(path)
    assert salt_for(secret, "a") == salt_for(secret, "a")
    salts = {salt_for(secret, "a"), salt_for(secret, "b"), salt_for(secret, "a", ""), salt_for(secret, "", "a")}  # fmt: skip
    assert len(salts) == 4
    assert {len(salt) for salt in salts} == {43}


def test_the_limits_of_a_key_are_kept_and_read_again(tmp_path):
    path = tmp_path / "keys.yaml"
    limits = KeyLimits(requests_per_minute=60, output_tokens_per_minute=20_480)
    made = create(path, name="ci", limits=limits)
    assert list_keys(path)[0].own.limits == limits
    caller = KeyRing.load(path).authenticate(b"Bearer " + made.key.encode(), None, None, 0.0)
    assert caller.limits == limits
    rotate(path, made.id)
    assert list_keys(path)[0].own.limits == limits


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{}", "expected a mapping"),
        ("{requests_per_minute: 0}", "must be at least 1"),
        ("{requests: 3}", "unknown limit 'requests'; there are requests_per_minute,"),
        ("{output_tokens_per_minute: many}", "write it like 60 or 100k"),
    ],
)
def test_limits_that_are_wrong_are_findings(tmp_path, written, told):
    path = tmp_path / "keys.yaml"
    create(path, name="ci")
    path.write_text(path.read_text() + f"    limits: {written}\n")
    with pytest.raises(ConfigError, match=re.escape(told)):
        list_keys(path)
