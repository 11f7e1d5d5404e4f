"""Operators' orders over a pool table, for tests of the admin app that are about something else."""

from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import Memory
from gateway.heal.orders import Orders
from gateway.heal.supervisor import Supervisor
from gateway.store.memory import MemoryStore
from gateway.store.replicas import Replicas, Told


def orders(table, clock, config):
    """Return what `admin_app` needs; nothing is supervised unless the configuration says so."""
    store = MemoryStore(clock)
    return Orders(table, Supervisor(table, clock, store, config), clock, lambda _: (None, 0))


def adapters(table, clock, config, ordered):
    """Return the keepers of a table's adapters; nothing runs."""
    found = Adapters(
        table, clock, ordered.supervisor.events, Memory(config.state), lambda pool: frozenset()
    )
    found.apply(config.pools)
    return found


def alone(clock):
    """No other replicas."""
    return Replicas(MemoryStore(clock), clock, Told)


async def no_limits(ask):
    """Refuse no request."""
