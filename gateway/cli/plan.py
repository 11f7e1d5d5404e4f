"""The verb `plan`: does a model fit on these GPUs, with how long a context, by which command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from gateway.cli.console import Exit, VerbError, option, print_json, print_table
from gateway.cli.verbs import AsTable

if TYPE_CHECKING:
    from gateway.sizing.fit import Fit
    from gateway.sizing.fitways import Way
    from gateway.sizing.modelshape import ModelShape
    from gateway.sizing.serveplan import Plan

_GIB: Final = 1 << 30
_KIB: Final = 1 << 10
_PARAMETERS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmbtKMBT])")
_PARAMETER_UNITS: Final = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SIGNS: Final = {"fits": "●", "tight": "◐", "too_large": "○", "invalid": "○"}
_HEADS: Final = {
    "fits": "FITS",
    "tight": "FITS IF THE ESTIMATES HOLD",
    "too_large": "DOES NOT FIT",
    "invalid": "CANNOT START",
}
_BY_NUMBERS: Final = "or give --parameters, --layers, --kv-heads and --head-dim"


def plan(  # noqa: PLR0913 - the options of a verb
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL_DIR]", help="Folder with config.json, weights.")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU: 24GiB, 80GB.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallel size.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, half, bfloat16, float32.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    max_model_len: Annotated[
        str | None,
        typer.Option(help="As vLLM reads it: 32768, 32k (32000), 32K (32768), auto."),
    ] = None,
    max_num_seqs: Annotated[str | None, typer.Option(help="Most requests at a time.")] = None,
    max_num_batched_tokens: Annotated[str | None, typer.Option(help="Tokens of a step.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Part vLLM may take.")] = 0.92,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Fix the KV cache of a GPU: 4GiB, 4294967296.")
    ] = None,
    block_size: Annotated[str | None, typer.Option(help="Tokens of a KV block.")] = None,
    max_loras: Annotated[int, typer.Option(min=0, help="LoRA slots; 0: off.")] = 0,
    lora_rank: Annotated[int, typer.Option(min=1, help="Highest rank of an adapter.")] = 16,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No graphs.")] = False,
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="What vLLM runs on.")] = "gpu",
    parameters: Annotated[str | None, typer.Option(help="In place of a folder: 8B.")] = None,
    weight_bits: Annotated[int, typer.Option(min=2, help="Bits of a parameter.")] = 16,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Size of a head.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of the model.")] = None,
    context: Annotated[str, typer.Option(help="Longest context of the model.")] = "131072",
    output: AsTable = "table",
) -> None:
    """Say whether a model fits, how long requests may be, how many at a time, and how to start it.

    Nothing is started and no GPU is asked. What cannot be counted is estimated and marked so.
    """
    from gateway.sizing.fit import fit
    from gateway.sizing.fitways import ways

    if model is not None:
        shape, name = _read(model), str(model)
    else:
        numbers = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        shape = _of_numbers(parameters, numbers, heads, hidden, (context, weight_bits))
        name = "MODEL"
    wanted = _plan(
        gpu_memory,
        {
            "tensor-parallel-size": tp,
            "pipeline-parallel-size": pp,
            "dtype": dtype,
            "kv-cache-dtype": kv_cache_dtype,
            "max-model-len": max_model_len,
            "max-num-seqs": max_num_seqs,
            "max-num-batched-tokens": max_num_batched_tokens,
            "gpu-memory-utilization": gpu_memory_utilization,
            "kv-cache-memory-bytes": _plain_bytes(kv_cache_memory_bytes),
            "block-size": block_size,
            "enforce-eager": enforce_eager,
            "enable-lora": max_loras > 0,
            "max-loras": max_loras or None,
            "max-lora-rank": lora_rank,
            "device": device,
        },
    )
    found = fit(shape, wanted)
    others = ways(found)
    if output == "json":
        print_json(as_json(found, others, name))
    else:
        _print(found, others, name)


# --- reading --------------------------------------------------------------------------------------


def _read(folder: Path) -> ModelShape:
    from gateway.sizing.modelfolder import ModelFolderError, read_model

    try:
        return read_model(folder)
    except ModelFolderError as error:
        raise VerbError(str(error), _BY_NUMBERS, Exit.NOT_FOUND) from error


def _of_numbers(
    parameters: str | None,
    numbers: Mapping[str, int | None],
    heads: int | None,
    hidden: int | None,
    rest: tuple[str, int],
) -> ModelShape:
    from gateway.config.flags import whole_number
    from gateway.sizing.modelshape import ModelShape

    missing = [f"--{name.replace('_', '-')}" for name, value in numbers.items() if value is None]
    missing = ([] if parameters else ["--parameters"]) + missing
    if missing:
        hint = f"without a model folder these are needed: {', '.join(missing)}"
        raise VerbError("name a model folder", hint, Exit.USAGE)
    count = _PARAMETERS.fullmatch(parameters or "")
    if count is None:
        message = f"--parameters: {parameters} is not a number such as 8B, 0.6B or 350M"
        raise VerbError(message, code=Exit.USAGE)
    context, bits = rest
    longest = option("--context", whole_number, context)
    heads = heads or numbers["kv_heads"] or 1
    config = {
        "num_hidden_layers": numbers["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": numbers["kv_heads"],
        "head_dim": numbers["head_dim"],
        "hidden_size": hidden or heads * (numbers["head_dim"] or 1),
        "max_position_embeddings": longest,
        **({} if bits == 16 else {"quantization_config": {"bits": bits}}),
    }
    total = float(count[1]) * _PARAMETER_UNITS[count[2].upper()]
    return ModelShape.of_config(config, round(total * bits / 8))


def _plan(gpu_memory: str | None, flags: Mapping[str, Any]) -> Plan:
    from gateway.config.units import parse_size
    from gateway.sizing.serveplan import PlanError, plan_of_args

    if gpu_memory is None and flags["kv-cache-memory-bytes"] is None:
        hint = "such as --gpu-memory 24GiB, or --kv-cache-memory-bytes 4GiB for the cache alone"
        raise VerbError("say how much memory a GPU has", hint, Exit.USAGE)
    memory = 0 if gpu_memory is None else option("--gpu-memory", parse_size, gpu_memory)
    try:
        return plan_of_args(flags, 1, memory)
    except PlanError as error:
        raise VerbError(f"--{error}", code=Exit.USAGE) from error


def _plain_bytes(text: str | None) -> str | None:
    """Return a size with a unit of ours as vLLM writes it; other forms are vLLM's to read."""
    if text is None or not text.endswith("B"):
        return text
    from gateway.config.units import parse_size

    return str(option("--kv-cache-memory-bytes", parse_size, text))


