"""The gateway's own process is stopped, killed, held up, or cannot write its log."""

import asyncio
import contextlib
import functools
import os
import signal
import time

import msgspec
import pytest

from gateway.sim.server import SimConfig, SimServer
from tests.faults import ledgers
from tests.faults.ledgers import End, Evidence, GatewayLine
from tests.faults.processes import served
from tests.faults.reconcile import reconcile
from tests.faults.traffic import Caller, Question, write_down
from tests.stories.support import story

PATIENT = functools.partial(story, seconds=55)
SIM = SimConfig(model="m", decode_step_s=0.02)
MANY = "limits: {connections_per_address: 2000}\n"


@contextlib.asynccontextmanager
async def world(folder, *sims, **more):
    """A gateway's process, and simulated backends in this one that write down what they do."""
    engine = []
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(each)) for each in sims]
        for number, sim in enumerate(servers):
            write_down(sim, f"b{number}", engine.append)
        gate = await stack.enter_async_context(served(folder, [sim.url for sim in servers], **more))
        yield gate, servers, Caller(gate.public_port, gate.key), engine


async def logged(gate, requests):
    """Return the log's lines of requests, once it has so many: it is written twice a second."""
    async with asyncio.timeout(20):
        while True:
            text = gate.log.read_bytes()
            if text.count(b'"endpoint":') >= requests and text.endswith(b"\n"):
                return ledgers.read(gate.log, GatewayLine)
            await asyncio.sleep(0.05)


def test_a_stop_under_a_hundred_streams_lets_them_end_and_exits_with_0(tmp_path, measured):
    @PATIENT
    async def check():
        extra = MANY + "shutdown: {grace: 20s}"
        async with world(tmp_path, SIM, SIM, extra=extra) as (gate, sims, caller, engine):
            async with asyncio.TaskGroup() as group:
                for number in range(100):
                    group.create_task(caller.ask(Question(f"n-{number:x}", tokens=60)))
                async with asyncio.timeout(20):
                    while sum(sim.engine.running for sim in sims) < 90:
                        await asyncio.sleep(0.01)
                gate.process.send_signal(signal.SIGTERM)
                begun = time.monotonic()
            assert {line.end for line in caller.lines} == {End.COMPLETE}
            async with asyncio.timeout(20):
                assert await gate.process.wait() == 0
            measured(
                f"100 of 100 streams ended well, exit code 0 after {time.monotonic() - begun:.1f} s"
            )
            lines = ledgers.read(gate.log, GatewayLine)
            found = reconcile(Evidence(client=caller.lines, gateway=lines, engine=engine))
            assert not found, found[0]

    check()


def test_a_stop_whose_grace_period_ends_tells_each_stream_so(tmp_path):
    @PATIENT
    async def check():
        extra = MANY + "shutdown: {grace: 1s}"
        async with world(tmp_path, SIM, extra=extra) as (gate, sims, caller, engine):
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(caller.ask(Question(f"n-{number:x}", tokens=2000)))
                async with asyncio.timeout(20):
                    while sims[0].engine.running < 20:
                        await asyncio.sleep(0.01)
                gate.process.send_signal(signal.SIGTERM)
            assert {line.end for line in caller.lines} == {End.ERROR}
            assert all("shut" in str(line.error) for line in caller.lines)
            async with asyncio.timeout(20):
                assert await gate.process.wait() == 0
            lines = ledgers.read(gate.log, GatewayLine)
            found = reconcile(Evidence(client=caller.lines, gateway=lines, engine=engine))
            assert not found, found[0]

    check()


