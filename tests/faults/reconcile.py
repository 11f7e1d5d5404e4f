"""Three ledgers say the same, or something was lost. Pure: evidence in, findings out.

1   one end for each request, told alike by client and gateway; no work that nobody asked for
2   what looks complete is complete: the tokens of a stream are contiguous, without gap or
    repetition, from one attempt or from several, each of which went on where the one before was cut
3   at most three attempts before the first byte, three more that go on; what the client has
    text of never begins anew; attempts that begin anew though the engine before may still be at work are at
    most a fifth of what is under way, and three
4   when all is quiet nothing is held
5   an engine works no longer than 250 ms (99 %) for a client that has left, and
    what the machine itself is late
6   what is charged is what the client got
7   descriptors, tasks, threads and memory are as before
8   no secret in any log, metric or error
9   an error has OpenAI's form, its status, a time to come again where it is for capacity, and tells
    nothing of the inside
10  tenants whose requests no fault hits succeed (99.9 %), and their streams begin as soon as before
    (twice the 99th percentile, and what the machine itself is late)
11  what was broken was restarted, once; nothing else was
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.faults.ledgers import ClientLine, End, EngineLine, Evidence, GatewayLine

TOKEN_CHARACTERS: Final = 4  # of the simulator's replies
MOST_ATTEMPTS: Final = 3
MOST_RESUMED: Final = 3
RETRY_SHARE: Final = 0.2
RETRY_FLOOR: Final = 3
ABORT_WITHIN_S: Final = 0.25
_TURNS: Final = 3  # of one loop: what a client ends, the gateway sees, and its engine then
GROWTH: Final = 0.05
FEW: Final = 4  # connections of probes come and go
MEMORY_MIB: Final = 32.0
SUCCESS: Final = 0.999
TTFT_FACTOR: Final = 2.0
_FINISHED: Final = ("stop", "length")
_TRACES: Final = ("Traceback", "http://127.", "site-packages", '.py"')


@dataclass(frozen=True)
class Finding:
    """One invariant that does not hold, and where."""

    invariant: int
    says: str

    def __str__(self) -> str:
        return f"I{self.invariant}: {self.says}"


def reconcile(evidence: Evidence) -> list[Finding]:
    """Return every violation that the evidence shows."""
    return [Finding(number, says) for number, rule in RULES.items() for says in rule(evidence)]


def _one_end(evidence: Evidence) -> Iterator[str]:
    clients = Counter(line.nonce for line in evidence.client)
    logged = Counter(line.id for line in evidence.gateway)
    for nonce, count in clients.items():
        if count != 1:
            yield f"{nonce} ended {count} times at its client"
    for nonce, count in logged.items():
        if count != 1:
            yield f"{nonce} was logged {count} times"
        if nonce not in clients:
            yield f"{nonce} was logged and never sent"
    for nonce in {line.nonce for line in evidence.engine} - clients.keys():
        yield f"{nonce} was at an engine and never sent"
    outcomes = {line.id: line.outcome for line in evidence.gateway}
    for line in evidence.client:
        outcome = outcomes.get(line.nonce)
        if outcome is None and line.end is not End.LEFT:
            yield f"{line.nonce} ended as {line.end.value} and was never logged"
        elif not _agree(line.end, outcome):
            yield f"{line.nonce} ended as {line.end.value} at its client and as {outcome} in the log"


def _agree(end: End, outcome: str | None) -> bool:
    if end is End.LEFT:  # it may leave before its request or after its answer, too
        return outcome != "bug"
    if end is End.COMPLETE:
        return outcome == "ok"
    if end is End.CUT:
        return False  # a gateway that lives says why
    return outcome not in ("ok", "client_gone", "bug")


def _contiguous(evidence: Evidence) -> Iterator[str]:
    attempts = _by_nonce(evidence.engine)
    for line in evidence.client:
        if line.end is not End.COMPLETE:
            if line.text and not line.whole.startswith(line.text):
                yield f"{line.nonce} was cut, and what came of it is not how its answer begins"
            continue
        if not line.whole:
            continue  # vectors and the like have no tokens
        if line.text != line.whole:
            yield f"{line.nonce} looks complete with {_differs(line)}"
        if line.finish not in _FINISHED or (line.stream and not line.done):
            yield f"{line.nonce} is taken for complete without a finish reason or its last event"
        if not line.stream:
            continue  # a whole reply may tell more than its engine counted
        reached = 0
        for attempt in sorted(attempts[line.nonce], key=lambda each: each.begun):
            if attempt.begun <= reached:
                reached = max(reached, attempt.begun + attempt.emitted)
        if reached * TOKEN_CHARACTERS < len(line.text):
            yield f"{line.nonce} has {len(line.text)} characters; engines gave the first {reached} tokens"


def _differs(line: ClientLine) -> str:
    pairs = zip(line.text, line.whole, strict=False)
    at = next((n for n, (got, right) in enumerate(pairs) if got != right), None)
    at = min(len(line.text), len(line.whole)) if at is None else at
    return f"{len(line.text)} of {len(line.whole)} characters, and differs at {at}"


def _attempts(evidence: Evidence) -> Iterator[str]:
    for line in evidence.gateway:
        most = MOST_ATTEMPTS + (MOST_RESUMED if line.stream else 0)
        if line.attempts > most or line.resumed > MOST_RESUMED:
            yield f"{line.id} had {line.attempts} attempts and went on {line.resumed} times"
    clients = {line.nonce: line for line in evidence.client}
    retries: list[EngineLine] = []
    for nonce, attempts in _by_nonce(evidence.engine).items():
        anew = sorted((each for each in attempts if not each.begun), key=lambda each: each.at)
        # One that refuses gives nothing, and does not look what the prompt holds already: behind one
        # that gave some it was asked for the rest.
        given = [each for each in anew if each.emitted]
        rests = [each for each in anew if not each.emitted and given and each.at > given[0].at]
        first = len(anew) - len(rests)
        if first > MOST_ATTEMPTS or len(attempts) > MOST_ATTEMPTS + MOST_RESUMED:
            yield f"{nonce} was at engines {len(attempts)} times, {first} of them from the beginning"
        client = clients.get(nonce)
        text_at = client.first_text_at if client is not None else None
        if text_at is not None and any(each.at > text_at for each in given):
            yield f"{nonce} began anew at an engine after its client had text"
        retries += [again for before, again in pairwise(anew) if not before.died]
    for tenant in sorted({line.tenant for line in evidence.client}):
        theirs = [line for line in evidence.client if line.tenant == tenant]
        nonces = {line.nonce for line in theirs}
        yield from _budget(theirs, [line for line in retries if line.nonce in nonces])


def _budget(clients: Sequence[ClientLine], retries: Sequence[EngineLine]) -> Iterator[str]:
    """Each tenant asks a pool of its own. Retries count until the engine answers, with the head of a reply at least."""
    changes = [(line.sent_at, 1, 0) for line in clients]
    changes += [(line.ended_at, -1, 0) for line in clients]
    changes += [(line.at, 0, 1) for line in retries]
    for line in retries:
        changes.append((line.answered_at or line.ended_at, 0, -1))
    active = again = 0
    # At one moment what ends goes first among retries, what begins among requests.
    for at, request, retry in sorted(changes, key=lambda each: (each[0], -each[1], each[2])):
        active, again = active + request, again + retry
        if retry > 0 and again > RETRY_SHARE * active + RETRY_FLOOR:
            yield f"{again} retries beside {active} requests at {at:.3f}"
            return


def _nothing_held(evidence: Evidence) -> Iterator[str]:
    if evidence.after is None:
        return
    for name in ("requests", "slots", "queued", "busy_connections"):
        if left := getattr(evidence.after, name):
            yield f"{left} {name} are left"


def _aborted(evidence: Evidence) -> Iterator[str]:
    attempts = _by_nonce(evidence.engine)
    within_s = ABORT_WITHIN_S + _machine_s(evidence) + _TURNS * evidence.late_s
    late_s: list[float] = []
    for line in evidence.client:
        if line.end is not End.LEFT:
            continue
        for attempt in attempts[line.nonce]:
            if attempt.ended_at > line.ended_at:
                late_s.append(attempt.ended_at - line.ended_at)
    slow = sum(late > within_s for late in late_s)
    if slow > max(1, len(late_s) // 100):
        worst = max(late_s)
        yield f"{slow} of {len(late_s)} engines worked on for more than {within_s:.3f} s, one for {worst:.3f} s"


def _machine_s(evidence: Evidence) -> float:
    """Return what clients wait beyond what the gateway logs (99 %).

    It is the machine's: connections that nobody has accepted yet, and loops that are late.
    """
    logged = {line.id: line.duration_s for line in evidence.gateway}
    beyond = [
        line.ended_at - line.sent_at - duration_s
        for line in evidence.client
        if line.end is not End.LEFT and (duration_s := logged.get(line.nonce)) is not None
    ]
    return max(0.0, _p99(beyond)) if beyond else 0.0


def _charged(evidence: Evidence) -> Iterator[str]:
    logged = {line.id: line for line in evidence.gateway}
    attempts = _by_nonce(evidence.engine)
    for line in evidence.client:
        told = logged.get(line.nonce)
        if told is None or told.completion_tokens is None:
            continue
        got = -(-len(line.text) // TOKEN_CHARACTERS)
        counted = told.usage_source != "upstream"  # events, and the first tells the role
        most = got + counted
        if line.end is End.COMPLETE and line.whole and not got <= told.completion_tokens <= most:
            yield f"{line.nonce} got {got} tokens and was charged {told.completion_tokens}"
        made = max((each.begun + each.emitted for each in attempts[line.nonce]), default=0)
        made += 2 * counted  # and the last of an abort why it ended
        if line.end is not End.COMPLETE and told.completion_tokens > made:
            yield f"{line.nonce} was charged {told.completion_tokens} tokens of {made} that were made"


def _as_before(evidence: Evidence) -> Iterator[str]:
    before, after = evidence.before, evidence.after
    if before is None or after is None:
        return
    for name in ("descriptors", "tasks", "threads"):
        was, now = getattr(before, name), getattr(after, name)
        if now > was * (1 + GROWTH) + FEW:
            yield f"{name} went from {was} to {now}"
    if after.memory_mib > before.memory_mib * (1 + GROWTH) + MEMORY_MIB:
        yield f"memory went from {before.memory_mib:.0f} to {after.memory_mib:.0f} MiB"


def _secret(evidence: Evidence) -> Iterator[str]:
    errors = json.dumps([line.error for line in evidence.client if line.error is not None])
    for name, text in (evidence.papers | {"errors": errors}).items():
        for number, secret in enumerate(evidence.secrets):
            if secret in text:
                yield f"secret {number} is in {name}"


def _errors(evidence: Evidence) -> Iterator[str]:
    for line in evidence.client:
        if line.end is End.REFUSED and not 400 <= line.status <= 599:
            yield f"{line.nonce} was refused with status {line.status}"
        if line.end is End.REFUSED and line.status in (429, 503) and not line.retry_after:
            yield f"{line.nonce} was refused with {line.status} and not told when to come again"
        if line.end in (End.REFUSED, End.ERROR):
            error = (line.error or {}).get("error")
            if not isinstance(error, dict) or not {"message", "type", "code"} <= error.keys():
                yield f"{line.nonce} ended with an error that has another form"
            told = json.dumps(line.error)
            if any(each in told for each in (*_TRACES, *evidence.inside)):
                yield f"{line.nonce} was told of the inside: {told[:200]}"


def _others_served(evidence: Evidence) -> Iterator[str]:
    if not evidence.faulted_tenants:
        return
    others = [
        line for line in evidence.client
        if line.tenant not in evidence.faulted_tenants and line.end is not End.LEFT
    ]  # fmt: skip
    well = sum(line.end is End.COMPLETE for line in others)
    if well < SUCCESS * len(others):
        yield f"{well} of {len(others)} requests of other tenants succeeded"
    if evidence.faults_from is None:
        return
    quiet_s, during_s = ttft_p99_s(others, evidence.faults_from)
    if during_s > TTFT_FACTOR * quiet_s + _machine_s(evidence):
        yield f"other tenants waited {during_s:.3f} s (99 %), {quiet_s:.3f} s without faults"


def ttft_p99_s(lines: Iterable[ClientLine], faults_from: float) -> tuple[float, float]:
    """Return what streams wait for their first byte (99 %), without faults and with them.

    Raises:
        ValueError: no stream began in one of the two times.
    """
    quiet, during = [], []
    for line in lines:
        if line.stream and line.first_at is not None:
            waited_s = line.first_at - line.sent_at
            (quiet if line.sent_at < faults_from else during).append(waited_s)
    if not quiet or not during:
        raise ValueError("no streams to compare")
    return _p99(quiet), _p99(during)


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.99 * (len(ordered) - 1))]


def _restarted(evidence: Evidence) -> Iterator[str]:
    for incarnation, count in Counter(evidence.restarts).items():
        if incarnation not in evidence.true_faults:
            yield f"{incarnation} was restarted and nothing was wrong with it"
        if count > 1:
            yield f"{incarnation} was restarted {count} times"
    for incarnation in sorted(evidence.true_faults.difference(evidence.restarts)):
        yield f"{incarnation} was broken and never restarted"


def _by_nonce(engine: Sequence[EngineLine]) -> defaultdict[str, list[EngineLine]]:
    found: defaultdict[str, list[EngineLine]] = defaultdict(list)
    for line in engine:
        found[line.nonce].append(line)
    return found


RULES: Final[dict[int, Callable[[Evidence], Iterator[str]]]] = {
    1: _one_end,
    2: _contiguous,
    3: _attempts,
    4: _nothing_held,
    5: _aborted,
    6: _charged,
    7: _as_before,
    8: _secret,
    9: _errors,
    10: _others_served,
    11: _restarted,
}

__all__ = ["RULES", "ClientLine", "Finding", "GatewayLine", "reconcile", "ttft_p99_s"]
