"""`status` for people: the worst first, and readable in narrow terminals, without colour and in ASCII."""

import pytest

from gateway.cli import statusview
from gateway.cli.statusview import degraded, fitting, overview_lines
from gateway.cli.terminal import Terminal
from gateway.ops import states

RECENT = {
    **{"seconds": 300.0, "requests": 600, "requests_per_s": 2.0, "errors": 12, "errors_by": {}},
    **{"shed": 3, "left": 0, "tokens_per_s": 9800.0, "ttft_p50_s": 0.085, "ttft_p95_s": 3.94},
    **{"gap_p50_s": 0.018, "gap_p95_s": 0.061},
}
BACKEND = {
    **{"id": "m/b1", "name": "b1", "phase": "ready", "state": "ready", "phase_age_s": 3700.0},
    **{"in_flight": 2, "running": 3, "waiting": 0, "kv_usage_ratio": 0.41, "limit": 32},
    **{"kv_projected_ratio": 0.5, "slowness": 3.2, "version": "0.32.0", "stale": False},
}
PROBLEMS = [
    {
        **{"severity": "down", "kind": "pool_down", "subject": "pool n", "since": ""},
        "sentence": "Pool n is down: its only backend is not ready, for 8 s (since 14:02:11 UTC).",
        "cause": "Backend b1 is unreachable: 3 or more health checks failed in a row.",
        "next": "See that vLLM runs there: `vllm-gateway check FILE --probe`.",
    },
    {
        **{"severity": "note", "kind": "client_slow", "subject": "client ci", "since": ""},
        **{"sentence": "A client of key ci reads too slowly.", "cause": "", "next": "Look at it."},
    },
]
OVERVIEW = {
    **{"schema_version": 2, "state": "down", "draining": False, "version": "0.1.0"},
    **{"verdict": {"state": "down", "sentence": "-"}, "uptime_s": 90061.0, "problems": PROBLEMS},
    "pools": [
        {
            **{"name": "m", "state": "ready", "last_5_min": RECENT},
            "models": [{"name": each, "last_5_min": RECENT} for each in ("m", "sql")],
            "queue": {"requests": 7, "oldest_s": 3.2},
            "backends": [BACKEND],
        },
        {
            **{"name": "n", "state": "down", "last_5_min": {**RECENT, "ttft_p50_s": None}},
            **{"models": [], "queue": {"requests": 0, "oldest_s": None}},
            "backends": [{**BACKEND, "id": "n/b1", "state": "unreachable", "phase": "down"}],
        },
    ],
    "transitions": [],
}


def test_problems_come_first_with_cause_and_next_step_and_the_worst_pool_before_others():
    lines = overview_lines(OVERVIEW, Terminal())
    assert lines[0] == "○ DOWN  vllm-gateway 0.1.0, up 1d  (1 down, 1 note)"
    assert lines[2] == f"down: {PROBLEMS[0]['sentence']}"
    assert lines[3] == f"  why   {PROBLEMS[0]['cause']}"
    assert lines[4] == f"  next  {PROBLEMS[0]['next']}"
    assert lines[6] == "note: A client of key ci reads too slowly."
    rows = [line.split() for line in lines]
    worst = ["n", "down", "0/1", "2.0", "2%", "(12)", "3", "-", "3.94s", "61ms", "9800", "0", "-", "2"]  # fmt: skip
    assert rows.index(worst) < rows.index(["m", "ready", "1/1", "2.0", "2%", "(12)", "3", "85ms", "3.94s", "61ms", "9800", "7", "3s", "2"])  # fmt: skip
    assert any(line.startswith("└ sql") for line in lines)
    first, second = (line.split()[:2] for line in lines if line.startswith(("m/b1", "n/b1")))
    assert (first, second) == (["n/b1", "unreachable"], ["m/b1", "ready"])


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal_and_the_state_is_never_left_out(width):
    lines = overview_lines(OVERVIEW, Terminal(width))
    assert max(len(line) for line in lines) <= width
    heads = [line.split() for line in lines if line.startswith(("POOL", "BACKEND"))]
    assert ["STATE" in head for head in heads] == [True, True]
    assert any("unreachable" in line for line in lines if line.startswith("n/b1"))


