"""What was answered to changes that had an Idempotency-Key: asked again, they are answered again, not done again."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from gateway.admin.endpoint import Problem

HEADER: Final = "idempotency-key"
REPLAYED: Final = "idempotency-replayed"
KEPT_S: Final = 3600.0
MOST: Final = 1000
MOST_BYTES: Final = 4 * 1024 * 1024
KEY: Final = "^[!-~]{1,255}$"


@dataclass(slots=True)
class _Kept:
    fingerprint: bytes
    at: float
    response: Response | None = None  # None: it is being carried out

    @property
    def size(self) -> int:
        return 0 if self.response is None else len(self.response.body)


class Replays:
    """The answers of the last hour, bounded in number and bytes; the oldest go first. One owner."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._bytes = 0

    def begin(self, who: str, key: str, fingerprint: bytes) -> Response | None:
        """Return what was answered to the same request; None: it is to be carried out, and then `end`ed.

        Raises:
            Problem: the key is no key (400), was that of another request (422), or of one under way (409).
        """
        if not re.fullmatch(KEY, key):
            detail = "Idempotency-Key must have 1 to 255 printable ASCII characters without spaces."
            raise Problem(HTTPStatus.BAD_REQUEST, "bad_parameter", detail)
        self._forget_old()
        kept = self._kept.get((who, key))
        if kept is None:
            self._kept[who, key] = _Kept(fingerprint, self._now())
            return None
        if kept.fingerprint != fingerprint:
            detail = "This Idempotency-Key was sent with another request. Use a new one for each."
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency_key_reused", detail)
        if kept.response is None:
            detail = "The request with this Idempotency-Key is being carried out. Ask again soon."
            headers = {"retry-after": "1"}
            raise Problem(HTTPStatus.CONFLICT, "idempotency_key_in_use", detail, headers=headers)
        return kept.response

    def end(self, who: str, key: str, response: Response | None) -> None:
        """Keep the answer; None, or a failure of ours: the request may be tried again."""
        kept = self._kept.get((who, key))
        if kept is None:
            return
        if response is None or response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            del self._kept[who, key]
            return
        kept.response = response
        self._bytes += kept.size
        self._forget_old()

    def _forget_old(self) -> None:
        horizon = self._now() - KEPT_S
        for name, kept in [*self._kept.items()]:
            over = len(self._kept) > MOST or self._bytes > MOST_BYTES
            if not over and kept.at > horizon:
                return
            if kept.response is not None:
                del self._kept[name]
                self._bytes -= kept.size
