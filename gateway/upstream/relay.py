"""Carry one streamed reply from the backend's connection to the client, callback to callback.

    connection --on_data--> watch (looks on, holds back half frames) --> client.write
               <--pause/resume--                                     <-- client's transport is full / drained

No task wakes per chunk: the story awaits `Relay.run` once, and it returns when the stream has ended.
The client's head is held back until the first bytes that say something, so a failure the backend
reports at once still gets an honest status; after `heartbeat_s` of silence the head goes out with a
comment, and comments keep flowing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from gateway.core.errors import (
    BackendDown,
    BackendTimeout,
    ClientStalled,
    GatewayError,
    RequestError,
    StreamBroke,
    StreamMoved,
    UpstreamError,
)
from gateway.upstream.reply import Reply
from gateway.upstream.watch import Watch, error_of, is_comment
from gateway.wire.chunks import inside
from gateway.wire.replies import fault_of
from gateway.wire.sse import HEARTBEAT, IN_ORDER

TICK_S: Final = 0.5  # how often on_tick comes; all times below are good to about that
_TOLD_AS_THEY_ARE: Final = (BackendTimeout, BackendDown, StreamMoved)
_FRAMINGS: Final = frozenset({b"transfer-encoding", b"content-length"})
_LAST_CHUNK_S: Final = 1.0  # what a backend has to end the body, after the stream's last frame


class ClientSide(Protocol):
    """The client's side of one request, as far as a relay needs it."""

    started: bool  # the head has been written
    writing_paused: bool  # the transport's buffer is full
    takes_chunks: bool  # the head is written, the body goes out in chunks, and the client is there
    bytes_out: int  # what was written
    write_chunk: Callable[[bytes], object]  # the transport's own, which counts nothing

    def begin(self, reply: Reply, data: bytes = b"") -> None:
        """Write the reply's head, and the first body bytes with it."""

    @property
    def answering(self) -> bool:
        """Whether any of the reply was written, beside comments."""

    def write(self, data: bytes) -> None:
        """Write body bytes."""

    def beat(self, reply: Reply, comment: bytes) -> None:
        """Write a comment, so that the connection is not thought dead, behind the reply's head."""

    def end(self, data: bytes = b"") -> None:
        """Finish the body, after its last bytes, in the client's framing."""

    def cut(self) -> None:
        """End a body that cannot be finished, so that the client sees it is cut."""


