"""The SDKs that people have: three generations of OpenAI's for Python, Node's, Anthropic's, LangChain."""

import json
import pathlib
import subprocess

import pytest

from tests.e2e.support import CACHE, GATEWAY, free_port, gateway, need, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
CLIENTS = pathlib.Path(__file__).parent / "clients"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdks")
    port = free_port()
    command = [GATEWAY, "sim", "--port", str(port), "--model", "m", "--max-model-len", "4096"]
    with running(command, log=folder / "sim.log"):
        with gateway(folder, f"pools: {{m: {{backends: [http://127.0.0.1:{port}]}}}}") as behind:
            yield behind, f"http://127.0.0.1:{port}"


def drive(command, site, **kwargs):
    behind, sim = site
    done = subprocess.run(
        [*command, behind.url, behind.key, "m", sim],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("generation", ["openai3", "openai2", "openai1"])
def test_openai_for_python(site, generation):
    python = need(CACHE / generation / "bin/python", generation)
    found = drive([python, str(CLIENTS / "openai_python.py")], site)
    assert found["version"].startswith(generation[-1] + ".")
    assert found["chat"] == ["length", 5]
    assert found["stream"] == ["length", True]
    assert found["usage"] == 5
    assert found["tools"] == "look_up"
    assert found["embedding"] == 1
    assert found["models"] == ["m"]
    assert found["model"] == "m"
    assert found["request_id"] is True
    assert found["no_model"] == ["NotFoundError", "model_not_found", "model"]
    assert found["bad_key"][:2] == ["AuthenticationError", "invalid_api_key"]
    assert found["too_long"] == ["BadRequestError", "context_length_exceeded", "messages"]
    assert found["broken_stream"][:2] == ["APIError", "backend_error"]


def test_anthropic_for_python(site):
    python = need(CACHE / "openai3/bin/python", "anthropic")
    found = drive([python, str(CLIENTS / "anthropic_python.py")], site)
    assert found["message"] == ["max_tokens", 5]
    assert found["stream"] is True
    assert found["count"] is True
    assert found["no_model"] == ["NotFoundError", "not_found_error"]
    assert found["bad_key"] == ["AuthenticationError", "authentication_error"]


def test_langchain_knows_a_context_overflow(site):
    python = need(CACHE / "openai3/bin/python", "langchain-openai")
    found = drive([python, str(CLIENTS / "langchain_python.py")], site)
    assert found["text"] is True
    assert found["stream"] is True
    assert any("ContextOverflow" in name for name in found["too_long"]), found["too_long"]


def test_openai_for_node(site):
    node = need("node", "Node.js")
    need(CACHE / "node/node_modules/openai", "the OpenAI SDK for Node")
    script = CACHE / "node/openai_node.mjs"
    script.write_text((CLIENTS / "openai_node.mjs").read_text())
    found = drive([node, str(script)], site)
    assert found["chat"] == ["length", 5]
    assert found["stream"] == "length"
    assert found["tools"] == "look_up"
    assert found["embedding"] == 1
    assert found["no_model"] == ["NotFoundError", "model_not_found", "model"]
    assert found["bad_key"][1] == "invalid_api_key"
    assert found["too_long"] == ["BadRequestError", "context_length_exceeded", "messages"]
    assert found["broken_stream"][1] == "backend_error"
