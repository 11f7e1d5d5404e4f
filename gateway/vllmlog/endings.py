"""Answers for what no rule tells: unknown errors, signals, hangs, exit codes, and nothing at all."""

from __future__ import annotations

import re
from typing import Final

from gateway.vllmlog.rules.devices import NCCL
from gateway.vllmlog.rules.rule import Found, Kind, Remedy, When
from gateway.vllmlog.starts import NOT_STARTED, Start
from gateway.vllmlog.verdict import Confidence, Diagnosis, evidence, without_secrets

_RESTART: Final = Remedy("", None, "restart the server")
_GROUP: Final = Remedy("", None, "kill the whole process group and start again")
_REPORT: Final = Remedy("", None, "search vLLM's issues for the evidence; try another version")
_MORE_LOG: Final = Remedy("", None, "keep more of the log: the cause is the first error, far above")

_KEEP_AWAY: Final = Remedy("", None, "if the same request kills it again, block that request")
_BACKEND: Final = Remedy(
    "--attention-backend", None, "another one: it failed in an attention kernel"
)

_ATTENTION: Final = re.compile(
    r"flashinfer|flash_attn|attention/backends|BatchPrefill|BatchDecode|paged_attention"
)
_STALL: Final = re.compile(r"No available shared memory broadcast block found in \d+ s")
_WORKS: Final = re.compile(r"generation throughput: (?!0\.0 )|HTTP/[\d.]+\" 2\d\d")
_LOAD: Final = re.compile(r"Running: (\d{1,9}) reqs, .{0,40}?(?:Waiting|Pending): (\d{1,9}) reqs")
_STALLS: Final = 3  # each of 60 s: fewer happen while kernels are compiled
_LOCK: Final = re.compile(
    r"[Ww]aiting for baton release at (\S{1,300})|[Ww]aiting for (?:file )?lock (\S{1,300})"
)
# What workers write on the way to each other; one that is alone connects to nobody.
_CONNECTS: Final = re.compile(
    r"^world_size=(?!1\b)\d|^rank \d{1,6} in world size (?!1\b)\d|^vLLM is using nccl"
)
_UNSUPPORTED: Final = re.compile(
    r"[Uu]nsupported|not (?:yet )?supported|not implemented|NotImplemented"
)

# What an unknown error at start is about, told by the innermost frames above it.
_PLACES: Final = (
    (Kind.BAD_ARGUMENT, "while checking the settings", re.compile(
        r"vllm/engine/arg_utils\.py|vllm/config/\w+\.py|cli_args\.py|in check_and_update_config\b")),
    (Kind.WEIGHTS, "while loading the weights", re.compile(
        r"in (?:safetensors_weights_iterator|load_weights|\w*weight_loader\w*|load_state_dict)\b")),
    (Kind.TOKENIZER, "while loading the tokenizer", re.compile(
        r"in (?:get_tokenizer|cached_get_tokenizer|init_tokenizer\w*)\b|tokenization_\w+\.py")),
    (Kind.LORA, "while loading an adapter", re.compile(r"vllm/lora/")),
    (Kind.QUANTIZATION, "while setting up the quantisation", re.compile(
        r"quantization/\S+\.py\", line \d+, in (?:__init__|from_config|get_\w+|create_weights|process_weights\w+)")),
    (Kind.NCCL, "while connecting its processes", re.compile(
        r"torch/distributed/\w+\.py|device_communicators/py(?:nccl|hccl)")),
)  # fmt: skip
_REFUSED: Final = re.compile(
    r"^(?:\w+\.)*(?:Value|NotImplemented|Assertion|Type|ArgumentType|VLLMValidation)Error\b"
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


def unknown_error(start: Start, place: int, when: When) -> Diagnosis:
    """Tell of an error that no rule knows."""
    line = start.lines[place]
    words = _words(start, place)
    if when is When.SERVING:
        return Diagnosis(
            Kind.ENGINE_DEAD,
            when,
            f"The engine died while serving: {words}",
            evidence(line),
            line.number,
            (*_around(start, place), _RESTART, _KEEP_AWAY, _REPORT),
            restart_helps=not _UNSUPPORTED.search(line.text),
            look_at="the traceback above the evidence",
        )  # fmt: skip
    frames = Found(start, place).before.splitlines()[-_INNERMOST:]
    known = (each for each in _PLACES if any(map(each[2].search, frames)) and (
        each[0] is not Kind.BAD_ARGUMENT or _REFUSED.search(line.text)))  # fmt: skip
    kind, doing, _ = next(known, (Kind.OTHER, "with an unknown error", None))
    return Diagnosis(
        kind,
        when,
        f"The start failed {doing}: {words}",
        evidence(line),
        line.number,
        (*_around(start, place), _REPORT),
        restart_helps=False,
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at="the traceback above the evidence",
    )


def _around(start: Start, place: int) -> tuple[Remedy, ...]:
    """Return what the place of an unknown error suggests."""
    frames = Found(start, place).before.splitlines()[-_INNERMOST:]
    near = "\n".join([*frames, start.lines[place].text])
    return (_BACKEND,) if _ATTENTION.search(near) else ()


def _words(start: Start, place: int) -> str:
    """Return what an error says; for one without words, the line of code that raised it as well."""
    said = start.lines[place].text.removeprefix("ERROR: ").strip()
    if ":" not in said:
        code = [
            each for each in Found(start, place).before.splitlines() if re.match(r" {4}\w", each)
        ]
        said += f" at `{code[-1].strip()}`" if code else ""
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
        evidence(line),
        line.number,
        (_MORE_LOG,),
        confidence=Confidence.LOW,
        look_at="the first ERROR of an EngineCore or Worker process, standard error included",
    )


