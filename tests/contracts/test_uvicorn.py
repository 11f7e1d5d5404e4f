"""What `gateway.ingress.server` leans on inside uvicorn, and why it exists at all.

When one of these fails after an upgrade, read `gateway/decisions/001` first.
"""

import asyncio
import contextlib
import inspect
import os
import socket

import httptools
import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


def make_protocol(app=None) -> HttpToolsProtocol:
    config = uvicorn.Config(
        app or (lambda scope: None), http="httptools", ws="none", lifespan="off"
    )
    server = uvicorn.Server(config)
    return HttpToolsProtocol(config=config, server_state=server.server_state, app_state={})


def make_protocol_in_a_loop() -> HttpToolsProtocol:
    async def main():
        return make_protocol()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    [
        "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "on_header",
        "on_headers_complete", "on_body", "on_message_complete", "on_message_begin", "eof_received", "shutdown",
    ],
)  # fmt: skip
def test_the_protocol_still_has_what_we_override(name):
    assert callable(getattr(HttpToolsProtocol, name))


def test_the_protocol_still_has_the_state_we_read():
    async def main():
        protocol = make_protocol()
        for name in ("parser", "transport", "flow", "pipeline", "cycle", "loop", "server_state"):
            assert hasattr(protocol, name), name
        assert protocol.cycle is None
        assert len(protocol.pipeline) == 0

    asyncio.run(main())


def test_the_server_stops_a_protocol_by_what_our_requests_have():
    source = inspect.getsource(HttpToolsProtocol.shutdown)
    assert "self.cycle.response_complete" in source
    assert "self.cycle.keep_alive = False" in source


def test_a_client_that_closes_its_side_has_left():
    assert make_protocol_in_a_loop().eof_received() is None


def test_the_loop_takes_in_one_connection_before_it_accepts_the_next():
    """The reason why a burst cannot use up all descriptors before the first one is refused."""
    accepted = []

    class Count(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.append(len(os.listdir("/proc/self/fd")))
            transport.abort()

    async def main():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Count, "127.0.0.1", 0)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                address = server.sockets[0].getsockname()
                stack.enter_context(socket.create_connection(address))
            while len(accepted) < 20:
                await asyncio.sleep(0)
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert max(accepted) - min(accepted) <= 2


def test_the_date_is_the_first_default_header():
    async def main():
        config = uvicorn.Config(
            lambda scope: None, server_header=False, lifespan="off", loop="none"
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[])
        await server.on_tick(0)
        assert server.server_state.default_headers[0][0] == b"date"

    asyncio.run(main())


def test_status_lines_cover_what_we_answer():
    for status in (200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 502, 503, 504):
        assert STATUS_LINE[status].startswith(b"HTTP/1.1 %d " % status)


def test_without_us_there_is_no_cap_on_a_request_head():
    """The reason for `ClientLimits`: uvicorn with httptools takes any number of headers of any size."""
    headers = []

    class Collect:
        def on_header(self, name, value):
            headers.append((name, value))

    parser = httptools.HttpRequestParser(Collect())
    parser.feed_data(
        b"GET / HTTP/1.1\r\n"
        + b"".join(b"x-%d: %b\r\n" % (i, b"v" * 1000) for i in range(1000))
        + b"\r\n"
    )
    assert len(headers) == 1000
    assert "max_header" not in inspect.getsource(HttpToolsProtocol)


def test_llhttp_refuses_conflicting_lengths_and_loose_chunk_sizes():
    for head in (
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0_3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: \x0bchunked\r\n\r\n",
    ):
        parser = httptools.HttpRequestParser(object())
        with pytest.raises(httptools.HttpParserError):
            parser.feed_data(head)


def test_a_client_that_leaves_is_invisible_to_an_app_that_does_not_listen():
    """The reason for `connection_lost` in our protocol: send() after a disconnect returns silently."""

    async def main():
        sends_after_leaving = 0
        left = asyncio.Event()

        async def app(scope, receive, send):
            nonlocal sends_after_leaving
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await left.wait()
            for _ in range(3):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                sends_after_leaving += 1
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", loop="none", log_config=None, port=0
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        while not server.server_state.tasks:
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        while server.server_state.connections:
            await asyncio.sleep(0)
        left.set()
        await asyncio.wait(set(server.server_state.tasks))
        await server.shutdown()
        assert sends_after_leaving == 3

    asyncio.run(main())


def test_the_server_runs_the_loop_we_override_until_its_tick_says_so():
    source = inspect.getsource(uvicorn.Server._serve)
    assert "await self.main_loop()" in source
    assert "self.should_exit" in inspect.getsource(uvicorn.Server.on_tick)


def test_the_parser_stops_behind_a_head_that_offers_another_protocol():
    """The reason for `GatewayProtocol._parse`: what follows is not parsed, and the head has ended."""
    ended = []

    class Collect:
        def on_message_complete(self):
            ended.append(True)

        def on_body(self, body):
            raise AssertionError("the body was parsed")

    parser = httptools.HttpRequestParser(Collect())
    head = b"POST / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n"
    with pytest.raises(httptools.HttpParserUpgrade) as stopped:
        parser.feed_data(head + b"{}")
    assert stopped.value.args == (len(head),)
    assert parser.should_upgrade()
    assert ended == [True]


def test_the_only_leniency_of_uvicorns_parser_is_data_after_close():
    source = inspect.getsource(HttpToolsProtocol.__init__)
    assert source.count("lenient_") == 1
    assert "set_dangerous_leniencies(lenient_data_after_close=True)" in source
