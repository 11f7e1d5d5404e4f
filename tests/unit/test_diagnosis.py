import json
from pathlib import Path

import pytest

from gateway.config.supervision import Remedy
from gateway.vllmlog.diagnosis import Confidence, Kind, When, diagnose

LOGS = Path(__file__).parents[1] / "data" / "logs"  # of a real vLLM 0.32 on a CPU

BANNER = (
    "(APIServer pid=7) INFO 11-21 10:09:36 [api_server.py:1896] vLLM API server version 0.10.2\n"
)
ARGUMENTS = (
    "(APIServer pid=7) INFO 11-21 10:09:36 [utils.py:328] non-default args: {'model': 'm', "
    "'max_model_len': 4096, 'gpu_memory_utilization': 0.8, 'max_num_seqs': 64}\n"
)
LOADED = "(EngineCore_0 pid=8) INFO 11-21 10:09:50 [gpu.py:1] Model loading took 7.3 GiB and 4.1 seconds\n"
UP = "INFO:     Application startup complete.\n"
WORKS = (
    "(APIServer pid=7) INFO 11-21 10:10:36 [loggers.py:1] Engine 000: Avg prompt throughput: 9.0 "
    "tokens/s, Avg generation throughput: 40.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs\n"
)
STALL = (
    "(EngineCore_0 pid=8) INFO 11-21 10:12:00 [shm_broadcast.py:1] No available shared memory "
    "broadcast block found in 60 seconds. This typically happens when\n"
)
WRAPPER = (
    "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}\n"
)
DEAD = (
    "(APIServer pid=7) ERROR 11-21 10:11:00 [async_llm.py:1] vllm.v1.engine.exceptions."
    "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
)


def log(name):
    return (LOGS / f"{name}.txt").read_bytes()


def core(words, level="ERROR"):
    return f"(EngineCore_0 pid=8) {level} 11-21 10:09:55 [core.py:1] {words}\n"


def failing(words):
    """A start that fails with an error in the engine, wrapped as vLLM does."""
    return BANNER + ARGUMENTS + core(words) + WRAPPER


def remedies(found):
    return [(each.flag, each.value) for each in found.remedies]


@pytest.mark.parametrize(
    ("name", "kind", "remedy"),
    [
        ("bad_flag", Kind.BAD_ARGUMENT, ("--no-such-flag", None)),
        ("bad_dtype", Kind.BAD_ARGUMENT, ("--dtype", "auto")),
        ("bad_json", Kind.BAD_ARGUMENT, None),
        ("bad_tool_parser", Kind.BAD_ARGUMENT, ("--tool-call-parser", None)),
        ("batched_tokens", Kind.BAD_ARGUMENT, ("--max-num-batched-tokens", "2048")),
        ("max_model_len_above_derived", Kind.BAD_ARGUMENT, ("--max-model-len", "2048")),
        ("kv_small", Kind.KV_CACHE_TOO_SMALL, ("--max-model-len", "896")),
        ("cpu_memory", Kind.FREE_MEMORY_LOW, ("VLLM_CPU_KVCACHE_SPACE", "10")),
        ("lora_rank", Kind.LORA, ("--max-lora-rank", "8")),
        ("lora_missing", Kind.LORA, ("--lora-modules", None)),
        ("missing_model", Kind.MODEL_NOT_FOUND, ("--model", None)),
        ("port_taken", Kind.PORT, ("--port", None)),
        ("tp_heads", Kind.TP_NOT_DIVISIBLE, ("--tensor-parallel-size", "2")),
        ("quantization_missing", Kind.QUANTIZATION, ("--quantization", None)),
        ("tokenizer_missing", Kind.TOKENIZER, ("--tokenizer", None)),
        ("chat_template_missing", Kind.CHAT_TEMPLATE, ("--chat-template", None)),
        ("unknown_architecture", Kind.UNSUPPORTED_ARCHITECTURE, None),
        ("weights_missing", Kind.WEIGHTS, None),
        ("weights_truncated", Kind.WEIGHTS, None),
        ("weights_shape", Kind.WEIGHTS, None),
    ],
)
def test_a_real_failed_start_is_named_with_proof_and_remedy(name, kind, remedy):
    found = diagnose(log(name))
    assert (found.kind, found.when, found.restart_helps) == (kind, When.STARTUP, False)
    assert found.evidence in log(name).decode()
    assert remedy is None or remedy in remedies(found)


