"""`Charge`: one backend under supervision, as the supervisor sees it now."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import Clock
from gateway.heal.healing import Cause, Facts, Sign, Suspend, Wait
from gateway.heal.signs import Errors, Memory, Pace
from gateway.heal.startup import StartWatch
from gateway.launch.launcher import Incarnation, Launcher, Seen
from gateway.pools.table import Backend
from gateway.vllmlog.diagnosis import Diagnosis
from gateway.watch.adapters import held_by
from gateway.watch.fetch import Pages

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Timing:
    """How often supervision looks, and how long it waits for one token. Seconds."""

    every_s: float = 1.0  # between two turns
    first_token_s: float = 60.0  # of a cold engine: kernels are compiled on the way
    token_s: float = 10.0  # of an idle, warm engine
    last_words_s: float = 5.0  # for a server whose engine failed its first token to end by itself


@dataclass(slots=True, eq=False)
class Charge:
    """One backend under supervision. The supervisor is its one owner; nothing else writes it."""

    backend: Backend
    pool: PoolConfig
    config: BackendConfig
    launcher: Launcher
    pages: Pages

    seen: Seen | None = None  # None: the launcher cannot tell
    trouble: str = ""  # why it cannot, or what it last failed to do
    orders: int = 0  # carried out by its launcher; what was looked at before one is old
    incarnation: Incarnation | None = None  # the last one seen
    first_seen_at: float | None = None  # of the incarnation that runs
    ran: bool = False  # something of it has run, or was started, since we look
    verified: Incarnation | None = None  # the one that passed its start
    examined: Incarnation | None = None  # the one whose end or hang was diagnosed
    diagnosis: Diagnosis | None = None  # of its end or hang, until it is launched anew

    work: asyncio.Task[None] | None = None  # a restart, or the watch over a start
    restarting: bool = False  # it is drained, stopped or launched
    waits_for: str = ""  # until whose start is over its own waits; empty: it does not wait
    starting: bool = False  # launched, and not yet verified
    watch: StartWatch | None = None

    adapters: dict[str, str] = field(default_factory=dict)  # name to path, while it served
    signs: dict[Cause, Sign] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    errors: Errors = field(default_factory=Errors)
    memory: Memory = field(default_factory=Memory)
    weighed_at: float = -math.inf
    sampled_at: float = -math.inf
    progress_at: float = 0.0  # when it last gave a sign of life, or a canary came back
    decision: Wait | Suspend | None = None  # why nothing is done about what ails it
    gone: bool = False  # it is no longer configured so: what is found out about it is nobody's
    suspended: bool = False  # it is left alone until an operator clears it

    @property
    def id(self) -> str:
        """The backend's id, `pool/name`."""
        return self.backend.id

    @property
    def busy(self) -> bool:
        """Whether something is being done with it."""
        return self.work is not None and not self.work.done()

    def known_adapters(self) -> dict[str, str]:
        """Return the adapters that it lists, with the paths it tells."""
        return held_by(self.backend)


async def emptied(backend: Backend, clock: Clock, patience_s: float) -> None:
    """Wait until a backend carries no request of ours, `patience_s` at most."""
    deadline = clock.now() + patience_s
    while backend.in_flight and clock.now() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_POLL_S)


def facts_of(backend: Backend, now: float, charge: Charge | None) -> Facts:
    """Return what is known of a backend, under supervision or not."""
    health, sample = backend.health, backend.sample
    fresh = sample if sample is not None and not backend.stale(now) else None
    return Facts(
        backend_id=backend.id,
        pool=backend.pool,
        phase=backend.phase,
        reason=backend.reason,
        since=backend.since,
        seen=charge.seen if charge is not None else None,
        supervised=charge is not None,
        held=health.held is not None,
        restarting=charge is not None and charge.restarting,
        starting=charge is not None and charge.starting,
        asleep=health.asleep,
        saturated=backend.saturated(now),
        moved_at=charge.progress_at if charge is not None else -math.inf,
        in_flight=backend.in_flight,
        running=fresh.running if fresh is not None else 0,
        waiting=fresh.waiting if fresh is not None else 0,
        age_s=None
        if charge is None or charge.first_seen_at is None
        else now - charge.first_seen_at,
        signs=tuple(charge.signs.values()) if charge is not None else (),
    )
