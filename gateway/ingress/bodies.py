"""Large JSON bodies on the client's side: no more of them than memory allows, and no work in one piece.

    wait for room --> read and scan, part by part --> parse beside the loop --> dropped at the first token
    (not read meanwhile)   (one step of one body a turn)

A small body (`wire.small`) needs none of this. All others together hold at most `limits.bodies`, and
those of one key at most as much as they leave for other keys: alone up to half of it.

A body that does not tell its length is let in where the largest would have room, and counts as
`UNTOLD_BYTES`. Once it is longer, it waits for the room of the largest, before all that is new. That
never ends in a deadlock: the body that was let in last found room for a whole body beside all others, so it
gets that room at the latest once all others wait. Without it, the same holds for the one before it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.config.limits import LimitsConfig
from gateway.config.models import Config
from gateway.config.units import format_size
from gateway.core.aio import InTime, beside
from gateway.core.errors import GatewayError, Overloaded, TooManyWaiting
from gateway.core.types import Call, Caller, ShedReason
from gateway.routing.catalog import Catalog
from gateway.wire.calls import EndpointSpec, form_call, parse_at_once, parse_call
from gateway.wire.large import completed
from gateway.wire.scan import BodyScan
from gateway.wire.small import SMALL_BODY_BYTES

if TYPE_CHECKING:
    from gateway.ingress.downstream import Downstream


UNTOLD_BYTES: Final = 1 << 20  # few conversations are longer; with images they are


def _parse(spec: EndpointSpec, scan: BodyScan, content_type: bytes) -> Call:
    return completed(parse_call(spec, scan.skim(), content_type), scan)


class Hold:
    """Room for one body. `release` gives it back, and may be called at any time."""

    __slots__ = ("_bodies", "body", "key", "size")

    def __init__(self, bodies: Bodies, key: str) -> None:
        self._bodies: Bodies | None = bodies
        self.key = key
        self.size = 0
        self.body: bytearray | None = None  # emptied when the room is given back

    def shrink(self, size: int) -> None:
        """Give back what the body does not need after all."""
        if self._bodies is not None:
            self._bodies.give_back(self, self.size - size)
            self.size = size

    def release(self) -> None:
        """Drop the body, whoever still refers to it, and give its room back."""
        bodies, self._bodies = self._bodies, None
        body, self.body = self.body, None
        if body is not None:
            with suppress(BufferError):  # it is being sent to a backend that has answered already
                body.clear()
        if bodies is not None:
            bodies.give_back(self, self.size)


class _Wait(NamedTuple):
    """A body that waits for room: it goes on where `needs` would fit, and takes `size` of it."""

    hold: Hold
    size: int
    needs: int
    waiter: asyncio.Future[None]


@contextmanager
def _unread(down: Downstream) -> Iterator[None]:
    """Read nothing of a client meanwhile."""
    down.pause_reading()
    try:
        yield
    finally:
        down.resume_reading()


def call_at_hand(down: Downstream, limit_bytes: int) -> Call | None:
    """Return what a small JSON body asks for that came with its head; None when it must be waited for.

    Raises:
        RequestError, UnsupportedMediaType: see `parse_call`.
    """
    body, fields = down.body, down.fields
    if down.spec.multipart or body.came_bytes > limit_bytes or b"content-encoding" in fields:
        return None
    short = body.at_hand()
    if short is None:
        return None
    call = parse_at_once(down.spec, short, fields.get(b"content-type", b""))
    if call is None:
        body.put_back(short)
    return call


class Bodies:
    """What all large bodies hold. One for the process."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._limit_bytes = 0
        self._by_key: Counter[str] = Counter()
        self._waiting: list[_Wait] = []
        self._turn = asyncio.Lock()  # of the one body that is scanned in a turn of the loop

    def filled(self, limits: LimitsConfig) -> tuple[int, int]:
        """Return how many bytes are held, and the most that may be."""
        return self.held_bytes, limits.all_bodies

    async def read_call(
        self, down: Downstream, caller: Caller, config: Config, catalog: Callable[[], Catalog]
    ) -> Call:
        """Read what is asked: a JSON body, or as much of a form as names its model.

        The catalog judges the model of a large JSON body as soon as that is known.

        A large one waits for room; its client's time stands still meanwhile. `Downstream.drop_body`
        gives the room back.

        Raises:
            UnsupportedMediaType, BodyTooLarge, BodyTimeout: see `Downstream.read_body`, `open_upload`.
            Overloaded, TooManyWaiting: there was no room in time (503, 429).
            RequestError: see `BodyScan`, `parse_call` and `Catalog.admit`.
        Cancel: what is being parsed is parsed to its end.
        """
        limits, body = config.limits, down.body
        if down.spec.multipart:
            return await self._read_form(down, caller, config)
        short = await down.read_body(limits.max_body, config.timeouts.body)
        if short is not None:
            call = parse_at_once(down.spec, short, down.content_type)
            if call is not None:
                return call
            body.put_back(short)
        with _unread(down):
            size = body.came_bytes if body.complete else body.content_length
            hold = await self.take(caller.key_id, size, limits, body.left_s)
        down.hold = hold
        scan = BodyScan()
        hold.body = scan.body
        while (part := await body.next_part()) is not None:
            if body.came_bytes > hold.size:
                with _unread(down):
                    await self.widen(hold, limits.max_body, body.left_s)
            scan.feed(part)
            has_room = size is not None or hold.size >= limits.max_body
            with nullcontext() if has_room else _unread(down):  # others' steps may take long
                await self._scan(scan)
            if (model := scan.text("model")) is not None:
                catalog().admit(model, caller)
        scan.end()
        await self._scan(scan)
        hold.shrink(len(scan.body))
        return await beside(partial(_parse, down.spec, scan, down.content_type))

    async def _read_form(self, down: Downstream, caller: Caller, config: Config) -> Call:
        """Read a form up to its model. Where that stands behind the file, all of it is held, and needs room."""
        limits = config.limits
        upload = down.open_upload(limits.max_audio_body, config.timeouts.body)
        size = min(upload.content_length or limits.max_audio_body, limits.all_bodies)
        if size > SMALL_BODY_BYTES and not upload.is_at_hand():
            left_s = upload.left_s
            upload.pause()
            try:
                down.hold = await self.take(caller.key_id, size, limits, left_s)
            finally:
                upload.resume()
        head = await upload.read_head()
        if down.hold is not None:
            down.hold.shrink(min(len(head), size))
        return form_call(down.spec, upload.form, head, down.content_type)

    async def _scan(self, scan: BodyScan) -> None:
        goes_on = True
        while goes_on:
            async with self._turn:
                goes_on = scan.step()
                await asyncio.sleep(0)  # all else on the loop has its turn

    async def take(self, key: str, size: int | None, limits: LimitsConfig, wait_s: float) -> Hold:
        """Take room for a body, waiting for it at most `wait_s`; None: its size is not known.

        Raises:
            TooManyWaiting: the key's own bodies leave no room (429).
            Overloaded: those of all keys do not (503).
        Cancel: nothing is held.
        """
        self._limit_bytes = limits.all_bodies
        hold = Hold(self, key)
        needs = limits.max_body if size is None else size
        counts = min(needs, UNTOLD_BYTES) if size is None else size
        entry = _Wait(hold, counts, needs, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await self._let(entry, wait_s)
        except BaseException:
            hold.release()
            raise
        return hold

    async def widen(self, hold: Hold, size: int, wait_s: float) -> None:
        """Have a body hold so much in place of less; it comes before those that wait for all of their room.

        Raises:
            TooManyWaiting, Overloaded: see `take`. It holds what it held.
        Cancel: likewise, or more.
        """
        more = size - hold.size
        place = sum(1 for each in self._waiting if each.hold.size)
        entry = _Wait(hold, more, more, asyncio.get_running_loop().create_future())
        self._waiting.insert(place, entry)
        await self._let(entry, wait_s)

    async def _let(self, entry: _Wait, wait_s: float) -> None:
        self._let_in()
        try:
            async with InTime(wait_s):
                await entry.waiter
        except TimeoutError:
            if entry in self._waiting:
                raise self._refusal(entry, wait_s) from None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._let_in()

    def give_back(self, hold: Hold, size: int) -> None:
        """Give back room; who waited for it goes on."""
        self.held_bytes -= size
        self._by_key[hold.key] -= size
        if self._by_key[hold.key] <= 0:
            del self._by_key[hold.key]
        self._let_in()

    def _let_in(self) -> None:
        """Let in the bodies that wait, the longest first; one of a key over its share holds up no other."""
        still = []
        blocked = False
        for entry in self._waiting:
            over_share = self._is_over_share(entry)
            if blocked or over_share or self.held_bytes + entry.needs > self._limit_bytes:
                still.append(entry)
                blocked = blocked or not over_share
                continue
            entry.hold.size += entry.size
            self.held_bytes += entry.size
            self._by_key[entry.hold.key] += entry.size
            if not entry.waiter.done():  # else it was cancelled, and gives back at once
                entry.waiter.set_result(None)
        self._waiting = still

    def _is_over_share(self, entry: _Wait) -> bool:
        own = entry.hold.size
        mine = self._by_key.get(entry.hold.key, 0)
        left = self._limit_bytes - self.held_bytes + own
        return mine > own and mine + entry.needs > left

    def _refusal(self, entry: _Wait, wait_s: float) -> GatewayError:
        retry_after_s = random.uniform(1.0, 3.0)
        mine, limit = self._by_key.get(entry.hold.key, 0), format_size(self._limit_bytes)
        waited = f"There was no room within {wait_s:.0f} s. Send fewer large requests at a time."
        if self._is_over_share(entry):
            return TooManyWaiting(
                f"Request bodies of this API key already hold {mine / 2**20:.0f} MiB, and one key may "
                f"hold at most as much of `limits.bodies` ({limit}) as it leaves for others. {waited}",
                code="too_many_body_bytes",
                retry_after_s=retry_after_s,
            )
        return Overloaded(
            f"Request bodies already hold {self.held_bytes / 2**20:.0f} MiB of `limits.bodies` "
            f"({limit}); this one needs {entry.needs / 2**20:.1f} MiB. {waited}",
            reason=ShedReason.BODIES,
            retry_after_s=retry_after_s,
        )
