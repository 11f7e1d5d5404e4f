"""Read a backend's load from its /metrics."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.aio import Clock
from gateway.core.types import Observation, Scraped, ScrapeFailed
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.metricspage import parse_metrics


async def scrape(
    pages: Pages,
    clock: Clock,
    report: Callable[[Observation], None],
    *,
    timeout_s: float,
) -> None:
    """Make one scrape and report it; a page without engine metrics is a failed one."""
    try:
        body = await pages.get("/metrics", timeout_s=timeout_s)
        sample = parse_metrics(body, clock.now())
        if sample is None:
            raise FetchError("garbage")
    except FetchError as failed:
        if failed.reason != "ours":  # "ours": the backend was not even asked
            report(ScrapeFailed(clock.now()))
    else:
        report(Scraped(sample))
