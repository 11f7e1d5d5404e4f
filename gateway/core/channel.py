"""Calls between two processes of one gateway, in both directions, over one stream socket.

    length (4 bytes), then MessagePack: Call(id, what, args)   or   Reply(id, value, why)

Either side asks and answers. Each call is a task of the side that answers, so a slow one delays no other; those
`at_once` wait for nothing and are answered as they are read, in order. A call of number 0 wants no reply.
What cannot be read, or is too long, ends the channel: both ends are the same program.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from gateway.core.aio import READ_S, guarded, start

MOST_BYTES: Final = 64 * 1024 * 1024  # of one message: all metrics, or one page of a list
_MOST_CALLS: Final = 1024  # being answered at a time
_HEAD_BYTES: Final = 4
# The other side may leave so much unread. Beyond that it is told nothing more.
_UNREAD_BYTES: Final = 1024 * 1024

Answer = Callable[..., Awaitable[Any]]
Answers = Mapping[str, Answer]


class Unanswered(Exception):
    """The other side did not answer; whether it did what was asked is unknown. The message is for people."""


class _Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    id: int
    what: str
    args: Sequence[Any]


class _Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    id: int
    value: Any
    why: str = ""  # there is no value


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[_Call | _Reply]] = msgspec.msgpack.Decoder(_Call | _Reply)


class Channel:
    """One end. Make it, then `run` it in a task; it can be asked from then on."""

    def __init__(self, connected: socket.socket, answers: Answers) -> None:
        self._socket = connected
        self._answers = answers
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[_Reply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self.open = asyncio.Event()
        self.at_once: Mapping[str, Callable[..., Any]] = {}

    async def run(self) -> None:
        """Read until the other side goes. Cancel: closes this side."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MOST_BYTES)
        self.open.set()
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "big")
                if length > MOST_BYTES or len(self._tasks) > _MOST_CALLS:
                    return
                self._read(await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            return
        finally:
            self._close()

    async def ask(
        self, what: str, *args: Any, within_s: float, late: Callable[[Any], None] | None = None
    ) -> Any:
        """Have the other side answer, and return what it does; `late` hears an answer that came too late.

        Raises:
            Unanswered: it has gone, cannot do it, or takes longer than `within_s`.
        Cancel: it may do it nevertheless.
        """
        if self._writer is None:
            raise Unanswered("the channel is closed")
        self._number += 1
        self._send(_Call(self._number, what, args))
        waiting = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        heard = False
        try:
            await asyncio.wait([waiting], timeout=within_s)
            if not waiting.done():
                await asyncio.sleep(READ_S)
            heard = waiting.done()
        finally:
            if late is not None and not heard:
                waiting.add_done_callback(partial(_tell_late, late))
        if not heard:
            raise Unanswered(f"no answer within {within_s:g} s")
        reply = waiting.result()
        if reply.why:
            raise Unanswered(reply.why)
        return reply.value

    def tell(self, what: str, *args: Any) -> bool:
        """Have the other side do something, after what it was asked before; nobody hears whether it did.

        Returns False, and tells nothing, when it has gone or leaves too much unread.
        """
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() >= _UNREAD_BYTES:
            return False
        self._send(_Call(0, what, args))
        return True

    def _read(self, data: bytes) -> None:
        message = _DECODER.decode(data)
        if isinstance(message, _Call):
            if (answer := self.at_once.get(message.what)) is not None:
                value = answer(*message.args)
                if message.id:
                    self._send(_Reply(message.id, value))
                return
            task = start(guarded(self._answer(message), name=message.what), name=message.what)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (waiting := self._waiting.pop(message.id, None)) is not None:
            waiting.set_result(message)

    async def _answer(self, call: _Call) -> None:
        reply = _Reply(call.id, None, "it failed; its log says why")
        try:
            answer = self._answers.get(call.what)
            if answer is None:
                reply = _Reply(call.id, None, f"it does not know {call.what!r}")
            else:
                reply = _Reply(call.id, await answer(*call.args))
        except Unanswered as error:
            reply = _Reply(call.id, None, str(error) or "unanswered")
        finally:
            if call.id:
                self._send(reply)

    def _send(self, message: _Call | _Reply) -> None:
        data = _ENCODER.encode(message)
        if self._writer is not None:
            self._writer.write(len(data).to_bytes(_HEAD_BYTES, "big") + data)

    def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
        for waiting in self._waiting.values():
            waiting.set_result(_Reply(0, None, "it has gone"))
        self._waiting.clear()


def _tell_late(late: Callable[[Any], None], waiting: asyncio.Future[_Reply]) -> None:
    reply = waiting.result()
    if not reply.why:
        late(reply.value)
