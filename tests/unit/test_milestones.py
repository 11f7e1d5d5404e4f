from pathlib import Path

import pytest

from gateway.vllmlog.milestones import Stage, stage_of

LOGS = Path(__file__).parents[1] / "data" / "logs"


def told(name):
    lines = (LOGS / f"{name}.txt").read_text().split("\n")
    return [found for line in lines if (found := stage_of(line)) is not None]


def test_a_real_start_passes_its_stages_in_order():
    stages = told("healthy")
    assert stages == sorted(stages)
    assert set(stages) == set(Stage) - {Stage.PROFILING, Stage.GRAPHS}  # --enforce-eager on a CPU


def test_a_failed_start_ends_at_the_stage_that_it_reached():
    assert max(told("port_taken")) <= Stage.CONFIG
    assert max(told("weights_truncated")) is Stage.LOADING_WEIGHTS
    assert max(told("lora_rank")) is Stage.WARM_UP
    assert told("bad_flag") == []


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("vLLM API server version 0.10.2", Stage.LAUNCHED),
        ("Using max model len 131072", Stage.CONFIG),
        (
            "Initializing an LLM engine (v0.5.4) with config: model='m'",
            Stage.DISTRIBUTED_INIT,
        ),
        ("vLLM is using nccl==2.27.5", Stage.DISTRIBUTED_INIT),
        (
            "Model loading took 5.1250 GiB and 12.500000 seconds",
            Stage.LOADING_WEIGHTS,
        ),
        (
            "Model loading took 10.25 GiB memory and 33.5 seconds",
            Stage.LOADING_WEIGHTS,
        ),
        (
            "Loading model weights took 6.5432 GB",
            Stage.LOADING_WEIGHTS,
        ),
        (
            "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01,  1.94it/s]",
            Stage.LOADING_WEIGHTS,
        ),
        ("torch.compile takes 8.25 s in total", Stage.PROFILING),
        ("Available KV cache memory: -2.50 GiB", Stage.KV_CACHE),
        ("GPU KV cache size: 123,456 tokens", Stage.KV_CACHE),
        (
            "Maximum concurrency for 131,072 tokens per request: 1.75x",
            Stage.KV_CACHE,
        ),
        ("# GPU blocks: 1000, # CPU blocks: 500", Stage.KV_CACHE),
        (
            "Graph capturing finished in 12 secs, took 0.75 GiB",
            Stage.GRAPHS,
        ),
        ("Graph capturing finished in 21 secs.", Stage.GRAPHS),
        (
            "init engine (profile, create kv cache, warmup model) took 45.50 seconds",
            Stage.WARM_UP,
        ),
        ("Starting vLLM API server 0 on http://0.0.0.0:8000", Stage.WARM_UP),
        ("Application startup complete.", Stage.SERVING),
    ],
)
@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "(EngineCore_0 pid=3) INFO 11-21 10:09:36 [x.py:1] ",
        "vllm-1  | INFO 11-21 10:09:36 x.py:1] ",
    ],
    ids=["bare", "process", "compose"],
)
def test_a_milestone_tells_its_stage(prefix, words, stage):
    assert stage_of(prefix + words) is stage


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ERROR 11-21 10:09:36 [x.py:1] Using max model len 3",
        "INFO 11-21 10:09:36 logger.py:36] Received request 1: prompt: 'Using max model len 3'",
        '  File "x.py", line 3, in load_model',
    ],
)
def test_other_lines_are_no_milestone(line):
    assert stage_of(line) is None
