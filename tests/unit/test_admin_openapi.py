"""The OpenAPI document: one truth with the table that is served."""

import json

import pytest
from jsonschema import Draft202012Validator

from gateway.admin.openapi import document
from gateway.admin.table import TABLE
from tests.admindesk import Desk


@pytest.fixture(scope="module")
def made():
    return document(TABLE)


def refs(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for each in node.values():
            yield from refs(each)
    elif isinstance(node, list):
        for each in node:
            yield from refs(each)


def test_every_endpoint_is_in_it_and_nothing_else(made):
    told = {
        (method.upper(), path, each["operationId"])
        for path, methods in made["paths"].items()
        for method, each in methods.items()
    }
    assert told == {(each.method.value, each.path, each.name) for each in TABLE}


def test_what_it_refers_to_is_in_it(made):
    for ref in refs(made):
        assert ref.rpartition("/")[2] in made["components"]["schemas"], ref


def test_its_schemas_are_schemas(made):
    for schema in made["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_it_says_who_may(made):
    for each in TABLE:
        told = made["paths"][each.path][each.method.value.lower()]
        assert told.get("x-role") == (each.role.value if each.role else None)
        assert (told.get("security") == []) == (each.role is None)
        assert ("403" in told["responses"]) == ("x-role" in told and told["x-role"] != "metrics")


def test_it_is_served_as_it_is(tmp_path, made):
    reply = Desk(tmp_path).get("/admin/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == json.loads(json.dumps(made))


def test_answers_are_as_it_says(tmp_path, made):
    desk = Desk(tmp_path, pools={"m": 2})
    for path in ("overview", "pools", "backends", "replicas", "events", "backends/m/b1"):
        template = "/admin/v1/backends/{backend}" if "/" in path else f"/admin/v1/{path}"
        answer = made["paths"][template]["get"]["responses"]["200"]
        schema = answer["content"]["application/json"]["schema"]
        whole = {**schema, "components": made["components"]}
        Draft202012Validator(whole).validate(desk.get(f"/admin/v1/{path}").json())
