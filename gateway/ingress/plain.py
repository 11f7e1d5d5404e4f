"""A request that Starlette answers: the routes that are not inference, and the admin listener's.

It stands on its connection like a `Downstream`, so every deadline and limit of a connection holds
for it, too. The public routes take no body: what comes of one is dropped. The admin listener's orders
have one, which is read once the app asks for it. A body that is not whole when the reply is written
closes the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import httptools
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core import aio
from gateway.ingress.heads import CLIENT_ID, header_lines

if TYPE_CHECKING:
    from gateway.core.errors import GatewayError
    from gateway.ingress.server import GatewayProtocol


@dataclass(frozen=True, slots=True)
class Takes:
    """How much of a body is taken, and how long it may take to come."""

    max_bytes: int
    within_s: float


NO_BODY: Final = Takes(0, 0.0)


class PlainRequest:
    """One request. Owned by the protocol until its reply is complete."""

    __slots__ = (
        "_body", "_expects_continue", "_head", "_more",
        "_parts", "_protocol", "_scope", "_transport", "body_complete", "cors_lines", "gone", "id", "keep_alive",
        "response_complete", "takes", "task", "writing_paused",
    )  # fmt: skip
    started: Final = False  # its reply is written in one piece

    def __init__(self, protocol: GatewayProtocol, new_id: str) -> None:
        """Take the request that the protocol has just read the head of.

        Raises:
            httptools.HttpParserInvalidURLError: its target is no path.
        """
        self._protocol = protocol
        self._transport = protocol.transport
        sent_id = dict(protocol.headers).get(b"x-request-id", b"")
        self.id = sent_id.decode() if CLIENT_ID.fullmatch(sent_id) else new_id
        self._scope = _scope(protocol, self.id)
        self.takes = NO_BODY
        self._body = bytearray()
        self._more: asyncio.Future[None] | None = None  # while the app waits for the body
        expects = dict(protocol.headers).get(b"expect", b"")
        self._expects_continue = protocol.http11 and expects.lower() == b"100-continue"
        self._head: Message = {}
        self._parts: list[bytes] = []
        self.cors_lines = b""  # for browsers
        self.keep_alive = protocol.keep_alive
        self.body_complete = False
        self.response_complete = False
        self.writing_paused = False
        self.gone = False
        self.task: asyncio.Task[None] | None = None

    # --- called by the protocol ---------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        """Keep as much of the body as may be taken; drop what comes then, or too late."""
        if len(self._body) < self.takes.max_bytes and not self.response_complete:
            self._body += data
            if len(self._body) >= self.takes.max_bytes:
                self._read_on()

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        self.body_complete = True
        self._read_on()

    def break_off(self, error: GatewayError) -> None:
        """Note that the body cannot be read on: an app that waits for it gets what there is."""
        self._read_on()

    def start(self, app: ASGIApp) -> None:
        """Have the app answer, in a task that this object owns."""
        self.task = aio.start(self._run(app), name="plain request", loop=self._protocol.loop)

    def on_client_gone(self) -> None:
        """Note that the connection is lost; end an app that waits for the body."""
        self.gone = True
        if self._more is not None and self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Do nothing: the whole reply is a few hundred bytes, or a list of models."""

    def resume_writing(self) -> None:
        """Do nothing."""

    # --- the reply ----------------------------------------------------------------------------------

    async def _run(self, app: ASGIApp) -> None:
        await aio.guarded(self._answer(app), name="plain request")
        if not self.response_complete and not self.gone:
            self._transport.abort()  # a bug that Starlette could not answer either; it is logged
        self.task = None

    async def _answer(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        """Return the body, or as much of it as may be taken.

        Raises:
            HTTPException: it does not come in time (408).
        """
        takes = self.takes
        if not self.body_complete and len(self._body) < takes.max_bytes:
            if self._expects_continue:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._more = self._protocol.loop.create_future()
            try:
                async with asyncio.timeout(takes.within_s):
                    await self._more
            except TimeoutError:
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT) from None
            finally:
                self._more = None
        return {"type": "http.request", "body": bytes(self._body), "more_body": False}

    def _read_on(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        self._parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            self._finish()

    def _finish(self) -> None:
        if self.gone or self.response_complete:
            return
        lines = header_lines((name, value) for name, value in self._head["headers"])
        lines += b"x-request-id: %b\r\n%b" % (self.id.encode(), self.cors_lines)
        if not (self.keep_alive and self.body_complete):
            lines += b"connection: close\r\n"
        body = b"" if self._scope["method"] == "HEAD" else b"".join(self._parts)
        self._transport.write(
            b"%b%b%b\r\n%b"
            % (STATUS_LINE[self._head["status"]], self._protocol.date_header(), lines, body)
        )
        self.response_complete = True
        self._protocol.on_reply_complete(self)


def _scope(protocol: GatewayProtocol, request_id: str) -> dict[str, Any]:
    target = httptools.parse_url(protocol.url)
    raw_path: bytes = target.path
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if protocol.http11 else "1.0",
        "method": protocol.parser.get_method().decode("ascii"),
        "scheme": "http",
        "server": protocol.server,
        "client": protocol.client,
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": target.query or b"",
        "headers": protocol.headers,
        "state": {"request_id": request_id},
    }
