"""`Follower`: apply one engine's KV event messages to a mirror, in order and without gaps. Pure.

A message can be lost without notice. A jump in the sequence numbers shows it. Then a replay is requested
that begins with the last message that was applied. If that message comes back with the same timestamp, the
engine is the same process, and only the messages after it were missing. Any other answer comes from
another process, which began with an empty cache.
"""

from __future__ import annotations

from typing import Final

from gateway.prefix.mirror import Mirror
from gateway.wire.kvevents import AllBlocksCleared, Garbled, parse_batch, time_of

# An engine's socket drops what does not fit its queue of 1,000 messages, the last of a replay too.
_SURE: Final = 500


class Follower:
    """Follows one engine. Read `mirror` only while `knows` is true.

    `whole` is true if the mirror lacks nothing: the engine was followed from its first message on, or has
    cleared its cache since then.
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.is_current = False  # everything that the engine published is in the mirror
        self.is_late = False  # messages come faster than they are applied
        self.whole = False
        self.losses = 0  # times that the mirror was dropped
        self.garbled = 0  # messages that could not be decoded
        self.strange = 0  # events of an unknown kind
        self._last: int | None = None  # number of the last message that was applied
        self._last_at: float | None = None  # its timestamp; None: it could not be decoded
        self._verified = False  # the current replay comes from the same process
        self._replayed = 0  # messages of the current replay
        self._replayed_to = -1  # published messages up to this number repeat replayed ones

    @property
    def knows(self) -> bool:
        """Whether the mirror shows what the engine holds now."""
        return self.is_current and not self.is_late

    @property
    def seen(self) -> int:
        """How many messages the engine has published, as far as is known."""
        return 0 if self._last is None else self._last + 1

    def disconnected(self) -> None:
        """Note that the connection is down: messages published from now on are missed."""
        self.is_current = False

    def forget(self) -> None:
        """Drop everything: the missing messages cannot be replayed."""
        self.losses += len(self.mirror) > 0
        self.mirror.clear()
        self.is_current = self.whole = False
        self._last = self._last_at = None
        self._replayed_to = -1

    # --- published messages -----------------------------------------------------------------------

    def published(self, number: int, payload: bytes) -> bool:
        """Apply a published message; return False if it is not the next one."""
        if not self.is_current:
            return False
        if number == self.seen:
            self._replayed_to = -1
            self._follow(number, payload)
            return True
        return number <= self._replayed_to and self._is_repeated(payload)

    def begin_with(self, number: int, payload: bytes) -> None:
        """Start over with a published message: those before it cannot be replayed."""
        self.forget()
        self.is_current = True
        self._follow(number, payload)

    def _is_repeated(self, payload: bytes) -> bool:
        at = time_of(payload)
        return at is None or self._last_at is None or at <= self._last_at

    # --- a replay ---------------------------------------------------------------------------------

    def replay_begins(self) -> int:
        """Return the sequence number from which to request a replay."""
        self._verified, self._replayed = self._last is None, 0
        return self._last or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """Apply a replayed message; return False if the replay must be requested again."""
        last = self._last
        self._replayed += 1
        if last is None or self._verified:
            if last is not None and number != last + 1:
                return number <= last  # if it is higher, one was dropped on the way
        elif number == last and time_of(payload) == self._last_at:
            self._verified = True
            return True
        else:
            self.forget()
            if 0 < number <= last:
                return False
        self._verified = True
        self._follow(number, payload)
        return True

    def replay_ended(self) -> bool:
        """Note the end of a replay; return False if another one must be requested."""
        if not self._verified:  # it has published fewer messages: another process
            self.forget()
            return False
        if self._replayed > _SURE:
            return False
        self.is_current = True
        self.whole = self.whole or self._last is None
        self._replayed_to = -1 if self._last is None else self._last
        return True

    def _follow(self, number: int, payload: bytes) -> None:
        first, self._last = self._last is None, number
        try:
            batch = parse_batch(payload)
        except Garbled:
            self.garbled += 1
            self.losses += len(self.mirror) > 0
            self.mirror.clear()
            self.whole, self._last_at = False, None
            return
        self._last_at = batch.at
        self.strange += batch.strange
        self.mirror.apply(batch.events)
        if first:
            self.whole = number == 0
        if any(isinstance(each, AllBlocksCleared) for each in batch.events):
            self.whole = True
