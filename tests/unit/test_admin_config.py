"""The configuration over the admin API: in force, checked, compared, reloaded, and its history."""

import asyncio
import json
import os

import pytest

from gateway.admin.condition import look_at_settings_file
from gateway.admin.settings import TEXT_BYTES
from tests.admindesk import Desk

SECRET = "secret-of-the-environment-0123456789"
PLAIN = """\
pools: {m: {backends: [http://127.0.0.1:8001]}}
admin: {token: "${ADMIN_TOKEN_OF_TEST}", listen: 127.0.0.1:9090}
"""


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("ADMIN_TOKEN_OF_TEST", SECRET)
    desk = Desk(tmp_path)
    desk.file.write_text(PLAIN)
    put(desk, "config:reload")
    desk.started = desk.loaded.config
    return desk


def put(desk, path, **body):
    headers = {"authorization": f"Bearer {SECRET}"}
    return desk.client.post(f"/admin/v1/{path}", json=body, headers=headers)


def read(desk, path):
    return desk.get(f"/admin/v1/{path}", authorization=f"Bearer {SECRET}")


def test_what_is_in_force_is_told_with_its_origin_and_without_secrets(desk):
    reply = read(desk, "config")
    rows = {each["setting"]: each for each in reply.json()["settings"]}
    assert rows["pools.m.backends[0].url"]["origin"] == "line 1"
    assert rows["health.interval"] == {
        "setting": "health.interval", "value": "2s", "origin": "default",
    }  # fmt: skip
    assert rows["admin.token"]["value"] == "***"
    assert rows["admin.token"]["origin"] == "line 2, ${ADMIN_TOKEN_OF_TEST}"
    assert SECRET not in reply.text


def test_a_reference_to_nothing_is_told_as_nothing(desk):
    """Else `api_key: ***` would hide that the gateway has none."""
    desk.file.write_text(PLAIN + "redis: ${NO_SUCH_VARIABLE:-}\n")
    put(desk, "config:reload")
    rows = {each["setting"]: each for each in read(desk, "config").json()["settings"]}
    assert rows["redis"]["value"] is None
    assert rows["redis"]["origin"] == "line 3, ${NO_SUCH_VARIABLE:-}"


def test_the_etag_is_of_what_is_in_force(desk):
    seen = read(desk, "config").headers["etag"]
    assert read(desk, "config").headers["etag"] == seen
    desk.file.write_text(PLAIN + "health: {interval: 3s}\n")
    assert put(desk, "config:reload").headers["etag"] != seen
    headers = {"authorization": f"Bearer {SECRET}", "if-match": seen}
    late = desk.client.post("/admin/v1/config:reload", json={}, headers=headers)
    assert late.status_code == 412


def test_a_reload_tells_what_it_changed_and_is_in_the_history(desk):
    desk.file.write_text(PLAIN + "health: {interval: 3s}\n")
    told = put(desk, "config:reload", reason="slower").json()
    assert (told["reloaded"], told["effect"]) == (True, ["health.interval 2s -> 3s"])
    newest, first = read(desk, "config/history").json()["data"]
    assert (newest["by"], newest["reason"], newest["done"]) == ("admin.token", "slower", True)
    assert newest["effect"] == ["health.interval 2s -> 3s"]
    assert newest["hash"] == read(desk, "config").json()["hash"] != first["hash"]
    entry = read(desk, "audit").json()["data"][0]
    assert (entry["action"], entry["reason"]) == ("reload_config", "slower")
    assert entry["before"]["hash"] == first["hash"]
    assert entry["after"]["hash"] == newest["hash"]


def test_a_file_is_changed_when_its_text_is_and_not_when_it_is_merely_written(desk):
    at = desk.clock.wall()
    for text, ahead_s, changed in ((PLAIN, 60, False), (PLAIN + "# why\n", -60, True)):
        desk.file.write_text(text)
        os.utime(desk.file, (at + ahead_s, at + ahead_s))
        asyncio.run(look_at_settings_file(desk.objects))
        found = [each["subject"] for each in read(desk, "overview").json()["problems"]]
        assert ("reload" in found) == changed
    put(desk, "config:reload")
    assert "reload" not in [each["subject"] for each in read(desk, "overview").json()["problems"]]


def test_a_dry_run_of_a_reload_changes_nothing(desk):
    before = read(desk, "config").json()
    desk.file.write_text(PLAIN + "health: {interval: 3s}\n")
    told = put(desk, "config:reload", dry_run=True).json()
    assert (told["reloaded"], told["effect"]) == (False, ["health.interval 2s -> 3s"])
    assert read(desk, "config").json() == before
    assert len(read(desk, "config/history").json()["data"]) == 1


