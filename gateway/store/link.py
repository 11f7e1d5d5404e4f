"""The way to Redis: one owner sends what others ask, all that waits in one round trip.

    ask --> waiting --> the owner: connect, send a batch, give each its reply

Only the owner touches the connection. So whoever asks may be cancelled or give up at any moment, and no
reply ever reaches another than who asked for it: what is interrupted in the middle closes the connection.

Who asks waits `BUDGET_S` as a rule. A batch that takes longer is late: until it is over, all are refused at once.
But the owner listens for `LISTENS_S` in all, for `late` and for those who have more patience. After `_FAILURES` in a
row only they ask, and one try each `_AGAIN_S`. Each further second of a late batch counts as another failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis import exceptions as failures
from redis.asyncio.sentinel import MasterNotFoundError

from gateway.core.aio import Clock, InTime, in_time, start
from gateway.store.address import Client
from gateway.store.scripts import BUDGET_S, Late, Lost, Script
from gateway.store.shared import StoreUnavailable

log = logging.getLogger("gateway.store")

CONNECT_S: Final = 2.0  # names are looked up and TLS is agreed meanwhile, and nobody waits for that
LISTENS_S: Final = 3.0  # for replies that are late
_FAILURES: Final = 3
_AGAIN_S: Final = 1.0
# Once it has refused no write for so long it is taken to be well.
_SURE_S: Final = 3.0
_BATCH: Final = 128
_MOST_WAITING: Final = 4096

_CODE: Final = re.compile(r"[A-Z]{3,20}\b")
_SLOW: Final = "it did not answer within {:.0f} ms"
LOST: Final = (failures.RedisError, failures.RedisClusterException, OSError, TimeoutError)
# With these a Redis refuses what it would have to keep, and answers the rest.
_WRITES_REFUSED: Final = (failures.OutOfMemoryError, failures.ReadOnlyError)
_DENIED: Final = "its user may not run scripts or use keys that begin with gw1:"
_DENIED_WITHIN: Final = "can't run this command"  # how Redis 7.0 tells it of a command in a script
_WORDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (failures.AuthenticationError, "it rejects the user or password"),
    (failures.NoPermissionError, _DENIED),
    (failures.ReadOnlyError, "it is a replica, which takes no writes"),
    (failures.OutOfMemoryError, "its memory is full (maxmemory)"),
    (failures.BusyLoadingError, "it is still loading its data"),
    (MasterNotFoundError, "no Sentinel knows a master of that name"),
    (failures.ClusterDownError, "its cluster is down"),
    (failures.RedisClusterException, "its cluster cannot be reached"),
    (failures.TimeoutError, _SLOW),
    (TimeoutError, _SLOW),
    (ssl.SSLError, "the TLS handshake failed"),
    (socket.gaierror, "its host name cannot be resolved"),
    (ConnectionRefusedError, "the connection was refused"),
    (FileNotFoundError, "its socket does not exist"),
    (PermissionError, "this user may not write to its socket"),
)


@dataclass(slots=True)
class _Asked:
    """One call. `reply` gets what Redis said, or why it did not."""

    script: Script
    keys: Sequence[str]
    args: Sequence[str | int]
    reply: asyncio.Future[Any]
    lost: Lost | None = None
    late: Late | None = None


@dataclass(slots=True)
class Link:
    """See the module, and `store.scripts.Scripted`. One event loop; `close` ends it."""

    client: Client
    clock: Clock
    trouble: str = ""  # why it does not answer, for people; empty: it does, as far as is known
    budget_s: float = BUDGET_S  # for what is sent at once; then it is late
    listens_s: float = LISTENS_S  # for what is late
    _waiting: deque[_Asked] = field(default_factory=deque)
    _owner: asyncio.Task[None] | None = None
    _connected: bool = False
    _sent: set[str] = field(default_factory=set)  # scripts, as text: this Redis knows them
    _under_way: Sequence[_Asked] = ()
    _late: bool = False  # what is under way
    _failures: int = 0  # in a row
    _again_at: float = 0.0
    _lost_at: float = 0.0
    _refused_at: float = -math.inf  # when it last refused a write
    _closed: bool = False

    async def ask(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        within_s: float = BUDGET_S,
        late: Late | None = None,
    ) -> Any:
        """See `Scripted`."""
        patient, loop = within_s > self.budget_s, asyncio.get_running_loop()
        asked = _Asked(script, keys, args, loop.create_future(), late=late)
        if (self._late and not patient) or not self._put(asked, patient=patient):
            raise StoreUnavailable(self.trouble or "too many calls wait for it")
        # A third of what `asyncio.timeout` takes: each request with limits waits here.
        end = in_time(loop, within_s, self._give_up, asked.reply, within_s)
        try:
            reply = await asked.reply
        except asyncio.CancelledError:
            if not asked.reply.cancelled():  # it came just as who asked left
                _give(asked, asked.reply.result())
            raise
        finally:
            end.cancel()
        if isinstance(reply, StoreUnavailable):
            raise reply
        return reply

    def _give_up(self, reply: asyncio.Future[Any], after_s: float) -> None:
        if not reply.done():
            trouble = "" if self._late else self.trouble
            reply.set_result(StoreUnavailable(trouble or _SLOW.format(after_s * 1000)))

    def post(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], lost: Lost | None = None
    ) -> None:  # fmt: skip
        """See `Scripted`."""
        reply = asyncio.get_running_loop().create_future()
        if not self._put(_Asked(script, keys, args, reply, lost)) and lost is not None:
            lost(False)

    def _put(self, asked: _Asked, *, patient: bool = False) -> bool:
        """Have a call wait for the owner; False where it would wait in vain."""
        shut = self._failures >= _FAILURES and self.clock.now() < self._again_at and not patient
        if self._closed or shut or len(self._waiting) >= _MOST_WAITING:
            return False
        self._waiting.append(asked)
        if self._owner is None or self._owner.done():
            loop = asyncio.get_running_loop()
            self._owner = start(self._own(), name="shared store", loop=loop)
        return True

    async def close(self) -> None:
        """End the owner, and close the connection."""
        self._closed = True
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner])
        await self._drop()

    # --- the owner ----------------------------------------------------------------------------------

    async def _own(self) -> None:
        """Send what waits until nothing does."""
        while self._waiting:
            batch: list[_Asked] = []
            try:
                if not self._connected:
                    async with asyncio.timeout(CONNECT_S):
                        await self.client.ping()
                    self._connected = True
                batch = self._take()
                if batch:
                    await self._exchange(batch)
                if not self._late:
                    self._answers()
            except LOST as error:
                await self._fails(error, batch)
            finally:
                self._late = False

    async def _exchange(self, batch: Sequence[_Asked]) -> None:
        """Send a batch, and give each its reply, late or not."""
        loop, self._under_way = asyncio.get_running_loop(), batch
        late = in_time(loop, self.budget_s, self._is_late, batch)
        try:
            async with InTime(self.listens_s):
                await self._send(batch)
        finally:
            late.cancel()
            self._under_way = ()

    def _is_late(self, batch: Sequence[_Asked]) -> None:
        """Count a failure, and another one each second that a batch takes."""
        if self._under_way is batch:
            self._late = True
            self._failed(_SLOW.format(self.budget_s * 1000))
            in_time(asyncio.get_running_loop(), _AGAIN_S, self._is_late, batch)

    def _take(self) -> list[_Asked]:
        """Take from what waits; whoever gave up meanwhile is left out, so that nothing is done for nobody."""
        batch: list[_Asked] = []
        while self._waiting and len(batch) < _BATCH:
            asked = self._waiting.popleft()
            if not asked.reply.done():
                batch.append(asked)
        return batch

    async def _send(self, batch: Sequence[_Asked]) -> None:
        """Give each what Redis replies.

        Raises:
            RedisError: it refused one of them, or all; the others have their replies.
        """
        unknown, refused = list[_Asked](), None
        for asked, reply in await self._replies(batch, by_name=True):
            if isinstance(reply, failures.NoScriptError):
                unknown.append(asked)  # since it started
            else:
                refused = _give(asked, reply) or refused
        if unknown:  # the library may have connected to another server, which knows none
            self._sent.clear()
        for asked, reply in await self._replies(unknown, by_name=False) if unknown else ():
            refused = _give(asked, reply) or refused
        if refused is not None:
            raise refused

    async def _replies(
        self, batch: Sequence[_Asked], *, by_name: bool
    ) -> list[tuple[_Asked, object]]:
        pipeline = self.client.pipeline(transaction=False)
        for each in batch:
            named = by_name and each.script.sha in self._sent
            how = ("EVALSHA", each.script.sha) if named else ("EVAL", each.script.text)
            self._sent.add(each.script.sha)
            pipeline.execute_command(*how, len(each.keys), *each.keys, *each.args)
        return [*zip(batch, await pipeline.execute(raise_on_error=False), strict=True)]

    def _answers(self) -> None:
        now = self.clock.now()
        if now - self._refused_at < _SURE_S:
            return
        if self._failures >= _FAILURES:
            away_s = now - self._lost_at
            log.info(
                "the shared store answers again, after %.0f s",
                away_s,
                extra={"event": "store_found"},
            )
        self._failures, self.trouble = 0, ""

    async def _fails(self, error: Exception, batch: Sequence[_Asked]) -> None:
        self._failed(why(error, self.budget_s))
        if isinstance(error, _WRITES_REFUSED):
            self._refused_at = self.clock.now()
        unsent: list[_Asked] = []
        if self._failures >= _FAILURES:
            unsent = [*self._waiting]
            self._waiting.clear()
        for may_have_run, lost in ((True, batch), (False, unsent)):
            for asked in lost:
                if asked.lost is not None and not asked.reply.done():
                    asked.lost(may_have_run)
                _give(asked, StoreUnavailable(self.trouble))
        await self._drop()

    def _failed(self, trouble: str) -> None:
        """Note that a batch failed, or is late."""
        self.trouble, now = trouble, self.clock.now()
        self._failures += 1
        self._again_at = now + _AGAIN_S
        if self._failures == 1:
            self._lost_at = now
        if self._failures == _FAILURES:
            log.warning(
                "the shared store (`redis`) does not answer: %s; requests are served as before,"
                " and no backend is restarted until it does",
                trouble,
                extra={"event": "store_lost"},
            )

    async def _drop(self) -> None:
        """Close the connection: another one may lead to another server."""
        self._connected = False
        self._sent.clear()
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(BUDGET_S):
                await self.client.aclose()


def _give(asked: _Asked, reply: object) -> failures.RedisError | None:
    """Give a reply to who asked, but for what Redis itself says is wrong: that is returned."""
    if isinstance(reply, failures.RedisError):
        return reply
    if not asked.reply.done():
        asked.reply.set_result(reply)
    elif asked.late is not None and not isinstance(reply, StoreUnavailable):
        asked.late(reply)
    return None


def why(error: BaseException | None, budget_s: float) -> str:
    """Return why Redis does not answer, for people: nothing of the URL, nothing of what it said but its code.

    `budget_s` is how long a call may take.
    """
    first = error
    while error is not None:
        for kind, words in _WORDS:
            if isinstance(error, kind):
                return words.format(budget_s * 1000)
        error = error.__cause__ or error.__context__
    if isinstance(first, failures.ResponseError) and _DENIED_WITHIN in str(first):
        return _DENIED
    code = _CODE.match(str(first)) if isinstance(first, failures.ResponseError) else None
    return f"it answers with the error {code[0]}" if code else "it cannot be reached"
