"""The screen of `top`: its lists, its keys, and that it fits."""

from dataclasses import replace

import pytest

from gateway.cli.terminal import Terminal
from gateway.cli.topview import Focus, Verb, View, frame, keys_in, lists, pressed
from tests.unit.test_status_view import OVERVIEW

REQUEST = {
    **{"id": "r1", "state": "running", "stream": True, "tenant": "acme", "key_id": "ci"},
    **{"model": "m", "backend": "m/b1", "duration_s": 4.0, "first_token_s": 2.0, "status": None},
    **{"output_tokens": 40, "shed_reason": None},
}
REQUESTS = [
    REQUEST,
    {**REQUEST, "id": "r2", "duration_s": 90.0},
    {**REQUEST, "id": "r3", "stream": False},
    {**REQUEST, "id": "r4", "state": "ended", "status": 503, "shed_reason": "queue_full"},
    {**REQUEST, "id": "r5", "state": "ended", "status": 200, "tenant": "other"},
]
FOUND = lists(OVERVIEW, REQUESTS)


def test_the_worst_backend_the_busiest_tenant_and_the_longest_stream_come_first():
    assert FOUND.ids == {
        Focus.BACKENDS: ["n/b1", "m/b1"],
        Focus.TENANTS: ["acme", "other"],
        Focus.STREAMS: ["r2", "r1"],
    }
    acme = FOUND.rows[Focus.TENANTS][0]
    assert (acme["under way"], acme["ended"], acme["errors"], acme["shed"]) == (3, 1, 1, 1)
    assert FOUND.rows[Focus.STREAMS][1]["tok/s"] == "20"  # since its first token


def test_keys_move_and_choose():
    view = pressed(View(), "j", FOUND)
    assert FOUND.selected(view) == "m/b1"
    assert FOUND.selected(pressed(view, "\x1b[B", FOUND)) == "m/b1"  # the last one
    assert FOUND.selected(pressed(view, "k", FOUND)) == "n/b1"
    streams = pressed(pressed(view, "\t", FOUND), "\t", FOUND)
    assert FOUND.selected(streams) == "r2"
    assert FOUND.selected(pressed(streams, "\t", FOUND)) == "m/b1"  # where it was
    assert lists({}, []).selected(View()) is None


@pytest.mark.parametrize(
    ("key", "verb"),
    [
        ("q", Verb.QUIT),
        ("d", Verb.DRAIN),
        ("u", Verb.UNDRAIN),
        ("h", Verb.HOLD),
        ("e", Verb.EXPLAIN),
    ],
)
def test_keys_ask_for_something(key, verb):
    assert pressed(View(), key, FOUND) is verb


def test_keys_that_come_together_are_told_apart():
    assert keys_in("dq\x1b[B\x1b[Aj\t") == ["d", "q", "\x1b[B", "\x1b[A", "j", "\t"]
    assert keys_in("\x1b[5~\x1bx\x1b") == ["\x1b[5~", "\x1b", "x", "\x1b"]
    assert keys_in("") == []


def test_an_unknown_key_takes_a_question_back():
    assert pressed(View(below=("sure?",)), "x", FOUND) == View()


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (140, 50)])
def test_a_screen_fits_and_ends_with_the_question_and_the_keys(width, height):
    view = replace(View(), below=("It carries 3 requests.", "y does it"))
    lines = frame(OVERVIEW, FOUND, view, Terminal(width), height)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= height
    assert "y does it" in lines
    assert lines[-1].split()[-1] in ("explain", "restarts")
    assert any(line.startswith(">  n/b1") for line in lines)


def fleet(backends, problems=4):
    """A gateway with so many backends, of which the last is down, and long problems."""
    one = OVERVIEW["pools"][0]["backends"][0]
    named = [{**one, "id": f"a-pool-with-a-long-name/b{each}", "state": "ready"} for each in range(backends)]  # fmt: skip
    wrong = {"severity": "degraded", "sentence": "Backend b1 " + "is slow " * 20, "next": "Wait."}
    pool = {**OVERVIEW["pools"][0], "backends": named}
    return {**OVERVIEW, "pools": [pool], "problems": [wrong] * problems}


@pytest.mark.parametrize(("width", "height"), [(50, 16), (80, 24), (100, 40)])
@pytest.mark.parametrize("place", [0, 14, 29])
def test_the_row_that_keys_act_on_is_always_shown(width, height, place):
    overview = fleet(30)
    found = lists(overview, REQUESTS)
    view = View()
    for _ in range(place):
        view = pressed(view, "j", found)
    lines = frame(overview, found, view, Terminal(width), height)
    assert len(lines) <= height
    (selected,) = [line for line in lines if line.startswith(">")]
    assert selected.split()[1].endswith(f"/b{place}" if width > 50 else f"b{place}")
    assert any(line.startswith("Backends (") and line.endswith(" of 30)") for line in lines)
    assert any(line.endswith("more: `vllm-gateway status`") for line in lines)


def test_a_list_that_is_chosen_is_shown_however_many_backends_there_are():
    overview = fleet(30)
    found = lists(overview, REQUESTS)
    view = pressed(pressed(View(), "\t", found), "\t", found)
    lines = frame(overview, found, view, Terminal(80), 24)
    assert len(lines) <= 24
    assert any(line.startswith(">  r2") for line in lines)
