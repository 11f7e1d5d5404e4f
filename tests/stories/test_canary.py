"""A revision on trial gets its part of the conversations, and what is found of it follows."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.pools.health import Order
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests import loopback
from tests.stories.support import FAST, gateway, story
from tests.stories.test_explain import route, verb

POOLS = """\
pools:
  m:
    canary: {{revision: v2, {how}}}
    backends:
      - {{url: <0>, revision: v1}}
      - {{url: <1>, revision: v2}}
"""


def pools(how):
    return POOLS.format(how=how)


async def overview(world):
    async with loopback.client() as http:
        told = (await http.get(world.admin_url + "/admin/v1/overview")).json()
    return told["pools"][0]["canary"]


def revision(reply):
    assert reply.status_code == 200, reply.text
    return reply.headers["x-gateway-revision"]


@story
async def test_a_share_of_the_conversations_goes_there_and_none_changes_sides():
    async with gateway(FAST, FAST, pools=pools("weight: 0.3"), access=True) as world:
        sides = {}
        for number in range(200):  # by a hash with the key's id, which is another one each time
            text = f"conversation {number}"
            sides[text] = revision(await world.chat(text, max_tokens=1))
        on_trial = sum(side == "v2" for side in sides.values())
        assert 20 < on_trial < 107
        for text, side in list(sides.items())[:12]:
            turns = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "and"},
                {"role": "user", "content": "more"},
            ]
            body = {"model": "m", "messages": turns, "max_tokens": 1}
            assert revision(await world.http.post("/v1/chat/completions", json=body)) == side
        headers = {"x-session-id": "one"}
        one = {revision(await world.chat(f"{n}", max_tokens=1, headers=headers)) for n in range(12)}
        assert len(one) == 1
        lines = world.access_lines()
        assert [line["revision"] for line in lines[:200]] == list(sides.values())


def marked(text):
    """Return a message as clients of Anthropic's API write their last one: the mark moves on with each turn."""
    mark = {"cache_control": {"type": "ephemeral"}}
    return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}


def said(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "and"}]


TURNS = {
    "/v1/messages": (
        lambda text: {"messages": [marked(text)], "max_tokens": 1},
        lambda text: {"messages": [*said(text), marked("more")], "max_tokens": 1},
    ),
    "/v1/responses": (
        lambda text: {"input": text, "max_output_tokens": 1},
        lambda text: {"input": [*said(text), marked("more")], "max_output_tokens": 1},
    ),
}


@pytest.mark.parametrize("path", TURNS)
@story
async def test_a_conversation_whose_first_turn_is_written_in_another_way_stays_on_its_side(path):
    async with gateway(FAST, FAST, pools=pools("weight: 0.5")) as world:
        sides = set()
        for number in range(32):
            bodies = [{"model": "m", **turn(f"talk {number}")} for turn in TURNS[path]]
            first, then = [revision(await world.http.post(path, json=each)) for each in bodies]
            assert first == then
            sides.add(first)
        assert len(sides) == 2


@story
async def test_by_header_and_by_key_only_those_who_are_named_go_there():
    async with gateway(FAST, FAST, pools=pools("header: true")) as world:
        assert {revision(await world.chat(max_tokens=1)) for _ in range(8)} == {"v1"}
        wish = {"x-gateway-revision": "v2"}
        assert {revision(await world.chat(max_tokens=1, headers=wish)) for _ in range(8)} == {"v2"}
        tester = keys.create(world.path.parent / "keys.yaml", name="tester")
        text = world.path.read_text()
        world.path.write_text(text.replace("header: true", f"keys: [{tester.id}]"))
        assert (await reload(world.process)).done
        assert {revision(await world.chat(max_tokens=1, headers=wish)) for _ in range(8)} == {"v1"}
        theirs = {"authorization": f"Bearer {tester.key}"}
        assert revision(await world.chat(max_tokens=1, headers=theirs)) == "v2"


@story
async def test_route_tells_the_side_that_a_key_or_the_lack_of_a_header_decides():
    async with gateway(FAST, FAST, pools=pools("header: true")) as world:

        async def backends(**query):
            return {(await route(world, **query))["backend"] for _ in range(8)}

        assert await backends() == {"m/b1"}
        tester = keys.create(world.path.parent / "keys.yaml", name="tester")
        text = world.path.read_text()
        world.path.write_text(text.replace("header: true", f"keys: [{tester.id}]"))
        assert (await reload(world.process)).done
        assert await backends() == {"m/b1"}
        assert await backends(key=tester.id) == {"m/b2"}


