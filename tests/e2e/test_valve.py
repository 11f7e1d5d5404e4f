"""The valve holds a stream where it is asked to, and never a reply that would then say nothing."""

import contextlib
import socket
import threading

import pytest

from tests.e2e.valve import valve

pytestmark = pytest.mark.e2e

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def frame(text, finish="null"):
    """Return a frame as vLLM's server writes it: a chunk of its own."""
    data = b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\n\n' % (
        text.encode(),
        finish.encode(),
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = frame("z", '"length"') + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def passed(answer, frames):
    """Return what a client receives of an answer, up to where it is held or its end."""
    with socket.create_server(("127.0.0.1", 0)) as server, valve(server.getsockname()[1]) as made:
        made.hold_after(frames)

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=serve).start()
        with socket.create_connection(made.url.removeprefix("http://").split(":")) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(65_536):
                    received += data
        return received, made.streams_held


def test_a_stream_is_held_after_its_frames():
    head = HEAD + frame("a") + frame("b")
    assert passed(head + frame("c") + frame("d") + LAST, 2) == (head, 1)


def test_the_last_frame_is_held_where_fewer_came():
    head = HEAD + frame("a") + frame("b")
    assert passed(head + LAST, 12) == (head, 1)


@pytest.mark.parametrize("begin", [HEAD, HEAD + frame("a")])
def test_a_reply_in_one_or_two_frames_passes_whole(begin):
    assert passed(begin + LAST, 12) == (begin + LAST, 0)
