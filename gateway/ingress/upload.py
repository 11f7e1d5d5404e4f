"""An upload on the client's side: a form that is read just far enough to know where it goes.

    COLLECT --the model and a file part were seen, or the form is whole--> HOLD --flow_into--> FLOW
       `------ too large, too slow, no clean form ------> failed <------------'-----------------'

COLLECT keeps everything, up to the limit: a form may name its model after its file. HOLD, while a
backend is chosen, keeps what one read brings and then stops reading. FLOW keeps nothing: what comes is
read by the form's reader, then written to the backend's connection, whose full buffer stops reading.
The limit, the client's time and the form's rules hold to the last byte; the client's time stands
still while we do not read.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.core.errors import BodyTimeout, BodyTooLarge, GatewayError
from gateway.ingress.connections import has_left
from gateway.upstream.upload import UploadConnection
from gateway.wire.forms import FormReader

_HELD_BYTES: Final = 64 * 1024  # held while a backend is chosen; one read may bring more
# While we do not read, a client that left shows only when asked for. Bytes of its own that still wait
# to be read hide it, on any system.
_LOOK_S: Final = 0.1


class Upload:
    """One form on its way from a client. Owned by its request; `close` it when that is over."""

    __slots__ = (
        "_closed", "_connection", "_ended", "_error", "_flow", "_fresh", "_held", "_left_s",
        "_limit_bytes", "_loop", "_passed_bytes", "_received_bytes", "_taking",
        "_timeout_s", "_timer", "_transport", "_until", "_waiter", "content_length", "form",
        "head_bytes", "paused", "sent_on",
    )  # fmt: skip

    def __init__(
        self,
        form: FormReader,
        flow: FlowControl,
        transport: asyncio.Transport,
        *,
        content_length: int | None,
        limit_bytes: int,
        timeout_s: float,
    ) -> None:
        """`content_length` is None for a body in chunks.

        Raises:
            BodyTooLarge: that is more than `limit_bytes` (413).
        """
        if content_length is not None and content_length > limit_bytes:
            raise too_large(limit_bytes)
        self.form = form
        self._flow = flow
        self._transport = transport
        self.content_length = content_length
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._loop = loop = asyncio.get_running_loop()
        self._fresh = bytearray()  # came since the last turn of the loop; not yet read
        self._held = bytearray()  # read, not yet passed on
        self._received_bytes = 0
        self._passed_bytes = 0
        self.head_bytes = 0  # of what `read_head` returned
        self._ended = False
        self._closed = False
        self._taking = False
        self._error: GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._connection: UploadConnection | None = None
        self.paused = False  # nothing is read from the client
        self.sent_on = False  # more than its head went to a backend, and is held nowhere
        self._left_s = 0.0
        self._until = loop.time() + timeout_s
        self._timer = loop.call_at(self._until, self._time_is_over)

    @property
    def left_s(self) -> float:
        """How much time its client has left."""
        return max(0.0, self._until - self._loop.time())

    # --- the request's side -------------------------------------------------------------------------

    def is_at_hand(self) -> bool:
        """Take in what has come; return whether that is all that `read_head` waits for."""
        self._take()
        return self._is_ready()

    async def read_head(self) -> bytes:
        """Return the beginning of the body, as far as it is needed to know the model, or all of it.

        Raises:
            RequestError: the form is not clean (400).
            BodyTooLarge: more than the limit (413).
            BodyTimeout: the client is too slow (408).
        Cancel: `close` is still to be called.
        """
        self._take()
        if not self._is_ready():
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        head = bytes(self._held)
        self._held.clear()
        self.head_bytes = self._passed_bytes = len(head)
        return head

    def close(self) -> None:
        """Hold nothing more; what still comes is dropped."""
        self._closed = True
        self._timer.cancel()
        self._fresh.clear()
        self._held.clear()
        self._connection = None
        self._read_on()

    # --- the connection to the backend: `upstream.upload.Rest` --------------------------------------

    @property
    def left_bytes(self) -> int | None:
        """How much of the body is still to be sent; None when the client did not tell."""
        if self._ended and self._error is None:
            return len(self._held) + len(self._fresh)
        return None if self.content_length is None else self.content_length - self._passed_bytes

    def flow_into(self, connection: UploadConnection) -> bytes:
        """Return what is held; what comes from now on is sent to `connection`.

        Raises:
            GatewayError: the upload has failed meanwhile.
        """
        self._take()
        if self._error is not None:
            raise self._error
        self.sent_on = True
        held = bytes(self._held)
        self._held.clear()
        self._passed_bytes += len(held)
        if not self._ended:
            self._connection = connection
        self.resume()
        return held

    def pause(self) -> None:
        """Stop reading from the client, whose time stands still."""
        if self.paused or self._ended or self._closed or self._transport.is_closing():
            return
        self.paused = True
        self._flow.pause_reading()
        self._left_s = self._until - self._loop.time()
        self._timer.cancel()
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def resume(self) -> None:
        """Read on."""
        if self.paused and not self._closed:
            self._timer.cancel()
            self._until = self._loop.time() + self._left_s
            self._timer = self._loop.call_at(self._until, self._time_is_over)
        self._read_on()

    # --- the client's side --------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Take body bytes. Small ones are handled together, once per turn: they may be tiny chunks."""
        if self._closed or self._error is not None:
            return
        self._received_bytes += len(data)
        if self._received_bytes > self._limit_bytes:
            self.fail(too_large(self._limit_bytes))
            return
        self._fresh += data
        if len(self._fresh) >= _HELD_BYTES:  # at once, as a turn of the loop may bring many reads
            self._take()
        else:
            self._take_soon()

    def on_end(self) -> None:
        """The body is whole. Reading is no more ours to stop: what follows is another request."""
        self._ended = True
        self._timer.cancel()
        self._read_on()
        self._take_soon()

    def fail(self, error: GatewayError) -> None:
        """End an upload that cannot go on; whoever waits for it gets the error."""
        if self._closed or self._error is not None:
            return
        self._error = error
        self._timer.cancel()
        self._fresh.clear()
        self._held.clear()
        if self._connection is None:
            self._wake()
        elif not self._connection.refuse(error):
            self._transport.abort()  # the answer has begun: all that can be told is that it is cut

    # --- inside -------------------------------------------------------------------------------------

    def _take_soon(self) -> None:
        if not self._taking:
            self._taking = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._taking = False
        self._take()

    def _take(self) -> None:
        """Read what came, then keep it or pass it on."""
        if self._closed or self._error is not None:
            return
        data = bytes(self._fresh)
        self._fresh.clear()
        try:
            self.form.feed(data)
            if self._ended or self._received_bytes == self.content_length:
                self.form.end()  # before the last bytes go on: the backend never sees it whole
        except GatewayError as error:
            self.fail(error)
            return
        if self._connection is not None:
            self._pass_on(self._connection, data)
            return
        self._held += data
        if self._is_ready():
            self._wake()
            if len(self._held) >= _HELD_BYTES:
                self.pause()

    def _pass_on(self, connection: UploadConnection, data: bytes) -> None:
        self._passed_bytes += len(data)
        if data:
            connection.send(data)
        if self._ended:
            self._connection = None
            connection.finish()

    def _is_ready(self) -> bool:
        form = self.form
        return self._ended or self._error is not None or (form.has_file and "model" in form.fields)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_on(self) -> None:
        if self.paused:
            self.paused = False
            if not self._transport.is_closing():
                self._flow.resume_reading()

    def _time_is_over(self) -> None:
        """Read first what came meanwhile, and add the time by which this is late: the process stood still."""
        late_s = min(self._loop.time() - self._until, self._timeout_s)
        self._until = self._loop.time() + late_s
        self._timer = self._loop.call_at(self._until, self._too_late)

    def _too_late(self) -> None:
        self.fail(
            BodyTimeout(
                f"The request body did not arrive within {self._timeout_s:.0f} s "
                f"({self._received_bytes} bytes received)."
            )
        )

    def _look(self) -> None:
        """See whether a client that we do not read from has left."""
        if has_left(self._transport):
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(_LOOK_S, self._look)


def too_large(limit_bytes: int) -> BodyTooLarge:
    """Return the refusal of a body that is, or says that it is, larger than the limit."""
    return BodyTooLarge(
        f"The request body is larger than the limit of {limit_bytes} bytes for this endpoint."
    )
