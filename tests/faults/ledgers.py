"""Three ledgers of the same traffic: what clients saw, what the gateway logged, what engines did.

Each is a file of JSON lines. All times are seconds of the machine's monotonic clock, which processes
share. A nonce names one request of one client: it is in the prompt, and it is the request's id.
"""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec


class End(enum.Enum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    ERROR = "error"  # a stream that ended with an error, in its own protocol
    REFUSED = "refused"  # a whole reply that is an error
    LEFT = "left"  # the client went away first
    CUT = "cut"  # the connection ended in the middle, and nothing told why


class ClientLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it."""

    nonce: str
    path: str
    stream: bool
    end: End
    sent_at: float
    ended_at: float
    status: int = 0  # 0: no reply came
    first_at: float | None = None  # when the first byte of the reply's body came
    first_text_at: float | None = None
    text: str = ""
    whole: str = ""  # the text that a whole reply to this prompt has
    finish: str | None = None
    done: bool = False  # a stream's last event came
    # The body of a reply that is an error, or the error in a stream.
    error: dict[str, Any] | None = None
    retry_after: bool = False
    tenant: str = ""


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as an engine saw it. `begun` tokens of the reply were in the prompt already."""

    nonce: str
    engine: str
    at: float
    ended_at: float
    answered_at: float | None = None  # it sent the head of a reply, a stream's at once
    begun: int = 0
    emitted: int = 0
    left_at: float | None = None  # when it saw that its client had left
    died: bool = False  # the engine ended, and it with it


class GatewayLine(msgspec.Struct, frozen=True, kw_only=True):
    """What of an access line is compared; the line has more."""

    id: str
    outcome: str | None
    status: int
    attempts: int
    stream: bool
    resumed: int = 0
    duration_s: float | None = None
    completion_tokens: int | None = None
    usage_source: str | None = None


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an engine that the gateway launches, as it says itself when it begins."""

    engine: str
    pid: int
    began_at: float

    @property
    def incarnation(self) -> str:
        """What it is called."""
        return f"{self.engine}/{self.pid}"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway's process holds at one moment."""

    requests: int = 0  # in progress
    slots: int = 0
    queued: int = 0
    busy_connections: int = 0  # to backends
    descriptors: int = 0
    tasks: int = 0
    threads: int = 0
    memory_mib: float = 0.0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run left behind. What is not measured is left out, and not judged."""

    client: Sequence[ClientLine]
    gateway: Sequence[GatewayLine]
    engine: Sequence[EngineLine]
    before: Held | None = None
    after: Held | None = None  # 2 s after the last request
    papers: dict[str, str] = msgspec.field(default_factory=dict)  # logs, metrics: name and text
    secrets: Sequence[str] = ()  # that no paper may have
    inside: Sequence[str] = ()  # addresses and paths that no error may name
    faulted_tenants: frozenset[str] = frozenset()
    faults_from: float | None = None  # before that, nothing was broken
    restarts: Sequence[str] = ()  # the incarnations that were restarted
    true_faults: frozenset[str] = frozenset()  # the incarnations that were broken
    late_s: float = 0.0  # at most, of a loop that has clients, gateway and engines


_Line = TypeVar("_Line", ClientLine, EngineLine, GatewayLine, Life)


def restarts(lives: Iterable[Life]) -> list[str]:
    """Return the incarnations that others took the place of, one each time."""
    last: dict[str, str] = {}
    found = []
    for life in sorted(lives, key=lambda each: each.began_at):
        if life.engine in last:
            found.append(last[life.engine])
        last[life.engine] = life.incarnation
    return found


def write(path: pathlib.Path, lines: Iterable[msgspec.Struct]) -> None:
    """Append lines to a ledger."""
    encode = msgspec.json.encode
    with path.open("ab") as file:
        file.writelines(encode(line) + b"\n" for line in lines)


def read(path: pathlib.Path, kind: type[_Line]) -> list[_Line]:
    """Read a ledger; of an access log only the lines of requests are taken."""
    lines = path.read_bytes().splitlines()
    if kind is GatewayLine:
        lines = [line for line in lines if b'"endpoint":' in line]
    decode = msgspec.json.Decoder(kind).decode
    return [decode(line) for line in lines]
