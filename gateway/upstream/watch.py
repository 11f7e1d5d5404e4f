"""What inspects a body while it is relayed: `StreamWatch` that of a stream, `PlainWatch` any other."""

from __future__ import annotations

import re
from typing import Final

from gateway.core.errors import BackendBroke, EngineFull, GatewayError, ReplyTooLarge, RequestError
from gateway.core.types import Dialect, Outcome, Usage
from gateway.wire.frames import json_aborted, json_usage
from gateway.wire.replies import Fault
from gateway.wire.sse import StreamWatch

_WITH_CHOICES: Final = (Dialect.CHAT, Dialect.COMPLETIONS)
_REASON_BYTES: Final = 32  # what two reads may share of `"finish_reason": "abort"`
_LAST_WORD: Final = {
    Dialect.RESPONSES: re.compile(rb'"status":\s*"(\w+)"'),
    Dialect.MESSAGES: re.compile(rb'"stop_reason":\s*"?(\w+)'),
}
_BAD_WORDS: Final = (b"cancelled", b"failed", b"null")


def is_comment(data: bytes) -> bool:
    """Whether what may be sent on is nothing but comments, as servers keep a connection alive with."""
    return data.startswith(b":") and all(line[:1] in b":" for line in data.splitlines())


def error_of(fault: Fault | None, *, in_order: bool = False) -> GatewayError:
    """Return the error for what a backend told in place of a stream, or within it; None: it told nothing."""
    if fault is None:
        return BackendBroke("the backend ended the stream before it began")
    if fault.status in (429, 503):
        return EngineFull(fault.message)
    if fault.status < 500:
        wrong = RequestError(fault.message, code=fault.code, param=fault.param)
        wrong.outcome = Outcome.UPSTREAM_REJECTED
        return wrong
    error = BackendBroke(fault.message)
    error.in_order = in_order
    return error


class PlainWatch:
    """Inspects a body that is no event stream and too large to be judged as a whole.

    Everything is passed on, up to `most_bytes`; more is an `excess`. Whether the engine aborted it stands in its
    choices (Chat, Completions), or near its end, where the usage is too.
    """

    _HEAD_BYTES: Final = 4096
    _TAIL_BYTES: Final = 4096
    between_frames: Final = False  # there are none
    answering: Final = False  # each read is an event, which says so
    ended: Final = False  # only the body's own end tells
    cut: Fault | None = None

    def __init__(self, dialect: Dialect, *, most_bytes: int) -> None:
        self._dialect = dialect
        self._most_bytes = self._left_bytes = most_bytes
        self._aborted = False
        self.excess: ReplyTooLarge | None = None
        self.began: Usage | None = None
        self.complete = False
        self.failed = False
        self.fault: Fault | None = None
        self.events = 0
        self._head = self._tail = b""

    @property
    def usage(self) -> Usage | None:
        """What the end of the body says, else its beginning: vLLM ranks documents behind what that took."""
        return json_usage(self._tail) or json_usage(self._head)

    def by_sight(self, data: bytes) -> bytes | None:
        """Nothing is known by sight."""
        return None

    def feed(self, data: bytes) -> bytes:
        """Pass on everything; nothing more once it is too much."""
        self.events += 1
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self.excess = ReplyTooLarge(
                f"The backend's reply has more than {self._most_bytes} bytes, which are accepted"
                " (`limits.max_reply`). Please ask for less at a time."
            )
            return b""
        if self._dialect in _WITH_CHOICES:
            self._aborted |= json_aborted(self._tail[-_REASON_BYTES:] + data)
        if len(self._head) < self._HEAD_BYTES:
            self._head += data[: self._HEAD_BYTES - len(self._head)]
        self._tail = (self._tail + data)[-self._TAIL_BYTES :]
        return data

    def close(self) -> bytes:
        """Judge the body, which is whole now."""
        last = _LAST_WORD.get(self._dialect)
        words: list[bytes] = last.findall(self._tail) if last is not None else []
        aborted = self._aborted or (bool(words) and words[-1] in _BAD_WORDS)
        self.complete = not (aborted or self.excess)
        return b""

    def ends_here(self) -> None:
        """Do nothing: no other backend goes on with such a body."""

    def broken(self, fault: Fault) -> bytes:
        """A cut body has no ending that could say so."""
        return b""


Watch = StreamWatch | PlainWatch
