"""The pulse of one backend: when it last gave a sign of life, and how long it may give none.

A sign of life is a byte of a reply to one of our requests, or a step that a scrape shows. Between two
of them the backend is quiet, if a request of ours waits for it. How long that may last is learnt from
how long it lasted before: a step that reads much of a prompt, a tool parser that holds back its text,
and a server short of processor time make it quiet too. It is fed twice a second, not per request.

    patience    quiet for longer is unusual: a suspicion, no more
    reading     what the largest prompt may take that may be read now; it may show no sign meanwhile
    canary      the deadline of a test request, which queues behind all that is there

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.core.types import LoadSample

_LEAST_S: Final = 4.0  # two scrapes may fail, and this process may be late
_BLIND_S: Final = 15.0  # without metrics: a parser may hold back the text of all streams there are
_TIMES: Final = 2.0  # the longest usual silence
_MOST_USUAL_S: Final = 10.0  # a freeze that ended is not to become the usual
_HALF_LIFE_S: Final = 600.0
# A prompt may be read four times slower, for each token, than the best lately: attention to a long
# one costs more, and what was in the prefix cache was not read at all.
_SLOWER: Final = 4.0
# Tokens of one request: a counter that grows faster is another server's at the same address.
_EACH_PER_S: Final = 300.0
_UNKNOWN_TOKENS_PER_S: Final = 100.0  # a large model on a few CPU cores
_TOGETHER_S: Final = 1.0  # what is sent so soon after a silence begins may be in the same step


@dataclass(frozen=True, slots=True)
class Waits:
    """What the requests at one backend wait for, as its connections show it at one moment.

    `unread` are those without any byte so far: when each was sent, and the tokens of its prompt.
    """

    heard_at: float = -math.inf  # the last byte of any reply
    oldest_at: float = math.inf  # since when the one waits that waits longest; inf: none waits
    oldest_stream_at: float = math.inf  # likewise of streams, of which more bytes are to come soon
    unread: tuple[tuple[float, int], ...] = ()


@dataclass(slots=True)
class Pulse:
    """Signs of life of one backend. Its one owner feeds it."""

    heard_at: float = -math.inf  # a byte of a reply
    stepped_at: float = -math.inf  # a scrape that shows a step
    # The last scrape before which a request may have missed a step: it waited, was preempted, or nobody looked.
    held_up_at: float = math.inf
    # Tokens that a request got which was in the engine all the time, while nothing waited there.
    each_wrote_tokens: float = 0.0
    sees_steps: bool = False  # its metrics are fresh
    starts: bool = False  # it starts slowly: kernels are compiled on the way
    usual_quiet_s: float = 0.0  # the longest silence lately that ended by itself
    usual_wait_s: float = 0.0  # the longest lately for a first byte, while it gave signs of life
    waits: Waits = field(default_factory=Waits)
    _most_sequences: int = 0  # of requests at a time, since the last scrape
    _learnt_at: float = -math.inf

    @property
    def moved_at(self) -> float:
        """When it last gave a sign of life."""
        return max(self.heard_at, self.stepped_at)

    # --- fed ---

    def listen(self, waits: Waits, now: float) -> None:
        """Take in what its requests wait for."""
        if waits.heard_at > self.heard_at:
            self._ended(waits.heard_at)
            self.heard_at = waits.heard_at
        self.waits = waits
        if waits.unread and now - self.moved_at < _LEAST_S:
            self.usual_wait_s = max(self.usual_wait_s, now - min(waits.unread)[0])

    def holds(self, sequences: int) -> None:
        """Note how many sequences requests have there now."""
        if sequences > self._most_sequences:
            self._most_sequences = sequences

    def scraped(
        self, before: LoadSample | None, sample: LoadSample, stale_s: float, sequences: int
    ) -> None:
        """Note what its engine did since the scrape before. Requests have so many sequences there now."""
        most, self._most_sequences = self._most_sequences, sequences
        unseen = before is None or sample.at - before.at > stale_s
        if before is None or unseen or sample.waiting or before.preemptions != sample.preemptions:
            self.held_up_at = sample.at
            return
        written = max(0.0, sample.generation_tokens - before.generation_tokens)
        each = written / max(1, before.running, sample.running, most)
        self.each_wrote_tokens += min(each, _EACH_PER_S * (sample.at - before.at))

    def stepped(self, at: float) -> None:
        """Note a scrape that shows a step since the one before."""
        self._ended(at)
        self.stepped_at = at

    def forgive(self, now: float) -> None:
        """Hold nothing of the time before against it: this process itself stood still."""
        self.heard_at = now

    def _ended(self, at: float) -> None:
        """Learn how long it was quiet until this sign of life."""
        if at > self._learnt_at > -math.inf:
            faded = math.exp2((self._learnt_at - at) / _HALF_LIFE_S)
            self.usual_quiet_s *= faded
            self.usual_wait_s *= faded
        self._learnt_at = max(at, self._learnt_at)
        self.usual_quiet_s = max(self.usual_quiet_s, min(self.quiet_s(at), _MOST_USUAL_S))

    # --- asked ---

    def quiet_s(self, now: float) -> float:
        """Return for how long a request of ours has waited without a sign of life; 0 when none waits.

        Without metrics, one that does not stream gives none until its end, and does not count.
        """
        return max(0.0, now - self._quiet_since)

    @property
    def _quiet_since(self) -> float:
        waits = self.waits
        oldest_at = waits.oldest_at if self.sees_steps else waits.oldest_stream_at
        return max(self.moved_at, oldest_at)

    def patience_s(self, prompt_tokens_per_s: float | None) -> float:
        """Return for how long it may be quiet, by what is usual there and by what it may read."""
        least_s = _LEAST_S if self.sees_steps and not self.starts else _BLIND_S
        return max(least_s, _TIMES * self.usual_quiet_s) + self.reading_s(prompt_tokens_per_s)

    def reading_s(self, prompt_tokens_per_s: float | None) -> float:
        """Return how long the largest prompt may take that may be read since it became quiet."""
        until = self._quiet_since + _TOGETHER_S
        largest = max((tokens for at, tokens in self.waits.unread if at <= until), default=0)
        return _reading_s(largest, prompt_tokens_per_s)

    def canary_s(self, token_s: float, prompt_tokens_per_s: float | None, *, queues: bool) -> float:
        """Return how long a test request may take, of which an idle engine needs `token_s` at most.

        It waits for all prompts that are unread, and where it `queues`, for twice as long as others did.
        If there was a sign of life after it was sent, its failure proves nothing all the same.
        """
        unread = sum(tokens for _, tokens in self.waits.unread)
        waits_s = _TIMES * self.usual_wait_s if queues else 0.0
        return token_s + waits_s + _reading_s(unread, prompt_tokens_per_s)


def _reading_s(tokens: int, tokens_per_s: float | None) -> float:
    if tokens_per_s is None:
        return tokens / _UNKNOWN_TOKENS_PER_S
    return _SLOWER * tokens / tokens_per_s
