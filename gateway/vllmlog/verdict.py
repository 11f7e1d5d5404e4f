"""The answer of a diagnosis, and its JSON form, which scripts rely on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypedDict

from gateway.vllmlog.lines import Line
from gateway.vllmlog.rules.rule import Found, Kind, Remedy, Rule, When

_EVIDENCE_CHARS: Final = 2_000

# Narrower than `observe.redact`: evidence is of use only as it stands, names like hf_overrides too.
_SECRETS: Final = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"(--[\w-]{0,40}(?:key|token|password|secret)[= ]+)[^\s-]\S*", r"\1***"),
        (r"\b(?:hf_|sk-|pk-|rk-|ghp_|nvapi-|gw_)[A-Za-z0-9_-]{16,}", "***"),
        (r"\b([Bb]earer|[Bb]asic) +[^\s\"',;]{8,}", r"\1 ***"),
        (
            r"\b(\w{0,30}(?:API_KEY|TOKEN|PASSWORD|SECRET|api_key|password)['\"]?[=:] ?['\"]?)[^\s\"',;}]{4,}",
            r"\1***",
        ),
        (r"(://)[^/\s@]{1,200}@", r"\1***@"),
    )
)


class Confidence(Enum):
    """How sure the answer is."""

    HIGH = "high"  # a message that means just this
    MEDIUM = "medium"  # a message that can mean more, or an error without a rule
    LOW = "low"  # inferred from what is not in the log


class RemedyFields(TypedDict):
    """One remedy as JSON."""

    flag: str
    value: str | None
    why: str
    action: str | None
    remove: bool


Fields = TypedDict(
    "Fields",
    {
        "class": str,
        "phase": str,
        "evidence": str,
        "cause": str,
        "remedies": list[RemedyFields],
        "restart_helps": bool | None,
        "confidence": str,
        "rule": str,
        "line": int,
        "secondary": list[str],
        "look_at": str,
    },
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log says about the last start in it."""

    kind: Kind
    when: When
    cause: str  # one sentence, with the numbers
    evidence: str = ""  # the line of the log that proves it; empty when none does
    line: int = 0  # its number, from 1, in what was read; 0: none
    remedies: tuple[Remedy, ...] = ()  # the best first
    restart_helps: bool | None = None  # alone, with nothing changed; None: cannot be told
    confidence: Confidence = Confidence.MEDIUM
    rule: str = ""  # which message it was, finer than the class
    secondary: tuple[Kind, ...] = ()  # what else the log shows
    look_at: str = ""  # where to look if unsure

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind is Kind.HEALTHY

    def fields(self) -> Fields:
        """Return the JSON form; keys and values are stable, keys may be added."""
        return {
            "class": self.kind.value,
            "phase": self.when.value,
            "evidence": self.evidence,
            "cause": self.cause,
            "remedies": [
                {
                    "flag": each.flag,
                    "value": each.value,
                    "why": each.why,
                    "action": each.action.value if each.action else None,
                    "remove": each.remove,
                }
                for each in self.remedies
            ],
            "restart_helps": self.restart_helps,
            "confidence": self.confidence.value,
            "rule": self.rule,
            "line": self.line,
            "secondary": [each.value for each in self.secondary],
            "look_at": self.look_at,
        }


def without_secrets(text: str) -> str:
    """Return the text with credentials blotted out."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def evidence(line: Line) -> str:
    """Return a line as it may be shown: as it stands in the log, credentials blotted out."""
    return without_secrets(line.raw[:_EVIDENCE_CHARS])


def told(rule: Rule, found: Found, when: When, matches: list[tuple[Rule, Found]]) -> Diagnosis:
    """Return the answer of a rule; the other matches become what else the log shows."""
    kind = rule.refine(found) if rule.refine else rule.kind
    if kind is Kind.OOM_LOAD and when is When.SERVING:
        kind = Kind.OOM_RUNTIME
    others = [each.kind for each, _ in matches if each.kind not in (kind, rule.kind)]
    if when is When.STARTUP and found.start.failed is not None:
        others.append(Kind.ENGINE_INIT)
    if when is When.SERVING and found.start.died is not None and kind is not Kind.ENGINE_DEAD:
        others.append(Kind.ENGINE_DEAD)
    return Diagnosis(
        kind,
        when,
        without_secrets(_sentence(rule, found)),
        evidence(found.line),
        found.line.number,
        remedies=rule.remedies(found) if callable(rule.remedies) else rule.remedies,
        restart_helps=when is When.SERVING if rule.restart is None else rule.restart,
        confidence=Confidence.HIGH if rule.rank == 0 else Confidence.MEDIUM,
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
