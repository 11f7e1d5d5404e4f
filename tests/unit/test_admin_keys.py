"""Keys and tiers over the admin API."""

import pytest
from starlette.testclient import TestClient

from gateway.access.redisstore import RedisKeys
from tests.admindesk import TOKEN, Desk
from tests.fakekeyserver import FakeKeyServer

TIERS = {"tiers": {"gold": {"priority": 5, "limits": {"requests_per_minute": 60}}}}


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, keys=True, more=TIERS, token=TOKEN)


@pytest.fixture
def shared(desk):
    """Keys on a Redis that is only played."""
    desk.store = RedisKeys(FakeKeyServer(), b"p" * 32, desk.tiers, desk.clock.wall)
    return desk


def ask(desk, method, path, body=None, token=TOKEN, **headers):
    sent = {"authorization": f"Bearer {token}"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    given = {} if method == "GET" else {"json": body or {}}
    return desk.client.request(method, f"/admin/v1/{path}", headers=sent, **given)


def make(desk, **settings):
    return ask(desk, "POST", "keys", {"name": "ci", **settings}).json()


def test_a_key_is_made_and_shown_once(desk):
    made = make(desk, tier="gold", max_context="32k", metadata={"team": "a"}, reason="new team")
    assert made["key"].startswith(f"gw_{made['id']}_")
    assert desk.ring().identify(f"Bearer {made['key']}".encode(), None, None, 1.8e9)
    record = ask(desk, "GET", f"keys/{made['id']}").json()
    assert record == made["record"]
    assert (record["name"], record["tier"], record["state"]) == ("ci", "gold", "active")
    assert record["settings"] == {"max_context": 32768}
    (row,) = ask(desk, "GET", "keys").json()["data"]
    assert row == {**record, "ends": None, "effective": row["effective"]}
    assert row["effective"]["max_context"] == 32768
    (entry,) = ask(desk, "GET", "audit").json()["data"]
    assert (entry["action"], entry["target"], entry["reason"]) == (
        "create_key", made["id"], "new team",
    )  # fmt: skip
    shown = [ask(desk, "GET", path).text for path in ("keys", f"keys/{made['id']}", "audit")]
    kept = (desk.state / "audit.jsonl").read_text()
    assert not any(made["key"][12:] in text for text in (*shown, kept))


def test_a_key_is_changed_as_it_was_seen(desk):
    made = make(desk, max_output=100)
    path = f"keys/{made['id']}"
    seen = ask(desk, "GET", path).headers["etag"]
    assert seen == f'"{made["record"]["version"]}"'
    done = ask(desk, "PATCH", path, {"tier": "gold", "max_output": None}, if_match=seen)
    assert done.status_code == 200
    assert (done.json()["tier"], done.json()["settings"]) == ("gold", {})
    assert done.headers["etag"] == f'"{done.json()["version"]}"' != seen
    late = ask(desk, "PATCH", path, {"name": "other"}, if_match=seen)
    assert (late.status_code, late.json()["code"]) == (412, "changed_since")
    assert ask(desk, "GET", path).json()["name"] == "ci"
    changed = ask(desk, "GET", "audit").json()["data"][1]
    assert changed["before"]["settings"] == {"max_output": 100}
    assert changed["after"]["tier"] == "gold"


@pytest.mark.parametrize("same", [{}, {"max_output": 100}, {"name": "ci", "tier": None}])
def test_a_key_that_is_so_already_stays_as_it_was_seen(desk, same):
    path = f"keys/{make(desk, max_output=100)['id']}"
    before = ask(desk, "GET", path)
    desk.clock.wall_now += 60.0
    done = ask(desk, "PATCH", path, same)
    assert (done.status_code, done.json()) == (200, before.json())
    assert done.headers["etag"] == before.headers["etag"]


@pytest.mark.parametrize("limits", [{"shadow": False}, {"on_outage": "local"}, {"models": {}}])
def test_a_key_with_limits_that_limit_nothing_is_made_and_changed(desk, limits):
    made = ask(desk, "POST", "keys", {"name": "ci", "limits": limits})
    assert made.status_code == 200
    changed = ask(desk, "PATCH", f"keys/{made.json()['id']}", {"owner": "ann@example.org"})
    assert changed.status_code == 200
    assert changed.json()["settings"]["limits"] == limits


def test_what_holds_has_its_origin(desk):
    made = make(desk, tier="gold", max_output=100)
    told = ask(desk, "GET", f"keys/{made['id']}/effective").json()
    values = told["settings"]
    assert values["priority"] == {"value": 5, "origin": "tier"}
    assert values["max_output"] == {"value": 100, "origin": "key"}
    assert values["fallback"]["origin"] == "default"
    (tier,) = ask(desk, "GET", "tiers").json()["data"]
    assert (tier["name"], tier["settings"]["priority"]) == ("gold", 5)


def test_a_key_is_rotated_and_revoked(desk):
    made = make(desk)
    again = ask(desk, "POST", f"keys/{made['id']}:rotate", {"grace_s": 60}).json()
    assert again["id"] == made["id"]
    assert again["key"] != made["key"]
    assert again["record"]["state"] == "rotating"
    twice = ask(desk, "POST", f"keys/{made['id']}:rotate", {"grace_s": 60})
    assert (twice.status_code, twice.json()["code"]) == (409, "wrong_state")
    ended = ask(desk, "POST", f"keys/{made['id']}:revoke").json()
    assert ended["state"] == "revoked"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "keys", {"name": "x"}),
        ("PATCH", "keys/{id}", {"tier": "gold"}),
        ("POST", "keys/{id}:rotate", {}),
        ("POST", "keys/{id}:revoke", {}),
    ],
)
def test_each_change_can_be_tried(desk, method, path, body):
    made = make(desk)
    before = ask(desk, "GET", "keys").json()
    reply = ask(desk, method, path.format(id=made["id"]), {**body, "dry_run": True})
    assert reply.status_code == 200
    assert reply.json().get("key") is None
    assert ask(desk, "GET", "keys").json() == before
    assert len(ask(desk, "GET", "audit").json()["data"]) == 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_settings_that_are_wrong_are_all_named(desk, dry_run):
    reply = ask(
        desk, "POST", "keys", {"name": "x", "tier": "none", "limits": {"no": 1}, "dry_run": dry_run}
    )
    assert (reply.status_code, reply.json()["code"]) == (422, "bad_settings")
    assert {each["pointer"] for each in reply.json()["errors"]} == {"/tier", "/limits"}


