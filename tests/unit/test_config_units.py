"""How settings are written: units, token counts, addresses, backend URLs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from gateway.config.units import (
    check_backend_url,
    format_duration,
    format_size,
    parse_duration,
    parse_listen,
    parse_size,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("2m", 120), ("1h", 3600), ("1h30m", 5400), ("30d", 2592000)]
    + [("1.5s", 1.5), (" 2s ", 2), ("0s", 0)],
)
def test_a_duration_is_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512B", 512), ("8KiB", 8192), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("8MB", 8_000_000)]
    + [("1.5 KiB", 1536)],
)
def test_a_size_is_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "tokens"), [(4096, 4096), ("4096", 4096), ("32k", 32768), ("1M", 1 << 20)]
)
def test_a_token_count_may_be_in_powers_of_two(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("parse", [parse_duration, parse_size])
@pytest.mark.parametrize("value", [30, 1.5, "30"])
def test_a_bare_number_is_refused_with_the_unit_to_write(parse, value):
    with pytest.raises(PydanticCustomError) as refused:
        parse(value)
    assert refused.value.type == "needs_unit"
    assert f"write {value}" in refused.value.message()


@pytest.mark.parametrize(
    "value", ["", "s", "1w", "1s!", "-1s", "-1", -1, math.nan, math.inf, "∞", True, None, [], {}]
)
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(PydanticCustomError, match="is not a duration such as 500ms") as refused:
        parse_duration(value)
    assert "True" not in refused.value.message()


@pytest.mark.parametrize("value", ["", "MiB", "1Mb", "1 XB", "-1B", True, None, []])
def test_what_is_no_size_is_refused(value):
    with pytest.raises(PydanticCustomError):
        parse_size(value)


@pytest.mark.parametrize("value", ["", "k", "1.5k", "32G", "-1", True, 1.5, None, []])
def test_what_is_no_token_count_is_refused(value):
    with pytest.raises(PydanticCustomError):
        parse_tokens(value)


@pytest.mark.parametrize(
    ("parse", "text", "most"),
    [(parse_duration, "36501d", "36500d"), (parse_duration, "9" * 400 + "s", "36500d")]
    + [(parse_size, "1025TiB", "1024TiB"), (parse_size, "9" * 400 + "B", "1024TiB")]
    + [(parse_tokens, "9" * 5000, "1073741824M"), (parse_tokens, 1 << 60, "1073741824M")],
)
def test_what_is_larger_than_can_be_is_refused_with_the_most(parse, text, most):
    with pytest.raises(PydanticCustomError, match=f"at most {most}"):
        parse(text)
    assert parse(most) > 0


@given(st.integers(0, 10**11))
def test_a_duration_survives_being_written(ms):
    assert parse_duration(format_duration(ms / 1000)) == pytest.approx(ms / 1000)


@given(st.integers(0, 1 << 45))
def test_a_size_survives_being_written(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:8080", True), ("localhost:1", True), ("[::1]:8080", True), ("127.8.8.8:0", True)]
    + [("0.0.0.0:80", False), ("[::]:80", False), ("gw.example:443", False)]
    + [("unix:/run/gw.sock", True)],
)
def test_an_address_is_written_as_it_was_read_and_knows_if_it_is_local(text, loopback):
    where = parse_listen(text)
    assert (str(where), where.loopback) == (text, loopback)
    assert parse_listen(where) is where


@pytest.mark.parametrize(
    "value",
    ["", "8080", ":8080", "host", "host:", "host:99999", "host:x", "::1:80", "unix:gw.sock"],
)
def test_what_is_no_address_is_refused(value):
    with pytest.raises(PydanticCustomError):
        parse_listen(value)


@pytest.mark.parametrize(
    "value", ["http://127.0.0.1:8080", "*:8080", "my host:8080", "me@host:8080"]
)
def test_what_nothing_can_listen_on_is_refused_with_an_example(value):
    with pytest.raises(PydanticCustomError, match="is not an address such as 127.0.0.1:8080"):
        parse_listen(value)


def test_a_socket_to_listen_on_has_a_path_that_the_system_takes():
    with pytest.raises(PydanticCustomError, match="has 121 bytes; the system allows at most 107"):
        parse_listen("unix:/" + "a" * 120)


@pytest.mark.parametrize("value", [8080, None, ["a:1"]])
def test_an_address_must_be_a_text(value):
    with pytest.raises(PydanticCustomError):
        parse_listen(value)


@pytest.mark.parametrize(
    ("written", "kept"),
    [("http://10.0.0.1:8000", "http://10.0.0.1:8000"), ("HTTPS://vLLM.lan/", "https://vllm.lan")]
    + [("http://[::1]:8000/", "http://[::1]:8000"), (" http://h:1 ", "http://h:1")]
    + [("unix:/run/b1.sock", "unix:/run/b1.sock"), (" unix:///run//b1.sock ", "unix:/run/b1.sock")]
    + [("unix:/run/a b.sock", "unix:/run/a b.sock"), (f"unix:/{106 * 'x'}", f"unix:/{106 * 'x'}")],
)
def test_a_backend_url_is_kept_as_an_origin(written, kept):
    assert check_backend_url(written) == kept


@pytest.mark.parametrize(
    "value",
    ["", "10.0.0.1:8000", "ftp://h", "http://", "http://h:1/v1", "http://h?x=1", "http://h#x"]
    + ["http://h:port", "http://h:99999", "http://hö:1", "http://a b:1"]
    + ["unix:", "unix:run/b1.sock", "unix:/run/\0b1", "unix:/run/\ud800", f"unix:/{107 * 'x'}"],
)
def test_what_is_no_origin_is_refused(value):
    with pytest.raises(PydanticCustomError):
        check_backend_url(value)


def test_a_password_in_a_url_is_refused_without_repeating_it():
    with pytest.raises(PydanticCustomError) as refused:
        check_backend_url("http://me:hunter2@h:1")
    assert "hunter2" not in refused.value.message()
    assert "api_key" in refused.value.message()
