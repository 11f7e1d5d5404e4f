"""What is refused before it reaches a model is counted, logged and explained."""

from __future__ import annotations

import json

from gateway.ingress.early import KEPT
from tests.stories.support import FAST, gateway, story
from tests.stories.test_explain import admin, explain, verb
from tests.stories.wire import CHAT, chat_body, connected, request

SHORT = "timeouts: {header: 300ms}"


def counted(text: str, status: int) -> int:
    """Return how many requests without an endpoint ended with a status."""
    marks = ('endpoint="_unknown"', f'code="{status}"')
    lines = [line for line in text.splitlines() if line.startswith("gateway_requests_total{")]
    return sum(
        int(float(line.split()[-1])) for line in lines if all(mark in line for mark in marks)
    )


@story
async def test_each_early_refusal_is_counted_logged_and_explained():
    refused = [
        (request("POST", "/v1/v1/chat/completions", b"{}"), 404, "unknown_url"),
        (
            request("GET", "/v1/models", lines=("Authorization: Bearer wrong",)),
            401,
            "invalid_api_key",
        ),
        (request("GET", "/v1/models"), 401, "missing_api_key"),
        (request("GET", CHAT), 405, "method_not_allowed"),
        (request("CONNECT", "gateway:443"), 405, "method_not_allowed"),
        (request("OPTIONS", "*"), 404, "unknown_url"),
        (request(lines=tuple(f"x-{n}: y" for n in range(100))), 431, "request_headers_too_large"),
        (b"POST /v1/chat/comp", 408, "request_timeout"),
        (b"NOT HTTP\r\n\r\n", 400, "invalid_http"),
    ]
    async with gateway(FAST, extra=SHORT, access=True) as world:
        answers = []
        for data, status, code in refused:
            async with connected(world.process.public_port) as wire:
                answer = await wire.ask(data)
                assert (answer.status, answer.code) == (status, code)
                answers.append(answer)
        text = await world.metrics()
        for status, count in ((404, 2), (401, 2), (405, 2), (431, 1), (408, 1), (400, 1)):
            assert counted(text, status) == count, status
        lines = {line["id"]: line for line in world.access_lines()}
        for answer in answers:
            request_id = answer.headers["x-request-id"]
            line = lines[request_id]
            assert (line["status"], line["code"]) == (answer.status, answer.code)
            assert (line["endpoint"], line["model"], line["key_id"]) == ("_unknown", None, None)
            told = await explain(world, request_id)
            assert (told["state"], told["status"], told["code"]) == (
                "refused", answer.status, answer.code,
            )  # fmt: skip
            assert told["message"] == answer.message
            assert told["sentence"].startswith(f"{request_id}: ")


@story
async def test_of_routes_that_are_no_inference_only_a_refusal_has_a_line_and_counts():
    """The reference of log lines says so."""
    async with gateway(FAST, access=True) as world:
        for path in ("/v1/models", "/v1/key", "/livez", "/readyz"):
            assert (await world.http.get(path)).status_code == 200
        wrong = {"authorization": "Bearer x"}
        assert (await world.http.get("/v1/models", headers=wrong)).status_code == 401
        (line,) = world.access_lines()
        assert (line["endpoint"], line["outcome"]) == ("_unknown", "unauthenticated")
        assert (await world.metrics()).count("\ngateway_requests_total{") == 1


@story
async def test_what_a_caller_did_wrong_is_explained_too():
    async with gateway(FAST) as world:
        bad = (
            (await world.chat(model="none"), 404),
            (await world.chat(headers={"authorization": "Bearer x"}), 401),
            (await world.chat(max_tokens="many"), 400),
        )
        for reply, status in bad:
            told = await explain(world, reply.headers["x-request-id"])
            assert reply.status_code == told["status"] == status
            assert told["message"] == reply.json()["error"]["message"]
            assert (told["method"], told["path"]) == ("POST", CHAT)


@story
async def test_explain_says_it_in_words_with_the_setting_that_decided():
    async with gateway(FAST, extra=SHORT) as world:
        async with connected(world.process.public_port) as wire:
            late = await wire.ask(b"GET /v1/mod")
        code, out = await verb(world, "explain", late.headers["x-request-id"])
        assert code == 0
        assert "GET /v1/mod" in out or "408 request_timeout" in out
        assert "Decided by timeouts.header: 300ms (gateway.yaml:" in out
        assert "None" not in out
        async with connected(world.process.public_port) as wire:
            wrong = await wire.ask(request("POST", "/chat/completions?key=hidden", b"{}"))
        secret = request("POST", f"/v1/{world.key}", b"{}")
        async with connected(world.process.public_port) as wire:
            answer = await wire.ask(secret)
        assert world.key[-20:] not in answer.message
        told = await explain(world, answer.headers["x-request-id"])
        assert world.key[-20:] not in json.dumps(told)
        code, out = await verb(world, "explain", wrong.headers["x-request-id"])
        assert "POST /chat/completions was refused" in out
        assert "Use /v1/chat/completions." in out
        assert "hidden" not in out


@story
async def test_strangers_push_no_explanation_of_a_caller_out():
    async with gateway(FAST) as world:
        mine = (await world.chat(model="none", headers={"x-request-id": "mine"})).json()
        async with connected(world.process.public_port) as wire:
            for number in range(KEPT + 1):
                lines = (f"X-Request-Id: s{number}",)
                assert (await wire.ask(request(target="/nowhere", lines=lines))).status == 404
            theirs = request("POST", CHAT, chat_body(), lines=("X-Request-Id: mine",))
            assert (await wire.ask(theirs)).status == 401
        told = await explain(world, "mine")
        assert told["message"] == mine["error"]["message"]
        early = world.process.handler.early
        assert len(early.callers) == 1
        assert len(early.strangers) == KEPT
        assert json.dumps(await explain(world, "s0")).count("decision_not_found") == 1


@story
async def test_all_requests_for_models_that_nobody_serves_are_counted_for_operators():
    body = chat_body(model="gpt-9")
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        for _ in range(KEPT + 20):
            wanted = request("POST", CHAT, body, lines=(f"Authorization: Bearer {world.key}",))
            answer = await wire.ask(wanted)
            assert (answer.status, answer.code) == (404, "model_not_found")
        async with admin(world) as http:
            told = (await http.get("overview")).json()["problems"]
    (problem,) = [each for each in told if each["kind"] == "unknown_model"]
    assert problem["sentence"].startswith(f"{KEPT + 20} requests in 5 min asked for a model")
    assert "gpt-9" in problem["cause"]


@story
async def test_a_connection_too_many_is_counted_as_shed_by_this_gateway():
    async with gateway(FAST, extra="limits: {connections_per_address: 2}") as world:
        async with connected(world.process.public_port) as one:
            assert (await one.ask(request(target="/livez"))).status == 200
            async with connected(world.process.public_port) as two:
                assert (await two.ask(request(target="/livez"))).status == 200
                async with connected(world.process.public_port) as three:
                    refused = await three.answer()
        assert (refused.status, refused.code) == (503, "too_many_connections")
        told = await explain(world, refused.headers["x-request-id"])
        assert (told["status"], told["message"]) == (503, refused.message)
        text = await world.metrics()
        assert 'gateway_shed_total{pool="_unknown",reason="engine"}' not in text
        reason = refused.headers["x-gateway-shed-reason"]
        assert f'gateway_shed_total{{pool="_unknown",reason="{reason}"}} 1.0' in text
