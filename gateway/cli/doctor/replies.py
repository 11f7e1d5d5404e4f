"""What a proxy does to replies: tried with a model, through the proxy and at the gateway itself.

A short stream is asked for twice: what takes a second at the gateway must not come at once through the proxy.
If wanted, one whole reply follows that takes longer than a time-out that is in doubt: nothing is sent meanwhile.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gateway.cli.doctor.findings import Finding, ok
from gateway.cli.doctor.site import TIMEOUT_S, Site
from gateway.config.models import Config
from gateway.config.units import format_duration
from gateway.core.codes import CODES

_TOKENS: Final = 64
# Of the time that a stream takes at the gateway: within less, it was held back.
_HELD: Final = 0.25
_LEAST_S: Final = 0.2  # that a stream must take to be judged
_LONGER: Final = 1.3  # a model may write faster than before
_SERVER_ERRORS: Final = 500


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a model, and with which key; `silent_s`: how long a whole reply shall take."""

    key: str = ""
    model: str = ""
    silent_s: float = 0.0


def stream_findings(site: Site, gateway: Site, config: Config, asked: Asked) -> Iterator[Finding]:
    """Yield whether streams pass at once, and whether long silence ends a reply."""
    if not asked.key or not asked.model:
        yield Finding(verdict="skipped", about="streaming", told="Whether streams are held back was not tried",
                      change="--key KEY --model MODEL asks a model for 64 tokens, twice")  # fmt: skip
        return
    try:
        direct, _ = _spread(gateway, asked)
        outer, headers = _spread(site, asked)
    except (OSError, http.client.HTTPException) as error:
        yield Finding(verdict="skipped", about="streaming", told=f"No stream could be had: {error}",
                      change="see that the key and the model are right")  # fmt: skip
        return
    if direct < _LEAST_S:
        yield Finding(verdict="skipped", about="streaming", told="The stream was too short to tell",
                      change="try again with a model that answers at length")  # fmt: skip
        return
    yield _streamed(direct, outer, headers.get("content-encoding", ""))
    yield _whole(site, asked, config, pace(direct, outer))


def pace(direct: float, outer: float) -> float:
    """Return how many tokens a model writes in a second, by the faster of two streams: one may have stalled. Pure."""
    held = outer < _HELD * direct
    return _TOKENS / (direct if held else min(direct, outer))


def _streamed(direct: float, outer: float, packed: str) -> Finding:
    if outer >= _HELD * direct:
        return ok(
            "streaming",
            f"Streams pass as they come: over {outer:.1f} s, at the gateway {direct:.1f} s",
        )
    return Finding(
        verdict="wrong", about="streaming",
        told=f"Streams are held back: what takes {direct:.1f} s at the gateway comes within {outer:.1f} s"
        + (f", packed with {packed}" if packed else ""),
        change="gzip off;" if packed else "proxy_buffering off; and no proxy_ignore_headers X-Accel-Buffering",
    )  # fmt: skip


def _whole(site: Site, asked: Asked, config: Config, tokens_per_s: float) -> Finding:
    """Ask for a whole reply that takes so long; return whether the proxy waited for it."""
    total = format_duration(config.timeouts.total)
    if not asked.silent_s:
        return Finding(
            verdict="skipped", about="silence",
            told=f"How long the proxy waits for a whole reply was not tried; the gateway takes up to {total}",
            change="--silent-for 90s asks for a reply that takes so long: longer than the usual time-outs of proxies",
        )  # fmt: skip
    tokens = round(asked.silent_s * tokens_per_s * _LONGER)
    # A model would stop by itself earlier.
    order = _order(asked, tokens) | {"min_tokens": tokens, "ignore_eos": True}
    connection = site.connect(asked.silent_s * 2 * _LONGER + TIMEOUT_S)
    began = time.monotonic()
    try:
        reply = _send(connection, site, asked, order)
        told, status = reply.read(), reply.status
    except TimeoutError:  # ours: the model is slower than before, and the proxy still waits
        told, status = b"", http.client.OK
    except (OSError, http.client.HTTPException) as error:
        status, told = 0, str(error).encode()
    finally:
        connection.close()
    return waited(time.monotonic() - began, asked.silent_s, status, told, total)


def waited(took: float, wanted: float, status: int, told: bytes, total: str) -> Finding:
    """Return what the end of a whole reply says; `status` 0: the connection was broken off. Pure."""
    if status == http.client.OK and took >= wanted:
        return ok("silence", f"A whole reply passes after {took:.0f} s of silence")
    if status == http.client.OK:
        return Finding(verdict="skipped", about="silence", told=f"The reply took {took:.0f} s, too short to tell",
                       change="--silent-for with a longer time")  # fmt: skip
    code, message = _error(told)
    if code in CODES or 0 < status < _SERVER_ERRORS:  # the gateway's own, or of who asks too much
        return Finding(verdict="skipped", about="silence",
                       told=f"No long reply could be had: {status} {code}: {message}",
                       change="see what the message says; or a shorter time, or another key")  # fmt: skip
    how = f"with status {status}" if status else "and closed the connection"
    return Finding(
        verdict="wrong", about="silence",
        told=f"The proxy gave up a whole reply after {took:.0f} s of silence, {how}; the gateway takes up to {total}"
        " (`timeouts.total`)",
        change="in nginx proxy_read_timeout, in a load balancer its idle time-out: as long as `timeouts.total`",
    )  # fmt: skip


def _error(told: bytes) -> tuple[str, str]:
    """Return the code and the message of an error; empty where it is a page of somebody else."""
    try:
        error = json.loads(told)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, TypeError, KeyError):
        return "", ""


def _order(asked: Asked, tokens: int) -> dict[str, object]:
    prompt = "Count slowly from one to a hundred, in words."
    return {
        "model": asked.model,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prompt}],
    }


def _send(
    connection: http.client.HTTPConnection, site: Site, asked: Asked, order: dict[str, object]
) -> http.client.HTTPResponse:
    headers = {"Authorization": f"Bearer {asked.key}", "Content-Type": "application/json"}
    connection.request(
        "POST", site.path("/v1/chat/completions"), json.dumps(order),
        headers | {"Accept-Encoding": "gzip"},
    )  # fmt: skip
    return connection.getresponse()


def _spread(site: Site, asked: Asked) -> tuple[float, dict[str, str]]:
    """Return the seconds from the first to the last part of a stream, and the reply's headers."""
    connection = site.connect()
    try:
        reply = _send(connection, site, asked, _order(asked, _TOKENS) | {"stream": True})
        if reply.status != http.client.OK:
            raise http.client.HTTPException(f"{reply.status} for a chat with {asked.model}")
        first = last = 0.0
        while reply.read1(65536):
            last = time.monotonic()
            first = first or last
        return last - first, {name.lower(): value for name, value in reply.getheaders()}
    finally:
        connection.close()
