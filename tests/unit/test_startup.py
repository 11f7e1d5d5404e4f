"""A start is watched by its stages."""

import pytest

from gateway.config.supervision import PatienceConfig
from gateway.heal.startup import StartWatch
from gateway.vllmlog.milestones import Stage

PATIENCE = PatienceConfig(
    config="10s", distributed="20s", weights="100s", profiling="40s", graphs="50s", total="1000s"
)
CONFIG = "INFO 11-21 10:10:03 [model.py:2152] Using max model len 2048"
NCCL = "INFO 11-21 10:10:04 [parallel_state.py:1] world_size=2 rank=0"
WEIGHTS = "INFO 11-21 10:10:05 [gpu_model_runner.py:1] Starting to load model m..."
PROFILE = "INFO 11-21 10:10:06 [x.py:1] torch.compile takes 5.0 s in total"
KV = "INFO 11-21 10:10:07 [x.py:1] GPU KV cache size: 1,000 tokens"
GRAPHS = "INFO 11-21 10:10:08 [x.py:1] Graph capturing finished in 9 secs, took 0.5 GiB"
UP = "INFO:     Application startup complete."


@pytest.mark.parametrize(
    ("lines", "patience_s", "name"),
    [
        ([], 10, "config"),
        ([CONFIG], 10, "config"),
        ([CONFIG, NCCL], 20, "distributed"),
        ([NCCL, WEIGHTS], 100, "weights"),
        ([WEIGHTS, PROFILE], 40, "profiling"),
        ([PROFILE, KV], 40, "profiling"),
        ([KV, GRAPHS], 50, "graphs"),
        ([GRAPHS, UP], 50, "graphs"),
    ],
)
def test_each_stage_may_be_silent_for_its_own_patience(lines, patience_s, name):
    watch = StartWatch(PATIENCE, 5.0)
    for line in lines:
        watch.heard(line, 7.0)
    spoke_at = 7.0 if lines else 5.0
    assert watch.hung(spoke_at + patience_s - 0.1) is None
    assert f"(supervision.patience.{name})" in watch.hung(spoke_at + patience_s)


def test_any_line_is_a_sign_of_life_but_the_whole_start_has_its_limit():
    watch = StartWatch(PATIENCE, 0.0)
    for second in range(999):
        watch.heard("Downloading ... 1%", float(second))
        assert watch.hung(float(second)) is None
    watch.heard("Downloading ... 2%", 1000.0)
    assert "(supervision.patience.total)" in watch.hung(1000.0)


def test_one_that_nobody_hears_has_only_the_limit_of_the_whole():
    watch = StartWatch(PATIENCE, 0.0, speaks=False)
    assert watch.hung(999.0) is None
    assert watch.hung(1000.0) is not None


def test_a_stage_that_was_left_is_not_entered_again():
    watch = StartWatch(PATIENCE, 0.0)
    watch.heard(WEIGHTS, 10.0)
    watch.heard(NCCL, 30.0)
    assert watch.stage is Stage.LOADING_WEIGHTS
    assert watch.stage_at == 10.0


def test_it_tells_where_it_is_beside_what_is_usual():
    first = StartWatch(PATIENCE, 0.0)
    assert first.told(3.0) == "launched for 3 s"
    first.heard(WEIGHTS, 10.0)
    first.heard(UP, 50.0)
    usual = first.ended(52.0)
    assert usual == {Stage.LAUNCHED: 10.0, Stage.LOADING_WEIGHTS: 40.0, Stage.SERVING: 2.0}
    second = StartWatch(PATIENCE, 100.0, usual_s=usual)
    second.heard(WEIGHTS, 112.0)
    assert second.told(120.0) == "loading weights for 8 s, usually 40 s; 20 s of about 52 s in all"


def test_the_rest_of_a_start_is_reckoned_by_the_last_one():
    usual = {Stage.LAUNCHED: 10.0, Stage.LOADING_WEIGHTS: 60.0, Stage.GRAPHS: 20.0}
    watch = StartWatch(PatienceConfig(), 100.0, True, usual)
    assert watch.ready_at(104.0) == 104.0 + 86.0
    assert watch.ready_at(130.0) == 130.0 + 80.0  # its first stage takes longer than usual
    watch.stage, watch.stage_at = Stage.LOADING_WEIGHTS, 130.0
    assert watch.ready_at(150.0) == 150.0 + 60.0
    assert StartWatch(PatienceConfig(), 100.0).ready_at(104.0) is None
