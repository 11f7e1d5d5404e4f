"""Run by the Python of a vLLM: lays out KV caches with vLLM's own functions, and prints the result.

Standard input: a list of cases, each with the caches of its layers and the memory of each stage.
Standard output, last line: what vLLM makes of them.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_capacity,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ModuleNotFoundError:  # vLLM before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

BYTES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def spec(cache, block):
    if cache["kind"] == "state":
        return MambaSpec(
            block_size=block,
            shapes=((cache["bytes"],),),
            dtypes=(torch.uint8,),
            page_size_padded=cache["padded"],
            mamba_cache_mode=cache["mode"],
            num_prefill_checkpoint_blocks=cache["checkpoints"],
        )
    dtype = BYTES[cache["number_bytes"]]
    if cache["kind"] == "latent":
        return MLAAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=cache["dim"], dtype=dtype
        )
    same = {
        "block_size": block,
        "num_kv_heads": cache["kv_heads"],
        "head_size": cache["key_dim"],
        "head_size_v": cache["value_dim"],
        "dtype": dtype,
    }
    if cache["window"]:
        return SlidingWindowSpec(**same, sliding_window=cache["window"])
    return FullAttentionSpec(**same)


def config(case):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=case["length"], original_max_model_len=case["length"], hf_config=None
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            mamba_cache_mode=case["mode"],
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=case["in_flight"],
        num_prefill_lookahead_tokens=0,
    )


def laid_out(case):
    stages = [
        {
            f"layers.{number}.{place}": spec(cache, case["block"])
            for number in range(first, last)
            for place, cache in enumerate(case["layers"][number])
        }
        for first, last in case["stages"]
    ]
    how = config(case)
    groups = [get_global_kv_cache_groups(how, stages)] if get_global_kv_cache_groups else []
    try:
        found = get_kv_cache_configs(how, stages, case["memory"], *groups)
    except ValueError as error:
        return {"error": str(error)}
    tokens, concurrency = get_kv_cache_capacity(how, found[0])
    assert concurrency == get_max_concurrency_for_kv_cache_config(how, found[0])
    return {
        "blocks": found[0].num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": len(found[0].kv_cache_groups),
    }


print(json.dumps([laid_out(case) for case in json.load(sys.stdin)]))
