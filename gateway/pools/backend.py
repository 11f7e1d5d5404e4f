"""`Backend`: one vLLM server as it is now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.core.exclusion import Exclusion
from gateway.core.prefix import KvEvents, Prefix, PrefixIndex
from gateway.core.types import Endpoint, LoadSample, Need, Phase, Route, ServedModel, Slot
from gateway.pools.ejection import Probation, Tally
from gateway.pools.elsewhere import NOTHING, UnderWay
from gateway.pools.facts import HealthState
from gateway.pools.limit import Limit, unreserved
from gateway.pools.progress import moved
from gateway.pools.pulse import Pulse
from gateway.pools.rate import Rate
from gateway.pools.room import LEAST, Room
from gateway.pools.server import Server
from gateway.pools.speed import Speed
from gateway.pools.turnover import Turnover
from gateway.pools.work import BESIDE, USUAL_TOKENS, TokenCost, Work
from gateway.prefix.ranked import by_engine
from gateway.prefix.sessions import Sessions
from gateway.prefix.uses import Uses

# For so long after its last request the highest priority keeps a reserve: who paused to think is back by then.
_LATELY_S: Final = 60.0
# For so long its next one is expected, and long prompts of others stand back. Shorter: it costs them more.
HERE_S: Final = 10.0


@dataclass(slots=True, eq=False)
class Backend(Server):
    """One vLLM server as it is now. Only `PoolTable` writes it; do not keep one across an await."""

    # Settings; a reload may change them under way.
    guarded: bool = True  # admission is on; else only a configured limit holds
    stale_s: float = 3.0  # age from which a scrape says nothing about the load
    base_names: tuple[str, ...] = ()  # what the pool's model may be called here, best first
    share: float = 1.0  # of the pool's work, by its weight
    weighted: bool = False  # the backends of its pool have different weights
    zero_weight: bool = False  # its weight is 0
    kept_back: bool = False  # it lost a trial; a reload does not undo that, see `keep_back`
    plain: bool = False  # no vLLM: what it does not tell is unknown
    revision: str = ""
    on_trial: bool = False  # its revision is on trial
    away_s: float = 0.0  # added to its work, because others are nearer (`prefer`)
    only_base_name: bool = False  # `served_model` is configured: no guessing
    set_endpoints: frozenset[Endpoint] | None = None  # configured: wins over what it tells

    health: HealthState = field(default_factory=lambda: HealthState(since=0.0))
    phase: Phase = Phase.STARTING  # as in `health`, like the next: every choice reads it
    reason: str = "new"
    tally: Tally = field(default_factory=Tally)
    kept_out: bool = False  # it is ejected, and its pool can do without it
    probation: Probation | None = None  # it is tried again

    # Load.
    in_flight: int = 0
    since_scrape: int = 0  # of those, taken after the last scrape
    scrape_count: int = 0
    peak: int = 0  # most in flight at a time since the last scrape
    sample: LoadSample | None = None
    worked_at: float = -math.inf  # the last scrape that shows progress, with our requests in it
    highest_came_at: float = -math.inf  # to its pool, of the highest of several priorities
    limit: Limit = field(default_factory=Limit)
    room: Room = field(default_factory=Room)
    turnover: Turnover = field(default_factory=Turnover)
    pulse: Pulse = field(default_factory=Pulse)
    speed: Speed = field(default_factory=Speed)
    slowness: float = 1.0  # times that it is slower than its fastest peer
    writes: Rate = field(default_factory=Rate)  # tokens of all its streams in a second

    # What the choice between backends goes by: expected seconds.
    foreign: int = 1  # requests of strangers that it holds; one while nobody knows
    elsewhere: UnderWay = NOTHING  # at other gateways that share the store, as they told last
    gateways: int = 1  # that send to it, this one included
    token_cost: TokenCost = TokenCost()  # of its pool
    work: Work | None = None  # None: it has changed; see `weighed`
    new_prefix_index: Callable[[], PrefixIndex] | None = None  # makes that of one engine
    prefix_index: PrefixIndex | None = None  # what its prefix cache holds; None: `prefix: off`
    sessions: Sessions = field(default_factory=Sessions)
    uses: Uses = field(default_factory=Uses)  # of its pool
    telling: set[Endpoint | None] = field(default_factory=set)  # whose replies told what was cached

    # What it serves.
    models: dict[str, ServedModel] = field(default_factory=dict)
    base_model: str | None = None  # its name for the pool's model; None: it does not have that
    window_tokens: int | None = None
    endpoints: frozenset[Endpoint] | None = None
    version: str | None = None
    chats_take_ids: bool = True  # in place of their messages: see `wire.vllm`
    adapter_requests: dict[str, int] = field(default_factory=dict)  # requests in flight by adapter
    lacking: Mapping[str, Exclusion] = field(default_factory=dict)  # adapters kept from requests
    give_back: Callable[[Slot], None] | None = field(default=None, repr=False)

    def stale(self, now: float) -> bool:
        """Whether the last scrape is missing or too old to tell the load."""
        sample = self.sample
        return sample is None or now - sample.at > self.stale_s

    def works(self, since: float, now: float) -> bool:
        """Whether fresh metrics show that the engine made progress after `since`, with our requests in it."""
        return self.worked_at > since and not self.stale(now)

    def note_work(self, before: LoadSample | None, sample: LoadSample) -> None:
        """Note progress of the engine while all of our requests are in it, as far as a scrape can tell.

        Up to a tenth of them may be on their way in or out. If more are missing there, one may be lost.
        """
        ours = self.in_flight - self.since_scrape
        has_moved = before is not None and moved(before, sample)
        if has_moved:
            self.pulse.stepped(sample.at)
        if has_moved and sample.running and sample.running + sample.waiting >= ours - ours // 10:
            self.worked_at = sample.at

    def take(
        self, now: float, need: Need, tenant: str = "", prefix: Prefix | None = None, adapter: str | None = None
    ) -> Slot:  # fmt: skip
        """Count one request, and what it needs, until its slot is released."""
        self.in_flight += 1
        self.tally.sent += 1
        self.since_scrape += 1
        if (held := self.in_flight + self.elsewhere.requests) > self.peak:
            self.peak = held
        index = self.prefix_index
        sent = index.sent(prefix) if index is not None and prefix is not None else None
        if sent is not None:
            self.uses.sent(sent)
            if sent.prefix.session is not None:
                self.sessions.sent(sent)
        credit = self.room.take(
            need.prompt_tokens,
            need.output_tokens,
            streams=need.streams,
            tenant=tenant,
            sequences=need.sequences,
            cached_tokens=0 if sent is None else sent.cached_tokens,
        )
        self.pulse.holds(self.room.sequences + self.elsewhere.sequences)
        self.limit.reading.comes(now, credit, self.room.unread_tokens)
        if adapter is not None:
            self.adapter_requests[adapter] = self.adapter_requests.get(adapter, 0) + 1
        self.work = None
        slot = Slot(self.id, now, self.scrape_count, credit, self.give_back, sent, adapter)
        if self.probation is not None and not self.probation.is_taken(now):
            self.probation.slots[id(slot)] = slot
        return slot

    def tries(self, slot: Slot) -> bool:
        """Whether a slot's request was let through on probation, to show whether the backend works again."""
        return self.probation is not None and id(slot) in self.probation.slots

    def first_token(self, slot: Slot, now: float) -> None:
        """Note that the prompt of a request in flight has been read."""
        seconds, credit, room, limit = now - slot.taken_at, slot.credit, self.room, self.limit
        tokens = credit.unread_tokens
        if slot.sent is not None:  # what was cached after all was not read
            tokens = min(tokens, slot.sent.surely_read_tokens)
        room.first_token(credit, now)
        limit.reading.first_token(now, seconds, tokens, room.unread_tokens, credit.unread_before)
        limit.first_token(now, seconds, credit.prompt_tokens)
        if slot.sent is not None and self.prefix_index is not None:
            self.prefix_index.read(slot.sent)
        self.work = None

    def taken_back(self, slot: Slot) -> None:
        """Count a request no more, however it ended."""
        self.in_flight -= 1
        if self.probation is not None:
            self.probation.slots.pop(id(slot), None)
        if slot.adapter is not None and (left := self.adapter_requests.pop(slot.adapter) - 1):
            self.adapter_requests[slot.adapter] = left
        if slot.sent is not None and self.prefix_index is not None:
            self.prefix_index.over(slot.sent)
            if slot.credit.read_at is None:
                self.prefix_index.unsent(slot.sent)
                self.sessions.unsent(slot.sent)
        self.room.give_back(slot.credit)
        self.turnover.give_back(slot.credit.need_tokens, slot.taken_at)
        if slot.scrape_count == self.scrape_count:
            self.since_scrape -= 1
        self.work = None

    def scraped(self, sample: LoadSample) -> None:
        """Take in what a scrape shows of its load."""
        before, self.sample = self.sample, sample
        known = self.room.sequences + self.elsewhere.sequences
        self.pulse.scraped(before, sample, self.stale_s, known)
        self.note_work(before, sample)
        self.scrape_count, self.since_scrape = self.scrape_count + 1, 0
        self.foreign = max(0, sample.running + sample.waiting - known)
        if before is not None:
            self.speed.observe(before, sample)
            written = sample.generation_tokens - before.generation_tokens
            if written > 0 and sample.running:
                self.writes.learn(sample.at, sample.at - before.at, int(written))
            if sample.progress < before.progress:  # another process
                self.limit.restarted(sample.at)
                self.forget_prefixes()
        self.room.observe(sample)
        self.prefix_index = by_engine(self.prefix_index, self.new_prefix_index, sample.engines)
        if self.prefix_index is not None:
            if sample.asleep:
                self.forget_prefixes()
            self.prefix_index.scraped(self.room.capacity_tokens, sample.prefix_hits)
        hits = sample.prefix_hits if self.prefix_index is None else None  # it knows of each prompt
        self.limit.reading.scraped(sample.at, hits or 0.0, self.room.unread_tokens)
        self.weigh(sample.at)

    def weigh(self, now: float) -> None:
        """Have its work weighed anew: what others do here, its pace or its cache has changed."""
        if self.stale(now):
            self.foreign = 1  # never emptier than an idle one whose metrics are there
            self.limit.reading.unseen()
        self.work = None

    def weighed(self) -> Work:
        """Return what it has to do, weighed on demand: of a backend that is alone in its pool nobody asks it.

        A backend with twice the share of another counts as equally busy with twice the work.
        """
        (prompts, outputs), foreign, others = self.room.left(), self.foreign, self.elsewhere
        known, cost = self.in_flight, self.token_cost
        if others is not NOTHING:
            known += others.requests
            outputs += others.output_tokens
            prompts += others.unread_tokens
        outputs += foreign * (USUAL_TOKENS + 1) + known  # each takes a step at least
        each_s = self.slowness / self.share
        writing_s = each_s * outputs * cost.output_s
        ahead_s = each_s * prompts * cost.prompt_s + writing_s + self.away_s
        waits_s = ahead_s - BESIDE * writing_s
        self.work = work = Work(ahead_s, waits_s, self.slowness, 1.0 + known + foreign)
        return work

    def forget_prefixes(self) -> None:
        """Note that its prefix cache is empty: it is another process, or asleep."""
        self.sessions.forget()
        self.telling.clear()
        if self.prefix_index is not None:
            self.prefix_index.forget()

    def cached_tokens(self, prefix: Prefix | None) -> int:
        """Return how many tokens of a prompt its prefix cache is thought to hold."""
        index = self.prefix_index
        return 0 if index is None or prefix is None else index.tokens(prefix)

    @property
    def kv_events(self) -> KvEvents | None:
        """How well its engines are followed by what they tell; None: nobody asks them."""
        return None if self.prefix_index is None else self.prefix_index.kv_events

    def too_small(self, need: Need) -> bool:
        """Return whether a request is larger than its whole KV cache, as far as that is known."""
        capacity = self.room.capacity_tokens
        return capacity is not None and self.room.asked(need) > capacity

    def obstacle(
        self,
        need: Need,
        now: float,
        priority: int = 0,
        top_priority: int | None = None,
        tenant: str = "",
        to_read: int = 1,
    ) -> Exclusion | None:
        """Return why it has no room for a request that it could serve, None when it has.

        A reserve is kept for the highest priority, `top_priority`, if it came lately; and for tenants with
        little in flight here. A request without tokens `to_read` does not stand back for what is unread.
        """
        limit = self.limit
        if not self.guarded:
            fixed = limit.fixed
            is_full = fixed and self.in_flight >= self.part(fixed, self.elsewhere.requests)
            return Exclusion.AT_LIMIT if is_full else None
        allowed = limit.value if limit.ready_at is None else limit.effective(now)
        alone = self.gateways == 1  # asked here: each request pays for a call
        part = allowed if alone else self.part(allowed, self.elsewhere.requests)
        if self.in_flight >= part:
            return Exclusion.TOO_LARGE if self.too_small(need) else Exclusion.AT_LIMIT
        lower = top_priority is not None and priority < top_priority
        unread, is_highest = self.room.unread_tokens, top_priority is not None and not lower
        if unread > 0 and to_read > 0 and not is_highest:
            beside = lower and now < self.highest_came_at + HERE_S
            ahead_tokens = limit.reading.ahead_tokens(now, beside_highest=beside)
            if not alone:
                ahead_tokens = self.part(ahead_tokens, self.elsewhere.unread_tokens)
            if unread + to_read > ahead_tokens:
                return Exclusion.READING
        reserves = 2 if lower and now < self.highest_came_at + _LATELY_S else 1
        by_peak = reserves == 1
        if 2 * (self.in_flight + self.elsewhere.requests) < allowed:  # no places are short
            found = self.room.verdict(need, now, reserves, by_peak=by_peak)
        else:
            found = self._kept(need, now, allowed, reserves, by_peak=by_peak)
        if found is None or self.room.shares.holds_much(tenant):
            return found
        return self._kept(need, now, allowed, reserves - 1, by_peak=by_peak)

    def part(self, allowed: float, elsewhere: int) -> float:
        """Return how much of what it may have is for this gateway: what others leave, at least an even part."""
        return allowed if self.gateways == 1 else max(allowed - elsewhere, allowed / self.gateways)

    def hear(self, elsewhere: UnderWay, gateways: int) -> None:
        """Take in what other gateways have under way here, of so many in all."""
        self.elsewhere, self.gateways = elsewhere, gateways
        self.room.hear(elsewhere)
        self.peak = max(self.peak, self.in_flight + elsewhere.requests)
        self.pulse.holds(self.room.sequences + elsewhere.sequences)
        self.work = None

    def _kept(
        self, need: Need, now: float, allowed: int, reserves: int, *, by_peak: bool
    ) -> Exclusion | None:
        """Return why a request has no room where so many reserves are kept for others."""
        if self.in_flight >= self.part(unreserved(allowed, reserves), self.elsewhere.requests):
            return Exclusion.AT_LIMIT
        return self.room.verdict(need, now, reserves, by_peak=by_peak)

    def allowed(self, now: float) -> int | None:
        """Return how many of our requests it may have at a time; None with admission off."""
        return self.limit.effective(now) if self.guarded else self.limit.fixed

    def saturated(self, now: float) -> bool:
        """Whether it takes no more of even the smallest requests."""
        return self.obstacle(LEAST, now) is not None

    def served_name(self, route: Route) -> str:
        """Return the model name to send: the adapter, or what the pool's model is called here."""
        return route.adapter or self.base_model or route.served_model

    @property
    def in_reserve(self) -> bool:
        """Whether it gets no requests while others serve: its weight is 0, or its revision was worse.

        An old revision that lost to one that is no worse is not: it takes what that has no room for.
        """
        return self.zero_weight or (self.kept_back and self.on_trial)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters it lists."""
        return tuple(name for name, model in self.models.items() if model.parent is not None)
