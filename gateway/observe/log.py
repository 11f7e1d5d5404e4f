"""What the gateway logs: one access line per request, and event lines.

Both are JSON, a line each, on standard output; event lines are text for a human where that is a
terminal. Both begin with `ts`, `level` and `event`. A line about one request has its `id`, a line about a client its
address as `client`. An access line is the event `request`. It has exactly the fields of `AccessLine`: no prompt,
body, header, URL, key. Any other line has a stable `event` name, a sentence, and fields that the code chose.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.config.log import LogConfig, LogFormat
from gateway.core.aio import Clock
from gateway.core.endings import Barrier
from gateway.core.printable import printable
from gateway.core.traffic import Fallback
from gateway.core.types import Outcome, RequestRecord
from gateway.observe.instruments import UNKNOWN
from gateway.observe.outlet import Outlet
from gateway.observe.redact import redact, safe_traceback

_MILLIS: Final = tuple(f"{millis:03d}Z" for millis in range(1000))
_MAX_MESSAGE: Final = 4096  # characters of one event's sentence

# Attributes that every LogRecord has; what `extra` added is the rest.
_STANDARD: Final = frozenset(
    vars(logging.LogRecord("", 0, "", 0, "", None, None)) | {"message": 0, "asctime": 0}
)

_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12
# Of requests that failed, and not by their caller. All others are ordinary.
_LEVELS: Final = {
    Outcome.SHED: "WARNING",
    Outcome.BACKEND_ERROR: "WARNING",
    Outcome.BACKEND_TIMEOUT: "WARNING",
    Outcome.STREAM_BROKEN: "WARNING",
    Outcome.TIME_LIMIT: "WARNING",
    Outcome.SHUTDOWN: "WARNING",
    Outcome.BUG: "ERROR",
    None: "ERROR",  # settling makes it a bug
}
_LIBRARY: Final = "library"  # the event of lines that are not our own


class AccessLine(msgspec.Struct, frozen=True, gc=False):
    """The access log's allow-list. Times are seconds, rounded to microseconds."""

    ts: str  # RFC 3339, UTC: when the request ended
    level: str
    event: str  # request
    id: str
    client: str | None  # address, behind trusted proxies; null on a UNIX socket
    key_id: str | None
    tenant: str | None
    model: str | None
    pool: str | None  # that answered
    fallback: Fallback | None  # it stood in for another one
    backend: str | None
    revision: str | None
    adapter: str | None
    endpoint: str
    stream: bool
    outcome: str | None
    status: int
    code: str | None
    queue_s: float
    ttft_s: float | None
    duration_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    usage_source: str | None
    attempts: int
    resumed: int  # how often another backend went on with the stream
    not_resumed: Barrier | None  # why nobody did, where it was cut short
    engine_request_id: str | None  # of the last attempt; vLLM logs `chatcmpl-<it>`, `cmpl-<it>` ...
    bytes_out: int
    client_retry: int


class AccessLog:
    """Makes one line per request; the outlet writes them off the loop. A full queue drops and counts."""

    def __init__(self, outlet: Outlet, clock: Clock, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._outlet = outlet
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode_lines
        self._second = 0.0
        self._prefix = ""

    def write(self, settled: Sequence[RequestRecord]) -> None:
        """Queue the lines of settled requests."""
        if self.enabled and settled:
            ahead_s = self._clock.wall() - self._clock.now()
            line = self._line
            lines = self._encode([line(each, ahead_s) for each in settled])
            self._outlet.put(lines, len(settled))

    def wake(self) -> None:
        """Have the queued lines written now."""
        if self._outlet.waiting:
            self._outlet.wake()

    def _line(self, record: RequestRecord, ahead_s: float) -> AccessLine:
        caller, usage, pool = record.caller, record.usage, record.pool
        backend, received_at, first_at = record.backend_id, record.received_at, record.first_byte_at
        ended_at = record.ended_at or received_at
        outcome, name = record.outcome, None
        if backend is not None:
            of, _, name = backend.rpartition("/")
            name = name if of == pool else None  # a backend of the pool that could not take it
        return AccessLine(
            self._time(ended_at + ahead_s),
            "INFO" if outcome is _OK else _LEVELS.get(outcome, "INFO"),
            "request",
            record.id,
            record.client,
            caller.key_id if caller is not None else None,
            caller.tenant if caller is not None else None,
            record.model,
            pool,
            record.fallback,
            name,
            record.revision or None,
            record.adapter,
            UNKNOWN if record.endpoint is None else record.endpoint._value_,
            record.stream,
            outcome._value_ if outcome is not None else None,
            record.status,
            record.error_code,
            _micros(record.queue_s) if record.queue_s else 0.0,
            _micros(first_at - received_at) if record.stream and first_at is not None else None,
            _micros(ended_at - received_at),
            usage.prompt_tokens if usage is not None else None,
            usage.completion_tokens if usage is not None else None,
            usage.cached_tokens if usage is not None else None,
            usage.source._value_ if usage is not None else None,
            record.attempts,
            record.resumed,
            record.not_resumed,
            record.engine_id or None,
            record.bytes_out,
            record.client_retry,
        )

    def _time(self, wall: float) -> str:
        """Return a wall time as text; its seconds are formatted once a second, not once a line."""
        past_s = wall - self._second
        if not 0.0 <= past_s < 1.0:
            self._second = wall // 1.0
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(wall))
            past_s = wall - self._second
        return self._prefix + _MILLIS[int(past_s * 1000)]


