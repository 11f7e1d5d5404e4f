"""Listening sockets: bound at once, or a plain OSError; and how fast clients are accepted."""

import asyncio
import contextlib
import errno
import os
import socket

import pytest
import uvicorn
import uvloop

from gateway.config.units import Listen
from gateway.core.aio import start
from gateway.ingress.listener import Server, bind, port_of, with_copies

TAKEN = os.strerror(errno.EADDRINUSE)


def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect(address)
        return True


def leave_behind(path):
    """Make a socket file that nobody listens on, as a killed process leaves it."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.is_socket()


def test_port_zero_is_a_port_of_the_systems_choice():
    with bind(Listen("127.0.0.1", 0)) as listener:
        port = port_of(listener)
        assert port > 0
        assert connects(socket.AF_INET, ("127.0.0.1", port))


def test_a_listener_never_blocks_the_loop():
    with bind(Listen("127.0.0.1", 0)) as listener:
        assert listener.getblocking() is False
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_taken_port_is_an_error_at_once():
    with bind(Listen("127.0.0.1", 0)) as first, pytest.raises(OSError, match=TAKEN):
        bind(Listen("127.0.0.1", port_of(first)))


def test_an_address_that_is_not_ours_is_an_error():
    with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
        bind(Listen("203.0.113.1", 0))  # TEST-NET-3: nobody's


def test_a_port_is_free_again_right_after_its_last_connection():
    with bind(Listen("127.0.0.1", 0)) as first:
        port = port_of(first)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            served, _ = first.accept()
            served.close()  # the server closes first: the port stays in TIME_WAIT
    with bind(Listen("127.0.0.1", port)) as again:
        assert port_of(again) == port


def test_an_ipv6_address_is_bound_as_such():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with bind(Listen("::1", 0)) as listener:
        assert listener.family is socket.AF_INET6
        assert connects(socket.AF_INET6, ("::1", port_of(listener)))


def test_a_unix_path_is_bound_and_has_no_port(tmp_path):
    path = tmp_path / "gw.sock"
    with bind(Listen(unix=path)) as listener:
        assert path.is_socket()
        assert port_of(listener) == 0
        assert connects(socket.AF_UNIX, str(path))


def test_a_stale_socket_file_is_taken_over(tmp_path):
    path = tmp_path / "gw.sock"
    leave_behind(path)
    with bind(Listen(unix=path)):
        assert connects(socket.AF_UNIX, str(path))


def test_a_socket_that_somebody_listens_on_is_left_alone(tmp_path):
    path = tmp_path / "gw.sock"
    with bind(Listen(unix=path)) as first:
        with pytest.raises(OSError, match=TAKEN):
            bind(Listen(unix=path))
        assert connects(socket.AF_UNIX, str(path))
        first.accept()[0].close()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("keep me")
    with contextlib.suppress(OSError):
        bind(Listen(unix=path)).close()
    assert path.is_file()
    assert path.read_text() == "keep me"


def test_a_unix_path_in_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        bind(Listen(unix=tmp_path / "missing" / "gw.sock"))


def test_a_unix_path_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(OSError, match="too long"):
        bind(Listen(unix=tmp_path / ("x" * 200)))


def test_many_clients_are_accepted_in_few_turns_of_the_loop_and_none_once_it_leaves():
    """A busy loop has some twenty turns a second, and libuv accepts one connection in each."""

    async def accept():
        accepted = []

        class Client(asyncio.Protocol):
            def __init__(self, **kwargs):
                pass

            def connection_made(self, transport):
                accepted.append(transport)

        server = Server(uvicorn.Config(None, http=Client, loop="none", lifespan="off"))
        listener = bind(Listen("127.0.0.1", 0))
        address = listener.getsockname()
        serving = start(server.serve(sockets=with_copies(listener)), name="server")
        while not server.started:
            await asyncio.sleep(0)
        with contextlib.ExitStack() as stack:
            for _ in range(250):
                stack.enter_context(socket.create_connection(address, timeout=5))
            turns = 0
            while len(accepted) < 250:
                await asyncio.sleep(0)
                turns += 1
        server.leave()
        await serving
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        for transport in accepted:
            transport.abort()
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(accept()) < 10
