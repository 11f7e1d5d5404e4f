"""Diagnose a vLLM log: what went wrong, the line that proves it, and what to do, with numbers.

The rules are tables in `vllmlog.rules`: one row for each message that vLLM, torch, CUDA, NCCL,
argparse or the hub are known to write. This module judges what they find:

1. The last start counts: log files are appended to.
2. The cause is the first specific error. `Engine core initialization failed` and `EngineDeadError`
   are only told when nothing better is there.
3. What the server survived is not a cause: an error before it came up, a refused request, a plugin
   that did not load.
4. After it was asked to stop, dying is normal.
5. With no proof of a failure the answer is `healthy` if it served, else `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from gateway.vllmlog import endings
from gateway.vllmlog.lines import Line, read
from gateway.vllmlog.rules.rule import HINT, Action, Kind, Remedy, Rule, When
from gateway.vllmlog.search import (
    Match,
    exceptions,
    is_exception,
    is_quiet,
    matches,
)
from gateway.vllmlog.starts import DEAD, Start, split
from gateway.vllmlog.verdict import Confidence, Diagnosis, told

__all__ = ["Action", "Confidence", "Diagnosis", "Kind", "Remedy", "When", "diagnose"]

_SAYS_LITTLE: Final = frozenset({Kind.UNKNOWN, Kind.ENGINE_INIT})
_INTERRUPT: Final = re.compile(r"^(?:KeyboardInterrupt|asyncio\.exceptions\.CancelledError)\b")
_GOING: Final = re.compile(r"[Ss]hut|[Tt]erminat|exit|destroy|leaked")  # what a process says last
_WORKS: Final = re.compile(r"Avg prompt throughput: |HTTP/[\d.]+\" 200")


def diagnose(
    log: str | bytes | Iterable[str | bytes], *, exit_code: int | None = None, hung: bool = False
) -> Diagnosis:
    """Return what the end of a log (at most 8 MiB of it) says. Nothing raises, whatever the text.

    Args:
        log: the text, or its lines.
        exit_code: of the server's process, if known; negative or above 128 when a signal ended it.
            vLLM exits with 0 after its engine died, so 0 proves nothing.
        hung: the last start is known to hang. Where it stands then counts, and no other start does.
    """
    starts = split(read(log))
    found = _judge(starts[-1], exit_code)
    if hung and found.kind in _SAYS_LITTLE:
        return endings.hung_at_start(starts[-1]) or found
    if found.kind not in _SAYS_LITTLE or len(starts) == 1:
        return found
    # It goes on still, or its end is cut off: what ended the start before it is more useful.
    before = _judge(starts[-2], None)
    if before.kind is Kind.HEALTHY or before.kind in _SAYS_LITTLE:
        return found
    hint = "this ended an earlier start; the log does not show the end of the last one"
    return replace(before, confidence=Confidence.MEDIUM, look_at=before.look_at or hint)


def _judge(start: Start, exit_code: int | None) -> Diagnosis:
    stopped = start.stopped
    if stopped is not None and (start.failed is None or stopped < start.failed):
        return _after_stop(start, stopped)
    return (
        _failure(start, len(start.lines))
        or endings.by_exit_code(start, exit_code)
        or endings.no_failure(start, exit_code)
    )


def _after_stop(start: Start, stopped: int) -> Diagnosis:
    """Judge a start that was asked to stop: nearly nothing that came after counts."""
    found = _failure(start, stopped)
    if found is not None:
        return found
    late = matches(start, stopped, len(start.lines), lambda rule: rule.even_stopped)
    if late:
        return told(*late[0], When.SERVING, late)
    if start.served is None and start.progress >= 0 and start.engine_up is None:
        return endings.interrupted(start, stopped)
    return endings.no_failure(start)


def _failure(start: Start, end: int) -> Diagnosis | None:
    """Return what failed in the lines before `end`; None if nothing did."""
    served = start.served if start.served is not None and start.served < end else None
    died = start.died if start.died is not None and start.died < end else None
    if died is not None and start.failed is None and (served is None or died < served):
        served = 0  # an excerpt: only an engine that served dies with these words
    if served is None:
        return _while_starting(start, end)
    if start.came_up is None and died is None:
        # It never said that it is up: the requests may be of another server with the same log.
        ended = [each for each in matches(start, 0, end, _of_start) if _ends_process(each, end)]
        if ended:
            return told(*ended[0], When.STARTUP, ended)
    return _while_serving(start, served, end)


def _while_starting(start: Start, end: int) -> Diagnosis | None:
    found = matches(start, 0, end, _of_start)
    proven = start.failed is not None and start.failed < end
    causes = [each for each in found if proven or each[0].rank < HINT or not _survived(each, end)]
    interrupt = start.first(_INTERRUPT)
    if interrupt is not None and interrupt < end and not (causes and causes[0][0].rank < HINT):
        return endings.interrupted(start, interrupt)
    if causes:
        return told(*causes[0], When.STARTUP, found)
    errors = exceptions(start, 0, end)
    late = [at for at in errors if at > start.progress]
    if errors and (proven or _ends_with(start, late, end)):
        return endings.unknown_error(start, (late or errors)[0], When.STARTUP)
    if proven:
        return endings.no_cause(start)
    return endings.wait_at_start(start) if end == len(start.lines) else None


def _while_serving(start: Start, served: int, end: int) -> Diagnosis | None:
    died = start.first(DEAD, served)
    if died is not None and died >= end:
        died = None
    found = matches(start, served, end, lambda rule: rule.serving, serious=died is None)
    if found and found[0][0].rank < HINT:
        return told(*found[0], When.SERVING, found)
    if died is not None:
        return _death(start, _last_work(start, served, died), died, end, found)
    refused = matches(start, 0, end, lambda rule: rule.request)
    return endings.hang(start, served, end) or (
        told(*refused[0], When.SERVING, refused) if refused else None
    )


def _death(start: Start, begin: int, died: int, end: int, hints: list[Match]) -> Diagnosis:
    """Tell why the engine died, from the lines since it last worked.

    What the API server says after the first word of the death is a consequence.
    """
    errors = exceptions(start, begin, end)
    causes = [at for at in errors if not _by_server(start.lines[at])] or [
        at for at in errors if at < died and "VLLMValidationError" not in start.lines[at].text
    ]
    if causes:
        return endings.unknown_error(start, causes[0], When.SERVING)
    if hints:
        return told(*hints[0], When.SERVING, hints)
    worded = next((at for at in range(died, end) if _tells_death(start.lines[at])), died)
    return endings.unknown_error(start, worded, When.SERVING)


def _tells_death(line: Line) -> bool:
    return is_exception(line) and DEAD.search(line.text) is not None


def _by_server(line: Line) -> bool:
    return line.process.startswith(("APIServer", "ApiServer"))


def _last_work(start: Start, served: int, died: int) -> int:
    """Return the place of the last sign of work before a death."""
    for at in range(died, served, -1):
        if _WORKS.search(start.lines[at].text):
            return at
    return served


def _ends_with(start: Start, errors: list[int], end: int) -> bool:
    """Whether nothing goes on after the last error: else it may have been survived."""
    if not errors:
        return False
    after = start.lines[errors[-1] + 1 : end]
    return not any(is_quiet(line) and not _GOING.search(line.text) for line in after)


# --- which matches count ---------------------------------------------------------------------------


def _of_start(rule: Rule) -> bool:
    return not rule.request


def _survived(match: Match, end: int) -> bool:
    """Whether starting up went on after an error."""
    _, found = match
    return found.place < found.start.progress < end


def _ends_process(match: Match, end: int) -> bool:
    """Whether an error was raised out of the process: printed by Python itself, nothing after it."""
    rule, found = match
    raised = not found.line.level and is_exception(found.line)
    in_request = "starlette/" in found.before or "in run_asgi" in found.before
    return raised and rule.rank < HINT and not in_request and not _survived(match, end)
