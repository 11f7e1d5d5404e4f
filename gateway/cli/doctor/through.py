"""What clients get through the proxy: asked over the network, at the URL that they use.

At most one short stream is asked of a model, twice: through the proxy, and of the gateway itself.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.cli.doctor.findings import Finding, ok
from gateway.config.models import Config

_TIMEOUT_S: Final = 10.0
_REFUSES_S: Final = 1.5  # within which a proxy refuses a body by its length
_CLOCK_S: Final = 5.0
_CERTIFICATE_DAYS: Final = 14
_TOKENS: Final = 64
_HELD: Final = (
    0.25  # of the time that a stream takes at the gateway; less between its parts was held back
)
_LEAST_S: Final = 0.2  # that a stream must take to be judged


@dataclass(frozen=True, slots=True)
class Site:
    """A URL, such as https://api.example.com/llm; `insecure`: its certificate is not verified.

    With `socket` it is asked through the UNIX socket at that path.
    """

    url: str
    insecure: bool = False
    socket: str = ""

    @property
    def tls(self) -> bool:
        """Whether it speaks TLS."""
        return self.url.startswith("https:")

    def path(self, path: str) -> str:
        """Return where a path of the gateway is there: behind the path of the URL."""
        return urlsplit(self.url).path.rstrip("/") + path

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection to it, not open yet."""
        if self.socket:
            return _LocalConnection(self.socket)
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if self.tls:
            return http.client.HTTPSConnection(
                host, port, timeout=_TIMEOUT_S, context=self.context()
            )
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def context(self) -> ssl.SSLContext:
        """Return how TLS is spoken to it."""
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


class _LocalConnection(http.client.HTTPConnection):
    """A connection through a UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def through_findings(
    site: Site, config: Config, key: str, model: str, gateway: Site
) -> Iterator[Finding]:
    """Yield what is found through the proxy at a site; `gateway` is the gateway's own listener."""
    try:
        date = _livez(site)
    except ssl.SSLError as error:
        yield Finding(verdict="wrong", about="tls", told=f"TLS to {site.url} fails: {error.reason or error}",
                      change="ssl_certificate must hold the whole chain, and name the host")  # fmt: skip
        return
    except (OSError, http.client.HTTPException) as error:
        yield Finding(verdict="wrong", about="reach", told=f"{site.url} does not lead to a gateway: {error}",
                      change="see that the proxy runs and that proxy_pass names the gateway's `listen`")  # fmt: skip
        return
    yield ok("reach", f"{site.url} leads to a gateway")
    yield from _clock(date)
    for about, tried in (
        ("tls", _tls(site)),
        ("admin", _admin(site)),
        ("body_size", _body(site, config)),
    ):
        try:
            yield from tried
        except (OSError, http.client.HTTPException) as error:
            yield Finding(verdict="skipped", about=about, told=f"{site.url} broke the connection off: {error}",
                          change="see the proxy's own log")  # fmt: skip
    yield from _stream(site, gateway, key, model)


def _livez(site: Site) -> str:
    """Return the date that the gateway's probe has; raises what a request raises."""
    connection = site.connect()
    try:
        connection.request("GET", site.path("/livez"))
        reply = connection.getresponse()
        reply.read(4096)
        if reply.status != http.client.OK:
            raise http.client.HTTPException(
                f"GET {site.path('/livez')} is answered with {reply.status}"
            )
        return reply.getheader("date") or ""
    finally:
        connection.close()


def _clock(date: str) -> Iterator[Finding]:
    try:
        apart_s = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return
    if abs(apart_s) > _CLOCK_S:
        yield Finding(
            verdict="wrong", about="clock",
            told=f"The clocks of this machine and of the proxy are {abs(apart_s):.0f} s apart: keys expire, and limits"
            " refill, at other times than you think",
            change="timedatectl set-ntp true",
        )  # fmt: skip


def _tls(site: Site) -> Iterator[Finding]:
    if not site.tls:
        yield Finding(verdict="note", about="tls", told="Keys and prompts travel without TLS",
                      change="listen 443 ssl http2; see deploy/nginx/gateway.conf")  # fmt: skip
        return
    parts, context = urlsplit(site.url), site.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((parts.hostname or "", parts.port or 443), _TIMEOUT_S) as raw,
        context.wrap_socket(raw, server_hostname=parts.hostname) as wrapped,
    ):
        agreed, version = wrapped.selected_alpn_protocol(), wrapped.version()
        certificate = wrapped.getpeercert() or {}
    yield ok("tls", f"It speaks {version}")
    ends = certificate.get("notAfter")
    if isinstance(ends, str):
        days = (ssl.cert_time_to_seconds(ends) - time.time()) / 86400
        if days < _CERTIFICATE_DAYS:
            yield Finding(verdict="wrong", about="certificate", told=f"Its certificate ends in {days:.0f} days",
                          change="renew it: certbot renew")  # fmt: skip
    if agreed != "h2":
        yield Finding(verdict="note", about="http2", told="It does not offer HTTP/2: each stream takes a connection",
                      change="listen 443 ssl http2;")  # fmt: skip


