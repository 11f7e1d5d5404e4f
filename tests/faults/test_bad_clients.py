"""Clients that leave, do not read, or send what nobody should: others notice nothing, and nothing stays behind."""

import asyncio
import json
import socket
import time

import pytest

from gateway.sim.server import SimConfig
from tests.abuse.support import front_of, head, ledger, raw, scripted
from tests.abuse.test_backends import TOKENS, ask, reply, says, text_of
from tests.faults.ledgers import End
from tests.faults.test_sick_backends import metrics
from tests.faults.world import FAST, SIM, recorded
from tests.stories.support import gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.02)
LONG = SimConfig(model="m", speed=0, max_model_len=200_000, num_blocks=20_000)
CHAT = "/v1/chat/completions"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def answered(asked):
    return reply("200 OK", "application/json", says(text_of(asked)))


# --- they leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["end", "reset", "half"])
def test_however_a_client_leaves_its_engine_stops(way, stream, measured):
    @story
    async def check():
        async with gateway(SLOW) as world, ledger(world):
            engine = world.sims[0].engine
            took = []
            for _ in range(5):
                async with raw(world) as client:
                    await client.send(ask(world, stream=stream, max_tokens=500))
                    await world.until(lambda: engine.running == 1)
                    begun = time.monotonic()
                    match way:
                        case "end":
                            client.writer.close()
                        case "reset":
                            client.abort()
                        case "half":
                            client.writer.write_eof()
                    await world.until(lambda: engine.running == 0)  # of 10 s of tokens
                    took.append(time.monotonic() - begun)
            measured(f"{way}: the engine stopped within {1000 * max(took):.0f} ms")
            await world.settled()
            assert 'outcome="client_gone"' in await world.metrics()

    check()


@story
async def test_a_hundred_requests_sent_ahead_and_an_end_in_the_middle_cross_nothing():
    async with scripted(answered) as backend, front_of(backend) as world, ledger(world):
        async with raw(world) as client:
            await client.send(b"".join(ask(world, f"t-{n}-") for n in range(100)))
            for number in range(50):
                assert f'"t-{number}-"'.encode() in (await client.reply()).body
        async with raw(world) as other:
            await other.send(ask(world, "another"))
            assert b'"another"' in (await other.reply()).body


# --- they do not read -------------------------------------------------------------------------------------


def test_a_hundred_clients_that_never_read_are_bounded_and_cut_and_others_are_served(measured):
    many = STREAM + b"%x\r\n%b\r\n" % (len(TOKENS), TOKENS)
    more = many[len(STREAM) :] * 100

    async def endless(asked):
        if text_of(asked) == "other":
            return answered(asked)
        asked.writer.write(many)
        while not asked.writer.is_closing():
            asked.writer.write(more)
            await asked.writer.drain()
        return None

    async def check():
        extra = "limits: {connections_per_address: 1000}\ntimeouts: {client_write: 2s}"
        idle = {"/metrics": metrics()}
        async with scripted(endless, idle) as backend, front_of(backend, extra=extra) as world:
            async with ledger(world, most_mib=96) as book:
                clients = []
                for _ in range(100):
                    sock = socket.create_connection(("127.0.0.1", world.process.public_port))
                    sock.sendall(ask(world, stream=True))
                    clients.append(sock)
                await world.until(lambda: len(backend.asked) >= 100, 30)
                for _ in range(10):
                    assert (await world.chat("other")).status_code == 200
                await world.until(lambda: not world.process.ingress.live, 45)
                for sock in clients:
                    sock.close()
                await world.http.aclose()
            measured(f"memory grew by {book.growth_mib:.0f} MiB for both ends of 100 streams")
            assert 'outcome="client_stalled"' in await world.metrics()

    story(check, seconds=58)()


@story
async def test_a_client_that_reads_ten_bytes_a_second_is_cut():
    async with gateway(LONG, extra="timeouts: {client_write: 1s}") as world, ledger(world):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", world.process.public_port, limit=16
        )
        writer.write(ask(world, stream=True, max_tokens=20_000))
        await world.until(lambda: world.in_flight() == 1)

        async def read_slowly():
            while await reader.read(1):
                await asyncio.sleep(0.1)

        slow = asyncio.get_running_loop().create_task(read_slowly())
        await world.until(lambda: not world.process.ingress.live, 20)
        slow.cancel()
        await asyncio.wait([slow])
        writer.transport.abort()
        assert 'outcome="client_stalled"' in await world.metrics()


# --- they send what nobody should ---------------------------------------------------------------------------

