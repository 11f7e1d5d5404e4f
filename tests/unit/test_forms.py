"""What a form is understood to hold, and what of it is refused."""

from __future__ import annotations

import pytest

from gateway.core.errors import RequestError, UnsupportedMediaType
from gateway.core.types import Call, Dialect
from gateway.wire.calls import ENDPOINTS, form_call, upstream_body
from gateway.wire.forms import MAX_PART_HEAD_BYTES, MAX_PARTS, FormReader
from gateway.wire.table import REFUSED_IN_FORMS

SPEECH = ENDPOINTS[b"/v1/audio/transcriptions"]
FORM = b"multipart/form-data; boundary=XX"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    body = b"".join(b"--XX\r\n" + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts)
    return body + b"--XX--\r\n"


def field(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    return b'Content-Disposition: form-data; name="' + name + b'"', value


def file(value: bytes, name: bytes = b"file") -> tuple[bytes, bytes]:
    head = b'content-disposition: form-data; name="' + name + b'"; filename="a.wav"'
    return head + b"\r\nContent-Type: audio/wav", value


def call_of(body: bytes, content_type: bytes = FORM) -> Call:
    reader = FormReader(content_type)
    reader.feed(body)
    reader.end()
    return form_call(SPEECH, reader, body, content_type)


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call_of(body)
    assert caught.value.code
    return caught.value


SOUND = b'\r\n--XY\r\nContent-Disposition: form-data; name="model"\r\n\r\nevil\r\n--X\r\n'


def test_a_form_is_read_and_its_file_is_never_taken_for_fields():
    body = form(file(SOUND), field(b"model", b"whisper"), field(b"stream", b"true"))
    call = call_of(body)
    assert (call.model, call.stream, call.text_bytes) == ("whisper", True, None)
    assert call.dialect is Dialect.PLAIN
    assert call.body is body


@pytest.mark.parametrize(
    "kind",
    [
        b'multipart/form-data; boundary="XX"',
        b"Multipart/Form-Data;boundary=XX",
        b"MULTIPART/FORM-DATA; charset=utf-8 ; Boundary=XX",
        b'multipart/form-data; a="1; boundary=YY"; boundary=XX; charset="utf-8"',
    ],
)
def test_the_boundary_is_found_by_the_rules_of_media_types(kind):
    assert call_of(form(field(b"model", b"w")), kind).model == "w"


@pytest.mark.parametrize(
    "kind",
    [
        b"multipart/form-data; boundary=XX; boundary=YY",
        b"multipart/form-data; boundary=XX; BOUNDARY =YY",
        b"multipart/form-data; boundary=XX, text/plain",
        b"multipart/form-data" + b"; a=1" * 5 + b"; boundary=XX",
        b"multipart/form-data" + b' ; "' * 8000,
    ],
)
def test_a_boundary_that_another_may_read_otherwise_is_refused(kind):
    with pytest.raises(UnsupportedMediaType):
        FormReader(kind)


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/json", b"multipart/form-data"])
def test_another_media_type_is_told_so(kind):
    with pytest.raises(UnsupportedMediaType):
        FormReader(kind)


def test_names_without_quotes_are_read_as_net_writes_them():
    """Source: .NET's MultipartFormDataContent, which the OpenAI SDK for .NET sends its audio with."""
    text = b"\r\nContent-Type: text/plain; charset=utf-8"
    model = b"Content-Disposition: form-data; name=model" + text, b"whisper"
    sound = (
        b"Content-Type: audio/wav\r\nContent-Disposition: form-data; name=file; filename=a.wav;"
        b" filename*=utf-8''a.wav",
        SOUND,
    )
    body = form(sound, model)
    call = call_of(body, b'multipart/form-data; boundary="XX"')
    assert call.model == "whisper"
    out = upstream_body(call, served_model="s", inject_usage=False)
    assert out == body.replace(b"whisper", b"s")
    denied = b"Content-Disposition: form-data; name=vllm_xargs", b"{}"
    assert refused(form(model, denied)).param == "vllm_xargs"


def test_only_the_model_of_a_form_is_replaced():
    body = form(field(b"prompt", b"model"), field(b"model", b"alias"), file(SOUND))
    call = call_of(body)
    out = upstream_body(call, served_model="served", inject_usage=True)
    assert out == form(field(b"prompt", b"model"), field(b"model", b"served"), file(SOUND))
    assert upstream_body(call, served_model="alias", inject_usage=True) is body


def test_the_model_is_replaced_in_a_beginning_too():
    body = form(field(b"model", b"alias"), file(b"\0" * 500))
    reader = FormReader(FORM)
    reader.feed(body[:300])
    call = form_call(SPEECH, reader, body[:300], FORM)
    out = upstream_body(call, served_model="s", inject_usage=False)
    assert out == body[:300].replace(b"alias", b"s")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        form(field(b"model", b"w"))[:-6],
        b"--XX\r\nContent-Disposition: form-data\r\n\r\nw\r\n--XX--\r\n",
        b"--XX \r\n" + form(field(b"model", b"w"))[6:],
        b'--XXY\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n--XX--\r\n',
        form(field(b"model", b"a"), field(b"model", b"b")),
        form(field(b"stream", b"maybe"), field(b"model", b"a")),
        form(field(b"model", b"a"), file(b"x", b"model")),
        form(field(b"model", b"\xff")),
        form(field(b"\xff", b"a"), field(b"model", b"b")),
        form(file(b"x", b"model")),
        form((b'Content-Disposition: form-data; name="model"; name="x"', b"w")),
        form((b'Content-Disposition: form-data; name=model; x="name="', b"w")),
        form((b"Content-Disposition: form-data; name=model; name=x", b"w")),
        form((b"Content-Disposition: form-data; name=mo del", b"w")),
        form((b'Content-Disposition: form-data; name=mod"el', b"w")),
        form((b"Content-Disposition: form-data; name*=utf-8''model", b"w")),
        form((b"Content-Disposition: form-data; name=", b"w")),
        form((field(b"model", b"")[0] + b"\r\n" + field(b"other", b"")[0], b"w")),
        form(field(b"stream", b"true")),
        form(field(b"model", b"")),
        form(field(b"model", b"w" * 70_000)),
        form((b"X-Long: " + b"a" * MAX_PART_HEAD_BYTES, b"w")),
        form(field(b"model", b"w"), *[field(b"f%d" % i, b"") for i in range(MAX_PARTS)]),
    ],
)  # fmt: skip
def test_a_form_that_could_be_read_in_two_ways_is_refused(body):
    assert refused(body).status == 400


