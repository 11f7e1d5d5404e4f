"""A real vLLM's spans are part of the gateway's trace of a request."""

import json

import pytest

from tests.e2e.support import gateway, vllms, wait_until
from tests.otlpreceiver import receiver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
OVER_HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


def test_the_spans_of_a_real_vllm_are_below_the_attempt_that_sent_it_the_request(tmp_path):
    with receiver() as collector:
        flags = ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        with vllms(tmp_path, flags, env=OVER_HTTP) as (port,):
            pools = "pools: " + json.dumps({"tiny": {"backends": [f"http://127.0.0.1:{port}"]}})
            traces = "traces: " + json.dumps({"endpoint": collector.url})
            with gateway(tmp_path, pools, traces) as world:
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 4,
                }
                status, _ = world.post("/v1/chat/completions", body)
                assert status == 200

                def spans():
                    return {each.service for each in collector.spans if each.name != "unknown"}

                wait_until(lambda: len(spans()) == 2, 60, "both have sent their spans")
        attempt = next(
            each
            for each in collector.spans
            if each.service == "vllm-gateway" and each.kind == "client"
        )
        engine = [each for each in collector.spans if each.parent_id == attempt.span_id]
        assert engine, [(each.service, each.name, each.parent_id) for each in collector.spans]
        assert {each.trace_id for each in engine} == {attempt.trace_id}
        assert {each.service for each in engine} != {"vllm-gateway"}
