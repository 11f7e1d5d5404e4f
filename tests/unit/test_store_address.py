"""The URL of a Redis: what it leads to, and that no error repeats any of it."""

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from gateway.store.address import client_of

SECRET = "c4nary%40"  # an @ in it


def client(url):
    return client_of(url, connect_s=2.0, reply_s=0.2)


def told(url):
    return client(url).connection_pool.connection_kwargs


def test_a_server_is_named_by_its_url():
    found = told(f"redis://me:{SECRET}@h:7000/3?socket_timeout=9")
    assert (found["host"], found["port"], found["db"]) == ("h", 7000, 3)
    assert (found["username"], found["password"]) == ("me", "c4nary@")
    assert client("rediss://h").connection_pool.connection_class.__mro__[2] is SSLConnection
    assert told("rediss://h?ssl_ca_certs=/ca.pem")["ssl_ca_certs"] == "/ca.pem"
    assert (
        client("unix:///run/r.sock").connection_pool.connection_class.__mro__[2]
        is UnixDomainSocketConnection
    )
    assert told("unix://me:pw@/run/r.sock?db=2")["path"] == "/run/r.sock"


def test_sentinels_are_asked_for_the_master_with_their_own_rights():
    found = client(f"rediss+sentinel://me:{SECRET}@a,b:1/mymaster/2")
    pool = found.connection_pool
    assert isinstance(found, Redis)
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "mymaster"
    assert pool.connection_kwargs["db"] == 2
    assert pool.connection_kwargs["password"] == "c4nary@"
    asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 26379), ("b", 1)]
    assert all(each.get("password") is None for each in asked)


def test_a_cluster_is_found_by_any_of_its_nodes():
    found = client(f"redis+cluster://me:{SECRET}@a,[::1]:7001")
    assert isinstance(found, RedisCluster)
    assert {(each.host, each.port) for each in found.nodes_manager.startup_nodes.values()} == {
        ("a", 6379),
        ("::1", 7001),
    }
    assert found.connection_kwargs["password"] == "c4nary@"


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?c4nary=1",
        "rediss://h?c4nary=1",
        "unix:///run/r.sock?c4nary=1",
        "redis://h?ssl_ca_certs=c4nary",
    ]
    + ["redis+sentinel://a/mymaster?c4nary=1", "redis+cluster://a?c4nary=1"],
)
def test_an_option_that_the_library_does_not_know_is_told_before_it_connects(url):
    with pytest.raises(ValueError, match="an option that redis-py does not know") as refused:
        client(url)
    assert "c4nary" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://me:{SECRET}@h:port/0",
        f"redis+sentinel://me:{SECRET}@h:1",
        f"redis+sentinel://me:{SECRET}@h:1/name/db",
        f"redis+sentinel://me:{SECRET}@/name",
        f"redis+cluster://me:{SECRET}@h:port",
        f"redis+other://me:{SECRET}@h",
    ],
)
def test_no_error_repeats_any_of_a_url(url):
    with pytest.raises(ValueError, match="write it like|name the master") as refused:
        client(url)
    assert "c4nary" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///run/redis.sock"])
def test_commands_are_packed_as_the_library_packs_them(url):
    connection = client(url).connection_pool.make_connection()
    library = type(connection).__mro__[2]
    assert issubclass(library, AbstractConnection)
    commands = [
        ("EVALSHA", "a1", 2, "gw1:{t}:k", "é", "0 1.5"),
        ("EVAL", "return 1\r\n", 0),
        ("", -7),
    ]
    assert connection.pack_commands(commands[:2]) == library.pack_commands(connection, commands[:2])
    assert connection.pack_commands(commands[2:]) == [b"*2\r\n$0\r\n\r\n$2\r\n-7\r\n"]
