"""When a stream leaves a backend that still works: as soon as another one has a place for its rest.

    drained    the operator or a planned restart wants the backend to be empty
    lost       the engine writes others, and has forgotten this one: for longer than a stream may be silent it got
               nothing, while nothing waited there and nothing was preempted, so each stream got a token in each
               step. What a parser may hold back is never thought lost.

The place is taken before the stream is cut, so nobody waits in between, and what finds none goes on
where it is. A restart that has waited for `supervision.drain` ends what is left, which then goes on as
after a failure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from gateway.admission.gate import Gate
from gateway.core.aio import Clock
from gateway.core.endpoints import NO_ENGINE
from gateway.core.errors import StreamMoved, UpstreamError
from gateway.core.exclusion import Chance
from gateway.core.types import Ask, Demand, Endpoint, Phase, Slot
from gateway.pools.table import Backend, PoolTable
from gateway.resume.recited import RecitedStream
from gateway.resume.stream import TrailedStream
from gateway.resume.trail import Trail
from gateway.resume.transcript import Transcript
from gateway.routing.choice import failed_at
from gateway.upstream.silence import Silence


class Leaving:
    """Has streams leave backends that are drained, and counts them."""

    def __init__(self, gate: Gate, table: PoolTable, clock: Clock) -> None:
        self._gate = gate
        self._table = table
        self._clock = clock
        self._moved: Counter[str] = Counter()

    def leaves(
        self, ask: Ask, stream: TrailedStream, backend: Backend, after_s: float, silence: Silence | None = None
    ) -> UpstreamError | None:  # fmt: skip
        """Return the error that cuts a stream which has a place elsewhere now (`ask.place`), if it has.

        `after_s` is how long its backend has to be drained before. Without its `silence` it is never thought lost.
        """
        lost = silence is not None and self._lost(silence, stream, backend)
        if not (lost or self._drained(backend, after_s)) or not stream.may_leave:
            return None
        ask.place = self._gate.enter(self._rest(ask, stream, backend))
        if ask.place is None:
            return None
        if silence is not None and lost:
            return silence.error(self._clock.now())
        self._moved[backend.id] += 1
        return StreamMoved("The server that worked on this request is drained. Please retry.")

    def would_leave(
        self, ask: Ask, stream: RecitedStream, backend: Backend, after_s: float
    ) -> bool:
        """Whether a stream of which nobody has told token ids yet has a place elsewhere now. Takes nothing."""
        if not self._drained(backend, after_s) or not stream.could_leave:
            return False
        return self._gate.chance(self._rest(ask, stream, backend)) is Chance.NOW

    def _lost(self, silence: Silence, stream: TrailedStream, backend: Backend) -> bool:
        # Since then it got nothing, and all that its engine runs got a token in each step.
        now, since = self._clock.now(), max(silence.open_at, backend.pulse.held_up_at)
        if now - since < silence.patience.stall_s:
            return False
        shows_each_token = isinstance(stream.trail, Trail) and not stream.trail.parsed
        return shows_each_token and backend.works(since, now)

    def _drained(self, backend: Backend, after_s: float) -> bool:
        since_s = self._clock.now() - backend.health.since
        return backend.phase is Phase.DRAINING and since_s >= after_s

    def take_moved(self) -> Mapping[str, int]:
        """Return how many streams have left which backends since this was last asked."""
        moved, self._moved = self._moved, Counter()
        return moved

    def _rest(self, ask: Ask, stream: TrailedStream, left: Backend) -> Ask:
        """Return the ask for what is left of a stream; what was said is counted by its events."""
        said, demand = stream.events, stream.asked[1]  # `ask.demand` may be that of a rest
        limit = demand.max_new_tokens
        demand = Demand(
            demand.prompt_tokens + said,
            exact=False,
            max_new_tokens=None if limit is None else max(1, limit - said),
        )
        need = self._gate.needs.of(ask.call, demand, ask.caller, ask.route.widest_tokens)
        # It fits where it is. A backend whose window is smaller would refuse it, or end it sooner.
        tokens = demand.prompt_tokens if limit is not None else left.window_tokens or 0
        demand = structs.replace(
            demand, prompt_tokens=max(demand.prompt_tokens, tokens), exact=True
        )
        rest = structs.replace(ask, demand=demand, need=need, prefix=None, tried={**ask.tried})
        failed_at(rest, left)
        pass_over(rest, stream, self._table.backends(ask.route.pool))
        return rest


def what_runs(backend: Backend, ask: Ask) -> tuple[str, str | None]:
    """Return what answers a request there: the revision and, of an adapter, the path that the backend tells."""
    held = backend.models.get(ask.route.adapter or "")
    return backend.revision, None if held is None else held.root


def runs_another(backend: Backend, ask: Ask) -> bool:
    """Whether a backend may have another model than what a stream leaves: it would say something else.

    One that has an adapter not yet will load what is wanted.
    """
    if ask.leaves is None:
        return False
    (revision, path), (its_revision, its_path) = ask.leaves, what_runs(backend, ask)
    return its_revision != revision or (its_path != path and None not in (its_path, path))


def pass_over(ask: Ask, stream: TrailedStream, backends: Sequence[Backend]) -> bool:
    """Bar the backends that cannot go on with a stream; return whether some are only too old for that."""
    for each in backends:
        if runs_another(each, ask):
            _bar(ask, each)
    if isinstance(stream.trail, Transcript):
        return False
    for each in backends:
        if each.plain:  # it takes no token ids, or those of another tokenizer
            _bar(ask, each)
    if not stream.needs_ids_in_chats:
        return False
    old = [each for each in backends if not each.chats_take_ids]
    may_complete = bool(old) and stream.may_complete
    unable = [each for each in old if not (may_complete and _completes(each))]
    for each in unable:
        _bar(ask, each)
    return bool(unable)


def bar_another(ask: Ask, stream: TrailedStream, backend: Backend) -> bool:
    """Bar a backend that has become another model while the rest of a stream waited for it; return whether it has."""
    if not (stream.went_on and runs_another(backend, ask)):
        return False
    _bar(ask, backend)
    return True


def _bar(ask: Ask, backend: Backend) -> None:
    """Bar a backend, even if it comes back while the ask waits."""
    ask.tried[backend.id] = math.inf


def _completes(backend: Backend) -> bool:
    """Whether a backend completes prompts, up to the end of a window that is known."""
    served = backend.endpoints is None or Endpoint.COMPLETIONS in backend.endpoints
    return served and backend.window_tokens is not None


def placed_at(table: PoolTable, slot: Slot, ask: Ask) -> Backend | None:
    """Return the backend where a request has its place; None: a reload took it away, or gave its name to another."""
    backend = table.get(slot.backend_id)
    if backend is None or ask.call.endpoint in NO_ENGINE or slot.held_from(backend.give_back):
        return backend
    return None


def taken_ahead(ask: Ask) -> Slot | None:
    """Return the place that was taken for the rest of a stream; it is the caller's now."""
    place, ask.place = ask.place, None
    return place


def let_go(ask: Ask) -> None:
    """Give back the place that was taken for a rest which is not sent any more."""
    place = taken_ahead(ask)
    if place is not None:
        place.release()
