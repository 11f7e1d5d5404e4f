"""What the routing study sends: sessions of requests whose prompts begin alike, as they do in practice.

Pure: the same name, size of the pool and seed give the same trace to every system that is compared. A
prompt is made of parts; equal parts have equal tokens, and equal text of four bytes a token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

from gateway.sim.text import END, ROLES, START
from loadtest.arrivals import Shot

_BYTES_PER_TOKEN: Final = 4
_AROUND_TOKENS: Final = 3  # of the template, for each message
_PART_BITS: Final = 20  # of a token's number that are its place in its part
_FIRST_PART: Final = 1  # the numbers below are the template's


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a prompt or a reply."""

    number: int
    tokens: int

    def ids(self) -> range:
        """Return its tokens."""
        first = self.number << _PART_BITS
        return range(first, first + self.tokens)


Message = tuple[str, tuple[Part, ...]]  # role, content


@dataclass(frozen=True, slots=True)
class Asked(Shot):
    """One request: its whole conversation, and the reply that it will get."""

    messages: tuple[Message, ...]
    reply: Part
    session: str | None  # told by the client; None where clients tell none
    after_s: float = 0.0  # of the reply before it in its session

    def ids(self) -> tuple[int, ...]:
        """Return the prompt's tokens, as the simulator's template makes them."""
        ids: list[int] = []
        for role, parts in self.messages:
            ids += (START, ROLES[role])
            for part in parts:
                ids += part.ids()
            ids.append(END)
        return (*ids, START, ROLES["assistant"])

    def texts(self) -> list[tuple[str, str]]:
        """Return role and text of each message."""
        return [(role, "".join(map(text_of, parts))) for role, parts in self.messages]

    def body(self, texts: Sequence[tuple[str, str]], model: str = "m") -> bytes:
        """Return the body of a streaming chat request of exactly the planned length."""
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": role, "content": text} for role, text in texts],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
        }
        return json.dumps(asked).encode()


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order of their beginnings; each is asked one request after the other.

    `forgets_s`: when the first backend loses its cache, if it does.
    """

    name: str
    sessions: tuple[tuple[Asked, ...], ...]
    seconds: float
    forgets_s: float | None = None


@lru_cache(32_768)
def text_of(part: Part) -> str:
    """Return the text of a part."""
    return random.Random(part.number).randbytes(part.tokens * _BYTES_PER_TOKEN // 2).hex()


class _Maker:
    """Makes the sessions of one trace, each part of them once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._next = _FIRST_PART

    def part(self, least: int, most: int) -> Part:
        """Return a part that nothing has yet, of so many tokens."""
        self._next += 1
        return Part(self._next, self.rng.randint(least, most))

    def parts(self, count: int, least: int, most: int) -> list[Part]:
        """Return several of them."""
        return [self.part(least, most) for _ in range(count)]

    def single(
        self, messages: tuple[Message, ...], output: tuple[int, int], kind: str
    ) -> tuple[Asked, ...]:
        """Return a session of one request, of a client that tells no session."""
        return (self.asked(messages, output, kind, None),)

    def asked(
        self,
        messages: tuple[Message, ...],
        output: tuple[int, int],
        kind: str,
        session: str | None,
        after_s: float = 0.0,
    ) -> Asked:
        """Return one request."""
        inside = sum(part.tokens for _, parts in messages for part in parts)
        tokens = inside + _AROUND_TOKENS * len(messages) + _AROUND_TOKENS - 1
        reply = self.part(*output)
        return Asked(
            0.0, "t0", kind, tokens, reply.tokens, reply.number, messages, reply, session, after_s
        )

    def talk(
        self, head: tuple[Message, ...], turns: int, said: tuple[int, int], output: tuple[int, int],
        pause_s: Callable[[], float], kind: str,
    ) -> tuple[Asked, ...]:  # fmt: skip
        """Return a conversation: each request repeats all before it, replies too."""
        name = f"{kind}-{self._next}"
        messages, found = head, []
        for turn in range(turns):
            messages = (*messages, ("user", (self.part(*said),)))
            after_s = pause_s() if turn else 0.0
            found.append(self.asked(messages, output, kind, name, after_s))
            messages = (*messages, ("assistant", (found[-1].reply,)))
        return tuple(found)


def _skewed(rng: random.Random, parts: Sequence[Part], power: float) -> Callable[[], Part]:
    """Return what draws a part, the k-th by 1 / k to the power."""
    weights = list(accumulate(1 / (place + 1) ** power for place in range(len(parts))))
    return lambda: rng.choices(parts, cum_weights=weights)[0]


_USER: Final = (64, 256)
_REPLY: Final = (24, 72)
_Sessions = Iterator[tuple[Asked, ...]]


