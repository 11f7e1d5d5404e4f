"""Bytes to a gateway and whole replies back, for what HTTP clients cannot send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """One reply as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> Any:
        """The code of an error in OpenAI's form."""
        return json.loads(self.body)["error"]["code"]

    @property
    def message(self) -> str:
        """The message of an error in OpenAI's form."""
        return json.loads(self.body)["error"]["message"]


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, head_only: bool = False) -> Answer:
        """Return the next reply; EOFError when the connection closed before it."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        body = b""
        if "content-length" in headers and not head_only:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        return Answer(int(first.split()[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    async def closed(self) -> bool:
        """Whether the other side closes without another byte."""
        return await self.reader.read() == b""


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    """Open a raw connection to a port of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def request(
    method: str = "GET",
    target: str = "/v1/models",
    body: bytes = b"",
    *,
    key: str | None = None,
    lines: tuple[str, ...] = (),
) -> bytes:
    """Return one request; a body gets its length, and is JSON."""
    head = [f"{method} {target} HTTP/1.1", "Host: gateway", *lines]
    if key is not None:
        head.append(f"Authorization: Bearer {key}")
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def chat_body(text: str = "hello", **more: object) -> bytes:
    """Return the body of a chat with the pool `m`."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "m", "max_tokens": 2, "messages": messages, **more}).encode()
