"""Two real vLLM servers on the CPU for the overload study, with so small a KV cache that it overflows.

    python -m loadtest.real --python VLLM_VENV/bin/python --weights MODEL_DIR

They serve the model as `tiny`. Once both answer, it prints their URLs; SIGTERM or Ctrl-C ends them.
Each has all its processes on a core of its own and yields to whatever else wants it: the clients' clock
must be true. (Engine and worker wait for each other by spinning; on two cores one server's spinning
would take the other's computing time.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator
from typing import Final

from loadtest.harness import wait_for

# 128 blocks of 32 tokens hold about sixteen requests of the profile `tiny`, fewer than may run at a
# time: so they preempt each other. float32, because not every CPU has bfloat16.
FLAGS: Final = (
    *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32", "--block-size", "32"),
    *("--num-gpu-blocks-override", "128", "--max-num-seqs", "32", "--disable-uvicorn-access-log"),
)
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the override counts
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
WEIGHT: Final = 5  # of its scheduling group, as nice: a third of an ordinary one
PATIENCE_S: Final = 240.0
PORTS: Final = (8801, 8802)


@contextlib.contextmanager
def server(
    python: str, weights: pathlib.Path, port: int, core: int, log: pathlib.Path
) -> Iterator[None]:
    """Run one server on one core; its whole process group is ended at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            [
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)),
                *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
                *FLAGS,
            ],
            stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core)},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip
    try:
        with contextlib.suppress(OSError):  # a kernel without groups by session: nice would do less
            pathlib.Path(f"/proc/{child.pid}/autogroup").write_text(str(WEIGHT))
        yield
    finally:
        for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience_s)


def main() -> None:
    """Run both until told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment with vLLM for CPU")
    parser.add_argument("--weights", type=pathlib.Path, required=True, help="folder of the model")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        for core, port in enumerate(PORTS):
            log = args.logs / f"vllm-{port}.log"
            stack.enter_context(server(args.python, args.weights, port, core, log))
        for port in PORTS:
            wait_for(port, "/health", PATIENCE_S)
        print(*(f"http://127.0.0.1:{port}" for port in PORTS), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
