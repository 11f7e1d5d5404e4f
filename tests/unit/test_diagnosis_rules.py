import re

import pytest

from gateway.heal.autopsy import explained
from gateway.vllmlog.diagnosis import Kind, When, diagnose
from gateway.vllmlog.lines import parse
from gateway.vllmlog.rules.rule import Found, told
from gateway.vllmlog.search import RULES
from gateway.vllmlog.starts import Start

START = "INFO 11-21 10:09:36 [api_server.py:1896] vLLM API server version 0.10.2\n"
UP = "INFO:     Application startup complete.\n"
DEAD = (
    "ERROR 11-21 10:11:00 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)

# Messages of vLLM, torch, CUDA, NCCL and the hub in their own words, as one error of a failed start.
AT_START = {
    "ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can be "
    "stored in KV cache (4000).": Kind.KV_CACHE_TOO_SMALL,
    "ValueError: Cannot auto-fit max_model_len: not enough GPU memory": Kind.NO_CACHE_MEMORY,
    "ValueError: The worker already uses 3.2 GiB (model weights and runtime), more than the 2.0 GiB of CPU memory "
    "reserved for it on node 0, leaving none for the KV cache.": Kind.NO_CACHE_MEMORY,
    "AssertionError: Error in memory profiling. Initial free memory 10.0 GiB": Kind.OTHER,
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests": Kind.OOM_RUNTIME,
    "MemoryError: out": Kind.HOST_MEMORY,
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": Kind.DRIVER_TOO_OLD,
    "RuntimeError: No CUDA GPUs are available": Kind.NOT_ENOUGH_GPUS,
    "RuntimeError: Failed to infer device type, please set": Kind.NOT_ENOUGH_GPUS,
    "ValueError: World size (4) is larger than the number of available GPUs (2) in this node.": Kind.NOT_ENOUGH_GPUS,
    "ValueError: Cannot provide a placement group of placement_group_specs=1": Kind.NOT_ENOUGH_GPUS,
    "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device": Kind.NO_KERNEL,
    "ValueError: No valid attention backend found for cuda with x": Kind.NO_KERNEL,
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": Kind.CUDA_FAULT,
    "RuntimeError: NCCL error: unhandled system error": Kind.NCCL,
    "ValueError: Total number of attention heads (30) must be divisible by tensor parallel size (4).": Kind.TP_NOT_DIVISIBLE,
    "OSError: Can't load the configuration of '/models/x'. If you were": Kind.MODEL_NOT_FOUND,
    "huggingface_hub.errors.GatedRepoError: 403 Client Error.": Kind.MODEL_GATED,
    "ValueError: Please pass the argument `trust_remote_code=True` to allow": Kind.TRUST_REMOTE_CODE,
    "ValueError: Model architectures ['X'] are not supported for now.": Kind.UNSUPPORTED_ARCHITECTURE,
    "safetensors_rust.SafetensorError: Error while deserializing header": Kind.WEIGHTS,
    "AssertionError: Attempted to load weight (torch.Size([2])) into parameter of size 3": Kind.WEIGHTS,
    "ValueError: Tokenizer class X does not exist or is not currently imported.": Kind.TOKENIZER,
    "ValueError: torch.float32 is not supported for quantization method awq. Supported": Kind.QUANTIZATION,
    "ValueError: The model type 'gemma3' does not support float16. Reason": Kind.DTYPE,
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.": Kind.DTYPE,
    "requests.exceptions.ConnectionError: Max retries exceeded with url: /m": Kind.NETWORK,
    "OSError: [Errno 28] No space left on device": Kind.DISK,
    "ValueError: Selected backend X is not valid for this configuration. Reason: y": Kind.BAD_ARGUMENT,
    "ValueError: a_setting (3) is larger than b_setting (2)": Kind.BAD_ARGUMENT,
    "OSError: [Errno 98] Address already in use": Kind.PORT,
    "TimeoutError: Timed out waiting for engine core processes to start.": Kind.HANG,
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": Kind.OTHER,
    "ModuleNotFoundError: No module named 'torchvision'": Kind.OTHER,
    "RuntimeError: can't start new thread": Kind.OTHER,
    "ZeroDivisionError: of no rule": Kind.OTHER,
}  # fmt: skip

WHILE_SERVING = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": Kind.OOM_RUNTIME,
    "RuntimeError: CUDA error: device-side assert triggered": Kind.CUDA_FAULT,
    "TimeoutError: RPC call to sample_tokens timed out.": Kind.EXECUTE_TIMEOUT,
    "[rank0]:[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: W": Kind.NCCL,
    "!!!!!!! Segfault encountered !!!!!!!": Kind.ENGINE_DEAD,
    "KeyError: 'of no rule'": Kind.ENGINE_DEAD,
    "OSError: [Errno 28] No space left on device": Kind.DISK,
}


@pytest.mark.parametrize(("message", "kind"), AT_START.items())
def test_a_message_at_start_has_its_class(message, kind):
    wrapper = "RuntimeError: Engine core initialization failed. See root cause above.\n"
    found = diagnose(START + f"ERROR 11-21 10:09:40 [core.py:1] {message}\n" + wrapper)
    assert (found.kind, found.when) == (kind, When.STARTUP)
    assert message in found.evidence
    assert "?" not in found.cause


