"""A stream that another backend can go on with: to its client one answer, whoever writes it.

    backend --frames--> ids are taken out --> the watch, as of any stream --> client
    it fails             where it is cut: `cut` tells why, and the client is told nothing yet
    another goes on      its frames get the id and the time of the first one's, its role frame is
                         dropped, and what both counted is put together

What another backend writes is taken only if it tells that its prompt was what it was given: one that
begins anew would repeat the answer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.core.types import Call, Demand
from gateway.resume.rest import rest_of
from gateway.resume.rules import may_go_on
from gateway.resume.trail import Reached, Trail
from gateway.wire.replies import Fault
from gateway.wire.sse import ABORTED, StreamWatch

_HOLD_BYTES: Final = 1024 * 1024  # of half a frame; the ids of a prompt are all in one
_MOST_RESUMES: Final = 3
_CHOICES: Final = b',"choices":['
_ROLE: Final = b'"delta":{"role":'
_USAGE: Final = b'"usage":{'
_CHUNK: Final = msgspec.json.Decoder(dict[str, Any])
_BEGAN_ANEW: Final = Fault(
    502, "server_error", "backend_error", "The stream could not be resumed on another backend."
)


class TrailedStream(StreamWatch):
    """Looks on as a `StreamWatch` does, at what the client gets of all backends."""

    __slots__ = (
        "_asked", "_head", "_partial", "_reached", "cut", "resumable", "resumes", "trail",
    )  # fmt: skip

    def __init__(self, call: Call, demand: Demand, *, request_id: str) -> None:
        super().__init__(
            call.dialect, choices=1, hide_usage=call.hides_usage, request_id=request_id
        )
        self.trail = Trail(call.dialect)
        self.cut: Fault | None = None  # it broke off here, and may go on
        self._asked = call, demand
        self._partial = b""
        self._head = b""  # what the first backend's frames begin with, up to their choices
        self._reached: Reached | None = (
            None  # where the last one went on; None: the first one writes
        )
        self.resumable = True  # nobody wants it to end where it breaks off
        self.resumes = 0  # how often another backend went on

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return what may be sent on now."""
        if self.cut is not None:
            return b""
        if self._partial:
            data = self._partial + data
        end = data.rfind(b"\n\n") + 2
        self._partial = data[end:] if end > 1 else data
        if end == 1:
            return self._end(_BEGAN_ANEW) if len(data) > _HOLD_BYTES else b""
        if data.find(b"\n\n") + 2 == end:
            ours = self._ours(data[:end])
        else:
            frames = data[: end - 2].split(b"\n\n")
            ours = b"".join([self._ours(each + b"\n\n") for each in frames])
        if self.trail.strayed:
            self.resumable = False
            return self._end(_BEGAN_ANEW)
        return super().feed(ours) if ours else b""

    def by_sight(self, chunk: bytes) -> bytes | None:
        """Return a read that is just one more token as the client gets it; None: it is to be fed."""
        if self._partial or self._carry or self._reached is not None:
            return None
        return self.trail.tell(chunk)

    def close(self) -> bytes:
        """Take note that the backend ended its stream in order; return the rest and the ending."""
        rest, self._partial = self._partial, b""
        out = super().feed(self._ours(rest)) if rest and self.cut is None else b""
        return out + super().close() if self.cut is None else out

    def broken(self, fault: Fault) -> bytes:
        """Take note that the stream broke off; return the ending, empty where it may go on."""
        return b"" if self.cut is not None else super().broken(fault)

    def ends_here(self) -> None:
        """Let what breaks it off be its end."""
        self.resumable = False

    @property
    def awaits(self) -> bool:
        """Whether it broke off, and nothing came of the rest yet."""
        return self.cut is not None or (self._reached is not None and not self.trail.proven)

    # --- where one backend ends, and another goes on ------------------------------------------------

    def rest(self) -> tuple[Call, Demand] | None:
        """Return the request for what is left of one that broke off, and have what comes be its answer."""
        reached = self.trail.reached() if self.awaits and self.resumable else None
        if reached is None:
            return None
        rest = rest_of(*self._asked, reached)
        if rest is None:
            return None
        self.trail.go_back(reached)
        self._reached = reached
        self.resumes += 1
        self.resumable = self.resumes < _MOST_RESUMES
        self._partial = self._carry = b""
        self.cut = self.failed = self.fault = None
        self.ended = self._aborted = False
        return rest

    def _end(self, fault: Fault, *, done: bool = False) -> bytes:
        out = super()._end(fault, done=done)
        return b"" if self.cut is not None else out  # else with [DONE]

    def _tell(self, fault: Fault) -> bytes:
        """Cut the stream here if it may go on; else write an error frame."""
        if fault.status >= 500 and self._goes_on():
            self.cut = self.fault = fault
            return b""
        return super()._tell(fault)

    def _goes_on(self) -> bool:
        whole = self.resumable and self._long is None  # no part of a frame was passed on
        return whole and self.trail.reached() is not None and may_go_on(self._asked[0])

    def _judge_chunk(self, frame: bytes, payload: bytes) -> bytes:
        out = super()._judge_chunk(frame, payload)
        if self._aborted and not self.ended:
            return self._end(ABORTED)  # the client must not see the end of what may go on
        return out

    # --- frames -----------------------------------------------------------------------------------

    def _ours(self, frame: bytes) -> bytes:
        """Return a frame as the client is to get it."""
        frame = self.trail.strip(frame)
        if self._reached is None:
            if not self._head:
                self._head = frame[: max(0, frame.find(_CHOICES))]
            return frame
        return self._gone_on(frame, self._reached)

    def _gone_on(self, frame: bytes, reached: Reached) -> bytes:
        """Return a frame of another backend as one of the first."""
        at = frame.find(_CHOICES)
        if at < 0:
            return frame
        if not self.trail.proven or _ROLE in frame:
            return b""
        frame = self._head + frame[at:]
        if _USAGE not in frame:
            return frame
        chunk = _CHUNK.decode(frame[6:])
        add_up(chunk["usage"], len(reached.reply))
        return b"data: %b\n\n" % msgspec.json.encode(chunk)


def add_up(usage: dict[str, Any], said: int) -> None:
    """Count what was said before as output, and no more as a part of the prompt."""
    usage["prompt_tokens"] -= said
    usage["completion_tokens"] = usage.get("completion_tokens", 0) + said
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens"):
        details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
