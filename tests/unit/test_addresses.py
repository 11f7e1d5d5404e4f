"""Whose address a request has behind proxies, and what nobody can make up."""

import pytest

from gateway.core.addresses import Proxies

TRUSTED = Proxies(["127.0.0.1", "10.0.0.0/8", "2001:db8::/32", "unix"])


def client(peer, *lists, proxies=TRUSTED):
    return proxies.client_of(peer, [(b"x-forwarded-for", each.encode()) for each in lists])


@pytest.mark.parametrize("peer", ["127.0.0.1", "203.0.113.9", "::1", None])
def test_without_the_setting_it_is_the_peers(peer):
    assert client(peer, "198.51.100.1", proxies=Proxies([])) == peer


@pytest.mark.parametrize("peer", ["203.0.113.9", "127.0.0.2", "::1", "not an address"])
def test_a_peer_that_is_not_listed_cannot_say_who_it_is(peer):
    assert client(peer, "198.51.100.1") == peer


@pytest.mark.parametrize(
    "peer", ["127.0.0.1", "10.200.3.4", "2001:db8::7", "::ffff:10.0.0.1", None]
)
def test_a_listed_peer_is_believed(peer):
    assert client(peer, "198.51.100.1") == "198.51.100.1"


def test_sockets_are_believed_only_where_they_are_listed():
    assert client(None, "198.51.100.1", proxies=Proxies(["10.0.0.0/8"])) is None


@pytest.mark.parametrize(
    ("lists", "meant"),
    [
        (["203.0.113.5, 198.51.100.1"], "198.51.100.1"),  # whoever came first may have made it up
        (["203.0.113.5, 198.51.100.1, 10.0.0.3"], "198.51.100.1"),  # two proxies of ours
        (["203.0.113.5", "198.51.100.1"], "198.51.100.1"),
        (["10.0.0.4, 10.0.0.3"], "10.0.0.4"),  # a client inside
        (["198.51.100.1, unknown"], "127.0.0.1"),
        (["198.51.100.1, _hidden, 10.0.0.3"], "10.0.0.3"),
        (["198.51.100.1:4711"], "198.51.100.1"),
        (["[2001:db9::1]:4711"], "2001:db9::1"),
        (["2001:DB9:0::1"], "2001:db9::1"),
        (["::ffff:198.51.100.1"], "198.51.100.1"),
        ([" 198.51.100.1 "], "198.51.100.1"),
        (["198.51.100.1,"], "127.0.0.1"),
        (["\xff"], "127.0.0.1"),
        ([""], "127.0.0.1"),
        ([], "127.0.0.1"),
    ],
)
def test_the_last_address_counts_that_no_trusted_proxy_has(lists, meant):
    assert client("127.0.0.1", *lists) == meant


def test_a_list_without_end_is_not_read_to_its_beginning():
    assert client("127.0.0.1", "198.51.100.1" + ", 10.0.0.3" * 16) == "10.0.0.3"
    assert client("127.0.0.1", "198.51.100.1" + ", 10.0.0.3" * 15) == "198.51.100.1"
