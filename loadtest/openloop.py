"""The load client: planned requests over raw protocols, one connection each, one process for all.

A streamed token costs a few microseconds here: no parser, no task wakes before the stream has ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from loadtest.arrivals import Shot, prompt
from loadtest.outcomes import REFUSING, End, Outcome

_TAIL_BYTES: Final = 512  # holds the last frames of a stream
_DATA: Final = b"data: "
_DONE: Final = b"data: [DONE]"
_ERROR: Final = b'data: {"error"'


class Target(Protocol):
    """What requests are sent to."""

    def prepare(self, shot: Shot, *, retry: bool = False) -> Any:
        """Return what `send` takes; made ahead, so that it delays no request."""

    async def send(self, prepared: Any, outcome: Outcome, clock: Callable[[], float]) -> None:
        """Send one request and note what becomes of it.

        Cancel: the client hangs up at once and the outcome stays UNFINISHED.
        """


@dataclass
class Door:
    """Where requests go in: one address, or backends among which the client picks the least busy."""

    addresses: list[tuple[str, int]]
    model: str
    keys: dict[str, str] = field(default_factory=dict)  # by tenant
    salt: int = 0  # of the prompts, so that a repeated plan finds nothing in a prefix cache
    open: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.open = [0] * len(self.addresses)

    def pick(self) -> int:
        """Return the address with the fewest open requests; equals by chance."""
        least = min(self.open)
        return random.choice([i for i, count in enumerate(self.open) if count == least])

    def prepare(self, shot: Shot, *, retry: bool = False) -> bytes:
        """Return the bytes of a request."""
        return request_bytes(self, shot, retry=retry)

    async def send(self, prepared: bytes, outcome: Outcome, clock: Callable[[], float]) -> None:
        """Send one request on a connection of its own, see `Target`."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        place = self.pick()
        self.open[place] += 1
        transport = None
        try:
            transport, _ = await loop.create_connection(
                lambda: _Call(prepared, outcome, clock, ended), *self.addresses[place]
            )
            await ended
        except OSError as error:
            outcome.end, outcome.reason = End.FAILED, f"connect: {type(error).__name__}"
        finally:
            self.open[place] -= 1
            ended.cancel()
            if transport is not None:
                transport.abort()


