"""The URL of a Redis: a server, a Sentinel's master, or a cluster.

    redis://[user:password@]host[:6379][/db]             rediss://...  over TLS
    unix:///run/redis.sock[?db=0]                        unix://user:password@/run/redis.sock
    redis+sentinel://[user:password@]host[:26379],host.../master[/db]       rediss+sentinel://...
    redis+cluster://[user:password@]host[:6379],host...                     rediss+cluster://...

Options follow as in redis-py, such as `?ssl_ca_certs=/etc/ssl/redis.pem`. No message repeats any part
of a URL: it may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

Client = Any  # Redis or RedisCluster: what is used of them is the same

_PORTS: Final = {"": 6379, "sentinel": 26379, "cluster": 6379}
_SYNTAX: Final = "write it like redis://user:password@host:6379/0"


def client_of(url: str, *, connect_s: float, reply_s: float | None) -> Client:
    """Return a client of the Redis at a URL; nothing is opened yet. `reply_s` of None: who asks gives up itself.

    Raises:
        ValueError: it is not such a URL.
    """
    try:
        return _client_of(url, connect_s, reply_s)
    except TypeError:  # how redis-py refuses a name that it does not know, without saying so
        raise ValueError("it has an option that redis-py does not know") from None


def _client_of(url: str, connect_s: float, reply_s: float | None) -> Client:
    scheme, _, form = url.partition("://")[0].lower().partition("+")
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_s,
        "socket_timeout": reply_s,
        "socket_keepalive": True,
        "decode_responses": True,
        "protocol": 2,  # no HELLO, which users of few rights and older servers lack
        "retry": Retry(NoBackoff(), 0),  # `Link` knows when to try again
    }
    if not form:
        told = _told(url)
        if told.get("path"):
            options.pop("socket_keepalive")
        return _quick(Redis.from_url(url, **options))
    # What the URL says of user, TLS and options, without the hosts that redis-py cannot read.
    listed, parts = _with_one_host(url)
    hosts = _hosts(listed, _PORTS.get(form))
    name, db = _master_of(parts) if form == "sentinel" else ("", 0)
    told = dict(_told(urlunsplit((scheme, parts.netloc, "", parts.query, ""))))
    told.pop("host", None)
    secure = told.pop("connection_class", None) is SSLConnection
    options |= {**told, "ssl": secure}
    if form == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(*each) for each in hosts], **options)
    # Sentinels have users of their own, as a rule none; TLS they share with the servers.
    credentials = ("username", "password", "decode_responses")
    own = {key: value for key, value in options.items() if key not in credentials}
    # Of several, the first may be gone with its machine: there is time left to ask the others.
    own |= dict.fromkeys(("socket_connect_timeout", "socket_timeout"), connect_s / (len(hosts) + 1))
    sentinel = Sentinel(hosts, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]
    return _quick(sentinel.master_for(name, redis_class=_Master, db=db))


class _QuickPacking:
    """Packs what is sent, all of it text or whole numbers, at a third of the library's cost."""

    def pack_commands(self, commands: Iterable[Sequence[str | int]]) -> list[bytes]:
        """Return commands as they are sent."""
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for word in command:
                data = word.encode() if isinstance(word, str) else b"%d" % word
                parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        return [b"".join(parts)]


def _quick(client: Redis) -> Redis:
    pool = client.connection_pool
    pool.connection_class = type("QuickConnection", (_QuickPacking, pool.connection_class), {})
    # It connects nowhere, but takes the options, or refuses them now.
    pool.make_connection()  # type: ignore[no-untyped-call]
    return client


class _Master(Redis):
    """The master that Sentinels name; closed, it lets go of them too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis`."""
        await super().aclose(close_connection_pool)
        pool: SentinelConnectionPool = self.connection_pool  # type: ignore[assignment]
        for each in pool.sentinel_manager.sentinels:
            await each.aclose()


def _told(url: str) -> Mapping[str, Any]:
    try:
        return parse_url(url)
    except ValueError:
        raise ValueError(_SYNTAX) from None


def _with_one_host(url: str) -> tuple[str, SplitResult]:
    """Return the hosts of a URL, and the parts of it with one host in their place.

    The `urlsplit` of Debian 12 takes no other host before an IPv6 address.
    """
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user, at, listed = authority.rpartition("@")
    return listed, urlsplit(f"{scheme}://{user}{at}host{rest[len(authority) :]}")


def _hosts(listed: str, port: int | None) -> list[tuple[str, int]]:
    """Return the hosts of a list with commas, each with its port."""
    hosts = []
    for each in listed.split(","):
        try:
            split = urlsplit(f"//{each}")
            found = split.hostname, split.port or port
        except ValueError:
            raise ValueError(_SYNTAX) from None
        if found[0] is None or found[1] is None:
            raise ValueError(_SYNTAX)
        hosts.append((found[0], found[1]))
    return hosts


def _master_of(parts: SplitResult) -> tuple[str, int]:
    """Return the name of the master, and the database."""
    name, _, db = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("name the master: redis+sentinel://host:26379/mymaster")
    if db and not db.isdecimal():
        raise ValueError(_SYNTAX)
    return name, int(db or 0)
