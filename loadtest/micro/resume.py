"""What one more token costs that another backend could go on behind, against `resume: off`.

    python -m loadtest.micro.resume
    python -m loadtest.micro.resume --streams 2000

Both are measured in turns: a chunk that the relay passes on by sight, without and with the ids of its tokens. Of many
streams each gets a chunk before the first one gets its next: as in a gateway, little is left in the processor's cache
then. A relayed chunk takes 18 to 50 us of processor time in all, most of it in the system.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from gateway.core.types import Call, Demand, Dialect
from gateway.resume.stream import TrailedStream
from gateway.upstream.relay import Relay
from gateway.upstream.reply import Reply
from gateway.upstream.silence import ENDLESS, Silence
from gateway.wire.calls import ENDPOINTS, parse_at_once
from gateway.wire.sse import StreamWatch

CHUNKS, LEAST_ROUNDS, MOST_CHUNKS = 64, 40, 200_000
LOOP = asyncio.new_event_loop()
SPEC = ENDPOINTS[b"/v1/chat/completions"]
WORDS = (" the", " a", " quick", "er", " brown", " something", ".", " of")
HEAD = 'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1780000000,'


class Client:
    """A client that reads everything."""

    started = answering = takes_chunks = True
    writing_paused = False
    bytes_out = 0

    def __init__(self) -> None:
        self.write_chunk = len


class Backend:
    """The connection of a relay that is not asked for anything."""

    def __init__(self) -> None:
        self.loop = LOOP
        self.silence = Silence(ENDLESS, 0.0)


def frame(text: str, ids: str) -> bytes:
    """Return the frame of one token."""
    said = f'{{"content":"{text}"}},"logprobs":null,"finish_reason":null,"token_ids":{ids}'
    return f'{HEAD}"model":"m","choices":[{{"index":0,"delta":{said}}}]}}\n\n'.encode()


def chunk(text: str, ids: str) -> bytes:
    """Return it in its framing."""
    data = frame(text, ids)
    return b"%x\r\n%b\r\n" % (len(data), data)


def passing(watch: StreamWatch) -> Callable[[bytes], bool]:
    """Return what passes chunks on of a stream that has begun."""
    reply = Reply(200, {}, None, Backend())  # type: ignore[arg-type]
    return Relay(reply, watch, Client(), 0.0).on_chunk  # type: ignore[arg-type]


def each_gets_one(
    streams: Sequence[Callable[[bytes], bool]], chunks: Sequence[bytes], at: int
) -> float:
    """Return the microseconds of one chunk, of a round."""
    began = time.perf_counter()
    for place, pass_on in enumerate(streams, at):
        pass_on(chunks[place % len(chunks)])
    return (time.perf_counter() - began) / len(streams) * 1e6


def begun(watch: StreamWatch, *frames: bytes) -> Callable[[bytes], bool]:
    """Return what passes chunks on of a stream with these first frames."""
    for each in frames:
        watch.feed(each)
    return passing(watch)


def main(streams: int) -> None:
    """Print the figures."""
    call = parse_at_once(
        SPEC,
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}',
        b"application/json",
    )
    assert isinstance(call, Call)
    role = f'{HEAD}"model":"m","choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"finish_reason":null}}],'
    first_off = role.encode() + b'"prompt_token_ids":null}\n\n', frame(" a", "null")
    first_on = role.encode() + b'"prompt_token_ids":[1,2,3]}\n\n', frame(" a", "[5]")
    plain = [
        begun(StreamWatch(Dialect.CHAT, choices=1, hide_usage=True, request_id="r"), *first_off)
        for _ in range(streams)
    ]
    demand = Demand(100, exact=False)
    trailed = [
        begun(TrailedStream(call, demand, request_id="r"), *first_on) for _ in range(streams)
    ]
    words = [WORDS[place % len(WORDS)] for place in range(CHUNKS)]
    off = [chunk(each, "null") for each in words]
    on = [chunk(each, f"[{100 + place * 37 % 30_000}]") for place, each in enumerate(words)]
    assert all(each(off[0]) for each in plain), "not told by sight"
    assert all(each(on[0]) for each in trailed), "not told by sight"
    rounds = [
        (each_gets_one(plain, off, at), each_gets_one(trailed, on, at))
        for at in range(max(LEAST_ROUNDS, MOST_CHUNKS // streams))
    ]
    usual_off, usual_on = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(f"a chunk of one of {streams} streams passed on by sight, us (median):", end=" ")
    print(f"off {usual_off:.2f}, exact {usual_on:.2f}, difference {usual_on - usual_off:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    main(parser.parse_args().streams)
