"""How a keeper loads and unloads adapters on a backend, over HTTP. Every call has a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from gateway.core.types import ServedModel
from gateway.pools.table import Backend
from gateway.pools.unanswered import in_words
from gateway.watch import adapters
from gateway.watch.adapters import AdapterError
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.vllm import parse_models

_LOAD_S: Final = 120.0  # to read its weights from a slow disk
_UNLOAD_S: Final = 10.0
_MODELS_S: Final = 5.0


class Server(Protocol):
    """A backend as a keeper uses it. Each call raises `AdapterError` if it fails.

    Cancel: the backend may still carry the call out.
    """

    async def load(self, name: str, path: str) -> None:
        """Load an adapter; one that is loaded already is fine."""

    async def unload(self, name: str) -> None:
        """Unload an adapter; one that is not there is fine."""

    async def models(self) -> Sequence[ServedModel]:
        """Return its model list."""

    def close(self) -> None:
        """Drop its connections."""


class VllmServer:
    """A `Server` over HTTP, with connections of its own."""

    def __init__(self, backend: Backend) -> None:
        self._pages = Pages(backend)

    async def load(self, name: str, path: str) -> None:
        """See `Server`."""
        await adapters.load(self._pages, name, path, timeout_s=_LOAD_S)

    async def unload(self, name: str) -> None:
        """See `Server`."""
        await adapters.unload(self._pages, name, timeout_s=_UNLOAD_S)

    async def models(self) -> Sequence[ServedModel]:
        """See `Server`."""
        try:
            return parse_models(await self._pages.get("/v1/models", timeout_s=_MODELS_S))
        except FetchError as error:
            raise AdapterError(
                f"its model list cannot be read: {in_words(error.reason)}"
            ) from error

    def close(self) -> None:
        """See `Server`."""
        self._pages.close()
