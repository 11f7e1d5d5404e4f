"""Multipart forms (RFC 7578) as far as audio requests need them: small fields, found by bytes.

Read strictly, because a second reader follows: what two parsers could read differently (a name
given twice, something behind a delimiter, an unusual Content-Disposition) is refused, not guessed.
File contents are skipped and never searched for anything but the delimiter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gateway.core.errors import RequestError, UnsupportedMediaType

MAX_PARTS: Final = 128
MAX_PART_HEAD_BYTES: Final = 8 * 1024
MAX_FIELD_BYTES: Final = 64 * 1024

# Source: RFC 2046 5.1.1 (boundary characters, at most 70), RFC 9110 5.6.6 (parameters)
_BOUNDARY: Final = re.compile(
    rb"""multipart/form-data\s*;\s*boundary="""
    rb"""(?:"([\w'()+,./:=? -]{0,69}[\w'()+,./:=?-])"|([\w'+.-]{1,70}))\s*""",
    re.ASCII | re.IGNORECASE,
)
_DISPOSITION: Final = re.compile(
    rb'form-data\s*;\s*name="([^"\\\r\n]{1,128})"((?:\s*;\s*filename\*?=(?:"(?:[^"\\\r\n]|\\.)*"|[^\s;"]+))*)\s*',
    re.IGNORECASE,
)
_SINGLE: Final = frozenset({"model", "stream"})  # what we act on; lists of others are legal
_TRUE: Final = frozenset({"true", "1", "yes", "on", "t", "y"})  # what pydantic takes for a boolean
_FALSE: Final = frozenset({"", "false", "0", "no", "off", "f", "n"})


@dataclass(frozen=True, slots=True)
class Form:
    """The plain fields found so far. `whole` tells whether the closing delimiter was seen."""

    fields: dict[str, str]
    whole: bool

    def flag(self, name: str) -> bool:
        """Read a boolean field; absent is false.

        Raises:
            RequestError: 400.
        """
        value = self.fields.get(name, "").strip().lower()
        if value in _TRUE:
            return True
        if value in _FALSE:
            return False
        raise RequestError(
            f"`{name}` has the wrong type: expected `true` or `false`.",
            param=name,
            code="invalid_type",
        )


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    is_file: bool
    start: int  # of its content
    end: int | None  # None: goes on beyond what is here


def parse_form(body: bytes, content_type: bytes) -> Form:
    """Read the plain fields of a whole form.

    Raises:
        RequestError: 400; not a well-formed form, or not one model.
        UnsupportedMediaType: 415; not multipart/form-data.
    """
    form = parse_multipart_head(body, content_type, until=None)
    if form is None or not form.whole:
        raise _malformed("it ends too early")
    return form


def parse_multipart_head(
    prefix: bytes, content_type: bytes, *, until: str | None = "model"
) -> Form | None:
    """Read the plain fields at the head of a form; None when more bytes are needed to know `until`.

    Raises:
        RequestError: 400; not a well-formed form, or not one model.
        UnsupportedMediaType: 415; not multipart/form-data.
    """
    fields: dict[str, str] = {}
    for part in _parts(prefix, content_type):
        if part is None:
            return Form(fields, whole=True)
        if part.name in _SINGLE and (part.is_file or part.name in fields):
            raise RequestError(
                f"`{part.name}` must be one plain field.", param=part.name, code="invalid_form"
            )
        if part.is_file:
            continue
        if part.end is None:
            break
        fields[part.name] = _text(prefix, part.name, part.start, part.end)
    return Form(fields, whole=False) if until is not None and until in fields else None


def replace_field(body: bytes, content_type: bytes, name: str, value: str) -> bytes:
    """Return the form with one plain field's value replaced; every other byte stays."""
    for part in _parts(body, content_type):
        if part is not None and part.name == name and not part.is_file and part.end is not None:
            return body[: part.start] + value.encode() + body[part.end :]
    return body


def _parts(data: bytes, content_type: bytes) -> Iterator[_Part | None]:
    """Yield the parts whose heads are here, then None at the closing delimiter if that is too."""
    delimiter = b"\r\n--" + _boundary(content_type)
    if not data.startswith(delimiter[2:]):
        if delimiter[2:].startswith(data):
            return
        raise _malformed("it does not begin with its boundary")
    at = len(delimiter) - 2
    for _ in range(MAX_PARTS):
        after = data[at : at + 2]
        if after == b"--":
            yield None
            return
        if after in (b"", b"\r", b"-"):
            return
        if after != b"\r\n":
            raise _malformed("something follows a boundary")
        head_end = data.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            if len(data) - at >= MAX_PART_HEAD_BYTES:
                raise _malformed("a part's head is too long")
            return
        name, is_file = _disposition(data[at + 2 : head_end])
        # A content may be empty: its delimiter then begins with the head's last line break.
        found = data.find(delimiter, head_end + 2)
        start = min(head_end + 4, found) if found >= 0 else head_end + 4
        yield _Part(name, is_file, start, found if found >= 0 else None)
        if found < 0:
            return
        at = found + len(delimiter)
    raise _malformed(f"it has more than {MAX_PARTS} parts")


def _boundary(content_type: bytes) -> bytes:
    found = _BOUNDARY.fullmatch(content_type.strip())
    if found is None:
        raise UnsupportedMediaType(
            "The body must be sent as `Content-Type: multipart/form-data` with a boundary."
        )
    return found[1] or found[2]


def _disposition(head: bytes) -> tuple[str, bool]:
    values = [
        value
        for line in head.split(b"\r\n")
        for name, _, value in [line.partition(b":")]
        if name.lower() == b"content-disposition"
    ]
    found = _DISPOSITION.fullmatch(values[0].strip()) if len(values) == 1 else None
    if found is None:
        raise _malformed("a part has no plain Content-Disposition")
    try:
        return found[1].decode(), bool(found[2])
    except UnicodeDecodeError:
        raise _malformed("a field's name is not UTF-8") from None


def _text(data: bytes, name: str, start: int, end: int) -> str:
    if end - start > MAX_FIELD_BYTES:
        raise RequestError(f"`{name}` is too long.", param=name, code="invalid_form")
    try:
        return data[start:end].decode()
    except UnicodeDecodeError:
        raise RequestError(f"`{name}` is not UTF-8.", param=name, code="invalid_form") from None


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not a well-formed form: {why}.", code="invalid_form")
