"""Marks: what replicas tell each other of single backends, so that none undoes what another did.

    SUSPENDED   a crash loop: nobody restarts it until an operator clears it, wherever that is
    DRAINED     an operator took it out: nobody sends it new work, nor restarts it

A mark is a hold in the shared store. What is said here counts here at once, and wins over the store
until the store has it; what the store then says wins. Without the store every replica keeps what it
knows. A mark outlives the replica that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway.pools.store import SharedStore, StoreUnavailable


class Mark(Enum):
    """What is told of a backend; the value makes of its id the scope of a hold."""

    SUSPENDED = "{}"
    DRAINED = "{}#drained"  # no name of a pool or backend has a #


Marked = tuple[Mark, str]  # a mark, and the id of the backend that has it


@dataclass(slots=True)
class Marks:
    """This replica's view of the marks. One owner; only `tell` waits for the store."""

    store: SharedStore
    _unsaid: dict[Marked, bool] = field(default_factory=dict)
    _known: set[Marked] = field(default_factory=set)  # that the store has
    _read: Mapping[str | None, float] | None = None

    def say(self, mark: Mark, backend_id: str, *, on: bool) -> None:
        """Set a mark of a backend, or take it off; the store has it after the next `tell`."""
        self._unsaid[mark, backend_id] = on

    async def tell(self) -> None:
        """Give the store what it does not have. Without it, the next call does so.

        Cancel: what was not confirmed is told again.
        """
        for marked, on in [*self._unsaid.items()]:
            mark, backend_id = marked
            scope = mark.value.format(backend_id)
            try:
                await (self.store.hold(scope) if on else self.store.lift(scope))
            except StoreUnavailable:
                return
            if self._unsaid[marked] is on:  # nothing else was said meanwhile
                del self._unsaid[marked]
                (self._known.add if on else self._known.discard)(marked)

    def changes(
        self,
        holds: Mapping[str | None, float],
        here: Collection[Marked],
        backend_ids: Mapping[Mark, Collection[str]],
    ) -> Iterator[tuple[Mark, str, bool]]:
        """Yield what other replicas said: a mark, a backend, and whether it has it now.

        Args:
            holds: what the store answered; the same object again is no answer, and says nothing.
            here: the marks that are in force in this replica.
            backend_ids: of those that may have a mark.
        """
        if holds is self._read:
            return
        self._read = holds
        found = {
            (mark, backend_id)
            for mark, ids in backend_ids.items()
            for backend_id in ids
            if mark.value.format(backend_id) in holds
        }
        came, went = found.difference(here), (self._known - found).intersection(here)
        self._known = found
        for marked in sorted(came | went, key=str):
            if marked not in self._unsaid:
                yield *marked, marked in came
