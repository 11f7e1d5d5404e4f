"""The clients that people have, unmodified: what each sees, and what the gateway logs of it.

Each script in clients/ drives one library through the same cases and prints what it saw. A case has
one name everywhere, so one table tells what the access log must have for it.
"""

import contextlib
import functools
import http.server
import json
import pathlib
import queue
import subprocess
import threading
import urllib.parse

import pytest

from tests.e2e.support import CACHE, GATEWAY, free_port, gateway, need, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
CLIENTS = pathlib.Path(__file__).parent / "clients"
LENGTH = ["length", 5]

# The requests of each case, as the access log tells them: endpoint, status, outcome, error code.
_CHAT = ("chat", 200, "ok", None)
_MESSAGE = ("messages", 200, "ok", None)
_RESPONSE = ("responses", 200, "ok", None)
_RERANK = ("rerank", 200, "ok", None)
_DOWN = (503, "shed", "model_unavailable")
LOGGED = {
    **dict.fromkeys(("chat", "chat_vllm", "stream", "usage", "usage_vllm", "tool"), [_CHAT]),
    **dict.fromkeys(("tool_stream", "request_id", "large"), [_CHAT]),
    **dict.fromkeys(("response", "response_stream"), [_RESPONSE]),
    **dict.fromkeys(("message", "message_stream", "message_tool"), [_MESSAGE]),
    **dict.fromkeys(("rerank", "rerank_v1", "rerank_v2"), [_RERANK]),
    "embedding": [("embeddings", 200, "ok", None)],
    "count": [("count_tokens", 200, "ok", None)],
    "no_model": [("chat", 404, "rejected", "model_not_found")],
    "message_no_model": [("messages", 404, "rejected", "model_not_found")],
    "bad_key": [("embeddings", 401, "unauthenticated", "invalid_api_key")],
    "message_too_long": [("messages", 400, "rejected", "context_length_exceeded")],
    "bad_key_of_chat": [("chat", 401, "unauthenticated", "invalid_api_key")],
    "message_bad_key": [("messages", 401, "unauthenticated", "invalid_api_key")],
    "too_long": [("chat", 400, "rejected", "context_length_exceeded")],
    # The client comes again by itself.
    "down": [("chat", *_DOWN), ("chat", *_DOWN)],
    "down_once": [("chat", *_DOWN)],
    "message_down": [("messages", *_DOWN), ("messages", *_DOWN)],
    "rerank_down": [("rerank", *_DOWN), ("rerank", *_DOWN)],
    "broken_stream": [("chat", 502, "stream_broken", "backend_error")],
    "left": [("chat", 499, "client_gone", None)],
    "message_left": [("messages", 499, "client_gone", None)],
}
for _version in ("_v1", "_v2"):
    LOGGED["rerank_no_model" + _version] = [("rerank", 404, "rejected", "model_not_found")]
    LOGGED["rerank_bad_key" + _version] = [("rerank", 401, "unauthenticated", "invalid_api_key")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with _site(tmp_path_factory.mktemp("clients")) as made:
        yield made


@contextlib.contextmanager
def _site(folder: pathlib.Path, extra: str = ""):
    """A gateway with two models: `m` is served by a simulated backend, the backend of `down` is not there."""
    port = free_port()
    command = [GATEWAY, "sim", "--port", str(port), "--model", "m", "--max-model-len", "4096"]
    pools = (
        f"pools: {{m: {{backends: [http://127.0.0.1:{port}]}},"
        f" down: {{backends: [http://127.0.0.1:{free_port()}]}}}}"
    )
    with running(command, log=folder / "sim.log"):
        with gateway(folder, pools, extra) as behind:
            yield behind, f"http://127.0.0.1:{port}"


class Access:
    """The lines that the gateway logs from now on."""

    def __init__(self, log: pathlib.Path) -> None:
        self._log = log
        self._from = log.stat().st_size

    def lines(self) -> list[dict]:
        with self._log.open("rb") as file:
            file.seek(self._from)
            whole = file.read().rpartition(b"\n")[0].splitlines()
        return [each for each in map(json.loads, whole) if "outcome" in each]


def drive(command, site, **kwargs):
    """Run a client; return what it saw, and the lines logged, once as many came as its cases make."""
    behind, sim = site
    access = Access(behind.log)
    done = subprocess.run(
        [*command, behind.url, behind.key, "m", sim],
        capture_output=True, text=True, timeout=120, check=False, **kwargs,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found, _as_logged(found, access)


def _as_logged(found, access):
    expected = [row for case in found for row in LOGGED.get(case, [])]
    with contextlib.suppress(AssertionError):  # the comparison tells more
        wait_until(lambda: len(access.lines()) >= len(expected), 10, "the log")
    lines = access.lines()
    rows = [
        tuple(each[name] for name in ("endpoint", "status", "outcome", "code")) for each in lines
    ]
    assert rows == expected
    return lines


def came_again_in_time(found, lines):
    """It waited as long as it was asked to; the gateway saw that it was the second try."""
    (first, second) = [each for each in lines if each["code"] == "model_unavailable"]
    assert found["down_waited"] >= 1.0, "Retry-After is at least a second"
    return [first["client_retry"], second["client_retry"]]


@pytest.mark.parametrize("generation", ["openai3", "openai2", "openai1"])
def test_openai_for_python(site, generation):
    python = need(CACHE / generation / "bin/python", generation)
    found, lines = drive([python, str(CLIENTS / "openai_python.py")], site)
    assert found.pop("version").startswith(generation[-1] + ".")
    assert came_again_in_time(found, lines) == [0, 1]
    assert _of_openai(found)


def test_openai_for_node(site):
    found, lines = drive(_node("openai_node.mjs", "openai"), site)
    assert came_again_in_time(found, lines) == [0, 1]
    assert _of_openai(found)


def _of_openai(found) -> bool:
    found.pop("down_waited")
    assert found == {
        "models": ["down", "m"],
        "model": "m",
        "chat": LENGTH,
        "stream": ["length", True],
        "usage": LENGTH,
        "tool": "look_up",
        "tool_stream": "look_up",
        "response": ["incomplete", 5],
        "response_stream": ["response.created", "response.completed"],
        "embedding": 1,
        "request_id": True,
        "no_model": ["NotFoundError", 404, "model_not_found", "model"],
        "bad_key": ["AuthenticationError", 401, "invalid_api_key", None],
        "too_long": ["BadRequestError", 400, "context_length_exceeded", "messages"],
        "down": ["InternalServerError", 503, "model_unavailable", "model"],
        "broken_stream": ["APIError", None, "backend_error", None],
        "left": True,
    }
    return True


def _node(script: str, package: str) -> list[str]:
    node = need("node", "Node.js")
    need(CACHE / "node/node_modules" / package, f"{package} for Node")
    # Node finds packages beside the script.
    copy = CACHE / "node" / script
    copy.write_text((CLIENTS / script).read_text())
    return [node, str(copy)]


def _of_anthropic(found) -> bool:
    assert found.pop("down_waited") >= 1.0
    assert found == {
        "models": ["down", "m"],
        "message": ["max_tokens", 5],
        "knows_its_id": True,
        "message_stream": ["max_tokens", 5],
        "message_tool": ["tool_use", "look_up"],
        "count": True,
        "message_no_model": ["NotFoundError", 404, "not_found_error"],
        "message_bad_key": ["AuthenticationError", 401, "authentication_error"],
        "message_too_long": ["BadRequestError", 400, "invalid_request_error"],
        "message_down": ["ServiceUnavailableError", 503, "overloaded_error"],
        "message_left": "message_start",
    }
    return True


def test_anthropic_for_python(site):
    python = need(CACHE / "openai3/bin/python", "anthropic")
    found, lines = drive([python, str(CLIENTS / "anthropic_python.py")], site)
    assert came_again_in_time(found, lines) == [0, 1]
    assert found.pop("version")
    assert _of_anthropic(found)


def test_anthropic_for_node(site):
    found, lines = drive(_node("anthropic_node.mjs", "@anthropic-ai/sdk"), site)
    assert came_again_in_time(found, lines) == [0, 1]
    assert _of_anthropic(found)


def test_langchain_knows_a_context_overflow(site):
    python = need(CACHE / "openai3/bin/python", "langchain-openai")
    found, _ = drive([python, str(CLIENTS / "langchain_python.py")], site)
    assert any("ContextOverflow" in name for name in found.pop("too_long"))
    assert "NotFoundError" in found.pop("no_model")
    assert found == {"chat": LENGTH, "usage": 5, "tool": "look_up", "embedding": True}


def test_litellm_in_both_dialects(site):
    python = need(CACHE / "openai2/bin/litellm", "litellm").replace("bin/litellm", "bin/python")
    found, lines = drive([python, str(CLIENTS / "litellm_python.py")], site)
    assert came_again_in_time(found, lines)
    found.pop("down_waited")
    assert found == {
        "chat": LENGTH,
        "usage": 5,
        "chat_vllm": LENGTH,
        "usage_vllm": 5,
        "tool": "look_up",
        "embedding": 1,
        "rerank": 2,
        "no_model": ["NotFoundError", 404],
        "bad_key": ["AuthenticationError", 401],
        "too_long": ["ContextWindowExceededError", 400],
        "down": ["ServiceUnavailableError", 503],
    }


def test_vercel_ai_sdk(site):
    found, lines = drive(_node("ai_sdk.mjs", "@ai-sdk/openai-compatible"), site)
    assert came_again_in_time(found, lines)
    found.pop("down_waited")
    assert found == {
        "chat": LENGTH,
        "usage": LENGTH,
        "tool": "look_up",
        "embedding": True,
        "no_model": ["AI_APICallError", 404],
        "bad_key": ["AI_APICallError", 401],
        "too_long": ["AI_APICallError", 400],
        "down": ["AI_RetryError", 503],
        "broken_stream": True,
        "left": True,
    }


def test_cohere_in_both_versions(site):
    python = need(CACHE / "openai3/bin/python", "cohere")
    found, lines = drive([python, str(CLIENTS / "cohere_python.py")], site)
    assert came_again_in_time(found, lines)
    assert found.pop("version")
    found.pop("down_waited")
    assert found == {
        f"{case}_v{version}": seen
        for case, seen in (
            ("rerank", [1, True]),
            ("rerank_no_model", ["NotFoundError", 404]),
            ("rerank_bad_key", ["UnauthorizedError", 401]),
        )
        for version in (1, 2)
    } | {"rerank_down": ["ServiceUnavailableError", 503]}


def test_http_client_of_java(site):
    java = need("java", "a JDK of version 17 or later")
    found, _ = drive([java, str(CLIENTS / "HttpClientTest.java")], site)
    eleven = "HTTP_1_1"
    assert found == {
        "models": [200, eleven, True],
        "chat": [200, eleven, True, True],
        "stream": [200, eleven, True, True],
        "large": [200, eleven, True],
        "no_model": [404, eleven, True],
        "bad_key": [401, eleven, True],
        "too_long": [400, eleven, True],
        "left": True,
    }


# --- curl -----------------------------------------------------------------------------------------


def _curl(site, *flags, path="/v1/chat/completions", body=None):
    """Return curl's exit status, the status of each reply's head, the version of HTTP, the body."""
    behind, _ = site
    curl = need("curl", "curl")
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    done = subprocess.run(
        [curl, "-sS", "--max-time", "20", "-H", f"authorization: Bearer {behind.key}",
         "-H", "content-type: application/json", "--data-binary", "@-",
         "-w", "\n%{http_code} %{http_version}", *flags, behind.url + path],
        capture_output=True, text=True, timeout=60, check=False,
        input=json.dumps(asked if body is None else body),
    )  # fmt: skip
    text, _, said = done.stdout.rpartition("\n")
    return done.returncode, *said.split(), text


def _has_http2() -> bool:
    curl = need("curl", "curl")
    return "HTTP2" in subprocess.run([curl, "--version"], capture_output=True, text=True).stdout


def test_curl_that_asks_for_http2_is_answered_in_http11(site):
    if not _has_http2():
        pytest.skip("this curl was built without HTTP/2")
    access = Access(site[0].log)
    returned, status, version, text = _curl(site, "--http2")
    assert (returned, status, version) == (0, "200", "1.1")
    assert json.loads(text)["usage"]["completion_tokens"] == 5
    assert _as_logged({"chat": None}, access)


def test_curl_with_a_large_body_and_expect_continue(site):
    access = Access(site[0].log)
    long = {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "word " * 200_000}],
    }
    returned, status, _, text = _curl(site, "-H", "expect: 100-continue", body=long)
    assert (returned, status) == (0, "400")
    assert json.loads(text)["error"]["code"] == "context_length_exceeded"
    assert _as_logged({"too_long": None}, access)


