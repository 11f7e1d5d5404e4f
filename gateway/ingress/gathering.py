"""Takes the place of the client for a relay, and keeps what that writes, to send it as a whole reply."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.errors import BackendBroke, ReplyTooLarge
from gateway.core.types import Dialect
from gateway.resume.whole import Whole
from gateway.upstream.reply import Reply


class Gathering:
    """One reply that is a stream inside. It outlives the backends that write it."""

    writing_paused = False
    takes_chunks = False  # it wants frames
    bytes_out = 0

    def __init__(self, dialect: Dialect, most_bytes: int) -> None:
        self.whole = Whole(dialect)
        self._left_bytes = most_bytes
        self.started = False
        self.write_chunk: Callable[[bytes], object] = self.write

    def begin(self, reply: Reply, data: bytes = b"") -> None:
        """Take the first bytes."""
        self.started = True
        self.write(data)

    def write(self, data: bytes) -> None:
        """Take more of it; nothing more of what is too large."""
        self._left_bytes -= len(data)
        if self._left_bytes >= 0:
            self.whole.feed(data)

    @property
    def answering(self) -> bool:
        """Whether any of it has come."""
        return self.started

    def beat(self, reply: Reply, comment: bytes) -> None:
        """Do nothing: no client reads this."""

    def end(self, data: bytes = b"") -> None:
        """Take the last of it."""
        self.write(data)

    def reply(self) -> bytes:
        """Return the whole reply, once the stream has come to a good end.

        Raises:
            ReplyTooLarge: it is (502).
            BackendBroke: it has parts that could not be read (502).
        """
        if self._left_bytes < 0:
            raise ReplyTooLarge(
                "The backend's reply is larger than accepted (`limits.max_reply`), counted as a stream."
                " Please ask for less at a time."
            )
        if self.whole.garbled:
            raise BackendBroke("The backend sent a stream with parts that could not be read.")
        return self.whole.body()

    def cut(self) -> None:
        """Do nothing: the client gets an error in place of the reply."""
