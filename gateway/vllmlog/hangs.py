"""Answers for what waits: a server whose workers do not answer, a start that does not go on."""

from __future__ import annotations

import re
from typing import Final

from gateway.vllmlog.rules.devices import NCCL
from gateway.vllmlog.starts import WORKS, Start
from gateway.vllmlog.verdict import Advice, Confidence, Diagnosis, Kind, When, proof, short

_LAST: Final = 12  # lines that are looked at for a lock
_GROUP: Final = Advice("", None, "kill the whole process group and start again")
STALL: Final = re.compile(r"No available shared memory broadcast block found in \d+ s")
_LOAD: Final = re.compile(r"Running: (\d{1,9}) reqs, .{0,40}?(?:Waiting|Pending): (\d{1,9}) reqs")
_STALLS: Final = 3  # each of 60 s: fewer happen while kernels are compiled
_LOCK: Final = re.compile(
    r"[Ww]aiting for baton release at (\S{1,300})|[Ww]aiting for (?:file )?lock (\S{1,300})"
)
WAITS: Final = re.compile(
    r"\b[Ww]ait(?:ing|s|ed)? (?:for(?! work| application)|on|until)\b|[Rr]etrying|\bnot ready yet"
)
# What workers write on the way to each other; one that is alone connects to nobody.
_CONNECTS: Final = re.compile(
    r"^world_size=(?!1\b)\d|^rank \d{1,6} in world size (?!1\b)\d|^vLLM is using nccl"
)


def hang(start: Start, served: int, end: int) -> Diagnosis | None:
    """Tell of a serving engine that says again and again, to the end, that nobody answers."""
    worked = next(
        (at for at in range(end - 1, served, -1) if WORKS.search(start.lines[at].text)), served
    )
    stalls = [at for at in range(worked, end) if STALL.search(start.lines[at].text)]
    load = _load(start, end)
    last = bool(stalls) and last_words(start, end) == stalls[-1]
    if len(stalls) < _STALLS and not (last and load) or load == 0:
        return None
    line = start.lines[stalls[-1]]
    return Diagnosis(
        Kind.HANG,
        When.SERVING,
        f"The workers do not answer: said {len(stalls)} times, once a minute, and no progress since.",
        *proof(line.raw, line.number),
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


def last_words(start: Start, end: int) -> int:
    """Return the place of the last line that says anything; -1 if none does."""
    return next((at for at in range(end - 1, -1, -1) if start.lines[at].text.strip()), -1)


def wait_at_start(start: Start) -> Diagnosis | None:
    """Tell of a start whose last words are that it waits: for its workers, a peer, or a lock."""
    end = len(start.lines)
    after = range(start.progress + 1, end)
    stalls = [at for at in after if STALL.search(start.lines[at].text)]
    last = last_words(start, end)
    lock = next((at for at in reversed(after[-_LAST:]) if _LOCK.search(start.lines[at].text)), None)
    same = [re.sub(r"\d+", "", start.lines[at].text) for at in (*after, last)]
    waits = [each for each in same[:-1] if each == same[-1]]
    # Not what idle processes say to developers, nor a script that waits for the server.
    said = last >= 0 and start.engine_up is None and start.lines[last].level in ("INFO", "WARNING")
    again = said and WAITS.search(start.lines[last].text) is not None and len(waits) > 1
    if lock is not None and stalls:
        told = _LOCK.search(start.lines[lock].text)
        why = f" for the lock {(told[1] or told[2])[-120:]}" if told else ""
    elif len(stalls) >= _STALLS or last in stalls:
        why = " for its workers"
    elif again:
        why, stalls = f": {short(start.lines[last].text)}", [last]
    else:
        return None
    line = start.lines[stalls[-1]]
    return Diagnosis(
        Kind.HANG,
        When.STARTUP,
        f"The start waits{why} and may hang.",
        *proof(line.raw, line.number),
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
        *proof(line.raw, line.number),
        (NCCL[1], NCCL[2], NCCL[0], _GROUP),
        restart_helps=True,
        confidence=Confidence.LOW,
        rule="hung_nccl",
        look_at="py-spy dump of the workers; nvidia-smi topo -m; the IOMMU, which breaks peer to peer",
    )