# --- telling --------------------------------------------------------------------------------------


def as_json(found: Fit, others: list[Way], model: str) -> dict[str, Any]:
    """Return the answer for programs. Bytes are of one GPU of the fullest pipeline stage."""
    from gateway.sizing.fitways import command

    return {
        "verdict": found.verdict.value,
        "fits": found.fits,
        "problems": list(found.problems),
        "caveats": list(found.caveats),
        "gpus": found.plan.tp * found.plan.pp,
        "max_model_len": found.max_model_len,
        "longest_context_tokens": found.longest,
        "surely_longest_context_tokens": found.surely_longest,
        "model_context_tokens": found.model.longest,
        "concurrency": round(found.concurrency, 2),
        "kv_cache_tokens": found.kv_tokens,
        "kv_bytes_per_token": found.token_bytes,
        "kv_bytes_per_token_beyond_window": found.far_token_bytes,
        "state_bytes_per_request": found.state_bytes,
        "block_tokens": found.block_tokens,
        "blocks": found.blocks,
        "kv_memory_bytes": found.kv_memory_bytes,
        "kv_needed_bytes": found.needed_bytes,
        "budget_bytes": found.budget_bytes,
        "weights_total_bytes": _total_weights(found),
        "weights_bytes": found.held.weights_bytes,
        "lora_bytes": found.held.lora_bytes,
        "estimates": [
            {"what": each.what, "bytes": each.size_bytes, "basis": each.basis}
            for each in found.held.estimates
        ],
        "uncertainty_bytes": found.held.doubt_bytes,
        "command": list(command(found, model)),
        "ways": [
            {
                "change": way.change,
                "flags": list(way.flags),
                "verdict": way.result.verdict.value,
                "max_model_len": way.result.max_model_len,
                "longest_context_tokens": way.result.longest,
                "concurrency": round(way.result.concurrency, 2),
            }
            for way in others
        ],
    }


