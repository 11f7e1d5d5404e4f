"""Each invariant, broken once in forged ledgers, is found; honest ledgers are clean."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults import ledgers
from tests.faults.ledgers import ClientLine, End, EngineLine, Evidence, GatewayLine, Held, Life
from tests.faults.reconcile import RULES, reconcile

WHOLE = "the sea sun sky fog "  # 5 tokens
BUSY = {"error": {"message": "Busy.", "type": "server_error", "param": None, "code": "overloaded"}}


def client(nonce="n1", **more):
    told = {
        "path": "/v1/chat/completions", "stream": True, "end": End.COMPLETE, "sent_at": 0.0, "ended_at": 1.0,
        "status": 200, "first_at": 0.1, "first_text_at": 0.1, "text": WHOLE, "whole": WHOLE, "finish": "length", "done": True,
    }  # fmt: skip
    return ClientLine(nonce=nonce, **(told | more))


def engine(nonce="n1", **more):
    told = {"engine": "e1", "at": 0.05, "ended_at": 0.95, "emitted": 5}
    return EngineLine(nonce=nonce, **(told | more))


def logged(nonce="n1", **more):
    told = {
        "outcome": "ok",
        "status": 200,
        "attempts": 1,
        "stream": True,
        "completion_tokens": 5,
        "usage_source": "upstream",
    }
    return GatewayLine(id=nonce, **(told | more))


def evidence(clients=None, gateways=None, engines=None, **more):
    def given_or(lines, one):
        return [one()] if lines is None else lines

    return Evidence(
        client=given_or(clients, client), gateway=given_or(gateways, logged), engine=given_or(engines, engine), **more
    )  # fmt: skip


REFUSED = {
    "end": End.REFUSED, "status": 503, "stream": False, "error": BUSY, "retry_after": True, "text": "", "done": False,
    "finish": None, "first_at": None, "first_text_at": None,
}  # fmt: skip
SHED = {"outcome": "shed", "status": 503, "completion_tokens": None}
LEFT = {"end": End.LEFT, "text": "the ", "done": False, "finish": None, "ended_at": 0.3}
GONE = {"outcome": "client_gone", "completion_tokens": 1}
CUT = {"end": End.ERROR, "text": "the sea ", "done": True, "finish": None, "error": BUSY}
BROKEN = {"outcome": "stream_broken", "completion_tokens": 2}

HONEST = {
    "a whole stream": evidence(),
    "one that another engine went on with": evidence(
        gateways=[logged(attempts=2, resumed=1)],
        engines=[engine(emitted=3, ended_at=0.4), engine(engine="e2", at=0.5, begun=2, emitted=3)],
    ),
    "one whose rest was refused until nobody could go on": evidence(
        [client(**CUT)],
        [logged(**BROKEN | {"attempts": 5, "resumed": 3})],
        [engine(emitted=2)]
        + [engine(engine="e2", at=at, ended_at=at, emitted=0) for at in (0.2, 0.3, 0.4, 0.5)],
    ),
    "a refusal": evidence([client(**REFUSED)], [logged(**SHED)], []),
    "a stream that was cut and told so": evidence(
        [client(**CUT)], [logged(**BROKEN)], [engine(emitted=2)]
    ),
    "a client that left": evidence(
        [client(**LEFT)], [logged(**GONE)], [engine(emitted=1, ended_at=0.4, left_at=0.4)]
    ),
    "a client that left before anybody had read its request": evidence(
        [client(**LEFT | {"text": ""})], [], []
    ),
    "vectors": evidence(
        [client(text="", whole="", finish=None, stream=False)],
        [logged(completion_tokens=None)],
        [engine(emitted=0)],
    ),
    "all at rest": evidence(
        before=Held(descriptors=50, tasks=20, threads=3, memory_mib=80),
        after=Held(descriptors=52, tasks=20, threads=3, memory_mib=90),
    ),
    "others wait as long as without faults": evidence(
        [client(), client("n2", sent_at=2.0, first_at=2.15)],
        [logged(), logged("n2")],
        [engine(), engine("n2")],
        faults_from=1.0,
        faulted_tenants=frozenset({"x"}),
    ),
    "many begin anew as their engine has died": evidence(
        [client(f"n{n}") for n in range(5)],
        [logged(f"n{n}") for n in range(5)],
        [engine(f"n{n}", at=at, died=at < 0.06) for n in range(5) for at in (0.05, 0.06)],
    ),
    "many begin anew at an engine that answers at once": evidence(
        [client(f"n{n}") for n in range(5)],
        [logged(f"n{n}") for n in range(5)],
        [
            attempt
            for n in range(5)
            for attempt in (
                engine(f"n{n}", at=0.05, ended_at=0.05, emitted=0),
                engine(f"n{n}", at=0.06 + 0.002 * n, answered_at=0.061 + 0.002 * n),
            )
        ],
    ),
    "restarts of what was broken": evidence(restarts=["b1/1"], true_faults=frozenset({"b1/1"})),
}

FORGED = {
    "two ends": (1, evidence([client(), client()])),
    "logged twice": (1, evidence(gateways=[logged(), logged()])),
    "never logged": (1, evidence(gateways=[])),
    "logged and never sent": (1, evidence(gateways=[logged(), logged("n2")])),
    "work that nobody asked for": (1, evidence(engines=[engine(), engine("n2")])),
    "complete here and broken there": (1, evidence(gateways=[logged(**BROKEN)])),
    "broken here and fine there": (1, evidence([client(**CUT)])),
    "cut without a word": (1, evidence([client(**CUT | {"end": End.CUT})], [logged(**BROKEN)])),
    "a bug": (1, evidence([client(**LEFT)], [logged(outcome="bug")])),
    "a word is missing": (2, evidence([client(text="the sun sky fog ")])),
    "a word comes twice": (2, evidence([client(text="the the sea sun sky fog ")])),
    "short, and looks complete": (2, evidence([client(text=WHOLE[:8])])),
    "no finish reason": (2, evidence([client(finish=None)])),
    "no last event": (2, evidence([client(done=False)])),
    "cut, with words of another answer": (
        2, evidence([client(**CUT | {"text": "the fox "})], [logged(**BROKEN)]),
    ),
    "words that no engine gave": (2, evidence(engines=[engine(emitted=4)])),
    "a gap between two attempts": (
        2, evidence(engines=[engine(emitted=2), engine(engine="e2", begun=3, emitted=2)]),
    ),
    "too many attempts": (3, evidence(gateways=[logged(attempts=4, stream=False)])),
    "went on too often": (3, evidence(gateways=[logged(attempts=5, resumed=4)])),
    "at engines too often": (3, evidence(engines=[engine(at=0.01 * n, ended_at=0.01 * n) for n in range(4)])),
    "refused too often": (
        3, evidence(engines=[engine(at=0.01 * n, ended_at=0.01 * n, emitted=n // 3) for n in range(4)]),
    ),
    "began anew after the first text": (3, evidence(engines=[engine(), engine(engine="e2", at=0.2)])),
    "a storm of retries": (
        3,
        evidence(
            [client(f"n{n}") for n in range(5)],
            [logged(f"n{n}") for n in range(5)],
            [engine(f"n{n}", at=at) for n in range(5) for at in (0.05, 0.06)],
        ),
    ),
    "requests are left": (4, evidence(after=Held(requests=1))),
    "slots are left": (4, evidence(after=Held(slots=1))),
    "somebody waits for ever": (4, evidence(after=Held(queued=1))),
    "a connection is never given back": (4, evidence(after=Held(busy_connections=1))),
    "engines that are not told": (
        5,
        evidence(
            [client(f"n{n}", **LEFT) for n in range(9)],
            [logged(f"n{n}", **GONE) for n in range(9)],
            [engine(f"n{n}", ended_at=0.9) for n in range(9)],
        ),
    ),
    "work that begins after its clients left": (
        5,
        evidence(
            [client(f"n{n}", **LEFT) for n in range(2)],
            [logged(f"n{n}", **GONE) for n in range(2)],
            [engine(f"n{n}", at=0.8) for n in range(2)],
        ),
    ),
    "charged more than it got": (6, evidence(gateways=[logged(completion_tokens=6)])),
    "charged less than it got": (6, evidence(gateways=[logged(completion_tokens=4)])),
    "charged for what was never made": (
        6, evidence([client(**CUT)], [logged(**BROKEN | {"completion_tokens": 9})], [engine(emitted=2)]),
    ),
    "descriptors leak": (7, evidence(before=Held(descriptors=50), after=Held(descriptors=60))),
    "tasks leak": (7, evidence(before=Held(tasks=20), after=Held(tasks=30))),
    "threads leak": (7, evidence(before=Held(threads=3), after=Held(threads=9))),
    "memory leaks": (7, evidence(before=Held(memory_mib=80), after=Held(memory_mib=130))),
    "a key in the log": (8, evidence(papers={"log": "key sk-1 failed"}, secrets=["sk-1"])),
    "a prompt in an error": (
        8,
        evidence(
            [client(**REFUSED | {"error": {"error": BUSY["error"] | {"message": "my secret"}}})],
            [logged(**SHED)], [], secrets=["secret"],
        ),
    ),
    "an error that is none": (9, evidence([client(**REFUSED | {"status": 200})], [logged(**SHED)], [])),
    "not told when to come again": (
        9, evidence([client(**REFUSED | {"retry_after": False})], [logged(**SHED)], []),
    ),
    "an error of another form": (
        9, evidence([client(**REFUSED | {"error": {"detail": "no"}})], [logged(**SHED)], []),
    ),
    "an error without a body": (9, evidence([client(**REFUSED | {"error": None})], [logged(**SHED)], [])),
    "an address in an error": (
        9,
        evidence(
            [client(**REFUSED | {"error": {"error": BUSY["error"] | {"message": "10.0.0.7 refused"}}})],
            [logged(**SHED)], [], inside=["10.0.0.7"],
        ),
    ),
    "others suffer": (
        10, evidence([client(**CUT)], [logged(**BROKEN)], [engine(emitted=2)], faulted_tenants=frozenset({"x"})),
    ),
    "others wait": (
        10,
        evidence(
            [client(), client("n2", sent_at=2.0, first_at=2.3)], [logged(), logged("n2")], [engine(), engine("n2")],
            faults_from=1.0, faulted_tenants=frozenset({"x"}),
        ),
    ),
    "a healthy one was restarted": (11, evidence(restarts=["b1/1"])),
    "what broke stays broken": (11, evidence(true_faults=frozenset({"b1/1"}))),
    "restarted twice": (
        11, evidence(restarts=["b1/1", "b1/1"], true_faults=frozenset({"b1/1"})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_ledgers_are_clean(name):
    assert reconcile(HONEST[name]) == []


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_is_found(name):
    invariant, forged = FORGED[name]
    found = reconcile(forged)
    assert invariant in {each.invariant for each in found}, found
    assert str(found[0]).startswith("I")


def test_every_invariant_was_broken_once():
    assert {invariant for invariant, _ in FORGED.values()} == set(RULES) == set(range(1, 12))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5))
def test_a_stream_is_whole_where_its_attempts_leave_no_gap(parts):
    """Whatever their order: the words 0 to 4 are covered from the first one on."""
    covered = {n for begun, emitted in parts for n in range(begun, begun + emitted)}
    engines = [
        engine(begun=begun, emitted=emitted, at=0.01 * n) for n, (begun, emitted) in enumerate(parts)
    ]  # fmt: skip
    found = [each for each in reconcile(evidence(engines=engines)) if each.invariant == 2]
    assert (found == []) == (covered >= set(range(5)))


@pytest.mark.parametrize(("late_s", "found"), [(0.0, [5]), (0.01, [5]), (1.0, [])])
def test_engines_may_work_on_for_as_long_as_the_loop_that_all_share_is_late(late_s, found):
    told = evidence(
        [client(f"n{n}", **LEFT) for n in range(9)],
        [logged(f"n{n}", **GONE) for n in range(9)],
        [engine(f"n{n}", ended_at=0.9) for n in range(9)],
    )
    told = msgspec.structs.replace(told, late_s=late_s)
    assert [each.invariant for each in reconcile(told)] == found


def test_each_life_after_the_first_one_is_a_restart():
    lives = [Life(engine="e1", pid=2, began_at=5.0), Life(engine="e1", pid=1, began_at=1.0)]
    lives += [Life(engine="e2", pid=3, began_at=2.0), Life(engine="e1", pid=4, began_at=7.0)]
    assert ledgers.restarts(lives) == ["e1/1", "e1/2"]


def test_ledgers_are_files_of_lines(tmp_path):
    path = tmp_path / "ledger"
    ledgers.write(path, [client()])
    ledgers.write(path, [client("n2", **REFUSED)])
    assert ledgers.read(path, ClientLine) == [client(), client("n2", **REFUSED)]


def test_of_an_access_log_only_requests_are_read(tmp_path):
    path = tmp_path / "log"
    line = msgspec.to_builtins(logged()) | {"endpoint": "chat", "tenant": None}
    # As the gateway writes it.
    path.write_bytes(b'{"event":"backend_ready"}\n' + msgspec.json.encode(line) + b"\n")
    assert ledgers.read(path, GatewayLine) == [logged()]
