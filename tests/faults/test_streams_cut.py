"""Backends that break in the middle of a reply: a client has a whole answer, or is told that it has none."""

import time

import pytest

from gateway.core.types import SERVING
from tests.abuse.support import front_of, scripted
from tests.faults.ledgers import End
from tests.faults.toxic import Ending, Toxic
from tests.faults.traffic import EMBEDDINGS, Caller, Question
from tests.faults.world import FAST, SIM, recorded
from tests.stories.support import story

WAYS = ["reset_after", "truncate_after", "truncate_chunk", "clean_end_without_done"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("tokens", [1, 10, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_a_lone_backend_that_breaks_off_is_told_in_the_stream(way, tokens):
    @story
    async def check():
        async with recorded(FAST) as run:
            run.world.sims[0].inject(f"{way}:{tokens}")
            line = await run.ask(tokens=1200)
            # What came in one read with the end is no stream yet: a 502 says it.
            assert line.end in (End.ERROR, End.REFUSED)
            assert run.world.process.table.backends("m")[0].health.traffic_failures == 1
            await run.reconciled()

    check()


@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.RESET])
def test_a_stream_cut_at_any_byte_goes_on_elsewhere_or_tells(ending, measured):
    """A connection ends after so many bytes, wherever that is in head, chunk and frame."""

    @story
    async def check():
        async with recorded(SIM, SIM, toxics=[Toxic(), Toxic()]) as run:
            backends = run.world.process.table.backends("m")
            for number, at in enumerate(range(1, 2400, 31)):
                spoilt, other = run.proxies[number % 2], run.proxies[1 - number % 2]
                other.down = Toxic()
                # Probes met the fault, too.
                await run.world.until(lambda: {each.phase for each in backends} <= SERVING, 20.0)
                spoilt.reset()
                spoilt.down = Toxic(limit_bytes=at, ending=ending)
                await run.world.rested()
                line = await run.ask(tokens=20)
                assert line.end in (End.COMPLETE, End.REFUSED)
            for proxy in run.proxies:
                proxy.down = Toxic()
            await run.reconciled()
            ends = [line.end.value for line in run.caller.lines]
            went_on = sum(line["resumed"] for line in run.world.access_lines())
            # Of about 25: half meet the proxy, two thirds of these in the reply.
            assert went_on >= 5
            measured(
                f"{len(ends)} requests: "
                + ", ".join(f"{ends.count(e)} {e}" for e in sorted({*ends}))
                + f"; {went_on} were cut and went on"
            )

    check()


@pytest.mark.parametrize("tokens", [0, 1, 5, 19])
@pytest.mark.parametrize("way", [*WAYS, "error_frame_after", "abort_finish"])
def test_what_comes_in_one_read_with_its_end_goes_on_elsewhere_too(way, tokens):
    @story
    async def check():
        async with recorded(FAST, FAST) as run:
            for number in range(4):
                for sim in run.world.sims:
                    sim.clear()
                run.world.sims[number % 2].inject(f"{way}:{tokens}@1")
                line = await run.ask(tokens=20)
                # Without a token there is nothing to go on with, and it may have been executed.
                assert line.end is End.COMPLETE or (tokens == 0 and line.end is End.REFUSED)
            await run.reconciled()

    check()


@story
async def test_a_backend_that_sends_its_head_and_nothing_more_is_given_up_and_not_asked_twice():
    async with recorded(FAST, FAST, extra="timeouts: {first_byte: 1s, stall: 1s}") as run:
        for sim in run.world.sims:
            sim.inject("stall_after:0")
        line = await run.ask()
        assert line.end in (End.ERROR, End.REFUSED)
        assert line.text == ""
        await run.reconciled()
        assert len(run.engine) == 1


@story
async def test_comments_are_no_progress():
    async with recorded(FAST, extra="timeouts: {first_byte: 1s, stall: 1s}") as run:
        run.world.sims[0].inject("only_comments")
        begun = time.monotonic()
        line = await run.ask()
        assert line.end in (End.ERROR, End.REFUSED)
        assert time.monotonic() - begun < 10
        await run.world.settled()


@pytest.mark.parametrize("slice_bytes", [1, 7])
def test_a_stream_in_tiny_pieces_is_whole(slice_bytes):
    @story
    async def check():
        async with recorded(FAST, toxics=[Toxic()]) as run:
            run.proxies[0].down = Toxic(slice_bytes=slice_bytes)
            for _ in range(5):
                assert (await run.ask(tokens=10)).end is End.COMPLETE
            run.proxies[0].down = Toxic()
            await run.reconciled()

    check()


FRAME = b'{"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,%b}]}'
TEXT = FRAME % b'"delta":{"content":"word"},"finish_reason":null'
STOP = FRAME % b'"delta":{},"finish_reason":"stop"'


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n"])
@pytest.mark.parametrize(
    "event", [b"data: %b", b"data:%b", b"event: x\ndata: %b", b"id: 7\ndata: %b"]
)
def test_every_spelling_of_an_event_is_understood_however_it_is_split(event, end):
    stream = b"".join(event % each + end for each in (TEXT, TEXT, STOP, b"[DONE]"))
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in stream) + b"0\r\n\r\n"

    @story
    async def check():
        async with scripted(lambda asked: HEAD + chunks) as backend, front_of(backend) as world:
            reply = await world.chat(stream=True)
            assert reply.text.count('"word"') == 2
            assert reply.text.rstrip().endswith("data: [DONE]")
            assert '"error"' not in reply.text
            await world.settled()
            assert 'outcome="ok"' in await world.metrics()

    check()


