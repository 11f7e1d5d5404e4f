"""The part of an address that tells clients apart, and the address that a request comes from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Final

UNIX: Final = "unix"  # a peer on a UNIX socket, which has no address
_FORWARDED: Final = b"x-forwarded-for"
_KNOWN: Final = 4096  # addresses that are remembered
_LONGEST: Final = 100  # characters of an address with a port and a zone
_MOST_PROXIES: Final = 16  # that a request passes; a longer list is not read on


def client_network(host: str | None) -> str | None:
    """Return the network that is surely one client's: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if host is None or ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or address.exploded[:19])


def within(host: str | None, networks: tuple[str, ...]) -> bool:
    """Whether an address is in one of these networks; None, a UNIX socket, is in none."""
    return host is not None and _is_in(host, _networks(networks))


@lru_cache(maxsize=1024)
def _networks(texts: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(each) for each in texts]


def _is_in(text: str, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    if (known := _address(text)) is None:
        return False
    address = ipaddress.ip_address(known)
    return any(address in network for network in networks)


class Proxies:
    """The proxies that are believed about where a request comes from."""

    def __init__(self, trusted: Iterable[str]) -> None:
        """`trusted` are addresses, networks in CIDR notation, and `unix`."""
        trusted = tuple(trusted)
        self._unix = UNIX in trusted
        self._networks = [ipaddress.ip_network(each) for each in trusted if each != UNIX]
        # An address is parsed for 4 us, and clients come again.
        self._known = lru_cache(_KNOWN)(partial(_is_in, networks=self._networks))

    def client_of(
        self, peer: str | None, headers: Iterable[tuple[bytes, bytes]] | None
    ) -> str | None:
        """Return the client's address; None is a UNIX socket. `peer` is who sent us the request.

        Each proxy appends whom it has the request from to X-Forwarded-For. So the list is read from
        its end, for as long as it was written by a trusted proxy; what is left of that, any client
        may have made up.
        """
        if not (self._networks or self._unix) or not self.trusts(peer):
            return peer
        lists = [value for name, value in headers or () if name == _FORWARDED]
        client = peer
        for each in b",".join(lists).decode("latin-1").split(",")[: -_MOST_PROXIES - 1 : -1]:
            if (address := _address(each.strip())) is None:
                break
            client = address
            if not self.trusts(client):
                break
        return client

    def trusts(self, peer: str | None) -> bool:
        """Whether this is one of the proxies; None is a UNIX socket."""
        if peer is None:
            return self._unix
        return self._known(peer) if self._networks else False


def _address(text: str) -> str | None:
    return _parsed(text) if len(text) <= _LONGEST else None


@lru_cache(_KNOWN)
def _parsed(text: str) -> str | None:
    """Return an address as `ipaddress` writes it, without a port or a zone; None for anything else.

    An IPv4 address in the form of IPv6 is that IPv4 address.
    """
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:  # some proxies add the port
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)
