"""Subscribe to the KV events of all engines in pools with `prefix: precise`.

run -- one task per backend -- look   where its engines publish: settings, else its page, else its command line
                            '- one subscription for each engine, until its address changes
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from gateway.config.kvevents import flag_of
from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import Clock, guarded, periodic
from gateway.core.types import SERVING
from gateway.pools.table import Backend, PoolTable
from gateway.prefix.follower import Follower
from gateway.prefix.precise import PreciseIndex
from gateway.prefix.ranked import precise_engines
from gateway.watch.fetch import FetchError, Pages
from gateway.watch.members import for_each_member
from gateway.wire.kvsources import MOST_RANKS, Source, parse_sources, source_of

if TYPE_CHECKING:
    from zmq.asyncio import Context

_Followed = dict[tuple[PreciseIndex, Source], asyncio.Task[None]]

_FIRST_LOOK_S: Final = 1.0
_LOOK_S: Final = 5.0  # after a restart an engine may publish at another port
_TIMEOUT_S: Final = 5.0
_LOCAL: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineEvents:
    """All subscriptions of one process. `pools` may be replaced at any time."""

    def __init__(self, table: PoolTable, pools: Mapping[str, PoolConfig], clock: Clock) -> None:
        self.pools = pools
        self._table = table
        self._clock = clock
        self._context: Context | None = None

    async def run(self) -> None:
        """Follow until cancelled. Cancel: all subscriptions end, and the approximate indexes count again."""
        try:
            await for_each_member(self._table, self._follow, name="kv events", wanted=_is_precise)
        finally:
            if self._context is not None:
                self._context.destroy(linger=0)

    async def _follow(self, backend: Backend) -> None:
        """Follow a backend's engines. Cancel: all its subscriptions end."""
        followed: _Followed = {}
        try:
            async with asyncio.TaskGroup() as group:
                with closing(Pages(backend)) as pages:

                    async def look() -> None:
                        if backend.phase not in SERVING:
                            return
                        with suppress(FetchError):
                            sources = await self._sources(backend, pages)
                            self._renew(backend, followed, sources, group)

                    await periodic(
                        look,
                        every_s=lambda: _LOOK_S if followed else _FIRST_LOOK_S,
                        name=f"kv events {backend.id}",
                    )
        finally:
            for engine, _ in followed:
                engine.follower = None

    def _renew(
        self,
        backend: Backend,
        followed: _Followed,
        sources: Mapping[int, Source],
        group: asyncio.TaskGroup,
    ) -> None:
        """Follow these engines from now on. Subscribe again where an address changed or a task failed.

        Of a server with several engines, all are followed or none.
        """
        from gateway.watch.kvevents import Subscriber  # its library is an extra

        engines = precise_engines(backend.prefix_index)
        wanted: set[tuple[PreciseIndex, Source]] = set()
        if len(engines) == len(sources):
            wanted = {
                (each, sources[rank]) for each, rank in zip(engines, sorted(sources), strict=True)
            }
        for key, task in [*followed.items()]:
            if key not in wanted or task.done():
                task.cancel()
                del followed[key]
                key[0].follower = None
        for engine, source in wanted - followed.keys():
            engine.follower = Follower()
            subscriber = Subscriber(self._context_at_hand(), source, engine.follower, self._clock)
            name = f"kv events {backend.id} {engines.index(engine)}"
            work = guarded(subscriber.run(), name=name)
            followed[engine, source] = group.create_task(work, name=name)

    def _context_at_hand(self) -> Context:
        import zmq.asyncio

        if self._context is None:
            self._context = zmq.asyncio.Context()
        return self._context

    async def _sources(self, backend: Backend, pages: Pages) -> Mapping[int, Source]:
        """Return where the engines of a backend publish, by rank; empty if they do not.

        Raises:
            FetchError: the server did not say. Its engines may well publish as before.
        """
        config = self._config_of(backend)
        host = None if backend.socket is not None or backend.host in _LOCAL else backend.host
        if config is not None and config.kv_events is not None:
            settings = config.kv_events.model_dump() | {"enable_kv_cache_events": True}
            return _of_ranks(settings, host, config.kv_events.ranks)
        try:
            page = await pages.get("/kv_event_sources", timeout_s=_TIMEOUT_S)
        except FetchError as failure:
            if not failure.reason.startswith("http_4"):
                raise
            page = b""  # an older vLLM has no such page
        sources = parse_sources(page, host)
        if sources is not None:
            return sources
        flag = flag_of(config.launch) if config is not None and config.launch is not None else None
        return {} if flag is None else _of_ranks(flag[0], host, flag[1])

    def _config_of(self, backend: Backend) -> BackendConfig | None:
        pool = self.pools.get(backend.pool)
        members = () if pool is None else pool.backends
        return next((each for each in members if each.name == backend.name), None)


def _is_precise(backend: Backend) -> bool:
    return backend.new_prefix_index is PreciseIndex


def _of_ranks(settings: Mapping[str, Any], host: str | None, ranks: int) -> dict[int, Source]:
    """Return where each rank publishes, by vLLM's settings of KV events."""
    found = {rank: source_of(settings, host, rank) for rank in range(min(ranks, MOST_RANKS))}
    return {rank: source for rank, source in found.items() if source is not None}
