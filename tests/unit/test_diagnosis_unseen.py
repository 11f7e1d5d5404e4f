"""Logs that no rule was made for: what the form of a log, and of an error in it, tells by itself."""

import pytest

from gateway.vllmlog.diagnosis import Confidence, Kind, When, diagnose
from gateway.vllmlog.errors import raised_in
from gateway.vllmlog.lines import read

BANNER = "(APIServer pid=7) INFO 11-21 10:09:36 [utils.py:297] vLLM API server version 0.32.0\n"
LOADED = (
    "(EngineCore pid=8) INFO 11-21 10:09:50 [gpu.py:1] Model loading took 7.3 GiB and 4.1 seconds\n"
)
UP = "(APIServer pid=7) INFO:     Application startup complete.\n"
WORKS = (
    "(APIServer pid=7) INFO 11-21 10:10:36 [loggers.py:1] Engine 000: Avg prompt throughput: 9.0 "
    "tokens/s, Avg generation throughput: 40.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs\n"
)
IDLE = WORKS.replace("40.0", "0.0").replace("Running: 2", "Running: 0")
STALL = (
    "(EngineCore pid=8) INFO 11-21 10:12:00 [shm_broadcast.py:1] No available shared memory "
    "broadcast block found in 60 seconds. This typically happens when\n"
)
DEAD = "(APIServer pid=7) ERROR 11-21 10:30:00 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: x\n"
FAILED = (
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.\n"
)


def core(words, level="ERROR"):
    return f"(EngineCore pid=8) {level} 11-21 10:09:55 [core.py:1108] {words}\n"


def traceback(error, *frames):
    """An exception that the engine logs, raised through these frames, the innermost last."""
    told = [f'  File "/opt/venv/lib/python3.12/site-packages/{frame}' for frame in frames]
    lines = ["Traceback (most recent call last):", *told, "    do()", "    ^^^^", error]
    return "".join(map(core, lines))


def failing(error, *frames):
    return BANNER + traceback(error, *frames) + FAILED


# --- the lines -------------------------------------------------------------------------------------

SMALL = failing(
    "ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (4.25 GiB).",
    'vllm/v1/core/kv_cache_utils.py", line 758, in _check_enough_kv_cache_memory',
)


@pytest.mark.parametrize(
    "prefix",
    [
        "> ",
        "    ",
        "2026-05-01 18:57:24.9 | ",
        "gpu-7/llm-0 (stderr) 00:12:44 >> ",
        "<14>1 2026-05-01T18:57:24Z gpu7 vllm 4711 - - ",
        "[worker 3] ",
        "[2026-01-22 20:05:33] [/bin/sh]: ",
        "2026-06-27 12:57:51,690 - __main__ - INFO - ",
        "2026-05-08 11:47:04.369 [Info] (Process) ",
        "| ",
    ],
)
def test_a_prefix_of_no_known_form_is_stripped(prefix):
    found = diagnose("".join(f"{prefix}{line}\n" for line in SMALL.splitlines()))
    assert (found.kind, found.rule) == (Kind.KV_CACHE_TOO_SMALL, "kv_small")


def test_a_log_that_another_program_forwards_as_information_still_has_its_errors():
    python = 'Traceback (most recent call last):\n  File "/o/vllm/a.py", line 1, in f\n    g()\n'
    python += '  File "/o/vllm/b.py", line 2, in g\n    h()\nZeroDivisionError: odd\n'
    forwarded = [
        f"2026-06-27 12:57:51,690 - __main__ - INFO - {line}" for line in python.splitlines()
    ]
    assert "ZeroDivisionError: odd" in diagnose("\n".join(forwarded)).cause


@pytest.mark.parametrize("columns", [80, 107, 132])
def test_lines_that_a_terminal_cut_are_put_together(columns):
    cut = [
        line[at : at + columns]
        for line in SMALL.splitlines()
        for at in range(0, len(line), columns)
    ]
    found = diagnose("\n".join(cut))
    assert (found.kind, found.rule) == (Kind.KV_CACHE_TOO_SMALL, "kv_small")
    assert "4.26 GiB" in found.cause


