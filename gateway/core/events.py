"""What the supervisor did and why: the list that operators read, each entry with its evidence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from gateway.core.aio import Clock

_KEPT: Final = 1000


class EventKind(Enum):
    """What happened; closed, because it is a metric label and an event's name in the log."""

    LAUNCH = "launch"  # a start began; nothing ran before
    RESTART = "restart"  # a restart began
    STARTED = "started"  # a start came to its good end
    START_FAILED = "start_failed"
    EXITED = "exited"
    SUSPECT = "suspect"  # there is evidence that it does not work; or there is none any more
    REMEDY = "remedy"  # the command line was changed
    SUSPENDED = "suspended"  # it is left alone until an operator clears it
    LAUNCH_FAILED = "launch_failed"  # its launcher could not do it, or another gateway claimed it
    ADAPTER = "adapter"  # an adapter was loaded
    ADAPTER_FAILED = "adapter_failed"
    STOPPED = "stopped"
    LEFT_BEHIND = "left_behind"  # a launched server runs on, and nobody is to stop it
    QUARANTINED = "quarantined"  # a request is refused that was present as two backends died
    CANARY = "canary"  # what was found of a revision on trial
    MOVED = "moved"  # streams went on elsewhere, as it is drained
    HOLD = "hold"  # an operator holds restarts, or lets them go on
    OPERATOR = "operator"  # an operator's other verbs
    UPGRADE = "upgrade"  # a new process of the gateway took over
    UPGRADE_FAILED = "upgrade_failed"  # none could: the old one goes on


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `detail` is a sentence with the evidence; `label` a closed word.

    `number` counts events, those of the gateways before too; `Events` gives it.
    """

    at: float  # wall time, seconds since the epoch; it stays what it was when the clock is set
    kind: EventKind
    backend_id: str  # pool/name; a pool, or empty, for what concerns several
    label: str  # the cause, remedy or class, as a machine reads it
    detail: str
    number: int = field(default=0, compare=False)


class Events:
    """The newest events. Listeners are called synchronously and must not raise."""

    def __init__(self) -> None:
        self.on_event: list[Callable[[Event], None]] = []
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._last = 0  # number

    def tell(self, event: Event) -> None:
        """Keep an event, and tell the listeners."""
        event = self._numbered(event)
        for listener in self.on_event:
            listener(event)

    def recall(self, event: Event) -> None:
        """Keep an event of a gateway before this one; no listener hears of it again."""
        self._numbered(event)

    def note(self, clock: Clock, kind: EventKind, backend_id: str, label: str, detail: str) -> None:
        """Tell an event of this moment."""
        self.tell(Event(clock.wall(), kind, backend_id, label, detail))

    def _numbered(self, event: Event) -> Event:
        """Keep an event under the next number, or its own if that is larger."""
        self._last = max(self._last + 1, event.number)
        event = replace(event, number=self._last)
        self._kept.append(event)
        return event

    def newest(self) -> Iterator[Event]:
        """Go through what is kept, the newest first."""
        return reversed(self._kept)
