"""The limits of a key, a tenant, or a key's use of some models: as written, as judged, as taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, TypeVar

_Value = TypeVar("_Value")


class Period(Enum):
    """Over which time a limit counts; its value is its name in scripts."""

    MINUTE = "m"  # a bucket of a minute's worth that empties continuously
    DAY = "d"  # of the calendar, in UTC
    MONTH = "y"
    RUNNING = "r"  # not over a time: how many are under way

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call into Python


class Rule(Enum):
    """What a limit counts, and over which time; its value is the setting's name."""

    REQUESTS = "requests_per_minute"
    INPUT = "input_tokens_per_minute"
    OUTPUT = "output_tokens_per_minute"
    TOKENS_DAY = "tokens_per_day"
    TOKENS_MONTH = "tokens_per_month"
    BUDGET_DAY = "budget_per_day"
    BUDGET_MONTH = "budget_per_month"
    CONCURRENT = "concurrent_requests"

    __hash__ = object.__hash__


class OnOutage(Enum):
    """What a rule does while replicas cannot agree on what is used."""

    LOCAL = "local"  # each replica gives out its share
    OPEN = "open"  # it refuses nothing
    CLOSED = "closed"  # it refuses all (503)


class Scope(Enum):
    """Whose use a limit counts."""

    KEY = "key"
    TENANT = "tenant"  # of all its keys together
    KEY_MODEL = "key_model"  # of one key, over the models that a glob matches
    TENANT_MODEL = "tenant_model"

    __hash__ = object.__hash__


class Amounts(NamedTuple):
    """What a request costs, or uses."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    tokens: float = 0.0  # of both
    money: float = 0.0

    def less(self, other: Amounts) -> Amounts:
        """Return how much more this is than another one."""
        return Amounts(*[a - b for a, b in zip(self, other, strict=True)])


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost."""

    input: float
    cached_input: float
    output: float

    def of(self, prompt_tokens: float, output_tokens: float, cached_tokens: float = 0) -> float:
        """Return what a request costs; cached tokens are among those of the prompt."""
        fresh = max(0.0, prompt_tokens - cached_tokens)
        return (
            fresh * self.input + cached_tokens * self.cached_input + output_tokens * self.output
        ) / 1e6


FREE: Final = Price(0.0, 0.0, 0.0)


# Over which time each rule counts, and which of the amounts.
RULES: Final[dict[Rule, tuple[Period, int]]] = {
    Rule.REQUESTS: (Period.MINUTE, 0),
    Rule.INPUT: (Period.MINUTE, 1),
    Rule.OUTPUT: (Period.MINUTE, 2),
    Rule.TOKENS_DAY: (Period.DAY, 3),
    Rule.TOKENS_MONTH: (Period.MONTH, 3),
    Rule.BUDGET_DAY: (Period.DAY, 4),
    Rule.BUDGET_MONTH: (Period.MONTH, 4),
    Rule.CONCURRENT: (Period.RUNNING, 0),
}


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits that one mapping of the settings states; None: no limit.

    `on_outage` and `shadow` hold for all its rules, those of its `models` too; None: not said. `apart` holds
    the rules that have their own; `models` the limits of one key over the models that each glob matches.
    """

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    budget_per_day: float | None = None
    budget_per_month: float | None = None
    on_outage: OnOutage | None = None
    shadow: bool | None = None  # True: it is counted and told, and nothing is refused
    apart: tuple[tuple[Rule, OnOutage | None, bool | None], ...] = ()
    models: tuple[tuple[str, KeyLimits], ...] = ()


def manner_of(limits: KeyLimits, rule: Rule) -> tuple[OnOutage | None, bool | None]:
    """Return a rule's `on_outage` and `shadow`: its own, else those of its mapping."""
    for each, on_outage, shadow in limits.apart:
        if each is rule:
            return _or_else(on_outage, limits.on_outage), _or_else(shadow, limits.shadow)
    return limits.on_outage, limits.shadow


