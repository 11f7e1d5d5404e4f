"""A small load client on raw asyncio streams: it counts, times and leaves when told to."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Result:
    """What one request brought."""

    status: int = 0
    sent_at: float = 0.0
    first_at: float = 0.0
    ended_at: float = 0.0
    chunk_at: list[float] = field(default_factory=list)
    complete: bool = False
    body: bytes = b""  # of a reply that is no stream
    last: bytes = b""  # the last chunk of a stream
    error: bool = False  # a stream told of one


def request_bytes(
    port: int, key: str, *, model: str = "m", stream: bool, tokens: int, prompt: str = "hello"
) -> bytes:
    """Return one chat request as bytes."""
    body = json.dumps(
        {
            "model": model,
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": prompt}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, data: bytes, *, leave_after: int | None = None) -> Result:
        """Send a request and read its reply; with `leave_after`, hang up after that many chunks."""
        # The server may have closed it since the last reply.
        closed = self._reader is None or self._reader.at_eof()
        if closed or self._writer is None or self._writer.is_closing():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        result = Result(sent_at=time.monotonic())
        writer.write(data)
        if leave_after == 0:
            await asyncio.sleep(0.002)
            self.close()
            return result
        head = await reader.readuntil(b"\r\n\r\n")
        result.first_at = time.monotonic()
        result.status = int(head[9:12])
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            while True:
                size = int(await reader.readline(), 16)
                data = await reader.readexactly(size + 2)
                if size == 0:
                    break
                result.last, result.error = data, result.error or b'data: {"error"' in data
                result.chunk_at.append(time.monotonic())
                if leave_after is not None and len(result.chunk_at) >= leave_after:
                    self.close()
                    return result
        else:
            length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            result.body = await reader.readexactly(length)
        result.ended_at = time.monotonic()
        result.complete = True
        if b"connection: close" in lower:
            self.close()
        return result

    def close(self) -> None:
        """Hang up at once."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None
