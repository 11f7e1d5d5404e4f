"""Run by the Python of a vLLM: starts an engine for each command line, and prints what each one logged.

Importing vLLM takes longer than these starts themselves. So one process imports it, and each start is
a fork of that, as many at a time as there are processors.

Standard input: a list of lists of flags, as `vllm serve` takes them.
Standard output, last line: the log of each, in the same order.
Environment: VLLM_ENABLE_V1_MULTIPROCESSING=0, so that no start imports vLLM once more.
"""

import json
import os
import pathlib
import signal
import sys
import tempfile
import traceback

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

MOST_S = 300  # a start that takes longer is ended


def import_here(folder):
    """Import the code of a model into this process; by itself vLLM starts one for a look at it."""
    (name,) = json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def start(flags, log):
    """Start an engine in a process of its own, which ends when it has started or failed."""
    if os.fork() != 0:
        return
    signal.alarm(MOST_S)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(flags))
        import_here(args.model)
        LLMEngine.from_engine_args(args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what belongs to the process that was forked is not ended here


def main():
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder) / f"{number}.log" for number in range(len(asked))]
        at_a_time = len(os.sched_getaffinity(0))
        for number, (flags, log) in enumerate(zip(asked, logs, strict=True)):
            if number >= at_a_time:
                os.wait()
            start(flags, log)
        for _ in asked[:at_a_time]:
            os.wait()
        print(json.dumps([log.read_text(errors="replace") for log in logs]))


main()