def test_lines_that_are_merely_long_are_left_alone():
    rows = [
        "INFO 11-21 10:09:36 [a.py:1] " + "x" * 100,
        "ERROR 11-21 10:09:36 [a.py:1] " + "y" * 99,
    ] * 3
    assert [line.raw for line in read("\n".join(rows))] == rows


# --- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["triton.runtime.errors.OutOfResources", "queue.Empty", "KaboomWarning"]
)
def test_an_exception_is_known_by_its_place_not_by_its_name(name):
    found = diagnose(failing(f"{name}: new words", 'vllm/v1/worker/gpu_worker.py", line 1, in f'))
    assert found.evidence.endswith(f"{name}: new words")
    assert f"{name}: new words" in found.cause
    assert "vllm/v1/worker/gpu_worker.py:1 in f" in found.cause


def test_tracebacks_of_processes_that_write_at_once_are_told_apart():
    first = traceback("ValueError: one", 'vllm/a.py", line 1, in one').splitlines()
    other = [
        line.replace("EngineCore pid=8", "Worker_TP1 pid=9").replace("one", "two") for line in first
    ]
    mixed = [line for pair in zip(first, other, strict=True) for line in pair]
    raised = raised_in(read("\n".join(mixed)))
    assert [(each.name, each.frames[0][-6:]) for each in raised.values()] == [
        ("ValueError", "in one"),
        ("ValueError", "in two"),
    ]


@pytest.mark.parametrize(
    ("error", "frame", "kind"),
    [
        ("json.decoder.JSONDecodeError: Expecting value", "transformers/tokenization_utils_base.py", Kind.TOKENIZER),
        ("json.decoder.JSONDecodeError: Expecting value", "transformers/image_processing_base.py", Kind.TOKENIZER),
        ("KeyError: 'w13'", "vllm/model_executor/layers/quantization/modelopt.py", Kind.QUANTIZATION),
        ("ValueError: no such scheme", "vllm/model_executor/layers/fused_moe/oracle/mxfp4.py", Kind.QUANTIZATION),
        ("IndexError: 3", "vllm/model_executor/model_loader/weight_utils.py", Kind.WEIGHTS),
        ("ValueError: rank 3 is odd", "vllm/config/parallel.py", Kind.BAD_ARGUMENT),
        ("AssertionError: both were given", "vllm/engine/arg_utils.py", Kind.BAD_ARGUMENT),
        ("httpx.ReadTimeout: timed out", "huggingface_hub/utils/_http.py", Kind.NETWORK),
        ("OSError: [Errno 2] gone", "transformers/utils/hub.py", Kind.MODEL_NOT_FOUND),
        ("KeyError: 'brand_new'", "transformers/models/auto/configuration_auto.py", Kind.UNSUPPORTED_ARCHITECTURE),
        ("RuntimeError: odd", "torch/distributed/rendezvous.py", Kind.NCCL),
        ("ValueError: odd", "peft/config.py", Kind.LORA),
        ("AttributeError: 'x' has no attribute 'y'", "vllm/v1/worker/gpu_model_runner.py", Kind.OTHER),
    ],
)  # fmt: skip
def test_words_that_no_rule_knows_are_told_by_the_innermost_frame_that_tells(error, frame, kind):
    through = 'vllm/v1/engine/core.py", line 1, in __init__', f'{frame}", line 9, in helper'
    inner = 'json/decoder.py", line 355, in raw_decode'
    found = diagnose(failing(error, *through, inner))
    assert (found.kind, found.when) == (kind, When.STARTUP)
    assert found.confidence is not Confidence.HIGH
    assert found.evidence.endswith(error)
    assert found.remedies


