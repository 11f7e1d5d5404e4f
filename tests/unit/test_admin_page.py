"""The dashboard's files, as the admin listener serves them."""

import html
import re
from pathlib import Path

import pytest

from gateway.admin.page import assets
from gateway.observe.rules import ALERTS
from tests.admindesk import TOKEN, Desk

HOST = "127.0.0.1:9090"
FOLDER = Path(__file__).parents[2] / "gateway" / "dashboard"
ORDER = "/admin/v1/restarts:hold"


@pytest.fixture
def guarded(tmp_path):
    return Desk(tmp_path, token=TOKEN)


def test_the_page_is_there_without_a_token_and_has_no_data(guarded):
    reply = guarded.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert guarded.get("/admin/v1/me").status_code == 401


@pytest.mark.parametrize("path", sorted(assets()))
def test_each_file_is_served_and_may_be_kept_only_if_it_is_current(guarded, path):
    reply = guarded.get(path)
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = guarded.get(path, **{"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_file_of_the_folder_is_served():
    there = {str(each.relative_to(FOLDER)) for each in FOLDER.rglob("*") if each.is_file()}
    assert {f"/dashboard/{each}" for each in there} - assets().keys() == {"/dashboard/index.html"}


def test_nothing_runs_but_files_of_this_listener(guarded):
    policy = guarded.get("/").headers["content-security-policy"].split("; ")
    assert {
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    } <= set(policy)
    assert "unsafe" not in " ".join(policy)


def test_the_page_names_no_other_host_and_has_no_inline_script_or_style():
    page = assets()["/"].body.decode()
    assert all(
        each.startswith("/dashboard/") for each in re.findall(r'(?:src|href)="([^"#]+)', page)
    )
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page)


def test_each_module_that_is_imported_is_there():
    for path, asset in assets().items():
        if not path.endswith(".js") or "/vendor/" in path:
            continue
        for name in re.findall(r'^(?:import|export) .*from "(\.[^"]+)"', asset.body.decode(), re.M):
            assert (FOLDER / path.removeprefix("/dashboard/")).parent.joinpath(name).is_file(), name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_is_only_read(tmp_path, method):
    desk = Desk(tmp_path)
    json = {"content-type": "application/json"}
    assert desk.client.request(method, "/", headers=json).status_code == 404
    assert desk.client.head("/").status_code == 200


def test_who_asks_is_told_with_its_role(tmp_path):
    tokens = [{"name": "watch", "role": "viewer", "token": "a-viewer-of-the-tests"}]
    desk = Desk(tmp_path, token=TOKEN, tokens=tokens)
    told = desk.get("/admin/v1/me", authorization="Bearer a-viewer-of-the-tests")
    assert told.json() == {"name": "watch", "role": "viewer"}
    assert Desk(tmp_path).get("/admin/v1/me").json() == {"name": "local", "role": "admin"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": f"http://{HOST}"},
        {"origin": f"http://{HOST}"},  # of a browser that tells no site over plain HTTP
        {"origin": f"https://{HOST}"},  # TLS ends before this listener
    ],
)
def test_the_dashboard_may_give_orders(tmp_path, headers):
    reply = Desk(tmp_path).client.post(ORDER, json={"dry_run": True}, headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "origin": f"http://{HOST}"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:8080"},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": ""},
    ],
)
def test_a_page_of_another_site_may_not(tmp_path, headers):
    reply = Desk(tmp_path).client.post(ORDER, json={"dry_run": True}, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_runbook_of_each_alert_is_a_page_that_needs_no_token(guarded, alert):
    page = guarded.get(f"/runbooks/{alert.name}")
    assert page.status_code == 200
    shown = html.unescape(re.sub(r"<[^>]+>", "", page.text))
    for text in (alert.name, alert.expr, alert.means, alert.look, alert.act):
        assert text.replace("`", "") in shown
    assert f'href="/runbooks/{alert.name}"' in guarded.get("/runbooks").text
    assert all(each.startswith("/") for each in re.findall(r'(?:src|href)="([^"]+)', page.text))


def test_a_runbook_that_does_not_exist_is_404(guarded):
    assert guarded.get("/runbooks/Nothing", authorization=f"Bearer {TOKEN}").status_code == 404
