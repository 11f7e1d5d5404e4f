"""The dashboard in a real Chromium, over a gateway with simulated backends."""

import asyncio
import contextlib
import functools
import json
import re
import time

import httpx2
import pytest

from gateway.config.supervision import Remedy
from gateway.core.types import Phase
from gateway.heal.cure import Cure
from gateway.launch.launcher import Changes
from gateway.sim.faults import Fault
from tests import keyfiles
from tests.e2e.browser import browsing
from tests.e2e.scene import CODER, scene, that_does_not_start
from tests.stories.served import runs, served
from tests.stories.support import FAST, gateway
from tests.stories.support import story as story_within

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
story = functools.partial(story_within, seconds=110.0)  # a browser starts in each

GOOD, BAD = ".verdict[data-tone=good]", ".verdict:not([data-tone=good])"
VIEWS = {  # and what each is headed
    "requests": "Requests", "keys": "Keys", "config": "Configuration", "backends/m/b2": "m/b2",
}  # fmt: skip
# What only one row of the requests says; a key's id, which is random, may hold "ok".
SERVED, REFUSED = "m/b", "model_not_found"
HOSTILE = "<img src=x onerror=window.hacked=1>"


@story
async def test_the_verdict_comes_first_and_changes_with_the_backends():
    async with gateway(FAST, FAST) as world, browsing(world.admin_url) as seen:
        await seen.until("2 backends", GOOD)
        assert [text.split()[0] for text in await seen.texts(".pools tbody th")] == [
            "m",
            "b1",
            "b2",
        ]
        await world.sims[0].stop()
        await seen.until("b1", BAD)
        await seen.until("unreachable", ".pools tbody tr:nth-child(2)")


@story
async def test_a_token_is_asked_for_and_kept_out_of_the_address():
    async with gateway(FAST, admin_token="the-token-of-this-test") as world:
        async with browsing(world.admin_url) as seen:
            await seen.page.get_by_label("Admin token").fill("a wrong one")
            await seen.page.keyboard.press("Enter")
            await seen.until("does not know this token")
            await seen.page.get_by_label("Admin token").fill("the-token-of-this-test")
            await seen.page.keyboard.press("Enter")
            await seen.until("1 pool", GOOD)
            assert "token" not in seen.page.url
            await seen.page.reload()
            await seen.until("1 pool", GOOD)
            await seen.page.get_by_role("button", name="Sign out").click()
            await seen.page.get_by_label("Admin token").wait_for()
            assert await seen.page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@story
async def test_every_view_is_accessible(scheme):
    async with gateway(FAST, FAST) as world, browsing(world.admin_url, scheme=scheme) as seen:
        assert (await world.chat(model="unknown")).status_code == 404
        await world.sims[0].stop()
        await seen.until("b1", BAD)
        assert await seen.accessibility() == []
        for view, heading in VIEWS.items():
            await seen.page.goto(f"{world.admin_url}/#/{view}")
            await seen.until(heading, "main h1")
            await seen.page.locator("main :is(td, dd)").first.wait_for()
            assert await seen.accessibility() == [], view


@pytest.mark.parametrize("scheme", ["light", "dark"])
@story
async def test_runbooks_are_accessible_and_fit_a_phone(scheme):
    async with gateway(FAST) as world:
        runbooks = f"{world.admin_url}/runbooks"
        async with browsing(runbooks, scheme=scheme, width=360, height=740) as seen:
            assert await seen.accessibility() == []
            await seen.page.get_by_role("link", name="BackendFrozen").click()
            await seen.until("BackendFrozen", "h1")
            assert await seen.accessibility() == []
            assert await seen.page.evaluate("document.documentElement.scrollWidth") == 360


@story
async def test_the_page_fits_a_phone():
    async with gateway(FAST, FAST) as world:
        async with browsing(world.admin_url, width=360, height=740) as seen:
            await seen.until("1 pool", GOOD)
            wide = await seen.page.evaluate("document.documentElement.scrollWidth")
            assert wide == 360


