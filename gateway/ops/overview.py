"""The body of `GET /admin/v1/overview`, and the sentence at its top.

`vllm-gateway status` and scripts read this shape. Within one `schema_version`, keys are added but
never renamed or removed. Times are RFC 3339 in UTC. What is unknown or out of date is null, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import TypedDict

from gateway import __version__
from gateway.admission.gate import Gate
from gateway.config.models import Config
from gateway.core.gpu import GpuLoad
from gateway.core.printable import count
from gateway.core.traffic import NOTHING_QUEUED, Engine
from gateway.core.types import Phase, Transition
from gateway.heal.states import Proving, Starting
from gateway.heal.supervised import Supervised
from gateway.observe.metrics import Metrics
from gateway.observe.readings import carried_by, queued_in_all
from gateway.ops.gatewayproblems import Own, own_problems
from gateway.ops.gpus import GpuOverview, gpus_told
from gateway.ops.moment import Moment, rfc3339, rounded
from gateway.ops.poolproblems import Failed, pool_problems
from gateway.ops.prefixes import KvEventsOverview, kv_events
from gateway.ops.problems import Known, ProblemTold, VerdictTold, told, verdict
from gateway.ops.recent import Lately, ModelOverview, RecentOverview
from gateway.ops.sharing import StoreOverview, store_told
from gateway.ops.states import (
    POOLS_WORST_FIRST,
    BackendState,
    PoolState,
    backend_state,
    detail_of,
    pool_state,
)
from gateway.ops.supervision import (
    HoldOverview,
    SupervisionOverview,
    holds_told,
    reason_of,
    supervision,
)
from gateway.ops.trials import TrialOverview, trial_told
from gateway.pools.room import LEAST
from gateway.pools.table import Backend, PoolTable
from gateway.rollout.rollouts import Rollout
from gateway.routing.catalog import Catalog
from gateway.store.replicas import Replicas

SCHEMA_VERSION: Final = 2
_TRANSITIONS_TOLD: Final = 50
_LOOP: Final = 3  # ends within ten minutes make a crash loop


class BackendOverview(TypedDict):
    """One vLLM server."""

    id: str  # pool/name
    name: str
    state: BackendState  # what is the matter with it, for people
    phase: str  # core.types.Phase: what may be sent to it
    reason: str  # short closed word
    since: str
    phase_age_s: float
    detail: str  # a sentence with the evidence
    in_flight: int  # requests of this gateway on it
    in_flight_elsewhere: int  # those of other gateways on the same Redis, as they told last
    uploading: int  # these of them whose clients still send sound
    running: int | None  # the backend's own figures; null while unknown or stale
    waiting: int | None
    kv_usage_ratio: float | None
    scrape_age_s: float | None  # null: never scraped
    stale: bool  # the three above are too old, or there are none
    saturated: bool  # takes no more work now
    obstacle: str | None  # why not: a `core.exclusion.Exclusion`; null: it takes more
    slowness: float  # times that it writes slower than its fastest peer
    ended: int  # times that it ended or failed to start in the last ten minutes
    limit: int | None  # most requests of this gateway now; null: none
    kv_projected_ratio: float | None  # of its KV cache, that requests are thought to come to
    engine: str  # core.traffic.Engine
    version: str | None
    window_tokens: int | None
    models: list[str]  # adapters included
    # By what name it serves the pool's model; null: it does not, or is not known yet.
    base_model: str | None
    adapters_kept_back: dict[str, str]  # adapters that it cannot serve now, and why: an `Exclusion`
    kv_events: KvEventsOverview | None  # null: not in a pool with `prefix: precise`
    gpus: list[GpuOverview]  # those that it may use; empty: not launched here, or nobody can tell
    supervision: SupervisionOverview | None  # null: nobody here starts or restarts it


class QueueOverview(TypedDict):
    """What waits here for room on a backend."""

    requests: int
    tokens: int
    oldest_s: float | None
    max_requests: int


class PoolOverview(TypedDict):
    """The backends that serve one model."""

    name: str
    aliases: list[str]
    state: PoolState
    window_tokens: int | None
    adapters: list[str]
    endpoints: list[str] | None  # null: the backends do not tell
    queue: QueueOverview
    canary: TrialOverview | None  # null: no revision is on trial
    last_5_min: RecentOverview
    models: list[ModelOverview]  # those that were asked for lately, the busiest first
    backends: list[BackendOverview]


class TransitionOverview(TypedDict):
    """One change of a backend's phase."""

    at: str
    backend: str  # pool/name
    before: str
    after: str
    reason: str
    detail: str


