"""A request of the routes that are not inference: answered by Starlette, from memory and at once.

It stands on its connection like a `Downstream`, so every deadline and limit of a connection holds
for it, too. These routes take no body: what comes of one is dropped, and a body that is not whole
when the reply is written closes the connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core import aio
from gateway.ingress.heads import CLIENT_ID

if TYPE_CHECKING:
    from gateway.core.errors import GatewayError
    from gateway.ingress.server import GatewayProtocol


class PlainRequest:
    """One request. Owned by the protocol until its reply is complete."""

    __slots__ = (
        "_head", "_parts", "_protocol", "_scope", "_transport", "body_complete", "gone", "id", "keep_alive",
        "response_complete", "task", "writing_paused",
    )  # fmt: skip

    def __init__(
        self, protocol: GatewayProtocol, new_id: str, http11: bool, keep_alive: bool
    ) -> None:
        """Take the request that the protocol's parser has just read the head of.

        Raises:
            httptools.HttpParserInvalidURLError: its target is no path.
        """
        self._protocol = protocol
        self._transport = protocol.transport
        sent_id = dict(protocol.headers).get(b"x-request-id", b"")
        self.id = sent_id.decode() if CLIENT_ID.fullmatch(sent_id) else new_id
        self._scope = _scope(protocol, self.id, "1.1" if http11 else "1.0")
        self._head: Message = {}
        self._parts: list[bytes] = []
        self.keep_alive = keep_alive
        self.body_complete = False
        self.response_complete = False
        self.writing_paused = False
        self.gone = False
        self.task: asyncio.Task[None] | None = None

    # --- called by the protocol ---------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        """Drop body bytes."""

    def on_message_complete(self) -> None:
        """The body is whole."""
        self.body_complete = True

    def break_off(self, error: GatewayError) -> None:
        """The body cannot be read on; the reply does not depend on it."""

    def start(self, app: ASGIApp) -> None:
        """Have the app answer, in a task that this object owns."""
        self.task = aio.start(self._run(app), name="plain request", loop=self._protocol.loop)

    def on_client_gone(self) -> None:
        """The connection is lost."""
        self.gone = True

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
        await app(self._scope, _receive, self._send)

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
        headers = self._head["headers"]
        lines = b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])
        lines += b"x-request-id: %b\r\n" % self.id.encode()
        if not (self.keep_alive and self.body_complete):
            lines += b"connection: close\r\n"
        body = b"" if self._scope["method"] == "HEAD" else b"".join(self._parts)
        self._transport.write(
            b"%b%b%b\r\n%b"
            % (STATUS_LINE[self._head["status"]], self._protocol.date_header(), lines, body)
        )
        self.response_complete = True
        self._protocol.on_reply_complete(self)


async def _receive() -> Message:
    """Return an empty body: these routes take none."""
    return {"type": "http.request", "body": b"", "more_body": False}


def _scope(protocol: GatewayProtocol, request_id: str, http_version: str) -> dict[str, Any]:
    target = httptools.parse_url(protocol.url)
    raw_path: bytes = target.path
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": http_version,
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
