"""llama.cpp's own server with a model made here, through the gateway, with the OpenAI SDK."""

import json
import pathlib
import subprocess

import pytest

from tests.e2e.support import CACHE, gateway, get, need, running, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    python = need(CACHE / "llamacpp/bin/python", "llama.cpp")
    folder, port = tmp_path_factory.mktemp("llama"), free_port()
    model = folder / "tiny.gguf"
    subprocess.run([python, HERE / "make_gguf.py", model, "512"], check=True, timeout=60)
    command = [python, str(HERE / "llama_server.py"), str(model), str(port), "512"]
    with running(command, log=folder / "llama.log"):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: get(url + "/v1/models")[0] == 200, 120, "llama.cpp answers")
        yield url


def test_the_openai_sdk_is_served_and_what_the_engine_says_is_in_openais_form(llama, tmp_path):
    python = need(CACHE / "openai3/bin/python", "the OpenAI SDK")
    pools = f"pools: {{tiny: {{engine: openai, backends: ['{llama}']}}}}"
    with gateway(tmp_path, pools) as site:
        wait_until(lambda: get(site.url + "/readyz")[0] == 200, 30, "it is ready")
        command = [python, HERE / "clients/plain_engine.py", f"{site.url}/v1", site.key, "tiny"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        seen = json.loads(ran.stdout)
        assert seen["chat"] == ["length", 5]
        assert seen["stream"] == ["length", "chat.completion.chunk"]
        assert seen["completion"] == ["length", 5]
        assert seen["completion_stream"] == "length"
        assert seen["too_long"] == "context_length_exceeded"
        assert seen["embedding"] in (400, 404, 500)
        assert seen["models"] == ["tiny"]
