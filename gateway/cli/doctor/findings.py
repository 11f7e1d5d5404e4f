"""What the doctor found: what is wrong, the evidence, and the line to change. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal[
    "wrong",  # clients or engines are hurt by it
    "note",  # it works, and could be better
    "ok",
    "skipped",  # it could not be looked at; `change` says what is missing
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    verdict: Verdict
    about: str  # a short word, stable: for programs
    told: str  # a sentence with the evidence
    change: str = ""  # the line to change, or the command to run
    where: str = ""  # file:line


def ok(about: str, told: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(verdict="ok", about=about, told=told)
