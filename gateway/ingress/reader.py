"""Bytes of a client connection in, request heads and bodies out: the parser, and its bounds.

httptools (llhttp) is strict about what frames a request, and bounds nothing. The bounds are here:
on a head's bytes and headers, on trailers, and on everything else that frames a body without being
part of it. An offer to change the protocol is ignored; a whole URL is reduced to its path.

Clients write each head on a connection alike, but for the length of the body. A head that comes again
so says what it said before: the parser does not see it, nor the bytes of its body, which are counted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config.limits import LimitsConfig
from gateway.core.errors import (
    GatewayError,
    HeadTooLarge,
    MethodNotAllowed,
    RequestError,
    UnknownUrl,
)
from gateway.ingress.heads import KnownHead, joined, known_head, origin_form, without_upgrade
from gateway.observe.redact import redact

_SHOWN_BYTES: Final = 128  # of a request target in an error
_TRIES: Final = 8  # heads that are kept in vain before no more are kept
_MANY_CHUNKS: Final = 1000  # in one read: a millisecond


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client connection may hold; what it may wait for is in `Connections`."""

    max_bytes: int  # of a head; of trailers; of what frames a body without any of the body
    max_headers: int  # in a head and trailers together
    write_buffer_bytes: int  # unsent bytes from which the backend is not read any more

    @classmethod
    def of(cls, limits: LimitsConfig) -> ClientLimits:
        """Return what the settings allow."""
        return cls(limits.max_header_bytes, limits.max_headers, limits.buffer_bytes)


