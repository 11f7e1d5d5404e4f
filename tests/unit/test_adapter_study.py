"""The study of many adapters runs, and the gateway refuses nobody in it."""

import math

from loadtest.adapters import Job, run_job


def test_a_few_seconds_of_the_study_are_answered_whole():
    cell = run_job(Job(1.1, 6.0, 8.0, 1, "gateway"))
    assert cell.whole == cell.requests > 20
    assert cell.refused == 0
    assert cell.ttft_p99_s < math.inf
    assert cell.loads_per_s > 0
