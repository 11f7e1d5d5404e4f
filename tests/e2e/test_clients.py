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
import re
import socket
import subprocess
import textwrap
import threading
import urllib.parse

import pytest

from tests.e2e.support import CACHE, GATEWAY, gateway, get, need, running, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
CLIENTS = pathlib.Path(__file__).parent / "clients"
LENGTH = ["length", 5]

# The requests of each case, as the access log tells them: endpoint, status, outcome, error code.
_CHAT = ("chat", 200, "ok", None)
_MESSAGE = ("messages", 200, "ok", None)
_RESPONSE = ("responses", 200, "ok", None)
_RERANK = ("rerank", 200, "ok", None)
_DOWN = (503, "shed", "model_unavailable")
_LIMITED = (429, "shed", "too_many_waiting")
_ENGINE_LIMITED = (429, "upstream_rejected", "rate_limit_exceeded")  # by the backend itself
_LEFT = (499, "client_gone", None)
_BROKEN = (502, "stream_broken", "backend_error")
LOGGED = {
    **dict.fromkeys(("chat", "chat_vllm", "stream", "usage", "usage_vllm", "tool"), [_CHAT]),
    **dict.fromkeys(("tool_stream", "request_id", "large", "parsed"), [_CHAT]),
    **dict.fromkeys(("response", "response_stream", "response_parsed"), [_RESPONSE]),
    **dict.fromkeys(("message", "message_stream", "message_tool"), [_MESSAGE]),
    **dict.fromkeys(("rerank", "rerank_v1", "rerank_v2"), [_RERANK]),
    # The runner sends the first turn again: the server would not keep the conversation for it.
    "message_tool_runner": [
        ("messages", 400, "rejected", "thread_unsupported_request"),
        _MESSAGE,
        _MESSAGE,
    ],
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
    "limited": [("chat", *_LIMITED), ("chat", *_LIMITED)],
    "message_limited": [("messages", *_LIMITED), ("messages", *_LIMITED)],
    "rerank_limited": [("rerank", *_LIMITED), ("rerank", *_LIMITED)],
    "served_later": [("chat", *_ENGINE_LIMITED), _CHAT],
    "message_served_later": [("messages", *_ENGINE_LIMITED), _MESSAGE],
    **dict.fromkeys(("broken_stream", "broken_stream_vllm"), [("chat", *_BROKEN)]),
    "broken_response": [("responses", *_BROKEN)],
    "message_broken_stream": [("messages", *_BROKEN)],
    **dict.fromkeys(("left", "left_vllm"), [("chat", *_LEFT)]),
    "message_left": [("messages", *_LEFT)],
}
for _version in ("_v1", "_v2"):
    LOGGED["rerank_no_model" + _version] = [("rerank", 404, "rejected", "model_not_found")]
    LOGGED["rerank_bad_key" + _version] = [("rerank", 401, "unauthenticated", "invalid_api_key")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with _site(tmp_path_factory.mktemp("clients")) as made, _taken(made[0]):
        yield made


@contextlib.contextmanager
def _site(folder: pathlib.Path, extra: str = ""):
    """A gateway with three models.

    `m` is served by a simulated backend, the backend of `down` is not there, and that of `busy` takes one
    request and never answers it.
    """
    port, hung = free_port(), free_port()
    command = [GATEWAY, "sim", "--max-model-len", "4096"]
    pools = {
        "m": {"backends": [f"http://127.0.0.1:{port}"]},
        "down": {"backends": [f"http://127.0.0.1:{free_port()}"]},
        "busy": {
            "backends": [{"url": f"http://127.0.0.1:{hung}", "max_in_flight": 1}],
            "queue": {"max_requests": 2, "tenant_share": 0.5, "max_wait": "600s"},
        },
    }
    with (
        running([*command, "--model", "m", "--port", str(port)], log=folder / "sim.log"),
        running(
            [*command, "--model", "busy", "--port", str(hung), "--fault", "hang_before_headers"],
            log=folder / "hung.log",
        ),
        # A busy machine's simulator takes seconds to count a megabyte.
        gateway(
            folder, f"pools: {json.dumps(pools)}", f"{extra}\ntimeouts: {{tokenize: 20s}}"
        ) as behind,
    ):
        yield behind, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _taken(behind):
    """Have one request at the backend of `busy` and another one wait: no key may have more than that."""
    host, _, port = behind.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "busy", "prompt": "x", "max_tokens": 5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {behind.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with contextlib.ExitStack() as held:
        for _ in range(2):
            client = held.enter_context(socket.create_connection((host, int(port)), 10))
            client.sendall(head.encode() + body)
        full = 'gateway_queue_requests{pool="busy"} 1'
        wait_until(lambda: full in behind.metrics(), 30, full)
        yield


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
    lines = _as_logged(found, access)
    _backend_was_told(sim, [each["engine_request_id"] for each in lines if each["status"] == 499])
    return found, lines


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


def _backend_was_told(sim, left):
    """The backend saw each of these requests, by their ids at the engine, end before its last token."""

    def told():
        requests = json.loads(get(f"{sim}/sim/requests", timeout=30)[1])
        found = [each for each in requests if dict(each["headers"]).get("x-request-id") in left]
        assert len(found) == len(left)
        assert all(each["tokens_emitted"] < 3000 for each in found)
        return all(each["client_disconnected_at"] is not None for each in found)

    wait_until(told, 10, "the backend knows that the client left")


# The cases in which a client comes again by itself, and what the log has of its first try.
AGAIN = {"down": _DOWN, "limited": _LIMITED, "served_later": _ENGINE_LIMITED}


def came_again(site, found, lines):
    """Each client waited as long as it was told to; return which tries the gateway took for a second one."""
    logged = [(each["status"], each["outcome"], each["code"]) for each in lines]
    retries = set()
    for case in [each for each in found if each.endswith("_waited")]:
        waited_s = found.pop(case)
        (first_try,) = [row for name, row in AGAIN.items() if case.endswith(f"{name}_waited")]
        place = logged.index(first_try)
        assert waited_s >= _told_s(site, lines[place]), case
        retries.add((lines[place]["client_retry"], lines[place + 1]["client_retry"]))
    return retries


def _told_s(site, refused) -> float:
    """Return the seconds after which a refused client was told to come again."""
    if refused["outcome"] == "upstream_rejected":
        return 1.0  # 1 to 3 s; why the gateway itself refused is kept, with the time
    status, body = get(f"{site[0].admin_url}/admin/v1/decisions/{refused['id']}")
    assert status == 200
    return json.loads(body)["retry_after_s"]


@pytest.mark.parametrize("generation", ["openai3", "openai2", "openai1"])
def test_openai_for_python(site, generation):
    python = need(CACHE / generation / "bin/python", generation)
    found, lines = drive([python, str(CLIENTS / "openai_python.py")], site)
    assert found.pop("version").startswith(generation[-1] + ".")
    assert came_again(site, found, lines) == {(0, 1)}
    assert _of_openai(found)


def test_openai_for_node(site):
    found, lines = drive(_node("openai_node.mjs", "openai"), site)
    assert came_again(site, found, lines) == {(0, 1)}
    assert _of_openai(found)


def _of_openai(found) -> bool:
    assert found == {
        "models": ["busy", "down", "m"],
        "model": "m",
        "chat": LENGTH,
        "stream": ["length", True],
        "usage": LENGTH,
        "tool": "look_up",
        "tool_stream": "look_up",
        "response": ["incomplete", 5],
        "response_stream": ["response.created", "response.completed"],
        "parsed": 0.0,
        "response_parsed": 0.0,
        "embedding": 1,
        "request_id": True,
        "no_model": ["NotFoundError", 404, "model_not_found", "model"],
        "bad_key": ["AuthenticationError", 401, "invalid_api_key", None],
        "too_long": ["BadRequestError", 400, "context_length_exceeded", "messages"],
        "down": ["InternalServerError", 503, "model_unavailable", "model"],
        "limited": ["RateLimitError", 429, "too_many_waiting", None],
        "served_later": "length",
        "broken_stream": ["APIError", None, "backend_error", None],
        "broken_response": ["APIError", None, "backend_error", None],
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
    assert found == {
        "models": ["busy", "down", "m"],
        "message": ["max_tokens", 5],
        "knows_its_id": True,
        "message_stream": ["max_tokens", 5],
        "message_tool": ["tool_use", "look_up"],
        "message_tool_runner": ["tool_use", True],
        "count": True,
        "message_no_model": ["NotFoundError", 404, "not_found_error", "model_not_found"],
        "message_bad_key": ["AuthenticationError", 401, "authentication_error", "invalid_api_key"],
        "message_too_long": [
            "BadRequestError",
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ],
        "message_down": ["ServiceUnavailableError", 503, "overloaded_error", "model_unavailable"],
        "message_limited": ["RateLimitError", 429, "rate_limit_error", "too_many_waiting"],
        "message_served_later": "max_tokens",
        "message_left": "message_start",
    }
    return True


def test_anthropic_for_python(site):
    python = need(CACHE / "openai3/bin/python", "anthropic")
    found, lines = drive([python, str(CLIENTS / "anthropic_python.py")], site)
    assert came_again(site, found, lines) == {(0, 1)}
    assert found.pop("version")
    assert found.pop("message_broken_stream") == [
        "APIStatusError",
        200,
        "api_error",
        "backend_error",
    ]
    assert _of_anthropic(found)


def test_anthropic_for_node(site):
    found, lines = drive(_node("anthropic_node.mjs", "@anthropic-ai/sdk"), site)
    assert came_again(site, found, lines) == {(0, 1)}
    assert found.pop("message_broken_stream") == ["APIError", None, "api_error", "backend_error"]
    assert _of_anthropic(found)


def test_langchain_knows_a_context_overflow(site):
    python = need(CACHE / "openai3/bin/python", "langchain-openai")
    found, _ = drive([python, str(CLIENTS / "langchain_python.py")], site)
    assert any("ContextOverflow" in name for name in found.pop("too_long"))
    assert "NotFoundError" in found.pop("no_model")
    assert found == {
        "chat": LENGTH,
        "usage": 5,
        "tool": "look_up",
        "response_parsed": 1,
        "embedding": True,
    }


def test_litellm_in_both_dialects(site):
    python = need(CACHE / "openai2/bin/litellm", "litellm").replace("bin/litellm", "bin/python")
    found, lines = drive([python, str(CLIENTS / "litellm_python.py")], site)
    assert came_again(site, found, lines)
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
        "limited": ["RateLimitError", 429],
        "served_later": "length",
        "broken_stream": ["MidStreamFallbackError", 500],
        "broken_stream_vllm": ["MidStreamFallbackError", 500],
        "left": True,
        "left_vllm": True,
    }


def test_vercel_ai_sdk(site):
    found, lines = drive(_node("ai_sdk.mjs", "@ai-sdk/openai-compatible"), site)
    assert came_again(site, found, lines)
    assert found == {
        "chat": LENGTH,
        "usage": LENGTH,
        "tool": "look_up",
        "embedding": True,
        "no_model": ["AI_APICallError", 404],
        "bad_key": ["AI_APICallError", 401],
        "too_long": ["AI_APICallError", 400],
        "down": ["AI_RetryError", 503],
        "limited": ["AI_RetryError", 429],
        "served_later": "length",
        "broken_stream": True,
        "left": True,
    }


def test_cohere_in_both_versions(site):
    python = need(CACHE / "openai3/bin/python", "cohere")
    found, lines = drive([python, str(CLIENTS / "cohere_python.py")], site)
    assert came_again(site, found, lines)
    assert found.pop("version")
    assert found == {
        f"{case}_v{version}": seen
        for case, seen in (
            ("rerank", [1, True]),
            ("rerank_no_model", ["NotFoundError", 404]),
            ("rerank_bad_key", ["UnauthorizedError", 401]),
        )
        for version in (1, 2)
    } | {
        "rerank_down": ["ServiceUnavailableError", 503],
        "rerank_limited": ["TooManyRequestsError", 429],
    }


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
        "models": ["busy", "down", "m"],
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


README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
PLACES = {"base_url": "http://127.0.0.1:8080/v1", "api_key": "gw_...", "model": "qwen3-8b"}


def test_the_python_of_the_readme_runs_as_it_is_written(site):
    """Only the address, the key and the model are those of this site; what it got is printed besides."""
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    python = need(CACHE / "openai3/bin/python", "openai")
    behind, _ = site
    here = {"base_url": f"{behind.url}/v1", "api_key": behind.key, "model": "m"}
    assert snippets
    access = Access(behind.log)
    for snippet in snippets:
        for what, example in PLACES.items():
            assert snippet.count(f'{what}="{example}"') == 1
            snippet = snippet.replace(f'{what}="{example}"', f'{what}="{here[what]}"')
        *lines, last = snippet.splitlines()
        program = "\n".join([*lines, f"print({last}.choices[0].message.role)"])
        ran = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout) == (0, "assistant\n"), ran.stderr
    wait_until(lambda: len(access.lines()) == len(snippets), 10, "the log")


def test_what_the_demo_prints_runs_as_it_is_pasted(tmp_path):
    """For Python, for Node and for the shell, which prints the stream's end."""
    need("curl", "curl")
    python = need(CACHE / "openai3/bin/python", "openai")
    commands = {
        "curl ": (["bash", "-c"], "data: [DONE]"),
        "# Python": ([python, "-c"], "ChatCompletion("),
        "// Node": (
            [*_node("openai_node.mjs", "openai")[:1], "--input-type=module", "-e"],
            "choices: [",
        ),
    }
    log = tmp_path / "demo.log"
    command = [GATEWAY, "demo", "--port", "0", "--admin-port", "0"]
    with running(command, log=log, env={"PYTHONUNBUFFERED": "1"}):
        wait_until(lambda: "chat.completions.create({" in log.read_text(), 60, "the demo is ready")
        parts = [textwrap.dedent(each) for each in log.read_text().split("\n\n")]
        for begins, (command, prints) in commands.items():
            (snippet,) = [each for each in parts if each.startswith(begins)]
            ran = subprocess.run(
                [*command, snippet], capture_output=True, text=True, timeout=60, cwd=CACHE / "node"
            )
            assert (ran.returncode, prints in ran.stdout) == (0, True), ran.stderr
