"""The difference of two configurations, as facts and as the sentences an operator reads.

Pure. A backend is the same one while its pool, name and URL are the same; under another URL it is
another server, so the old one is drained and the new one starts unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config.models import BackendConfig, Config, PoolConfig, Section
from gateway.config.spell import HIDDEN, spell

# Read once, at start. A name covers the settings below it.
NEEDS_RESTART: Final = (
    "listen",
    "admin.listen",
    "redis",
    "state",
    "log",
    "limits.max_header_bytes",
    "limits.max_headers",
    "limits.connections",
    "limits.failed_keys",
    "limits.connections_per_address",
    "timeouts.header",
    "timeouts.keep_alive",
    "timeouts.connect",
    "timeouts.upstream_keep_alive",
)


@dataclass(frozen=True, slots=True)
class Effect:
    """What taking over a new configuration does. False when it does nothing.

    Backends are named `pool/name`; `drained` ones take no new work and finish their streams.
    """

    sentences: tuple[str, ...] = ()
    added_pools: tuple[str, ...] = ()
    removed_pools: tuple[str, ...] = ()
    changed_pools: tuple[str, ...] = ()
    unchanged_pools: tuple[str, ...] = ()
    added_backends: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()  # settings that keep their old value until then

    def __bool__(self) -> bool:
        return bool(self.sentences)


def diff(old: Config, new: Config, *, started: Config | None = None) -> Effect:
    """Return what changes from `old` to `new`; nothing when they are equal.

    What needs a restart is the difference from `started`, the configuration that the process began
    with and still has of those settings; from `old` when it is not given.
    """
    since_start = dict(_changes(started or old, new, skip={"pools"}))
    restart = {name: change for name, change in since_start.items() if _needs_restart(name)}
    if old == new and not restart:
        return Effect(unchanged_pools=tuple(new.pools))
    settings = dict(_changes(old, new, skip={"pools"}))
    sentences = []
    live = {name: change for name, change in settings.items() if not _needs_restart(name)}
    if live:
        sentences.append(_list(live))
    unchanged: list[str] = []
    changed: list[str] = []
    for name in [*new.pools, *(name for name in old.pools if name not in new.pools)]:
        sentence = _pool_sentence(name, old.pools.get(name), new.pools.get(name))
        if sentence:
            sentences.append(f"{name}: {sentence}")
        else:
            unchanged.append(name)
        if sentence and name in old.pools and name in new.pools:
            changed.append(name)
    if unchanged and (changed or len(unchanged) < len(new.pools)):
        sentences.append(f"{', '.join(unchanged)} unchanged")
    drained = _missing(old.pools, new.pools)
    if drained:
        sentences.append(f"will drain {', '.join(drained)}")
    if restart:
        sentences.append(f"needs a restart: {_list(restart)}")
    return Effect(
        sentences=tuple(sentences),
        added_pools=tuple(name for name in new.pools if name not in old.pools),
        removed_pools=tuple(name for name in old.pools if name not in new.pools),
        changed_pools=tuple(changed),
        unchanged_pools=tuple(unchanged),
        added_backends=_missing(new.pools, old.pools),
        drained=drained,
        needs_restart=tuple(restart),
    )


def _pool_sentence(name: str, old: PoolConfig | None, new: PoolConfig | None) -> str:
    if old == new:
        return ""
    if old is None and new is not None:
        return f"new pool, {_count(new.backends)}"
    if new is None:
        return "pool removed"
    assert old is not None  # both cannot be missing: the name came from one of them
    before, after = _servers(old), _servers(new)
    parts = []
    for sign, here, there in (("+", after, before), ("-", before, after)):
        names = [server[0] for server in here if server not in there]
        if names:
            plural = "backend" if len(names) == 1 else "backends"
            parts.append(f"{sign}{len(names)} {plural} ({', '.join(names)})")
    for server, backend in after.items():
        if server in before:
            changes = dict(_changes(before[server], backend))
            parts += [f"{backend.name}.{key} {change}" for key, change in changes.items()]
    parts += [f"{key} {change}" for key, change in _changes(old, new, skip={"backends"})]
    return ", ".join(parts) or "backends reordered"


def _changes(
    old: Section, new: Section, *, skip: frozenset[str] | set[str] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the change of every setting that differs."""
    for name, field in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if name in skip or before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            yield from _changes(before, after, prefix=f"{prefix}{name}.")
            continue
        was, now = spell(before, field), spell(after, field)
        secret = HIDDEN in (was, now)
        yield prefix + name, "changed" if secret else f"{_word(was)} -> {_word(now)}"


def _servers(pool: PoolConfig) -> dict[tuple[str, str], BackendConfig]:
    return {(backend.name, backend.url): backend for backend in pool.backends}


def _missing(here: Mapping[str, PoolConfig], there: Mapping[str, PoolConfig]) -> tuple[str, ...]:
    """Return the backends of `here` that `there` does not have."""
    others = {name: _servers(pool) for name, pool in there.items()}
    return tuple(
        f"{pool}/{name}"
        for pool, settings in here.items()
        for name, url in _servers(settings)
        if (name, url) not in others.get(pool, {})
    )


def _needs_restart(name: str) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in NEEDS_RESTART)


def _count(backends: tuple[BackendConfig, ...]) -> str:
    return "1 backend" if len(backends) == 1 else f"{len(backends)} backends"


def _list(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {change}" for name, change in changes.items())


def _word(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        names = (item.get("name", "?") if isinstance(item, dict) else item for item in value)
        return f"[{', '.join(map(str, names))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items() if v is not None) + "}"
    return str(value)


def digest(config: Config) -> str:
    """Return a short text that two different configurations do not share; secrets are masked."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:12]