def interrupted(start: Start, place: int) -> Diagnosis:
    """Tell of a start that somebody ended."""
    line = start.lines[place]
    return Diagnosis(
        Kind.OTHER,
        When.STARTUP,
        "It was told to stop during its start.",
        evidence(line),
        line.number,
        rule="interrupted",
        secondary=() if start.failed is None else (Kind.ENGINE_INIT,),
        look_at="who sent the signal: a person, a liveness probe, a job's time limit",
    )


# --- hangs -----------------------------------------------------------------------------------------


def hang(start: Start, served: int, end: int) -> Diagnosis | None:
    """Tell of a serving engine that says again and again, to the end, that nobody answers."""
    worked = next(
        (at for at in range(end - 1, served, -1) if _WORKS.search(start.lines[at].text)), served
    )
    stalls = [at for at in range(worked, end) if _STALL.search(start.lines[at].text)]
    if len(stalls) < _STALLS or _idle(start, end):
        return None
    line = start.lines[stalls[-1]]
    return Diagnosis(
        Kind.HANG,
        When.SERVING,
        f"The workers do not answer: said {len(stalls)} times, once a minute, and no progress since.",
        evidence(line),
        line.number,
        (_GROUP,),
        restart_helps=True,
        rule="stall",
        look_at="whether vllm:generation_tokens_total moves; py-spy dump of a worker",
    )


def _idle(start: Start, end: int) -> bool:
    """Whether the last that is known of the load is that there was none: then nobody waits."""
    told = (_LOAD.search(start.lines[at].text) for at in range(end - 1, -1, -1))
    last = next((found for found in told if found), None)
    return last is not None and last[1] == last[2] == "0"


def wait_at_start(start: Start) -> Diagnosis | None:
    """Tell of a start that only waits at its end: for minutes, or for a lock that nobody frees."""
    after = start.lines[start.progress + 1 :]
    stalls = [each for each in after if _STALL.search(each.text)]
    last = reversed(after[-_INNERMOST:])
    lock = next((found for each in last if (found := _LOCK.search(each.text))), None)
    if len(stalls) < (_STALLS if lock is None else 1):
        return None
    held = f" for the lock {(lock[1] or lock[2])[-120:]}" if lock else ""
    return Diagnosis(
        Kind.HANG,
        When.STARTUP,
        f"The start waits{held} and does not go on.",
        evidence(stalls[-1]),
        stalls[-1].number,
        (_GROUP, Remedy("", None, "before that, remove lock files that a killed compiler left")),
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
        evidence(line),
        line.number,
        (NCCL[1], NCCL[2], NCCL[0], _GROUP),
        restart_helps=True,
        confidence=Confidence.LOW,
        rule="hung_nccl",
        look_at="py-spy dump of the workers; nvidia-smi topo -m; the IOMMU, which breaks peer to peer",
    )


# --- the process ended without a word --------------------------------------------------------------


def by_exit_code(start: Start, exit_code: int | None) -> Diagnosis | None:
    """Judge a process by how it ended; None if that says nothing."""
    when = When.STARTUP if start.served is None else When.SERVING
    if exit_code in _SIGKILL:
        more = Remedy("", None, "give the host or the container more memory")
        why = "It was killed (SIGKILL) and wrote nothing: most often by the kernel, out of host memory."
        return _silent(Kind.HOST_MEMORY, when, why, (more,), None)
    if exit_code in _CRASHED:
        why = f"It crashed (exit code {exit_code}) and wrote nothing."
        return _silent(Kind.ENGINE_DEAD, when, why, (_RESTART,), True)
    if exit_code in _ENDED and when is When.STARTUP:
        return _silent(Kind.OTHER, when, "It was told to stop during its start.", (), None)
    if exit_code == _USAGE and not any(line.text.strip() for line in start.lines):
        why = "It refused its command line (exit code 2), but not in this log."
        return _silent(Kind.BAD_ARGUMENT, when, why, (), False)
    return None


def _silent(
    kind: Kind, when: When, why: str, remedies: tuple[Remedy, ...], restart_helps: bool | None
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
    proofs = (*(start.first(each) for each in _UP), start.served, start.engine_up, start.stopped)
    line = start.lines[next(at for at in proofs if at is not None)]
    serving = start.served is not None or start.stopped is not None
    how = "It served, and stopped when it was asked to." if start.stopped is not None else (
        "It serves; nothing fatal is in the log." if serving else "The engine is up; nothing fatal is in the log."
    )  # fmt: skip
    return Diagnosis(
        Kind.HEALTHY,
        When.SERVING if serving else When.STARTUP,
        how,
        evidence(line),
        line.number,
        restart_helps=False,
        confidence=Confidence.HIGH,
    )


def _nothing(start: Start, exit_code: int | None) -> Diagnosis:
    if start.progress >= 0:
        why = "It is still starting, or was ended without a word: the log stops without an error."
    elif any(line.text for line in start.lines):
        why = "Nothing in this log says what happened."
    else:
        why = "The log is empty."
    hint = "whether the process still runs; if not, its exit code and more of the log"
    if exit_code == _USAGE:
        why += " Exit code 2 often is a refused command line, of vLLM or of what starts it."
    return Diagnosis(Kind.UNKNOWN, When.STARTUP, why, confidence=Confidence.LOW, look_at=hint)