@story
@pytest.mark.parametrize("how", ["weight: 0.3", "header: true", "keys: [nobody]"])
async def test_audio_uploads_are_served_beside_a_canary(how):
    async with gateway(FAST, FAST, pools=pools(how)) as world:
        wave = {"file": ("a.wav", b"RIFF" + bytes(2000), "audio/wav")}
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            assert revision(await world.http.post(path, data={"model": "m"}, files=wave))


@story
async def test_who_cannot_be_served_by_their_own_side_are_served_by_the_other():
    async with gateway(FAST, FAST, pools=pools("header: true")) as world:
        wish = {"x-gateway-revision": "v2"}
        world.sims[1].inject("refuse")
        assert revision(await world.chat(max_tokens=1, headers=wish)) == "v1"
        world.sims[1].clear()
        await world.until(lambda: world.process.table.get("m/b2").phase.value == "ready")
        world.sims[0].inject("refuse")
        assert revision(await world.chat(max_tokens=1)) == "v2"


@story
async def test_route_and_explain_name_both_sides_their_shares_and_the_verdict():
    async with gateway(FAST, FAST, pools=pools("weight: 0.25")) as world:
        shares = "Canary of m: v2 gets 0.25 of the conversations; the other backends get 0.75."
        code, text = await verb(world, "route", "--model", "m")
        assert code == 0
        assert shares in " ".join(text.split())
        assert (await route(world))["canary"].startswith(f"{shares} Revision v2 is on trial")
        reply = await world.chat(max_tokens=1)
        world.process.ledger.post()
        code, text = await verb(world, "explain", reply.headers["x-request-id"])
        told = " ".join(text.split())
        assert code == 0
        assert shares in told
        assert f"Answered by revision {revision(reply)}." in told


async def fill(world, count):
    replies = [await world.chat(f"c {number}", max_tokens=1) for number in range(count)]
    world.process.ledger.post()
    return replies


@story
async def test_what_one_conversation_is_refused_in_a_loop_counts_once():
    how = "header: true, automatic: true"
    async with gateway(FAST, FAST, pools=pools(how), extra="state: state") as world:
        world.sims[1].inject("http_500:422")
        for number in range(50):
            await world.chat("the same", max_tokens=1, headers={"x-gateway-revision": "v2"})
            await world.chat(f"c {number}", max_tokens=1)
        world.process.ledger.post()
        told = await overview(world)
        assert (told["finding"], told["requests"], told["failed"]) == ("open", 1, 1)


@pytest.mark.parametrize("automatic", [False, True])
def test_a_revision_that_fails_is_found_worse_and_rolled_back_where_that_is_automatic(automatic):
    @story
    async def found():
        how = f"weight: 0.5, automatic: {json.dumps(automatic)}"
        async with gateway(FAST, FAST, pools=pools(how), extra="state: state") as world:
            assert (await overview(world))["finding"] == "open"
            world.sims[1].inject("http_500:422")
            await fill(world, 100)
            told = await overview(world)
            assert (told["finding"], told["carried_out"]) == ("worse", automatic)
            assert told["requests"] == told["failed"] >= 20
            assert 'gateway_canary_verdict{pool="m",verdict="worse"} 1.0' in await world.metrics()
            event = next(world.process.supervisor.events.newest())
            assert (event.kind.value, event.backend_id, event.label) == ("canary", "m", "worse")
            after = {reply.status_code for reply in await fill(world, 40)}
            assert after == ({200} if automatic else {200, 400})
            code, text = await verb(world, "status")
            assert (
                "m: revision v2 is worse: " + ("rolled back" if automatic else "roll it back")
                in text
            )
            if automatic:
                # A reload changes nothing, and neither does the next gateway.
                assert (await reload(world.process)).done
                assert {reply.status_code for reply in await fill(world, 20)} == {200}
                saved = json.loads((world.path.parent / "state/rollouts.json").read_text())
                assert saved["m"][1] == "worse"

    found()


@story
async def test_a_gateway_that_starts_anew_keeps_to_what_was_found():
    from gateway.app import build
    from gateway.config.load import load_config
    from gateway.observe.outlet import Outlet

    how = "weight: 0.5, automatic: true"
    async with gateway(FAST, FAST, pools=pools(how), extra="state: state") as world:
        world.sims[1].inject("http_500:422")
        await fill(world, 100)
        assert world.process.table.get("m/b2").in_reserve
        again = build(load_config(world.path), world.path, Outlet())
        assert again.rollouts.get("m").carried_out
        assert again.table.get("m/b2").in_reserve
        text = world.path.read_text()
        world.path.write_text(text.replace("weight: 0.5", "weight: 0.4"))  # another trial
        anew = build(load_config(world.path), world.path, Outlet())
        assert not anew.table.get("m/b2").in_reserve
        # A reload begins it anew too.
        assert (await reload(world.process)).done
        assert not world.process.table.get("m/b2").in_reserve


