"""A grid of requests whose framing is odd, doubtful or wrong, each on a connection of its own.

Each comes alone, and once more behind a request whose head is alike: what is known of that must not be
taken for what the other says.

For every one: as many requests reached the engine as were answered 200, and none that another hid.
What is malformed is answered at most once, the connection closes, and nothing behind it is served.

In a case `@K` is a key's header line, `@B` a valid body, `@L` its length, `@C` the same in chunks,
`@S` a whole valid request that must not be served unless the case says so.

Nothing here depends on time: the deadlines are far longer than a slow machine needs, but for the
bodies that never end. Once all replies that are due have come, a last request asks for a page that
does not exist. Its 404 shows that the connection is in step; behind what is malformed it must not come.
"""

import asyncio
import json
import re
from dataclasses import dataclass

import pytest

from tests.abuse.support import FAST, gateway, ledger, story

PATIENT = "timeouts: {header: 100s, body: 100s, keep_alive: 100s}"
NEVER_ENDS = "timeouts: {header: 100s, body: 1s, keep_alive: 100s}"  # a 408, however early or late
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
MOST_S = 40.0  # for one case; what has come until then is judged
START = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n@K"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
WHOLE = re.compile(rb"HTTP/1\.1 200 .*?\r\ncontent-length: (\d+)\r\n.*?\r\n\r\n", re.DOTALL)


@dataclass(frozen=True)
class Case:
    name: str
    sent: str
    statuses: tuple[int, ...]  # of all replies, in order
    smuggled: int = 0  # of those 200 that answer `@S`


def post(name, lines, body, *statuses, smuggled=0):
    return Case(name, START + lines + "\r\n" + body, statuses, smuggled)


def whole(name, sent, *statuses, smuggled=0):
    return Case(name, sent, statuses, smuggled)


LENGTH = "content-length: @L\r\n"
CHUNKED = "transfer-encoding: chunked\r\n"
END = "0\r\n\r\n"

