"""llama.cpp's own HTTP server in this process until it is ended: llama_server.py MODEL PORT WINDOW."""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, window = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.port = int(port)
    params.n_ctx = int(window)
    params.n_parallel = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
