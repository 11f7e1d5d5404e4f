"""Audio uploads are sent on as they come, and are checked to their last byte."""

import asyncio
import contextlib
import socket
import struct

import pytest

from gateway.core.limits import KeyLimits
from gateway.core.types import Phase
from gateway.process import reload
from tests import keyfiles as keys
from tests import loopback
from tests.stories.support import FAST, gateway, story
from tests.uploads import held_bytes

PATH = "/v1/audio/transcriptions"
MODEL = (b'name="model"', b"m")
MIB = 1024 * 1024
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def sound(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)


def form(*parts):
    body = b"".join(
        b"--XX\r\nContent-Disposition: form-data; " + name + b"\r\n\r\n" + value + b"\r\n"
        for name, value in parts
    )
    return body + b"--XX--\r\n"


def file(size):
    return b'name="file"; filename="a.wav"', sound(size)


class Wire:
    """Stands before a simulated backend, sees what reaches it, and can stop reading or answer itself."""

    def __init__(self):
        self.uploaded = 0  # bytes that came in on connections that carry an upload
        self.connections = 0  # that carried one
        self.closed = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.answer = None  # instead of the backend's, as soon as an upload's head is there
        self.target = 0
        self._uploads = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 * 1024)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self.server.close()

    def break_off(self):
        for writer in self._uploads:
            writer.transport.abort()

    async def _serve(self, reader, writer):
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            returning = group.create_task(self._return(there, writer))
            try:
                await self._carry(reader, writer, back)
            except ConnectionError:
                self.closed.set()
            finally:
                returning.cancel()
                back.close()
                writer.close()

    async def _carry(self, reader, writer, back):
        uploads = False
        while data := await reader.read(64 * 1024):
            if data.startswith(b"POST /v1/audio"):
                uploads = True
                self.connections += 1
                self._uploads.append(writer)
                if self.answer is not None:
                    writer.write(self.answer)
            if uploads:
                self.uploaded += len(data)
                await self.reading.wait()
            if self.answer is None or not uploads:
                back.write(data)
                await back.drain()
        if uploads:
            self.closed.set()

    async def _return(self, there, writer):
        with contextlib.suppress(ConnectionError):
            while data := await there.read(64 * 1024):
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def wired(extra="", alias=None):
    """A gateway whose only backend is reached through a `Wire`."""
    async with Wire() as wire:
        name = alias or "m"
        pools = (
            f"pools: {{{name}: {{backends: ['http://127.0.0.1:{wire.port}'], served_model: m}}}}"
        )
        async with gateway(FAST, pools=pools, extra=extra, wait=False) as world:
            wire.target = world.sims[0].port
            await world.ready(1)
            yield world, wire


