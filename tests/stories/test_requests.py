"""Operators read what became of each request, whatever its end, and what is under way."""

from __future__ import annotations

import json

from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.support import FAST, gateway, story
from tests.stories.test_explain import LONG, ONE_PLACE, admin, held, verb, waiting

SLOW = SimConfig(model="m", reply_tokens=4000)
SECRET_WORD = "xylophone"


async def listed(world, **query):
    async with admin(world) as http:
        reply = await http.get("requests", params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]


async def explained(world, request_id):
    async with admin(world) as http:
        reply = await http.get(f"requests/{request_id}")
        assert reply.status_code == 200, reply.text
        return reply.json()


def steps(told):
    return [each["step"] for each in told["timeline"]]


@story
async def test_a_request_that_went_well_is_told_from_its_arrival_to_its_end():
    async with gateway(FAST, FAST, pool={"aliases": ["gpt"]}) as world:
        for number in range(4):
            headers = {"x-request-id": f"well-{number}"}
            reply = await world.chat(SECRET_WORD, model="gpt", max_tokens=3, headers=headers)
            assert reply.status_code == 200
        told = await explained(world, "well-3")
        assert (told["state"], told["outcome"], told["status"]) == ("ended", "ok", 200)
        assert (told["model"], told["pool"]) == ("gpt", "m")
        assert steps(told) == ["arrived", "read", "sent", "first_token", "ended"]
        after = [each["after_s"] for each in told["timeline"]]
        assert after == sorted(after)
        assert [each["outcome"] for each in told["tried"]] == ["ok"]
        candidates = told["weighed"]
        assert {each["backend"] for each in candidates} == {"m/b1", "m/b2"}
        assert [each["backend"] for each in candidates if each["chosen"]] == [told["backend"]]
        usage = reply.json()["usage"]
        tokens = told["tokens"]
        assert (tokens["prompt"], tokens["output"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert (tokens["counted_by"], tokens["stated_output"]) == ("upstream", 3)
        assert [each["field"] for each in told["changed"]] == ["model"]
        assert (told["decision"], told["refused"], told["setting"]) == (None, None, None)
        assert SECRET_WORD not in json.dumps(told)
        assert world.key not in json.dumps(told)
        code, out = await verb(world, "explain", "well-3")
        assert (code, out.split("\n")[0]) == (0, told["sentence"])
        code, out = await verb(world, "requests", "--model", "gpt", "--limit", "2")
        assert (code, out.count("\n")) == (0, 3)


@story
async def test_what_no_engine_reads_has_no_prompt():
    async with gateway(FAST) as world:
        body, headers = {"model": "m", "prompt": "hi"}, {"x-request-id": "counted"}
        reply = await world.http.post("/tokenize", json=body, headers=headers)
        assert reply.status_code == 200
        told = await explained(world, "counted")
        assert (told["prompt_tokens"], told["tokens"]["expected_prompt"]) == (None, None)
        _, out = await verb(world, "explain", "counted")
        assert "tokens expected" not in out


@story
async def test_a_stream_tells_what_was_added_to_its_body_and_when_its_first_token_came():
    async with gateway(FAST, FAST) as world:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"x-request-id": "streamed"}
        reply = await world.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200
        told = await explained(world, "streamed")
        assert [each["field"] for each in told["changed"]] == ["stream_options", "return_token_ids"]
        assert told["first_token_s"] <= told["duration_s"]
        (sent,) = (
            json.loads(each.body) for sim in world.sims for each in sim.requests if each.body
        )
        assert {"stream_options", "return_token_ids"} == sent.keys() - body.keys()


@story
async def test_what_runs_and_what_waits_is_told_while_it_does():
    async with gateway(LONG, pools=ONE_PLACE) as world:
        async with held(world), waiting(world, "waits"):
            (down,) = [each for each in world.process.ingress.live if each.relay is not None]
            await world.until(lambda: down.relay.watch.events > 2)
            waits, runs = await listed(world)
            assert (waits["id"], waits["state"], waits["outcome"]) == ("waits", "waiting", None)
            assert (runs["state"], runs["backend"], runs["stream"]) == ("running", "m/b1", True)
            assert runs["output_tokens"] > 2
            assert [each["id"] for each in await listed(world, state="running")] == [runs["id"]]
            told = await explained(world, "waits")
            assert told["decision"]["state"] == "waiting"
            assert told["setting"]["name"] == "pools.m.backends[0].max_in_flight"
            assert steps(told)[-1] == "now"
            code, out = await verb(world, "explain", "waits")
            assert out.startswith("waits has been waiting ")
            assert "m/b1     at limit" in out
        await world.settled()
        ended = {each["id"]: each for each in await listed(world)}
        assert ended["waits"]["outcome"] == "client_gone"
        assert ended[runs["id"]]["outcome"] == "client_gone"


@story
async def test_each_attempt_that_failed_is_told():
    async with gateway(FAST, FAST) as world:
        for sim in world.sims:
            sim.inject("admission_503")
        reply = await world.chat(headers={"x-request-id": "twice"})
        told = await explained(world, "twice")
        assert told["status"] == reply.status_code
        assert told["attempts"] == len(told["tried"]) == 2
        assert steps(told).count("sent") == 2
        assert {each["backend"] for each in told["tried"]} == {"m/b1", "m/b2"}
        assert [each["outcome"] for each in told["tried"]] == ["full", "full"]
        assert (told["outcome"], told["shed_reason"]) == ("shed", "engine")


@story
async def test_every_kind_of_end_can_be_found_and_the_last_error_by_its_key():
    async with gateway(FAST) as world:
        await world.chat(headers={"x-request-id": "good"})
        await world.chat(model="nope", headers={"x-request-id": "no-model"})
        await world.chat(SECRET_WORD * 40_000, headers={"x-request-id": "too-long"})
        async with loopback.client(base_url=world.url) as http:
            wrong = {"authorization": "Bearer gw_wrong", "x-request-id": "stranger"}
            assert (
                await http.post("/v1/chat/completions", json={}, headers=wrong)
            ).status_code == 401
            assert (await http.get("/v1/nowhere")).status_code == 404
        rows = await listed(world)
        assert [each["outcome"] for each in rows] == [
            "rejected", "unauthenticated", "rejected", "rejected", "ok",
        ]  # fmt: skip
        key_id = rows[-1]["key_id"]
        assert [each["id"] for each in await listed(world, errors="", key=key_id)] == [
            "too-long",
            "no-model",
        ]
        assert [each["id"] for each in await listed(world, outcome="ok")] == ["good"]
        told = await explained(world, "no-model")
        assert told["refused"]["path"] == "/v1/chat/completions"
        assert told["message"] == told["refused"]["message"]
        told = await explained(world, "too-long")
        assert (told["code"], told["tried"]) == ("context_length_exceeded", [])
        assert SECRET_WORD not in json.dumps(told)
        code, out = await verb(world, "explain", "--last-error", "--key", key_id)
        assert (code, out.split(" for ")[0]) == (0, "too-long")


@story
async def test_pages_of_requests_go_on_though_others_come():
    async with gateway(FAST) as world:
        for number in range(5):
            await world.chat(headers={"x-request-id": f"r{number}"})
        async with admin(world) as http:
            first = (await http.get("requests", params={"limit": 2})).json()
            await world.chat(headers={"x-request-id": "later"})
            query = {"limit": 2, "after": first["last_id"]}
            second = (await http.get("requests", params=query)).json()
            query["after"] = second["last_id"]
            third = (await http.get("requests", params=query)).json()
            refused = await http.get("requests", params={"after": "nonsense"})
        found = [[each["id"] for each in page["data"]] for page in (first, second, third)]
        assert found == [["r4", "r3"], ["r2", "r1"], ["r0"]]
        assert [page["has_more"] for page in (first, second, third)] == [True, True, False]
        assert refused.json()["code"] == "unknown_cursor"


@story
async def test_the_address_of_a_client_is_the_one_that_trusted_proxies_tell():
    extra = "trusted_proxies: [127.0.0.1, 192.0.2.0/24]"
    async with gateway(FAST, extra=extra, access=True) as world:
        told_by = {"x-forwarded-for": "made-up, 203.0.113.9, 192.0.2.1"}
        await world.chat(headers={"x-request-id": "far", **told_by})
        await world.chat(model="nope", headers={"x-request-id": "far-refused", **told_by})
        await world.http.get("/v1/nowhere", headers=told_by)
        await world.chat(headers={"x-request-id": "near"})
        lines = world.access_lines()
        clients = ["203.0.113.9", "203.0.113.9", "203.0.113.9", "127.0.0.1"]
        assert [each["client"] for each in lines] == clients
        assert [each["level"] for each in lines] == ["INFO"] * 4
        assert {each["event"] for each in lines} == {"request"}
        assert (await explained(world, "far"))["client"] == "203.0.113.9"


@story
async def test_without_trusted_proxies_nobody_is_believed():
    async with gateway(FAST, access=True) as world:
        await world.chat(headers={"x-forwarded-for": "203.0.113.9"})
        assert [each["client"] for each in world.access_lines()] == ["127.0.0.1"]
