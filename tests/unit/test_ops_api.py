import asyncio
import os
import threading

import pytest
from starlette.testclient import TestClient

from gateway.admin.condition import look_at_settings_file
from gateway.admin.fleet import get_overview
from gateway.admin.table import TABLE
from gateway.config.supervision import LaunchConfig, Remedy
from gateway.heal.cure import Cure
from gateway.ingress.routes import Readiness
from gateway.launch.launcher import Changes
from tests.admindesk import TOKEN, Desk

PATHS = ("/metrics", "/admin/v1/overview", "/admin/v1/decisions", "/livez", "/readyz")


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.fixture
def guarded(tmp_path):
    return Desk(tmp_path, token=TOKEN)


def test_remedies_are_listed_and_dropped(tmp_path):
    desk = Desk(tmp_path)
    launch = LaunchConfig(command=("vllm", "serve", "m"), port=8001)
    cure = Cure(Remedy.LOWER_MAX_MODEL_LEN, Changes({"max-model-len": 8192}), "KV cache too small")
    desk.orders.supervisor.overrides.apply("m/b1", launch, cure, desk.clock.wall())
    (told,) = desk.get("/admin/v1/remedies").json()["data"]
    assert (told["backend"], told["args"], told["on_trial"]) == (
        "m/b1",
        {"max-model-len": 8192},
        False,
    )
    assert told["applied"] == [
        {
            "remedy": "lower_max_model_len",
            "at": "2023-11-14T22:13:20.000Z",
            "why": "KV cache too small",
        }
    ]
    dropped = desk.client.post("/admin/v1/backends/m/b1/remedies:drop", json={}).json()
    assert dropped["changed"]
    assert "Dropped --max-model-len 8192" in dropped["sentence"]
    assert desk.get("/admin/v1/remedies").json()["data"] == []
    again = desk.client.post("/admin/v1/backends/m/b1/remedies:drop", json={}).json()
    assert not again["changed"]
    unknown = desk.client.post("/admin/v1/backends/m/b9/remedies:drop", json={})
    assert unknown.status_code == 404
    (event,) = desk.get("/admin/v1/events").json()["data"]
    assert (event["kind"], event["label"]) == ("remedy", "dropped")


@pytest.mark.parametrize(
    ("path", "accepted", "encoding"),
    [
        ("/admin/openapi.json", "br, gzip;q=0.8", "gzip"),
        ("/admin/openapi.json", "GZIP", "gzip"),
        ("/admin/openapi.json", "identity", None),
        ("/admin/openapi.json", "br, gzip; q=0", None),
        ("/admin/openapi.json", "", None),
        ("/admin/v1/pools", "gzip", None),  # so small that packing it gains nothing
    ],
)
def test_a_large_answer_is_packed_for_who_takes_it(desk, path, accepted, encoding):
    reply = desk.get(path, **{"accept-encoding": accepted})
    assert reply.headers.get("content-encoding") == encoding
    assert reply.json() == desk.get(path, **{"accept-encoding": "identity"}).json()
    assert (int(reply.headers["content-length"]) < len(reply.content)) == (encoding is not None)


def test_who_asks_here_for_a_model_is_told_where_models_are(desk, guarded):
    reply = desk.client.post("/v1/chat/completions", json={})
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert "models are served at the other address, `listen`" in reply.json()["detail"]
    assert "openapi.json" in desk.get("/v2").json()["detail"]
    reply = guarded.client.post("/v1/chat/completions", json={})
    assert reply.status_code == 401
    assert reply.json()["detail"].startswith("This is the admin listener. Send its token")


def test_who_has_no_token_is_named_in_the_log_as_often_as_it_is_told(tmp_path, caplog):
    guarded = Desk(tmp_path, limits={"failed_keys": 2}, token=TOKEN)
    headers = {"authorization": "Bearer not-the-token"}
    answered = [guarded.get("/metrics", **headers).status_code for _ in range(4)]
    assert answered == [401, 401, 429, 429]
    lines = [each for each in caplog.records if getattr(each, "event", "") == "admin_refused"]
    assert [each.client for each in lines] == ["testclient"] * 2
    assert "not-the-token" not in caplog.text


def test_metrics_are_told(desk):
    reply = desk.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "gateway_build_info{" in reply.text


