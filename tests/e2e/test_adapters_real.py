"""Adapters are placed on two real vLLM servers: one keeps a single adapter, one loaded its own."""

import concurrent.futures
import http.client
import json
import shutil
import urllib.parse

import pytest

from tests.e2e.support import MODELS, gateway, get, need, wait_until
from tests.e2e.vllms import vllms

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
]


def too_big(folder, lora):
    """Return an adapter whose configuration says rank 16."""
    big = folder / "big"
    shutil.copytree(lora, big)
    told = json.loads((big / "adapter_config.json").read_text()) | {"r": 16}
    (big / "adapter_config.json").write_text(json.dumps(told))
    return str(big)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    a, b = (need(MODELS / name, "the adapters") for name in ("lora-a", "lora-b"))
    lora = ["--enable-lora", "--max-lora-rank", "8"]
    one = [*lora, "--max-loras", "1", "--max-cpu-loras", "1"]
    own = [*lora, "--max-loras", "2", "--max-cpu-loras", "2", "--lora-modules", f"lora-a={a}"]
    paths = {"lora-a": a, "lora-b": b, "big": too_big(folder, a), "none": "/no/such/folder"}
    adapters = [{"name": name, "path": path} for name, path in paths.items()]
    with (
        vllms(folder, one, own, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as ports,
        gateway(
            folder,
            f"health: {{timeout: 10s}}\ntimeouts: {{connect: 10s}}\nstate: {folder}/state\n"
            "pools:\n  tiny:\n    backends:\n"
            f"      - {{url: 'http://127.0.0.1:{ports[0]}', max_cpu_loras: 1}}\n"
            f"      - {{url: 'http://127.0.0.1:{ports[1]}', max_cpu_loras: 2}}\n"
            f"    adapters: {json.dumps(adapters)}",
        ) as running,
    ):
        wait_until(lambda: b"2 of 2" in get(running.url + "/readyz?verbose")[1], 120, "both serve")
        yield running, ports


def held(port):
    told = json.loads(get(f"http://127.0.0.1:{port}/v1/models", timeout=30)[1])
    return {each["id"] for each in told["data"] if each["parent"] is not None}


def said(running, model, **more):
    body = {"messages": [{"role": "user", "content": "the gateway"}], "temperature": 0, **more}
    status, reply = running.post("/v1/chat/completions", {"model": model, "max_tokens": 16, **body})
    return status, reply["choices"][0]["message"]["content"] if status == 200 else reply["error"]


def admin(running, path, body=None):
    connection = http.client.HTTPConnection(
        urllib.parse.urlparse(running.admin_url).netloc, timeout=10
    )
    headers = {"content-type": "application/json"}
    sent = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", f"/admin/v1/{path}", sent, headers)
    try:
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_adapters_go_where_they_fit_and_each_answers_with_its_own_weights(site):
    running, ports = site
    words = {name: said(running, name) for name in ("tiny", "lora-a", "lora-b")}
    assert {status for status, _ in words.values()} == {200}, words
    assert len({text for _, text in words.values()}) == 3
    assert "lora-a" in held(ports[1])
    assert len(held(ports[0])) <= 1

    rows = {(r["adapter"], r["backend_id"]): r for r in admin(running, "adapters")["data"]}
    assert rows["lora-a", "tiny/b2"]["loaded_by"] == "other"
    status, error = said(running, "none")
    assert status == 503, error
    wait_until(
        lambda: any(
            "No adapter found for /no/such/folder" in row["detail"]
            for row in admin(running, "adapters")["data"]
        ),
        60,
        "vLLM's reason is told",
    )
    wait_until(
        lambda: any(
            "LoRA rank 16 is greater than max_lora_rank 8" in row["detail"]
            for row in admin(running, "adapters")["data"]
        ),
        60,
        "the rank is told",
    )

    # The one that has room for one takes what is asked for, when the other is out.
    admin(running, "backends/tiny/b2:drain", {"force": True})
    for name in ("lora-a", "lora-b", "lora-a"):
        assert said(running, name) == words[name]
        assert held(ports[0]) == {name}
    assert said(running, "tiny") == words["tiny"]


def test_a_request_in_flight_ends_before_its_adapter_goes(site):
    running, ports = site
    admin(running, "backends/tiny/b2:drain", {"force": True})
    assert said(running, "lora-a")[0] == 200
    long = {"max_tokens": 600, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(said, running, "lora-a", **long)
        wait_until(
            lambda: any(row["in_flight"] for row in admin(running, "adapters")["data"]),
            30,
            "the long one runs",
        )
        second = threads.submit(said, running, "lora-b")
        assert first.result()[0] == 200
        status, told = second.result()
    assert status == 200 or "overloaded" in str(told) or "could not load" in str(told), told
    admin(running, "backends/tiny/b2:undrain", {})
    assert said(running, "lora-b")[0] == 200


def test_what_the_server_loaded_itself_is_still_there(site):
    _, ports = site
    assert "lora-a" in held(ports[1])