def test_the_cause_of_a_failed_start_is_not_its_last_line():
    found = diagnose(log("kv_small"))
    assert "about 896 tokens fit" in found.cause
    assert "To serve at least one request" in found.evidence
    assert found.confidence is Confidence.HIGH
    assert Kind.ENGINE_INIT in found.secondary


def test_an_engine_that_was_killed_is_dead_and_a_restart_helps():
    found = diagnose(log("engine_killed"), exit_code=0)
    assert (found.kind, found.when) == (Kind.ENGINE_DEAD, When.SERVING)
    assert found.restart_helps is True
    assert "engine core exited unexpectedly" in found.evidence


def test_an_engine_that_dies_of_what_it_cannot_do_is_not_helped_by_a_restart():
    found = diagnose(log("engine_died"))
    assert (found.kind, found.when) == (Kind.ENGINE_DEAD, When.SERVING)
    assert "Unsupported CPU attention configuration: head_dim=16" in found.cause
    assert found.restart_helps is False


def test_workers_that_do_not_answer_for_minutes_are_a_hang():
    found = diagnose(log("worker_stopped"))
    assert (found.kind, found.restart_helps) == (Kind.HANG, True)
    assert "No available shared memory broadcast block" in found.evidence


def test_a_failed_start_without_its_cause_says_so():
    found = diagnose(log("engine_killed_at_start"))
    assert (found.kind, found.confidence) == (Kind.ENGINE_INIT, Confidence.LOW)
    assert found.look_at


def test_a_served_and_stopped_engine_is_healthy():
    found = diagnose(log("healthy"))
    assert found.healthy
    assert (found.remedies, found.secondary) == ((), ())
    assert "stopped when it was asked to" in found.cause


def test_no_part_of_a_healthy_log_raises_an_alarm():
    lines = log("healthy").split(b"\n")
    parts = [lines[:place] for place in range(len(lines))] + [
        lines[place:] for place in range(len(lines))
    ]
    kinds = {diagnose(b"\n".join(part)).kind for part in parts}
    assert kinds == {Kind.HEALTHY, Kind.UNKNOWN}


# --- what stands before the message ----------------------------------------------------------------

PREFIXES = {
    "docker compose": "vllm-server-1  | ",
    "journald": "Nov 21 10:09:36 gpu-1 vllm[4711]: ",
    "kubernetes": "2026-11-21T10:09:36.123456789Z stderr F ",
    "docker -t": "2026-11-21T10:09:36.123456789Z ",
    "kubectl --prefix": "[pod/vllm-0/server] ",
    "timestamps": "[2026-11-21 10:09:36] ",
    "colours": "\x1b[0;36m",
    "ranks": "[rank0]: ",
    "none": "",
}


def test_a_socket_that_is_taken_is_no_port():
    told = log("port_taken").decode()
    on_port = "'host': '127.0.0.1', 'port': 18520, "
    assert on_port in told
    found = diagnose(told.replace(on_port, "'uds': '/run/vllm/m.sock', "))
    assert found.kind is Kind.PORT
    assert found.cause.endswith("is there already: /run/vllm/m.sock.")
    assert remedies(found)[0] == ("--uds", None)
    assert not any("port" in each.flag + each.why for each in found.remedies)