class ConfigOverview(TypedDict):
    """The configuration in force; `hash` is the one in `gateway_config_info`."""

    file: str | None
    hash: str | None


class Totals(TypedDict):
    """Sums over all pools; `requests` counts those that ended since the start, by outcome."""

    backends: int
    backends_ready: int
    in_flight: int  # those at backends that a reload took away, too
    requests: dict[str, int]
    body_bytes: int  # what request bodies hold of `limits.bodies`, which each worker has
    body_bytes_limit: int


class Overview(TypedDict):
    """The whole answer."""

    schema_version: int
    at: str
    verdict: VerdictTold
    problems: list[ProblemTold]  # the worst first
    state: PoolState  # the worst of the pools
    draining: bool
    version: str
    uptime_s: float
    config: ConfigOverview
    store: StoreOverview | None  # null: no `redis` and one worker, so this gateway runs alone
    holds: list[HoldOverview]
    pools: list[PoolOverview]
    transitions: list[TransitionOverview]  # the newest first
    totals: Totals


@dataclass(frozen=True, slots=True)
class Facts:
    """What an overview is made of."""

    table: PoolTable
    metrics: Metrics
    config: Config
    file: Path | None
    draining: bool
    started_at: float
    gate: Gate
    units: Mapping[str, Supervised]
    holds: Mapping[str | None, float]  # `Supervisor.holds`
    why_held: Callable[[str | None], str]
    why_drained: Callable[[str], str]  # a backend; in the words of who ordered it
    trial: Callable[[str], Rollout | None]  # of a pool
    replicas: Replicas
    lately: Lately
    failed: Failed  # why adapters could not be loaded
    ended: Mapping[str, int]  # times that a backend ended in the last ten minutes
    own: Own
    gpus: Mapping[str, Sequence[GpuLoad]]  # of launched backends
    known: Known


def overview(facts: Facts, moment: Moment) -> Overview:
    """Return the overview of this moment, and remember since when its problems are known."""
    found = _without_problems(facts, moment)
    now, pools = moment.now, found["pools"]
    problems = [
        problem
        for pool in pools
        for problem in pool_problems(pool, facts.lately, facts.failed, now)
    ]
    problems += own_problems(found, facts.own, moment.wall - now)
    found["problems"] = [told(each, moment) for each in facts.known.dated(problems, now)]
    totals = found["totals"]
    well = (
        f"All is well: {count(len(pools), 'pool')}, {count(totals['backends'], 'backend')},"
        f" {count(totals['in_flight'], 'request')} in flight."
    )
    found["verdict"] = verdict(found["problems"], well)
    return found


def _without_problems(facts: Facts, moment: Moment) -> Overview:
    pools = pool_overviews(facts, moment)
    backends = [backend for pool in pools for backend in pool["backends"]]
    recent = list(facts.table.transitions)[: -_TRANSITIONS_TOLD - 1 : -1]
    shared = facts.config.redis is not None or facts.replicas.tell().group != ""
    body_bytes, body_bytes_limit = facts.metrics.bodies()
    return Overview(
        schema_version=SCHEMA_VERSION,
        at=rfc3339(moment.wall),
        verdict=VerdictTold(state="ok", sentence=""),
        problems=[],
        state=min((pool["state"] for pool in pools), key=POOLS_WORST_FIRST.index, default="ready"),
        draining=facts.draining,
        version=__version__,
        uptime_s=round(moment.now - facts.started_at, 3),
        config=ConfigOverview(
            file=str(facts.file) if facts.file is not None else None,
            hash=facts.metrics.config_hash,
        ),
        store=store_told(facts.replicas, moment) if shared else None,
        holds=holds_told(facts.holds, facts.why_held, moment),
        pools=pools,
        transitions=[_transition(each, moment) for each in recent],
        totals=Totals(
            backends=len(backends),
            backends_ready=sum(each["phase"] == Phase.READY.value for each in backends),
            in_flight=sum(each.in_flight for each in (*facts.table, *facts.table.leaving()))
            + carried_by(facts.replicas.fellows()).total(),
            requests=facts.metrics.total_requests(),
            body_bytes=body_bytes,
            body_bytes_limit=body_bytes_limit,
        ),
    )


