"""The public listener's connections: how many there may be, what each waits for, which goes first.

A connection stands in one line at a time, by what it waits for from its client. A line has one
deadline for all, so its head is always the next to expire, and a tick looks no further.

    HEAD     a request head has begun, or the connection is new      `timeouts.header`
    IDLE     the next request                                        `timeouts.keep_alive`
    LINGER   the client reads a refusal; what it still sends is dropped    at most 2 s
    CLOSING  the client reads what is left to send                   `timeouts.client_write`
    (none)   a request is being answered; its own deadlines count

When there are as many as there may be, a new one takes the place of the connection that is easiest
to miss. A connection whose request is being answered is never closed for another.

Workers accept from one listener, and whichever is awake takes what comes. A connection lives long, so
one that has far more than its share gives some away: they close behind a reply (`surplus`).
"""

from __future__ import annotations

import asyncio
import math
import select
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Final

from gateway.core.addresses import Proxies, client_network

if TYPE_CHECKING:
    from gateway.ingress.server import GatewayProtocol

# Whether the other side has closed: POLLRDHUP is Linux's; POLLHUP and POLLERR always count.
_HANGUP: Final[int] = getattr(select, "POLLRDHUP", 0)
# A client sends its head within a round trip of connecting; one that takes longer than this is slow.
_SLOW_S: Final = 1.0
_LOOKED_AT: Final = 64  # of a line, for one without unsent bytes
# So many connections beyond a worker's share, or this part of it, are left to chance.
_UNEVEN: Final = 8
_UNEVEN_RATIO: Final = 0.25
_GIVEN_AWAY_RATIO: Final = 0.25  # of the rest, at a time: what others tell is up to two seconds old


class Waits(Enum):
    """What a connection waits for from its client."""

    HEAD = "head"
    IDLE = "idle"
    LINGER = "linger"
    CLOSING = "closing"


class Shed(Enum):
    """Why a connection was closed or refused to stay within the limits; a label of the metric."""

    LINGERING = "lingering"  # it was answered already
    SLOW_HEAD = "slow_head"
    IDLE = "idle"
    REFUSED = "refused"  # a new one, while every other has a request in progress
    ADDRESS = "address"  # a new one of an address that has as many as one may have


_WHY: Final = {
    Waits.HEAD: Shed.SLOW_HEAD,
    Waits.IDLE: Shed.IDLE,
    Waits.LINGER: Shed.LINGERING,
}


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """For how many seconds a connection waits for its client, by what it waits for."""

    head_s: float
    idle_s: float
    linger_s: float
    closing_s: float


_LOOPBACK: Final = ("127.0.0.1", client_network("::1"))


class Line(OrderedDict["GatewayProtocol", float]):
    """Connections that wait for the same, the oldest first, and until when each does.

    A connection stands in one line only, and joins at its end: until `seconds` from then.
    """

    def __init__(self, waits: Waits, seconds: float) -> None:
        super().__init__()
        self.waits = waits
        self.seconds = seconds

    def wait_for(self, seconds: float) -> None:
        """Have each wait for so long, from when it joined; those that are in line already, too."""
        longer = seconds - self.seconds
        for connection in self:
            self[connection] += longer
        self.seconds = seconds