def test_what_fails_as_it_is_imported_is_about_the_package_not_about_its_topic():
    frames = (
        'vllm/model_executor/layers/quantization/__init__.py", line 128, in get_quantization_config',
        'vllm/model_executor/layers/quantization/new.py", line 4, in <module>',
        'cutlass/gemm.py", line 7, in Gemm',
    )
    found = diagnose(failing("KeyError: 'odd'", *frames))
    assert (found.kind, "importing" in found.cause) == (Kind.OTHER, True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RuntimeError: HIP error: invalid device function", Kind.NO_KERNEL),
        ("torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", Kind.DRIVER_TOO_OLD),
        ("RuntimeError: No XPU devices are available", Kind.NOT_ENOUGH_GPUS),
        ("RuntimeError: Unable to initialize backend 'tpu': no device", Kind.NOT_ENOUGH_GPUS),
        ("RuntimeError: NPU error: odd", Kind.CUDA_FAULT),
        ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB", Kind.OOM_RUNTIME),
        ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm", Kind.OOM_RUNTIME),
        ("RuntimeError: HCCL function error: HcclCommInitRootInfo", Kind.NCCL),
        ("ValueError: moe_backend='triton' is not supported for NvFP4 MoE. Expected one of ['cutlass']", Kind.BAD_ARGUMENT),
        ("KeyError: 'layers.0.mlp.down_proj.weight_scale'", Kind.QUANTIZATION),
        ("KeyError: 'layers.0.mlp.down_proj.weight'", Kind.WEIGHTS),
        ("ValueError: No quantization scheme fits this odd layer", Kind.QUANTIZATION),
        ("ValueError: num_odd_tokens must be even", Kind.BAD_ARGUMENT),
        ("RuntimeError: the odd tokenizer gave no tokens", Kind.TOKENIZER),
    ],
)  # fmt: skip
def test_words_decide_where_frames_do_not(error, kind):
    assert diagnose(failing(error, 'vllm/a/b.py", line 1, in run')).kind is kind


# --- what is no proof ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "advice",
    [
        "Compile with `TORCH_USE_HIP_DSA` to enable device-side assertions.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1, an illegal memory access is async",
        "CUDA kernel errors might be asynchronously reported: illegal memory access",
    ],
)
def test_advice_below_an_error_is_no_proof(advice):
    found = diagnose(
        BANNER
        + traceback("ZeroDivisionError: odd", 'vllm/a.py", line 1, in f')
        + core(advice)
        + FAILED
    )
    assert found.kind is Kind.OTHER
    assert "ZeroDivisionError" in found.evidence


@pytest.mark.parametrize(
    "quiet",
    [
        "gpu7:46:46 [0] NCCL INFO dlopen(libnccl-env.so) failed: cannot open shared object file\n",
        "[rank0]:[W1121 10:11:00.1 socket.cpp:1] NCCL error: it will be tried again\n",
        core("CUDA out of memory in a trial, smaller batch is used", "INFO"),
    ],
)
def test_a_line_that_is_told_quietly_never_beats_an_exception(quiet):
    found = diagnose(
        BANNER + quiet + traceback("ValueError: odd", 'vllm/config/odd.py", line 1, in f') + FAILED
    )
    assert found.kind is Kind.BAD_ARGUMENT


def test_what_the_server_survived_for_long_is_no_cause_of_its_death():
    oom = traceback(
        "torch.OutOfMemoryError: CUDA out of memory.", 'vllm/a.py", line 1, in execute_model'
    )
    later = traceback("KeyError: 'odd'", 'vllm/v1/core/sched/scheduler.py", line 1, in schedule')
    started = BANNER + LOADED + UP + WORKS + oom
    assert diagnose(started + later + DEAD).kind is Kind.OOM_RUNTIME
    found = diagnose(started + WORKS * 9 + later + DEAD)
    assert (found.kind, "KeyError" in found.evidence) == (Kind.ENGINE_DEAD, True)
    assert diagnose(started + WORKS * 9).healthy


# --- what it waits for -----------------------------------------------------------------------------


def test_an_interrupted_start_says_what_it_waited_for():
    waits = core("Waiting for 2 remote engine processes to connect.", "INFO")
    stop = "(EngineCore pid=8) KeyboardInterrupt\n"
    found = diagnose(BANNER + LOADED + waits + stop)
    assert (found.kind, found.rule) == (Kind.OTHER, "interrupted")
    assert "Waiting for 2 remote engine processes to connect" in found.cause
    assert "while loading weights" in diagnose(BANNER + LOADED + stop).cause


