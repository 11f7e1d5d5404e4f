"""The fit planner's arithmetic: numbers reckoned by hand, and rules of vLLM in small."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from gateway.config.flags import in_force, whole_number
from gateway.sizing.fit import Verdict, fit, sizing
from gateway.sizing.fitways import command, ways
from gateway.sizing.kvcaches import Dtype, Heads, State
from gateway.sizing.kvlayout import Sizing, lay_out, split_layers
from gateway.sizing.modelconfig import ModelShapeError
from gateway.sizing.modelshape import ModelShape, Weights
from gateway.sizing.serveplan import (
    AUTO_LEN,
    GIB,
    Device,
    KvDtype,
    Plan,
    PlanError,
    plan_of_args,
)
from tests import modelconfigs as models

KIB = 1024


def shape(config, weights_bytes=16 * GIB):
    return ModelShape.of_config(config, weights_bytes)


def cached(config, **plan):
    return fit(shape(config), Plan(80 * GIB, **plan))


# --- bytes of a token -----------------------------------------------------------------------------

TOKEN_BYTES = {  # by hand beside each model in tests/modelconfigs.py; beyond the window, if any
    "LLAMA_3_8B": (128 * KIB, 128 * KIB),
    "QWEN3_8B": (144 * KIB, 144 * KIB),
    "QWEN3_06B": (112 * KIB, 112 * KIB),
    "QWEN25_VL_7B": (56 * KIB, 56 * KIB),
    "MISTRAL_7B_V01": (128 * KIB, 0),
    "PHI_3_MINI_4K": (384 * KIB, 0),
    "GEMMA_2_9B": (336 * KIB, 168 * KIB),
    "GEMMA_3_4B": (136 * KIB, 20 * KIB),
    "LLAVA_15_7B": (512 * KIB, 512 * KIB),
    "GPT_OSS_20B": (48 * KIB, 24 * KIB),
    "DEEPSEEK_V2_LITE": (27 * 576 * 2, 27 * 576 * 2),
    "DEEPSEEK_V3": (61 * 576 * 2, 61 * 576 * 2),
    "DEEPSEEK_V32": (61 * (1152 + 132), 61 * (1152 + 132)),
    "QWEN3_NEXT_80B": (24 * KIB, 24 * KIB),
    "JAMBA_V01": (16 * KIB, 16 * KIB),
    "GRANITE_4_TINY": (8 * KIB, 8 * KIB),
    "FALCON_7B": (8 * KIB, 8 * KIB),
    "LLAMA_4_SCOUT": (192 * KIB, 192 * KIB),
    "NEMOTRON_H_8B": (16 * KIB, 16 * KIB),
    "KIMI_LINEAR_48B": (7 * 576 * 2, 7 * 576 * 2),
    "MAMBA_28B": (0, 0),
    "LFM2_12B": (12 * KIB, 12 * KIB),
    "FALCON_H1_15B": (24 * KIB, 24 * KIB),
}
STATE_BYTES = {
    "QWEN3_NEXT_80B": 36 * 1_097_728,
    "JAMBA_V01": 28 * 311_296,
    "GRANITE_4_TINY": 36 * (3 * (3072 + 256) * 2 + 48 * 64 * 128 * 2),
    "NEMOTRON_H_8B": 24 * (3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 4),
    "KIMI_LINEAR_48B": 20 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4),
    "LFM2_12B": 10 * 8 * KIB,
    "FALCON_H1_15B": 24 * 1_594_368,
    "MAMBA_28B": 64 * (3 * 5120 * 2 + 5120 * 16 * 2),
}


def test_every_model_has_its_numbers():
    assert TOKEN_BYTES.keys() == models.ALL.keys()


@pytest.mark.parametrize("name", TOKEN_BYTES)
def test_a_token_takes_what_is_reckoned_by_hand(name):
    found = cached(models.ALL[name])
    assert (found.token_bytes, found.far_token_bytes) == TOKEN_BYTES[name]
    assert found.state_bytes == STATE_BYTES.get(name, 0)


def test_fp8_halves_a_token_and_float32_doubles_it():
    assert cached(models.LLAMA_3_8B, kv_dtype=KvDtype.FP8).token_bytes == 64 * KIB
    assert cached(models.LLAMA_3_8B, dtype=Dtype.FLOAT32).token_bytes == 256 * KIB


def test_an_fp8_cache_of_sparse_mla_has_a_record_of_its_own():
    found = cached(models.DEEPSEEK_V32, kv_dtype=KvDtype.FP8)
    assert found.token_bytes == 61 * (656 + 132)


def test_a_checkpoint_may_ask_for_an_fp8_cache():
    for scheme in (
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quantization": {"kv_cache_quant_algo": "FP8"}},
    ):
        config = {**models.LLAMA_3_8B, "quantization_config": {"quant_method": "x", **scheme}}
        assert cached(config).token_bytes == 64 * KIB
        explicit = cached(config, kv_dtype=KvDtype.BFLOAT16)
        assert explicit.token_bytes == 128 * KIB


@pytest.mark.parametrize(("tp", "kib"), [(1, 128), (2, 64), (4, 32), (8, 16), (16, 16)])
def test_heads_are_divided_among_gpus_until_each_has_one(tp, kib):
    assert cached(models.LLAMA_3_8B, tp=tp).token_bytes == kib * KIB


def test_the_latent_of_mla_is_whole_on_every_gpu():
    assert cached(models.DEEPSEEK_V3, tp=8).token_bytes == cached(models.DEEPSEEK_V3).token_bytes


def test_a_pipeline_stage_has_the_caches_of_its_layers():
    assert cached(models.LLAMA_3_8B, pp=4).token_bytes == 32 * KIB


def test_layers_that_say_each_what_they_are_count_each_for_itself():
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"n_heads_in_group": 16}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {"replace_with_linear": True}},
    ]
    config = {**models.LLAMA_3_8B, "num_hidden_layers": 4, "block_configs": blocks}
    assert cached(config).token_bytes == (4 + 2) * 2 * 128 * 2


def test_layers_that_read_the_caches_of_others_have_none():
    config = {**models.LLAMA_3_8B, "num_kv_shared_layers": 12}
    assert cached(config).token_bytes == 20 * 4 * KIB


def test_shared_attention_beside_a_state_counts_both():
    kinds = ["mamba", "hybrid"] * 2
    config = {"model_type": "zamba2", "hidden_size": 256, "num_hidden_layers": 4, "layers_block_type": kinds,
              "num_attention_heads": 4, "attention_head_dim": 128, "mamba_d_state": 64, "mamba_d_conv": 4,
              "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 64}  # fmt: skip
    found = cached(config)
    assert found.token_bytes == 2 * 2 * 4 * 128 * 2
    assert found.state_bytes == 4 * (3 * (512 + 128) * 2 + 8 * 64 * 64 * 2)


# --- blocks and capacity --------------------------------------------------------------------------


def test_capacity_is_what_the_memory_holds():
    # 1 GiB of 128 KiB a token is 8192 tokens: 512 blocks of 16, one request of the whole context...
    found = cached(models.LLAMA_3_8B, kv_cache_memory_bytes=GIB)
    assert (found.blocks, found.kv_tokens, found.concurrency) == (512, 8192, 1.0)
    # ... and yet it does not start, for the block that vLLM holds back.
    assert found.verdict is Verdict.TOO_LARGE
    assert found.longest == 8176
    assert cached(models.LLAMA_3_8B, kv_cache_memory_bytes=GIB + 2 * KIB * KIB).fits


def test_a_sliding_window_takes_its_window_and_what_is_in_flight():
    # 4095 + 3 batches (2 stages and one ahead) of 512 tokens: 352 blocks, one more for the edge.
    plan = Plan(80 * GIB, pp=2, max_num_batched_tokens=512, kv_cache_memory_bytes=4 * GIB)
    found = fit(shape(models.MISTRAL_7B_V01), plan)
    assert found.blocks == 4 * GIB // (16 * 64 * KIB)
    assert found.concurrency == found.blocks / 353


def test_a_phi_3_start_is_told_as_its_log_did():
    # vLLM 0.19 logged 13.06 GiB for the cache and 8.67x for 4,096 tokens.
    found = cached(models.PHI_3_MINI_4K, kv_cache_memory_bytes=int(13.06 * GIB), tp=1)
    assert found.concurrency == pytest.approx(8.67, abs=0.005)


def test_qwen3_next_gets_the_block_size_that_vllm_logs():
    # "Setting attention block size to 544 tokens": 1,097,728 bytes of state / 2048 bytes a token.
    assert cached(models.QWEN3_NEXT_80B).block_tokens == 544


def test_a_recurrent_request_takes_blocks_of_state_whatever_its_length():
    model = shape(models.QWEN3_NEXT_80B)
    for caching, each in ((True, 2), (False, 1)):
        plan = Plan(80 * GIB, prefix_caching=caching)
        layout = lay_out(model.layers, sizing(model, plan, 262144), [range(48)])
        assert len(layout.groups) == 4  # 12 layers of attention, 3 x 12 of state
        assert layout.blocks(262144) == -(-262144 // 544) + 3 * each


def test_a_model_without_attention_is_limited_by_its_states_alone():
    found = cached(models.MAMBA_28B)
    assert found.kv_tokens == 0
    assert found.concurrency == found.kv_memory_bytes // found.state_bytes
    assert found.fits


def test_kinds_of_nearly_as_many_layers_are_padded_not_split():
    caches = [(Heads(8, 64, 64, None if number < 8 else 128),) for number in range(17)]
    layout = lay_out(caches, Sizing(), [range(17)])
    assert [len(group.layers) for group in layout.groups] == [8, 9]
    assert layout.block_bytes(0) == 9 * 16 * 2 * 8 * 64 * 2


def test_smaller_heads_get_longer_blocks_so_that_all_blocks_cost_the_same():
    caches = [(Heads(8, 128, 128),), (Heads(4, 128, 128, 64),), (Heads(3, 100, 100, 32),)]
    layout = lay_out(caches, Sizing(), [range(3)])
    assert [group.block_tokens for group in layout.groups] == [16, 32, 16]
    assert {group.pages for group in layout.groups} == {(16 * 8 * 256 * 2,)}


def test_groups_of_states_that_gpus_do_not_divide_are_extended():
    state = State(1024, 3, 4096, groups=1, group_channels=256)
    one, four = (state.request_bytes(tp, Dtype.BFLOAT16) for tp in (1, 4))
    assert one == (1024 + 256) * 3 * 2 + 4096 * 2
    assert four == (1024 + 4 * 256) // 4 * 3 * 2 + 1024 * 2


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(32, 2, [16, 16]), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (6, 4, [1, 2, 2, 1])],
)
def test_layers_that_do_not_divide_go_to_the_middle_stages(layers, stages, counts):
    assert [len(stage) for stage in split_layers(layers, stages)] == counts


# --- the GPU --------------------------------------------------------------------------------------


def test_what_is_left_of_the_budget_is_the_kv_cache():
    found = fit(shape(models.LLAMA_3_8B, 15 * GIB), Plan(24 * GIB))
    assert found.budget_bytes == pytest.approx(24 * GIB * 0.92, abs=1)
    assert found.held.weights_bytes == pytest.approx(15 * GIB, abs=64)
    assert found.kv_memory_bytes == found.budget_bytes - found.held.total_bytes
    assert found.verdict is Verdict.FITS
    assert all(each.basis for each in found.held.estimates)


def test_weights_of_a_stage_are_its_layers_and_the_ends():
    weights = Weights(100, embedding_bytes=10, head_bytes=10, layer_bytes=(10, 20, 30, 20))
    assert weights.stage_bytes(range(4), 4) == 100
    assert weights.stage_bytes(range(2), 4) == 40
    assert weights.stage_bytes(range(2, 4), 4) == 60


def test_a_tied_embedding_is_held_twice_by_a_pipeline():
    weights = Weights(50, embedding_bytes=10, layer_bytes=(20, 20))
    assert weights.stage_bytes(range(2), 2) == 50
    assert [weights.stage_bytes(range(n, n + 1), 2) for n in (0, 1)] == [30, 30]


def test_float_weights_are_converted_and_quantised_ones_are_not():
    assert Weights(100, stored=Dtype.FLOAT32).loaded(Dtype.BFLOAT16).total_bytes == 50
    assert Weights(100, stored=Dtype.FLOAT16).loaded(Dtype.BFLOAT16).total_bytes == 100
    assert Weights(100).loaded(Dtype.FLOAT32).total_bytes == 100


def test_more_gpus_than_heads_hold_the_key_and_value_weights_more_than_once():
    even, more = (cached(models.FALCON_7B, tp=tp).held.weights_bytes for tp in (1, 71))
    replicated = 32 * 2 * 4544 * 64 * 2 * (1 - 1 / 71)
    assert more == pytest.approx(even / 71 + replicated, rel=1e-6)


def test_lora_slots_are_counted():
    # Per layer and rank: q 4096+4096, k and v 4096+1024, o 4096+4096, gate and up 4096+14336,
    # down 14336+4096; 32 layers, rank 64, 2 bytes, 4 slots.
    found = cached(models.LLAMA_3_8B, max_loras=4, max_lora_rank=64)
    assert found.held.lora_bytes == 4 * 64 * 2 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert cached(models.LLAMA_3_8B).held.lora_bytes == 0


def test_a_plan_that_leaves_less_room_than_doubt_is_called_tight():
    model = shape(models.LLAMA_3_8B, 15 * GIB)
    exact = fit(model, Plan(24 * GIB))
    plan = Plan(24 * GIB, kv_dtype=KvDtype.AUTO, max_model_len=8192)
    for spare, verdict in ((0, Verdict.TIGHT), (-1, Verdict.TOO_LARGE), (GIB, Verdict.FITS)):
        need = exact.held.total_bytes + exact.needed_bytes + spare
        assert (
            fit(model, replace(plan, gpu_memory_bytes=need, gpu_memory_utilization=1)).verdict
            is verdict
        )


def test_a_fixed_kv_cache_must_fit_beside_the_weights():
    model = shape(models.LLAMA_3_8B, 15 * GIB)
    assert fit(model, Plan(24 * GIB, kv_cache_memory_bytes=6 * GIB)).fits
    assert fit(model, Plan(24 * GIB, kv_cache_memory_bytes=9 * GIB)).verdict is Verdict.TOO_LARGE


def test_a_number_of_blocks_by_order_decides_whatever_the_memory():
    """A block of 16 tokens; one is held back, and one request must fit (`get_kv_cache_configs`)."""
    enough = cached(models.LLAMA_3_8B, max_model_len=8192, num_gpu_blocks=513)
    short = cached(models.LLAMA_3_8B, max_model_len=8192, num_gpu_blocks=512)
    assert (enough.verdict, enough.kv_tokens) == (Verdict.FITS, 513 * 16)
    assert (short.verdict, short.longest) == (Verdict.TOO_LARGE, 8176)
    assert {way.flags for way in ways(short)} >= {(), ("--max-model-len", "8176")}
    crowded = Plan(24 * GIB, num_gpu_blocks=5000)  # 10 GB of cache beside 16 GiB of weights
    assert fit(shape(models.LLAMA_3_8B), crowded).verdict is Verdict.TOO_LARGE


def test_the_environment_of_a_cpu_backend_says_how_large_its_cache_is():
    plan = plan_of_args({"kv-cache-memory-bytes": "1G"}, env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert (plan.device, plan.kv_cache_memory_bytes) == (Device.CPU, 2 * GIB)
    bound = plan_of_args({}, env={"VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert (bound.device, bound.kv_cache_memory_bytes) == (Device.CPU, None)
    assert plan_of_args({}, env={"VLLM_LOGGING_LEVEL": "DEBUG"}).device is Device.GPU


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"tp": 3}, "32 attention heads"),
        ({"tp": 6}, "attention heads"),
        ({"pp": 33}, "32 layers"),
        ({"max_model_len": 9000}, "more than the model's own 8192"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "less than max-num-seqs 512"),
    ],
)
def test_what_vllm_refuses_is_said_before_memory_is_looked_at(plan, said):
    found = cached(models.LLAMA_3_8B, **plan)
    assert found.verdict is Verdict.INVALID
    assert said in " ".join(found.problems)
    assert not found.fits
    assert command(found, "m") == ()
    assert ways(found) == []


def test_key_value_heads_must_divide_too():
    config = {**models.LLAMA_3_8B, "num_attention_heads": 24, "num_key_value_heads": 6}
    assert "6 key/value heads" in cached(config, tp=4).problems[0]


def test_auto_takes_what_fits():
    model = shape(models.QWEN3_8B)
    found = fit(model, Plan(24 * GIB, max_model_len=AUTO_LEN))
    assert found.fits
    assert found.max_model_len // 16 * 16 == found.longest < model.longest
    whole = fit(model, Plan(80 * GIB, max_model_len=AUTO_LEN))
    assert whole.max_model_len == whole.longest == model.longest


# --- what would fit -------------------------------------------------------------------------------


def test_each_way_out_is_reckoned_and_really_fits():
    model = shape({**models.QWEN3_8B, "max_position_embeddings": 49152})
    short = fit(model, Plan(24 * GIB))
    assert short.verdict is Verdict.TOO_LARGE
    found = ways(short)
    flags = {way.flags[0] if way.flags else "weights" for way in found}
    assert flags >= {
        "--max-model-len",
        "--kv-cache-dtype",
        "--tensor-parallel-size",
        "--quantization",
    }
    assert all(way.result.fits for way in found)
    longest = [way for way in found if way.flags[:1] == ("--max-model-len",)]
    assert [way.result.verdict for way in longest] == [Verdict.FITS, Verdict.TIGHT]
    beyond = fit(model, Plan(24 * GIB, max_model_len=short.longest + short.block_tokens))
    assert not beyond.fits


def test_a_little_more_of_the_gpu_is_offered_up_to_95_percent():
    model = shape(models.LLAMA_3_8B)
    plan = Plan(24 * GIB, gpu_memory_utilization=0.70)
    raised = [way for way in ways(fit(model, plan)) if "--gpu-memory-utilization" in way.flags]
    assert len(raised) == 1
    value = float(raised[0].flags[1])
    assert 0.70 < value <= 0.95
    assert not fit(model, replace(plan, gpu_memory_utilization=value - 0.01)).fits


def test_when_no_single_change_helps_two_are_offered():
    found = ways(
        fit(shape(models.DEEPSEEK_V3 | {"quantization_config": None}, 1340 * GIB), Plan(80 * GIB))
    )
    assert [(way.change, way.flags) for way in found] == [
        ("weights of 8 bits, 16 GPUs", ("--tensor-parallel-size", "16")),
        ("weights of 4 bits, 8 GPUs", ("--tensor-parallel-size", "8")),
    ]


def test_ways_that_are_taken_already_are_not_offered():
    config = {**models.QWEN3_8B, "quantization_config": {"quant_method": "awq"}}
    plan = Plan(
        8 * GIB, kv_dtype=KvDtype.FP8, enforce_eager=True, max_num_seqs=8, max_model_len=40960
    )
    found = ways(fit(shape(config, 5 * GIB), plan))
    assert {way.flags[0] for way in found} == {"--max-model-len", "--tensor-parallel-size"}


def test_a_model_that_fits_has_no_ways():
    assert ways(cached(models.LLAMA_3_8B)) == []


def test_the_command_line_is_what_was_planned():
    plan = Plan(80 * GIB, tp=2, pp=2, kv_dtype=KvDtype.FP8, max_loras=2, enforce_eager=True,
                prefix_caching=False, max_num_seqs=64, dtype=Dtype.FLOAT16)  # fmt: skip
    assert command(fit(shape(models.LLAMA_3_8B), plan), "my model") == (
        *("vllm", "serve", "my model", "--max-model-len", "8192"),
        *("--gpu-memory-utilization", "0.92", "--tensor-parallel-size", "2"),
        *("--pipeline-parallel-size", "2", "--dtype", "float16", "--kv-cache-dtype", "fp8"),
        *("--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"),
    )


def test_the_command_line_of_what_does_not_fit_has_the_window_that_surely_does():
    short = fit(shape({**models.QWEN3_8B, "max_position_embeddings": 49152}), Plan(24 * GIB))
    argv = command(short, "m")
    assert argv[4] == str(short.surely_longest)
    assert short.surely_longest < short.longest
    shorter = fit(short.model, Plan(24 * GIB, max_model_len=short.surely_longest))
    assert shorter.verdict is Verdict.FITS


def test_there_is_no_command_line_where_nothing_fits():
    assert command(fit(shape(models.LLAMA_3_8B), Plan(8 * GIB)), "m") == ()


# --- flags ----------------------------------------------------------------------------------------


def test_flags_are_read_as_vllm_reads_them():
    plan = plan_of_args(
        {
            "max-model-len": "32k",
            "tensor-parallel-size": "2",
            "gpu-memory-utilization": "0.85",
            "kv-cache-dtype": "fp8_e4m3",
            "kv-cache-memory-bytes": "4G",
            "max-num-seqs": 64,
            "dtype": "half",
            "block-size": 32,
            "enforce-eager": True,
            "enable-lora": "",
            "max-lora-rank": 64,
            "served-model-name": "x",
        },
        gpus=4,
        gpu_memory_bytes=80 * GIB,
    )
    assert plan == Plan(
        80 * GIB, tp=2, max_model_len=32000, gpu_memory_utilization=0.85, kv_dtype=KvDtype.FP8,
        kv_cache_memory_bytes=4 * GIB, max_num_seqs=64, dtype=Dtype.FLOAT16, block_size=32,
        enforce_eager=True, max_loras=1, max_lora_rank=64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "caches"),
    [
        ((), True),
        (("--enable-prefix-caching",), True),
        (("--no-enable-prefix-caching",), False),
        (("--disable-prefix-caching",), False),  # since vLLM 0.33
        (("--no-disable-prefix-caching",), True),
    ],
)
def test_prefix_caching_is_switched_off_in_either_form(words, caches):
    assert plan_of_args(in_force(["vllm", "serve", "m", *words])).prefix_caching is caches


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (("-sc", '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}'), False),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'), False),
        (("--speculative-config.model", "d"), False),
        (("--spec-model", "d", "--spec-tokens", "3"), False),
        (("--speculative-config", "torn"), False),
        (("-sc", '{"method": "ngram", "prompt_lookup_max": 4}'), True),
        (("--spec-method", "suffix"), True),
        (("--speculative-config.method", "ngram_gpu"), True),
    ],
)
def test_what_a_draft_model_takes_of_a_gpu_is_not_known(words, known):
    flags = in_force(["vllm", "serve", "m", *words])
    with contextlib.nullcontext() if known else pytest.raises(PlanError, match="its draft model"):
        plan_of_args(flags)


def test_gpus_are_taken_by_tensor_parallelism_unless_told():
    assert plan_of_args({}, 4).tp == 4
    assert plan_of_args({"data-parallel-size": 4}, 4).tp == 1
    assert plan_of_args(in_force(["vllm", "-dp", "2", "-tp", "2"]), 4).tp == 2
    assert plan_of_args({"pipeline-parallel-size": 2}, 4).tp == 2
    assert plan_of_args({"tensor-parallel-size": 1}, 4).tp == 1


@pytest.mark.parametrize("value", ["auto", "AUTO", -1, "-1"])
def test_an_automatic_window_is_known(value):
    assert plan_of_args({"max-model-len": value}).max_model_len == AUTO_LEN


@pytest.mark.parametrize(
    ("text", "number"), [("32768", 32768), ("1k", 1000), ("1K", 1024), ("25.6k", 25600)]
)
def test_numbers_have_vllms_suffixes(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "args",
    [
        {"max-model-len": "long"},
        {"max-model-len": "1.5K"},
        {"max-num-seqs": 0},
        {"max-num-seqs": [1]},
        {"gpu-memory-utilization": 1.5},
        {"gpu-memory-utilization": "much"},
        {"dtype": "int3"},
        {"kv-cache-dtype": "int2"},
    ],
)
def test_a_value_that_vllm_would_not_read_is_refused_by_name(args):
    with pytest.raises(PlanError, match=next(iter(args))):
        plan_of_args(args)


@pytest.mark.parametrize(
    ("memory", "seqs", "tokens"), [(24, 256, 2048), (80, 1024, 8192), (192, 1024, 16384)]
)
def test_defaults_of_a_step_go_by_the_memory_of_the_gpu(memory, seqs, tokens):
    batch = Plan(memory * GIB).batch(32768)
    assert (batch.seqs, batch.tokens, batch.in_flight_tokens) == (seqs, tokens, 2 * tokens)


def test_a_cpu_has_blocks_of_128_and_nothing_ahead():
    plan = Plan(0, device=Device.CPU, kv_cache_memory_bytes=GIB)
    assert plan.batch(8192).in_flight_tokens == 2048
    assert fit(shape(models.LLAMA_3_8B), plan).block_tokens == 128


# --- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"hidden_size": 64, "num_attention_heads": 2}, "num_hidden_layers"),
        ({**models.LLAMA_3_8B, "num_hidden_layers": "many"}, "not a number"),
        ({**models.LLAMA_3_8B, "layer_types": ["quantum"] * 32}, "'quantum'"),
        ({**models.LLAMA_3_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({**models.DEEPSEEK_V3, "compress_ratios": [4]}, "DeepSeek-V4"),
        ({**models.LLAMA_3_8B, "is_encoder_decoder": True}, "encoder-decoder"),
        (
            {**models.KIMI_LINEAR_48B, "linear_attn_config": {"kda_layers": [1]}},
            "linear_attn_config",
        ),
    ],
)
def test_a_config_that_leaves_memory_open_is_refused(config, said):
    with pytest.raises(ModelShapeError, match=said):
        shape(config)
