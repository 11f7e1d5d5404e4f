"""Changes: once, on what was seen, and on the record."""

import asyncio
import json
from http import HTTPStatus

import httpx2
import pytest
from starlette.testclient import TestClient

from gateway.access.secret import new_key
from gateway.admin.audit import Audit
from gateway.admin.changes import etag
from gateway.admin.endpoint import Endpoint, Method, Problem
from gateway.admin.replays import KEPT_S, MOST, Replays
from gateway.admin.replies import json_reply, problem
from gateway.admin.router import Router
from tests.admindesk import TOKEN, Desk

OPERATOR = "operator-token-of-the-tests"
VIEWER = "viewer-token-of-the-tests"


@pytest.fixture
def desk(tmp_path):
    tokens = [
        {"name": "ci", "role": "operator", "token": OPERATOR},
        {"name": "eve", "role": "viewer", "token": VIEWER},
    ]
    return Desk(tmp_path, pools={"m": 2}, token=TOKEN, tokens=tokens)


def order(desk, path, token=TOKEN, body=None, **headers):
    sent = {"authorization": f"Bearer {token}"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    return desk.client.post(f"/admin/v1/{path}", json=body or {}, headers=sent)


def read(desk, path):
    return desk.get(f"/admin/v1/{path}", authorization=f"Bearer {TOKEN}")


def audited(desk):
    return read(desk, "audit").json()["data"]


# --- on the record ----------------------------------------------------------------------------------


def test_a_change_is_on_the_record(desk):
    order(desk, "backends/m/b1:drain", OPERATOR, {"reason": "new driver", "force": True})
    (entry,) = audited(desk)
    assert entry["at"] == "2023-11-14T22:13:20.000Z"
    assert (entry["who"], entry["role"], entry["address"]) == ("ci", "operator", "testclient")
    assert (entry["action"], entry["target"], entry["status"]) == ("drain", "m/b1", 200)
    assert (entry["reason"], entry["order"]) == ("new driver", {"force": True})
    assert (entry["before"]["drained"], entry["after"]["drained"]) == (False, True)
    assert entry["after"]["why"] == "new driver"


def test_a_line_of_the_log_has_no_gaps(desk, caplog):
    caplog.set_level("INFO", "gateway.audit")
    order(desk, "restarts:hold", body={"for_s": 60})
    order(desk, "backends/m/b1:restart")
    assert [each.partition(" asked for ")[2] for each in caplog.messages if " asked " in each] == [
        "hold: 200", "restart m/b1: 409 not_supervised",
    ]  # fmt: skip


def test_what_was_refused_for_its_role_is_on_the_record(desk):
    assert order(desk, "backends/m/b1:drain", VIEWER).status_code == 403
    (entry,) = audited(desk)
    assert (entry["who"], entry["status"], entry["code"]) == ("eve", 403, "role_needed")
    assert entry["target"] == "m/b1"


def test_what_something_stood_in_the_way_of_is_on_the_record(desk):
    assert order(desk, "backends/m/b1:restart").status_code == 409
    (entry,) = audited(desk)
    assert (entry["status"], entry["code"]) == (409, "not_supervised")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("backends/m/b1:drain", {"dry_run": True}),
        ("backends/m/b1:drain?dry_run=true", {}),
        ("backends/m/b9:drain", {}),
        ("backends/m/b1:drain", {"nothing": 1}),
    ],
)
def test_what_changed_nothing_is_not(desk, path, body):
    order(desk, path, body=body)
    assert audited(desk) == []


def test_the_record_outlives_the_gateway_and_goes_on_counting(desk, tmp_path):
    order(desk, "backends/m/b1:drain")
    order(desk, "backends/m/b1:undrain")
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines if line] == ["drain", "undrain"]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    desk.objects.audit = Audit(tmp_path)
    order(desk, "restarts:hold", body={"pool": "m", "for_s": 60})
    told = [(each["id"], each["action"]) for each in audited(desk)]
    assert told == [("3", "hold"), ("2", "undrain"), ("1", "drain")]
    hold = audited(desk)[0]
    assert (hold["before"], hold["after"]) == ({}, {"m": "2023-11-14T22:14:20.000Z"})
    assert hold["order"] == {"pool": "m", "for_s": 60.0}