@pytest.mark.parametrize("name", sorted(REFUSED_IN_FORMS))
@pytest.mark.parametrize("part", [field, lambda name, value: file(value, name)])
def test_fields_that_reach_into_the_engine_are_refused_wherever_they_stand(name, part):
    model, sound, denied = field(b"model", b"w"), file(SOUND), part(name.encode(), b"{secret}")
    error = refused(form(denied, model, sound))
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "secret" not in error.message
    reader = FormReader(FORM)
    body = form(model, sound, denied)
    reader.feed(body[: body.index(b"{secret}") - 4])
    with pytest.raises(RequestError, match=name):
        reader.feed(b"\r\n\r\n")  # refused as soon as its name is known


def test_lists_are_fields_given_more_than_once():
    name = b"timestamp_granularities[]"
    body = form(field(b"model", b"w"), field(name, b"word"), field(name, b"segment"))
    assert call_of(body).model == "w"


def test_an_empty_field_is_a_field():
    assert call_of(form(field(b"prompt", b""), field(b"model", b"w"))).model == "w"
    bare = b'--XX\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n--XX--\r\n'
    assert refused(bare).param == "model"


def test_a_field_is_too_long_before_it_ends():
    reader = FormReader(FORM)
    reader.feed(b"--XX\r\n" + field(b"prompt", b"")[0] + b"\r\n\r\n")
    for _ in range(60):
        reader.feed(b"x" * 1000)
    with pytest.raises(RequestError, match="`prompt` is too long"):
        reader.feed(b"x" * 10_000)


def test_what_follows_the_closing_delimiter_is_no_part_of_the_form():
    body = form(field(b"model", b"w")) + form(field(b"model", b"other"))
    assert call_of(body).model == "w"


def test_the_model_is_known_when_its_value_has_ended():
    body = form(field(b"model", b"whisper"), file(b"\0" * 1000))
    reader = FormReader(FORM)
    ends = body.index(b"whisper\r\n--XX") + len(b"whisper\r\n--XX")
    reader.feed(body[: ends - 1])
    assert (reader.fields, reader.has_file, reader.model_at) == ({}, False, None)
    reader.feed(body[ends - 1 :])
    assert (reader.fields, reader.has_file, reader.whole) == ({"model": "whisper"}, True, True)
