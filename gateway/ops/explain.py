"""Why a request waited or was refused: decisions told with the settings behind them.

The shapes below are what `vllm-gateway explain` reads. Keys are added, never renamed or
removed, within one `schema_version`. A setting is told with its value and line as they are now: a
reload since the decision shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from typing_extensions import TypedDict

from gateway.admission.decisions import CLIENT_TIMEOUT, Decision, Said, State
from gateway.config.findings import KeyPath, dotted
from gateway.config.load import Loaded
from gateway.config.spell import spell
from gateway.config.units import Section
from gateway.core.exclusion import AWAITS_ADAPTER
from gateway.core.traffic import Cause, Fallback
from gateway.ops.moment import Moment, rfc3339, rounded

SCHEMA_VERSION: Final = 2


class SettingTold(TypedDict):
    """One setting; `origin` is `gateway.yaml:12` or `default`. `name` may be a client's own header."""

    name: str
    value: object
    origin: str


class BackendTold(TypedDict):
    """What one backend said: `room`, `second choice`, or why it is excluded."""

    id: str
    verdict: str
    expected_s: float | None  # that it costs there; less is better
    cached_tokens: int | None  # of its prompt, that it was thought to hold; null: nobody asked
    setting: SettingTold | None


class FallbackTold(TypedDict):
    """Which pool could not take a request that another took, and why."""

    pool: str
    cause: str  # core.traffic.Cause


class Summary(TypedDict):
    """One decision, in short."""

    id: str
    at: str
    state: str  # admission.decisions.State
    sentence: str
    model: str
    pool: str
    adapter: str | None
    tenant: str
    key_id: str
    priority: int
    waited_s: float
    backend: str | None
    status: int | None
    code: str | None
    shed_reason: str | None


class Told(Summary):
    """One decision, in full."""

    schema_version: int
    prompt_tokens: int
    output_tokens: int  # expected
    may_wait_s: float
    position: int | None
    eta_s: float | None
    message: str | None  # as its client reads it
    retry_after_s: float | None
    setting: SettingTold | None
    # Its own pool could not take it; `pool` is the one that was asked next.
    fallback: FallbackTold | None
    backends: list[BackendTold]


@dataclass(frozen=True, slots=True)
class Book:
    """The configuration in force, to tell settings from."""

    loaded: Loaded
    file: Path | None

    def told(self, path: KeyPath | None) -> SettingTold | None:
        """Return a setting with its value and where it is written; None stays None."""
        if path is None:
            return None
        origin = self.loaded.told_in(path)
        if self.file is not None and origin.startswith("line "):
            origin = f"{self.file.name}:{origin.removeprefix('line ')}"
        return SettingTold(name=dotted(path), value=self._value(path), origin=origin)

    def _value(self, path: KeyPath) -> object:
        here: Any = self.loaded.config
        field = None
        try:
            for part in path:
                name = str(part)
                field = type(here).model_fields[name] if isinstance(here, Section) else None
                here = getattr(here, name) if field is not None else here[part]
        except (KeyError, IndexError, TypeError):
            return None  # a reload took it away
        return spell(here, field)


def summary(decision: Decision, moment: Moment) -> Summary:
    """Return a decision in short."""
    return Summary(
        id=decision.id,
        at=rfc3339(decision.wall_at),
        state=decision.state.value,
        sentence=sentence(decision, moment.now),
        model=decision.model,
        pool=decision.pool,
        adapter=decision.adapter,
        tenant=decision.tenant,
        key_id=decision.key_id,
        priority=decision.priority,
        waited_s=round(_waited_s(decision, moment.now), 3),
        backend=decision.backend_id,
        status=decision.status,
        code=decision.code,
        shed_reason=shed_reason(decision),
    )


def told(decision: Decision, book: Book, moment: Moment) -> Told:
    """Return all of a decision."""
    return Told(
        **summary(decision, moment),
        schema_version=SCHEMA_VERSION,
        prompt_tokens=decision.need.prompt_tokens,
        output_tokens=decision.need.output_tokens,
        may_wait_s=round(decision.may_wait_s, 3),
        position=decision.position,
        eta_s=rounded(decision.eta_s),
        message=decision.message,
        retry_after_s=rounded(decision.retry_after_s),
        setting=setting_told(decision, book),
        fallback=fallback_told(decision.fallback),
        backends=[backend_told(each, book) for each in decision.said],
    )


