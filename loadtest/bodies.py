"""What one large body costs everybody else: the longest gap of the loop, and the memory.

    python -m loadtest.bodies [MIB]

Each case is one request of so many MiB (64 unless said) with a valid key, sent by a process of its
own to a gateway in another. The gap is the most that the gateway's process computed between two turns
of a ticker on its loop, in processor time, so that a busy machine does not count. To hold: 50 ms, and
three times the body in memory.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from gateway.access.filestore import FileKeys
from gateway.app import build
from gateway.config.load import load_config
from gateway.observe.outlet import Outlet
from gateway.running import run

TICK_S = 0.001
IMAGE = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,'


def cases(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each case."""

    def many(unit: bytes) -> bytes:
        return unit * (size // len(unit))

    def chat(content: bytes) -> bytes:
        return b'{"model":"m","messages":[{"role":"user","content":' + content + b"}]}"

    path = "/v1/chat/completions"
    yield "content: [{},{},...]", path, chat(b"[" + many(b"{},") + b"{}]")
    yield "messages: [{},...]", path, b'{"model":"m","messages":[' + many(b"{},") + b"{}]}"
    yield (
        "prompt: [[1],...]",
        "/v1/completions",
        b'{"model":"m","prompt":[' + many(b"[1],") + b"[1]]}",
    )
    yield 'input: ["",...]', "/v1/embeddings", b'{"model":"m","input":[' + many(b'"",') + b'""]}'
    yield "input: [{},...]", "/v1/responses", b'{"model":"m","input":[' + many(b"{},") + b"{}]}"
    yield "keys", path, b'{"model":"m",' + many(b'"abcdefghijklmnop":1,') + b'"b":1}'
    yield "token ids", "/v1/completions", b'{"model":"m","prompt":[' + many(b"1,") + b"1]}"
    yield "depth", path, b'{"model":"m","messages":' + many(b"[")
    yield "tools: [{},...]", path, b'{"model":"m","messages":[],"tools":[' + many(b"{},") + b"{}]}"
    yield "tools, one text", path, b'{"model":"m","messages":[],"tools":["' + many(b"x") + b'"]}'
    yield "schema", path, b'{"model":"m","messages":[],"response_format":[' + many(b"{},") + b"{}]}"
    yield "text, ASCII", path, chat(b'"' + many(b"word ") + b'"')
    yield "text, not ASCII", path, chat(b'"' + many("é".encode()) + b'"')
    yield "text, escapes", path, chat(b'"' + many(b"\\n") + b'"')
    yield "texts of 1 KiB", "/v1/embeddings", b'{"model":"m","input":[' + many(b'"' + b"x" * 1021 + b'",') + b'""]}'  # fmt: skip
    yield "white space", path, b'{"model":"m","messages":[]' + many(b" ") + b"}"
    yield "an image", path, chat(b"[" + IMAGE + many(b"QUJD") + b'"}}]')
    yield "an image, renamed", path, chat(b"[" + IMAGE + many(b"QUJD") + b'"}}]').replace(b'"m"', b'"a"', 1)  # fmt: skip
    yield "another model", path, chat(b'"' + many(b"word ") + b'"').replace(b'"m"', b'"z"', 1)


def serve(pipe: Connection, size: int, backend: int) -> None:
    """Run a gateway that tells its port, and at each word its longest gap and its memory since."""

    async def main() -> None:
        folder = Path(tempfile.mkdtemp())
        path = folder / "gateway.yaml"
        path.write_text(
            "version: 1\nlisten: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nkeys: {file: keys.yaml}\n"
            f"log: {{access: false}}\nlimits: {{max_body: {size + 4096}B, bodies: 1GiB}}\nshutdown: {{grace: 0s}}\n"
            f'pools: {{m: {{aliases: [a], backends: ["http://127.0.0.1:{backend}"]}}}}\n'
        )
        made = await FileKeys(folder / "keys.yaml", dict, time.time).create({"name": "load"})
        process = build(load_config(path), path, Outlet())
        gap = peak = 0.0

        async def tick() -> None:
            nonlocal gap, peak
            last = time.process_time()
            while True:
                await asyncio.sleep(TICK_S)
                now = time.process_time()
                gap, last = max(gap, now - last), now
                peak = max(peak, memory_mib())

        async with asyncio.TaskGroup() as group:
            group.create_task(run(process))
            await process.listening.wait()
            while not process.readiness().ready:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            ticker = group.create_task(tick())
            pipe.send((process.public_port, made.key))
            loop = asyncio.get_running_loop()
            word = asyncio.Event()
            loop.add_reader(pipe.fileno(), word.set)
            while True:
                await word.wait()
                loop.remove_reader(pipe.fileno())
                if pipe.recv() is None:
                    break
                pipe.send((gap, peak, memory_mib()))
                gap = peak = 0.0
                word.clear()
                loop.add_reader(pipe.fileno(), word.set)
            ticker.cancel()
            process.stopping.set()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


MODELS = b'{"object":"list","data":[{"id":"m","object":"model","root":"m","parent":null,"max_model_len":4096}]}'


def engine(pipe: Connection) -> None:
    """Run a backend that reads whatever comes, and tells its port."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length: " in head:
                    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                body = MODELS if b" /v1/models " in head else b"{}"
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )

    async def main() -> None:
        server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(main())


def memory_mib() -> float:
    """Return this process's resident memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20


def post(port: int, path: str, body: bytes, key: str) -> int:
    """Send one request; return its status."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sent:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        sent.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        with suppress(OSError):  # it has answered already
            sent.sendall(body)
        try:
            return int(sent.recv(65536).split()[1])
        except (OSError, IndexError):
            return 0


def started(
    target: Callable[..., None], *args: object
) -> tuple[multiprocessing.Process, Connection]:
    """Start a process with a pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(theirs, *args), daemon=True
    )
    process.start()
    return process, ours  # type: ignore[return-value]


def main() -> None:
    """Run all cases and print a table."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    backend, pipe = started(engine)
    gateway, asked = started(serve, mib << 20, pipe.recv())
    port, key = asked.recv()
    print(
        f"{'case, ' + str(mib) + ' MiB':24}{'status':>7}{'gap ms':>9}{'memory MiB':>12}{'took ms':>9}"
    )
    worst = 0.0
    for name, path, body in cases(mib << 20):
        asked.send("begin")
        before = asked.recv()[2]
        began = time.perf_counter()
        status = post(port, path, body, key)
        took = time.perf_counter() - began
        time.sleep(0.1)
        asked.send("end")
        gap, peak, _ = asked.recv()
        worst = max(worst, gap)
        print(
            f"{name:24}{status:>7}{gap * 1e3:9.1f}{max(0.0, peak - before):12.0f}{took * 1e3:9.0f}",
            flush=True,
        )
    asked.send(None)
    gateway.join(10)
    backend.terminate()
    print(json.dumps({"mib": mib, "worst_gap_ms": round(worst * 1e3, 1)}))


if __name__ == "__main__":
    main()
