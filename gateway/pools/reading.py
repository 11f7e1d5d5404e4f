"""How fast a backend reads prompts, and how much of them may be unread there at a time. Pure.

An engine reads many short prompts in one step. So the time of one alone tells how long a step takes, and
not how much goes into it: what is read together within about a second counts as well, and the best holds.

A measurement counts once a scrape has come that was asked for after it. Two things follow:

    cold start   for a second or two nothing is known, and as much may be unread as comes. The first prompts alone
                 would show far less than an engine reads together: simulated engines that met four times their
                 load at once served .84, .84 and .95 of what they serve warm (.48 at worst) when those counted
    hits         an engine does not read what it finds in its prefix cache. Where nobody here knows how much of
                 which prompt that was, a prompt that is measured alone is charged with all hits since the
                 scrape before it was sent, and what was read together with its share of them. Where that
                 leaves nothing, the last ten scrapes tell how much was read between them

All this shows no more than was asked of an engine. So prompts that it read in time beside others show at once
that more may be unread. Where the rate alone counted, 200 streams that came one after the other to an engine
that answers each after 50 ms got two thirds of what they asked for.

A batch that is full reads nothing until one of its requests ends. The metrics show it two scrapes later; the
prompts show it at once: the oldest waits longer than all that may be unread takes to be read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from gateway.core.types import Credit
from gateway.pools.rate import Rate

_AHEAD_S: Final = 0.05  # two steps of an engine under load
_IN_TIME_S: Final = _AHEAD_S / 2  # a prompt that waits no longer for those before it is in time
_NOT_AT_ALL_S: Final = _IN_TIME_S / 4  # it hardly waits
# Of what may be unread, once a prompt was late. With a half, an engine that reads 10,000 tokens/s and had most of
# each prompt cached read .78 to .84 of what it can, as much had to be found out anew each time; .94 to .96 with this.
_LESS: Final = 0.6
_TRIAL_S: Final = 0.2  # a prompt that took longer alone was read for most of it
_TRIED_S: Final = 10.0  # after a prompt was late, none is tried
_BESIDE_HIGHEST_S: Final = 0.015  # while the highest priority comes: below a step of a fast engine
_AHEAD_LEAST_TOKENS: Final = 512  # a rate is a lower bound; a few short prompts go together
_FOLLOWED: Final = 1024  # prompts: of more the oldest are not looked after
_SAME_S: Final = 1e-6  # two moments that are no further apart are one, but for rounding
_STRETCH_S: Final = 1.0
_FORGOTTEN_S: Final = 600.0  # the quickest first token counts as twice as slow after it
_SCRAPES: Final = 64  # whose counts are kept: what took longer tells nothing
_MEASURED: Final = 1024  # measurements that wait for a scrape; more are dropped until it comes
_MEAN_OF: Final = 10  # scrapes
_STEPS: Final = 2  # of a prompt to its first token: the one under way, and the one that reads it
_STREAMS: Final = 8  # that ended last; the quickest of them was held up by its client least


class Counted(NamedTuple):
    """What has been counted when a scrape came."""

    at: float
    hits: float  # prompt tokens that were found cached, ever, nobody here knows of which prompts
    read_tokens: int  # of prompts that have their first token, ever
    unread_tokens: int  # of those that have none yet


class Measured(msgspec.Struct, frozen=True, gc=False):
    """Tokens that were read up to a moment, or found cached."""

    now: float
    seconds: float
    tokens: int
    alone: bool  # one prompt's, of which the seconds are those of its first token


@dataclass(slots=True)
class Reading:
    """What one backend has shown of its reading. Its one owner feeds it."""

    rate: Rate = field(default_factory=partial(Rate, _AHEAD_LEAST_TOKENS))
    _quickest: tuple[float, int, float] = (math.inf, 0, 0.0)  # first token: seconds, prompt, when
    _in_time_tokens: float = 0.0  # may be unread, by prompts that were read in time beside others
    _late_at: float = -math.inf  # when one was late: what was sent before shows nothing more
    # The stretch in which tokens are counted. What was unread when it began may have been read in part.
    _began: float = -math.inf
    _read_tokens: int = 0
    _before_tokens: int = 0
    # Prompts that no later one has overtaken, the oldest first: when each was sent.
    _sent: deque[tuple[float, Credit]] = field(default_factory=lambda: deque(maxlen=_FOLLOWED))
    _counted: deque[Counted] = field(default_factory=lambda: deque(maxlen=_SCRAPES))
    _all_tokens: int = 0  # of prompts that have their first token, ever
    _waits: deque[Measured] = field(default_factory=deque)
    _gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STREAMS))
    _slower_s: float = 0.0  # by so much a step is longer than the shortest of the last minutes

    def comes(self, now: float, credit: Credit, unread_tokens: int) -> None:
        """Note that a prompt was sent; it is one of those that are unread. With no other a stretch begins."""
        if credit.read_at is None:  # else nobody sees when it is read
            self._sent.append((now, credit))
            unread_tokens -= credit.unread_tokens
        if not unread_tokens:
            self._began, self._read_tokens, self._before_tokens = now, 0, 0

    def first_token(
        self, now: float, ttft_s: float, tokens: int, unread_tokens: int, before_tokens: int
    ) -> None:
        """Note a prompt that was read, beside what is unread still. Those sent before it are being read.

        `before_tokens` of others were unread when it was sent.
        """
        quickest_s, _, at = self._quickest
        if ttft_s * math.exp2((at - now) / _FORGOTTEN_S) <= quickest_s:  # the power never grows
            self._quickest = ttft_s, tokens, now
        self._judge(now, ttft_s, tokens, before_tokens)
        sent = self._sent
        while sent and (sent[0][0] < now - ttft_s - _SAME_S or not _unread(sent[0][1])):
            sent.popleft()
        self._measured(Measured(now, ttft_s, tokens, alone=True))
        self._read_tokens += tokens
        self._all_tokens += tokens
        stretch_s = now - self._began
        if stretch_s >= ttft_s:  # all of this one's reading lies in it
            together = self._read_tokens - self._before_tokens
            self._measured(Measured(now, stretch_s, together, alone=False))
        if stretch_s >= _STRETCH_S and stretch_s >= 2 * ttft_s:
            self._began, self._read_tokens, self._before_tokens = now, 0, unread_tokens

    def scraped(self, at: float, hits: float, unread_tokens: int) -> None:
        """Take in a scrape: what it tells of hits (see `Counted`), and what is unread now."""
        known = self._counted
        if known and hits < known[-1].hits:  # another process
            known.clear()
            self._waits.clear()
        asked_after = known[-1].at if known else -math.inf
        while self._waits and self._waits[0].now <= asked_after:
            self._count(self._waits.popleft(), hits)
        known.append(Counted(at, hits, self._all_tokens, unread_tokens))
        if len(known) > _MEAN_OF:
            before = known[-1 - _MEAN_OF]
            read_tokens = self._all_tokens - before.read_tokens - before.unread_tokens
            self.rate.learn(at, at - before.at, max(0, int(read_tokens - (hits - before.hits))))

    def wrote(self, gap_s: float, least_s: float) -> None:
        """Note a stream that ended: it got a token each `gap_s`; at best one gets one each `least_s`."""
        self._gaps_s.append(gap_s)
        slower_s = min(self._gaps_s) - least_s
        self._slower_s = slower_s if slower_s > 0.0 else 0.0

    def unseen(self) -> None:
        """Note that no scrapes come any more: what is measured counts at once, as it is."""
        self._counted.clear()
        while self._waits:
            self._learn(self._waits.popleft())

    def _measured(self, measured: Measured) -> None:
        if not self._counted:
            self._learn(measured)
        elif len(self._waits) < _MEASURED:
            self._waits.append(measured)

    def _count(self, measured: Measured, hits: float) -> None:
        known = self._counted
        if hits > known[0].hits:
            began = bisect_right(known, measured.now - measured.seconds, key=_at) - 1
            before = known[max(began, 0)]
            found_tokens = hits - before.hits
            if not measured.alone:  # its share
                all_tokens = self._all_tokens - before.read_tokens
                found_tokens *= min(1.0, measured.tokens / max(1, all_tokens))
            tokens = measured.tokens - math.ceil(found_tokens)
            measured = structs.replace(measured, tokens=tokens)
        self._learn(measured)

    def _learn(self, measured: Measured) -> None:
        self.rate.learn(measured.now, measured.seconds, max(0, measured.tokens))

    def _judge(self, now: float, ttft_s: float, tokens: int, before_tokens: int) -> None:
        """Learn from how long a prompt waited for those before it: twice as much may be unread, more, or less.

        Its wait is the time by which its first token came later than the quickest, less what its longer prompt takes,
        less what longer steps take: those of a large batch take long, however little is unread.
        Of its own tokens only so many count as others may wait for. A prompt that was alone does not show how
        much of its time was reading: if it was as quick as any, a second one beside it is tried.
        """
        quickest_s, quickest_tokens, _ = self._quickest
        if not before_tokens:
            is_quick = ttft_s <= min(quickest_s + _NOT_AT_ALL_S, _TRIAL_S)
            if is_quick and now - self._late_at > _TRIED_S:
                self._in_time_tokens = max(self._in_time_tokens, 2.0 * tokens)
            return
        ttft_s = max(ttft_s, 0.001)
        rate = self.rate.at(now) or 0.0
        per_s = max(rate, (before_tokens + tokens) / ttft_s)
        longer_s = (tokens - quickest_tokens) / per_s if tokens > quickest_tokens else 0.0
        waited_s = ttft_s - quickest_s - longer_s - _STEPS * self._slower_s
        if waited_s <= _IN_TIME_S:
            times = 2.0 if waited_s <= _NOT_AT_ALL_S else 1 + (_IN_TIME_S - waited_s) / ttft_s
            own_tokens = min(tokens, per_s * _AHEAD_S)
            in_time_tokens = times * (before_tokens + own_tokens)
            beside_tokens = before_tokens + own_tokens + tokens
            if beside_tokens > self._allowed_tokens(rate):
                # One more like it had to wait, and need not.
                in_time_tokens = max(in_time_tokens, before_tokens + 2 * own_tokens)
            self._in_time_tokens = max(self._in_time_tokens, in_time_tokens)
        elif now - ttft_s >= self._late_at:
            self._in_time_tokens, self._late_at = _LESS * self._in_time_tokens, now

    def ahead_tokens(self, now: float, *, beside_highest: bool = False) -> float:
        """Return how much of prompts may be unread at a time; infinite while no prompt was read.

        An engine reads prompts in the order in which they came: what is unread is waited for by all who
        come later, and no priority or fair share can change the order any more. It is less of others'
        prompts beside the highest of several priorities. What comes in
        the time that an idle engine takes to answer is under way, not ahead: else one that answers late
        could never show how much it reads at a time (Little's law).

        Where the oldest waits for longer than all this takes, the batch is full: then no more than a few
        short prompts are unread beside it. They may overtake it, for an engine can hold up one alone.
        """
        rate = self.rate.at(now)
        if rate is None:
            return math.inf
        if self._overdue_s(now, rate) > _AHEAD_S:
            return self._sent[0][1].unread_tokens + _AHEAD_LEAST_TOKENS
        if beside_highest:
            per_s = max(rate, self._in_time_tokens / (_AHEAD_S + self._answers_s(rate)))
            return max(per_s * _BESIDE_HIGHEST_S, _AHEAD_LEAST_TOKENS)
        return self._allowed_tokens(rate)

    def overdue_s(self, now: float) -> float:
        """Return how late the oldest unread prompt is; 0 while nobody knows.

        Its own reading, and the time in which an idle engine answers, are not late. Where it is late, the batch
        is probably full, and a request that is sent there now waits about as long.
        """
        rate = self.rate.at(now) if self._sent else None
        return 0.0 if rate is None else self._overdue_s(now, rate)

    def _overdue_s(self, now: float, rate: float) -> float:
        sent = self._sent
        while sent and not _unread(sent[0][1]):
            sent.popleft()
        if not sent:
            return 0.0
        sent_at, credit = sent[0]
        return max(0.0, now - sent_at - self._answers_s(rate) - credit.unread_tokens / rate)

    def _allowed_tokens(self, rate: float) -> float:
        """Return how much may be unread, but for what one prompt that waits for long tells."""
        read_in_time = max(rate * (_AHEAD_S + self._answers_s(rate)), self._in_time_tokens)
        return max(read_in_time, _AHEAD_LEAST_TOKENS)

    def _answers_s(self, rate: float) -> float:
        """Return what a first token takes beside the reading, by the quickest."""
        seconds, tokens, _ = self._quickest
        return max(0.0, seconds - tokens / rate) if rate and seconds < math.inf else 0.0


def _unread(credit: Credit) -> bool:
    return credit.held and credit.read_at is None


def _at(counted: Counted) -> float:
    return counted.at
