"""The KV room of one backend: how many more tokens it may take, and when it takes none.

What is in its KV cache is projected from the last scrape and from what we credited to our own
requests (prompt plus expected output):

    scraped usage                                the truth, at the time of the scrape
  - what has ended since                         it was counted, and is free again
  + fresh requests, their whole need             sent since, or their prompt is still being read
  - half of what these have yet to write         if their first token came, see `Writing`
  + a quarter of the older ones' expected output   what they will grow by

An older request's prompt is in the scraped usage, and so is what it has written: half of the output,
as requests are met at all points of their life alike. Of the half to come half counts, for while it
is written others end, and free more than it takes. So it is with fresh ones, whose pace is known.

What is credited is an upper bound, and scrapes show by how much: see `Trust`. Without a fresh scrape the
usage is unknown, not none: then all that is in flight counts, whatever has been written of it.

While a pool is not overloaded, the most that the cache will ever hold takes the place of the projection: see
`Peak`. In an overload it would let in long requests in place of many short ones.

Closing has hysteresis, on the scraped usage alone: closed from `stop_ratio`, open again below
`resume_ratio`, `dwell_s` at least in either. Meanwhile it is filled up to `resume_ratio` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.core.types import Credit, Exclusion, LoadSample, Need
from gateway.pools.elsewhere import NOTHING, UnderWay
from gateway.pools.peak import Peak
from gateway.pools.shares import Shares
from gateway.pools.trust import Trust
from gateway.pools.writing import Writing

LEAST: Final = Need(1, 0, streams=True)  # a backend without room for it is full
_WRITTEN: Final = 0.5  # of the expected output, by a request met at a random point of its life
# Of the expected output, on top of the scraped usage. Simulated engines of 3,200 to 64,000 tokens at
# 2 to 4 times their load: with the whole half to come they had no preemption at all, but wrote up to
# a quarter less; with a quarter 0 to 3 preemptions, with a tenth 5 to 11, without a gateway 130 to 1,950.
_GROWTH: Final = 0.25
_LEFT: Final = _GROWTH / _WRITTEN  # of what is left to write: the same, where that is known
_RESERVE: Final = 0.1  # of the capacity: two long requests of a twentieth, or dozens of short ones
# Of the capacity: enough room for a batch to begin, however large it is. A stop ratio of 0.9 less two
# reserves leaves it while a tenth of the cache, or less, is in use. A simulated engine of 10,240 tokens,
# with batches of 12,400 among chats: 22 preemptions in 15 s at 0.4, 9 at 0.6, none at 0.8, and 3 to 5 %
# fewer requests served at each; 27 when a batch counted as its longest prompt.
_BEGINS: Final = 0.6
_QUEUE_SHARE: Final = 0.5  # of running: less is for the concurrency limit to see in two scrapes


@dataclass(frozen=True, slots=True)
class Projection:
    """What the KV cache is thought to hold, for people; None where it is unknown or there is none."""

    tokens: int | None
    ratio: float | None


@dataclass(slots=True)
class Room:
    """The room of one backend. Its one owner feeds it, asks `verdict`, and may change the settings."""

    stop_ratio: float = 0.90
    resume_ratio: float = 0.80
    dwell_s: float = 2.0  # two scrapes: one odd value opens or closes nothing for long
    stale_s: float = 3.0  # age from which a scrape says nothing about the load
    max_waiting: int = 4  # in the engine's queue, about what one step takes in; or half its batch
    open: bool = True
    changed_at: float = -math.inf
    capacity_tokens: int | None = None  # the last one known; None too where the model uses no cache
    sequences: int = 0  # in flight: what our requests are in the engine's own counts
    _sample: LoadSample | None = None
    _scrapes: int = 0
    # Of requests whose prompt is not read yet, was read since the last scrape, or before it. Fresh are the
    # first two; a sum that can be made of these is made when it is asked for.
    _coming_tokens: int = 0
    _coming_output: int = 0
    _read_prompt: int = 0
    _read_output: int = 0
    _old_prompt: int = 0
    _old_output: int = 0
    unread_tokens: int = 0  # to be read of the prompts of streams whose first token has not come
    _unseen_tokens: int = 0  # the same of others; the next scrape is taken to show them read
    writing: Writing = field(default_factory=Writing)
    _ended_tokens: float = 0.0
    _begun: int = 0  # sequences whose first token has come since the last scrape
    trust: Trust = field(default_factory=Trust)
    peak: Peak = field(default_factory=Peak)
    shares: Shares = field(default_factory=Shares)
    # Counted ever, but for requests that ended before a scrape could show them:
    _read_before_tokens: int = 0  # whole needs of those that were read, up to the last scrape
    ended_tokens: int = 0  # what those that ended should have held
    elsewhere: UnderWay = NOTHING  # at other gateways, as they told last
    _read_elsewhere: int = 0  # since the last scrape
    _ended_elsewhere: int = 0  # since the last scrape
    # The common case in one look: until then the last scrape showed nothing that forbids, and so
    # much room beside what is fresh at most. What ends meanwhile only adds to it.
    _clear_until: float = -math.inf
    _surely_free: float = 0.0
    _all_fits: float = 0.0  # likewise, if everybody took its whole need at the same time

    # --- fed ---

    def take(
        self, prompt_tokens: int, output_tokens: int, *, streams: bool = True, tenant: str = "",
        sequences: int = 1, cached_tokens: int = 0,
    ) -> Credit:  # fmt: skip
        """Credit a request that goes to the backend; give it back through `give_back`.

        `output_tokens` is what is expected, not what is allowed. One that streams is fresh until
        `first_token`; of one that does not, nobody sees when its prompt is read: the next scrape is
        taken to show it. A batch that is larger than the cache is credited with the whole cache.
        `cached_tokens` of the prompt need not be read; they take their room all the same.
        """
        need_tokens, capacity = prompt_tokens + output_tokens, self.capacity_tokens
        if capacity is not None and need_tokens > capacity:
            prompt_tokens = min(prompt_tokens, capacity)
            output_tokens = capacity - prompt_tokens
        tokens = prompt_tokens + output_tokens
        self.sequences += sequences
        self.shares.take(tenant, tokens)
        unread_tokens = prompt_tokens - cached_tokens if cached_tokens < prompt_tokens else 0
        unread_before = self.unread_tokens + self.elsewhere.unread_tokens
        if streams:
            read_at = None
            self.unread_tokens += unread_tokens
            self._coming_tokens += tokens
            self._coming_output += output_tokens
        else:
            read_at = self._scrapes
            self._unseen_tokens += unread_tokens
            self._read_prompt += prompt_tokens
            self._read_output += output_tokens
        credit = Credit(
            prompt_tokens, output_tokens, need_tokens, unread_tokens, unread_before, read_at,
            tenant=tenant, sequences=sequences,
        )  # fmt: skip
        if streams and sequences == 1:
            self.peak.take(credit)
        return credit

    def first_token(self, credit: Credit, now: float) -> None:
        """Note that the prompt has been read: from the next scrape on, usage shows it."""
        if credit.held and credit.read_at is None:
            prompt, output = credit.prompt_tokens, credit.output_tokens
            credit.read_at = self._scrapes
            self._begun += credit.sequences
            self.unread_tokens -= credit.unread_tokens
            credit.unread_tokens = 0
            self._coming_tokens -= prompt + output
            self._coming_output -= output
            self._read_prompt += prompt
            self._read_output += output
            if credit.sequences == 1:  # several write faster than the pace of one
                credit.began_at = now
                self.writing.begins(now, output)
                self.peak.changed()

    def give_back(self, credit: Credit) -> None:
        """Take back a credit, however the request ended; further calls do nothing."""
        if not credit.held:
            return
        credit.held = False
        self.peak.give_back(credit)
        self.sequences -= credit.sequences
        prompt, output = credit.prompt_tokens, credit.output_tokens
        self.shares.give_back(credit.tenant, prompt + output)
        if credit.read_at is None:
            self.unread_tokens -= credit.unread_tokens
            self._coming_tokens -= prompt + output
            self._coming_output -= output
        elif credit.read_at == self._scrapes:
            self._unseen_tokens -= credit.unread_tokens
            self._read_prompt -= prompt
            self._read_output -= output
            self.writing.ends(credit.began_at, output)
        else:
            self._old_prompt -= prompt
            self._old_output -= output
            held_tokens = prompt + _WRITTEN * output
            self.ended_tokens += int(held_tokens)
            self._ended_tokens += self.trust.share * held_tokens

    def hear(self, elsewhere: UnderWay) -> None:
        """Take in what other gateways have under way; of what is counted over all time, what came since."""
        self.elsewhere = elsewhere
        if elsewhere is not NOTHING:
            self.peak.joined()
        self._read_elsewhere += elsewhere.read_tokens
        self._ended_elsewhere += elsewhere.ended_tokens

    def observe(self, sample: LoadSample) -> None:
        """Take in a scrape, which may open or close the backend."""
        self._sample = sample
        self._scrapes += 1
        self._begun = 0
        if sample.kv_capacity_tokens is not None:
            self.capacity_tokens = sample.kv_capacity_tokens or None
        self._read_before_tokens += self._read_prompt + self._read_output
        self._old_prompt += self._read_prompt
        self._old_output += self._read_output
        self._read_prompt = self._read_output = self._unseen_tokens = 0
        self.writing.scraped()
        self._read_elsewhere, self._ended_elsewhere, self._ended_tokens = 0, 0, 0.0
        credited = self._old_prompt + _WRITTEN * self._old_output + self.elsewhere.seen_tokens
        self.trust.scraped(sample, self.capacity_tokens, credited)
        capacity, gap_s = self.capacity_tokens or 0, self.writing.gap_s or 0.0
        ours = self.sequences if self.elsewhere is NOTHING else None
        self.peak.scraped(sample, ours, capacity, gap_s)
        self._move(sample)
        self._surely_free = self._clear_room(sample)
        most = (self.stop_ratio - self.trust.spared_ratio) * capacity
        self._all_fits = most - self.peak.beyond_tokens
        self._clear_until = sample.at + self.stale_s if self._surely_free > 0 else -math.inf

    def _move(self, sample: LoadSample) -> None:
        usage = sample.kv_usage_ratio
        if usage is None or sample.at - self.changed_at < self.dwell_s:
            return
        if usage >= self.stop_ratio if self.open else usage < self.resume_ratio:
            self.open, self.changed_at = not self.open, sample.at

    def _clear_room(self, sample: LoadSample) -> float:
        """Return the room that is there whatever ends or not until the next scrape; 0: look closer."""
        capacity, usage = self.capacity_tokens, sample.kv_usage_ratio
        if capacity is None or usage is None or not self.open or self._queued(sample):
            return 0.0
        grows = _GROWTH * self.trust.share * (self._old_output + self.elsewhere.growing_tokens)
        return (self.stop_ratio - self.trust.spared_ratio - usage) * capacity - grows

    def _queued(self, sample: LoadSample) -> bool:
        waiting = sample.waiting - self._begun  # those have left the queue since
        return waiting >= max(self.max_waiting, _QUEUE_SHARE * sample.running)

    # --- asked ---

    def asked(self, need: Need) -> int:
        """Return the room that a request asks for.

        Those sequences of a batch that do not fit run once earlier ones have ended. So a batch larger than the
        whole cache goes to a backend that is nearly idle.
        """
        tokens, capacity = need.prompt_tokens + need.output_tokens, self.capacity_tokens
        if need.sequences == 1 or capacity is None:
            return tokens
        return min(tokens, int(_BEGINS * capacity))

    def verdict(
        self, need: Need, now: float, reserves: int = 0, *, by_peak: bool = True
    ) -> Exclusion | None:
        """Return why a request may not go in, None if it may.

        For each of the `reserves` a tenth of the cache stays free for others. `by_peak`: `Peak` may decide.

        An idle backend takes whatever it can hold at all: a request over `stop_ratio` would find no
        better time.
        """
        capacity, usage, full = self.capacity_tokens, None, False
        single = need.sequences == 1
        need_tokens = need.prompt_tokens + need.output_tokens if single else self.asked(need)
        reserve = reserves * _RESERVE * (capacity or 0)
        # As `_all_fresh` does: each request pays for a call.
        fresh_tokens = self._coming_tokens + self._read_prompt + self._read_output
        fresh_tokens += self.elsewhere.coming_tokens + self._read_elsewhere
        if now <= self._clear_until:
            if by_peak and self.peak.knows(self.sequences):
                whole_tokens = self.shares.tokens + self.peak.blocks_tokens
                if need_tokens + whole_tokens + reserve <= self._all_fits:
                    return None
            elif need_tokens + self.trust.share * fresh_tokens + reserve <= self._surely_free:
                return None
        if capacity is not None and need_tokens > capacity:
            return Exclusion.TOO_LARGE
        sample = self._latest(now)
        seen = 0 if sample is None else sample.running + sample.waiting
        if self.sequences == self.elsewhere.requests == seen == 0:
            return None
        if sample is not None:
            if self._queued(sample):
                return Exclusion.ENGINE_QUEUED
            usage = sample.kv_usage_ratio
            full = usage is not None and (not self.open or usage >= self.stop_ratio)
        why = Exclusion.KV_FULL if full else Exclusion.NO_KV_ROOM
        if capacity is None:
            return why if full else None
        most = (self.resume_ratio if full else self.stop_ratio) - self.trust.spared_ratio
        holds = self._with(need, capacity, usage, now, by_peak=by_peak)
        return None if holds + reserve <= most * capacity else why

    def _with(
        self, need: Need, capacity: int, usage: float | None, now: float, *, by_peak: bool
    ) -> float:
        """Return what the cache would hold with a request in it."""
        known = by_peak and usage is not None and need.streams and need.sequences == 1
        if known and self.peak.knows(self.sequences):
            return self.peak.with_one_more(need.prompt_tokens, need.output_tokens, now)
        return self.asked(need) + self._projected(capacity, usage, now)

    def left(self) -> tuple[int, int]:
        """Return the tokens that our requests still need: of prompts not known to be read, of outputs expected."""
        output_tokens = self._coming_output + self._read_output + self._old_output
        return self.unread_tokens + self._unseen_tokens, output_tokens

    def projection(self, now: float) -> Projection:
        """Return what the verdict goes by, for people."""
        sample, capacity = self._latest(now), self.capacity_tokens
        usage = sample.kv_usage_ratio if sample is not None else None
        if capacity is None:
            return Projection(None, usage)
        if usage is not None and self.peak.knows(self.sequences):
            tokens = self.peak.most(now)
        else:
            tokens = self._projected(capacity, usage, now)
        return Projection(int(tokens), tokens / capacity)

    def _latest(self, now: float) -> LoadSample | None:
        sample = self._sample
        return None if sample is None or now - sample.at > self.stale_s else sample

    def under_way(self, requests: int) -> UnderWay:
        """Return what there is of our `requests` for other gateways."""
        unread_tokens, output_tokens = self.left()
        return UnderWay(
            requests, unread_tokens, output_tokens, self._coming_tokens,
            int(self._old_prompt + _WRITTEN * self._old_output), self._old_output,
            self._read_before_tokens + self._read_prompt + self._read_output,
            self.ended_tokens, self.sequences,
        )  # fmt: skip

    def _all_fresh(self) -> int:
        """Return the fresh tokens, those of other gateways too."""
        ours = self._coming_tokens + self._read_prompt + self._read_output
        return ours + self.elsewhere.coming_tokens + self._read_elsewhere

    def _projected(self, capacity: int, usage: float | None, now: float) -> float:
        others, fresh_tokens = self.elsewhere, self._all_fresh()
        if usage is None:
            older = self._old_prompt + self._old_output
            older += others.seen_tokens + others.growing_tokens
            return self.trust.share * (fresh_tokens + older)
        ended = self._ended_tokens + self.trust.share * self._ended_elsewhere
        grows = _GROWTH * (self._old_output + others.growing_tokens)
        shown = max(0.0, usage * capacity - ended)
        spared = (1 - _LEFT) * self.writing.left_tokens(now)
        return max(0.0, shown + self.trust.share * (fresh_tokens - spared + grows))
