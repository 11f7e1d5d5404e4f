"""`Follower`: the messages of one engine, in their order and without a gap, into a mirror. Pure.

A published message can be lost, and nobody says so; its number tells. What is missing is asked for
from the last message that was followed, that one included: if it comes back with the time that it
had, this is the same engine, and nothing but the rest is missing. Any other answer is that of
another process, whose cache was empty when it began.
"""

from __future__ import annotations

from typing import Final

from gateway.prefix.mirror import Mirror
from gateway.wire.kvevents import AllBlocksCleared, Garbled, parse_batch, time_of

# An engine's socket drops what does not fit its queue of 1,000 messages, the last of a replay too.
_SURE: Final = 500


class Follower:
    """Follows one engine. Ask `mirror` only while `knows` is true.

    `whole` tells that the mirror lacks nothing: the engine was followed from its first message on, or
    has emptied its cache since.
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.is_current = False  # all that the engine published is in the mirror
        self.is_late = False  # messages have come faster than they were read for a while
        self.whole = False
        self.losses = 0  # times that blocks had to be forgotten
        self.garbled = 0  # messages that nobody could read
        self.strange = 0  # events of kinds that are not known
        self._last: int | None = None  # number of the last message that was followed
        self._last_at: float | None = None  # its time; None: nobody could read it
        self._verified = False  # the replay under way comes from the same process
        self._replayed = 0  # messages of the replay under way
        self._replayed_to = -1  # up to here, published messages repeat replayed ones

    @property
    def knows(self) -> bool:
        """Whether the mirror shows what the engine holds now."""
        return self.is_current and not self.is_late

    @property
    def seen(self) -> int:
        """How many messages the engine has published, as far as is known."""
        return 0 if self._last is None else self._last + 1

    def disconnected(self) -> None:
        """Note that nobody listens: what is published from now on is missed."""
        self.is_current = False

    def forget(self) -> None:
        """Forget all: what was missed cannot be had."""
        self.losses += len(self.mirror) > 0
        self.mirror.clear()
        self.is_current = self.whole = False
        self._last = self._last_at = None
        self._replayed_to = -1

    # --- published messages -----------------------------------------------------------------------

    def published(self, number: int, payload: bytes) -> bool:
        """Follow a published message; False when it does not follow the last one."""
        if not self.is_current:
            return False
        if number == self.seen:
            self._replayed_to = -1
            self._follow(number, payload)
            return True
        return number <= self._replayed_to and self._is_repeated(payload)

    def begin_with(self, number: int, payload: bytes) -> None:
        """Begin anew with a published message: those before it cannot be had."""
        self.forget()
        self.is_current = True
        self._follow(number, payload)

    def _is_repeated(self, payload: bytes) -> bool:
        at = time_of(payload)
        return at is None or self._last_at is None or at <= self._last_at

    # --- a replay ---------------------------------------------------------------------------------

    def replay_begins(self) -> int:
        """Return the number from which messages are asked for."""
        self._verified, self._replayed = self._last is None, 0
        return self._last or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """Follow a replayed message; False when the replay must be asked for anew."""
        last = self._last
        self._replayed += 1
        if last is None or self._verified:
            if last is not None and number != last + 1:
                return number <= last  # else one was dropped on the way
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
        """Note the end of a replay; False when another must be asked for."""
        if not self._verified:  # it has not published as much: another process
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
