"""How long a backend may be silent while a request waits for it, and when its engine has forgotten it (decision 045).

An engine that runs a request gives it a token in each step, as it gives one to all others, while nothing waits
there and nothing is preempted. So a request has been forgotten if, after `timeouts.stall` at least and before any
byte of its reply, each other one got many times the tokens that its whole reply may have. So much is
counted for a stream, too: a server may keep back what the engine has written for this very request.

What the server does before its engine sees a request takes no such time, but for media: a request that has some
is never thought forgotten. Nor is one that may call tools of the server's (Responses), nor a beam search: its
engine gets each of its tokens as requests of their own, with a pause between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.core.endpoints import GENERATES
from gateway.core.errors import BackendTimeout, RequestForgotten
from gateway.core.types import Ask, Endpoint, Need
from gateway.pools.backend import Backend
from gateway.pools.pulse import Pulse, Waits

# An engine that guesses tokens ahead gives some requests up to seven a step, and others one.
_TIMES_OVER: Final = 8.0
_READ_PER_STEP: Final = 64  # tokens of its prompt at least, beside all that is written
_BEAM_SEARCH: Final = "use_beam_search"
_ONLY_ENGINE: Final = GENERATES - {Endpoint.RESPONSES}


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of one request, in seconds."""

    first_byte_s: float  # from the request to the first byte, or to a stream's first event
    stall_s: float  # from then on
    heartbeat_s: float
    client_write_s: float


# For callers with a deadline of their own.
ENDLESS: Final = Patience(math.inf, math.inf, math.inf, math.inf)


def _never(since: float, now: float) -> bool:
    return False


class Silence(msgspec.Struct, gc=False):
    """The silence of one backend in one request, from the sending of its request to the end of its reply.

    Silence alone does not prove that a request is dead: a tool parser may withhold its text for
    minutes, and a long prompt takes as long to read. So when the limit has passed, `works(since, now)`
    is asked whether the engine made progress meanwhile. If so, the same limit starts again.
    `timeouts.total` bounds all of it. Times are monotonic seconds.
    """

    patience: Patience
    since: float
    works: Callable[[float, float], bool] = _never
    need: Need | None = None  # of the request; None: it is none of a client's
    pulse: Pulse | None = None  # of its backend; None: nothing tells that it was forgotten
    most_tokens: int | None = None  # of each sequence of its reply; None: not bounded
    sent_at: float = math.inf
    wrote_before: float = 0.0  # `Pulse.each_wrote_tokens` when it was sent
    was_broken: bool = False
    heard_at: float = -math.inf  # the last byte, to half a second
    open_at: float = math.inf  # since when we listen and hear nothing; inf before the first byte

    @property
    def limit_s(self) -> float:
        """How long it may last now."""
        return self.patience.stall_s if self.was_broken else self.patience.first_byte_s

    def broken(self, now: float) -> None:
        """Note that the backend said something."""
        self.was_broken = True
        self.since = self.heard_at = self.open_at = now

    def answered(self) -> None:
        """Note that its engine has begun a reply, of which a parser may hold back all for long."""
        self.pulse = None

    def restart(self, now: float) -> None:
        """Count from now: until now the backend had nothing to say, or nobody listened."""
        self.since = now
        if self.was_broken:
            self.open_at = now
        elif self.pulse is not None:
            self.sent_at, self.wrote_before = now, self.pulse.each_wrote_tokens

    def suspend(self) -> None:
        """Count nothing until `restart`: the backend waits for us, or nobody listens."""
        self.since = math.inf

    def too_long(self, now: float) -> bool:
        """Whether the limit has passed and nothing proves that the engine works, or it has forgotten the request."""
        if self.is_forgotten(now):
            return True
        if now - self.since < self.limit_s:
            return False
        if self.works(self.since, now):
            self.since = now
            return False
        return True

    def is_forgotten(self, now: float) -> bool:
        """Whether its engine has surely no such request any more."""
        pulse, need = self.pulse, self.need
        if pulse is None or need is None or self.was_broken or self.since == math.inf:
            return False
        if now - self.sent_at < self.patience.stall_s or not pulse.sees_steps:
            return False
        tokens = need.sequences * (self.most_tokens or math.inf)  # no more is its own
        steps = tokens + need.prompt_tokens / _READ_PER_STEP
        return pulse.each_wrote_tokens - self.wrote_before >= _TIMES_OVER * steps

    def error(self, now: float) -> BackendTimeout:
        """Return the error for a silence that is too long (504)."""
        if self.is_forgotten(now):
            return RequestForgotten(
                "The backend works on other requests, and has forgotten this one. Please retry."
            )
        return BackendTimeout(
            f"The backend sent nothing for {self.limit_s:.0f} s, and nothing shows that it still works on "
            "this request. Please retry later."
        )


def silence_of(patience: Patience, now: float, backend: Backend, ask: Ask) -> Silence:
    """Return the silence of a client's request that is sent to a backend now."""
    call = ask.call
    is_text = call.text_bytes is not None or call.prompt_token_ids
    searches = _BEAM_SEARCH in (call.fields or call.places or ())  # an ordinary body has neither
    if call.endpoint in _ONLY_ENGINE and is_text and not searches:
        most, pulse = ask.demand.max_new_tokens or ask.route.widest_tokens, backend.pulse
        wrote = pulse.each_wrote_tokens
        return Silence(patience, now, backend.works, ask.need, pulse, most, now, wrote)
    return Silence(patience, now, backend.works, ask.need)


def waits_of(silences: Iterable[Silence], heard_at: float) -> Waits:
    """Return what the requests at one backend wait for; `heard_at` is when a reply last ended."""
    oldest_at = oldest_stream_at = math.inf
    unread: list[tuple[float, int]] = []
    for silence in silences:  # 0.1 us each: there may be ten thousand
        since, need = silence.since, silence.need
        if silence.heard_at > heard_at:
            heard_at = silence.heard_at
        if since == math.inf or need is None:
            continue  # the backend waits for us, or the client does not read
        if since < oldest_at:
            oldest_at = since
        if since < oldest_stream_at and need.streams:
            oldest_stream_at = since
        if not silence.was_broken:
            unread.append((since, need.prompt_tokens))
    return Waits(heard_at, oldest_at, oldest_stream_at, tuple(unread))
