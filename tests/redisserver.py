"""A real redis-server, or valkey-server, of a test's own: started, stopped, killed and asked by the test."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest
import redis

from gateway.store.address import client_of
from gateway.store.link import Link
from gateway.store.onredis import RedisStore
from tests.ports import free_port

PROGRAMS = ("redis-server", "valkey-server")
PATIENCE_S = 5.0


class PatientLink(Link):
    """Waits longer than a request does: for tests of what Redis decides, however busy the machine is."""

    async def ask(self, script, keys, args, within_s=PATIENCE_S, late=None):
        return await super().ask(script, keys, args, max(within_s, PATIENCE_S), late)


def patient_store(url, clock, link=PatientLink):
    """Return the store at a URL, which waits longer for each reply than a gateway does."""
    client = client_of(url, connect_s=PATIENCE_S, reply_s=PATIENCE_S)
    return RedisStore(link(client, clock, budget_s=PATIENCE_S, listens_s=PATIENCE_S), clock)


async def connected(client):
    """Connect, so that the first call does not wait for that. A busy machine may keep Redis from it."""
    while True:
        with contextlib.suppress(redis.RedisError):
            return await client.ping()


class RedisServer:
    """One server on loopback and on a UNIX socket, without a disk. `options` are of its command line."""

    def __init__(self, program: str, folder: pathlib.Path, *options: str) -> None:
        self.program, self.folder, self.options = program, folder, options
        self.port = free_port()  # it is the same after a restart
        self.socket = str(folder / "redis.sock")
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.folder / "log.txt"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [self.program, *self.options, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                 "--unixsocket", self.socket, "--dir", str(self.folder)],
                stdout=out,
            )  # fmt: skip
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                if pathlib.Path(self.socket).exists():  # it makes that a moment later
                    return
            time.sleep(0.02)
        raise AssertionError(f"{self.program} does not listen: {log.read_text()[-2000:]}")

    def client(self, **more: object) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True, **more)

    def ask(self, *words: object) -> object:
        with self.client() as client:
            return client.execute_command(*words)

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def redis_server(*options, program=None):
    """Run a server; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, (program,) if program else PROGRAMS)), None)
    if found is None:
        pytest.skip(f"{program or PROGRAMS[0]} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(found, pathlib.Path(folder), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()


def time_passes(server: RedisServer, seconds: float, days: int = 0, months: int = 0) -> None:
    """Move every deadline that the server has for us nearer, and what it counts by days and months back."""
    shift_ms = round(seconds * 1000)
    with server.client() as client:
        for key in client.scan_iter("gw1:*"):
            left_ms = client.pttl(key)
            if left_ms >= 0:
                client.pexpire(key, left_ms - shift_ms)
        for scope, ends in client.hgetall("gw1:{holds}").items():
            if ends != "inf":
                until_ms = int(ends.lstrip("-")) - shift_ms
                client.hset("gw1:{holds}", scope, ("-" if ends[0] == "-" else "") + str(until_ms))
        for replica, told in client.hgetall("gw1:{replicas}").items():
            at_ms, _, what = told.partition(" ")
            client.hset("gw1:{replicas}", replica, f"{int(at_ms) - shift_ms} {what}")
        for key in client.scan_iter("gw1:{t:*"):
            if ":runs:" in key:
                for lease in client.zrange(key, 0, -1):
                    client.zincrby(key, -shift_ms, lease)
                continue
            for field, told in client.hgetall(key).items():
                if field.endswith(" most"):  # the limit of a minute, and no time
                    continue
                stamp, _, used = told.partition(" ")
                back = {"m": shift_ms, "d": days, "y": months}[field[1:]]
                client.hset(key, field, f"{int(stamp) - back} {used}")
