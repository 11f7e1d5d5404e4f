"""What operators want of backends, and what is not to be restarted: on disk, and known to all replicas.

    SUSPENDED   restarts do not help: nobody restarts it until an operator clears it, wherever that is
    DRAINED     an operator took it out: nobody sends it new work, nor restarts it
    holds       automatic restarts of a pool, or of all, wait

    <state>/intent.json    {"drained": {"pool/b1": {"at": ..., "why": ...}}, "suspended": {...},
                            "holds": {"pool": {"until": ..., "why": ...}},
                            "undrained": ["pool/b2"], "cleared": []}  what the store was not told yet

What is said here counts here at once and outlives this process. A mark is a hold in the shared store
too, so other replicas do the same; what is said here wins over the store until the store has it, and
what the store then says wins. Without the store every replica keeps what it knows. What the file has
and the store does not is told to it, unless another replica lifted it while no gateway ran here. A mark
that was taken off here stays so for the next gateway, which tells the store if this one could not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from gateway.core.aio import Clock
from gateway.heal.statefile import read_state, write_state
from gateway.store.shared import LIFTED, SharedStore, StoreUnavailable

FILE: Final = "intent.json"
_ALL: Final = ""  # the pool that stands for all
_LAST_S: Final = 2.0  # for what the store is told at the end


class Mark(Enum):
    """What is told of a backend; the value makes of its name the scope of a hold."""

    SUSPENDED = "{}"
    DRAINED = "{}#drained"  # no name of a pool or backend has a #

    def scope(self, name: str) -> str:
        """Return the scope of the hold that stands for this mark of a backend, by what all replicas call it."""
        return self.value.format(name)


class Note(msgspec.Struct, frozen=True):
    """Since when something is so, and why. Seconds since the epoch."""

    at: float
    why: str = ""
    way: str = ""  # of a suspension: `Unit.way` then; empty: not known


class Hold(msgspec.Struct, frozen=True):
    """Until when automatic restarts wait; None: until that is lifted."""

    until: float | None = None
    why: str = ""


class Kept(msgspec.Struct):
    """The file."""

    drained: dict[str, Note] = {}
    suspended: dict[str, Note] = {}
    holds: dict[str, Hold] = {}
    undrained: set[str] = set()
    cleared: set[str] = set()

    def of(self, mark: Mark) -> dict[str, Note]:
        """Return the backends that have a mark."""
        return self.suspended if mark is Mark.SUSPENDED else self.drained

    def without(self, mark: Mark) -> set[str]:
        """Return the backends that a mark was taken off, which the store was not told yet."""
        return self.cleared if mark is Mark.SUSPENDED else self.undrained


_FORMAT: Final = msgspec.json.Decoder(Kept)


@dataclass(slots=True)
class Intent:
    """This replica's view. One owner; only `restore`, `hold`, `lift` and `tell` wait for the store.

    `named` says what all replicas call a backend.
    """

    store: SharedStore
    clock: Clock
    folder: Path
    named: Callable[[str], str] = str
    saved: bool = True  # the file has all of it
    _kept: Kept = field(default_factory=Kept)
    _unsaid: dict[tuple[Mark, str], bool] = field(default_factory=dict)
    _of_file: set[tuple[Mark, str]] = field(default_factory=set)  # what only the file says so far
    _held: set[str] = field(default_factory=set)  # pools on hold since the store answered last
    _ends: dict[str, float] = field(default_factory=dict)  # of holds, by the store's clock
    _read: Mapping[str | None, float] | None = None

    def __post_init__(self) -> None:
        self._kept = read_state(self.folder / FILE, _FORMAT) or Kept()
        for mark in Mark:
            self._of_file |= {(mark, each) for each in self._kept.of(mark)}
            self._unsaid |= {(mark, each): False for each in self._kept.without(mark)}
        self._unsaid |= dict.fromkeys(self._of_file, True)
        now = self.clock.now()
        self._ends = {pool: now + self._left_s(hold) for pool, hold in self._kept.holds.items()}

    def has(self, mark: Mark, backend_id: str) -> bool:
        """Whether a backend has a mark."""
        return backend_id in self._kept.of(mark)

    def why(self, mark: Mark, backend_id: str) -> str:
        """Return why a backend has a mark; empty where it has not, or nobody said."""
        note = self._kept.of(mark).get(backend_id)
        return note.why if note is not None else ""

    @property
    def holds(self) -> Mapping[str, Hold]:
        """What was ordered here of automatic restarts, by pool; the empty name stands for all."""
        return self._kept.holds

    def holds_now(self, pool: str) -> bool:
        """Whether a hold of a pool, or of all, that was ordered here lasts; the store may tell of it later."""
        now = self.clock.now()
        return any(of in self._kept.holds and self._ends[of] > now for of in (_ALL, pool))

    def why_held(self, pool: str | None) -> str:
        """Return why restarts of a pool, or (None) of all, are on hold; empty where nobody said, or not here."""
        hold = self._kept.holds.get(pool or _ALL)
        return hold.why if hold is not None else ""

    def way(self, backend_id: str) -> str:
        """Return the `Unit.way` that a suspension is about; empty: not known."""
        note = self._kept.suspended.get(backend_id)
        return note.way if note is not None else ""

    def say(self, mark: Mark, backend_id: str, *, on: bool, why: str = "", way: str = "") -> None:
        """Give a mark to a backend, or take it off; the store has it after the next `tell`."""
        if on or self.has(mark, backend_id):
            without = self._kept.without(mark)
            if on:
                without.discard(backend_id)
            else:
                without.add(backend_id)
            self._set(mark, backend_id, on=on, why=why, way=way)
        self._unsaid[mark, backend_id] = on
        self._of_file.discard((mark, backend_id))

    async def tell(self) -> None:
        """Give the store what it does not have. Without it, the next call does so.

        What only the file says may have been lifted since: it waits for `restore`.
        Cancel: what was not confirmed is told again.
        """
        for marked, on in [*self._unsaid.items()]:
            if marked in self._of_file:
                continue
            mark, backend_id = marked
            scope = self._scope(mark, backend_id)
            try:
                await (self.store.hold(scope) if on else self.store.lift(scope))
            except StoreUnavailable:
                return
            if self._unsaid[marked] is on:  # nothing else was said meanwhile
                del self._unsaid[marked]
                if backend_id in (without := self._kept.without(mark)):
                    without.remove(backend_id)
                    self._write()

    async def close(self) -> None:
        """Tell the store a last time what it does not have; not for long, as the next gateway tells it too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self.tell()

    def changes(
        self, holds: Mapping[str | None, float], backend_ids: Mapping[Mark, Collection[str]]
    ) -> Iterator[tuple[Mark, str, bool]]:
        """Yield what other replicas said, once it is so here: a mark, a backend, whether it has it now.

        Args:
            holds: what the store answered; the same object again is no answer, and says nothing.
            backend_ids: of those that may have a mark.
        """
        if holds is self._read:
            return
        self._read = holds
        self._drop_lifted(holds)
        every = {(mark, each) for mark, ids in backend_ids.items() for each in ids}
        ends = {marked: holds.get(self._scope(*marked)) for marked in every}
        found = {marked for marked, end in ends.items() if end not in (None, LIFTED)}
        here = {(mark, each) for mark, each in every if self.has(mark, each)}
        lifted = {marked for marked, end in ends.items() if end == LIFTED}
        for marked in here - found - lifted:
            self._unsaid.setdefault(marked, True)  # the store had it, and lost it
        came, went = found - here, lifted & here
        for marked in sorted(came | went, key=str):
            if marked not in self._unsaid:
                self._set(*marked, on=marked in came, why="ordered by another replica")
                yield *marked, marked in came

    # --- holds ------------------------------------------------------------------------------------

    async def restore(self, holds: Mapping[str | None, float]) -> None:
        """Tell the store what the file has and it does not; forget what was lifted meanwhile.

        Call it once, with the store's first answer. What was said since the start counts.

        Raises:
            StoreUnavailable: not all was told; call it again.
        """
        for pool, hold in [*self._kept.holds.items()]:
            left_s = self._left_s(hold)
            if left_s <= 0 or holds.get(pool or None) == LIFTED:
                del self._kept.holds[pool]
                self._write()
            elif (pool or None) not in holds:
                await self.store.hold(pool or None, None if hold.until is None else left_s)
        for marked in self._of_file:
            if holds.get(self._scope(*marked)) == LIFTED:
                del self._unsaid[marked]  # so that `changes` takes it off
        self._of_file.clear()

    def _left_s(self, hold: Hold) -> float:
        return math.inf if hold.until is None else hold.until - self.clock.wall()

    def _drop_lifted(self, holds: Mapping[str | None, float]) -> None:
        """Forget the holds that another replica lifted; not those that were set after it answered so."""
        of = self._kept.holds.keys() - self._held
        self._held.clear()
        if lifted := {pool for pool in of if holds.get(pool or None) == LIFTED}:
            for pool in lifted:
                del self._kept.holds[pool]
            self._write()

    async def hold(self, pool: str | None, for_s: float | None, why: str) -> None:
        """Stop automatic restarts of a pool, or (None) of all, for a time or (None) for good.

        Raises:
            StoreUnavailable: nothing was changed.
        """
        await self.store.hold(pool, for_s)
        until = None if for_s is None else self.clock.wall() + for_s
        self._kept.holds[pool or _ALL] = Hold(until, why)
        self._ends[pool or _ALL] = math.inf if for_s is None else self.clock.now() + for_s
        self._held.add(pool or _ALL)
        self._write()

    async def lift(self, pool: str | None) -> None:
        """End a hold.

        Raises:
            StoreUnavailable: nothing was changed.
        """
        await self.store.lift(pool)
        if self._kept.holds.pop(pool or _ALL, None) is not None:
            self._write()

    def _scope(self, mark: Mark, backend_id: str) -> str:
        return mark.scope(self.named(backend_id))

    # --- the file ---------------------------------------------------------------------------------

    def _set(self, mark: Mark, backend_id: str, *, on: bool, why: str, way: str = "") -> None:
        if on:
            self._kept.of(mark)[backend_id] = Note(self.clock.wall(), why, way)
        else:
            self._kept.of(mark).pop(backend_id, None)
        self._write()

    def _write(self) -> None:
        self.saved = write_state(self.folder / FILE, self._kept, "what operators ordered")
