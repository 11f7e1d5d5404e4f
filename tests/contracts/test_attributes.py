"""How CPython finds methods: fast on objects whose attributes are in slots, or are few."""

import asyncio

import uvicorn

from gateway.config.limits import LimitsConfig
from gateway.ingress.connections import ClientTimes, Connections
from gateway.ingress.reader import ClientLimits
from gateway.ingress.server import GatewayProtocol, Ingress
from gateway.upstream.connection import Connection

# Attributes of a dict whose keys are shared: `SHARED_KEYS_MAX_SIZE` of dictobject.c.
MOST_SHARED = 30


def attributes(made) -> int:
    return len(getattr(made, "__dict__", ()))


def in_a_loop(make):
    async def main():
        return make()

    return asyncio.run(main())


def test_a_backends_connection_has_all_of_its_attributes_in_slots():
    assert attributes(in_a_loop(lambda: Connection(lambda _: None, lambda _: None))) == 0


def test_a_clients_connection_has_so_few_others_that_their_names_are_shared():
    connections = Connections(ClientTimes(head_s=10, idle_s=75, linger_s=2, closing_s=60), 2)
    ingress = Ingress(
        story=lambda down: None,
        limits=ClientLimits.of(LimitsConfig()),
        connections=connections,
        refused=lambda error, request_id, line, client: None,
    )
    config = uvicorn.Config(lambda scope: None, http="httptools", ws="none", lifespan="off")
    state = uvicorn.Server(config).server_state
    made = in_a_loop(
        lambda: GatewayProtocol(ingress, config=config, server_state=state, app_state={})
    )
    assert attributes(made) <= MOST_SHARED
