"""How a backend reads its settings and its model list, and what is kept from requests there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from gateway.config.models import Admission, BackendConfig, HealthConfig, PoolConfig
from gateway.config.parameters import PrefixRouting
from gateway.core.exclusion import Exclusion
from gateway.core.prefix import PrefixIndex
from gateway.core.traffic import Engine
from gateway.core.types import ModelsSeen, Phase
from gateway.pools.backend import Backend
from gateway.pools.facts import HealthState
from gateway.prefix.approximate import ApproximateIndex
from gateway.prefix.precise import PreciseIndex
from gateway.prefix.ranked import RankedIndex
from gateway.wire.vllm import chats_take_ids


class Withheld(NamedTuple):
    """Which adapters requests cannot have at a backend, whatever it lists."""

    backend: Backend
    why: Mapping[str, Exclusion]
    ordered: tuple[tuple[str, bool], ...] = ()  # which shall be there by an order, or shall not

    @property
    def is_new(self) -> bool:
        """Whether the backend does not have it so yet."""
        return (self.backend.lacking, self.backend.ordered) != (self.why, self.ordered)


def member(
    pool: str, settings: PoolConfig, config: BackendConfig, known: Backend | None, now: float
) -> Backend:
    """Return the backend of a setting: the `known` one of its name, if its address, key and kind are the same."""
    key = config.api_key.get_secret_value() if config.api_key is not None else None
    same = (config.url, key, _is_plain(settings, config))
    if known is not None and (known.url, known.api_key, known.plain) == same:
        return known
    backend = Backend(pool, config.name, config.url, key, now, health=HealthState(since=now))
    backend.weigh(now)
    return backend


def _is_plain(pool: PoolConfig, config: BackendConfig) -> bool:
    """Whether a backend is no vLLM."""
    return (config.engine or pool.engine) is Engine.OPENAI


def configure(
    backend: Backend, pool: PoolConfig, config: BackendConfig, health: HealthConfig | None
) -> None:
    """Bring the settings of a backend up to date; what it is and does stays."""
    backend.guarded = pool.admission is Admission.ON
    limit, room = backend.limit, backend.room
    limit.fix(config.max_in_flight)
    limit.objective_s, limit.gap_objective_s = pool.slo.ttft, pool.slo.itl
    limit.slow_start_s = pool.slow_start
    _know_prefixes(backend, pool)
    room.stop_ratio, room.resume_ratio = pool.kv.stop_admitting, pool.kv.resume
    if health is not None:
        backend.stale_s = room.stale_s = health.scrape_stale
    backend.only_base_name = pool.served_model is not None
    guesses = (backend.pool, *pool.aliases)
    backend.base_names = guesses if pool.served_model is None else (pool.served_model,)
    backend.plain = _is_plain(pool, config)
    if backend.plain:  # Ollama lists the tag of a model that has none
        backend.base_names += tuple(f"{name}:latest" for name in backend.base_names)
    told = config.endpoints if config.endpoints is not None else pool.endpoints
    if told is not None:
        backend.endpoints = frozenset(told)
    elif backend.set_endpoints is not None:
        backend.endpoints = None  # the setting is gone; the next model list tells
    backend.set_endpoints = frozenset(told) if told is not None else None
    backend.share, backend.zero_weight = config.weight or 1.0, config.weight == 0
    weights = {each.weight for each in pool.backends if each.weight}  # who has none takes no part
    backend.weighted = len(weights) > 1
    backend.revision = config.revision or ""
    backend.on_trial = pool.canary is not None and config.revision == pool.canary.revision
    backend.away_s = pool.prefer.away_s(config.labels)
    backend.work = None
    identify(backend)


def _know_prefixes(backend: Backend, pool: PoolConfig) -> None:
    """Give it what knows its prefix cache; what is known stays as long as that is of the same kind."""
    kinds: Mapping[PrefixRouting, Callable[[], PrefixIndex]]
    kinds = {PrefixRouting.PRECISE: PreciseIndex, PrefixRouting.APPROXIMATE: ApproximateIndex}
    before, backend.new_prefix_index = backend.new_prefix_index, kinds.get(pool.prefix)
    if backend.new_prefix_index is not before:
        backend.prefix_index = None
    if isinstance(backend.prefix_index, RankedIndex):
        return
    if backend.new_prefix_index is None or (
        pool.prefix is PrefixRouting.APPROXIMATE and len(pool.backends) == 1
    ):
        backend.prefix_index = None
    elif backend.prefix_index is None:
        backend.prefix_index = backend.new_prefix_index()


def adopt_models(backend: Backend, seen: ModelsSeen) -> bool:
    """Take in what a backend lists; returns whether that changes what it serves."""
    before = _served(backend)
    starts = backend.phase is Phase.STARTING
    backend.awaited = backend.awaited.union(backend.adapters) if starts else frozenset()
    backend.models = {model.name: model for model in seen.models}
    backend.version = seen.version
    backend.chats_take_ids = chats_take_ids(seen.version)
    told = backend.set_endpoints
    backend.endpoints = told if told is not None else seen.endpoints
    identify(backend)
    return before != _served(backend)


def narrow(backend: Backend, window_tokens: int) -> None:
    """Have what it lists be as a server with a smaller window will list it."""
    for each in [each for each in backend.models.values() if each.parent is None]:
        narrowed = min(window_tokens, each.window_tokens or window_tokens)
        backend.models[each.name] = replace(each, window_tokens=narrowed)
    identify(backend)


def _served(backend: Backend) -> tuple[object, ...]:
    names = backend.models, backend.awaited, backend.base_model
    return *names, backend.endpoints, backend.window_tokens


def identify(backend: Backend) -> None:
    """Find the pool's model among those the backend lists, and its window; without it, the smallest of all."""
    bases = [model for model in backend.models.values() if model.parent is None]
    named = {model.name for model in bases}
    base = next((name for name in backend.base_names if name in named), None)
    if base is None and len(bases) == 1 and not backend.only_base_name:
        base = bases[0].name
    backend.base_model = base
    own = bases if base is None else [backend.models[base]]
    windows = (model.window_tokens for model in own if model.window_tokens is not None)
    backend.window_tokens = min(windows, default=None)
