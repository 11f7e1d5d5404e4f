"""Takes the pictures of the README and of deploy/DASHBOARD.md: python -m tests.e2e.screenshots FOLDER [SECONDS]

A gateway runs with traffic for some minutes, gets a fault, and is looked at with a real Chromium.
"""

from __future__ import annotations

import asyncio
import io
import pathlib
import sys

import uvloop
from PIL import Image

from tests.e2e.browser import Seen, browsing
from tests.e2e.scene import CODER, LARGE, scene, traffic
from tests.stories.support import World

_SECONDS = 240.0
_WIDTH, _PHONE = 1200, 390
_TALLEST = 1700
_COLOURS = 256
# Where the last part ends that belongs on a picture: the charts, or the last card.
_CARDS = """
16 + Math.max(...[...document.querySelectorAll(".timeline, .view > .columns:not(:has(.events)) .card")]
  .map((each) => each.getBoundingClientRect().bottom + scrollY))
"""
_ALL = "16 + document.querySelector('main').getBoundingClientRect().bottom + scrollY"
_SETTLED_MS = 2_500  # until the charts are drawn


async def main(folder: pathlib.Path, seconds: float) -> None:
    """Take every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    async with scene() as world:
        clients = asyncio.get_running_loop().create_task(traffic(world))
        try:
            await asyncio.sleep(seconds / 2)
            world.sims[0].inject("http_500")
            await asyncio.sleep(seconds / 2)
            await _take(world, folder)
        finally:
            clients.cancel()
            await asyncio.wait([clients])


async def _take(world: World, folder: pathlib.Path) -> None:
    for scheme, name in (("light", "overview"), ("dark", "overview-dark")):
        async with browsing(world.admin_url, scheme=scheme, width=_WIDTH) as seen:
            await seen.until(LARGE, ".pools")
            await _shot(seen, folder / f"{name}.png", _CARDS)
    async with browsing(f"{world.admin_url}/#/requests", width=_WIDTH) as seen:
        await seen.page.locator("tbody tr a").first.wait_for()
        await _shot(seen, folder / "requests.png", "innerHeight")
        await seen.page.get_by_label("Only errors").check()
        await seen.page.locator("tbody tr a").first.click()
        await seen.until("ended", ".steps")
        await _shot(seen, folder / "request.png", _CARDS)
    for view, shown, name in (
        (f"backends/{CODER}/b2", ".log mark", "backend"),
        ("keys", "main td", "keys"),
    ):
        async with browsing(f"{world.admin_url}/#/{view}", width=_WIDTH) as seen:
            await seen.page.locator(shown).first.wait_for()
            await _shot(seen, folder / f"{name}.png")
    async with browsing(f"{world.admin_url}/#/config", width=_WIDTH) as seen:
        await seen.page.get_by_label("Only what is written").uncheck()
        await seen.page.get_by_label("Search").fill(f"{LARGE}.queue")
        await seen.until("queue.max_requests", "main table")
        await _shot(seen, folder / "config.png")
    async with browsing(f"{world.admin_url}/#/backends/{LARGE}/b2", width=_WIDTH) as seen:
        await seen.page.get_by_role("button", name="Drain", exact=True).click()
        await seen.until("b2", "dialog .effect")
        await _shot(seen, folder / "order.png", "innerHeight")
    async with browsing(world.admin_url, width=_PHONE) as seen:
        await seen.until(LARGE, ".pools")
        await _shot(seen, folder / "phone.png", "innerHeight")


async def _shot(seen: Seen, path: pathlib.Path, bottom: str = _ALL) -> None:
    """Take the page from its top, in as many colours as such a page needs; `bottom`: where it ends."""
    await seen.page.wait_for_timeout(_SETTLED_MS)
    height = min(await seen.page.evaluate(bottom), _TALLEST)
    width = await seen.page.evaluate("innerWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": height}
    taken = await seen.page.screenshot(full_page=True, clip=clip)
    with Image.open(io.BytesIO(taken)) as picture:
        picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = float(sys.argv[2]) if len(sys.argv) > 2 else _SECONDS
        runner.run(main(pathlib.Path(sys.argv[1]), seconds))