@pytest.mark.parametrize(
    "arguments",
    ["non-default args: {'uds': '/run/m.sock'}", "args: Namespace(port=8000, uds='/run/m.sock')"],
)
def test_an_inner_address_that_is_taken_is_not_the_socket_of_the_server(arguments):
    start = BANNER + f"(APIServer pid=7) INFO 11-21 10:09:50 [api_utils.py:286] {arguments}\n"
    error = core("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5555')")
    found = diagnose(start + error + WRAPPER)
    assert "tcp://127.0.0.1:5555" in found.cause
    plain = diagnose(start + core("OSError: [Errno 98] Address already in use") + WRAPPER)
    assert "/run/m.sock" in plain.cause


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("name", ["kv_small", "engine_killed", "port_taken", "healthy"])
def test_what_others_put_before_a_line_changes_nothing(name, prefix, ending):
    plain = diagnose(log(name))
    wrapped = diagnose("".join(prefix + line + ending for line in log(name).decode().split("\n")))
    assert (wrapped.kind, wrapped.rule, wrapped.remedies) == (
        plain.kind,
        plain.rule,
        plain.remedies,
    )
    assert wrapped.line == plain.line
    assert plain.evidence in wrapped.evidence


def test_the_files_of_dockers_json_driver_are_read():
    lines = log("kv_small").decode().split("\n")
    entries = [json.dumps({"log": line + "\n", "stream": "stderr", "time": "t"}) for line in lines]
    assert diagnose(entries) == diagnose(log("kv_small"))


# --- several starts in one file ---------------------------------------------------------------------


def test_the_last_start_of_a_file_counts():
    assert diagnose(log("kv_small") + log("healthy")).healthy
    assert diagnose(log("healthy") + log("kv_small")).kind is Kind.KV_CACHE_TOO_SMALL
    assert diagnose(log("kv_small") + log("bad_flag")).kind is Kind.BAD_ARGUMENT


def test_a_start_under_way_leaves_the_failure_before_it_as_the_answer():
    found = diagnose(log("kv_small") + (BANNER + ARGUMENTS).encode())
    assert found.kind is Kind.KV_CACHE_TOO_SMALL
    assert found.confidence is Confidence.MEDIUM
    assert "an earlier start" in found.look_at


def test_a_start_under_way_after_a_healthy_one_is_unknown():
    assert diagnose(log("healthy") + (BANNER + ARGUMENTS).encode()).kind is Kind.UNKNOWN


def test_requests_of_another_server_in_the_same_file_do_not_hide_a_failed_start():
    other = '(APIServer pid=99) INFO:     127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200 OK\n'
    words = "ValueError: No available memory for the cache blocks. Try increasing"
    assert diagnose(failing(words) + other * 3).kind is Kind.NO_CACHE_MEMORY


# --- traps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trap",
    [
        "INFO 11-21 10:11:00 logger.py:36] Received request cmpl-1: prompt: 'TypeError: CUDA out of "
        "memory\\n  Traceback (most recent call last)', params: SamplingParams(n=1)\n",
        "TypeError: this was printed by a prompt\n",
        "CUDA out of memory, wrote the user\n",
        "(APIServer pid=7) WARNING 11-21 10:11:00 [launcher.py:98] port 8000 is used by process 7\n",
        core("Address already in use. Retrying with a new port.", "WARNING"),
        STALL * 2 + WORKS,
        '(APIServer pid=7) INFO:     1.1.1.1:5 - "POST /v1/completions HTTP/1.1" 500 Error\n',
        "[rank0]:[W1121 10:11:00.1 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not called\n",
    ],
)
def test_what_only_looks_sick_is_healthy(trap):
    assert diagnose(BANNER + ARGUMENTS + LOADED + UP + WORKS + trap).healthy
    assert diagnose(BANNER + ARGUMENTS + LOADED + UP + trap + WORKS).healthy


def test_an_error_that_the_start_survived_is_no_cause():
    plugin = core("ModuleNotFoundError: No module named 'somewhere'")
    assert diagnose(BANNER + ARGUMENTS + plugin + LOADED + UP + WORKS).healthy
    assert diagnose(BANNER + ARGUMENTS + plugin + LOADED).kind is Kind.UNKNOWN


def test_a_dead_engine_after_a_stop_was_asked_for_is_normal():
    stop = (
        "(APIServer pid=7) INFO 11-21 10:11:00 [l.py:1] [shutdown] API server: shutdown triggered\n"
    )
    assert diagnose(BANNER + UP + WORKS + stop + DEAD).healthy
    assert diagnose(DEAD + stop).healthy
    assert diagnose(BANNER + UP + WORKS + DEAD).kind is Kind.ENGINE_DEAD


