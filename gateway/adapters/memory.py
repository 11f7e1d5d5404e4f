"""What must outlive this process: which adapters the gateway loaded, and what operators ordered.

Of several workers the first one keeps the file. The others hear what it knows (`adapters.together`).

A load that was begun is kept for ten minutes: it may succeed after its deadline, or after this process ended. It
counts once the backend lists the adapter.

What was loaded is a fact about the server at an address: it goes with the address, whatever the settings call it.

<state>/adapters.json    {"loaded": {"pool/b1": ["sql"]}, "begun": {"pool/b1": {"fr": ...}},
                          "orders": {"pool/b1": {"sql": {"keep": true, "path": null, "at": ..., "why": ""}}},
                          "deaths": {"pool": {"fr": [{"backend_id": "pool/b1", "path": "/fr", "at": ...}]}},
                          "urls": {"pool/b1": "http://10.0.0.11:8000"}}  of those that are named above
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.heal.statefile import digest, read_state, write_state

FILE: Final = "adapters.json"
_BEGUN_S: Final = 600.0
_DEATHS_KEPT: Final = 4


class Order(msgspec.Struct, frozen=True):
    """An operator's order: keep an adapter on a backend, or keep it away."""

    keep: bool
    path: str | None = None  # None: as configured
    at: float = 0.0  # seconds since the epoch
    why: str = ""


T = TypeVar("T", float, Order)


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
    urls: dict[str, str] = {}  # a file of before has none

    def named(self) -> set[str]:
        """Return the backends of which anything is kept."""
        tables: tuple[Mapping[str, Collection[str]], ...] = (self.loaded, self.begun, self.orders)
        deaths = [each for of in self.deaths.values() for known in of.values() for each in known]
        found = {each for table in tables for each, names in table.items() if names}
        return found | {each.backend_id for each in deaths}


_FORMAT: Final = msgspec.json.Decoder(_Kept)


@dataclass(slots=True)
class Memory:
    """The state file. One owner. `folder` is None where another process keeps the file: nothing is read or saved."""

    folder: Path | None
    saved: bool = True  # the last write succeeded
    _kept: _Kept = field(default_factory=_Kept)
    _urls: dict[str, str] = field(default_factory=dict)  # of all that are configured, or kept
    _addresses: dict[str, str] = field(default_factory=dict)  # digests of these
    _seen: set[str] = field(default_factory=set)  # digests of these, and of those of before

    def __post_init__(self) -> None:
        if self.folder is not None:
            self._kept = read_state(self.folder / FILE, _FORMAT) or _Kept()
        self._urls = self._kept.urls

    def apply(self, urls: Mapping[str, str]) -> None:
        """Take over which servers there are: their addresses, by backend id.

        What was loaded goes with its server, and is forgotten where its name is another server's. So do orders, but
        those for a server that is gone stay with its name. Deaths go with their pool, also where that is renamed.
        """
        kept, before, written = self._kept, self._urls, msgspec.json.encode(self._kept)
        moved = _moved(before, urls)
        lost = {each for each, url in before.items() if urls.get(each, url) != url} - moved.keys()
        loaded = {each: dict.fromkeys(names, 0.0) for each, names in kept.loaded.items()}
        kept.loaded = {each: [*names] for each, names in _under(loaded, moved, lost).items()}
        kept.begun = _under(kept.begun, moved, lost)
        kept.orders = _under(kept.orders, moved)
        self._move_deaths(before, urls)
        named = kept.named()
        self._urls = {each: url for each, url in before.items() if each in named} | {**urls}
        self._addresses = {each: digest(url) for each, url in self._urls.items()}
        self._seen |= {*self._addresses.values(), *map(digest, before.values())}
        self._note_urls()
        if msgspec.json.encode(kept) != written:
            self._save()

    def address(self, backend_id: str) -> str:
        """Return what tells the address of a backend from others, without telling it."""
        return self._addresses.get(backend_id, "")

    def is_another(self, backend_id: str, address: str) -> bool:
        """Whether an address is certainly another server's than this backend's: the settings have or had it here.

        Gateways may reach one server by several addresses, so one that was never seen here tells nothing.
        """
        return address in self._seen and address != self.address(backend_id)

    def leave(self) -> None:
        """Save nothing from now on: the file is another process's."""
        self.folder = None

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

    def _move_deaths(self, before: Mapping[str, str], urls: Mapping[str, str]) -> None:
        """Have the deaths of pools that are gone count in those that have their servers."""
        pools, now = {_pool(each) for each in urls}, {url: each for each, url in urls.items()}
        for pool in self._kept.deaths.keys() - pools:
            for name, deaths in self._kept.deaths.pop(pool).items():
                for each in deaths:
                    place = now.get(before.get(each.backend_id, ""), each.backend_id)
                    death = msgspec.structs.replace(each, backend_id=place)
                    known = self._kept.deaths.setdefault(_pool(place), {}).setdefault(name, [])
                    known.append(death)
                    known.sort(key=lambda death: death.at)
                    del known[:-_DEATHS_KEPT]

    def _note_urls(self) -> None:
        named = self._kept.named()
        self._kept.urls = {each: url for each, url in self._urls.items() if each in named}

    def _save(self) -> None:
        self._note_urls()
        if self.folder is not None:
            self.saved = write_state(self.folder / FILE, self._kept, "what was loaded and ordered")


def _moved(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the new ids of servers by their ids of before; a server that two pools have stays in each."""
    found: dict[str, str] = {}
    new = [each for each, url in now.items() if before.get(each) != url]
    for each, url in before.items():
        places = [place for place in new if now[place] == url] if now.get(each) != url else ()
        if places:
            found[each] = next(
                (place for place in places if _pool(place) == _pool(each)), places[0]
            )
    return found


def _under(
    known: Mapping[str, Mapping[str, T]], moved: Mapping[str, str], lost: Collection[str] = ()
) -> dict[str, dict[str, T]]:
    """Return what is known, by the new ids. Of two that meet under one id the later one holds."""
    found: dict[str, dict[str, T]] = {}
    for each, of in known.items():
        here = {} if each in lost else found.setdefault(moved.get(each, each), {})
        for name, value in of.items():
            if name not in here or _at(here[name]) < _at(value):
                here[name] = value
    return found


def _at(value: float | Order) -> float:
    return value.at if isinstance(value, Order) else value


def _pool(backend_id: str) -> str:
    return backend_id.rpartition("/")[0]
