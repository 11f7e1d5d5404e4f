"""Faults are written and read as text."""

from __future__ import annotations

import pytest

from gateway.sim import faults
from gateway.sim.faults import Fault, FaultSet


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("refuse", Fault("refuse")),
        ("stall_after", Fault("stall_after", "1")),
        ("stall_after:7", Fault("stall_after", "7")),
        ("stall_after=7", Fault("stall_after", "7")),
        ("reset_after:0@2", Fault("reset_after", "0", 2)),
        ("http_500@3", Fault("http_500", "500", 3)),
        ("slow_metrics:250ms", Fault("slow_metrics", "250ms")),
        ("die_on_prompt:a@b c", Fault("die_on_prompt", "a@b c")),
        ("unhealthy_then_ok:2", Fault("unhealthy_then_ok", None, 2)),
        ("clean_end_without_done", Fault("clean_end_without_done")),
    ],
)
def test_a_fault_is_read_from_text(text, fault):
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode", "unknown fault"),
        ("", "unknown fault"),
        ("refuse:now", "does not take the argument"),
        ("stall_after:soon", "does not take the argument"),
        ("die_on_prompt", "needs the text"),
    ],
)
def test_a_wrong_fault_says_what_is_wrong(text, says):
    with pytest.raises(ValueError, match=says):
        Fault.parse(text)


@pytest.mark.parametrize("name", faults.NAMES)
def test_every_fault_is_in_the_table_and_survives_its_own_text(name):
    assert f"\n    {name}" in str(faults.__doc__)
    fault = Fault.parse("die_on_prompt:x" if name == "die_on_prompt" else name)
    if name != "unhealthy_then_ok":
        assert Fault.parse(str(fault)) == fault


def test_durations_and_numbers_are_read():
    assert Fault.parse("slow_metrics").duration_s == 5.0
    assert Fault.parse("hang_before_headers:250ms").duration_s == 0.25
    assert Fault.parse("hang_before_headers").duration_s is None
    assert Fault.parse("reset_after:4").number == 4


def test_a_counted_fault_is_used_up_and_others_stay():
    active = FaultSet()
    active.add(Fault.parse("http_500@2"))
    active.add(Fault.parse("html_error"))
    assert [bool(active.take("http_500")) for _ in range(3)] == [True, True, False]
    assert [bool(active.take("html_error")) for _ in range(3)] == [True, True, True]
    active.clear()
    assert active.find("html_error") is None
