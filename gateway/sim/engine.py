"""The pure model of a vLLM engine: batch slots, KV blocks, prefix cache, preemption, adapters.

It knows no clock: the owner calls `step(now)` at `next_event_time()` and gets the tokens that the
finished step produced. One step is one forward pass over a batch:

    waiting --admit--> running --(prompt computed)--> one token per step --> finished
       ^                  |
       '---- preempted ---'   no free block: the youngest running request loses its blocks and
                              starts again at the front of the queue, keeping what it emitted

Rules, as in vLLM's scheduler: running requests are served before waiting ones are admitted;
admission is first come first served, except that a request whose adapter does not fit into the
batch is stepped over; nothing is admitted in a step that preempted, nor while what a request has so
far, the prompt and what it wrote before a preemption, does not fit into the free blocks as a whole.
Only the blocks of its first chunk are taken then: several long prompts that are read at a time may
still not all fit.

What a scrape sees is written at the end of a step: the gauges by every step, the counters of tokens
and iterations only by one from which a token came out. So while a lone long prompt is read in chunks
those counters stand still, and only the usage of the KV cache tells that the engine works.
A full block is found by its content from the moment it is scheduled, so requests of the same step
share a prefix too. A lookup counts once, at the first admission, and not again after a preemption.

A step takes its own time, and more for each sequence, each token that a prompt's part computes, and
each token of context that it reads.

Source: vLLM 0.32 v1/core/sched/scheduler.py (order of the rules; `make_stats`), kv_cache_manager.py
(what is to fit, what counts), v1/metrics/stats.py, v1/engine/async_llm.py (`iteration_stats`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from gateway.sim.blocks import BlockPool
from gateway.sim.config import EngineConfig
from gateway.sim.sequence import CacheUse, Emitted, Sequence
from gateway.sim.shown import Gauges, Totals

_EPSILON_S: Final = 1e-9  # a step that ends "now" has ended, whatever the rounding


@dataclass(slots=True)
class _Step:
    """The forward pass in progress: tokens per sequence, and when it ends."""

    tokens: dict[Sequence, int]
    ends_at: float


class Engine:
    """One engine core. All methods are synchronous and take the time from outside."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.totals = Totals()
        self.gauges = Gauges()
        self.blocks = BlockPool(config.num_blocks)
        self.running_queue: list[Sequence] = []
        self.waiting_queue: deque[Sequence] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._step: _Step | None = None
        self._wake_at: float | None = None
        self._uses_adapters = False
        self._passed_over = 0  # still waited when the step under way began

    # --- what is in it now ---

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.running_queue)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.waiting_queue)

    @property
    def kv_usage_ratio(self) -> float:
        """Share of referenced blocks, 0..1."""
        return 1 - self.blocks.free / self.blocks.count

    @property
    def running_adapters(self) -> list[str]:
        """Adapters of the batch, sorted."""
        return sorted({s.adapter for s in self.running_queue if s.adapter})

    @property
    def waiting_adapters(self) -> list[str]:
        """Adapters of the queue, sorted."""
        return sorted({s.adapter for s in self.waiting_queue if s.adapter})

    # --- what the owner does ---

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a request. Raises ValueError when it could never fit into the KV cache alone."""
        if not sequence.prompt or not sequence.output:
            raise ValueError("a request needs a prompt and at least one token to emit")
        if len(sequence.prompt) + len(sequence.output) > self.config.capacity_tokens:
            raise ValueError("the request is larger than the whole KV cache")
        if sequence.id in self._sequences:
            raise ValueError(f"request {sequence.id} is already here")
        sequence.arrived_at = now
        sequence.due_at = now + self._lead(sequence.ttft_s)
        self._sequences[sequence.id] = sequence
        self._uses_adapters |= sequence.adapter is not None
        self.waiting_queue.append(sequence)
        self._wake_at = -math.inf

    def abort(self, sequence_id: str) -> bool:
        """Forget a request at once and free its blocks; False when it is not here."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._leave(sequence)
        self.totals.finished["abort"] += 1
        self._wake_at = -math.inf
        return True

    def forget_prefixes(self, *, preempt: bool = False) -> bool:
        """Empty the prefix cache; False while blocks are in use, unless the running are preempted for it."""
        while preempt and self.running_queue:
            self._preempt(self.running_queue[-1])
        if preempt:
            self._step, self._wake_at = None, -math.inf if self.waiting_queue else None
        return self.blocks.forget()

    def next_event_time(self) -> float | None:
        """When `step` will next have something to do; None while idle."""
        return self._wake_at if self._step is None else self._step.ends_at

    def step(self, now: float) -> list[Emitted]:
        """End the pass that is due, start the next one, and return the tokens that came out."""
        emitted: list[Emitted] = []
        if self._step is not None and self._step.ends_at <= now + _EPSILON_S:
            step, self._step = self._step, None
            emitted = self._complete(step, now)
        if self._step is None:
            tokens = self._schedule(now)
            if not tokens and not self.running_queue and self.waiting_queue:
                tokens = self._schedule(now)  # the last running one was just preempted
            self._passed_over = self.waiting
            if tokens:
                self._step = _Step(tokens, now + self._duration(tokens))
            else:
                self._write_gauges()
            # Nothing to compute: whoever runs waits for its pace, and so does everybody behind it.
            self._wake_at = min((s.due_at for s in self.running_queue), default=None)
        return emitted

    # --- scheduling ---

    def _lead(self, pace_s: float | None) -> float:
        """How long before a token its last pass must start."""
        return max(0.0, (pace_s or 0.0) - self.config.decode_step_s)

    def _duration(self, tokens: dict[Sequence, int]) -> float:
        prefill = sum(count for count in tokens.values() if count > 1)
        context = sum(sequence.computed + count for sequence, count in tokens.items())
        config = self.config
        return (
            config.decode_step_s
            + config.decode_step_per_seq_s * len(tokens)
            + prefill / config.prefill_tokens_per_s
            + config.context_token_s * context
        )

    def _adapter_fits(self, sequence: Sequence) -> bool:
        if sequence.adapter is None:
            return True
        return len({*self.running_adapters, sequence.adapter}) <= self.config.max_loras

    def _wanted(self, sequence: Sequence, now: float, budget: int) -> int:
        """Tokens to compute now; the one that makes a token come out waits until it is due."""
        due = sequence.due_at <= now + _EPSILON_S
        return min(budget, sequence.length - sequence.computed - (0 if due else 1))

    def _schedule(self, now: float) -> dict[Sequence, int]:
        budget = self.config.max_batched_tokens
        tokens: dict[Sequence, int] = {}
        preempted = False
        for sequence in list(self.running_queue):
            wanted = self._wanted(sequence, now, budget)
            if wanted <= 0 or sequence not in self.running_queue:
                continue
            while not self._grow(sequence, wanted):
                victim = self.running_queue[-1]
                preempted = True
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                self._begin(sequence, wanted, tokens)
                budget -= wanted
        if not preempted:
            self._admit(now, budget, tokens)
        return tokens

    def _admit(self, now: float, budget: int, tokens: dict[Sequence, int]) -> None:
        passed: list[Sequence] = []
        slots = self.config.max_num_seqs
        while self.waiting_queue and budget > 0 and len(self.running_queue) < slots:
            sequence = self.waiting_queue.popleft()
            if not self._adapter_fits(sequence):
                passed.append(sequence)
                continue
            self._reuse_prefix(sequence)
            wanted = max(0, self._wanted(sequence, now, budget))
            if not self._fits_whole(sequence) or not self._grow(sequence, wanted):
                self._release(sequence)
                self.waiting_queue.appendleft(sequence)
                break
            if sequence.cached is None:
                sequence.cached = sequence.computed
                self.totals.prefix_queries += sequence.length
                self.totals.prefix_hits += sequence.computed
            self.running_queue.append(sequence)
            if wanted:
                self._begin(sequence, wanted, tokens)
                budget -= wanted
        self.waiting_queue.extendleft(reversed(passed))

    def _begin(self, sequence: Sequence, count: int, tokens: dict[Sequence, int]) -> None:
        """Put `count` of its tokens into the step; the blocks that they fill are found from now on."""
        tokens[sequence] = count
        size, reached = self.config.block_size, sequence.computed + count
        if reached // size > sequence.computed // size:
            sequence.hash_to(reached, size)
            for index in range(sequence.computed // size, reached // size):
                self.blocks.remember(sequence.blocks[index], sequence.hashes[index])

    def _preempt(self, victim: Sequence) -> None:
        self.running_queue.remove(victim)
        self._release(victim)
        self.totals.preemptions += 1
        self.waiting_queue.appendleft(victim)

    # --- blocks ---

    def _reuse_prefix(self, sequence: Sequence) -> None:
        # The last token is always computed: its pass is what emits the next one.
        sequence.hash_to(sequence.length - 1, self.config.block_size)
        usable = (sequence.length - 1) // self.config.block_size
        sequence.blocks = self.blocks.find(sequence.hashes[:usable])
        self.blocks.share(sequence.blocks)
        sequence.computed = len(sequence.blocks) * self.config.block_size

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Hold blocks for `tokens` more computed tokens, or change nothing."""
        needed = self._lacks(sequence, sequence.computed + tokens)
        if needed > self.blocks.free:
            return False
        if needed > 0:
            sequence.blocks.extend(self.blocks.take() for _ in range(needed))
        return True

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether there is room for all that it has so far."""
        return self._lacks(sequence, sequence.length) <= self.blocks.free

    def _lacks(self, sequence: Sequence, tokens: int) -> int:
        """How many more blocks it needs to hold so many tokens."""
        return -(-tokens // self.config.block_size) - len(sequence.blocks)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _leave(self, sequence: Sequence) -> None:
        self._release(sequence)
        if sequence in self.running_queue:
            self.running_queue.remove(sequence)
        else:
            self.waiting_queue.remove(sequence)
        if self._step is not None:
            self._step.tokens.pop(sequence, None)

    # --- results ---

    def _write_gauges(self) -> None:
        """Write what a step shows; it has not seen who came while it lasted."""
        gauges = self.gauges
        gauges.steps += 1
        gauges.running = self.running
        gauges.waiting = min(self.waiting, self._passed_over)
        gauges.kv_usage_ratio = self.kv_usage_ratio
        if self._uses_adapters:
            gauges.running_adapters = self.running_adapters
            gauges.waiting_adapters = self.waiting_adapters

    def _complete(self, step: _Step, now: float) -> list[Emitted]:
        emitted: list[Emitted] = []
        computed_before = self.totals.prompt_tokens - self.totals.cached_tokens
        for sequence, count in step.tokens.items():
            sequence.computed += count
            if sequence.computed == sequence.length:
                emitted.append(self._emit(sequence, now))
        if emitted:
            computed = self.totals.prompt_tokens - self.totals.cached_tokens - computed_before
            self.totals.iterations += 1
            self.totals.iteration_tokens += computed + len(emitted)
        self._write_gauges()
        return emitted

    def _emit(self, sequence: Sequence, now: float) -> Emitted:
        totals = self.totals
        if not sequence.prefilled:
            sequence.prefilled = True
            totals.prompt_tokens += len(sequence.prompt)
            totals.cached_tokens += sequence.cached or 0
            totals.first_tokens += 1
            totals.ttft_s += now - sequence.arrived_at
        position = sequence.emitted
        sequence.emitted += 1
        totals.generation_tokens += 1
        sequence.due_at = now + self._lead(sequence.itl_s)
        finish = sequence.finish if sequence.emitted == len(sequence.output) else None
        if finish is not None:
            del self._sequences[sequence.id]
            self._leave(sequence)
            totals.finished[finish] += 1
        return Emitted(
            sequence.id, position, sequence.output[position], finish, self._cache_use(sequence)
        )

    def _cache_use(self, sequence: Sequence) -> CacheUse:
        found, size = sequence.cached or 0, self.config.block_size
        stored = len(sequence.prompt) // size * size
        return CacheUse(found, max(0, stored - found))
