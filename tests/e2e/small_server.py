"""What the gateway needs to see of a vLLM, in Python's standard library: it runs in any container or unit.

python3 small_server.py PORT [stubborn]     stubborn: it takes no notice of SIGTERM
"""

import http.server
import json
import os
import signal
import sys

MODEL = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 2048}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        pages = {
            "/health": b"",
            "/version": b'{"version": "0.32.0"}',
            "/v1/models": json.dumps({"object": "list", "data": [MODEL]}).encode(),
        }
        self.answer(pages.get(self.path))

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/crash":
            os._exit(3)
        if self.path == "/eat":  # more memory than the container or unit may have
            kept = []
            while True:
                kept.append(bytearray(16 << 20))
        choice = {"index": 0, "text": " a", "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        self.answer(json.dumps(body).encode() if self.path == "/v1/completions" else None)

    def answer(self, body):
        self.send_response(404 if body is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    print("INFO:     Application startup complete.", flush=True)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
