"""What a reload does, in sentences."""

from __future__ import annotations

import pathlib

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import check_text
from gateway.config.models import Config
from gateway.config.reload import diff, shared_digest
from gateway.ingress.settings import settings_for
from gateway.watch.fetch import Pages


def config(text):
    loaded = check_text(text, folder=pathlib.Path("/"), env={}).loaded
    assert loaded is not None
    return loaded.config


def pools(*, a="{backends: [http://h:1, http://h:2]}", b="{backends: [http://g:1]}", more=""):
    parts = [f"{name}: {text}" for name, text in (("a", a), ("b", b)) if text]
    return config(f"pools: {{{', '.join(parts)}}}\n{more}")


def test_the_same_settings_change_nothing():
    assert diff(pools(), pools()) == ()


def test_a_new_backend_and_a_longer_wait_are_told_in_one_sentence():
    new = pools(a="{backends: [http://h:1, http://h:2, http://h:3], queue: {max_wait: 45s}}")
    told = diff(pools(), new)
    assert told == ("a: +1 backend (b3), queue.max_wait 30s -> 45s", "b unchanged")


def test_a_backend_that_goes_is_drained():
    told = diff(pools(), pools(a="{backends: [http://h:1]}"))
    assert told == ("a: -1 backend (b2)", "b unchanged", "will drain a/b2")


def test_a_backend_with_another_socket_is_another_server():
    def launched(**address):
        backend = {"launch": {"command": ["vllm", "serve", "m"], **address}}
        return Config.model_validate({"pools": {"a": {"backends": [backend]}}})

    on_port, on_socket = launched(port=8001), launched(socket="/run/a.sock")
    for old, new in ((on_port, on_socket), (on_socket, launched(socket="/run/b.sock"))):
        assert diff(old, new) == ("a: +1 backend (b1), -1 backend (b1)", "will drain a/b1")
    assert not diff(on_socket, launched(socket="/run/a.sock"))


def test_a_backend_with_another_url_is_another_server():
    told = diff(pools(), pools(a="{backends: [http://h:1, http://h:9]}"))
    assert told == ("a: +1 backend (b2), -1 backend (b2)", "b unchanged", "will drain a/b2")


def test_pools_come_and_go():
    assert diff(pools(b=""), pools(a="")) == (
        "b: new pool, 1 backend",
        "a: pool removed",
        "will drain a/b1, a/b2",
    )


def test_a_setting_of_a_backend_is_named_with_it():
    new = pools(a="{backends: [http://h:1, {url: http://h:2, max_in_flight: 8}]}")
    assert diff(pools(), new)[0] == "a: b2.max_in_flight unset -> 8"


def test_a_secret_is_told_as_changed_only():
    new = pools(a="{backends: [http://h:1, {url: http://h:2, api_key: s3cret}]}")
    assert diff(pools(), new)[0] == "a: b2.api_key changed"


def test_lists_words_and_paths_are_told_as_written():
    new = pools(a="{backends: [http://h:1, http://h:2], aliases: [x, y], adapters: [z],"
                  " max_context: 1k, tokenizer: /t}")  # fmt: skip
    assert diff(pools(), new)[0] == (
        "a: aliases [] -> [x, y], max_context auto -> 1024, adapters auto -> [z],"
        " tokenizer unset -> /t"
    )


def test_backends_in_another_order_are_the_same_backends():
    one = "{backends: [{name: x, url: http://h:1}, {name: y, url: http://h:2}]}"
    two = "{backends: [{name: y, url: http://h:2}, {name: x, url: http://h:1}]}"
    assert diff(pools(a=one), pools(a=two)) == ("a: backends reordered", "b unchanged")


def test_what_was_bound_at_the_start_needs_a_restart_and_the_rest_does_not():
    new = pools(
        more="listen: 127.0.0.1:81\nadmin: {listen: 127.0.0.1:91, token: x}\n"
        "timeouts: {stall: 1m, upstream_keep_alive: 4s}\nlog: {access: false}\nkeys: none\n"
        "limits: {stream_buffer: 1MiB, max_reply: 1MiB}\n"
    )
    assert diff(pools(), new) == (
        "admin.token changed, keys {file: /keys.yaml, shared: false} -> none, limits.max_reply 64MiB -> 1MiB, timeouts.stall 45s -> 1m",
        "needs a restart: listen 127.0.0.1:8080 -> 127.0.0.1:81,"
        " admin.listen 127.0.0.1:9090 -> 127.0.0.1:91, limits.stream_buffer 256KiB -> 1MiB, timeouts.upstream_keep_alive 3s -> 4s,"
        " log.access true -> false",
    )


