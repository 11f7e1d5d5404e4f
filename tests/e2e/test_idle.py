"""What it costs to do nothing: the gateway with as many as 100 backends, and the page that shows them.

Counted are wake-ups, changes of the page, layouts, styles and requests, which a busy machine makes no more of. What
they take of a processor is measured by loadtest.dashboard.
"""

import asyncio
import contextlib
import functools
import json
import pathlib
import time

import pytest

from tests.e2e.browser import browsing
from tests.e2e.support import GATEWAY, gateway, running
from tests.ports import free_port
from tests.stories.support import story as story_within

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
story = functools.partial(story_within, seconds=170.0)

LOOKS = 8  # at the gateway's state, each 2 s
# Every change of the page, when each question was asked, and how often it asked for a frame.
NOTES = """() => {
  window.noted = {changes: 0, asked: [], frames: 0};
  const all = {subtree: true, childList: true, attributes: true, characterData: true};
  new MutationObserver((seen) => { noted.changes += seen.length; }).observe(document.body, all);
  const {fetch, requestAnimationFrame} = window;
  window.fetch = (...of) => { noted.asked.push([performance.now(), of[0].split("?")[0]]); return fetch(...of); };
  window.requestAnimationFrame = (of) => { noted.frames += 1; return requestAnimationFrame(of); };
}"""


@contextlib.contextmanager
def quiet(folder, backends):
    """A gateway as shipped over so many backends that do nothing: one server, at an address for each."""
    port = free_port()
    urls = [f"http://127.0.1.{each + 1}:{port}" for each in range(backends)]
    pools = {f"m{each or ''}": {"backends": urls[each::4]} for each in range(4)}
    server = [GATEWAY, "sim", "--host", "0.0.0.0", "--port", str(port), "--model", "m"]
    with (
        running(server, log=folder / "sim.log"),
        gateway(folder, f"pools: {json.dumps(pools)}") as behind,
    ):
        yield behind


def wake_ups(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize(("backends", "most"), [(4, 60), (100, 500)])
@story
async def test_an_idle_gateway_wakes_up_to_look_at_its_backends_and_for_little_else(
    tmp_path, backends, most
):
    """Each backend is asked once a second for its metrics, and now and then for more; each answer is a wake-up too."""
    with quiet(tmp_path, backends) as behind:
        before, began = wake_ups(behind.pid), time.monotonic()
        await asyncio.sleep(10.0)
        woken = wake_ups(behind.pid) - before
        assert woken / (time.monotonic() - began) <= most


async def looked(seen, looks):
    """Wait until the page has asked so often for the gateway's state; return when, in ms, and all that it noted."""
    times = []
    while len(times) <= looks:
        await asyncio.sleep(2.0 * (looks + 1 - len(times)))  # to ask costs the page something, too
        noted = await seen.page.evaluate("noted")
        times = [at for at, path in noted["asked"] if path.endswith("overview")]
    return times, noted


async def figures(debugger):
    told = await debugger.send("Performance.getMetrics")
    return {each["name"]: each["value"] for each in told["metrics"]}


@pytest.mark.parametrize("backends", [4, 100])
@story
async def test_a_page_that_shows_nothing_new_does_next_to_nothing(tmp_path, backends):
    with quiet(tmp_path, backends) as behind:
        async with browsing(behind.admin_url) as seen:
            await seen.until(f"{backends} backends")
            debugger = await seen.page.context.new_cdp_session(seen.page)
            await debugger.send("Performance.enable")
            await seen.page.locator(
                "#rewind:not([max='0'])"
            ).wait_for()  # the first lines are drawn
            await seen.page.evaluate(NOTES)
            before = await figures(debugger)
            times, noted = await looked(seen, LOOKS)
            after = await figures(debugger)
    took = {name: after[name] - before[name] for name in after}
    # Ages, the events of 10 s, and one line and number for each cell with a line.
    looks = len(times) - 1  # a busy machine may let the page look once more
    assert noted["changes"] <= 100 + 30 * backends
    assert noted["frames"] <= looks
    assert took["LayoutCount"] <= 4 * looks
    assert took["RecalcStyleCount"] <= 4 * looks
    assert took["JSEventListeners"] <= 0
    assert min(later - at for at, later in zip(times, times[1:], strict=False)) >= 1_900  # ms
    assert len(noted["asked"]) <= 3 * looks
