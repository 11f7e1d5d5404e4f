"""What is wrong now, the worst first: each problem with its cause, and what to do about it.

`vllm-gateway status`, the dashboard and alerts tell the same sentences. A problem says what is wrong, with
the numbers, and since when; its cause, as far as it is known; and one command or setting that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from typing_extensions import TypedDict

from gateway.core.printable import count
from gateway.ops.moment import Moment

Severity = Literal[  # the worst first
    "down",  # requests of a pool or a model are not served
    "degraded",  # they are, but worse, fewer, or without what protects them
    "note",  # it concerns single callers, or nobody yet
]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

ProblemKind = Literal[  # those that hurt most first, within a severity
    "pool_down",  # no backend of the pool serves
    "requests_fail",  # most requests of the pool fail
    "model_fails",  # most requests for one model or adapter fail
    "other_model",  # a backend does not serve the model of its pool, or not the one that others do
    "adapter_missing",  # an adapter is on no backend, and could not be loaded
    "shutting_down",
    "saturated",  # no backend has room: requests wait, or are refused
    "shed",  # requests were refused for capacity
    "errors",  # some requests fail
    "suspended",  # the next are states of a backend, see `ops.states`
    "crash_looping",
    "failed",
    "unreachable",
    "frozen",
    "backend_down",
    "failing",
    "asleep",
    "backend_degraded",
    "slow",  # a backend is slower than its peers
    "lost_requests",  # a backend has far more of our requests than its engine runs
    "kv_full",
    "adapter_failed",  # a backend could not load an adapter that others have
    "store_lost",  # what replicas share does not answer
    "keys_unknown",
    "keys_invalid",  # the keys file cannot be used, and those before it stay
    "disk_low",
    "state_unwritable",  # what the gateway must remember is not kept
    "state_shared",  # another gateway writes what this one must remember
    "reload_failed",
    "replicas_differ",
    "gpu_memory",  # a GPU of a launched backend has little memory left
    "cordoned",
    "draining",
    "pending",
    "restarting",
    "starting",
    "metrics_stale",
    "reload_pending",  # the file has changed, or a setting needs a restart
    "restarts_held",
    "unknown_model",  # requests ask for a model that nobody serves
    "key_over_limit",
    "client_slow",
]
_ORDER: Final = {kind: place for place, kind in enumerate(get_args(ProblemKind))}
_HALF_A_DAY_S: Final = 43_200.0
MOST_ALIKE: Final = 4  # that are told one by one
_MOST_TEXT: Final = 400  # of a cause: some come from a server's log


class ProblemTold(TypedDict):
    """One problem."""

    severity: Severity
    kind: ProblemKind
    subject: str  # such as `pool m`, `backend m/b1`, `model m-sql`, `redis`, `reload`
    sentence: str  # what is wrong, with the numbers and since when
    cause: str  # a sentence; empty: it is not known, or in the one before
    next: str  # what to do: a sentence with one command or setting
    since: str


class VerdictTold(TypedDict):
    """How things are, in one sentence or two."""

    state: Literal["ok", "degraded", "down"]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem as it was found; `what` is a sentence without its stop."""

    kind: ProblemKind
    severity: Severity
    subject: str
    what: str
    remedy: str
    cause: str = ""
    since: float | None = None  # monotonic; None: since it was first found
    weight: float = 0.0  # the larger, the worse, among those of one kind
    group: str = ""  # the subject of all that are alike, where they are many
    after_s: float = 0.0  # it is told once it has lasted so long: what passes at once is no problem

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same problem as one found before."""
        return self.kind, self.subject


class Known:
    """Since when each problem is known. One owner, who is told of all problems at least each few seconds."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}  # monotonic

    def dated(self, found: Iterable[Problem], now: float) -> list[Problem]:
        """Return the problems with the time since when, the worst first; what is not among them has ended."""
        dated = [replace(each, since=self._began(each, now)) for each in found]
        self._since = {each.key: each.since for each in dated if each.since is not None}
        lasting = [each for each in dated if now - (each.since or now) >= each.after_s]
        return sorted(_folded(lasting), key=_badness)

    def _began(self, problem: Problem, now: float) -> float:
        if problem.since is None:
            return self._since.get(problem.key, now)
        return min(problem.since, now)  # of a file by another machine's clock it may be to come


def _folded(lasting: Iterable[Problem]) -> Iterator[Problem]:
    """Yield problems; many of one kind and group as one: a fleet may have thousands."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for each in lasting:
        groups.setdefault((each.kind, each.group or each.subject), []).append(each)
    for (_, subject), alike in groups.items():
        if len(alike) <= MOST_ALIKE:
            yield from alike
            continue
        first = min(alike, key=lambda each: (SEVERITIES.index(each.severity), -each.weight))
        what = f"{first.what}; so it is with {len(alike) - 1} more"
        since = min(each.since for each in alike if each.since is not None)
        yield replace(first, subject=subject, what=what, weight=len(alike), since=since)


def told(problem: Problem, moment: Moment) -> ProblemTold:
    """Return a problem for people."""
    since = moment.now if problem.since is None else problem.since
    at, lasted = moment.told(since), duration(moment.now - since)
    clock = at[11:19] if moment.now - since < _HALF_A_DAY_S else at[:16].replace("T", " ")
    return ProblemTold(
        severity=problem.severity,
        kind=problem.kind,
        subject=problem.subject,
        sentence=f"{problem.what}. Since {clock} UTC ({lasted}).",
        cause=_short(problem.cause),
        next=problem.remedy,
        since=at,
    )


def verdict(problems: list[ProblemTold], well: str) -> VerdictTold:
    """Return the verdict: the worst problem with its cause, and how many there are; `well` if there is none."""
    worst = problems[0] if problems else None
    state: Literal["ok", "degraded", "down"] = "ok"
    if worst is not None and worst["severity"] != "note":
        state = worst["severity"]
    if worst is None:
        return VerdictTold(state=state, sentence=well)
    parts = [worst["sentence"], worst["cause"]]
    more = len(problems) - 1
    if state == "ok":
        parts.insert(0, well)
    if more:
        parts.append(f"{count(more, 'more problem')}.")
    return VerdictTold(state=state, sentence=" ".join(filter(None, parts)))


def duration(seconds: float) -> str:
    """Return `8 s`, `6 min`, `3 h` or `12 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def sentence(text: str) -> str:
    """Return a clause as a sentence; nothing of nothing."""
    text = text.strip()
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _badness(problem: Problem) -> tuple[int, int, float, str]:
    return (
        SEVERITIES.index(problem.severity),
        _ORDER[problem.kind],
        -problem.weight,
        problem.subject,
    )


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
