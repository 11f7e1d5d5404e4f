"""What clients get through the proxy: asked over the network, at the URL that they use."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from gateway.cli.doctor.clocks import of_date
from gateway.cli.doctor.findings import Finding, ok
from gateway.cli.doctor.replies import Asked, stream_findings
from gateway.cli.doctor.site import TIMEOUT_S, Site
from gateway.config.models import Config

# Within which a proxy refuses a body by its length: so long, or so many times what a reply takes.
_REFUSES_S: Final = 1.5
_REPLIES: Final = 4
_APART: Final = "keys expire, and limits refill, at other times than you think"
_CERTIFICATE_DAYS: Final = 14


def through_findings(site: Site, config: Config, asked: Asked, gateway: Site) -> Iterator[Finding]:
    """Yield what is found through the proxy at a site; `gateway` is the gateway's own listener."""
    began = time.monotonic()
    try:
        date = _livez(site)
    except ssl.SSLError as error:
        yield Finding(verdict="wrong", about="tls", told=f"TLS to {site.url} fails: {error.reason or error}",
                      change="ssl_certificate must hold the whole chain, and name the host")  # fmt: skip
        return
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        yield Finding(verdict="wrong", about="reach", told=f"{site.url} does not lead to a gateway: {why}",
                      change="see that the proxy runs and that proxy_pass names the gateway's `listen`")  # fmt: skip
        return
    refuses_s = max(_REFUSES_S, _REPLIES * (time.monotonic() - began))
    yield ok("reach", f"{site.url} leads to a gateway")
    yield from of_date(date, "the proxy", "wrong", _APART)
    for about, tried in (
        ("tls", _tls(site)),
        ("admin", _admin(site)),
        ("body_size", _body(site, config, refuses_s)),
    ):
        try:
            yield from tried
        except (OSError, http.client.HTTPException) as error:
            yield Finding(verdict="skipped", about=about, told=f"{site.url} broke the connection off: {error}",
                          change="see the proxy's own log")  # fmt: skip
    yield from stream_findings(site, gateway, config, asked)


def _livez(site: Site) -> str:
    """Return the date that the gateway's probe has; raises what a request raises."""
    status, date = _get(site, "/livez")
    if status != http.client.OK:
        raise http.client.HTTPException(f"GET {site.path('/livez')} is answered with {status}")
    return date


def _tls(site: Site) -> Iterator[Finding]:
    if not site.tls:
        yield Finding(verdict="note", about="tls", told="Keys and prompts travel without TLS",
                      change="listen 443 ssl http2; see deploy/nginx/gateway.conf")  # fmt: skip
        return
    parts, context = urlsplit(site.url), site.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((parts.hostname or "", parts.port or 443), TIMEOUT_S) as raw,
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
    status, _ = _get(site, "/admin/v1/overview")
    if status in (http.client.OK, http.client.UNAUTHORIZED):
        yield Finding(verdict="wrong", about="admin", told="The admin listener can be reached through the proxy",
                      change="proxy_pass must name `listen`, not `admin.listen`")  # fmt: skip


def _get(site: Site, path: str) -> tuple[int, str]:
    """Return the status and the `Date` of a reply."""
    connection = site.connect()
    try:
        connection.request("GET", site.path(path))
        reply = connection.getresponse()
        reply.read(4096)
        return reply.status, reply.getheader("date") or ""
    finally:
        connection.close()


def _body(site: Site, config: Config, refuses_s: float) -> Iterator[Finding]:
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
            connection.sock.settimeout(refuses_s)
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