def test_curl_through_the_gateway_as_its_proxy_sends_the_absolute_form(site):
    access = Access(site[0].log)
    returned, status, _, text = _curl(site, "--proxy", site[0].url)
    assert (returned, status) == (0, "200")
    assert json.loads(text)["usage"]["completion_tokens"] == 5
    assert _as_logged({"chat": None}, access)


# --- a browser ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _origin(told: queue.Queue):
    """Serve the page on an origin of its own; it posts what it found there."""

    class Pages(http.server.SimpleHTTPRequestHandler):
        def do_POST(self):
            told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    handler = functools.partial(Pages, directory=str(CLIENTS))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _browse(folder: pathlib.Path, cors: str):
    """Open the page in a browser; return what its script found, and what the gateway logged."""
    chromium = need("chromium", "Chromium")
    told = queue.Queue()
    with _origin(told) as origin, _site(folder, cors.format(origin=origin)) as (behind, _):
        access = Access(behind.log)
        asked = urllib.parse.urlencode({"url": behind.url, "key": behind.key, "model": "m"})
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}",
            f"{origin}/browser.html?{asked}",
        ]  # fmt: skip
        with running(command, log=folder / "chromium.log"):
            found = told.get(timeout=90)
        return found, access


def test_a_page_of_an_allowed_origin_sees_all_replies(tmp_path):
    found, access = _browse(tmp_path, "cors: {{origins: [{origin}]}}")
    assert found == {
        "models": ["down", "m"],
        "chat": [200, *LENGTH],
        "request_id": True,
        "stream": [True, True],
        "no_model": [404, "model_not_found"],
        "bad_key_of_chat": [401, "invalid_api_key"],
        "down_once": [503, "model_unavailable", True],
        "left": True,
    }
    assert _as_logged(found, access)


@pytest.mark.parametrize("cors", ["", "cors: {{origins: ['https://other.example']}}"])
def test_a_page_of_any_other_origin_sees_nothing(tmp_path, cors):
    found, access = _browse(tmp_path, cors)
    assert found == dict.fromkeys(found, "TypeError")
    lines = access.lines()
    assert {each["key_id"] for each in lines} <= {None}, "it asks first, and then sends no key"
    assert {each["outcome"] for each in lines} <= {"rejected"}
