"""Run by the Python of a vLLM: imports it once, and makes each server, or what runs a script, as a fork of itself.

To import vLLM takes ten times as long as the rest of a start with a tiny model, and a server does it twice: its
engine is a process of its own (`forking` is about that one). What runs is the same.

Standard input: one line of JSON for each fork, the arguments of `become`.
Standard output: a line when all is imported, and one with the process id of each fork.
"""

import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import traceback

# What servers and engines would import once they have their flags. Whatever else they need, they import then.
NEEDED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.lora.layers",
    "compressed_tensors",
    "uvicorn",
)


def become(script, words, env, files):
    """Run a script with these words, or a server without one, until it ends."""
    os.setsid()
    print(os.getpid(), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, (path, mode) in enumerate(zip(files, ("rb", "ab", "ab"), strict=True)):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    os.environ.update(env)
    sys.argv[1:] = words
    if script:
        sys.path.insert(0, str(pathlib.Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        return
    from vllm.entrypoints.launchers.api_server.entry import main

    main()


def fork(asked):
    if os.fork() != 0:
        return
    try:
        become(**asked)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what belongs to the process that was forked is not ended here


def main():
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that ended leave nothing behind
    print("imported", flush=True)
    for line in sys.stdin:
        fork(json.loads(line))


if __name__ == "__main__":
    main()
