"""`vllm-gateway demo`, as a newcomer runs it."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "vllm-gateway")


@pytest.mark.parametrize("flags", [[], ["--traffic", "--fault", "stall_after:5"]])
def test_the_demo_prints_a_url_and_a_key_that_work_and_ends_at_once(flags):
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
    finally:
        demo.terminate()
        out, err = demo.communicate(timeout=15)
    assert demo.returncode == 0, err
    assert "Traceback" not in err