def limits_within(each: KeyLimits, whole: KeyLimits) -> KeyLimits:
    """Return limits of some models with the `on_outage` and `shadow` of the mapping that they stand in."""
    return replace(
        each,
        on_outage=_or_else(each.on_outage, whole.on_outage),
        shadow=_or_else(each.shadow, whole.shadow),
    )


def limits_over(own: KeyLimits | None, wide: KeyLimits | None) -> KeyLimits | None:
    """Return a key's limits over those of its tier, rule by rule.

    What a key says of all its rules, its `on_outage` and `shadow`, holds for those of its tier too.
    """
    if own is None or wide is None:
        return own or wide
    return _merged(own, wide)


def _merged(own: KeyLimits, wide: KeyLimits) -> KeyLimits:
    most: dict[str, float] = {}
    apart: list[tuple[Rule, OnOutage | None, bool | None]] = []
    for rule in Rule:
        source = own if getattr(own, rule.value) is not None else wide
        if getattr(source, rule.value) is None:
            continue
        on_outage, shadow = manner_of(source, rule)
        if source is wide:
            on_outage, shadow = _or_else(own.on_outage, on_outage), _or_else(own.shadow, shadow)
        most[rule.value] = getattr(source, rule.value)
        if (on_outage, shadow) != (None, None):
            apart.append((rule, on_outage, shadow))
    ours, theirs = dict(own.models), dict(wide.models)
    models = {
        glob: _merged(
            limits_within(ours.get(glob, KeyLimits()), own),
            limits_within(theirs.get(glob, KeyLimits()), wide),
        )
        for glob in theirs | ours
    }
    return KeyLimits(**most, apart=tuple(apart), models=tuple(models.items()))  # type: ignore[arg-type]


def _or_else(stated: _Value | None, otherwise: _Value | None) -> _Value | None:
    return otherwise if stated is None else stated


@dataclass(frozen=True, slots=True)
class Limit:
    """One rule of one scope, as it is judged."""

    scope: Scope
    owner: str  # the name of the key, or of the tenant
    models: str  # a glob, where it counts these alone; else empty
    rule: Rule
    most: float
    on_outage: OnOutage = OnOutage.LOCAL
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """How a limit counts: where what is used is kept, and what of a request's amounts counts."""

    store: int  # its place in the plan's `stores`
    period: Period
    amount: int  # its place in `Amounts`
    most: float
    shadow: bool


@dataclass(frozen=True, slots=True)
class Judged(Counted):
    """A limit in its plan."""

    limit: Limit


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """What is counted of one request."""

    rules: tuple[Counted, ...]
    stores: tuple[str, ...]  # all of one tenant's are on one node of a cluster
    running: tuple[int, ...]  # the stores that hold what runs


@dataclass(frozen=True, slots=True, eq=False)  # each is itself: requests look things up by it
class Plan(Counts):
    """All that a request of one key for one model has to fit. Compiled once; see `limiting.plans`."""

    rules: tuple[Judged, ...]
    key_id: str
    words: str  # the rules, as scripts read them
    calendar: str  # those of them that count over a day or a month
    months: str  # those that count over a month
    # For headers: a label, and the rules that it may tell of.
    shown: tuple[tuple[bytes, tuple[int, ...]], ...]
    # A request is never thought to cost more than these, or it could not run at all.
    input_most: float
    output_most: float
    tokens_most: float
    money_most: float
    closed: Limit | None  # that refuses all while replicas cannot agree
    priced: bool  # some rule counts money


@dataclass(frozen=True, slots=True)
class Taken:
    """What a request took of its limits. `used` is by all, it included, rule by rule."""

    plan: Plan
    costs: Amounts
    used: tuple[float, ...]
    lease: str
    shared: bool  # from what replicas share; else from this process's own part
    day: int  # in which it was taken, since the epoch
    wall: float  # when
    share_of: int = 1  # replicas, each with its own part
    shadowed: tuple[int, ...] = ()  # the rules that would have refused it, were they not in shadow