def test_a_warning_that_a_rule_knows_is_why_an_interrupted_start_waited():
    gpus = "WARNING 11-21 10:10:00 [ray_utils.py:1] The number of required GPUs exceeds the total number of available GPUs in the placement group.\n"
    found = diagnose(BANNER + gpus + "(EngineCore pid=8) KeyboardInterrupt\n")
    assert (found.kind, found.confidence) == (Kind.NOT_ENOUGH_GPUS, Confidence.MEDIUM)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (BANNER + LOADED + UP + WORKS + STALL, Kind.HANG),
        (BANNER + LOADED + UP + WORKS + STALL + WORKS, Kind.HEALTHY),
        (BANNER + LOADED + UP + IDLE + STALL, Kind.HEALTHY),
        (BANNER + LOADED + STALL, Kind.HANG),
        (
            BANNER
            + LOADED
            + core("Waiting for a peer for 3 s", "INFO")
            + core("Waiting for a peer for 60 s", "INFO"),
            Kind.HANG,
        ),
        (BANNER + LOADED + core("Waiting for the peer", "INFO"), Kind.UNKNOWN),
        (
            BANNER + LOADED + "waiting for the server, 30 s\nwaiting for the server, 60 s\n" * 9,
            Kind.UNKNOWN,
        ),
    ],
    ids=["busy", "went on", "idle", "starting", "twice", "once", "script"],
)
def test_a_log_whose_last_word_is_a_wait_may_hang(text, kind):
    found = diagnose(text)
    assert found.kind is kind
    ends_waiting = not text.endswith(WORKS)
    assert (found.confidence is Confidence.LOW) == ends_waiting
    assert not ends_waiting or "hang" in found.cause or "do not answer" in found.cause


def test_an_engine_that_waits_for_work_does_not_hang():
    up = core("init engine (profile, create kv cache, warmup model) took 47.57 seconds", "INFO")
    idle = core("EngineCore waiting for work.", "DEBUG") * 9
    assert diagnose(BANNER + LOADED + up + idle).healthy
    assert diagnose(BANNER + LOADED + idle).kind is Kind.UNKNOWN


# --- excerpts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "when"),
    [
        ('vllm/v1/engine/core.py", line 1, in _initialize_kv_caches', When.STARTUP),
        ('vllm/v1/engine/core.py", line 1, in step_with_batch_queue', When.SERVING),
    ],
)
def test_an_excerpt_without_a_start_is_told_by_its_frames(frame, when):
    found = diagnose(traceback("ZeroDivisionError: odd", frame, 'vllm/a.py", line 1, in f'))
    assert found.when is when


def test_a_traceback_that_is_cut_off_still_says_where_it_was():
    cut = 'Traceback (most recent call last):\n  File "/o/vllm/a.py", line 1, in f\n    g()\n'
    cut += '  File "/o/vllm/b.py", line 7, in g\n    assert left == right\n'
    found = diagnose(cut)
    assert found.kind is Kind.OTHER
    assert "assert left == right" in found.cause
    assert "vllm/b.py:7 in g" in found.cause


# --- what ended it, and how sure that is ------------------------------------------------------------

STEP = 'vllm/v1/engine/core.py", line 1, in run_busy_loop'
LOAD = 'vllm/v1/worker/gpu_worker.py", line 1, in load_model'


def test_an_error_through_the_engines_loop_with_no_work_after_it_is_a_death():
    error = traceback("KeyError: 'odd'", STEP)
    assert diagnose(BANNER + LOADED + UP + WORKS + error + IDLE * 9).kind is Kind.ENGINE_DEAD
    assert diagnose(BANNER + LOADED + UP + WORKS + error + WORKS * 9).healthy
    request = traceback(
        "KeyError: 'odd'", 'vllm/entrypoints/openai/api_server.py", line 1, in chat'
    )
    found = diagnose(BANNER + LOADED + UP + WORKS + request + IDLE)
    assert (found.kind, found.confidence) == (Kind.HEALTHY, Confidence.MEDIUM)


