"""What went over the wire in each test: status, names of headers, and the fields of bodies with their types.

Values differ from run to run (ids, times, noise); what a reply is made of does not, or seldom.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import re
import urllib.parse
from collections.abc import Iterator

import pytest

# Of the connection, of a server, or of a gateway alone.
_OURS = re.compile(
    r"date|server|server-timing|content-length|transfer-encoding|connection|keep-alive|x-gateway-.*|"
    r"x-request-id|request-id|retry-after(-ms)?|cache-control|x-accel-buffering|vary"
)


class Exchange:
    """One request and its reply. The body of a stream grows while the test reads it."""

    def __init__(self, asked: str, reply) -> None:
        self.asked = asked
        self.status = int(reply.status_code)
        self.headers = {name.lower() for name in reply.headers if not _OURS.fullmatch(name.lower())}
        self.kind = reply.headers.get("content-type", "").partition(";")[0]
        self.body = bytearray()

    def summary(self) -> dict[str, object]:
        fields = collections.defaultdict(set)
        for value in self._values():
            for path, kind in _fields(value, "$"):
                fields[path].add(kind)
        return {
            "asked": self.asked, "status": self.status, "kind": self.kind,
            "headers": sorted(self.headers), "fields": {path: sorted(kinds) for path, kinds in fields.items()},
            "start": self.body[:300].decode(errors="replace"),
        }  # fmt: skip

    def _values(self) -> Iterator[object]:
        frames = [bytes(self.body)]
        if self.kind == "text/event-stream":
            frames = [each[5:] for each in self.body.splitlines() if each.startswith(b"data:")]
        for frame in frames:
            try:
                yield json.loads(frame)
            except ValueError:
                continue


def _fields(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _fields(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value[:100]:
            yield from _fields(inner, f"{path}[]")
    else:
        yield path, type(value).__name__


class Recorder:
    """A pytest plugin that files the exchanges of `requests` and `httpx` under the test that made them."""

    def __init__(self) -> None:
        self.found: dict[str, list[Exchange]] = {}
        self._test = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    def summaries(self) -> dict[str, list[dict]]:
        return {test: [each.summary() for each in all_] for test, all_ in self.found.items()}

    def _add(self, method: str, url: str, reply) -> Exchange:
        exchange = Exchange(f"{method} {urllib.parse.urlsplit(str(url)).path}", reply)
        self.found.setdefault(self._test, []).append(exchange)
        return exchange

    def __enter__(self) -> Recorder:
        requests = importlib.import_module("requests")
        self._undo = [(requests.Session, "send", requests.Session.send)]
        requests.Session.send = self._requests_send(requests.Session.send)
        for name in ("httpx", "httpx2"):
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            for owner, method, wrap in (
                (module.Client, "send", self._httpx_send),
                (module.AsyncClient, "send", self._httpx_asend),
                (module.Response, "iter_bytes", self._iterate),
                (module.Response, "aiter_bytes", self._aiterate),
            ):
                old = getattr(owner, method)
                self._undo.append((owner, method, old))
                setattr(owner, method, wrap(old))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method, old in self._undo:
            setattr(owner, method, old)

    def _requests_send(self, old):
        @functools.wraps(old)
        def send(session, request, **kwargs):
            reply = old(session, request, **kwargs)
            exchange = self._add(request.method, request.url, reply)
            if not kwargs.get("stream"):
                exchange.body += reply.content
            return reply

        return send

    def _httpx_send(self, old):
        @functools.wraps(old)
        def send(client, request, **kwargs):
            reply = old(client, request, **kwargs)
            return self._httpx_add(request, reply)

        return send

    def _httpx_asend(self, old):
        @functools.wraps(old)
        async def send(client, request, **kwargs):
            reply = await old(client, request, **kwargs)
            return self._httpx_add(request, reply)

        return send

    def _httpx_add(self, request, reply):
        reply.exchange = self._add(request.method, request.url, reply)
        if reply.is_stream_consumed:
            reply.exchange.body += reply.content
        return reply

    def _iterate(self, old):
        @functools.wraps(old)
        def iter_bytes(reply, *args, **kwargs):
            for part in old(reply, *args, **kwargs):
                _tee(reply, part)
                yield part

        return iter_bytes

    def _aiterate(self, old):
        @functools.wraps(old)
        async def aiter_bytes(reply, *args, **kwargs):
            async for part in old(reply, *args, **kwargs):
                _tee(reply, part)
                yield part

        return aiter_bytes


def _tee(reply, part: bytes) -> None:
    if (exchange := getattr(reply, "exchange", None)) is not None:
        exchange.body += part


def _fields_differ(one: dict[str, list[str]], two: dict[str, list[str]]) -> Iterator[str]:
    """Compare fields. What depends on chance is let be: a list that is empty, a value that is null."""
    for mark, here, there in (("lost", one, two), ("new", two, one)):
        for field in here.keys() - there.keys():
            holder, is_in_list, _ = field.rpartition("[]")
            if not is_in_list or any(each.startswith(f"{holder}[]") for each in there):
                yield f"{mark} {field}"
    for field in one.keys() & two.keys():
        before, after = ({*each[field]} - {"NoneType"} for each in (one, two))
        if before and after and before != after:
            yield f"{field}: {', '.join(sorted(before))} -> {', '.join(sorted(after))}"


def differences(direct: list[dict], through: list[dict]) -> Iterator[str]:
    """Say how a test's exchanges through the gateway differ from those with vLLM itself."""
    for one, two in zip(direct, through, strict=False):
        asked = one["asked"]
        if asked != two["asked"]:
            yield f"{asked}: the test went on with {two['asked']}"
            return
        if one["status"] != two["status"]:
            yield f"{asked}: {one['status']} -> {two['status']} {two['start']}"
            return
        if one["kind"] != two["kind"]:
            yield f"{asked}: {one['kind']} -> {two['kind']}"
        for header in sorted({*one["headers"]} - {*two["headers"]}):
            yield f"{asked}: lost header {header}"
        if one["status"] == 200:
            yield from (f"{asked}: {each}" for each in _fields_differ(one["fields"], two["fields"]))
    if len(direct) != len(through):
        yield f"{len(direct)} requests -> {len(through)}"


def table(direct: dict[str, list[dict]], through: dict[str, list[dict]]) -> dict[str, list[str]]:
    """Return each difference, and the tests in which it is."""
    found = collections.defaultdict(list)
    for test in direct:
        for each in {*differences(direct[test], through.get(test, []))}:
            found[each].append(test)
    return dict(found)