def _admin(site: Site) -> Iterator[Finding]:
    status, _, _ = _get(site, "/admin/v1/overview")
    if status in (http.client.OK, http.client.UNAUTHORIZED):
        yield Finding(verdict="wrong", about="admin", told="The admin listener can be reached through the proxy",
                      change="proxy_pass must name `listen`, not `admin.listen`")  # fmt: skip


def _get(site: Site, path: str) -> tuple[int, str, bytes]:
    connection = site.connect()
    try:
        connection.request("GET", site.path(path))
        reply = connection.getresponse()
        return reply.status, reply.getheader("content-type") or "", reply.read(65536)
    finally:
        connection.close()


def _body(site: Site, config: Config) -> Iterator[Finding]:
    """Announce the largest body that the gateway takes, and send none of it."""
    most = max(config.limits.max_body, config.limits.max_audio_body)
    audio = config.limits.max_audio_body > config.limits.max_body
    limit = "max_audio_body" if audio else "max_body"
    connection = site.connect()
    try:
        path = "/v1/audio/transcriptions" if audio else "/v1/chat/completions"
        kind = "multipart/form-data; boundary=doctor" if audio else "application/json"
        connection.putrequest("POST", site.path(path))
        connection.putheader("Content-Type", kind)
        connection.putheader("Content-Length", str(most))
        connection.endheaders()
        if connection.sock is not None:
            connection.sock.settimeout(_REFUSES_S)
        reply = connection.getresponse()
        told = reply.read(4096)
    except TimeoutError:
        yield ok("body_size", f"A body of {most >> 20} MiB is let in")
        return
    finally:
        connection.close()
    if reply.status == http.client.REQUEST_ENTITY_TOO_LARGE:
        yield Finding(
            verdict="wrong", about="body_size",
            told=f"The proxy refuses a body of {most >> 20} MiB, which the gateway takes (`limits.{limit}`)",
            change=f"client_max_body_size {-(-most >> 20)}m;",
        )  # fmt: skip
        if not _is_json(told):
            yield Finding(verdict="note", about="errors", told="The proxy's own errors are no JSON",
                          change="error_page 413 as in deploy/nginx/gateway.conf")  # fmt: skip
    else:
        yield ok("body_size", f"A body of {most >> 20} MiB is let in")


def _is_json(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


def _stream(site: Site, gateway: Site, key: str, model: str) -> Iterator[Finding]:
    if not key or not model:
        yield Finding(verdict="skipped", about="streaming", told="Whether streams are held back was not tried",
                      change="--key KEY --model MODEL asks a model for 64 tokens, twice")  # fmt: skip
        return
    try:
        direct, _ = _spread(gateway, key, model)
        outer, headers = _spread(site, key, model)
    except (OSError, http.client.HTTPException) as error:
        yield Finding(verdict="skipped", about="streaming", told=f"No stream could be had: {error}",
                      change="see that the key and the model are right")  # fmt: skip
        return
    if direct < _LEAST_S:
        yield Finding(verdict="skipped", about="streaming", told="The stream was too short to tell",
                      change="try again with a model that answers at length")  # fmt: skip
    elif outer < _HELD * direct:
        packed = headers.get("content-encoding", "")
        yield Finding(
            verdict="wrong", about="streaming",
            told=f"Streams are held back: what takes {direct:.1f} s at the gateway comes within {outer:.1f} s"
            + (f", packed with {packed}" if packed else ""),
            change="gzip off;" if packed else "proxy_buffering off; and no proxy_ignore_headers X-Accel-Buffering",
        )  # fmt: skip
    else:
        yield ok(
            "streaming",
            f"Streams pass as they come: over {outer:.1f} s, at the gateway {direct:.1f} s",
        )


def _spread(site: Site, key: str, model: str) -> tuple[float, dict[str, str]]:
    """Return the seconds from the first to the last part of a stream, and the reply's headers."""
    order = {"model": model, "stream": True, "max_tokens": _TOKENS,
             "messages": [{"role": "user", "content": "Count slowly from one to a hundred, in words."}]}  # fmt: skip
    connection = site.connect()
    try:
        connection.request(
            "POST", site.path("/v1/chat/completions"), json.dumps(order),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Accept-Encoding": "gzip"},
        )  # fmt: skip
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise http.client.HTTPException(f"{reply.status} for a chat with {model}")
        first = last = 0.0
        while reply.read1(65536):
            last = time.monotonic()
            first = first or last
        return last - first, {name.lower(): value for name, value in reply.getheaders()}
    finally:
        connection.close()
