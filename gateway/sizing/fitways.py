"""Find what would make a model fit: try each change by the same arithmetic, and with which value it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from gateway.config.flags import MOST_UTILIZATION
from gateway.sizing.fit import Fit, Verdict, fit
from gateway.sizing.serveplan import ONLINE_FP8, Device, KvDtype

_MOST_GPUS: Final = 16
_FEW_SEQS: Final = 64


@dataclass(frozen=True, slots=True)
class Way:
    """One change, the flags that make it, and the result."""

    change: str
    flags: tuple[str, ...]
    result: Fit


def ways(short: Fit) -> list[Way]:
    """Return the changes that would each make it fit, the mildest first.

    Empty for a plan that fits, or whose flags vLLM refuses.
    """
    if short.verdict is not Verdict.TOO_LARGE:
        return []
    found = [way for find in _FINDERS for way in find(short) if way.result.fits]
    return found or [way for way in _quantized_on_more_gpus(short) if way.result.fits]


def _utilization(short: Fit) -> Iterator[Way]:
    plan = short.plan
    fixed = plan.kv_cache_memory_bytes is not None or plan.num_gpu_blocks is not None
    if fixed or plan.device is Device.CPU:
        return
    percent = round(plan.gpu_memory_utilization * 100)
    for raised in range(percent + 1, round(MOST_UTILIZATION * 100) + 1):
        tried = fit(short.model, replace(plan, gpu_memory_utilization=raised / 100))
        if tried.fits:
            flags = ("--gpu-memory-utilization", f"{raised / 100:g}")
            yield Way("let vLLM use more of the GPU", flags, tried)
            return


def _measured(short: Fit) -> Iterator[Way]:
    if short.plan.num_gpu_blocks is not None:
        tried = fit(short.model, replace(short.plan, num_gpu_blocks=None))
        yield Way("as many blocks as vLLM measures, without --num-gpu-blocks-override", (), tried)


def _shorter(short: Fit) -> Iterator[Way]:
    for length in sorted({short.surely_longest, short.longest}):
        if 0 < length < short.max_model_len:
            tried = fit(short.model, replace(short.plan, max_model_len=length))
            yield Way("a shorter context window", ("--max-model-len", str(length)), tried)


def _fp8_kv(short: Fit) -> Iterator[Way]:
    if short.plan.kv_dtype is KvDtype.FP8 or short.model.kv_fp8 or not short.model.attentive:
        return
    tried = fit(short.model, replace(short.plan, kv_dtype=KvDtype.FP8))
    yield Way("an 8-bit KV cache", ("--kv-cache-dtype", "fp8"), tried)


def _fewer_seqs(short: Fit) -> Iterator[Way]:
    if short.plan.batch(short.max_model_len).seqs > _FEW_SEQS:
        tried = fit(short.model, replace(short.plan, max_num_seqs=_FEW_SEQS))
        yield Way("fewer requests at a time", ("--max-num-seqs", str(_FEW_SEQS)), tried)


def _eager(short: Fit) -> Iterator[Way]:
    if not short.plan.enforce_eager and short.plan.device is Device.GPU:
        tried = fit(short.model, replace(short.plan, enforce_eager=True))
        yield Way("no CUDA graphs (slower)", ("--enforce-eager",), tried)


def _more_gpus(short: Fit) -> Iterator[Way]:
    tp = short.plan.tp
    while (tp := tp * 2) <= _MOST_GPUS:
        tried = fit(short.model, replace(short.plan, tp=tp))
        if tried.fits:
            yield Way(f"{tp * short.plan.pp} GPUs", ("--tensor-parallel-size", str(tp)), tried)
            return


def _quantized(short: Fit) -> Iterator[Way]:
    if short.model.quantized:
        return
    for bits in (8, 4):
        tried = fit(short.model.at_bits(bits), short.plan)
        if tried.fits:
            flags = ("--quantization", ONLINE_FP8) if bits == 8 else ()
            yield Way(f"weights of {bits} bits (another checkpoint, or fp8)", flags, tried)
            return


def _quantized_on_more_gpus(short: Fit) -> Iterator[Way]:
    if short.model.quantized:
        return
    for bits in (8, 4):
        for way in _more_gpus(replace(short, model=short.model.at_bits(bits))):
            yield replace(way, change=f"weights of {bits} bits, {way.change}")


_FINDERS: Final[tuple[Callable[[Fit], Iterator[Way]], ...]] = (
    _measured,
    _utilization,
    _shorter,
    _fp8_kv,
    _fewer_seqs,
    _eager,
    _quantized,
    _more_gpus,
)


def command(found: Fit, model: str) -> tuple[str, ...]:
    """Return the argv that serves a model as planned, or else with the longest window that fits.

    If some window fits even if the estimates are too low, it is the longest of those. Flags at vLLM's own
    default are left out, except the window and the utilization, which the answer is about. Empty: nothing fits.
    """
    plan = found.plan
    shorter = found.surely_longest or found.longest
    length = found.max_model_len if found.fits else min(shorter, found.max_model_len)
    if not length or found.verdict is Verdict.INVALID:
        return ()
    words = ["vllm", "serve", model, "--max-model-len", str(length)]
    if plan.kv_cache_memory_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(plan.kv_cache_memory_bytes)]
    else:
        words += ["--gpu-memory-utilization", f"{plan.gpu_memory_utilization:g}"]
    flags: tuple[tuple[str, object, object], ...] = (  # name, value, vLLM's default
        ("--num-gpu-blocks-override", plan.num_gpu_blocks, None),
        ("--tensor-parallel-size", plan.tp, 1),
        ("--pipeline-parallel-size", plan.pp, 1),
        ("--dtype", plan.dtype.value if plan.dtype else None, None),
        ("--quantization", plan.quantization, None),
        ("--kv-cache-dtype", plan.kv_dtype.value, KvDtype.AUTO.value),
        ("--mamba-ssm-cache-dtype", plan.state_dtype.value if plan.state_dtype else None, None),
        ("--max-num-seqs", plan.max_num_seqs, None),
        ("--max-num-batched-tokens", plan.max_num_batched_tokens, None),
        ("--block-size", plan.block_size, None),
    )
    for flag, value, default in flags:
        words += [] if value == default else [flag, str(value)]
    words += ["--enforce-eager"] if plan.enforce_eager else []
    words += [] if plan.prefix_caching else ["--no-enable-prefix-caching"]
    if plan.max_loras:
        loras, rank = str(plan.max_loras), str(plan.max_lora_rank)
        words += ["--enable-lora", "--max-loras", loras, "--max-lora-rank", rank]
    return tuple(words)
