"""`PoolTable`: the only owner of live state. It alone writes the `Backend`s it hands out.

Every method is synchronous, so nobody sees a half-made change. Whoever takes a slot gives it back through the slot
itself, also one of a backend that has left the configuration meanwhile: the last one lets the backend go.

What a backend has to do is kept beside it in expected seconds (`Backend.weighed`): what our requests there are
credited with, and what its last scrape showed beside them. Without a fresh scrape that is unknown, which is not the
same as none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from gateway.config.models import HealthConfig, PoolConfig
from gateway.core.aio import Clock
from gateway.core.prefix import Prefix
from gateway.core.types import (
    SERVING,
    Credit,
    LoadSample,
    ModelsSeen,
    Need,
    Observation,
    Phase,
    RequestRecord,
    Scraped,
    ScrapeFailed,
    Slot,
    TrafficFailed,
    Transition,
    UsageSource,
)
from gateway.pools.backend import HERE_S, Backend
from gateway.pools.configured import Withheld, adopt_models, configure, member, narrow
from gateway.pools.elsewhere import NOTHING, UnderWay
from gateway.pools.facts import HealthState, Policy, Tending, carried_nowhere
from gateway.pools.health import Order, advance, listen, obey, tend
from gateway.pools.hearing import compare, learn, take_in
from gateway.pools.pulse import Pulse, Waits
from gateway.pools.sparing import after_failure, leave_out
from gateway.pools.speed import Speed
from gateway.prefix.uses import Uses

__all__ = ["Backend", "PoolTable"]

_NO_NEED: Final = Need(0, 0)
_TRANSITIONS_KEPT: Final = 1000
_UPSTREAM: Final = UsageSource.UPSTREAM  # looked up once: 0.15 us before Python 3.12


class PoolTable:
    """All pools and their backends.

    `epoch` grows with every change of membership, models, windows or endpoints, `revision` with those and every change
    of a phase: what was computed from them holds while they stand still. Listeners are called synchronously and must
    not raise: `on_transition` with each change of phase, `on_members` when backends came or went, `on_models` with a
    backend's id when it serves other models, `on_capacity` with a pool's name when it may take more work than before,
    `on_read` with it when a backend has read a prompt, `on_cut` with a backend's id and a sign when its limit sank.
    """

    def __init__(self, clock: Clock) -> None:
        self.epoch = self.revision = 0
        self.transitions: deque[Transition] = deque(maxlen=_TRANSITIONS_KEPT)
        self.on_transition: list[Callable[[Transition], None]] = []
        self.on_members: list[Callable[[], None]] = []
        self.on_models: list[Callable[[str], None]] = []
        self.on_capacity: list[Callable[[str], None]] = []
        self.on_read: list[Callable[[str, float, int], None]] = []
        self.on_cut: list[Callable[[str, str], None]] = []
        self.carried_elsewhere = carried_nowhere  # by other workers: `Replicas.carried_elsewhere`
        self._clock = clock
        self._policy = Policy()
        self._backends: dict[str, Backend] = {}
        self._pools: dict[str, tuple[Backend, ...]] = {}
        self._leaving: list[Backend] = []

    # --- reading ----------------------------------------------------------------------------------

    def backends(self, pool: str) -> Sequence[Backend]:
        """Return the configured backends of a pool; empty for a pool that is not there."""
        return self._pools.get(pool, ())

    def pools(self) -> Mapping[str, Sequence[Backend]]:
        """Return every pool with its configured backends."""
        return self._pools

    def get(self, backend_id: str) -> Backend | None:
        """Return a configured backend by its id `pool/name`."""
        return self._backends.get(backend_id)

    def ids(self) -> frozenset[str]:
        """Return the ids of all configured backends."""
        return frozenset(self._backends)

    def leaving(self) -> Sequence[Backend]:
        """Return backends that have left the configuration and still carry requests."""
        return tuple(self._leaving)

    def serving(self) -> tuple[int, int]:
        """Return how many configured backends serve, and how many there are."""
        return sum(each.phase in SERVING for each in self._backends.values()), len(self._backends)

    def __iter__(self) -> Iterator[Backend]:
        """Go through every configured backend."""
        return iter(tuple(self._backends.values()))

    # --- membership -------------------------------------------------------------------------------

    def apply(self, pools: Mapping[str, PoolConfig], health: HealthConfig | None = None) -> None:
        """Make the configuration's backends the members; those that stay keep all their state.

        A backend stays when its pool, name, address, key and kind are the same. One that goes takes no
        new work; with requests in flight it is DRAINING until the last has ended.
        """
        now = self._clock.now()
        if health is not None:
            self._policy = Policy(fall=health.fall, rise=health.rise, progress_s=health.progress)
        before, self._backends, self._pools = self._backends, {}, {}
        for pool, config in pools.items():
            known = [before.get(f"{pool}/{each.name}") for each in config.backends]
            pairs = zip(config.backends, known, strict=True)
            members = tuple(self._own(member(pool, config, *pair, now)) for pair in pairs)
            self._pools[pool] = members
            uses = next((each.uses for each in known if each is not None), Uses())
            for backend, settings in zip(members, config.backends, strict=True):
                self._backends[backend.id], backend.uses = backend, uses
                configure(backend, config, settings, health)
        for backend in before.values():
            if self._backends.get(backend.id) is not backend:
                self._leave(backend, now)
        self._changed()
        for members_listener in self.on_members:
            members_listener()
        for pool in self._pools:
            leave_out(self._pools[pool])
            self._tell_capacity(pool)

    def order(self, backend_id: str, order: Order) -> Transition | None:
        """Carry out an operator's order; doing it twice changes nothing more.

        Raises:
            KeyError: no such backend.
        """
        backend, now = self._backends[backend_id], self._clock.now()
        return self._adopt(backend, obey(backend.health, order, now, self._policy), now)

    def tend(self, backend_id: str, tending: Tending | None) -> Transition | None:
        """Take note that the supervisor works on a backend, or, with None, that it has ended.

        A backend that comes back from a restart starts slowly. One that is no longer configured is left alone.
        """
        backend, now = self._backends.get(backend_id), self._clock.now()
        if backend is None:
            return None
        before = backend.health.tended
        if tending is None and before is not None and before.phase is Phase.STARTING:
            backend.limit.restarted(now)
            backend.forget_prefixes()
            backend.pulse, backend.speed = Pulse(), Speed()
            backend.tally.forget(now)
        return self._adopt(backend, tend(backend.health, tending, now, self._policy), now)

    def keep_back(self, pool: str, *, on_trial: bool | None) -> None:
        """Keep those on trial (True), the others (False) or none (None) in reserve, until the next call."""
        for each in self.backends(pool):
            each.kept_back = on_trial is not None and each.on_trial is on_trial
        self._changed()
        self._tell_capacity(pool)

    def narrow(self, backend_id: str, window_tokens: int) -> None:
        """Note that a backend will come up with a smaller window, before its model list says so."""
        backend = self._backends.get(backend_id)
        if backend is not None and window_tokens < (backend.window_tokens or math.inf):
            narrow(backend, window_tokens)
            self._changed()

    def _own(self, backend: Backend) -> Backend:
        backend.give_back = backend.give_back or partial(self._give_back, backend)
        return backend

    def _leave(self, backend: Backend, now: float) -> None:
        order = Order.DRAIN if backend.in_flight else Order.STOP
        self._adopt(backend, obey(backend.health, order, now, self._policy), now)
        if backend.in_flight:
            self._leaving.append(backend)

    def withhold(self, *told: Withheld) -> None:
        """Note what requests cannot have at backends of one pool: at all of them at once.

        One adapter may be loaded at another backend than before. In between nobody is told that it is nowhere.
        """
        changed = [each for each in told if each.is_new]
        for backend, why, ordered in changed:
            self.epoch += backend.ordered != ordered
            backend.lacking, backend.ordered = why, ordered
        if changed:
            self.revision += 1
            self._tell_capacity(changed[0].backend.pool)

    # --- slots ------------------------------------------------------------------------------------

    def take(
        self, backend_id: str, now: float, need: Need = _NO_NEED, tenant: str = "", prefix: Prefix | None = None,
        adapter: str | None = None,
    ) -> Slot:  # fmt: skip
        """Count one request of a tenant, and what it needs, on a backend until its slot is released.

        With a `prefix` it holds that prompt from now on: engines read in order, so who comes next finds it read.

        Raises:
            KeyError: the backend is not configured (any more).
        """
        return self._backends[backend_id].take(now, need, tenant, prefix, adapter)

    def visit(self, backend_id: str, now: float) -> Slot:
        """Return a slot for what no engine works on: it takes no place and is no load."""
        self._backends[backend_id].tally.sent += 1
        return Slot(backend_id, now, 0, Credit(0, 0, held=False))

    def first_token(self, slot: Slot, now: float) -> None:
        """Note that the request of a slot has its first token; nothing if its need does not stream."""
        backend = self._backends.get(slot.backend_id)
        told = slot.credit.read_at is None  # of others nobody knows what was read by then
        if told and backend is not None and slot.held_from(backend.give_back):
            seconds, prompt_tokens = now - slot.taken_at, slot.credit.prompt_tokens
            backend.first_token(slot, now)
            for listener in self.on_read:
                listener(backend.pool, seconds, prompt_tokens)

    def ended(self, settled: Sequence[RequestRecord]) -> None:
        """Learn from requests that ended how fast their backends write, and what these had cached."""
        for record in settled:
            backend = self._backends.get(record.backend_id or "")
            if backend is not None and (record.sent_at or 0.0) >= backend.member_since:
                learn(backend, record)

    def highest_came(self, pool: str, now: float) -> None:
        """Note that the highest of several priorities uses a pool: a reserve is kept for its next."""
        for backend in self._pools.get(pool, ()):
            backend.highest_came_at = now

    def forgive(self, now: float, only: Backend | None = None) -> None:
        """Hold nothing of the time before against backends: this process stood still, or had `only` do so."""
        for backend in self._backends.values() if only is None else (only,):
            backend.limit.forgive(now)
            backend.pulse.forgive(now)
            backend.health = backend.health.forgiven(now)

    def _give_back(self, backend: Backend, slot: Slot) -> None:
        backend.taken_back(slot)
        for listener in self.on_capacity:
            listener(backend.pool)
        if self._leaving and backend.in_flight == 0 and backend in self._leaving:
            self._leaving.remove(backend)
            now = self._clock.now()
            self._adopt(backend, obey(backend.health, Order.STOP, now, self._policy), now)
            for members_listener in self.on_members:
                members_listener()

    # --- observations -----------------------------------------------------------------------------

    def observe(self, backend_id: str, observation: Observation) -> Transition | None:
        """Feed one observation; returns the change of phase that it caused.

        One about a backend that is no longer configured is dropped.
        """
        backend = self._backends.get(backend_id)
        if backend is None:
            return None
        if isinstance(observation, Scraped):
            backend.scraped(observation.sample)
            self._end_window(backend, observation.sample.at, observation.sample)
            self._tell_capacity(backend.pool)
        elif isinstance(observation, ScrapeFailed):
            self._end_window(backend, observation.at, None)
            backend.weigh(observation.at)
            self._tell_capacity(backend.pool)  # what only metrics tell may forbid nothing any more
        elif isinstance(observation, ModelsSeen):
            self._models_seen(backend, observation)
        state = advance(backend.health, observation, self._policy)
        at = observation.sample.at if isinstance(observation, Scraped) else observation.at
        if isinstance(observation, TrafficFailed):
            members = self._pools[backend.pool]
            state = after_failure(backend, members, state, observation, self._policy)
        return self._adopt(backend, state, at)

    def listen(self, said: Iterable[tuple[Backend, Waits]], now: float) -> None:
        """Note what the requests at each backend have heard of it; called about twice a second."""
        for backend, waits in said:
            heard = take_in(backend, waits, now)
            self._adopt(backend, listen(backend.health, heard, now, self._policy), now)
        for members in self._pools.values():
            compare(members, now)

    def hear(self, elsewhere: Mapping[str, UnderWay], gateways: int) -> None:
        """Take in what other gateways have under way, by backend; so many send, this one included."""
        for each in self:
            each.hear(elsewhere.get(each.id, NOTHING), gateways)
        for pool in self._pools:
            self._tell_capacity(pool)

    def _end_window(self, backend: Backend, now: float, sample: LoadSample | None) -> None:
        beside_highest = now < backend.highest_came_at + HERE_S
        sign = backend.limit.observe(now, sample, backend.peak, beside_highest=beside_highest)
        backend.peak = backend.in_flight + backend.elsewhere.requests
        if sign is not None:
            for listener in self.on_cut:
                listener(backend.id, sign.value)

    def _models_seen(self, backend: Backend, seen: ModelsSeen) -> None:
        if adopt_models(backend, seen):
            self._changed()
            for listener in self.on_models:
                listener(backend.id)
            self._tell_capacity(backend.pool)

    def _changed(self) -> None:
        self.epoch += 1
        self.revision += 1

    def _adopt(self, backend: Backend, state: HealthState, at: float) -> Transition | None:
        before, was, backend.health = backend.phase, backend.health.ejection, state
        if state.phase is Phase.DOWN and state.reason == "refused" != backend.reason:
            backend.forget_prefixes()  # nobody listens there: its process has ended
        backend.phase, backend.reason = state.phase, state.reason
        if state.phase is before and state.ejection is was:
            return None
        self.revision += 1
        leave_out(self._pools.get(backend.pool, ()))
        if was is not None and state.ejection is None and state.phase in SERVING:
            backend.limit.trusted_again(at)
            backend.tally.forget(at)
        if before is Phase.DOWN:  # how slow it was then, and what failed, says nothing
            backend.speed = Speed()
            backend.tally.forget(at)
        transition = Transition(backend.id, before, state.phase, state.reason, state.detail, at)
        self.transitions.append(transition)
        for listener in self.on_transition:
            listener(transition)
        self._tell_capacity(backend.pool)
        return transition

    def _tell_capacity(self, pool: str) -> None:
        for listener in self.on_capacity:
            listener(pool)