def _micros(seconds: float) -> float:
    """Return the time in whole microseconds; a third of what `round` costs."""
    return (seconds * 1e6 + 0.5) // 1 / 1e6


# --- event lines ----------------------------------------------------------------------------------


class OutletHandler(logging.Handler):
    """Puts event lines on the outlet and has them written at once."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__()
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        """Write one event; a line that cannot be formatted is written without its arguments."""
        try:
            line = self.format(record)
        except (TypeError, ValueError, KeyError):  # a wrong log call must not break its caller
            line = (
                f'{{"level":"ERROR","event":"log_bug","message":"bad log call in {record.name}"}}'
            )
        self._outlet.put(line.encode("utf-8", "backslashreplace") + b"\n")
        self._outlet.wake()

    def flush(self) -> None:
        """Wait a second at most until everything is written: logging does this when the process ends."""
        self._outlet.flush(1.0)


def _sentence(record: logging.LogRecord) -> str:
    return redact(record.getMessage())[:_MAX_MESSAGE]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what the call's `extra` added, redacted; only plain values and lists of them."""
    return {name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return redact(str(value))[:_MAX_MESSAGE]


class JsonFormatter(logging.Formatter):
    """`{"ts", "level", "event", "message", "logger", ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one event as one line of JSON."""
        millis = int(record.created % 1 * 1000)
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{millis:03d}Z",
            "level": record.levelname,
            "event": _LIBRARY,
            "message": _sentence(record),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info is not None and record.exc_info[1] is not None:
            line["traceback"] = safe_traceback(record.exc_info[1])
        return json.dumps(line, separators=(",", ":"))  # pure ASCII, unlike msgspec's


class TextFormatter(logging.Formatter):
    """`14:02:11 WARNING b3 is down ... (pool=... reason=...)`, safe to show on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one event for a human; a traceback follows on lines of its own."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        text = f"{at} {record.levelname:<7} {_sentence(record)}"
        text = printable(f"{text}  ({fields})" if fields else text)
        if record.exc_info is not None and record.exc_info[1] is not None:
            frames = safe_traceback(record.exc_info[1]).splitlines()
            text = "\n".join([text, *(f"    {printable(line)}" for line in frames)])
        return text


def set_up_logging(config: LogConfig, fd: int = 1) -> Outlet:
    """Send all event lines to `fd`, and return the outlet that the access log shares with them.

    A format that was not configured is text on a terminal, JSON elsewhere.
    """
    outlet = Outlet(fd)
    as_text = config.format is LogFormat.TEXT
    if "format" not in config.model_fields_set:
        as_text = os.isatty(fd)
    handler = OutletHandler(outlet)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.value.upper())
    for chatty in ("httpx2", "httpcore2", "asyncio", "uvicorn.access", "uvicorn.error"):
        # Each probe would be a line, with the backend's address in it; uvicorn logs its start twice.
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))
    sys.stdout.flush()  # what was printed before comes first
    return outlet
