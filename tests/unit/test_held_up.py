"""A loop that was held up: what came meanwhile is read before anything is judged late."""

import asyncio
import socket
import time

import msgspec
import pytest

from gateway.config.limits import LimitsConfig
from gateway.core.aio import SystemClock
from gateway.core.channel import Channel
from gateway.ingress.bodies import Bodies
from gateway.ingress.body import Body
from gateway.ingress.upload import Upload
from gateway.launch.docker import DockerLauncher
from gateway.launch.launcher import Changes
from gateway.launch.run import run
from gateway.store.address import client_of
from gateway.store.link import Link
from gateway.store.onredis import redis_store
from gateway.store.scripts import HOLDS
from gateway.wire.forms import FormReader
from tests.unit.test_forms import FORM, field, file, form

PATIENCE_S, HELD_UP_S, ENDLESS_S = 60.0, 600.0, 6000.0
MIB = 1 << 20


class HeldUp(asyncio.SelectorEventLoop):
    """Its time passes at once, and nothing is read meanwhile."""

    passed_s = 0.0

    def time(self):
        return super().time() + self.passed_s


def story(told):
    with asyncio.Runner(loop_factory=HeldUp) as runner:
        runner.run(told)


def test_a_reply_of_redis_that_came_meanwhile_is_in_time(tmp_path):
    async def told():
        asked, ended = asyncio.Future(), asyncio.Event()

        async def redis(reader, writer):
            while data := await reader.read(65536):
                if b"EVAL" in data:
                    asked.set_result(writer)
                else:  # several may come in one read
                    writer.write(b"+OK\r\n" * (data.count(b"SETINFO") + data.count(b"PING")))
            writer.close()
            ended.set()

        path = tmp_path / "redis.sock"
        async with await asyncio.start_unix_server(redis, path), asyncio.TaskGroup() as group:
            client = client_of(f"unix://{path}", connect_s=ENDLESS_S, reply_s=ENDLESS_S)
            link = Link(client, SystemClock(), budget_s=PATIENCE_S, listens_s=ENDLESS_S)
            asking = group.create_task(link.ask(HOLDS, ["gw1:x"], [], PATIENCE_S))
            writer = await asked
            writer.write(b"*0\r\n")
            asyncio.get_running_loop().passed_s = HELD_UP_S
            assert await asking == []
            assert link.trouble == ""
            await link.close()
            await ended.wait()

    story(told())


@pytest.mark.parametrize("came", [True, False])  # by the time at which the gateway goes on
def test_a_call_that_redis_answers_at_a_stop_of_the_gateway_is_not_late(tmp_path, came):
    """However long that was: the library has no time-out of its own that would end the call."""

    async def told():
        loop, asked, ended = asyncio.get_running_loop(), asyncio.Future(), asyncio.Event()

        async def redis(reader, writer):
            while data := await reader.read(65536):
                if b"EVAL" in data:
                    asked.set_result(writer)
                else:
                    writer.write(b"+OK\r\n" * (data.count(b"SETINFO") + data.count(b"PING")))
            writer.close()
            ended.set()

        path = tmp_path / "redis.sock"
        async with await asyncio.start_unix_server(redis, path), asyncio.TaskGroup() as group:
            store = redis_store(f"unix://{path}", SystemClock(), PATIENCE_S)
            asking = group.create_task(store.link.ask(HOLDS, ["gw1:x"], [], PATIENCE_S))
            writer = await asked
            if came:
                writer.write(b"*0\r\n")
            loop.passed_s = HELD_UP_S
            if not came:
                await asyncio.sleep(0.1)  # the timers, and what follows them
                writer.write(b"*0\r\n")
            assert await asking == []
            assert store.trouble == ""
            await store.close()
            await ended.wait()

    story(told())


def test_an_answer_of_another_process_that_came_meanwhile_is_in_time():
    async def told():
        own, other = socket.socketpair()
        own.setblocking(False)
        channel = Channel(own, {})
        async with asyncio.TaskGroup() as group:
            group.create_task(channel.run())
            await channel.open.wait()
            asking = group.create_task(channel.ask("what", within_s=PATIENCE_S))
            await asyncio.sleep(0)  # it is sent
            assert other.recv(65536)
            answer = msgspec.msgpack.encode(["_Reply", 1, "that", ""])
            other.sendall(len(answer).to_bytes(4, "big") + answer)
            asyncio.get_running_loop().passed_s = HELD_UP_S
            assert await asking == "that"
            other.close()

    story(told())