def _print(found: Fit, others: list[Way], model: str) -> None:
    from gateway.sizing.fitways import command

    verdict = found.verdict.value
    print(f"{_SIGNS[verdict]} {_HEADS[verdict]}  {model} with {found.max_model_len:,} tokens")
    for problem in found.problems:
        print(f"  {problem}")
    print(f"  {_sentence(found)}")
    for caveat in found.caveats:
        print(f"  Not counted: {caveat}.")
    print()
    print_table(_memory_rows(found))
    print()
    print_table(_capacity_rows(found))
    if others:
        print("\nWhat would fit")
        print_table([_way_row(way) for way in others])
    elif verdict == "too_large":
        print("\nNo single change makes it fit: combine a smaller model, fewer bits and more GPUs.")
    if argv := command(found, model):
        print(f"\n{shlex.join(argv)}")


def _sentence(found: Fit) -> str:
    held, left = found.held, found.kv_memory_bytes
    if found.verdict.value == "invalid":
        return "vLLM refuses these flags, whatever the memory."
    if left <= 0:
        return (
            f"Weights and estimates take {_gib(held.total_bytes)} of a GPU's {_gib(found.budget_bytes)}"
            " that vLLM may take: nothing is left for the KV cache."
        )
    needs = f"One request of {found.max_model_len:,} tokens needs {_gib(found.needed_bytes)} of KV cache"
    if found.needed_bytes > left:
        return (
            f"{needs}, there are {_gib(left)}. The longest that fits is {found.longest:,} tokens."
        )
    if not found.fits:
        return f"{needs}; the KV cache, the weights and the estimates are more than the GPU has."
    doubt = f"; the estimates may be off by {_gib(held.doubt_bytes)}" if held.estimates else ""
    return f"{needs}, there are {_gib(left)}: {found.concurrency:.1f} at a time{doubt}."


def _memory_rows(found: Fit) -> list[dict[str, object]]:
    plan, held = found.plan, found.held
    total = f"{_gib(_total_weights(found))} in all"
    divided = f"{total}, on {plan.tp * plan.pp} GPUs" if plan.tp * plan.pp > 1 else "counted"
    rows = [("weights", held.weights_bytes, divided)]
    if held.lora_bytes:
        rows.append(
            ("LoRA slots", held.lora_bytes, f"{plan.max_loras} of rank {plan.max_lora_rank}")
        )
    rows += [(f"{e.what} *", e.size_bytes, f"estimated: {e.basis}") for e in held.estimates]
    fixed = plan.kv_cache_memory_bytes is not None or plan.num_gpu_blocks is not None
    basis = "as told" if fixed else f"what is left of {_gib(found.budget_bytes)}"
    if not fixed:
        basis += f" ({plan.gpu_memory_utilization:g} of {_gib(plan.gpu_memory_bytes)})"
    rows.append(("KV cache", found.kv_memory_bytes, basis))
    return [
        {"on each gpu": what, "gib": f"{size / _GIB:8.2f}", "why": why} for what, size, why in rows
    ]


def _capacity_rows(found: Fit) -> list[dict[str, object]]:
    rows = [("KV cache of a token", _kib(found.token_bytes))]
    if found.far_token_bytes != found.token_bytes:
        rows.append(("  beyond the sliding window", _kib(found.far_token_bytes)))
    if found.state_bytes:
        rows.append(("state of a request", _kib(found.state_bytes)))
    rows += [
        ("tokens the KV cache holds", f"{found.kv_tokens:,}"),
        (f"requests of {found.max_model_len:,} tokens", f"{found.concurrency:.2f}"),
        ("longest context that fits", f"{found.longest:,}"),
        ("  whatever the estimates", f"{found.surely_longest:,}"),
        ("context of the model", f"{found.model.longest:,}"),
    ]
    return [{"kv cache": what, "each gpu": value} for what, value in rows]


def _way_row(way: Way) -> dict[str, object]:
    result = way.result
    return {
        "change": way.change,
        "flags": shlex.join(way.flags) or "-",
        "context": f"{result.max_model_len:,}",
        "at a time": f"{result.concurrency:.1f}",
        "sure": "yes" if result.verdict.value == "fits" else "if the estimates hold",
    }


def _total_weights(found: Fit) -> int:
    return found.model.weights.loaded(found.plan.dtype or found.model.dtype).total_bytes


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _kib(size: int) -> str:
    return f"{size / _KIB:,.1f} KiB"
