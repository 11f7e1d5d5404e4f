"""A gateway that accepts the tokens of an identity provider, over real sockets."""

import json

from gateway.sim.server import SimConfig
from tests.issuing import AUDIENCE, Provider
from tests.stories.fakes import serving
from tests.stories.support import gateway, story

TIERS = "tiers: {gold: {models: ['*'], limits: {requests_per_minute: 2}}}"
OIDC = ", oidc: {{issuer: '{}', audience: {}, tier: gold, claims: {{tenant: org}}}}"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def ask(world, token, **body):
    headers = {"authorization": f"Bearer {token}"}
    return await world.http.post("/v1/chat/completions", json={**HELLO, **body}, headers=headers)


@story
async def test_a_token_is_a_key_with_limits_usage_and_an_end():
    provider = Provider()
    async with serving(provider.app(), host="127.0.0.1", port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        provider.url = f"http://127.0.0.1:{port}"
        keyed = OIDC.format(provider.url, AUDIENCE)
        async with gateway(SimConfig(model="m"), keyed=keyed, extra=TIERS, access=True) as world:
            token = provider.token(org="acme", sub="ann")
            assert (await ask(world, token)).status_code == 200
            told = (
                await world.http.get("/v1/key", headers={"authorization": f"Bearer {token}"})
            ).json()
            assert (told["name"], told["tenant"], told["tier"]) == ("ann", "acme", "gold")
            assert told["expires"] == "2096-10-02T07:06:40Z"
            assert (await ask(world, token)).status_code == 200
            limited = await ask(world, provider.token(org="acme", sub="ann", exp=3_999_999_999))
            assert (limited.status_code, limited.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            assert (await ask(world, provider.token(org="acme", sub="bob"))).status_code == 200
            ended = await ask(world, provider.token(org="acme", exp=1_000_000_000))
            assert (ended.status_code, ended.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await world.chat()).status_code == 200  # keys go on working beside them
            await world.settled()
            lines = world.access_lines()
            assert {line["tenant"] for line in lines if line["status"] == 200} == {"acme", "test"}
            assert token not in json.dumps(lines)
            assert provider.asked == 1
            provider.keys = {"k2": next(iter(provider.keys.values()))}
            assert (await ask(world, token)).status_code in (200, 429)  # it is remembered
            await world.process.tokens.issuer.fetch()
            assert (await ask(world, token)).status_code == 401