def test_metrics_are_told_as_openmetrics_on_request(desk):
    reply = desk.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


def test_streams_go_on_while_the_overview_is_made(desk):
    went_on = []

    async def asked():
        asyncio.get_running_loop().call_soon(went_on.append, "a stream")
        await get_overview(desk.objects, None)
        return [*went_on]

    assert asyncio.run(asked()) == ["a stream"]


def kinds(desk):
    return [each["kind"] for each in desk.get("/admin/v1/overview").json()["problems"]]


def test_a_settings_file_that_was_changed_is_told_until_it_is_in_force(desk):
    asyncio.run(desk.reload("anna", ""))
    desk.file.write_text(desk.file.read_text() + "\n")
    os.utime(desk.file, (1_699_999_990, 1_699_999_990))  # just now, by the desk's clock
    asyncio.run(look_at_settings_file(desk.objects))
    assert "reload_pending" in kinds(desk)
    asyncio.run(desk.reload("anna", ""))
    assert "reload_pending" not in kinds(desk)


def test_a_settings_file_that_cannot_be_read_to_its_end_holds_up_nobody(desk):
    desk.file.unlink()
    os.mkfifo(desk.file)  # as if its file server hung
    asked = threading.Thread(target=kinds, args=(desk,), daemon=True)
    asked.start()
    asked.join(5)
    held_up = asked.is_alive()
    os.close(os.open(desk.file, os.O_RDWR | os.O_NONBLOCK))
    assert not held_up


def test_the_overview_is_told(desk):
    reply = desk.get("/admin/v1/overview")
    assert reply.headers["content-type"] == "application/json"
    told = reply.json()
    assert told["schema_version"] == 2
    assert told["state"] == "starting"
    assert [pool["name"] for pool in told["pools"]] == ["m"]
    assert not told["draining"]


def test_the_overview_says_when_the_gateway_drains(desk):
    desk.readiness = Readiness(False, (("accepting", False, "draining"),))
    assert desk.get("/admin/v1/overview").json()["draining"]


def test_the_overview_has_no_secret(guarded):
    reply = guarded.get("/admin/v1/overview", authorization=f"Bearer {TOKEN}")
    assert reply.status_code == 200
    assert TOKEN not in reply.text


def test_an_event_keeps_its_time_when_the_clock_is_set(desk):
    desk.client.post("/admin/v1/restarts:hold", json={"for_s": 60})
    desk.clock.wall_now += 3600
    (event,) = desk.get("/admin/v1/events").json()["data"]
    assert event["at"] == "2023-11-14T22:13:20.000Z"


def test_alive_whatever_the_backends_do(desk):
    desk.readiness = Readiness(False, ())
    assert desk.get("/livez").text == "ok\n"


def test_readiness_is_a_status_and_lines_on_request(desk):
    assert desk.get("/readyz").text == "ok\n"
    assert desk.get("/readyz?verbose").text == "[+]accepting ok\n[+]backends 1 of 1\nok\n"
    desk.readiness = Readiness(False, (("backends", False, "0 of 1 serving"),))
    reply = desk.get("/readyz?verbose")
    assert reply.status_code == 503
    assert reply.text == "[-]backends 0 of 1 serving\nnot ready\n"


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/admin/v1/overview", "/nothing"])
@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x", "Bearer é"],
)
def test_without_the_token_nothing_is_told(guarded, path, authorization):
    given = {} if authorization is None else {"authorization": authorization.encode()}
    reply = guarded.get(path, **given)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["code"] == "unauthorized"


def test_with_the_token_it_is(guarded):
    assert guarded.get("/metrics", authorization=f"Bearer {TOKEN}").status_code == 200
    assert guarded.get("/metrics", authorization=f"bearer {TOKEN}").status_code == 200


@pytest.mark.parametrize("token", ["geheimer-schlüssel-à", "пароль-1234567890", "鍵-0123456789"])
def test_a_token_may_have_any_letters(guarded, token):
    guarded.configure(token=token)
    for sent, status in ((token, 200), (token[:-1], 401), (token + "à", 401)):
        bearer = f"Bearer {sent}".encode()
        assert guarded.get("/metrics", authorization=bearer).status_code == status


def test_two_credentials_are_none(guarded):
    twice = [("authorization", f"Bearer {TOKEN}")] * 2
    assert guarded.client.get("/metrics", headers=twice).status_code == 401


