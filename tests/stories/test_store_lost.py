"""A Redis that does not answer: the gateway serves, restarts nothing, and says so without the password."""

import logging

from gateway.core.types import Phase
from gateway.heal.decisions import Why
from tests.stories.stubs import free_url
from tests.stories.supervised import fleet, machine, managed
from tests.stories.support import story

CANARY = "c4nary"


def lost():
    return {"redis": f"redis://gateway:{CANARY}@{free_url().removeprefix('http://')}/0"}


@story
async def test_the_gateway_starts_and_serves_without_it_and_restarts_nothing(caplog):
    caplog.set_level(logging.DEBUG)
    async with machine() as on:
        for name in ("m/b1", "m/b2"):
            await on[name].begin()
        async with fleet(on, managed(on["m/b1"]), managed(on["m/b2"]), extra=lost()) as world:
            await on["m/b1"].die()
            await world.until(lambda: world.phase("m/b1") is not Phase.READY)
            await world.until(lambda: world.unit().decision is not None)
            assert (await world.chat()).status_code == 200
            await world.turns()
            assert world.unit().decision.why is Why.NO_STORE
            assert on["m/b1"].starts == []
            told = (await world.admin("GET", "/admin/v1/overview")).json()
            assert told["store"]["trouble"] == "the connection was refused"
            refused = await world.admin("POST", "/admin/v1/restarts:hold", {})
            assert refused.status_code == 503
            await world.until(lambda: any("does not answer" in each for each in caplog.messages))
            said = [caplog.text, str(told), refused.text, await world.metrics()]
            assert not any(CANARY in each for each in said)