@pytest.mark.parametrize(
    ("frame", "kind", "when"),
    [(STEP, Kind.ENGINE_DEAD, When.SERVING), (LOAD, Kind.OTHER, When.STARTUP)],
)
def test_an_exception_that_older_engines_hit_is_told_by_what_they_did(frame, kind, when):
    log = core("EngineCore hit an exception: Traceback (most recent call last):")
    log += traceback("KeyError: 'odd'", frame)
    found = diagnose(BANNER + log)
    assert (found.kind, found.when) == (kind, when)


def test_a_mistake_in_a_program_is_not_about_the_module_that_it_happens_in():
    weights = 'vllm/model_executor/model_loader/weight_utils.py", line 1, in load'
    assert (
        diagnose(failing("TypeError: f() got an unexpected keyword argument 'x'", weights)).kind
        is Kind.OTHER
    )
    assert diagnose(failing("TypeError: 'NoneType' object is odd", weights)).kind is Kind.OTHER
    assert diagnose(failing("ValueError: odd", weights)).kind is Kind.WEIGHTS
    flags = 'vllm/entrypoints/openai/cli_args.py", line 1, in validate_parsed_serve_args'
    assert (
        diagnose(failing("TypeError: Error: --enable-x needs --tool-y", flags)).kind
        is Kind.BAD_ARGUMENT
    )


def test_a_listing_of_settings_proves_nothing():
    listing = (
        "model='m', seed=0, trust_remote_code=True, dtype='auto', port=8000, uds=None, lora=False\n"
    )
    found = diagnose(BANNER + listing + traceback("ZeroDivisionError: odd", LOAD) + FAILED)
    assert (found.kind, "ZeroDivisionError" in found.evidence) == (Kind.OTHER, True)


def test_what_others_write_after_an_exception_that_left_its_process_does_not_hide_it():
    python = 'Traceback (most recent call last):\n  File "/o/bin/vllm", line 8, in <module>\n    main()\n'
    python += '  File "/o/vllm/a.py", line 1, in f\n    g()\nZeroDivisionError: odd\n'
    after = "INFO 11-21 10:12:00 [supervisor.py:1] the next attempt begins in 10 s\n"
    assert "ZeroDivisionError" in diagnose(BANNER + python + after).evidence


def test_a_bar_that_is_drawn_once_more_is_no_progress_after_an_error():
    bar = "Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]\n"
    found = diagnose(BANNER + bar + traceback("ValueError: odd", LOAD) + bar)
    assert "ValueError: odd" in found.evidence


def test_a_cause_that_is_only_repeated_is_told_when_the_first_words_are_not_in_the_log():
    again = core(
        "RuntimeError: Worker failed with error 'free HBM is below the reserve', please check"
    )
    found = diagnose(BANNER + again + FAILED)
    assert (found.kind, "below the reserve" in found.cause) == (Kind.OTHER, True)


def test_a_request_that_is_cancelled_interrupts_nothing():
    cancelled = 'Traceback (most recent call last):\n  File "/o/starlette/responses.py", line 1, in __call__\n'
    cancelled += (
        "    await f()\nasyncio.exceptions.CancelledError: Cancelled by cancel scope 7f20\n"
    )
    served = "INFO 11-21 10:11:00 [logger.py:36] Received request cmpl-1: prompt: 'x'\n"
    assert diagnose(served + cancelled).healthy


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        (BANNER + "No CUDA GPUs are available, said somebody\n", Kind.NOT_ENOUGH_GPUS),
        (core("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), Kind.OOM_LOAD),
    ],
    ids=["words that may stand anywhere", "a class that depends on a place that is not told"],
)
def test_an_answer_is_sure_only_with_a_proof_by_its_form(log, kind):
    found = diagnose(log)
    assert (found.kind, found.confidence) == (kind, Confidence.MEDIUM)


# --- a server that stops its own engine -------------------------------------------------------------

ENGINE_UP = "(EngineCore pid=8) INFO 11-21 10:10:00 [core.py:402] init engine (profile, create kv cache, warmup model) took 1.97 s\n"
OWN_STOP = (
    "(APIServer pid=7) INFO 11-21 10:10:02 [utils.py:628] [shutdown] Process manager: send sigterm to process EngineCore\n"
    "(EngineCore pid=8) INFO 11-21 10:10:02 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
)
LEAK = "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: 1 leaked semaphore objects\n"


