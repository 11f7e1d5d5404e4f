"""`Settings`: what requests are handled with, made from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.access.effective import Tiers
from gateway.access.keys import KeyRing, OpenRing
from gateway.access.salt import salt_for
from gateway.config.limits import TimeoutsConfig
from gateway.config.models import Config, OverflowPolicy, PoolConfig
from gateway.config.parameters import Policies, PrefixRouting, Resume
from gateway.config.reload import shared_digest
from gateway.core.addresses import Proxies
from gateway.core.endpoints import NO_ENGINE
from gateway.core.traffic import Engine
from gateway.core.types import Ask
from gateway.counting.counters import PromptCounters
from gateway.counting.tokens import Asker
from gateway.ingress import descriptors
from gateway.ingress.connections import ClientTimes, Connections
from gateway.ingress.descriptors import ADMIN_CONNECTIONS
from gateway.ingress.downstream import Downstream
from gateway.ingress.plain import Takes
from gateway.ingress.reader import ClientLimits
from gateway.ingress.server import Ingress
from gateway.limiting.plans import Plans
from gateway.limiting.prices import Prices
from gateway.pools.table import Backend
from gateway.upstream.silence import Patience

if TYPE_CHECKING:  # it needs a library that is optional
    from gateway.access.tokens import Tokens

log = logging.getLogger("gateway.app")

# After a refusal the client has this long to read why, before the connection closes under it.
_LINGER_S: Final = 2.0
_ORDER_BYTES: Final = 256 * 1024 + 1  # one more than a configuration that is to be checked may have


@dataclass(frozen=True, slots=True)
class GoingOn:
    """How streams of one pool go on at another backend when theirs fails, or leaves."""

    how: Resume
    # A whole reply with so much output expected is made of a stream; None: none is.
    least_tokens: int | None
    move_after_s: float

    @classmethod
    def of(cls, pool: PoolConfig) -> GoingOn:
        """Return what the settings of a pool say."""
        exact = pool.resume is Resume.EXACT and pool.engine is Engine.VLLM
        least_tokens = pool.resume_replies if exact and len(pool.backends) > 1 else None
        return cls(pool.resume, least_tokens, pool.move_after)


@dataclass(slots=True)
class Settings:
    """What a reload swaps, all at once; a request keeps the settings it started with."""

    config: Config
    shared_digest: str  # of `config`; sent to other replicas each second, and costly to compute
    keys: KeyRing | OpenRing
    counters: PromptCounters
    patience: Patience
    policies: Policies
    plans: Plans  # of limits
    prices: Prices
    proxies: Proxies
    # As in `config`, whose attributes cost ten times as much.
    max_body: int
    max_reply: int
    session_header: bytes
    pools: Mapping[str, PoolConfig]
    on_overflow: Mapping[str, OverflowPolicy]  # by pool
    going_on: Mapping[str, GoingOn]  # by pool
    precise: frozenset[str]  # pools whose engines tell what they hold

    def counts_as(self, before: Settings) -> bool:
        """Whether limits are as in settings before; a key that is new had none."""
        keys, known = self.keys, before.keys
        if isinstance(keys, KeyRing) and isinstance(known, KeyRing) and not keys.counts_as(known):
            return False
        now, then = self.config, before.config
        return now.tenants == then.tenants and now.tiers == then.tiers

    def salt(self, ask: Ask) -> Callable[[str | None], str] | None:
        """Return what makes the salt of a prefix cache that tenants do not share; None where there is none."""
        if ask.call.endpoint in NO_ENGINE:
            return None
        return partial(salt_for, self.keys.salting, ask.caller.tenant)


def settings_for(
    config: Config,
    open_asker: Callable[[Backend], Asker],
    before: Settings | None = None,
    shared: KeyRing | None = None,
    tokens: Tokens | None = None,
) -> Settings:
    """Return what requests are handled with under a configuration.

    Keys and tokenizers of `before` are kept where their files have not changed. Others are read,
    which blocks: 1 ms a key, 0.8 s a tokenizer of 150,000 tokens. A thread keeps the loop free of
    the first; the tokenizers' library lets no other thread run for most of the second.
    `shared` are the keys, where they are not in a file; `tokens` are accepted beside those of a file.

    Raises:
        ConfigError: the keys file or a tokenizer cannot be used.
    """
    timeouts = config.timeouts
    keys = None if before is None else before.keys
    if config.keys is None:
        keys = OpenRing()
    elif shared is not None:
        keys = shared
    elif not isinstance(keys, KeyRing) or not _same(keys, config.keys.file, config.tiers):
        keys = KeyRing.load(config.keys.file, config.tiers, tokens)
    return Settings(
        config=config,
        shared_digest=shared_digest(config),
        keys=keys,
        policies=Policies(config),
        plans=Plans({name: tenant.limits for name, tenant in config.tenants.items()}),
        prices=Prices(config.prices),
        proxies=Proxies(config.trusted_proxies),
        max_body=config.limits.max_body,
        max_reply=config.limits.max_reply,
        session_header=config.session_header.encode(),
        pools=config.pools,
        precise=frozenset(
            name for name, pool in config.pools.items() if pool.prefix is PrefixRouting.PRECISE
        ),
        going_on={name: GoingOn.of(pool) for name, pool in config.pools.items()},
        on_overflow={name: pool.on_overflow for name, pool in config.pools.items()},
        counters=PromptCounters(
            config.pools,
            open_asker,
            deadline_s=timeouts.tokenize,
            before=None if before is None else before.counters,
        ),
        patience=Patience(
            first_byte_s=timeouts.first_byte,
            stall_s=timeouts.stall,
            heartbeat_s=timeouts.heartbeat,
            client_write_s=timeouts.client_write,
        ),
    )


def _same(keys: KeyRing, path: Path, tiers: Tiers) -> bool:
    """Whether a ring is what these settings would lead to."""
    return keys.path == path and keys.tiers == tiers and not keys.changed()


def connections_for(config: Config) -> Connections:
    """Return the book of client connections: its deadlines, and how many there may be."""
    limits, timeouts = config.limits, config.timeouts
    backends = sum(len(pool.backends) for pool in config.pools.values())
    descriptor_limit = descriptors.limit()
    most = descriptors.most_connections(descriptor_limit, backends, limits.connections)
    if limits.connections is not None and most < limits.connections:
        log.warning(
            "limits.connections is %d, but %d open files allow only %d; raise `ulimit -n`",
            limits.connections, descriptor_limit, most,
            extra={"event": "few_descriptors"},
        )  # fmt: skip
    return Connections(_client_times(timeouts), most, limits.connections_per_address)


def admin_ingress(config: Config) -> Ingress:
    """Return what the admin listener's connections share: the public one's bounds, and no inference."""
    return Ingress(
        story=_no_story,
        limits=ClientLimits.of(config.limits),
        connections=Connections(
            _client_times(config.timeouts), ADMIN_CONNECTIONS, by_setting=False
        ),
        refused=lambda error, request_id, line, client: None,
        endpoints={},
        takes=_orders(config.timeouts),
    )


def change_ingresses(config: Config, public: Ingress, admin: Ingress) -> None:
    """Have both listeners do as changed settings say, also with the connections that they have."""
    public.allow(config.cors)
    public.connections.proxies = Proxies(config.trusted_proxies)
    for ingress in (public, admin):
        ingress.connections.apply(_client_times(config.timeouts))
    admin.takes = _orders(config.timeouts)


async def _no_story(down: Downstream) -> None:
    raise NotImplementedError("the admin listener has no inference routes")


def _orders(timeouts: TimeoutsConfig) -> Takes:
    return Takes(_ORDER_BYTES, timeouts.body)


def _client_times(timeouts: TimeoutsConfig) -> ClientTimes:
    return ClientTimes(
        head_s=timeouts.header,
        idle_s=timeouts.keep_alive,
        linger_s=min(_LINGER_S, timeouts.body),
        closing_s=timeouts.client_write,
    )