HEADS = {
    "a target of 1 MiB": b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a header of 64 KiB": b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 65_536 + b"\r\n\r\n",
    "10,000 headers": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    "a method of 64 KiB": b"G" * 65_536 + b" / HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.parametrize("what", HEADS)
def test_a_head_that_is_too_large_is_refused_in_flat_memory(what):
    @story
    async def check():
        async with gateway(FAST) as world, ledger(world, most_mib=24):
            for _ in range(20):
                async with raw(world) as client:
                    await client.send(HEADS[what])
                    assert (await client.reply()).status in (400, 414, 431)

    check()


def bombs():
    one = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1,"x":%b}'
    many = b",".join(b'"k%d":1' % n for n in range(100_000))
    return {
        "deep lists": one % (b"[" * 100_000 + b"]" * 100_000),
        "deep objects": one % (b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "many names": b"{%b}" % many,
        "a number of 1 MB": one % (b"1" * 1_000_000),
        "a name twice": b'{"model":"m","model":"m","messages":[],"max_tokens":1}',
        "NaN": one % b"NaN",
        "UTF-16": (one % b"1").decode().encode("utf-16"),
        "no UTF-8": one % b'"\x98"',
        "half a surrogate": (one % b"1").replace(b'"x"}]', b'"\\ud800"}]'),
        "a zero byte": (one % b"1").replace(b'"x"}]', b'"\0"}]'),
        "cut": (one % b"1")[:-5],
        "nothing": b"",
        "something behind it": one % b"1" + b"{}",
    }


def test_json_bombs_are_refused_or_harmless_and_hold_nobody_up(measured):
    async def check():
        async with gateway(FAST) as world:
            async with ledger(world, most_mib=96) as book:
                for name, body in bombs().items():
                    async with raw(world) as client:
                        await client.send(head(key=world.key, length=len(body)) + body)
                        got = await client.reply()
                        harmless = name in ("half a surrogate", "no UTF-8")
                        refused = (400, 415) if name == "nothing" else (400,)
                        assert got.status in refused or (harmless and got.status == 200), name
                        if got.status == 400:
                            assert isinstance(json.loads(got.body)["error"]["code"], str)
            measured(f"the loop stood still for {1000 * book.lag_s:.0f} ms at most")

    story(check, seconds=55)()


PATHS = [
    "//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions/", "/V1/chat/completions",
    "/v1/chat/completions;x", "/v1/chat/completions%2f..%2f..%2fsleep", "/v1/%2e%2e/pause", "/v1/../sleep",
    "/v1/./chat/completions", "/v1/chat/completions%00", "/v1/chat%2fcompletions", "/sleep", "/pause",
    "/v1/load_lora_adapter", "/reset_prefix_cache", "/metrics", "/openapi.json", "/docs", "/server_info",
    "/v1/chat/completions\\..\\sleep", "/%76%31/chat/completions",
]  # fmt: skip


@story
async def test_paths_that_are_not_exactly_ours_reach_nothing():
    async with gateway(FAST) as world, ledger(world):
        sim = world.sims[0]
        for path in PATHS:
            for method in ("POST", "GET"):
                async with raw(world) as client:
                    body = b'{"model":"m","messages":[],"max_tokens":1}'
                    await client.send(head(method, path, key=world.key, length=len(body)) + body)
                    got = await client.reply()
                    assert got.status in (400, 404, 405), path
        seen = {each.path for each in sim.requests}
        assert seen <= {"/health", "/metrics", "/v1/models", "/version", "/openapi.json"}
        ok = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1}'
        async with raw(world) as client:
            target = CHAT + "?path=/sleep&x=../../pause"
            await client.send(head("POST", target, key=world.key, length=len(ok)) + ok)
            assert (await client.reply()).status == 200
        assert {each.query for each in sim.received(CHAT)} == {""}


@story
async def test_credentials_that_are_doubtful_are_refused_alike():
    async with gateway(FAST) as world, ledger(world):
        key = world.key
        doubtful = {
            "two of them": (f"authorization: Bearer {key}", "authorization: Bearer other"),
            "other headers": (f"authorization: Bearer {key}", "x-api-key: other"),
            "two spaces": (f"authorization: Bearer  {key}x",),
            "8 KiB": ("authorization: Bearer " + "x" * 8192,),
            "another scheme": (f"authorization: Basic {key}",),
            "none": (),
            "empty": ("authorization:",),
            "control characters": ("authorization: Bearer \x01" + key,),
        }
        shapes = set()
        for name, lines in doubtful.items():
            body = b'{"model":"m","messages":[],"max_tokens":1}'
            async with raw(world) as client:
                await client.send(head("POST", CHAT, *lines, length=len(body)) + body)
                got = await client.reply()
                assert got.status in (400, 401, 429), name
                shapes.add(tuple(sorted(json.loads(got.body)["error"])))
        assert len(shapes) == 1
        assert not world.sims[0].received(CHAT)


@story
async def test_header_names_and_ids_are_ours_or_dropped():
    async with scripted(answered) as backend, front_of(backend) as world, ledger(world):
        for lines, kept in (
            (("x_request_id: evil", "x-request-id: mine"), "mine"),
            (("x-request-id: " + "y" * 4096,), None),
            (("x-request-id: caf\xc3\xa9",), None),
            (("x-request-id: a b",), None),
        ):
            async with raw(world) as client:
                await client.send(
                    ask(world, "x", *lines, "x_forwarded_for: 1.2.3.4", "cookie: a=b")
                )
                got = await client.reply()
                assert got.status == 200
                told = got.headers["x-request-id"]
                assert told == kept if kept else "y" * 100 not in told
            (*_, asked) = backend.asked
            for never in (b"cookie", b"x_", b"1.2.3.4", world.key.encode()):
                assert never not in asked.head


# --- others -------------------------------------------------------------------------------------------------


def test_clients_that_leave_at_random_cost_the_others_nothing(measured):
    async def check():
        async with recorded(SIM, SIM) as run:
            async with asyncio.TaskGroup() as group:
                stay = [group.create_task(run.ask(tokens=60)) for _ in range(20)]
                for number in range(60):
                    group.create_task(run.ask(tokens=200, leave_after=number % 12))
            assert {each.result().end for each in stay} == {End.COMPLETE}
            evidence = await run.reconciled()
            left = [line for line in evidence.client if line.end is End.LEFT]
            measured(f"{len(left)} left, 20 of 20 others were answered whole")

    story(check, seconds=55)()