def uncaught(error, *frames):
    """An exception that ends the API server; Python prints it, without a logger."""
    entry = '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
    told = "".join(f'  File "/opt/venv/lib/python3.12/site-packages/{each}\n' for each in frames)
    return f"Traceback (most recent call last):\n{entry}{told}{error}\n{LEAK}"


@pytest.mark.parametrize(
    ("error", "frame", "kind"),
    [
        ("ModuleNotFoundError: No module named 'acme_auth'", 'importlib/__init__.py", line 126, in import_module', Kind.OTHER),
        ("FileNotFoundError: [Errno 2] No such file or directory", 'uvicorn/config.py", line 131, in create_ssl_context', Kind.BAD_ARGUMENT),
    ],
)  # fmt: skip
def test_a_server_that_fails_before_it_serves_and_stops_its_own_engine_was_not_asked_to_stop(
    error, frame, kind
):
    found = diagnose(BANNER + LOADED + ENGINE_UP + OWN_STOP + uncaught(error, frame))
    assert (found.kind, found.when) == (kind, When.STARTUP)
    assert found.evidence == error


@pytest.mark.parametrize("exit_code", [0, 1, 255, -15])
def test_a_server_that_ended_without_a_last_word_does_not_serve(exit_code):
    found = diagnose(BANNER + LOADED + ENGINE_UP + UP, exit_code=exit_code)
    assert found.cause == f"It served and ended (exit code {exit_code}); the log does not say why."
    assert found.confidence is Confidence.LOW


def test_what_a_server_prints_that_was_told_to_stop_is_no_failure():
    log = BANNER + LOADED + ENGINE_UP + OWN_STOP
    for error in ("KeyboardInterrupt: ", "asyncio.exceptions.CancelledError"):
        frame = 'vllm/entrypoints/launcher.py", line 3, in serve_http'
        assert diagnose(log + uncaught(error, frame)).kind in (Kind.HEALTHY, Kind.OTHER)
    asked = "(APIServer pid=7) INFO 11-21 10:10:02 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    late = uncaught("ValueError: too late", 'vllm/entrypoints/launcher.py", line 3, in serve_http')
    assert diagnose(BANNER + LOADED + ENGINE_UP + UP + asked + OWN_STOP + late).healthy


def test_an_address_of_another_machine_is_not_one_in_use():
    found = diagnose(BANNER + uncaught("OSError: [Errno 99] Cannot assign requested address", 'vllm/entrypoints/launchers/api_server/entry.py", line 90, in create_server_socket'))  # fmt: skip
    assert found.kind is Kind.BAD_ARGUMENT
    assert "not an address of this machine" in found.cause
    assert found.remedies[0].flag == "--host"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("argument --dtype: invalid choice: 'float64' (choose from 'auto', 'half')", "one of 'auto', 'half'"),
        ("argument --max-lora-rank: invalid choice: 1000 (choose from 1, 8, 512)", "one of 1, 8, 512"),
        ("argument --override-generation-config: Value {temperature: 0.5 cannot be converted to <function loads at 0x7fb6>.", "valid JSON"),
    ],
)  # fmt: skip
def test_what_a_flag_takes_is_told_as_it_is_to_be_written(error, why):
    (advice, *_) = diagnose(BANNER + f"api_server.py: error: {error}\n").remedies
    assert advice.why.startswith(why)
    assert not advice.why.endswith(")")


def test_the_parsers_that_there_are_are_told_without_their_braces():
    found = diagnose(BANNER + uncaught("KeyError: 'invalid tool call parser: lama3 (chose from { hermes,llama3_json })'", 'vllm/entrypoints/openai/serving.py", line 1, in init_app_state'))  # fmt: skip
    assert found.cause == "There is no tool call parser lama3."
    assert found.remedies[0].why == "one of hermes,llama3_json"


