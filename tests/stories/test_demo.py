"""`vllm-gateway demo`, as a newcomer runs it."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # a whole gateway, and its backends, as a process
COMMAND = str(Path(sys.executable).parent / "vllm-gateway")


@pytest.mark.parametrize("flags", [[], ["--traffic", "--fault", "stall_after:5"]])
def test_the_demo_prints_a_url_and_a_key_that_work_refuses_an_upgrade_and_ends_at_once(flags):
    demo = subprocess.Popen(
        [COMMAND, "demo", "--port", "0", "--admin-port", "0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        printed = ""
        while "chat.completions.create({" not in printed:
            line = demo.stdout.readline()
            assert line, demo.stderr.read()
            printed += line
        url = re.search(r"base URL +(\S+)", printed)[1]
        key = re.search(r"API key +(\S+)", printed)[1]
        assert re.search(r"models +llama3-1b, qwen3-8b, qwen3-8b-legal, qwen3-8b-sql", printed)
        body = {
            "model": "llama3-1b",
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi"}],
        }
        request = urllib.request.Request(
            url + "/chat/completions", json.dumps(body).encode(),
            {"authorization": f"Bearer {key}", "content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert json.loads(reply.read())["usage"]["completion_tokens"] == 3
        # Clients for Messages that are told no limit state one of their own, up to this.
        body["max_tokens"] = 128_000
        request = urllib.request.Request(
            url + "/messages", json.dumps(body).encode(),
            {"x-api-key": key, "content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert json.loads(reply.read())["stop_reason"] == "end_turn"
        admin = re.search(r"dashboard +(\S+)/", printed)[1]
        words = [COMMAND, "--server", admin, "upgrade"]
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert refused.returncode == 5
        assert refused.stderr.startswith(
            "vllm-gateway: This is a demo: its backends run in this process"
        )
    finally:
        demo.terminate()
        out, err = demo.communicate(timeout=15)
    assert demo.returncode == 0, err
    assert "Traceback" not in err


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("busy", ["public", "admin"])
def test_a_taken_port_is_named_with_a_way_out(taken, busy):
    ports = {"public": [taken, "0"], "admin": ["0", taken]}[busy]
    words = [COMMAND, "demo", "--port", ports[0], "--admin-port", ports[1]]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines() == [
        f"vllm-gateway: 127.0.0.1:{taken}: Address already in use",
        "  hint: try --port 0 --admin-port 0",
    ]


@pytest.mark.parametrize("busy", ["public", "admin"])
def test_serve_names_the_address_that_is_taken(taken, busy, tmp_path):
    ports = {"public": [taken, "0"], "admin": ["0", taken]}[busy]
    file = tmp_path / "gw.yaml"
    file.write_text(
        "keys: none\npools: {m: {backends: [http://127.0.0.1:1]}}\n"
        f"listen: 127.0.0.1:{ports[0]}\nadmin: {{listen: 127.0.0.1:{ports[1]}}}\n"
    )
    words = [COMMAND, "serve", "-c", str(file)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    first, hint = ran.stderr.splitlines()
    assert first == f"vllm-gateway: 127.0.0.1:{taken}: Address already in use"
    assert "`vllm-gateway upgrade` takes over" in hint
