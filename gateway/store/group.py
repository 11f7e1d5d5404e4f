"""The workers of one gateway: what each knows of itself, and how it reaches the others.

A parent process starts the workers (`gateway.workers`). It keeps what they share, a `MemoryStore` and what is
used of limits, and passes calls on between them. Worker 1 leads: it heals backends, places adapters, judges
canaries and serves the admin listener. When it dies, the parent starts another worker 1, which reads the state
folder as any gateway does. The parent starts it only when the one before is gone, so there are never two.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from gateway.core.channel import Answer, Answers, Channel, Unanswered
from gateway.store.scripts import BUDGET_S, Late, Lost, Script
from gateway.store.shared import Board, Heard, Lease, SharedStore, StoreUnavailable

if TYPE_CHECKING:
    from gateway.store.replicas import Told

VARIABLE: Final = "GATEWAY_WORKER"  # in the environment of a worker: `Place`, as JSON
LEADER: Final = 1
_WITHIN_S: Final = 1.0  # for the parent, which does little else
_FELLOWS_S: Final = 2.0  # for all other workers
_LAST_S: Final = 3600.0  # for the others to end; `shutdown.grace` ends them before
_UPGRADED_S: Final = 160.0  # for one worker to be replaced; the parent gives up a little earlier


class Place(msgspec.Struct, frozen=True):
    """A worker's number, how many there are, and what it inherits. `kept`: systemd has the listeners too."""

    number: int
    count: int
    address: str  # of the parent's socket, an abstract one
    public: int
    admin: int
    kept: bool = False
    key: str = ""  # hex; all workers know requests by it (`pools.quarantine`)

    @property
    def leads(self) -> bool:
        """Whether it does what only one may do."""
        return self.number == LEADER

    @property
    def answers_for(self) -> int:
        """How many workers it tells operators of."""
        return self.count if self.leads else 1


def place_of(environ: MutableMapping[str, str]) -> Place | None:
    """Return the place of this process; None: it is no worker. It stays in the environment, for an upgrade.

    Raises:
        msgspec.DecodeError: the environment says so, and it is not true.
    """
    text = environ.get(VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=Place)


@dataclass(slots=True)
class Group:
    """This worker's end of the channel to its parent. `run` it; who asks before waits for the connection."""

    place: Place
    answers: dict[str, Answer] = field(default_factory=dict)  # what it answers the others
    trouble: str = ""  # why the parent does not answer, for people
    channel: Channel = field(init=False)

    @classmethod
    def join(cls, place: Place) -> Self:
        """Connect to the parent.

        Raises:
            OSError: there is none.
        """
        group = cls(place)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect("\0" + place.address)
        except OSError as error:
            connected.close()
            raise OSError(
                error.errno, error.strerror or str(error), "the parent process"
            ) from error
        connected.setblocking(False)
        group.channel = Channel(connected, group.answers)
        return group

    def named(self, told: Told, *, in_charge: bool) -> Told:
        """Return what this worker tells of itself, with its place."""
        group, number = self.place.address[-8:], self.place.number
        return msgspec.structs.replace(told, group=group, worker=number, in_charge=in_charge)

    async def run(self) -> None:
        """Say who this is, and answer until the parent goes. Cancel: closes the connection."""
        await self.channel.run()
        self.trouble = "the parent process has gone"

    async def meet(self) -> None:
        """Say who this is. Call it once `run` has begun.

        Raises:
            Unanswered: the parent does not want this process.
        """
        await self.channel.open.wait()
        await self.channel.ask("hello", self.place.number, within_s=10.0)

    async def serving(self) -> None:
        """Tell that this worker accepts connections."""
        await self.channel.ask("serving", within_s=10.0)

    async def all_stop(self) -> bool:
        """Return whether the parent has told all workers to stop."""
        return bool(await self.channel.ask("all_stop", within_s=_WITHIN_S))

    async def others_ended(self) -> None:
        """Wait until no other worker runs."""
        await self.channel.ask("others_ended", within_s=_LAST_S)

    def reload_others(self) -> None:
        """Have all other workers read the configuration again, each once it serves; nobody hears whether they did."""
        self.channel.tell("reload_others")

    async def upgrade_others(self) -> str:
        """Have all other workers replaced, one by one; returns what went wrong, empty: nothing."""
        within_s = _UPGRADED_S * self.place.count
        return str(await self.channel.ask("upgrade_others", within_s=within_s))

    async def fellows(self, what: str, *args: Any) -> list[Any]:
        """Ask all other workers; returns the answers of those that gave one."""
        try:
            return list(await self.channel.ask("fellows", what, list(args), within_s=_FELLOWS_S))
        except Unanswered:
            return []

    def tell_fellows(self, what: str, *args: Any) -> None:
        """Have all other workers do something; nobody hears whether they did."""
        self.channel.tell("fellows", what, list(args))