@pytest.mark.parametrize(("message", "kind"), WHILE_SERVING.items())
def test_a_message_while_serving_has_its_class(message, kind):
    found = diagnose(START + UP + f"{message}\n" + DEAD)
    assert (found.kind, found.when) == (kind, When.SERVING)
    assert message in found.evidence


def test_a_node_whose_share_the_worker_fills_is_to_give_it_more():
    error = (
        "ValueError: The worker already uses 3.2 GiB (model weights and runtime), more than the 2.0 GiB of CPU "
        "memory reserved for it on node 0, leaving none for the KV cache. On the CPU backend, the "
        "`--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name). To "
        "resolve: increase `--gpu-memory-utilization` to more than 0.21, or set the KV cache size explicitly "
        "with `--kv-cache-memory-bytes` or VLLM_CPU_KVCACHE_SPACE."
    )
    found = diagnose(START + f"ERROR 11-21 10:09:40 [core.py:1] {error}\n")
    assert (
        found.cause == "The worker takes 3.2 GiB, more than its 2.0 GiB of the node: no cache fits."
    )
    raised, _ = found.remedies
    assert (raised.flag, raised.value) == ("--gpu-memory-utilization", "0.26")


@pytest.mark.parametrize("least", ["0.95", "1.04"])
def test_a_node_that_the_worker_fills_gets_no_share_that_would_not_be_enough(least):
    error = (
        "ValueError: The worker already uses 60.2 GiB (model weights and runtime), more than the 57.0 GiB of CPU "
        "memory reserved for it on node 0, leaving none for the KV cache. To resolve: increase "
        f"`--gpu-memory-utilization` to more than {least}, or set the KV cache size explicitly"
    )
    found = diagnose(START + f"ERROR 11-21 10:09:40 [core.py:1] {error}\n")
    assert [each.flag for each in found.remedies] == ["VLLM_CPU_KVCACHE_SPACE"]


def test_errors_of_starting_up_do_not_explain_a_death_while_serving():
    found = diagnose(START + UP + "ValueError: Tokenizer class X does not exist\n" + DEAD)
    assert found.kind is Kind.ENGINE_DEAD


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        ('File "vllm/config/parallel.py", line 1, in __post_init__', Kind.BAD_ARGUMENT),
        ('File "vllm/model_executor/models/llama.py", line 1, in load_weights', Kind.WEIGHTS),
        ('File "vllm/lora/worker_manager.py", line 1, in _load_adapter', Kind.LORA),
        ('File "torch/distributed/distributed_c10d.py", line 1, in init', Kind.NCCL),
        ('File "vllm/v1/worker/gpu_worker.py", line 1, in f', Kind.OTHER),
    ],
)
def test_an_error_without_a_rule_is_told_by_where_it_happened(frame, kind):
    log = (
        f"{START}Traceback (most recent call last):\n  {frame}\n    code()\nValueError: new words\n"
    )
    found = diagnose(log)
    assert found.kind is kind
    assert "new words" in found.cause


def test_an_error_without_words_is_told_with_the_code_that_raised_it():
    log = START + '  File "x.py", line 1, in f\n    assert left == right\nAssertionError\n'
    assert "assert left == right" in diagnose(log).cause


def test_the_first_specific_error_is_the_cause_and_what_follows_is_secondary():
    log = (
        START
        + "ValueError: No available memory for the cache blocks.\nRuntimeError: NCCL error: x\n"
    )
    found = diagnose(log)
    assert found.kind is Kind.NO_CACHE_MEMORY
    assert Kind.NCCL in found.secondary


def test_the_error_itself_is_better_proof_than_a_log_line_about_it():
    about = "ERROR 11-21 10:09:40 [x.py:1] Failed to load: CUDA out of memory. Tried\n"
    error = "ERROR 11-21 10:09:40 [x.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert diagnose(START + about + error).evidence == error.strip()


def test_rules_have_names_of_their_own():
    assert len({each.name for each in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_can_be_told_even_when_its_numbers_are_missing(rule):
    groups = re.compile(rule.pattern).groupindex
    words = {"flag": "--flag", "unknown": "--flag", "other": "a_setting"}
    for filler in ("8", "0", ""):
        named = {name: words.get(name, filler) for name in groups}
        found = told(rule, Found(Start((parse("x"),)), 0, named), When.STARTUP, [])
        assert found.cause.endswith((".", "?"))
        assert all(each.flag or each.why for each in found.remedies)
        assert all(
            re.fullmatch(r"--[a-z][\w-]*|[A-Z][A-Z0-9_]*|", each.flag) for each in found.remedies
        )


@pytest.mark.parametrize(
    "error", ["MemoryError", "OSError: [Errno 12] Cannot allocate memory", "std::bad_alloc"]
)
def test_memory_that_was_refused_is_not_told_as_the_kernels_kill(error):
    found = diagnose(START + f"ERROR 11-21 10:09:40 [core.py:1] {error}\n", exit_code=1)
    assert found.kind is Kind.HOST_MEMORY
    assert "a limit of its process" in found.cause
    advice = " ".join(each.why for each in found.remedies)
    assert "ulimit -v" in advice
    assert "OOM killer" not in advice


def test_what_helps_is_told_in_one_pair_of_brackets():
    log = START + "vllm serve: error: unrecognized arguments: --foo\n"
    assert explained(diagnose(log, exit_code=2)) == (
        "Unknown flags: --foo. To fix it: without --foo (this version of vLLM does not know it;"
        " `vllm serve --help=all` lists its flags)."
    )
