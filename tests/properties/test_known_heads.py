"""A head that comes again is read as if it were parsed again, whatever differs in it.

What comes byte by byte is always parsed, for only a read that holds a whole head can be known. So a
reader that gets its bytes one at a time says what another must say that gets them in larger pieces.
"""

import asyncio

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ingress.heads import known_head
from gateway.ingress.reader import ClientLimits, RequestReader

LIMITS = ClientLimits(max_bytes=32 * 1024, max_headers=100, write_buffer_bytes=1024)
CONFIG = uvicorn.Config(lambda scope: None, http="httptools", ws="none", lifespan="off")
STATE = uvicorn.Server(CONFIG).server_state


class Request:
    def __init__(self, said):
        self.said = said
        self.body = b""
        self.body_complete = self.response_complete = False

    def on_body(self, data):
        self.body += data

    def on_message_complete(self):
        assert not self.body_complete
        self.body_complete = True


class Reader(RequestReader):
    """Keeps what it reads. A request is answered when `answer` is called."""

    def __init__(self, loop):
        super().__init__(LIMITS, config=CONFIG, server_state=STATE, app_state={}, _loop=loop)
        self.requests = []
        self.parsed = self.ahead = 0

    def on_ahead(self):
        self.ahead += 1

    def on_message_begin(self):
        super().on_message_begin()
        self.parsed += 1

    def on_head(self):
        self.on_head_again(None)

    def on_head_again(self, whole):
        method = self.parser.get_method()
        headers = [each for each in self.headers if each[0] != b"content-length"]
        said = (
            method,
            self.url,
            headers,
            dict(headers) == self.others(),
            self.content_length,
            self.http11,
            self.keep_alive,
        )
        self.cycle = Request(said)
        if whole is not None:
            self.cycle.on_body(whole)
            self.cycle.on_message_complete()
        self.requests.append(self.cycle)

    def others(self):
        return {name: value for name, value in self.fields.items() if name != b"content-length"}

    def answer(self):
        for request in self.requests:
            request.response_complete = request.body_complete

    def found(self):
        return self.ahead, [(each.said, each.body, each.body_complete) for each in self.requests]


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def read(loop, pieces, *, bytewise, answers=True):
    """Return a reader that got these pieces, and why it was stopped, if it was.

    What is whole is answered after each piece if it `answers`.
    """
    reader = Reader(loop)
    for piece in pieces:
        for part in [piece[at : at + 1] for at in range(len(piece))] if bytewise else [piece]:
            if part and (error := reader.read(part)) is not None:
                return reader, error.code
        if answers:
            reader.answer()
    return reader, None


def check(loop, *pieces, answers=True):
    """Read pieces, and hold that each byte is read as if every head in them were parsed."""
    reader, error = read(loop, pieces, bytewise=False, answers=answers)
    parser, expected = read(loop, pieces, bytewise=True, answers=answers)
    assert (error, reader.found()) == (expected, parser.found()), pieces
    assert parser.parsed >= len(parser.requests)  # that one knows of no head
    return reader


def post(body, *lines, length=None, first=b"POST /v1/chat/completions HTTP/1.1"):
    told = b"%d" % len(body) if length is None else length
    head = b"\r\n".join((first, b"Host: x", *lines)) + b"\r\n\r\n"
    return head.replace(b"@", told) + body


ODD_LENGTHS = [
    b"", b"+3", b"-1", b"0x3", b" 3", b"3 ", b"3\t", b"3,3", b"3.0", b"03", b"0000000003", b"1_0", b"3\x0b", b"3\x00",
    b"3\r\n 1", b"3\r\nContent-Length: 3", b"3\r\nTransfer-Encoding: chunked", b"3\n", b"999999999", b"18446744073709551617",
    "\u0663".encode(),
]  # fmt: skip
USUAL = [(b"Content-Length: @",), (b"Accept: */*", b"Content-Length: @", b"User-Agent: x/1")]
LINES = [
    *(USUAL * 4), (b"content-length:@", b"X-Last: 1"), (b"A: b", b"CONTENT-LENGTH:\t@", b"B: c"),
    (b"Content-Length: @ ",), (b"Connection: close", b"Content-Length: @"), (b"Transfer-Encoding: chunked",),
    (b"Connection: keep-alive", b"Content-Length: @"), (b"X: \r\n folded", b"Content-Length: @"),
    (b"Content-Length: @", b"Upgrade: h2c", b"Connection: upgrade"), (b"Expect: 100-continue", b"Content-Length: @"),
    (b"Same: 1", b"Same: 2", b"Content-Length: @"),
]  # fmt: skip
FIRST = [
    *([b"POST /v1/chat/completions HTTP/1.1"] * 6), b"POST /v1/completions?x=1 HTTP/1.1", b"GET /v1/models HTTP/1.1",
    b"POST http://x/v1/completions HTTP/1.1", b"POST /v1/completions HTTP/1.0", b"\r\nPOST / HTTP/1.1",
]  # fmt: skip
BODIES = [
    b"",
    b"{}",
    b"abc",
    b"12\r\n\r\n",
    b"2\r\n{}\r\n0\r\n\r\n",
    post(b"{}", b"Content-Length: @"),
]


rarely = st.sampled_from([False, False, False, True])


