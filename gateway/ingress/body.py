"""A JSON body as it comes from its client: whole if it is small, else part by part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.core.aio import InTime
from gateway.core.errors import BodyTimeout, GatewayError
from gateway.ingress.upload import too_large
from gateway.wire.small import SMALL_BODY_BYTES

_PIECE_BYTES: Final = 4096  # smaller ones are put together
# A wait that succeeds so long after its end: this process did not run, or its loop was held up.
_STOOD_STILL_S: Final = 1.0


class Body(msgspec.Struct, eq=False):
    """One body. Owned by its request; large ones are read by `ingress.bodies`."""

    _parts: list[bytes | bytearray] = []
    _limit_bytes: float = math.inf
    _enough_bytes: float = math.inf  # once so many came, the waiter is woken
    left_s: float = 0.0  # time that the client has left
    _waiter: asyncio.Future[None] | None = None
    error: GatewayError | None = None
    came_bytes: int = 0
    complete: bool = False
    content_length: int | None = None
    on_wanted: Callable[[], None] | None = None  # called once, when its bytes are awaited

    @classmethod
    def of(cls, whole: bytes) -> Body:
        """Return a body that came in one piece."""
        return cls([whole], came_bytes=len(whole), complete=True)

    # --- the request's side -------------------------------------------------------------------------

    async def read(
        self, limit_bytes: int, timeout_s: float, content_length: int | None
    ) -> bytes | None:
        """Return the whole body; None when it is not short.

        A longer one comes by `next_part`, and all of it must come within `timeout_s`.

        Raises:
            BodyTooLarge: it has more than `limit_bytes`, or its Content-Length says so (413).
            BodyTimeout: not whole within `timeout_s` (408).
            GatewayError: what comes of it cannot be read on (400, 431).
        Cancel: nothing is held.
        """
        self._limit_bytes, self.left_s, self.content_length = limit_bytes, timeout_s, content_length
        if (content_length or 0) > limit_bytes:
            raise too_large(limit_bytes)
        if (content_length or 0) <= SMALL_BODY_BYTES:
            await self._reaches(SMALL_BODY_BYTES + 1)
        return self.at_hand()

    def at_hand(self) -> bytes | None:
        """Take the body if it is whole and short; return None, and take nothing, if it is not."""
        if not self.complete or self.came_bytes > SMALL_BODY_BYTES or self.error is not None:
            return None
        body = b"".join(self._parts)
        self._parts.clear()
        return body

    def put_back(self, body: bytes) -> None:
        """Have a body that was taken come by `next_part` after all."""
        self._parts.append(body)

    async def next_part(self) -> bytes | bytearray | None:
        """Return what came next of a large body; None at its end.

        Raises:
            BodyTooLarge, BodyTimeout, GatewayError: see `read`.
        Cancel: nothing is held.
        """
        await self._reaches(self.came_bytes + (0 if self._parts else SMALL_BODY_BYTES))
        return self._parts.pop(0) if self._parts else None

    def take(self) -> list[bytes | bytearray]:
        """Return what came so far, and hold nothing of it."""
        parts, self._parts = self._parts, []
        return parts

    async def _reaches(self, size: float) -> None:
        """Wait until so many bytes came, or the body is whole or too large. Only this is the client's time."""
        size = min(size, self._limit_bytes + 1)
        if not self.complete and self.came_bytes < size and self.error is None:
            on_wanted, self.on_wanted = self.on_wanted, None
            if on_wanted is not None:
                on_wanted()
            loop = asyncio.get_running_loop()
            began, self._enough_bytes = loop.time(), size
            self._waiter = loop.create_future()
            try:
                async with InTime(self.left_s):
                    await self._waiter
            except TimeoutError:
                raise BodyTimeout(
                    f"The request body did not arrive in time: only {self.came_bytes} bytes were "
                    "received within the limit (`timeouts.body`)."
                ) from None
            finally:
                self._waiter = None
                passed_s = loop.time() - began
                if passed_s < self.left_s + _STOOD_STILL_S:  # else it was not the client's time
                    self.left_s -= passed_s
        if self.error is not None:
            raise self.error
        if self.came_bytes > self._limit_bytes:
            raise too_large(int(self._limit_bytes))

    # --- the client's side --------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Keep body bytes; those of a body that is over its limit are dropped."""
        self.came_bytes += len(data)
        if self.came_bytes > self._limit_bytes:
            self._parts.clear()
            self._wake()
            return
        parts = self._parts
        if parts and len(data) < _PIECE_BYTES:
            last = parts[-1]
            if isinstance(last, bytearray) and len(last) < SMALL_BODY_BYTES:
                last += data
            else:
                parts.append(bytearray(data))
        else:
            parts.append(data)
        if self.came_bytes >= self._enough_bytes:
            self._wake()

    def on_end(self) -> None:
        """Note that the body is whole."""
        self.complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self, error: GatewayError) -> None:
        """Note that what comes of it cannot be read on."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
