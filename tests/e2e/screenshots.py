"""Takes the pictures of the README: python -m tests.e2e.screenshots FOLDER [SECONDS]

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
from tests.e2e.scene import LARGE, scene, traffic
from tests.stories.support import World

_SECONDS = 240.0
_WIDTH = 1200
_COLOURS = 256
# Where the last part ends that belongs on a picture: the charts, or the last card.
_BOTTOM = """
16 + Math.max(...[...document.querySelectorAll(".timeline, .view > .columns:not(:has(.events)) .card")]
  .map((each) => each.getBoundingClientRect().bottom + scrollY))
"""
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
            await _shot(seen, folder / f"{name}.png")
    async with browsing(f"{world.admin_url}/#/requests", width=_WIDTH) as seen:
        await seen.page.get_by_label("Only errors").check()
        await seen.page.locator("tbody tr a").first.click()
        await seen.until("ended", ".steps")
        await _shot(seen, folder / "request.png")


async def _shot(seen: Seen, path: pathlib.Path) -> None:
    """Take the page from its top, in as many colours as such a page needs."""
    await seen.page.wait_for_timeout(_SETTLED_MS)
    height = await seen.page.evaluate(_BOTTOM)
    clip = {"x": 0, "y": 0, "width": _WIDTH, "height": height}
    taken = await seen.page.screenshot(full_page=True, clip=clip)
    with Image.open(io.BytesIO(taken)) as picture:
        picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = float(sys.argv[2]) if len(sys.argv) > 2 else _SECONDS
        runner.run(main(pathlib.Path(sys.argv[1]), seconds))
