"""What one more token costs that another backend could go on behind, against `resume: off`.

    python -m loadtest.micro.resume

Both are measured in turns: a chunk that the relay passes on by sight, without and with the ids of its tokens. A relayed
chunk takes 18 to 31 us of processor time in all, most of it in the system. Of that it is to be at most 3 %.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from gateway.core.types import Call, Demand, Dialect
from gateway.resume.stream import TrailedStream
from gateway.upstream.relay import Relay
from gateway.upstream.reply import Reply
from gateway.upstream.silence import ENDLESS, Silence
from gateway.wire.calls import ENDPOINTS, parse_at_once
from gateway.wire.sse import StreamWatch

LOOP = asyncio.new_event_loop()
CHUNKS, ROUNDS = 2000, 200
SPEC = ENDPOINTS[b"/v1/chat/completions"]
WORDS = (" the", " a", " quick", "er", " brown", " something", ".", " of")
HEAD = 'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1780000000,'


class Client:
    """A client that reads everything."""

    started = takes_chunks = True
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
    return Relay(reply, watch, Client(), 0.0).on_chunk


def least(pass_on: Callable[[bytes], bool], chunks: Sequence[bytes]) -> float:
    """Return the microseconds of one chunk, of one round."""
    began = time.perf_counter()
    for each in chunks:
        pass_on(each)
    return (time.perf_counter() - began) / len(chunks) * 1e6


def main() -> None:
    """Print the figures."""
    call = parse_at_once(
        SPEC,
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}',
        b"application/json",
    )
    assert isinstance(call, Call)
    role = f'{HEAD}"model":"m","choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"finish_reason":null}}],'
    plain = StreamWatch(Dialect.CHAT, choices=1, hide_usage=True, request_id="r")
    trailed = TrailedStream(call, Demand(100, exact=False), request_id="r")
    plain.feed(role.encode() + b'"prompt_token_ids":null}\n\n')
    plain.feed(frame(" a", "null"))
    trailed.feed(role.encode() + b'"prompt_token_ids":[1,2,3]}\n\n')
    trailed.feed(frame(" a", "[5]"))
    words = [WORDS[place % len(WORDS)] for place in range(CHUNKS)]
    off = [chunk(each, "null") for each in words]
    on = [chunk(each, f"[{100 + place * 37 % 30_000}]") for place, each in enumerate(words)]
    pass_off, pass_on = passing(plain), passing(trailed)
    assert all(map(pass_off, off)), "not told by sight"
    assert all(map(pass_on, on)), "not told by sight"
    rounds = [(least(pass_off, off), least(pass_on, on)) for _ in range(ROUNDS)]
    least_off, least_on = (min(each) for each in zip(*rounds, strict=True))
    print(f"a chunk passed on by sight, us (least of {ROUNDS} rounds):", end=" ")
    print(f"off {least_off:.2f}, exact {least_on:.2f}, difference {least_on - least_off:.2f}")


if __name__ == "__main__":
    main()
