"""What a server still needs once its engine has proved that it works: its adapters, and a warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config.models import PoolConfig
from gateway.core.aio import Clock
from gateway.core.events import EventKind, Events
from gateway.core.types import ModelsSeen
from gateway.heal.states import FAILED_TESTS
from gateway.pools.table import Backend, PoolTable
from gateway.pools.unanswered import in_words
from gateway.watch import adapters
from gateway.watch.canary import warm_up
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.vllm import parse_models

log = logging.getLogger("gateway.supervisor")

_ADAPTER_S: Final = 120.0  # to read its weights from a slow disk
_WARM_UP_S: Final = 60.0
_MODELS_S: Final = 5.0
_HEALTH_S: Final = 5.0


@dataclass(slots=True)
class Preparation:
    """The preparation of one backend's server. Nothing here writes its state."""

    backend: Backend
    pages: Pages
    table: PoolTable
    clock: Clock
    events: Events

    async def load_adapters(
        self, pool: PoolConfig, held: Mapping[str, str], tell: Callable[[str], None]
    ) -> str:
        """Load the adapters that it should hold; returns why it cannot serve, if so.

        `held` are those of the server before it, with their paths. One that fails is told as an event. If the
        server may have ended of it, the others are loaded only if it answers `/health`.
        """
        out = {name for name, wanted in self.backend.ordered if not wanted}
        wanted = adapters.wanted(pool, held, self.backend.name, out)
        if not wanted:
            return ""
        # The list that is known may be of the server before.
        if failed := await self._see_models():
            return failed
        missing = {name: path for name, path in wanted.items() if name not in self.backend.adapters}
        for name, path in missing.items():
            tell(f"loading the adapter {name}")
            try:
                await adapters.load(self.pages, name, path, timeout_s=_ADAPTER_S)
            except adapters.AdapterError as error:
                self._note(EventKind.ADAPTER_FAILED, name, str(error))
                if error.fatal and (failed := await self._unhealthy()):
                    return f"/health fails since it was to load the adapter {name}: {failed}"
        if missing and (failed := await self._see_models()):
            return failed
        for name in missing:
            if name in self.backend.adapters:
                self._note(EventKind.ADAPTER, name, f"the adapter {name} was loaded again")
        return ""

    async def warm_up(self) -> None:
        """Have it read and write a little; best effort, for a server that gave one token serves."""
        try:
            await warm_up(self.pages, self.backend, timeout_s=_WARM_UP_S)
        except FetchError as error:
            log.warning(
                "%s: warm-up failed: %s",
                *(self.backend.id, in_words(error.reason)),
                extra={"event": "warm_up_failed"},
            )

    async def _unhealthy(self) -> str:
        """Return why it is not well; empty: it is."""
        try:
            await self.pages.get("/health", timeout_s=_HEALTH_S)
        except FetchError as error:
            return in_words(error.reason)
        return ""

    async def _see_models(self) -> str:
        failed, backend = "", self.backend
        for _ in range(FAILED_TESTS):  # one that gave a token is not given up for one page
            try:
                models = parse_models(await self.pages.get("/v1/models", timeout_s=_MODELS_S))
            except FetchError as error:
                failed = f"cannot read its model list: {in_words(error.reason)}"
                continue
            seen = ModelsSeen(self.clock.now(), models, backend.endpoints, backend.version)
            self.table.observe(backend.id, seen)
            return ""
        return failed

    def _note(self, kind: EventKind, name: str, detail: str) -> None:
        self.events.note(self.clock, kind, self.backend.id, name, detail)