def poisoned(told):
    """Add markup to each string of an answer, but to roles and times, which the page reads as such."""
    match told:
        case str():
            return told + HOSTILE
        case list():
            return [poisoned(each) for each in told]
        case dict():
            return {
                name: each if name in ("role", "at") else poisoned(each)
                for name, each in told.items()
            }
    return told


async def poison(route):
    reply = await route.fetch()
    if "json" in reply.headers["content-type"]:
        await route.fulfill(response=reply, json=poisoned(await reply.json()))
    else:
        await route.fulfill(response=reply, body=HOSTILE + await reply.text())


@story
async def test_whatever_the_gateway_tells_is_text_and_never_runs():
    async with gateway(FAST, FAST) as world, browsing(f"{world.admin_url}/livez") as seen:
        assert (await world.chat()).status_code == 200
        await world.sims[0].stop()
        await seen.page.route("**/admin/v1/**", poison)
        await seen.page.goto(world.admin_url)
        await seen.until(f"b1{HOSTILE}", ".pools")
        await seen.until(HOSTILE, "section:has(#events) li")
        for view in VIEWS:
            await seen.page.goto(f"{world.admin_url}/#/{view}")
            await seen.until(HOSTILE)
            assert await seen.page.locator("img").count() == 0
            assert await seen.page.evaluate("window.hacked") is None


@story
async def test_an_outage_of_the_gateway_is_said_and_ends():
    async with gateway(FAST) as world, browsing(world.admin_url) as seen:
        await seen.until("1 pool", GOOD)
        await seen.page.route("**/admin/**", lambda route: route.abort())
        await seen.until("What you see is old", ".verdict")
        await seen.page.unroute("**/admin/**")
        await seen.page.locator(".stale").wait_for(state="hidden")
        seen.wrong.clear()  # the browser complains of what this test did