class Client:
    """One upload over a plain socket, so that a test decides which bytes go when."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, world, length=None, more=b"", *, first=b""):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", world.process.public_port
        )
        framing = (
            b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        )
        self.chunked = length is None
        self.writer.write(
            b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n%b%b\r\n"
            b"content-type: multipart/form-data; boundary=XX\r\n\r\n"
            % (PATH.encode(), world.key.encode(), more, framing)
            + first
        )
        try:
            yield self
        finally:
            self.writer.close()

    async def send(self, data):
        if self.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self):
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), head, await self.reader.readexactly(length)


def received(world):
    return world.sims[0].received(PATH)


def upload_of(world):
    return next((each.upload for each in world.process.ingress.live if each.upload), None)


@story
async def test_the_backend_gets_the_first_bytes_before_the_client_has_sent_the_last():
    body = form(MODEL, (b'name="language"', b"en"), file(MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        await client.send(body[:100_000])
        await world.until(lambda: wire.uploaded >= 100_000)
        assert received(world) == []
        await client.send(body[100_000:])
        status, head, text = await client.reply()
        assert status == 200, text
        assert b"x-gateway-attempts: 1" in head
        assert received(world)[0].body == body
        assert received(world)[0].header("content-length") == str(len(body))
        await world.settled()


@story
async def test_operators_are_told_of_uploads_that_are_on_their_way():
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire), Client.open(world) as client:

        async def told():
            async with loopback.client(base_url=world.admin_url) as http:
                overview = (await http.get("/admin/v1/overview")).json()
            (backend,) = overview["pools"][0]["backends"]
            return backend["in_flight"], backend["uploading"]

        await client.send(body)
        await world.until(lambda: wire.connections)
        assert await told() == (1, 1)
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reply())[0] == 200
        await world.settled()
        assert await told() == (0, 0)


@story
async def test_a_client_that_sends_chunks_is_forwarded_in_chunks():
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire), Client.open(world) as client:
        for at in range(0, len(body), 100_001):
            await client.send(body[at : at + 100_001])
            await world.until(lambda: wire.connections)
        client.writer.write(b"0\r\n\r\n")
        assert (await client.reply())[0] == 200
        assert received(world)[0].body == body
        assert received(world)[0].header("transfer-encoding") == "chunked"
        assert received(world)[0].header("content-length") is None


@pytest.mark.parametrize("chunked", [False, True])
def test_only_the_model_name_is_rewritten(chunked):
    @story
    async def check():
        body = form((b'name="model"', b"a-longer-name"), file(MIB))
        length = None if chunked else len(body)
        async with wired(alias="a-longer-name") as (world, _), Client.open(world, length) as client:
            await client.send(body)
            if chunked:
                client.writer.write(b"0\r\n\r\n")
            assert (await client.reply())[0] == 200
            assert received(world)[0].body == body.replace(b"a-longer-name", b"m")

    check()


@pytest.mark.parametrize("size", [1024, MIB])
def test_a_model_after_the_file_is_found_too(size):
    @story
    async def check():
        body = form(file(size), (b'name="model"', b"alias"), (b'name="stream"', b"false"))
        async with wired(alias="alias") as (world, _), Client.open(world, len(body)) as client:
            await client.send(body)
            assert (await client.reply())[0] == 200
            assert received(world)[0].body == body.replace(b"alias", b"m")
            await world.settled()

    check()


@story
async def test_a_whole_small_form_uses_an_idle_connection():
    body = form(MODEL, file(1024))
    async with gateway(FAST) as world:
        headers = {"content-type": "multipart/form-data; boundary=XX"}
        for _ in range(3):
            reply = await world.http.post(PATH, content=body, headers=headers)
            assert reply.status_code == 200
            await world.rested()
        assert [each.reused for each in received(world)] == [False, True, True]


@story
async def test_connections_of_both_sides_serve_on_after_an_upload():
    body = form(MODEL, file(MIB))
    async with gateway(FAST) as world:
        headers = {"content-type": "multipart/form-data; boundary=XX"}
        for _ in range(2):
            reply = await world.http.post(PATH, content=body, headers=headers)
            assert reply.status_code == 200
            await world.rested()
            assert (await world.chat(max_tokens=1)).status_code == 200
        chats = world.sims[0].received("/v1/chat/completions")
        assert [each.reused for each in chats] == [True, True]
        await world.settled()


@story
async def test_an_upload_that_tells_of_too_much_is_refused_before_it_is_read():
    async with wired("limits: {max_audio_body: 1MiB}") as (world, wire):
        async with Client.open(world, 2 * MIB, b"expect: 100-continue\r\n") as client:
            status, head, _ = await client.reply()
            assert status == 413
            assert b"connection: close" in head
        assert wire.connections == 0


@pytest.mark.parametrize("named_first", [True, False])
def test_an_upload_that_grows_too_large_is_refused_and_its_backend_let_go(named_first):
    @story
    async def check():
        body = form(MODEL, file(2 * MIB)) if named_first else form(file(2 * MIB), MODEL)
        async with wired("limits: {max_audio_body: 1MiB}") as (world, wire):
            async with Client.open(world) as client:
                await client.send(body[:100_000])
                if named_first:
                    await world.until(lambda: wire.uploaded >= 100_000)
                await client.send(body[100_000:])
                status, _, text = await client.reply()
                assert status == 413, text
                assert b"1048576" in text
                if named_first:
                    await wire.closed.wait()
            assert wire.connections == int(named_first)
            assert received(world) == []
            assert world.process.table.backends("m")[0].phase is Phase.READY
            await world.settled()

    check()


@pytest.mark.parametrize(
    ("late", "param"),
    [
        ((b'name="model"', b"other"), b'"model"'),
        ((b'name="chat_template"', b"{{ x }}"), b'"chat_template"'),
        ((b'name="stream"', b"maybe"), b'"stream"'),
        ((b"name=two words", b"x"), b"null"),
    ],
)
def test_a_field_behind_the_file_is_refused_and_its_backend_let_go(late, param):
    @story
    async def check():
        body = form(MODEL, file(MIB), late)
        async with wired() as (world, wire), Client.open(world, len(body)) as client:
            await client.send(body[:100_000])
            await world.until(lambda: wire.uploaded >= 100_000)
            await client.send(body[100_000:])
            status, _, text = await client.reply()
            assert status == 400
            assert b'"param":' + param in text.replace(b": ", b":")
            await wire.closed.wait()
            assert received(world) == []
            await world.settled()
            assert world.process.table.backends("m")[0].health.traffic_failures == 0

    check()


@story
async def test_a_form_that_never_ends_is_not_passed_on_as_whole():
    body = form(MODEL, file(MIB))[:-8]
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        await client.send(body[:100_000])
        await world.until(lambda: wire.uploaded >= 100_000)
        await client.send(body[100_000:])
        assert (await client.reply())[0] == 400
        await wire.closed.wait()
        assert received(world) == []


@story
async def test_a_backend_that_does_not_read_stops_the_client_and_memory_stays_bounded():
    body = form(MODEL, file(20 * MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        wire.reading.clear()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(client.send(body))
            await world.until(lambda: upload_of(world) is not None)
            upload = upload_of(world)
            await world.until(lambda: upload.paused)
            most = held(world)
            assert not sending.done()
            wire.reading.set()
            while not sending.done():
                most = max(most, held(world))
                await asyncio.sleep(0)
        assert (await client.reply())[0] == 200
        assert received(world)[0].body == body
        assert most < 512 * 1024
        await world.settled()


def held(world):
    upload = upload_of(world)
    return held_bytes(upload) if upload else 0


@story
async def test_the_head_of_an_upload_that_comes_at_once_is_small():
    body = form(MODEL, file(20 * MIB))
    async with wired() as (world, wire):
        wire.reading.clear()
        async with Client.open(world, len(body), first=body) as client:
            await world.until(lambda: (upload := upload_of(world)) and upload.head_bytes)
            assert upload_of(world).head_bytes < 512 * 1024
            wire.reading.set()
            assert (await client.reply())[0] == 200
        assert received(world)[0].body == body


@story
async def test_a_client_that_leaves_in_mid_upload_frees_the_backend_at_once():
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire):
        async with Client.open(world, len(body)) as client:
            await client.send(body[:100_000])
            await world.until(lambda: wire.uploaded >= 100_000)
        await world.at_once(wire.closed.is_set)
        await world.settled()
        assert 'outcome="client_gone"' in await world.metrics()


@story
async def test_a_client_that_resets_while_it_is_paused_frees_the_backend_at_once():
    body = form(MODEL, file(20 * MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        wire.reading.clear()
        client.writer.write(body)
        await world.until(lambda: (upload := upload_of(world)) is not None and upload.paused)
        linger = struct.pack("ii", 1, 0)
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.writer.transport.abort()
        await world.at_once(lambda: world.process.client.open_connections()[0] == 0)
        wire.reading.set()
        await world.settled()


@story
async def test_a_client_that_falls_silent_is_told_so_and_the_backend_is_not_blamed():
    body = form(MODEL, file(MIB))
    async with wired("timeouts: {body: 300ms, first_byte: 100ms}") as (world, wire):
        async with Client.open(world, len(body)) as client:
            await client.send(body[:100_000])
            status, _, text = await client.reply()
            assert status == 408, text
            await wire.closed.wait()
        await world.settled()
        assert world.process.table.backends("m")[0].health.traffic_failures == 0


@story
async def test_an_upload_that_is_cut_midway_takes_no_tokens():
    body = form(MODEL, file(MIB))
    async with wired("timeouts: {body: 300ms}") as (world, wire):
        limits = KeyLimits(tokens_per_day=100_000)
        made = keys.create(world.path.parent / "keys.yaml", name="ci", limits=limits)
        assert (await reload(world.process)).done
        world.key = made.key
        async with Client.open(world, len(body)) as client:
            await client.send(body[:100_000])
            await world.until(lambda: wire.uploaded >= 100_000)
            assert (await client.reply())[0] == 408
        await world.settled()
        told = await world.http.get("/v1/key", headers={"authorization": f"Bearer {made.key}"})
        (day,) = told.json()["standing"]
        assert day["used"] == 0


@story
async def test_a_backend_that_takes_nothing_times_out_while_the_clients_time_stands_still():
    body = form(MODEL, file(20 * MIB))
    async with wired("timeouts: {body: 300ms, first_byte: 1s}") as (world, wire):
        async with Client.open(world, len(body)) as client:
            wire.reading.clear()
            client.writer.write(body)
            status, _, text = await client.reply()
            assert status == 504, text
        wire.reading.set()
        await world.settled()


@pytest.mark.parametrize(("status", "told"), [(400, 400), (413, 413), (500, 500)])
def test_a_refusal_in_mid_upload_reaches_the_client(status, told):
    @story
    async def check():
        body = form(MODEL, file(20 * MIB))
        async with wired() as (world, wire), Client.open(world, len(body)) as client:
            text = b'{"error": {"message": "no", "type": "t", "code": %d, "param": null}}' % status
            wire.answer = (
                b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(text), text)
            )
            await client.send(body[: 10 * MIB])
            got, head, text = await client.reply()
            assert got == told, text
            assert b"connection: close" in head
            await wire.closed.wait()
            await world.settled()

    check()


@story
async def test_a_backend_that_breaks_off_in_mid_upload_is_final():
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        await client.send(body[:100_000])
        await world.until(lambda: wire.uploaded >= 100_000)
        wire.break_off()
        assert (await client.reply())[0] == 502
        assert wire.connections == 1
        await world.settled()


@story
async def test_an_upload_goes_elsewhere_when_no_connection_could_be_made():
    body = form(MODEL, file(2 * MIB))
    # The dead one is chosen first, and no probe tells of it before.
    listed = "pools: {m: {backends: [{url: <0>}, {url: <1>, weight: 0.000000001}]}}"
    async with gateway(FAST, FAST, pools=listed, as_shipped=True) as world:
        world.sims[0].inject("refuse")
        headers = {"content-type": "multipart/form-data; boundary=XX"}
        reply = await world.http.post(PATH, content=body, headers=headers)
        assert (reply.status_code, reply.headers["x-gateway-attempts"]) == (200, "2")
        assert [each.body for each in world.sims[1].received(PATH)] == [body]
        await world.settled()


@story
async def test_an_upload_that_an_engine_had_no_room_for_is_not_sent_again_without_its_beginning():
    body = form(MODEL, file(2 * MIB))
    async with gateway(FAST, FAST) as world:
        for sim in world.sims:
            sim.inject("http_500:503")
        headers = {"content-type": "multipart/form-data; boundary=XX"}
        reply = await world.http.post(PATH, content=body, headers=headers)
        assert reply.status_code == 503
        assert reply.headers["x-gateway-shed-reason"] == "engine"
        assert sum(len(sim.received(PATH)) for sim in world.sims) == 1
        await world.settled()


@story
async def test_a_stream_asked_for_behind_the_file_is_recorded_as_one():
    headers = {"content-type": "multipart/form-data; boundary=XX"}
    asks = (b'name="stream"', b"true")
    async with wired() as (world, _):
        for parts in ((), (asks,)):
            body = form(MODEL, file(MIB), *parts)
            reply = await world.http.post(PATH, content=body, headers=headers)
            assert reply.status_code == 200
        await world.settled()
        told = [
            line
            for line in (await world.metrics()).splitlines()
            if line.startswith("gateway_ttft_seconds_count")
        ]
        assert [line.rpartition(" ")[2] for line in told] == ["1.0"]


@story
async def test_an_answer_that_comes_before_the_upload_is_whole_is_taken():
    frame = b'{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}'
    frames = b"%x\r\ndata: %b\n\n\r\n" % (len(frame) + 8, frame)
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        wire.answer = EVENT_STREAM + frames + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        await client.send(body[:100_000])
        text = await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert text.startswith(b"HTTP/1.1 200")
        assert frame in text
        await wire.closed.wait()
        await world.settled()


@story
async def test_an_upload_that_fails_while_it_is_answered_is_cut():
    body = form(MODEL, file(MIB), MODEL)
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        wire.answer = EVENT_STREAM + b"9\r\ndata: 1\n\n\r\n"
        await client.send(body[:100_000])
        assert (await client.reader.readuntil(b"data: 1\n\n")).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):
            await client.send(body[100_000:])
            assert b"0\r\n\r\n" not in await client.reader.read()
        await wire.closed.wait()
        await world.settled()
        assert world.process.table.backends("m")[0].health.traffic_failures == 0


@story
async def test_a_request_pipelined_behind_an_upload_is_answered_too():
    body = form(MODEL, file(MIB))
    async with wired() as (world, wire), Client.open(world, len(body)) as client:
        await client.send(body[:100_000])
        await world.until(lambda: wire.uploaded >= 100_000)
        chat = b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await client.send(body[100_000:] + head % (world.key.encode(), len(chat)) + chat)
        assert (await client.reply())[0] == 200
        status, _, text = await client.reply()
        assert status == 200
        assert b"chat.completion" in text
        assert received(world)[0].body == body
        await world.settled()


@story
async def test_a_client_that_asks_first_is_told_to_go_on():
    body = form(MODEL, file(MIB))
    more = b"expect: 100-continue\r\n"
    async with wired() as (world, _), Client.open(world, len(body), more) as client:
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await client.send(body)
        assert (await client.reply())[0] == 200
        assert received(world)[0].body == body


@story
async def test_a_wrong_key_or_model_is_told_before_the_file_has_come():
    body = form((b'name="model"', b"nothere"), file(MIB))
    async with wired() as (world, wire):
        async with Client.open(world, len(body)) as client:
            await client.send(body[:1000])
            assert (await client.reply())[0] == 404
        world.key = "gw_wrong"
        async with Client.open(world, len(body)) as client:
            assert (await client.reply())[0] == 401
        assert wire.connections == 0
        await world.settled()


@story
async def test_tiny_chunks_are_joined_on_their_way():
    body = form(MODEL, file(64 * 1024))
    async with wired() as (world, wire), Client.open(world) as client:
        await client.send(body[:30_000])
        await world.until(lambda: wire.uploaded >= 30_000)
        before = wire.uploaded
        rest = body[30_000:]
        tiny = [rest[at : at + 1] for at in range(len(rest))]
        client.writer.write(b"".join(b"1\r\n%b\r\n" % each for each in tiny) + b"0\r\n\r\n")
        assert (await client.reply())[0] == 200
        assert received(world)[0].body == body
        assert wire.uploaded - before < len(rest) * 1.1
