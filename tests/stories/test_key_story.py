"""What a key learns of itself, and what it is not for."""

from gateway.process import reload
from tests import keyfiles as keys
from tests.stories.support import FAST, gateway, story

TIERS = "tiers: {gold: {models: [m, other], max_output: 4k, limits: {requests_per_minute: 60}}}"


async def made(world, **settings):
    file = world.path.parent / "keys.yaml"
    found = keys.run(keys.keys_of(file, tiers=world.process.config.tiers).create(settings))
    assert await reload(world.process)
    return found, {"authorization": f"Bearer {found.key}"}


@story
async def test_a_key_reads_what_it_may_and_when_it_ends():
    async with gateway(FAST, extra=TIERS) as world:
        settings = {"name": "ci", "tenant": "acme", "tier": "gold", "owner": "ann", "priority": 3}
        settings |= {"expires": "2099-01-01T00:00:00Z", "limits": {"concurrent_requests": 2}}
        found, bearer = await made(world, **settings)
        reply = await world.http.get("/v1/key", headers=bearer)
        assert reply.status_code == 200
        told = reply.json()
        stands = {each["rule"]: (each["limit"], each["used"]) for each in told.pop("standing")}
        assert stands == {"requests_per_minute": (60, 0), "concurrent_requests": (2, 0)}
        assert told == {
            "object": "key",
            "id": found.id,
            "name": "ci",
            "tenant": "acme",
            "kind": "inference",
            "role": None,
            "tier": "gold",
            "state": "active",
            "expires": "2099-01-01T00:00:00Z",
            "models": ["m", "other"],
            "deny": [],
            "addresses": [],
            "max_context": None,
            "max_output": 4096,
            "priority": 3,
            "fallback": True,
            "parameters": {},
            "limits": {"requests_per_minute": 60, "concurrent_requests": 2},
        }
        assert (
            await world.http.get("/v1/key", headers={"authorization": "Bearer x"})
        ).status_code == 401


@story
async def test_the_secret_before_a_rotation_reads_when_it_ends_itself():
    async with gateway(FAST) as world:
        found, bearer = await made(world, name="ci")
        again = keys.rotate(world.path.parent / "keys.yaml", found.id, 3600)
        assert await reload(world.process)
        old = (await world.http.get("/v1/key", headers=bearer)).json()
        bearer = {"authorization": f"Bearer {again.key}"}
        new = (await world.http.get("/v1/key", headers=bearer)).json()
        assert (old["id"], old["state"], new["state"]) == (found.id, "rotating", "rotating")
        assert old["expires"] is not None
        assert new["expires"] is None


@story
async def test_a_key_for_the_admin_api_reads_itself_and_uses_no_model():
    async with gateway(FAST) as world:
        _, bearer = await made(world, name="ops", kind="admin", role="operator")
        told = (await world.http.get("/v1/key", headers=bearer)).json()
        assert (told["kind"], told["role"]) == ("admin", "operator")
        for reply in (
            await world.chat(headers=bearer),
            await world.http.get("/v1/models", headers=bearer),
        ):
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == "wrong_kind_of_key"


@story
async def test_a_key_that_is_bound_to_networks_is_refused_elsewhere_and_taken_through_a_proxy():
    async with gateway(FAST, extra="trusted_proxies: [127.0.0.1]") as world:
        _, bearer = await made(world, name="ci", addresses=["10.0.0.0/8"])
        for reply in (
            await world.chat(headers=bearer),
            await world.http.get("/v1/key", headers=bearer),
        ):
            assert reply.status_code == 403
            assert reply.json()["error"]["code"] == "ip_not_authorized"
        through = bearer | {"x-forwarded-for": "10.1.2.3"}
        assert (await world.chat(max_tokens=1, headers=through)).status_code == 200
        beside = bearer | {"x-forwarded-for": "11.1.2.3"}
        assert (await world.chat(max_tokens=1, headers=beside)).status_code == 403


@story
async def test_what_a_key_may_not_use_is_not_there_for_it():
    async with gateway(FAST) as world:
        _, bearer = await made(world, name="ci", deny=["m*"])
        assert (await world.http.get("/v1/models", headers=bearer)).json()["data"] == []
        assert (await world.chat(headers=bearer)).status_code == 404


@story
async def test_without_keys_everybody_is_anonymous():
    async with gateway(FAST) as world:
        world.path.write_text(
            world.path.read_text().replace("keys: {file: keys.yaml}", "keys: none")
        )
        assert await reload(world.process)
        told = (await world.http.get("/v1/key")).json()
        assert (told["id"], told["models"], told["limits"]) == ("anonymous", ["*"], {})


@story
async def test_the_last_use_of_a_key_is_noted_beside_the_file_and_not_in_it():
    async with gateway(FAST) as world:
        file = world.path.parent / "keys.yaml"
        text = file.read_text()
        assert (await world.chat(max_tokens=1)).status_code == 200
        world.process.ledger.post()
        await world.process.last_used.write()
        (key_id,) = keys.run(keys.keys_of(file).uses())
        assert key_id == world.key[3:11]
        assert file.read_text() == text


@story
async def test_the_last_uses_before_a_gateway_stops_are_noted():
    async with gateway(FAST) as world:
        used = world.path.parent / "keys.yaml.used"
        assert (await world.chat(max_tokens=1)).status_code == 200
        world.process.stopping.set()
        await world.until(used.exists)
        assert world.key[3:11] in used.read_text()