def test_a_file_that_is_no_json_any_more_is_told_as_damaged():
    error = "json.decoder.JSONDecodeError: Unterminated string starting at: line 302 column 7 (char 4998)"
    found = diagnose(BANNER + uncaught(error, 'transformers/tokenization_utils_tokenizers.py", line 90, in __init__'))  # fmt: skip
    assert found.kind is Kind.TOKENIZER
    assert "cut off or damaged" in found.remedies[0].why


def test_a_process_that_was_killed_is_told_with_what_is_known_and_where_to_look():
    log = BANNER + core("Worker proc VllmWorker-1 died unexpectedly, exit code: -9")
    found = diagnose(log)
    assert found.cause == "VllmWorker-1 was killed with SIGKILL; the log does not say by whom."
    assert "oom_kill" in found.look_at


def test_a_model_that_is_not_there_is_told_with_the_flag_that_names_it():
    told = "(APIServer pid=7) INFO 11-21 10:09:36 [utils.py:1] non-default args: {'model': '/models/a', 'rope_scaling': {'x': 1}, 'speculative_config': {'model': '/models/head', 'n': {'k': 3}}}\n"
    error = "ValueError: Invalid repository ID or local directory specified: '%s'."
    for path, flag in (
        ("/models/head", "--speculative-config"),
        ("/models/a", "--model"),
        ("/x", "--model"),
    ):
        found = diagnose(
            BANNER + told + uncaught(error % path, 'vllm/config/model.py", line 1, in f')
        )
        assert found.kind is Kind.MODEL_NOT_FOUND
        assert found.remedies[0].flag == flag


def test_a_message_ends_where_a_line_is_empty():
    first = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'acme'\n\n"
    then = "The above exception was the direct cause of the following exception:\n\n"
    found = diagnose(BANNER + first + then + uncaught("ImportError: Please install acme", 'vllm/a.py", line 1, in f'))  # fmt: skip
    assert found.cause.endswith("'acme'.")


def test_a_file_that_is_missing_is_to_be_looked_for_where_the_server_runs():
    error = "RuntimeError: ('Could not load logging config. File does not exist: %s', '/etc/vllm/logging.json')"
    found = diagnose(uncaught(error, 'vllm/logger.py", line 90, in _configure_vllm_root_logger'))
    assert "/etc/vllm/logging.json" in found.evidence
    assert "where the server runs" in found.remedies[0].why


def test_a_warning_of_pythons_after_a_short_line_is_not_its_continuation():
    rows = ["x" * 100, "ModuleNotFoundError: No module named 'acme_auth'", LEAK.rstrip()] * 3
    assert "ModuleNotFoundError: No module named 'acme_auth'" in [each.text for each in read("\n".join(rows))]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "frame", "kind", "advice"),
    [
        ("OSError: It looks like the config file at '/models/a/config.json' is not a valid JSON file.", 'transformers/configuration_utils.py", line 886, in _get_config_dict', Kind.WEIGHTS, "checksums"),
        ("FileNotFoundError: [Errno 2] No such file or directory", 'vllm/entrypoints/launchers/launcher.py", line 355, in create_server_unix_socket', Kind.BAD_ARGUMENT, "folder exists"),
        ("AttributeError: module 'numpy' has no attribute 'ndarray'", 'torch/utils/data/_utils/collate.py", line 330, in <module>', Kind.OTHER, "PYTHONPATH"),
    ],
)  # fmt: skip
def test_a_damaged_config_a_folder_that_is_missing_and_a_hidden_package_are_told(
    error, frame, kind, advice
):
    found = diagnose(BANNER + uncaught(error, frame))
    assert found.kind is kind
    assert "unknown error" not in found.cause
    assert advice in " ".join(each.why for each in found.remedies)


def test_a_config_that_the_models_code_cannot_build_is_told_as_that():
    frames = 'vllm/model_executor/models/llama.py", line 243, in _init_rotary_emb', 'vllm/model_executor/layers/rotary_embedding/__init__.py", line 350, in get_rope'  # fmt: skip
    found = diagnose(failing("ValueError: Unknown RoPE scaling type spiral", *frames))
    assert found.kind is Kind.UNSUPPORTED_ARCHITECTURE
    assert "config.json" in found.cause
    assert "--hf-overrides" in found.remedies[0].why
