"""What the overview tells of what replicas share, and of the replicas: gateways, or workers of one."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from gateway.ops.moment import Moment
from gateway.store.replicas import ALIVE_S, Replicas


class ReplicaOverview(TypedDict):
    """One gateway that shares the Redis, or one worker of a gateway."""

    id: str  # names its life: another one after a restart
    here: bool  # it is the one that answers
    alive: bool  # heard of within 5 s, as far as this one knows
    heard_s: float  # how long ago
    host: str
    pid: int
    version: str
    config_agrees: bool  # it is configured like the one that answers
    leads: list[str]  # pools whose backends it restarts
    worker: int  # its number among the workers of one gateway; 0: it is alone
    connections: int  # of its clients
    in_flight: int  # requests that it carries
    differs: list[str]  # backends that it sees in another phase than the one that answers


class StoreOverview(TypedDict):
    """What replicas share: a Redis, or what the parent of several workers keeps."""

    trouble: str  # why it does not answer; empty: it does
    replicas: list[ReplicaOverview]  # as it last told


def store_told(replicas: Replicas, moment: Moment) -> StoreOverview:
    """Return the shared store as it is told."""
    own = replicas.tell()
    return StoreOverview(
        trouble=replicas.store.trouble,
        replicas=[
            ReplicaOverview(
                id=each.id,
                here=each.id == replicas.id,
                alive=each.id == replicas.id or moment.now - each.heard_at <= ALIVE_S,
                heard_s=round(max(0.0, moment.now - each.heard_at), 1),
                host=each.told.host,
                pid=each.told.pid,
                version=each.told.version,
                config_agrees=each.told.config_hash == own.config_hash,
                leads=list(each.told.leads),
                worker=each.told.worker,
                connections=each.told.connections,
                in_flight=sum(each.told.in_flight.values()),
                differs=_differ(own.phases, each.told.phases),
            )
            for each in replicas.every
        ],
    )


def _differ(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return the backends that both know and see in different phases."""
    return sorted(each for each, phase in here.items() if there.get(each, phase) != phase)
