"""The requests that are under way or ended lately, as rows for people and programs.

Keys are added, never renamed or removed, within one `schema_version`. Nothing here is of a prompt or a
reply but their lengths in tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Final, Literal, NamedTuple

from typing_extensions import TypedDict

from gateway.core.endpoints import NO_ENGINE
from gateway.core.types import Outcome, RequestRecord
from gateway.ingress.downstream import Downstream
from gateway.observe.ended import EndedRequests
from gateway.ops.moment import Moment, rounded

_TOGETHER: Final = 256  # some 0.3 ms

RequestState = Literal[
    "reading",  # its body is not there yet
    "waiting",  # its prompt is counted, or it has no place at a backend yet
    "running",  # a backend works on it
    "ended",
]

# What is nobody's trouble: the client got all, or did not stay for it.
_NO_ERRORS: Final = frozenset({None, Outcome.OK, Outcome.CLIENT_GONE})


class RequestTold(TypedDict):
    """One request in short. While it is under way, times and tokens are those so far."""

    id: str
    at: str  # when it came
    state: RequestState
    endpoint: str | None  # null: refused before it was known
    model: str | None
    adapter: str | None
    pool: str | None
    backend: str | None  # of the last attempt
    key_id: str | None
    tenant: str | None
    stream: bool
    outcome: str | None  # null while it is under way, as are the next
    status: int | None
    code: str | None
    shed_reason: str | None
    waited_s: float  # for a place at a backend
    first_token_s: float | None  # of a stream, since it came
    duration_s: float
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    tokens_from: str | None  # who counted: core.usage.UsageSource; null: they are estimates so far
    attempts: int
    resumed: int  # how often another backend went on with its stream
    cursor: str  # for `after`


class Seen(NamedTuple):
    """A request, and its client's side while it is under way."""

    record: RequestRecord
    down: Downstream | None

    @property
    def state(self) -> RequestState:
        """Where it is."""
        record = self.record
        if self.down is None:
            return "ended"
        if record.body_at is None:
            return "reading"
        return "waiting" if record.attempts == len(record.failed) else "running"


@dataclass(frozen=True, slots=True)
class Requests:
    """All requests that can be told of."""

    ended: EndedRequests
    live: Callable[[], Iterable[Downstream]]

    def __iter__(self) -> Iterator[Seen]:
        """Go through them as they are when that begins, in no order."""
        live = [
            Seen(down.record, down)
            for down in self.live()
            if down.record is not None and not down.record.settled
        ]
        ended = iter(self.ended)
        yield from live
        for record in ended:
            yield Seen(record, None)

    def get(self, request_id: str) -> Seen | None:
        """Return a request; of several with its id one that is under way, else the newest."""
        for down in self.live():
            if down.id == request_id and down.record is not None and not down.record.settled:
                return Seen(down.record, down)
        record = self.ended.get(request_id)
        return None if record is None else Seen(record, None)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which requests are wanted; None: any. `errors`: only those that ended, and not well."""

    key: str | None = None
    tenant: str | None = None
    model: str | None = None
    pool: str | None = None
    backend: str | None = None
    outcome: Outcome | None = None
    state: RequestState | None = None
    errors: bool = False

    def wants(self, seen: Seen) -> bool:
        """Whether a request is wanted."""
        record, caller = seen.record, seen.record.caller
        is_so = (
            (self.key, None if caller is None else caller.key_id),
            (self.tenant, None if caller is None else caller.tenant),
            (self.model, record.model),
            (self.pool, record.pool),
            (self.backend, record.backend_id),
            (self.outcome, record.outcome),
            (self.state, seen.state),
        )
        return all(wanted is None or wanted == found for wanted, found in is_so) and not (
            self.errors and record.outcome in _NO_ERRORS
        )


Place = tuple[int, str]  # in the order of all requests: when it came, in microseconds, and its id


def place_of(record: RequestRecord) -> Place:
    """Return the place of a request."""
    return int(record.received_at * 1e6), record.id


def cursor_of(place: Place) -> str:
    """Return a place as a cursor."""
    return f"{place[0]}-{place[1]}"


def place_at(cursor: str) -> Place:
    """Return the place of a cursor.

    Raises:
        ValueError: it is none.
    """
    micros, _, request_id = cursor.partition("-")
    return int(micros), request_id


async def newest(
    requests: Iterable[Seen], wanted: Filter, before: Place | None = None
) -> list[Seen]:
    """Return the requests that are wanted, the newest first; those `before` a place, if there is one.

    Streams go on meanwhile: no more than `_TOGETHER` requests are looked at in one go.
    """
    found, every = list[tuple[Place, Seen]](), iter(requests)
    while some := [*islice(every, _TOGETHER)]:
        found += [(place_of(each.record), each) for each in some if wanted.wants(each)]
        await asyncio.sleep(0)
    found.sort(key=itemgetter(0), reverse=True)
    return [each for place, each in found if before is None or place < before]


def request_told(seen: Seen, moment: Moment) -> RequestTold:
    """Return a request in short."""
    record, caller, usage = seen.record, seen.record.caller, seen.record.usage
    until = moment.now if record.ended_at is None else record.ended_at
    first_at = record.first_byte_at
    said_tokens = None if usage is None else usage.completion_tokens
    if seen.down is not None:
        said_tokens = said_so_far(seen.down)
        first_at = seen.down.started_at
    return RequestTold(
        id=record.id,
        at=moment.told(record.received_at),
        state=seen.state,
        endpoint=None if record.endpoint is None else record.endpoint.value,
        model=record.model,
        adapter=record.adapter,
        pool=record.pool,
        backend=record.backend_id,
        key_id=None if caller is None else caller.key_id,
        tenant=None if caller is None else caller.tenant,
        stream=record.stream,
        outcome=None if record.outcome is None else record.outcome.value,
        status=record.status or None,
        code=record.error_code,
        shed_reason=None if record.shed_reason is None else record.shed_reason.value,
        waited_s=round(_waited_s(seen, moment.now), 3),
        first_token_s=rounded(None if first_at is None else first_at - record.received_at)
        if record.stream
        else None,
        duration_s=round(until - record.received_at, 3),
        prompt_tokens=expected_prompt(record) if usage is None else usage.prompt_tokens,
        output_tokens=said_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        tokens_from=None if usage is None else usage.source.value,
        attempts=record.attempts,
        resumed=record.resumed,
        cursor=cursor_of(place_of(record)),
    )


def expected_prompt(record: RequestRecord) -> int | None:
    """Return how many tokens an engine is expected to read; None: not known, or no engine reads any."""
    if record.need is None or record.endpoint in NO_ENGINE:
        return None
    return record.need.prompt_tokens


def said_so_far(down: Downstream) -> int | None:
    """Return how many tokens of a stream were relayed; None: nothing is relayed now."""
    return None if down.relay is None else down.relay.watch.events


def _waited_s(seen: Seen, now: float) -> float:
    """Return how long a request waited for a place, this moment included."""
    record = seen.record
    if seen.state != "waiting" or record.body_at is None:
        return record.queue_s
    since = record.failed[-1].ended_at if record.failed else record.body_at
    return record.queue_s + max(0.0, now - since)
