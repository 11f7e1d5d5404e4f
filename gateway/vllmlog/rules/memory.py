"""Rules about memory: the KV cache, a GPU that is full, a host that is full.

Source: messages of vLLM 0.5 to 0.33 (v1/core/kv_cache_utils.py, v1/worker/utils.py, gpu_worker.py,
cpu_worker.py, gpu_model_runner.py) and of torch's allocator.
"""

from __future__ import annotations

import math
import re
from typing import Final

from gateway.config.flags import DEFAULT_UTILIZATION, MOST_UTILIZATION
from gateway.config.supervision import Remedy
from gateway.vllmlog.rules.rule import Found, Rule
from gateway.vllmlog.verdict import Advice, Kind, as_number

BLOCK_TOKENS: Final = 16  # vLLM's default block; lengths are rounded down to it
_MARGIN_RATIO: Final = 0.02  # of the whole memory, left free because neighbours move
_LEAST_UTILIZATION: Final = 0.05  # below this no model is left to serve
_DEFAULT_MAX_NUM_SEQS: Final = 256

_LOADING: Final = re.compile(
    r"in (?:load_model|load_weights|init_device|_init_device|initialize_model|create_weights"
    r"|get_model|set_device|process_weights_after_loading)\b"
)
_RUNNING: Final = re.compile(
    r"in (?:profile_run|determine_available_memory|determine_num_available_blocks|capture_model"
    r"|compile_or_warm_up_model|_dummy_run|_dummy_sampler_run|initialize_from_config|initialize_cache"
    r"|initialize_kv_cache\w*|_initialize_kv_caches|execute_model|wake_up|capture_graph|capture_end"
    r"|warmup\w*|warm_up\w*|allocate_kv_cache\w*|_allocate_kv_cache\w*)\b"
    r"|torch/_(?:inductor|dynamo)/|compilation/(?:backends|cuda_graph|wrapper)"
)


def when_out_of_memory(found: Found) -> Kind:
    """Tell whether the weights did not fit, or what came after them.

    The frames above the error decide, the innermost first; without them, whether the weights were in.
    """
    for frame in reversed(found.before.splitlines()):
        if _RUNNING.search(frame):
            return Kind.OOM_RUNTIME
        if _LOADING.search(frame):
            return Kind.OOM_LOAD
    start = found.start
    error = start.raised.get(found.place)
    if error is not None and any("vllm" in frame for frame in error.frames):
        return Kind.OOM_RUNTIME  # not below what loads
    below = [line.text for line in start.lines[found.place :] if line.is_frame]
    if any(_RUNNING.search(frame) for frame in below):
        return Kind.OOM_RUNTIME
    loaded = start.loaded is not None and start.loaded < found.place
    running = loaded or start.engine_up is not None or start.served is not None
    return Kind.OOM_RUNTIME if running or start.died is not None else Kind.OOM_LOAD


# --- the remedies, with their numbers --------------------------------------------------------------


def _floor_block(tokens: float) -> int:
    return int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _utilization(found: Found) -> float:
    given = found.setting("gpu_memory_utilization")
    return DEFAULT_UTILIZATION if given is None else given


def _more_utilization(found: Found) -> tuple[Advice, ...]:
    now = _utilization(found)
    raised = min(MOST_UTILIZATION, now + 0.05)
    if raised <= now:
        return ()
    why = f"gives the cache more of the GPU (now {now:.2f}); needs that much free memory"
    return (
        Advice(
            "--gpu-memory-utilization", f"{raised:.2f}", why, Remedy.ADJUST_GPU_MEMORY_UTILIZATION
        ),
    )


def _less_utilization(found: Found) -> Advice:
    now = _utilization(found)
    lowered = max(_LEAST_UTILIZATION, now - 0.05)
    why = f"leaves more room outside the KV cache (now {now:.2f})"
    return Advice(
        "--gpu-memory-utilization", f"{lowered:.2f}", why, Remedy.ADJUST_GPU_MEMORY_UTILIZATION
    )


