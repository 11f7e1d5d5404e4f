"""The admin API as its OpenAPI document describes it, asked at random: a bounded number of examples, one seed."""

import asyncio

import hypothesis
import pytest
import schemathesis
import schemathesis.openapi
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gateway.admin.openapi import document
from gateway.admin.table import TABLE
from gateway.ops.upgrading import UpgradeRefused
from tests.admindesk import TOKEN, Desk

SCHEMA = schemathesis.openapi.from_dict(document(TABLE))
# Of an ETag or a key that was made up, these are the answers.
SCHEMA.config.checks.positive_data_acceptance.expected_statuses += ["412", "422"]
# An order for an unknown pool was a 400 before there was a document, and stays one.
UNKNOWN_POOL = ("hold", "lift")


class NoUpgrade:
    under_way = False

    async def ask(self):
        raise UpgradeRefused("Not in a test.")


class Current:
    """The app that is asked; it is made when the tests run."""

    app = None

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


SCHEMA.app = Current()


@pytest.fixture(scope="module", autouse=True)
def _app(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    desk = Desk(
        state,
        pools={"m": 2, "org/n:x": 1},
        keys=True,
        more={"tiers": {"gold": {"priority": 5}}},
        limits={"failed_keys": 1_000_000},  # each check tries without a token, too
        listen="0.0.0.0:9090",
        token=TOKEN,
    )
    desk.objects.upgrades = NoUpgrade()
    asyncio.run(desk.store.create({"name": "first"}))
    SCHEMA.app.app = desk.app


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),  # they are about time
)
def test_every_answer_is_as_the_document_says(case):
    known = case.operation.definition.raw["operationId"] in UNKNOWN_POOL
    excluded = [positive_data_acceptance] if known else []
    # Given here, the token counts as one that is valid.
    token = {"Authorization": f"Bearer {TOKEN}"}
    case.call_and_validate(headers=token, excluded_checks=excluded)
