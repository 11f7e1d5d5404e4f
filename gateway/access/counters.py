"""Who counts a pool's prompts: its tokenizer here, when one is configured, else one of its backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.access.tokens import Asker, BackendCounter, LocalCounter, as_chat
from gateway.config.models import PoolConfig
from gateway.core.types import Call, Endpoint, Route
from gateway.pools.table import Backend


class PromptCounters:
    """The counters of all pools, made from one configuration.

    Raises:
        ConfigError: a configured tokenizer folder cannot be used.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolConfig],
        open_asker: Callable[[Backend], Asker],
        *,
        deadline_s: float,
        before: PromptCounters | None = None,
    ) -> None:
        """Load the tokenizers; those of `before` are kept where no file of the folder has changed."""
        self._local: dict[str, LocalCounter] = {}
        self._stamps: dict[str, object] = {}  # of what each was made from
        for name, pool in pools.items():
            if pool.tokenizer is None:
                continue
            stamp = self._stamps[name] = (deadline_s, _stamp(pool.tokenizer))
            same = before is not None and before._stamps.get(name) == stamp
            kept = before._local[name] if before is not None and same else None
            self._local[name] = kept or LocalCounter(pool.tokenizer, deadline_s=deadline_s)
        self._open_asker = open_asker
        self._deadline_s = deadline_s
        self._remote: dict[Backend, BackendCounter] = {}

    async def count(self, call: Call, route: Route, backends: Sequence[Backend]) -> int | None:
        """Return the exact length of the longest prompt in tokens; None when nobody can tell in time.

        `backends` are those that serve now; the least busy one is asked. Cancel: nothing is held.
        """
        chat = as_chat(call) if call.endpoint is Endpoint.RESPONSES else call
        if chat is None:
            return None
        local = self._local.get(route.pool)
        if local is not None:
            tokens = await local.count(chat, route.served_model, window_tokens=route.window_tokens)
            if tokens is not None:
                return tokens
        if not backends:
            return None
        asked = min(backends, key=lambda backend: backend.in_flight)
        counter = self._remote.get(asked)
        if counter is None:
            counter = self._remote[asked] = BackendCounter(
                self._open_asker(asked), deadline_s=self._deadline_s
            )
        return await counter.count(chat, asked.served_name(route))

    def close(self) -> None:
        """Drop the connections to backends; a count that is under way comes to its end."""
        for counter in self._remote.values():
            counter.asker.close()


def _stamp(folder: Path) -> list[object]:
    """Return what changes whenever a file of a folder does."""
    stamp: list[object] = []
    for file in sorted(folder.rglob("*")):
        with suppress(OSError):
            found = file.stat()
            stamp.append((file, found.st_ino, found.st_size, found.st_mtime_ns))
    return stamp