@st.composite
def conversations(draw):
    """Requests of one client on one connection, most of them alike, in pieces as they may be read."""
    lines, first = draw(st.sampled_from(LINES)), draw(st.sampled_from(FIRST))
    pieces = []
    for number in range(draw(st.integers(2, 5))):
        body = draw(st.sampled_from(BODIES))
        length = draw(st.sampled_from(ODD_LENGTHS)) if number and draw(rarely) else None
        sent = post(body, *lines, length=length, first=first)
        if number and draw(rarely):
            at = draw(st.integers(0, len(sent)))
            new = draw(st.binary(max_size=2) | st.sampled_from([b"\r\n", b"\n", b" ", b":", b"1"]))
            sent = sent[:at] + new + sent[at + draw(st.integers(0, 3)) :]
        cuts = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=2))) if draw(rarely) else []
        pieces += [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        if len(pieces) > 1 and draw(rarely):
            pieces[-2:] = [pieces[-2] + pieces[-1]]
    return pieces


PLAIN = post(b"abc", b"Content-Length: @")
OTHER = post(b"x", b"Other: 1")


@settings(max_examples=300)
@given(conversations(), st.booleans())
def test_every_byte_is_read_as_if_each_head_were_parsed(loop, pieces, answers):
    check(loop, *pieces, answers=answers)


@pytest.mark.parametrize("lines", LINES, ids=repr)
def test_so_is_any_length(loop, lines):
    for length in ODD_LENGTHS:
        check(loop, post(b"abc", *lines), post(b"abc", *lines, length=length), PLAIN)


@pytest.mark.parametrize(
    "new", [b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"0", b"9", b"x", b"\x00", b"\xff"]
)
def test_so_is_a_byte_more_or_less_or_another_anywhere(loop, new):
    for at in range(len(PLAIN)):
        check(loop, PLAIN, PLAIN[:at] + new + PLAIN[at:], PLAIN)
        check(loop, PLAIN, PLAIN[:at] + new + PLAIN[at + 1 :], PLAIN)


@pytest.mark.parametrize(
    "behind",
    [
        [PLAIN[PLAIN.find(b"3\r\n") :]],  # what is before the length is missing
        [post(b"abc", b"Content-Length: @", b"Another: line")],
        [OTHER, PLAIN, PLAIN],
        [post(b"", b"Transfer-Encoding: chunked") + b"0\r\n\r\n", PLAIN],
        [b"P", PLAIN],
        [b"\r\n", PLAIN, PLAIN],
        [PLAIN + PLAIN[:40], PLAIN[40:]],
        [PLAIN + post(b"", b"Ctl: 1", b"Content-Length: @", first=b"POST /other HTTP/1.1"), PLAIN],
        [PLAIN + post(b"abc", b"Content-Length: @", first=b"POST /other HTTP/1.1"), PLAIN],
        [post(b"", b"Content-Length: @") + PLAIN, PLAIN],
        [PLAIN[:-2], b"b", b"c" + PLAIN],
        [post(b"abc", b"Content-Length: @ "), post(b"abc", b"Content-Length: @ 3")],
    ],
)  # fmt: skip
@pytest.mark.parametrize("answers", [True, False])
def test_so_is_what_comes_behind_a_head_that_is_known(loop, behind, answers):
    check(loop, *behind, answers=answers)
    check(loop, PLAIN, *behind, answers=answers)
    check(loop, PLAIN, PLAIN, *behind, answers=answers)


def test_a_head_that_comes_again_is_not_parsed(loop):
    bodies = [b"abc", b"", b"de" * 500]
    reader, error = read(
        loop, [post(body, b"Content-Length: @") for body in bodies], bytewise=False
    )
    assert error is None
    assert (reader.parsed, [each.body for each in reader.requests]) == (1, bodies)


def test_nor_is_its_body_however_it_comes(loop):
    again = post(b"abcdef", b"Content-Length: @")
    reader, _ = read(loop, [PLAIN, again[:-6], again[-6:-2], again[-2:] + PLAIN], bytewise=False)
    assert [each.body for each in reader.requests] == [b"abc", b"abcdef", b"abc"]
    assert reader.parsed == 2  # what comes behind a request in one read is parsed


def test_another_head_is_parsed_and_known_from_then_on(loop):
    other = post(b"x", b"Other: 1", b"Content-Length: @")
    reader, _ = read(loop, [PLAIN, PLAIN, other, other, PLAIN], bytewise=False)
    assert (reader.parsed, len(reader.requests)) == (3, 5)


def test_what_never_comes_again_is_no_longer_kept(loop):
    traced = [post(b"x", b"Trace: %d" % number, b"Content-Length: @") for number in range(20)]
    reader, _ = read(loop, [*traced, traced[-1]], bytewise=False)
    assert (reader.parsed, len(reader.requests)) == (21, 21)


def test_no_large_head_is_kept():
    line = (b"x", b"y" * 4096)
    head = b"POST / HTTP/1.1\r\nx: %b\r\ncontent-length: 0\r\n\r\n" % line[1]
    assert known_head(head, [line, (b"content-length", b"0")], 32 * 1024) is None
    small = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
    assert known_head(small, [(b"content-length", b"0")], len(small)) is None
    assert known_head(small, [(b"content-length", b"0")], len(small) + 9) is not None
