"""A TCP proxy in front of a server that lets each event stream pass up to a point, and no further.

    client  <--  frames up to the point  --  Valve  <--  all frames  --  server

So it is certain what a client has seen of a stream, and that the stream goes on, when its server is
frozen or killed: neither the speed of the machine nor chance decides it. A busy server may put all of a
reply into fewer frames: then the frame that ends it is the first that does not pass. A reply of one or two
frames passes whole, for without its last one nothing would be said. What is not an event stream passes, and
so does the server's end: a reset, or a closed connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_FRAME_END = b"\n\n\r\n"  # vLLM's server writes each frame as a chunk of its own
_STREAMS = b"\r\ncontent-type: text/event-stream"
_LAST = (
    b'"finish_reason":"',
    b"event: message_delta\n",
    b"event: response.completed\n",
    b"event: response.incomplete\n",
)
_RESET = struct.pack("ii", 1, 0)  # close() then sends a reset
_READ_BYTES = 65_536


class Valve:
    """One listener in front of one server on loopback. Made by `valve`."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self._frames: int | None = None
        self._more_bytes = 0
        self._holds: Callable[[bytes], bool] = _any_frame
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._held: set[socket.socket] = set()
        self._loses = False
        self.streams_passing = 0  # so many have not come to the point yet
        self.streams_held = 0  # so many came to the point
        self.lost = 0  # so many requests were taken and not passed on
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold_after(
        self, frames: int, more_bytes: int = 0, holds: Callable[[bytes], bool] | None = None
    ) -> None:
        """Let so many frames of each stream that begins from now on pass, and so many bytes of the next one.

        `holds`: then as many more as it takes until it is true of one, which is the last to pass.
        """
        self._frames, self._more_bytes, self._holds = frames, more_bytes, holds or _any_frame

    def lose_next(self) -> None:
        """Take the next chat and pass it on to nobody: nothing is ever answered."""
        self._loses = True

    def cut(self) -> int:
        """Close the connections of all streams that are held, in order (FIN); return how many they were."""
        with self._lock:
            held, self._held = self._held, set()
        for each in held:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return len(held)

    def close(self) -> None:
        """End all connections, and the listener."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        both = {client, server}
        with self._lock:
            self._open |= both
        up = threading.Thread(target=self._pass_on, args=[client, server], daemon=True)
        up.start()
        try:
            self._answer(server, client)
        except OSError:  # the server's reset, or the client's
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for each in both:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        up.join()
        with self._lock:
            self._open -= both
            self._held.discard(client)
        for each in both:
            each.close()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_READ_BYTES):
                if self._loses and data.startswith(b"POST /v1/chat/"):
                    self._loses, self.lost = False, self.lost + 1
                else:
                    server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _count(self, *, passing: int = 0, held: int = 0) -> None:
        with self._lock:
            self.streams_passing += passing
            self.streams_held += held

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        """Pass on what the server says, until its end; of a stream only what may pass."""
        while data := server.recv(_READ_BYTES):
            frames, more_bytes, holds = self._frames, self._more_bytes, self._holds
            if frames is None or _STREAMS not in data.lower():
                client.sendall(data)
                continue
            said, at = data, -1
            self._count(passing=1)
            try:
                while (at := _end_of(said, frames, holds)) < 0 or len(said) < at + more_bytes:
                    client.sendall(data)
                    data = server.recv(_READ_BYTES)
                    if not data:
                        return
                    said += data
            finally:
                self._count(passing=-1)
            unsent = len(said) - len(data)
            client.sendall(said[unsent : at + more_bytes])
            self._count(held=1)
            with self._lock:
                self._held.add(client)
            while server.recv(_READ_BYTES):  # the rest passes by, and its end is seen
                pass


def _end_of(said: bytes, frames: int, holds: Callable[[bytes], bool]) -> int:
    """Return where the first frame ends, from the n-th on, that holds; -1 where it has not come yet.

    It is before the last frame of the reply in any case, and nowhere in a reply of one or two frames.
    """
    begin = at = number = 0
    while number < frames or not holds(said[begin:at]):
        begin, number = at, number + 1
        at = said.find(_FRAME_END, at) + len(_FRAME_END)
        if at < len(_FRAME_END):
            return -1
        if any(each in said[begin:at] for each in _LAST):
            return begin if number > 2 else -1
    return at


def _any_frame(frame: bytes) -> bool:
    return True


@contextlib.contextmanager
def valve(port: int) -> Iterator[Valve]:
    """Run one in front of the server at a port."""
    made = Valve(port)
    try:
        yield made
    finally:
        made.close()
