"""Answers for what no rule tells: unknown errors, signals, hangs, exit codes, and nothing at all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from gateway.vllmlog.lines import Line
from gateway.vllmlog.places import innermost, place_of
from gateway.vllmlog.rules.devices import NCCL
from gateway.vllmlog.starts import NOT_STARTED, WORKS, Start
from gateway.vllmlog.verdict import (
    Advice,
    Confidence,
    Diagnosis,
    Kind,
    When,
    shown,
    without_secrets,
)

_RESTART: Final = Advice("", None, "restart the server")
_GROUP: Final = Advice("", None, "kill the whole process group and start again")
_REPORT: Final = Advice("", None, "search vLLM's issues for the evidence; try another version")
_MORE_LOG: Final = Advice("", None, "keep more of the log: the cause is the first error, far above")

_KEEP_AWAY: Final = Advice("", None, "if the same request kills it again, block that request")
_BACKEND: Final = Advice(
    "--attention-backend", None, "another one: it failed in an attention kernel"
)

_ATTENTION: Final = re.compile(
    r"flashinfer|flash_attn|attention/backends|BatchPrefill|BatchDecode|paged_attention"
)
_STALL: Final = re.compile(r"No available shared memory broadcast block found in \d+ s")
_LOAD: Final = re.compile(r"Running: (\d{1,9}) reqs, .{0,40}?(?:Waiting|Pending): (\d{1,9}) reqs")
_STALLS: Final = 3  # each of 60 s: fewer happen while kernels are compiled
_LOCK: Final = re.compile(
    r"[Ww]aiting for baton release at (\S{1,300})|[Ww]aiting for (?:file )?lock (\S{1,300})"
)
_WAITS: Final = re.compile(
    r"\b[Ww]ait(?:ing|s|ed)? (?:for(?! work| application)|on|until)\b|[Rr]etrying|\bnot ready yet"
)
# What workers write on the way to each other; one that is alone connects to nobody.
_CONNECTS: Final = re.compile(
    r"^world_size=(?!1\b)\d|^rank \d{1,6} in world size (?!1\b)\d|^vLLM is using nccl"
)
_UNSUPPORTED: Final = re.compile(
    r"[Uu]nsupported|not (?:yet )?supported|not implemented|NotImplemented"
)

_WORDS_CHARS: Final = 200
_INNERMOST: Final = 12  # lines above the error

_SIGKILL: Final = frozenset({-9, 137})
_ENDED: Final = frozenset({-15, 143, -2, 130})  # SIGTERM, SIGINT
_CRASHED: Final = frozenset(
    {-11, 139, -6, 134, -7, 135, -4, 132}
)  # SIGSEGV, SIGABRT, SIGBUS, SIGILL
_USAGE: Final = 2  # argparse

_UP: Final = tuple(
    re.compile(text)
    for text in (
        "Application startup complete",
        "Avg prompt throughput: ",
        "Application shutdown complete",
    )
)


def _proof(line: Line) -> tuple[str, int]:
    return shown(line.raw), line.number


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
            *_proof(line),
            (*helps, _RESTART, _KEEP_AWAY, _REPORT),
            restart_helps=not _UNSUPPORTED.search(line.text),
            look_at=look_at,
        )
    told = None if error is None else place_of(error)
    return Diagnosis(
        Kind.OTHER if told is None else told.kind,
        when,
        f"The start failed {'with an unknown error' if told is None else told.doing}: {words}",
        *_proof(line),
        (*(() if told is None else told.helps), *helps, _REPORT),
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
    return without_secrets(said[:_WORDS_CHARS])


def no_cause(start: Start) -> Diagnosis:
    """Tell of a start that failed, in a log that does not say why."""
    places = [at for at, each in enumerate(start.lines) if NOT_STARTED.search(each.text)]
    told = [at for at in places if not start.lines[at].is_frame] or places
    line = start.lines[told[-1]]
    return Diagnosis(
        Kind.ENGINE_INIT,
        When.STARTUP,
        "The engine did not start; this part of the log does not say why.",
        *_proof(line),
        (_MORE_LOG,),
        confidence=Confidence.LOW,
        look_at="the first ERROR of an EngineCore or Worker process, standard error included",
    )


def interrupted(start: Start, place: int) -> Diagnosis:
    """Tell of a start that somebody ended, and what it did or waited for."""
    line = start.lines[place]
    waits = (start.lines[at].text for at in range(place, max(start.progress, -1), -1))
    wait = next((text for text in waits if _WAITS.search(text)), None)
    milestone = start.milestones.get(start.progress)
    doing = "" if milestone is None else f", while {milestone.stage.words}"
    return Diagnosis(
        Kind.OTHER,
        When.STARTUP,
        f"It was told to stop during its start{doing if wait is None else f'; it waited: {_short(wait)}'}.",
        *_proof(line),
        rule="interrupted",
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at="who sent the signal: a person, a liveness probe, a job's time limit",
    )


def _short(text: str) -> str:
    return without_secrets(text.strip()[:_WORDS_CHARS].rstrip("."))


# --- hangs -----------------------------------------------------------------------------------------


def hang(start: Start, served: int, end: int) -> Diagnosis | None:
    """Tell of a serving engine that says again and again, to the end, that nobody answers."""
    worked = next(
        (at for at in range(end - 1, served, -1) if WORKS.search(start.lines[at].text)), served
    )
    stalls = [at for at in range(worked, end) if _STALL.search(start.lines[at].text)]
    load = _load(start, end)
    last = bool(stalls) and _last_words(start, end) == stalls[-1]
    if len(stalls) < _STALLS and not (last and load) or load == 0:
        return None
    line = start.lines[stalls[-1]]
    return Diagnosis(
        Kind.HANG,
        When.SERVING,
        f"The workers do not answer: said {len(stalls)} times, once a minute, and no progress since.",
        *_proof(line),
        (_GROUP,),
        restart_helps=True,
        confidence=Confidence.MEDIUM if len(stalls) >= _STALLS else Confidence.LOW,
        rule="stall",
        look_at="whether vllm:generation_tokens_total moves; py-spy dump of a worker",
    )


def _load(start: Start, end: int) -> int | None:
    """Return how many requests it last said that it has; None if it never did."""
    told = (_LOAD.search(start.lines[at].text) for at in range(end - 1, -1, -1))
    last = next((found for found in told if found), None)
    return None if last is None else int(last[1]) + int(last[2])


def _last_words(start: Start, end: int) -> int:
    """Return the place of the last line that says anything; -1 if none does."""
    return next((at for at in range(end - 1, -1, -1) if start.lines[at].text.strip()), -1)


def wait_at_start(start: Start) -> Diagnosis | None:
    """Tell of a start whose last words are that it waits: for its workers, a peer, or a lock."""
    end = len(start.lines)
    after = range(start.progress + 1, end)
    stalls = [at for at in after if _STALL.search(start.lines[at].text)]
    last = _last_words(start, end)
    lock = next(
        (at for at in reversed(after[-_INNERMOST:]) if _LOCK.search(start.lines[at].text)), None
    )
    same = [re.sub(r"\d+", "", start.lines[at].text) for at in (*after, last)]
    waits = [each for each in same[:-1] if each == same[-1]]
    # Not what idle processes say to developers, nor a script that waits for the server.
    said = last >= 0 and start.engine_up is None and start.lines[last].level in ("INFO", "WARNING")
    again = said and _WAITS.search(start.lines[last].text) is not None and len(waits) > 1
    if lock is not None and stalls:
        told = _LOCK.search(start.lines[lock].text)
        why = f" for the lock {(told[1] or told[2])[-120:]}" if told else ""
    elif len(stalls) >= _STALLS or last in stalls:
        why = " for its workers"
    elif again:
        why, stalls = f": {_short(start.lines[last].text)}", [last]
    else:
        return None
    line = start.lines[stalls[-1]]
    return Diagnosis(
        Kind.HANG,
        When.STARTUP,
        f"The start waits{why} and may hang.",
        *_proof(line),
        (_GROUP, Advice("", None, "before that, remove lock files that a killed compiler left")),
        restart_helps=True,
        confidence=Confidence.LOW,
        rule="stall_at_start",
        look_at="whether a compiler still runs: then it is slow, not stuck; py-spy dump of the workers",
    )


def hung_at_start(start: Start) -> Diagnosis | None:
    """Tell where a start stands that is known to hang; None if its log does not show that."""
    at = next(
        (at for at in reversed(range(len(start.lines))) if _CONNECTS.search(start.lines[at].text)),
        None,
    )
    if at is None or start.progress > at or start.served is not None:
        return None
    line = start.lines[at]
    return Diagnosis(
        Kind.NCCL,
        When.STARTUP,
        "The workers do not finish connecting to each other (NCCL).",
        *_proof(line),
        (NCCL[1], NCCL[2], NCCL[0], _GROUP),
        restart_helps=True,
        confidence=Confidence.LOW,
        rule="hung_nccl",
        look_at="py-spy dump of the workers; nvidia-smi topo -m; the IOMMU, which breaks peer to peer",
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
    last = _last_words(start, len(start.lines))
    waits = start.stopped is None and _STALL.search(start.lines[last].text) is not None
    if waits:
        how = f"{how} Its last words are that its workers do not answer: it may hang."
    line = start.lines[next(at for at in proofs if at is not None)]
    raised = start.stopped is None and start.raised and start.idle_after(max(start.raised))
    return Diagnosis(
        Kind.HEALTHY,
        When.SERVING if serving else When.STARTUP,
        how,
        *_proof(line),
        restart_helps=False,
        confidence=Confidence.LOW if waits else Confidence.MEDIUM if raised else Confidence.HIGH,
        look_at="whether vllm:generation_tokens_total moves" if waits else "",
    )


def _nothing(start: Start, exit_code: int | None) -> Diagnosis:
    last = _last_words(start, len(start.lines))
    said = start.lines[last].text if last >= 0 else ""
    if _WAITS.search(said):
        why = f"The log ends while the start waits, and may hang: {_short(said)}."
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
