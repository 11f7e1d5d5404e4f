"""Diagnose a vLLM log: what went wrong, the line that proves it, and what to do, with numbers.

The rules are tables in `control.logs`: one row for each message that vLLM, torch, CUDA, NCCL,
argparse or the hub are known to write. This module judges what they find:

1. The last start counts: log files are appended to.
2. The cause is the first specific error. `Engine core initialization failed` and `EngineDeadError`
   are only told when nothing better is there.
3. What the server survived is not a cause: a traceback before it served, a request that was
   refused, a plugin that did not load.
4. After it was asked to stop, dying is normal.
5. With no proof of a failure the answer is `healthy` if it served, else `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypedDict

from gateway.control.logs import arguments, devices, memory, models, runtime
from gateway.control.logs.lines import Line, read
from gateway.control.logs.rule import Action, Found, Kind, Remedy, Rule, Stage
from gateway.control.logs.starts import DEAD, NOT_STARTED, Start, split
from gateway.observe.redact import redact

__all__ = ["Action", "Confidence", "Diagnosis", "Kind", "Remedy", "Stage", "diagnose"]

RULES: Final[tuple[Rule, ...]] = (
    *memory.RULES,
    *devices.RULES,
    *models.RULES,
    *arguments.RULES,
    *runtime.RULES,
)

_SAYS_LITTLE: Final = frozenset({Kind.UNKNOWN, Kind.ENGINE_INIT})
_EVIDENCE_CHARS: Final = 2_000
_QUIET: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_LOUD: Final = tuple(rule for rule in RULES if rule.any_level)

# The last line of a traceback: the name of an exception, a colon, its words.
_EXCEPTION: Final = re.compile(
    r"^(?:ERROR: +)?(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Timeout|Failed)(?::|$)"
)
# Exceptions that only pass on that something else failed, or that mean nothing.
_WRAPPER: Final = re.compile(
    r"EngineDeadError|EngineCore|Engine core init|Engine process failed|WorkerProc init|Executor failed"
    r"|See stack trace|Worker failed with error|RuntimeError: cancelled|Operation not supported"
    r"|CancelledError|SystemExit|GeneratorExit|ensure_kv_transfer_shutdown|HandlerFileNotFoundError"
    r"|BrokenPipeError|EOFError|^RuntimeError: Engine |ProcessExited|ChildFailedError|VLLMValidationError"
    r"|CalledProcessError|MessageFactory|ZMQError: (?:Operation|Socket)"
)
_INTERRUPT: Final = re.compile(r"^(?:KeyboardInterrupt|asyncio\.exceptions\.CancelledError)\b")
_STALL: Final = re.compile(r"No available shared memory broadcast block found in \d+ s")
_MOVES: Final = re.compile(r"Avg (?:prompt|generation) throughput: |HTTP/[\d.]+\" 200")
_IDLE: Final = re.compile(r"generation throughput: 0\.0 tokens/s, Running: [1-9]")


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
    stage: Stage
    cause: str  # one sentence, with the numbers
    evidence: str = ""  # the line of the log that proves it; empty when none does
    remedies: tuple[Remedy, ...] = ()  # the best first
    restart_helps: bool | None = None  # alone, nothing changed; None: cannot be told
    confidence: Confidence = Confidence.HIGH
    rule: str = ""  # which message it was, finer than the class
    line: int = 0  # number of the evidence in what was read; 0: none
    secondary: tuple[Kind, ...] = ()  # what else the log shows
    look_at: str = ""  # where to look if unsure

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind is Kind.HEALTHY

    def fields(self) -> Fields:
        """Return the JSON form; its keys and values are stable."""
        return {
            "class": self.kind.value,
            "phase": self.stage.value,
            "evidence": self.evidence,
            "cause": self.cause,
            "remedies": [
                {
                    "flag": each.flag,
                    "value": each.value,
                    "why": each.why,
                    "action": each.action.value if each.action else None,
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


def diagnose(
    log: str | bytes | Iterable[str | bytes], *, exit_code: int | None = None
) -> Diagnosis:
    """Return what the end of a log (at most 8 MiB) says. Never raises, whatever the text.

    Args:
        log: the text, or its lines.
        exit_code: of the server's process, if known; negative or above 128: killed by a signal.
            vLLM exits with 0 after its engine died, so 0 proves nothing.
    """
    starts = split(read(log))
    found = _judge(starts[-1], exit_code)
    if found.kind not in _SAYS_LITTLE or found.rule == "exit_code" or len(starts) == 1:
        return found
    # It goes on still, or its end is cut off: what ended the start before it is more useful.
    before = _judge(starts[-2], None)
    if before.kind is Kind.HEALTHY or before.kind in _SAYS_LITTLE:
        return found
    hint = "this is what ended the start before the last, of which the log does not show the end"
    return replace(before, confidence=Confidence.MEDIUM, look_at=before.look_at or hint)


def _judge(start: Start, exit_code: int | None) -> Diagnosis:
    if start.stopped is not None and (start.failed is None or start.stopped < start.failed):
        return _before_stop(start, exit_code)
    return (
        _failure(start, len(start.lines)) or _by_exit_code(start, exit_code) or _no_failure(start)
    )


def _before_stop(start: Start, exit_code: int | None) -> Diagnosis:
    """Judge a start that was asked to stop: only what came before counts."""
    assert start.stopped is not None
    found = _failure(start, start.stopped)
    if found is not None:
        return found
    if start.served is None and start.progress >= 0 and start.engine_up is None:
        return _interrupted(start, start.stopped)
    return _no_failure(start)


# --- what failed -----------------------------------------------------------------------------------


def _failure(start: Start, end: int) -> Diagnosis | None:
    """Return what failed in the lines before `end`; None if nothing did."""
    served = start.served if start.served is not None and start.served < end else None
    died = start.died if start.died is not None and start.died < end else None
    if died is not None and start.failed is None and (served is None or died < served):
        served = 0  # an excerpt of a serving engine: only those die this way
    if served is not None:
        return _while_serving(start, served, end)
    return _while_starting(start, end)


def _while_starting(start: Start, end: int) -> Diagnosis | None:
    matches = _ordered(_matches(start, 0, end, _at_start))
    proven = start.failed is not None and start.failed < end
    causes = [
        each
        for each in matches
        if proven or each[0].rank < _BROAD or not _survived(start, each[1], end)
    ]
    errors = [at for at in _exceptions(start, 0, end) if not _WRAPPER.search(start.lines[at].text)]
    interrupt = start.first(_INTERRUPT)
    if causes and causes[0][0].rank < _BROAD:
        return _diagnosed(*causes[0], Stage.STARTUP, matches)
    if interrupt is not None and interrupt < end:
        return _interrupted(start, interrupt)
    if causes:
        return _diagnosed(*causes[0], Stage.STARTUP, matches)
    last = [at for at in errors if at > start.progress] or errors
    if last and (proven or last[-1] > start.progress):
        return _other(start, last[0], Kind.OTHER, Stage.STARTUP)
    if proven:
        return _init_failed(start)
    return None


_BROAD: Final = 2  # from this rank on, a rule is no more than a hint


def _survived(start: Start, found: Found, end: int) -> bool:
    """Whether starting up went on after an error."""
    return found.place < start.progress < end


def _while_serving(start: Start, served: int, end: int) -> Diagnosis | None:
    matches = _ordered(
        _matches(start, served, end, _at_run) + _matches(start, 0, served, _of_a_request)
    )
    died = start.first(DEAD, served)
    died = died if died is not None and died < end else None
    fatal = [each for each in matches if not each[0].request]
    if fatal and fatal[0][0].rank < _BROAD:
        return _diagnosed(*fatal[0], Stage.SERVING, matches)
    if died is not None:
        burst = _burst(start, served, died)
        errors = [
            at for at in _exceptions(start, burst, end) if not _WRAPPER.search(start.lines[at].text)
        ]
        engine = [
            at
            for at in errors
            if not start.lines[at].process.startswith(("APIServer", "ApiServer"))
        ]
        if engine or errors:
            return _other(start, (engine or errors)[0], Kind.ENGINE_DEAD, Stage.SERVING)
        if fatal:
            return _diagnosed(*fatal[0], Stage.SERVING, matches)
        return _other(start, died, Kind.ENGINE_DEAD, Stage.SERVING)
    if _hangs(start, served, end):
        return _hung(start, end)
    refused = [each for each in matches if each[0].request]
    return _diagnosed(*refused[0], Stage.SERVING, matches) if refused else None


def _burst(start: Start, served: int, died: int) -> int:
    """Return where the lines begin that tell of a death: after the last sign of work before it."""
    for at in range(died, served, -1):
        if _MOVES.search(start.lines[at].text):
            return at
    return served


# --- finding ---------------------------------------------------------------------------------------


def _at_start(rule: Rule) -> bool:
    return not rule.request


def _at_run(rule: Rule) -> bool:
    return rule.serving or rule.request


def _of_a_request(rule: Rule) -> bool:
    return rule.request


def _ordered(matches: list[tuple[Rule, Found]]) -> list[tuple[Rule, Found]]:
    return sorted(matches, key=lambda each: (each[0].rank, each[1].place))


def _matches(
    start: Start, begin: int, end: int, wanted: Callable[[Rule], bool]
) -> list[tuple[Rule, Found]]:
    """Return each rule that matches, with its first place.

    The error that ends a traceback proves more than a log line about it, so it is taken instead
    when it follows within the same burst of lines.
    """
    found: dict[str, tuple[Rule, Found]] = {}
    told_by: dict[str, int] = {}  # rule -> place of a line that is not an exception
    for place in range(begin, end):
        line = start.lines[place]
        if line.is_frame or not line.text:
            continue
        for rule in _LOUD if line.level in _QUIET else RULES:
            if not wanted(rule) or (rule.name in found and rule.name not in told_by):
                continue
            if rule.name in told_by and not _follows(start, told_by[rule.name], place):
                continue
            match = rule.pattern.search(line.text)
            if match is None:
                continue
            if _EXCEPTION.search(line.text):
                told_by.pop(rule.name, None)
            elif rule.name in found:
                continue
            else:
                told_by[rule.name] = place
            found[rule.name] = (rule, Found(start, place, _groups(start, place, rule, match)))
    return list(found.values())


def _follows(start: Start, told: int, place: int) -> bool:
    """Whether an exception belongs to what was told before: soon after, by the same process."""
    same = start.lines[told].process == start.lines[place].process
    return same and place - told <= _TRACEBACK and bool(_EXCEPTION.search(start.lines[place].text))


_TRACEBACK: Final = 150  # lines


def _groups(start: Start, place: int, rule: Rule, match: re.Match[str]) -> dict[str, str]:
    """Return the named groups; a message that goes on in the next lines is matched again whole."""
    following = " ".join(each.text.strip() for each in start.lines[place : place + 3])
    whole = rule.pattern.search(following) or match
    named = {
        **match.groupdict(),
        **{name: text for name, text in whole.groupdict().items() if text},
    }
    return {name: text.strip() for name, text in named.items() if text}


def _exceptions(start: Start, begin: int, end: int) -> list[int]:
    return [
        place
        for place in range(begin, end)
        if start.lines[place].level not in _QUIET and _EXCEPTION.search(start.lines[place].text)
    ]


# --- telling ---------------------------------------------------------------------------------------


def _diagnosed(
    rule: Rule, found: Found, stage: Stage, matches: list[tuple[Rule, Found]]
) -> Diagnosis:
    kind = rule.refine(found) if rule.refine else rule.kind
    if kind is Kind.OOM_LOAD and stage is Stage.SERVING:
        kind = Kind.OOM_RUNTIME
    others = [each.kind for each, _ in matches if each.kind not in (kind, rule.kind)]
    if stage is Stage.STARTUP and found.start.failed is not None:
        others.append(Kind.ENGINE_INIT)
    if stage is Stage.SERVING and found.start.died is not None and kind is not Kind.ENGINE_DEAD:
        others.append(Kind.ENGINE_DEAD)
    restart = rule.restart if rule.restart is not None else stage is Stage.SERVING
    return Diagnosis(
        kind,
        stage,
        _sentence(rule, found),
        evidence=_evidence(found.line),
        remedies=rule.remedies(found) if callable(rule.remedies) else rule.remedies,
        restart_helps=restart,
        confidence=Confidence.HIGH if rule.rank == 0 else Confidence.MEDIUM,
        rule=rule.name,
        line=found.line.number,
        secondary=tuple(dict.fromkeys(others)),
        look_at=rule.look_at,
    )


def _sentence(rule: Rule, found: Found) -> str:
    if callable(rule.cause):
        return redact(rule.cause(found))
    names = re.findall(r"\{(\w+)\}", rule.cause)
    groups = {name: found.groups.get(name) or _alternative(found, name) for name in names}
    return redact(rule.cause.format_map(groups))


def _alternative(found: Found, name: str) -> str:
    """Return the group of another alternative of the pattern: `model2` for `model`."""
    for key, text in found.groups.items():
        if key.rstrip("0123456789") == name:
            return text
    return "?"


def _evidence(line: Line) -> str:
    return redact(line.raw[:_EVIDENCE_CHARS])


_UNSUPPORTED: Final = re.compile(
    r"[Uu]nsupported|not (?:yet )?supported|not implemented|NotImplemented"
)


def _other(start: Start, place: int, kind: Kind, stage: Stage) -> Diagnosis:
    """Tell of an error that no rule knows."""
    line = start.lines[place]
    serving = stage is Stage.SERVING
    what = "The engine died while serving" if serving else "The start failed"
    words = redact(line.text.removeprefix("ERROR: ").strip()[:200])
    restart = Remedy(
        "", None, "restart the server; if the same request kills it again, look for that request"
    )
    report = Remedy("", None, "search vLLM's issues for the evidence; try another version")
    return Diagnosis(
        kind,
        stage,
        f"{what} with an error that is not known here: {words}",
        evidence=_evidence(line),
        remedies=(restart, report) if serving else (report,),
        restart_helps=serving and not _UNSUPPORTED.search(line.text),
        confidence=Confidence.MEDIUM,
        line=line.number,
        secondary=() if serving or start.failed is None else (Kind.ENGINE_INIT,),
        look_at="the traceback above the evidence",
    )


def _init_failed(start: Start) -> Diagnosis:
    assert start.failed is not None
    places = range(len(start.lines) - 1, -1, -1)
    last = next(
        at for at in places if NOT_STARTED.search(start.lines[at].text) and not start.lines[at].is_frame
        or at == start.failed
    )  # fmt: skip
    return Diagnosis(
        Kind.ENGINE_INIT,
        Stage.STARTUP,
        "The engine did not start; this part of the log does not say why.",
        evidence=_evidence(start.lines[last]),
        remedies=(
            Remedy("", None, "keep more of the log: the cause is the first error, far above"),
        ),
        confidence=Confidence.LOW,
        line=start.lines[last].number,
        look_at="the first ERROR of an EngineCore or Worker process, standard error included",
    )


def _interrupted(start: Start, place: int) -> Diagnosis:
    line = start.lines[place]
    return Diagnosis(
        Kind.OTHER,
        Stage.STARTUP,
        "It was told to stop while it started.",
        evidence=_evidence(line),
        confidence=Confidence.MEDIUM,
        rule="interrupted",
        line=line.number,
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at="who sent the signal: a person, a liveness probe, a job's time limit",
    )


# --- hangs, exit codes, nothing --------------------------------------------------------------------

_STALLS: Final = 3  # in a row, each of 60 s: fewer happen while kernels are compiled


def _hangs(start: Start, served: int, end: int) -> bool:
    """Whether the end of the log says again and again that the engine does not answer."""
    stalls = 0
    for at in range(end - 1, served, -1):
        text = start.lines[at].text
        if _STALL.search(text):
            stalls += 1
        elif _MOVES.search(text) and not _IDLE.search(text) and "throughput: 0.0" not in text:
            break
    return stalls >= _STALLS


def _hung(start: Start, end: int) -> Diagnosis:
    places = [at for at in range(end) if _STALL.search(start.lines[at].text)]
    line = start.lines[places[-1]]
    return Diagnosis(
        Kind.HANG,
        Stage.SERVING,
        f"The workers have not answered for minutes: said {len(places)} times, no progress since.",
        evidence=_evidence(line),
        remedies=(Remedy("", None, "kill the whole process group and start again"),),
        restart_helps=True,
        confidence=Confidence.MEDIUM,
        rule="stall",
        line=line.number,
        look_at="whether vllm:generation_tokens_total moves; py-spy dump of a worker",
    )


_SIGKILL: Final = frozenset({-9, 137})
_SIGTERM: Final = frozenset({-15, 143, -2, 130})
_CRASHES: Final = frozenset({-11, 139, -6, 134, -7, 135, -4, 132})
_USAGE_CODE: Final = 2


def _by_exit_code(start: Start, exit_code: int | None) -> Diagnosis | None:
    """Judge a process that ended without a word."""
    stage = Stage.STARTUP if start.served is None else Stage.SERVING
    if exit_code in _SIGKILL:
        remedy = Remedy(
            "", None, "give the host or the container more memory; see dmesg for the OOM killer"
        )
        told = (Kind.HOST_MEMORY, "It was killed with SIGKILL and wrote nothing: most often by the kernel, "
                "because the host's memory ran out.", (remedy,), None)  # fmt: skip
    elif exit_code in _CRASHES:
        told = (Kind.ENGINE_DEAD, f"It crashed with exit code {exit_code} and wrote nothing.",
                (Remedy("", None, "restart the server"),), True)  # fmt: skip
    elif exit_code in _SIGTERM and stage is Stage.STARTUP:
        told = (Kind.OTHER, "It was told to stop while it started.", (), None)
    elif exit_code == _USAGE_CODE:
        told = (Kind.BAD_ARGUMENT, "It refused its command line, but not in this log.", (), False)
    else:
        return None
    kind, cause, remedies, restart = told
    return Diagnosis(
        kind, stage, cause, remedies=remedies, restart_helps=restart, confidence=Confidence.LOW,
        rule="exit_code", look_at="dmesg, the container's events, its standard error",
    )  # fmt: skip


_UP: Final = (
    re.compile(r"Application startup complete"),
    re.compile(r"Avg prompt throughput: "),
    re.compile(r"Application shutdown complete"),
)


def _proof_of_health(start: Start) -> int | None:
    """Return the place of the line that shows best that it served; None if none does."""
    if start.served is None and start.stopped is None:
        return start.engine_up
    proofs = (start.first(each) for each in _UP)
    proof = next((at for at in proofs if at is not None), None)
    return next(
        (at for at in (proof, start.served, start.engine_up, start.stopped) if at is not None), None
    )


def _no_failure(start: Start) -> Diagnosis:
    at = _proof_of_health(start)
    if at is not None:
        stopped = start.stopped is not None
        return Diagnosis(
            Kind.HEALTHY,
            Stage.STARTUP if start.served is None and not stopped else Stage.SERVING,
            "It served, and stopped when it was asked to."
            if stopped
            else "It serves; nothing fatal is in the log.",
            evidence=_evidence(start.lines[at]),
            restart_helps=False,
            line=start.lines[at].number,
        )
    begun = any(line.text for line in start.lines)
    return Diagnosis(
        Kind.UNKNOWN,
        Stage.STARTUP,
        "It is still starting, or was killed without a word: the log ends without an error."
        if start.progress >= 0
        else "Nothing in this log is known to say what happened."
        if begun
        else "The log is empty.",
        confidence=Confidence.LOW,
        look_at="whether the process still runs; if not, its exit code and more of the log",
    )
