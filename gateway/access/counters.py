"""Who counts a pool's prompts: its tokenizer here, when one is configured, else one of its backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.access.tokens import Asker, BackendCounter, LocalCounter
from gateway.config.models import PoolConfig
from gateway.core.types import Call, Route
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
    ) -> None:
        self._local = {
            name: LocalCounter(pool.tokenizer, deadline_s=deadline_s)
            for name, pool in pools.items()
            if pool.tokenizer is not None
        }
        self._open_asker = open_asker
        self._deadline_s = deadline_s
        self._remote: dict[Backend, BackendCounter] = {}

    async def count(self, call: Call, route: Route, backends: Sequence[Backend]) -> int | None:
        """Return the exact length of the longest prompt in tokens; None when nobody can tell in time.

        `backends` are those that serve now; the least busy one is asked. Cancel: nothing is held.
        """
        local = self._local.get(route.pool)
        if local is not None:
            tokens = await local.count(call, route.served_model, window_tokens=route.window_tokens)
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
        return await counter.count(call, asked.served_name(route))

    def close(self) -> None:
        """Drop the connections to backends; a count that is under way comes to its end."""
        for counter in self._remote.values():
            counter.asker.close()
