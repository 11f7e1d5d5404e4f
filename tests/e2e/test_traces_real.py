"""A real vLLM's spans are part of the gateway's trace of a request, as a real collector reads them."""

import contextlib
import json
import pathlib
from collections.abc import Iterator

import pytest

from tests.e2e.support import CACHE, gateway, get, need, running, wait_until
from tests.e2e.vllms import vllms
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
OVER_HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


@contextlib.contextmanager
def collector(folder: pathlib.Path) -> Iterator[str]:
    """Run Phoenix, which takes spans over OTLP and understands those of language models."""
    phoenix, port = need(CACHE / "phoenix/bin/phoenix", "Phoenix"), free_port()
    env = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with running([phoenix, "serve"], log=folder / "phoenix.log", env=env):
        yield f"http://127.0.0.1:{port}"


def read(url: str) -> list[dict]:
    """Return the spans that a collector has; before the first one there is no such page."""
    status, body = get(f"{url}/v1/projects/default/spans?limit=1000", timeout=60.0)
    return json.loads(body)["data"] if status == 200 else []


def test_the_spans_of_a_real_vllm_are_below_the_attempt_that_sent_it_the_request(tmp_path):
    with collector(tmp_path) as url:
        flags = ("--otlp-traces-endpoint", f"{url}/v1/traces")
        with vllms(tmp_path, flags, env=OVER_HTTP) as (port,):
            wait_until(lambda: get(f"{url}/healthz")[0] == 200, 120, "the collector is ready")
            pools = "pools: " + json.dumps({"tiny": {"backends": [f"http://127.0.0.1:{port}"]}})
            traces = "traces: " + json.dumps({"endpoint": url})
            with gateway(tmp_path, pools, traces) as world:
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 4,
                }
                status, reply = world.post("/v1/chat/completions", body)
                assert status == 200

                def all_are_there():
                    names = [each["name"] for each in read(url)]
                    return names.count("chat tiny") == 2 and "llm_request" in names

                wait_until(all_are_there, 60, "both have sent their spans")
        spans = read(url)
        request, attempt = (  # the gateway's
            next(each for each in spans if each["name"] == "chat tiny" and is_part(each))
            for is_part in (lambda span: span["parent_id"] is None, lambda span: span["parent_id"])
        )
        assert attempt["parent_id"] == request["context"]["span_id"]
        engine = next(each for each in spans if each["name"] == "llm_request")
        assert engine["parent_id"] == attempt["context"]["span_id"]
        assert {each["context"]["trace_id"] for each in (request, attempt, engine)} == {
            request["context"]["trace_id"]
        }
        # What it understands of the conventions for generative AI.
        usage, told = reply["usage"], request["attributes"]
        assert request["span_kind"] == attempt["span_kind"] == "LLM"
        assert (told["llm.model_name"], attempt["attributes"]["llm.system"]) == ("tiny", "vllm")
        assert told["llm.token_count.prompt"] == usage["prompt_tokens"]
        assert told["llm.token_count.completion"] == usage["completion_tokens"]
