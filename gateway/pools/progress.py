"""Whether an engine gets on, by what its metrics and our own requests show. Pure.

`/health` 200 says nothing of the engine, so two things are told from what moves:

    stuck    work runs, and no step ended for the patience, nor for as long as a prompt may be read
    silent   our requests wait, and have heard nothing for longer than is usual there: a suspicion

Requests that give up and leave are no progress. So the suspicion stays until there is some; but where the
engine shows no work either, only for a while, for then it takes another request to know.

A step shows in the metrics (`moved`). One that only reads a part of a prompt counts
no token; it shows in the usage of the KV cache, and not even there while one large step lasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from gateway.core.types import LoadSample


@dataclass(frozen=True, slots=True)
class Listened:
    """What the requests that wait for a backend have heard of it; told about twice a second."""

    heard_at: float  # a byte of a reply
    quiet_s: float  # neither a byte nor a step since then, with a request that waits; 0: none waits
    patience_s: float  # so long it may be quiet, by what is usual there
    reading_s: float  # that the largest prompt which may be read now may take


class Progress(msgspec.Struct, frozen=True):
    """What moved, and what has not for too long. Times are seconds."""

    sample: LoadSample | None = None  # the last one
    reading_s: float = 0.0  # that the largest prompt which may be read now may take
    stuck_since: float | None = None  # work runs, and nothing has moved since
    stuck_s: float = 0.0  # how long, once that is too long; else 0
    silent_s: float = 0.0  # how long our requests heard nothing, once that is unusual; else 0
    silent_until: float = 0.0  # when that is forgotten, if nothing tells of it any more


def moved(before: LoadSample, sample: LoadSample) -> bool:
    """Whether the engine ended a step between two scrapes: it writes all of this at the end of one."""
    return (
        (before.progress, before.steps) != (sample.progress, sample.steps)
        or (before.running, before.waiting) != (sample.running, sample.waiting)
        or before.kv_usage_ratio != sample.kv_usage_ratio
    )


def scraped(progress: Progress, sample: LoadSample, patience_s: float, hold_s: float) -> Progress:
    """Take in a scrape. Steps write the gauges, so a fall to no running work is one too."""
    before, since, stuck_s = progress.sample, progress.stuck_since, progress.stuck_s
    has_moved = before is None or moved(before, sample)
    if sample.running == 0:
        since, stuck_s = None, 0.0
    elif since is None or has_moved:
        since, stuck_s = sample.at, 0.0
    elif sample.at - since >= max(patience_s, progress.reading_s):
        stuck_s = sample.at - since
    return replace(
        progress,
        sample=sample,
        stuck_since=since,
        stuck_s=stuck_s,
        silent_s=0.0 if has_moved else progress.silent_s,
        silent_until=sample.at + hold_s if sample.running else progress.silent_until,
    )


def listened(
    progress: Progress, said: Listened, at: float, hold_s: float, *, heard: bool
) -> Progress:
    """Take in what our requests heard; `heard`: a byte since the last time, which is progress."""
    since, stuck_s = progress.stuck_since, progress.stuck_s
    if since is not None and said.heard_at > since:
        since, stuck_s = said.heard_at, 0.0
    silent_s, until = progress.silent_s, progress.silent_until
    if said.quiet_s >= said.patience_s:
        silent_s, until = said.quiet_s, max(until, at + hold_s)
    elif heard or at >= until:
        silent_s = 0.0
    return replace(
        progress,
        reading_s=said.reading_s,
        silent_s=silent_s,
        silent_until=until,
        stuck_since=since,
        stuck_s=stuck_s,
    )
