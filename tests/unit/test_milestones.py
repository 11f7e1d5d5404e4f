from pathlib import Path

import pytest

from gateway.vllmlog.milestones import Milestone, Stage, stage_of

LOGS = Path(__file__).parents[1] / "data" / "logs"


def told(name):
    lines = (LOGS / f"{name}.txt").read_text().split("\n")
    return [found for line in lines if (found := stage_of(line)) is not None]


def test_a_real_start_passes_its_stages_in_order():
    stages = [found.stage for found in told("healthy")]
    assert stages == sorted(stages)
    assert set(stages) == set(Stage) - {Stage.PROFILING, Stage.GRAPHS}  # --enforce-eager on a CPU


def test_a_real_start_tells_its_numbers():
    found = told("healthy")
    assert [each.version for each in found if each.version] == ["0.32.0", "0.32.0"]
    assert 2048 in [each.max_model_len for each in found]
    assert 1.0 in [each.loaded_ratio for each in found]
    cache = next(each for each in found if each.kv_cache_tokens)
    assert (cache.kv_cache_tokens, cache.max_concurrency) == (1_048_576, 512.0)
    assert any(each.engine_s for each in found)


def test_a_failed_start_ends_at_the_stage_that_it_reached():
    assert max(each.stage for each in told("port_taken")) <= Stage.CONFIG
    assert max(each.stage for each in told("weights_truncated")) is Stage.LOADING_WEIGHTS
    assert max(each.stage for each in told("lora_rank")) is Stage.WARM_UP
    assert told("bad_flag") == []


@pytest.mark.parametrize(
    ("words", "milestone"),
    [
        ("vLLM API server version 0.10.2", Milestone(Stage.LAUNCHED, version="0.10.2")),
        ("Using max model len 131072", Milestone(Stage.CONFIG, max_model_len=131072)),
        (
            "Initializing an LLM engine (v0.5.4) with config: model='m'",
            Milestone(Stage.DISTRIBUTED_INIT, version="0.5.4"),
        ),
        ("vLLM is using nccl==2.27.5", Milestone(Stage.DISTRIBUTED_INIT)),
        (
            "Model loading took 5.1250 GiB and 12.500000 seconds",
            Milestone(Stage.LOADING_WEIGHTS, weights_gib=5.125, weights_s=12.5),
        ),
        (
            "Model loading took 10.25 GiB memory and 33.5 seconds",
            Milestone(Stage.LOADING_WEIGHTS, weights_gib=10.25, weights_s=33.5),
        ),
        (
            "Loading model weights took 6.5432 GB",
            Milestone(Stage.LOADING_WEIGHTS, weights_gib=6.5432),
        ),
        (
            "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01,  1.94it/s]",
            Milestone(Stage.LOADING_WEIGHTS, loaded_ratio=0.25),
        ),
        ("torch.compile takes 8.25 s in total", Milestone(Stage.PROFILING, compile_s=8.25)),
        ("Available KV cache memory: -2.50 GiB", Milestone(Stage.KV_CACHE, kv_cache_gib=-2.5)),
        ("GPU KV cache size: 123,456 tokens", Milestone(Stage.KV_CACHE, kv_cache_tokens=123456)),
        (
            "Maximum concurrency for 131,072 tokens per request: 1.75x",
            Milestone(Stage.KV_CACHE, max_concurrency=1.75),
        ),
        ("# GPU blocks: 1000, # CPU blocks: 500", Milestone(Stage.KV_CACHE)),
        (
            "Graph capturing finished in 12 secs, took 0.75 GiB",
            Milestone(Stage.GRAPHS, graphs_s=12.0, graphs_gib=0.75),
        ),
        ("Graph capturing finished in 21 secs.", Milestone(Stage.GRAPHS, graphs_s=21.0)),
        (
            "init engine (profile, create kv cache, warmup model) took 45.50 seconds",
            Milestone(Stage.WARM_UP, engine_s=45.5),
        ),
        ("Starting vLLM API server 0 on http://0.0.0.0:8000", Milestone(Stage.WARM_UP)),
        ("Application startup complete.", Milestone(Stage.SERVING)),
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
def test_a_milestone_is_read_with_its_numbers(prefix, words, milestone):
    assert stage_of(prefix + words) == milestone


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
