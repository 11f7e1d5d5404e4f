"""This machine has no file descriptor left for a connection: that says nothing about a backend."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest

from gateway.core.aio import SystemClock
from gateway.core.endings import Ending
from gateway.core.errors import NothingFree
from gateway.core.types import ProbeFailed, ProbePassed, Scraped
from gateway.heal.observed import Observed, Timing
from gateway.pools.table import Backend
from gateway.upstream.client import BackendConnections
from gateway.upstream.connection import Connection
from gateway.watch.fetch import Pages
from gateway.watch.probe import Prober
from gateway.watch.scrape import scrape
from tests.stories.support import gateway, story


@contextlib.contextmanager
def nothing_free():
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def all_taken():
    """Let this process have all the files open that it may; it may poll them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard)
    )
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@story
async def test_a_request_fails_of_what_this_machine_lacks_not_of_its_backend():
    async with gateway() as world:
        backend = next(iter(world.process.table))
        with contextlib.closing(BackendConnections(backend, keep_alive_s=1.0)) as connections:
            with nothing_free(), pytest.raises(NothingFree, match="Too many open files") as failed:
                await connections.connect(Connection)
            assert failed.value.ending is Ending.OURS
            (await connections.connect(Connection)).abort()


@story
async def test_an_idle_connection_that_was_closed_is_dropped_though_nothing_is_free_to_look_why():
    async with gateway() as world:
        assert (await world.chat()).status_code == 200
        await world.rested()
        connections = world.process.client.connections(next(iter(world.process.table)))
        assert connections.idle == 1
        for each in world.sims[0]._connections:
            there = os.dup(each.transport.get_extra_info("socket").fileno())
            with socket.socket(fileno=there) as ours:
                ours.shutdown(socket.SHUT_WR)  # the gateway has not read it yet
        with all_taken():
            assert connections.take_idle() is None


@story
async def test_no_probe_and_no_scrape_counts_against_a_backend_that_is_up():
    async with gateway() as world:
        backend = next(iter(world.process.table))
        told = []
        with contextlib.closing(Pages(backend)) as pages:
            prober = Prober(backend, pages, SystemClock(), told.append)

            async def ask():
                await prober.probe(1.0)
                await scrape(pages, SystemClock(), told.append, timeout_s=1.0)

            with nothing_free():
                await ask()
            assert told == []
            await ask()
            assert [type(each) for each in told] == [ProbePassed, Scraped]


@story
async def test_a_backend_that_was_never_up_tells_why_it_is_not_asked():
    backend, told = Backend("m", "b1", "http://127.0.0.1:1"), []
    with contextlib.closing(Pages(backend)) as pages, nothing_free():
        await Prober(backend, pages, SystemClock(), told.append).probe(1.0)
    assert [(type(each), each.reason) for each in told] == [(ProbeFailed, "ours")]


@story
async def test_a_test_of_its_engine_that_could_not_be_sent_proves_nothing():
    async with gateway() as world:
        backend = next(iter(world.process.table))
        with contextlib.closing(Pages(backend)) as pages:
            observed = Observed(backend, pages, None, SystemClock(), Timing(every_s=0.01))
            with nothing_free():
                assert await observed.test(1.0) is None
            assert await observed.test(1.0) == ""
    unknown = Backend("m", "b1", "http://no host:8000")  # a name that nobody is asked for
    with contextlib.closing(Pages(unknown)) as pages:
        observed = Observed(unknown, pages, None, SystemClock(), Timing(every_s=0.01))
        assert await observed.test(10.0) is None