def test_streams_of_a_gateway_that_is_killed_never_look_complete(tmp_path):
    @PATIENT
    async def check():
        async with world(tmp_path, SIM, extra=MANY) as (gate, sims, caller, _):
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    question = Question(f"n-{number:x}", stream=bool(number % 4), tokens=2000)
                    group.create_task(caller.ask(question))
                async with asyncio.timeout(20):
                    while sims[0].engine.running < 40:
                        await asyncio.sleep(0.01)
                gate.process.kill()
            assert {line.end for line in caller.lines} == {End.CUT}
            assert all(line.whole.startswith(line.text) for line in caller.lines)
            async with asyncio.timeout(5):  # and the engine learns it, too
                while sims[0].engine.running:
                    await asyncio.sleep(0.01)

    check()


@pytest.mark.parametrize("reader", ["stands still", "is gone"])
def test_a_log_that_nobody_reads_holds_no_request_up(tmp_path, reader, measured):
    @PATIENT
    async def check():
        read, write = os.pipe()
        try:
            fast = SimConfig(model="m", speed=0)
            async with world(tmp_path, fast, log=write) as (gate, _, caller, _):
                os.close(write)
                if reader == "is gone":
                    os.close(read)
                begun = time.monotonic()
                for number in range(400):  # some 300 KB of lines; a pipe holds 64 KiB
                    line = await caller.ask(Question(f"n-{number:x}", stream=False, tokens=1))
                    assert line.end is End.COMPLETE
                measured(
                    f"log {reader}: {400 / (time.monotonic() - begun):.0f} requests/s, one after the other"
                )
                dropped = [
                    line for line in (await gate.metrics()).splitlines()
                    if line.startswith("gateway_access_log_dropped_total")
                ]  # fmt: skip
                assert dropped
        finally:
            if reader != "is gone":
                os.close(read)

    check()


def test_a_process_that_was_stopped_for_seconds_ends_no_stream_and_ejects_nobody(
    tmp_path, measured
):
    """All deadlines passed while it stood still; what came meanwhile is read first."""

    @PATIENT
    async def check():
        extra = MANY + "timeouts: {stall: 2s, first_byte: 2s, client_write: 2s}"
        async with world(tmp_path, SIM, SIM, extra=extra) as (gate, sims, caller, engine):
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(caller.ask(Question(f"n-{number:x}", tokens=150)))
                async with asyncio.timeout(20):
                    while sum(sim.engine.running for sim in sims) < 40:
                        await asyncio.sleep(0.01)
                gate.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(5)
                gate.process.send_signal(signal.SIGCONT)
            assert {line.end for line in caller.lines} == {End.COMPLETE}
            text = await gate.metrics()
            away = [
                line for line in text.splitlines()
                if line.startswith("gateway_backend_transitions_total") and 'to="down"' in line
            ]  # fmt: skip
            assert not away, away
            measured("40 of 40 streams ended well after a stop of 5 s with deadlines of 2 s")
            lines = await logged(gate, len(caller.lines))
            found = reconcile(Evidence(client=caller.lines, gateway=lines, engine=engine))
            assert not found, found[0]

    check()


def test_a_broken_configuration_changes_nothing_for_streams_under_way(tmp_path):
    @PATIENT
    async def check():
        async with world(tmp_path, SIM, extra=MANY) as (gate, sims, caller, engine):
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(caller.ask(Question(f"n-{number:x}", tokens=100)))
                async with asyncio.timeout(20):
                    while sims[0].engine.running < 20:
                        await asyncio.sleep(0.01)
                path = tmp_path / "gateway.yaml"
                good = path.read_text()
                for bad in (
                    good[: len(good) // 2],
                    "",
                    good + "\npools: [",
                    "pools: {m: {backends: []}}",
                ):
                    path.write_text(bad)
                    gate.process.send_signal(signal.SIGHUP)
                    await asyncio.sleep(0.2)
                path.write_text(good)
            assert {line.end for line in caller.lines} == {End.COMPLETE}
            assert (await caller.ask(Question("n-ffff"))).end is End.COMPLETE
            lines = await logged(gate, len(caller.lines))
            found = reconcile(Evidence(client=caller.lines, gateway=lines, engine=engine))
            assert not found, found[0]
            assert msgspec.json.encode(lines)

    check()
