"""What a server that gave a token still needs before it serves."""

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


@pytest.mark.parametrize(("failures", "why"), [(1, ""), (2, "cannot read its model list: timeout")])
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
