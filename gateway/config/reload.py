"""The difference of two configurations, in the sentences that an operator reads.

Pure. A backend is the same one while its pool, name and URL are the same; under another URL it is
another server, so the old one is drained and the new one starts unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.config.check import check_listeners
from gateway.config.findings import Finding, Severity
from gateway.config.load import Loaded, placed
from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.process import KeysConfig
from gateway.config.spell import HIDDEN, spell
from gateway.config.units import Section
from gateway.core.printable import count

# Read once, at start. A name covers the settings below it.
NEEDS_RESTART: Final = (
    "listen",
    "workers",
    "admin.listen",
    "redis",
    "keys.shared",
    "keys.pepper",
    "keys.oidc",
    "state",
    "usage",
    "log",
    "traces",
    "limits.max_header_bytes",
    "limits.max_headers",
    "limits.connections",
    "limits.failed_keys",
    "limits.connections_per_address",
    "limits.stream_buffer",
    "timeouts.connect",
    "timeouts.upstream_keep_alive",
)


def diff(old: Config, new: Config, *, started: Config | None = None) -> tuple[str, ...]:
    """Return what changes from `old` to `new`, in sentences; none when they are equal.

    Backends are named `pool/name`; those that are drained take no new work and finish their streams.
    What needs a restart is the difference from `started`, the configuration that the process began
    with and still has of those settings; from `old` when it is not given.
    """
    since_start = dict(_changes(started or old, new, skip={"pools"}))
    # Then the process has read no settings of keys.
    if (started or old).keys is None and new.keys is not None:
        since_start |= dict(_changes(KeysConfig(), new.keys, prefix="keys."))
    restart = {name: change for name, change in since_start.items() if _needs_restart(name)}
    settings = dict(_changes(old, new, skip={"pools"}))
    sentences = []
    live = {name: change for name, change in settings.items() if not _needs_restart(name)}
    if live:
        sentences.append(_list(live))
    pairs = {name: (old.pools.get(name), new.pools.get(name)) for name in new.pools | old.pools}
    sentences += [f"{name}: {_change(*pair)}" for name, pair in pairs.items() if pair[0] != pair[1]]
    unchanged = [name for name, pair in pairs.items() if pair[0] == pair[1]]
    if 0 < len(unchanged) < len(new.pools):
        sentences.append(f"{', '.join(unchanged)} unchanged")
    if drained := _drained(old.pools, new.pools):
        sentences.append(f"will drain {', '.join(drained)}")
    if restart:
        sentences.append(f"needs a restart: {_list(restart)}")
    return tuple(sentences)


def _change(old: PoolConfig | None, new: PoolConfig | None) -> str:
    if new is None:
        return "pool removed"
    if old is None:
        return f"new pool, {count(len(new.backends), 'backend')}"
    before, after = _servers(old), _servers(new)
    parts = []
    for sign, here, there in (("+", after, before), ("-", before, after)):
        names = [server[0] for server in here if server not in there]
        if names:
            parts.append(f"{sign}{count(len(names), 'backend')} ({', '.join(names)})")
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
        secret = HIDDEN in (was, now) or was == now
        yield prefix + name, "changed" if secret else f"{_word(was)} -> {_word(now)}"


def _servers(pool: PoolConfig) -> dict[tuple[str, str], BackendConfig]:
    return {(backend.name, backend.url): backend for backend in pool.backends}


def _drained(old: Mapping[str, PoolConfig], new: Mapping[str, PoolConfig]) -> list[str]:
    """Return the backends of `old` that `new` does not have."""
    kept = {name: _servers(pool) for name, pool in new.items()}
    return [
        f"{pool}/{name}"
        for pool, settings in old.items()
        for name, url in _servers(settings)
        if (name, url) not in kept.get(pool, {})
    ]


def _needs_restart(name: str) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in NEEDS_RESTART)


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
        return "{" + ", ".join(f"{k}: {_word(v)}" for k, v in value.items() if v is not None) + "}"
    return str(value)


# A listener stays where it is until a restart, while who may use it changes at once.
_OPENS: Final = frozenset({"open-admin", "weak-token", "auth-off"})
_NOT_BY_A_RELOAD: Final = (
    "a listener moves with a restart only; `vllm-gateway upgrade` puts the whole file in force"
)


def opened(loaded: Loaded, before: Config, started: Config, file: Path) -> list[Finding]:
    """Return what a reload would open to other machines, though the file does not say so.

    The listeners of a file may be for this machine only, and need no key or token, while those of the process,
    which began with `started`, are not. `before` is in force.
    """
    reported = check_listeners(loaded.config), check_listeners(_where_it_listens(before, started))
    known = {each.code for remarks in reported for each in remarks}
    return [
        placed(replace(each, severity=Severity.ERROR, hint=_NOT_BY_A_RELOAD), loaded, file)
        for each in check_listeners(_where_it_listens(loaded.config, started))
        if each.code in _OPENS - known
    ]


def _where_it_listens(config: Config, started: Config) -> Config:
    admin = config.admin.model_copy(update={"listen": started.admin.listen})
    return config.model_copy(update={"listen": started.listen, "admin": admin})


# What each replica has of its own.
_OWN: Final = frozenset({"listen", "admin", "redis", "keys", "log", "state"})


def shared_digest(config: Config) -> str:
    """Return a short text that is the same where replicas are configured alike; secrets are masked."""
    alike = [(name, value) for name, value in config if name not in _OWN]
    return hashlib.sha256(repr(alike).encode()).hexdigest()[:12]


def digest(config: Config) -> str:
    """Return a short text that two different configurations do not share; secrets are masked."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:12]
