"""Addresses of media in a body: inline data, a host on the internet, or anything else.

The engine would fetch what an address names, from inside the operator's network. Only what is
plainly a public host passes as one. A name is not resolved here: the engine resolves it again, later
and by itself, so an answer here would prove nothing. A public name that leads to a private address
is for the engine's `--allowed-media-domains`, or for `media: data`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from gateway.core.asked import Media

# The authority of an http address, read so narrowly that no two parsers can disagree: no user, no
# backslash, no space, no percent sign, ASCII only. Source: GHSA-qh4c-xf7m-gxfc (a parser differential).
_HTTP: Final = re.compile(
    r"https?://(?:\[(?P<six>[0-9a-fA-F:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::[0-9]{0,5})?"
    r"(?:[/?#][^\\\x00-\x20\x7f]*)?",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
_INTERNAL: Final = frozenset(
    # Source: RFC 6761, 6762, 8375, 9476 and ICANN's `internal`; the rest are habits of networks.
    ["localhost", "local", "internal", "intranet", "lan", "home", "corp", "private", "localdomain"]
    + ["arpa", "test", "invalid", "onion", "alt", "svc", "cluster", "consul"]
)
_GLOBAL_SIX: Final = ipaddress.ip_network("2000::/3")
_TUNNELS: Final = tuple(
    # These carry an IPv4 address of the sender's choice: Teredo, 6to4. NAT64 is outside of 2000::/3.
    ipaddress.ip_network(each)
    for each in ("2001::/23", "2002::/16")
)


def kind_of_address(address: str) -> Media:
    """Say which setting of `media` an address needs; ANY for all that is not plainly one of the others."""
    if address[:5].lower() == "data:":
        return Media.DATA
    found = _HTTP.fullmatch(address)
    if found is None:
        return Media.ANY
    six, name = found["six"], found["name"]
    public = _is_public_six(six) if six is not None else _is_public_name(name)
    return Media.PUBLIC if public else Media.ANY


def _is_public_six(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    inside = address in _GLOBAL_SIX and not any(address in tunnel for tunnel in _TUNNELS)
    return inside and address.is_global


def _is_public_name(name: str) -> bool:
    labels = name.lower().removesuffix(".").split(".")
    if "" in labels:
        return False
    if _NUMBER.fullmatch(labels[-1]):  # no domain ends so: it is an IPv4 address in some spelling
        return _is_public_four(labels)
    return len(labels) > 1 and labels[-1] not in _INTERNAL  # one label is found in a search domain


def _is_public_four(parts: list[str]) -> bool:
    """Read what inet_aton reads: one to four parts, each decimal, octal or hexadecimal."""
    if len(parts) > 4 or not all(map(_NUMBER.fullmatch, parts)):
        return False
    try:
        numbers = [_number(part) for part in parts]
    except ValueError:
        return False
    *octets, rest = numbers
    if any(octet > 255 for octet in octets) or rest >= 256 ** (5 - len(numbers)):
        return False
    value = rest
    for place, octet in enumerate(octets):
        value += octet << (24 - 8 * place)
    address = ipaddress.IPv4Address(value)
    return address.is_global and not address.is_multicast


def _number(text: str) -> int:
    if text[:2].lower() == "0x":
        return int(text[2:] or "0", 16)
    return int(text, 8 if text[0] == "0" and len(text) > 1 else 10)
