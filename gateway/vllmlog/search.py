"""Where the rules match, and where exceptions are, in the lines of one start."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from gateway.vllmlog.lines import Line
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

_ALL: Final[_Compiled] = tuple((rule, re.compile(rule.pattern)) for rule in RULES)
_LOUD: Final[_Compiled] = tuple(each for each in _ALL if each[0].any_level)
_QUIET: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_TRACEBACK: Final = 150  # lines between a log line about an error and the error itself, at most

# The last line of a traceback: the name of an exception, a colon, its words.
_EXCEPTION: Final = re.compile(
    r"^(?:ERROR: +)?(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Timeout|Failed)(?::|$)"
)
# Exceptions that only pass on that something else failed, or that mean nothing.
_WRAPPER: Final = re.compile(
    r"EngineDeadError|EngineCore|Engine core init|Engine process failed|WorkerProc init|Executor failed"
    r"|See stack trace|Worker failed with error|RuntimeError: cancelled|Operation not supported"
    r"|CancelledError|SystemExit|GeneratorExit|ensure_kv_transfer_shutdown|HandlerFileNotFoundError"
    r"|BrokenPipeError|EOFError|^RuntimeError: Engine |ProcessExited|ChildFailedError"
    r"|CalledProcessError|MessageFactory|ZMQError: (?:Operation|Socket)"
)
# What native code and schedulers print, without a logger and without an exception.
_NATIVE: Final = re.compile(
    r"^(?:\[[EF]\d|Exception |terminate called|!!+|Fatal |Segmentation|Memory access fault|Killed|Aborted"
    r"|what\(\)|CUDA [Ee]rror: |HSA_|slurmstepd|srun|scancel)|error: \*\*\*|Killed$|Killed process|oom[-_]kill"
)


def is_quiet(line: Line) -> bool:
    """Whether a logger said that it is no error."""
    return line.level in _QUIET


def is_exception(line: Line) -> bool:
    """Whether the line is the end of a traceback, logged as an error or printed by Python."""
    return not is_quiet(line) and _EXCEPTION.search(line.text) is not None


def is_serious(line: Line) -> bool:
    """Whether a line tells of an error by its form; a prompt that was printed does not."""
    return (
        line.level in ("ERROR", "CRITICAL")
        or is_exception(line)
        or _NATIVE.search(line.text) is not None
    )


def exceptions(start: Start, begin: int, end: int) -> list[int]:
    """Return the places of errors that say something themselves."""
    return [
        place
        for place in range(begin, end)
        if is_exception(start.lines[place]) and not _WRAPPER.search(start.lines[place].text)
    ]


def matches(
    start: Start, begin: int, end: int, wanted: Callable[[Rule], bool], *, serious: bool = False
) -> list[Match]:
    """Return each rule that matches, at its first place; the best first.

    `serious` leaves out lines that are no errors by their form, such as words of a prompt.

    The error that ends a traceback proves more than a log line about it, so it is taken instead
    when it follows within the same burst of lines.
    """
    all_rules = tuple(each for each in _ALL if wanted(each[0]))
    loud = tuple(each for each in _LOUD if wanted(each[0]))
    found: dict[str, Match] = {}
    read: set[tuple[str, bool]] = set()  # what was said before is not searched again
    for place in range(begin, end):
        line = start.lines[place]
        quiet = is_quiet(line)
        if line.is_frame or (line.text, quiet) in read:
            continue
        read.add((line.text, quiet))
        if serious and not quiet and not is_serious(line):
            continue
        for rule, pattern in loud if quiet else all_rules:
            before = found.get(rule.name)
            if before is not None and not _proves_more(before[1], line, place):
                continue
            match = pattern.search(line.text)
            if match is not None:
                found[rule.name] = rule, Found(start, place, _groups(start, place, pattern, match))
    return sorted(found.values(), key=lambda each: (each[0].rank, each[1].place))


def _proves_more(before: Found, line: Line, place: int) -> bool:
    """Whether a line is the error of which an earlier one told: soon after, by the same process."""
    return (
        place - before.place <= _TRACEBACK
        and not is_exception(before.line)
        and line.process == before.line.process
        and is_exception(line)
    )


def _groups(
    start: Start, place: int, pattern: re.Pattern[str], match: re.Match[str]
) -> dict[str, str]:
    """Return the named groups; a message that goes on in the next lines is matched again whole."""
    following = " ".join(each.text.strip() for each in start.lines[place : place + 3])
    whole = pattern.search(following) or match
    named = match.groupdict() | {name: text for name, text in whole.groupdict().items() if text}
    return {name: text.strip() for name, text in named.items() if text}
