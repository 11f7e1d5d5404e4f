"""Check the settings of traffic between pools: unknown names, and leaks between tenants.

Pure, as `config.check`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.findings import KeyPath, Remark, warning
from gateway.config.models import Config, PoolConfig
from gateway.config.parameters import PrefixCache, PrefixRouting
from gateway.core.traffic import Cause, Engine


def check_traffic(config: Config) -> Iterator[Remark]:
    """Yield what is wrong or doubtful in engines, weights, canaries, fallbacks and shadows."""
    for name, pool in config.pools.items():
        yield from _engines(("pools", name), pool)
        yield from _shares(("pools", name), pool)
        yield from _canary(("pools", name, "canary"), pool)
        yield from _fallback(("pools", name, "fallback"), name, pool, config)
        if pool.shadow is not None:
            to: KeyPath = ("pools", name, "shadow", "to")
            yield from _destination(to, name, pool.shadow.to, config, "shadow")


def _engines(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    """Yield the settings that only vLLM can honour, of a pool with another server."""
    plain = [
        place
        for place, backend in enumerate(pool.backends)
        if (backend.engine or pool.engine) is Engine.OPENAI
    ]
    if not plain:
        return
    for place in plain:
        if pool.backends[place].launch is not None:
            yield Remark(
                (*path, "backends", place, "launch"),
                "not-vllm",
                "only vLLM can be started from here, and this backend has `engine: openai`",
                "start it otherwise and write its `url`, or remove `engine`",
            )
    if _keeps_apart(pool):
        yield Remark(
            (*path, "prefix_cache"),
            "not-vllm",
            "only vLLM keeps the prefix caches of tenants apart, and this pool has `engine: openai`",
            "use separate servers for tenants that must not learn of each other",
        )
    if pool.prefix is PrefixRouting.PRECISE:
        yield Remark(
            (*path, "prefix"),
            "not-vllm",
            "only vLLM tells what its prefix cache holds, and this pool has `engine: openai`",
            "write `prefix: approximate`",
        )
    for place, adapter in enumerate(() if pool.adapters == "auto" else pool.adapters):
        if adapter.path is not None:
            yield Remark(
                (*path, "adapters", place, "path"),
                "not-vllm",
                f"only vLLM loads adapters at run time, so `{adapter.name}` cannot be loaded here",
                "load it when the server starts, and write its name alone",
            )


def _shares(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    """Yield weights that are all 0, and labels of `prefer` that no backend has."""
    if all(backend.weight == 0 for backend in pool.backends):
        yield warning(
            (*path, "backends", 0, "weight"),
            "no-weight",
            "every backend of this pool has weight 0, so they share its work evenly",
            "leave weight 0 to backends that are kept in reserve",
        )
    wanted = pool.prefer.labels.items()
    if wanted and not any(wanted <= backend.labels.items() for backend in pool.backends):
        labels = ", ".join(f"{name}: {value}" for name, value in wanted)
        yield warning(
            (*path, "prefer", "labels"),
            "nobody-near",
            f"no backend of this pool has the labels {{{labels}}}, so none is preferred",
            "give them to the `labels` of the backends that are near",
        )


def _canary(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    """Yield what keeps a canary from being compared with another revision."""
    canary = pool.canary
    if canary is None:
        return
    mine = [backend for backend in pool.backends if backend.revision == canary.revision]
    share = sum(backend.weight for backend in mine) / (sum(b.weight for b in pool.backends) or 1)
    if not mine:
        yield Remark(
            (*path, "revision"),
            "unknown-revision",
            f"no backend of this pool has the revision `{canary.revision}`",
            f"write `revision: {canary.revision}` at the backends that are on trial",
        )
    elif len(mine) == len(pool.backends):
        yield warning(
            (*path, "revision"),
            "no-other-revision",
            f"every backend of this pool has the revision `{canary.revision}`, so there is nothing to compare",
            "remove `canary`, or list the backends of the revision before it too",
        )
    elif not share:
        yield warning(
            (*path, "revision"),
            "canary-in-reserve",
            f"every backend of the revision `{canary.revision}` has weight 0, so it gets no requests on trial",
            "give a backend of the revision a weight: only the requests on trial go there",
        )
    elif canary.weight is not None and canary.weight > 2 * share:
        yield warning(
            (*path, "weight"),
            "heavy-canary",
            f"{canary.weight:.0%} of the conversations go to {share:.0%} of the backends, which may be too few",
            "the others take what has no room there; lower the weight, or add backends of the revision",
        )


def _fallback(path: KeyPath, name: str, pool: PoolConfig, config: Config) -> Iterator[Remark]:
    """Yield what is wrong with the pools that answer in place of this one."""
    fallback = pool.fallback
    for cause in Cause:
        for other in fallback.of(cause):
            here: KeyPath = (*path, cause.value)
            yield from _destination(here, name, other, config, "fallback")
            mine, its = pool.max_context, getattr(config.pools.get(other), "max_context", None)
            if cause is Cause.CONTEXT and mine is not None and its is not None and its <= mine:
                yield warning(
                    here,
                    "smaller-window",
                    f"`{other}` takes {its} tokens, no more than this pool ({mine}), so it never helps",
                    "name a pool with a larger `max_context`",
                )
    listed = None if pool.adapters == "auto" else {each.name for each in pool.adapters}
    for place, adapter in enumerate(fallback.adapters):
        if listed is not None and adapter not in listed:
            yield Remark(
                (*path, "adapters", place),
                "unknown-adapter",
                f"`{adapter}` is none of the adapters that this pool lists",
                "add it to `adapters` of the pool, or remove it here",
            )


def _destination(path: KeyPath, name: str, to: str, config: Config, kind: str) -> Iterator[Remark]:
    """Check that requests of one pool, or their copies, may go to another; `kind` names the setting."""
    if to == name:
        yield Remark(
            path,
            f"{kind}-loop",
            f"the {kind} of the pool `{name}` is the pool itself",
            "name another pool; a revision can be a pool of its own",
        )
    elif to not in config.pools:
        known = ", ".join(each for each in config.pools if each != name) or "none"
        yield Remark(
            path,
            "unknown-pool",
            f"there is no pool `{to}`",
            f"a {kind} is the name of another pool, not of an alias or adapter; there are: {known}",
        )
    elif _keeps_apart(config.pools[name]) and not _keeps_apart(config.pools[to]):
        yield Remark(
            path,
            f"shared-{kind}",
            f"requests of this pool have a prefix cache per tenant, and in `{to}` they would share one",
            f"write `prefix_cache: per_tenant` in `{to}` too, or remove this {kind}",
        )


def _keeps_apart(pool: PoolConfig) -> bool:
    return pool.prefix_cache is PrefixCache.PER_TENANT
