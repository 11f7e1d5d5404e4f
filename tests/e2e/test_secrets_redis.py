"""No secret and nothing of a prompt is in logs, metrics, errors, answers to operators, files or Redis."""

import logging
import pathlib
import tempfile

import pytest

from gateway.access.keyfile import make_pepper
from gateway.core.limits import KeyLimits
from gateway.process import reload
from gateway.sim.config import SimConfig
from gateway.sim.server import SimServer
from tests import keyfiles as keys
from tests.e2e.test_keys_redis import ordered, replica, until
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


@story
async def test_canaries_of_two_gateways_with_shared_keys_are_found_nowhere(caplog):
    """Each secret goes over both gateways, and over all that they tell each other."""
    caplog.set_level(logging.DEBUG)
    with tempfile.TemporaryDirectory() as made_folder, redis_server() as server:
        folder = pathlib.Path(made_folder)
        make_pepper(folder / "keys.yaml")
        (pepper,) = folder.glob("*pepper*")
        async with (
            SimServer(SimConfig(model="m", speed=0)) as sim,
            replica(server, folder, "a", sim) as (a, to_a),
            replica(server, folder, "b", sim) as (b, to_b),
        ):
            limits = {"limits": {"tokens_per_day": 1_000_000, "concurrent_requests": 9}}
            made = await ordered(a.key_store.create, {"name": "told", **limits})
            for http in (to_a, to_b):
                await until(200, http, made.key)
            again = await ordered(b.key_store.rotate, made.id, 60.0)
            replies, pages = [], []
            for process, http in ((a, to_a), (b, to_b)):
                await until(200, http, again.key)
                asked = {"model": "m", "max_tokens": 2, "cache_salt": SALT}
                asked["messages"] = [{"role": "user", "content": PROMPT}]
                for key in (made.key, again.key, WRONG, made.key + WRONG):
                    for more in ({}, {"stream": True}, {"temperature": "hot"}, {"model": "none"}):
                        bearer = {"authorization": f"Bearer {key}"}
                        replies.append(
                            await http.post(
                                "/v1/chat/completions", json=asked | more, headers=bearer
                            )
                        )
                process.ledger.post()
                await process.accounts.turn()
                admin = f"http://127.0.0.1:{process.admin_port}"
                pages += [(await http.get(admin + page)).text for page in PAGES]
            assert {200, 401, 404} <= {each.status_code for each in replies}
            redis = everything_in(server)
            assert made.id in redis
            places = {
                "log": caplog.text,
                "files": text_of_files(folder, {pepper.name, "a.yaml", "b.yaml"}),
                "pages": "\n".join(pages),
                "errors": "\n".join(each.text for each in replies if each.status_code != 200),
                "redis": redis,
            }
            secrets = {
                "prompt": PROMPT,
                "key": made.key[12:55],
                "rotated key": again.key[12:55],
                "pepper": pepper.read_text().strip(),
                "salt": SALT,
                "wrong key": WRONG,
            }
            for place, text in places.items():
                for what, secret in secrets.items():
                    assert secret not in text, f"the {what} is in the {place}"
