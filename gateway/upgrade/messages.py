"""What two gateways tell each other while one takes the place of the other.

    the new one                                 the old one
    reads its settings, has its listeners
    Loaded  -------------------------------->   pauses healing: nobody writes the state folder
            <--------------------------------   Go
    reads the state folder, finds the backends that serve, accepts connections
    Ready   -------------------------------->   accepts no more, hands over what it launched
            <--------------------------------   the channel closes
    heals, opens the admin listener             finishes its requests, and ends

Before `Ready` either may give up (`Failed`, or its end of the channel closes): the old one goes on as if
nothing had been. The channel keeps messages apart (SOCK_SEQPACKET), so one is one read.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.heal.decisions import Tries
from gateway.launch.launcher import Incarnation

MOST_BYTES: Final = 1024 * 1024  # `Go` names each backend, twice as a rule
VARIABLE: Final = "GATEWAY_TAKES_OVER"  # in the environment of the new process: `Inherits`, as JSON


class Inherits(msgspec.Struct, frozen=True):
    """The file descriptors that the new process gets. `kept`: systemd has the listeners open too."""

    channel: int
    public: int
    admin: int
    kept: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The settings can be used, and the listeners are open. `pid` is of the process that will serve."""

    pid: int
    version: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """Read the state folder, and serve. These backends serve, and those of them show metrics.

    `restarts` are ordered by operators and not carried out, with why. `tried`: how often restarts of what
    runs were begun, whoever ordered them.
    `unproven` runs, and has to give a token before it serves: its start goes on, by backend.
    `finishing` are the processes before the old one that still finish requests: pid, and when it started.
    """

    serving: list[str]
    measured: list[str]
    restarts: dict[str, str] = {}
    tried: dict[str, Tries] = {}
    unproven: dict[str, Incarnation] = {}
    finishing: list[tuple[int, int]] = []


class Ready(msgspec.Struct, frozen=True, tag=True):
    """New connections are accepted. `missing`: backends that serve at the old one, and not here."""

    missing: list[str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The new process gives up."""

    why: str


Message = Loaded | Go | Ready | Failed

# Both decoders raise DecodeError of what another version says.
encode: Final = msgspec.json.encode
decode: Final = msgspec.json.Decoder[Message](Message).decode
inherits: Final = msgspec.json.Decoder(Inherits).decode
