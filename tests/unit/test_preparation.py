"""What a server that gave a token still needs before it serves."""

import json

import pytest

from gateway.config.models import Config
from gateway.core.events import Events
from gateway.heal.preparation import Preparation
from gateway.watch.fetch import FetchError
from tests.gatehouse import House, held

LIST = b'{"object":"list","data":[{"id":"m","object":"model"},{"id":"sql","object":"model","root":"/sql","parent":"m"}]}'


class Pages:
    """Pages of a server whose model list does not come so many times."""

    def __init__(self, failures):
        self.failures = failures

    async def get(self, path, *, timeout_s):
        assert path == "/v1/models"
        self.failures -= 1
        if self.failures >= 0:
            raise FetchError("timeout")
        return LIST


@pytest.mark.parametrize(
    ("failures", "why"), [(1, ""), (2, "cannot read its model list: no answer in time")]
)
@held
async def test_a_model_list_that_does_not_come_twice_in_a_row_is_proof_and_once_is_none(
    failures, why
):
    pools = {"m": {"backends": [{"url": "http://127.0.0.1:8001"}]}}
    house = House(**pools)
    backend = house.table.get("m/b1")
    prepare = Preparation(backend, Pages(failures), house.table, house.loop, Events())
    pool = Config.model_validate({"pools": pools}).pools["m"]
    assert await prepare.load_adapters(pool, {"sql": "/sql"}, print) == why
    assert backend.adapters == (() if why else ("sql",))


class Dies:
    """Pages of a server that answers 500 to the load of one adapter; `healthy`: it lives."""

    def __init__(self, healthy):
        self.healthy = healthy
        self.loads = []

    async def get(self, path, *, timeout_s):
        if path == "/health" and not self.healthy:
            raise FetchError("http_503")
        return LIST

    async def post(self, path, body, *, timeout_s):
        name = json.loads(body)["lora_name"]
        self.loads.append(name)
        return (500, b"EngineCore encountered an issue.") if name == "deadly" else (200, b"Success")


@pytest.mark.parametrize("healthy", [True, False])
@held
async def test_what_may_have_died_of_a_load_is_asked_whether_it_lives_before_the_next(healthy):
    pools = {"m": {"backends": [{"url": "http://127.0.0.1:8001"}]}}
    house, pages = House(**pools), Dies(healthy)
    prepare = Preparation(
        house.table.get("m/b1"), pages, house.table, house.loop, events := Events()
    )
    pool = Config.model_validate({"pools": pools}).pools["m"]
    why = await prepare.load_adapters(pool, {"deadly": "/deadly", "fr": "/fr"}, print)
    assert pages.loads == ["deadly", "fr"][: 1 + healthy]
    dead = "/health fails since it was to load the adapter deadly: it answers with status 503"
    assert why == ("" if healthy else dead)
    assert [each.label for each in events.newest()] == ["deadly"]
