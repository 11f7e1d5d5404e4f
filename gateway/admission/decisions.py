"""Why requests waited or were refused at the gate: the last thousand, for `vllm-gateway explain`.

Pure. A decision holds numbers and names, never a prompt. What decided is told as the path of a
setting, such as `pools.m.queue.max_requests`; whoever shows it looks up line and value.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gateway.admission.bounds import Full
from gateway.config.findings import KeyPath
from gateway.config.models import PoolConfig
from gateway.core.errors import GatewayError, Rejected
from gateway.core.exclusion import Choice
from gateway.core.traffic import Fallback
from gateway.core.types import Ask, Exclusion, Need, ShedReason
from gateway.pools.table import Backend

KEPT: Final = 1000
CLIENT_TIMEOUT: Final = "x-stainless-read-timeout"  # how long the client itself waits for bytes


class State(Enum):
    """Where a request is, or how its wait ended."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    REFUSED = "refused"  # at once, after a wait, or by the engine it was sent to
    LEFT = "left"  # its client went away


class Said(NamedTuple):
    """What one backend said. Without exclusion and seconds: it is a later choice, and an earlier one is free."""

    backend_id: str
    exclusion: Exclusion | None
    expected_s: float | None
    setting: KeyPath | None  # that excluded it; None when no setting did
    cached_tokens: int | None = None  # of the prompt, thought to be there; None: nobody asked


@dataclass(slots=True, kw_only=True)
class Decision:
    """One request at the gate. Its gate owns it: `state` and what follows change as it goes on."""

    id: str
    at: float
    wall_at: float
    model: str  # as asked
    pool: str
    adapter: str | None
    tenant: str
    key_id: str
    priority: int
    need: Need
    may_wait_s: float
    said: tuple[Said, ...]
    fallback: Fallback | None  # the pool that it asked for could not take it
    impatient: bool = False  # its client's own time-out ends its wait, before the setting does
    hurried: bool = False  # its pool ends its wait before its client or `queue.max_wait` does
    state: State = State.WAITING
    setting: KeyPath | None = None  # that made it wait, or refused it
    starts_too_late: bool = False  # no backend serves, and the first to start will be too late
    awaits: str | None = None  # the full backend that it waits for, which has its prompt cached
    position: int | None = None  # when it was queued; 1 is next. None: not queued, or not counted
    eta_s: float | None = None  # of its turn, as estimated when it came; None: nobody knew
    ended_at: float | None = None  # its wait
    backend_id: str | None = None  # that it was sent to
    status: int | None = None  # what its client was told, as are the next
    code: str | None = None
    shed_reason: ShedReason | None = None
    message: str | None = None
    retry_after_s: float | None = None

    def admitted(self, backend_id: str, now: float) -> None:
        """Note that it got a place; it may have got one though it was not allowed to wait."""
        self.state, self.ended_at, self.backend_id = State.ADMITTED, now, backend_id
        self.status = self.code = self.shed_reason = self.message = self.retry_after_s = None

    def left(self, now: float) -> None:
        """Note that it went away."""
        self.state, self.ended_at = State.LEFT, now

    def refused(self, error: GatewayError, now: float, full: Full | None = None) -> None:
        """Note what its client is told, and which setting decided. If its wait had ended before, that moment stays."""
        self.state = State.REFUSED
        self.ended_at = now if self.ended_at is None else self.ended_at
        self.status, self.code, self.message = error.status, error.code, error.message
        self.retry_after_s = error.retry_after_s
        if isinstance(error, Rejected):
            self.shed_reason = error.shed_reason
        if full is not None:
            self.setting = ("pools", self.pool, "queue", BOUNDS[full])
        elif self.timed_out:
            self.setting = self._ended_by
        elif self.shed_reason in _BY_NO_SETTING:
            self.setting = None
        else:
            self.setting = _commonest(each for each in self.said if not _passes(each))

    @property
    def _ended_by(self) -> KeyPath | None:
        """The setting that bounds its wait; None: its client's own time-out."""
        if self.hurried:
            return ("pools", self.pool, "admission")
        return None if self.impatient else ("pools", self.pool, "queue", "max_wait")

    @property
    def has_room(self) -> bool:
        """Whether a backend had room for it when it came."""
        return any(each.expected_s is not None for each in self.said)

    @property
    def timed_out(self) -> bool:
        """Whether it was refused for the time it may wait: there is none, or it was or would be over."""
        return self.shed_reason in _DEADLINE or self.starts_too_late


