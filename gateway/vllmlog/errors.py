"""Which lines of a log tell of an error, and where in the program it was raised.

An exception is known by its place, the line that ends a traceback, and only without one by its name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.vllmlog.lines import Line

_QUIET: Final = frozenset({"DEBUG", "INFO", "WARNING"})
_KEPT_FRAMES: Final = 80  # of one traceback: its innermost ones

_NAMED: Final = re.compile(
    r"^(?:ERROR: +)?(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit|Timeout|Failed)(?:\(\w{1,60}\))?(?::|$)"
    r"|^(?:[a-z_]\w{0,60}\.){2,8}[A-Z]\w{1,60}: "
)
# Below the frames of a traceback: any name of a module, or one that begins as a class does.
_ENDS_TRACEBACK: Final = re.compile(
    r"^(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:\(\w{1,60}\)(?=:))?(?:: |:?$)"
    r"|^(?:[A-Za-z_]\w{0,60}\.){1,8}[a-z_]\w{0,60}: "
)
_ENTRY: Final = re.compile(r"in (?:<module>|_run_module_as_main|_bootstrap)$")
_FILE: Final = re.compile(r'^ {0,4}File "')
# Exceptions that only pass on that something else failed, or that mean nothing.
_WRAPPER: Final = re.compile(
    r"EngineDeadError|EngineCore|Engine core init|Engine process failed|WorkerProc init|Executor failed"
    r"|See stack trace|Worker failed with error|RuntimeError: cancelled|Operation not supported"
    r"|CancelledError|SystemExit|GeneratorExit|ensure_kv_transfer_shutdown|HandlerFileNotFoundError"
    r"|BrokenPipeError|EOFError|^RuntimeError: Engine |ProcessExited|ChildFailedError"
    r"|CalledProcessError|MessageFactory|Error raised in subprocess|ZMQError: (?:Operation|Socket)"
    r"|RayTaskError\(|ExceptionGroup: "
)
# What native code and schedulers print, without a logger and without an exception.
NATIVE: Final = re.compile(
    r"^(?:Exception |terminate called|!!+|Fatal |Segmentation|Memory access fault|Killed|Aborted"
    r"|what\(\)|CUDA [Ee]rror: |HSA_|slurmstepd|srun|scancel)|error: \*\*\*|Killed$|Killed process|oom[-_]kill"
)
# What torch and others say below every error of a kind: how to find out more. It proves nothing.
ADVICE: Final = re.compile(
    r"^(?:Compile with `TORCH_USE_|For debugging consider passing|Search for `|Device-side assertion "
    r"tracking|(?:CUDA|HIP|XPU|NPU) kernel errors might be|If you were trying to|Set TORCHDYNAMO_"
    r"|For further information visit|Note: |Since the operator is called asynchronously)"
)
# A server lists its arguments before it starts.
LISTING: Final = re.compile(r"(?:\b\w{1,60}=[^,=]{0,80}, ){4}")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that ended a traceback, or was logged by its name."""

    name: str  # with its module, such as torch.OutOfMemoryError
    said: str = ""  # the whole line, without its prefixes
    frames: tuple[str, ...] = ()  # `File "...", line 1, in function`, the innermost last
    code: str = ""  # the source line that raised it
    uncaught: bool = False  # it went out of a process, and Python printed it


def is_quiet(line: Line) -> bool:
    """Whether a logger said that it is no error."""
    return line.level in _QUIET


def passes_on(line: Line) -> bool:
    """Whether an exception only says that another one ended something."""
    return _WRAPPER.search(line.text) is not None


def repeats(line: Line) -> bool:
    """Whether it passes on the words of the other one as well."""
    return "Worker failed with error" in line.text or "CalledProcessError" in line.text


def raised_in(lines: Sequence[Line]) -> dict[int, Raised]:
    """Return the exceptions by their places. Processes that write at the same time are told apart."""
    found: dict[int, Raised] = {}
    frames: defaultdict[str, list[str]] = defaultdict(list)
    code: defaultdict[str, str] = defaultdict(str)
    for place, line in enumerate(lines):
        who, text = line.process, line.text
        if is_quiet(line) or not text.strip():
            continue
        if line.is_frame:
            if text.startswith("Traceback"):
                frames.pop(who, None)
            elif _FILE.match(text):
                frames[who].append(text.strip())
            elif text[4:5].strip("^~ "):
                code[who] = text.strip()
            continue
        ends = _ENDS_TRACEBACK if frames.get(who) else _NAMED
        if ends.match(text) or _NAMED.match(text):
            name = text.removeprefix("ERROR: ").strip().partition(":")[0]
            told = frames.pop(who, [])
            uncaught = not line.level and bool(told) and _ENTRY.search(told[0]) is not None
            inner = tuple(told[-_KEPT_FRAMES:])
            found[place] = Raised(name, text, inner, code.pop(who, ""), uncaught)
    for who, cut in frames.items():  # the log ends before it says which exception it was
        if code[who].startswith(("assert ", "raise ")) and len(cut) > 1:
            name = "AssertionError" if code[who].startswith("assert") else "Exception"
            place = max(
                at for at, line in enumerate(lines) if line.process == who and line.is_frame
            )
            found[place] = Raised(name, "", tuple(cut[-_KEPT_FRAMES:]), code[who])
    return found
