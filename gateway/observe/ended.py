"""Keep the latest requests that ended, for `vllm-gateway explain`.

A request's record is kept as it is, and put into words only when somebody asks. It holds names and
numbers, never a prompt or a reply, in about 1 KB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gateway.core.types import Outcome, RequestRecord

KEPT: Final = 4096  # requests that ended well
TROUBLED_KEPT: Final = 1024  # requests of callers that did not
STRANGERS_KEPT: Final = 256  # failed requests without a valid key

_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12


class EndedRequests:
    """Records of ended requests. Successes push out no failures, and strangers' failures no caller's."""

    def __init__(self, before_reading: Callable[[], None] = lambda: None) -> None:
        """`before_reading` is called before each reading: it hands over the requests that ended just now."""
        self._before_reading = before_reading
        self._well: deque[RequestRecord] = deque(maxlen=KEPT)
        self._troubled: deque[RequestRecord] = deque(maxlen=TROUBLED_KEPT)
        self._strangers: deque[RequestRecord] = deque(maxlen=STRANGERS_KEPT)

    def __len__(self) -> int:
        return len(self._well) + len(self._troubled) + len(self._strangers)

    def __iter__(self) -> Iterator[RequestRecord]:
        """Go through them as they are now, in no order."""
        self._before_reading()
        return iter([*self._well, *self._troubled, *self._strangers])

    def posted(self, settled: Sequence[RequestRecord]) -> None:
        """Keep records that were settled. The last listener: it drops what is large in them."""
        for record in settled:
            sent = record.sent
            if sent is not None:
                record.expected_cached_tokens, record.sent = sent.cached_tokens, None
            record.taken = None
            if record.outcome is _OK:
                self._well.append(record)
            elif record.caller is not None:
                self._troubled.append(record)
            else:
                self._strangers.append(record)

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; of several with its id the newest, a caller's before a stranger's."""
        found = (each for each in self if each.id == request_id)
        return max(
            found, key=lambda each: (each.caller is not None, each.received_at), default=None
        )