def test_what_needs_a_restart_is_told_of_a_file_as_a_reload_tells_it(desk):
    moved = PLAIN + "listen: 127.0.0.1:8081\n"
    waits = "needs a restart: listen 127.0.0.1:8080 -> 127.0.0.1:8081"
    desk.file.write_text(moved)
    assert put(desk, "config:reload").json()["effect"] == [waits]
    for told in (put(desk, "config:diff").json(), put(desk, "config:diff", text=moved).json()):
        assert (told["effect"], told["needs_restart"]) == ([waits], True)
    assert put(desk, "config:reload", dry_run=True).json()["effect"] == [waits]
    desk.file.write_text(PLAIN)  # where the process still listens
    assert put(desk, "config:reload", dry_run=True).json()["effect"] == []
    assert not put(desk, "config:diff").json()["needs_restart"]


def test_a_dry_run_refuses_what_a_reload_would(tmp_path):
    desk = Desk(tmp_path, listen="0.0.0.0:9090", token=SECRET)
    desk.file.write_text(PLAIN.partition("admin")[0] + "admin: {listen: 127.0.0.1:9090}\n")
    reply = put(desk, "config:reload", dry_run=True)
    assert (reply.status_code, reply.json()["code"]) == (409, "config_invalid")
    assert "has no token" in reply.json()["detail"]


def test_a_file_that_is_not_valid_is_told_and_changes_nothing(desk):
    before = read(desk, "config").json()
    desk.file.write_text(PLAIN + "health: {interval: 3}\nnothing: 1\n")
    for dry_run in (True, False):
        reply = put(desk, "config:reload", dry_run=dry_run)
        assert (reply.status_code, reply.json()["code"]) == (409, "config_invalid")
        assert len(reply.json()["errors"]) == 2
    assert read(desk, "config").json() == before
    told = put(desk, "config:validate").json()
    assert not told["valid"]
    assert [each["line"] for each in told["findings"]] == [3, 4]


def test_a_text_is_checked_and_compared_and_not_put_in_force(desk):
    text = PLAIN + "health: {interval: 3s}\nlisten: 127.0.0.1:8081\n"
    assert put(desk, "config:validate", text=text).json() == {"valid": True, "findings": []}
    told = put(desk, "config:diff", text=text).json()
    assert told["effect"][0] == "health.interval 2s -> 3s"
    assert told["needs_restart"]
    assert put(desk, "config:diff").json()["effect"] == []
    assert not put(desk, "config:diff", text="nothing: 1\n").json()["valid"]


@pytest.mark.parametrize(
    "text",
    [
        'pools: {m: {backends: [http://127.0.0.1:8001], aliases: ["${ADMIN_TOKEN_OF_TEST}"]}}\n',
        'pools: {m: {backends: [http://127.0.0.1:8001], aliases: ["x${file:/etc/hostname}"]}}\n',
        PLAIN + 'session_header: "${ADMIN_TOKEN_OF_TEST}"\n',
        PLAIN + 'health: {interval: "${ADMIN_TOKEN_OF_TEST}"}\n',
        PLAIN + 'version: "${ADMIN_TOKEN_OF_TEST}"\n',
        PLAIN + '"x${ADMIN_TOKEN_OF_TEST}": 1\n',
    ],
)
def test_no_text_brings_a_secret_to_light(desk, text):
    compared, checked = put(desk, "config:diff", text=text), put(desk, "config:validate", text=text)
    assert SECRET not in compared.text + checked.text
    assert SECRET[:12] not in compared.text + checked.text
    assert compared.status_code == 409 or compared.json()["effect"] == []


def test_a_text_may_refer_to_what_is_in_force_there(desk):
    assert put(desk, "config:diff", text=PLAIN).json()["effect"] == []


def test_a_text_is_bounded(desk):
    reply = put(desk, "config:validate", text="#" * TEXT_BYTES)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")


def test_an_alias_bomb_is_a_finding(desk):
    bomb = "x-a: &a [" + "1," * 500 + "]\n" + "x-b: &b [" + "*a," * 500 + "]\n"
    text = PLAIN + bomb + "x-c: [" + "*b," * 500 + "]\n"
    told = put(desk, "config:validate", text=text).json()
    assert not told["valid"]


def test_the_history_outlives_the_gateway(desk, tmp_path):
    lines = (tmp_path / "config.jsonl").read_text().splitlines()
    assert [json.loads(line)["by"] for line in lines if line] == ["local"]
