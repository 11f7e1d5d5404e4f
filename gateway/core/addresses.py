"""What of a network address tells clients apart."""

from __future__ import annotations

import ipaddress


def client_network(host: str | None) -> str | None:
    """Return what one client surely has: an IPv4 address, or the first 64 bits of an IPv6 one."""
    if host is None or ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or address.exploded[:19])
