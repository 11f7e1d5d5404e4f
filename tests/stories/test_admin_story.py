"""The admin API of a gateway that runs, asked as operators ask: by the command line, and over HTTP."""

import asyncio
import functools
import json
import subprocess

import pytest

from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.served import PROGRAM, served
from tests.stories.support import story as story_within

pytestmark = pytest.mark.timeout(180)  # each verb is a process of its own
story = functools.partial(story_within, seconds=170.0)


async def verb(world, *words):
    """Run a verb with the server named before it; return its exit code and what it says."""
    ran = await asyncio.to_thread(
        subprocess.run,
        [PROGRAM, "--server", world.admin_url, *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout + ran.stderr


@story
async def test_a_change_of_settings_is_seen_carried_out_and_on_the_record():
    async with served(SimConfig(model="m")) as world:
        text = world.path.read_text()
        world.path.write_text(text.replace("scrape_interval: 100ms", "scrape_interval: 150ms"))
        code, said = await verb(world, "config", "diff")
        assert (code, said) == (0, "health.scrape_interval 100ms -> 150ms\n")
        code, said = await verb(world, "reload", "--reason", "less load")
        assert (code, said.splitlines()[0]) == (0, "reloaded")
        code, said = await verb(world, "config", "effective")
        assert 'health.scrape_interval: "150ms"  # line' in said
        code, said = await verb(world, "config", "history")
        assert [line.split()[2] for line in said.splitlines()[1:]] == ["local", "start"]
        code, said = await verb(world, "audit")
        assert (code, "less load" in said, "reload config" in said) == (0, True, True)
        world.path.write_text(text + "nothing: 1\n")
        code, said = await verb(world, "reload")
        assert code == 3
        assert "unknown key `nothing`" in said
        code, said = await verb(world, "status", "--exit-code")
        assert code == 8
        assert "degraded: The last reload, asked for on this machine, was refused" in said
        assert "unknown key `nothing`" in said
        code, said = await verb(world, "config", "validate")
        assert (code, "it cannot be used" in said) == (3, True)
        code, said = await verb(world, "config", "validate", str(world.path))
        assert code == 3


@story
async def test_the_verbs_of_keys_reach_the_keys_of_a_gateway_that_runs_elsewhere():
    async with served(SimConfig(model="m")) as world:
        made = json.loads((await verb(world, "keys", "create", "new", "-o", "json"))[1])
        code, said = await verb(world, "keys", "update", made["id"], "--max-output", "4k")
        assert (code, f"key {made['id']} is changed" in said) == (0, True)
        code, said = await verb(
            world, "keys", "update", made["id"], "--name", "x", "--if-version", "no"
        )
        assert code == 1
        assert "changed since" in said
        rows = json.loads((await verb(world, "keys", "list", "-o", "json"))[1])
        assert [(row["name"], row["max_output"]) for row in rows[1:]] == [("new", 4096)]
        code, said = await verb(world, "keys", "effective", made["id"])
        assert "max_output" in said
        rotated = json.loads((await verb(world, "keys", "rotate", made["id"], "-o", "json"))[1])
        assert (rotated["id"], rotated["key"] != made["key"]) == (made["id"], True)
        assert (await verb(world, "keys", "revoke", made["id"]))[0] == 0
        shown = json.loads((await verb(world, "keys", "show", made["id"], "-o", "json"))[1])
        assert shown["state"] == "revoked"
        code, said = await verb(world, "keys", "create", "two\nlines")
        assert (code, "NAME" in said or "name" in said) == (2, True)
        code, said = await verb(world, "keys", "show", "nope")
        assert (code, "no key with the id nope" in said) == (4, True)


@story
async def test_a_key_that_is_made_over_the_api_is_let_in_and_then_not():
    async with served(SimConfig(model="m")) as world:
        async with loopback.client() as http:
            keys = world.admin_url + "/admin/v1/keys"
            made = (await http.post(keys, json={"name": "new"})).json()
            bearer = {"authorization": f"Bearer {made['key']}"}

            async def answered(status):
                async with asyncio.timeout(20):
                    while True:
                        reply = await http.get(world.url + "/v1/models", headers=bearer)
                        if reply.status_code == status:
                            return
                        await asyncio.sleep(0.05)

            await answered(200)
            ended = await http.post(f"{keys}/{made['id']}:revoke", json={})
            assert ended.json()["state"] == "revoked"
            await answered(401)
            assert {each["name"] for each in (await http.get(keys)).json()["data"]} == {
                "test",
                "new",
            }