def pool_overviews(facts: Facts, moment: Moment) -> list[PoolOverview]:
    """Return every pool as it is, in the order of the configuration."""
    configs, table, gate = facts.config.pools, facts.table, facts.gate
    catalog, fellows = Catalog.build(configs, table), facts.replicas.fellows()
    entries, adapters = catalog.entries, catalog.adapters()
    carried, queues = carried_by(fellows), queued_in_all(gate.queues(), fellows)
    pools = []
    for name, config in configs.items():
        backends = [
            _backend(each, facts, moment, carried[each.id]) for each in table.backends(name)
        ]
        entry = entries[name]
        endpoints = entry.endpoints
        queued = queues.get(name, NOTHING_QUEUED)
        pools.append(
            PoolOverview(
                name=name,
                aliases=list(config.aliases),
                state="down"
                if facts.lately.pool_failing(name)
                else pool_state(
                    [each["state"] for each in backends],
                    saturated=[each["saturated"] for each in backends],
                ),
                window_tokens=entry.route.widest_tokens,
                adapters=sorted(adapters.get(name, ())),
                endpoints=sorted(each.value for each in endpoints) if endpoints else None,
                queue=QueueOverview(
                    requests=queued.requests,
                    tokens=queued.tokens,
                    oldest_s=rounded(queued.oldest_s),
                    max_requests=config.queue.max_requests * (1 + len(fellows)),
                ),
                canary=trial_told(facts.trial(name)),
                last_5_min=facts.lately.told(facts.lately.pool(name)),
                models=facts.lately.models_told(name),
                backends=backends,
            )
        )
    return pools


def _backend(backend: Backend, facts: Facts, moment: Moment, elsewhere: int) -> BackendOverview:
    unit, ended = facts.units.get(backend.id), facts.ended.get(backend.id, 0)
    sample, stale, now = backend.sample, backend.stale(moment.now), moment.now
    fresh = None if stale else sample
    obstacle, projected = backend.obstacle(LEAST, now), backend.room.projection(now).ratio
    return BackendOverview(
        id=backend.id,
        name=backend.name,
        state=backend_state(
            backend.phase,
            reason_of(backend.reason, unit),
            suspended=unit is not None and unit.suspended,
            crash_loops=unit is not None and (unit.observed.crash_loops() or ended >= _LOOP),
            starting=unit is not None and isinstance(unit.state, Starting | Proving),
        ),
        phase=backend.phase.value,
        reason=backend.reason,
        since=moment.told(backend.health.since),
        phase_age_s=round(moment.now - backend.health.since, 3),
        detail=detail_of(backend, facts.why_drained(backend.id)),
        in_flight=backend.in_flight + elsewhere,
        in_flight_elsewhere=facts.replicas.at_other_gateways(backend.id),
        uploading=facts.own.callers.uploading.get(backend.id, 0),
        running=fresh.running if fresh is not None else None,
        waiting=fresh.waiting if fresh is not None else None,
        kv_usage_ratio=fresh.kv_usage_ratio if fresh is not None else None,
        scrape_age_s=round(now - sample.at, 3) if sample is not None else None,
        stale=stale,
        saturated=obstacle is not None,
        obstacle=None if obstacle is None else obstacle.value,
        slowness=round(backend.slowness, 2),
        ended=ended,
        limit=backend.allowed(moment.now),
        kv_projected_ratio=rounded(projected),
        engine=(Engine.OPENAI if backend.plain else Engine.VLLM).value,
        version=backend.version,
        window_tokens=backend.window_tokens,
        models=list(backend.models),
        base_model=backend.base_model,
        adapters_kept_back={name: why.value for name, why in backend.lacking.items()},
        kv_events=kv_events(backend),
        gpus=gpus_told(facts.gpus.get(backend.id, ())),
        supervision=None if unit is None else supervision(unit, moment),
    )


def _transition(seen: Transition, moment: Moment) -> TransitionOverview:
    return TransitionOverview(
        at=moment.told(seen.at),
        backend=seen.backend_id,
        before=seen.before.value,
        after=seen.after.value,
        reason=seen.reason,
        detail=seen.detail,
    )
