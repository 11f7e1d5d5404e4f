"""What must outlive this process: which adapters the gateway loaded, and what operators ordered.

Of several workers the first one keeps the file. The others hear what it knows (`adapters.together`).

A load that was begun is kept for ten minutes: it may succeed after its deadline, or after this process ended. It
counts once the backend lists the adapter.

<state>/adapters.json    {"loaded": {"pool/b1": ["sql"]}, "begun": {"pool/b1": {"fr": ...}},
                          "orders": {"pool/b1": {"sql": {"keep": true, "path": null, "at": ..., "why": ""}}},
                          "deaths": {"pool": {"fr": [{"backend_id": "pool/b1", "path": "/fr", "at": ...}]}}}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.heal.statefile import read_state, write_state

FILE: Final = "adapters.json"
_BEGUN_S: Final = 600.0
_DEATHS_KEPT: Final = 4


class Order(msgspec.Struct, frozen=True):
    """An operator's order: keep an adapter on a backend, or keep it away."""

    keep: bool
    path: str | None = None  # None: as configured
    at: float = 0.0  # seconds since the epoch
    why: str = ""


class Death(msgspec.Struct, frozen=True):
    """A server that died as it loaded an adapter."""

    backend_id: str
    path: str
    at: float  # seconds since the epoch


class _Kept(msgspec.Struct):
    loaded: dict[str, list[str]] = {}
    begun: dict[str, dict[str, float]] = {}  # since when, seconds since the epoch
    orders: dict[str, dict[str, Order]] = {}
    deaths: dict[str, dict[str, list[Death]]] = {}


_FORMAT: Final = msgspec.json.Decoder(_Kept)


@dataclass(slots=True)
class Memory:
    """The state file. One owner. `folder` is None where another worker keeps the file: nothing is read or saved."""

    folder: Path | None
    saved: bool = True  # the last write succeeded
    _kept: _Kept = field(default_factory=_Kept)

    def __post_init__(self) -> None:
        if self.folder is not None:
            self._kept = read_state(self.folder / FILE, _FORMAT) or _Kept()

    def loaded(self, backend_id: str) -> frozenset[str]:
        """Return the adapters that this gateway, or one before it, loaded on a backend."""
        return frozenset(self._kept.loaded.get(backend_id, ()))

    def begin(self, backend_id: str, name: str, at: float) -> None:
        """Remember that this gateway has a backend load an adapter; `at` is by the wall clock."""
        self._kept.begun.setdefault(backend_id, {})[name] = at
        self._save()

    def begun(self, backend_id: str) -> Mapping[str, float]:
        """Return the loads that were begun on a backend and are not known to have succeeded, and since when."""
        return self._kept.begun.get(backend_id, {})

    def hear(self, backend_id: str, begun: Mapping[str, float], at: float) -> None:
        """Remember the loads that other gateways began; they may end before these do."""
        known = self.begun(backend_id)
        for name, since in begun.items():
            if name not in known and 0 <= at - since < _BEGUN_S:
                self.begin(backend_id, name, since)

    def note(self, backend_id: str, name: str) -> None:
        """Remember that this gateway loaded an adapter."""
        names = self._kept.loaded.setdefault(backend_id, [])
        begun = self._kept.begun.get(backend_id, {}).pop(name, None)
        if name not in names:
            names.append(name)
        elif begun is None:
            return
        self._save()

    def only(self, backend_id: str, held: Collection[str], at: float) -> None:
        """Forget the loads of adapters that a backend does not list any more; `held` are those that it lists."""
        begun = self._kept.begun.get(backend_id, {})
        for name in [name for name in begun if name in held]:
            self.note(backend_id, name)
        late = [name for name, since in begun.items() if not 0 <= at - since < _BEGUN_S]
        names = self._kept.loaded.get(backend_id, [])
        left = [name for name in names if name in held]
        if late or left != names:
            for name in late:
                del begun[name]
            self._kept.loaded[backend_id] = left
            self._save()

    def orders(self, backend_id: str) -> dict[str, Order]:
        """Return the operators' orders for a backend, by adapter."""
        return self._kept.orders.get(backend_id, {})

    def order(self, backend_id: str, name: str, order: Order | None) -> None:
        """Keep an order until the next one; None ends it."""
        orders = self._kept.orders.setdefault(backend_id, {})
        if order is None:
            orders.pop(name, None)
        else:
            orders[name] = order
        self._save()

    def deaths(self, pool: str) -> Mapping[str, Sequence[Death]]:
        """Return the deaths of servers that loaded an adapter, by adapter, the oldest first."""
        return self._kept.deaths.get(pool, {})

    def died(self, pool: str, name: str, death: Death) -> None:
        """Remember that a server died as it loaded an adapter; the latest few are kept."""
        deaths = self._kept.deaths.setdefault(pool, {}).setdefault(name, [])
        deaths.append(death)
        del deaths[:-_DEATHS_KEPT]
        self._save()

    def forgive(self, pool: str, name: str, until: float) -> None:
        """Forget the deaths of an adapter up to a moment by the wall clock."""
        known = self._kept.deaths.get(pool, {}).pop(name, [])
        left = [each for each in known if each.at > until]
        if left:
            self._kept.deaths[pool][name] = left
        if left != known:
            self._save()

    def _save(self) -> None:
        if self.folder is not None:
            self.saved = write_state(self.folder / FILE, self._kept, "what was loaded and ordered")
