"""Servers that say what a test tells them to."""

import asyncio
import contextlib

from tests.ports import free_port


@contextlib.asynccontextmanager
async def stub(answer):
    """A server that answers each request with `answer(path)`: bytes, or None for silence."""

    async def serve(reader, writer):
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    heads.append(head)
                    reply = answer(head.split()[1].decode())
                    if reply is None:
                        await asyncio.Event().wait()
                    writer.write(reply)
                    await writer.drain()
        finally:
            writer.transport.abort()

    heads: list[bytes] = []
    tasks = set()

    def accept(reader, writer):
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # lets the transports finish closing


def page(body=b"", status="200 OK"):
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def free_url():
    """The URL of a port on which nobody listens, unless the test does."""
    return f"http://127.0.0.1:{free_port()}"
