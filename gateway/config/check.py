"""Check what spans several settings, once each value is valid on its own.

Pure: no file, no network. Each check yields everything that it finds; `load` adds the places in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from gateway.config.findings import KeyPath, Remark, Severity, warning
from gateway.config.models import Config, PoolConfig
from gateway.config.parameters import PrefixCache
from gateway.config.process import TOKEN_CHARS
from gateway.config.units import Listen, format_duration, format_size

# vLLM (uvicorn) closes idle connections after 5 s; below 4 s we close first.
SAFE_UPSTREAM_KEEP_ALIVE_S: Final = 4.0
NGINX_BODY_BYTES: Final = 64 * 1024**2  # `client_max_body_size` of deploy/nginx/gateway.conf
# Clients and the proxies in between rarely wait longer for a first byte.
LONG_WAIT_S: Final = 300.0


def check_meaning(config: Config) -> Iterator[Remark]:
    """Yield everything that is wrong or doubtful with settings taken together."""
    yield from check_listeners(config)
    yield from _names(config)
    yield from _addresses(config)
    for name, pool in config.pools.items():
        yield from _pool(("pools", name), pool)
    yield from _tenants(config)
    yield from _times(config)
    yield from _behind_nginx(config)
    yield from _oidc(config)
    yield from _redis(config)
    yield from _traces(config)


def check_listeners(config: Config) -> Iterator[Remark]:
    """Yield what is wrong or doubtful about the listeners: their addresses, tokens and keys."""
    admin, public = config.admin.listen, config.listen
    if not admin.loopback and config.admin.token is None and not config.admin.tokens:
        yield Remark(
            ("admin", "listen"),
            "open-admin",
            f"the admin listener {admin} is reachable from other machines and has no token",
            "set admin.token, or listen on 127.0.0.1",
        )
    names = [each.name for each in config.admin.tokens]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield Remark(
                ("admin", "tokens", place, "name"),
                "duplicate-name",
                f"two tokens of the admin listener are called {name}",
                "give each a name of its own, by which the audit log tells them apart",
            )
    token = config.admin.token
    if not admin.loopback and token is not None and len(token.get_secret_value()) < TOKEN_CHARS:
        yield Remark(
            ("admin", "token"),
            "weak-token",
            f"the admin listener {admin} is reachable from other machines, and its token is shorter than"
            f" {TOKEN_CHARS} characters",
            "make one with `openssl rand -hex 32`",
        )
    if _clash(admin, public):
        written = "listen" in config.admin.model_fields_set
        yield Remark(
            ("admin", "listen") if written else ("listen",),
            "address-clash",
            f"{admin} is the address of both listeners, the public and the admin one",
            "give one of them another port, such as `admin: {listen: 127.0.0.1:9091}`",
        )
    if config.keys is None and not public.loopback:
        yield warning(
            ("keys",),
            "auth-off",
            f"AUTHENTICATION IS OFF and {public} is reachable from other machines: anyone can use the models",
            "write `keys: {file: keys.yaml}`, or listen on 127.0.0.1",
        )
    if config.keys is None and "*" in config.cors.origins:
        yield warning(
            ("cors", "origins"),
            "open-to-pages",
            "AUTHENTICATION IS OFF and any web page that someone here opens can use the models",
            "list the origins of your own pages, or write `keys: {file: keys.yaml}`",
        )


def _clash(one: Listen, other: Listen) -> bool:
    """Whether two listeners cannot both be bound. The listener `::` takes IPv4 as well, `0.0.0.0` no IPv6."""
    if one.unix is not None or other.unix is not None:
        return one.unix == other.unix
    if one.port != other.port or one.port == 0:
        return False
    hosts = {"127.0.0.1" if each.host == "localhost" else each.host for each in (one, other)}
    if len(hosts) == 1 or "::" in hosts:
        return True
    return "0.0.0.0" in hosts and not any(":" in host for host in hosts)


def _leads_to(url: str, listens: Listen) -> bool:
    """Whether a backend's URL certainly leads to a listener; other names of this machine are not known here."""
    parts = urlsplit(url)
    if listens.unix is not None or parts.scheme == "unix":
        return url == str(listens)
    backend = Listen(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    same = {backend.host, listens.host} == {"localhost", "127.0.0.1"} or (
        backend.loopback and listens.host == ("::" if ":" in backend.host else "0.0.0.0")
    )
    return backend.port == listens.port and (same or backend.host == listens.host)


def _names(config: Config) -> Iterator[Remark]:
    """Yield each name of a model that two pools, aliases or adapters have."""
    owners = {name: f"the pool `{name}`" for name in config.pools}
    for pool, settings in config.pools.items():
        listed: list[tuple[KeyPath, str, str]] = [
            (("aliases", place), alias, "an alias") for place, alias in enumerate(settings.aliases)
        ]
        if settings.adapters != "auto":
            listed += [
                (("adapters", place), adapter.name, "an adapter")
                for place, adapter in enumerate(settings.adapters)
            ]
        for path, name, kind in listed:
            if name in owners:
                message = f"`{name}` is already {owners[name]}"
                yield Remark(
                    ("pools", pool, *path),
                    "duplicate-name",
                    message,
                    "each name must belong to exactly one pool",
                )
            else:
                owners[name] = f"{kind} of `{pool}`"


def _addresses(config: Config) -> Iterator[Remark]:
    """Yield each server that is listed twice, or is the gateway itself."""
    owners: dict[str, tuple[str, str]] = {}
    for pool, settings in config.pools.items():
        for place, backend in enumerate(settings.backends):
            path: KeyPath = ("pools", pool, "backends", place)
            if _leads_to(backend.url, config.listen) or _leads_to(backend.url, config.admin.listen):
                message = f"{backend.url} is an address of the gateway itself"
                yield Remark(path, "address-clash", message, "write the address of the server")
            first = owners.setdefault(backend.url, (pool, backend.name))
            if first == (pool, backend.name):
                continue
            same_pool = first[0] == pool
            yield Remark(
                path,
                "duplicate-backend" if same_pool else "shared-backend",
                f"{backend.url} is already listed as {first[1]} of the pool `{first[0]}`",
                "" if same_pool else "each pool sees only its own requests on a shared server",
                Severity.ERROR if same_pool else Severity.WARNING,
            )


def _pool(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    seen: dict[str, int] = {}
    for place, backend in enumerate(pool.backends):
        first = seen.setdefault(backend.name, place)
        if first != place:
            yield Remark(
                (*path, "backends", place, "name"),
                "duplicate-backend",
                f"backends {first + 1} and {place + 1} of this pool are both named `{backend.name}`",
                "unnamed backends are called b1, b2, ... by position; choose another name",
            )
    yield from _adapters(path, pool)
    if pool.kv.resume >= pool.kv.stop_admitting:
        yield Remark(
            (*path, "kv", "resume"),
            "kv-order",
            f"resume ({pool.kv.resume:g}) must be below stop_admitting ({pool.kv.stop_admitting:g})",
            "leave a gap, such as stop_admitting: 0.90 and resume: 0.80",
        )
    if pool.queue.max_wait > LONG_WAIT_S:
        yield warning(
            (*path, "queue", "max_wait"),
            "long-wait",
            f"most clients and proxies give up before {format_duration(pool.queue.max_wait)}",
            f"nginx waits 60s by default; stay below {format_duration(LONG_WAIT_S)}",
        )


def _behind_nginx(config: Config) -> Iterator[Remark]:
    """Yield the sizes that the gateway takes and the shipped nginx file refuses."""
    for name in ("max_body", "max_audio_body"):
        ours = getattr(config.limits, name)
        if ours > NGINX_BODY_BYTES:
            yield warning(
                ("limits", name),
                "nginx-body",
                f"deploy/nginx/gateway.conf refuses bodies above {format_size(NGINX_BODY_BYTES)}",
                f"there: client_max_body_size {-(-ours // 1024**2)}m;",
            )


def _adapters(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    """Yield what is wrong with the path, the replicas and the pins of adapters."""
    known = [each.name for each in pool.backends]
    for place, adapter in enumerate(() if pool.adapters == "auto" else pool.adapters):
        here: KeyPath = (*path, "adapters", place)
        if adapter.path is None and (adapter.replicas is not None or adapter.pin):
            yield Remark(
                here,
                "adapter-path",
                f"`{adapter.name}` has replicas or pin, but no path, so the gateway cannot load it",
                "add its path on the backends",
            )
        for unknown in sorted({*adapter.pin} - {*known}):
            yield Remark(
                (*here, "pin"),
                "unknown-backend",
                f"this pool has no backend `{unknown}`",
                f"its backends are {', '.join(known)}",
            )
        if adapter.replicas is not None and adapter.replicas > len(known):
            yield warning(
                (*here, "replicas"),
                "too-many-replicas",
                f"{adapter.replicas} replicas of `{adapter.name}`, but the pool has {len(known)} backends",
                "it is kept on all of them",
            )


def _tenants(config: Config) -> Iterator[Remark]:
    if config.keys is not None:
        return
    for name, pool in config.pools.items():
        if pool.prefix_cache is PrefixCache.PER_TENANT:
            yield warning(
                ("pools", name, "prefix_cache"),
                "no-tenants",
                "per_tenant has no effect with `keys: none`: without keys all clients are one tenant",
                "create keys (vllm-gateway keys create), or remove this setting",
            )


def _times(config: Config) -> Iterator[Remark]:
    times, health = config.timeouts, config.health
    if times.upstream_keep_alive >= SAFE_UPSTREAM_KEEP_ALIVE_S:
        yield warning(
            ("timeouts", "upstream_keep_alive"),
            "stale-connections",
            "vLLM closes idle connections after 5s, so with"
            f" {format_duration(times.upstream_keep_alive)} some requests meet a closed connection",
            "stay below 4s, or raise vLLM's keep-alive timeout",
        )
    if times.first_byte > times.total:
        yield warning(
            ("timeouts", "first_byte"),
            "deadline-order",
            f"first_byte ({format_duration(times.first_byte)}) is longer than total"
            f" ({format_duration(times.total)}), the limit of the whole request",
        )
    if health.scrape_stale < health.scrape_interval:
        yield Remark(
            ("health", "scrape_stale"),
            "deadline-order",
            "every scrape would be out of date before the next one",
            "set it to two or three times scrape_interval",
        )


def _oidc(config: Config) -> Iterator[Remark]:
    if config.keys is None or config.keys.oidc is None:
        return
    if find_spec("jwt") is None:
        yield Remark(
            ("keys", "oidc"),
            "no-oidc",
            "the library that checks tokens is not installed",
            "pip install 'vllm-gateway[oidc]', or leave `keys.oidc` out",
        )
    tier = config.keys.oidc.tier
    if tier is not None and tier not in config.tiers:
        yield Remark(
            ("keys", "oidc", "tier"),
            "unknown-tier",
            f"`tiers` has no `{tier}`",
            f"known: {', '.join(config.tiers)}" if config.tiers else "write it under `tiers`",
        )


def _redis(config: Config) -> Iterator[Remark]:
    if config.keys is not None and config.keys.shared and config.redis is None:
        yield Remark(
            ("keys", "shared"),
            "keys-need-redis",
            "shared keys are kept in Redis, and `redis` is empty",
            "write `redis: redis://HOST:6379/0`, or leave `keys.shared` out",
        )
    if config.redis is not None and find_spec("redis") is None:
        yield Remark(
            ("redis",),
            "no-redis",
            "the library that talks to Redis is not installed",
            "pip install 'vllm-gateway[redis]', or leave `redis` empty",
        )


def _traces(config: Config) -> Iterator[Remark]:
    # Other programs install the API alone; spans need the two packages that keep and send them.
    needed = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if config.traces.endpoint is not None and not all(map(_installed, needed)):
        yield Remark(
            ("traces", "endpoint"),
            "no-otel",
            "the library that sends traces is not installed",
            "pip install 'vllm-gateway[otel]', or leave `traces.endpoint` empty",
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False
