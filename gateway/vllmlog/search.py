"""Where the rules match in the lines of one start."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Final

from gateway.vllmlog.errors import ADVICE, LISTING, is_quiet, passes_on, repeats
from gateway.vllmlog.lines import PYTHON_WARNS
from gateway.vllmlog.rules import arguments, devices, memory, models, runtime
from gateway.vllmlog.rules.rule import Found, Rule
from gateway.vllmlog.starts import Start

RULES: Final[tuple[Rule, ...]] = (
    *memory.RULES,
    *devices.RULES,
    *models.RULES,
    *arguments.RULES,
    *runtime.RULES,
)

Match = tuple[Rule, Found]
_Compiled = tuple[tuple[Rule, re.Pattern[str]], ...]

COMPILED: Final[_Compiled] = tuple((rule, re.compile(rule.pattern)) for rule in RULES)
_BURST: Final = 150  # lines between a log line about an error and the error itself, at most


def errors(start: Start, begin: int, end: int) -> list[int]:
    """Return the places of exceptions that say something themselves, or else repeat what others said."""
    raised = [at for at in start.raised if begin <= at < end]
    own = [at for at in raised if not passes_on(start.lines[at])]
    return own or [at for at in raised if repeats(start.lines[at])]


def matches(
    start: Start,
    begin: int,
    end: int,
    wanted: Callable[[Rule], bool],
    *,
    serious: bool = False,
    warnings: bool = False,
) -> list[Match]:
    """Return each rule that matches, at its first place; the best first.

    What a logger calls no error is compared with the rules for such lines only, or with all if it is
    a warning and `warnings` are asked for. `serious` leaves out lines that are no errors by their
    form either, such as words of a prompt.

    The error that ends a traceback proves more than a log line about it, so it is taken instead
    when it follows within the same burst of lines.
    """
    all_rules = tuple(each for each in COMPILED if wanted(each[0]))
    loud = tuple(each for each in all_rules if each[0].any_level)
    found: dict[str, Match] = {}
    read: set[tuple[str, bool]] = set()  # what was said before is not searched again
    for place in range(begin, end):
        line = start.lines[place]
        quiet = is_quiet(line) and not (warnings and line.level == "WARNING")
        if line.is_frame or (line.text, quiet) in read or ADVICE.match(line.text):
            continue
        read.add((line.text, quiet))
        doubtful = (serious and not quiet) or LISTING.search(line.text)
        if doubtful and not Found(start, place).is_error:
            continue
        error = start.raised.get(place)
        text = line.text if error is None or ":" in line.text else f"{line.text} {error.code}"
        for rule, pattern in loud if quiet else all_rules:
            before = found.get(rule.name)
            if before is not None and not _proves_more(before[1], start, place):
                continue
            match = pattern.search(text)
            if match is not None:
                found[rule.name] = rule, Found(start, place, _groups(start, place, pattern, match))
    return sorted(found.values(), key=lambda each: (each[0].rank, each[1].place))


def _proves_more(before: Found, start: Start, place: int) -> bool:
    """Whether a line is the error of which an earlier one told: soon after, by the same process."""
    return (
        place - before.place <= _BURST
        and before.place not in start.raised
        and start.lines[place].process == before.line.process
        and place in start.raised
    )


def _groups(
    start: Start, place: int, pattern: re.Pattern[str], match: re.Match[str]
) -> dict[str, str]:
    """Return the named groups; a message that goes on in the next lines is matched again whole."""
    rows = (each.text.strip() for each in start.lines[place : place + 3])
    said = takewhile(lambda text: text and not PYTHON_WARNS.match(text), rows)
    whole = pattern.search(" ".join(said)) or match
    named = match.groupdict() | {name: text for name, text in whole.groupdict().items() if text}
    return {name: text.strip() for name, text in named.items() if text}
