"""When an engine has surely forgotten a request: by what others got meanwhile."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from gateway.core.errors import RequestForgotten
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    LoadSample,
    Need,
    Route,
)
from gateway.pools.pulse import Pulse
from gateway.upstream.relay import Relay
from gateway.upstream.silence import Patience, silence_of
from gateway.wire.sse import StreamWatch
from tests.unit.test_resume import FAULT, begun, frame, role

PATIENCE = Patience(600.0, 45.0, math.inf, math.inf)
STALE_S = 3.0


def silent(
    pulse,
    endpoint=Endpoint.CHAT,
    *,
    stream=False,
    limit=10,
    window=None,
    text_bytes=40,
    prompt=64,
    sequences=1,
    **more,
):
    """Return the silence of a request that is sent now, at 100 s."""
    call = Call(endpoint, Dialect.CHAT, "m", stream, b"", limit, text_bytes=text_bytes, **more)
    demand = Demand(prompt, exact=True, max_new_tokens=limit)
    route = Route("m", "m", "m", widest_tokens=window)
    need = Need(prompt, 10, streams=stream, sequences=sequences)
    ask = Ask(route, call, demand, Caller("k", "n", "t", 0), need)
    backend = SimpleNamespace(works=lambda since, now: True, pulse=pulse)
    return silence_of(PATIENCE, 100.0, backend, ask)


def running(pulse, tokens, *, running=1, most=1, seconds=50, every_s=1.0, waiting=0, preempted=0):
    """Have an engine write so many tokens for all that run there, from 100 s on."""
    steps = int(seconds / every_s)
    before = LoadSample(100.0, running, waiting, 0.1)
    for step in range(1, steps + 1):
        sample = LoadSample(
            100.0 + step * every_s,
            running,
            waiting,
            0.1,
            preemptions=step * preempted,
            generation_tokens=tokens * step / steps,
        )
        pulse.scraped(before, sample, STALE_S, most)
        pulse.stepped(sample.at)
        before = sample


# Ten tokens and a step to read 64 tokens, eight times over.
ENOUGH = 88


@pytest.mark.parametrize(
    ("tokens", "engine", "request_", "forgotten"),
    [
        (ENOUGH - 1, {}, {}, False),
        (ENOUGH, {}, {}, True),
        (ENOUGH * 3, {"running": 4}, {}, False),  # a quarter for each
        (ENOUGH * 4, {"running": 4}, {}, True),
        (ENOUGH * 3, {"most": 4}, {}, False),  # so many were there between two scrapes
        (ENOUGH * 9, {"waiting": 1}, {}, False),  # it may be the one that waits
        (ENOUGH * 9, {"preempted": 1}, {}, False),
        (ENOUGH * 9, {"every_s": 5.0}, {}, False),  # nobody saw whether one waited
        # A balancer passes some scrapes on to another server, of which nobody knows what runs there.
        (1e6, {"seconds": 6}, {"limit": 300}, False),
        (ENOUGH, {}, {"stream": True}, True),
        (
            ENOUGH - 1,
            {},
            {"stream": True},
            False,
        ),  # some of it may be its own, that its server keeps back
        (ENOUGH, {}, {"prompt": 6400}, False),
        (
            ENOUGH * 8,
            {},
            {"sequences": 9},
            False,
        ),  # between two scrapes it may have written all of that
        (ENOUGH * 9, {}, {"limit": None}, False),
        (ENOUGH * 9, {}, {"limit": None, "window": 64}, True),
        (ENOUGH * 9, {}, {"text_bytes": None}, False),  # a server may load a film for minutes
        (ENOUGH * 9, {}, {"endpoint": Endpoint.RESPONSES}, False),  # or call tools
        # Each token is a request of its own to the engine.
        (ENOUGH * 9, {}, {"fields": {"use_beam_search": b"true"}}, False),
        (ENOUGH * 9, {}, {"places": {"use_beam_search": (1, 5)}}, False),
        (ENOUGH * 9, {}, {"fields": {"n": b"2"}}, True),
        (ENOUGH * 9, {}, {"endpoint": Endpoint.EMBEDDINGS}, False),
        (ENOUGH * 9, {}, {"endpoint": Endpoint.COMPLETIONS}, True),
    ],
)
def test_what_all_others_got_tells_it(tokens, engine, request_, forgotten):
    pulse = Pulse(sees_steps=True)
    silence = silent(pulse, **request_)
    running(pulse, tokens, **engine)
    assert silence.is_forgotten(150.0) == silence.too_long(150.0) == forgotten
    assert isinstance(silence.error(150.0), RequestForgotten) == forgotten


def test_it_is_not_told_before_the_limit_nor_after_a_byte_nor_by_metrics_that_are_old():
    pulse = Pulse(sees_steps=True)
    silence = silent(pulse)
    running(pulse, ENOUGH)
    assert not silence.is_forgotten(144.9)
    assert silence.is_forgotten(145.0)
    pulse.sees_steps = False
    assert not silence.is_forgotten(145.0)
    pulse.sees_steps = True
    silence.broken(145.0)
    assert not silence.is_forgotten(195.0)


def test_what_was_written_while_it_was_sent_does_not_count():
    pulse = Pulse(sees_steps=True)
    silence = silent(pulse)
    silence.suspend()
    running(pulse, ENOUGH)
    assert not silence.is_forgotten(200.0)
    silence.restart(150.0)
    assert not silence.is_forgotten(200.0)


# --- what has come, and shows nothing yet ---------------------------------------------------------

STARTED = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":64}}}\n\n'
)


def unshown(watch, data=b"", endpoint=Endpoint.CHAT):
    """Return whether a stream is thought forgotten that showed nothing for 50 s, but for this data."""

    async def relayed():
        pulse = Pulse(sees_steps=True)
        silence = silent(pulse, endpoint, stream=True)
        connection = SimpleNamespace(
            loop=asyncio.get_running_loop(), silence=silence, abort=lambda: None
        )
        client = SimpleNamespace(
            started=True,
            answering=True,
            writing_paused=False,
            write=lambda data: None,
            write_chunk=None,
        )
        relay = Relay(SimpleNamespace(connection=connection), watch, client, 100.0)
        relay.on_tick(100.5)
        if data:
            relay.on_data(data)
        relay.on_tick(101.0)
        running(pulse, ENOUGH * 9)
        return silence.is_forgotten(150.0)

    return asyncio.run(relayed())


def messages():
    return StreamWatch(Dialect.MESSAGES, choices=1, hide_usage=False, request_id="r")


def test_a_message_that_has_begun_is_not_forgotten_though_a_parser_holds_back_its_text():
    assert unshown(messages(), endpoint=Endpoint.MESSAGES)
    assert not unshown(messages(), STARTED, Endpoint.MESSAGES)


def rest():
    watch = begun(frame("a", [4]), frame("b", [5]))
    watch.broken(FAULT)
    assert watch.rest() is not None
    return watch


def test_the_rest_of_a_stream_is_forgotten_before_its_engine_tells_its_prompt_and_not_afterwards():
    assert unshown(rest())
    assert not unshown(rest(), role([1, 2, 3, 4, 5]))
