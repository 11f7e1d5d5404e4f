"""One request from its arrival to its end, as `vllm-gateway explain` tells it: made when it is asked for.

Keys are added, never renamed or removed, within one `schema_version`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from typing_extensions import TypedDict

from gateway.admission.decisions import Decision, State
from gateway.core.endings import FAILED, Attempt
from gateway.core.types import Outcome, RequestRecord
from gateway.ingress.early import Refused
from gateway.ops.explain import (
    SCHEMA_VERSION,
    Book,
    FallbackTold,
    SettingTold,
    Told,
    fallback_told,
    why_it_waited,
)
from gateway.ops.explain import told as decision_told
from gateway.ops.moment import Moment
from gateway.ops.refused import RefusedTold, refused_told
from gateway.ops.requests import RequestTold, Seen, expected_prompt, request_told
from gateway.wire.calls import ENDPOINTS, reports_usage_on_request

Step = Literal[
    "arrived",
    "read",  # its whole body was there
    "queued",
    "admitted",  # it got a place at a backend
    "sent",
    "failed",  # an attempt
    "first_token",  # of a stream; else the first byte of the reply
    "now",  # it is still under way
    "ended",
]


class StepTold(TypedDict):
    """One moment of a request's life."""

    after_s: float  # it came
    step: Step
    sentence: str


class AttemptTold(TypedDict):
    """One attempt to have it answered."""

    backend: str
    engine_request_id: str  # as vLLM logs it, behind `chatcmpl-`, `cmpl-` ...
    sent_s: float  # after it came
    took_s: float
    outcome: str  # core.endings.Ending of a failed one, else core.types.Outcome; "running"


class CandidateTold(TypedDict):
    """A backend that was compared for the last attempt."""

    backend: str
    costs_s: float  # of the request there, in expected seconds; the least was to be had first
    chosen: bool


class ChangeTold(TypedDict):
    """What the backend got otherwise than the client wrote it."""

    field: str  # of the body
    sentence: str


class TokensTold(TypedDict):
    """What was expected, and what was used. null: not known, or not yet."""

    expected_prompt: int | None  # before it was sent: counted if `exact`, else by its size
    exact: bool | None
    expected_output: int | None
    stated_output: int | None  # limit, as the client wrote it
    output_limit: int | None  # as it was sent
    expected_cached: int | None
    prompt: int | None
    output: int | None
    cached: int | None
    counted_by: str | None  # core.usage.UsageSource: upstream is the backend itself


class RequestExplained(RequestTold):
    """One request, in full. `weighed` is empty where there was one backend, or none was looked for."""

    schema_version: int
    sentence: str
    message: str | None  # of the error, as its client reads it
    client: str | None
    revision: str | None
    canary: str | None  # of its pool, as it stands now: both sides, their shares, and the verdict
    fallback: FallbackTold | None
    # Why no other backend went on with a stream that broke: core.endings.Barrier.
    not_resumed: str | None
    timeline: list[StepTold]
    tried: list[AttemptTold]
    weighed: list[CandidateTold]
    changed: list[ChangeTold]
    tokens: TokensTold
    setting: SettingTold | None  # that made it wait, or refused it
    decision: Told | None  # of the gate: set if it waited, or was refused for capacity
    refused: RefusedTold | None  # set if it was refused before it asked for a backend


_USAGE_ON_REQUEST: Final = frozenset(
    spec.endpoint for spec in ENDPOINTS.values() if reports_usage_on_request(spec.dialect)
)

_ENDED: Final = {
    Outcome.OK: "was answered",
    Outcome.UNAUTHENTICATED: "was refused: it had no valid key",
    Outcome.REJECTED: "was refused as the client's own mistake",
    Outcome.SHED: "was refused for capacity",
    Outcome.UPSTREAM_REJECTED: "was refused by the backend",
    Outcome.BACKEND_ERROR: "failed at the backend",
    Outcome.BACKEND_TIMEOUT: "failed: the backend was silent for too long",
    Outcome.STREAM_BROKEN: "broke off in the middle of its stream",
    Outcome.CLIENT_GONE: "ended because its client left",
    Outcome.CLIENT_STALLED: "was cut: its client did not read",
    Outcome.TIME_LIMIT: "was ended: it took longer than `timeouts.total`",
    Outcome.SHUTDOWN: "was ended by the gateway's shutdown",
    Outcome.BUG: "failed by a bug of the gateway, which is logged",
}