urls = st.sampled_from([f"http://h:{port}" for port in range(1, 6)])
some_pools = st.dictionaries(
    st.sampled_from("abc"),
    st.fixed_dictionaries(
        {"backends": st.lists(urls, min_size=1, max_size=4, unique=True)},
        optional={"max_context": st.sampled_from(["auto", "1k"]), "aliases": st.just(["x"])},
    ),
    min_size=1,
)
configs = st.builds(lambda tree: Config.model_validate({"pools": tree}), some_pools)


@given(configs)
def test_no_difference_is_not_told(one):
    assert diff(one, one.model_copy(deep=True)) == ()


@given(configs, configs)
def test_every_pool_that_changes_and_every_backend_that_goes_is_told(old, new):
    told = diff(old, new)
    assert bool(told) == (old != new)
    changed = {
        name
        for name in old.pools.keys() | new.pools.keys()
        if old.pools.get(name) != new.pools.get(name)
    }
    assert {line.partition(":")[0] for line in told if ":" in line} == changed

    def servers(config):
        return {(f"{p}/{b.name}", b.url) for p, pool in config.pools.items() for b in pool.backends}

    drained = {name for line in told if line.startswith("will drain ") for name in names(line)}
    assert drained == {name for name, _ in servers(old) - servers(new)}
    unchanged = {name for line in told if line.endswith(" unchanged") for name in names(line)}
    assert unchanged <= new.pools.keys() - changed


def names(line):
    return line.removeprefix("will drain ").removesuffix(" unchanged").split(", ")


def test_what_needs_a_restart_is_told_against_what_the_process_started_with():
    def at(port, more=""):
        return pools(more=f"listen: 127.0.0.1:{port}\n{more}")

    started, moved = at(28080), at(28081)
    told = "needs a restart: listen 127.0.0.1:28080 -> 127.0.0.1:28081"
    assert diff(started, moved, started=started) == (told,)
    # It stays to be told until the restart, whatever else a reload changes.
    assert diff(moved, moved, started=started) == (told,)
    longer = at(28081, "timeouts: {stall: 50s}")
    assert diff(moved, longer, started=started) == ("timeouts.stall 45s -> 50s", told)
    # Back at the start: nothing is left to do.
    assert diff(moved, started, started=started) == ()


def test_keys_that_come_with_a_reload_say_what_of_them_needs_a_restart():
    def with_keys(keys):
        return pools(more=f"redis: redis://h\nkeys: {keys}\n")

    none = with_keys("none")
    shared = diff(none, with_keys("{shared: true}"))
    assert shared[1] == "needs a restart: keys.shared false -> true"
    provider = diff(none, with_keys("{oidc: {issuer: 'https://login.example', audience: gw}}"))
    assert provider[1] == (
        "needs a restart: keys.oidc unset -> {issuer: https://login.example, audience: gw, claims: {name: sub}}"
    )
    assert diff(none, with_keys("{file: k.yaml}")) == (
        "keys none -> {file: /k.yaml, shared: false}",
    )
    assert len(diff(with_keys("{shared: true}"), none)) == 1  # what was read at start is not used


def test_replicas_that_differ_in_what_is_their_own_are_configured_alike():
    one = Config.model_validate({"pools": {"m": {"backends": ["http://h:1"]}}})
    own = one.model_copy(update={"listen": "127.0.0.1:9", "redis": None, "state": "elsewhere"})
    other = one.model_copy(update={"session_header": "x-other"})
    assert shared_digest(one) == shared_digest(own)
    assert shared_digest(one) != shared_digest(other)


def test_other_replicas_are_told_of_the_settings_that_are_in_force():
    one = Config.model_validate({"keys": "none", "pools": {"m": {"backends": ["http://h:1"]}}})
    other = one.model_copy(update={"session_header": "x-other"})
    before = settings_for(one, Pages)
    after = settings_for(other, Pages, before)
    assert before.shared_digest == shared_digest(one)
    assert after.shared_digest == shared_digest(other) != before.shared_digest
