"""Answers for what no rule tells: unknown errors, signals, exit codes, and nothing at all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from gateway.vllmlog.hangs import STALL, WAITS, last_words
from gateway.vllmlog.places import innermost, place_of
from gateway.vllmlog.starts import NOT_STARTED, Start
from gateway.vllmlog.verdict import (
    Advice,
    Confidence,
    Diagnosis,
    Kind,
    When,
    proof,
    short,
)

_RESTART: Final = Advice("", None, "restart the server")
_REPORT: Final = Advice("", None, "search vLLM's issues for the evidence; try another version")
_MORE_LOG: Final = Advice("", None, "keep more of the log: the cause is the first error, far above")

_DAMAGED: Final = Advice(
    "", None, "a JSON file that it reads is cut off or damaged: compare it with the original"
)
_MISSING: Final = Advice(
    "",
    None,
    "what the line names is to be there where the server runs: in its container, on its mounts",
)
_ABSENT: Final = re.compile(  # with the path, before or after
    r"(?:does(?: not|n't) exist|No such file|[Nn]ot found).{0,80}/|/.{0,200}does(?: not|n't) exist"
)
_KEEP_AWAY: Final = Advice("", None, "if the same request kills it again, block that request")
_BACKEND: Final = Advice(
    "--attention-backend", None, "another one: it failed in an attention kernel"
)

_ATTENTION: Final = re.compile(
    r"flashinfer|flash_attn|attention/backends|BatchPrefill|BatchDecode|paged_attention"
)
_UNSUPPORTED: Final = re.compile(
    r"[Uu]nsupported|not (?:yet )?supported|not implemented|NotImplemented"
)

_INNERMOST: Final = 12  # lines above the error

_SIGKILL: Final = frozenset({-9, 137})
_ENDED: Final = frozenset({-15, 143, -2, 130})  # SIGTERM, SIGINT
# SIGSEGV, SIGABRT, SIGBUS, SIGILL.
_CRASHED: Final = frozenset({-11, 139, -6, 134, -7, 135, -4, 132})
_USAGE: Final = 2  # argparse

_UP: Final = tuple(
    re.compile(text)
    for text in (
        "Application startup complete",
        "Avg prompt throughput: ",
        "Application shutdown complete",
    )
)


def unknown_error(start: Start, place: int, when: When) -> Diagnosis:
    """Tell of an error that no rule knows: by its type and its place in the engine."""
    line, error = start.lines[place], start.raised.get(place)
    where = "" if error is None else innermost(error)
    words = f"{_words(start, place)}{f' ({where})' if where else ''}"
    near = [] if error is None else [*error.frames[-_INNERMOST:], line.text]
    helps = (_BACKEND,) if any(map(_ATTENTION.search, near)) else ()
    look_at = "the traceback above the evidence"
    if when is When.SERVING:
        return Diagnosis(
            Kind.ENGINE_DEAD,
            when,
            f"The engine died while serving: {words}",
            *proof(line.raw, line.number),
            (*helps, _RESTART, _KEEP_AWAY, _REPORT),
            restart_helps=not _UNSUPPORTED.search(line.text),
            look_at=look_at,
        )
    told = None if error is None else place_of(error)
    if error is not None and error.name.endswith("JSONDecodeError"):
        helps = (_DAMAGED, *helps)
    elif told is None and _ABSENT.search(line.text):
        helps = (_MISSING, *helps)
    return Diagnosis(
        Kind.OTHER if told is None else told.kind,
        when,
        f"The start failed {'with an unknown error' if told is None else told.doing}: {words}",
        *proof(line.raw, line.number),
        (*helps, *(() if told is None else told.helps), _REPORT),
        restart_helps=False,
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at=look_at,
    )


def _words(start: Start, place: int) -> str:
    """Return what an error says; for one without words, the line of code that raised it as well."""
    said = start.lines[place].text.removeprefix("ERROR: ").strip()
    error = start.raised.get(place)
    if ":" not in said and error is not None and error.code:
        said += f" at `{error.code}`"
    return short(said)


def no_cause(start: Start) -> Diagnosis:
    """Tell of a start that failed, in a log that does not say why."""
    places = [at for at, each in enumerate(start.lines) if NOT_STARTED.search(each.text)]
    told = [at for at in places if not start.lines[at].is_frame] or places
    line = start.lines[told[-1]]
    return Diagnosis(
        Kind.ENGINE_INIT,
        When.STARTUP,
        "The engine did not start; this part of the log does not say why.",
        *proof(line.raw, line.number),
        (_MORE_LOG,),
        confidence=Confidence.LOW,
        look_at="the first ERROR of an EngineCore or Worker process, standard error included",
    )


def interrupted(start: Start, place: int) -> Diagnosis:
    """Tell of a start that somebody ended, and what it did or waited for."""
    line = start.lines[place]
    waits = (start.lines[at].text for at in range(place, max(start.progress, -1), -1))
    wait = next((text for text in waits if WAITS.search(text)), None)
    stage = start.milestones.get(start.progress)
    doing = "" if stage is None else f", while {stage.words}"
    return Diagnosis(
        Kind.OTHER,
        When.STARTUP,
        f"It was told to stop during its start{doing if wait is None else f'; it waited: {short(wait)}'}.",
        *proof(line.raw, line.number),
        rule="interrupted",
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at="who sent the signal: a person, a liveness probe, a job's time limit",
    )


# --- the process ended without a word --------------------------------------------------------------


def by_exit_code(
    start: Start, exit_code: int | None, oom_killed: bool | None = None
) -> Diagnosis | None:
    """Judge a process by how it ended; None if that says nothing."""
    when = When.STARTUP if start.served is None else When.SERVING
    if exit_code in _SIGKILL:
        why = (
            "It was killed (signal 9) and wrote nothing. The kernel counts no kill for lack of memory:"
            " a person, a service manager or another program sent the signal."
            if oom_killed is False
            else "It was killed (signal 9) and wrote nothing. Possible causes: the kernel (out of host"
            " memory), a container's memory limit, a person or a service manager."
        )
        return _silent(Kind.OTHER, when, why, (_RESTART,), True)
    if exit_code in _CRASHED:
        why = f"It crashed (exit code {exit_code}) and wrote nothing."
        return _silent(Kind.ENGINE_DEAD, when, why, (_RESTART,), True)
    if exit_code in _ENDED and when is When.STARTUP:
        return _silent(Kind.OTHER, when, "It was told to stop during its start.", (), None)
    if exit_code == _USAGE and not any(line.text.strip() for line in start.lines):
        why = "It refused its command line (exit code 2), but not in this log."
        return _silent(Kind.BAD_ARGUMENT, when, why, (), False)
    return None


def out_of_memory(start: Start) -> Diagnosis:
    """Judge a server that the kernel killed, as its counters prove."""
    when = When.STARTUP if start.served is None else When.SERVING
    more = Advice("", None, "give the host or the container more memory")
    why = "The kernel killed it, or a process of it: out of host memory."
    found = _silent(Kind.HOST_MEMORY, when, why, (more,), None)
    return replace(found, confidence=Confidence.HIGH, rule="oom_killed")


def _silent(
    kind: Kind, when: When, why: str, remedies: tuple[Advice, ...], restart_helps: bool | None
) -> Diagnosis:
    return Diagnosis(
        kind,
        when,
        why,
        remedies=remedies,
        restart_helps=restart_helps,
        confidence=Confidence.LOW,
        rule="exit_code",
        look_at="dmesg, the container's events, the server's standard error",
    )


# --- no failure ------------------------------------------------------------------------------------


def no_failure(start: Start, exit_code: int | None = None) -> Diagnosis:
    """Tell that it serves or served; or that the log does not say."""
    if start.served is None and start.stopped is None and start.engine_up is None:
        return _nothing(start, exit_code)
    serving = start.served is not None or start.stopped is not None
    how = "It serves; nothing fatal is in the log." if serving else (
        "The engine is up; nothing fatal is in the log.")  # fmt: skip
    proofs = (*map(start.first, _UP), start.served, start.engine_up, start.stopped)
    if start.stopped is not None:
        how = "It served, and stopped when it was asked to."
    ended = exit_code is not None and start.stopped is None
    if ended:
        how = f"It {'served' if serving else 'came up'} and ended (exit code {exit_code}); the log does not say why."
    last = last_words(start, len(start.lines))
    waits = not ended and start.stopped is None and STALL.search(start.lines[last].text) is not None
    if waits:
        how = f"{how} Its last words are that its workers do not answer: it may hang."
    line = start.lines[next(at for at in proofs if at is not None)]
    raised = start.stopped is None and start.raised and start.idle_after(max(start.raised))
    sure = Confidence.MEDIUM if raised else Confidence.HIGH
    return Diagnosis(
        Kind.HEALTHY,
        When.SERVING if serving else When.STARTUP,
        how,
        *proof(line.raw, line.number),
        restart_helps=False,
        confidence=Confidence.LOW if waits or ended else sure,
        look_at="whether vllm:generation_tokens_total moves" if waits else "",
    )


def _nothing(start: Start, exit_code: int | None) -> Diagnosis:
    last = last_words(start, len(start.lines))
    said = start.lines[last].text if last >= 0 else ""
    if WAITS.search(said):
        why = f"The log ends while the start waits, and may hang: {short(said)}."
    elif start.progress >= 0:
        why = "It is still starting, or was ended without a word: the log stops without an error."
    elif last >= 0:
        why = "Nothing in this log says what happened."
    else:
        why = "The log is empty."
    hint = "whether the process still runs; if not, its exit code and more of the log"
    if exit_code == _USAGE:
        why += " Exit code 2 often is a refused command line, of vLLM or of what starts it."
    return Diagnosis(Kind.UNKNOWN, When.STARTUP, why, confidence=Confidence.LOW, look_at=hint)
