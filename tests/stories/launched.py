"""A server for the tests of launchers, and what is left of it. Run as a script it is that server."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

SCRIPT = pathlib.Path(__file__).read_text()


def left(token: str) -> list[int]:
    """Return the processes with `token` in their command line: another way than the launcher's own."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if token.encode() in words and state not in "ZX":
                found.append(int(entry.name))
    return found


def child(kind: str, token: str) -> subprocess.Popen[bytes]:
    """Start a child that never ends by itself, as hard to find as `kind` says."""
    words = [sys.executable, "-c", "import signal; signal.pause()", token]
    match kind:
        case "worker":  # in the group, with our output
            return subprocess.Popen(words)
        case (
            "titled"
        ):  # like vLLM's engine, whose title overwrites its environment; no output of ours
            quiet = subprocess.DEVNULL
            return subprocess.Popen(words, env={}, stdout=quiet, stderr=quiet)
        case (
            "engine"
        ):  # a worker that sets its title as vLLM does, as far as a name of 15 bytes goes
            title = "open('/proc/self/comm', 'w').write('VLLM::EngineCore'); print(flush=True)"
            words[2] = f"{title}; {words[2]}"
            engine = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert engine.stdout is not None
            engine.stdout.readline()  # it has its title
            return engine
        case "away":  # a session of its own, its output elsewhere: only its environment tells
            quiet = subprocess.DEVNULL
            return subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True)
        case "blank":  # a session of its own and no environment: only its output tells
            return subprocess.Popen(words, env={}, start_new_session=True)
    raise ValueError(kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--token", default="")
    parser.add_argument("--child", nargs="+", default=[])
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--lines", type=int, default=0)
    parser.add_argument("--exit", type=int)
    given = parser.parse_args()
    if given.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its children inherit that
    children = [child(kind, given.token) for kind in given.child]
    listener = socket.create_server((given.host, given.port))
    for number in range(given.lines):
        print(f"line {number}", flush=True)
    if given.exit is not None:
        print("gives up", file=sys.stderr)
        os._exit(given.exit)
    handles = sorted(map(int, os.listdir("/proc/self/fd")))
    print("holds", [n for n in handles if n > 2 and n != listener.fileno()][:-1], flush=True)
    print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("GATEWAY_ADMIN_TOKEN"))
    print("serves", given.port, [each.pid for each in children], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
