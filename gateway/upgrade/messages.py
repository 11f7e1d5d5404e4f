"""The messages between two processes while one takes the place of the other.

    the new one                                 the old one
    reads its settings, has its listeners
    Loaded  -------------------------------->   pauses healing: nobody writes the state folder
            <--------------------------------   Go
    reads the state folder, finds the backends that serve, accepts connections
    Ready   -------------------------------->   accepts no more, hands over what it launched
            <--------------------------------   Left
    heals, opens the admin listener             finishes its requests
            <--------------------------------   Left, whenever these wait for other adapters
                                                ends

Before `Ready` either may give up (`Failed`, or its end of the channel closes): then the old one goes on as before.
A new process of an earlier version knows no `Left`: for it the channel closes instead.
The channel keeps messages apart (SOCK_SEQPACKET): one read returns one message.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.heal.decisions import Tries
from gateway.launch.launcher import Incarnation

MOST_BYTES: Final = 1024 * 1024  # of a message; `Go` usually names each backend twice
VARIABLE: Final = "GATEWAY_TAKES_OVER"  # in the environment of the new process: `Inherits`, as JSON


class Inherits(msgspec.Struct, frozen=True):
    """The file descriptors that the new process gets. `kept`: systemd keeps the listeners open, too."""

    channel: int
    public: int
    admin: int
    kept: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The settings can be used, and the listeners are open. `pid` is of the process that will serve.

    `hears_left`: it knows the message `Left`.
    """

    pid: int
    version: str
    hears_left: bool = False


class Go(msgspec.Struct, frozen=True, tag=True):
    """Read the state folder, and serve.

    `serving`: the backends that serve; `measured`: those of them that show metrics.
    `restarts`: restarts that operators ordered and that are not carried out yet, with the reason, by backend.
    `tried`: how often restarts of the running servers were begun, whoever ordered them.
    `unproven`: servers that run and have to give a token before they serve, by backend.
    `finishing`: older processes that still finish requests, each with its pid and when it started.
    `records`: the state folder that has the records of launched servers; empty: none is launched.
    """

    serving: list[str]
    measured: list[str]
    restarts: dict[str, str] = {}
    tried: dict[str, Tries] = {}
    unproven: dict[str, Incarnation] = {}
    finishing: list[tuple[int, int]] = []
    records: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """New connections are accepted. `missing`: backends that serve at the old process and not here."""

    missing: list[str]


class Left(msgspec.Struct, frozen=True, tag=True):
    """All is handed over. `awaited`: the adapters that requests of the old process wait for now, by pool."""

    awaited: dict[str, frozenset[str]] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The new process gives up."""

    why: str


Message = Loaded | Go | Ready | Left | Failed

# Both decoders raise DecodeError for a message of another version.
encode: Final = msgspec.json.encode
decode: Final = msgspec.json.Decoder[Message](Message).decode
inherits: Final = msgspec.json.Decoder(Inherits).decode