def decide(  # noqa: PLR0913 - all that a decision is made of
    request_id: str,
    ask: Ask,
    backends: Sequence[Backend],
    choice: Choice,
    *,
    pool: PoolConfig,
    at: tuple[float, float],
    wait_s: float,
) -> Decision:
    """Return the decision of a request that comes; `at` is the monotonic and the wall time.

    Args:
        request_id: as in its reply and in the access log.
        ask: what it asks for.
        backends: of its pool, in the order of the configuration.
        choice: what they are worth to it.
        pool: the settings in force.
        at: when it comes.
        wait_s: how long it may wait.
    """
    now, wall = at
    said = []
    for place, backend in enumerate(backends):
        reason, setting = choice.excluded.get(backend.id), None
        if reason is not None:
            setting = excluded_by(reason, backend, place, ask, pool, now)
        cached_tokens = None if ask.prefix is None else backend.cached_tokens(ask.prefix)
        expected_s = choice.expected_s.get(backend.id)
        said.append(Said(backend.id, reason, expected_s, setting, cached_tokens))
    route, caller = ask.route, ask.caller
    setting = _commonest(each for each in said if _passes(each))
    if setting is None and choice.expected_s:
        # One has room: it waits its turn, or for the one that has its prompt cached.
        setting = ("pools", route.pool, "admission")
    return Decision(
        id=request_id,
        at=now,
        wall_at=wall,
        model=route.requested,
        pool=route.pool,
        adapter=route.adapter,
        tenant=caller.tenant,
        key_id=caller.key_id,
        priority=caller.priority,
        need=ask.need,
        may_wait_s=wait_s,
        said=tuple(said),
        fallback=ask.fallback,
        setting=setting,
    )


class Decisions:
    """The latest decisions by request id, at most `most`; an id that comes again replaces the old."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, Decision] = OrderedDict()

    def __iter__(self) -> Iterator[Decision]:
        """Go through them, the newest first."""
        return reversed(self._kept.values())

    def get(self, request_id: str) -> Decision | None:
        """Return the decision of a request; None when it is not, or no longer, kept."""
        return self._kept.get(request_id)

    def keep(self, decision: Decision) -> None:
        """Keep a decision, in the place of the oldest one."""
        self._kept.pop(decision.id, None)
        self._kept[decision.id] = decision
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


# --- which setting decided ------------------------------------------------------------------------

BOUNDS: Final[Mapping[Full, str]] = {
    Full.REQUESTS: "max_requests",
    Full.TOKENS: "max_tokens",
    Full.BYTES: "max_bytes",
    Full.TENANT_REQUESTS: "tenant_share",
    Full.TENANT_TOKENS: "tenant_share",
    Full.TENANT_BYTES: "tenant_share",
}
_DEADLINE: Final = frozenset({ShedReason.NO_ROOM, ShedReason.TOO_LATE, ShedReason.QUEUE_TIMEOUT})
_BY_NO_SETTING: Final = frozenset({ShedReason.ENGINE, ShedReason.DRAINING})


def excluded_by(
    reason: Exclusion, backend: Backend, place: int, ask: Ask, pool: PoolConfig, now: float
) -> KeyPath | None:
    """Return the setting by which a backend, the `place`th of its pool, is excluded; None: by none."""
    here: KeyPath = ("pools", backend.pool)
    match reason:
        case Exclusion.AT_LIMIT:
            return _limited_by(backend, (*here, "backends", place), now)
        case Exclusion.KV_FULL:  # closed from `stop_admitting` until below `resume`
            seen = None if backend.stale(now) else backend.sample
            usage = None if seen is None else seen.kv_usage_ratio
            closing = usage is None or usage >= backend.room.stop_ratio
            return (*here, "kv", "stop_admitting" if closing else "resume")
        case Exclusion.NO_KV_ROOM:
            return (*here, "kv", "stop_admitting")
        case Exclusion.READING | Exclusion.ENGINE_QUEUED | Exclusion.CLAIMED:
            return (*here, "admission")
        case (
            Exclusion.MODEL_MISSING
            | Exclusion.ADAPTER_LOADING
            | Exclusion.ADAPTER_DUE
            | Exclusion.ADAPTER_FAILED
        ):
            return (*here, "adapters" if ask.route.adapter is not None else "served_model")
        case Exclusion.ENDPOINT_MISSING:
            own = place < len(pool.backends) and pool.backends[place].endpoints is not None
            return (*here, "backends", place, "endpoints") if own else (*here, "endpoints")
        case Exclusion.IN_RESERVE:
            return (*here, "canary") if backend.kept_back else (*here, "backends", place, "weight")
        case (
            Exclusion.NOT_SERVING
            | Exclusion.WINDOW_TOO_SMALL
            | Exclusion.EJECTED
            | Exclusion.PROBATION
            | Exclusion.TOO_LARGE
            | Exclusion.ALREADY_TRIED
        ):
            return None  # its phase, what failed there, its window, the size of its KV cache


def _limited_by(backend: Backend, own: KeyPath, now: float) -> KeyPath:
    limit, in_flight, elsewhere = backend.limit, backend.in_flight, backend.elsewhere.requests
    fixed: KeyPath = (*own, "max_in_flight")
    if not backend.guarded:
        return fixed
    if in_flight < backend.part(limit.effective(now), elsewhere):
        # What is left is kept for keys of a higher priority, or for tenants that use little.
        return ("keys", "file")
    if in_flight < backend.part(limit.value, elsewhere):
        return ("pools", backend.pool, "slow_start")
    return fixed if limit.value == limit.fixed else ("pools", backend.pool, "slo", "ttft")


def _passes(said: Said) -> bool:
    return said.exclusion is not None and said.exclusion.passes


def _commonest(said: Iterable[Said]) -> KeyPath | None:
    """Return the setting that excluded most backends; of several the first."""
    counts = Counter(each.setting for each in said if each.setting is not None)
    return max(counts, key=counts.__getitem__, default=None)
