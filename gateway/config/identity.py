"""Keep the names of backends that the file does not name: an address keeps its name, wherever it is listed.

If position alone decided, a server that is listed before others would take over their names, with all that is
known of them. Replicas on one Redis know backends by name and do not share these names, so there position
decides. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from gateway.config.load import Loaded
from gateway.config.models import BackendConfig

# Of backends without a name in the file, by pool and address.
Names = Mapping[str, Mapping[str, str]]


def names_of(loaded: Loaded) -> dict[str, dict[str, str]]:
    """Return the names that were given to backends without one, by pool and address."""
    return {
        pool: {
            each.url: each.name
            for at, each in enumerate(config.backends)
            if not _is_named(loaded, pool, at)
        }
        for pool, config in loaded.config.pools.items()
    }


def keep_names(loaded: Loaded, known: Names) -> Loaded:
    """Return the configuration with the `known` names of addresses that stay; others get free ones."""
    config = loaded.config
    if config.redis is not None:
        return loaded
    pools = {
        pool: each.model_copy(update={"backends": _named(loaded, pool, known.get(pool, {}))})
        for pool, each in config.pools.items()
    }
    return replace(loaded, config=config.model_copy(update={"pools": pools}))


def _named(loaded: Loaded, pool: str, known: Mapping[str, str]) -> tuple[BackendConfig, ...]:
    backends = loaded.config.pools[pool].backends
    taken = {each.name for at, each in enumerate(backends) if _is_named(loaded, pool, at)}
    names: dict[int, str] = {}
    for at, each in enumerate(backends):
        name = known.get(each.url)
        if not _is_named(loaded, pool, at) and name is not None and name not in taken:
            names[at] = name
            taken.add(name)
    for at, each in enumerate(backends):
        if at not in names and not _is_named(loaded, pool, at):
            free = (f"b{number}" for number in count(1) if f"b{number}" not in taken)
            names[at] = next(free) if each.name in taken else each.name
            taken.add(names[at])
    return tuple(
        each.model_copy(update={"name": names.get(at, each.name)})
        for at, each in enumerate(backends)
    )


def _is_named(loaded: Loaded, pool: str, at: int) -> bool:
    """Whether the file names a backend."""
    return ("pools", pool, "backends", at, "name") in loaded.origin