def test_probes_need_no_token(guarded):
    assert guarded.get("/livez").status_code == 200
    assert guarded.get("/readyz").status_code == 200


def test_a_reload_may_change_the_token(guarded):
    guarded.configure(token="another-token")
    assert guarded.get("/metrics", authorization=f"Bearer {TOKEN}").status_code == 401
    assert guarded.get("/metrics", authorization="Bearer another-token").status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9090", "127.0.0.1", "127.0.0.1:9090", "[::1]", "[::1]:9090"]
)
def test_on_loopback_the_names_of_this_machine_are_answered(desk, host):
    assert desk.get("/metrics", host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost:9090:1", "[::1",
     "localhost.", "10.0.0.1", "", "localhost:x", ":9090"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/metrics", "/livez"])
def test_on_loopback_foreign_names_are_not(desk, path, host):
    reply = desk.get(path, host)
    assert reply.status_code == 421
    assert reply.json()["code"] == "unknown_host"


def test_elsewhere_the_name_does_not_matter(tmp_path):
    desk = Desk(tmp_path, listen="0.0.0.0:9090", token=TOKEN)
    reply = desk.get("/metrics", "gw.internal", authorization=f"Bearer {TOKEN}")
    assert reply.status_code == 200


# --- how ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_everything_is_read_with_get_or_head_only(desk, method, path):
    json = {"content-type": "application/json"}  # else a POST is not looked at
    reply = desk.client.request(method, path, headers=json)
    assert reply.status_code == 405
    assert "GET, HEAD" in reply.headers["allow"]


@pytest.mark.parametrize("path", PATHS)
def test_head_answers_like_get(desk, path):
    asked, told = desk.client.head(path), desk.client.get(path)
    assert asked.status_code == told.status_code
    assert asked.headers["content-type"] == told.headers["content-type"]
    assert asked.headers.get("etag") == told.headers.get("etag")


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard",
        "/dashboard/",
        "/dashboard/../guard.py",
        "/metrics/",
        "/v1/models",
        "/v1/chat/completions",
        "/docs",
    ],
)
def test_other_paths_are_unknown_and_never_redirected(desk, path):
    reply = desk.client.get(path, follow_redirects=False)
    assert reply.status_code == 404
    assert reply.json()["code"] == "not_found"


def test_a_path_with_a_line_end_is_unknown_too(desk):
    reply = desk.client.get("/admin/v1/a%0Ab")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert reply.json()["detail"].startswith("There is no such path here.")


def test_every_answer_forbids_caching_and_embedding(desk, guarded):
    replies = [desk.get(path) for path in (*PATHS, "/nothing")]
    replies += [guarded.get("/metrics"), desk.get("/metrics", "evil.example")]
    for reply in replies:
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_a_bug_is_told_as_a_problem_without_its_words(desk):

    client = TestClient(desk.app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    desk.readiness = None  # what no caller would do
    reply = client.get("/readyz")
    assert reply.status_code == 500
    assert reply.json()["code"] == "bug"
    assert "NoneType" not in reply.text


def test_the_endpoints_that_scripts_rely_on_stay_as_they_are():
    backend = "/admin/v1/backends/{backend}"
    read = {
        *PATHS,
        *("/admin/v1/decisions/{request_id}", "/admin/v1/route", "/admin/v1/events"),
        *(f"{backend}/logs", "/admin/v1/remedies", "/admin/v1/adapters", "/admin/v1/quarantine"),
    }
    ordered = {
        *(f"{backend}:{verb}" for verb in ("drain", "undrain", "restart")),
        *("/admin/v1/restarts:hold", "/admin/v1/restarts:lift", f"{backend}/remedies:drop"),
        *(f"{backend}/adapters:{verb}" for verb in ("load", "unload", "release")),
        *("/admin/v1/upgrade", "/admin/v1/quarantine/{id}:lift"),
    }
    served = {(each.method.value, each.path) for each in TABLE}
    assert {("GET", path) for path in read} | {("POST", path) for path in ordered} <= served


def test_no_endpoint_has_a_path_of_the_public_side():
    assert all(each.path.startswith("/admin/") or each.path in PATHS for each in TABLE)
    assert len({each.name for each in TABLE}) == len(TABLE)
