"""Two real vLLM servers, one with a LoRA, behind the gateway."""

import concurrent.futures
import http.client
import json
import re
import urllib.parse

import pytest

from tests.e2e.support import MODELS, gateway, get, need, page, wait_until
from tests.e2e.vllms import vllms

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    lora = need(MODELS / "lora-a", "the LoRA adapter")
    adapter = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora-a={lora}"]
    with (
        vllms(folder, adapter, []) as (first, second),
        gateway(
            folder,
            # Two engines on the processors of this machine may be slow to answer probes.
            "health: {timeout: 10s}\ntimeouts: {connect: 10s}\n"
            f"pools:\n  tiny:\n    aliases: [gpt-4o]\n    backends: [http://127.0.0.1:{first}, http://127.0.0.1:{second}]",
        ) as running,
    ):
        wait_until(lambda: b'"lora-a"' in models(running), 120, "the adapter is known")
        wait_until(
            lambda: get(running.url + "/readyz?verbose")[1].count(b"2 of 2") == 1,
            120,
            "both backends serve",
        )
        yield running, (first, second)


def models(running):
    connection = http.client.HTTPConnection(urllib.parse.urlparse(running.url).netloc, timeout=10)
    connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {running.key}"})
    try:
        return connection.getresponse().read()
    finally:
        connection.close()


def chat(running, text="the gateway", **more):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **more,
    }
    return running.post("/v1/chat/completions", body)


def stream(running, path="/v1/chat/completions", **body):
    connection = http.client.HTTPConnection(urllib.parse.urlparse(running.url).netloc, timeout=60)
    connection.request("POST", path, json.dumps({"model": "tiny", "stream": True, **body}),
                       {"content-type": "application/json", "authorization": f"Bearer {running.key}"})  # fmt: skip
    try:
        reply = connection.getresponse()
        lines = reply.read().split(b"\n")
    finally:
        connection.close()
    return reply, [line[6:].decode().strip() for line in lines if line.startswith(b"data: ")]


def vllm_metric(port, name):
    text = page(f"http://127.0.0.1:{port}/metrics")
    return sum(
        float(value)
        for value in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.M)
    )


def test_chat_is_answered_with_true_usage(site):
    running, _ = site
    status, body = chat(running, max_tokens=8)
    assert status == 200
    assert body["usage"]["completion_tokens"] == 8
    assert body["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_stream_is_complete_and_hides_the_usage_it_did_not_ask_for(site):
    running, _ = site
    messages = [{"role": "user", "content": "hello"}]
    reply, data = stream(running, messages=messages, max_tokens=8)
    assert reply.status == 200
    assert data[-1] == "[DONE]"
    assert not any(json.loads(each)["choices"] == [] for each in data[:-1])
    _, data = stream(
        running, messages=messages, max_tokens=8, stream_options={"include_usage": True}
    )
    assert json.loads(data[-2])["usage"]["completion_tokens"] == 8


def test_streaming_and_not_streaming_say_the_same(site):
    running, _ = site
    messages = [{"role": "user", "content": "the same question"}]
    _, data = stream(running, messages=messages, max_tokens=20, temperature=0)
    streamed = "".join(
        json.loads(each)["choices"][0]["delta"].get("content") or "" for each in data[:-1]
    )
    _, body = running.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0},
    )
    assert streamed == body["choices"][0]["message"]["content"]


def test_adapters_answer_differently_and_come_from_the_backend_that_holds_them(site):
    running, _ = site
    base = chat(running, max_tokens=16)[1]["choices"][0]["message"]["content"]
    for _ in range(4):
        status, body = chat(running, max_tokens=16, model="lora-a")
        assert status == 200
        assert body["choices"][0]["message"]["content"] != base
    listed = {each["id"]: each for each in json.loads(models(running))["data"]}
    assert set(listed) == {"tiny", "gpt-4o", "lora-a"}
    assert listed["lora-a"]["parent"] == "tiny"
    assert listed["tiny"]["context_window"] == 2048
    assert chat(running, model="lora-z")[0] == 404


def test_an_alias_is_rewritten_on_the_way(site):
    running, _ = site
    assert chat(running, max_tokens=2, model="gpt-4o")[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
        ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [10, 11]}),
    ],
)
def test_each_generate_endpoint_answers(site, path, body):
    running, _ = site
    status, reply = running.post(path, {"model": "tiny", **body})
    assert status == 200, reply


@pytest.mark.parametrize(
    ("path", "body", "ending"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}, "[DONE]"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}, '"type":"response.'),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
            "message_stop",
        ),
    ],
)
def test_each_stream_ends_as_its_protocol_says(site, path, body, ending):
    running, _ = site
    reply, data = stream(running, path, **body)
    assert reply.status == 200
    assert ending in data[-1]
    assert "error" not in data[-1]


def test_an_endpoint_the_model_does_not_serve_is_a_clear_404(site):
    running, _ = site
    status, body = running.post("/v1/embeddings", {"model": "tiny", "input": "x"})
    assert (status, body["error"]["code"]) == (404, "endpoint_not_supported")


def test_a_prompt_that_is_too_long_is_refused_here_with_the_true_number(site):
    running, ports = site
    before = [vllm_metric(port, "vllm:request_success_total") for port in ports]
    text = "the gateway routes " * 900
    status, body = chat(running, text, max_tokens=10)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    count = running.post(
        "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    )[1]["count"]
    assert str(count) in body["error"]["message"]
    assert [vllm_metric(port, "vllm:request_success_total") for port in ports] == before


def test_vllms_own_errors_read_like_openais(site):
    running, _ = site
    status, body = chat(running, temperature=9)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_stops_the_engine(site, streams):
    running, ports = site
    connection = http.client.HTTPConnection(urllib.parse.urlparse(running.url).netloc, timeout=60)
    body = {"model": "tiny", "stream": streams, "max_tokens": 1900, "ignore_eos": True, "n": 8,
            "messages": [{"role": "user", "content": "long"}]}  # fmt: skip
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {"content-type": "application/json", "authorization": f"Bearer {running.key}"})  # fmt: skip
    if streams:
        connection.getresponse().read(200)
    wait_until(
        lambda: sum(vllm_metric(p, "vllm:num_requests_running") for p in ports) >= 1,
        120,
        "the engine runs",
    )
    generated = sum(vllm_metric(port, "vllm:generation_tokens_total") for port in ports)
    connection.sock.close()
    connection.close()
    wait_until(
        lambda: sum(vllm_metric(p, "vllm:num_requests_running") for p in ports) == 0,
        120,
        "the engine stops",
    )
    after = sum(vllm_metric(port, "vllm:generation_tokens_total") for port in ports)
    assert after - generated < 8 * 1500  # of 8 * 1900: it was not let run to its end


def test_many_at_once_all_end_well_and_are_counted(site):
    running, ports = site
    before = sum(vllm_metric(port, "vllm:request_success_total") for port in ports)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(
            pool.map(lambda n: chat(running, f"question {n}", max_tokens=16)[0], range(96))
        )
    assert set(results) == {200}
    wait_until(
        lambda: sum(vllm_metric(p, "vllm:request_success_total") for p in ports) - before == 96,
        300,
        "the engines count them all",
    )
    assert "gateway_inflight_requests" in running.metrics()
