"""Multipart forms (RFC 7578) as far as audio requests need them: small fields, found by bytes.

Read strictly, because a second reader follows: what two parsers could read differently (a name
given twice, something behind a delimiter, an unusual Content-Disposition) is refused, not guessed.
File contents are skipped and never searched for anything but the delimiter.

    START --boundary--> DELIMITER --line break--> HEAD --empty line--> CONTENT --boundary--> DELIMITER
                            `--two dashes--> END (what follows is no part of the form)
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from gateway.core.errors import RequestError, UnsupportedMediaType
from gateway.wire.lax import OFF, ON
from gateway.wire.objects import wrong_type
from gateway.wire.table import REFUSED_IN_FORMS

MAX_PARTS: Final = 128
MAX_PART_HEAD_BYTES: Final = 8 * 1024
MAX_FIELD_BYTES: Final = 64 * 1024

# Source: RFC 2046 5.1.1 (boundary characters, at most 70), RFC 9110 5.6.6 (parameters). There may be one boundary:
# of two, a backend might read the other.
_PARAMETERS: Final = (
    rb"""(?:\s*;\s*(?!boundary\s*=)[\w!#$%&'*+.^`|~-]+=(?:[\w!#$%&'*+.^`|~-]+|"[^"\\]*")){0,4}"""
)
_BOUNDARY: Final = re.compile(
    rb"""multipart/form-data%b\s*;\s*boundary="""
    rb"""(?:"([\w'()+,./:=? -]{0,69}[\w'()+,./:=?-])"|([\w'+.-]{1,70}))%b\s*"""
    % (_PARAMETERS, _PARAMETERS),
    re.ASCII | re.IGNORECASE,
)
# A name without quotes, as .NET writes it, is a token of plain letters.
_DISPOSITION: Final = re.compile(
    rb'form-data\s*;\s*name=(?:"([^"\\\r\n]{1,128})"|([A-Za-z0-9_.-]{1,128}))((?:\s*;\s*filename\*?=(?:"(?:[^"\\\r\n]|\\.)*"|[^\s;"]+))*)\s*',
    re.IGNORECASE,
)
_SINGLE: Final = frozenset({"model", "stream"})  # the gateway acts on these; others may repeat


class _At(Enum):
    """What the next unread byte belongs to."""

    START = "start"
    DELIMITER = "delimiter"  # behind a boundary
    HEAD = "head"
    CONTENT = "content"
    END = "end"


class FormReader:
    """Reads a form as it comes, in pieces of any size: the same bytes, the same fields and refusals.

    `fields` are the plain fields whose values are whole (of one given more than once, the last);
    `model_at` is where the model's value stands in all that was fed. Holds at most one part's head
    or one plain field's value, never a file's content.
    """

    __slots__ = (
        "_at", "_base", "_buffer", "_delimiter", "_is_file", "_name", "_parts", "_seen", "fields",
        "has_file", "model_at", "stream",
    )  # fmt: skip

    def __init__(self, content_type: bytes) -> None:
        """Raises UnsupportedMediaType (415) when it is not multipart/form-data with a boundary."""
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._at = _At.START
        self._buffer = b"\r\n"  # the first boundary has no line break before it
        self._base = -2  # where the buffer begins in the body
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._seen: set[str] = set()
        self.fields: dict[str, str] = {}
        self.has_file = False  # a file part has begun
        self.model_at: tuple[int, int] | None = None
        self.stream = False

    @property
    def whole(self) -> bool:
        """Whether the closing delimiter was seen."""
        return self._at is _At.END

    def feed(self, data: bytes) -> None:
        """Read on.

        Raises:
            RequestError: 400; not a well-formed form, a field we do not take, or not one model.
        """
        self._buffer += data
        while self._step():
            pass

    def end(self) -> None:
        """Note that nothing follows.

        Raises:
            RequestError: 400; the form is not whole.
        """
        if not self.whole:
            raise _malformed("it ends too early")

    def _step(self) -> bool:
        """Read one thing; False when it is not whole yet."""
        if self._at is _At.CONTENT:
            return self._read_content()
        if self._at is _At.HEAD:
            return self._read_head()
        if self._at is _At.DELIMITER:
            return self._read_delimiter()
        if self._at is _At.START:
            return self._read_start()
        self._drop(len(self._buffer))
        return False

    def _read_start(self) -> bool:
        if self._buffer.startswith(self._delimiter):
            self._drop(len(self._delimiter))
            self._at = _At.DELIMITER
            return True
        if not self._delimiter.startswith(self._buffer):
            raise _malformed("it does not begin with its boundary")
        return False

    def _read_delimiter(self) -> bool:
        after = self._buffer[:2]
        if after == b"--":
            self._at = _At.END
            return True
        if after == b"\r\n":
            self._parts += 1
            if self._parts > MAX_PARTS:
                raise _malformed(f"it has more than {MAX_PARTS} parts")
            self._at = _At.HEAD
            return True
        if after not in (b"", b"\r", b"-"):
            raise _malformed("something follows a boundary")
        return False

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_PART_HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_PART_HEAD_BYTES:
                raise _malformed("a part's head is too long")
            return False
        self._name, self._is_file = _disposition(self._buffer[2:end])
        self._check_part(self._name)
        self.has_file = self.has_file or self._is_file
        # A content may be empty: its delimiter then begins with the head's last line break.
        self._drop(end + 2)
        self._at = _At.CONTENT
        return True

    def _check_part(self, name: str) -> None:
        if name in REFUSED_IN_FORMS:
            raise RequestError(
                f"`{name}` is not accepted here. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
        if name in _SINGLE:
            if self._is_file or name in self._seen:
                raise RequestError(
                    f"`{name}` must be one plain field.", param=name, code="invalid_form"
                )
            self._seen.add(name)

    def _read_content(self) -> bool:
        found = self._buffer.find(self._delimiter)
        if not self._is_file:
            self._read_field(found)
        if found < 0:
            if self._is_file:  # all but what may be the beginning of a delimiter
                self._drop(max(0, len(self._buffer) - len(self._delimiter) + 1))
            return False
        self._drop(found + len(self._delimiter))
        self._at = _At.DELIMITER
        return True

    def _read_field(self, end: int) -> None:
        """Take the value that ends at `end`; below 0 it is not whole yet, but may be too long."""
        name = self._name
        least = end if end >= 0 else len(self._buffer) - len(self._delimiter) + 1
        if least - 2 > MAX_FIELD_BYTES:
            raise RequestError(f"`{name}` is too long.", param=name, code="invalid_form")
        if end < 0:
            return
        start = min(2, end)
        try:
            self.fields[name] = self._buffer[start:end].decode()
        except UnicodeDecodeError:
            raise RequestError(f"`{name}` is not UTF-8.", param=name, code="invalid_form") from None
        if name == "model":
            self.model_at = (self._base + start, self._base + end)
        elif name == "stream":
            self.stream = _flag(name, self.fields[name])

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._base += count


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
        return (found[1] or found[2]).decode(), bool(found[3])
    except UnicodeDecodeError:
        raise _malformed("a field's name is not UTF-8") from None


def _flag(name: str, value: str) -> bool:
    word = value.strip().lower()
    if word and word not in ON and word not in OFF:
        raise wrong_type(name, "expected `true` or `false`")
    return word in ON


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not a well-formed form: {why}.", code="invalid_form")