@story
async def test_a_revision_whose_requests_fail_in_a_row_harms_few_before_the_verdict():
    async with gateway(FAST, FAST, pools=pools("weight: 0.5, automatic: true")) as world:
        world.sims[1].inject("http_500")
        replies = await fill(world, 100)
        assert sum(reply.status_code != 200 for reply in replies) < 8
        told = await overview(world)
        assert (told["finding"], told["failed"]) == ("open", told["requests"])


@story
async def test_who_waits_while_the_settings_are_reloaded_is_not_sent_to_what_was_rolled_back():
    how = "header: true, automatic: true"
    text = pools(how).replace("revision: v1}", "revision: v1, max_in_flight: 1}")
    slow = SimConfig(model="m", reply_tokens=4000)
    async with gateway(slow, FAST, pools=text, extra="state: state") as world:
        world.sims[1].inject("http_500:422")
        wish = {"x-gateway-revision": "v2"}
        for number in range(30):
            await world.chat(f"c {number}", max_tokens=1)
            await world.chat(f"c {number}", max_tokens=1, headers=wish)
        world.process.ledger.post()
        assert (await overview(world))["carried_out"]
        _, second = (await route(world))["backends"]
        assert (second["verdict"], second["setting"]["name"]) == ("in_reserve", "pools.m.canary")
        told = (await route(world))["canary"]
        assert told.startswith("Canary of m: Revision v2 is worse: rolled back.")
        before = len(world.sims[1].received("/v1/chat/completions"))
        body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        async with asyncio.TaskGroup() as group:
            async with world.http.stream("POST", "/v1/chat/completions", json=body):
                await world.until(lambda: world.in_flight() == 1)
                waits = group.create_task(world.chat(max_tokens=1), name="waits")
                await world.until(lambda: world.process.handler.gate.queues()["m"][0] == 1)
                assert (await reload(world.process)).done
                assert world.process.handler.gate.queues()["m"][0] == 1
        assert revision(waits.result()) == "v1"
        assert len(world.sims[1].received("/v1/chat/completions")) == before


CUT = SimConfig(model="m", decode_step_s=0.005)
ASKED = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "tell me"}],
        "max_tokens": 90,
    },
    "/v1/responses": {"input": "tell me", "max_output_tokens": 90},
}


async def told_by(world, path, ordered):
    """Return the bytes of a stream of revision v1; `ordered` is done to its backend after its first bytes."""
    body = {"model": "m", "stream": True, "temperature": 0, **ASKED[path]}
    wish, raw = {"x-gateway-revision": "v1"}, b""
    async with world.http.stream("POST", path, json=body, headers=wish) as reply:
        assert reply.headers["x-gateway-revision"] == "v1"
        async for part in reply.aiter_raw():
            if not raw:
                backends = world.process.table.backends("m")
                ordered(next(each for each in backends if each.in_flight))
            raw += part
    await world.settled()
    return raw


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("alike", [False, True])
def test_an_answer_is_of_one_revision(path, alike):
    """Half of it by one model, and half by another, would be no answer of either."""

    @story
    async def check():
        text = pools("header: true") + "      - {url: <2>, revision: %s}\n" % (
            "v1" if alike else "v2"
        )
        async with gateway(CUT, CUT, CUT, pools=text, access=True) as world:
            for sim in world.sims:
                sim.inject("reset_after:30@1")

            def others_work(backend):
                for number, sim in enumerate(world.sims, 1):
                    if backend.name != f"b{number}":
                        sim.clear()

            raw = await told_by(world, path, others_work)
            line = world.access_lines()[-1]
            assert (line["outcome"], line["resumed"]) == (
                ("ok", 1) if alike else ("stream_broken", 0)
            )
            assert (b"error" in raw) is not alike
            assert not [each for each in world.sims[1].requests if each.method == "POST"]

    check()


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_stays_at_a_backend_that_is_drained_where_others_run_another_revision(path):
    @story
    async def check():
        text = pools("header: true").replace("canary", "move_after: 0s\n    canary")
        async with gateway(CUT, CUT, pools=text, access=True) as world:
            order = world.process.table.order
            raw = await told_by(world, path, lambda backend: order(backend.id, Order.DRAIN))
            line = world.access_lines()[-1]
            assert (line["outcome"], line["attempts"], line["revision"]) == ("ok", 1, "v1")
            assert b"error" not in raw.replace(b'"error":null', b"")

    check()
