"""Ask a backend whether it is well, and what it serves.

A probe is `GET /health`; of a plain OpenAI server that has no such page, `GET /v1/models`. A backend that
is not up yet must show its model list in the same turn: a server that answers but serves nothing we can
name is not ready, and the reason says so (`models_...`). Its endpoints and version do not change while it
runs, so they are read with the first list only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.core.aio import Clock
from gateway.core.types import Endpoint, ModelsSeen, Observation, ProbeFailed, ProbePassed
from gateway.pools.table import Backend
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.vllm import parse_models, parse_openapi_endpoints, parse_version

log = logging.getLogger("gateway.watch")

# How often a backend is probed while it starts, is down, or has just failed a probe.
FAST_S: Final = 0.5
_NO_PAGE: Final = frozenset({"http_404", "http_405", "http_501"})


@dataclass(slots=True)
class Prober:
    """One backend's probes. `report` gets what they find."""

    backend: Backend
    pages: Pages
    clock: Clock
    report: Callable[[Observation], None]
    endpoints: frozenset[Endpoint] | None = None
    version: str | None = None
    described: bool = False  # endpoints and version were read from the running server
    without_health: bool = False  # it has no page /health

    def pause_s(self, interval_s: float) -> float:
        """Return the time to the next probe: shorter while the last ones disagree."""
        return interval_s if self.backend.health.settled else min(FAST_S, interval_s)

    async def probe(self, timeout_s: float) -> None:
        """Make one probe and report it."""
        asked_at = self.clock.now()
        try:
            await self._is_well(timeout_s)
            if not self.backend.health.models_known:
                self.described = False
                self._report(await self._models(timeout_s), asked_at)
        except FetchError as failed:
            if failed.reason.endswith("ours") and self.backend.health.up:
                return  # the backend was not asked, so this is no failure of its own
            self.without_health = False  # another server may come up there
            self._report(ProbeFailed(self.clock.now(), failed.reason, asked_at), asked_at)
        else:
            self._report(ProbePassed(self.clock.now(), asked_at), asked_at)

    def _report(self, seen: Observation, asked_at: float) -> None:
        """Report an observation, unless another process took the backend's place since it was asked."""
        if self.backend.health.forgot_at <= asked_at:
            self.report(seen)

    async def _is_well(self, timeout_s: float) -> None:
        if self.backend.plain and self.without_health:
            await self.pages.get("/v1/models", timeout_s=timeout_s)
            return
        try:
            await self.pages.get("/health", timeout_s=timeout_s)
        except FetchError as failed:
            if not self.backend.plain or failed.reason not in _NO_PAGE:
                raise
            await self.pages.get("/v1/models", timeout_s=timeout_s)
            self.without_health = True

    async def refresh_models(self, timeout_s: float) -> None:
        """Read the model list of a backend that is up again; a failure keeps what was known."""
        if not self.backend.health.models_known:
            return
        asked_at = self.clock.now()
        try:
            seen = await self._models(timeout_s)
        except FetchError as failed:
            log.debug(
                "the model list has not been read yet",
                extra={"event": "models_unread", "backend": self.backend.id, "why": str(failed)},
            )
            return
        if self.backend.health.models_known:  # a backend that went down meanwhile has another list
            self._report(seen, asked_at)

    async def _models(self, timeout_s: float) -> ModelsSeen:
        try:
            models = parse_models(await self.pages.get("/v1/models", timeout_s=timeout_s))
        except FetchError as failed:
            raise FetchError(f"models_{failed.reason}") from failed
        if not models:
            raise FetchError("models_garbage")
        if not self.described:
            await self._describe(timeout_s)
        return ModelsSeen(self.clock.now(), models, self.endpoints, self.version)

    async def _describe(self, timeout_s: float) -> None:
        """Read endpoints and version. What a server does not tell stays unknown."""
        version = b"" if self.backend.plain else await self._page("/version", timeout_s)
        openapi = await self._page("/openapi.json", timeout_s)
        self.version = parse_version(version) if version else None
        self.endpoints = parse_openapi_endpoints(openapi) if openapi else None
        if self.backend.plain and not self.endpoints:
            self.endpoints = None  # it describes something else
        self.described = version is not None and openapi is not None

    async def _page(self, path: str, timeout_s: float) -> bytes | None:
        """Return a page, b"" where the server has none, None where it is worth asking again."""
        try:
            return await self.pages.get(path, timeout_s=timeout_s)
        except FetchError as failed:
            return b"" if failed.reason.startswith("http_4") else None