def request_bytes(door: Door, shot: Shot, *, retry: bool = False) -> bytes:
    """Return one streaming chat request of exactly the planned output length."""
    body = json.dumps(
        {
            "model": door.model,
            "stream": True,
            "max_tokens": shot.output_tokens,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": prompt(shot, door.salt)}],
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"authorization: Bearer {door.keys.get(shot.tenant, 'none')}\r\n"
        f"x-stainless-retry-count: {int(retry)}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers (lower-case names) of a reply."""
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    return int(lines[0].split(" ", 2)[1]), {k.strip().lower(): v.strip() for k, _, v in pairs}


def parse_refusal(headers: dict[str, str], body: bytes) -> tuple[str, float | None]:
    """Return why a reply refuses, and after how many seconds to come again (the SDKs' rule)."""
    reason = headers.get("x-gateway-shed-reason", "")
    if not reason:
        found = re.search(rb'"code"\s*:\s*"?(\w+)', body)
        reason = found[1].decode() if found else ""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
        if math.isfinite(wait_s) and wait_s >= 0:
            return reason, wait_s
    return reason, None


class _Call(asyncio.Protocol):
    """One request on its connection: notes times, judges the end when the connection is closed."""

    def __init__(
        self, data: bytes, outcome: Outcome, clock: Callable[[], float], ended: asyncio.Future[None]
    ) -> None:
        self._data = data
        self._outcome = outcome
        self._clock = clock
        self._ended = ended
        self._headers: dict[str, str] = {}
        self._early = b""  # all that came before the first token
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._outcome.sent_s = self._clock()
        transport.write(self._data)  # type: ignore[attr-defined]  # uvloop's is a Transport by behaviour
        self._data = b""

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome.first_s is None:
            self._before_first(data)
            return
        if _DATA in data:  # not a comment that only keeps the connection alive
            now = self._clock()
            assert outcome.last_s is not None
            outcome.gap_s = max(outcome.gap_s, now - outcome.last_s)
            outcome.last_s = now
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def _before_first(self, data: bytes) -> None:
        outcome = self._outcome
        self._early += data
        if outcome.status == 0:
            head, found, rest = self._early.partition(b"\r\n\r\n")
            if not found:
                return
            outcome.status, self._headers = parse_head(head)
            outcome.answered_s = self._clock()
            self._early = rest
        if outcome.status == 200 and _DATA in self._early:
            outcome.first_s = outcome.last_s = self._clock()
            self._tail, self._early = self._early[-_TAIL_BYTES:], b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended.done():  # we hung up
            return
        outcome = self._outcome
        outcome.ended_s = self._clock()
        if outcome.status in REFUSING:
            outcome.end = End.REFUSED
            outcome.reason, outcome.retry_after_s = parse_refusal(self._headers, self._early)
        elif outcome.status != 200:
            outcome.end = End.FAILED
            outcome.reason = parse_refusal(self._headers, self._early)[0] or "no reply"
        elif _ERROR in self._tail or _DONE not in self._tail:
            outcome.end = End.FAILED
            outcome.reason = "error frame" if _ERROR in self._tail else "cut"
        else:
            outcome.end = End.COMPLETE
        self._ended.set_result(None)


async def fire(
    door: Target,
    shots: Sequence[Shot],
    *,
    until_s: float,
    retry: bool,
    awaited: Callable[[Outcome, float], bool],
) -> tuple[list[Outcome], float]:
    """Send every request at its planned moment, whatever became of those before.

    `until_s` ends the arrivals; no retry starts after it. Then it waits while a request is `awaited`
    (given the outcome so far and the time) and hangs up on the rest.
    Returns the outcomes and the moment at which it hung up.
    """
    loop = asyncio.get_running_loop()
    ready = [(shot, door.prepare(shot)) for shot in shots]
    outcomes: list[Outcome] = []
    start = loop.time() + 0.05

    def clock() -> float:
        return loop.time() - start

    async def one(shot: Shot, data: Any) -> None:
        outcome = Outcome(shot, shot.at_s)
        outcomes.append(outcome)
        await door.send(data, outcome, clock)
        wait_s = outcome.retry_after_s
        if not retry or wait_s is None or clock() + wait_s > until_s:
            return
        again = Outcome(shot, clock() + wait_s, retry=True)
        await asyncio.sleep(wait_s)
        outcomes.append(again)
        await door.send(door.prepare(shot, retry=True), again, clock)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for shot, data in ready:
            if (ahead_s := shot.at_s - clock()) > 0:
                await asyncio.sleep(ahead_s)
            tasks.append(group.create_task(one(shot, data)))
        await asyncio.sleep(until_s - clock())
        # Time alone can end the wait: there is no event to wait for.
        while any(awaited(each, clock()) for each in outcomes):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        cut_s = clock()
        for task in tasks:
            task.cancel()
    return outcomes, cut_s


async def closed_loop(
    door: Target, source: Iterator[Shot], *, clients: Sequence[tuple[float, int]]
) -> list[Outcome]:
    """Keep a number of requests in flight, one after the other each: (until_s, clients) in order."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    outcomes: list[Outcome] = []

    def clock() -> float:
        return loop.time() - start

    async def client() -> None:
        while True:
            outcome = Outcome(next(source), clock())
            data = door.prepare(outcome.shot)
            outcomes.append(outcome)
            await door.send(data, outcome, clock)
            if outcome.end is not End.COMPLETE:
                await asyncio.sleep(0.1)

    try:
        async with asyncio.timeout_at(start + clients[-1][0]), asyncio.TaskGroup() as group:
            running = 0
            for until_s, count in clients:
                for _ in range(count - running):
                    group.create_task(client())
                running = count
                await asyncio.sleep(until_s - clock())
            await asyncio.Event().wait()
    except TimeoutError:
        pass  # the plan is over
    return outcomes


async def scrape(address: tuple[str, int]) -> dict[str, float]:
    """Read /metrics of a vLLM: the sum of each metric over its labels; empty when it fails."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: vllm\r\nconnection: close\r\n\r\n")
            page = await reader.read()
            writer.close()
    except (OSError, TimeoutError):
        return {}
    totals: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("vllm:"):
            key = name.partition("{")[0]
            totals[key] = totals.get(key, 0.0) + float(value)
    return totals