class Relay:
    """One reply on its way. Owned by the handler; `Connection` and the client's protocol call in."""

    __slots__ = (
        "_beaten_at", "_begun", "_by_sight", "_client", "_connection", "_done", "_error", "_events", "_loop",
        "_on_first_token", "_refuses", "_reply", "blocked_since", "leaves", "silence", "watch",
    )  # fmt: skip

    def __init__(
        self,
        reply: Reply,
        watch: Watch,
        client: ClientSide,
        now: float,
        *,
        on_first_token: Callable[[], None] | None = None,
        refuses: Callable[[bytes], GatewayError | None] = lambda beginning: None,
    ) -> None:
        """`refuses` judges the first bytes of a body, before the client gets any of it."""
        # Asked twice a second, once the client has something; what it returns cuts the stream.
        self.leaves: Callable[[], UpstreamError | None] | None = None
        self._on_first_token = on_first_token
        self._refuses = refuses
        self.watch = watch
        self._by_sight = watch.by_sight
        self._reply = reply
        self._connection = reply.connection  # as long as it is ours
        self._client = client
        self._begun = client.answering  # until then, a failure may be answered in another way
        self._error: GatewayError | None = None
        self._events = watch.events  # until the last tick; the rest of a stream begins with some
        assert reply.connection is not None
        self._loop = reply.connection.loop
        self._done: asyncio.Future[None] = self._loop.create_future()
        self.silence = reply.connection.silence
        self._beaten_at = now  # when the client last got anything, to half a second
        # Since when the client has not read what is ready for it, by the loop's clock; None: it reads.
        self.blocked_since: float | None = None

    async def run(self) -> GatewayError | None:
        """Relay until the stream has ended; None, or why it did not end well.

        An error returned with nothing yet sent may be answered with its own status; afterwards the
        client has already been told in its own protocol.
        Cancel: the backend's connection is closed at once and nothing more is written.
        """
        assert self._connection is not None
        self._connection.attach(self)
        try:
            await self._done
        except asyncio.CancelledError:
            if self._connection is not None:
                self._connection.abort()
            raise
        return self._error

    # --- called by the connection ---------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Pass on what the watch lets through."""
        out = self.watch.feed(data)
        if out:
            if self._begun:
                self._client.write(out)
            elif not self._begin(out):
                return
            if self._client.writing_paused:
                self.pause()
        elif self.watch.excess is not None:
            self._break(self.watch.excess)
        self._note_first_token()

    def on_chunk(self, chunk: bytes) -> bool:
        """Pass on a read that is nothing but more tokens, or exactly one chunk; False: it is to be parsed."""
        client = self._client
        if client.takes_chunks and (passed := self._by_sight(chunk)) is not None:
            client.bytes_out += len(passed)
            write = client.write_chunk  # a method that is looked up as one would cost twice as much
            write(passed)
            return True
        frame = inside(chunk)
        if not frame:
            return False
        if self._begun:
            self._pass_on(frame, chunk)
        else:
            self.on_data(frame)
        return True

    def _pass_on(self, frame: bytes, chunk: bytes) -> None:
        """Pass on a frame that is one chunk: the chunk itself, where nothing of the frame changes."""
        out, client = self.watch.feed(frame), self._client
        if out is frame and client.takes_chunks:
            client.bytes_out += len(chunk)
            client.write_chunk(chunk)
        elif out:
            client.write(out)
        elif self.watch.excess is not None:
            self._break(self.watch.excess)
        if client.writing_paused:
            self.pause()
        if self._on_first_token is not None:
            self._note_first_token()

    def _begin(self, out: bytes) -> bool:
        """Write the first bytes, behind the head, unless they are those of a failure that ends the stream."""
        watch = self.watch
        # Where it is cut, another backend goes on behind these bytes.
        failed = watch.failed and watch.cut is None
        in_order = watch.fault in IN_ORDER
        error = error_of(watch.fault, in_order=in_order) if failed else self._refuses(out)
        if error is not None:
            self._stop(error)
            return False
        if watch.between_frames and is_comment(out):  # a comment is no answer
            self._client.beat(self._reply, out)
            return True
        self._begun = True
        if self._client.started:  # a comment went ahead
            self._client.write(out)
        else:
            self._client.begin(self._reply, out)
        return True

    def _note_first_token(self) -> None:
        if self._on_first_token is not None and (self.watch.events or self.watch.answering):
            self._on_first_token()
            self._on_first_token = None

    def on_end(self, data: bytes) -> None:
        """Finish in the client's protocol; a stream that lacks its ending is a failure."""
        self._connection = None  # it carries another's request by the time this task wakes
        rest = (self.watch.feed(data) if data else b"") + self.watch.close()
        self._note_first_token()
        failure = None
        if not self.watch.complete:
            failure = self._failure("the stream ended before it was complete")
        self._finish(rest, failure)

    def on_lost(self, error: UpstreamError) -> None:
        """Tell the client in its own protocol that the backend broke off."""
        self._break(error)

    def on_tick(self, now: float) -> None:
        """Enforce silence limits and send heart-beats. Work for others excuses no silence behind a finish reason."""
        silence = self.silence
        patience = silence.patience
        if self.blocked_since is not None:
            if now - self.blocked_since >= patience.client_write_s:
                self._stop(
                    ClientStalled(f"the client did not read for {patience.client_write_s:.0f} s")
                )
            return
        if written := self.watch.events != self._events:
            self._events = self.watch.events
            self._beaten_at = now
            silence.broken(now)
        elif self.watch.answering:
            silence.answered()
        if self.leaves is not None and self._client.started and (error := self.leaves()):
            self._break(error)
            return
        if written:
            return
        said_all = self.watch.complete and now - silence.since >= silence.limit_s
        if self.watch.ended and now - silence.since >= _LAST_CHUNK_S:
            self._end_for_backend()
        elif said_all or silence.too_long(now):
            self._break(silence.error(now))
        elif now - self._beaten_at >= patience.heartbeat_s and self.watch.between_frames:
            self._beaten_at = now
            self._client.beat(self._reply, HEARTBEAT)

    # --- called by the client's protocol ----------------------------------------------------------

    def pause(self) -> None:
        """Stop reading from the backend: the client's buffer is full, or the stream is about to leave."""
        if self.blocked_since is None:
            self.blocked_since = self._loop.time()
            self.silence.suspend()
            if self._connection is not None:
                self._connection.pause()

    def resume(self) -> None:
        """The client's buffer has drained."""
        if self.blocked_since is not None:
            self.blocked_since = None
            self.silence.restart(self._loop.time())
            if self._connection is not None:
                self._connection.resume()

    def let_go(self, error: UpstreamError | None = None) -> None:
        """Read on after a `pause`, if the client reads; with an error cut the stream here: another one goes on."""
        if error is not None:
            self._break(error)
        elif not self._client.writing_paused:
            self.resume()

    def end_early(self, error: GatewayError) -> bool:
        """End the stream now for a reason of the gateway's own, which the client is told; False: it ended before."""
        if self._done.done():
            return False
        self.watch.ends_here()
        self._break(error)
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _failure(self, message: str) -> GatewayError:
        """Return why a stream did not end well. A request that its backend finds wrong is no failure of the backend."""
        watch = self.watch
        if watch.excess is not None:
            return watch.excess
        if watch.fault is not None and watch.cut is None and self._begun:
            error = error_of(watch.fault)
            if isinstance(error, RequestError):
                return error
        return self._broke(message)

    def _broke(self, message: str) -> StreamBroke:
        # A body without a length or chunks ends with its connection, also where the server crashes.
        framed = not _FRAMINGS.isdisjoint(self._reply.headers)
        error = StreamBroke(message)
        error.in_order = framed and self.watch.fault in IN_ORDER
        return error

    def _break(self, error: GatewayError) -> None:
        if self._done.done():
            return
        if self._connection is not None:
            self._connection.abort()
        if not self._begun:
            self._stop(error)
            return
        if isinstance(error, UpstreamError) and not isinstance(error, _TOLD_AS_THEY_ARE):
            error = self._broke(error.message)
        ending = self.watch.broken(fault_of(error))
        self._finish(ending, None if self.watch.complete else error)

    def _end_for_backend(self) -> None:
        """End a body whose stream has said all, and which its backend does not end."""
        if self._connection is not None:
            self._connection.abort()
        self.on_end(b"")

    def _finish(self, rest: bytes, error: GatewayError | None) -> None:
        client = self._client
        if self.watch.cut is not None:
            if rest and self._begun:
                client.write(rest)
            elif rest and not self._begin(rest):
                return
            self._stop(error)
            return
        if error is not None and not self._begun:
            if isinstance(error, UpstreamError):
                error = error_of(self.watch.fault, in_order=error.in_order)
            self._stop(error)
            return
        if not self._begun and (refused := self._refuses(rest)) is not None:
            self._stop(refused)
            return
        if not client.started:
            client.begin(self._reply)
        if error is None or self.watch.failed:  # the watch has written the ending that says so
            client.end(rest)
        else:
            client.write(rest)
            client.cut()
        self._stop(error, cut=False)

    def _stop(self, error: GatewayError | None, *, cut: bool = True) -> None:
        if self._done.done():
            return
        self._error = error
        if error is not None and self._connection is not None:
            self._connection.abort()
        if isinstance(error, ClientStalled) and cut:
            self._client.cut()
        self._done.set_result(None)