def fallback_told(fallback: Fallback | None) -> FallbackTold | None:
    """Return from which pool a request came, if it was sent to another."""
    if fallback is None:
        return None
    return FallbackTold(pool=fallback.pool, cause=fallback.cause.value)


_BECAUSE: Final = {
    Cause.NO_BACKEND: "none of its backends serves",
    Cause.OVERLOAD: "it is overloaded",
    Cause.CONTEXT: "its context window is too small",
}


def sentence(decision: Decision, now: float) -> str:
    """Return what became of a request, in two or three sentences at most."""
    said, fallback = _outcome(decision, now), decision.fallback
    if fallback is None:
        return said
    return f"{said} The pool {fallback.pool} could not take it: {_BECAUSE[fallback.cause]}."


def _outcome(decision: Decision, now: float) -> str:
    waited, name = f"{_waited_s(decision, now):.1f} s", decision.id
    match decision.state:
        case State.WAITING:
            return (
                f"{name} has been waiting {waited} for {decision.model}, of at most "
                f"{decision.may_wait_s:.1f} s. {queued(decision, 'It joined the queue')}"
            )
        case State.ADMITTED:
            return f"{name} waited {waited} for {decision.model} and was sent to {decision.backend_id}."
        case State.LEFT:
            return f"{name} waited {waited} for {decision.model}; then its client disconnected."
        case State.REFUSED:
            told = f"{decision.status} {shed_reason(decision) or decision.code}"
            at_once, model = decision.ended_at == decision.at, decision.model
            if decision.backend_id is not None:
                began = f"{name} for {model}" if at_once else f"{name} waited {waited} for {model},"
                return f"{began} was sent to {decision.backend_id}, which answered {told}."
            after = "at once" if at_once else f"after {waited} in the queue"
            return f"{name} for {model} was refused {after}: {told}."


def why_it_waited(decision: Decision) -> str:
    """Return why a request did not go to a backend as it came."""
    passing = [each.exclusion for each in decision.said if each.exclusion and each.exclusion.passes]
    if decision.has_room and decision.awaits is not None:
        return (
            f"{decision.awaits}, which has its prompt cached, had no room, so it waited for that."
        )
    if decision.has_room:
        return "Others waited before it, so it waited for its turn."
    if not passing:
        return "No backend served it, so it waited for one."
    if AWAITS_ADAPTER.issuperset(passing):
        return "Its adapter was not loaded yet, so it waited for that."
    return "No backend had room, so it waited for one."


def backend_told(said: Said, book: Book) -> BackendTold:
    """Return what one backend said."""
    verdict = "room" if said.expected_s is not None else "second choice"
    return BackendTold(
        id=said.backend_id,
        verdict=verdict if said.exclusion is None else said.exclusion.value,
        expected_s=rounded(said.expected_s),
        cached_tokens=said.cached_tokens,
        setting=book.told(said.setting),
    )


def setting_told(decision: Decision, book: Book) -> SettingTold | None:
    """Return the setting that decided, or the client's own timeout."""
    if decision.setting is None and decision.timed_out:
        return SettingTold(
            name=CLIENT_TIMEOUT,
            value=f"leaves {round(decision.may_wait_s, 2):g}s to wait",
            origin="sent by the client",
        )
    return book.told(decision.setting)


def queued(decision: Decision, lead: str) -> str:
    """Return a sentence with its place in the queue."""
    eta = "wait unknown" if decision.eta_s is None else f"about {decision.eta_s:.1f} s"
    place = (
        "behind many others" if decision.position is None else f"at position {decision.position}"
    )
    return f"{lead} {place} ({eta})."


def shed_reason(decision: Decision) -> str | None:
    """Return the word of the closed set, None when it was not shed."""
    return None if decision.shed_reason is None else decision.shed_reason.value


def _waited_s(decision: Decision, now: float) -> float:
    return (now if decision.ended_at is None else decision.ended_at) - decision.at
