"""What a rule of the diagnosis is, what it finds, and the verdict that it gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from gateway.vllmlog.errors import NATIVE
from gateway.vllmlog.lines import Line
from gateway.vllmlog.starts import Start
from gateway.vllmlog.verdict import (
    Advice,
    Confidence,
    Diagnosis,
    Kind,
    When,
    as_number,
    shown,
    without_secrets,
)


@dataclass(frozen=True)
class Found:
    """A line that a rule matched, where it stands, and what the start says around it."""

    start: Start
    place: int  # of the line in the start
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> Line:
        """The line itself."""
        return self.start.lines[self.place]

    @property
    def is_error(self) -> bool:
        """Whether the line is an error by its form, not only by words that may stand anywhere."""
        line = self.line
        raised = line.level in ("ERROR", "CRITICAL") or self.place in self.start.raised
        return raised or "error: " in line.text or NATIVE.search(line.text) is not None

    @cached_property
    def before(self) -> str:
        """The frames above the line, of its own process: where in the engine it happened."""
        lines = self.start.lines[max(0, self.place - _FRAMES) : self.place]
        return "\n".join(each.text for each in lines if each.process == self.line.process)

    def number(self, name: str) -> float | None:
        """Return a matched number, commas aside; None when it was not in the line."""
        return as_number(self.groups.get(name))

    def setting(self, name: str) -> float | None:
        """Return a number from the start's arguments, such as max_model_len; None if not given."""
        told = re.search(rf"['\"]?\b{name}['\"]?[=:] ?'?(-?[\d.]{{1,20}})", self.start.arguments)
        return None if told is None else as_number(told[1])

    def flag_with(self, value: str) -> str:
        """Return the flag whose value holds a text, such as --speculative-config; empty: unknown."""
        told = self.start.arguments
        depth, flag, end = 0, "", told.find(f"'{value}'")
        for each in _SETTING.finditer(told, 0, max(end, 0)):
            if each["name"] is None:
                depth += 1 if each[0] == "{" else -1
            elif depth == 1:
                flag = f"--{each['name'].replace('_', '-')}"
        return flag


_SETTING: Final = re.compile(r"[{}]|'(?P<name>\w{1,60})': ")
_FRAMES: Final = 150  # lines above an error that are looked at for frames


HINT: Final = 2  # from this rank on, a rule is told only when nothing else explains it


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table: a message, and what it means.

    `pattern` is searched in lines that are not frames; its named groups fill `cause`.
    """

    name: str  # unique, short: which message it was
    kind: Kind
    pattern: str
    cause: str | Callable[[Found], str]
    remedies: tuple[Advice, ...] | Callable[[Found], tuple[Advice, ...]] = ()
    rank: int = 0  # the lowest wins, then the earliest: 0 specific, 1 broad, 2 and more a hint
    serving: bool = False  # may also be the cause of what happens while it serves
    request: bool = False  # harms one request only; the server goes on
    even_stopped: bool = False  # not normal even after it was asked to stop
    any_level: bool = False  # vLLM logs it at INFO or WARNING
    restart: bool | None = None  # whether a restart alone can help; None: as the stage says
    refine: Callable[[Found], Kind] | None = None  # the class, when it depends on the place
    sure: bool = True  # at rank 0: its words mean nothing else
    place_tells: bool = False  # the class is sure only where frames or milestones are told
    look_at: str = ""


def told(rule: Rule, found: Found, when: When, matches: Sequence[tuple[Rule, Found]]) -> Diagnosis:
    """Return the answer of a rule; the other matches become what else the log shows."""
    kind = rule.refine(found) if rule.refine else rule.kind
    if kind is Kind.OOM_LOAD and when is When.SERVING:
        kind = Kind.OOM_RUNTIME
    # What depends on the place is a guess in an excerpt that shows none.
    start = found.start
    guessed = rule.place_tells and not (start.milestones or found.before or start.served)
    guessed = guessed or not found.is_error or not rule.sure
    others = [each.kind for each, _ in matches if each.kind not in (kind, rule.kind)]
    if when is When.STARTUP and found.start.failed is not None:
        others.append(Kind.ENGINE_INIT)
    if when is When.SERVING and found.start.died is not None and kind is not Kind.ENGINE_DEAD:
        others.append(Kind.ENGINE_DEAD)
    return Diagnosis(
        kind,
        when,
        without_secrets(_sentence(rule, found)),
        shown(found.line.raw),
        found.line.number,
        remedies=rule.remedies(found) if callable(rule.remedies) else rule.remedies,
        restart_helps=when is When.SERVING if rule.restart is None else rule.restart,
        confidence=Confidence.HIGH if rule.rank == 0 and not guessed else Confidence.MEDIUM,
        rule=rule.name,
        secondary=tuple(dict.fromkeys(others)),
        look_at=rule.look_at,
    )


def _sentence(rule: Rule, found: Found) -> str:
    if callable(rule.cause):
        return rule.cause(found)
    names = re.findall(r"\{(\w+)\}", rule.cause)
    return rule.cause.format_map({name: _group(found, name) for name in names})


def _group(found: Found, name: str) -> str:
    """Return a group, or the one of another alternative of the pattern: `model2` for `model`."""
    for key, text in found.groups.items():
        if key.rstrip("0123456789") == name:
            return text
    return "?"
