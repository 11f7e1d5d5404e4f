"""Clients that write down what they saw, and engines that write down what they did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.sim.ask import CHAT, COMPLETIONS, parse_ask
from gateway.sim.config import SimConfig
from gateway.sim.http import Received
from gateway.sim.plan import plan_reply
from gateway.sim.server import SimServer
from gateway.sim.text import TOKEN_BYTES, detokenize
from tests.faults.ledgers import ClientLine, End, EngineLine

EMBEDDINGS = "/v1/embeddings"
_NONCE = re.compile(r"\[(n-[0-9a-f-]+)\]")


# --- a client ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One request. `leave_after`: the client goes away after that many events (0: before the first)."""

    nonce: str
    path: str = CHAT
    stream: bool = True
    tokens: int = 20
    leave_after: int | None = None
    model: str = "m"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body: its prompt ends with the nonce, so that what follows it is the reply's."""
        text = f"tell [{self.nonce}]"
        if self.path == EMBEDDINGS:
            return {"model": self.model, "input": text} | self.extra
        asked: dict[str, Any] = {"model": self.model, "max_tokens": self.tokens, "temperature": 0}
        asked |= (
            {"prompt": text}
            if self.path == COMPLETIONS
            else {"messages": [{"role": "user", "content": text}]}
        )
        return asked | ({"stream": True} if self.stream else {}) | self.extra

    @property
    def whole(self) -> str:
        """The text of a whole reply, by the simulator's own rule."""
        if self.path == EMBEDDINGS:
            return ""
        ask = parse_ask(self.path, self.body, SimConfig(model=self.model), [])
        return "".join(plan_reply(ask, 0)[0].pieces)


class Caller:
    """Sends questions, each over a connection of its own, and keeps a line of each."""

    def __init__(self, port: int, key: str, tenant: str = "") -> None:
        self.lines: list[ClientLine] = []
        self._port = port
        self._key = key
        self._tenant = tenant

    async def ask(self, question: Question, seconds: float = 60.0) -> ClientLine:
        """Ask, read to the end or leave, and write down what came."""
        sent_at = time.monotonic()
        seen = _Seen(question)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(self._request(question))
                await seen.read(reader)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            seen.end = End.CUT
        finally:
            ended_at = time.monotonic()
            if writer is not None:
                writer.transport.abort()
        line = ClientLine(
            nonce=question.nonce, path=question.path, stream=question.stream, end=seen.end, sent_at=sent_at,
            ended_at=ended_at, status=seen.status, first_at=seen.first_at, first_text_at=seen.first_text_at,
            text=seen.text, whole=question.whole, finish=seen.finish, done=seen.done, error=seen.error, retry_after=seen.retry_after,
            tenant=self._tenant,
        )  # fmt: skip
        self.lines.append(line)
        return line

    def _request(self, question: Question) -> bytes:
        body = json.dumps(question.body).encode()
        return (
            f"POST {question.path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {self._key}\r\n"
            f"x-request-id: {question.nonce}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body


class _Left(Exception):
    """The client has seen enough."""


class _Seen:
    """One reply while it is read."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.end = End.CUT
        self.status = 0
        self.first_at: float | None = None
        self.first_text_at: float | None = None
        self.text = ""
        self.finish: str | None = None
        self.done = False
        self.error: dict[str, Any] | None = None
        self.retry_after = False
        self._events = 0

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read one reply."""
        try:
            if self.question.leave_after == 0:
                raise _Left
            await self._reply(reader)
        except _Left:
            self.end = End.LEFT

    async def _reply(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 "):
            return None  # what begins like this is no reply
        self.status = int(head.split()[1])
        self.retry_after = b"\r\nretry-after: " in head
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        if length is not None:
            body = await reader.readexactly(int(length[1]))
            self.first_at = time.monotonic()
            return self._body(body)
        held = b""
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            held += await reader.readexactly(size)
            await reader.readexactly(2)
            if self.first_at is None:
                self.first_at = time.monotonic()
            *events, held = held.split(b"\n\n")
            for event in events:
                self._event(event)
        await reader.readexactly(2)
        if self.error is not None:
            self.end = End.ERROR
        elif self.done and self.finish is not None:
            self.end = End.COMPLETE
        return None

    def _body(self, body: bytes) -> None:
        with contextlib.suppress(ValueError):
            told = json.loads(body)
            if self.status == 200 and "error" not in told:
                self.end = End.COMPLETE
                self._choices(told.get("choices", ()))
                return
            self.error = told
        self.end = End.REFUSED

    def _event(self, event: bytes) -> None:
        if not event.startswith(b"data: "):
            return
        self._events += 1
        if event == b"data: [DONE]":
            self.done = True
            return
        with contextlib.suppress(ValueError):  # a broken event is none
            told = json.loads(event[6:])
            if "error" in told:
                self.error = told
            self._choices(told.get("choices", ()))
        if self.question.leave_after is not None and self._events >= self.question.leave_after:
            raise _Left

    def _choices(self, choices: Any) -> None:
        for choice in choices:
            said = choice.get("delta") or choice.get("message") or choice
            self.text += said.get("content") or choice.get("text") or ""
            if self.text and self.first_text_at is None:
                self.first_text_at = time.monotonic()
            self.finish = choice.get("finish_reason") or self.finish


# --- an engine --------------------------------------------------------------------------------------


def write_down(
    sim: SimServer,
    name: str,
    keep: Callable[[EngineLine], None],
    dies: Callable[[], bool] = lambda: False,
) -> None:
    """Have a simulated server tell each attempt that has a nonce, when it ends. `dies`: the server ends now."""

    def ended(request: Received) -> None:
        if request.method != "POST" or (told := _told(request)) is None:
            return
        nonce, begun = told
        line = EngineLine(
            nonce=nonce, engine=name, at=request.at, ended_at=time.monotonic(), begun=begun,
            emitted=request.tokens_emitted, left_at=request.client_disconnected_at, answered_at=request.answered_at,
            died=dies(),
        )  # fmt: skip
        keep(line)

    sim.on_ended = ended


def _told(request: Received) -> tuple[str, int] | None:
    """Return the nonce of a request, and how much of its reply it has in its prompt."""
    if request.path != COMPLETIONS:
        found = _NONCE.search(request.body.decode())
        return (found[1], request.begun_tokens) if found else None
    prompt = msgspec.json.decode(request.body).get("prompt")
    text = prompt if isinstance(prompt, str) else detokenize(prompt)
    found = _NONCE.search(text)
    return (found[1], len(text[found.end() :]) // TOKEN_BYTES) if found else None