def reads(body, length):
    """Hand a body what comes on a socket, up to its end; return that socket's other side."""
    ours, client = socket.socketpair()
    loop, left = asyncio.get_running_loop(), length

    def read():
        nonlocal left
        data = ours.recv(65536)
        left -= len(data)
        body.on_data(data)
        if not left:
            body.on_end()
            loop.remove_reader(ours)
            ours.close()

    loop.add_reader(ours, read)
    return client


def test_a_body_that_came_meanwhile_is_in_time_and_so_is_its_rest():
    async def told():
        body, sent = Body(), b"x" * 200_000
        loop = asyncio.get_running_loop()
        with reads(body, len(sent)) as client:
            assert await body.read(len(sent), PATIENCE_S, len(sent)) is None
            reading = loop.create_task(body.next_part())
            await asyncio.sleep(0)
            client.sendall(sent[:70_000])
            loop.passed_s = HELD_UP_S
            came = len(await reading)
            client.sendall(sent[70_000:])
            while (part := await body.next_part()) is not None:
                came += len(part)
            assert came == len(sent)

    story(told())


def test_an_upload_of_which_some_came_meanwhile_is_in_time():
    async def told():
        sent = form(file(b"x" * 100), field(b"model", b"w"))
        loop = asyncio.get_running_loop()
        upload = Upload(
            FormReader(FORM), None, None, content_length=len(sent), limit_bytes=len(sent), timeout_s=PATIENCE_S
        )  # fmt: skip
        with reads(upload, len(sent)) as client:
            reading = loop.create_task(upload.read_head())
            await asyncio.sleep(0)
            client.sendall(sent[:100])
            loop.passed_s = HELD_UP_S
            await asyncio.sleep(0)  # the timer
            await asyncio.sleep(0)
            client.sendall(sent[100:])
            assert await reading == sent
        upload.close()

    story(told())


def test_a_body_for_which_there_is_room_meanwhile_has_that_in_time():
    async def told():
        limits, bodies = LimitsConfig(bodies="32MiB"), Bodies()
        loop, (ours, other) = asyncio.get_running_loop(), socket.socketpair()
        ours.setblocking(False)
        before = await bodies.take("one", 32 * MIB, limits, PATIENCE_S)

        async def ends():
            await loop.sock_recv(ours, 1)
            await asyncio.sleep(0)  # the task of its request
            before.release()

        with ours, other:
            ending = loop.create_task(ends())
            waiting = loop.create_task(bodies.take("two", 32 * MIB, limits, PATIENCE_S))
            await asyncio.sleep(0)
            other.send(b"x")
            loop.passed_s = HELD_UP_S
            assert (await waiting).size == 32 * MIB
            await ending

    story(told())


def test_a_command_that_ended_meanwhile_did_not_take_too_long():
    async def told():
        loop = asyncio.get_running_loop()
        words = ["sh", "-c", "sleep 0.1; echo done"]
        running = loop.create_task(run(words, timeout_s=PATIENCE_S, kept_bytes=1024))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - nothing is read meanwhile
        loop.passed_s = HELD_UP_S
        assert await running == "done\n"

    story(told())


def test_a_restart_that_docker_carried_out_meanwhile_did_not_fail(tmp_path):
    async def told():
        loop, asked = asyncio.get_running_loop(), asyncio.Future()
        state = {"Running": True, "StartedAt": "2026-01-01T00:00:01.5Z"}
        inspected = msgspec.json.encode({"Id": "a" * 64, "State": state})

        async def docker(reader, writer):
            while not reader.at_eof():
                head = await reader.readline()
                while len(await reader.readline()) > 2:
                    pass
                page = b'{"ApiVersion": "1.44"}' if b"/version " in head else inspected
                if head.startswith(b"POST"):
                    asked.set_result(writer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page))
                    writer.write(page)
            writer.close()

        path = tmp_path / "docker.sock"
        async with await asyncio.start_unix_server(docker, path), asyncio.TaskGroup() as group:
            launcher = DockerLauncher("vllm", path)
            ran = (await launcher.look()).incarnation
            ordered = launcher.restart(ran, grace_s=PATIENCE_S, changes=Changes())
            restarting = group.create_task(ordered)
            (await asked).write(b"HTTP/1.1 204 No Content\r\n\r\n")
            loop.passed_s = HELD_UP_S
            assert await restarting == ran  # as this Docker says
            await launcher.close()

    story(told())