def _few(make: _Maker, count: int) -> _Sessions:
    """Eight system prompts of 2,048 tokens, skewed: every backend can hold them all."""
    draw = _skewed(make.rng, make.parts(8, 2048, 2048), 1.0)
    while True:
        messages = (("system", (draw(),)), ("user", (make.part(*_USER),)))
        yield make.single(messages, _REPLY, "few")


def _many(make: _Maker, count: int) -> _Sessions:
    """Forty system prompts of 1,024 to 3,072 tokens for each backend: all together hold them, none alone."""
    draw = _skewed(make.rng, make.parts(40 * count, 1024, 3072), 0.6)
    while True:
        messages = (("system", (draw(),)), ("user", (make.part(*_USER),)))
        yield make.single(messages, _REPLY, "many")


def _short(make: _Maker, count: int) -> _Sessions:
    """Four hundred system prompts of 48 to 160 tokens for each backend, and a short question: under a KiB each."""
    draw = _skewed(make.rng, make.parts(400 * count, 48, 160), 0.6)
    while True:
        messages = (("system", (draw(),)), ("user", (make.part(16, 48),)))
        yield make.single(messages, (4, 16), "short")


def _hot(make: _Maker, count: int) -> _Sessions:
    """As `many`, but six of ten requests begin with the same 3,072 tokens."""
    hot, others = make.part(3072, 3072), _many(make, count)
    while True:
        if make.rng.random() < 0.6:
            messages = (("system", (hot,)), ("user", (make.part(*_USER),)))
            yield make.single(messages, _REPLY, "hot")
        else:
            yield next(others)


def _chats(make: _Maker, count: int) -> _Sessions:
    """Conversations of 3 to 10 turns below four system prompts; people think 4 s on average."""
    heads = make.parts(4, 512, 512)
    while True:
        head: tuple[Message, ...] = (("system", (make.rng.choice(heads),)),)
        turns = make.rng.randint(3, 10)
        yield make.talk(
            head, turns, (32, 256), (48, 160), lambda: make.rng.expovariate(1 / 4.0), "chat"
        )


def _agents(make: _Maker, count: int) -> _Sessions:
    """Agents that call tools 8 to 16 times: contexts grow from 1.7 to some 10 thousand tokens."""
    heads = make.parts(3, 1536, 1536)
    while True:
        head: tuple[Message, ...] = (("system", (make.rng.choice(heads),)),)
        turns = make.rng.randint(8, 16)
        yield make.talk(
            head, turns, (128, 768), (24, 96), lambda: make.rng.uniform(0.3, 1.5), "agent"
        )


def _rag(make: _Maker, count: int) -> _Sessions:
    """Instructions, then four documents of 512 tokens of a skewed collection, shuffled, then a question."""
    intro, draw = make.part(256, 256), _skewed(make.rng, make.parts(100 * count, 512, 512), 0.8)
    while True:
        documents = tuple({draw(): None for _ in range(4)})
        content = (*documents, make.part(32, 96))
        yield make.single((("system", (intro,)), ("user", content)), _REPLY, "rag")


def _random(make: _Maker, count: int) -> _Sessions:
    """Prompts of 128 to 3,072 tokens that share nothing."""
    while True:
        yield make.single((("user", (make.part(128, 3072),)),), _REPLY, "random")


# Sessions a second for each backend: about two thirds of what an engine can do that finds what it can.
_KINDS: Final[dict[str, tuple[Callable[[_Maker, int], _Sessions], float]]] = {
    "few prompts": (_few, 14.0),
    "many prompts": (_many, 11.0),
    "short prompts": (_short, 60.0),
    "chats": (_chats, 1.3),
    "agents": (_agents, 0.4),
    "rag": (_rag, 4.5),
    "random": (_random, 5.0),
    "hot spot": (_hot, 12.0),
    "restart": (_many, 9.0),
}
NAMES: Final = tuple(_KINDS)
SHARED: Final = tuple(name for name in NAMES if name not in ("random", "rag"))


def trace(name: str, backends: int, seconds: float, seed: int, load: float = 1.0) -> Trace:
    """Plan a trace for a pool: as many sessions as its rate says, at moments independent of each other."""
    kind, rate_per_s = _KINDS[name]
    rng = random.Random(f"{name}/{backends}/{seed}")
    source = kind(_Maker(rng), backends)
    count = round(rate_per_s * load * backends * seconds)
    moments = sorted(seconds * rng.random() for _ in range(count))
    sessions = tuple(
        (_starting(first, at_s), *rest)
        for at_s, (first, *rest) in zip(moments, source, strict=False)
    )
    return Trace(name, sessions, seconds, seconds / 2 if name == "restart" else None)


def _starting(asked: Asked, at_s: float) -> Asked:
    return Asked(
        at_s, asked.tenant, asked.kind, asked.prompt_tokens, asked.output_tokens, asked.seed,
        asked.messages, asked.reply, asked.session,
    )  # fmt: skip
