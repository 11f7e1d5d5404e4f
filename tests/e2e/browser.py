"""A real Chromium that looks at the dashboard, and what it must never do there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.support import CACHE, need

PATIENCE_MS = 40_000
AXE = CACHE / "axe/node_modules/axe-core/axe.min.js"
TEXTS = """selector => [...document.querySelectorAll(selector)]
    .filter(each => each.checkVisibility()).map(each => each.innerText)"""


@dataclass
class Seen:
    """One open page, and what went wrong on it."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    async def until(self, text: str, selector: str = "main") -> None:
        """Wait until a text is shown."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for()

    async def texts(self, selector: str) -> list[str]:
        """Return the texts of what is shown, all of one moment: a locator finds first and reads later."""
        return await self.page.evaluate(TEXTS, selector)

    async def accessibility(self) -> list[str]:
        """Return what axe finds that is serious or critical."""
        need(AXE, "axe-core")
        # Through the debugger, so that the page's own policy stays as strict as it is for everybody.
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("axe.run({resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]


@contextlib.asynccontextmanager
async def browsing(
    url: str, *, scheme: str = "light", width: int = 1280, height: int = 900, token: str = ""
) -> AsyncIterator[Seen]:
    """Open a page; at the end nothing may have gone wrong on it: no error, no refused script."""
    chromium = need("chromium", "chromium")
    driver = pytest.importorskip(
        "playwright.async_api", reason="playwright is not installed (make browser)"
    )
    async with driver.async_playwright() as playwright:
        # Text in shades of one colour makes pictures half as large.
        flags = ["--no-sandbox", "--disable-lcd-text", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=chromium, args=flags)
        try:
            context = await browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": height}
            )
            if token:
                kept = f"sessionStorage.setItem('vllm-gateway.token', {json.dumps(token)})"
                await context.add_init_script(kept)
            page = await context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            seen = Seen(page)
            page.on("pageerror", lambda error: seen.wrong.append(str(error)))
            page.on("console", lambda said: _note(seen, said))
            await page.goto(url)
            yield seen
            assert not seen.wrong, seen.wrong
        finally:
            await browser.close()


def _note(seen: Seen, said: Any) -> None:
    """Note what the browser complains of; a refused token is told on the page, too."""
    if said.type in ("error", "warning") and "401" not in said.text:
        seen.wrong.append(f"{said.type}: {said.text}")