def test_a_collective_that_hangs_after_the_stop_is_still_told():
    stop = "INFO:     Shutting down\n"
    late = "[rank0]:[E1121 10:20:00.1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: W\n"
    assert diagnose(BANNER + UP + WORKS + stop + late).kind is Kind.NCCL


def test_what_failed_before_a_stop_counts():
    stop = (
        "(APIServer pid=7) INFO 11-21 10:11:00 [l.py:1] [shutdown] API server: shutdown triggered\n"
    )
    oom = core("torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert diagnose(BANNER + UP + WORKS + oom + stop + DEAD).kind is Kind.OOM_RUNTIME


def test_a_start_that_waits_for_a_lock_is_told_as_a_guess():
    lock = "(Worker_TP0 pid=9) waiting for baton release at /root/.cache/lock_module\n"
    found = diagnose(BANNER + ARGUMENTS + STALL + lock)
    assert (found.kind, found.when, found.confidence) == (Kind.HANG, When.STARTUP, Confidence.LOW)
    assert "lock_module" in found.cause
    assert diagnose(BANNER + ARGUMENTS + STALL + LOADED).kind is Kind.UNKNOWN


def test_a_start_that_was_told_to_stop_is_interrupted():
    stop = "(EngineCore_0 pid=8) INFO 11-21 10:11:00 [c.py:1] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
    assert diagnose(BANNER + ARGUMENTS + LOADED + stop).rule == "interrupted"


def test_stalls_of_an_idle_engine_are_no_hang():
    idle = WORKS.replace("Running: 2", "Running: 0").replace("40.0", "0.0")
    assert diagnose(BANNER + UP + idle + STALL * 9).healthy
    assert diagnose(BANNER + UP + WORKS + STALL * 9).kind is Kind.HANG
    assert diagnose(BANNER + UP + STALL * 9 + WORKS).healthy


def test_a_refused_request_is_told_but_a_restart_does_not_help():
    refused = (
        "(APIServer pid=7) vllm.exceptions.VLLMValidationError: This model's maximum context length "
        "is 2048 tokens. However, you requested 3000 tokens\n"
    )
    found = diagnose(BANNER + UP + WORKS + refused + WORKS)
    assert (found.kind, found.when) == (Kind.CONTEXT_LENGTH, When.SERVING)
    assert found.restart_helps is False


def test_an_interrupted_start_is_no_fault_of_the_engine():
    found = diagnose(BANNER + ARGUMENTS + "(EngineCore_0 pid=8) KeyboardInterrupt\n" + WRAPPER)
    assert (found.kind, found.rule) == (Kind.OTHER, "interrupted")


# --- numbers ----------------------------------------------------------------------------------------


def test_utilization_is_what_is_free_with_a_margin_rounded_down():
    found = diagnose(
        failing(
            "ValueError: Free memory on device cuda:0 (20.50/80.0 GiB) on startup is less than desired "
            "GPU memory utilization (0.8, 64.0 GiB). Decrease GPU memory utilization"
        )
    )
    assert ("--gpu-memory-utilization", "0.23") in remedies(found)  # 0.256 - 0.02
    assert "20.50 of 80.0 GiB" in found.cause
    assert found.remedies[1].action is Remedy.ADJUST_GPU_MEMORY_UTILIZATION


def test_no_utilization_is_offered_when_next_to_nothing_is_free():
    found = diagnose(
        failing(
            "ValueError: Free memory on device (0.75/24.0 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 21.6 GiB)."
        )
    )
    assert found.kind is Kind.FREE_MEMORY_LOW
    assert "--gpu-memory-utilization" not in dict(remedies(found))


@pytest.mark.parametrize(
    ("estimate", "longest"),
    [
        (" Based on the available memory, the estimated maximum model length is 1015.", "1008"),
        ("", "992"),
    ],
    ids=["told", "computed"],
)
def test_the_longest_context_is_a_whole_number_of_blocks(estimate, longest):
    found = diagnose(
        failing(
            "ValueError: To serve at least one request with the models's max seq len (4096), (2.00 GiB "
            "KV cache is needed, which is larger than the available KV cache memory (0.50 GiB)."
            + estimate
        )
    )
    assert remedies(found)[0] == ("--max-model-len", longest)
    assert ("--gpu-memory-utilization", "0.85") in remedies(found)  # from 0.8


def test_the_memory_of_the_log_is_told_when_nothing_is_left_for_the_cache():
    left = core("Available KV cache memory: -2.50 GiB", "INFO")
    found = diagnose(
        BANNER
        + ARGUMENTS
        + LOADED
        + left
        + core("ValueError: No available memory for the cache blocks.")
        + WRAPPER
    )
    assert found.kind is Kind.NO_CACHE_MEMORY
    assert "weights take 7.3 GiB" in found.cause
    assert "-2.50 GiB" in found.cause
    assert ("--max-num-seqs", "32") in remedies(found)


def test_memory_that_runs_out_is_told_by_where_it_did():
    oom = core(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 300.00 MiB is free."
    )
    loading = core('  File "gpu_model_runner.py", line 1, in load_model')
    profiling = core('  File "gpu_worker.py", line 1, in determine_available_memory')
    start = BANNER + ARGUMENTS
    assert diagnose(start + loading + oom + WRAPPER).kind is Kind.OOM_LOAD
    assert diagnose(start + LOADED + profiling + oom + WRAPPER).kind is Kind.OOM_RUNTIME
    assert diagnose(start + LOADED + oom + WRAPPER).kind is Kind.OOM_RUNTIME
    served = diagnose(start + UP + WORKS + oom + DEAD)
    assert (served.kind, served.when, served.restart_helps) == (
        Kind.OOM_RUNTIME,
        When.SERVING,
        True,
    )
    assert "2.00 GiB were asked for, 300.00 MiB of 24.00 GiB were free" in served.cause


# --- the process ended without a word ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "kind"),
    [
        (-9, Kind.OTHER),
        (137, Kind.OTHER),
        (-11, Kind.ENGINE_DEAD),
        (143, Kind.OTHER),
        (2, Kind.UNKNOWN),
        (0, Kind.UNKNOWN),
        (1, Kind.UNKNOWN),
        (None, Kind.UNKNOWN),
    ],
)
def test_the_exit_code_answers_when_the_log_does_not(exit_code, kind):
    found = diagnose(BANNER + ARGUMENTS + LOADED, exit_code=exit_code)
    assert (found.kind, found.evidence) == (kind, "")
    assert found.confidence is Confidence.LOW