@dataclass(slots=True)
class GroupStore:
    """The parent's `MemoryStore`, as a worker sees it; see `SharedStore`. All processes share one clock."""

    group: Group
    within_s: float = _WITHIN_S
    # Claims that were confirmed too late: asked again, they are ours.
    _confirmed: set[tuple[str, str | None, int]] = field(default_factory=set)

    @property
    def trouble(self) -> str:
        """See `SharedStore`."""
        return self.group.trouble

    async def acquire(self, name: str, holder: str) -> Lease | None:
        """See `SharedStore`."""
        return msgspec.convert(await self._ask("acquire", name, holder), Lease | None)

    async def renew(self, lease: Lease) -> Lease | None:
        """See `SharedStore`."""
        return msgspec.convert(await self._ask("renew", lease), Lease | None)

    async def release(self, lease: Lease) -> None:
        """See `SharedStore`."""
        await self._ask("release", lease)

    async def claim_restart(
        self, backend_id: str, incarnation: str | None, attempt: int = 1
    ) -> bool:
        """See `SharedStore`."""
        claim = backend_id, incarnation, attempt

        def late(claimed: object) -> None:
            if claimed:
                self._confirmed.add(claim)

        claimed = bool(await self._ask("claim_restart", *claim, late=late))
        if claim in self._confirmed:  # by a call before, which had given up
            self._confirmed.discard(claim)
            return True
        return claimed

    async def hold(self, scope: str | None, for_s: float | None = None) -> None:
        """See `SharedStore`."""
        await self._ask("hold", scope, for_s)

    async def lift(self, scope: str | None) -> None:
        """See `SharedStore`."""
        await self._ask("lift", scope)

    async def holds(self) -> Mapping[str | None, float]:
        """See `SharedStore`."""
        return dict(await self._ask("holds"))

    async def beat(
        self, replica_id: str, told: str, keep_s: float, board: Board = Board.REPLICAS
    ) -> Mapping[str, tuple[str, float]]:
        """See `SharedStore`."""
        found = await self._ask("beat", replica_id, told, keep_s, board)
        return msgspec.convert(found, dict[str, tuple[str, float]])

    async def tell(self, log: str, word: str, by: str, told: str, after: int) -> Heard:
        """See `SharedStore`."""
        return msgspec.convert(await self._ask("tell", log, word, by, told, after), Heard)

    async def close(self) -> None:
        """The connection is the group's."""

    async def _ask(self, what: str, *args: Any, late: Late | None = None) -> Any:
        try:
            return await self.group.channel.ask(
                f"store.{what}", *args, within_s=self.within_s, late=late
            )
        except Unanswered as error:
            raise StoreUnavailable(f"the parent process: {error}") from None


@dataclass(slots=True)
class GroupScripts:
    """The parent as what runs the scripts of limits; see `Scripted`."""

    group: Group

    @property
    def trouble(self) -> str:
        """See `Scripted`."""
        return self.group.trouble

    async def ask(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        within_s: float = BUDGET_S,
        late: Late | None = None,
    ) -> Any:
        """See `Scripted`."""
        try:
            reply = await self.group.channel.ask(
                "limits", script.sha, keys, args, within_s=within_s, late=late
            )
        except Unanswered as error:
            raise StoreUnavailable(f"the parent process: {error}") from None
        if not reply:
            raise StoreUnavailable("the parent process is of another version")
        return reply

    def post(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], lost: Lost | None = None
    ) -> None:  # fmt: skip
        """See `Scripted`. If the parent ends before it reads that, all that was counted ends with it."""
        if not self.group.channel.tell("limits", script.sha, keys, args) and lost is not None:
            lost(False)


def store_answers(store: SharedStore, acquired: dict[str, Lease]) -> Answers:
    """Return what the parent answers of its store; `acquired` gets the leases that this worker holds."""

    async def acquire(name: str, holder: str) -> Lease | None:
        lease = await store.acquire(name, holder)
        if lease is not None:
            acquired[name] = lease
        return lease

    async def renew(lease: object) -> Lease | None:
        return await store.renew(msgspec.convert(lease, Lease))

    async def release(lease: object) -> None:
        await store.release(msgspec.convert(lease, Lease))

    async def holds() -> list[tuple[str | None, float]]:
        return [*(await store.holds()).items()]

    async def beat(
        replica_id: str, told: str, keep_s: float, board: str
    ) -> dict[str, tuple[str, float]]:
        return dict(await store.beat(replica_id, told, keep_s, Board(board)))

    return {
        "store.acquire": acquire,
        "store.renew": renew,
        "store.release": release,
        "store.claim_restart": store.claim_restart,
        "store.hold": store.hold,
        "store.lift": store.lift,
        "store.holds": holds,
        "store.beat": beat,
        "store.tell": store.tell,
    }