def test_a_record_that_cannot_be_written_is_still_shown(desk, tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    assert order(desk, "backends/m/b1:drain").status_code == 200
    assert [each["action"] for each in audited(desk)] == ["drain"]


def test_no_token_is_on_the_record(desk, tmp_path):
    order(desk, "backends/m/b1:drain", OPERATOR)
    kept = (tmp_path / "audit.jsonl").read_text() + read(desk, "audit").text
    assert OPERATOR not in kept
    assert TOKEN not in kept


def test_no_key_is_on_the_record_by_which_somebody_named_it(desk, tmp_path):
    key = new_key("k7m2q9xd")
    assert order(desk, f"keys/{key}:revoke", OPERATOR).status_code == 403
    (entry,) = audited(desk)
    assert entry["target"] == "gw_k7m2q9xd_***"
    assert key not in (tmp_path / "audit.jsonl").read_text()


# --- on what was seen ---------------------------------------------------------------------------------


def test_a_change_is_made_to_what_was_seen(desk):
    seen = read(desk, "backends/m/b1").headers["etag"]
    done = order(desk, "backends/m/b1:drain", if_match=seen)
    assert done.status_code == 200
    assert done.headers["etag"] == read(desk, "backends/m/b1").headers["etag"] != seen
    late = order(desk, "backends/m/b1:undrain", if_match=seen)
    assert (late.status_code, late.json()["code"]) == (412, "changed_since")
    assert done.headers["etag"] in late.json()["detail"]
    assert read(desk, "backends/m/b1").headers["etag"] == done.headers["etag"]
    assert [each["code"] for each in audited(desk)] == ["changed_since", ""]


def test_an_etag_is_no_newer_than_the_answer_that_has_it(desk):
    version = [1]

    async def handler(desk, asked):
        told = {"version": version[0]}
        version[0] += 1  # somebody else changes it, before this answer is sent
        return told

    async def subject(desk, names):
        return {"version": version[0]}

    row = Endpoint(
        method=Method.GET, path="/it", name="it", role=None, does="Read it.", handler=handler, subject=subject
    )  # fmt: skip
    router = Router(desk.objects, [row])

    async def app(scope, receive, send):
        await router(scope | {"state": {"actor": None}}, receive, send)

    client = TestClient(app)
    first, second = client.get("/it"), client.get("/it")
    assert [first.json(), second.json()] == [{"version": 1}, {"version": 2}]
    assert (first.headers["etag"], second.headers["etag"]) == (
        etag({"version": 1}), etag({"version": 2})
    )  # fmt: skip


def test_an_etag_stays_while_a_backend_merely_lives(desk):
    seen = read(desk, "backends/m/b1").headers["etag"]
    desk.clock.wall_now += 60
    order(desk, "backends/m/b2:drain")
    assert read(desk, "backends/m/b1").headers["etag"] == seen


def test_any_version_will_do(desk):
    assert order(desk, "backends/m/b1:drain", if_match="*").status_code == 200
    assert order(desk, "backends/m/b1:undrain", if_match='"x", "y"').status_code == 412
    for text in ("", "x", '"x", *', 'W/"x"'):
        assert order(desk, "backends/m/b1:undrain", if_match=text).status_code == 412


def test_what_has_no_version_cannot_be_compared(desk):
    reply = order(desk, "quarantine/nobody:lift", if_match="*")
    assert (reply.status_code, reply.json()["code"]) == (412, "changed_since")


# --- once ---------------------------------------------------------------------------------------------


def test_a_change_that_is_sent_again_is_answered_again(desk):
    first = order(desk, "backends/m/b1:drain", idempotency_key="k1")
    again = order(desk, "backends/m/b1:drain", idempotency_key="k1")
    assert again.content == first.content
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    assert len(audited(desk)) == 1


def test_a_key_is_its_senders_own_and_of_one_request(desk):
    order(desk, "backends/m/b1:drain", idempotency_key="k1")
    other = order(desk, "backends/m/b2:drain", idempotency_key="k1", body={"force": True})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    theirs = order(desk, "backends/m/b2:drain", OPERATOR, {"force": True}, idempotency_key="k1")
    assert theirs.status_code == 200


@pytest.mark.parametrize("key", ["a b", "x" * 256, "é".encode()])
def test_a_key_has_a_form(desk, key):
    reply = order(desk, "backends/m/b1:drain", idempotency_key=key)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_parameter")


class Now:
    at = 0.0

    def __call__(self):
        return self.at


def test_a_request_under_way_is_not_begun_again():
    kept = Replays(Now())
    assert kept.begin("me", "k", b"1") is None
    with pytest.raises(Problem) as caught:
        kept.begin("me", "k", b"1")
    assert caught.value.code == "idempotency_key_in_use"
    kept.end("me", "k", None)
    assert kept.begin("me", "k", b"1") is None


def test_a_failure_of_ours_may_be_tried_again():
    kept = Replays(Now())
    kept.begin("me", "k", b"1")
    kept.end("me", "k", problem(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "Try again."))
    assert kept.begin("me", "k", b"1") is None


def test_what_is_kept_is_bounded_in_time_number_and_bytes():
    now = Now()
    kept = Replays(now)
    for number in range(MOST + 10):
        kept.begin("me", str(number), b"1")
        kept.end("me", str(number), json_reply({}))
    assert kept.begin("me", "0", b"2") is None  # forgotten
    assert kept.begin("me", str(MOST), b"1") is not None
    for number in range(20):
        kept.begin("big", str(number), b"1")
        kept.end("big", str(number), json_reply({"x": "y" * 1024 * 1024}))
    assert kept.begin("big", "0", b"2") is None
    assert kept.begin("big", "19", b"1") is not None
    now.at += KEPT_S + 1
    assert kept.begin("big", "19", b"2") is None


# --- in turn ------------------------------------------------------------------------------------------


def test_of_two_that_saw_the_same_one_changes_it(desk):
    """Both send the ETag that they read; whatever their order, the second one is told."""

    async def both():
        transport = httpx2.ASGITransport(app=desk.app)
        sent = {"authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:9090", headers=sent
        ) as http:
            seen = (await http.get("/admin/v1/backends/m/b1")).headers["etag"]
            url = "/admin/v1/backends/m/b1:drain"
            asked = [http.post(url, json={}, headers={"if-match": seen}) for _ in range(5)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in asked]
            return sorted(task.result().status_code for task in tasks)

    assert asyncio.run(both()) == [200, 412, 412, 412, 412]
