import pytest

from gateway.admin.endpoint import Method
from gateway.admin.table import TABLE
from gateway.core.roles import Role
from tests.admindesk import TOKEN, Desk

SECRETS = {role: f"{role.value}-token-of-the-tests" for role in Role}
GUARDED = [each for each in TABLE if each.role is not None]


@pytest.fixture
def desk(tmp_path):
    tokens = [
        {"name": role.value, "role": role.value, "token": secret}
        for role, secret in SECRETS.items()
    ]
    return Desk(tmp_path, token=TOKEN, tokens=tokens)


def ask(desk, endpoint, secret):
    """Ask for something that does not exist, with a body that no endpoint takes."""
    path = endpoint.path
    for name in endpoint.parameters:
        path = path.replace(f"{{{name}}}", "nobody/b9" if name == "backend" else "nobody")
    headers = {"authorization": f"Bearer {secret}"}
    body = {"json": {"nothing_knows_this": 1}} if endpoint.changes else {}
    return desk.client.request(endpoint.method.value, path, headers=headers, **body)


def test_a_role_includes_those_before_it():
    order = [Role.METRICS, Role.VIEWER, Role.OPERATOR, Role.ADMIN]
    assert [[one.includes(other) for other in order] for one in order] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("endpoint", GUARDED, ids=lambda each: each.name)
def test_each_endpoint_asks_for_its_role(desk, endpoint, role):
    reply = ask(desk, endpoint, SECRETS[role])
    if role.includes(endpoint.role):
        assert reply.status_code not in (401, 403), reply.text
    else:
        assert (reply.status_code, reply.json()["code"]) == (403, "role_needed")
        assert reply.headers["content-type"] == "application/problem+json"
        assert endpoint.role.value in reply.json()["detail"]
        assert role.value in reply.json()["detail"]


@pytest.mark.parametrize("endpoint", GUARDED, ids=lambda each: each.name)
def test_no_endpoint_answers_without_a_token(desk, endpoint):
    reply = ask(desk, endpoint, "wrong")
    assert (reply.status_code, reply.json()["code"]) == (401, "unauthorized")


def test_the_one_token_of_old_is_an_admin(desk):
    for endpoint in GUARDED:
        assert ask(desk, endpoint, TOKEN).status_code not in (401, 403)


def test_what_changes_anything_needs_more_than_a_viewer():
    for endpoint in TABLE:
        assert not endpoint.changes or endpoint.role in (Role.OPERATOR, Role.ADMIN)
        writes = endpoint.method is not Method.GET
        assert writes == (endpoint.changes or endpoint.computes)


def test_with_roles_alone_there_is_no_other_way_in(tmp_path):
    desk = Desk(tmp_path, tokens=[{"name": "ci", "role": "viewer", "token": SECRETS[Role.VIEWER]}])
    assert desk.get("/admin/v1/overview").status_code == 401
    bearer = f"Bearer {SECRETS[Role.VIEWER]}"
    assert desk.get("/admin/v1/overview", authorization=bearer).status_code == 200
    assert desk.get("/livez").status_code == 200