CASES = [
    # --- plainly valid
    post("length", LENGTH, "@B", 200),
    post("chunks", CHUNKED, "@C" + END, 200),
    post("length, then another request", LENGTH, "@B@S", 200, 200, smuggled=1),
    post("chunks, then another request", CHUNKED, "@C" + END + "@S", 200, 200, smuggled=1),
    post("blank lines before the next request", LENGTH, "@B\r\n\r\n@S", 200, 200, smuggled=1),
    post("close, then another request", LENGTH + "connection: close\r\n", "@B@S", 200),
    whole("blank lines first", "\r\n\r\n" + START + LENGTH + "\r\n@B", 200),
    whole("HTTP/1.0", START.replace("1.1", "1.0") + LENGTH + "\r\n@B", 200),
    whole("HTTP/1.0 with another behind", START.replace("1.1", "1.0") + LENGTH + "\r\n@B@S", 200),
    whole("absolute form", START.replace("/v1", "http://x/v1", 1) + LENGTH + "\r\n@B", 200),
    whole("absolute form of another host", START.replace("/v1", "http://y/v1", 1) + LENGTH + "\r\n@B", 200),
    # --- Content-Length
    post("length twice, equal", LENGTH * 2, "@B", 400),
    post("length twice, different", LENGTH + "content-length: 1\r\n", "@B", 400),
    post("length twice, smaller first", "content-length: 1\r\n" + LENGTH, "@B", 400),
    post("length as a list, equal", "content-length: @L, @L\r\n", "@B", 400),
    post("length as a list, different", "content-length: @L, 1\r\n", "@B", 400),
    post("length with a plus", "content-length: +@L\r\n", "@B", 400),
    post("length negative", "content-length: -1\r\n", "@B", 400),
    post("length hexadecimal", "content-length: 0x40\r\n", "@B", 400),
    post("length with a unit", "content-length: @Lb\r\n", "@B", 400),
    post("length with a fraction", "content-length: @L.0\r\n", "@B", 400),
    post("length empty", "content-length:\r\n", "@B", 400),
    post("length with a space inside", "content-length: 1 0\r\n", "@B", 400),
    post("length with an underscore", "content-length: 1_0\r\n", "@B", 400),
    post("length beyond 64 bits", "content-length: 18446744073709551617\r\n", "@B", 400),
    post("length of 64 bits", "content-length: 9223372036854775807\r\n", "@B", 413),
    post("length with zeros in front", "content-length: 000@L\r\n", "@B", 200),
    post("length with a tab before it", "content-length:\t@L\r\n", "@B", 200),
    post("length with blanks behind it", "content-length: @L \t\r\n", "@B", 200),
    post("length in Arabic digits", "content-length: \u0661\u0660\r\n", "@B", 400),
    post("length with a vertical tab", "content-length: \x0b@L\r\n", "@B", 400),
    post("length with a form feed behind", "content-length: @L\x0c\r\n", "@B", 400),
    post("length too small hides a request", "content-length: 2\r\n", "{}@S", 400, 200, smuggled=1),
    post("length zero, a body behind", "content-length: 0\r\n", "@S", 400, 200, smuggled=1),
    post("no length, a body behind", "", "{}@S", 400),
    post("no length, a request behind", "", "@S", 400, 200, smuggled=1),
    post("length too large, half closed", "content-length: 100000\r\n", "@B", 408),
    # --- Content-Length and Transfer-Encoding
    post("length and chunks", LENGTH + CHUNKED, "@C" + END, 400),
    post("chunks and length", CHUNKED + LENGTH, "@C" + END, 400),
    post("length zero and chunks", "content-length: 0\r\n" + CHUNKED, "@C" + END + "@S", 400),
    post("chunks and a length that hides", CHUNKED + "content-length: 4\r\n", "@C" + END + "@S", 400),
    post("an underscore for the dash", "content_length: 1\r\n" + CHUNKED, "@C" + END, 200),
    post("chunks under an underscore", LENGTH + "transfer_encoding: chunked\r\n", "@B", 200),
    # --- Transfer-Encoding
    post("chunked in capitals", "Transfer-Encoding: CHUNKED\r\n", "@C" + END, 200),
    post("chunked twice", CHUNKED * 2, "@C" + END, 400),
    post("chunked, chunked", "transfer-encoding: chunked, chunked\r\n", "@C" + END, 400),
    post("identity", "transfer-encoding: identity\r\n" , "@B", 400),
    post("identity and length", "transfer-encoding: identity\r\n" + LENGTH, "@B", 400),
    post("gzip", "transfer-encoding: gzip\r\n", "@B", 400),
    post("gzip, chunked", "transfer-encoding: gzip, chunked\r\n", "@C" + END, 400),
    post("chunked, gzip", "transfer-encoding: chunked, gzip\r\n", "@C" + END, 400),
    post("chunked, identity", "transfer-encoding: chunked, identity\r\n", "@C" + END, 400),
    post("xchunked", "transfer-encoding: xchunked\r\n", "@C" + END, 400),
    post("chunkedx", "transfer-encoding: chunkedx\r\n", "@C" + END, 400),
    post("chunked in quotes", 'transfer-encoding: "chunked"\r\n', "@C" + END, 400),
    post("chunked with a parameter", "transfer-encoding: chunked;q=1\r\n", "@C" + END, 400),
    post("chunked with a vertical tab", "transfer-encoding: \x0bchunked\r\n", "@C" + END, 400),
    post("chunked with a NUL", "transfer-encoding: chunked\x00\r\n", "@C" + END, 400),
    post("an empty coding", "transfer-encoding:\r\n", "@C" + END, 400),
    post("a comma and chunked", "transfer-encoding: ,chunked\r\n", "@C" + END, 400),
    post("chunked and a comma", "transfer-encoding: chunked,\r\n", "@C" + END, 400),
    post("chunked on a folded line", "transfer-encoding:\r\n chunked\r\n", "@C" + END, 400),
    post("codings in two lines", "transfer-encoding: gzip\r\n" + CHUNKED, "@C" + END, 400),
    post("codings in two lines, turned", CHUNKED + "transfer-encoding: gzip\r\n", "@C" + END, 400),
    whole("chunks in HTTP/1.0", START.replace("1.1", "1.0") + CHUNKED + "\r\n@C" + END, 400),
    whole("both in HTTP/1.0", START.replace("1.1", "1.0") + LENGTH + CHUNKED + "\r\n@C" + END, 400),
    # --- chunks
    post("an extension", CHUNKED, "@C".replace("@C", "@E") + END, 200),
    post("an extension at the end", CHUNKED, "@C0;last=1\r\n\r\n", 200),
    post("a quoted extension that holds a line end", CHUNKED, '@C0;a="\r\n\r\n@S"\r\n\r\n', 400),
    post("an extension with a bare LF", CHUNKED, "@C0;a\n\r\n@S", 400),
    post("size with 0x", CHUNKED, "0x2\r\n{}\r\n" + END, 400),
    post("size with a plus", CHUNKED, "+2\r\n{}\r\n" + END, 400),
    post("size with a minus", CHUNKED, "-2\r\n{}\r\n" + END, 400),
    post("size with an underscore", CHUNKED, "0_2\r\n{}\r\n" + END, 400),
    post("size with a space before it", CHUNKED, " 2\r\n{}\r\n" + END, 400),
    post("size with a space behind it", CHUNKED, "2 \r\n{}\r\n" + END, 400),
    post("size empty", CHUNKED, "\r\n{}\r\n" + END, 400),
    post("size of 17 digits", CHUNKED, "10000000000000002\r\n{}\r\n" + END, 400),
    post("size with zeros in front", CHUNKED, "0000@X\r\n@B\r\n" + END, 200),
    post("size beyond the data", CHUNKED, "4\r\n{}\r\n" + END, 400),
    post("size short of the data", CHUNKED, "1\r\n{}\r\n" + END, 400),
    post("size of 2 GiB", CHUNKED, "80000000\r\n{}", 408),
    post("bare LF behind the size", CHUNKED, "2\n{}\r\n" + END, 400),
    post("bare LF behind the data", CHUNKED, "2\r\n{}\n" + END, 400),
    post("bare CR behind the size", CHUNKED, "2\r{}\r\n" + END, 400),
    post("nothing behind the data", CHUNKED, "2\r\n{}" + END, 400),
    post("a letter for the size", CHUNKED, "g\r\n{}\r\n" + END, 400),
    post("no end", CHUNKED, "@C", 408),
    post("an end without its last line", CHUNKED, "@C0\r\n", 408),
    post("an end in bare LF", CHUNKED, "@C0\n\n@S", 400),
    # --- trailers
    post("a trailer", CHUNKED, "@C0\r\nx: y\r\n\r\n", 200),
    post("a trailer that names a length", CHUNKED, "@C0\r\ncontent-length: 5\r\n\r\n@S", 400),
    post("a trailer that names a coding", CHUNKED, "@C0\r\n" + CHUNKED + "\r\n@S", 400),
    post("a trailer that names a key", CHUNKED, "@C0\r\nauthorization: Bearer no\r\n\r\n", 200),
    post("a trailer without a colon", CHUNKED, "@C0\r\nxy\r\n\r\n@S", 400),
    # --- lines of a head
    post("a space before the colon", "content-length : @L\r\n", "@B", 400),
    post("a tab before the colon", "transfer-encoding\t: chunked\r\n", "@C" + END, 400),
    post("a folded line", "x: a\r\n b\r\n" + LENGTH, "@B", 400),
    post("a folded length", "content-length: @L\r\n 1\r\n", "@B", 400),
    post("a space before the name", " x: a\r\n" + LENGTH, "@B", 400),
    post("an empty name", ": a\r\n" + LENGTH, "@B", 400),
    post("no colon", "nothing\r\n" + LENGTH, "@B", 400),
    post("a NUL in a name", "x\x00y: a\r\n" + LENGTH, "@B", 400),
    post("a NUL in a value", "x: a\x00b\r\n" + LENGTH, "@B", 400),
    post("a bare CR in a value", "x: a\rcontent-length: 1\r\n" + LENGTH, "@B", 400),
    post("a bare LF ends a line", "x: a\n" + LENGTH, "@B", 400),
    post("a bare LF hides a length", "x: a\ncontent-length: 2\r\n" + LENGTH, "@B", 400),
    whole("bare LF throughout", (START + LENGTH).replace("\r\n", "\n") + "\n@B", 400),
    post("bytes above ASCII in a name", "x\xff: a\r\n" + LENGTH, "@B", 400),
    post("bytes above ASCII in a value", "x: \xff\xfe\r\n" + LENGTH, "@B", 200),
    # --- request lines
    whole("no version", START.replace(" HTTP/1.1", "") + LENGTH + "\r\n@B", 400),
    whole("HTTP/0.9", "GET /v1/models\r\n\r\n@S", 400),
    whole("HTTP/1.2", START.replace("1.1", "1.2") + LENGTH + "\r\n@B", 400),
    whole("HTTP/2.0", START.replace("1.1", "2.0") + LENGTH + "\r\n@B", 400),
    whole("HTTP/11", START.replace("1.1", "11") + LENGTH + "\r\n@B", 400),
    whole("the preface of HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n@S", 400),
    whole("a lower-case method", START.replace("POST", "post", 1) + LENGTH + "\r\n@B", 400),
    whole("an unknown method", START.replace("POST", "FROB", 1) + LENGTH + "\r\n@B", 400),
    whole("two spaces", START.replace(" ", "  ", 1) + LENGTH + "\r\n@B", 200),
    whole("a tab for a space", START.replace(" ", "\t", 1) + LENGTH + "\r\n@B", 400),
    whole("a space in the target", START.replace("/v1/chat", "/v1 /chat", 1) + LENGTH + "\r\n@B", 400),
    whole("a NUL in the target", START.replace("/chat", "/\x00chat", 1) + LENGTH + "\r\n@B", 400),
    whole("a head within the target", START.replace("/chat", "/a\r\nx: y", 1) + LENGTH + "\r\n@B", 400),
    whole("a TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    whole("a SOCKS hello", "\x05\x01\x00", 400),
    whole("CONNECT", "CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n@S", 405),
    # --- bodies where none is read
    whole("GET with a body that is a request", "GET /livez HTTP/1.1\r\nhost: x\r\ncontent-length: @N\r\n\r\n@S", 200),
    whole("404 with a body that is a request", "POST /no HTTP/1.1\r\nhost: x\r\ncontent-length: @N\r\n\r\n@S", 404),
    whole("401 with a body that is a request", START.replace("@K", "") + "content-length: @N\r\n\r\n@S", 401),
    whole("GET without a body, then a request", "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n@S", 200, 200, smuggled=1),
    # --- Expect, Upgrade
    post("expect", LENGTH + "expect: 100-continue\r\n", "@B", 200),
    post("expect something else", LENGTH + "expect: 200-ok\r\n", "@B", 200),
    post("an offer of h2c", LENGTH + "connection: upgrade\r\nupgrade: h2c\r\n", "@B@S", 200, 200, smuggled=1),
    post("an offer and chunks", CHUNKED + "connection: upgrade\r\nupgrade: x\r\n", "@C" + END + "@S", 200, 200, smuggled=1),
    post("an offer and both lengths", LENGTH + CHUNKED + "connection: upgrade\r\nupgrade: x\r\n", "@B@S", 400),
]  # fmt: skip

FIRST = post("length", LENGTH, "@B", 200)  # most cases are alike up to a length, or but for it

PLAIN_200 = {"GET with a body that is a request", "GET without a body, then a request"}


def spelled(case, number, key):
    """Return the bytes of a case; what reaches the engine of it can be told by its number."""

    def body(mark):
        said = {"role": "user", "content": f"{mark}-{number}."}
        return json.dumps({"model": "m", "max_tokens": 1, "messages": [said]})

    own, other = body("own"), body("smuggled")
    line = f"authorization: Bearer {key}\r\n"
    request = START.replace("@K", line) + f"content-length: {len(other)}\r\n\r\n{other}"
    sent = case.sent
    for mark, value in {
        "@K": line, "@B": own, "@L": str(len(own)), "@X": f"{len(own):x}",
        "@C": f"5\r\n{own[:5]}\r\n{len(own) - 5:X}\r\n{own[5:]}\r\n",
        "@E": f"{len(own):x};a=b;c\r\n{own}\r\n", "@N": str(len(request)), "@S": request,
    }.items():  # fmt: skip
        sent = sent.replace(mark, value)
    try:
        return sent.encode("latin-1")
    except UnicodeEncodeError:
        return sent.encode()


class Wire(asyncio.Protocol):
    """A connection that keeps what it got, also when it is reset."""

    def __init__(self):
        self.got = b""
        self.lost = False
        self.changed = asyncio.Event()

    def data_received(self, data):
        self.got += data
        self.changed.set()

    def connection_lost(self, exc):
        self.lost = True
        self.changed.set()

    async def until(self, count):
        """Wait until so many replies have begun; None: until the connection is lost."""
        while not self.lost and (count is None or len(statuses(self.got)) < count):
            self.changed.clear()
            await self.changed.wait()

    async def until_answered(self):
        """Wait for one whole reply, and forget it."""
        while not (found := WHOLE.match(self.got)) or len(self.got) < found.end() + int(found[1]):
            assert not self.lost
            self.changed.clear()
            await self.changed.wait()
        self.got = b""


def statuses(got):
    return [int(status) for status in STATUS.findall(got) if status != b"100"]


async def exchange(world, case, data, *, bytewise, first=b""):
    """Return what came back of a case, but for the reply to a `first` request before it."""
    loop, step = asyncio.get_running_loop(), 1 if bytewise else len(data)
    transport, wire = await loop.create_connection(Wire, "127.0.0.1", world.process.public_port)
    try:
        async with asyncio.timeout(MOST_S):
            if first:
                transport.write(first)
                await wire.until_answered()
            for place in range(0, len(data), step):
                if transport.is_closing():
                    break
                transport.write(data[place : place + step])
                await asyncio.sleep(0)  # each byte is a read of its own: the gateway runs here, too
            await wire.until(len(case.statuses))
            if not transport.is_closing():
                transport.write(LAST)
            await wire.until(None)
    except TimeoutError:
        wire.got += b"<not closed>"
    finally:
        transport.abort()
    return wire.got


def judged(case, number, got, seen):
    """Return what is wrong with what came of a case; None when nothing is.

    Garbage behind a request that was answered already gets a 400 of its own.
    """
    replies = statuses(got)
    own, smuggled = (
        sum(f"{mark}-{number}." in each for each in seen) for mark in ("own", "smuggled")
    )
    answered = replies.count(200) - (case.name in PLAIN_200)
    if tuple(replies) not in (case.statuses, (*case.statuses, 400), (*case.statuses, 404)):
        return f"{case.name}: replies {replies}, not {case.statuses}"
    if got.endswith(b"<not closed>"):
        return f"{case.name}: replies {replies}, and the connection is not closed"
    if own + smuggled != answered or smuggled != case.smuggled:
        return (
            f"{case.name}: {own} and {smuggled} hidden reached the engine, {answered} answered 200"
        )
    for reply in got.split(b"HTTP/1.1 ")[1:]:
        if b"invalid_http" in reply and b"connection: close" not in reply:
            return f"{case.name}: the connection stays open"
    if b"invalid_http" in got and b"invalid_http" not in got.rpartition(b"HTTP/1.1 ")[2]:
        return f"{case.name}: a request behind what is malformed is answered"
    return None


@pytest.mark.parametrize("ends", [True, False], ids=["that end", "without end"])
@pytest.mark.parametrize("way", ["in one piece", "byte by byte", "behind one that is alike"])
def test_as_many_requests_reach_the_engine_as_are_answered_200(way, ends):
    cases = [
        (number, case) for number, case in enumerate(CASES) if (408 not in case.statuses) is ends
    ]

    async def check():
        extra = PATIENT if ends else NEVER_ENDS
        async with gateway(FAST, extra=extra) as world, ledger(world):
            before = spelled(FIRST, len(CASES), world.key) if way.startswith("behind") else b""
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        exchange(
                            world,
                            case,
                            spelled(case, number, world.key),
                            bytewise=way == "byte by byte",
                            first=before,
                        )
                    )
                    for number, case in cases
                ]
            seen = [repr(each.body) for each in world.sims[0].requests if each.method == "POST"]
            wrong = [
                found
                for (number, case), task in zip(cases, tasks, strict=True)
                if (found := judged(case, number, task.result(), seen))
            ]
            assert not wrong, "\n".join(wrong)

    story(check, seconds=55)()


def test_the_grid_is_whole():
    assert len(CASES) >= 105
    assert len({case.name for case in CASES}) == len(CASES)