def test_a_key_that_is_not_there_is_named(desk):
    make(desk)
    for method, path in (("GET", "keys/aaaaaaaa"), ("POST", "keys/aaaaaaaa:revoke")):
        reply = ask(desk, method, path)
        assert (reply.status_code, reply.json()["code"]) == (404, "key_not_found")


def test_without_keys_there_are_none(tmp_path):
    desk = Desk(tmp_path, token=TOKEN)
    reply = ask(desk, "GET", "keys")
    assert (reply.status_code, reply.json()["code"]) == (409, "no_keys")


def test_a_key_that_is_made_again_is_the_same_one(desk):
    first, again = (ask(desk, "POST", "keys", {"name": "x"}, idempotency_key="k") for _ in range(2))
    assert first.json() == again.json()
    assert len(ask(desk, "GET", "keys").json()["data"]) == 1


@pytest.mark.parametrize(
    ("kind", "role", "metrics", "overview", "order"),
    [
        ("admin", "operator", 200, 200, 200),
        ("admin", "viewer", 200, 200, 403),
        ("metrics", None, 200, 403, 403),
        ("inference", None, 401, 401, 401),
    ],
)
def test_keys_of_kind_admin_and_metrics_open_what_they_are_for(
    desk, kind, role, metrics, overview, order
):
    key = make(desk, kind=kind, **({"role": role} if role else {}))["key"]
    sent = {"authorization": f"Bearer {key}"}
    assert desk.client.get("/metrics", headers=sent).status_code == metrics
    assert ask(desk, "GET", "overview", token=key).status_code == overview
    assert ask(desk, "POST", "backends/m/b1:drain", {"force": True}, key).status_code == order


def test_a_key_that_was_revoked_opens_nothing(desk):
    made = make(desk, kind="admin", role="admin")
    assert ask(desk, "GET", "overview", token=made["key"]).status_code == 200
    ask(desk, "POST", f"keys/{made['id']}:revoke")
    assert ask(desk, "GET", "overview", token=made["key"]).status_code == 401


def test_a_key_that_is_bound_to_networks_opens_nothing_from_elsewhere(desk):
    key = make(desk, kind="admin", role="admin", addresses=["10.0.0.0/8"])["key"]
    assert ask(desk, "GET", "overview", token=key).status_code == 401


@pytest.mark.parametrize(
    ("client", "status"), [("203.0.113.7", 401), ("10.1.2.3", 200), ("10.1.2.3, 203.0.113.7", 401)]
)
def test_behind_a_trusted_proxy_the_networks_of_a_key_are_those_of_its_client(
    tmp_path, client, status
):
    desk = Desk(tmp_path, keys=True, more={"trusted_proxies": ["10.0.0.9"]}, token=TOKEN)
    key = make(desk, kind="admin", role="admin", addresses=["10.0.0.0/8"])["key"]
    proxy = TestClient(desk.app, base_url="http://127.0.0.1:9090", client=("10.0.0.9", 1))
    headers = {"authorization": f"Bearer {key}", "x-forwarded-for": client}
    assert proxy.get("/admin/v1/overview", headers=headers).status_code == status


@pytest.mark.parametrize("damage", ['{"of_the_future": 1, ', "nonsense"])
def test_a_key_of_a_newer_version_is_named_as_that(shared, damage):
    path, records = f"keys/{make(shared)['id']}", shared.store.link.records
    for key_id, text in records.items():
        records[key_id] = text.replace("{", damage, 1)
    for method, each in (
        ("GET", path),
        ("GET", f"{path}/effective"),
        ("PATCH", path),
        ("POST", f"{path}:rotate"),
        ("POST", f"{path}:revoke"),
    ):
        told = ask(shared, method, each)
        assert (told.status_code, told.json()["code"]) == (409, "keys_unusable"), each
        assert "a gateway of that version" in told.json()["detail"]


def test_another_pepper_is_named_as_what_keeps_keys_from_being_changed(shared):
    path = f"keys/{make(shared)['id']}"
    shared.store = RedisKeys(shared.store.link, b"q" * 32, shared.tiers, shared.clock.wall)
    for each, body in (
        ("keys", {"name": "b"}),
        (f"{path}:rotate", {"grace_s": 0}),
        (f"{path}:revoke", {}),
    ):
        told = ask(shared, "POST", each, body)
        assert (told.status_code, told.json()["code"]) == (409, "keys_unusable"), each
        assert "pepper of this machine is not the one" in told.json()["detail"]
    assert ask(shared, "GET", path).json()["state"] == "active"
