"""What a process shares with others: over Redis with other gateways, over the parent with other workers, or nothing.

    redis            other gateways, and all their workers
    workers, alone   the parent keeps it
    neither          this process has it for itself

Of several workers the first one leads: it alone writes the state folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.access.keyfile import shared_pepper
from gateway.access.redisstore import RedisKeys
from gateway.access.sharedkeys import SharedKeys
from gateway.adapters.memory import Memory
from gateway.adapters.together import Together
from gateway.config.models import Config
from gateway.core.aio import Clock
from gateway.core.errors import ConfigError
from gateway.core.events import Events
from gateway.heal.supervisor import Supervisor
from gateway.ingress.handler import Handler
from gateway.ingress.settings import Settings
from gateway.limiting.limiter import Limiter
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollouts
from gateway.store.group import Group, GroupScripts, GroupStore
from gateway.store.memory import MemoryStore
from gateway.store.scripts import Scripted
from gateway.store.shared import SharedStore
from gateway.usage.accounts import Accounts

if TYPE_CHECKING:  # it needs a library that is optional
    from gateway.access.tokens import Tokens


def shared_store(
    config: Config, clock: Clock, group: Group | None
) -> tuple[SharedStore, Scripted | None]:
    """Return what replicas share, and the Redis that it is on, if it is; nothing is opened yet.

    Workers without Redis share what their parent keeps.

    Raises:
        ConfigError: `redis` is not the URL of one.
    """
    if config.redis is None:
        return MemoryStore(clock) if group is None else GroupStore(group), None
    from gateway.store.onredis import redis_store

    try:
        store = redis_store(config.redis.get_secret_value(), clock)
        return store, store.link
    except ValueError as error:
        raise ConfigError([f"redis: error: {error}"]) from None


def keys_of(
    config: Config, link: Scripted | None, clock: Clock, settings: Callable[[], Settings]
) -> tuple[Tokens | None, SharedKeys | None]:
    """Return the reader of an identity provider's tokens, and the keys that replicas share, as their copy on disk is.

    The first is None where no provider is named, the second where keys are in a file. `settings` is called later,
    for those in force by then.

    Raises:
        ConfigError: the pepper cannot be used.
    """
    tokens = None
    if config.keys is not None and config.keys.oidc is not None:
        from gateway.access.issuer import Issuer
        from gateway.access.tokens import Tokens

        tokens = Tokens(Issuer(config.keys.oidc, clock))
        tokens.issuer.on_change.append(lambda: settings().keys.check_anew())
    if config.keys is None or not config.keys.shared or link is None:
        return tokens, None
    keys = RedisKeys(link, shared_pepper(config.keys), lambda: settings().config.tiers, clock.wall)
    shared = SharedKeys(keys, config.state / "keys.json", tokens)
    shared.read_copy()
    return tokens, shared


def limiter_of(
    clock: Clock,
    link: Scripted | None,
    replicas: Callable[[], int],
    accounts: Accounts,
    group: Group | None,
) -> Limiter:
    """Return what limits, on Redis, else in the parent of workers, else in this process."""
    shared = link if link is not None or group is None else GroupScripts(group)
    limiter = Limiter(clock, shared, replicas, accounts.spent)
    accounts.on_learnt.append(limiter.recall)
    if accounts.telling is not None:
        limiter.tells_owed = False
        accounts.telling.on_telling.append(limiter.tell_owed)
        accounts.telling.on_learnt.append(limiter.recall)
        limiter.on_lost.append(accounts.telling.relearn)
    return limiter


def count_on(handler: Handler, accounts: Accounts, before: Settings) -> None:
    """Have limits that changed go on from all that was used of a day or month, also while there was none."""
    if not handler.settings.counts_as(before):
        handler.limiter.recall()
        if accounts.telling is not None:
            accounts.telling.count_for_another()


def rollouts_of(
    table: PoolTable, clock: Clock, events: Events, config: Config, group: Group | None
) -> Rollouts:
    """Make the canaries; of several gateways on a Redis, who holds a lease judges them."""
    leads, alone = group is None or group.place.leads, config.redis is None
    rollouts = Rollouts(table, clock, events, config.state, saves=leads, judges=leads and alone)
    rollouts.apply(config.pools)
    return rollouts


def adapter_memory(config: Config, group: Group | None) -> Memory:
    """Return what is known of adapters from before, for the process that has the state folder."""
    return Memory(config.state if group is None or group.place.leads else None)


def adapters_together(
    config: Config, store: SharedStore, clock: Clock, process_id: str, group: Group | None, supervisor: Supervisor
) -> Together | None:  # fmt: skip
    """Return what has one process place adapters for all; None: there is no other."""
    if group is None and config.redis is None:
        return None
    leads, table, names = group is None or group.place.leads, supervisor.table, supervisor.names

    def scope_of(pool: str) -> str:
        return names.scope(table.backends(pool))

    return Together(store, clock, process_id, leads, group is not None, scope_of)