@contextlib.asynccontextmanager
async def cutting():
    """The URL of a server that ends its connection in the middle of each answer."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b'content-length: 1000\r\n\r\n{"data": [')
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@story
async def test_answers_that_are_cut_are_an_outage_and_the_page_keeps_asking():
    async with gateway(FAST) as world, cutting() as url:
        async with browsing(f"{world.admin_url}/livez") as seen:

            async def cut(route):
                await route.continue_(url=url)

            await seen.page.route("**/admin/v1/**", cut)
            await seen.page.goto(world.admin_url)
            await seen.until("does not answer", ".stale")
            await seen.page.unroute("**/admin/v1/**")
            await seen.until("1 pool", GOOD)
            await seen.page.route("**/admin/v1/**", cut)
            await seen.until("What you see is old", ".verdict")
            await seen.page.unroute("**/admin/v1/**")
            await seen.page.locator(".stale").wait_for(state="hidden")
            await seen.page.goto(f"{world.admin_url}/#/requests")
            await seen.until("Requests", "main h1")
            await seen.page.route("**/admin/v1/**", cut)
            await seen.until("does not answer", "main .problem-text")
            await seen.page.unroute("**/admin/v1/**")
            await seen.page.locator("main .problem-text").wait_for(state="hidden")
            seen.wrong.clear()  # the browser complains of what this test did


@story
async def test_an_order_says_what_it_would_do_and_waits_for_a_yes():
    async with gateway(FAST, FAST) as world:
        async with browsing(f"{world.admin_url}/#/backends/m/b1") as seen:
            backend = world.process.table.get("m/b1")
            await seen.page.get_by_role("button", name="Drain", exact=True).click()
            await seen.until("m/b1", "dialog .effect")
            await seen.page.get_by_role("button", name="Cancel").click()
            assert backend.phase is Phase.READY
            await seen.page.get_by_role("button", name="Drain", exact=True).click()
            await seen.page.get_by_label("Reason").fill("a new driver")
            await (
                seen.page.get_by_role("dialog")
                .get_by_role("button", name="Drain", exact=True)
                .click()
            )
            await seen.until("Done.", "dialog .effect")
            assert backend.phase is not Phase.READY
            await seen.page.get_by_role("button", name="Close").click()
            await seen.page.get_by_role("dialog").wait_for(state="hidden")
            await seen.page.get_by_role("button", name="Undrain").click()
            await seen.page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
            await seen.until("Done.", "dialog .effect")
            await world.ready(2)
        audit = (await world.http.get(world.admin_url + "/admin/v1/audit")).json()["data"]
        assert [(each["action"], each["reason"]) for each in audit] == [
            ("undrain", ""),
            ("drain", "a new driver"),
        ]


@story
async def test_the_last_backend_is_taken_out_only_when_that_is_said_twice():
    async with gateway(FAST) as world:
        async with browsing(f"{world.admin_url}/#/backends/m/b1") as seen:
            await seen.page.get_by_role("button", name="Drain", exact=True).click()
            dialog = seen.page.get_by_role("dialog")
            await dialog.get_by_label("although no other backend").wait_for()
            assert await dialog.get_by_role("button", name="Drain", exact=True).is_disabled()
            await dialog.get_by_label("although no other backend").check()
            await dialog.get_by_role("button", name="Drain", exact=True).click()
            await seen.until("Done.", "dialog .effect")


@story
async def test_restarts_are_held_and_the_hold_is_lifted():
    async with gateway(FAST) as world, browsing(world.admin_url) as seen:
        for order in ("Hold automatic restarts", "Lift the hold"):
            await seen.page.get_by_role("button", name=order).click()
            await seen.page.get_by_role("dialog").get_by_role("button", name=order).click()
            await seen.until("Done.", "dialog .effect")
            await seen.page.get_by_role("button", name="Close").click()
        await seen.page.get_by_role("button", name="Hold automatic restarts").wait_for()


async def give(seen, button, *, confirm):
    """Give an order by its button, confirm it, and close what it tells."""
    await seen.page.get_by_role("button", name=button, exact=True).click()
    dialog = seen.page.get_by_role("dialog")
    await dialog.get_by_role("button", name=confirm, exact=True).click()
    await seen.until("Done.", "dialog .effect")
    await dialog.get_by_role("button", name="Close").click()
    await dialog.wait_for(state="hidden")


@story
async def test_an_adapter_is_unloaded_and_loaded_again():
    sql = {"name": "sql", "path": "/loras/sql"}
    pools = "pools: " + json.dumps({"m": {"backends": ["<0>", "<1>"], "adapters": [sql]}})
    async with gateway(FAST, FAST, pools=pools) as world:
        held = world.sims[0].state.loaded
        await world.until(lambda: "sql" in held)
        async with browsing(f"{world.admin_url}/#/backends/m/b1") as seen:
            row = "section:has(#adapters) tbody tr"
            await seen.until("the settings", row)
            await give(seen, "Unload sql", confirm="Unload")
            await seen.until("an operator keeps it out", row)
            await world.until(lambda: "sql" not in held)
            await give(seen, "End the order sql", confirm="End the order")
            await seen.until("loaded", f"{row} .state[data-tone=good]")
            assert "sql" in held
            assert await seen.accessibility() == []
        listed = await world.http.get(f"{world.admin_url}/admin/v1/adapters?backend=m/b1")
        assert [each["backend_id"] for each in listed.json()["data"]] == ["m/b1"]


@story
async def test_remedies_are_shown_and_dropped():
    async with scene() as world:
        backend_id = f"{CODER}/b2"
        overrides = world.process.supervisor.overrides
        launch = world.process.config.pools[CODER].backends[1].launch
        cure = Cure(
            Remedy.LOWER_MAX_MODEL_LEN, Changes({"max-model-len": 4096}), "the cache is small"
        )
        overrides.apply(backend_id, launch, cure, time.time())
        async with browsing(f"{world.admin_url}/#/backends/{backend_id}") as seen:
            await seen.until("--max-model-len 4096", "section:has(#remedies)")
            await seen.until("the cache is small", "section:has(#remedies) tbody tr")
            assert await seen.accessibility() == []
            await give(seen, "Drop the remedies", confirm="Drop the remedies")
            await seen.page.locator("section:has(#remedies)").wait_for(state="hidden")
            assert backend_id not in overrides.kept


@story
async def test_a_request_in_quarantine_is_let_go():
    async with gateway(FAST, FAST, FAST, FAST) as world:
        for sim in world.sims:
            sim.inject("die_on_prompt:poison")
        for _ in range(6):
            refused = await world.chat("poison", max_tokens=5)
        assert refused.json()["error"]["code"] == "request_quarantined"
        async with browsing(world.admin_url) as seen:
            await seen.until("test: ", "section:has(#quarantine) tbody tr")
            (kept,) = world.process.handler.retrying.quarantine
            assert await seen.accessibility() == []
            again = "Let it be sent again"
            await give(seen, f"{again} {kept.of.id}", confirm=again)
            await seen.page.locator("section:has(#quarantine)").wait_for(state="hidden")
            assert [*world.process.handler.retrying.quarantine] == []


async def give_token(world, role):
    """Have the gateway take a token of a role, `watch`, beside the one of its admin."""
    text = world.path.read_text()
    begin = "token: 'an-admin-of-this-test'"
    assert begin in text
    more = f"tokens: [{{name: watch, role: {role}, token: another-of-this-test}}]"
    world.path.write_text(text.replace(begin, f"{begin}, {more}"))
    bearer = {"authorization": "Bearer an-admin-of-this-test"}
    reload = world.admin_url + "/admin/v1/config:reload"
    assert (await world.http.post(reload, json={}, headers=bearer)).status_code == 200


@story
async def test_a_viewer_is_offered_no_order():
    async with gateway(FAST, FAST, admin_token="an-admin-of-this-test") as world:
        await give_token(world, "viewer")
        assert (await world.chat()).status_code == 200
        async with browsing(world.admin_url, token="another-of-this-test") as seen:
            await seen.until("watch · viewer", ".session")
            for view, heading in ({"overview": ""} | VIEWS).items():
                await seen.page.goto(f"{world.admin_url}/#/{view}")
                await seen.until(heading, "main h1")
                await seen.page.locator("main :is(td, dd)").first.wait_for()
                assert set(await seen.texts("main button")) <= {"Back to now"}, view


@story
async def test_an_upgrade_is_confirmed_and_tells_which_process_serves():
    async with served(FAST) as world:
        before = world.pids[0]
        async with browsing(f"{world.admin_url}/#/config") as seen:
            dialog, effect = seen.page.get_by_role("dialog"), "dialog .effect"
            await seen.page.get_by_role("button", name="Upgrade", exact=True).click()
            await seen.until("A new process of the gateway takes over", effect)
            await dialog.get_by_role("button", name="Cancel").click()
            assert runs(before)
            await seen.page.get_by_role("button", name="Upgrade", exact=True).click()
            await seen.page.get_by_label("Reason").fill("other code")
            await dialog.get_by_role("button", name="Upgrade", exact=True).click()
            await seen.until("Done. process", effect)
            told = await dialog.locator(".effect").inner_text()
            world.pids.append(int(re.search(r"process (\d+)", told)[1]))
            await dialog.get_by_role("button", name="Close").click()
            await world.until(lambda: not runs(before))
            assert runs(world.pids[1])
            await seen.page.goto(f"{world.admin_url}/#/overview")
            await seen.until("1 pool", GOOD)


@story
async def test_an_upgrade_that_is_refused_says_why():
    why = "the gateway is the main process of a container"

    async def refuse(route):
        refused = json.dumps({"code": "upgrade_refused", "detail": why})
        await route.fulfill(status=409, content_type="application/problem+json", body=refused)

    async with gateway(FAST) as world, browsing(f"{world.admin_url}/#/config") as seen:
        await seen.page.route("**/admin/v1/upgrade", refuse)
        await seen.page.get_by_role("button", name="Upgrade", exact=True).click()
        dialog = seen.page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Upgrade", exact=True).click()
        await seen.until(why, "dialog .effect[data-tone=bad]")
        seen.wrong.clear()  # the browser complains of the refusal


@story
async def test_an_operator_may_reload_and_not_upgrade():
    async with gateway(FAST, admin_token="an-admin-of-this-test") as world:
        await give_token(world, "operator")
        config = f"{world.admin_url}/#/config"
        async with browsing(config, token="another-of-this-test") as seen:
            await seen.page.get_by_role("button", name="Reload the file").wait_for()
            assert await seen.page.get_by_role("button", name="Upgrade", exact=True).count() == 0


@story
async def test_a_key_is_made_shown_once_and_revoked():
    async with gateway(FAST) as world, browsing(f"{world.admin_url}/#/keys") as seen:
        await seen.page.get_by_label("New key for").fill("ci-bot")
        await seen.page.keyboard.press("Enter")
        dialog = seen.page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Make a key").click()
        secret = await dialog.locator(".secret").inner_text()
        await dialog.get_by_role("button", name="Close").click()
        await seen.until("ci-bot", "tbody tr")
        assert secret not in await seen.page.content()
        await seen.page.get_by_role("button", name="Revoke ci-bot").click()
        await dialog.get_by_role("button", name="Revoke").click()
        await seen.until("revoked", "tbody tr")


@story
async def test_a_key_that_has_expired_can_be_revoked_and_not_rotated():
    async with gateway(FAST) as world:
        day_s = 86400
        file, began = world.path.with_name("keys.yaml"), time.time() - day_s
        keyfiles.create(file, name="ci-bot", wall_now=began, expires_in_s=day_s / 2)
        async with browsing(f"{world.admin_url}/#/keys") as seen:
            await seen.until("expired", "tbody tr")
            await seen.page.get_by_role("button", name="Revoke ci-bot").wait_for()
            assert await seen.page.get_by_role("button", name="Rotate ci-bot").count() == 0


@story
async def test_a_key_is_made_once_though_the_first_answer_is_lost():
    lost = []

    async def lose_the_first(route):
        """Let the order be carried out, and lose what is answered."""
        asked = route.request
        if asked.method != "POST" or (asked.post_data_json or {}).get("dry_run") or lost:
            return await route.fallback()
        lost.append(asked)
        await route.fetch()
        await route.abort()

    async with gateway(FAST) as world, browsing(f"{world.admin_url}/#/keys") as seen:
        await seen.page.route("**/admin/v1/keys", lose_the_first)
        await seen.page.get_by_label("New key for").fill("ci-bot")
        await seen.page.keyboard.press("Enter")
        dialog = seen.page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Make a key").click()
        await seen.until("does not answer", "dialog .effect")
        await dialog.get_by_role("button", name="Make a key").click()
        await dialog.locator(".secret").wait_for()
        listed = (await world.http.get(f"{world.admin_url}/admin/v1/keys")).json()["data"]
        assert [each["name"] for each in listed].count("ci-bot") == 1
        seen.wrong.clear()  # the browser complains of the answer that was lost


@story
async def test_settings_are_found_with_their_origin_and_the_file_is_reloaded():
    async with gateway(FAST) as world, browsing(f"{world.admin_url}/#/config") as seen:
        await seen.page.get_by_label("Search").fill("scrape_interval")
        await seen.until("line ", "section:has(#settings) tbody tr")
        rows = await seen.texts("section:has(#settings) tbody tr")
        assert [row.split()[0] for row in rows] == ["health.scrape_interval"]
        text = world.path.read_text()
        world.path.write_text(text.replace("scrape_interval: 100ms", "scrape_interval: 150ms"))
        await seen.page.get_by_role("button", name="Reload the file").click()
        await seen.until("100ms -> 150ms", "dialog .effect")
        await seen.page.get_by_role("dialog").get_by_role("button", name="Reload").click()
        await seen.until("Done.", "dialog .effect")
        await seen.until("150ms", "section:has(#settings) tbody tr")


@story
async def test_a_request_is_found_and_explains_itself():
    async with gateway(FAST, FAST) as world, browsing(f"{world.admin_url}/#/requests") as seen:
        assert (await world.chat()).status_code == 200
        assert (await world.chat(model="unknown")).status_code == 404
        await seen.until(SERVED, "tbody tr")
        await seen.until(REFUSED, "tbody tr")  # the page may have asked between the two
        assert len(await seen.texts("tbody tr")) == 2
        await seen.page.get_by_label("Only errors").check()
        await seen.page.locator("tbody tr").filter(has_text=SERVED).wait_for(state="detached")
        assert len(await seen.texts("tbody tr")) == 1
        await seen.page.get_by_label("Only errors").uncheck()
        await seen.until(SERVED, "tbody tr")
        await seen.page.get_by_label("Model").fill("m")
        await seen.page.keyboard.press("Enter")
        await seen.page.locator("tbody tr").filter(has_text=REFUSED).wait_for(state="detached")
        await seen.page.locator("tbody tr a").click()
        await seen.until("ended", ".steps li")
        await seen.until(
            "m/b", "section:has(h2:text('Attempts')) td, section:has(h2:text('Attempts')) th"
        )
        assert await seen.accessibility() == []


@story
async def test_the_table_shows_the_last_filter_though_an_earlier_answer_comes_late():
    asked, answered, second = [], [], asyncio.Event()

    async def hold_the_first(route):
        """Hold the answer to the first filter until the second was answered, and answer nothing after that."""
        model = "model=m" in route.request.url
        if model not in asked:
            asked.append(model)
            reply = await route.fetch()
            if not model:
                await second.wait()
            await route.fulfill(response=reply)
            answered.append(model)
            second.set()

    async with gateway(FAST, FAST) as world, browsing(f"{world.admin_url}/#/requests") as seen:
        assert (await world.chat()).status_code == 200
        assert (await world.chat(model="unknown")).status_code == 404
        await seen.page.get_by_label("Only errors").check()
        await seen.until(REFUSED, "tbody tr")
        await seen.page.route("**/admin/v1/requests?*", hold_the_first)
        await seen.page.get_by_label("Only errors").uncheck()
        await seen.page.get_by_label("Model").fill("m")
        await seen.page.keyboard.press("Enter")
        while len(answered) < 2:
            await asyncio.sleep(0.01)
        await seen.page.evaluate("new Promise(requestAnimationFrame)")
        await seen.until(SERVED, "tbody tr")
        await seen.page.locator("tbody tr").filter(has_text=REFUSED).wait_for(state="detached")


@story
async def test_the_keyboard_reaches_what_the_mouse_does():
    async with gateway(FAST) as world, browsing(world.admin_url) as seen:
        await seen.until("1 pool", GOOD)
        reached = set()
        for _ in range(30):
            await seen.page.keyboard.press("Tab")
            told = await seen.page.evaluate(
                "document.activeElement.innerText || document.activeElement.id"
            )
            reached.add(told.strip())
        assert {"Skip to the content", "Overview", "Requests", "b1", "rewind", "Dark"} <= reached


@story
async def test_the_page_is_rewound_to_an_earlier_moment_and_back():
    async with gateway(FAST, FAST) as world:
        series = world.process.series
        series.end_bucket()
        series.end_bucket()
        await world.sims[0].stop()
        await world.until(lambda: world.process.table.get("m/b1").phase is Phase.DOWN)
        series.end_bucket()
        async with browsing(world.admin_url) as seen:
            await seen.until("b1", BAD)
            rewind = seen.page.get_by_label("Rewind")
            await seen.page.locator("#rewind[max='2']").wait_for()
            await rewind.press("ArrowLeft")
            await seen.until("2 of 2 backends served at that moment", GOOD)
            assert await seen.texts(".pools td:nth-child(2) .state > :last-child") == ["ready"] * 3
            await seen.page.get_by_role("button", name="Back to now").click()
            await seen.until("b1", BAD)


class Ahead:
    """Clocks of which one can be set forward: what time it is."""

    def __init__(self):
        self.ahead_s = 0.0

    now = staticmethod(time.monotonic)

    def wall(self):
        return time.time() + self.ahead_s


@story
async def test_an_earlier_moment_is_judged_by_what_was_told_then():
    clock = Ahead()
    async with gateway(FAST, FAST, clock=clock) as world, httpx2.AsyncClient() as http:

        async def told_then():
            asked = {"at": clock.wall()}
            return (await http.get(f"{world.admin_url}/admin/v1/verdict", params=asked)).json()

        for sim in world.sims:
            sim.state.faults.add(Fault.parse("http_500"))
        for _ in range(9):
            assert (await world.chat()).status_code >= 500
        while (await told_then())["pools"].get("m") != "down":
            await asyncio.sleep(0.1)
        world.process.series.end_bucket()
        clock.ahead_s = 10.0
        world.process.series.end_bucket()
        async with browsing(world.admin_url) as seen:
            await seen.page.locator("#rewind[max='1']").wait_for()
            await seen.page.get_by_label("Rewind").press("ArrowLeft")
            await seen.until("Pool m fails most requests", f"{BAD}:has-text('at ')")
            states = await seen.texts(".pools td:nth-child(2) .state > :last-child")
            # Backends answer their probes.
            assert (states[0], "down" in states[1:]) == ("down", False)


@story
async def test_an_address_that_is_no_code_is_taken_as_it_is_written():
    async with gateway(FAST) as world, browsing(world.admin_url) as seen:
        await seen.until("1 pool", GOOD)
        for view in ("requests/%", "backends/m/%zz"):
            await seen.page.goto(f"{world.admin_url}/#/{view}")
            await seen.until(view.partition("/")[2], "main h1")
        seen.wrong = [each for each in seen.wrong if "404" not in each]


async def theme_listeners(seen):
    """Count who is told that light becomes dark."""
    debugger = await seen.page.context.new_cdp_session(seen.page)
    told = await debugger.send("Runtime.evaluate", {"expression": "document"})
    found = await debugger.send(
        "DOMDebugger.getEventListeners", {"objectId": told["result"]["objectId"]}
    )
    await debugger.detach()
    return sum(each["type"] == "theme" for each in found["listeners"])


@story
async def test_a_view_that_is_left_holds_no_chart():
    drawn = "main .chart canvas"
    linked = "window.uPlot.sync('last hour').plots.length"
    async with gateway(FAST) as world, browsing(world.admin_url) as seen:
        world.process.series.end_bucket()
        for _ in range(2):
            for view in ("overview", "backends/m/b1"):
                await seen.page.goto(f"{world.admin_url}/#/{view}")
                await seen.page.locator(drawn).nth(3).wait_for()
                assert await seen.page.evaluate(linked) == 4
                assert await theme_listeners(seen) == 4
        await seen.page.goto(f"{world.admin_url}/#/requests")
        await seen.until("Requests", "main h1")
        assert await seen.page.evaluate(linked) == 0
        assert await theme_listeners(seen) == 0


WRITES_DOWN = """
    window.written = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
      window.written.push([this.canvas, text, y]);
      return write.call(this, text, x, y, ...more);
    };"""
WRITTEN = """title => {
    const named = [...document.querySelectorAll("figure.chart")]
        .find(each => each.querySelector(".title").textContent === title);
    const found = window.written.filter(([canvas, text]) => named?.contains(canvas) && !text.includes(":"));
    return [...new Map(found.map(([, text, y]) => [y, text])).values()];
}"""


@story
async def test_the_axis_of_what_is_counted_has_each_number_once():
    async with gateway(FAST) as world, browsing(f"{world.admin_url}/livez") as seen:
        world.process.series.end_bucket()
        await seen.page.add_init_script(WRITES_DOWN)
        await seen.page.goto(world.admin_url)
        await seen.page.locator("main .chart canvas").nth(3).wait_for()
        while not (told := await seen.page.evaluate(WRITTEN, "Requests at a time")):
            await asyncio.sleep(0.01)
        assert sorted(told) == ["0", "1"]


@story
async def test_a_gap_in_the_last_hour_is_seen_by_the_clock_of_the_gateway_alone():
    """The gateway's clock is five hours behind the page's; the page sleeps for ten minutes before its third question."""
    asked = []

    async def tell(route):
        asked.append(re.search(r"minutes=(\d+)", route.request.url)[1])
        told = await (await route.fetch()).json()
        told["now"] = begun + (0 if len(asked) == 1 else 10 if len(asked) == 2 else 610)
        await route.fulfill(json=told)

    async with gateway(FAST) as world, browsing(f"{world.admin_url}/livez") as seen:
        begun = time.time() - 5 * 3600
        world.process.series.end_bucket()
        await seen.page.route("**/admin/v1/series*", tell)
        await seen.page.goto(world.admin_url)
        while len(asked) < 4:
            await asyncio.sleep(0.01)
        assert asked[:4] == ["60", "1", "1", "60"]


@story
async def test_the_log_of_a_server_that_does_not_start_is_marked_where_the_reason_is():
    async with scene(that_does_not_start(HOSTILE)) as world:
        async with browsing(f"{world.admin_url}/#/backends/{CODER}/b2") as seen:
            await seen.until("ValueError: To serve at least one request", ".log mark")
            assert len(await seen.texts(".log mark")) == 1
            await seen.until(HOSTILE, ".log")
            assert await seen.page.locator("img").count() == 0
            assert await seen.accessibility() == []


_COUNT_CHANGES = """
window.changes = 0;
new MutationObserver((found) => (window.changes += found.length)).observe(
  document.querySelector("main"),
  {subtree: true, childList: true, attributes: true, characterData: true},
);
"""


@story
async def test_of_a_hundred_backends_only_what_changed_is_drawn():
    asked = 0

    async def a_hundred(route):
        nonlocal asked
        asked += 1
        told = await (await route.fetch()).json()
        (pool,) = told["pools"]
        one = pool["backends"][0] | {"phase_age_s": 7_200.0, "running": 0, "in_flight": 0}
        names = [f"b{number}" for number in range(1, 101)]
        pool["backends"] = [one | {"name": name, "id": f"m/{name}"} for name in names]
        pool["backends"][41]["running"] = 5_000 + asked  # no other number of the row is alike
        await route.fulfill(json=told)

    async with gateway(FAST) as world, browsing(f"{world.admin_url}/livez") as seen:
        await seen.page.route("**/admin/v1/overview", a_hundred)
        await seen.page.route("**/admin/v1/series*", lambda route: route.abort())
        await seen.page.goto(world.admin_url)
        await seen.until("b100", ".pools")
        await seen.page.evaluate(_COUNT_CHANGES)
        begun = asked
        later = re.compile("|".join(f"5,{begun + more:03}" for more in range(3, 100)))
        await seen.page.locator("tr:has(a:text-is('b42'))").filter(has_text=later).wait_for()
        updates = asked - begun
        assert 0 < await seen.page.evaluate("window.changes") <= 10 * updates
        assert await seen.page.evaluate("document.querySelectorAll('.pools *').length") < 100 * 40
        seen.wrong.clear()  # the browser complains of the series, which are refused here
