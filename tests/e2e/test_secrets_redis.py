"""No secret and nothing of a prompt is in logs, metrics, errors, answers to operators, files or Redis."""

import logging

import pytest

from gateway.core.limits import KeyLimits
from gateway.process import reload
from gateway.sim.config import SimConfig
from tests import keyfiles as keys
from tests.redisserver import redis_server
from tests.stories.support import gateway, story

pytestmark = pytest.mark.e2e

PROMPT, SALT, WRONG = "canaryprompt7391", "canarysalt5527", "canarywrongkey8812"
PAGES = (
    "/metrics",
    "/admin/v1/overview",
    "/admin/v1/requests",
    "/admin/v1/events",
    "/admin/v1/usage",
    "/admin/v1/keys",
    "/admin/v1/config",
    "/admin/v1/series",
)


def everything_in(server):
    """Return all names and values of a Redis as text."""
    ask = {"string": "GET", "hash": "HGETALL"}
    ranges = {"list": ("LRANGE", 0, -1), "zset": ("ZRANGE", 0, -1), "set": ("SMEMBERS",)}
    found = []
    for name in server.ask("KEYS", "*"):
        kind = server.ask("TYPE", name)
        verb, *more = (ask[kind],) if kind in ask else ranges[kind]
        found += [name, repr(server.ask(verb, name, *more))]
    return "\n".join(found)


def text_of_files(folder, but):
    return "\n".join(
        each.read_bytes().decode("utf-8", "replace")
        for each in sorted(folder.rglob("*"))
        if each.is_file() and each.name not in but
    )


@story
async def test_canaries_are_found_nowhere(caplog):
    caplog.set_level(logging.DEBUG)
    with redis_server() as server:
        async with gateway(
            SimConfig(model="m", speed=0), extra=f"redis: {server.url}", access=True
        ) as world:
            folder = world.path.parent
            limits = KeyLimits(6, 100_000, concurrent_requests=9, tokens_per_day=1_000_000)
            made = keys.create(folder / "keys.yaml", name="canary", limits=limits)
            assert (await reload(world.process)).done
            pepper = next(folder.glob("*pepper*"))
            own = {"authorization": f"Bearer {made.key}"}
            asked = {"messages": [{"role": "user", "content": PROMPT}], "cache_salt": SALT}
            replies = [
                await world.chat(headers=own, **asked),
                await world.chat(headers=own, stream=True, **asked),
                await world.chat(headers=own, temperature="hot", **asked),
                await world.chat(
                    headers=own, messages=[{"role": "user", "content": {"x": PROMPT}}]
                ),
                await world.chat(headers=own, model="none", **asked),
                await world.chat(headers={"authorization": f"Bearer {WRONG}"}, **asked),
                await world.chat(headers={"authorization": f"Bearer {made.key}{WRONG}"}, **asked),
            ]
            replies += [await world.chat(headers=own, **asked) for _ in range(8)]
            codes = {each.status_code for each in replies}
            assert {200, 401, 404, 429} <= codes
            pages = [(await world.http.get(world.admin_url + page)).text for page in PAGES]
            assert "canary" in pages[PAGES.index("/admin/v1/keys")]  # the key's name may be told
            world.process.ledger.post()
            await world.process.accounts.turn()
            redis = everything_in(server)
            assert made.id in redis  # there is something to be found
            places = {
                "log": caplog.text,
                "files": text_of_files(folder, {pepper.name, "gateway.yaml"}),
                "pages": "\n".join(pages),
                "errors": "\n".join(each.text for each in replies),
                "redis": redis,
            }
            secrets = {
                "prompt": PROMPT,
                "key": made.key[12:55],
                "pepper": pepper.read_text().strip(),
                "salt": SALT,
                "wrong key": WRONG,
            }
            for place, text in places.items():
                for what, secret in secrets.items():
                    assert secret not in text, f"the {what} is in the {place}"
