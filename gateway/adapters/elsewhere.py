"""The messages in which gateways with the same backends tell each other of a pool's adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gateway.adapters.memory import Order
from gateway.core.exclusion import Exclusion
from gateway.pools.table import Backend


class Placed(msgspec.Struct, frozen=True):
    """What the gateway that places adapters knows of a backend."""

    held: frozenset[str] = frozenset()  # adapters that are loaded
    lacking: dict[str, str] = {}  # adapters that are not available, and why: an `Exclusion`

    @property
    def exclusions(self) -> dict[str, Exclusion]:
        """Why adapters are not available; a reason that only another version knows counts as absence."""
        known = {each.value: each for each in Exclusion}
        missing = Exclusion.MODEL_MISSING
        return {name: known.get(why, missing) for name, why in self.lacking.items()}


def placed_on(backend: Backend, lacking: Mapping[str, Exclusion]) -> Placed:
    """Return what the other gateways are told of a backend."""
    why = {name: each.value for name, each in lacking.items()}
    return Placed(frozenset(backend.adapters), why)


class PoolTold(msgspec.Struct, frozen=True):
    """What one gateway tells of a pool. Mappings by backend have backend ids as keys."""

    requests: dict[str, dict[str, int]] = {}  # in flight, by backend and adapter
    awaited: frozenset[str] = frozenset()  # adapters that requests wait for, and no backend has
    loaded: dict[str, list[str]] = {}  # what gateways loaded, by backend
    orders: dict[str, dict[str, Order]] = {}  # operators', by backend and adapter
    placed: dict[str, Placed] | None = None  # by backend; None: another gateway places adapters
    begun: dict[str, dict[str, float]] = {}  # loads that may be under way, as in `Memory`
    addresses: dict[str, str] = {}  # digests, by backend; an older gateway tells none


class Elsewhere:
    """The last messages of the other gateways about a pool.

    `stale`: this gateway placed adapters last, and another one may have taken over since.
    `others`: there certainly are other gateways, even if none has sent a message yet.
    """

    def __init__(
        self, messages: Sequence[PoolTold] = (), *, stale: bool = False, others: bool = False
    ) -> None:
        self._messages = messages
        self.stale = stale
        self._others = others

    def __bool__(self) -> bool:
        return self.stale or self._others or bool(self._messages)

    @property
    def awaited(self) -> AbstractSet[str]:
        """The adapters that requests wait for at other gateways."""
        return frozenset().union(*(each.awaited for each in self._messages))

    @property
    def placed(self) -> Mapping[str, Placed] | None:
        """What the gateway that places adapters told; None: none of these does."""
        return next((each.placed for each in self._messages if each.placed is not None), None)

    def requests(self, backend_id: str) -> Mapping[str, int]:
        """Return how many requests other gateways have in flight on a backend, by adapter."""
        found: dict[str, int] = {}
        for each in self._messages:
            for name, count in each.requests.get(backend_id, {}).items():
                found[name] = found.get(name, 0) + count
        return found

    def loaded(self, backend_id: str) -> AbstractSet[str]:
        """Return the adapters that gateways loaded on a backend, as far as the others know."""
        return frozenset().union(*(each.loaded.get(backend_id, ()) for each in self._messages))

    def begun(self, backend_id: str) -> Mapping[str, float]:
        """Return which loads other gateways have begun on a backend, and when, by the wall clock."""
        return {
            name: at
            for each in self._messages
            for name, at in each.begun.get(backend_id, {}).items()
        }

    def orders(self, backend_id: str, own: Mapping[str, Order]) -> Mapping[str, Order]:
        """Return operators' orders for a backend, this gateway's `own` among them; the latest one holds."""
        found = {**own}
        for each in self._messages:
            for name, order in each.orders.get(backend_id, {}).items():
                if name not in found or found[name].at < order.at:
                    found[name] = order
        return found
