"""The fit planner against a real vLLM: its own functions, its own starts, and the log line it writes."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from gateway.sizing.fit import fit, sizing
from gateway.sizing.kvcaches import Dtype, Heads, Latent, State
from gateway.sizing.kvlayout import lay_out, split_layers
from gateway.sizing.modeldefaults import DEFAULTS
from gateway.sizing.modelfolder import read_model
from gateway.sizing.modelshape import ModelShape
from gateway.sizing.serveplan import GIB, Device, KvDtype, Plan
from tests import modelconfigs
from tests.e2e.support import MODELS, need
from tests.e2e.tiny_models import TINY, write
from tests.e2e.vllms import in_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ESTIMATED = re.compile(r"estimated maximum model length is (\d+)")


# --- blocks, groups, capacity: vLLM's functions on caches as we read them --------------------------

LENGTHS = {2048: 3, 32768: 7}  # a context window, and about how many requests of it fit
PLANS = [
    {},
    {"tp": 2},
    {"pp": 3},
    {"tp": 4, "pp": 2},
    {"kv_dtype": KvDtype.FP8},
    {"prefix_caching": False},
    {"max_num_batched_tokens": 512},
]


def cache_of(cache, layout):
    how = layout.sizing
    if isinstance(cache, State):
        attention = [g.pages[0] for g in layout.groups if not isinstance(g.cache, State)]
        mode = "align" if how.prefix_caching else "none"
        size = how.state_bytes(cache)
        return {"kind": "state", "bytes": size, "padded": max(attention, default=None), "mode": mode,
                "checkpoints": cache.checkpoints}  # fmt: skip
    if isinstance(cache, Latent):
        index = cache.fixed_bytes is not None
        number = 1 if index else how.kv_bytes
        return {
            "kind": "latent",
            "dim": cache.fixed_bytes if index else cache.dim,
            "number_bytes": number,
        }
    assert isinstance(cache, Heads)
    return {"kind": "heads", "kv_heads": max(1, cache.kv_heads // how.tp), "key_dim": cache.key_dim,
            "value_dim": cache.value_dim, "window": cache.window, "number_bytes": how.kv_bytes}  # fmt: skip


def cases():
    for name, config in modelconfigs.ALL.items():
        model = ModelShape.of_config(config, 0)
        for told in PLANS:
            plan = Plan(80 * GIB, **told)
            stages = split_layers(len(model.layers), plan.pp)
            for length, requests in LENGTHS.items():
                layout = lay_out(model.layers, sizing(model, plan, length), stages)
                if (
                    any(isinstance(c, Latent) and c.sparse for layer in model.layers for c in layer)
                    and layout.sizing.kv_bytes == 1
                ):
                    continue  # a record of its own, which the spec does not reckon
                for full in (requests, 0.6):
                    cost = [layout.block_bytes(stage) for stage in range(plan.pp)]
                    memory = [int(full * layout.blocks(length) * each) + 12345 for each in cost]
                    case = {
                        "length": length, "block": layout.sizing.block_tokens, "memory": memory,
                        "mode": "align" if layout.sizing.prefix_caching else "none",
                        "in_flight": layout.sizing.in_flight_tokens,
                        "stages": [[stage.start, stage.stop] for stage in stages],
                        "layers": [[cache_of(cache, layout) for cache in layer] for layer in model.layers],
                    }  # fmt: skip
                    yield f"{name} {told} {length} x{full}", layout, case


def test_blocks_and_capacity_are_those_of_vllms_own_functions():
    told = list(cases())
    answers = in_vllm("vllm_kv.py", [case for _, _, case in told])
    wrong = []
    for (name, layout, case), real in zip(told, answers, strict=True):
        length, memory = case["length"], case["memory"]
        if "error" in real:
            found = ESTIMATED.search(real["error"])
            ours = {"fits": layout.fits(length, memory), "longest": layout.longest(length, memory)}
            theirs = {"fits": False, "longest": int(found[1]) if found else 0}
            if len(case["stages"]) > 1:  # vLLM names the limit of the first stage that is short
                ours["longest"] = theirs["longest"]
        else:
            blocks = layout.pool_blocks(memory)
            concurrency = blocks / layout.blocks(length)
            ours = {"fits": layout.fits(length, memory), "blocks": blocks, "groups": len(layout.groups),
                    "concurrency": concurrency, "tokens": int(concurrency * length)}  # fmt: skip
            theirs = {"fits": True, **real}
        if ours != theirs:
            wrong.append((name, ours, theirs))
    assert len(told) > 300
    assert not wrong, f"{len(wrong)} of {len(told)}: {wrong[:5]}"


# --- config.json: what vLLM reads of it ----------------------------------------------------------

RECURRENT = (
    "LFM2_12B",
    "FALCON_H1_15B",
    "QWEN3_NEXT_80B",
    "JAMBA_V01",
    "GRANITE_4_TINY",
    "NEMOTRON_H_8B",
    "KIMI_LINEAR_48B",
    "MAMBA_28B",
)
SLIDES, SEES_ALL = "sliding_attention", ("full_attention", "chunked_attention")


def ours(model):
    caches = [cache for layer in model.layers for cache in layer]
    state = next((c for c in caches if isinstance(c, State)), None)
    latent = next((c for c in caches if isinstance(c, Latent)), None)
    attends = any(not isinstance(c, State) for c in caches)
    return {
        "longest": model.longest, "heads": model.heads, "layers": len(model.layers), "hidden": model.hidden,
        "vocab": model.vocab, "experts": model.experts, "mla": latent is not None,
        "kv_heads": model.kv_heads,
        "head_size": latent.dim if latent else model.head_dim if attends else 0,
        "state_bytes": state.request_bytes(1, model.dtype) if state else None,
    }  # fmt: skip


def test_a_config_is_read_as_vllm_reads_it(tmp_path):
    folders = {}
    for name, config in modelconfigs.ALL.items():
        folders[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    wrong = {}
    asked = {kind: list(values) for kind, values in DEFAULTS.items()}
    told = in_vllm("vllm_models.py", {"all": folders, "recurrent": RECURRENT, "defaults": asked})
    unset = {"use_sliding_window", "sliding_window"}  # transformers clears the one for the other
    for kind, values in told["defaults"].items():
        for field in values.keys() - (unset if kind.startswith("qwen") else set()):
            assert (kind, field, DEFAULTS[kind][field]) == (kind, field, values[field])
    for name, real in told["models"].items():
        model = ModelShape.of_config(modelconfigs.ALL[name], 0)
        window, kinds = real.pop("window"), real.pop("kinds")
        if not model.experts:
            del real["experts"]  # transformers has a default of 8 where a config tells none
        for number, kind in enumerate(kinds or []):
            windows = {c.window for c in model.layers[number] if isinstance(c, Heads)}
            if kind in SEES_ALL and windows not in ({None}, set()):
                wrong[name, number] = (kind, windows)
            if kind == SLIDES and windows != {window}:
                wrong[name, number] = (kind, windows)
        found = ours(model)
        expected = {"state_bytes": None, **real}
        if differ := [key for key, value in expected.items() if found[key] != value]:
            wrong[name] = {key: (found[key], expected[key]) for key in differ}
    assert not wrong


# --- starts: the line that vLLM logs ---------------------------------------------------------------

CAPACITY = re.compile(
    r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
)
START = [
    "--enforce-eager",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "512",
    "--mamba-ssm-cache-dtype",
    "float32",
    "--dtype",
    "bfloat16",
]


def capacity_of(log):
    found = CAPACITY.search(log)
    if found is None:
        return None
    return int(found[1].replace(",", "")), int(found[2].replace(",", "")), found[3]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """What vLLM logs of each start on the CPU, by name: the models of every layout, and the tiny one twice."""
    folder, tiny = tmp_path_factory.mktemp("models"), need(MODELS / "tiny", "the tiny model")
    asked = {
        name: ["--model", str(write(folder, name, pathlib.Path(tiny))), "--load-format", "dummy"]
        for name in TINY
    }
    asked["weights"] = ["--model", tiny, "--max-model-len", "1000"]
    asked["too long"] = ["--model", tiny, "--num-gpu-blocks-override", "8"]
    logs = in_vllm("vllm_starts.py", [[*each, *START] for each in asked.values()])
    return dict(zip(asked, logs, strict=True))


def cpu_plan(**more):
    return Plan(0, device=Device.CPU, kv_cache_memory_bytes=GIB, max_num_seqs=8, max_num_batched_tokens=512,
                dtype=Dtype.BFLOAT16, state_dtype=Dtype.FLOAT32, **more)  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_the_capacity_that_a_start_logs_is_the_planned_one(name, started):
    amx = "amx_tile" in pathlib.Path("/proc/cpuinfo").read_text()  # MLA has larger blocks with it
    block = {"block_size": 128} if name == "deepseek" and amx else {}
    found = fit(ModelShape.of_config(TINY[name], 0), cpu_plan(**block))
    planned = (found.kv_tokens, found.max_model_len, f"{found.concurrency:.2f}")
    assert capacity_of(started[name]) == planned, started[name][-3000:]


def test_a_model_folder_with_weights_starts_as_planned(started):
    found = fit(read_model(MODELS / "tiny"), cpu_plan(max_model_len=1000))
    planned = (found.kv_tokens, 1000, f"{found.concurrency:.2f}")
    assert capacity_of(started["weights"]) == planned, started["weights"][-3000:]


def test_a_start_that_fails_names_the_length_that_was_planned(started):
    model = read_model(MODELS / "tiny")
    memory = 8 * 128 * fit(model, cpu_plan()).token_bytes
    found = fit(model, Plan(0, device=Device.CPU, kv_cache_memory_bytes=memory, max_num_seqs=8,
                            max_num_batched_tokens=512, dtype=Dtype.BFLOAT16))  # fmt: skip
    assert not found.fits
    assert capacity_of(started["too long"]) is None
    assert int(ESTIMATED.search(started["too long"])[1]) == found.longest == 896
