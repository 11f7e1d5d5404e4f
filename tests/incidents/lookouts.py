"""Where operators look: the program `status`, the dashboard in a real Chromium, and an alert of a real Prometheus.

Prometheus has the scrape and the rules that are shipped, and Chromium shows the page that opens first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx2

from gateway.observe.rules import ALERTS
from tests import loopback
from tests.e2e.browser import Seen, browsing
from tests.e2e.support import GATEWAY, need, running
from tests.incidents.scenes import Incident
from tests.ports import free_port

SHIPPED = pathlib.Path(__file__).parents[2] / "deploy/prometheus"
_DESCRIBED = {each.name: each for each in ALERTS}


@dataclass(frozen=True)
class Heard:
    """What one of them said when it first named the cause, and how long after the fault."""

    text: str
    after_s: float


@dataclass(frozen=True)
class Told:
    """What each of them said."""

    status: Heard
    dashboard: Heard
    alert: Heard


@dataclass(frozen=True)
class Lookouts:
    """Those who look at one gateway."""

    admin_url: str
    page: Seen
    prometheus_url: str
    http: httpx2.AsyncClient

    async def hear(self, incident: Incident, patience_s: float) -> Told:
        """Ask all three from now on, until each has named the cause. Raises AssertionError: one has not."""
        asked = {"status": self._status, "the dashboard": self._verdict, "the alert": self._alerts}
        async with asyncio.TaskGroup() as group:
            heard = [
                group.create_task(_until_named(incident, patience_s, whose, ask))
                for whose, ask in asked.items()
            ]
        return Told(*(each.result() for each in heard))

    async def _status(self, incident: Incident) -> list[str]:
        """Return the parts of what the program prints: the head, each problem, and the tables."""
        program = await asyncio.create_subprocess_exec(
            *(GATEWAY, "status", "--server", self.admin_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "120"},
        )
        printed, _ = await program.communicate()
        parts = [_flat(each) for each in printed.decode().split("\n\n")]
        return [each for each in parts if incident.named_in(each)]

    async def _verdict(self, incident: Incident) -> list[str]:
        """Return the verdict: its sentence, and what is said of the worst problem."""
        worst = ".verdict .problems li:first-child"
        told = await self.page.texts(f".verdict .sentence, {worst} .cause, {worst} .next")
        said = _flat(" ".join(told))
        return [said] if incident.named_in(said) else []

    async def _alerts(self, incident: Incident) -> list[str]:
        """Return the summary of the alert, if it fires."""
        reply = await self.http.get(self.prometheus_url + "/api/v1/alerts")
        return [
            each["annotations"]["summary"]
            for each in reply.json()["data"]["alerts"]
            if each["labels"]["alertname"] == incident.alert and each["state"] == "firing"
        ]


async def _until_named(
    incident: Incident,
    patience_s: float,
    whose: str,
    ask: Callable[[Incident], Awaitable[list[str]]],
) -> Heard:
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            while not (named := await ask(incident)):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(
            f"{incident.name}: {whose} did not name it within {patience_s:.0f} s"
        ) from None
    return Heard(named[0], time.monotonic() - began)


@contextlib.asynccontextmanager
async def lookouts(admin_url: str) -> AsyncIterator[Lookouts]:
    """Have a gateway looked at. Skips the test where a program is not installed."""
    prometheus = need("prometheus", "prometheus (Debian's package prometheus)")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = (SHIPPED / "prometheus.yaml").read_text()
        mine = settings.replace("127.0.0.1:9090", admin_url.removeprefix("http://"))
        (folder / "prometheus.yaml").write_text(mine)
        (folder / "alerts.yaml").write_text((SHIPPED / "alerts.yaml").read_text())
        command = [
            prometheus,
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'series'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        stack.enter_context(running(command, log=folder / "prometheus.log"))
        page = await stack.enter_async_context(browsing(admin_url))
        http = await stack.enter_async_context(loopback.client(timeout=10))
        looking = Lookouts(admin_url, page, url, http)
        await page.until("pool", ".verdict")
        await _scraped(looking)
        yield looking


async def _scraped(looking: Lookouts) -> None:
    """Wait until Prometheus has seen the gateway in order."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                asked = {"query": "up == 1"}
                reply = await looking.http.get(
                    looking.prometheus_url + "/api/v1/query", params=asked
                )
                if reply.status_code == 200 and reply.json()["data"]["result"]:
                    return
            await asyncio.sleep(0.1)


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def waits(incident: Incident) -> str:
    """Return how long the alert of an incident waits, in words."""
    lasts = _DESCRIBED[incident.alert].lasts
    return "at once" if lasts == "0s" else f"after {lasts}"
