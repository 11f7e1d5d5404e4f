"""A request whose body is still coming from its client: it is sent on as it comes.

    client --> Rest --send--> UploadConnection --> backend
                <--pause/resume--     the backend's write buffer is full / drained

An upload has a connection of its own, made for it: what was streamed is held nowhere, so it could not
be sent again had an idle connection died. Once the upload is answered the connection is like any other.

One clock runs at a time: the client's while the backend waits for bytes, the backend's while it takes
none and from the body's end. An answer may come before that end: nothing more is sent once it is an
error, and the connection is closed after it.
"""

from __future__ import annotations

from typing import Protocol

from gateway.core.errors import GatewayError
from gateway.upstream.connection import Connection
from gateway.upstream.reading import CLOSED
from gateway.upstream.reply import Reply
from gateway.upstream.silence import Silence


class Rest(Protocol):
    """What of a body is still to come."""

    @property
    def left_bytes(self) -> int | None:
        """How much, what is held included; None when the client does not tell."""

    def flow_into(self, connection: UploadConnection) -> bytes:
        """Return what is held and `send` the connection what comes from now on.

        Raises:
            GatewayError: the upload has failed meanwhile.
        """

    def pause(self) -> None:
        """Let no more come: the backend is slower than the client."""

    def resume(self) -> None:
        """Let it come again."""


class UploadConnection(Connection):
    """A connection whose first request is an upload."""

    _rest: Rest | None = None  # while the upload's body is not whole
    _chunked = False

    async def upload(self, head: bytes, body: bytes, rest: Rest, silence: Silence) -> Reply:
        """Send a head without its end and framing, the body's beginning, and the rest as it comes.

        Raises:
            GatewayError: the upload failed by the client's fault: too large, too slow, no clean form.
            BackendBroke, BackendTimeout: see `Connection.request`; the backend's silence counts from
                the body's end.
        Cancel: closes the connection.
        """
        try:
            body += rest.flow_into(self)
        except GatewayError:
            self.abort()
            raise
        left = rest.left_bytes
        if left != 0:
            self._rest = rest
            silence.suspend()
        self._chunked = left is None
        if left is None:
            framing, body = b"transfer-encoding: chunked", _chunk(body)
        else:
            framing = b"content-length: %d" % (len(body) + left)
        return await self.request(b"%b%b\r\n\r\n" % (head, framing), body, silence)

    def send(self, data: bytes) -> None:
        """Send more of the body; a backend that has refused it gets no more."""
        if self._transport is not None and self.state is not CLOSED and self._status < 400:
            self._transport.write(_chunk(data) if self._chunked else data)

    def finish(self) -> None:
        """Note that the body is whole: now the backend's time runs."""
        self._restart_silence()
        if self._status < 400:  # else it did not get all of it
            self._rest = None
            if self._chunked:
                self.send(b"")

    def refuse(self, error: GatewayError) -> bool:
        """Close, since the upload failed; False when a reply is being streamed that cannot tell it."""
        if self.state is CLOSED:
            return True  # it was answered, or broke, in the same turn
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is None or waiter.done():
            return False
        waiter.set_exception(error)
        return True

    def pause_writing(self) -> None:
        """Stop the client: the backend does not keep up."""
        if self._rest is not None:
            self._restart_silence()
            self._rest.pause()

    def resume_writing(self) -> None:
        """Let the client go on."""
        if self._rest is not None:
            self.silence.suspend()
            self._rest.resume()

    def _release(self, *, keep_alive: bool) -> None:
        """Close after an answer that came before the body was whole, unsent bytes and all."""
        if self._rest is None:
            super()._release(keep_alive=keep_alive)
        else:
            self._rest = None
            self.abort()

    def _restart_silence(self) -> None:
        self.silence.restart(self.loop.time())


def _chunk(data: bytes) -> bytes:
    """Frame a chunk; the empty one is the last."""
    return b"%x\r\n%b\r\n" % (len(data), data)
