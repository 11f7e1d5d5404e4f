"""The bundle of a gateway that runs: what it tells of its past, and what the doctor finds around it."""

import json

from gateway.process import reload
from tests.stories.served import program
from tests.stories.support import FAST, gateway, story
from tests.unit.test_bundle import members

SECRET = "redis-pass-of-now"


@story
async def test_it_has_what_was_reloaded_without_a_secret(tmp_path):
    async with gateway(FAST) as world:
        text = world.path.read_text()
        world.path.write_text(text + f"redis: redis://user:{SECRET}@127.0.0.1:1/0\n")
        await reload(world.process)
        world.path.write_text(text + "listn: 1\n")
        assert not (await reload(world.process)).done
        world.path.write_text(text)
        assert (await reload(world.process)).done
        out = tmp_path / "out.tar.gz"
        words = ["bundle", "-c", str(world.path), "--out", str(out), "--server", world.admin_url]
        assert "Secrets are masked" in await program(*words)
    parts = members(out)
    tried = json.loads(parts["reloads.json"])["data"]
    assert [each["done"] for each in tried][:2] == [True, False]
    assert "listn" in tried[1]["findings"][0]
    assert all(SECRET not in each for each in parts.values())
    assert "no known advisory" in parts["doctor.txt"]