def _fewer_sequences(found: Found) -> Advice:
    now = found.setting("max_num_seqs") or _DEFAULT_MAX_NUM_SEQS
    why = "smaller batches need less memory beside the cache"
    return Advice("--max-num-seqs", str(max(1, int(now) // 2)), why, Remedy.LOWER_MAX_NUM_SEQS)


_EAGER: Final = Advice(
    "--enforce-eager",
    None,
    "no CUDA graphs: saves their memory, slower decode",
    Remedy.ENFORCE_EAGER,
)
_QUANTIZE: Final = Advice("--quantization", None, "a quantised or smaller model needs less")
_FREE_GPU: Final = Advice(
    "", None, "stop the other processes that hold this GPU's memory (nvidia-smi)"
)


def _more_parallel(found: Found) -> Advice:
    now = int(found.setting("tensor_parallel_size") or 1)
    return Advice(
        "--tensor-parallel-size", str(now * 2), "spreads weights and cache over more GPUs"
    )


def _longest(found: Found) -> int | None:
    """Return the longest context that the cache can hold, a whole number of blocks."""
    told = found.number("estimated")
    if told:
        return _floor_block(told) or None
    wanted, needed, available = (found.number(name) for name in ("length", "needed", "available"))
    if wanted and needed and available and available > 0:
        return _floor_block(wanted * available / needed * 0.98) or None
    return None


def _small_cache(found: Found) -> tuple[Advice, ...]:
    longest = _longest(found)
    needed, available = found.number("needed"), found.number("available")
    given: list[Advice] = []
    if longest:
        why = "the longest context that the KV cache can hold"
        given.append(Advice("--max-model-len", str(longest), why, Remedy.LOWER_MAX_MODEL_LEN))
    else:
        why = "a shorter context; the log has no number to compute it from"
        given.append(Advice("--max-model-len", None, why, Remedy.LOWER_MAX_MODEL_LEN))
    if found.setting("num_gpu_blocks_override") is not None:
        given.append(Advice("--num-gpu-blocks-override", None, "it caps the KV cache", remove=True))
    given += _more_utilization(found)
    fits = bool(needed and available) and (available or 0) * 2 >= (needed or 0)
    why = "halves the cache per token" + (", which is enough" if fits else "")
    given.append(Advice("--kv-cache-dtype", "fp8", why, Remedy.FP8_KV_CACHE))
    return (*given, _more_parallel(found))


def _small_cache_cause(found: Found) -> str:
    needed, available = found.groups.get("needed"), found.groups.get("available")
    asked = f"One request of max_model_len {found.groups['length']} needs"
    text = f"{asked} {needed} GiB of KV cache, but only {available} GiB are available"
    if needed == available:  # both are rounded in the log
        text = f"{asked} more KV cache than is available"
    longest = found.groups.get("estimated")
    return text + (f"; about {longest} tokens fit." if longest else ".")


def _no_cache(found: Found) -> tuple[Advice, ...]:
    return (
        *_more_utilization(found),
        Advice("--max-model-len", None, "profiling needs less for a shorter context",
               Remedy.LOWER_MAX_MODEL_LEN),
        _fewer_sequences(found),
        _EAGER,
        _QUANTIZE,
        _more_parallel(found),
    )  # fmt: skip


def _no_cache_cause(found: Found) -> str:
    available = _told_before(found, r"Available KV cache memory: (-?[\d.]{1,12}) GiB")
    weights = _told_before(
        found, r"(?:Model loading|Loading model weights) took ([\d.]{1,12}) ?Gi?B"
    )
    numbers = [f"weights take {weights} GiB"] if weights else []
    numbers += [f"{available} GiB are left for the cache"] if available else []
    tail = f": {', '.join(numbers)}" if numbers else ""
    return f"Nothing is left for the KV cache within gpu-memory-utilization {_utilization(found):.2f}{tail}."


def _told_before(found: Found, pattern: str) -> str | None:
    for line in reversed(found.start.lines[: found.place]):
        told = re.search(pattern, line.text)
        if told:
            return told[1]
    return None


def _start_memory(found: Found) -> tuple[Advice, ...]:
    free, total = found.number("free"), found.number("total")
    given = [_FREE_GPU]
    if free is not None and total:
        fits = math.floor((free / total - _MARGIN_RATIO) * 100) / 100
        if fits >= _LEAST_UTILIZATION:
            why = f"what {free:g} of {total:g} GiB free allow, with {_MARGIN_RATIO:.0%} to spare"
            given.append(
                Advice("--gpu-memory-utilization", f"{fits:.2f}", why,
                       Remedy.ADJUST_GPU_MEMORY_UTILIZATION)
            )  # fmt: skip
    why = "start backends of one GPU one after the other, once its memory is released"
    return (*given, Advice("", None, why, Remedy.SERIAL_START))


def _node_cache(found: Found) -> tuple[Advice, ...]:
    free, total = found.number("free") or 0.0, found.number("total") or 0.0
    fits = math.floor(free - total * _MARGIN_RATIO)
    why = "GiB for the KV cache, no more than what is free on the node"
    value = str(fits) if fits >= 1 else None
    return (
        Advice("VLLM_CPU_KVCACHE_SPACE", value, why),
        Advice("", None, "stop the other processes that hold this node's memory"),
    )


def _more_of_node(found: Found) -> tuple[Advice, ...]:
    least, flag = found.number("least"), "--gpu-memory-utilization"
    size = Advice("VLLM_CPU_KVCACHE_SPACE", None, "the cache's size in GiB, whatever that leaves")
    if least is not None and least >= MOST_UTILIZATION:
        return (size,)  # no share that is offered has room
    value = f"{min(MOST_UTILIZATION, least + 0.05):.2f}" if least else None
    why, action = "room for a cache beside the worker", Remedy.ADJUST_GPU_MEMORY_UTILIZATION
    return (Advice(flag, value, why, action), size)


def _oom(found: Found) -> tuple[Advice, ...]:
    if when_out_of_memory(found) is Kind.OOM_LOAD:
        return (
            _more_parallel(found),
            _QUANTIZE,
            _FREE_GPU,
            Advice("CUDA_VISIBLE_DEVICES", None, "another GPU, if this one is taken"),
            Advice("--cpu-offload-gb", None, "keeps part of the weights in host memory, slowly"),
        )
    override = found.setting("num_gpu_blocks_override") is not None
    return (
        _less_utilization(found),
        _fewer_sequences(found),
        Advice("--max-num-batched-tokens", None, "smaller prefill steps need less memory"),
        _EAGER,
        *((Advice("--num-gpu-blocks-override", None, "it sizes the cache by hand", remove=True),)
          if override else ()),
    )  # fmt: skip


def _oom_cause(found: Found) -> str:
    loading = when_out_of_memory(found) is Kind.OOM_LOAD
    doing = "loading the weights" if loading else "running the model"
    told = re.search(
        r"Tried to allocate ([\d.]{1,12} \w{1,5}).{0,80}?total capacity of ([\d.]{1,12} \w{1,5}) "
        r"of which ([\d.]{1,12} \w{1,5}) is free",
        found.line.text,
    )
    numbers = f": {told[1]} were asked for, {told[3]} of {told[2]} were free" if told else ""
    return f"The GPU's memory ran out while {doing}{numbers}."


_SHARED: Final = Advice("", None, "give the container more of it: --shm-size=16g or --ipc=host")
_OFFLOAD: Final = Advice("--cpu-offload-gb", None, "lower it, if weights are kept in host memory")
_HOST: Final = (
    Advice("", None, "give the host or the container more memory; see dmesg for the OOM killer"),
    _OFFLOAD,
)


def _free(found: Found) -> str:
    utilization = as_number(found.groups.get("ratio"))
    asked = f"{utilization:g} = {found.groups['wanted']} GiB" if utilization else "more"
    return (
        f"Only {found.groups['free']} of {found.groups['total']} GiB are free on the device, "
        f"but gpu-memory-utilization asks for {asked}."
    )


RULES: Final[tuple[Rule, ...]] = (
    Rule("kv_small", Kind.KV_CACHE_TOO_SMALL,
         r"To serve at least one request with the models?'s max seq len \((?P<length>\d+)\), "
         r"\(?(?P<needed>[\d.]+) ?Gi?B KV cache is needed, which is larger than the available KV cache "
         r"memory \((?P<available>-?[\d.]+) ?Gi?B\)"
         r"(?:.{0,100}estimated maximum model length is (?P<estimated>\d+))?",
         _small_cache_cause, remedies=_small_cache),
    Rule("kv_small_v0", Kind.KV_CACHE_TOO_SMALL,
         r"The model's max seq len \((?P<length>\d+)\) is larger than the maximum number of tokens "
         r"that can be stored in KV cache \((?P<estimated>\d+)\)",
         "The KV cache holds {estimated} tokens, fewer than max_model_len {length}.",
         remedies=_small_cache),
    Rule("kv_none", Kind.NO_CACHE_MEMORY,
         r"No available memory for the cache blocks|Cannot auto-fit max_model_len",
         _no_cache_cause, remedies=_no_cache),
    Rule("kv_none_node", Kind.NO_CACHE_MEMORY,
         r"worker already uses (?P<used>[\d.]+) ?Gi?B .{1,40}more than the (?P<reserved>[\d.]+) ?Gi?B of CPU memory"
         r"(?:.{1,400}to more than (?P<least>\d\.\d+))?",
         "The worker takes {used} GiB, more than its {reserved} GiB of the node: no cache fits.",
         remedies=_more_of_node),
    Rule("free_memory", Kind.FREE_MEMORY_LOW,
         r"Free memory on device (?:\S{1,20} )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) ?Gi?B\) on startup is "
         r"less than desired GPU memory utilization \((?P<ratio>[\d.]+), (?P<wanted>[\d.]+) ?Gi?B\)",
         _free, remedies=_start_memory, restart=False,
         look_at="nvidia-smi: if the memory belongs to an engine that is on its way out, a later start works"),
    Rule("free_memory_node", Kind.FREE_MEMORY_LOW,
         r"Available memory on node \S{1,10} \((?P<free>[\d.]+)/(?P<total>[\d.]+) ?Gi?B\) on startup is "
         r"less than desired CPU memory utilization \((?P<ratio>[\d.]+), (?P<wanted>[\d.]+) ?Gi?B\)",
         _free, remedies=_start_memory),
    Rule("free_memory_cache", Kind.FREE_MEMORY_LOW,
         r"Available memory on node \S{1,10} \((?P<free>[\d.]+)/(?P<total>[\d.]+) ?Gi?B\) on kv cache allocation is "
         r"less than requested memory for kv \((?P<wanted>[\d.]+) ?Gi?B\)",
         "Only {free} of {total} GiB are free on the node, but {wanted} GiB are requested for the KV cache.",
         remedies=_node_cache),
    Rule("free_memory_held", Kind.FREE_MEMORY_LOW,
         r"is less than the engine's budget after excluding|Externally held weights on device",
         "Less memory is free than the engine was told to use.", remedies=(
             Advice("--gpu-memory-utilization", None, "lower it to what is free",
                    Remedy.ADJUST_GPU_MEMORY_UTILIZATION),)),
    Rule("memory_profiling_race", Kind.OTHER,
         r"Error in memory profiling\.(?:.{0,40}Initial free memory (?P<before>[\d.]+).{0,40}current free "
         r"memory (?P<after>[\d.]+))?",
         "Another process released GPU memory while this one measured its own.", restart=True,
         remedies=(Advice("", None, "restart, with nothing else starting or stopping on this GPU",
                          Remedy.SERIAL_START),)),
    Rule("oom_warmup", Kind.OOM_RUNTIME,
         r"CUDA out of memory occurred when warming up \w+ with (?P<seqs>\d+) dummy requests",
         "The GPU's memory ran out while warming up with {seqs} requests.",
         remedies=lambda found: (_fewer_sequences(found), _less_utilization(found), _EAGER)),
    Rule("oom", Kind.OOM_RUNTIME,
         r"(?:CUDA|HIP|XPU|NPU|TPU|HPU) out of memory|torch\.(?:\w{1,8}\.)?OutOfMemoryError|RESOURCE_EXHAUSTED"
         r"|(?:CUDA|HIP|XPU|NPU) [Ee]rror: out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
         r"|\w+_STATUS_ALLOC_FAILED|exceeded scoped vmem limit|(?:UR|ZE)_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
         r"|[Rr]an out of memory in memory space|nrt_tensor_allocate"
         r"|[Ff]ailed to allocate (?:device|GPU|HBM) memory|(?:malloc|alloc)\w* device memory failed",
         _oom_cause, remedies=_oom, refine=when_out_of_memory, serving=True, place_tells=True),
    Rule("oom_load", Kind.OOM_LOAD, r"Failed to load model - not enough GPU memory",
         "The weights do not fit into the GPU's memory.", remedies=_oom, rank=1),
    Rule("shared_memory", Kind.HOST_MEMORY,
         r"No space left on device.{0,80}(?:/dev/shm|psm_)|(?:/dev/shm|psm_).{0,80}No space left on device"
         r"|[Ii]nsufficient (?:shared memory|space in /dev/shm)|Bus error",
         "Shared memory (/dev/shm) is too small.", remedies=(_SHARED,), serving=True),
    Rule("memory_refused", Kind.HOST_MEMORY,
         r"Cannot allocate memory|can't allocate memory|^MemoryError\b|std::bad_alloc",
         "It asked for more memory than the host has left, or than a limit of its process allows.",
         remedies=(Advice("", None, "lift the limit, if there is one: `ulimit -v`, systemd's LimitAS"),
                   Advice("", None, "give the host or the container more memory"), _OFFLOAD), serving=True),
    Rule("host_memory", Kind.HOST_MEMORY,
         r"Out of memory: Killed process|oom-kill|oom_kill|OOMKilled|Detected \d+ oom"
         r"|HostOutOfMemory|cudaErrorHostMemory|killed by signal: Killed",
         "The host ran out of memory.", remedies=_HOST, serving=True),
    Rule("worker_killed", Kind.HOST_MEMORY,
         r"(?:Worker proc|Engine core process|Process|Command) (?P<who>\S{1,80})(?: .{0,200})?(?:exit ?code:? -9\b"
         r"|died with <Signals\.SIGKILL)",
         "{who} was killed with SIGKILL; the log does not say by whom.",
         remedies=_HOST, serving=True, rank=1,
         look_at="dmesg, or `oom_kill` in the container's memory.events: whether the kernel lacked host memory"),
)  # fmt: skip
