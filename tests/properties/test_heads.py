"""A head without its offer to upgrade is framed as it was with it."""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ingress.heads import joined, origin_form, without_upgrade


class Seen:
    """What a parser reads of one request."""

    def __init__(self):
        self.url, self.headers, self.body, self.complete = b"", [], b"", False

    def on_url(self, url):
        self.url += url

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.complete = True


names = st.from_regex(r"[a-z][a-z0-9-]{0,15}", fullmatch=True).map(str.encode)
values = st.from_regex(r"([!-~\x80-\xff]([ -~\t]{0,20}[!-~])?)?", fullmatch=True).map(
    lambda text: text.encode("latin-1")
)
framing = st.sampled_from(
    [(b"content-length", b"5"), (b"transfer-encoding", b"chunked"), (b"content-length", b"0")]
)
BODIES = {b"5": b"hello", b"chunked": b"5\r\nhello\r\n0\r\n\r\n", b"0": b""}
FRAMES = {b"content-length", b"transfer-encoding", b"upgrade", b"connection"}


@given(
    st.lists(st.tuples(names.filter(lambda name: name not in FRAMES), values), max_size=6),
    framing,
    st.sampled_from([b"h2c", b"websocket", b"a, b/2"]),
    st.sampled_from([b"Upgrade", b"close, upgrade", b"keep-alive, Upgrade, HTTP2-Settings"]),
    st.sampled_from(["1.0", "1.1"]),
)
def test_the_head_again_reads_the_same_but_for_the_offer(others, frame, offer, connection, version):
    headers = [*others, frame, (b"upgrade", offer), (b"connection", connection)]
    seen = Seen()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(without_upgrade(b"POST", b"/v1/x?y=1", version, headers))
    assert seen.headers == [each for each in headers if each[0] != b"upgrade"]
    assert (seen.url, parser.get_http_version(), parser.should_upgrade()) == (
        b"/v1/x?y=1", version, False,
    )  # fmt: skip
    parser.feed_data(BODIES[frame[1]])
    assert seen.complete
    assert seen.body == (b"" if frame[1] == b"0" else b"hello")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://gateway/v1/models?x=1", b"/v1/models?x=1"),
        (b"HTTPS://u:p@[::1]:8080/a", b"/a"),
        (b"http://gateway", b"/"),
        (b"http://gateway?x=http://other/", b"/?x=http://other/"),
        (b"http://gateway//v1", b"//v1"),
        (b"http:///v1", b"http:///v1"),  # no host: not a URL of this scheme
        (b"ftp://gateway/v1", b"ftp://gateway/v1"),
        (b"gateway:443", b"gateway:443"),
        (b"http://gateway/v1?x#y", b"/v1?x"),
        (b"/v1?x#y?z", b"/v1?x"),
        (b"*", b"*"),
        (b"/http://gateway/v1", b"/http://gateway/v1"),
    ],
)
def test_a_whole_url_is_reduced_to_its_path(target, path):
    assert origin_form(target) == path


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([], {}),
        ([(b"a", b"1"), (b"b", b"2")], {b"a": b"1", b"b": b"2"}),
        ([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")], {b"a": b"1,3", b"b": b"2"}),
        ([(b"a", b"1"), (b"a", b"1")], {b"a": b"1"}),  # sent twice, and means one thing
    ],
)
def test_different_values_of_one_header_are_joined(headers, fields):
    assert joined(headers) == fields
