"""The fit planner against a real vLLM: its own functions, its own starts, and the log line it writes."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest

from gateway.control.fit import sizing
from gateway.control.kvcaches import Heads, Latent, State
from gateway.control.kvlayout import lay_out, split_layers
from gateway.control.modelshape import ModelShape
from gateway.control.serveplan import GIB, KvDtype, Plan
from tests import modelconfigs
from tests.e2e.support import CACHE, need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HERE = pathlib.Path(__file__).parent
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PATH": "/usr/bin:/bin",
}
ESTIMATED = re.compile(r"estimated maximum model length is (\d+)")


def in_vllm(script, told):
    """Run a script of ours with the Python of the vLLM; return the JSON of its last line."""
    python = need(CACHE / "vllm/bin/python", "vLLM")
    ran = subprocess.run(
        [python, str(HERE / script)], input=json.dumps(told), capture_output=True, text=True,
        timeout=600, env={**ENV, "HOME": str(pathlib.Path.home())}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


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
        size = cache.request_bytes(how.tp, how.dtype)
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