class RequestReader(HttpToolsProtocol):
    """The reading half of a connection. `cycle` is the last request whose head was read."""

    # With slots: these and uvicorn's are more than 30, and CPython looks up each method of such an object anew.
    __slots__ = (
        "_begun", "_head_bytes", "_in_chunks", "_kept_in_vain", "_known", "_left_bytes", "_limits", "_max_bytes",
        "_max_headers", "_read_bytes", "_refusal", "_trailer_bytes", "_trailers", "fields", "http11", "in_head",
        "keep_alive", "loose_bytes", "content_length", "url",
    )  # fmt: skip

    cycle: Any  # a Downstream or a PlainRequest

    def __init__(self, limits: ClientLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = limits
        self._max_headers = limits.max_headers
        self._max_bytes = limits.max_bytes
        # What the last head says, until another one begins. If it came again, `headers` and `fields` have
        # the Content-Length of the first time.
        self.url = b""
        self.fields: Mapping[bytes, bytes] = {}  # its headers, by name
        self.content_length: int | None = None
        self.http11 = True  # its version; False: 1.0
        self.keep_alive = False  # another request may follow
        self._known: KnownHead | None = None  # how it was written, if it may come again
        self.in_head = False  # a head has begun and is not whole
        self.loose_bytes = 0  # read since the last byte of a body or end of a request
        self._read_bytes = 0  # of the read that is being parsed
        self._head_bytes = 0  # of the read that the head began in: at least its share of that
        self._begun = 0  # heads, in that read
        self._kept_in_vain = 0  # heads that did not come again, one after the other
        self._left_bytes = 0  # of a body that the parser does not see
        self._in_chunks = False
        self._chunks = 0  # in the read that is being parsed
        self._trailers = 0
        self._trailer_bytes = 0
        self._refusal: GatewayError | None = None  # why a callback below stopped the parser

    @abstractmethod
    def on_ahead(self) -> None:
        """A request begins while the one before it is not answered."""

    @abstractmethod
    def on_head(self) -> None:
        """A head is whole and within its bounds: set `cycle` to its request."""

    @abstractmethod
    def on_head_again(self, whole: bytes | None) -> None:
        """The last head has come once more, behind a request that is answered: set `cycle` likewise.

        `whole` is the body, if all of it came too: then neither `on_body` nor `on_message_complete` follows.
        """

    def read(self, data: bytes) -> GatewayError | None:
        """Take one read; return an error if what came is no request that can be served, or has no end in sight.

        After an error nothing more may be read.
        """
        between = self._between_requests()
        if between and self._known is not None:
            data = self._take_known(self._known, data)
        elif self._left_bytes:
            data = self._count(data)
        if not data:
            return None
        error = self._parse(data)
        if between and error is None:
            self._keep_head(data)
        if self._chunks > _MANY_CHUNKS and not self.transport.is_closing():
            self._let_others_run()
        return error

    def _let_others_run(self) -> None:
        """Read on in the next turn: the loop would read up to 32 times in a row where so much comes."""
        self.transport.pause_reading()
        self.loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def request_line(self) -> tuple[str, str]:
        """Return method and path of the last request as far as they were read; without the query."""
        path = self.url.partition(b"?")[0]
        return (self.parser.get_method().decode() if path else "", path.decode("latin-1"))

    # --- heads that come again ----------------------------------------------------------------------

    def _between_requests(self) -> bool:
        """Whether the next byte is the first of a request, and those before it are answered."""
        last = self.cycle
        whole = last is None or (last.body_complete and last.response_complete)
        return whole and not self.loose_bytes

    def _keep_head(self, data: bytes) -> None:
        """Note how the head was written that a read began with, if it may come again.

        A client that writes each head anew, with a trace of its own, pays for that a few times only.
        """
        if self._begun == 1 and self.keep_alive and self._kept_in_vain < _TRIES:
            self._kept_in_vain += 1
            self._known = known_head(data, self.headers, self._max_bytes)

    def _take_known(self, known: KnownHead, data: bytes) -> bytes:
        """Take a head that comes again, and what came of its body; return what is behind them."""
        again = known.comes_again(data)
        if again is None:
            return data
        self.content_length, came = again
        self._kept_in_vain = 0
        if len(came) == self.content_length:
            self.on_head_again(came)
            return b""
        self._left_bytes = self.content_length
        self.on_head_again(None)
        return self._count(came)

    def _count(self, data: bytes) -> bytes:
        """Hand on what is of a body whose head came again; return what is behind it."""
        left = self._left_bytes
        body = data[:left]
        self._left_bytes = left - len(body)
        if body:
            self.cycle.on_body(body)
        if not self._left_bytes:
            self.cycle.on_message_complete()
        return data[left:]

    # --- heads that are parsed ----------------------------------------------------------------------

    def _parse(self, data: bytes) -> GatewayError | None:
        self._begun = self._chunks = 0
        self._read_bytes = len(data)
        self.loose_bytes += self._read_bytes
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._ignore(offer, data)
        except httptools.HttpParserError:
            return self._refusal or RequestError(
                "The request is not valid HTTP/1.1.", code="invalid_http"
            )
        return self._too_large() if self.loose_bytes > self._max_bytes else None

    # --- httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a head."""
        self.url = b""
        self.headers = []
        self._known = None
        self._begun += 1
        self.in_head = True
        self._head_bytes = self._read_bytes
        self._in_chunks = False
        self._trailers = self._trailer_bytes = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.on_ahead()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header. What a head may hold is checked at its end, and after each read of it."""
        if self.in_head:
            self.headers.append((name.lower(), value))
        else:
            self._drop_trailer(name, value)

    def on_headers_complete(self) -> None:
        """Check the head and hand it on."""
        if (
            len(self.headers) > self._max_headers
            or self._head_bytes + self.loose_bytes > self._max_bytes
        ):
            self._check_head()
        if self.parser.should_upgrade():
            self._refuse_tunnel()
            return  # `_ignore` has this head parsed once more
        version = self.parser.get_http_version()
        self.http11 = version == "1.1"
        if not self.http11 and version != "1.0":
            raise httptools.HttpParserError("neither HTTP/1.1 nor HTTP/1.0")
        self.in_head = False
        if not self.url.startswith(b"/") or self.url.find(b"#") >= 0:  # `in` takes thrice as long
            self._take_path()
        self.fields = fields = joined(self.headers)
        self.content_length = (
            int(fields[b"content-length"]) if b"content-length" in fields else None
        )
        self.keep_alive = self.http11 and self.parser.should_keep_alive()
        self.on_head()

    def on_chunk_header(self) -> None:
        """See to it, once, that nobody could frame this body in another way.

        The parser takes any list of codings that ends with chunked, and takes it in HTTP/1.0, too,
        where a proxy may not know it (RFC 9112 section 6.1).
        """
        self._chunks += 1
        if not self._in_chunks:
            self._in_chunks = True
            codings = [value for name, value in self.headers if name == b"transfer-encoding"]
            if len(codings) != 1 or codings[0].lower() != b"chunked" or not self.http11:
                self._refusal = RequestError(
                    "The body's Transfer-Encoding must be `chunked` alone, in HTTP/1.1.",
                    code="invalid_http",
                )
                raise httptools.HttpParserError("framing that others may not see")

    def on_body(self, body: bytes) -> None:
        """Hand body bytes to the request they belong to."""
        self.loose_bytes = 0
        self.cycle.on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        if self.parser.should_upgrade():
            return  # the end of a head that is parsed once more
        self.loose_bytes = 0
        self.cycle.on_message_complete()

    # --- inside -------------------------------------------------------------------------------------

    def _ignore(self, offer: httptools.HttpParserUpgrade, data: bytes | memoryview) -> None:
        """Have what follows an offer to change the protocol parsed, and all further offers ignored.

        The parser stops behind a head with such an offer and takes what follows for another protocol.
        So it gets the head again without the offer, then what follows.

        Raises:
            httptools.HttpParserError: this is not a request that can be served.
        """
        while True:
            data = memoryview(data)[offer.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = without_upgrade(method, self.url, version, self.headers)
            self.parser = httptools.HttpRequestParser(self)  # the other may be done after `close`
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as another:
                offer = another

    def _refuse_tunnel(self) -> None:
        """Refuse CONNECT, which has no path; the parser takes it for an offer, too."""
        if self.parser.get_method() == b"CONNECT":
            self._refusal = MethodNotAllowed("This gateway is not a proxy: CONNECT is not allowed.")
            raise httptools.HttpParserError("a tunnel")

    def _take_path(self) -> None:
        """Reduce a request target that is a whole URL, or has a fragment, to its path; refuse any other."""
        self.url = origin_form(self.url)
        if not self.url.startswith(b"/"):
            target = redact(self.url[:_SHOWN_BYTES].decode("latin-1"))
            self._refusal = UnknownUrl(f"Unknown request target: {target}")
            raise httptools.HttpParserError("no path")

    def _check_head(self) -> None:
        """Refuse a whole head that is too large; it may have come in one read, with other bytes."""
        headers = self.headers
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._max_headers or size > self._max_bytes:
            self._refusal = self._too_large()
            raise httptools.HttpParserError("the request head is too large")

    def _drop_trailer(self, name: bytes, value: bytes) -> None:
        """Drop a header behind a body in chunks; they are bounded like the head's, and with them."""
        self._trailers += 1
        self._trailer_bytes += len(name) + len(value)
        if (
            len(self.headers) + self._trailers > self._max_headers
            or self._trailer_bytes > self._max_bytes
        ):
            self._refusal = self._too_large()
            raise httptools.HttpParserError("the trailers are too large")

    def _too_large(self) -> HeadTooLarge:
        limits = self._limits
        return HeadTooLarge(
            f"The request head is larger than {limits.max_bytes} bytes or has more than {limits.max_headers} headers."
        )