def explained(
    seen: Seen,
    book: Book,
    moment: Moment,
    decision: Decision | None,
    refused: Refused | None,
    canary: str | None,
) -> RequestExplained:
    """Return all that is known of a request. `canary` is what `trials.sides_told` says of its pool."""
    record, told = seen.record, request_told(seen, moment)
    gate_told = None if decision is None else decision_told(decision, book, moment)
    early_told = None if refused is None else refused_told(refused, book)
    decided = early_told or gate_told
    return RequestExplained(
        **told,
        schema_version=SCHEMA_VERSION,
        sentence=gate_told["sentence"]
        if told["state"] == "waiting" and gate_told is not None
        else _sentence(told, early_told),
        message=record.message,
        client=record.client,
        revision=record.revision or None,
        canary=canary,
        fallback=fallback_told(record.fallback),
        not_resumed=None if record.not_resumed is None else record.not_resumed.value,
        timeline=_timeline(seen, moment, decision),
        tried=_tried(seen, moment),
        weighed=_weighed(record),
        changed=[*_changed(record)],
        tokens=_tokens(told, record),
        setting=decided["setting"] if decided else None,
        decision=gate_told,
        refused=early_told,
    )


def _sentence(told: RequestTold, refused: RefusedTold | None) -> str:
    """Return what became of a request, in one or two sentences."""
    subject = told["id"] if told["model"] is None else f"{told['id']} for {told['model']}"
    if refused is not None and refused["path"] and told["model"] is None:
        subject = f"{told['id']}: {refused['method']} {refused['path']}"
    if told["outcome"] is None:
        at = f" at {told['backend']}" if told["state"] == "running" else ""
        return f"{subject} is {told['state']}{at}, {told['duration_s']:.2f} s after it came."
    outcome = Outcome(told["outcome"])
    by = f" by {told['backend']}" if outcome is Outcome.OK else ""
    why = told["shed_reason"] or told["code"]
    ending = str(told["status"]) if why is None else f"{told['status']} {why}"
    text = f"{subject} {_ENDED[outcome]}{by} after {told['duration_s']:.2f} s: {ending}."
    if told["resumed"]:
        times = "once" if told["resumed"] == 1 else f"{told['resumed']} times"
        text += f" Another backend went on with its stream {times}."
    return text


def _timeline(seen: Seen, moment: Moment, decision: Decision | None) -> list[StepTold]:
    """Return the moments of a request in their order."""
    record = seen.record
    steps: list[tuple[float, Step, str]] = [(record.received_at, "arrived", "Its head was read.")]
    if record.body_at is not None:
        steps.append((record.body_at, "read", "Its body was read."))
    if decision is not None and decision.ended_at != decision.at:
        steps.append((decision.at, "queued", why_it_waited(decision)))
        if decision.state is State.ADMITTED and decision.ended_at is not None:
            steps.append((decision.ended_at, "admitted", f"{decision.backend_id} had room."))
    for each in record.failed:
        steps.append((each.sent_at, "sent", f"It was sent to {each.backend_id}."))
        steps.append((each.ended_at, "failed", f"{each.backend_id} {_failed(each)}."))
    if record.attempts > len(record.failed) and record.sent_at is not None:
        steps.append((record.sent_at, "sent", f"It was sent to {record.backend_id}."))
    first_at = record.first_byte_at if seen.down is None else seen.down.started_at
    if first_at is not None:
        what = "token" if record.stream else "byte of the reply"
        steps.append((first_at, "first_token", f"The first {what} went to the client."))
    if record.ended_at is None:
        steps.append((moment.now, "now", "It is still under way."))
    else:
        outcome = record.outcome or Outcome.BUG
        steps.append((record.ended_at, "ended", f"It {_ENDED[outcome]}: {record.status}."))
    steps.sort(key=lambda each: each[0])
    return [
        StepTold(after_s=round(at - record.received_at, 6), step=step, sentence=sentence)
        for at, step, sentence in steps
    ]