def test_a_killed_server_is_out_of_host_memory_only_with_proof():
    text = BANNER + ARGUMENTS + LOADED
    proven = diagnose(text, exit_code=-9, oom_killed=True)
    assert (proven.kind, proven.confidence) == (Kind.HOST_MEMORY, Confidence.HIGH)
    unknown = diagnose(text, exit_code=-9)
    assert "Possible causes: the kernel (out of host memory)" in unknown.cause
    refuted = diagnose(text, exit_code=-9, oom_killed=False)
    assert refuted.kind is Kind.OTHER
    assert "counts no kill for lack of memory" in refuted.cause


def test_proof_of_a_kill_says_more_than_a_dead_engine_and_less_than_a_cause():
    dead = (
        BANNER + LOADED + "ERROR 11-21 10:10:03 [x.py:1] EngineDeadError: EngineCore encountered\n"
    )
    assert diagnose(dead, oom_killed=True).kind is Kind.HOST_MEMORY
    assert diagnose(log("kv_small"), oom_killed=True).kind is Kind.KV_CACHE_TOO_SMALL


def test_a_message_says_more_than_the_exit_code():
    assert diagnose(log("kv_small"), exit_code=-9).kind is Kind.KV_CACHE_TOO_SMALL


@pytest.mark.parametrize("empty", ["", b"", [], "\n\n", "hello\n"])
def test_a_log_that_says_nothing_is_unknown(empty):
    assert diagnose(empty).kind is Kind.UNKNOWN


# --- what is handed on ------------------------------------------------------------------------------


