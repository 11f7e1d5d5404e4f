"""Rules about processes and their surroundings: ports, disks, deaths, hangs, packages, signals.

Source: messages of vLLM (launchers, v1/engine, v1/executor, distributed), of the OS, Python,
SLURM, and of compilers that run at start.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.config.supervision import Remedy
from gateway.vllmlog.rules.rule import Found, Rule
from gateway.vllmlog.verdict import Advice, Kind

_UDS: Final = re.compile(r"""['"]?\buds['"]?[=:] ?['"]([^'"]{1,108})['"]""")
_DISK: Final = (
    Advice("VLLM_CACHE_ROOT", None, "a file system with room (torch.compile's artefacts)"),
    Advice("HF_HOME", None, "the same for downloads"),
    Advice("", None, "or free some space: ~/.cache/vllm, ~/.cache/huggingface"),
)
_RESTART: Final = Advice("", None, "restart the server")
_PACKAGES: Final = Advice(
    "", None, "reinstall vLLM into a fresh environment, with the versions that it pins"
)
_COMPILER: Final = (
    Advice("--enforce-eager", None, "compiles nothing at start", Remedy.ENFORCE_EAGER),
    Advice("--attention-backend", None, "one that needs no compiler"),
    Advice("", None, "make nvcc, gcc and ninja of the right versions available"),
)


def _socket(found: Found) -> str | None:
    """Return the UNIX socket that it was to listen on, unless the address in use is another."""
    told = _UDS.search(found.start.arguments)
    return None if told is None or found.groups.get("address") else told[1]


def _in_use(found: Found) -> str:
    if (path := _socket(found)) is not None:
        return f"The UNIX socket that it should listen on is there already: {path}."
    address = found.groups.get("address")
    return f"The address that it should listen on is in use{f': {address}' if address else ''}."


def _free_address(found: Found) -> tuple[Advice, ...]:
    if _socket(found) is not None:
        stop = (
            "or stop what listens on it (ss -lxp); when nothing does, the file is stale: unlink it"
        )
        return Advice("--uds", None, "another path"), Advice("", None, stop)
    return Advice("--port", None, "a free one"), Advice(
        "", None, "or stop what holds it (ss -ltnp)"
    )


RULES: Final[tuple[Rule, ...]] = (
    Rule("port", Kind.PORT,
         r"(?:\[Errno (?:98|48|10048)\]|OSError|ZMQError|RuntimeError|EADDRINUSE|errno: -98"
         r"|error while attempting to bind).{0,200}"
         r"[Aa]ddress already in use(?!\. Retrying)(?: \(addr='(?P<address>[^']{1,200})'\))?"
         r"|[Aa]ddress already in use(?!\. Retrying).{0,40}(?:port|bind)|EADDRINUSE",
         _in_use, remedies=_free_address, restart=False),
    Rule("address", Kind.BAD_ARGUMENT, r"Cannot assign requested address",
         "What it should listen on is not an address of this machine.",
         remedies=(Advice("--host", None, "an address of this machine (`ip address`); 0.0.0.0: all of them"),),
         restart=False),
    Rule("disk", Kind.DISK,
         r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]|os error (?:28|122)\b|ENOSPC|EDQUOT"
         r"|Not enough free disk space|Consistency check failed|disk I/O error",
         "A disk or quota is full.", remedies=_DISK, serving=True, restart=False),
    Rule("read_only", Kind.DISK,
         r"\[Errno 30\]|Read-only file system|PermissionError: \[Errno 13\].{0,200}(?:cache|hub|hf|vllm|triton"
         r"|flashinfer)"
         r"|Stale file handle|\[Errno 116\]",
         "A cache folder cannot be written.", remedies=_DISK, restart=False, rank=1),
    Rule("threads", Kind.OTHER,
         r"Resource temporarily unavailable|can't start new thread|pthread_create failed|Too many open files"
         r"|\[Errno (?:11|24)\]",
         "The process has reached its limit of threads or open files.", restart=True, serving=True,
         remedies=(Advice("", None, "raise `ulimit -u` and `-n`, or the container's pids limit"),)),
    Rule("nvml", Kind.OTHER, r"NVML_SUCCESS == r INTERNAL ASSERT|Failed to initialize NVML|nvml error",
         "The driver's management library fails inside this container.", restart=True,
         remedies=(Advice("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "avoids the call"),
                   Advice("", None, "check nvidia-smi in the container (vGPU, MIG, a driver upgraded under it)"))),
    Rule("fork", Kind.OTHER, r"Cannot re-initialize CUDA in forked subprocess",
         "CUDA was used before the workers were forked.",
         remedies=(Advice("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "workers start afresh", Remedy.SPAWN),)),
    Rule("spawn_main", Kind.OTHER,
         r"An attempt has been made to start a new process before the",
         "The script starts processes while it is imported.",
         remedies=(Advice("", None, "put the script's start under `if __name__ == \"__main__\":`"),)),
    Rule("package_missing", Kind.OTHER,
         r"^(?:ModuleNotFoundError: No module named|ImportError: .{0,120}(?:is not installed|install|requires?"
         r"|needs?)) ?(?P<package>.{0,80})",
         "A Python package is missing or of the wrong version: {package}.", rank=2,
         remedies=(Advice("", None, "install the package, in the version that the line names"), _PACKAGES)),
    Rule("package_broken", Kind.OTHER,
         r"^ImportError: |undefined symbol: |cannot open shared object file|version `\w+_[\d.]+' not found"
         r"|(?:DistributionNotFound|VersionConflict|PackageNotFoundError)|has no attribute '?_C\b"
         r"|No module named '?vllm\._C"
         r"|'_OpNamespace' '\w+' object has no attribute",
         "A compiled package is not compatible with the installed versions.", rank=2,
         remedies=(_PACKAGES,)),
    Rule("compile", Kind.OTHER,
         r"Ninja build failed|ninja: build stopped|nvcc fatal|Failed to find C compiler|Could not find nvcc"
         r"|nvcc: not found"
         r"|fatal error: Python\.h|InductorError|TorchRuntimeError"
         r"|BackendCompilerFailed|torch\._dynamo\.exc\.\w+|PermissionError.{0,80}nvcc|CompilationError"
         r"|CppCompileError",
         "A kernel could not be compiled at start.", remedies=_COMPILER, rank=2),
    Rule("compiler_killed", Kind.OTHER,
         r"died with <Signals\.(?P<signal>(?!SIGKILL)\w+): \d+>",
         "A program that the start needs, such as a compiler, was ended by {signal}.", restart=True,
         remedies=(Advice("", None, "start it detached from the session (nohup, a service), and again"),)),
    Rule("cancelled", Kind.OTHER,
         r"^(?:slurmstepd|srun): .{0,80}(?:CANCELLED AT|DUE TO TIME LIMIT|Job step aborted|Killed|Terminated)"
         r"|\bCANCELLED AT\b",
         "The job was ended from outside, by its scheduler.", serving=True, restart=None, rank=1,
         remedies=(Advice("", None, "a longer time limit, if it was that"),)),
    Rule("rpc_timeout", Kind.EXECUTE_TIMEOUT,
         r"RPC call to (?P<call>\w+) timed out|(?:execute_model|sample_tokens).{0,60}timed out|RayChannelTimeoutError",
         "A worker did not answer {call} in time: a GPU or a collective hangs.", serving=True, restart=True,
         remedies=(_RESTART, Advice("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "600", "if steps may really take that "
             "long"),
                   Advice("--disable-custom-all-reduce", None, "if it happens again"))),
    Rule("engine_timeout", Kind.HANG,
         r"Timed out waiting for engine(?:s| core)|Did not receive response from front-end"
         r"|Timeout waiting for engine core",
         "The engine's processes were not ready in time.", restart=True, rank=2,
         remedies=(Advice("VLLM_ENGINE_READY_TIMEOUT_S", "1800", "a large model on a slow disk needs longer"),),
         look_at="the last stage that each process reached"),
    Rule("segfault", Kind.ENGINE_DEAD,
         r"Segfault encountered|Segmentation fault|SIGSEGV|Fatal Python error|core dumped",
         "A native crash (segmentation fault) ended a process of the engine.", serving=True, restart=True, rank=1,
         remedies=(_RESTART, Advice("", None, "upgrade vLLM and torch"),
                   Advice("--enforce-eager", None, "if it happens again", Remedy.ENFORCE_EAGER))),
    Rule("process_died", Kind.ENGINE_DEAD,
         r"(?:Worker proc|Engine core proc(?:ess)?) (?P<who>\S+) died unexpectedly(?! \(exit code: None\))"
         r"|(?P<who2>engine core) exited unexpectedly",
         "A process of the engine ended without saying why.", serving=True, restart=True, rank=2,
         remedies=(_RESTART, Advice("", None, "look for the OOM killer and Xid errors in dmesg")),
         any_level=True),
)  # fmt: skip