def test_without_more_than_ascii_the_signs_are_ascii():
    text = "\n".join(overview_lines(OVERVIEW, Terminal(80, unicode=False)))
    assert text.isascii()
    assert text.startswith("x DOWN")


def test_states_have_colours_only_where_there_are_any():
    assert "\x1b[" not in "\n".join(overview_lines(OVERVIEW, Terminal()))
    text = "\n".join(overview_lines(OVERVIEW, Terminal(colour=True)))
    assert "\x1b[31m○ DOWN\x1b[0m" in text
    assert "\x1b[31munreachable\x1b[0m" in text
    assert "\x1b[32mready      \x1b[0m" in text  # as wide as its column


@pytest.mark.parametrize(("state", "found"), [("ok", False), ("degraded", True), ("down", True)])
def test_what_needs_a_look_is_what_the_verdict_says(state, found):
    assert degraded({"verdict": {"state": state}, "state": "degraded"}) is found


def test_gpus_of_launched_backends_have_columns_where_they_are_known():
    def head_and_row(overview):
        lines = overview_lines(overview, Terminal())
        head = next(line for line in lines if line.startswith("BACKEND"))
        return head, next(line for line in lines if line.startswith("m/b1"))

    gib = 1 << 30
    gpu = {"memory_used_bytes": 40 * gib, "memory_bytes": 80 * gib, "busy_ratio": None}
    known = {**BACKEND, "gpus": [gpu, {**gpu, "memory_used_bytes": 76 * gib, "busy_ratio": 0.88}]}
    pools = [{**OVERVIEW["pools"][0], "backends": [known]}]
    head, row = head_and_row({**OVERVIEW, "pools": pools})
    place = head.index("GPU MEM")
    assert row[place : place + len("GPU MEM  GPU BUSY")].split() == ["95%", "88%"]
    assert "GPU" not in head_and_row(OVERVIEW)[0]


def test_a_narrow_terminal_shows_how_names_begin_and_end_and_wraps_what_changed():
    name = "a-pool-with-a-very-long-name-instruct-fp8"
    pool = OVERVIEW["pools"][0]
    backends = [{**pool["backends"][0], "id": f"{name}/b{each}"} for each in (1, 2)]
    change = {"at": "2026-01-02T03:04:05Z", "backend": f"{name}/b1", "before": "starting"}
    told = {
        **OVERVIEW,
        "pools": [{**pool, "backends": backends}],
        "transitions": [{**change, "after": "ready", "detail": "health checks pass"}],
    }
    lines = overview_lines(told, Terminal(60, unicode=False))
    assert max(len(line) for line in lines) <= 60
    rows = [line.split()[0] for line in lines if line.startswith("a-pool") and "/b" in line]
    assert [row[-3:] for row in rows] == ["/b1", "/b2"]
    assert all("~" in row for row in rows)


def test_what_is_watched_keeps_the_worst_on_the_screen():
    lines = [f"line {each}" for each in range(50)]
    shown = fitting(lines, 20)
    assert len(shown) < 20
    assert (shown[0], shown[-1]) == ("line 0", "line 49")
    hidden = 50 - (len(shown) - 1)
    assert shown[-2] == f"({hidden} more lines: `vllm-gateway status`)"
    assert fitting(lines, None) == fitting(lines, 51) == lines


def test_the_command_line_knows_each_state_and_has_a_colour_for_it():
    assert statusview.POOLS_WORST_FIRST == states.POOLS_WORST_FIRST
    assert statusview.BACKENDS_WORST_FIRST == states.BACKENDS_WORST_FIRST
    terminal = Terminal(colour=True)
    for state in (*states.POOLS_WORST_FIRST, *states.BACKENDS_WORST_FIRST):
        assert terminal.painted("x", state) != "x"
    assert {terminal.sign(state) for state in states.POOLS_WORST_FIRST}.isdisjoint({"?"})
