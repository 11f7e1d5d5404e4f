"""Streams that end well are heard of, also where the client does not wait for the end of the body."""

import asyncio

from gateway.core.endings import Ending
from gateway.core.types import TrafficFailed
from tests.abuse.support import front_of, scripted
from tests.stories.support import story

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
ASKED = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(delta, finish=b"null"):
    return chunk(
        b'data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        b'[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]}\n\n' % (delta, finish)
    )


REPLY = HEAD + b"".join(
    (
        frame(b'"role":"assistant","content":""'),
        frame(b'"content":"hi"'),
        frame(b"", b'"stop"'),
        chunk(b"data: [DONE]\n\n"),
    )
)


@story
async def test_failures_with_complete_streams_between_them_are_not_in_a_row():
    async def answer(asked):
        asked.writer.write(REPLY)
        await asyncio.sleep(0.3)  # the end of the body comes when the client has left
        return b"0\r\n\r\n"

    async with scripted(answer) as backend, front_of(backend) as world:
        (seen,) = world.process.table.backends("m")
        for _ in range(3):
            now = world.process.clock.now()
            world.process.table.observe(seen.id, TrafficFailed(now, Ending.HTTP_5XX, False))
            assert seen.health.traffic_failures == 1
            async with world.http.stream("POST", "/v1/chat/completions", json=ASKED) as reply:
                async for line in reply.aiter_lines():
                    if "[DONE]" in line:
                        break
            await world.until(lambda: not seen.health.traffic_failures)