def _failed(attempt: Attempt) -> str:
    return "failed" if attempt.ending is None else FAILED[attempt.ending]


def _tried(seen: Seen, moment: Moment) -> list[AttemptTold]:
    """Return the attempts in their order: those that failed, and the last one."""
    record = seen.record
    tried = [
        AttemptTold(
            backend=each.backend_id,
            engine_request_id=each.engine_id,
            sent_s=round(each.sent_at - record.received_at, 6),
            took_s=round(each.ended_at - each.sent_at, 6),
            outcome="" if each.ending is None else each.ending.value,
        )
        for each in record.failed
    ]
    if record.attempts > len(record.failed) and record.sent_at is not None:
        ended_at = moment.now if record.ended_at is None else record.ended_at
        tried.append(
            AttemptTold(
                backend=record.backend_id or "",
                engine_request_id=record.engine_id,
                sent_s=round(record.sent_at - record.received_at, 6),
                took_s=round(ended_at - record.sent_at, 6),
                outcome="running" if record.outcome is None else record.outcome.value,
            )
        )
    return tried


def _weighed(record: RequestRecord) -> list[CandidateTold]:
    """Return what the request was expected to cost at each backend, the cheapest first."""
    if len(record.costs_s) != len(record.weighed):
        return []  # there was one, which is taken whatever it costs
    found = [
        CandidateTold(backend=each, costs_s=round(cost, 6), chosen=each == record.backend_id)
        for each, cost in zip(record.weighed, record.costs_s, strict=True)
    ]
    return sorted(found, key=lambda each: each["costs_s"])


def _changed(record: RequestRecord) -> Iterator[ChangeTold]:
    """Yield what the backend got otherwise than the client wrote it."""
    if record.sent_model is not None and record.sent_model != record.model:
        told = f"The backend knows {record.model} as {record.sent_model}."
        yield ChangeTold(field="model", sentence=told)
    limit, stated = _output_limit(record), record.stated_tokens
    if limit != stated:
        client = (
            "the client stated no limit" if stated is None else f"the client asked for {stated}"
        )
        told = f"At most {limit} tokens of output, so that prompt and output fit; {client}."
        yield ChangeTold(field="max_tokens", sentence=told)
    if record.adds_usage and record.endpoint in _USAGE_ON_REQUEST:
        told = "The backend tells the tokens at the end; the client, who did not ask, is not shown that."
        yield ChangeTold(field="stream_options", sentence=told)
    if record.adds_ids:
        told = (
            "The backend tells the ids of tokens, so that another one could go on with the reply."
        )
        yield ChangeTold(field="return_token_ids", sentence=told)
        if not record.stream:
            told = "The reply was streamed to the gateway, and sent to the client as a whole."
            yield ChangeTold(field="stream", sentence=told)
    if record.adds_salt:
        told = "Its prefix cache is the tenant's own."
        yield ChangeTold(field="cache_salt", sentence=told)
    if record.resumed:
        told = "The last attempt was sent the prompt and what its client had by then."
        yield ChangeTold(field="prompt", sentence=told)


def _output_limit(record: RequestRecord) -> int | None:
    """Return the limit of the output that was sent; the client's own where nothing was changed."""
    limit = None if record.demand is None else record.demand.max_new_tokens
    return record.stated_tokens if limit is None else limit


def _tokens(told: RequestTold, record: RequestRecord) -> TokensTold:
    demand, need = record.demand, record.need
    return TokensTold(
        expected_prompt=expected_prompt(record),
        exact=None if demand is None else demand.exact,
        expected_output=None if need is None else need.output_tokens,
        stated_output=record.stated_tokens,
        output_limit=_output_limit(record),
        expected_cached=record.expected_cached_tokens,
        prompt=None if record.usage is None else record.usage.prompt_tokens,
        output=told["output_tokens"],
        cached=told["cached_tokens"],
        counted_by=told["tokens_from"],
    )
