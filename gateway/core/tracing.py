"""The trace that a request belongs to, as W3C Trace Context has it (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

import msgspec

_CHANCE: Final = random.Random()  # its own: whoever seeds the module's does not repeat our ids


class Parent(NamedTuple):
    """A span of somebody else's: what a valid `traceparent` says."""

    trace_id: str  # 32 hexadecimal digits, as in all of this module
    span_id: str  # 16
    sampled: bool


class Trace(msgspec.Struct, gc=False):
    """The trace of one request. Its handler owns it; ids are made as they are needed."""

    trace_id: str
    span_id: str  # of the request
    sampled: bool
    parent_id: str | None = None  # of the client's span
    linked: Parent | None = None  # the client's span, which is of another trace
    state: bytes = b""  # the line of `tracestate`
    attempt_id: str = ""  # of the span of the last attempt

    def begin_attempt(self) -> bytes:
        """Make the span of another attempt; return the header lines that put the backend's spans below it."""
        self.attempt_id = new_span_id()
        parent = f"traceparent: 00-{self.trace_id}-{self.attempt_id}-0{self.sampled:d}\r\n"
        return parent.encode() + self.state


def new_trace_id() -> str:
    """Return the id of a new trace, by chance; never all zeros."""
    return f"{_CHANCE.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """Return the id of a new span, by chance; never all zeros."""
    return f"{_CHANCE.getrandbits(64) or 1:016x}"
