"""The client's side of an upload: how far it is read, what is held, whose time runs."""

import asyncio
import socket

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.core.errors import BodyTimeout, BodyTooLarge, RequestError
from gateway.ingress.upload import Upload
from gateway.wire.forms import FormReader
from tests.unit.test_forms import FORM, field, file, form
from tests.uploads import held_bytes

KIB = 1024


class Transport:
    """A client's connection, as far as an upload looks at it."""

    def __init__(self, sock):
        self.sock = sock
        self.reading = True
        self.aborted = asyncio.Event()

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.aborted.is_set()

    def abort(self):
        self.aborted.set()

    def get_extra_info(self, name):
        return self.sock


class Connection:
    """A backend's connection that takes everything."""

    _transport = None

    def __init__(self):
        self.got = b""
        self.whole = False
        self.error = None

    def send(self, data):
        self.got += data

    def finish(self):
        self.whole = True

    def refuse(self, error):
        self.error = error
        return True


def run(test, *, content_length=None, limit_bytes=KIB * KIB, timeout_s=5.0):
    async def main():
        ours, client = socket.socketpair()
        with ours, client:
            transport = Transport(ours)
            upload = Upload(
                FormReader(FORM),
                FlowControl(transport),
                transport,
                content_length=content_length,
                limit_bytes=limit_bytes,
                timeout_s=timeout_s,
            )
            try:
                async with asyncio.timeout(5):
                    await test(upload, transport, client)
            finally:
                upload.close()

    asyncio.run(main())


MODEL = field(b"model", b"w")
BODY = form(MODEL, file(b"\0" * 500 * KIB))


def test_the_head_is_whatever_came_until_the_model_and_a_file_were_seen():
    async def test(upload, transport, client):
        async with asyncio.TaskGroup() as group:
            head = group.create_task(upload.read_head())
            upload.on_data(BODY[:50])
            await asyncio.sleep(0)
            upload.on_data(BODY[50:80])
            await asyncio.sleep(0)
            assert not head.done()
            upload.on_data(BODY[80:300])
        assert head.result() == BODY[:300]
        assert upload.form.fields == {"model": "w"}
        assert upload.left_bytes is None

    run(test)


def test_while_a_backend_is_chosen_reading_stops_and_goes_on_with_it():
    async def test(upload, transport, client):
        upload.on_data(BODY[:300])
        head = await upload.read_head()
        at = 300
        while transport.reading:
            upload.on_data(BODY[at : at + 30 * KIB])
            at += 30 * KIB
        assert 64 * KIB <= held_bytes(upload) < 128 * KIB
        connection = Connection()
        held = upload.flow_into(connection)
        assert head + held == BODY[:at]
        assert transport.reading
        assert upload.left_bytes == len(BODY) - at
        upload.on_data(BODY[at:])
        upload.on_end()
        await asyncio.sleep(0)
        assert head + held + connection.got == BODY
        assert connection.whole
        assert held_bytes(upload) < 100

    run(test, content_length=len(BODY))


def test_a_head_that_came_with_much_more_stops_reading_at_once():
    async def test(upload, transport, client):
        upload.on_data(BODY[: 200 * KIB])
        assert not transport.reading
        assert await upload.read_head() == BODY[: 200 * KIB]
        assert upload.flow_into(Connection()) == b""
        assert transport.reading

    run(test)


def test_a_body_that_ended_while_it_was_held_has_a_known_length():
    async def test(upload, transport, client):
        upload.on_data(BODY[:300])
        await upload.read_head()
        upload.on_data(BODY[300:])
        upload.on_end()
        assert transport.reading
        assert upload.left_bytes == len(BODY) - 300
        connection = Connection()
        assert upload.flow_into(connection) == BODY[300:]
        assert upload.left_bytes == 0
        await asyncio.sleep(0)
        assert (connection.got, connection.whole) == (b"", False)

    run(test)


def test_a_failure_while_it_was_held_is_told_when_it_would_be_sent():
    async def test(upload, transport, client):
        upload.on_data(BODY[:300])
        await upload.read_head()
        upload.on_data(b"\r\n--XX\r\n" + MODEL[0] + b"\r\n\r\n")
        upload.on_end()
        assert upload.left_bytes != 0
        with pytest.raises(RequestError, match="`model` must be one"):
            upload.flow_into(Connection())

    run(test)


def test_too_many_bytes_are_told_at_once():
    async def test(upload, transport, client):
        upload.on_data(b"--XX\r\n" + file(b"")[0] + b"\r\n\r\n")
        upload.on_data(b"x" * 2000)
        with pytest.raises(BodyTooLarge, match="2000 bytes"):
            await upload.read_head()
        upload.on_data(b"x" * 2000)
        assert held_bytes(upload) < 200

    run(test, limit_bytes=2000)


def test_the_clients_time_stands_still_while_nothing_is_read():
    async def test(upload, transport, client):
        upload.on_data(BODY[:300])
        await upload.read_head()
        connection = Connection()
        upload.flow_into(connection)
        upload.pause()
        assert not transport.reading
        await asyncio.sleep(0.1)
        assert connection.error is None
        upload.resume()
        assert transport.reading
        while connection.error is None:
            await asyncio.sleep(0.01)
        assert isinstance(connection.error, BodyTimeout)

    run(test, timeout_s=0.05)


def test_a_client_that_leaves_while_nothing_is_read_is_noticed():
    async def test(upload, transport, client):
        upload.on_data(BODY[:300])
        await upload.read_head()
        upload.pause()
        client.close()
        for _ in range(25):  # looks; a machine that stands still does not use them up
            if transport.aborted.is_set():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nobody noticed")

    run(test)


def test_a_closed_upload_reads_on_and_drops_what_comes():
    async def test(upload, transport, client):
        upload.on_data(BODY[: 200 * KIB])
        assert not transport.reading
        upload.close()
        assert transport.reading
        upload.on_data(BODY[200 * KIB :])
        upload.on_end()
        await asyncio.sleep(0)
        assert held_bytes(upload) < 100

    run(test)