class Connections:
    """All connections of the public listener. Single event loop only; nothing here awaits."""

    def __init__(
        self, times: ClientTimes, most: int, most_per_address: int | None = None, *, by_setting: bool = True
    ) -> None:  # fmt: skip
        """Without `most_per_address` one address has half of all; loopback and proxies are not bounded.

        `by_setting`: settings can change both numbers.
        """
        self.by_setting = by_setting
        self.proxies = Proxies(())  # the trusted ones
        self.most = most
        self.most_per_address = most_per_address or max(1, self.most // 2)
        self._spares_proxies = most_per_address is None
        self.shed: Counter[Shed] = Counter()
        self._all: dict[GatewayProtocol, str | None] = {}
        self._by_address: Counter[str] = Counter()
        self.heads = Line(Waits.HEAD, times.head_s)
        self.idle = Line(Waits.IDLE, times.idle_s)
        self.lingering = Line(Waits.LINGER, times.linger_s)
        self.closing = Line(Waits.CLOSING, times.closing_s)

    def apply(self, times: ClientTimes) -> None:
        """Wait for clients as long as changed settings say."""
        self.heads.wait_for(times.head_s)
        self.idle.wait_for(times.idle_s)
        self.lingering.wait_for(times.linger_s)
        self.closing.wait_for(times.closing_s)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def busy(self) -> int:
        """How many have a head on its way, or a reply due."""
        return len(self._all) - len(self.idle) - len(self.lingering) - len(self.closing)

    def enter(self, connection: GatewayProtocol, host: str | None, now: float) -> Shed | None:
        """Take a new connection in, another one's place if need be; return why it may not stay.

        `host` is the client's address, None for a UNIX socket.
        """
        address = client_network(host)
        if self._spares_proxies and (address in _LOOPBACK or self.proxies.trusts(host)):
            address = None
        if address is not None and self._by_address[address] >= self.most_per_address:
            self.shed[Shed.ADDRESS] += 1
            return Shed.ADDRESS
        if len(self._all) >= self.most and not self._make_room(now):
            self.shed[Shed.REFUSED] += 1
            return Shed.REFUSED
        self._all[connection] = address
        if address is not None:
            self._by_address[address] += 1
        return None

    def leave(self, connection: GatewayProtocol) -> None:
        """Forget a connection; one that was never in, or has left, is no mistake."""
        address = self._all.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def all(self) -> tuple[GatewayProtocol, ...]:
        """Return every connection."""
        return tuple(self._all)

    @property
    def counts(self) -> dict[tuple[str, ...], int]:
        """How many were shed since the start, by reason."""
        return {(why.value,): self.shed[why] for why in Shed}

    def tick(self, now: float) -> None:
        """Expire what waited for too long; called about twice a second."""
        for line in (self.heads, self.idle, self.lingering, self.closing):
            while line:
                connection, until = next(iter(line.items()))
                if now < until:
                    break
                del line[connection]
                connection.expire(line.waits)

    def _make_room(self, now: float) -> bool:
        """Close the connection that is easiest to miss; False when every one is at work.

        One with bytes that are still unsent makes no room at once. Where all that may go have some, the first
        of them begins to close, for whoever comes later.
        """
        first = None
        for line in self._by_ease(now):
            for connection in islice(line, _LOOKED_AT):
                if connection.has_unsent():
                    first = first or (connection, line)
                    continue
                del line[connection]
                connection.shed()
                self.leave(connection)
                self.shed[_WHY[line.waits]] += 1
                return True
        if first is not None:
            connection, line = first
            del line[connection]
            connection.shed()
        return False

    def _by_ease(self, now: float) -> tuple[Line, ...]:
        """Return the lines in the order in which they lose one: refused already, a slow head, long idle, any head."""
        heads, idle = self.heads, self.idle
        slow = heads and now - (next(iter(heads.values())) - heads.seconds) >= _SLOW_S
        return (self.lingering, heads, idle) if slow else (self.lingering, idle, heads)


def surplus(own: int, others: Sequence[int]) -> int:
    """Return how many of its connections a worker gives away now, by how many the others have."""
    share = (own + sum(others)) / (1 + len(others))
    beyond = own - share
    if beyond <= max(_UNEVEN, share * _UNEVEN_RATIO):
        return 0
    return math.ceil(beyond * _GIVEN_AWAY_RATIO)


def has_left(transport: asyncio.Transport) -> bool:
    """Return whether a client that we do not read from has closed its side, or is gone.

    Bytes of its own that still wait to be read hide that on some systems.
    """
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _HANGUP)
    return bool(poll.poll(0))