def test_the_json_form_is_stable():
    fields = diagnose(log("lora_rank")).fields()
    assert list(fields) == [
        "class",
        "phase",
        "evidence",
        "cause",
        "remedies",
        "restart_helps",
        "confidence",
        "rule",
        "line",
        "secondary",
        "look_at",
    ]
    assert json.loads(json.dumps(fields)) == fields
    assert fields["class"] == "lora_misconfigured"
    assert fields["remedies"] == [
        {
            "flag": "--max-lora-rank",
            "value": "8",
            "why": "the adapter's rank is 8",
            "action": None,
            "remove": False,
        }
    ]


@pytest.mark.parametrize(
    "secret", ["hf_abcdefghijklmnopqrstuvwx", "sk-abcdefghijklmnop1234", "--api-key hunter2hunter2"]
)
def test_a_credential_in_the_proof_is_blotted_out(secret):
    found = diagnose(
        f"usage: vllm [-h]\nvllm: error: unrecognized arguments: --nonsense {secret}\n"
    )
    assert found.kind is Kind.BAD_ARGUMENT
    assert secret.split()[-1] not in found.evidence + found.cause
    assert "--nonsense" in found.evidence


def test_no_control_character_reaches_a_terminal():
    found = diagnose(failing("ValueError: \x1b[31m\x07\x9b2JCUDA out of memory\u2028"))
    assert found.evidence.isprintable()


# --- starts that hang ---------------------------------------------------------------------------------

JOINING = (
    "(Worker_TP0 pid=7) INFO 11-21 10:09:50 [parallel_state.py:1200] world_size=2 rank=0 "
    "local_rank=0 distributed_init_method=tcp://127.0.0.1:5555 backend=nccl\n"
    "(Worker_TP0 pid=7) INFO 11-21 10:09:51 [pynccl.py:111] vLLM is using nccl==2.27.5\n"
)
ALONE = JOINING.splitlines(keepends=True)[0].replace("world_size=2", "world_size=1")


def test_workers_that_hang_while_they_connect_may_do_so_without_peer_to_peer():
    found = diagnose(BANNER + ARGUMENTS + JOINING, hung=True)
    assert (found.kind, found.when, found.restart_helps) == (Kind.NCCL, When.STARTUP, True)
    assert found.confidence is Confidence.LOW
    assert "vLLM is using nccl" in found.evidence
    assert Remedy.NCCL_P2P_OFF in {each.action for each in found.remedies}


@pytest.mark.parametrize(
    "text",
    [ALONE, JOINING + LOADED, JOINING + LOADED + UP, "", "(EngineCore_0 pid=8) hello\n"],
    ids=["one worker", "went on", "came up", "silent", "says nothing"],
)
def test_a_hang_elsewhere_is_not_held_against_nccl(text):
    assert diagnose(BANNER + ARGUMENTS + text, hung=True).kind in (Kind.UNKNOWN, Kind.HEALTHY)


def test_a_start_that_connects_its_workers_and_is_not_known_to_hang_is_unknown():
    assert diagnose(BANNER + ARGUMENTS + JOINING).kind is Kind.UNKNOWN


def test_a_hang_after_an_error_has_that_cause():
    found = diagnose(log("kv_small"), hung=True)
    assert found == diagnose(log("kv_small"))


def test_what_ended_the_start_before_is_no_cause_of_a_hang():
    text = log("kv_small") + (BANNER + ARGUMENTS).encode()
    assert diagnose(text, hung=True).kind is Kind.UNKNOWN


# --- exit code 2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "python3: can't open file '/opt/vllm/serve.py': [Errno 2] No such file or directory\n",
        bytes(range(128, 256)) * 20,
        BANNER + ARGUMENTS + LOADED,
    ],
    ids=["another error", "binary", "a start under way"],
)
def test_exit_code_2_alone_does_not_accuse_the_command_line(text):
    found = diagnose(text, exit_code=2)
    assert (found.kind, found.confidence) == (Kind.UNKNOWN, Confidence.LOW)
    assert "Exit code 2 often is a refused command line" in found.cause


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_exit_code_2_with_an_empty_log_is_likely_a_refused_command_line(text):
    found = diagnose(text, exit_code=2)
    assert (found.kind, found.confidence) == (Kind.BAD_ARGUMENT, Confidence.LOW)
