"""What nginx's settings do to a gateway behind it: each rule with the line to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.cli.doctor.findings import Finding, Verdict, ok
from gateway.cli.doctor.machine import most_clients
from gateway.cli.doctor.nginxfile import Directive, seconds, size
from gateway.config.models import Config
from gateway.config.units import format_duration

_MIB: Final = 1024 * 1024
_CONNECT_S: Final = 10.0
_DEFAULTS: Final = {
    "proxy_buffering": "on",
    "gzip": "off",
    "proxy_http_version": "1.0",  # before nginx 1.29.7
    "proxy_read_timeout": "60s",
    "proxy_send_timeout": "60s",
    "proxy_connect_timeout": "60s",
    "worker_connections": "512",
    "worker_processes": "1",
    "client_max_body_size": "1m",
    "proxy_next_upstream": "error timeout",
    "proxy_ignore_client_abort": "off",
    "proxy_intercept_errors": "off",
}


def nginx_findings(
    root: Directive, config: Config, *, file: str, none: Verdict = "wrong"
) -> Iterator[Finding]:
    """Yield what is found of each place that passes requests on to the gateway.

    `file` is the name of the gateway's settings; `none` is the verdict where there is no such place.
    """
    address = str(config.listen)
    places = [each.parent for each in root.find("proxy_pass") if _leads(root, each, address)]
    if not places:
        yield Finding(
            verdict=none,
            about="proxy_pass",
            told=f"Nothing in {root.where} passes requests on to the gateway ({address})",
            change=f"proxy_pass http://{address};",
        )
    told: set[Finding] = set()  # one line may hold for several places
    for place in places:
        if place is not None:
            found = [*_of(root, place, config, file)]
            yield from (each for each in found if each not in told)
            told |= {*found}
            if not found:
                yield ok("nginx", f"nginx's settings at {place.where} fit the gateway's")


def _leads(root: Directive, passes: Directive, address: str) -> bool:
    target = (passes.words or [""])[0].removeprefix("http://").removeprefix("https://")
    # nginx writes http://unix:/path or, before a URI, http://unix:/path:
    unix = target.startswith("unix:")
    host = ":".join(target.split(":")[:2]) if unix else target.split("/", 1)[0]
    return _same(host, address) or any(
        _same(server.words[0], address) for server in _servers(root, host)
    )


def _servers(root: Directive, name: str) -> list[Directive]:
    return [
        server
        for upstream in root.find("upstream")
        if upstream.words[:1] == [name]
        for server in upstream.inside
        if server.name == "server" and server.words
    ]


def _same(one: str, other: str) -> bool:
    """Whether two addresses are the same to a proxy on this machine."""
    local = ("localhost:", "0.0.0.0:", "[::]:", "[::1]:")

    def plain(text: str) -> str:
        for each in local:
            if text.startswith(each):
                return "127.0.0.1:" + text.removeprefix(each)
        return text

    if other.startswith(("0.0.0.0:", "[::]:")):  # every address of its machine
        return one.rpartition(":")[2] == other.rpartition(":")[2]
    return plain(one) == plain(other)


def _word(place: Directive, name: str) -> tuple[str, str]:
    """Return the value that holds, and where it stands: at the place itself if it is the default."""
    found = place.holds(name)
    if found is None:
        return _DEFAULTS.get(name, ""), place.where
    return " ".join(found.words), found.where


def _of(root: Directive, place: Directive, config: Config, file: str) -> Iterator[Finding]:
    yield from _streams(place)
    yield from _bodies(place, config)
    yield from _times(place, config)
    yield from _keep_alive(root, place, config)
    yield from _failures(place)
    yield from _addresses(place, config, file)
    yield from _connections(root, config)


def _wrong(about: str, place: tuple[str, str], told: str, change: str) -> Finding:
    return Finding(verdict="wrong", about=about, told=told, change=change, where=place[1])


def _note(about: str, place: tuple[str, str], told: str, change: str) -> Finding:
    return Finding(verdict="note", about=about, told=told, change=change, where=place[1])


def _streams(place: Directive) -> Iterator[Finding]:
    ignored = _word(place, "proxy_ignore_headers")
    buffering = _word(place, "proxy_buffering")
    if "x-accel-buffering" in ignored[0].lower():
        yield _wrong(
            "x_accel_buffering", ignored,
            "nginx ignores the gateway's `X-Accel-Buffering: no`, so it may hold streams back",
            "remove X-Accel-Buffering from proxy_ignore_headers",
        )  # fmt: skip
        if buffering[0] != "off":
            yield _wrong("buffering", buffering, "nginx collects a stream before it passes it on",
                         "proxy_buffering off;")  # fmt: skip
    gzip = _word(place, "gzip")
    types = _word(place, "gzip_types")[0]
    if gzip[0] == "on" and ("text/event-stream" in types or "*" in types):
        yield _wrong("gzip", gzip, "gzip holds back a stream until there is enough to compress",
                     "gzip off;")  # fmt: skip
    if (version := _word(place, "proxy_http_version"))[0] == "1.0":
        yield _wrong(
            "http_version", version,
            "nginx speaks HTTP/1.0 to the gateway: each request takes a new connection",
            'proxy_http_version 1.1; proxy_set_header Connection "";',
        )  # fmt: skip


def _bodies(place: Directive, config: Config) -> Iterator[Finding]:
    most = _word(place, "client_max_body_size")
    ours = max(config.limits.max_body, config.limits.max_audio_body)
    theirs = size(most[0])
    if theirs and theirs < ours:
        yield _wrong(
            "body_size", most,
            f"nginx refuses bodies above {theirs / _MIB:g} MiB with a page of its own; the gateway takes"
            f" {ours / _MIB:g} MiB (`limits.max_body`, `limits.max_audio_body`)",
            f"client_max_body_size {-(-ours // _MIB)}m;",
        )  # fmt: skip


def _times(place: Directive, config: Config) -> Iterator[Finding]:
    total_s = config.timeouts.total
    reads = _word(place, "proxy_read_timeout")
    theirs = seconds(reads[0])
    if theirs is not None and theirs < total_s:
        yield _wrong(
            "read_timeout", reads,
            f"nginx ends a reply that is silent for {format_duration(theirs)}; whole replies are silent until they"
            f" are done, for up to {format_duration(total_s)} (`timeouts.total`)",
            f"proxy_read_timeout {total_s:.0f}s;",
        )  # fmt: skip
    body_s = config.timeouts.body
    sends = _word(place, "proxy_send_timeout")
    theirs = seconds(sends[0])
    if theirs is not None and theirs < body_s:
        yield _wrong(
            "send_timeout", sends,
            f"nginx gives up a body that the gateway does not read for {format_duration(theirs)}; a large one may"
            f" wait for room for {format_duration(body_s)} (`timeouts.body`)",
            f"proxy_send_timeout {max(2 * body_s, 60):.0f}s;",
        )  # fmt: skip
    connects = _word(place, "proxy_connect_timeout")
    theirs = seconds(connects[0])
    if theirs is not None and theirs > _CONNECT_S:
        yield _note(
            "connect_timeout", connects,
            f"nginx waits {format_duration(theirs)} for a machine of the gateway that is gone, and clients wait too",
            "proxy_connect_timeout 5s;",
        )  # fmt: skip


def _keep_alive(root: Directive, place: Directive, config: Config) -> Iterator[Finding]:
    ours = config.timeouts.keep_alive
    passes = place.holds("proxy_pass")
    name = "" if passes is None else passes.words[0].split("//", 1)[-1].split("/", 1)[0]
    upstream = next((each for each in root.find("upstream") if each.words[:1] == [name]), None)
    if upstream is None or upstream.holds("keepalive") is None:
        where = place.where if upstream is None else upstream.where
        yield _note(
            "keep_alive", ("", where),
            "nginx, before its version 1.29.7, makes a new connection to the gateway for each request",
            "keepalive 64; in an `upstream` block, which proxy_pass names",
        )  # fmt: skip
        return
    own = next((each for each in upstream.inside if each.name == "keepalive_timeout"), None)
    theirs = 60.0 if own is None else seconds(own.words[0])
    if theirs is not None and theirs >= ours:
        yield _wrong(
            "keep_alive", ("", upstream.where if own is None else own.where),
            f"nginx keeps idle connections for {format_duration(theirs)}, as long as the gateway or longer"
            f" ({format_duration(ours)}, `timeouts.keep_alive`): it may send a request on one that is being closed,"
            " which is a 502",
            f"keepalive_timeout {max(int(ours) - 15, 1)}s;",
        )  # fmt: skip
    headers = [each.words for each in place.all_of("proxy_set_header")]
    if not any(words[0].lower() == "connection" for words in headers if words):
        yield _wrong("keep_alive", ("", place.where), "nginx sends `Connection: close`, so `keepalive` has no effect",
                     'proxy_set_header Connection "";')  # fmt: skip


def _failures(place: Directive) -> Iterator[Finding]:
    again = _word(place, "proxy_next_upstream")
    if "non_idempotent" in again[0]:
        yield _wrong("replay", again, "nginx may send a POST twice: two engines would work on it",
                     "proxy_next_upstream error timeout;")  # fmt: skip
    if (hidden := _word(place, "proxy_ignore_client_abort"))[0] == "on":
        yield _wrong("client_abort", hidden, "nginx hides that a client has left, so its engine works on",
                     "proxy_ignore_client_abort off;")  # fmt: skip
    if (errors := _word(place, "proxy_intercept_errors"))[0] == "on":
        yield _wrong("errors", errors, "nginx puts pages of its own in the place of the gateway's JSON errors",
                     "proxy_intercept_errors off;")  # fmt: skip


def _addresses(place: Directive, config: Config, file: str) -> Iterator[Finding]:
    headers = {
        each.words[0].lower(): (each.words[1], each.where)
        for each in place.all_of("proxy_set_header")
        if len(each.words) > 1
    }
    told = headers.get("x-forwarded-for")
    if told is None:
        yield _wrong(
            "client_address", ("", place.where),
            "nginx does not tell the gateway whose request it is: wrong keys of one client count against all",
            "proxy_set_header X-Forwarded-For $remote_addr;",
        )  # fmt: skip
    elif not config.trusted_proxies:
        yield Finding(
            verdict="wrong", about="client_address", where=file,
            told="The gateway does not read X-Forwarded-For, so wrong keys of one client count against all",
            change="trusted_proxies: [127.0.0.1]",
        )  # fmt: skip


def _connections(root: Directive, config: Config) -> Iterator[Finding]:
    """Yield that nginx has too few connections: a client takes one, and one more to the gateway."""
    events = next(root.find("events"), None)
    if events is None:
        return  # a file of one site
    of_each, workers = _word(events, "worker_connections"), _word(root, "worker_processes")
    if not of_each[0].isdigit() or not workers[0].isdigit():
        return  # `auto`: as many as the machine of nginx has cores
    possible = int(of_each[0]) * int(workers[0]) // 2
    most = most_clients(config)
    if possible < most:
        needed = -(-2 * most // max(int(workers[0]), 1))
        yield _note(
            "connections", of_each,
            f"nginx serves at most {possible:,} clients at a time; the gateway takes {most:,} (`limits.connections`)",
            f"worker_connections {needed}; and worker_rlimit_nofile {2 * needed};",
        )  # fmt: skip