@story
async def test_a_slow_line_is_no_silence():
    async with recorded(SIM, toxics=[Toxic()], extra="timeouts: {stall: 1s}") as run:
        run.proxies[0].down = Toxic(bytes_per_s=1024, slice_bytes=64)
        line = await run.ask(tokens=12)  # about 3 s
        assert line.end is End.COMPLETE
        assert line.ended_at - line.sent_at > 1.5
        run.proxies[0].down = Toxic()
        await run.reconciled()


@pytest.mark.parametrize("ending", [Ending.HALF_CLOSE, Ending.CLOSE])
def test_a_backend_that_closes_slowly_or_by_half_holds_no_descriptor(ending):
    @story
    async def check():
        async with recorded(SIM, toxics=[Toxic()]) as run:
            run.proxies[0].down = Toxic(limit_bytes=700, ending=ending, close_delay_s=0.5)
            for line in await run.ask_many(10, tokens=50):
                assert line.end in (End.ERROR, End.REFUSED)
            run.proxies[0].down = Toxic()
            await run.world.until(lambda: run.proxies[0].open <= 6, 5)  # probes, scrapes
            await run.reconciled()

    check()


@story
async def test_a_wrong_byte_anywhere_is_an_error_or_passes_and_breaks_nothing():
    async with recorded(FAST, toxics=[Toxic()]) as run:
        for at in range(0, 1400, 31):
            for stream in (True, False):
                run.proxies[0].reset()
                run.proxies[0].down = Toxic(corrupt_at=at)
                await run.world.rested()
                question = Question(f"n-{at:x}-{stream:d}", stream=stream, tokens=5)
                line = await run.caller.ask(question)
                assert line.done or line.end in (End.COMPLETE, End.ERROR, End.REFUSED)
                if at < 9:  # the status line
                    assert line.end is End.REFUSED
                if run.world.process.table.backends("m")[0].health.traffic_failures > 3:
                    run.proxies[0].down = Toxic()
                    await run.world.chat(max_tokens=1)
        run.proxies[0].down = Toxic()
        evidence = await run.evidence()
        assert "bug" not in {line.outcome for line in evidence.gateway}


@story
async def test_vectors_and_whole_replies_that_break_off_are_refused():
    async with recorded(FAST) as run:
        caller: Caller = run.caller
        for number, way in enumerate(["reset_after", "truncate_after", "truncate_chunk"]):
            run.world.sims[0].inject(f"{way}:3@1")
            line = await caller.ask(Question(f"n-{number}", stream=False))
            assert line.end is End.REFUSED
            assert line.status == 502
        assert (
            await caller.ask(Question("n-e", path=EMBEDDINGS, stream=False))
        ).end is End.COMPLETE
        await run.reconciled()


@story
async def test_a_stream_with_a_wrong_byte_that_then_breaks_off_is_told_or_goes_on():
    async with recorded(SIM, SIM, toxics=[Toxic(), Toxic()]) as run:
        for at in range(170, 2600, 53):
            for proxy in run.proxies:
                proxy.reset()
                proxy.down = Toxic(corrupt_at=at, limit_bytes=at + 400)
            await run.world.rested()
            await run.ask(tokens=30)
            for proxy in run.proxies:
                proxy.reset()
                proxy.down = Toxic()
            await run.ask(tokens=1)
        evidence = await run.evidence()
        assert "bug" not in {line.outcome for line in evidence.gateway}
